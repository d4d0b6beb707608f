//! One file: opening it, and tokenising all of it.

use std::io;
use std::ops::Range;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::rows::{Rows, StoredRows};
use super::{FileInfo, KeptTokens, LARGE_FILE_BYTES};
use crate::data::ahead::{OpenOptions, for_each_chunk};
use crate::data::cache::{self, CacheKey, Chunk, Details, KeyParts, Signature, StoreWriter, TokenStore};
use crate::data::config::{DataConfig, DataFormat, DataSource, OnBadRow};
use crate::data::counts::RowCounts;
use crate::data::encode::{EncodedRow, Encoder};
use crate::data::error::DataError;
use crate::data::files::{FileKind, RowProblem};
use crate::data::progress::Meter;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;

/// Bad rows of a file that are named.
const MAX_NAMED_ROWS: usize = 5;
/// Characters of what is told about a bad row.
const MAX_REASON_CHARACTERS: usize = 500;

/// Rows of a file that cannot be used and are skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct BadRows {
    pub(in crate::data) count: u64,
    /// The first ones, each with its place and what is wrong.
    pub(in crate::data) first: Vec<String>,
}

#[derive(Debug)]
pub(super) struct DataFile {
    pub(super) info: FileInfo,
    pub(super) rows: Rows,
    /// Number of its first row among those of the set.
    pub(super) first_row: u32,
    pub(super) bad_rows: BadRows,
    /// What its tokens are to be kept under.
    wanted: Option<Wanted>,
    /// SHA-256 of its content; absent of a large file whose tokens are not kept, which would have to be read for it.
    pub(super) content: Option<[u8; 32]>,
}

/// Tokens that are to be kept.
#[derive(Clone, Debug)]
struct Wanted {
    key: CacheKey,
    content: [u8; 32],
    signature: Signature,
    source: DataSource,
}

/// Why the rows of a file were not all tokenised.
pub(super) enum AheadError {
    Data(DataError),
    /// They cannot be written.
    Store(io::Error),
}

impl From<DataError> for AheadError {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

impl DataFile {
    /// Opens a file of `source`: its tokens, if they are kept and there, else its rows.
    pub(super) fn open(
        path: &Path,
        source: &DataSource,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        options: &OpenOptions<'_>,
    ) -> Result<Self, DataError> {
        let failed = |reason: String| DataError::File { path: path.to_path_buf(), reason };
        let kind = FileKind::of(path).ok_or_else(|| failed("files end in .json, .jsonl, .parquet or .txt".into()))?;
        let is_textual = matches!(source.format, DataFormat::Auto | DataFormat::Text) && source.columns.is_empty();
        if kind == FileKind::Txt && !is_textual {
            return Err(failed("a .txt file has no columns: its `format` is \"text\"".into()));
        }
        let folder = options.cache.folder.as_deref();
        let wanted = folder.and_then(|folder| Wanted::of(path, kind, source, config, tokenizer, template, folder));
        let kept = wanted.as_ref().zip(folder).and_then(|(wanted, folder)| {
            let tokens = wanted.find(folder, config.max_length, config.on_bad_row, tokenizer)?;
            Some((tokens, wanted.clone()))
        });
        if let Some((tokens, wanted)) = kept {
            return Ok(Self::of_tokens(path, kind, tokens, wanted, false));
        }
        let (rows, facts) = Rows::open(path, kind, source, config.max_length, tokenizer)?;
        let info = FileInfo {
            path: path.into(),
            kind: facts.kind,
            format: facts.format,
            num_rows: rows.len(),
            unused_columns: facts.unused_columns,
            is_eval: false,
            kept_tokens: None,
        };
        let content = match &wanted {
            Some(wanted) => Some(wanted.content),
            None => content_of_small(path),
        };
        Ok(Self { info, rows, first_row: 0, bad_rows: BadRows::default(), wanted, content })
    }

    /// The file whose tokens are kept under `wanted`.
    fn of_tokens(path: &Path, kind: FileKind, tokens: TokenStore, wanted: Wanted, is_new: bool) -> Self {
        let Details { kind: found, format, unused_columns, counts, bad_rows } = tokens.details().clone();
        // It is only for `tidy` to know.
        drop(cache::touch(tokens.file()));
        let info = FileInfo {
            path: path.into(),
            kind: found,
            format,
            num_rows: tokens.num_rows(),
            unused_columns,
            is_eval: false,
            kept_tokens: Some(KeptTokens { bytes: tokens.bytes(), is_new }),
        };
        let bad_rows = BadRows { count: counts.bad, first: bad_rows };
        let content = Some(wanted.content);
        let rows = StoredRows::in_cache(tokens, path.into(), kind, wanted.source, wanted.signature);
        Self { info, rows, first_row: 0, bad_rows, wanted: None, content }
    }

    /// Tokenises the rows into the cache, if they are wanted there, and reads them from there from now on.
    pub(super) fn keep_tokens(
        &mut self,
        encoder: &Encoder<'_>,
        on_bad_row: OnBadRow,
        options: &OpenOptions<'_>,
    ) -> Result<(), AheadError> {
        let (Some(wanted), Some(folder)) = (self.wanted.take(), &options.cache.folder) else {
            return Ok(());
        };
        // The same file may have come up before, or another process may have been quicker.
        let found = wanted.find(folder, encoder.max_length, on_bad_row, encoder.tokenizer);
        let (tokens, is_new) = match found {
            Some(tokens) => (tokens, false),
            None => (self.write_tokens(&wanted, folder, encoder, on_bad_row, options)?, true),
        };
        let kind = FileKind::of(&self.info.path).unwrap_or(self.info.kind);
        let kept = Self::of_tokens(&self.info.path, kind, tokens, wanted, is_new);
        let info = FileInfo { is_eval: self.info.is_eval, ..kept.info };
        *self = Self { info, first_row: self.first_row, ..kept };
        Ok(())
    }

    /// Tokenises the rows into `folder`.
    fn write_tokens(
        &self,
        wanted: &Wanted,
        folder: &Path,
        encoder: &Encoder<'_>,
        on_bad_row: OnBadRow,
        options: &OpenOptions<'_>,
    ) -> Result<TokenStore, AheadError> {
        let path = wanted.key.path(folder);
        // What is not needed any more makes room first.
        cache::tidy(folder, options.cache.max_bytes, &path);
        let (num_rows, max_id) = (self.rows.len(), encoder.tokenizer.max_id());
        let mut meter = self.meter(0..num_rows, options);
        let mut watch = |found: usize| {
            meter.advance(found);
            !(options.is_stopped)()
        };
        let mut writer = StoreWriter::open(folder, wanted.key, num_rows, encoder.max_length, max_id, &mut watch)
            .map_err(|error| match error.kind() {
                io::ErrorKind::Interrupted => DataError::Interrupted.into(),
                _ => AheadError::Store(error),
            })?;
        drop(meter);
        let mut bad_rows = BadRows::default();
        // Of an earlier start: what is wrong with them was not kept.
        for row in writer.bad_rows().iter().copied().take(MAX_NAMED_ROWS) {
            let bad = self.encode_chunk(row..row + 1, encoder, on_bad_row, &mut |_| {})?;
            self.name_bad_rows(bad, &mut bad_rows);
        }
        let first = writer.num_rows();
        let encode = |rows: Range<usize>| {
            let mut chunk = Chunk::default();
            let bad = self.encode_chunk(rows, encoder, on_bad_row, &mut |row| chunk.push(row))?;
            Ok((chunk, bad))
        };
        let unchanged = || {
            if Signature::of(&self.info.path).is_ok_and(|now| now == wanted.signature) {
                return Ok(());
            }
            let reason = "changes while it is read\n  hint: start again once it is complete".to_owned();
            Err(DataError::File { path: self.info.path.clone(), reason })
        };
        let mut sink = |_: Range<usize>, (chunk, bad): (Chunk, Vec<(usize, String)>)| {
            // Each time: what is written may be gone on with, and is then believed to be of this content.
            unchanged()?;
            self.name_bad_rows(bad, &mut bad_rows);
            writer.push(&chunk).map_err(AheadError::Store)
        };
        let rows = first..num_rows;
        let meter = self.meter(rows.clone(), options);
        let result = for_each_chunk(rows, encoder.max_length, options.is_stopped, meter, &encode, &mut sink);
        if matches!(result, Err(AheadError::Data(DataError::Interrupted))) {
            writer.leave();
            return Err(DataError::Interrupted.into());
        }
        result?;
        unchanged()?;
        let details = Details {
            kind: self.info.kind,
            format: self.info.format,
            unused_columns: self.info.unused_columns.clone(),
            counts: writer.counts(),
            bad_rows: bad_rows.first,
        };
        writer.finish(&details).map_err(AheadError::Store)?;
        cache::tidy(folder, options.cache.max_bytes, &path);
        let tokens = TokenStore::open(&path, wanted.key, encoder.max_length, max_id);
        tokens.map_err(|error| AheadError::Store(error.into()))
    }

    /// Puts the tokens of every row, 0 for one that is left out, behind `lengths`.
    pub(super) fn lengths(
        &mut self,
        encoder: &Encoder<'_>,
        on_bad_row: OnBadRow,
        options: &OpenOptions<'_>,
        lengths: &mut Vec<u32>,
    ) -> Result<(), DataError> {
        if let Rows::Stored(stored) = &self.rows {
            let failed = |error: io::Error| DataError::File {
                path: stored.tokens().path().to_path_buf(),
                reason: error.to_string(),
            };
            lengths.extend(stored.tokens().lengths().map_err(failed)?);
            return Ok(());
        }
        let mut bad_rows = BadRows::default();
        let encode = |rows: Range<usize>| {
            let mut counts = RowCounts::default();
            let mut lengths = Vec::with_capacity(rows.len());
            let bad = self.encode_chunk(rows, encoder, on_bad_row, &mut |row| {
                let length = if counts.add(row) { row.ids.len() } else { 0 };
                lengths.push(u32::try_from(length).unwrap_or(u32::MAX));
            })?;
            Ok::<_, DataError>((lengths, counts.bad, bad))
        };
        let mut sink = |_: Range<usize>, (chunk, num_bad, bad): (Vec<u32>, u64, Vec<(usize, String)>)| {
            bad_rows.count += num_bad;
            self.name_bad_rows(bad, &mut bad_rows);
            lengths.extend(chunk);
            Ok(())
        };
        let meter = self.meter(0..self.rows.len(), options);
        for_each_chunk(0..self.rows.len(), encoder.max_length, options.is_stopped, meter, &encode, &mut sink)?;
        self.bad_rows = bad_rows;
        Ok(())
    }

    /// Tokenises `rows` one after the other; the first bad ones with what is wrong.
    fn encode_chunk(
        &self,
        rows: Range<usize>,
        encoder: &Encoder<'_>,
        on_bad_row: OnBadRow,
        push: &mut dyn FnMut(&EncodedRow),
    ) -> Result<Vec<(usize, String)>, DataError> {
        let mut bad = Vec::new();
        for index in rows {
            match self.rows.encode(index, encoder) {
                Ok(row) => push(&row),
                Err(RowProblem::Bad(reason)) if on_bad_row == OnBadRow::Skip => {
                    push(&EncodedRow::bad());
                    if bad.len() < MAX_NAMED_ROWS {
                        bad.push((index, reason));
                    }
                }
                Err(problem) => return Err(self.rows.error(index, problem)),
            }
        }
        Ok(bad)
    }

    /// Adds the places of `bad`: to find a line means reading the file up to it, so only the first ones are named.
    fn name_bad_rows(&self, bad: Vec<(usize, String)>, bad_rows: &mut BadRows) {
        for (index, reason) in bad.into_iter().take(MAX_NAMED_ROWS - bad_rows.first.len()) {
            // Without the path: the same rows may be found in another file.
            let text = match self.rows.error(index, RowProblem::Bad(reason)) {
                DataError::Row { place, reason, .. } => format!("{place}: {reason}"),
                error => error.to_string(),
            };
            bad_rows.first.push(text.chars().take(MAX_REASON_CHARACTERS).collect());
        }
    }

    fn meter(&self, rows: Range<usize>, options: &OpenOptions<'_>) -> Meter {
        Meter::start(options.progress, self.info.path.display().to_string(), rows)
    }
}

fn is_large(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.len() >= LARGE_FILE_BYTES)
}

/// SHA-256 of a file that is read in a moment.
fn content_of_small(path: &Path) -> Option<[u8; 32]> {
    if is_large(path) {
        return None;
    }
    std::fs::read(path).ok().map(|content| Sha256::digest(content).into())
}

impl Wanted {
    /// Under what the tokens of a file are kept; `None` for one whose tokens are not.
    fn of(
        path: &Path,
        kind: FileKind,
        source: &DataSource,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        folder: &Path,
    ) -> Option<Self> {
        let every_row = config.packing || config.on_bad_row == OnBadRow::Skip;
        if !(every_row || is_large(path)) || !TokenStore::can_hold(tokenizer.max_id()) {
            return None;
        }
        let template = match template {
            // A template that asks for the time of day writes something else each time.
            Some(template) => Some(template.identity()?),
            None => None,
        };
        // A file that cannot be read is told of where its rows are looked for.
        let (signature, content) = cache::content_hash(path, folder).ok()?;
        let key = CacheKey::new(&KeyParts {
            content,
            kind,
            format: source.format,
            columns: &source.columns,
            tokenizer: tokenizer.digest(),
            template,
            max_length: config.max_length,
            train_on_inputs: config.train_on_inputs,
        });
        Some(Self { key, content, signature, source: source.clone() })
    }

    /// The tokens, if they are there and whole.
    fn find(
        &self,
        folder: &Path,
        max_length: usize,
        on_bad_row: OnBadRow,
        tokenizer: &Tokenizer,
    ) -> Option<TokenStore> {
        // What is damaged or cannot be read is made anew and takes the place of what is there.
        let tokens = TokenStore::open(&self.key.path(folder), self.key, max_length, tokenizer.max_id()).ok()?;
        let counts = tokens.details().counts;
        // Bad rows were skipped when they were made: now the first of them is to be named.
        let is_refused = counts.bad > 0 && on_bad_row == OnBadRow::Error;
        // Nobody can train on it: what is wrong is told from the rows themselves.
        let is_useless = counts.tokens == 0;
        (!is_refused && !is_useless).then_some(tokens)
    }
}
