//! The figures of a run, and where they are written.
//!
//! - [`summary`](Summary): the final figures, summary.json or unfinished.json
//! - [`cost`](CostConfig): what the run costs
//! - [`finding`](Finding): what they say about the run
//! - `console`, `jsonl`, `tensorboard`, `dashboard`: the sinks
//! - [`Sinks`]: all of them, called by name from the loop
//!
//! To add a figure: one row in [`crate::figures`], and the place that measures it.

mod append;
mod console;
mod cost;
#[cfg(feature = "tui")]
mod dashboard;
mod finding;
mod jsonl;
mod sinks;
mod summary;
mod tags;
mod tensorboard;

use std::path::PathBuf;

use serde::Serialize;

use crate::schema::{Problem, Section};

pub use crate::figures::{EvalMetrics, Sample, StepMetrics};
pub use cost::CostConfig;
pub use finding::{Change, Finding, Severity};
pub use sinks::{SinkOptions, Sinks};
pub use summary::{Outcome, PerMillionTokens, SUMMARY_FILE, Summary, TimeSpent, UNFINISHED_FILE};

/// Gives the terminal back where the dashboard has it. Makes only calls that may be made in a signal handler: for one in
/// which the process ends.
#[cfg(unix)]
pub fn give_terminal_back() {
    #[cfg(feature = "tui")]
    dashboard::give_back_in_handler();
}

/// Section `[logging]` of a recipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoggingConfig {
    /// Steps between two lines on the console (metrics.jsonl and TensorBoard get every step).
    pub logging_steps: u64,
    /// Write TensorBoard event files.
    pub tensorboard: bool,
    /// Milliseconds between two samples of the GPU and the host; 0: they are not sampled.
    pub gpu_sample_ms: u64,
}

impl Default for LoggingConfig {
    fn default() -> Self {
        Self { logging_steps: 1, tensorboard: true, gpu_sample_ms: 100 }
    }
}

impl LoggingConfig {
    /// Reads section `[logging]`.
    pub fn read(section: &mut Section) -> Self {
        let default = Self::default();
        let config = Self {
            logging_steps: section.count("logging_steps", default.logging_steps, 1..),
            tensorboard: section.boolean("tensorboard", default.tensorboard),
            gpu_sample_ms: section.count("gpu_sample_ms", default.gpu_sample_ms, 0..=60_000),
        };
        if (1..10).contains(&config.gpu_sample_ms) {
            let message = format!("`logging.gpu_sample_ms` = {}, expected 0 or 10 to 60000", config.gpu_sample_ms);
            section.reject("gpu_sample_ms", Problem::new(message).hint("0 turns sampling off"));
        }
        config
    }
}

/// A file for figures cannot be opened. Once training runs, a file that fails is a warning instead.
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
