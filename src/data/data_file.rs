//! A data file: opening it, encoding its rows on all cores, and reading them as tokens.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rayon::prelude::*;

use super::cache::{self, CacheKey, Chunk, Details, Encoded, KeyParts, RowEntry, Signature, StoreWriter, TokenStore};
use super::config::{DataConfig, DataFormat, DataSource};
use super::counts::RowCounts;
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::files::{FileInfo, FileKind, KeptTokens, OpenOptions};
use super::findings::RowFindings;
use super::formats::RowFormat;
use super::progress::Meter;
use super::rows::{RowFile, RowProblem};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::windows;

/// Most characters that a message about a row may have.
const MAX_MESSAGE_CHARACTERS: usize = 500;
/// The tokens of a .txt file are stored in pieces of this many tokens.
const PIECE_TOKENS: usize = 1024;
/// Most rows that a thread encodes at a time.
const CHUNK_ROWS: usize = 128;
/// Chunks that a thread gets in one round: enough that threads seldom wait for the last chunk.
const CHUNKS_PER_THREAD: usize = 16;
/// Most bytes of rows that are encoded in one round, unless a single row has more.
const MAX_ROUND_BYTES: usize = 32 << 20;

/// A file before its rows are encoded.
#[derive(Debug)]
pub(super) struct OpenedFile {
    path: PathBuf,
    is_eval: bool,
    content: [u8; 32],
    signature: Signature,
    rows: Rows,
    /// The key in the cache, if the tokens are to be kept.
    key: Option<CacheKey>,
}

/// Where the tokens of a file come from.
#[derive(Debug)]
enum Rows {
    /// JSON objects.
    Objects { file: RowFile, format: RowFormat },
    /// A .txt file.
    Text,
    /// Tokens from the cache.
    Kept(Box<Encoded>),
}

impl OpenedFile {
    /// Opens a file of `source`: its tokens if they are in the cache, otherwise its rows.
    pub(super) fn open(
        path: PathBuf,
        is_eval: bool,
        source: &DataSource,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        options: &OpenOptions<'_>,
    ) -> Result<Self, DataError> {
        let failed = |reason: String| DataError::File { path: path.clone(), reason };
        let kind = FileKind::of(&path).ok_or_else(|| failed("files end in .json, .jsonl, .parquet or .txt".into()))?;
        let is_textual = matches!(source.format, DataFormat::Auto | DataFormat::Text) && source.columns.is_empty();
        if kind == FileKind::Txt && !is_textual {
            return Err(failed("a .txt file has no columns: its `format` is \"text\"".into()));
        }
        let unreadable = |error: io::Error| failed(error.to_string());
        let is_large = std::fs::metadata(&path).map_err(unreadable)?.len() >= options.cache.min_file_bytes;
        let folder = options.cache.folder.as_deref().filter(|_| is_large && options.max_rows.is_none());
        let (signature, content) = match folder {
            Some(folder) => cache::content_hash(&path, folder).map_err(unreadable)?,
            None => cache::hash_of(&path).map_err(unreadable)?,
        };
        let key = folder.is_some().then(|| key(content, kind, source, config, tokenizer, template)).flatten();
        let kept = key.zip(folder).and_then(|(key, folder)| Encoded::open(&key.path(folder), key));
        let rows = match kept {
            Some(kept) => Rows::Kept(Box::new(kept)),
            None if is_large && options.refuse_large => {
                return Err(failed("large, and its tokens are not kept yet: `lora-train check` makes them".into()));
            }
            None if kind == FileKind::Txt => Rows::Text,
            None => {
                let file = RowFile::open(&path, kind)?;
                let first = file.first_row()?;
                let format = RowFormat::detect(source.format, &source.columns, &first)
                    .map_err(|reason| file.row_error(0, reason))?;
                Rows::Objects { file, format }
            }
        };
        Ok(Self { path, is_eval, content, signature, rows, key })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn format(&self) -> DataFormat {
        match &self.rows {
            Rows::Objects { format, .. } => format.format(),
            Rows::Text => DataFormat::Text,
            Rows::Kept(kept) => kept.details.format,
        }
    }

    /// Encodes the rows, numbered from `first_row`, into the cache if they should and can be kept there, otherwise into
    /// memory. Returns the file and the number of tokens of every row at `max_length`, 0 for a row that is left out.
    pub(super) fn encode(
        self,
        first_row: u32,
        max_length: usize,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<(DataFile, Vec<u32>), DataError> {
        let (encoded, is_new) = match self.rows {
            Rows::Kept(encoded) => (*encoded, false),
            _ => self.encoded(encoder, options, warnings)?,
        };
        let kept_tokens = encoded.tokens.file().map(|(file, _)| {
            // A failure is ignored: only `tidy` uses the time.
            drop(file.set_modified(SystemTime::now()));
            KeptTokens { bytes: file.metadata().map_or(0, |file| file.len()), is_new }
        });
        let Encoded { tokens, entries, details } = encoded;
        let Details { kind, format, unused_columns, bad_rows, odd_rows } = details;
        let (path, is_eval) = (self.path, self.is_eval);
        let mut file = DataFile {
            info: FileInfo { path, kind, format, num_rows: 0, unused_columns, is_eval, kept_tokens },
            first_row,
            content: self.content,
            max_length,
            max_id: encoder.tokenizer.max_id(),
            counts: RowCounts::default(),
            bad_rows,
            odd_rows,
            cut_rows: Vec::new(),
            without_targets: RowFindings::default(),
            tokens,
        };
        let lengths = if kind == FileKind::Txt { file.count_windows(&entries) } else { file.count_rows(&entries) };
        file.info.num_rows = lengths.len();
        Ok((file, lengths))
    }

    /// The rows as tokens, and whether they were encoded just now.
    fn encoded(
        &self,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<(Encoded, bool), DataError> {
        if let (Some(key), Some(folder)) = (self.key, &options.cache.folder) {
            let path = key.path(folder);
            // The recipe may name the file twice, or another process may have encoded it meanwhile.
            if let Some(encoded) = Encoded::open(&path, key) {
                return Ok((encoded, false));
            }
            // Remove old token files first, to make room.
            cache::tidy(folder, options.cache.max_bytes, &path);
            let writer = StoreWriter::in_folder(folder, key).map_err(DataError::Store);
            match writer.and_then(|writer| self.write(writer, encoder, options)) {
                Err(DataError::Store(error)) => warnings.push(format!(
                    "{}: its tokens cannot be kept in {}: {error}; they are held in memory\n  hint: {} names another \
                     folder",
                    self.path.display(),
                    folder.display(),
                    cache::CACHE_VARIABLE,
                )),
                written => {
                    cache::tidy(folder, options.cache.max_bytes, &path);
                    return Ok((written?, true));
                }
            }
        }
        Ok((self.write(StoreWriter::in_memory(), encoder, options)?, true))
    }

    fn write(
        &self,
        mut writer: StoreWriter,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
    ) -> Result<Encoded, DataError> {
        let mut details = Details {
            kind: FileKind::Txt,
            format: self.format(),
            unused_columns: Vec::new(),
            bad_rows: RowFindings::default(),
            odd_rows: RowFindings::default(),
        };
        if let Rows::Objects { file, format } = &self.rows {
            details.kind = file.kind();
            self.write_objects(file, format, &mut writer, &mut details, encoder, options)?;
        } else {
            self.write_text(&mut writer, encoder.tokenizer, options)?;
        }
        if !Signature::of(&self.path).is_ok_and(|now| now == self.signature) {
            let reason = "changes while it is read\n  hint: start again once it is complete".to_owned();
            return Err(DataError::File { path: self.path.clone(), reason });
        }
        writer.finish(details).map_err(DataError::Store)
    }

    fn write_text(
        &self,
        writer: &mut StoreWriter,
        tokenizer: &Tokenizer,
        options: &OpenOptions<'_>,
    ) -> Result<(), DataError> {
        let mut piece = Vec::with_capacity(PIECE_TOKENS);
        let mut push = |ids: Vec<u32>| {
            let mut chunk = Chunk::default();
            chunk.push(&EncodedRow::window(ids));
            if (options.is_stopped)() {
                Err(DataError::Interrupted)
            } else {
                writer.push(&chunk).map_err(DataError::Store)
            }
        };
        windows::tokenise(&self.path, tokenizer, &mut |id| {
            piece.push(id);
            if piece.len() == PIECE_TOKENS { push(std::mem::take(&mut piece)) } else { Ok(()) }
        })?;
        if piece.is_empty() { Ok(()) } else { push(piece) }
    }

    /// Encodes the rows of `file` on all cores, in rounds, so that only a bounded part of them is in memory.
    fn write_objects(
        &self,
        file: &RowFile,
        format: &RowFormat,
        writer: &mut StoreWriter,
        details: &mut Details,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
    ) -> Result<(), DataError> {
        let num_rows = file.num_rows().min(options.max_rows.unwrap_or(usize::MAX));
        let chunks_per_round = rayon::current_num_threads() * CHUNKS_PER_THREAD;
        let chunk_rows = (MAX_ROUND_BYTES / chunks_per_round / file.mean_row_bytes().max(1)).clamp(1, CHUNK_ROWS);
        let encode = |rows: Range<usize>| -> Vec<Result<EncodedChunk, DataError>> {
            let starts: Vec<usize> = rows.clone().step_by(chunk_rows).collect();
            let chunk = |start: usize| {
                if (options.is_stopped)() {
                    return Err(DataError::Interrupted);
                }
                let mut chunk = EncodedChunk::default();
                let rows = start..(start + chunk_rows).min(rows.end);
                rows.into_iter().try_for_each(|row| chunk.add(row, file, format, encoder)).map(|()| chunk)
            };
            starts.into_par_iter().map(chunk).collect()
        };
        let mut unused = BTreeSet::new();
        let mut write = |round: Vec<Result<EncodedChunk, DataError>>| {
            round.into_iter().try_for_each(|chunk| {
                let chunk = chunk?;
                chunk.bad.iter().for_each(|(row, text)| details.bad_rows.add(*row, text));
                chunk.odd.iter().for_each(|(row, text)| details.odd_rows.add(*row, text));
                unused.extend(chunk.unused);
                writer.push(&chunk.tokens).map_err(DataError::Store)
            })
        };
        let mut meter = Meter::start(options.progress, self.path.display().to_string(), num_rows);
        let (mut round, mut at) = (Vec::new(), 0);
        while at < num_rows || !round.is_empty() {
            let end = (at + chunk_rows * chunks_per_round).min(num_rows);
            // The next round is encoded while this one is written.
            let (written, next) = rayon::join(|| write(round), || encode(at..end));
            written?;
            if at > 0 {
                meter.advance(at);
            }
            (round, at) = (next, end);
        }
        meter.finish();
        details.unused_columns = unused.into_iter().collect();
        for findings in [&mut details.bad_rows, &mut details.odd_rows] {
            findings.place(|rows| file.places(rows));
        }
        Ok(())
    }
}

/// Consecutive rows, encoded by one thread, with messages about some of them.
#[derive(Default)]
struct EncodedChunk {
    tokens: Chunk,
    bad: Vec<(usize, String)>,
    odd: Vec<(usize, String)>,
    unused: BTreeSet<String>,
}

impl EncodedChunk {
    fn add(&mut self, row: usize, file: &RowFile, format: &RowFormat, encoder: &Encoder<'_>) -> Result<(), DataError> {
        let mut encode = || {
            let value = file.read(row)?;
            format.add_unused(&value, encoder.template, &mut self.unused);
            let sample = format.read(&value, encoder.template).map_err(RowProblem::Bad)?;
            encoder.encode_with_notes(&sample).map_err(|error| RowProblem::Bad(error.to_string()))
        };
        match encode() {
            Ok((encoded, note)) => {
                self.tokens.push(&encoded);
                self.odd.extend(note.map(|note| (row, note)));
            }
            Err(RowProblem::Bad(reason)) => {
                let reason: String = reason.chars().take(MAX_MESSAGE_CHARACTERS).collect();
                self.tokens.push(&EncodedRow::bad(reason.clone()));
                self.bad.push((row, reason));
            }
            Err(RowProblem::Failed(error)) => return Err(error),
        }
        Ok(())
    }
}

/// The rows of a file, as tokens.
#[derive(Debug)]
pub(super) struct DataFile {
    pub(super) info: FileInfo,
    /// Number of the file's first row within the dataset.
    pub(super) first_row: u32,
    /// SHA-256 of its content.
    pub(super) content: [u8; 32],
    max_length: usize,
    /// Largest token id that the tokenizer has.
    max_id: u32,
    counts: RowCounts,
    bad_rows: RowFindings,
    odd_rows: RowFindings,
    /// Rows that are cut but still have tokens with loss. `counts` lacks their target tokens.
    cut_rows: Vec<usize>,
    /// Rows without a token that carries loss: they have no answer, or it is cut off.
    without_targets: RowFindings,
    tokens: TokenStore,
}

impl DataFile {
    /// The lengths of the windows of a text.
    fn count_windows(&mut self, pieces: &[RowEntry]) -> Vec<u32> {
        let num_tokens: usize = pieces.iter().map(|piece| piece.num_tokens() as usize).sum();
        let windows = (0..num_tokens).step_by(self.max_length).map(|start| self.max_length.min(num_tokens - start));
        // The first token is not predicted, so a window of one token has no target.
        let lengths: Vec<u32> =
            windows.map(|length| if length < 2 { 0 } else { u32::try_from(length).unwrap_or(u32::MAX) }).collect();
        self.counts.rows = lengths.len() as u64;
        self.counts.tokens = lengths.iter().copied().map(u64::from).sum();
        self.counts.target_tokens = lengths.iter().map(|length| u64::from(length.saturating_sub(1))).sum();
        self.counts.longest_tokens = lengths.iter().copied().max().map_or(0, u64::from);
        lengths
    }

    /// The lengths of the rows.
    fn count_rows(&mut self, entries: &[RowEntry]) -> Vec<u32> {
        let limit = u32::try_from(self.max_length).unwrap_or(u32::MAX);
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
                    "nothing carries loss: there is no answer, an empty one, or one of weight 0".to_owned()
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

    /// Counts of the rows. Reads the rows that are cut.
    pub(super) fn all_counts(&self) -> Result<RowCounts, DataError> {
        let target_tokens = |row: &usize| self.read(*row).map(|row| row.num_target_tokens() as u64);
        let of_cut: u64 = self.cut_rows.par_iter().map(target_tokens).sum::<Result<_, _>>()?;
        Ok(RowCounts { target_tokens: self.counts.target_tokens + of_cut, ..self.counts })
    }

    /// An error if none of the rows can be used.
    pub(super) fn refuse_if_no_row_is_usable(&self) -> Result<(), DataError> {
        if self.bad_rows.num_rows < self.info.num_rows as u64 {
            return Ok(());
        }
        let (_, first) = self.bad_rows.messages().next().unwrap_or_default();
        let reason = format!("none of its {} rows can be used; the first: {first}", self.info.num_rows);
        Err(DataError::File { path: self.info.path.clone(), reason })
    }

    /// An error for each kind of bad rows.
    pub(super) fn mistakes(&self) -> Vec<DataError> {
        let path = &self.info.path;
        let error = |(place, reason)| DataError::Row { path: path.clone(), place, reason };
        let mut errors: Vec<DataError> = self.bad_rows.messages().map(error).collect();
        let unnamed = self.bad_rows.num_unnamed();
        if unnamed > 0 {
            let reason = format!("{unnamed} more rows cannot be used, for other reasons");
            errors.push(DataError::File { path: path.clone(), reason });
        }
        errors
    }

    /// Warnings about rows that are left out, cut or unusual.
    pub(super) fn warnings(&self) -> Vec<String> {
        let (path, rows) = (self.info.path.display(), self.info.num_rows);
        let list = |findings: &RowFindings| -> String {
            let texts = findings.messages().map(|(place, text)| (place, text.replace('\n', "\n  ")));
            texts.map(|(place, text)| format!("\n  {place}: {text}")).collect()
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
                "{path}: {} of {rows} rows are longer than `data.max_length` = {} and lose their end\n  hint: \
                 the longest has {longest_tokens} tokens",
                truncated - answer_cut,
                self.max_length
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
    pub(super) fn read(&self, row: usize) -> Result<EncodedRow, DataError> {
        let max_length = self.max_length;
        if self.info.kind != FileKind::Txt {
            return Ok(self.record(row)?.cut(max_length));
        }
        let mut ids = Vec::with_capacity(max_length);
        let mut at = row * max_length;
        while ids.len() < max_length && at / PIECE_TOKENS < self.tokens.num_records() {
            let piece = self.record(at / PIECE_TOKENS)?.ids;
            let rest = piece.get(at % PIECE_TOKENS..).unwrap_or_default();
            ids.extend(rest.iter().take(max_length - ids.len()));
            at = (at / PIECE_TOKENS + 1) * PIECE_TOKENS;
        }
        Ok(EncodedRow::window(ids))
    }

    /// Reads a record of the token file. Records were checked when written, so damage here comes from the disk.
    fn record(&self, index: usize) -> Result<EncodedRow, DataError> {
        self.tokens.read(index, self.max_id).ok_or_else(|| {
            // Without the file, the next start makes the tokens again.
            let path = self.tokens.file().map(|(_, path)| path);
            if let Some(path) = path {
                drop(std::fs::remove_file(path));
            }
            let reason = format!("the tokens of row {} are damaged on the disk\n  hint: start again", index + 1);
            DataError::Tokens { path: path.unwrap_or(&self.info.path).into(), reason }
        })
    }
}

/// The cache key of a file's tokens; `None` if they cannot be cached.
fn key(
    content: [u8; 32],
    kind: FileKind,
    source: &DataSource,
    config: &DataConfig,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Option<CacheKey> {
    let template = match template {
        // `None` for a template that uses the time: its text differs each time.
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
