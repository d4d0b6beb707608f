//! The files that a recipe names, and how their rows are read.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use indicatif::HumanBytes;
use sha2::{Digest as _, Sha256};

use super::ahead::OpenOptions;
use super::batch::RowSource;
use super::cache;
use super::config::{DataConfig, DataFormat, DataSource, OnBadRow};
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::files::{FileKind, RowProblem};
use super::template::{ChatTemplate, TemplateError};
use super::tokenizer::Tokenizer;

mod file;
mod rows;

pub(super) use file::BadRows;
use file::{AheadError, DataFile};

/// Files from this size on are tokenised as a whole before the first step, and their tokens kept: it takes seconds, every
/// bad row is found at once, and the next start has them. Rows of smaller files are tokenised as they are visited, which
/// is quicker than looking for what was kept.
pub const LARGE_FILE_BYTES: u64 = 16 << 20;
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

/// The files of `[[data.train]]` or of `[[data.eval]]`, their rows numbered through.
#[derive(Debug)]
pub(super) struct FileSet {
    files: Vec<DataFile>,
    /// Rows of each entry.
    sources: Vec<Range<u32>>,
    on_bad_row: OnBadRow,
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

    /// SHA-256 of the content of all files, in their order; absent where that of one is not known.
    pub(super) fn digest(&self) -> Option<[u8; 32]> {
        let mut digest = Sha256::new();
        for file in &self.files {
            digest.update(file.content?);
        }
        Some(digest.finalize().into())
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

/// The files that a `path` names, sorted.
pub(super) fn matching_files(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
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
        // What a recipe names must be there, also where no row needs it; the model's own template is nobody's mistake.
        return match opened {
            Err(error) if config.chat_template != "auto" => Err(error.into()),
            _ => Ok(None),
        };
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
