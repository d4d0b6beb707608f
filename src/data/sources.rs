//! The files that a recipe names, and how their rows are read.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::batch::RowSource;
use super::config::{DataConfig, DataFormat, DataSource};
use super::encode::{EncodedRow, Encoder};
use super::error::DataError;
use super::files::{FileKind, RowFile};
use super::formats::RowFormat;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::windows::TokenFile;

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
}

/// The files of `[[data.train]]` or of `[[data.eval]]`, their rows numbered through.
#[derive(Debug)]
pub(super) struct FileSet {
    files: Vec<DataFile>,
    /// Rows of each entry.
    sources: Vec<Range<u32>>,
}

#[derive(Debug)]
struct DataFile {
    info: FileInfo,
    rows: Rows,
    format: RowFormat,
    /// Number of its first row among those of the set.
    first_row: u32,
}

#[derive(Debug)]
enum Rows {
    Objects(RowFile),
    Windows(TokenFile),
}

impl FileSet {
    /// Opens the files of `sources`.
    pub(super) fn open(
        sources: &[DataSource],
        is_eval: bool,
        config: &DataConfig,
        tokenizer: &Tokenizer,
    ) -> Result<Self, DataError> {
        let mut set = Self { files: Vec::new(), sources: Vec::new() };
        let mut num_rows: u32 = 0;
        for source in sources {
            let first_row = num_rows;
            for path in matching_files(&source.path)? {
                let mut file = open_file(&path, source, config, tokenizer)?;
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

    /// The tokens of row `row` of the set, and where it was read.
    pub(super) fn encode(&self, row: u32, encoder: &Encoder<'_>) -> Result<(RowSource, EncodedRow), DataError> {
        let file = self.files.partition_point(|file| file.first_row <= row) - 1;
        let DataFile { rows, format, first_row, .. } = &self.files[file];
        let row = (row - first_row) as usize;
        let tokens = match rows {
            Rows::Windows(windows) => encoder.window(&windows.read(row)?),
            Rows::Objects(objects) => {
                let failed = |reason: String| objects.row_error(row, reason);
                let sample = format.read(&objects.read(row)?, encoder.template.is_some()).map_err(failed)?;
                encoder.encode(&sample).map_err(|error| failed(error.to_string()))?
            }
        };
        Ok((RowSource { file, row }, tokens))
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

/// Opens a file of `source` and decides how its rows are read.
fn open_file(
    path: &Path,
    source: &DataSource,
    config: &DataConfig,
    tokenizer: &Tokenizer,
) -> Result<DataFile, DataError> {
    let failed = |reason: String| DataError::File { path: path.to_path_buf(), reason };
    let kind = FileKind::of(path).ok_or_else(|| failed("files end in .json, .jsonl, .parquet or .txt".into()))?;
    if kind == FileKind::Txt {
        if !matches!(source.format, DataFormat::Auto | DataFormat::Text) || !source.columns.is_empty() {
            return Err(failed("a .txt file has no columns: its `format` is \"text\"".into()));
        }
        let tokens = TokenFile::open(path, tokenizer, config.max_length)?;
        let info = FileInfo {
            path: path.into(),
            kind,
            format: DataFormat::Text,
            num_rows: tokens.num_rows(),
            unused_columns: Vec::new(),
            is_eval: false,
        };
        return Ok(DataFile { info, rows: Rows::Windows(tokens), format: RowFormat::text(), first_row: 0 });
    }
    let rows = RowFile::open(path, kind)?;
    let first = rows.read(0)?;
    let format =
        RowFormat::detect(source.format, &source.columns, &first).map_err(|reason| rows.row_error(0, reason))?;
    let info = FileInfo {
        path: path.into(),
        kind: rows.kind(),
        format: format.format(),
        num_rows: rows.num_rows(),
        unused_columns: format.unused_columns(&first),
        is_eval: false,
    };
    Ok(DataFile { info, rows: Rows::Objects(rows), format, first_row: 0 })
}

/// The chat template, if a file needs one.
pub(super) fn open_template(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    files: &[FileInfo],
) -> Result<Option<ChatTemplate>, DataError> {
    let needs = |format| matches!(format, DataFormat::Messages | DataFormat::Sharegpt);
    if !files.iter().any(|file| needs(file.format) || file.format == DataFormat::Alpaca) {
        return Ok(None);
    }
    let template = ChatTemplate::open(&config.chat_template, tokenizer)?;
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
