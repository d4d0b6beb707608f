//! `lora-train generate`: text from a model, with or without an adapter.

use std::path::PathBuf;

use crate::failure::Failure;

/// Arguments of `lora-train generate`.
#[derive(Clone, Debug, clap::Args)]
pub struct GenerateArgs {
    /// The base model: a Hugging Face folder or the id of a Hub repository
    #[arg(long, value_name = "MODEL")]
    pub model: String,

    /// Branch, tag or commit of a Hub repository
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,

    /// A PEFT adapter: the folder `adapter` of a run, or a checkpoint
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,

    /// The user's message; where the model has no chat template, the text to continue
    #[arg(long, value_name = "TEXT")]
    pub prompt: String,

    /// Where to compute: auto, cpu, cuda, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,
}

/// Writes the model's answer to stdout as it is made.
///
/// # Errors
///
/// A model, adapter or device that cannot be used.
pub fn run(_args: &GenerateArgs) -> Result<(), Failure> {
    Err(Failure::running("`generate` is not in this build"))
}
