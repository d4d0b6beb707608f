//! `lora-train report`: makes report.html of a run from its files.

use std::path::PathBuf;

use super::print;
use crate::failure::Failure;
use crate::report::{self, ReportError};

/// Arguments of `lora-train report`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReportArgs {
    /// The output folder of a run, finished or not
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,

    /// Where to write it; without, report.html in the run's folder
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

/// Writes the report and prints its path.
pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    let path = report::write(&args.run, args.out.as_deref()).map_err(failure)?;
    print(&path.display().to_string())
}

/// Wrong arguments end with exit code 2, later failures with 1.
pub(super) fn failure(error: ReportError) -> Failure {
    if error.is_input() { Failure::input(error) } else { Failure::running(error) }
}
