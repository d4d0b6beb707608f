//! What can be wrong with the weights of a model.

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
        /// What is there instead, and what to do about it.
        hint: String,
    },
    /// A file is not safetensors, or not all of it.
    #[error("{}: {reason}{hint}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do about it, on a line of its own.
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
    /// The tensors are not those of the config.
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
        /// The storage type that was asked for.
        dtype: Dtype,
    },
}

/// One tensor that is not as the config says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorProblem {
    /// It is not in the files.
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
    /// It has another shape.
    Shape {
        /// Name of the tensor.
        name: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape that the config implies.
        expected: Vec<usize>,
    },
    /// Its numbers are of a type that cannot be trained on.
    Dtype {
        /// Name of the tensor.
        name: String,
        /// Type in the file, in safetensors' spelling.
        found: String,
    },
    /// `lm_head.weight` is stored, is not the embedding, and the config says that it is tied.
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

/// Each on a line of its own, indented.
pub(crate) struct Lines<'a, T>(pub(crate) &'a [T]);

impl<T: fmt::Display> fmt::Display for Lines<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}
