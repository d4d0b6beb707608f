//! The files that a recipe names, and how their rows are read.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use indicatif::HumanBytes;

use super::ahead::{OpenOptions, for_each_chunk};
use super::batch::RowSource;
use super::cache::{self, CacheKey, Chunk, Details, KeyParts, Signature, StoreWriter, TokenStore, Unusable};
use super::config::{DataConfig, DataFormat, DataSource, OnBadRow};
use super::counts::RowCounts;
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::files::{FileKind, RowProblem};
use super::progress::Meter;
use super::template::{ChatTemplate, TemplateError};
use super::tokenizer::Tokenizer;

mod rows;

use rows::{Rows, StoredRows};

/// Files from this size on are tokenised as a whole before the first step, and their tokens kept: it takes seconds, every
/// bad row is found at once, and the next start has them. Rows of smaller files are tokenised as they are visited, which
/// is quicker than looking for what was kept.
pub const LARGE_FILE_BYTES: u64 = 16 << 20;
/// Bad rows of a file that are named.
const MAX_NAMED_ROWS: usize = 5;
/// Characters of what is told about a bad row.
const MAX_REASON_CHARACTERS: usize = 500;

/// A file of the recipe, and what was found in it.
#[derive(Clone, Debug, PartialEq)]
pub struct FileInfo {
    /// The file.
    pub path: PathBuf,
    /// Its layout.
    pub kind: FileKind,
    /// How its rows are read; what `auto` found.
    pub format: DataFormat,
    /// Its rows; for a .txt file, windows of `max_length` tokens.
    pub num_rows: usize,
    /// Columns that are not read.
    pub unused_columns: Vec<String>,
    /// Whether it comes from `[[data.eval]]`.
    pub is_eval: bool,
    /// Its tokens, where they are kept.
    pub kept_tokens: Option<KeptTokens>,
}

/// Tokens of a file that are kept on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptTokens {
    /// Size on disk.
    pub bytes: u64,
    /// Whether this start has written them.
    pub is_new: bool,
}

impl fmt::Display for KeptTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = HumanBytes(self.bytes);
        if self.is_new {
            write!(f, "tokens now kept on disk, {bytes}")
        } else {
            write!(f, "tokens read from disk, {bytes}")
        }
    }
}

/// Rows of a file that cannot be used and are skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BadRows {
    pub(super) count: u64,
    /// The first ones, each with its place and what is wrong.
    pub(super) first: Vec<String>,
}

/// The files of `[[data.train]]` or of `[[data.eval]]`, their rows numbered through.
#[derive(Debug)]
pub(super) struct FileSet {
    files: Vec<DataFile>,
    /// Rows of each entry.
    sources: Vec<Range<u32>>,
    on_bad_row: OnBadRow,
}

#[derive(Debug)]
struct DataFile {
    info: FileInfo,
    rows: Rows,
    /// Number of its first row among those of the set.
    first_row: u32,
    bad_rows: BadRows,
    /// What its tokens are to be kept under.
    wanted: Option<Wanted>,
}

/// Tokens that are to be kept and are not there yet.
#[derive(Debug)]
struct Wanted {
    key: CacheKey,
    signature: Signature,
    source: DataSource,
}

impl FileSet {
    /// Opens the files of `sources`. Nothing is tokenised yet but .txt files whose tokens have not been kept.
    pub(super) fn open(
        sources: &[DataSource],
        is_eval: bool,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        options: &OpenOptions<'_>,
    ) -> Result<Self, DataError> {
        let mut set = Self { files: Vec::new(), sources: Vec::new(), on_bad_row: config.on_bad_row };
        let mut num_rows: u32 = 0;
        for source in sources {
            let first_row = num_rows;
            for path in matching_files(&source.path)? {
                let mut file = DataFile::open(&path, source, config, tokenizer, template, options)?;
                (file.info.is_eval, file.first_row) = (is_eval, num_rows);
                let more = u32::try_from(file.info.num_rows).ok().and_then(|more| num_rows.checked_add(more));
                num_rows = more.ok_or_else(|| DataError::File {
                    path,
                    reason: format!("more than {} rows in all are not supported", u32::MAX),
                })?;
                set.files.push(file);
            }
            set.sources.push(first_row..num_rows);
        }
        Ok(set)
    }

    /// Tokenises what is to be kept and is not there; what cannot be kept is a warning. With `every_row`, rows that are
    /// not kept are tokenised too.
    ///
    /// Returns the tokens of every row of the set, 0 for one that is left out, if `every_row`.
    pub(super) fn tokenise(
        &mut self,
        encoder: &Encoder<'_>,
        every_row: bool,
        options: &OpenOptions<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<Vec<u32>, DataError> {
        let mut lengths = Vec::with_capacity(if every_row { self.num_rows() as usize } else { 0 });
        for file in &mut self.files {
            match (file.keep_tokens(encoder, self.on_bad_row, options), options.cache.folder.as_deref()) {
                (Err(AheadError::Data(error)), _) => return Err(error),
                (Err(AheadError::Store(error)), Some(folder)) => warnings.push(format!(
                    "{}: its tokens cannot be kept in {}: {error}; rows are tokenised as they are visited\n  hint: {} \
                     names another folder",
                    file.info.path.display(),
                    folder.display(),
                    cache::CACHE_VARIABLE,
                )),
                _ => {}
            }
            if every_row {
                file.lengths(encoder, self.on_bad_row, options, &mut lengths)?;
            }
            if file.bad_rows.count == file.info.num_rows as u64 {
                let first = file.bad_rows.first.first().map_or("", String::as_str);
                let reason = format!("none of its {} rows can be used; the first: {first}", file.info.num_rows);
                return Err(DataError::File { path: file.info.path.clone(), reason });
            }
        }
        Ok(lengths)
    }

    pub(super) fn num_rows(&self) -> u32 {
        self.sources.last().map_or(0, |last| last.end)
    }

    /// Rows of each entry, in the order of the recipe.
    pub(super) fn sources(&self) -> &[Range<u32>] {
        &self.sources
    }

    pub(super) fn infos(&self) -> impl Iterator<Item = &FileInfo> {
        self.files.iter().map(|file| &file.info)
    }

    /// Each file with its rows that are skipped.
    pub(super) fn bad_rows(&self) -> impl Iterator<Item = (&FileInfo, &BadRows)> {
        self.files.iter().map(|file| (&file.info, &file.bad_rows)).filter(|(_, bad)| bad.count > 0)
    }

    /// The tokens of row `row` of the set, and where it was read.
    pub(super) fn encode(&self, row: u32, encoder: &Encoder<'_>) -> Result<(RowSource, EncodedRow), DataError> {
        let file = self.files.partition_point(|file| file.first_row <= row) - 1;
        let DataFile { rows, first_row, .. } = &self.files[file];
        let row = (row - first_row) as usize;
        let tokens = match rows.encode(row, encoder) {
            Err(RowProblem::Bad(_)) if self.on_bad_row == OnBadRow::Skip => EncodedRow::bad(),
            encoded => encoded.map_err(|problem| rows.error(row, problem))?,
        };
        Ok((RowSource { file, row }, tokens))
    }
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

impl DataFile {
    /// Opens a file of `source`: its tokens, if they are kept and there, else its rows.
    fn open(
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
        let kept = wanted.as_ref().zip(folder).and_then(|(wanted, folder)| wanted.open(folder, config, tokenizer));
        if let (Some(tokens), Some(Wanted { signature, source, .. })) = (kept, &wanted) {
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
                kept_tokens: Some(KeptTokens { bytes: tokens.bytes(), is_new: false }),
            };
            let bad_rows = BadRows { count: counts.bad, first: bad_rows };
            let rows = StoredRows::in_cache(tokens, path.into(), kind, source.clone(), signature.clone());
            return Ok(Self { info, rows, first_row: 0, bad_rows, wanted: None });
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
        Ok(Self { info, rows, first_row: 0, bad_rows: BadRows::default(), wanted })
    }

    /// Tokenises the rows into the cache, if they are wanted there, and reads them from there from now on.
    fn keep_tokens(
        &mut self,
        encoder: &Encoder<'_>,
        on_bad_row: OnBadRow,
        options: &OpenOptions<'_>,
    ) -> Result<(), AheadError> {
        let (Some(Wanted { key, signature, source }), Some(folder)) = (self.wanted.take(), &options.cache.folder)
        else {
            return Ok(());
        };
        let mut writer = StoreWriter::create(folder, key).map_err(AheadError::Store)?;
        let mut bad_rows = BadRows::default();
        let encode = |rows: Range<usize>| {
            let mut chunk = Chunk::default();
            let bad = self.encode_chunk(rows, encoder, on_bad_row, &mut |row| chunk.push(row))?;
            Ok((chunk, bad))
        };
        let mut sink = |_: Range<usize>, (chunk, bad): (Chunk, Vec<(usize, String)>)| {
            self.name_bad_rows(bad, &mut bad_rows);
            writer.push(&chunk).map_err(AheadError::Store)
        };
        let meter = self.meter(options);
        for_each_chunk(self.rows.len(), encoder.max_length, options.is_stopped, meter, &encode, &mut sink)?;
        if !Signature::of(&self.info.path).is_ok_and(|now| now == signature) {
            let reason = "changes while it is read\n  hint: start again once it is complete".to_owned();
            return Err(DataError::File { path: self.info.path.clone(), reason }.into());
        }
        bad_rows.count = writer.counts().bad;
        let details = Details {
            kind: self.info.kind,
            format: self.info.format,
            unused_columns: self.info.unused_columns.clone(),
            counts: writer.counts(),
            bad_rows: bad_rows.first.clone(),
        };
        let path = writer.finish(&details).map_err(AheadError::Store)?;
        cache::tidy(folder, options.cache.max_bytes, &path);
        let tokens = TokenStore::open(&path, key, encoder.max_length, encoder.tokenizer.max_id());
        let tokens = tokens.map_err(|error| AheadError::Store(error.into()))?;
        self.info.kept_tokens = Some(KeptTokens { bytes: tokens.bytes(), is_new: true });
        self.bad_rows = bad_rows;
        let kind = FileKind::of(&self.info.path).unwrap_or(self.info.kind);
        self.rows = StoredRows::in_cache(tokens, self.info.path.clone(), kind, source, signature);
        Ok(())
    }

    /// Puts the tokens of every row, 0 for one that is left out, behind `lengths`.
    fn lengths(
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
        let meter = self.meter(options);
        for_each_chunk(self.rows.len(), encoder.max_length, options.is_stopped, meter, &encode, &mut sink)?;
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
            let error = self.rows.error(index, RowProblem::Bad(reason)).to_string();
            bad_rows.first.push(error.chars().take(MAX_REASON_CHARACTERS).collect());
        }
    }

    fn meter(&self, options: &OpenOptions<'_>) -> Meter {
        Meter::start(options.progress, self.info.path.display().to_string(), self.rows.len())
    }
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
        let is_large = || std::fs::metadata(path).is_ok_and(|metadata| metadata.len() >= LARGE_FILE_BYTES);
        if !(every_row || is_large()) || !TokenStore::can_hold(tokenizer.max_id()) {
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
        Some(Self { key, signature, source: source.clone() })
    }

    /// The tokens, if they are there and whole.
    fn open(&self, folder: &Path, config: &DataConfig, tokenizer: &Tokenizer) -> Option<TokenStore> {
        let path = self.key.path(folder);
        match TokenStore::open(&path, self.key, config.max_length, tokenizer.max_id()) {
            // Bad rows were skipped when they were made: now the first of them is to be named.
            Ok(tokens) if tokens.details().counts.bad > 0 && config.on_bad_row == OnBadRow::Error => None,
            Ok(tokens) => Some(tokens),
            // It is made anew and takes the place of what is there.
            Err(Unusable::Absent | Unusable::Damaged | Unusable::Unreadable(_)) => None,
        }
    }
}

/// The files that a `path` names, sorted.
fn matching_files(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let literal = PathBuf::from(pattern);
    let failed = |reason: String| DataError::File { path: literal.clone(), reason };
    if literal.is_file() {
        return Ok(vec![literal]);
    }
    if literal.is_dir() {
        return Err(failed(format!("is a folder\n  hint: name its files, such as \"{pattern}/*.jsonl\"")));
    }
    if !pattern.contains(['*', '?', '[']) {
        return Err(failed("no such file".into()));
    }
    let matches = glob::glob(pattern).map_err(|error| failed(format!("not a valid glob: {error}")))?;
    let mut files = Vec::new();
    for path in matches {
        let path = path.map_err(|error| failed(error.to_string()))?;
        if path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() { Err(failed("matches no file".into())) } else { Ok(files) }
}

/// The chat template, if a file needs one: `opened` is what the recipe asks for.
pub(super) fn needed_template(
    config: &DataConfig,
    opened: Result<Option<ChatTemplate>, TemplateError>,
    files: &[FileInfo],
) -> Result<Option<ChatTemplate>, DataError> {
    let needs = |format| matches!(format, DataFormat::Messages | DataFormat::Sharegpt);
    if !files.iter().any(|file| needs(file.format) || file.format == DataFormat::Alpaca) {
        return Ok(None);
    }
    let template = opened?;
    match files.iter().find(|file| needs(file.format)) {
        Some(file) if template.is_none() => Err(DataError::File {
            path: file.path.clone(),
            reason: format!(
                "format `{}` needs a chat template, and {}\n  hint: set `data.chat_template` to a Jinja file",
                file.format.name(),
                if config.chat_template == "none" {
                    "`data.chat_template` = \"none\" turns it off"
                } else {
                    "the model has none"
                }
            ),
        }),
        _ => Ok(template),
    }
}
