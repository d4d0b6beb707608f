use std::fs;
use std::ops::Range;
use std::sync::Arc;

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::config::{DataConfig, DataSource, OnBadRow, RowKind, RowLimit, TrainOnTurns};
use crate::data::batch::RowSource;
use crate::data::dataset::{Cursor, Dataset, OpenOptions};
use crate::data::encode::EncodedRow;
use crate::data::error::DataError;
use crate::data::fixture::{self, CHATML, Files, chat_tokenizer, config, model_folder, numbered_rows, tokenizer};
use crate::data::tokenizer::Tokenizer;
use crate::images::{Images, Limits, is_of_image};
use crate::spec::{ModelConfig, Vision};
use crate::util::files::UNFINISHED_SUFFIX;

mod damage;

/// A cache folder that does not exist yet.
struct Cache(TempDir);

impl Cache {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn folder(&self) -> PathBuf {
        self.0.path().join("cache/tokens")
    }

    fn options(&self) -> OpenOptions<'static> {
        let cache = CacheSettings { folder: Some(self.folder()), max_bytes: MAX_CACHE_BYTES, min_file_bytes: 0 };
        OpenOptions { cache, ..OpenOptions::default() }
    }

    fn open(&self, config: &DataConfig, tokenizer: &Arc<Tokenizer>) -> Result<Dataset, DataError> {
        Dataset::open(config, Arc::clone(tokenizer), 7, &self.options())
    }

    fn stores(&self) -> Vec<PathBuf> {
        let mut paths: Vec<_> =
            self.entries().into_iter().filter(|path| path.extension().unwrap() == "tokens").collect();
        paths.sort();
        paths
    }

    fn entries(&self) -> Vec<PathBuf> {
        fs::read_dir(self.folder())
            .map(|entries| entries.map(|entry| entry.unwrap().path()).collect())
            .unwrap_or_default()
    }
}

/// Whether the tokens of each file were read from disk.
fn is_hit(dataset: &Dataset) -> bool {
    dataset.files().iter().all(|file| file.kept_tokens.is_some_and(|kept| !kept.is_new))
}

/// Where the records of a token file are.
fn records(store: &[u8]) -> Range<usize> {
    let number = |at: usize| usize::try_from(u64::from_le_bytes(*store[at..].first_chunk().unwrap())).unwrap();
    128..128 + number(56)
}

fn rows(dataset: &Dataset) -> Vec<(RowSource, EncodedRow)> {
    (0..dataset.num_train_rows()).map(|row| dataset.train_row(row).unwrap()).collect()
}

fn packed(sources: Vec<DataSource>) -> DataConfig {
    DataConfig { packing: true, max_length: 64, ..config(sources) }
}

/// A file of each format and layout. Some rows are cut, and some have no answer left.
fn all_formats(files: &Files) -> Vec<DataSource> {
    let mut sources = Vec::new();
    let mut lines = |name: &str, row: &dyn Fn(usize) -> serde_json::Value| {
        let text: String = (0..300).map(|index| row(index).to_string() + "\n").collect();
        sources.push(files.write(name, &text));
    };
    let words = |count: usize| "ab é ".repeat(count % 23);
    let turn = |role: &str, content: String| json!({"role": role, "content": content});
    lines(
        "messages.jsonl",
        &|i| json!({"messages": [turn("user", words(i)), turn("assistant", words(i + 1))], "id": i}),
    );
    lines(
        "sharegpt.jsonl",
        &|i| json!({"conversations": [{"from": "human", "value": words(i)}, {"from": "gpt", "value": i.to_string()}]}),
    );
    lines("alpaca.jsonl", &|i| json!({"instruction": words(i), "input": "x", "output": words(i / 2)}));
    lines("completion.jsonl", &|i| json!({"prompt": words(i), "completion": i.to_string()}));
    lines("text.jsonl", &|i| json!({"text": words(i)}));
    let cells: String = (0..300).map(|i| format!("{},\"{}\n\"\n", words(i), words(i / 2))).collect();
    sources.push(files.write("cells.csv", &format!("prompt,response\n{cells}")));
    std::fs::write(
        files.path("packed.csv.gz"),
        fixture::packed("gz", format!("text\n{cells}").replace(",\"", "\n\"").as_bytes()),
    )
    .unwrap();
    sources.push(DataSource { rows: Some(RowLimit::Percent(50.0)), ..files.source("packed.csv.gz") });
    let array: Vec<_> = (0..200).map(|i| json!({"text": format!("{i}: {}", words(i))})).collect();
    sources.push(files.write("array.json", &serde_json::to_string(&array).unwrap()));
    sources.push(files.write("document.txt", &words(22).repeat(50)));
    sources
}

#[test]
fn kept_tokens_are_those_of_a_fresh_pass_in_every_format() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), chat_tokenizer());
    let sources = all_formats(&files);
    for train_on_inputs in [false, true] {
        let config = DataConfig { train_on_inputs, shuffle: true, ..packed(sources.clone()) };
        let fresh = Dataset::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
        assert!(fresh.files().iter().all(|file| file.kept_tokens.is_none()));
        let expected = rows(&fresh);
        let counts = fresh.train_counts().unwrap();
        assert!(counts.truncated > 0 && (train_on_inputs || counts.answer_cut > 0), "{counts:?}");
        let made = cache.open(&config, &tokenizer).unwrap();
        let read = cache.open(&config, &tokenizer).unwrap();
        assert!(!is_hit(&made) && is_hit(&read));
        for kept in [&made, &read] {
            assert_eq!(rows(kept), expected);
            assert_eq!(kept.batches_per_epoch(2), fresh.batches_per_epoch(2));
        }
        for (kept, fresh) in read.files().iter().zip(fresh.files()) {
            let fresh = crate::data::files::FileInfo { kept_tokens: kept.kept_tokens, ..fresh.clone() };
            assert_eq!(kept, &fresh);
        }
    }
    assert_eq!(cache.stores().len(), 2 * sources.len());
    assert!(cache.entries().iter().all(|path| !path.to_string_lossy().ends_with(UNFINISHED_SUFFIX)));
}

#[test]
fn kept_tokens_of_preferences_are_those_of_a_fresh_pass() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), chat_tokenizer());
    let words = |count: usize| "ab é ".repeat(count % 23);
    let rows_of =
        |row: &dyn Fn(usize) -> serde_json::Value| (0..200).map(|i| row(i).to_string() + "\n").collect::<String>();
    let pairs = rows_of(&|i| json!({"prompt": words(i), "chosen": i.to_string(), "rejected": words(i + 1) + "x"}));
    // Some look like marks.
    let margin = |i: usize| [0.0, 2.0, -0.25, 1e-30][i % 4];
    let scored = rows_of(
        &|i| json!({"prompt": words(i), "chosen": i.to_string(), "rejected": words(i % 9) + "x", "margin": margin(i)}),
    );
    let labelled = rows_of(&|i| json!({"prompt": words(i), "completion": words(i + 1) + "x", "label": i % 3 == 0}));
    for (name, text, row_kind) in [
        ("pairs.jsonl", pairs, RowKind::Pair),
        ("labelled.jsonl", labelled, RowKind::Labelled),
        ("scored.jsonl", scored, RowKind::ScoredPair),
    ] {
        let config = DataConfig { row_kind, ..packed(vec![files.write(name, &text)]) };
        let fresh = Dataset::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
        let counts = fresh.train_counts().unwrap();
        assert!(counts.truncated > 0 && counts.answer_cut > 0 && counts.bad == 0, "{counts:?}");
        for is_kept in [false, true] {
            let kept = cache.open(&config, &tokenizer).unwrap();
            assert_eq!((is_hit(&kept), rows(&kept)), (is_kept, rows(&fresh)));
        }
        let capacity = 64 * row_kind.num_sequences();
        let mut loader = fresh.loader(Cursor::default(), 2).unwrap();
        for _ in 0..fresh.batches_per_epoch(2) {
            let batch = loader.next_batch().unwrap().batch;
            assert_eq!(batch.answers.len(), batch.documents.len());
            assert!(batch.documents.iter().all(|document| document.len <= 64));
            assert!(batch.row_lengths.iter().all(|length| *length <= capacity));
        }
    }
}

#[test]
fn only_large_files_keep_tokens_and_are_refused_without_them_where_that_is_asked_for() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let try_open = |config: &DataConfig, refuse_large: bool| {
        let cache = CacheSettings { min_file_bytes: LARGE_FILE_BYTES, ..cache.options().cache };
        let options = OpenOptions { cache, refuse_large, ..OpenOptions::default() };
        Dataset::open(config, Arc::clone(&tokenizer), 7, &options)
    };
    let open = |config: &DataConfig| try_open(config, false).unwrap();
    let small = packed(vec![files.write("r.jsonl", &numbered_rows(3))]);
    assert!(open(&small).files()[0].kept_tokens.is_none());
    assert!(try_open(&small, true).is_ok());
    assert!(cache.entries().is_empty(), "nothing is written for it");
    let row = json!({"text": "ab ".repeat(100)}).to_string() + "\n";
    let large = files.write("large.jsonl", &row.repeat(1 + (16 << 20) / row.len()));
    let large = DataConfig { max_length: 8, ..config(vec![large]) };
    let error = try_open(&large, true).unwrap_err().to_string();
    assert!(
        error.ends_with("large.jsonl: large, and its tokens are not kept yet: `lora-train check` makes them"),
        "{error}"
    );
    open(&large);
    assert!(is_hit(&try_open(&large, true).unwrap()));
}

#[test]
fn tokens_for_a_model_that_sees_are_kept_unless_a_row_has_an_image() {
    let (files, cache) = (Files::new(), Cache::new());
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images-mistral3");
    let model = ModelConfig::from_file(&golden.join("config.json")).unwrap();
    let vision = Vision::of_folder(&golden, &model).unwrap().unwrap();
    let tokenizer = Arc::new(Tokenizer::open(&golden).unwrap());
    let open = |source: &DataSource, sees: bool, options: OpenOptions<'_>| {
        let limits = Limits { folder: Some(golden.clone()), max_length: 64, ..Limits::default() };
        let images = sees.then(|| Arc::new(Images::new(Ok(vision.clone()), limits)));
        let config = DataConfig { max_length: 64, on_bad_row: OnBadRow::Skip, ..config(vec![source.clone()]) };
        Dataset::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions { images, ..options }).unwrap()
    };
    let row = |text: &str, images: &[&str]| {
        let said = [json!({"role": "user", "content": text}), json!({"role": "assistant", "content": "x"})];
        json!({"messages": said, "images": images}).to_string() + "\n"
    };
    let texts: String = (0..300).map(|index| row(&format!("{index}?"), &[])).collect();
    let text = files.write("texts.jsonl", &texts);
    let made = open(&text, true, cache.options());
    assert!(!is_hit(&made));
    let read = open(&text, true, cache.options());
    assert!(is_hit(&read));
    assert_eq!(rows(&read), rows(&made));
    assert!(!is_hit(&open(&text, false, cache.options())), "rows may be read otherwise for a model that does not see");

    // The image comes when other rows are written already.
    let num_stores = cache.stores().len();
    for (image, num_rows) in [("a.png", 301), ("lost.png", 300)] {
        let seen = files.write(&format!("{image}.jsonl"), &(texts.clone() + &row("<image>?", &[image])));
        for _ in 0..2 {
            let held = open(&seen, true, cache.options());
            assert!(held.files()[0].kept_tokens.is_none());
            let found = rows(&held);
            let has_image = found[num_rows - 1].1.ids.iter().any(|id| is_of_image(*id));
            assert_eq!((found.len(), has_image), (num_rows, num_rows == 301));
            assert_eq!(found, rows(&open(&seen, true, OpenOptions::default())));
        }
    }
    assert_eq!(cache.stores().len(), num_stores);
    let is_unfinished = |path: &PathBuf| path.to_string_lossy().ends_with(UNFINISHED_SUFFIX);
    assert!(!cache.entries().iter().any(is_unfinished));
}

#[test]
fn whatever_changes_tokens_makes_them_anew() {
    let (files, cache) = (Files::new(), Cache::new());
    let source = files.write("m.jsonl", &"{\"a\": \"x\", \"text\": \"y\"}\n".repeat(5));
    let tokenizer = Arc::new(tokenizer());
    let config = packed(vec![source.clone()]);
    let opens = |config: &DataConfig, tokenizer: &Arc<Tokenizer>| is_hit(&cache.open(config, tokenizer).unwrap());
    assert!(!opens(&config, &tokenizer));
    assert!(opens(&config, &tokenizer));
    let other = DataConfig { shuffle: true, num_workers: 3, max_length: 65, packing: false, ..config.clone() };
    assert!(opens(&other, &tokenizer), "not a matter of tokens");

    let everything = DataConfig { train_on_inputs: true, ..config.clone() };
    let mut renamed = config.clone();
    renamed.train[0].columns.insert("text".into(), "a".into());
    let mut fewer = config.clone();
    fewer.train[0].rows = Some(RowLimit::Rows(4));
    let last = DataConfig { train_on_turns: TrainOnTurns::Last, ..config.clone() };
    let other_special = model_folder(&json!({"bos_token": "<s>", "eos_token": "<|im_end|>"}));
    let other_special = Arc::new(Tokenizer::open(other_special.path()).unwrap());
    let folder = model_folder(&json!({"bos_token": "<s>", "eos_token": "</s>"}));
    let text = fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("tokenizer.json"), text.replace("\"merges\":[[\"a\",\"b\"]]", "\"merges\":[]"))
        .unwrap();
    let other_vocabulary = Arc::new(Tokenizer::open(folder.path()).unwrap());
    for (what, config, tokenizer) in [
        ("train_on_inputs", &everything, &tokenizer),
        ("columns", &renamed, &tokenizer),
        ("rows", &fewer, &tokenizer),
        ("train_on_turns", &last, &tokenizer),
        ("special tokens", &config, &other_special),
        ("tokenizer.json", &config, &other_vocabulary),
    ] {
        assert!(!opens(config, tokenizer), "{what}");
        assert!(opens(config, tokenizer), "{what}");
    }

    // The size stays equal, and perhaps the time too.
    let before = rows(&cache.open(&config, &tokenizer).unwrap());
    files.write("m.jsonl", &"{\"a\": \"x\", \"text\": \"z\"}\n".repeat(5));
    let changed = cache.open(&config, &tokenizer).unwrap();
    assert!(!is_hit(&changed));
    assert_ne!(rows(&changed), before);
    files.write("m.jsonl", &"{\"a\": \"x\", \"text\": \"y\"}\n".repeat(5));
    let back = cache.open(&config, &tokenizer).unwrap();
    assert!(is_hit(&back), "by content, not by time");
    assert_eq!(rows(&back), before);
}

#[test]
fn a_changed_template_makes_tokens_anew_and_one_that_asks_for_the_time_keeps_none() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), chat_tokenizer());
    let row = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    let source = files.write("m.jsonl", &(row.to_string() + "\n"));
    let template = |source: &str| {
        fs::write(files.path("t.jinja"), source).unwrap();
        DataConfig {
            chat_template: files.path("t.jinja").to_str().unwrap().into(),
            ..packed(vec![files.source("m.jsonl")])
        }
    };
    let opens = |config: &DataConfig| is_hit(&cache.open(config, &tokenizer).unwrap());
    let auto = packed(vec![source]);
    assert!(!opens(&auto) && opens(&auto));
    assert!(opens(&template(CHATML)), "the same source from a file");
    let other = template(&CHATML.replace("be kind", "be brief"));
    assert!(!opens(&other) && opens(&other));
    let dated = template(&format!("{{{{ strftime_now('%Y') }}}}{CHATML}"));
    assert!(!opens(&dated) && opens(&dated));
    let kept = cache.stores().len();
    let timed = template(&format!("{{{{ strftime_now('%H') }}}}{CHATML}"));
    assert!(!opens(&timed) && !opens(&timed));
    assert_eq!(cache.stores().len(), kept);
}

/// If this fails, the stored form of a row has changed: increase `FORMAT_VERSION` and update this number.
#[test]
fn what_is_kept_of_a_row_changes_only_with_the_version() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), chat_tokenizer());
    let sources = all_formats(&files);
    cache.open(&packed(sources.clone()), &tokenizer).unwrap();
    // Each file alone, ordered by content, since the names in the cache vary.
    let mut records: Vec<u32> = cache
        .stores()
        .iter()
        .map(|store| {
            let bytes = fs::read(store).unwrap();
            crc32fast::hash(&bytes[records(&bytes)])
        })
        .collect();
    records.sort_unstable();
    let records: Vec<u8> = records.iter().flat_map(|crc| crc.to_le_bytes()).collect();
    assert_eq!((FORMAT_VERSION, crc32fast::hash(&records)), (13, 4_099_099_636));
}

#[test]
fn bad_rows_are_skipped_counted_and_named_kept_or_not() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let mut lines: Vec<String> = numbered_rows(500).lines().map(str::to_owned).collect();
    for row in [3, 200, 201, 202, 203, 204, 499] {
        lines[row] = ["{\"text\": null}", "{\"text\"", "[]"][row % 3].into();
    }
    let source = files.write("r.jsonl", &lines.join("\n"));
    for packing in [false, true] {
        let skip = DataConfig { on_bad_row: OnBadRow::Skip, packing, max_length: 64, ..config(vec![source.clone()]) };
        let fresh = Dataset::open(&skip, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
        let expected = rows(&fresh);
        let bad: Vec<usize> = (0..500).filter(|row| fresh.file_row(*row).unwrap().1.problem.is_some()).collect();
        assert_eq!(bad, [3, 200, 201, 202, 203, 204, 499]);
        let warning = &fresh.warnings()[0];
        assert!(warning.contains("r.jsonl: 7 of 500 rows cannot be used and are skipped:"), "{warning}");
        assert!(warning.contains("\n  line 4: `text` must be text, not null\n    and likewise 2 more: "), "{warning}");
        assert!(warning.contains("\n  line 201: "), "{warning}");
        for _ in 0..2 {
            let kept = cache.open(&skip, &tokenizer).unwrap();
            assert_eq!((rows(&kept), kept.warnings()), (expected.clone(), fresh.warnings()));
        }
        let mut loader = fresh.loader(Cursor::default(), 500).unwrap();
        let loaded = loader.next_batch().unwrap();
        assert_eq!((loaded.report.bad, loaded.report.rows, loaded.batch.sources.len()), (0, 493, 493));
        // A row skipped under one setting is an error under the other, even though its tokens are cached.
        let error =
            cache.open(&DataConfig { on_bad_row: OnBadRow::Error, packing: true, ..skip }, &tokenizer).unwrap_err();
        assert!(error.to_string().contains("r.jsonl:line 4: `text` must be text"), "{error}");
    }
    let hopeless = files.write("bad.jsonl", "{\"text\": null}\n{\"text\": []}\n");
    let skip = DataConfig { on_bad_row: OnBadRow::Skip, ..config(vec![hopeless]) };
    let error = cache.open(&skip, &tokenizer).unwrap_err().to_string();
    assert!(error.contains("bad.jsonl: none of its 2 rows can be used; the first: "), "{error}");
}
