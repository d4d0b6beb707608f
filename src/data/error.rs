//! Errors of reading data.

use std::io;
use std::path::PathBuf;

use super::template::TemplateError;
use super::tokenizer::TokenizerError;
use crate::hub::HubError;

/// Why data could not be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A `[[data.train]]` or `[[data.eval]]` entry matches no file, or there is no entry.
    #[error("{0}")]
    Config(String),
    /// A path in the recipe matches nothing that can be read.
    #[error("`{key}` = {reason}")]
    Path {
        /// The key, such as `data.train[0].path`.
        key: String,
        /// The path, what is wrong with it, where it was searched for, and how to fix it.
        reason: String,
    },
    /// A data set or a web address of the recipe cannot be read.
    #[error("`{key}`: {error}")]
    Hub {
        /// The key, such as `data.train[0].path`.
        key: String,
        /// What is wrong.
        error: HubError,
    },
    /// Rows that cannot be used, one error for each kind.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Rows(Vec<DataError>),
    /// A token file that was written cannot be read.
    #[error("{}: {reason}", path.display())]
    Tokens {
        /// The file of tokens.
        path: PathBuf,
        /// What is wrong, and how to fix it.
        reason: String,
    },
    /// Tokens cannot be written.
    #[error("the tokens cannot be written: {0}")]
    Store(io::Error),
    /// A file cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and how to fix it.
        reason: String,
    },
    /// A row cannot be used.
    #[error("{}:{place}: {reason}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// `line 12` or `row 12`, counted from 1.
        place: String,
        /// What is wrong, and how to fix it.
        reason: String,
    },
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A worker thread could not be started or has panicked.
    #[error("a data worker failed: {0}")]
    Worker(String),
    /// The user stopped the command while rows were being tokenised.
    #[error("interrupted while rows were tokenised")]
    Interrupted,
    /// The loader was asked for another micro-batch after an error.
    #[error("the data loader has stopped after an earlier error")]
    Stopped,
}

impl DataError {
    /// Whether the error is a mistake in the recipe or a file, rather than a failure of the trainer or the machine.
    #[must_use]
    pub fn is_mistake(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::Path { .. }
            | Self::Rows(_)
            | Self::File { .. }
            | Self::Row { .. }
            | Self::Template(_)
            | Self::Tokenizer(_) => true,
            Self::Hub { error, .. } => matches!(error, HubError::Input(_)),
            Self::Tokens { .. } | Self::Store(_) | Self::Worker(_) | Self::Interrupted | Self::Stopped => false,
        }
    }
}
