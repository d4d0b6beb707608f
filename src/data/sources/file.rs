//! A file before its rows are tokenised, and tokenising it.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::tokens::{DataFile, PIECE_TOKENS};
use crate::data::ahead::{OpenOptions, for_each_chunk};
use crate::data::cache::{self, CacheKey, Chunk, Details, KeyParts, RowEntry, Signature, StoreWriter, TokenStore};
use crate::data::config::{DataConfig, DataFormat, DataSource};
use crate::data::encode::{EncodedRow, Encoder};
use crate::data::error::DataError;
use crate::data::files::{FileKind, RowFile, RowProblem};
use crate::data::findings::RowFindings;
use crate::data::formats::RowFormat;
use crate::data::progress::Meter;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;
use crate::data::windows;

/// Most characters that a message about a row may have.
const MAX_MESSAGE_CHARACTERS: usize = 500;

/// A file before its rows are tokenised.
#[derive(Debug)]
pub(super) struct Opened {
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
    /// Tokens from the cache; the details have the format of the rows.
    Kept(Box<(TokenStore, Vec<RowEntry>, Details)>),
}

/// Why the rows of a file were not all tokenised.
enum AheadError {
    Data(DataError),
    /// The tokens cannot be written.
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
    /// Opens a file of `source`: its tokens if they are in the cache, otherwise its rows.
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
            None if is_large && options.refuse_large => {
                return Err(failed("large, and its tokens are not kept yet: `lora-train check` makes them".into()));
            }
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

    /// Tokenises the rows into the cache if they should and can be kept there, otherwise into memory.
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
        // A failure is ignored: only `tidy` uses the time.
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
            // The recipe may name the file twice, or another process may have tokenised it meanwhile.
            if let Ok((tokens, entries, details)) = TokenStore::open(&path, key) {
                return Ok((tokens, entries, details, false));
            }
            // Remove old token files first, to make room.
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
            encoder.encode_with_notes(&sample).map_err(|error| RowProblem::Bad(error.to_string()))
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
