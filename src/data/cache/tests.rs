use std::fs::{self, OpenOptions as FileOptions};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::json;
use tempfile::TempDir;

use super::store::Unusable;
use super::*;
use crate::data::batch::RowSource;
use crate::data::config::{DataConfig, DataSource, OnBadRow};
use crate::data::encode::EncodedRow;
use crate::data::error::DataError;
use crate::data::fixture::{CHATML, Files, chat_tokenizer, config, model_folder, numbered_rows, tokenizer};
use crate::data::pipeline::{Cursor, DataPipeline, OpenOptions};
use crate::data::tokenizer::Tokenizer;

/// A cache folder that is not there yet.
struct Cache(TempDir);

impl Cache {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn folder(&self) -> PathBuf {
        self.0.path().join("cache/tokens")
    }

    fn options(&self) -> OpenOptions<'static> {
        let cache = CacheSettings { folder: Some(self.folder()), max_bytes: MAX_CACHE_BYTES };
        OpenOptions { cache, ..OpenOptions::default() }
    }

    fn open(&self, config: &DataConfig, tokenizer: &Arc<Tokenizer>) -> Result<DataPipeline, DataError> {
        DataPipeline::open(config, Arc::clone(tokenizer), 7, &self.options())
    }

    /// The token files.
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
fn is_hit(pipeline: &DataPipeline) -> bool {
    pipeline.files().iter().all(|file| file.kept_tokens.is_some_and(|kept| !kept.is_new))
}

fn rows(pipeline: &DataPipeline) -> Vec<(RowSource, EncodedRow)> {
    (0..pipeline.num_train_rows()).map(|row| pipeline.train_row(row).unwrap()).collect()
}

/// With `packing`, tokens are kept of small files too.
fn packed(sources: Vec<DataSource>) -> DataConfig {
    DataConfig { packing: true, max_length: 64, ..config(sources) }
}

/// A file of each format and layout, some rows of which are cut and some of which have no answer left.
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
        let fresh = DataPipeline::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
        assert!(fresh.files().iter().all(|file| file.kept_tokens.is_none()));
        let expected = rows(&fresh);
        assert!(
            expected.iter().any(|(_, row)| row.is_truncated())
                && (train_on_inputs || expected.iter().any(|(_, row)| row.is_answer_cut()))
        );
        let made = cache.open(&config, &tokenizer).unwrap();
        let read = cache.open(&config, &tokenizer).unwrap();
        assert!(!is_hit(&made) && is_hit(&read));
        for kept in [&made, &read] {
            assert_eq!(rows(kept), expected);
            assert_eq!(kept.batches_per_epoch(2), fresh.batches_per_epoch(2));
            for num_workers in [0, 1, 3] {
                let config = DataConfig { num_workers, ..config.clone() };
                let kept = cache.open(&config, &tokenizer).unwrap();
                let (mut ours, mut theirs) = (
                    kept.loader(Cursor { epoch: 1, batch: 3 }, 2).unwrap(),
                    fresh.loader(Cursor { epoch: 1, batch: 3 }, 2).unwrap(),
                );
                for _ in 0..40 {
                    assert_eq!(ours.next_batch().unwrap(), theirs.next_batch().unwrap(), "{num_workers} workers");
                }
            }
        }
        for (kept, fresh) in read.files().iter().zip(fresh.files()) {
            let fresh = crate::data::sources::FileInfo { kept_tokens: kept.kept_tokens, ..fresh.clone() };
            assert_eq!(kept, &fresh);
        }
    }
    assert_eq!(cache.stores().len(), 2 * sources.len());
    assert!(cache.entries().iter().all(|path| !path.to_string_lossy().ends_with(UNFINISHED_SUFFIX)));
}

#[test]
fn only_packing_large_files_and_skipping_keep_tokens() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let source = files.write("r.jsonl", &numbered_rows(3));
    let plain = config(vec![source.clone()]);
    assert!(cache.open(&plain, &tokenizer).unwrap().files()[0].kept_tokens.is_none());
    assert!(cache.entries().is_empty(), "nothing is written for it");
    cache.open(&DataConfig { on_bad_row: OnBadRow::Skip, ..plain.clone() }, &tokenizer).unwrap();
    assert_eq!(cache.stores().len(), 1);
    let row = json!({"text": "ab ".repeat(100)}).to_string() + "\n";
    let large = files.write("large.jsonl", &row.repeat(1 + (16 << 20) / row.len()));
    let large = DataConfig { max_length: 8, ..config(vec![large]) };
    cache.open(&large, &tokenizer).unwrap();
    assert!(is_hit(&cache.open(&large, &tokenizer).unwrap()));
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
    assert!(
        opens(&DataConfig { shuffle: true, num_workers: 3, ..config.clone() }, &tokenizer),
        "not a matter of tokens"
    );

    let longer = DataConfig { max_length: 65, ..config.clone() };
    let everything = DataConfig { train_on_inputs: true, ..config.clone() };
    let mut renamed = config.clone();
    renamed.train[0].columns.insert("text".into(), "a".into());
    let other_special = model_folder(&json!({"bos_token": "<s>", "eos_token": "<|im_end|>"}));
    let other_special = Arc::new(Tokenizer::open(other_special.path()).unwrap());
    let folder = model_folder(&json!({"bos_token": "<s>", "eos_token": "</s>"}));
    let text = fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("tokenizer.json"), text.replace("\"merges\":[[\"a\",\"b\"]]", "\"merges\":[]"))
        .unwrap();
    let other_vocabulary = Arc::new(Tokenizer::open(folder.path()).unwrap());
    for (what, config, tokenizer) in [
        ("max_length", &longer, &tokenizer),
        ("train_on_inputs", &everything, &tokenizer),
        ("columns", &renamed, &tokenizer),
        ("special tokens", &config, &other_special),
        ("tokenizer.json", &config, &other_vocabulary),
    ] {
        assert!(!opens(config, tokenizer), "{what}");
        assert!(opens(config, tokenizer), "{what}");
    }

    // The same size, and perhaps the same time.
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
    let timed = template(&format!("{{{{ strftime_now('%Y' ~ '') }}}}{CHATML}"));
    assert!(!opens(&timed) && !opens(&timed));
    assert_eq!(cache.stores().len(), kept);
}

#[test]
fn damaged_and_foreign_files_are_never_believed() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    let expected = rows(&cache.open(&config, &tokenizer).unwrap());
    let store = cache.stores().remove(0);
    let sound = fs::read(&store).unwrap();
    // Every bit of the header and of the tables, and some of each record.
    let tables = sound.len() - 40 * usize::try_from(store::TABLE_BYTES_PER_ROW).unwrap();
    let places = (0..128).chain((128..tables).step_by(7)).chain((tables - 300..sound.len()).step_by(3));
    let mut num_found_at_start = 0;
    for place in places {
        let mut bytes = sound.clone();
        bytes[place] ^= 1 << (place % 8);
        fs::write(&store, &bytes).unwrap();
        let opened = cache.open(&config, &tokenizer).unwrap();
        num_found_at_start += usize::from(!is_hit(&opened));
        assert_eq!(rows(&opened), expected, "byte {place}");
        // Whether it was found at the start or at a row, the next start has a sound one.
        drop(cache.open(&config, &tokenizer).unwrap());
        assert_eq!(fs::read(&store).unwrap(), sound, "byte {place}");
    }
    assert!(num_found_at_start >= 128, "{num_found_at_start}");
    for bytes in [
        &[],
        &sound[..7],
        &sound[..127],
        &sound[..128],
        &sound[..sound.len() - 1],
        &[sound.clone(), vec![0]].concat()[..],
    ] {
        fs::write(&store, bytes).unwrap();
        let opened = cache.open(&config, &tokenizer).unwrap();
        assert!(!is_hit(&opened));
        assert_eq!(rows(&opened), expected, "{} bytes", bytes.len());
    }
    // The tokens of another file under this name.
    let other = packed(vec![files.write("other.jsonl", &numbered_rows(41))]);
    cache.open(&other, &tokenizer).unwrap();
    let foreign = cache.stores().into_iter().find(|path| *path != store).unwrap();
    fs::copy(&foreign, &store).unwrap();
    let opened = cache.open(&config, &tokenizer).unwrap();
    assert!(!is_hit(&opened));
    assert_eq!(rows(&opened), expected);
}

#[test]
fn lengths_that_no_file_has_are_refused_before_anything_is_allocated() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    cache.open(&config, &tokenizer).unwrap();
    let store = cache.stores().remove(0);
    let sound = fs::read(&store).unwrap();
    let key = CacheKey(*sound[16..].first_chunk().unwrap());
    for (at, number) in
        [(48, u64::MAX), (48, u64::MAX / 12), (56, u64::MAX - 200), (64, u64::MAX), (48, 1 << 40), (56, 0)]
    {
        let mut bytes = sound.clone();
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        let crc = crc32fast::hash(&bytes[12..128]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        fs::write(&store, &bytes).unwrap();
        let opened = TokenStore::open(&store, key, 64, tokenizer.max_id());
        assert!(matches!(opened, Err(Unusable::Damaged)), "{number} at {at}");
    }
    // A token that the model has no embedding for, with a right checksum.
    let mut bytes = sound.clone();
    let first =
        128..128 + usize::try_from(u64::from_le_bytes(*sound[ends_at(&sound)..].first_chunk().unwrap())).unwrap();
    bytes[first.start + 16..first.start + 20].copy_from_slice(&261_u32.to_le_bytes());
    let crc = crc32fast::hash(&bytes[first.start + 4..first.end]);
    bytes[first.start..first.start + 4].copy_from_slice(&crc.to_le_bytes());
    fs::write(&store, &bytes).unwrap();
    assert_eq!(TokenStore::open(&store, key, 64, 261).unwrap().read(0).unwrap().ids[0], 261);
    assert!(TokenStore::open(&store, key, 64, 260).unwrap().read(0).is_none());
    assert!(matches!(TokenStore::open(&store, key, 3, 261), Err(Unusable::Damaged)), "rows longer than there can be");
}

fn ends_at(store: &[u8]) -> usize {
    128 + usize::try_from(u64::from_le_bytes(*store[56..].first_chunk().unwrap())).unwrap()
}

#[test]
fn a_cache_that_is_damaged_after_the_start_is_replaced_by_the_data_file() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    cache.open(&config, &tokenizer).unwrap();
    let expected = rows(&cache.open(&config, &tokenizer).unwrap());
    for case in ["zeroed", "cut", "data changed"] {
        let opened = cache.open(&config, &tokenizer).unwrap();
        let file = FileOptions::new().write(true).open(&cache.stores()[0]).unwrap();
        if case == "zeroed" {
            file.write_all_at(&[0; 400], 500).unwrap();
        } else {
            file.set_len(400).unwrap();
        }
        if case == "data changed" {
            files.write("r.jsonl", &numbered_rows(39));
            let error = (0..40).find_map(|row| opened.train_row(row).err()).unwrap().to_string();
            assert!(
                error.contains("r.jsonl: has changed since the start") && error.contains("hint: start again"),
                "{error}"
            );
        } else {
            assert_eq!(rows(&opened), expected, "{case}");
        }
        assert!(cache.stores().is_empty(), "it is thrown away");
        cache.open(&config, &tokenizer).unwrap();
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_a_warning() {
    let (files, tokenizer) = (Files::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(40))]);
    let fresh = DataPipeline::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
    // A file where the folder is to be: refused for root too.
    let folder = files.path("r.jsonl").join("tokens");
    let cache = CacheSettings { folder: Some(folder), max_bytes: 0 };
    let options = OpenOptions { cache, ..OpenOptions::default() };
    let opened = DataPipeline::open(&config, tokenizer, 7, &options).unwrap();
    let warnings = opened.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("its tokens cannot be kept in"), "{warnings:?}");
    assert!(warnings[0].contains("hint: LORA_TRAIN_CACHE names another folder"), "{warnings:?}");
    assert_eq!(rows(&opened), rows(&fresh));
    assert_eq!(opened.batches_per_epoch(1), fresh.batches_per_epoch(1));
}

#[test]
fn starts_at_the_same_time_do_not_harm_each_other() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(3000))]);
    let expected = rows(&DataPipeline::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..3 {
                    let opened = cache.open(&config, &tokenizer).unwrap();
                    assert!(opened.warnings().is_empty(), "{:?}", opened.warnings());
                    assert_eq!(rows(&opened), expected);
                }
            });
        }
    });
    assert_eq!(cache.stores().len(), 1);
    assert!(is_hit(&cache.open(&config, &tokenizer).unwrap()));
}

#[test]
fn an_interruption_leaves_nothing_behind() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let config = packed(vec![files.write("r.jsonl", &numbered_rows(20_000))]);
    let asked = AtomicUsize::new(0);
    let is_stopped = || asked.fetch_add(1, Ordering::Relaxed) > 20;
    let options = OpenOptions { is_stopped: &is_stopped, ..cache.options() };
    let error = DataPipeline::open(&config, Arc::clone(&tokenizer), 7, &options).unwrap_err();
    assert!(matches!(error, DataError::Interrupted));
    assert!(cache.entries().iter().all(|path| path.extension().unwrap() == "sha256"), "{:?}", cache.entries());
    assert!(!is_hit(&cache.open(&config, &tokenizer).unwrap()));
}

#[test]
fn tidying_takes_the_oldest_and_what_killed_processes_left() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    for (age, name) in [
        (3, "old.tokens"),
        (2, "kept.tokens"),
        (1, "new.tokens"),
        (9, "a.unfinished"),
        (9, "b.unfinished"),
        (9, "notes.sha256"),
    ] {
        fs::write(path(name), [0; 100]).unwrap();
        let file = FileOptions::new().write(true).open(path(name)).unwrap();
        file.set_modified(SystemTime::now() - std::time::Duration::from_hours(age)).unwrap();
    }
    let in_use = File::open(path("b.unfinished")).unwrap();
    in_use.lock().unwrap();
    let left = |max_bytes: u64| {
        tidy(folder.path(), max_bytes, &path("kept.tokens"));
        let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(left(300), ["b.unfinished", "kept.tokens", "new.tokens", "notes.sha256", "old.tokens"]);
    assert_eq!(left(299), ["b.unfinished", "kept.tokens", "new.tokens", "notes.sha256"]);
    assert_eq!(left(0), ["b.unfinished", "kept.tokens", "notes.sha256"]);
}

/// If this fails, what is kept of a row has changed: `FORMAT_VERSION` must go up, and this number with it.
#[test]
fn what_is_kept_of_a_row_changes_only_with_the_version() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), chat_tokenizer());
    let sources = all_formats(&files);
    cache.open(&packed(sources.clone()), &tokenizer).unwrap();
    // Each file alone, in the order of their content, whatever they are called in the cache.
    let mut records: Vec<u32> = cache
        .stores()
        .iter()
        .map(|store| {
            let bytes = fs::read(store).unwrap();
            crc32fast::hash(&bytes[128..ends_at(&bytes)])
        })
        .collect();
    records.sort_unstable();
    let records: Vec<u8> = records.iter().flat_map(|crc| crc.to_le_bytes()).collect();
    assert_eq!((FORMAT_VERSION, crc32fast::hash(&records)), (2, 1_925_296_449));
}

#[test]
fn bad_rows_are_skipped_counted_and_named_kept_or_not() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let mut lines: Vec<String> = numbered_rows(500).lines().map(str::to_owned).collect();
    for row in [3, 200, 201, 202, 203, 204, 499] {
        lines[row] = ["{\"text\": 1}", "{\"text\"", "[]"][row % 3].into();
    }
    let source = files.write("r.jsonl", &lines.join("\n"));
    for packing in [false, true] {
        let skip = DataConfig { on_bad_row: OnBadRow::Skip, packing, max_length: 64, ..config(vec![source.clone()]) };
        let fresh = DataPipeline::open(&skip, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
        let expected = rows(&fresh);
        let bad: Vec<usize> = expected.iter().filter(|(_, row)| row.is_bad).map(|(source, _)| source.row).collect();
        assert_eq!(bad, [3, 200, 201, 202, 203, 204, 499]);
        let warning = &fresh.warnings()[0];
        assert!(warning.contains("r.jsonl: 7 of 500 rows cannot be used and are skipped:"), "{warning}");
        assert!(warning.contains("\n  line 4: `text` must be text, not a number\n"), "{warning}");
        assert!(warning.contains("\n  line 204: ") && warning.ends_with("\n  ..."), "{warning}");
        for _ in 0..2 {
            let kept = cache.open(&skip, &tokenizer).unwrap();
            assert_eq!((rows(&kept), kept.warnings()), (expected.clone(), fresh.warnings()));
        }
        let mut loader = fresh.loader(Cursor::default(), 500).unwrap();
        let loaded = loader.next_batch().unwrap();
        assert_eq!((loaded.report.bad, loaded.report.rows, loaded.batch.sources.len()), (7, 500, 493));
        // What was skipped under one setting is an error under the other, though its tokens are there.
        let error =
            cache.open(&DataConfig { on_bad_row: OnBadRow::Error, packing: true, ..skip }, &tokenizer).unwrap_err();
        assert!(error.to_string().contains("r.jsonl:line 4: `text` must be text"), "{error}");
    }
    let hopeless = files.write("bad.jsonl", "{\"text\": 1}\n{\"text\": 2}\n");
    let skip = DataConfig { on_bad_row: OnBadRow::Skip, ..config(vec![hopeless]) };
    let error = cache.open(&skip, &tokenizer).unwrap_err().to_string();
    assert!(error.contains("bad.jsonl: none of its 2 rows can be used; the first: "), "{error}");
}
