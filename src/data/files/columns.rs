//! Parquet files as JSON lines.

use std::fs::File;
use std::io::{BufWriter, Write as _};

use indicatif::HumanBytes;
use parquet::basic::Compression;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::Value;

use super::footer::check_schema;
use super::pages::PageSizes;

/// Bytes that the pages of a row group that are in memory together may have unpacked, whatever they have packed.
const FREE_PAGE_BYTES: u64 = 64 << 20;
/// How far packed bytes may unpack beyond that: as far as DEFLATE can.
const MAX_UNPACKING: u64 = 1032;
/// Row groups of which rows are taken where some are enough.
const MAX_SAMPLED_GROUPS: usize = 8;

/// Decodes a Parquet file into an unnamed temporary file of JSON lines.
pub(super) fn as_lines(file: File) -> Result<File, String> {
    let num_bytes = file.metadata().map_err(|error| error.to_string())?.len();
    let pages = file.try_clone().map_err(|error| error.to_string())?;
    check_schema(&file)?;
    let reader = SerializedFileReader::new(file)
        .map_err(|error| format!("not a whole Parquet file: {error}\n  hint: write it, or download it, again"))?;
    check_columns(reader.metadata(), num_bytes)?;
    for group in 0..reader.num_row_groups() {
        check_pages(&pages, reader.metadata(), group)?;
    }
    let spool = tempfile::tempfile().map_err(|error| format!("cannot create a temporary file: {error}"))?;
    let mut lines = BufWriter::new(spool);
    for (index, row) in reader.get_row_iter(None).map_err(|error| error.to_string())?.enumerate() {
        let row = row.map_err(|error| format!("row {}: {error}", index + 1))?;
        serde_json::to_writer(&mut lines, &row_to_json(&row)).map_err(|error| error.to_string())?;
        lines.write_all(b"\n").map_err(|error| format!("cannot write a temporary file: {error}"))?;
    }
    lines.into_inner().map_err(|error| format!("cannot write a temporary file: {error}"))
}

/// At most `wanted` rows of a Parquet file, the first ones of row groups spread over it, and the number of its rows.
pub(super) fn some_rows(file: File, wanted: usize) -> Result<(Vec<Value>, u64), String> {
    let num_bytes = file.metadata().map_err(|error| error.to_string())?.len();
    let pages = file.try_clone().map_err(|error| error.to_string())?;
    check_schema(&file)?;
    let reader = SerializedFileReader::new(file).map_err(|error| error.to_string())?;
    check_columns(reader.metadata(), num_bytes)?;
    let num_rows = u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
    let groups = reader.num_row_groups();
    let visited = groups.min(MAX_SAMPLED_GROUPS);
    let mut rows = Vec::new();
    for group in (0..visited).map(|index| index * groups / visited) {
        check_pages(&pages, reader.metadata(), group)?;
        let group = reader.get_row_group(group).map_err(|error| error.to_string())?;
        for row in group.get_row_iter(None).map_err(|error| error.to_string())?.take(wanted.div_ceil(visited)) {
            rows.push(row_to_json(&row.map_err(|error| error.to_string())?));
        }
    }
    Ok((rows, num_rows))
}

/// Holds that every column lies within the file: its pages are read into memory by the lengths that the file gives.
/// Without columns, a file of some bytes could have any number of rows.
fn check_columns(metadata: &ParquetMetaData, num_bytes: u64) -> Result<(), String> {
    if metadata.file_metadata().schema_descr().num_columns() == 0 {
        return Err("the file has no columns".into());
    }
    let ranges = metadata.row_groups().iter().flat_map(RowGroupMetaData::columns).map(ColumnChunkMetaData::byte_range);
    let is_within = |(start, len): (u64, u64)| start.checked_add(len).is_some_and(|end| end <= num_bytes);
    let mut ranges = ranges.map(is_within);
    if ranges.all(|is_within| is_within) {
        Ok(())
    } else {
        Err("damaged: a column lies beyond the end of the file".into())
    }
}

/// Holds that the pages of a row group, which are unpacked into memory of the size that they name, name sizes in proportion
/// to their bytes.
/// In memory together are a dictionary and a page of each column.
fn check_pages(file: &File, metadata: &ParquetMetaData, index: usize) -> Result<(), String> {
    let columns = metadata.row_group(index).columns();
    let packed = columns.iter().filter(|column| column.compression() != Compression::UNCOMPRESSED);
    let (mut packed_bytes, mut unpacked_bytes) = (0_u64, 0_u64);
    for column in packed {
        let (start, len) = column.byte_range();
        let sizes = PageSizes::of(file, start, len)
            .ok_or("damaged: the header of a page is not laid out as the format says")?;
        packed_bytes = packed_bytes.saturating_add(len);
        unpacked_bytes = unpacked_bytes.saturating_add(sizes.largest_dictionary).saturating_add(sizes.largest_page);
    }
    if unpacked_bytes > packed_bytes.saturating_mul(MAX_UNPACKING).saturating_add(FREE_PAGE_BYTES) {
        let (packed, unpacked) = (HumanBytes(packed_bytes), HumanBytes(unpacked_bytes));
        return Err(format!(
            "damaged, or made to fill memory: {packed} of row group {} are to unpack to {unpacked}",
            index + 1
        ));
    }
    Ok(())
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
