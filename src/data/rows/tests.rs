use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use tempfile::TempDir;

use super::*;

/// The rows of a file with this content, or the error.
fn rows(name: &str, content: impl AsRef<[u8]>) -> Result<Vec<Value>, String> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    read_all(&path).map_err(|error| error.to_string().replace(folder.path().to_str().unwrap(), ""))
}

fn read_all(path: &Path) -> Result<Vec<Value>, DataError> {
    let file = RowFile::open(path, FileKind::of(path).unwrap())?;
    let read = |row| file.parse(&file.bytes(row)?).map_err(|reason| file.row_error(row, reason));
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

/// Writes conversations (lists of role and content), with an id and a score each.
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
fn a_parquet_file_that_is_cut_or_is_none_is_refused_by_its_name() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("r.parquet");
    write_parquet(&path, &[vec![("user", "Hi")], vec![("assistant", "a frog")]]);
    let whole = std::fs::read(&path).unwrap();
    for len in 0..whole.len() {
        let error = rows("r.parquet", &whole[..len]).unwrap_err();
        assert!(error.starts_with("/r.parquet: "), "{len} bytes: {error}");
    }
    let error = rows("r.parquet", "{\"text\": \"a frog\"}\n".repeat(9)).unwrap_err();
    assert!(error.starts_with("/r.parquet: not a whole Parquet file: "), "{error}");
}
