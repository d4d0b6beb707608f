//! The files that a recipe names.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::HumanBytes;
use serde::{Deserialize, Serialize};

use super::cache::CacheSettings;
use super::error::DataError;
use super::unpack::Compression;
use crate::config::DataFormat;
use crate::hub::{DatasetLayout, Progress};
use crate::images::{Images, has_image_name};
use crate::schema::{did_you_mean, searched_folder};

/// Names of a folder that a message lists.
const MAX_NAMED: usize = 8;

/// How data is opened, besides what the recipe says.
pub struct OpenOptions<'a> {
    /// Where tokens are kept between runs.
    pub cache: CacheSettings,
    /// How the progress of tokenising a large file is shown.
    pub progress: Progress,
    /// How many rows of each file are read; all where absent. A .txt file is read whole.
    pub max_rows: Option<usize>,
    /// Whether to refuse a large file whose tokens are not in the cache, since making them takes long.
    pub refuse_large: bool,
    /// What reads the images of rows; absent: rows with images are refused.
    pub images: Option<Arc<Images>>,
    /// Whether the user wants the command to end.
    pub is_stopped: &'a (dyn Fn() -> bool + Sync),
}

impl Default for OpenOptions<'_> {
    /// Keeps nothing on disk, shows nothing, and is never stopped.
    fn default() -> Self {
        Self {
            cache: CacheSettings::default(),
            progress: Progress::Quiet,
            max_rows: None,
            refuse_large: false,
            images: None,
            is_stopped: &|| false,
        }
    }
}

/// The files that are read, for messages.
pub(super) const ENDINGS: &str = ".csv, .tsv, .json, .jsonl, .parquet or .txt, and .gz or .zst behind it";

/// How a file is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileKind {
    /// Cells separated by commas; the first line names the columns.
    Csv,
    /// Cells separated by tabs; the first line names the columns.
    Tsv,
    /// One JSON array of objects.
    Json,
    /// One JSON object a line.
    JsonLines,
    /// Apache Parquet.
    Parquet,
    /// Plain text.
    Txt,
}

impl FileKind {
    /// The kind of a file by its ending, before that of a compression; `None` for an ending that is not supported.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let packed = Compression::of(path).and_then(|_| path.file_stem());
        match packed.map_or(path, Path::new).extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "csv" => Some(Self::Csv),
            "tsv" => Some(Self::Tsv),
            "json" => Some(Self::Json),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            "txt" => Some(Self::Txt),
            _ => None,
        }
    }

    /// Name of the kind in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Csv => "CSV",
            Self::Tsv => "TSV",
            Self::Json => "JSON array",
            Self::JsonLines => "JSON lines",
            Self::Parquet => "Parquet",
            Self::Txt => "text",
        }
    }

    /// What separates the cells of a row.
    pub(super) fn delimiter(self) -> Option<u8> {
        match self {
            Self::Csv => Some(b','),
            Self::Tsv => Some(b'\t'),
            _ => None,
        }
    }
}

/// What makes Parquet of a folder that `save_to_disk` has written.
const TO_PARQUET: &str = "\n  hint: in Python, `datasets.load_from_disk(FOLDER).to_parquet(\"rows.parquet\")` writes what is; a split of \
                          a `DatasetDict` is a folder of its own";

/// Refuses a folder that `save_to_disk` has written: its rows are in Arrow files, beside notes in JSON.
pub(super) fn refuse_saved(folder: &Path) -> Result<(), String> {
    let has = |note: &str| folder.join(note).is_file();
    if has("dataset_dict.json") || (has("dataset_info.json") && has("state.json")) {
        return Err(format!("is a folder of `save_to_disk`, and Arrow files are not read{TO_PARQUET}"));
    }
    Ok(())
}

/// What to do with a file of another kind.
pub(super) fn unsupported(path: &Path) -> String {
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    let hint = match ending.as_str() {
        "xlsx" | "xls" | "ods" => "\n  hint: save the sheet as CSV",
        "zip" | "xz" | "bz2" | "tar" | "tgz" | "7z" => "\n  hint: unpack it",
        "arrow" => return format!("Arrow files are not read{TO_PARQUET}"),
        "feather" | "pkl" | "pickle" => "\n  hint: pandas writes it as Parquet with `to_parquet`",
        _ => "",
    };
    format!("files end in {ENDINGS}{hint}")
}

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
    /// Number of rows that the file has, where only the first are read; of a .txt file, those that are read.
    pub num_rows_in_file: usize,
    /// Columns that are not read.
    pub unused_columns: Vec<String>,
    /// Says that one of them is, by its name, what the rows are there for, and how to learn it.
    pub unlearnt: Option<String>,
    /// What was taken for granted of its encoding, for the user.
    pub note: Option<String>,
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

/// The files on this machine that match a `path`, sorted. `key` is the path's key in the recipe.
pub(super) fn matching_files(key: &str, pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let literal = PathBuf::from(pattern);
    let failed = |reason: String| DataError::Path { key: key.to_owned(), reason: format!("\"{pattern}\" {reason}") };
    if literal.is_file() {
        return Ok(vec![literal]);
    }
    if literal.is_dir() {
        return files_of_folder(&literal, key.starts_with("data.eval")).map_err(failed);
    }
    // For a pattern, the part before the first folder with a wildcard.
    let fixed: PathBuf =
        literal.components().take_while(|part| !part.as_os_str().to_string_lossy().contains(['*', '?', '['])).collect();
    if !pattern.contains(['*', '?', '[']) {
        let hint = match did_you_mean(&literal) {
            Some(near) => format!("\n  hint: {near}"),
            None if FileKind::of(&literal).is_some() || pattern.starts_with(['.', '/']) => String::new(),
            None => "\n  hint: a data set of the Hub has the form `owner/name`".to_owned(),
        };
        return Err(failed(format!("is no file: looked for in {}{hint}", searched_folder(&literal).display())));
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

/// Files with the rows of a folder's images, of which `datasets` takes one kind alone.
const METADATA: [&str; 3] = ["metadata.csv", "metadata.jsonl", "metadata.parquet"];

/// The data files of a folder, sorted; files with other endings are left out, and so are hidden ones and what lists data sets.
fn files_of_folder(folder: &Path, is_eval: bool) -> Result<Vec<PathBuf>, String> {
    refuse_saved(folder)?;
    let entries = std::fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|error| format!("cannot be read: {error}"))?;
    let mut paths: Vec<PathBuf> = entries.iter().map(std::fs::DirEntry::path).collect();
    paths.sort();
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    paths.retain(|path| !name(path).starts_with('.') && name(path) != "dataset_info.json");
    let is_data = |path: &&PathBuf| path.is_file() && FileKind::of(path).is_some();
    let files: Vec<PathBuf> = paths.iter().filter(is_data).cloned().collect();
    let of_images: Vec<String> = files.iter().map(name).filter(|name| METADATA.contains(&name.as_str())).collect();
    if of_images.len() > 1 {
        return Err(format!(
            "has `{}`, each with rows of the same images\n  hint: name the one that is meant, such as {}",
            of_images.join("` and `"),
            folder.join(&of_images[of_images.len() - 1]).display()
        ));
    }
    if !files.is_empty() {
        let layout = DatasetLayout::of_names(&files.iter().map(name).collect::<Vec<_>>());
        let splits: Vec<&str> = layout.splits().into_iter().collect();
        if splits.len() > 1 {
            let meant = splits.iter().rfind(|split| (**split == "train") != is_eval);
            let meant = meant.unwrap_or(&splits[splits.len() - 1]);
            let is_of_it = |file: &&PathBuf| DatasetLayout::of_names(&[name(file)]).splits().contains(meant);
            let file = files.iter().find(is_of_it).unwrap_or(&files[0]).display();
            return Err(format!(
                "has the splits `{}`\n  hint: beside the path, `split = {meant:?}` takes one, or name its files, such as \
                 {file}",
                splits.join("`, `")
            ));
        }
        return Ok(files);
    }
    let mut names: Vec<String> = paths.iter().map(|path| name(path) + if path.is_dir() { "/" } else { "" }).collect();
    if names.len() > MAX_NAMED {
        names.truncate(MAX_NAMED);
        names.push("...".into());
    }
    let held = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
    let metadata = "\n  hint: the rows of images go beside them, into metadata.jsonl: {\"file_name\": \"a.png\", \"prompt\": \"...\", \
                    \"completion\": \"...\"}";
    let hint = if names.iter().any(|name| has_image_name(name)) { metadata } else { "" };
    Err(format!("is a folder without data files, which end in {ENDINGS}; it has {held}{hint}"))
}
