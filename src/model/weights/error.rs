//! Errors in the weights of a model.

use std::fmt;
use std::path::PathBuf;

use crate::device::Dtype;

/// Why weights could not be read.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file could not be opened or mapped.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The folder has no safetensors weights.
    #[error("{}: no model.safetensors and no model.safetensors.index.json{hint}", folder.display())]
    NoWeights {
        /// The model folder.
        folder: PathBuf,
        /// What is there instead, and how to fix it.
        hint: String,
    },
    /// A file is not safetensors, or is incomplete.
    #[error("{}: {reason}{hint}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// How to fix it, on a separate line.
        hint: String,
    },
    /// The index of a sharded model is not usable.
    #[error("{}: {reason}", path.display())]
    Index {
        /// `model.safetensors.index.json`.
        path: PathBuf,
        /// Every disagreement between the index and the files.
        reason: String,
    },
    /// The tensors do not match the config.
    #[error("{}: the weights do not fit config.json:{}", folder.display(), Lines(problems))]
    Mismatch {
        /// The model folder.
        folder: PathBuf,
        /// One entry per tensor.
        problems: Vec<TensorProblem>,
    },
    /// A value is too large for the storage type.
    #[error(
        "{}: a value of `{name}` is too large for {dtype}\n  hint: set `model.dtype` to \"bf16\" or \"f32\"", path.display()
    )]
    Overflow {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The storage type that was requested.
        dtype: Dtype,
    },
}

/// A tensor that does not match the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorProblem {
    /// The files do not have it.
    Missing {
        /// Name of the tensor.
        name: String,
        /// Shape that the config implies.
        expected: Vec<usize>,
    },
    /// The model has no such tensor.
    Unexpected {
        /// Name of the tensor.
        name: String,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// Its shape is not the expected one.
    Shape {
        /// Name of the tensor.
        name: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape that the config implies.
        expected: Vec<usize>,
    },
    /// Its type cannot be used for training.
    Dtype {
        /// Name of the tensor.
        name: String,
        /// Type in the file, as safetensors spells it.
        found: String,
    },
    /// `lm_head.weight` is stored and differs from the embedding, but the config says that the two are tied.
    UntiedHead,
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { name, expected } => write!(f, "missing: `{name}` {expected:?}"),
            Self::Unexpected { name, found } => write!(f, "unexpected: `{name}` {found:?}"),
            Self::Shape { name, found, expected } => {
                write!(f, "misshapen: `{name}` is {found:?}, expected {expected:?}")
            }
            Self::Dtype { name, found } => write!(f, "type: `{name}` is {found}, expected F32, BF16 or F16"),
            Self::UntiedHead => write!(
                f,
                "`lm_head.weight` differs from `model.embed_tokens.weight`, but `tie_word_embeddings` is true\n  \
                 hint: set \"tie_word_embeddings\": false in config.json if the head was trained on its own"
            ),
        }
    }
}

/// Writes each item on a separate line, indented.
pub(crate) struct Lines<'a, T>(pub(crate) &'a [T]);

impl<T: fmt::Display> fmt::Display for Lines<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}
