//! `lora-train report`: makes report.html of a run from its files, or serves it while the run goes on.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Html;
use axum::routing::get;

use super::{http, print, say};
use crate::insight::report::{self, ReportError};
use crate::schema::Problem;
use crate::train::stop::Stop;
use crate::util::failure::Failure;

/// Arguments of `lora-train report`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReportArgs {
    /// The output folder of a run, finished or not
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,

    /// Where to write it; without, report.html in the run's folder
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,

    /// Serve the page to this machine's browsers instead, and keep it up to date while the run goes on
    #[arg(long, conflicts_with = "out")]
    pub(crate) watch: bool,

    /// Port for --watch; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8001, requires = "watch")]
    pub(crate) port: u16,
}

/// Writes the report and prints its path, or serves it until the command is stopped.
pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    if args.watch {
        return watch(args);
    }
    let path = report::write(&args.run, args.out.as_deref()).map_err(failure)?;
    print(&path.display().to_string())
}

/// Wrong arguments end with exit code 2, later failures with 1.
pub(super) fn failure(error: ReportError) -> Failure {
    if error.is_input() { Failure::input(error) } else { Failure::running(error) }
}

fn watch(args: &ReportArgs) -> Result<(), Failure> {
    // A signal ends the process: nothing is lost.
    let _stop = Stop::on_signals().map_err(Failure::running)?;
    if args.run.is_file() {
        let problem = Problem::new(format!("{} is a file", args.run.display()));
        return Err(problem.hint("give the `output_dir` of a run, which need not be there yet").into());
    }
    let listener = http::bind(Ipv4Addr::LOCALHOST.into(), args.port)?;
    let (address, run) = (listener.local_addr().map_err(Failure::running)?, args.run.display());
    say(&format!("http://{address} shows {run} while it trains; Ctrl-C ends this"));
    if !report::has_begun(&args.run) {
        say(&format!("{run} has no figures yet: the page waits for its first step"));
    }
    http::answer(listener, Router::new().route("/", get(page)).with_state(Arc::new(args.run.clone())))
}

async fn page(State(run): State<Arc<PathBuf>>, headers: HeaderMap) -> Result<Html<String>, (StatusCode, String)> {
    if !http::is_for_this_machine(&headers) {
        return Err((StatusCode::FORBIDDEN, "for this machine only".to_owned()));
    }
    report::watched_page(&run).map(Html).map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}
