//! `lora-train merge`: an adapter folded into its base model.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::say;
use crate::export::{self, ExportError};
use crate::failure::Failure;
use crate::hub::{self, HubSettings, Progress, Wanted};
use crate::schema::Problem;

/// Arguments of `lora-train merge`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MergeArgs {
    /// The base model: a Hugging Face folder or the id of a Hub repository
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: String,

    /// Branch, tag or commit of a Hub repository
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,

    /// The adapter: the output folder of a run, a checkpoint, or a folder that PEFT wrote
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: PathBuf,

    /// Folder to write; it must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

/// Writes a Hugging Face folder whose weights contain the adapter.
#[expect(clippy::cast_precision_loss, reason = "a size for people")]
pub(crate) fn run(args: &MergeArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let settings = HubSettings::from_env();
    let progress = Progress::detect(false);
    let model = hub::resolve(&args.model, args.revision.as_deref(), Wanted::Model, &settings, progress)?;
    let adapter = export::find_adapter(&args.adapter);
    let summary = export::merge(&model, &adapter, &args.out).map_err(|error| failure(error, &adapter))?;
    let mut text = format!(
        "merged {} layer{} of {} into {}: {:.2} GB in {} file{}, {:.1} s",
        summary.num_modules,
        plural(summary.num_modules),
        adapter.display(),
        args.out.display(),
        summary.num_bytes as f64 / 1e9,
        summary.num_files,
        plural(summary.num_files),
        start.elapsed().as_secs_f64(),
    );
    if let Some(trained_on) = summary.trained_on.filter(|trained_on| *trained_on != args.model) {
        let _ = write!(text, "\nnote: the adapter says that it was trained on {trained_on}");
    }
    say(&text);
    Ok(())
}

/// Names the base that an adapter was trained on, if known, where it does not fit.
fn failure(error: ExportError, adapter: &Path) -> Failure {
    let saved = match &error {
        ExportError::AdapterTensors { .. } => export::read_adapter(adapter).ok(),
        _ => None,
    };
    match saved.and_then(|saved| saved.base_model_name_or_path) {
        Some(base) => {
            let hint = format!("the adapter was trained on {base}; give that as --model");
            Problem::new(error.to_string()).hint(hint).into()
        }
        None => error.into(),
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
