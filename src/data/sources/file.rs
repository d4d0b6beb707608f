//! One file: opening it, and tokenising all of it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::{FileInfo, KeptTokens};
use crate::budget;
use crate::data::ahead::{OpenOptions, for_each_chunk};
use crate::data::cache::{self, CacheKey, Chunk, Details, KeyParts, RowEntry, Signature, StoreWriter, TokenStore};
use crate::data::config::{DataConfig, DataFormat, DataSource};
use crate::data::counts::RowCounts;
use crate::data::encode::{EncodedRow, Encoder};
use crate::data::error::DataError;
use crate::data::files::{FileKind, RowFile, RowProblem};
use crate::data::findings::RowFindings;
use crate::data::formats::RowFormat;
use crate::data::progress::Meter;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;
use crate::data::windows;

/// Tokens of a piece in which those of a .txt file are kept.
const PIECE_TOKENS: usize = 1024;
/// Characters of what is said about a row.
const MAX_MESSAGE_CHARACTERS: usize = 500;

/// A file before its rows are tokenised.
#[derive(Debug)]
pub(super) struct Opened {
    path: PathBuf,
    is_eval: bool,
    content: [u8; 32],
    signature: Signature,
    rows: Rows,
    /// What its tokens are to be kept under.
    key: Option<CacheKey>,
}

/// Where the tokens of a file come from.
#[derive(Debug)]
enum Rows {
    /// JSON objects.
    Objects { file: RowFile, format: RowFormat },
    /// A .txt file.
    Text,
    /// Tokens that are in the cache. The details say of what format the rows were.
    Kept(Box<(TokenStore, Vec<RowEntry>, Details)>),
}

/// A file as tokens.
#[derive(Debug)]
pub(super) struct DataFile {
    pub(super) info: FileInfo,
    /// Number of its first row among those of the set.
    pub(super) first_row: u32,
    /// SHA-256 of its content.
    pub(super) content: [u8; 32],
    pub(super) bad_rows: RowFindings,
    counts: RowCounts,
    odd_rows: RowFindings,
    /// Rows that lose their end and not all that carries loss: `counts` does not have their target tokens.
    cut_rows: Vec<usize>,
    /// Rows in which nothing carries loss: they have no answer, or it is cut off.
    without_targets: RowFindings,
    tokens: TokenStore,
}

/// Why the rows of a file were not all tokenised.
enum AheadError {
    Data(DataError),
    /// They cannot be written.
    Store(io::Error),
}

impl From<DataError> for AheadError {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

impl From<io::Error> for AheadError {
    fn from(error: io::Error) -> Self {
        Self::Store(error)
    }
}

impl Opened {
    /// Opens a file of `source`: its tokens, if they are kept and there, else its rows.
    pub(super) fn open(
        path: &Path,
        is_eval: bool,
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
        let unreadable = |error: io::Error| failed(error.to_string());
        let is_large = std::fs::metadata(path).map_err(unreadable)?.len() >= options.cache.min_file_bytes;
        let folder = options.cache.folder.as_deref().filter(|_| is_large && options.max_rows.is_none());
        let (signature, content) = match folder {
            Some(folder) => cache::content_hash(path, folder).map_err(unreadable)?,
            None => cache::hash_of(path).map_err(unreadable)?,
        };
        let key = folder.is_some().then(|| key(content, kind, source, config, tokenizer, template)).flatten();
        let kept = key.zip(folder).and_then(|(key, folder)| TokenStore::open(&key.path(folder), key).ok());
        let rows = match kept {
            Some(kept) => Rows::Kept(Box::new(kept)),
            None if kind == FileKind::Txt => Rows::Text,
            None => {
                let file = RowFile::open(path, kind)?;
                let first = file.first_row()?;
                let format = RowFormat::detect(source.format, &source.columns, &first)
                    .map_err(|reason| file.row_error(0, reason))?;
                Rows::Objects { file, format }
            }
        };
        Ok(Self { path: path.to_path_buf(), is_eval, content, signature, rows, key })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn format(&self) -> DataFormat {
        match &self.rows {
            Rows::Objects { format, .. } => format.format(),
            Rows::Text => DataFormat::Text,
            Rows::Kept(kept) => kept.2.format,
        }
    }

    /// Tokenises the rows: into the cache if they are to be kept and can be, else into memory.
    pub(super) fn tokenise(
        self,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<(DataFile, Vec<RowEntry>), DataError> {
        let (tokens, entries, details, is_new) = match self.rows {
            Rows::Kept(kept) => {
                let (tokens, entries, details) = *kept;
                (tokens, entries, details, false)
            }
            _ => self.tokens(encoder, options, warnings)?,
        };
        // It is only for `tidy` to know.
        if let Some((file, _)) = tokens.file() {
            drop(cache::touch(file));
        }
        Ok((DataFile::new(self.path, self.is_eval, self.content, tokens, details, is_new), entries))
    }

    fn tokens(
        &self,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<(TokenStore, Vec<RowEntry>, Details, bool), DataError> {
        if let (Some(key), Some(folder)) = (self.key, &options.cache.folder) {
            let path = key.path(folder);
            // Another file of the recipe may be the same one, or another process may have been quicker.
            if let Ok((tokens, entries, details)) = TokenStore::open(&path, key) {
                return Ok((tokens, entries, details, false));
            }
            // What is not needed any more makes room first.
            cache::tidy(folder, options.cache.max_bytes, &path);
            let writer = StoreWriter::in_folder(folder, key).map_err(AheadError::Store);
            match writer.and_then(|writer| self.write(writer, encoder, options)) {
                Ok((tokens, entries, details)) => {
                    cache::tidy(folder, options.cache.max_bytes, &path);
                    return Ok((tokens, entries, details, true));
                }
                Err(AheadError::Data(error)) => return Err(error),
                Err(AheadError::Store(error)) => warnings.push(format!(
                    "{}: its tokens cannot be kept in {}: {error}; they are held in memory\n  hint: {} names another \
                     folder",
                    self.path.display(),
                    folder.display(),
                    cache::CACHE_VARIABLE,
                )),
            }
        }
        match self.write(StoreWriter::in_memory(), encoder, options) {
            Ok((tokens, entries, details)) => Ok((tokens, entries, details, true)),
            Err(AheadError::Data(error)) => Err(error),
            Err(AheadError::Store(error)) => Err(DataError::Worker(error.to_string())),
        }
    }

    fn write(
        &self,
        mut writer: StoreWriter,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
    ) -> Result<(TokenStore, Vec<RowEntry>, Details), AheadError> {
        let mut details = Details {
            kind: FileKind::Txt,
            format: self.format(),
            unused_columns: Vec::new(),
            bad_rows: RowFindings::default(),
            odd_rows: RowFindings::default(),
        };
        match &self.rows {
            Rows::Objects { file, format } => {
                details.kind = file.kind();
                self.write_objects(file, format, &mut writer, &mut details, encoder, options)?;
            }
            _ => self.write_text(&mut writer, encoder.tokenizer, options)?,
        }
        if !Signature::of(&self.path).is_ok_and(|now| now == self.signature) {
            let reason = "changes while it is read\n  hint: start again once it is complete".to_owned();
            return Err(DataError::File { path: self.path.clone(), reason }.into());
        }
        let (tokens, entries) = writer.finish(&details)?;
        Ok((tokens, entries, details))
    }

    fn write_text(
        &self,
        writer: &mut StoreWriter,
        tokenizer: &Tokenizer,
        options: &OpenOptions<'_>,
    ) -> Result<(), AheadError> {
        let mut piece = Vec::with_capacity(PIECE_TOKENS);
        let mut push = |ids: Vec<u32>| {
            let mut chunk = Chunk::default();
            chunk.push(&EncodedRow::window(ids));
            if (options.is_stopped)() { Err(DataError::Interrupted.into()) } else { Ok(writer.push(&chunk)?) }
        };
        windows::tokenise::<AheadError>(&self.path, tokenizer, &mut |id| {
            piece.push(id);
            if piece.len() == PIECE_TOKENS { push(std::mem::take(&mut piece)) } else { Ok(()) }
        })?;
        if piece.is_empty() { Ok(()) } else { push(piece) }
    }

    fn write_objects(
        &self,
        file: &RowFile,
        format: &RowFormat,
        writer: &mut StoreWriter,
        details: &mut Details,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
    ) -> Result<(), AheadError> {
        let num_rows = file.num_rows().min(options.max_rows.unwrap_or(usize::MAX));
        let encode = |rows: Range<usize>| {
            let mut made = Made::default();
            for row in rows {
                made.add(row, file, format, encoder)?;
            }
            Ok::<Made, AheadError>(made)
        };
        let mut unused = BTreeSet::new();
        let mut sink = |_: Range<usize>, made: Made| {
            made.bad.iter().for_each(|(row, text)| details.bad_rows.add(*row, text));
            made.odd.iter().for_each(|(row, text)| details.odd_rows.add(*row, text));
            unused.extend(made.unused);
            writer.push(&made.chunk).map_err(AheadError::Store)
        };
        let meter = Meter::start(options.progress, self.path.display().to_string(), num_rows);
        for_each_chunk(num_rows, file.mean_row_bytes(), options.is_stopped, meter, &encode, &mut sink)?;
        details.unused_columns = unused.into_iter().collect();
        for findings in [&mut details.bad_rows, &mut details.odd_rows] {
            findings.place(|rows| file.places(rows));
        }
        Ok(())
    }
}

/// What one thread made of some rows.
#[derive(Default)]
struct Made {
    chunk: Chunk,
    bad: Vec<(usize, String)>,
    odd: Vec<(usize, String)>,
    unused: BTreeSet<String>,
}

impl Made {
    fn add(&mut self, row: usize, file: &RowFile, format: &RowFormat, encoder: &Encoder<'_>) -> Result<(), DataError> {
        let mut encode = || {
            let value = file.read(row)?;
            format.add_unused(&value, encoder.template, &mut self.unused);
            let sample = format.read(&value, encoder.template).map_err(RowProblem::Bad)?;
            let encoded = budget::on_row(file.path(), row, || encoder.encode_with_notes(&sample));
            encoded.map_err(|error| RowProblem::Bad(error.to_string()))
        };
        match encode() {
            Ok((encoded, note)) => {
                self.chunk.push(&encoded);
                self.odd.extend(note.map(|note| (row, note)));
            }
            Err(RowProblem::Bad(reason)) => {
                let reason: String = reason.chars().take(MAX_MESSAGE_CHARACTERS).collect();
                self.chunk.push(&EncodedRow::bad(reason.clone()));
                self.bad.push((row, reason));
            }
            Err(RowProblem::Failed(error)) => return Err(error),
        }
        Ok(())
    }
}

impl DataFile {
    fn new(
        path: PathBuf,
        is_eval: bool,
        content: [u8; 32],
        tokens: TokenStore,
        details: Details,
        is_new: bool,
    ) -> Self {
        let bytes = |file: &File| file.metadata().map_or(0, |file| file.len());
        let kept_tokens = tokens.file().map(|(file, _)| KeptTokens { bytes: bytes(file), is_new });
        let Details { kind, format, unused_columns, bad_rows, odd_rows } = details;
        let info = FileInfo { path, kind, format, num_rows: 0, unused_columns, is_eval, kept_tokens };
        let (counts, without_targets) = (RowCounts::default(), RowFindings::default());
        let cut_rows = Vec::new();
        Self { info, first_row: 0, content, bad_rows, counts, odd_rows, cut_rows, without_targets, tokens }
    }

    /// Tokens of every row at `max_length`, 0 for one that is left out. Counts them.
    pub(super) fn rows(&mut self, entries: &[RowEntry], max_length: usize) -> Vec<u32> {
        let limit = u32::try_from(max_length).unwrap_or(u32::MAX);
        if self.info.kind == FileKind::Txt {
            let all: u64 = entries.iter().map(|entry| u64::from(entry.num_tokens())).sum();
            let lengths = (0..all).step_by(max_length).map(|start| {
                let length = u32::try_from(all - start).map_or(limit, |left| left.min(limit));
                // The first token is not predicted.
                if length < 2 { 0 } else { length }
            });
            let lengths: Vec<u32> = lengths.collect();
            self.counts.rows = lengths.len() as u64;
            self.counts.tokens = lengths.iter().copied().map(u64::from).sum();
            self.counts.target_tokens = lengths.iter().map(|length| u64::from(length.saturating_sub(1))).sum();
            self.counts.longest_tokens = lengths.iter().copied().max().map_or(0, u64::from);
            return lengths;
        }
        let mut lengths = Vec::with_capacity(entries.len());
        for (row, entry) in entries.iter().enumerate() {
            let (length, counts) = (entry.num_tokens(), &mut self.counts);
            let is_usable = entry.is_usable(limit);
            counts.rows += 1;
            counts.bad += u64::from(entry.is_bad());
            counts.truncated += u64::from(length > limit);
            counts.longest_tokens = counts.longest_tokens.max(length.into());
            if !is_usable && !entry.is_bad() {
                counts.without_targets += 1;
                counts.answer_cut += u64::from(entry.has_targets());
                let reason = if entry.has_targets() {
                    format!("of {length} tokens, nothing of the answer is in the first {limit} (`data.max_length`)")
                } else {
                    "nothing carries loss: there is no answer".to_owned()
                };
                self.without_targets.add(row, &reason);
            }
            if is_usable {
                counts.tokens += u64::from(length.min(limit));
                if length <= limit {
                    counts.target_tokens += u64::from(entry.num_targets());
                } else {
                    self.cut_rows.push(row);
                }
            }
            lengths.push(if is_usable { length.min(limit) } else { 0 });
        }
        self.without_targets.place(|rows| rows.iter().map(|row| format!("row {}", row + 1)).collect());
        lengths
    }

    /// What the rows turned out to be. Reads those that are cut.
    pub(super) fn all_counts(&self, max_length: usize, max_id: u32) -> Result<RowCounts, DataError> {
        let target_tokens = |row: &usize| self.read(*row, max_length, max_id).map(|row| row.num_target_tokens() as u64);
        let of_cut: u64 = self.cut_rows.par_iter().map(target_tokens).sum::<Result<_, _>>()?;
        Ok(RowCounts { target_tokens: self.counts.target_tokens + of_cut, ..self.counts })
    }

    /// An error for each kind of bad rows.
    pub(super) fn mistakes(&self) -> Vec<DataError> {
        let path = &self.info.path;
        let error = |place: String, reason: String| DataError::Row { path: path.clone(), place, reason };
        let mut errors: Vec<DataError> =
            self.bad_rows.messages().map(|message| error(message.place(), message.to_string())).collect();
        let unnamed = self.bad_rows.num_unnamed();
        if unnamed > 0 {
            let reason = format!("{unnamed} more rows cannot be used, for other reasons");
            errors.push(DataError::File { path: path.clone(), reason });
        }
        errors
    }

    /// What is to be said of rows that are left out, cut or odd.
    pub(super) fn warnings(&self, max_length: usize) -> Vec<String> {
        let (path, rows) = (self.info.path.display(), self.info.num_rows);
        let list = |findings: &RowFindings| -> String {
            let texts = findings.messages().map(|message| {
                let text = message.to_string().replace('\n', "\n  ");
                format!("\n  {}: {text}", message.place())
            });
            texts.collect()
        };
        let mut warnings = Vec::new();
        if self.bad_rows.num_rows > 0 {
            let count = self.bad_rows.num_rows;
            warnings.push(format!(
                "{path}: {count} of {rows} rows cannot be used and are skipped:{}",
                list(&self.bad_rows)
            ));
        }
        if self.without_targets.num_rows > 0 {
            let (count, list) = (self.without_targets.num_rows, list(&self.without_targets));
            warnings.push(format!("{path}: {count} of {rows} rows carry no loss and are left out:{list}"));
        }
        let RowCounts { truncated, answer_cut, longest_tokens, .. } = self.counts;
        if truncated > answer_cut {
            warnings.push(format!(
                "{path}: {} of {rows} rows are longer than `data.max_length` = {max_length} and lose their end\n  hint: \
                 the longest has {longest_tokens} tokens",
                truncated - answer_cut
            ));
        }
        if self.odd_rows.num_rows > 0 {
            warnings.push(format!(
                "{path}: {} of {rows} rows are odd:{}",
                self.odd_rows.num_rows,
                list(&self.odd_rows)
            ));
        }
        warnings
    }

    /// The tokens of row `row`, at most `max_length` of them.
    pub(super) fn read(&self, row: usize, max_length: usize, max_id: u32) -> Result<EncodedRow, DataError> {
        if self.info.kind != FileKind::Txt {
            return Ok(self.record(row, max_id)?.cut(max_length));
        }
        let mut ids = Vec::with_capacity(max_length);
        let mut at = row * max_length;
        while ids.len() < max_length && at / PIECE_TOKENS < self.tokens.num_records() {
            let piece = self.record(at / PIECE_TOKENS, max_id)?.ids;
            let rest = piece.get(at % PIECE_TOKENS..).unwrap_or_default();
            ids.extend(rest.iter().take(max_length - ids.len()));
            at = (at / PIECE_TOKENS + 1) * PIECE_TOKENS;
        }
        Ok(EncodedRow::window(ids))
    }

    /// A record of the tokens. They were checked when they were written: one that is damaged by now is the disk's.
    fn record(&self, index: usize, max_id: u32) -> Result<EncodedRow, DataError> {
        self.tokens.read(index, max_id).ok_or_else(|| {
            // The next start makes them anew.
            let path = self.tokens.file().map(|(_, path)| path);
            if let Some(path) = path {
                drop(std::fs::remove_file(path));
            }
            let reason = format!("the tokens of row {} are damaged on the disk\n  hint: start again", index + 1);
            DataError::Tokens { path: path.unwrap_or(&self.info.path).into(), reason }
        })
    }
}

/// Under what the tokens of a file are kept; `None` for one whose tokens cannot be.
fn key(
    content: [u8; 32],
    kind: FileKind,
    source: &DataSource,
    config: &DataConfig,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Option<CacheKey> {
    let template = match template {
        // A template that asks for the time of day writes something else each time.
        Some(template) => Some(template.identity()?),
        None => None,
    };
    Some(CacheKey::new(&KeyParts {
        content,
        kind,
        format: source.format,
        columns: &source.columns,
        tokenizer: tokenizer.digest(),
        template,
        train_on_inputs: config.train_on_inputs,
    }))
}
