//! Parquet files as JSON lines.

use std::fs::File;
use std::io::{BufWriter, Write as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::Value;

use super::features::{self, Features};
use crate::util::files;

/// Decodes a Parquet file into an unnamed temporary file of JSON lines.
pub(super) fn as_lines(file: File) -> Result<File, String> {
    let reader = SerializedFileReader::new(file)
        .map_err(|error| format!("not a whole Parquet file: {error}\n  hint: write it, or download it, again"))?;
    let spool = files::temporary()?;
    let mut lines = BufWriter::new(spool);
    let mut metadata = reader.metadata().file_metadata().key_value_metadata().into_iter().flatten();
    let metadata = metadata.find(|pair| pair.key == features::KEY).and_then(|pair| pair.value.as_deref());
    let features = metadata.and_then(Features::of_metadata);
    for (index, row) in reader.get_row_iter(None).map_err(|error| error.to_string())?.enumerate() {
        let row = row.map_err(|error| {
            let reason = error.to_string();
            let is_packed = reason.contains("Disabled feature");
            let hint = if is_packed { "\n  hint: write it with compression snappy, zstd or gzip" } else { "" };
            format!("row {}: {reason}{hint}", index + 1)
        })?;
        let columns = row.get_column_iter().map(|(name, field)| (name.clone(), field_to_json(field)));
        let mut row = Value::Object(columns.collect());
        features.iter().for_each(|features| features.apply(&mut row));
        serde_json::to_writer(&mut lines, &row).map_err(|error| error.to_string())?;
        lines.write_all(b"\n").map_err(|error| format!("cannot write a temporary file: {error}"))?;
    }
    lines.into_inner().map_err(|error| format!("cannot write a temporary file: {error}"))
}

/// A struct without its nulls: all structs of a column have the same fields, so null stands for a key that is not there. What it has as
/// `bytes`, as images of `datasets` are stored, becomes Base64.
fn struct_to_json(row: &Row) -> Value {
    let fields = row.get_column_iter().filter(|(_, field)| !matches!(field, Field::Null));
    let to_json = |(name, field): (&String, &Field)| match field {
        Field::Bytes(bytes) if name == "bytes" => (name.clone(), STANDARD.encode(bytes.data()).into()),
        field => (name.clone(), field_to_json(field)),
    };
    Value::Object(fields.map(to_json).collect())
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
        // As short as it can be written: 0.1, not 0.10000000149011612.
        Field::Float(value) => value.to_string().parse().map_or(Value::Null, |number: f64| number.into()),
        Field::Float16(value) => value.to_string().parse().map_or(Value::Null, |number: f64| number.into()),
        Field::Double(value) => (*value).into(),
        Field::Str(value) => value.as_str().into(),
        Field::Bytes(value) => String::from_utf8_lossy(value.data()).into(),
        Field::Group(row) => struct_to_json(row),
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
