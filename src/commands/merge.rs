//! `lora-train merge`: an adapter folded into its base model.

use std::path::PathBuf;

use crate::failure::Failure;

/// Arguments of `lora-train merge`.
#[derive(Clone, Debug, clap::Args)]
pub struct MergeArgs {
    /// The base model: a Hugging Face folder or the id of a Hub repository
    #[arg(long, value_name = "MODEL")]
    pub model: String,

    /// Branch, tag or commit of a Hub repository
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,

    /// The PEFT adapter
    #[arg(long, value_name = "DIR")]
    pub adapter: PathBuf,

    /// Folder to write; it must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Writes a Hugging Face folder whose weights contain the adapter.
///
/// # Errors
///
/// A model, adapter or folder that cannot be used.
pub fn run(_args: &MergeArgs) -> Result<(), Failure> {
    Err(Failure::running("`merge` is not in this build"))
}
