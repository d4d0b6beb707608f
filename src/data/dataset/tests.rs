use std::collections::BTreeMap;
use std::time::Instant;

use super::*;
use crate::config::DataFormat;
use crate::data::fixture::{BOS, EOS, Files, chat_tokenizer, config, numbered_rows, tokenizer};
use crate::data::loader::LoadedBatch;

mod kinds;
mod questions;
mod web;

fn open(config: &DataConfig) -> Dataset {
    Dataset::open(config, Arc::new(tokenizer()), 7, &OpenOptions::default()).unwrap()
}

fn error(config: &DataConfig) -> String {
    Dataset::open(config, Arc::new(tokenizer()), 7, &OpenOptions::default()).unwrap_err().to_string()
}

fn take(dataset: &Dataset, from: Cursor, micro_batch_size: usize, count: usize) -> Vec<LoadedBatch> {
    let mut loader = dataset.loader(from, micro_batch_size).unwrap();
    (0..count).map(|_| loader.next_batch().unwrap()).collect()
}

/// Row numbers within their file, of all rows in the batches.
fn rows(batches: &[LoadedBatch]) -> Vec<usize> {
    batches.iter().flat_map(|batch| batch.batch.sources.iter().map(|source| source.row)).collect()
}

#[test]
fn rows_are_end_to_end_and_labels_are_shifted_once() {
    let files = Files::new();
    let source = files
        .write("r.jsonl", "{\"prompt\": \"x\", \"completion\": \"yz\"}\n{\"prompt\": \"\", \"completion\": \"w\"}");
    let loaded = &take(&open(&config(vec![source])), Cursor::default(), 2, 1)[0];
    let [x, y, z, w] = [120, 121, 122, 119];
    assert_eq!(loaded.batch.row_lengths, [5, 3]);
    assert_eq!(loaded.batch.input_ids, [BOS, x, y, z, EOS, BOS, w, EOS]);
    let targets: Vec<(usize, u32)> = loaded.batch.targets.iter().map(|t| (t.position, t.token)).collect();
    assert_eq!(targets, [(1, y), (2, z), (3, EOS), (5, w), (6, EOS)]);
    assert_eq!(loaded.batch.documents.iter().map(|d| (d.start, d.len)).collect::<Vec<_>>(), [(0, 5), (5, 3)]);
    let counts = RowCounts { rows: 2, tokens: 8, target_tokens: 5, longest_tokens: 5, ..RowCounts::default() };
    assert_eq!(loaded.report, counts);
    assert!(loaded.last_of_epoch);
}

#[test]
fn an_epoch_visits_every_row_once_in_an_order_of_its_own() {
    let files = Files::new();
    let source = files.write("r.jsonl", &numbered_rows(10));
    let dataset = open(&DataConfig { shuffle: true, ..config(vec![source.clone()]) });
    assert_eq!((dataset.num_train_rows(), dataset.batches_per_epoch(4)), (10, 3));
    let batches = take(&dataset, Cursor::default(), 4, 9);
    let flags: Vec<_> = batches.iter().map(|batch| (batch.epoch, batch.last_of_epoch)).collect();
    assert_eq!(flags[..4], [(0, false), (0, false), (0, true), (1, false)]);
    assert_eq!(batches[2].batch.row_lengths[1..], [batches[2].batch.row_lengths[1], 0, 0], "filled up to four rows");
    let orders: Vec<Vec<usize>> = batches.chunks(3).map(rows).collect();
    for order in &orders {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10).collect::<Vec<_>>());
    }
    assert!(orders[0] != orders[1] && orders[1] != orders[2]);
    assert_eq!(rows(&take(&dataset, Cursor::default(), 10, 1)), orders[0], "for every micro-batch size");

    let in_order = open(&config(vec![source]));
    assert_eq!(rows(&take(&in_order, Cursor::default(), 4, 3)), (0..10).collect::<Vec<_>>());
}

#[test]
fn a_cursor_goes_on_exactly_where_it_was_taken() {
    let files = Files::new();
    let source = files.write("r.jsonl", &numbered_rows(11));
    for packing in [false, true] {
        let config = DataConfig { shuffle: true, packing, max_length: 20, ..config(vec![source.clone()]) };
        let dataset = open(&config);
        let all = take(&dataset, Cursor::default(), 2, 20);
        for (index, batch) in all.iter().enumerate().take(15) {
            let json = serde_json::to_string(&batch.cursor_after).unwrap();
            let resumed = take(&open(&config), serde_json::from_str(&json).unwrap(), 2, 5);
            assert_eq!(resumed, all[index + 1..index + 6], "packing {packing}, after batch {index}");
        }
    }
}

#[test]
fn the_number_of_workers_does_not_change_the_batches() {
    let files = Files::new();
    let source = files.write("r.jsonl", &numbered_rows(50));
    let batches = |num_workers: usize, prefetch_batches: usize| {
        let config = DataConfig { shuffle: true, num_workers, prefetch_batches, ..config(vec![source.clone()]) };
        take(&open(&config), Cursor { epoch: 2, batch: 3 }, 3, 40)
    };
    let alone = batches(0, 1);
    for (num_workers, prefetch_batches) in [(1, 1), (1, 4), (3, 2), (8, 16)] {
        assert_eq!(batches(num_workers, prefetch_batches), alone, "{num_workers} workers");
    }
}

#[test]
fn a_batch_that_is_looked_at_stays_the_next_one() {
    let files = Files::new();
    let source = files.write("r.jsonl", &numbered_rows(50));
    let dataset = |num_workers| open(&DataConfig { shuffle: true, num_workers, ..config(vec![source.clone()]) });
    let with_workers = dataset(2);
    let mut loader = with_workers.loader(Cursor::default(), 3).unwrap();
    for (index, expected) in take(&with_workers, Cursor::default(), 3, 40).into_iter().enumerate() {
        // Each third is taken without a look.
        let is_seen = || loader.peek() == Some(&expected);
        assert!(index % 3 == 0 || soon(is_seen), "batch {index}");
        assert_eq!(loader.next_batch().unwrap(), expected, "batch {index}");
    }
    let alone = dataset(0);
    assert_eq!(alone.loader(Cursor::default(), 3).unwrap().peek(), None, "no thread makes it ahead");
}

/// Whether it is so within a minute.
fn soon(mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !is_so() {
        if start.elapsed().as_secs() > 60 {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

#[test]
fn held_out_rows_are_evaluated_and_never_trained_on() {
    let files = Files::new();
    let source = files.write("r.jsonl", &numbered_rows(40));
    let split = |split: EvalSplit, seed: u64| {
        let config = DataConfig { eval_split: Some(split), ..config(vec![source.clone()]) };
        Dataset::open(&config, Arc::new(tokenizer()), seed, &OpenOptions::default()).unwrap()
    };
    let eval_rows = |dataset: &Dataset| {
        let batches: Vec<_> = dataset.eval_batches(3, None).unwrap().until(|| false).collect::<Result<_, _>>().unwrap();
        rows(&batches)
    };
    let dataset = split(EvalSplit::Share(0.25), 7);
    let held_out = eval_rows(&dataset);
    assert_eq!((dataset.num_train_rows(), dataset.num_eval_rows(), held_out.len()), (30, 10, 10));
    let trained = rows(&take(&dataset, Cursor::default(), 30, 1));
    assert!(trained.iter().all(|row| !held_out.contains(row)) && trained.len() == 30 && trained.is_sorted());
    assert_eq!(held_out, eval_rows(&split(EvalSplit::Rows(10), 7)), "by the seed alone");
    assert_ne!(held_out, eval_rows(&split(EvalSplit::Rows(10), 8)));
    assert_eq!(dataset.eval_batches(3, Some(2)).unwrap().until(|| false).count(), 2);
    let all = DataConfig { eval_split: Some(EvalSplit::Rows(40)), ..config(vec![source]) };
    assert_eq!(error(&all), "`data.eval_split` holds out 40 of 40 training rows, which leaves none to train on");
}

#[test]
fn evaluation_files_are_read_in_order_and_a_file_in_both_lists_is_warned_of() {
    let files = Files::new();
    let (train, eval) = (files.write("a.jsonl", &numbered_rows(5)), files.write("b.txt", "abcdefgh"));
    let config = DataConfig { eval: vec![train.clone(), eval], max_length: 4, ..config(vec![train]) };
    let dataset = open(&config);
    let batches: Vec<_> = dataset.eval_batches(4, None).unwrap().until(|| false).collect::<Result<_, _>>().unwrap();
    let sources: Vec<_> = batches.iter().flat_map(|batch| &batch.batch.sources).map(|s| (s.file, s.row)).collect();
    // The third window of the text file is only EOS, which no token predicts.
    assert_eq!(sources, [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0), (2, 1)]);
    let names: Vec<_> =
        dataset.files().iter().map(|file| (file.path.extension().unwrap().to_owned(), file.is_eval)).collect();
    assert_eq!(names, [("jsonl".into(), false), ("jsonl".into(), true), ("txt".into(), true)]);
    assert!(dataset.warnings().iter().any(|warning| warning.contains("is in [[data.train]] and in [[data.eval]]")));
}

#[test]
fn a_weight_says_how_often_rows_are_visited() {
    let files = Files::new();
    let (mut half, mut twice) = (files.write("a.jsonl", &numbered_rows(10)), files.write("b.jsonl", &numbered_rows(4)));
    (half.weight, twice.weight) = (0.5, 2.0);
    let dataset = open(&DataConfig { shuffle: true, ..config(vec![half, twice]) });
    assert_eq!((dataset.num_train_rows(), dataset.rows_per_epoch(), dataset.batches_per_epoch(13)), (14, 13, 1));
    let epochs = take(&dataset, Cursor::default(), 13, 2);
    let mut drawn = Vec::new();
    for epoch in &epochs {
        let mut visits = BTreeMap::new();
        for source in &epoch.batch.sources {
            *visits.entry((source.file, source.row)).or_insert(0) += 1;
        }
        assert!((0..4).all(|row| visits[&(1, row)] == 2));
        let of_half: Vec<_> = visits.into_iter().filter(|((file, _), _)| *file == 0).collect();
        assert!(of_half.len() == 5 && of_half.iter().all(|(_, count)| *count == 1));
        drawn.push(of_half);
    }
    assert_ne!(drawn[0], drawn[1]);
}

#[test]
fn rows_that_lose_their_answer_are_counted_and_left_out() {
    let files = Files::new();
    let long = "q".repeat(20);
    let content = format!(
        "{{\"prompt\": \"q\", \"completion\": \"a\"}}\n{{\"prompt\": \"{long}\", \"completion\": \"a\"}}\n\
         {{\"prompt\": \"qqqq\", \"completion\": \"{long}\"}}\n"
    );
    let source = files.write("r.jsonl", &content);
    let config = DataConfig { max_length: 10, ..config(vec![source]) };
    let expected = RowCounts {
        rows: 3,
        truncated: 2,
        answer_cut: 1,
        without_targets: 1,
        tokens: 14,
        target_tokens: 7,
        longest_tokens: 26,
        ..RowCounts::default()
    };
    for packing in [false, true] {
        let dataset = open(&DataConfig { packing, ..config.clone() });
        assert_eq!(dataset.train_counts().unwrap(), expected);
        let warnings = dataset.warnings();
        assert!(
            warnings[0].contains("1 of 3 rows carry no loss and are left out:\n  line 2: of 23 tokens, "),
            "{warnings:?}"
        );
        assert!(warnings[1].contains("1 of 3 rows are longer than `data.max_length` = 10 and lose"), "{warnings:?}");
        // Rows that are left out are in no micro-batch, so no micro-batch is empty.
        assert_eq!((dataset.num_train_rows(), dataset.rows_per_epoch()), (2, 2));
        let batches = take(&dataset, Cursor::default(), 1, 2);
        let mut sum = RowCounts::default();
        batches.iter().for_each(|batch| sum += batch.report);
        assert_eq!((rows(&batches).len(), sum.rows, sum.tokens, sum.target_tokens), (2, 2, 14, 7));
        assert!(batches[1].last_of_epoch);
    }
    let held_out = open(&DataConfig { eval_split: Some(EvalSplit::Rows(1)), ..config });
    assert_eq!((held_out.num_train_rows(), held_out.num_eval_rows()), (1, 1), "of those that are of use");
}

#[test]
fn packed_rows_hold_the_same_documents_and_targets() {
    let files = Files::new();
    let row = |i: usize| serde_json::json!({"prompt": "q".repeat(i % 17), "completion": i.to_string()}).to_string();
    let content: String = (0..60).map(|i| row(i) + "\n").collect();
    let source = files.write("r.jsonl", &content);
    let plain = DataConfig { shuffle: true, max_length: 32, ..config(vec![source]) };
    let packed = open(&DataConfig { packing: true, ..plain.clone() });
    // The documents of an epoch as (source, ids, targets relative to the document's start).
    let documents = |dataset: &Dataset| {
        let count = usize::try_from(dataset.batches_per_epoch(2)).unwrap();
        let batches = take(dataset, Cursor::default(), 2, count);
        assert!(batches[count - 1].last_of_epoch);
        let mut documents = Vec::new();
        for LoadedBatch { batch, .. } in &batches {
            for (document, source) in batch.documents.iter().zip(&batch.sources) {
                let range = document.start..document.start + document.len;
                let targets = batch.targets.iter().filter(|target| range.contains(&target.position));
                let targets: Vec<_> = targets.map(|target| (target.position - document.start, target.token)).collect();
                assert!(targets.iter().all(|(position, _)| position + 1 < document.len), "no label across a boundary");
                documents.push((source.row, batch.input_ids[range].to_vec(), targets));
            }
            assert!(batch.row_lengths.iter().all(|length| *length <= 32));
        }
        documents.sort_unstable();
        (count, documents)
    };
    let (plain_count, plain_documents) = documents(&open(&plain));
    let (packed_count, packed_documents) = documents(&packed);
    assert_eq!(packed_documents, plain_documents);
    let tokens: usize = packed_documents.iter().map(|(_, ids, _)| ids.len()).sum();
    assert_eq!((plain_count, packed_count), (30, tokens.div_ceil(32).div_ceil(2)), "as few rows as there can be");
}

#[test]
fn bad_rows_are_errors_of_the_start_grouped_and_with_their_places() {
    let (files, bad) = (Files::new(), "{\"text\": null}\n");
    let source = files.write("r.jsonl", &(numbered_rows(90) + bad + &numbered_rows(6) + bad + "{\"text\": \n"));
    let other = files.write("s.jsonl", &(numbered_rows(2) + bad));
    let message = error(&config(vec![source.clone(), other]));
    let mistakes: Vec<&str> = message.lines().filter(|line| !line.starts_with(' ')).collect();
    assert_eq!(mistakes.len(), 3, "{message}");
    assert!(mistakes[0].ends_with("r.jsonl:line 91: `text` must be text, not null"), "{message}");
    assert!(message.contains("\n  and likewise 1 more: line 98\n"), "{message}");
    assert!(
        mistakes[1].contains("r.jsonl:99:9: not valid JSON") && mistakes[2].contains("s.jsonl:line 3:"),
        "{message}"
    );
    let nothing = files.write("n.jsonl", "{\"prompt\": \"a\", \"completion\": \"\"}\n");
    let message = error(&config(vec![nothing]));
    assert!(
        message.starts_with("no row is left to train on\n  ") && message.contains("1 of 1 rows carry no loss"),
        "{message}"
    );
}

#[test]
fn a_text_is_one_document_cut_into_windows() {
    let files = Files::new();
    let text: String = (0..1500).map(|i| ["xyz", "é", "w "][i % 3]).collect();
    let whole = tokenizer().encode(&text, true).unwrap();
    for max_length in [3, 7, 1000, 1024, 1025, 4000, 1 << 40] {
        let dataset = open(&DataConfig { max_length, ..config(vec![files.write("t.txt", &text)]) });
        let windows = (0..dataset.num_file_rows()).map(|row| dataset.file_row(row).unwrap().1);
        let windows: Vec<EncodedRow> = windows.collect();
        assert!(windows.iter().rev().skip(1).all(|row| row.ids.len() == max_length), "{max_length}");
        let ids: Vec<u32> = windows.iter().flat_map(|row| row.ids.clone()).collect();
        assert_eq!(ids, [&whole[..], &[EOS]].concat(), "{max_length}");
        assert!(windows.iter().all(|row| !row.carries_loss[0] && row.num_target_tokens() == row.ids.len() - 1));
    }
}

#[test]
fn rows_keep_their_order_over_many_rounds_of_encoding_which_can_be_stopped() {
    let files = Files::new();
    let config = config(vec![files.write("r.jsonl", &numbered_rows(9000))]);
    let dataset = open(&config);
    assert_eq!(dataset.num_file_rows(), 9000);
    for row in [0, 127, 128, 4095, 4096, 8999] {
        let (source, tokens) = dataset.file_row(row).unwrap();
        let text = tokenizer().decode(&tokens.ids, true).unwrap();
        assert_eq!((source.row, text), (row, format!("row {row}")));
    }
    let stopped = OpenOptions { is_stopped: &|| true, ..OpenOptions::default() };
    let error = Dataset::open(&config, Arc::new(tokenizer()), 7, &stopped).unwrap_err();
    assert!(matches!(error, DataError::Interrupted), "{error}");
}

#[test]
fn globs_are_sorted_and_what_names_no_file_is_an_error() {
    let files = Files::new();
    for name in ["b.jsonl", "a.jsonl", "c[1].jsonl"] {
        files.write(name, &numbered_rows(1));
    }
    let dataset = open(&config(vec![files.source("*.jsonl"), files.source("c[1].jsonl")]));
    let names: Vec<_> = dataset.files().iter().map(|file| file.path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["a.jsonl", "b.jsonl", "c[1].jsonl", "c[1].jsonl"]);
    let info = &dataset.files()[0];
    assert_eq!((info.format, info.num_rows, info.kind.name()), (DataFormat::Text, 1, "JSON lines"));

    let path_error = |pattern: &str| error(&config(vec![files.source(pattern)]));
    let message = path_error("none.jsonl");
    assert!(
        message.starts_with("`data.train[0].path` = \"")
            && message.contains("none.jsonl\" is no file: looked for in /"),
        "{message}"
    );
    assert!(path_error("*.parquet").contains("*.parquet\" matches no file: looked for in /"));
    files.write("a.xlsx", "x");
    assert!(path_error("a.xlsx").ends_with(".gz or .zst behind it\n  hint: save the sheet as CSV"));
    let mut text = files.write("a.txt", "x");
    text.format = DataFormat::Alpaca;
    assert!(error(&config(vec![text])).ends_with("a .txt file has no columns: its `format` is \"text\""));
    assert!(error(&config(vec![])).starts_with("no training data"));
    let measured = |source| DataConfig { eval: vec![source], ..config(vec![]) };
    let dataset = open(&measured(files.write("e.jsonl", &numbered_rows(3))));
    assert_eq!((dataset.num_train_rows(), dataset.num_file_rows(), dataset.num_eval_rows()), (0, 0, 3));
    assert!(error(&measured(files.source("none.jsonl"))).starts_with("`data.eval[0].path` = "));
}

#[test]
fn conversations_need_a_template_and_alpaca_rows_do_not() {
    let files = Files::new();
    let chat = files.write("c.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}");
    let message = error(&config(vec![chat.clone()]));
    assert!(message.contains("format `messages` needs a chat template, and the model has none"), "{message}");
    let none = DataConfig { chat_template: "none".into(), ..config(vec![chat]) };
    let message = Dataset::open(&none, chat_tokenizer(), 7, &OpenOptions::default()).unwrap_err().to_string();
    assert!(message.contains("and `data.chat_template` = \"none\" turns it off\n  hint: set"), "{message}");

    // Where the model has a template, a question and an answer become turns.
    let rows = files.write("p.jsonl", "{\"prompt\": \"ab\", \"completion\": \"c\"}");
    let text = |chat_template: &str| {
        let config = DataConfig { chat_template: chat_template.into(), ..config(vec![rows.clone()]) };
        let dataset = Dataset::open(&config, chat_tokenizer(), 7, &OpenOptions::default()).unwrap();
        chat_tokenizer().decode(&dataset.train_row(0).unwrap().1.ids, false).unwrap()
    };
    let asked =
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n";
    assert_eq!((text("auto").as_str(), text("none").as_str()), (asked, "<s>abc<|im_end|>"));

    let alpaca = files.write("a.jsonl", "{\"instruction\": \"i\", \"output\": \"o\"}");
    let (_, row) = open(&config(vec![alpaca])).train_row(0).unwrap();
    let text = tokenizer().decode(&row.ids, false).unwrap();
    assert!(text.starts_with("<s>Below is an instruction") && text.ends_with("\n\n### Response:o</s>"), "{text}");
    assert_eq!(row.num_target_tokens(), 2);
}
