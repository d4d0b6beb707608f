//! Parquet files as JSON lines.

use std::fs::File;
use std::io::{BufWriter, Write as _};

use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::Value;

/// Decodes a Parquet file into an unnamed temporary file of JSON lines.
pub(super) fn as_lines(file: File) -> Result<File, String> {
    let reader = SerializedFileReader::new(file)
        .map_err(|error| format!("not a whole Parquet file: {error}\n  hint: write it, or download it, again"))?;
    let spool = tempfile::tempfile().map_err(|error| format!("cannot create a temporary file: {error}"))?;
    let mut lines = BufWriter::new(spool);
    for (index, row) in reader.get_row_iter(None).map_err(|error| error.to_string())?.enumerate() {
        let row = row.map_err(|error| {
            let reason = error.to_string();
            let is_packed = reason.contains("Disabled feature");
            let hint = if is_packed { "\n  hint: write it with compression snappy, zstd or gzip" } else { "" };
            format!("row {}: {reason}{hint}", index + 1)
        })?;
        serde_json::to_writer(&mut lines, &row_to_json(&row)).map_err(|error| error.to_string())?;
        lines.write_all(b"\n").map_err(|error| format!("cannot write a temporary file: {error}"))?;
    }
    lines.into_inner().map_err(|error| format!("cannot write a temporary file: {error}"))
}

fn row_to_json(row: &Row) -> Value {
    Value::Object(row.get_column_iter().map(|(name, field)| (name.clone(), field_to_json(field))).collect())
}

/// Text, numbers, lists and structs keep their type; dates and decimals become text.
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
