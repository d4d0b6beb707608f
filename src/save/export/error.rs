//! Errors of adapters and merged models on disk.

use std::path::{Path, PathBuf};

use crate::schema::{Problem, Problems};
use crate::util::failure::Failure;
use crate::util::text;

/// Why an adapter or a merged model could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read`, `write`, ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The adapter, the model or the output folder cannot be used.
    #[error(transparent)]
    Input(#[from] Problems),
    /// The tensors of an adapter do not match its config or the model.
    #[error("{}: these tensors do not fit {expected_by}:{}", path.display(), text::lines(problems))]
    AdapterTensors {
        /// The file.
        path: PathBuf,
        /// `the format of LoRA adapters`, or the model.
        expected_by: &'static str,
        /// One entry per tensor or module.
        problems: Vec<String>,
    },
}

impl ExportError {
    /// Adds the action and the path to a file system error.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

impl From<Problem> for ExportError {
    fn from(problem: Problem) -> Self {
        Self::Input(problem.into())
    }
}

impl From<ExportError> for Failure {
    /// A failing disk is a failure of the run; every other error is a wrong input.
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Io { .. } => Self::running(error),
            ExportError::Input(problems) => Self::Input(problems),
            ExportError::AdapterTensors { .. } => Self::input(error),
        }
    }
}
