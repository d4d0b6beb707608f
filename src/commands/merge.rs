//! `lora-train merge`: an adapter folded into its base model.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::named::{ModelArgs, Named, misfit};
use super::say;
use crate::export::{self, ExportError};
use crate::failure::Failure;
use crate::hub::{self, HubSettings, Progress, Wanted};
use crate::schema::Problem;
use crate::text::bytes;

/// Arguments of `lora-train merge`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MergeArgs {
    /// A run, or an adapter's folder that names its base model
    #[arg(value_name = "RUN", required_unless_present = "adapter")]
    pub(crate) name: Option<String>,

    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Folder to write; it must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

/// Writes a Hugging Face folder whose weights contain the adapter.
pub(crate) fn run(args: &MergeArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let named = Named::find(args.name.as_slice(), &args.model)?;
    let Some(adapter) = named.one_adapter()? else {
        let problem = Problem::new(format!("{}: a model without an adapter", named.base.path));
        return Err(problem.hint("name a run, or an adapter with --adapter DIR").into());
    };
    let (settings, progress) = (HubSettings::from_env(), Progress::detect(false));
    let base = hub::resolve(&named.base.path, named.base.revision.as_deref(), Wanted::Model, &settings, progress)?;
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("merging [{bar:24}] {binary_bytes}/{binary_total_bytes} {eta}") {
        bar.set_style(style.progress_chars("=> "));
    }
    let on_bytes = |written: usize, all: usize| {
        bar.set_length(all as u64);
        bar.inc(written as u64);
    };
    let summary = export::merge(&base, &adapter.folder, &args.out, &on_bytes);
    bar.finish_and_clear();
    let summary = summary.map_err(|error| failure(error, &adapter.folder))?;
    let mut text = format!(
        "merged {} layer{} of {} into {}: {} in {} file{}, {:.1} s",
        summary.num_modules,
        plural(summary.num_modules),
        adapter.folder.display(),
        args.out.display(),
        bytes(summary.num_bytes as u64),
        summary.num_files,
        plural(summary.num_files),
        start.elapsed().as_secs_f64(),
    );
    if let Some(trained_on) = summary.trained_on.filter(|_| args.model.model.is_some())
        && trained_on != named.base.path
    {
        let _ = write!(text, "\nnote: the adapter says that it was trained on {trained_on}");
    }
    say(&text);
    Ok(())
}

/// Names the base that an adapter was trained on, if known, where it does not fit.
fn failure(error: ExportError, adapter: &Path) -> Failure {
    match &error {
        ExportError::AdapterTensors { .. } => misfit(
            &error,
            export::read_adapter(adapter).ok().and_then(|saved| saved.base_model_name_or_path).as_deref(),
        ),
        _ => error.into(),
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
