//! Mistakes in data files, and in what a recipe says of them.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use flate2::write::GzEncoder;

use super::table::Wrong::{self, FileAndSet, Made, Set};
use super::table::{RECIPE, ROW};

const CSV: &str = "data.train.0.path=\"rows.csv\"";

/// As `MISTAKES`, which they follow.
pub(crate) const DATA_MISTAKES: &[(&str, Wrong<'static>, &[&str])] = &[
    // Cells.
    (
        "a row with a cell too many",
        FileAndSet("rows.csv", "prompt,completion\na,b\n\na, b, c\n", CSV),
        &["rows.csv:line 4: has 3 cells, and the first line names 2 columns", "a cell with a comma"],
    ),
    (
        "a tab too few",
        FileAndSet("rows.tsv", "prompt\tcompletion\na b\n", "data.train.0.path=\"rows.tsv\""),
        &["rows.tsv:line 2: has 1 cells, and the first line names 2 columns", "a cell with a tab"],
    ),
    (
        "a quote that is not closed",
        FileAndSet("rows.csv", "prompt,completion\na,b\na,\"b\na,b\n", CSV),
        &["rows.csv:line 3: opens a quote that nothing closes"],
    ),
    (
        "a quote that is not doubled",
        FileAndSet("rows.csv", "prompt,completion\na,\"b \"c\" d\"\n", CSV),
        &["rows.csv:line 2: has text after a closing quote", "a quote in a quoted cell is doubled"],
    ),
    (
        "a semicolon too few",
        FileAndSet("rows.csv", "prompt;completion\na;b, c\na, b\n", CSV),
        &["rows.csv:line 3: has 1 cells, and the first line names 2 columns", "a cell with a semicolon"],
    ),
    (
        "a column twice",
        FileAndSet("rows.csv", "prompt,completion,prompt\na,b,c\n", CSV),
        &["rows.csv: its first line names `prompt` twice"],
    ),
    ("a first line alone", FileAndSet("rows.csv", "prompt,completion\n", CSV), &["rows.csv: the file has no rows"]),
    (
        "no first line",
        FileAndSet("rows.csv", "what is it?,a frog\nand this?,a house\n", CSV),
        &["the columns `what is it?`, `a frog` are those of no format", "; the first line names the columns"],
    ),
    (
        "Python's way to write a list",
        FileAndSet("rows.csv", "messages\n\"[{'role': 'user', 'content': 'a'}]\"\n", CSV),
        &["rows.csv:line 2: `messages` must be a list of objects in JSON", "`json.dumps`"],
    ),
    ("two encodings", Made(with_latin), &["rows.csv:line 3: not UTF-8", "`iconv`"]),
    (
        "a row without an end",
        Made(with_an_endless_row),
        &["rows.jsonl: the row that begins at byte 0 has more than 64 MiB", "a row is an object on a line of its own"],
    ),
    (
        "bytes that are no text",
        FileAndSet("rows.txt", "a frog\0", "data.train.0.path=\"rows.txt\""),
        &["rows.txt: byte 6 is NUL: this is no text"],
    ),
    (
        "rows of OpenAI's preferences",
        FileAndSet(
            "rows.jsonl",
            "{\"input\": {\"messages\": []}, \"preferred_output\": [], \"non_preferred_output\": []}\n",
            "data.train.0.path=\"rows.jsonl\"",
        ),
        &["this is preference data (`preferred_output` and `non_preferred_output`)", "`name = \"dpo\"` in [objective]"],
    ),
    (
        "rows of an embedding model",
        FileAndSet("rows.csv", "anchor,positive\na,b\n", CSV),
        &["`anchor` and `positive` are columns of rows for an embedding model, which is not trained here"],
    ),
    (
        "pairs of good and bad answers",
        FileAndSet("rows.csv", "prompt,chosen,rejected\na,b,c\n", CSV),
        &["rows.csv:line 2: this is preference data", "`columns = { completion = \"chosen\" }`"],
    ),
    // Compressed and other files.
    ("half a .gz", Made(with_half_a_gz), &["rows.jsonl.gz: cannot be unpacked as .gz: ", "download it, again"]),
    ("half a .zst", Made(with_half_a_zst), &["rows.jsonl.zst: cannot be unpacked as .zst: ", "download it, again"]),
    (
        "a .gz that is none",
        FileAndSet("rows.jsonl.gz", ROW, "data.train.0.path=\"rows.jsonl.gz\""),
        &["rows.jsonl.gz: cannot be unpacked as .gz: invalid gzip header"],
    ),
    (
        "a file that unpacks without end",
        Made(with_a_bomb),
        &["rows.jsonl.zst: unpacks to more than 1000 times its size: not a file of rows"],
    ),
    (
        "a sheet",
        FileAndSet("rows.xlsx", "PK", "data.train.0.path=\"rows.xlsx\""),
        &["rows.xlsx: files end in .csv, .tsv, ", "save the sheet as CSV"],
    ),
    (
        "an archive",
        FileAndSet("rows.zip", "PK", "data.train.0.path=\"rows.zip\""),
        &["rows.zip: files end in .csv, .tsv, ", "hint: unpack it"],
    ),
    // Folders.
    (
        "a folder without data",
        Made(with_a_folder_of_notes),
        &["`data.train[0].path` = \"d\" is a folder without data files", "it has notes.md"],
    ),
    ("a folder with nothing", Made(with_an_empty_folder), &["\"d\" is a folder without data files", "it has nothing"]),
    (
        "a folder with rows to test on",
        Made(with_three_splits),
        &[
            "\"d\" has the splits `test`, `train`, `validation`",
            "`split = \"train\"` takes one, or name its files, such as d/train.jsonl",
        ],
    ),
    (
        "a split that a folder lacks",
        Made(with_another_split),
        &["the folder has no split `unseen`; it has `test`, `train`, `validation`", "`split = \"...\"`"],
    ),
    // Keys of a source.
    (
        "no rows of a file",
        Set(&["data.train.0.rows=0"]),
        &["`data.train[0].rows` = 0, expected a number of rows of at least 1, or a share such as \"10%\""],
    ),
    (
        "more than all rows",
        Set(&["data.train.0.rows=\"110%\""]),
        &["`data.train[0].rows` = \"110%\", expected a number of rows"],
    ),
    ("a share as a number", Set(&["data.train.0.rows=0.25"]), &["rows` = 0.25, expected", "write \"25%\""]),
    ("rows in quotes", Set(&["data.train.0.rows=\"100\""]), &["rows` = \"100\", expected", "without quotes: 100"]),
    (
        "LLaMA-Factory's name",
        Set(&["data.max_samples=5"]),
        &["unknown key `max_samples`; this trainer calls it `rows`, in [[data.train]]"],
    ),
    (
        "a split of a file",
        Set(&["data.train.0.split=\"test\""]),
        &["\"rows.jsonl\" names files, so `split` has no meaning here"],
    ),
    (
        "a configuration of a file",
        Set(&["data.train.0.name=\"main\""]),
        &["\"rows.jsonl\" names files, so `name` has no meaning here"],
    ),
    (
        "a split of a file of a data set",
        Set(&["data.train.0.path=\"hf://datasets/openai/gsm8k/main/*.parquet\"", "data.train.0.split=\"test\""]),
        &["\"hf://datasets/openai/gsm8k/main/*.parquet\" names files, so `split` has no meaning here"],
    ),
    (
        "a slice of a split",
        Set(&["data.train.0.path=\"openai/gsm8k\"", "data.train.0.split=\"train[:10%]\""]),
        &["`data.train[0].split` = \"train[:10%]\" is not the name of a split", "`rows = \"10%\"`"],
    ),
    (
        "a data set's configuration by its name elsewhere",
        Set(&["data.train.0.subset=\"main\""]),
        &["unknown key `subset`; this trainer calls it `name`"],
    ),
    (
        "a data set that is not in the cache",
        Set(&["data.train.0.path=\"openai/gsm8k\"", "data.train.0.name=\"main\""]),
        &["HF_HUB_OFFLINE is set, and split `train` of openai/gsm8k is not in", "no such file or folder"],
    ),
    (
        "neither a file nor a data set",
        Set(&["data.train.0.path=\"my rows\""]),
        &["`data.train[0].path` = \"my rows\" is no file: looked for in", "has the form `owner/name`"],
    ),
    (
        "an address that was not downloaded",
        Set(&["data.train.0.path=\"https://example.org/rows.csv?key=secret\""]),
        &["https://example.org/rows.csv was not downloaded before", "with the network on"],
    ),
    (
        "an address of a page",
        Set(&["data.train.0.path=\"https://example.org/rows\""]),
        &["\"https://example.org/rows\" is no file of data: files end in .csv, .tsv, "],
    ),
    // Keys of all rows.
    (
        "a system prompt for plain text",
        FileAndSet("rows.jsonl", "{\"text\": \"a b\"}\n", "data.system=\"Be brief.\""),
        &["`data.system` = \"Be brief.\" changes nothing: the rows are plain text", "take it out"],
    ),
    (
        "turns that are no choice",
        Set(&["data.train_on_turns=\"first\""]),
        &["`data.train_on_turns` = \"first\", expected one of \"all\", \"last\""],
    ),
    (
        "loss on all and on the last",
        Set(&["data.train_on_turns=\"last\"", "data.train_on_inputs=true"]),
        &["`data.train_on_turns` = \"last\" excludes `data.train_on_inputs` = true", "keep one of the two"],
    ),
    (
        "axolotl's system prompt",
        Set(&["data.default_system_message=\"Be brief.\""]),
        &["unknown key `default_system_message`; this trainer calls it `system`"],
    ),
];

/// Trains on this path, with more keys of the source.
fn train_on(folder: &Path, path: &str, more: &str) {
    let recipe = RECIPE.replace("path = \"rows.jsonl\"", &format!("path = \"{path}\"\n{more}"));
    fs::write(folder.join("r.toml"), recipe).unwrap();
}

fn with_latin(folder: &Path) {
    fs::write(folder.join("rows.csv"), b"prompt,completion\nle caf\xc3\xa9,b\nle caf\xe9,b\n").unwrap();
    train_on(folder, "rows.csv", "");
}

fn with_an_endless_row(folder: &Path) {
    let file = fs::File::create(folder.join("rows.jsonl")).unwrap();
    (&file).write_all(&[b"{\"text\": \"".to_vec(), vec![b'a'; 600]].concat()).unwrap();
    // The rest is a hole, which takes no room.
    file.set_len(80 << 20).unwrap();
}

fn with_half_a_gz(folder: &Path) {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(ROW.repeat(8).as_bytes()).unwrap();
    let whole = encoder.finish().unwrap();
    fs::write(folder.join("rows.jsonl.gz"), &whole[..whole.len() - 9]).unwrap();
    train_on(folder, "rows.jsonl.gz", "");
}

fn with_half_a_zst(folder: &Path) {
    let whole = zstd::encode_all(ROW.repeat(8).as_bytes(), 0).unwrap();
    fs::write(folder.join("rows.jsonl.zst"), &whole[..whole.len() - 9]).unwrap();
    train_on(folder, "rows.jsonl.zst", "");
}

fn with_a_bomb(folder: &Path) {
    fs::write(folder.join("rows.jsonl.zst"), zstd::encode_all(&vec![b'\n'; 80 << 20][..], 0).unwrap()).unwrap();
    train_on(folder, "rows.jsonl.zst", "");
}

fn with_an_empty_folder(folder: &Path) {
    fs::create_dir(folder.join("d")).unwrap();
    train_on(folder, "d", "");
}

fn with_a_folder_of_notes(folder: &Path) {
    with_an_empty_folder(folder);
    fs::write(folder.join("d/notes.md"), "").unwrap();
}

fn with_three_splits(folder: &Path) {
    with_an_empty_folder(folder);
    for name in ["train", "test", "valid"] {
        fs::write(folder.join(format!("d/{name}.jsonl")), ROW).unwrap();
    }
}

fn with_another_split(folder: &Path) {
    with_three_splits(folder);
    train_on(folder, "d", "split = \"unseen\"");
}
