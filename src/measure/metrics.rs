//! The figures of a run, and where they are written.
//!
//! - [`summary`](Summary): the final figures, summary.json or unfinished.json
//! - `cost`: what the run costs
//! - [`finding`](Finding): what the figures say about the run
//! - `console`, `jsonl`, `tensorboard`, `mlflow`, `dashboard`: the sinks
//! - [`Sinks`]: all of them, called by name from the loop
//!
//! To add a figure: one row in [`crate::measure::figures`], and the place that measures it.

mod append;
mod console;
mod cost;
#[cfg_attr(not(feature = "tui"), path = "no_dashboard.rs")]
mod dashboard;
mod finding;
mod jsonl;
mod mlflow;
mod pace;
mod sinks;
mod summary;
mod tensorboard;
mod totals;

use std::path::PathBuf;

pub use crate::measure::figures::{EvalMetrics, Sample, StepMetrics};
pub use finding::{Change, Finding, Severity};
pub use sinks::{Shows, SinkOptions, Sinks};
pub use summary::{Outcome, PerMillionTokens, SUMMARY_FILE, Summary, UNFINISHED_FILE};
pub use totals::{Evaluations, TimeSpent, Totals};

/// Gives the terminal back if the dashboard has it. Makes only calls that are allowed in a signal handler, for a
/// handler in which the process ends.
#[cfg(unix)]
pub fn give_terminal_back() {
    #[cfg(feature = "tui")]
    dashboard::give_back_in_handler();
}

/// Most characters of a prompt that stand before its answer on a line.
const MAX_PROMPT: usize = 30;

/// A sample on one line: the end of its prompt, if that is long, and its text, which is what people look for.
fn on_a_line(sample: &Sample) -> String {
    let [prompt, text] =
        [&sample.prompt, &sample.text].map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
    let left_out = prompt.chars().count().saturating_sub(MAX_PROMPT);
    let dots = if left_out > 0 { "…" } else { "" };
    format!("{dots}{} > {text}", prompt.chars().skip(left_out).collect::<String>())
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
