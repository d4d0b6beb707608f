//! The figures of a run, and where they are written.
//!
//! - [`summary`](Summary): the final figures, summary.json or unfinished.json
//! - [`cost`](CostConfig): what the run costs
//! - [`finding`](Finding): what the figures say about the run
//! - `console`, `jsonl`, `tensorboard`, `mlflow`, `dashboard`: the sinks
//! - [`Sinks`]: all of them, called by name from the loop
//!
//! To add a figure: one row in [`crate::figures`], and the place that measures it.

mod append;
mod console;
mod cost;
#[cfg_attr(not(feature = "tui"), path = "no_dashboard.rs")]
mod dashboard;
mod finding;
mod jsonl;
mod mlflow;
mod sinks;
mod summary;
mod tensorboard;
mod totals;

use std::path::PathBuf;
use std::time::Instant;

use crate::schema::{Problem, Section, section};
use crate::stats::as_f64;

pub use crate::figures::{EvalMetrics, Sample, StepMetrics};
pub use cost::CostConfig;
pub use finding::{Change, Finding, Severity};
pub use sinks::{SinkOptions, Sinks};
pub use summary::{Outcome, PerMillionTokens, SUMMARY_FILE, Summary, UNFINISHED_FILE};
pub use totals::{Evaluations, TimeSpent, Totals};

/// Gives the terminal back if the dashboard has it. Makes only calls that are allowed in a signal handler, for a
/// handler in which the process ends.
#[cfg(unix)]
pub fn give_terminal_back() {
    #[cfg(feature = "tui")]
    dashboard::give_back_in_handler();
}

section! {
    /// Section `[logging]` of a recipe.
    #[derive(Eq)]
    pub struct LoggingConfig then check {
        /// Steps between two lines on the console. metrics.jsonl and TensorBoard get every step.
        logging_steps: u64 = 1 => count(1..),
            ["log_steps", "steps_per_report", "log_every_n_steps", "log_interval", "log_every", "logging_strategy",
             "steps", "every", "interval", "every_n_steps"];
        /// Write TensorBoard event files.
        tensorboard: bool = true => boolean(), ["use_tensorboard", "report_to", "use_tb", "log_with"];
        /// Milliseconds between two samples of the GPU and the host, from 10; 0 turns them off.
        gpu_sample_ms: u64 = 100 => count(0..=60_000),
            ["sample_ms", "gpu_sample_interval_ms", "log_peak_memory_stats"];
        /// An MLflow server that gets the figures too. With one of the next two keys, `MLFLOW_TRACKING_URI` can name it.
        /// "none" turns it off.
        mlflow_tracking_uri: Option<String> = None => optional_string() like "http://127.0.0.1:5000";
        /// The experiment there; made where there is none of this name. By default the one named Default.
        mlflow_experiment_name: Option<String> = None => optional_string() like "my-experiment";
        /// The name of the run there. By default that of its folder.
        mlflow_run_name: Option<String> = None => optional_string() like "my-run";
    }
}

impl LoggingConfig {
    fn check(mut self, section: &mut Section) -> Self {
        self.check_mlflow(section);
        if (1..10).contains(&self.gpu_sample_ms) {
            let message = format!("`logging.gpu_sample_ms` = {}, expected 0 or 10 to 60000", self.gpu_sample_ms);
            section.reject("gpu_sample_ms", Problem::new(message).hint("0 turns sampling off"));
        }
        self
    }

    fn check_mlflow(&mut self, section: &mut Section) {
        if self.mlflow_tracking_uri.as_deref() == Some("none") {
            (self.mlflow_tracking_uri, self.mlflow_experiment_name, self.mlflow_run_name) = (None, None, None);
        }
        if self.mlflow_experiment_name.is_some() || self.mlflow_run_name.is_some() {
            let uri = self.mlflow_tracking_uri.take();
            self.mlflow_tracking_uri = uri.or_else(|| std::env::var(mlflow::URI_VARIABLE).ok());
            if self.mlflow_tracking_uri.is_none() {
                let problem = Problem::new("an MLflow run without `logging.mlflow_tracking_uri`");
                let hint = "give the server's address there or in MLFLOW_TRACKING_URI";
                section.reject("mlflow_tracking_uri", problem.hint(hint));
            }
        }
        if let Some(uri) = self.mlflow_tracking_uri.as_ref().filter(|uri| !uri.starts_with("http")) {
            let message = format!("`logging.mlflow_tracking_uri` = {uri:?}, expected the http(s) address of a server");
            let problem = Problem::new(message).hint("`mlflow server` makes one of a file or a database");
            section.reject("mlflow_tracking_uri", problem);
        }
    }
}

/// Seconds until the last step, at the pace of the steps since `started`. Steps of earlier starts do not count: they may
/// have run on another machine.
fn remaining_seconds(started: Instant, [first_step, step, total_steps]: [u64; 3]) -> Option<f64> {
    let done = step.checked_sub(first_step).filter(|&done| done > 0)?;
    Some(started.elapsed().as_secs_f64() / as_f64(done) * as_f64(total_steps.saturating_sub(step)))
}

/// A file for figures cannot be opened. During training, a file that fails is a warning instead.
#[derive(Debug, thiserror::Error)]
#[error("{path}: cannot {action}: {source}", path = path.display())]
pub struct MetricsError {
    /// The file or folder.
    pub path: PathBuf,
    /// What was tried.
    pub action: &'static str,
    /// What the system said.
    pub source: std::io::Error,
}
