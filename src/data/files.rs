//! Rows of .json, .jsonl and .parquet files, by number.
//!
//! A file is mapped into memory and only the start of every row is kept (8 bytes a row), so opening costs one pass
//! over the bytes and host memory does not grow with the data. Parquet files, which cannot be read row by row, are
//! decoded once into an unnamed temporary file of JSON lines.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::Value;

use super::error::DataError;

/// How a file is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
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
    /// Kind of a file by its name, `None` for a name that is not one of ours.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "json" => Some(Self::Json),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            "txt" => Some(Self::Txt),
            _ => None,
        }
    }

    /// What messages call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Json => "JSON array",
            Self::JsonLines => "JSON lines",
            Self::Parquet => "Parquet",
            Self::Txt => "text",
        }
    }
}

/// The rows of one file.
#[derive(Debug)]
pub(super) struct RowFile {
    path: PathBuf,
    kind: FileKind,
    map: Mmap,
    /// Where every row starts in `map`.
    starts: Vec<u64>,
}

impl RowFile {
    /// Finds the rows of `path`, which is `kind` by its name. A .json file that holds one object a line is read as
    /// such, and a .jsonl file that holds one array as that.
    pub(super) fn open(path: &Path, kind: FileKind) -> Result<Self, DataError> {
        let failed = |reason: String| DataError::File { path: path.to_path_buf(), reason };
        let file = File::open(path).map_err(|error| failed(error.to_string()))?;
        let file = if kind == FileKind::Parquet { parquet_as_lines(file).map_err(failed)? } else { file };
        // SAFETY: the mapping is only read. A file that someone truncates meanwhile would end the process, as with
        // every program that maps its input; parsing copes with any other change.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| failed(error.to_string()))?;
        let body_start = if map.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
        let first = map[body_start..].iter().find(|byte| !byte.is_ascii_whitespace());
        let (kind, starts) = match (kind, first) {
            (FileKind::Parquet, _) => (kind, line_starts(&map, 0)),
            (_, Some(b'[')) => (FileKind::Json, element_starts(&map, body_start).map_err(failed)?),
            (_, Some(b'{')) => (FileKind::JsonLines, line_starts(&map, body_start)),
            (_, None) => (kind, Vec::new()),
            (_, Some(_)) => {
                let hint = "a .json file holds an array of objects, a .jsonl file one object a line";
                return Err(failed(format!("neither starts with `[` nor with `{{`\n  hint: {hint}")));
            }
        };
        if starts.is_empty() {
            return Err(failed("the file has no rows".into()));
        }
        Ok(Self { path: path.to_path_buf(), kind, map, starts })
    }

    pub(super) fn kind(&self) -> FileKind {
        self.kind
    }

    pub(super) fn num_rows(&self) -> usize {
        self.starts.len()
    }

    /// Row `index` as a JSON object.
    pub(super) fn read(&self, index: usize) -> Result<Value, DataError> {
        let bytes = &self.map[to_usize(self.starts[index])..];
        let parsed = if self.kind == FileKind::Json {
            let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>();
            values.next().unwrap_or(Ok(Value::Null))
        } else {
            serde_json::from_slice(bytes.split(|byte| *byte == b'\n').next().unwrap_or_default())
        };
        match parsed {
            Ok(row) if row.is_object() => Ok(row),
            Ok(_) => Err(self.row_error(index, "a row must be a JSON object".into())),
            Err(error) => Err(self.row_error(index, format!("not valid JSON: {error}"))),
        }
    }

    /// An error about row `index`, which names the file and the row's place in it.
    pub(super) fn row_error(&self, index: usize, reason: String) -> DataError {
        let place = if self.kind == FileKind::JsonLines {
            let before = &self.map[..to_usize(self.starts[index])];
            format!("line {}", before.split(|byte| *byte == b'\n').count())
        } else {
            format!("row {}", index + 1)
        };
        DataError::Row { path: self.path.clone(), place, reason }
    }
}

/// Offsets into a mapping came from its length, which is a `usize`.
fn to_usize(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// Starts of the lines that are not blank.
fn line_starts(bytes: &[u8], from: usize) -> Vec<u64> {
    let mut starts = Vec::new();
    let mut start = from;
    for line in bytes[from..].split(|byte| *byte == b'\n') {
        if !line.trim_ascii().is_empty() {
            starts.push(start as u64);
        }
        start += line.len() + 1;
    }
    starts
}

/// Starts of the elements of the array in `bytes`. Only brackets and strings are looked at; that every element is
/// valid is seen when it is read.
fn element_starts(bytes: &[u8], from: usize) -> Result<Vec<u64>, String> {
    let mut starts = Vec::new();
    let (mut depth, mut in_string, mut escaped, mut expects_element) = (0_u32, false, false, false);
    for (at, byte) in bytes.iter().enumerate().skip(from) {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        if expects_element && depth == 1 && !byte.is_ascii_whitespace() && !matches!(byte, b']' | b',') {
            starts.push(at as u64);
            expects_element = false;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                expects_element |= depth == 1;
            }
            b']' | b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    if bytes[at + 1..].iter().any(|byte| !byte.is_ascii_whitespace()) {
                        return Err(format!("text follows the end of the array, at byte {}", at + 1));
                    }
                    return Ok(starts);
                }
            }
            b',' => expects_element |= depth == 1,
            _ => {}
        }
    }
    Err(format!("the array does not end: it has {} elements and then the file stops", starts.len()))
}

/// Decodes a Parquet file into an unnamed temporary file of JSON lines.
fn parquet_as_lines(file: File) -> Result<File, String> {
    let reader = SerializedFileReader::new(file).map_err(|error| error.to_string())?;
    let spool = tempfile::tempfile().map_err(|error| format!("cannot create a temporary file: {error}"))?;
    let mut lines = BufWriter::new(spool);
    for (index, row) in reader.get_row_iter(None).map_err(|error| error.to_string())?.enumerate() {
        let row = row.map_err(|error| format!("row {}: {error}", index + 1))?;
        serde_json::to_writer(&mut lines, &row_to_json(&row)).map_err(|error| error.to_string())?;
        lines.write_all(b"\n").map_err(|error| format!("cannot write a temporary file: {error}"))?;
    }
    lines.into_inner().map_err(|error| format!("cannot write a temporary file: {error}"))
}

fn row_to_json(row: &Row) -> Value {
    Value::Object(row.get_column_iter().map(|(name, field)| (name.clone(), field_to_json(field))).collect())
}

/// Text, numbers, lists and structs as they are; dates and decimals as text.
fn field_to_json(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(value) => (*value).into(),
        Field::Byte(value) => (*value).into(),
        Field::Short(value) => (*value).into(),
        Field::Int(value) => (*value).into(),
        Field::Long(value) => (*value).into(),
        Field::UByte(value) => (*value).into(),
        Field::UShort(value) => (*value).into(),
        Field::UInt(value) => (*value).into(),
        Field::ULong(value) => (*value).into(),
        Field::Float(value) => f64::from(*value).into(),
        Field::Double(value) => (*value).into(),
        Field::Str(value) => value.as_str().into(),
        Field::Bytes(value) => String::from_utf8_lossy(value.data()).into(),
        Field::Group(row) => row_to_json(row),
        Field::ListInternal(list) => list.elements().iter().map(field_to_json).collect(),
        Field::MapInternal(map) => Value::Object(
            map.entries()
                .iter()
                .map(|(key, value)| {
                    let key = field_to_json(key);
                    (key.as_str().map_or_else(|| key.to_string(), str::to_owned), field_to_json(value))
                })
                .collect(),
        ),
        other => other.to_string().into(),
    }
}

#[cfg(test)]
mod tests;
