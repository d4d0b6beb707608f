//! The files that a recipe names, and how their rows are read.

use std::ffi::OsStr;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use indicatif::HumanBytes;
use sha2::{Digest as _, Sha256};

use super::ahead::OpenOptions;
use super::batch::RowSource;
use super::config::{DataConfig, DataFormat, DataSource, OnBadRow};
use super::counts::RowCounts;
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::files::FileKind;
use super::template::{ChatTemplate, TemplateError};
use super::tokenizer::Tokenizer;
use crate::schema::searched_folder;

mod file;
mod tokens;

use file::Opened;
use tokens::DataFile;

/// A file of the recipe, and what was found out about it.
#[derive(Clone, Debug, PartialEq)]
pub struct FileInfo {
    /// Path of the file.
    pub path: PathBuf,
    /// How the file is laid out.
    pub kind: FileKind,
    /// How its rows are read: the recipe's format, or the format that `auto` found.
    pub format: DataFormat,
    /// Number of rows; for a .txt file, of windows of `max_length` tokens.
    pub num_rows: usize,
    /// Columns that are not read.
    pub unused_columns: Vec<String>,
    /// Whether it comes from `[[data.eval]]`.
    pub is_eval: bool,
    /// Its tokens in the cache, if they are kept there.
    pub kept_tokens: Option<KeptTokens>,
}

/// Tokens of a file that are kept on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptTokens {
    /// Size on disk.
    pub bytes: u64,
    /// Whether this start wrote them.
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

/// The files of `[[data.train]]` or of `[[data.eval]]` before tokenising. Their rows are numbered consecutively across
/// files.
#[derive(Debug)]
pub(super) struct OpenedSet {
    files: Vec<Opened>,
    sources: Vec<Range<usize>>,
}

impl OpenedSet {
    /// Opens the files of `sources` without tokenising them.
    pub(super) fn open(
        sources: &[DataSource],
        is_eval: bool,
        config: &DataConfig,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        options: &OpenOptions<'_>,
    ) -> Result<Self, DataError> {
        let mut set = Self { files: Vec::new(), sources: Vec::new() };
        for (index, source) in sources.iter().enumerate() {
            let first = set.files.len();
            let key = format!("data.{}[{index}].path", if is_eval { "eval" } else { "train" });
            for path in matching_files(&key, &source.path)? {
                set.files.push(Opened::open(&path, is_eval, source, config, tokenizer, template, options)?);
            }
            set.sources.push(first..set.files.len());
        }
        Ok(set)
    }

    pub(super) fn formats(&self) -> impl Iterator<Item = (&Path, DataFormat)> {
        self.files.iter().map(|file| (file.path(), file.format()))
    }

    /// Tokenises the files whose tokens are not cached. Failing to cache tokens is only a warning. The bad rows of all
    /// files are reported as one error, unless they are to be skipped.
    pub(super) fn tokenise(
        self,
        encoder: &Encoder<'_>,
        config: &DataConfig,
        options: &OpenOptions<'_>,
        warnings: &mut Vec<String>,
    ) -> Result<FileSet, DataError> {
        let max_length = u32::try_from(config.max_length).unwrap_or(u32::MAX);
        let mut set = FileSet { files: Vec::new(), sources: Vec::new(), lengths: Vec::new(), max_length };
        let mut mistakes = Vec::new();
        let mut files = self.files.into_iter();
        for source in self.sources {
            let first_row = set.num_rows();
            for opened in files.by_ref().take(source.len()) {
                let (mut file, entries) = opened.tokenise(encoder, options, warnings)?;
                file.first_row = set.num_rows();
                let rows = file.rows(&entries, config.max_length);
                file.info.num_rows = rows.len();
                if rows.len() > (u32::MAX - file.first_row) as usize {
                    let reason = format!("more than {} rows in all are not supported", u32::MAX);
                    return Err(DataError::File { path: file.info.path, reason });
                }
                set.lengths.extend(rows);
                if config.on_bad_row == OnBadRow::Error {
                    mistakes.extend(file.mistakes());
                } else if file.bad_rows.num_rows == file.info.num_rows as u64 {
                    let first = file.bad_rows.messages().next().map(|message| message.to_string()).unwrap_or_default();
                    let reason = format!("none of its {} rows can be used; the first: {first}", file.info.num_rows);
                    return Err(DataError::File { path: file.info.path, reason });
                }
                set.files.push(file);
            }
            set.sources.push(first_row..set.num_rows());
        }
        if mistakes.is_empty() { Ok(set) } else { Err(DataError::Rows(mistakes)) }
    }
}

/// The files of `[[data.train]]` or of `[[data.eval]]` as tokens. Their rows are numbered consecutively across files.
#[derive(Debug)]
pub(super) struct FileSet {
    files: Vec<DataFile>,
    /// Range of rows of each entry.
    sources: Vec<Range<u32>>,
    /// Number of tokens of every row, at most `max_length`; 0 for a row that is left out because it cannot be used or
    /// no token carries loss.
    lengths: Vec<u32>,
    max_length: u32,
}

impl FileSet {
    /// SHA-256 of the content of all files, in their order.
    pub(super) fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        self.files.iter().for_each(|file| digest.update(file.content));
        digest.finalize().into()
    }

    fn num_rows(&self) -> u32 {
        u32::try_from(self.lengths.len()).unwrap_or(u32::MAX)
    }

    /// Number of tokens of every row, 0 for a row that is left out.
    pub(super) fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// Range of rows of each entry, in the order of the recipe.
    pub(super) fn sources(&self) -> &[Range<u32>] {
        &self.sources
    }

    pub(super) fn infos(&self) -> impl Iterator<Item = &FileInfo> {
        self.files.iter().map(|file| &file.info)
    }

    /// Warnings about rows that are left out, cut or unusual.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.files.iter().flat_map(|file| file.warnings(self.max_length as usize)).collect()
    }

    /// Counts of the rows. Reads the rows that are cut.
    pub(super) fn counts(&self, max_id: u32) -> Result<RowCounts, DataError> {
        let mut counts = RowCounts::default();
        for file in &self.files {
            counts += file.all_counts(self.max_length as usize, max_id)?;
        }
        Ok(counts)
    }

    /// The tokens of row `row` of the set, and the place it was read from. A row that cannot be used has no tokens.
    pub(super) fn read(&self, row: u32, max_id: u32) -> Result<(RowSource, EncodedRow), DataError> {
        let file = self.files.partition_point(|file| file.first_row <= row) - 1;
        let row = (row - self.files[file].first_row) as usize;
        Ok((RowSource { file, row }, self.files[file].read(row, self.max_length as usize, max_id)?))
    }
}

/// The files that match a `path`, sorted. `key` is the path's key in the recipe.
///
/// # Errors
/// A path or pattern that matches no file.
pub fn matching_files(key: &str, pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let literal = PathBuf::from(pattern);
    let failed = |reason: String| DataError::Path { key: key.to_owned(), reason: format!("\"{pattern}\" {reason}") };
    if literal.is_file() {
        return Ok(vec![literal]);
    }
    if literal.is_dir() {
        let names = std::fs::read_dir(&literal).into_iter().flatten().flatten().map(|entry| entry.path());
        let ending =
            names.filter(|path| FileKind::of(path).is_some()).find_map(|path| path.extension().map(OsStr::to_owned));
        let ending = ending.map_or_else(|| "jsonl".into(), |ending| ending.to_string_lossy().into_owned());
        return Err(failed(format!("is a folder\n  hint: name its files, such as \"{pattern}/*.{ending}\"")));
    }
    // For a pattern, the part before the first folder with a wildcard.
    let fixed: PathBuf =
        literal.components().take_while(|part| !part.as_os_str().to_string_lossy().contains(['*', '?', '['])).collect();
    if !pattern.contains(['*', '?', '[']) {
        return Err(failed(format!("is no file: looked for in {}", searched_folder(&literal).display())));
    }
    let matches = glob::glob(pattern).map_err(|error| failed(format!("is not a valid glob: {error}")))?;
    let mut files = Vec::new();
    for path in matches {
        let path = path.map_err(|error| failed(format!("cannot be searched: {error}")))?;
        if path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        Err(failed(format!("matches no file: looked for in {}", searched_folder(&fixed.join("*")).display())))
    } else {
        Ok(files)
    }
}

/// The chat template, if a file needs one. `opened` is the result of opening the template that the recipe names.
pub(super) fn needed_template<'a>(
    config: &DataConfig,
    opened: Result<Option<ChatTemplate>, TemplateError>,
    files: impl Iterator<Item = (&'a Path, DataFormat)>,
) -> Result<Option<ChatTemplate>, DataError> {
    let files: Vec<(&Path, DataFormat)> = files.filter(|(_, format)| format.uses_template()).collect();
    if files.is_empty() {
        // A template that the recipe names must be usable even where no row needs it. An unusable template of the model
        // is ignored.
        return match opened {
            Err(error) if config.chat_template != "auto" => Err(error.into()),
            _ => Ok(None),
        };
    }
    let template = opened?;
    let needs = |format| matches!(format, DataFormat::Messages | DataFormat::Sharegpt);
    match files.iter().find(|(_, format)| needs(*format)) {
        Some((path, format)) if template.is_none() => Err(DataError::File {
            path: path.to_path_buf(),
            reason: format!(
                "format `{}` needs a chat template, and {}\n  hint: set `data.chat_template` to a Jinja file",
                format.name(),
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
