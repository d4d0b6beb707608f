//! The rows of one file: in the file itself, or as tokens in the cache.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::budget;
use crate::data::cache::{Signature, TokenStore};
use crate::data::config::{DataFormat, DataSource};
use crate::data::encode::{EncodedRow, Encoder};
use crate::data::error::DataError;
use crate::data::files::{FileKind, RowFile, RowProblem};
use crate::data::formats::RowFormat;
use crate::data::tokenizer::Tokenizer;
use crate::data::windows::TokenFile;

/// How the rows of a file are read.
#[derive(Debug)]
pub(super) enum Rows {
    /// JSON objects.
    Objects { file: RowFile, format: RowFormat },
    /// Windows of a .txt file.
    Windows(TokenFile),
    /// Tokens of either.
    Stored(Box<StoredRows>),
}

/// What is seen of a file when it is opened.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) kind: FileKind,
    pub(super) format: DataFormat,
    pub(super) unused_columns: Vec<String>,
}

impl Rows {
    /// Finds the rows of the file `path` of `source`, and decides how they are read. `path` is `kind` by its name.
    pub(super) fn open(
        path: &Path,
        kind: FileKind,
        source: &DataSource,
        max_length: usize,
        tokenizer: &Tokenizer,
    ) -> Result<(Self, Facts), DataError> {
        if kind == FileKind::Txt {
            let windows = TokenFile::open(path, tokenizer, max_length)?;
            return Ok((Self::Windows(windows), Facts { kind, format: DataFormat::Text, unused_columns: Vec::new() }));
        }
        let file = RowFile::open(path, kind)?;
        let first = file.first_row()?;
        let format =
            RowFormat::detect(source.format, &source.columns, &first).map_err(|reason| file.row_error(0, reason))?;
        let facts = Facts { kind: file.kind(), format: format.format(), unused_columns: format.unused_columns(&first) };
        Ok((Self::Objects { file, format }, facts))
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Objects { file, .. } => file.num_rows(),
            Self::Windows(windows) => windows.num_rows(),
            Self::Stored(stored) => stored.tokens.num_rows(),
        }
    }

    /// The tokens of row `index`.
    pub(super) fn encode(&self, index: usize, encoder: &Encoder<'_>) -> Result<EncodedRow, RowProblem> {
        match self {
            Self::Objects { file, format } => {
                let sample = format.read(&file.read(index)?, encoder.template.is_some()).map_err(RowProblem::Bad)?;
                let encode = || encoder.encode(&sample);
                budget::on_row(file.path(), index, encode).map_err(|error| RowProblem::Bad(error.to_string()))
            }
            Self::Windows(windows) => Ok(encoder.window(&windows.read(index).map_err(RowProblem::Failed)?)),
            Self::Stored(stored) => match stored.tokens.read(index) {
                Some(row) => Ok(row),
                None => stored.data_file(encoder).map_err(RowProblem::Failed)?.encode(index, encoder),
            },
        }
    }

    /// What is wrong with row `index`, with its place.
    pub(super) fn error(&self, index: usize, problem: RowProblem) -> DataError {
        match (self, problem) {
            (_, RowProblem::Failed(error)) => error,
            (Self::Objects { file, .. }, RowProblem::Bad(reason)) => file.row_error(index, reason),
            (Self::Windows(windows), RowProblem::Bad(reason)) => windows.row_error(index, reason),
            (Self::Stored(stored), RowProblem::Bad(reason)) => match stored.damaged.get() {
                Some(Ok(rows)) => rows.error(index, RowProblem::Bad(reason)),
                _ => DataError::Row { path: stored.path.clone(), place: format!("row {}", index + 1), reason },
            },
        }
    }
}

/// Rows whose tokens are in the cache.
#[derive(Debug)]
pub(super) struct StoredRows {
    tokens: TokenStore,
    path: PathBuf,
    kind: FileKind,
    source: DataSource,
    /// The data file as it was when its tokens were looked up.
    signature: Signature,
    /// The rows of the data file, once the tokens have turned out to be damaged.
    damaged: OnceLock<Result<Box<Rows>, String>>,
}

impl StoredRows {
    pub(super) fn in_cache(
        tokens: TokenStore,
        path: PathBuf,
        kind: FileKind,
        source: DataSource,
        signature: Signature,
    ) -> Rows {
        Rows::Stored(Box::new(Self { tokens, path, kind, source, signature, damaged: OnceLock::new() }))
    }

    pub(super) fn tokens(&self) -> &TokenStore {
        &self.tokens
    }

    /// The rows of the data file: the cache has lost one. It is thrown away, so that the next start makes it anew.
    fn data_file(&self, encoder: &Encoder<'_>) -> Result<&Rows, DataError> {
        let open = || {
            // If it stays, it is found damaged once more.
            drop(std::fs::remove_file(self.tokens.path()));
            if !Signature::of(&self.path).is_ok_and(|now| now == self.signature) {
                return Err(
                    "has changed since the start, and the tokens that were kept of it are damaged\n  hint: start \
                            again"
                        .to_owned(),
                );
            }
            let rows = Self::rows_of(&self.path, self.kind, &self.source, encoder);
            rows.map(Box::new).map_err(|error| error.to_string())
        };
        match self.damaged.get_or_init(open) {
            Ok(rows) => Ok(rows),
            Err(reason) => Err(DataError::File { path: self.path.clone(), reason: reason.clone() }),
        }
    }

    fn rows_of(path: &Path, kind: FileKind, source: &DataSource, encoder: &Encoder<'_>) -> Result<Rows, DataError> {
        Rows::open(path, kind, source, encoder.max_length, encoder.tokenizer).map(|(rows, _)| rows)
    }
}
