use std::io::Write as _;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::column::writer::ColumnCloseResult;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use tempfile::TempDir;

use super::*;

/// The rows of a file with this content, or what is wrong.
fn rows(name: &str, content: impl AsRef<[u8]>) -> Result<Vec<Value>, String> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    read_all(&path).map_err(|error| error.to_string().replace(folder.path().to_str().unwrap(), ""))
}

fn read_all(path: &Path) -> Result<Vec<Value>, DataError> {
    let file = RowFile::open(path, FileKind::of(path).unwrap())?;
    let read = |row| {
        file.read(row).map_err(|problem| match problem {
            RowProblem::Bad(reason) => file.row_error(row, reason),
            RowProblem::Failed(error) => error,
        })
    };
    (0..file.num_rows()).map(read).collect()
}

#[test]
fn lines_are_rows_whatever_ends_them() {
    let expected = [json!({"a": "é{[\"\n"}), json!({"a": 2})];
    let lines = "{\"a\": \"é{[\\\"\\n\"}\r\n\n   \n{\"a\": 2}";
    assert_eq!(rows("r.jsonl", lines).unwrap(), expected);
    assert_eq!(rows("r.JSONL", format!("\u{feff}{lines}\n")).unwrap(), expected);
    assert_eq!(rows("lines.json", lines).unwrap(), expected, "one object a line in a .json file");
}

#[test]
fn elements_of_an_array_are_rows() {
    let array = " [ {\"a\": \"]},[\\\\\", \"b\": [{\"c\": []}, []]},\n{\"a\": {\"b\": \"\\\"}\"}} ,{}] \n";
    let expected = [json!({"a": "]},[\\", "b": [{"c": []}, []]}), json!({"a": {"b": "\"}"}}), json!({})];
    assert_eq!(rows("r.json", array).unwrap(), expected);
    assert_eq!(rows("r.jsonl", array).unwrap(), expected, "an array in a .jsonl file");
}

#[test]
fn a_bad_row_is_named_by_its_line_or_number() {
    let cases = [
        ("r.jsonl", "{\"a\": 1}\n\n{\"a\": }\n", "/r.jsonl:3:7: not valid JSON: expected value"),
        ("r.jsonl", "{\"é\": 1}\n{\"é\": oops}\n", "/r.jsonl:2:7: not valid JSON: expected value"),
        ("r.json", "[{\"a\": 1},\n  {\n \"a\": }]", "/r.json:3:7: not valid JSON: expected value"),
        ("r.jsonl", "{\"a\": 1}\n[1]\n", "/r.jsonl:line 2: a row must be a JSON object"),
        ("r.jsonl", "{\"a\": 1} {\"a\": 2}\n", "/r.jsonl:1:10: not valid JSON: trailing characters"),
        ("r.json", "[{\"a\": 1}, 7]", "/r.json:row 2: a row must be a JSON object"),
        ("r.json", "[{\"a\": 1}, {\"a\": 01}]", "/r.json:1:19: not valid JSON: invalid number"),
        ("r.json", "{\n \"a\": 1\n}", "/r.json:1:1: not valid JSON: EOF while parsing an object"),
        ("r.json", "[{\"a\": 1}, {\"a\"", "/r.json: the array does not end: it has 2 elements and then the file stops"),
        ("r.json", "[{\"a\": 1}] x", "/r.json: text follows the end of the array, at byte 11"),
        ("r.json", "[]", "/r.json: the file has no rows"),
        ("r.jsonl", "\n \n", "/r.jsonl: the file has no rows"),
        ("r.jsonl", "", "/r.jsonl: the file has no rows"),
        ("r.json", "a,b\n1,2\n", "/r.json: starts neither with `[` nor with `{`\n  hint: a .json file holds an array"),
        ("r.parquet", "PAR0", "/r.parquet: "),
    ];
    for (name, content, message) in cases {
        let error = rows(name, content).unwrap_err();
        assert!(error.starts_with(message), "{content:?}: {error}");
    }
    let invalid = rows("r.jsonl", b"{\"a\": \"\xff\"}\n").unwrap_err();
    assert!(invalid.starts_with("/r.jsonl:1:8: not valid JSON"), "{invalid}");
}

/// Writes conversations of (role, content), an id and a score.
fn write_parquet(path: &Path, conversations: &[Vec<(&str, &str)>]) {
    let schema = "message rows {
        required int64 id;
        optional double score;
        optional group messages (LIST) { repeated group list { optional group element {
            optional binary role (UTF8);
            optional binary content (UTF8);
        } } }
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    // Two row groups.
    for group in conversations.chunks(conversations.len().div_ceil(2)) {
        let mut columns = writer.next_row_group().unwrap();
        let ids: Vec<i64> = (0_i64..).take(group.len()).collect();
        let mut column = columns.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let mut column = columns.next_column().unwrap().unwrap();
        let defined: Vec<i16> = ids.iter().map(|id| i16::from(*id == 0)).collect();
        column.typed::<DoubleType>().write_batch(&[0.5], Some(&defined), None).unwrap();
        column.close().unwrap();
        for part in 0..2 {
            let texts = group.iter().flatten().map(|turn| ByteArray::from(if part == 0 { turn.0 } else { turn.1 }));
            let texts: Vec<ByteArray> = texts.collect();
            let repeated: Vec<i16> =
                group.iter().flat_map(|turns| (0..turns.len()).map(|i| i16::from(i > 0))).collect();
            let mut column = columns.next_column().unwrap().unwrap();
            let defined = vec![4; texts.len()];
            column.typed::<ByteArrayType>().write_batch(&texts, Some(&defined), Some(&repeated)).unwrap();
            column.close().unwrap();
        }
        columns.close().unwrap();
    }
    writer.close().unwrap();
}

#[test]
fn parquet_rows_with_lists_of_structs_are_read() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("r.parquet");
    write_parquet(&path, &[vec![("user", "hé"), ("assistant", "yo\n")], vec![("user", "a")], vec![("user", "b")]]);
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    assert_eq!(
        read_all(&path).unwrap(),
        [
            json!({"id": 0, "score": 0.5, "messages": [message("user", "hé"), message("assistant", "yo\n")]}),
            json!({"id": 1, "score": null, "messages": [message("user", "a")]}),
            json!({"id": 0, "score": 0.5, "messages": [message("user", "b")]}),
        ]
    );
    let file = RowFile::open(&path, FileKind::Parquet).unwrap();
    assert!(file.row_error(2, "no".into()).to_string().ends_with("r.parquet:row 3: no"));
}

#[test]
fn every_changed_byte_of_a_parquet_file_is_read_or_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("r.parquet");
    write_parquet(&path, &[vec![("user", "Hi")], vec![("assistant", "a frog")]]);
    let whole = std::fs::read(&path).unwrap();
    for index in 0..whole.len() {
        for mask in [1, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[index] ^= mask;
            // Rows, or what is wrong: never a panic, of which the library has many.
            drop(rows("r.parquet", bytes));
        }
    }
}

#[test]
fn a_parquet_file_without_columns_has_no_rows_whatever_it_says() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("r.parquet");
    let schema = Arc::new(parse_message_type("message rows { }").unwrap());
    let properties = Arc::new(WriterProperties::builder().build());
    SerializedFileWriter::new(File::create(&path).unwrap(), schema, properties).unwrap().close().unwrap();
    let error = rows("r.parquet", std::fs::read(&path).unwrap()).unwrap_err();
    assert!(error.contains("the file has no columns"), "{error}");
}

/// A Parquet file of one text, whose page says that it unpacks to `unpacked` bytes, and whose header ends with `end`.
fn with_a_page_of(unpacked: u32, end: u8) -> Vec<u8> {
    let varint = |number: u32| -> Vec<u8> {
        let zigzag = u64::from(number) << 1;
        (0..5).map(|index| (zigzag >> (7 * index)) as u8 & 127 | if index < 4 { 128 } else { 0 }).collect()
    };
    // A text of five bytes behind its length, as Snappy packs what has no repetition, and the head of such a page.
    let packed = [&[9, 8 << 2][..], &5_u32.to_le_bytes(), b"a fro"].concat();
    let header = [&[0x15, 0, 0x15][..], &varint(unpacked), &[0x15], &varint(packed.len() as u32)].concat();
    let page = [&header[..], &[0x2c, 0x15, 2, 0x15, 0, 0x15, 6, 0x15, 6, 0, end], &packed].concat();
    let schema = Arc::new(parse_message_type("message rows { required binary text (UTF8); }").unwrap());
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::default()).unwrap();
    let column = writer.schema_descr().column(0);
    let len = i64::try_from(page.len()).unwrap();
    let metadata = ColumnChunkMetaData::builder(column)
        .set_compression(Compression::SNAPPY)
        .set_data_page_offset(0)
        .set_num_values(1)
        .set_total_compressed_size(len)
        .set_total_uncompressed_size(len)
        .build()
        .unwrap();
    let (bytes_written, rows_written) = (page.len() as u64, 1);
    let (bloom_filter, column_index, offset_index) = (None, None, None);
    let closed = ColumnCloseResult { bytes_written, rows_written, metadata, bloom_filter, column_index, offset_index };
    let mut group = writer.next_row_group().unwrap();
    let mut chunk = tempfile::tempfile().unwrap();
    chunk.write_all(&page).unwrap();
    group.append_column(&chunk, closed).unwrap();
    group.close().unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn a_page_of_some_bytes_that_says_it_has_gigabytes_is_refused_before_it_is_unpacked() {
    assert_eq!(rows("r.parquet", with_a_page_of(9, 0)).unwrap(), [json!({"text": "a fro"})]);
    for (gigabytes, end) in [(1 << 30, 0), (i32::MAX as u32, 0), (1 << 30, 0x10)] {
        let error = rows("r.parquet", with_a_page_of(gigabytes, end)).unwrap_err();
        assert!(
            error.contains("made to fill memory: ") && error.contains(" of row group 1 are to unpack to "),
            "{error}"
        );
    }
}

/// 20 bytes that ask for a hundred gigabytes of columns.
#[test]
fn a_footer_of_some_bytes_that_says_it_lists_millions_is_refused() {
    let footer = [&[0x15, 2, 0x19, 0xfc][..], &[0xff, 0xff, 0xff, 0x7f]].concat();
    let file = [b"PAR1", &footer[..], &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat();
    let error = rows("r.parquet", file).unwrap_err();
    assert!(error.starts_with("/r.parquet: "), "{error}");
}
