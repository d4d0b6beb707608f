use std::sync::Arc;

use super::*;
use crate::data::fixture::{Files, chat_tokenizer, config, tokenizer};
use crate::data::pipeline::{Cursor, DataPipeline, OpenOptions};

/// A row of `len` letters, the last of which carry loss.
fn row(len: usize) -> String {
    format!("{{\"prompt\": \"p\", \"completion\": \"{}\"}}\n", "c".repeat(len))
}

/// Lengths from 2 to 201, in no order.
fn length(index: usize) -> usize {
    let mixed = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    usize::try_from((mixed >> 40) % 200).unwrap() + 2
}

fn look(config: &DataConfig) -> Survey {
    Survey::look(config, &tokenizer(), 7).unwrap()
}

/// Micro-batches, rows of them and tokens of an epoch.
fn surveyed(survey: &Survey, micro_batch_size: usize) -> (u64, usize, usize) {
    let batches = survey.micro_batches(micro_batch_size);
    let tokens = batches.iter().flatten().flatten().map(|document| document.tokens).sum();
    (survey.batches_per_epoch(micro_batch_size), batches.iter().map(Vec::len).sum(), tokens)
}

/// The same of the epoch that is trained on.
fn visited(config: &DataConfig, micro_batch_size: usize) -> (u64, usize, usize) {
    let data = DataPipeline::open(config, Arc::new(tokenizer()), 7, &OpenOptions::default()).unwrap();
    let mut loader = data.loader(Cursor::default(), micro_batch_size).unwrap();
    let (mut rows, mut tokens) = (0, 0);
    loop {
        let loaded = loader.next_batch().unwrap();
        (rows, tokens) = (rows + loaded.batch.num_rows(), tokens + loaded.batch.num_tokens());
        if loaded.last_of_epoch {
            return (data.batches_per_epoch(micro_batch_size), rows, tokens);
        }
    }
}

#[test]
fn of_a_few_rows_the_whole_epoch_is_known_packed_and_unpacked() {
    let files = Files::new();
    let sources = vec![
        files.write("a.jsonl", &(0..150).map(|index| row(length(index))).collect::<String>()),
        DataSource { weight: 2.0, ..files.write("b.json", &format!("[{},{}]", row(30), row(120))) },
    ];
    for packing in [false, true] {
        let config = DataConfig { packing, shuffle: true, max_length: 256, ..config(sources.clone()) };
        let survey = look(&config);
        assert_eq!((survey.rows_per_epoch, survey.is_counted, survey.num_sampled), (154, true, 152));
        assert_eq!(surveyed(&survey, 4), visited(&config, 4), "packing: {packing}");
    }
}

#[test]
fn rows_of_large_files_and_their_lengths_are_estimated_from_bytes() {
    let files = Files::new();
    let rows: Vec<String> = (0..180_000).map(|index| row(length(index))).collect();
    let exact = (0..180_000).map(|index| length(index) + 3).sum::<usize>() / 180_000;
    let lines = rows.concat();
    assert!(lines.len() as u64 > LARGE_FILE_BYTES);
    let array = format!("[{}]", lines.trim().replace('\n', ","));
    for (name, content) in [("r.jsonl", &lines), ("r.json", &array)] {
        let survey = look(&config(vec![files.write(name, content)]));
        assert!(!survey.is_counted && survey.num_sampled >= 500, "{name}: {survey:?}");
        let rows = survey.rows_per_epoch;
        assert!(rows.abs_diff(180_000) < 3_600, "{name}: {rows} rows");
        let (_, _, tokens) = surveyed(&survey, 1);
        let mean = tokens / survey.num_rows();
        assert!(mean.abs_diff(exact) <= 8, "{name}: {mean} tokens a row, not {exact}");
    }
}

#[test]
fn a_file_of_few_long_rows_counts_no_more_than_its_rows() {
    let files = Files::new();
    files.write("rows-a.jsonl", &row(10).repeat(20_000));
    files.write("rows-b.jsonl", &row(200).repeat(400));
    let source = DataSource { path: files.path("rows-*.jsonl").display().to_string(), ..files.write("c.jsonl", "") };
    let survey = look(&config(vec![source]));
    assert_eq!((survey.rows_per_epoch, survey.is_counted), (20_400, true));
    let (_, _, tokens) = surveyed(&survey, 1);
    let (mean, exact) = (tokens as f64 / survey.num_rows() as f64, (20_000.0 * 13.0 + 400.0 * 203.0) / 20_400.0);
    assert!((mean / exact - 1.0).abs() < 0.2, "{mean} tokens a row, not {exact}");
}

#[test]
fn long_rows_at_one_end_of_a_large_file_count_no_more_than_they_are() {
    let files = Files::new();
    // Half of the bytes are rows of 40 bytes, half of them rows of 4000.
    let content = row(10).repeat(220_000) + &row(4000).repeat(2_200);
    assert!(content.len() as u64 > LARGE_FILE_BYTES);
    let survey = look(&DataConfig { max_length: 8192, ..config(vec![files.write("r.jsonl", &content)]) });
    let (_, _, tokens) = surveyed(&survey, 1);
    let (mean, exact) = (tokens as f64 / survey.num_rows() as f64, (220_000.0 * 13.0 + 2_200.0 * 4003.0) / 222_200.0);
    assert!((mean / exact - 1.0).abs() < 0.3, "{mean} tokens a row, not {exact}");
}

#[test]
fn rows_of_files_that_were_not_looked_at_are_counted_by_their_bytes() {
    let files = Files::new();
    for index in 0..20 {
        files.write(&format!("{index:02}.jsonl"), &row(40).repeat(50));
    }
    let survey = look(&config(vec![files.source("*.jsonl")]));
    assert_eq!((survey.rows_per_epoch, survey.is_counted), (1000, false));
}

#[test]
fn a_row_too_long_to_be_looked_at_fills_its_length() {
    let files = Files::new();
    let survey = look(&config(vec![files.write("r.jsonl", &(row(3) + &row(300_000)))]));
    assert_eq!(surveyed(&survey, 1), (2, 2, 6 + 1024));
}

#[test]
fn held_out_rows_and_rows_without_loss_are_left_out() {
    let files = Files::new();
    let rows = (row(10).repeat(30)) + &"{\"prompt\": \"p\", \"completion\": 1}\n".repeat(10);
    let source = files.write("r.jsonl", &rows);
    let config = DataConfig { eval_split: Some(EvalSplit::Rows(8)), ..config(vec![source]) };
    let survey = look(&config);
    // What cannot be used is not visited.
    assert_eq!((survey.rows_per_epoch, surveyed(&survey, 32).0), (22, 1));
    assert_eq!(surveyed(&survey, 1), (22, 22, 22 * 13));
    let none = DataConfig { eval_split: Some(EvalSplit::Rows(40)), ..config };
    let error = Survey::look(&none, &tokenizer(), 7).unwrap_err().to_string();
    assert!(error.contains("`data.eval_split` holds out 40 of 30"), "{error}");
}

#[test]
fn a_text_is_as_many_windows_as_it_has_tokens() {
    let files = Files::new();
    let short = DataConfig { max_length: 10, ..config(vec![files.write("t.txt", &"x".repeat(95))]) };
    let survey = look(&short);
    // BOS and EOS make 97 tokens.
    assert_eq!((survey.is_counted, surveyed(&survey, 1)), (true, (10, 10, 97)));
    let long = DataConfig { max_length: 1000, ..config(vec![files.write("l.txt", &"xyz ".repeat(500_000))]) };
    let survey = look(&long);
    assert!(!survey.is_counted && survey.rows_per_epoch.abs_diff(2000) <= 2, "{survey:?}");
}

#[test]
fn conversations_go_through_the_template() {
    let files = Files::new();
    let chat =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\"}]}\n";
    let config = config(vec![files.write("r.jsonl", chat)]);
    let data = DataPipeline::open(&config, chat_tokenizer(), 7, &OpenOptions::default()).unwrap();
    let expected = data.train_row(0).unwrap().1;
    let survey = Survey::look(&config, &chat_tokenizer(), 7).unwrap();
    let size = RowSize { tokens: expected.ids.len(), target_tokens: expected.num_target_tokens() };
    assert_eq!(survey.micro_batches(1), [[[size]]]);
    let error = Survey::look(&config, &tokenizer(), 7).unwrap_err().to_string();
    assert!(error.contains("chat template"), "{error}");
}
