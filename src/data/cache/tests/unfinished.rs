//! Tokens that are being made: interrupted, killed, by several at once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use super::*;

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

/// Opens `config` and is stopped after `chunks` chunks of rows.
fn interrupt(cache: &Cache, config: &DataConfig, tokenizer: &Arc<Tokenizer>, chunks: usize) {
    let asked = AtomicUsize::new(0);
    let is_stopped = || asked.fetch_add(1, Ordering::Relaxed) > chunks;
    let options = OpenOptions { is_stopped: &is_stopped, ..cache.options() };
    let error = DataPipeline::open(config, Arc::clone(tokenizer), 7, &options).unwrap_err();
    assert!(matches!(error, DataError::Interrupted));
}

/// The one file that is not finished.
fn unfinished(cache: &Cache) -> PathBuf {
    let mut found = cache.entries();
    found.retain(|path| path.extension().is_some_and(|end| end == "unfinished"));
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Rows of 20,000 with a bad one now and then, and the file of their tokens as an undisturbed start makes it.
fn interrupted_case(files: &Files, tokenizer: &Arc<Tokenizer>) -> (DataConfig, Vec<u8>) {
    let mut lines: Vec<String> = numbered_rows(20_000).lines().map(str::to_owned).collect();
    for row in (100..20_000).step_by(1777) {
        lines[row] = format!("{{\"text\": {row}}}");
    }
    let source = files.write("r.jsonl", &lines.join("\n"));
    let config = DataConfig { on_bad_row: OnBadRow::Skip, ..packed(vec![source]) };
    let undisturbed = Cache::new();
    undisturbed.open(&config, tokenizer).unwrap();
    let store = fs::read(undisturbed.stores().remove(0)).unwrap();
    (config, store)
}

#[test]
fn an_interrupted_file_is_gone_on_with_and_ends_as_an_undisturbed_one() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let (config, expected) = interrupted_case(&files, &tokenizer);
    let mut kept = 0;
    for _ in 0..3 {
        interrupt(&cache, &config, &tokenizer, 40);
        assert!(cache.stores().is_empty());
        // Its table of ends tells how many rows it has.
        let bytes = fs::read(unfinished(&cache)).unwrap();
        let ends = bytes[128..128 + 8 * 20_000].chunks_exact(8);
        let rows = ends.take_while(|end| end.iter().any(|byte| *byte != 0)).count();
        assert!(rows > kept && rows < 20_000, "{rows} after {kept}");
        kept = rows;
    }
    let opened = cache.open(&config, &tokenizer).unwrap();
    assert!(!is_hit(&opened));
    assert_eq!(fs::read(cache.stores().remove(0)).unwrap(), expected);
    // Bad rows that an earlier start has passed are named as if this one had found them.
    let fresh = DataPipeline::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
    assert_eq!(opened.warnings(), fresh.warnings());
    assert!(opened.warnings()[0].contains("line 101: "), "{:?}", opened.warnings());
    assert_eq!(cache.entries().iter().filter(|path| path.extension().unwrap() != "sha256").count(), 1);
}

/// What is done to an unfinished file, whose records start at the given byte.
type Damage = (&'static str, fn(&mut Vec<u8>, usize));

#[test]
fn of_an_unfinished_file_only_whole_rows_are_believed() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let (config, expected) = interrupted_case(&files, &tokenizer);
    interrupt(&cache, &config, &tokenizer, 60);
    let path = unfinished(&cache);
    let sound = fs::read(&path).unwrap();
    let records_at = 128 + 12 * 20_000;
    let damages: [Damage; 9] = [
        ("cut within a record", |bytes, _| bytes.truncate(bytes.len() - 5)),
        ("cut within the tables", |bytes, at| bytes.truncate(at - 100)),
        ("empty", |bytes, _| bytes.clear()),
        ("zeroed records", |bytes, at| bytes[at + 5000..].fill(0)),
        ("a changed token", |bytes, at| bytes[at + 5000] ^= 4),
        ("an end beyond the file", |bytes, _| bytes[128 + 8 * 300 + 6] = 1),
        ("an end before its start", |bytes, _| bytes[128 + 8 * 300..128 + 8 * 301].fill(0)),
        ("ends without end", |bytes, _| bytes[128 + 8 * 100..128 + 8 * 5000].fill(255)),
        ("another number of rows", |bytes, at| drop(bytes.drain(at - 12..at))),
    ];
    for (what, damage) in damages {
        let mut bytes = sound.clone();
        damage(&mut bytes, records_at);
        fs::write(&path, bytes).unwrap();
        cache.open(&config, &tokenizer).unwrap();
        let store = cache.stores().remove(0);
        assert!(fs::read(&store).unwrap() == expected, "{what}");
        fs::remove_file(store).unwrap();
    }
}

/// Its rows would be believed to be those of the content that the file had at the start, and has again later.
#[test]
fn rows_of_a_file_that_changed_meanwhile_are_not_left_to_go_on_with() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let (config, expected) = interrupted_case(&files, &tokenizer);
    let content = fs::read(files.path("r.jsonl")).unwrap();
    let (asked, asked_since) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let is_changed = AtomicBool::new(false);
    let is_stopped = || {
        if asked.fetch_add(1, Ordering::SeqCst) == 40 {
            fs::write(files.path("r.jsonl"), String::from_utf8_lossy(&content).replace('1', "2")).unwrap();
            is_changed.store(true, Ordering::SeqCst);
        }
        is_changed.load(Ordering::SeqCst) && asked_since.fetch_add(1, Ordering::SeqCst) > 80
    };
    let options = OpenOptions { is_stopped: &is_stopped, ..cache.options() };
    let error = DataPipeline::open(&config, Arc::clone(&tokenizer), 7, &options).unwrap_err();
    assert!(error.to_string().contains("changes while it is read"), "{error}");
    fs::write(files.path("r.jsonl"), content).unwrap();
    cache.open(&config, &tokenizer).unwrap();
    let found: Vec<_> = cache.stores().into_iter().map(|store| fs::read(store).unwrap()).collect();
    assert!(found == [expected], "rows of another content");
}

#[test]
fn a_start_that_is_stopped_while_it_looks_for_earlier_rows_loses_none() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let (config, expected) = interrupted_case(&files, &tokenizer);
    interrupt(&cache, &config, &tokenizer, 60);
    let before = fs::read(unfinished(&cache)).unwrap();
    // At the first question, and at the second one.
    for chunks in [0, 1] {
        interrupt(&cache, &config, &tokenizer, chunks);
        assert!(fs::read(unfinished(&cache)).unwrap() == before, "after {chunks}");
    }
    cache.open(&config, &tokenizer).unwrap();
    assert!(fs::read(cache.stores().remove(0)).unwrap() == expected);
}

#[test]
fn a_bad_row_that_was_skipped_before_the_interruption_is_refused_where_bad_rows_are_errors() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let (config, _) = interrupted_case(&files, &tokenizer);
    interrupt(&cache, &config, &tokenizer, 60);
    let strict = DataConfig { on_bad_row: OnBadRow::Error, ..config };
    let error = cache.open(&strict, &tokenizer).unwrap_err().to_string();
    assert!(error.contains("r.jsonl:line 101: `text` must be text"), "{error}");
    // The row will be mended, and then it is another file: nothing waits for that one.
    assert!(cache.entries().iter().all(|path| path.extension().unwrap() == "sha256"), "{:?}", cache.entries());
}

#[test]
fn who_comes_second_to_an_unfinished_file_makes_one_of_its_own() {
    let (files, cache, tokenizer) = (Files::new(), Cache::new(), Arc::new(tokenizer()));
    let (config, expected) = interrupted_case(&files, &tokenizer);
    interrupt(&cache, &config, &tokenizer, 60);
    let path = unfinished(&cache);
    let left = fs::read(&path).unwrap();
    let other_process = File::open(&path).unwrap();
    other_process.lock().unwrap();
    cache.open(&config, &tokenizer).unwrap();
    assert_eq!(fs::read(cache.stores().remove(0)).unwrap(), expected);
    assert_eq!(fs::read(&path).unwrap(), left, "it belongs to who holds its lock");
}

#[test]
fn tidying_takes_the_oldest_and_what_nobody_will_finish() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (waiting, given_up, own) = ("a".repeat(64), "b".repeat(64), "c".repeat(64));
    let unfinished = |stem: &str| format!("{stem}.unfinished");
    let (waiting, given_up) = (unfinished(&waiting), unfinished(&given_up));
    let (own, own_store) = (unfinished(&own), format!("{own}.tokens"));
    for (hours, name) in [
        (3, "old.tokens"),
        (2, waiting.as_str()),
        (1, "new.tokens"),
        (9, "tokens-killed.unfinished"),
        (9, "tokens-in-use.unfinished"),
        (24 * 8, given_up.as_str()),
        (9, own.as_str()),
        (9, "notes.sha256"),
    ] {
        fs::write(path(name), [0; 100]).unwrap();
        let file = FileOptions::new().write(true).open(path(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_hours(hours)).unwrap();
    }
    let in_use = File::open(path("tokens-in-use.unfinished")).unwrap();
    in_use.lock().unwrap();
    let left = |max_bytes: u64| {
        tidy(folder.path(), max_bytes, &path(&own_store));
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let always = [own.as_str(), "notes.sha256", "tokens-in-use.unfinished"];
    let expected = |more: &[&str]| {
        let mut names: Vec<String> = always.iter().chain(more).map(ToString::to_string).collect();
        names.sort();
        names
    };
    assert_eq!(left(400), expected(&["old.tokens", &waiting, "new.tokens"]));
    assert_eq!(left(399), expected(&[&waiting, "new.tokens"]));
    assert_eq!(left(299), expected(&["new.tokens"]));
    assert_eq!(left(0), expected(&[]));
}
