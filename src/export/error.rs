//! Errors of adapters and merged models on disk.

use std::path::{Path, PathBuf};

use crate::device::Dtype;
use crate::failure::Failure;
use crate::model::weights::WeightsError;
use crate::model::weights::error::Lines;
use crate::spec::ConfigError;

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
    /// The folder holds no adapter.
    #[error("{}: no {missing}{hint}", folder.display())]
    NoAdapter {
        /// The folder.
        folder: PathBuf,
        /// The missing file.
        missing: &'static str,
        /// What is there instead, on a separate line.
        hint: String,
    },
    /// `adapter_config.json` is not valid, or needs something that this trainer does not support.
    #[error("{}: this adapter cannot be used:{}", path.display(), Lines(problems))]
    AdapterConfig {
        /// The file.
        path: PathBuf,
        /// One entry per key.
        problems: Vec<String>,
    },
    /// The tensors of an adapter do not match its config or the model.
    #[error("{}: these tensors do not fit {expected_by}:{}", path.display(), Lines(problems))]
    AdapterTensors {
        /// The file.
        path: PathBuf,
        /// `the format of LoRA adapters`, or the model.
        expected_by: &'static str,
        /// One entry per tensor or module.
        problems: Vec<String>,
    },
    /// A weight file is damaged, or does not fit its config.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The config of the model cannot be used.
    #[error(transparent)]
    Model(#[from] ConfigError),
    /// A merged value is too large for the base model's type.
    #[error("a merged value of `{name}` is too large for {dtype}\n  hint: convert the base model to bf16 first")]
    MergeOverflow {
        /// The tensor.
        name: String,
        /// The base model's type.
        dtype: Dtype,
    },
    /// The output folder exists and is not empty.
    #[error(
        "{} exists and is not empty\n  hint: give a folder that does not exist yet; nothing is overwritten", path.display()
    )]
    OutputExists {
        /// The folder.
        path: PathBuf,
    },
}

impl ExportError {
    /// Adds the action and the path to a file system error.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

impl From<ExportError> for Failure {
    /// A failing disk is a failure of the run; every other error is a wrong input.
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Io { .. } => Self::running(error),
            _ => Self::input(error),
        }
    }
}
