//! `lora-train export --plain`: an adapter in the form that every server reads right.

use std::path::PathBuf;

use super::named::{ModelArgs, Named};
use super::say;
use crate::hub::{self, HubSettings, Progress, Wanted};
use crate::save::export;
use crate::schema::Problem;
use crate::util::failure::Failure;

/// Arguments of `lora-train export`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ExportArgs {
    /// Give all layers one rank and one scale: lower ranks are filled up with zeros, and what scales differ by goes into B
    #[arg(long, required = true)]
    plain: bool,

    /// A run, or an adapter's folder
    #[arg(value_name = "RUN")]
    name: String,

    /// Folder to write; nothing is overwritten
    #[arg(value_name = "DIR")]
    out: PathBuf,

    #[command(flatten)]
    model: ModelArgs,
}

/// Writes the adapter.
pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    let named = Named::find(std::slice::from_ref(&args.name), &args.model)?;
    let Some(adapter) = named.one_adapter()? else {
        let problem = Problem::new(format!("{}: a model without an adapter", args.name));
        return Err(problem.hint("name the output folder of a run").into());
    };
    let (settings, progress) = (HubSettings::from_env(), Progress::detect(false));
    let revision = named.base.revision.as_deref();
    let base = hub::resolve(&named.base.path, revision, Wanted::WithoutWeights, &settings, progress)?;
    let r = export::write_plain(&adapter.folder, &base, &named.base.path, &args.out)?;
    say(&format!("wrote {} to {}: rank {r} and scale 1 everywhere", adapter.folder.display(), args.out.display()));
    Ok(())
}
