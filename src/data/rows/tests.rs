use parquet::data_type::{ByteArrayType, FloatType, Int64Type};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::data::fixture::{packed, write_parquet};

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
        ("r.json", "{\n \"a\": 1\n}", "/r.json:1:1: not valid JSON: EOF while parsing an object\n  hint: every row is"),
        (
            "r.jsonl",
            "{\"a\": \"\\ud83d\"}",
            "/r.jsonl:1:14: not valid JSON: unexpected end of hex escape\n  hint: half of a",
        ),
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

#[test]
fn cells_are_texts_and_quotes_hold_separators_line_ends_and_quotes() {
    let row = |a: &str, b: &str| json!({"a": a, "b é": b});
    let expected = [row("1, 2", "x\n\"y\"\r\n"), row("", "5\" disk"), row(" z ", "{\"c\": 1}")];
    let text = "a,b é\r\n\r\n\"1, 2\",\"x\n\"\"y\"\"\r\n\"\r\n,5\" disk\n\n z ,\"{\"\"c\"\": 1}\"";
    assert_eq!(rows("r.csv", text).unwrap(), expected);
    assert_eq!(rows("r.CSV", format!("\u{feff}{text}\n")).unwrap(), expected);
    let tabs = "a\tb é\n1, 2\t\"x\n\"\"y\"\"\r\n\"\n\t5\" disk\n z \t{\"c\": 1}\n";
    assert_eq!(rows("r.tsv", tabs).unwrap(), expected);
    assert_eq!(rows("r.csv", "text\nab\n\"\"\n").unwrap(), [json!({"text": "ab"}), json!({"text": ""})]);
    assert_eq!(rows("r.csv", ",text\n0,ab\n").unwrap(), [json!({"column 1": "0", "text": "ab"})]);
}

#[test]
fn a_bad_row_of_cells_is_named_by_its_line() {
    let cases: [(&str, &[u8], &str); 10] = [
        ("r.csv", b"a,b\n\"x\ny\",1\n\n1,2,3\n", "/r.csv:line 5: has 3 cells, and the first line names 2 columns"),
        ("r.csv", b"a,b\n1\n", "/r.csv:line 2: has 1 cells, and the first line names 2"),
        ("r.tsv", b"a\tb\n1,2\n", "/r.tsv:line 2: has 1 cells"),
        ("r.csv", b"a,b\n1,\"x\n2,y\n3,z\n", "/r.csv:line 2: opens a quote that nothing closes"),
        ("r.csv", b"a,b\n1,\"x\" y\n", "/r.csv:line 2: has text after a closing quote\n  hint: a quote in"),
        ("r.csv", b"a,b\n1,\xc3\xa9\n2,\xe9\n", "/r.csv:line 3: not UTF-8\n  hint: `iconv`"),
        ("r.csv", b"\x1f\x8b\x08\0", "/r.csv: is packed by gzip\n  hint: end its name in .gz"),
        ("r.csv", b"a,b,a\n1,2,3\n", "/r.csv: its first line names `a` twice"),
        ("r.csv", b"a,b\n", "/r.csv: the file has no rows"),
        ("r.csv", b"\n", "/r.csv: the file has no rows"),
    ];
    for (name, content, message) in cases {
        let error = rows(name, content).unwrap_err();
        assert!(error.starts_with(message), "{}: {error}", String::from_utf8_lossy(content));
    }
}

#[test]
fn cells_are_separated_by_what_separates_them_in_the_first_rows() {
    let row = |a: &str, b: &str| json!({"a": a, "b": b});
    for (name, text, expected) in [
        ("r.csv", "a;b\n1,5;2,5,1\n3;\"4;\n5\"\n", [row("1,5", "2,5,1"), row("3", "4;\n5")]),
        ("r.csv", "\u{feff}a\tb\n1;2\t3;4\n5\t6\n", [row("1;2", "3;4"), row("5", "6")]),
        ("r.csv", "a|b\r\n1|2,3\r\n4|5,6\r\n", [row("1", "2,3"), row("4", "5,6")]),
        ("r.tsv", "a,b\n1,2\n3,4\n", [row("1", "2"), row("3", "4")]),
        // As Excel says it.
        ("r.csv", "\u{feff}sep=;\r\na;b\r\n1,2;3,4\r\n5;6\r\n", [row("1,2", "3,4"), row("5", "6")]),
    ] {
        assert_eq!(rows(name, text).unwrap(), expected, "{text}");
    }
    // The usual separator goes before others that divide as many rows, and not before one that divides more.
    assert_eq!(rows("r.csv", "a,b;c\n1,2;3\n").unwrap(), [json!({"a": "1", "b;c": "2;3"})]);
    assert_eq!(rows("r.csv", "a, b;c\n1;2\n").unwrap(), [json!({"a, b": "1", "c": "2"})]);
    assert!(rows("r.csv", "text\na, b; c\n").unwrap_err().contains("has 2 cells, and the first line names 1"));
    let error = rows("r.csv", "sep=;\na;b\n1;2\n3\n").unwrap_err();
    assert!(error.starts_with("/r.csv:line 4: has 1 cells"), "{error}");
}

#[test]
fn what_excel_writes_is_read_in_its_encoding() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("r.csv");
    // A sequence of UTF-8 may lie across two blocks, and one is no more than the bytes that stand alone.
    let filling = "x".repeat(crate::data::blocks::BLOCK_BYTES - 8);
    let latin = [b"a;b\r\nF\xf6n;80 \x80\r\n", filling.as_bytes(), b";Gr\xfc\xdf\xc3\xa9\r\n"].concat();
    std::fs::write(&path, &latin).unwrap();
    assert_eq!(read_all(&path).unwrap(), [json!({"a": "Fön", "b": "80 €"}), json!({"a": filling, "b": "GrüßÃ©"})]);
    let note = RowFile::open(&path, FileKind::Csv).unwrap().note.unwrap();
    assert!(note.starts_with("not UTF-8: read as Windows-1252") && note.contains("\"Fön\""), "{note}");

    // Hardly a letter is ASCII: Russian in Windows-1251.
    assert!(
        rows("r.csv", b"a;b\r\n\xc2\xee\xef\xf0\xee\xf1;\xce\xf2\xe2\xe5\xf2\r\n").unwrap_err().contains("not UTF-8")
    );

    let utf8 = format!("a,b\nö,é{filling}ü,ß\n").replacen("ü,", "ü", 1);
    std::fs::write(&path, &utf8).unwrap();
    assert_eq!(RowFile::open(&path, FileKind::Csv).unwrap().note, None);

    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let big: Vec<u8> = "\u{feff}a\tb\n1\té\n".encode_utf16().flat_map(u16::to_be_bytes).collect();
    assert_eq!(rows("r.csv", utf16("\u{feff}a\tb\r\n1\té\r\n")).unwrap(), [json!({"a": "1", "b": "é"})]);
    assert_eq!(rows("r.tsv", big).unwrap(), [json!({"a": "1", "b": "é"})]);
    assert_eq!(rows("r.jsonl", utf16("\u{feff}{\"a\": \"é\"}\n")).unwrap(), [json!({"a": "é"})]);
    let half = utf16("\u{feff}a,b\n1,\n").split_last().unwrap().1.to_vec();
    assert_eq!(rows("r.csv", half).unwrap_err(), "/r.csv: is not valid UTF-16LE");
}

#[test]
fn compressed_files_have_the_rows_and_places_of_their_content() {
    let text = "{\"a\": 1}\n{\"a\": }\n";
    for (ending, of_half) in [("gz", "unexpected end of file"), ("zst", "incomplete frame")] {
        let name = format!("r.jsonl.{ending}");
        let packed = packed(&name, text.as_bytes());
        assert_eq!(rows(&name, packed.clone()).unwrap_err(), format!("/{name}:2:7: not valid JSON: expected value"));
        let twice = [packed.clone(), packed.clone()].concat();
        assert!(rows(&name, twice).unwrap_err().starts_with(&format!("/{name}:2:7")), "members follow each other");
        let error = rows(&name, &packed[..packed.len() - 3]).unwrap_err();
        assert!(error.contains(of_half) && error.contains("download it, again"), "{error}");
        let error = rows(&name, text).unwrap_err();
        assert!(error.starts_with(&format!("/{name}: cannot be unpacked as .{ending}: ")), "{error}");
    }
}

#[test]
fn a_file_that_unpacks_without_end_is_refused() {
    let bomb = packed("r.jsonl.zst", &vec![b' '; 65 << 20]);
    assert!(bomb.len() < 65_000, "{} bytes", bomb.len());
    let error = rows("r.jsonl.zst", bomb).unwrap_err();
    assert_eq!(error, "/r.jsonl.zst: unpacks to more than 1000 times its size: not a file of rows");
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
fn nulls_of_structs_in_parquet_are_keys_that_are_not_there() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("r.parquet");
    let schema = "message rows { optional group call { optional binary x (UTF8); optional group y { optional int64 z; } } optional int64 label; optional float f; }";
    let schema = std::sync::Arc::new(parse_message_type(schema).unwrap());
    let features =
        json!({"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}).to_string();
    let metadata = vec![KeyValue::new("huggingface".to_owned(), features)];
    let properties = WriterProperties::builder().set_key_value_metadata(Some(metadata)).build();
    let mut writer = SerializedFileWriter::new(File::create(&path).unwrap(), schema, properties.into()).unwrap();
    let mut columns = writer.next_row_group().unwrap();
    let mut column = columns.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&["a".into()], Some(&[2, 1, 0]), None).unwrap();
    column.close().unwrap();
    for (values, defined) in [([5], [1, 3, 0]), ([1], [1, 0, 0])] {
        let mut column = columns.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&values, Some(&defined), None).unwrap();
        column.close().unwrap();
    }
    let mut column = columns.next_column().unwrap().unwrap();
    column.typed::<FloatType>().write_batch(&[0.1, 1.0, 2.0], Some(&[1, 1, 1]), None).unwrap();
    column.close().unwrap();
    columns.close().unwrap();
    writer.close().unwrap();
    assert_eq!(
        read_all(&path).unwrap(),
        [
            json!({"call": {"x": "a"}, "label": "yes", "f": 0.1}),
            json!({"call": {"y": {"z": 5}}, "label": null, "f": 1.0}),
            json!({"call": null, "label": null, "f": 2.0}),
        ]
    );
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
