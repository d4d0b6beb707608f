//! Kinds of files, and how many of their rows are read.

use serde_json::{Value, json};

use super::*;
use crate::data::fixture::{packed, write_parquet};

/// Ids and masks of all rows, whatever their file.
fn encoded(sources: Vec<DataSource>, tokenizer: &Arc<Tokenizer>) -> Vec<EncodedRow> {
    let dataset = Dataset::open(&config(sources), Arc::clone(tokenizer), 7, &OpenOptions::default()).unwrap();
    (0..dataset.num_train_rows()).map(|row| dataset.train_row(row).unwrap().1).collect()
}

#[test]
fn the_same_rows_have_the_same_tokens_and_masks_in_every_kind_of_file() {
    let (files, tokenizer) = (Files::new(), chat_tokenizer());
    let texts = [("Hé, \"you\"\n", "yo\r\n,;\t."), ("a", "  b"), ("{\"c\": [1]}", "'d'"), ("1", "2.50")];
    let turns = |(question, answer): &(&'static str, &'static str)| vec![("user", *question), ("assistant", *answer)];
    let conversations: Vec<Vec<(&str, &str)>> = texts.iter().map(turns).collect();
    let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
    let lists = conversations.iter().map(|turns| turns.iter().map(message).collect::<Vec<_>>());
    let rows: Vec<Value> = lists.map(|messages| json!({"messages": messages, "id": "1"})).collect();
    let lines = |rows: &[Value]| rows.iter().map(|row| row.to_string() + "\n").collect::<String>();
    let cells = |delimiter: &str| {
        let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
        let row = |row: &Value| quoted(&row["messages"].to_string()) + delimiter + "1\n";
        format!("messages{delimiter}id\n{}", rows.iter().map(row).collect::<String>())
    };
    let pairs = |delimiter: &str| {
        let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
        let row = |(question, answer): &(&str, &str)| [quoted(question), quoted(answer)].join(delimiter) + "\r\n";
        format!("question{delimiter}answer\r\n{}", texts.iter().map(row).collect::<String>())
    };
    let questions: Vec<Value> = texts.iter().map(|(q, a)| json!({"question": q, "answer": a})).collect();
    let expected = encoded(vec![files.write("r.jsonl", &lines(&rows))], &tokenizer);
    assert!(expected.len() == 4 && expected.iter().all(|row| row.num_target_tokens() > 1));
    let contents = [
        ("array.json", serde_json::to_string_pretty(&rows).unwrap()),
        ("r.ndjson", lines(&rows)),
        ("r.csv", cells(",")),
        ("r.tsv", cells("\t")),
        ("pairs.jsonl", lines(&questions)),
        ("pairs.csv", pairs(",")),
        ("pairs.tsv", pairs("\t")),
    ];
    write_parquet(&files.path("r.parquet"), &conversations);
    let parquet = std::fs::read(files.path("r.parquet")).unwrap();
    let contents = contents.map(|(name, content)| (name, content.into_bytes())).into_iter();
    for (name, content) in contents.chain([("r.parquet", parquet)]) {
        std::fs::write(files.path(name), &content).unwrap();
        assert_eq!(encoded(vec![files.source(name)], &tokenizer), expected, "{name}");
        for ending in ["gz", "zst"] {
            let name = format!("{name}.{ending}");
            std::fs::write(files.path(&name), packed(&name, &content)).unwrap();
            assert_eq!(encoded(vec![files.source(&name)], &tokenizer), expected, "{name}");
        }
    }
    let text = files.write("t.txt", &"ab é\n".repeat(50));
    std::fs::write(files.path("t.txt.gz"), packed("t.txt.gz", "ab é\n".repeat(50).as_bytes())).unwrap();
    assert_eq!(encoded(vec![files.source("t.txt.gz")], &tokenizer), encoded(vec![text], &tokenizer));
}

#[test]
fn a_folder_stands_for_its_data_files() {
    let files = Files::new();
    files.write("b.csv", "text\nrow 2\n");
    files.write("a.jsonl", &numbered_rows(2));
    for other in [".hidden.jsonl", "dataset_info.json", "notes.md", "loader.py"] {
        files.write(other, "no rows");
    }
    let dataset = open(&config(vec![files.source("")]));
    let names: Vec<_> = dataset.files().iter().map(|file| file.path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!((names, dataset.num_train_rows()), (vec!["a.jsonl", "b.csv"], 3));
    let empty = Files::new();
    let error_of = |source: DataSource| error(&config(vec![source]));
    assert!(error_of(empty.source("")).ends_with("and .gz or .zst behind it; it has nothing"));
    // As `save_to_disk` writes it.
    let saved = Files::new();
    std::fs::create_dir(saved.path("train")).unwrap();
    saved.write("dataset_dict.json", "{\"splits\": [\"train\"]}");
    saved.write("train/state.json", "{\n}");
    saved.write("train/dataset_info.json", "{\n}");
    saved.write("train/data-00000-of-00001.arrow", "");
    for folder in ["", "train"] {
        let message = error_of(saved.source(folder));
        assert!(message.contains("is a folder of `save_to_disk`, and Arrow files are not read\n  hint: "), "{message}");
    }
    assert!(error_of(DataSource { split: Some("train".into()), ..saved.source("") }).contains("of `save_to_disk`"));
    assert!(error_of(saved.source("train/*.arrow")).contains("`datasets.load_from_disk(FOLDER).to_parquet"));
    empty.write("x.md", "");
    std::fs::create_dir(empty.path("data")).unwrap();
    let message = error_of(empty.source(""));
    assert!(message.contains("is a folder without data files") && message.ends_with("it has data/, x.md"), "{message}");
    empty.write("a.png", "");
    assert!(
        error_of(empty.source("")).contains("it has a.png, data/, x.md\n  hint: the rows of images go beside them")
    );
    // The rows of a folder's images, and once more.
    empty.write("metadata.jsonl", &numbered_rows(2));
    assert_eq!(open(&config(vec![empty.source("")])).num_train_rows(), 2);
    empty.write("metadata.csv", "text\nrow 0\nrow 1\n");
    let message = error_of(empty.source(""));
    assert!(
        message.contains("has `metadata.csv` and `metadata.jsonl`, each with rows of the same images"),
        "{message}"
    );
    assert!(message.ends_with("/metadata.jsonl"), "{message}");
    assert_eq!(open(&config(vec![empty.source("metadata.csv")])).num_train_rows(), 2);
}

#[test]
fn a_folder_laid_out_as_a_data_set_takes_a_split_and_a_name() {
    let files = Files::new();
    for (folder, rows) in [("main", 3), ("socratic", 4)] {
        std::fs::create_dir(files.path(folder)).unwrap();
        files.write(&format!("{folder}/train-00000-of-00002.jsonl"), &numbered_rows(rows));
        files.write(&format!("{folder}/train-00001-of-00002.jsonl"), &numbered_rows(rows));
        files.write(&format!("{folder}/test.jsonl"), &numbered_rows(1));
    }
    let source = |name: Option<&str>, split: Option<&str>| {
        let (name, split) = (name.map(str::to_owned), split.map(str::to_owned));
        config(vec![DataSource { split, name, ..files.source("") }])
    };
    let num_rows = |name: &str, split: Option<&str>| open(&source(Some(name), split)).num_train_rows();
    assert_eq!((num_rows("main", None), num_rows("socratic", None), num_rows("main", Some("test"))), (6, 8, 1));
    let message = error(&source(None, Some("test")));
    assert!(message.contains("the folder has several configurations: `main`, `socratic`"), "{message}");
    let message = error(&source(None, None));
    assert!(message.ends_with("it has main/, socratic/"), "{message}");
}

#[test]
fn rows_takes_the_first_of_a_source_or_a_share_of_each_file() {
    let files = Files::new();
    files.write("a.jsonl", &numbered_rows(10));
    files.write("b.jsonl", &(numbered_rows(10) + "{bad\n"));
    let visited = |rows: RowLimit| {
        let dataset = open(&config(vec![DataSource { rows: Some(rows), ..files.source("*.jsonl") }]));
        let rows: Vec<RowSource> = (0..dataset.num_train_rows()).map(|row| dataset.train_row(row).unwrap().0).collect();
        rows.iter().map(|source| (source.file, source.row)).collect::<Vec<_>>()
    };
    let first = |counts: [usize; 2]| -> Vec<(usize, usize)> {
        (0..2).flat_map(|file| (0..counts[file]).map(move |row| (file, row))).collect()
    };
    assert_eq!(visited(RowLimit::Rows(3)), first([3, 0]));
    assert_eq!(visited(RowLimit::Rows(10)), first([10, 0]));
    assert_eq!(visited(RowLimit::Rows(12)), first([10, 2]), "and the bad row is never read");
    assert_eq!(visited(RowLimit::Percent(20.0)), first([2, 2]));
    assert_eq!(visited(RowLimit::Percent(0.1)), first([1, 1]));

    let text = |name: &str| files.write(name, &"ab".repeat(40));
    let windows = |sources: Vec<DataSource>| open(&DataConfig { max_length: 8, ..config(sources) }).num_train_rows();
    let all = windows(vec![text("x.txt")]);
    text("y.txt");
    let some = |rows: RowLimit| windows(vec![DataSource { rows: Some(rows), ..files.source("*.txt") }]);
    assert_eq!((some(RowLimit::Rows(all + 2)), some(RowLimit::Rows(2))), (all + 2, 2));
    let both = DataSource { rows: Some(RowLimit::Rows(30)), ..files.source("[ax]*") };
    let message = error(&config(vec![both]));
    assert!(message.contains("rows of tables and windows of texts together"), "{message}");
}

#[test]
fn a_system_prompt_that_changes_nothing_is_refused_or_warned_of() {
    let files = Files::new();
    let text = files.write("t.jsonl", &numbered_rows(2));
    let chat = files.write("c.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}\n");
    let with_system = |sources: Vec<DataSource>| DataConfig { system: Some("s".into()), ..config(sources) };
    let message = error(&with_system(vec![text.clone(), chat.clone()]));
    assert!(message.starts_with("`data.system` = \"s\" changes nothing"), "{message}");
    let both = with_system(vec![text, chat]);
    let dataset = Dataset::open(&both, chat_tokenizer(), 7, &OpenOptions::default()).unwrap();
    let warnings = dataset.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("t.jsonl: `data.system` does not change"), "{warnings:?}");
    let row = dataset.train_row(2).unwrap().1;
    assert!(dataset.tokenizer().decode(&row.ids, false).unwrap().starts_with("<|im_start|>system\ns<|im_end|>\n"));
}

#[test]
fn what_a_row_says_in_vain_is_said_to_the_user() {
    let (files, tokenizer) = (Files::new(), chat_tokenizer());
    let source = files.write(
        "r.jsonl",
        r#"{"messages": [{"role": "user", "content": "a", "name": "ann"}, {"role": "assistant", "content": "b", "be": 1}]}
{"messages": [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b", "content": "\"c:{"}]}
{"messages": [{"role": "assistant", "content": "b"}], "messages": [{"role": "assistant", "content": "d"}]}
{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "b"}]}
"#,
    );
    let dataset = Dataset::open(&config(vec![source]), tokenizer, 7, &OpenOptions::default()).unwrap();
    assert_eq!(dataset.files()[0].unused_columns, ["messages[].be", "messages[].name"]);
    let warnings = dataset.warnings().join("\n");
    for warning in [
        "3 of 4 rows are odd:",
        "line 4: message 1 is empty",
        "line 2: message 1 has \"<|im_end|>\" in its text, which becomes the special token; an object has the key \
         `content` twice; the last one counts",
        "line 3: an object has the key `messages` twice; the last one counts",
    ] {
        assert!(warnings.contains(warning), "{warnings}");
    }
    let targets = |row: usize| dataset.train_row(row).unwrap().1.num_target_tokens();
    assert_eq!([targets(0), targets(1), targets(2)], [2, 5, 2]);
}

#[test]
fn a_mask_beside_loss_on_all_tokens_is_refused() {
    let files = Files::new();
    let row =
        r#"{"messages": [{"role": "user", "content": "a", "train": false}, {"role": "assistant", "content": "b"}]}"#;
    let all = DataConfig { train_on_inputs: true, ..config(vec![files.write("r.jsonl", row)]) };
    let error = Dataset::open(&all, chat_tokenizer(), 7, &OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("message 1 is to carry no loss, and `data.train_on_inputs` = true"), "{error}");
}

#[test]
fn rows_without_an_answer_are_told_once_and_by_what_they_lack() {
    let files = Files::new();
    let opened = |name: &str, content: &str| {
        let config = config(vec![files.write(name, content)]);
        Dataset::open(&config, chat_tokenizer(), 7, &OpenOptions::default())
    };
    let said = |name: &str, content: &str| {
        opened(name, content).unwrap().warnings().join("\n").replace(files.path("").to_str().unwrap(), "")
    };
    let table = "Question,Answer\na,b\nc,\n,d\ne,f\n";
    assert_eq!(
        said("r.csv", table),
        "r.csv: 1 of 4 rows carry no loss and are left out:\n  line 3: the cell `Answer` is empty\n\
         r.csv: 1 of 4 rows are odd:\n  line 4: the cell `Question` is empty"
    );
    let user = json!({"role": "user", "content": "a"});
    let row = |answer: Value| json!({"messages": [user, answer]}).to_string() + "\n";
    let answer = |text: &str, weight: u8| json!({"role": "assistant", "content": text, "weight": weight});
    let rows = [answer("b", 1), answer("", 1), answer("b", 0), user.clone(), answer("c", 1)].map(row).concat();
    let said = said("r.jsonl", &rows);
    for line in
        ["line 2: message 2 is an empty answer", "line 3: all answers have weight 0", "line 4: no message is an answer"]
    {
        assert!(said.contains(line), "{said}");
    }
    assert!(said.starts_with("r.jsonl: 3 of 5 rows carry no loss") && !said.contains("odd"), "{said}");
    let open = json!({"messages": [user, answer("b", 1), user], "reference_answer": "c"}).to_string();
    let dataset = opened("o.jsonl", &open).unwrap();
    assert!(dataset.warnings().join("").contains("line 1: it ends with a message of the user, which nothing answers"));
    let prompts = format!("{}\n", json!({"messages": [user], "reference_answer": "4"})).repeat(3);
    let message = opened("p.jsonl", &prompts).unwrap_err().to_string();
    assert!(
        message.ends_with(
            "hint: these are prompts: with `[objective] name = \"grpo\"` the model answers them, for rewards"
        ),
        "{message}"
    );
    let empty = opened("e.csv", "prompt,completion\na,\n").unwrap_err().to_string();
    assert!(empty.ends_with("line 2: the cell `completion` is empty"), "{empty}");
}

#[test]
fn a_script_that_the_tokenizer_hardly_knows_is_said() {
    let files = Files::new();
    let warned = |name: &str, question: &str, answer: &str| {
        let row = json!({"prompt": question, "completion": answer}).to_string() + "\n";
        let config = config(vec![files.write(name, &row.repeat(4))]);
        let dataset = Dataset::open(&config, chat_tokenizer(), 7, &OpenOptions::default()).unwrap();
        dataset.warnings().join("\n").contains(": 3.0 tokens a letter: the tokenizer hardly knows the script")
    };
    assert!(warned("zh.jsonl", "\u{4f60}\u{597d}".repeat(20).as_str(), "\u{597d}"));
    assert!(!warned("en.jsonl", &"a question of some length ".repeat(9), "\u{4f60}\u{597d}"));
    assert!(!warned("short.jsonl", "\u{4f60}", "\u{597d}"));
}
