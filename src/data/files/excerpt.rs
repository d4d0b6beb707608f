//! Some rows of a file, spread over it, and how many it has: a file of any size is looked at in a moment.

use std::fs::File;
use std::io;
use std::path::Path;

use serde_json::Value;

use super::scan::Scan;
use super::{FileKind, RowFile, columns, parse_row, read_exact_at};
use crate::data::error::DataError;
use crate::panics::guarded;

/// Places of a large file at which rows are read.
const NUM_PLACES: usize = 32;
/// Bytes that are read at each: a row that is longer is not read here.
const PLACE_BYTES: usize = 256 << 10;
/// Bytes of a large array that are read: where its rows start is known from its beginning on only.
const ARRAY_BYTES: usize = 8 << 20;

/// Some rows of a file.
#[derive(Debug)]
pub(in crate::data) struct Excerpt {
    /// In the order of the file.
    pub(in crate::data) rows: Vec<ExcerptRow>,
    /// Rows of the whole file.
    pub(in crate::data) num_rows: u64,
    /// They were counted; else they follow from bytes.
    pub(in crate::data) is_counted: bool,
}

/// One of them.
#[derive(Clone, Debug)]
pub(in crate::data) struct ExcerptRow {
    /// Its size in the file, or as JSON.
    pub(in crate::data) bytes: usize,
    /// The row, or why it cannot be used; `None`: it is too long to be looked at.
    pub(in crate::data) value: Option<Result<Value, String>>,
}

impl ExcerptRow {
    fn parse(kind: FileKind, bytes: &[u8]) -> Self {
        Self { bytes: bytes.len(), value: Some(parse_row(kind, bytes)) }
    }

    fn too_long(bytes: usize) -> Self {
        Self { bytes, value: None }
    }
}

impl Excerpt {
    /// About `wanted` rows of `path`, which is `kind` by its name. Rows of files below `counted_bytes` are counted.
    ///
    /// # Errors
    /// A file that cannot be read, or has no row.
    pub(in crate::data) fn open(
        path: &Path,
        kind: FileKind,
        wanted: usize,
        counted_bytes: u64,
    ) -> Result<Self, DataError> {
        let failed = |reason: String| DataError::File { path: path.to_path_buf(), reason };
        let file = File::open(path).map_err(|error| failed(error.to_string()))?;
        let len = file.metadata().map_err(|error| failed(error.to_string()))?.len();
        let excerpt = if kind == FileKind::Parquet {
            let some = guarded(|| columns::some_rows(file, wanted));
            let (rows, num_rows) =
                some.map_err(|panic| failed(format!("a damaged Parquet file: {panic}")))?.map_err(failed)?;
            let row = |value: Value| ExcerptRow { bytes: value.to_string().len(), value: Some(Ok(value)) };
            Ok(Self { rows: rows.into_iter().map(row).collect(), num_rows, is_counted: true })
        } else if len < counted_bytes {
            Self::of_rows(&RowFile::open(path, kind)?, wanted)
        } else {
            Self::of_large(&file, len, wanted)
        };
        let excerpt = excerpt.map_err(|error| failed(error.to_string()))?;
        if excerpt.rows.is_empty() { Err(failed("no row was found in it".into())) } else { Ok(excerpt) }
    }

    fn of_rows(file: &RowFile, wanted: usize) -> io::Result<Self> {
        let num_rows = file.num_rows();
        let wanted = wanted.min(num_rows);
        let read = |index: usize| {
            let (start, end) = (file.bounds[index], file.bounds[index + 1]);
            let bytes = usize::try_from(end - start).unwrap_or(usize::MAX);
            if bytes > PLACE_BYTES {
                Ok(ExcerptRow::too_long(bytes))
            } else {
                read_row(&file.file, file.kind, start, bytes)
            }
        };
        let rows = (0..wanted).map(|index| read(index * num_rows / wanted)).collect::<io::Result<_>>()?;
        Ok(Self { rows, num_rows: num_rows as u64, is_counted: true })
    }

    fn of_large(file: &File, len: u64, wanted: usize) -> io::Result<Self> {
        let mut scan = Scan::default();
        scan.feed(&read(file, 0, len, PLACE_BYTES)?);
        if scan.is_array() {
            return Self::of_array(file, len, wanted);
        }
        let (mut places, mut line_ends, mut bytes) = (Vec::new(), 0_u64, 0_u64);
        for place in 0..NUM_PLACES {
            let at = len.saturating_sub(PLACE_BYTES as u64) / (NUM_PLACES - 1) as u64 * place as u64;
            let block = read(file, at, len, PLACE_BYTES)?;
            let is_row = |line: &&[u8]| line.ends_with(b"\n") && !line.trim_ascii().is_empty();
            let lines: Vec<&[u8]> = block.split_inclusive(|byte| *byte == b'\n').filter(is_row).collect();
            line_ends += lines.len() as u64;
            bytes += block.len() as u64;
            // The first one may have started before.
            let whole = &lines[usize::from(at > 0).min(lines.len())..];
            let here = whole.len().min(wanted.div_ceil(NUM_PLACES));
            let row = |row: usize| ExcerptRow::parse(FileKind::JsonLines, whole[row * whole.len() / here]);
            places.push(if whole.is_empty() {
                (1, vec![ExcerptRow::too_long(block.len())])
            } else {
                (whole.len() as u64, (0..here).map(row).collect())
            });
        }
        // Where rows are short there are more of them.
        let rows = in_shares(&places, wanted.max(NUM_PLACES));
        Ok(Self { rows, num_rows: in_proportion(line_ends, len, bytes), is_counted: false })
    }

    fn of_array(file: &File, len: u64, wanted: usize) -> io::Result<Self> {
        let mut scan = Scan::default();
        scan.feed(&read(file, 0, len, ARRAY_BYTES)?);
        let starts = scan.starts();
        let whole = starts.len().saturating_sub(1);
        let wanted = wanted.min(whole);
        let row = |index: usize| {
            let (start, end) = (starts[index], starts[index + 1]);
            let bytes = usize::try_from(end - start).unwrap_or(usize::MAX);
            if bytes > PLACE_BYTES {
                Ok(ExcerptRow::too_long(bytes))
            } else {
                read_row(file, FileKind::Json, start, bytes)
            }
        };
        let rows: Vec<ExcerptRow> = (0..wanted).map(|index| row(index * whole / wanted)).collect::<io::Result<_>>()?;
        let spanned = starts.last().zip(starts.first()).map_or(0, |(last, first)| last - first);
        Ok(Self { rows, num_rows: in_proportion(whole as u64, len, spanned), is_counted: false })
    }
}

/// `wanted` of the items of several parts, of each as many as its weight says, spread over it; some of them more than once
/// where a part has too few. A part without items has none, whatever its weight.
pub(in crate::data) fn in_shares<T: Clone>(parts: &[(u64, Vec<T>)], wanted: usize) -> Vec<T> {
    let parts = || parts.iter().filter(|(_, items)| !items.is_empty());
    let all: u128 = parts().map(|(weight, _)| u128::from(*weight)).sum();
    let mut found = Vec::with_capacity(wanted);
    let mut before: u128 = 0;
    for (weight, items) in parts() {
        before += u128::from(*weight);
        // Together they are as many as are wanted, however each is rounded.
        let until = usize::try_from(before * wanted as u128 / all.max(1)).unwrap_or(wanted);
        let quota = until.saturating_sub(found.len());
        found.extend((0..quota).map(|index| items[index * items.len() / quota].clone()));
    }
    found
}

fn read_row(file: &File, kind: FileKind, start: u64, bytes: usize) -> io::Result<ExcerptRow> {
    let mut row = vec![0; bytes];
    read_exact_at(file, &mut row, start)?;
    Ok(ExcerptRow::parse(kind, &row))
}

/// At most so many bytes from `at`.
fn read(file: &File, at: u64, len: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let mut block = vec![0; usize::try_from(len - at).unwrap_or(bytes).min(bytes)];
    read_exact_at(file, &mut block, at)?;
    Ok(block)
}

/// Rows of `len` bytes where `bytes` of them hold `rows`; at least one.
fn in_proportion(rows: u64, len: u64, bytes: u64) -> u64 {
    let all = u128::from(rows) * u128::from(len) / u128::from(bytes.max(1));
    u64::try_from(all).unwrap_or(u64::MAX).max(1)
}
