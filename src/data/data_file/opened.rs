//! A data file before it is tokens: opening it, and encoding its rows on all cores.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rayon::prelude::*;

use super::addresses::fetch_images;
use super::{DataFile, PIECE_TOKENS};
use crate::config::{DataConfig, DataFormat, DataSource, RowLimit};
use crate::data::cache::{self, CacheKey, Details, Encoded, RowChunk, Signature, StoreWriter};
use crate::data::counts::RowCounts;
use crate::data::encode::{EncodedRow, Encoder};
use crate::data::error::DataError;
use crate::data::files::{FileInfo, FileKind, KeptTokens, OpenOptions, unsupported};
use crate::data::findings::RowFindings;
use crate::data::formats::RowFormat;
use crate::data::progress::{Meter, Work};
use crate::data::rows::RowFile;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;
use crate::data::windows;
use crate::util::files::tidy;

/// Most characters that a message about a row may have.
const MAX_MESSAGE_CHARACTERS: usize = 500;
/// Names of unused columns that are kept.
const MAX_UNUSED: usize = 50;
/// Most rows that a thread encodes at a time.
const CHUNK_ROWS: usize = 128;
/// Chunks that a thread gets in one round: enough that threads seldom wait for the last chunk.
const CHUNKS_PER_THREAD: usize = 16;
/// Most bytes of rows that are encoded in one round, unless a single row has more.
const MAX_ROUND_BYTES: usize = 32 << 20;

/// A file before its rows are encoded.
#[derive(Debug)]
pub(in crate::data) struct OpenedFile {
    path: PathBuf,
    is_eval: bool,
    content: [u8; 32],
    signature: Signature,
    rows: TokenSource,
    /// The key in the cache, if the tokens are to be kept.
    key: Option<CacheKey>,
    limit: Option<RowLimit>,
}

/// What the files of one `[[data.train]]` or `[[data.eval]]` share.
#[derive(Clone, Copy)]
pub(in crate::data) struct Reading<'a> {
    pub(in crate::data) is_eval: bool,
    pub(in crate::data) source: &'a DataSource,
    pub(in crate::data) config: &'a DataConfig,
    pub(in crate::data) tokenizer: &'a Tokenizer,
    pub(in crate::data) template: Option<&'a ChatTemplate>,
    pub(in crate::data) options: &'a OpenOptions<'a>,
}

/// Where the tokens of a file come from.
#[derive(Debug)]
enum TokenSource {
    /// JSON objects.
    Objects { file: RowFile, format: RowFormat },
    /// A .txt file.
    Text,
    /// Tokens from the cache.
    Kept(Box<Encoded>),
}

/// The tokens in the cache, if that has them, which are used now.
fn used_now(encoded: &Encoded, is_new: bool) -> Option<KeptTokens> {
    let (file, _) = encoded.tokens.file()?;
    // A failure is ignored: only `tidy` uses the time.
    drop(file.set_modified(SystemTime::now()));
    Some(KeptTokens { bytes: file.metadata().map_or(0, |file| file.len()), is_new })
}

impl OpenedFile {
    /// Opens a file: its tokens if they are in the cache, otherwise its rows. `limit` says how many of them are read.
    pub(in crate::data) fn open(
        path: PathBuf,
        limit: Option<RowLimit>,
        reading: &Reading<'_>,
    ) -> Result<Self, DataError> {
        let Reading { is_eval, source, config, options, .. } = *reading;
        let failed = |reason: String| DataError::File { path: path.clone(), reason };
        let kind = FileKind::of(&path).ok_or_else(|| failed(unsupported(&path)))?;
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
        let key = folder.is_some().then(|| key(content, kind, limit, reading)).flatten();
        let kept = key.zip(folder).and_then(|(key, folder)| Encoded::open(&key.path(folder), key));
        let rows = match kept {
            Some(kept) => TokenSource::Kept(Box::new(kept)),
            None if is_large && options.refuse_large && options.images.is_none() => {
                return Err(failed("large, and its tokens are not kept yet: `lora-train check` makes them".into()));
            }
            None if kind == FileKind::Txt => TokenSource::Text,
            None => {
                let file = RowFile::open(&path, kind)?;
                let first = file.first_row()?;
                let header = if kind.delimiter().is_some() { "; the first line names the columns" } else { "" };
                let format = RowFormat::detect(source.format, &source.columns, &first, config.row_kind)
                    .map_err(|reason| file.row_error(0, reason + header))?;
                let images = options.images.as_ref().map(|images| images.folder_for(&path));
                TokenSource::Objects { file, format: format.under(config).with_images(images) }
            }
        };
        Ok(Self { path, is_eval, content, signature, rows, key, limit })
    }

    /// Number of rows that are read; `None` for text, whose windows are not known yet.
    pub(in crate::data) fn num_rows(&self) -> Option<usize> {
        match &self.rows {
            TokenSource::Objects { file, .. } => Some(self.limited(file.num_rows())),
            TokenSource::Kept(kept) if kept.details.kind != FileKind::Txt => Some(kept.entries.len()),
            TokenSource::Text | TokenSource::Kept(_) => None,
        }
    }

    fn limited(&self, num_rows: usize) -> usize {
        self.limit.map_or(num_rows, |limit| limit.of(num_rows))
    }

    pub(in crate::data) fn path(&self) -> &Path {
        &self.path
    }

    pub(in crate::data) fn format(&self) -> DataFormat {
        match &self.rows {
            TokenSource::Objects { format, .. } => format.format(),
            TokenSource::Text => DataFormat::Text,
            TokenSource::Kept(kept) => kept.details.format,
        }
    }

    /// Encodes the rows, numbered from `first_row`, into the cache if they should and can be kept there, otherwise into
    /// memory; of a text, at most `left` windows. Returns the file and the number of tokens of every row at `max_length`,
    /// 0 for a row that is left out.
    pub(in crate::data) fn encode(
        self,
        (first_row, left): (u32, Option<usize>),
        max_length: usize,
        encoder: &Encoder<'_>,
        options: &OpenOptions<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<(DataFile, Vec<u32>), DataError> {
        let (limit, num_rows_in_file) = (self.limit, self.num_rows());
        let (encoded, is_new, rows) = match self.rows {
            TokenSource::Kept(encoded) => (*encoded, false, None),
            _ => {
                let (encoded, is_new) = self.encoded(encoder, options, warnings)?;
                (encoded, is_new, if let TokenSource::Objects { file, .. } = self.rows { Some(file) } else { None })
            }
        };
        let kept_tokens = used_now(&encoded, is_new);
        let Encoded { tokens, entries, details } = encoded;
        let Details { kind, format, unused_columns, unlearnt, note, bad_rows, unanswered_rows, odd_rows, letters } =
            details;
        let (path, is_eval) = (self.path, self.is_eval);
        let mut file = DataFile {
            info: FileInfo {
                path,
                kind,
                format,
                num_rows: 0,
                num_rows_in_file: 0,
                unused_columns,
                unlearnt,
                note,
                is_eval,
                kept_tokens,
            },
            first_row,
            content: self.content,
            max_length,
            max_id: encoder.tokenizer.max_id(),
            counts: RowCounts::default(),
            num_bad_answers: 0,
            bad_rows,
            unanswered_rows,
            odd_rows,
            letters,
            cut_rows: Vec::new(),
            cut_off_rows: RowFindings::default(),
            tokens,
        };
        let lengths = if kind == FileKind::Txt {
            let limited = |windows: usize| limit.map_or(windows, |limit| limit.of(windows));
            file.count_windows(&entries, |windows| limited(windows).min(left.unwrap_or(windows)))
        } else {
            file.count_rows(&entries, rows.as_ref())
        };
        file.info.num_rows = lengths.len();
        file.info.num_rows_in_file = num_rows_in_file.unwrap_or(lengths.len());
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
            tidy(folder, cache::STORE_SUFFIX, options.cache.max_bytes, &path);
            let writer = StoreWriter::in_folder(folder, key).map_err(DataError::Store);
            match writer.and_then(|writer| self.write(writer, encoder, options)) {
                Err(DataError::Store(error)) => warnings.push(format!(
                    "{}: its tokens cannot be kept in {}: {error}; they are held in memory\n  hint: {} names another \
                     folder",
                    self.path.display(),
                    folder.display(),
                    crate::util::files::CACHE_VARIABLE,
                )),
                written => {
                    tidy(folder, cache::STORE_SUFFIX, options.cache.max_bytes, &path);
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
            unlearnt: None,
            note: None,
            bad_rows: RowFindings::default(),
            unanswered_rows: RowFindings::default(),
            odd_rows: RowFindings::default(),
            letters: [0; 3],
        };
        if let TokenSource::Objects { file, format } = &self.rows {
            (details.kind, details.note) = (file.kind(), file.note.clone());
            self.write_objects(file, format, &mut writer, &mut details, encoder, options)?;
        } else {
            details.note = self.write_text(&mut writer, encoder.tokenizer, options)?;
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
    ) -> Result<Option<String>, DataError> {
        let mut piece = Vec::with_capacity(PIECE_TOKENS);
        let mut push = |ids: Vec<u32>| {
            let mut chunk = RowChunk::default();
            chunk.push(&EncodedRow::window(ids));
            if (options.is_stopped)() {
                Err(DataError::Interrupted)
            } else {
                writer.push(&chunk).map_err(DataError::Store)
            }
        };
        let note = windows::tokenise(&self.path, tokenizer, &mut |id| {
            piece.push(id);
            if piece.len() == PIECE_TOKENS { push(std::mem::take(&mut piece)) } else { Ok(()) }
        })?;
        if !piece.is_empty() {
            push(piece)?;
        }
        Ok(note)
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
        let num_rows = self.limited(file.num_rows()).min(options.max_rows.unwrap_or(usize::MAX));
        fetch_images((file, &self.path, num_rows), format, encoder, options)?;
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
                if chunk.has_images {
                    // What an image is follows from other files, and ids of its tokens from the images before it.
                    writer.hold().map_err(DataError::Store)?;
                }
                chunk.bad.iter().for_each(|(row, text)| details.bad_rows.add(*row, text));
                chunk.unanswered.iter().for_each(|(row, text)| details.unanswered_rows.add(*row, text));
                chunk.odd.iter().for_each(|(row, text)| details.odd_rows.add(*row, text));
                unused.extend(chunk.unused);
                details.letters.iter_mut().zip(chunk.letters).for_each(|(sum, count)| *sum += count);
                writer.push(&chunk.tokens).map_err(DataError::Store)
            })
        };
        let mut meter = Meter::start(options.progress, Work::Tokenising, self.path.display().to_string(), num_rows);
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
        details.unlearnt = format.unlearnt(&unused);
        let more = unused.len().saturating_sub(MAX_UNUSED);
        details.unused_columns = unused.into_iter().take(MAX_UNUSED).collect();
        details.unused_columns.extend((more > 0).then(|| format!("and {more} more")));
        for findings in [&mut details.bad_rows, &mut details.unanswered_rows, &mut details.odd_rows] {
            findings.place(|rows| file.places(rows));
        }
        Ok(())
    }
}

/// Consecutive rows, encoded by one thread, with messages about some of them.
#[derive(Default)]
struct EncodedChunk {
    tokens: RowChunk,
    bad: Vec<(usize, String)>,
    unanswered: Vec<(usize, String)>,
    odd: Vec<(usize, String)>,
    unused: BTreeSet<String>,
    letters: [u64; 3],
    has_images: bool,
}

impl EncodedChunk {
    fn add(&mut self, row: usize, file: &RowFile, format: &RowFormat, encoder: &Encoder<'_>) -> Result<(), DataError> {
        let bytes = file.bytes(row)?;
        let encoded = file.parse(&bytes).and_then(|value| {
            format.add_unused(&value, &mut self.unused);
            let sample = format.read(&value, encoder.template)?;
            self.has_images |= !sample.images().is_empty();
            let (row, notes) = encoder.encode_with_notes(&sample).map_err(|error| error.to_string())?;
            let cell = if file.has_cells() { "the cell " } else { "" };
            let columns: Vec<String> =
                format.empty_columns(&value).iter().map(|name| format!("{cell}`{name}` is empty")).collect();
            self.letters.iter_mut().zip(notes.letters).for_each(|(sum, count)| *sum += count);
            Ok((row, if columns.is_empty() { notes.empty } else { columns }, notes.odd, notes.unread))
        });
        match encoded {
            Ok((encoded, empty, odd, unread)) => {
                self.tokens.push(&encoded);
                self.unused.extend(unread.iter().map(|key| format.name_of_key(key)));
                if encoded.full_target_tokens == 0 {
                    let reason =
                        if empty.is_empty() { "there is nothing to predict".to_owned() } else { empty.join("; ") };
                    self.unanswered.push((row, reason));
                    return Ok(());
                }
                let double = file.double_key(&bytes);
                let double = double.map(|key| format!("an object has the key `{key}` twice; the last one counts"));
                let odd: Vec<String> = empty.into_iter().chain(odd).chain(double).collect();
                self.odd.extend((!odd.is_empty()).then(|| (row, odd.join("; "))));
            }
            Err(reason) => {
                let reason: String = reason.chars().take(MAX_MESSAGE_CHARACTERS).collect();
                self.tokens.push(&EncodedRow::bad(reason.clone()));
                self.bad.push((row, reason));
            }
        }
        Ok(())
    }
}

/// The cache key of a file's tokens, of which none is of an image; `None` if they cannot be cached.
fn key(content: [u8; 32], kind: FileKind, limit: Option<RowLimit>, reading: &Reading<'_>) -> Option<CacheKey> {
    let Reading { source, config, tokenizer, options, .. } = reading;
    // A template that uses the time of day writes another text each time.
    let template = match reading.template {
        Some(template) => Some(template.identity()?),
        None => None,
    };
    // Text is kept whole.
    let limit = limit.filter(|_| kind != FileKind::Txt);
    let rows = (content, kind, source.format, &source.columns, limit);
    let loss = (&config.system, config.train_on_turns, config.train_on_inputs, config.row_kind);
    // Where images are seen, rows are read otherwise, and their texts may not have this token.
    let image_token_id = options.images.as_ref().map(|images| images.image_token_id());
    Some(CacheKey::new(&(rows, tokenizer.digest(), tokenizer.eos_ids(), template, loss, image_token_id)))
}
