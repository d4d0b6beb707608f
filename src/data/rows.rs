//! Rows of .json, .jsonl, .csv, .tsv and .parquet files, by number.
//!
//! Opening a file reads it once and keeps only the offset where every row starts (8 bytes a row). Rows are then read
//! one by one, so host memory does not grow with the data. Compressed and Parquet files cannot be read this way; they
//! are decoded once into an unnamed temporary file, the latter as JSON lines.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::blocks::{bytes_at, first_bytes, for_each_block};
use super::encoding::Utf8;
use super::error::DataError;
use super::files::FileKind;
use super::unpack::{self, Compression};
use crate::util::panics::guarded;

mod cells;
mod columns;
mod features;
mod scan;

use cells::Cells;
pub(super) use scan::STARTING_BYTES;
use scan::Scan;

/// Bytes at the start of a file of cells that show what separates them.
const SAMPLE_BYTES: u64 = 1 << 16;

/// The rows of one file.
#[derive(Debug)]
pub(super) struct RowFile {
    path: PathBuf,
    kind: FileKind,
    /// The file itself, or the temporary file that it was decoded into.
    file: File,
    /// The columns of a CSV or TSV file.
    cells: Option<Cells>,
    /// What was taken for granted of its encoding, for the user.
    pub(super) note: Option<String>,
    /// Offsets in `file` where every row starts, and the offset where the last one ends.
    bounds: Vec<u64>,
}

impl RowFile {
    /// Finds the rows of `path`, whose extension says `kind`. A .json file with one object a line is read as JSON
    /// lines, and a .jsonl file with one array as JSON. Cells are separated by what separates them in the first rows.
    pub(super) fn open(path: &Path, kind: FileKind) -> Result<Self, DataError> {
        let failed = |reason: String| DataError::File { path: path.to_path_buf(), reason };
        let usual = kind.delimiter();
        let mut scan = usual.map_or_else(Scan::default, |usual| Scan::of_cells(0, usual));
        let is_packed = Compression::of(path).is_some() && kind != FileKind::Parquet;
        let mut watch = |block: &[u8]| if is_packed { scan.feed(block) } else { Ok(()) };
        let file = unpack::open(path, &mut watch).map_err(failed)?;
        let Utf8 { file, note } = if kind == FileKind::Parquet {
            let lines = guarded(|| columns::as_lines(file));
            let file = lines.map_err(|panic| failed(format!("a damaged Parquet file: {panic}")))?.map_err(failed)?;
            Utf8 { file, note: None }
        } else {
            // JSON is UTF-8.
            Utf8::of(file, usual.is_some()).map_err(failed)?
        };
        let unreadable = |error: io::Error| failed(error.to_string());
        let separators = usual.map(|usual| separators(&file, usual)).transpose().map_err(unreadable)?;
        if !is_packed || separators.is_some() {
            let (start, delimiter) = separators.unwrap_or_default();
            scan = if separators.is_some() { Scan::of_cells(start, delimiter) } else { Scan::default() };
            for_each_block(&file, start..u64::MAX, &mut |block| scan.feed(block)).map_err(unreadable)?;
        }
        let (is_array, mut bounds) = scan.finish().map_err(failed)?;
        let cells = match separators {
            Some((_, delimiter)) if bounds.len() > 1 => {
                let header = bytes_at(&file, bounds.remove(0)..bounds[0]).map_err(unreadable)?;
                Some(Cells::of_header(&header, delimiter).map_err(failed)?)
            }
            _ => None,
        };
        let kind = match kind {
            FileKind::Json | FileKind::JsonLines if is_array => FileKind::Json,
            FileKind::Json => FileKind::JsonLines,
            kind => kind,
        };
        if bounds.len() < 2 {
            return Err(failed("the file has no rows".into()));
        }
        let rows = Self { path: path.to_path_buf(), kind, file, cells, note, bounds };
        rows.refuse_open_quote()?;
        Ok(rows)
    }

    /// Refuses a file in which a quote swallows all that follows it.
    fn refuse_open_quote(&self) -> Result<(), DataError> {
        let Some(cells) = &self.cells else { return Ok(()) };
        let last = self.num_rows() - 1;
        cells.refuse_open_quote(&self.bytes(last)?).map_err(|reason| self.row_error(last, reason))
    }

    /// The first rows of a file, as far as they can be read.
    pub(super) fn first_rows(path: &Path, count: usize) -> Vec<Value> {
        let file = FileKind::of(path).and_then(|kind| Self::open(path, kind).ok());
        let rows = file
            .iter()
            .flat_map(|file| (0..file.num_rows().min(count)).map(|row| file.parse(&file.bytes(row).ok()?).ok()));
        rows.flatten().collect()
    }

    pub(super) fn kind(&self) -> FileKind {
        self.kind
    }

    pub(super) fn num_rows(&self) -> usize {
        self.bounds.len() - 1
    }

    /// The first row: it shows the columns of all others.
    pub(super) fn first_row(&self) -> Result<Value, DataError> {
        self.parse(&self.bytes(0)?).map_err(|reason| self.row_error(0, reason))
    }

    /// The bytes of row `index`.
    pub(super) fn bytes(&self, index: usize) -> Result<Vec<u8>, DataError> {
        self.try_bytes(index).map_err(|error| {
            let reason = format!("cannot read row {}: {error}", index + 1);
            DataError::File { path: self.path.clone(), reason }
        })
    }

    fn try_bytes(&self, index: usize) -> io::Result<Vec<u8>> {
        bytes_at(&self.file, self.bounds[index]..self.bounds[index + 1])
    }

    /// Whether rows are lines of a table.
    pub(super) fn has_cells(&self) -> bool {
        self.cells.is_some()
    }

    /// The JSON object that a row's `bytes` are, or why the row cannot be used. Its place is not included: finding its
    /// line takes long.
    pub(super) fn parse(&self, bytes: &[u8]) -> Result<Value, String> {
        if let Some(cells) = &self.cells {
            return cells.row(bytes);
        }
        match json(self.kind, bytes) {
            Ok(row) if row.is_object() => Ok(row),
            Ok(_) => Err("a row must be a JSON object".into()),
            Err(error) => {
                // serde_json counts line and column from the row, not from the file.
                let place = format!(" at line {} column {}", error.line(), error.column());
                let reason = error.to_string();
                let hint = if reason.contains("hex escape") {
                    "\n  hint: half of a pair of `\\u` escapes is no character"
                } else if reason.contains("unicode code point") {
                    "\n  hint: the file is not UTF-8; `iconv` converts other encodings"
                } else if error.is_eof() && self.kind == FileKind::JsonLines {
                    "\n  hint: every row is an object on a line of its own, or all rows are in one array"
                } else if reason.contains("trailing characters") && self.kind == FileKind::JsonLines {
                    "\n  hint: nothing follows a row on its line, such as a comma"
                } else {
                    ""
                };
                Err(format!("not valid JSON: {}{hint}", reason.trim_end_matches(&place)))
            }
        }
    }

    /// A key that an object in a row's `bytes`, which are valid, has twice.
    pub(super) fn double_key(&self, bytes: &[u8]) -> Option<String> {
        if self.cells.is_some() { None } else { double_key(bytes) }
    }

    /// Mean number of bytes of a row.
    pub(super) fn mean_row_bytes(&self) -> usize {
        let all = self.bounds.last().copied().unwrap_or(0) - self.bounds[0];
        usize::try_from(all / self.num_rows() as u64).unwrap_or(usize::MAX)
    }

    /// An error about row `index`, with the file and the row's place in it.
    pub(super) fn row_error(&self, index: usize, reason: String) -> DataError {
        let place = self.places(&[index]).pop().unwrap_or_default();
        DataError::Row { path: self.path.clone(), place, reason }
    }

    /// The places of the rows at ascending `indices`: `line 12`; `12:7` (line and column) for invalid JSON; `row 12` in
    /// a file that has no lines.
    pub(super) fn places(&self, indices: &[usize]) -> Vec<String> {
        let mut places = Vec::with_capacity(indices.len());
        let (mut at, mut line, mut column) = (0, 1, 1);
        for index in indices {
            let place = self.place(*index, &mut at, &mut line, &mut column);
            places.push(place.unwrap_or_else(|_| format!("row {}", index + 1)));
        }
        places
    }

    /// The place of row `index`. `at`, with its line and column, is an earlier offset; it is moved to the row's start.
    fn place(&self, index: usize, at: &mut u64, line: &mut usize, column: &mut usize) -> io::Result<String> {
        let start = self.bounds[index];
        for_each_block(&self.file, *at..start, &mut |block| {
            (*line, *column) = walk(block, *line, *column);
            Ok(())
        })?;
        *at = start;
        if self.cells.is_some() {
            return Ok(format!("line {line}"));
        }
        let row = self.try_bytes(index)?;
        match json(self.kind, &row) {
            Err(error) if self.kind != FileKind::Parquet => {
                let in_lines = row.split_inclusive(|byte| *byte == b'\n').take(error.line() - 1).map(<[u8]>::len);
                let wrong = in_lines.sum::<usize>() + error.column().saturating_sub(1);
                let (line, column) = walk(&row[..wrong.min(row.len())], *line, *column);
                Ok(format!("{line}:{column}"))
            }
            _ if self.kind == FileKind::JsonLines => Ok(format!("line {line}")),
            _ => Ok(format!("row {}", index + 1)),
        }
    }
}

/// The JSON value at the start of `bytes`, which come from a file of this kind.
fn json(kind: FileKind, bytes: &[u8]) -> serde_json::Result<Value> {
    if kind == FileKind::Json {
        // The next element's comma may follow.
        let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>();
        values.next().unwrap_or(Ok(Value::Null))
    } else {
        serde_json::from_slice(bytes.split(|byte| *byte == b'\n').next().unwrap_or_default())
    }
}

/// A key that an object in `json`, which is valid, has twice.
fn double_key(json: &[u8]) -> Option<String> {
    let (mut at, mut text) = (0, &json[..0]);
    let mut objects: Vec<HashSet<&[u8]>> = Vec::new();
    while let Some(byte) = json.get(at) {
        match byte {
            b'"' => {
                let start = at + 1;
                at = start;
                while *json.get(at)? != b'"' {
                    at += if json[at] == b'\\' { 2 } else { 1 };
                }
                text = &json[start..at];
            }
            b'{' => objects.push(HashSet::new()),
            b'}' => drop(objects.pop()),
            b':' if !objects.last_mut()?.insert(text) => return Some(String::from_utf8_lossy(text).into_owned()),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Line and column (in characters) after `bytes`, which start at `line` and `column`.
fn walk(bytes: &[u8], mut line: usize, mut column: usize) -> (usize, usize) {
    for byte in bytes {
        match byte {
            b'\n' => (line, column) = (line + 1, 1),
            // A continuation byte of a UTF-8 character.
            0b1000_0000..=0b1011_1111 => {}
            _ => column += 1,
        }
    }
    (line, column)
}

/// Where the rows of a file of cells begin, and what separates the cells.
fn separators(file: &File, usual: u8) -> io::Result<(u64, u8)> {
    first_bytes(file, SAMPLE_BYTES).map(|start| cells::separators(&start, usual))
}

#[cfg(test)]
mod tests;
