//! How many tokens a second one data worker delivers: `cargo bench --bench loader [MODEL_FOLDER] [NUM_ROWS] [FILTER]`.
//!
//! Rows are tokenised when visited, or read from the token cache; padded and packed. It also measures the time to the
//! first micro-batch, at the start of the data and at a place far into it. The two are alike, because a cursor needs
//! nothing that came before it. The last column is the process's peak memory so far.

#![allow(clippy::print_stdout, reason = "the console is the job")]
#![allow(clippy::unwrap_used, reason = "a benchmark ends where something is missing")]
#![allow(clippy::cast_precision_loss, reason = "counts of a few seconds")]

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lora_train::config::{DataConfig, DataSource};
use lora_train::data::cache::CacheSettings;
use lora_train::data::dataset::{Cursor, Dataset, OpenOptions};
use lora_train::data::tokenizer::Tokenizer;
use lora_train::measure::telemetry::peak_host_memory_bytes;

/// Time to take micro-batches for.
const BUDGET: Duration = Duration::from_secs(2);
const MICRO_BATCH_SIZE: usize = 8;
const WORDS: [&str; 12] =
    ["river", "seven", "apples", "carried", "the", "of", "morning", "slowly", "because", "a", "stones", "counted"];

/// Writes rows of 40 to 200 words, the same ones in every run.
fn write_rows(path: &Path, num_rows: usize) {
    let mut file = BufWriter::new(File::create(path).unwrap());
    let mut state = 1_u32;
    for row in 0..num_rows {
        let mut words = |count: usize| {
            let mut word = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                WORDS[(state >> 16) as usize % WORDS.len()]
            };
            (0..count).map(|_| word()).collect::<Vec<_>>().join(" ")
        };
        let (prompt, completion) = (words(20 + row * 7 % 60), words(20 + row * 13 % 120));
        writeln!(file, "{{\"prompt\": \"{row}: {prompt}? \", \"completion\": \"{completion}.\"}}").unwrap();
    }
    file.flush().unwrap();
}

fn main() {
    // Skip the `--bench` that Cargo adds.
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let model = PathBuf::from(arguments.next().unwrap_or("quickstart/model".into()));
    let num_rows: usize = arguments.next().map_or(20_000, |number| number.parse().unwrap());
    let filter = arguments.next().unwrap_or_default();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    write_rows(&path, num_rows);
    let tokenizer = Arc::new(Tokenizer::open(&model).unwrap());
    let source = DataSource { path: path.to_str().unwrap().into(), ..DataSource::default() };
    println!("{num_rows} rows, tokenizer of {}, 1 worker, {MICRO_BATCH_SIZE} rows a micro-batch", model.display());
    println!(
        "{:<26} {:>9} {:>14} {:>15} {:>15} {:>12}",
        "", "open", "tokens/s", "first at start", "first far on", "memory"
    );
    for (name, packing, is_kept) in [
        ("padded, tokenised", false, false),
        ("padded, from the cache", false, true),
        ("packed, tokenised", true, false),
        ("packed, from the cache", true, true),
    ] {
        if !name.contains(&filter) {
            continue;
        }
        let cache = CacheSettings {
            folder: is_kept.then(|| folder.path().join("tokens")),
            max_bytes: u64::MAX,
            min_file_bytes: 0,
        };
        let options = OpenOptions { cache, ..OpenOptions::default() };
        let config = DataConfig { train: vec![source.clone()], packing, ..DataConfig::default() };
        let open = || Dataset::open(&config, Arc::clone(&tokenizer), 1, &options).unwrap();
        if is_kept {
            open();
        }
        let start = Instant::now();
        let pipeline = open();
        let open_seconds = start.elapsed().as_secs_f64();
        let first_batch = |from: Cursor| {
            let start = Instant::now();
            pipeline.loader(from, MICRO_BATCH_SIZE).unwrap().next_batch().unwrap();
            start.elapsed().as_secs_f64() * 1e3
        };
        let at_start = first_batch(Cursor::default());
        let far_on = first_batch(Cursor { epoch: 1000, batch: pipeline.batches_per_epoch(MICRO_BATCH_SIZE) - 2 });
        let mut loader = pipeline.loader(Cursor::default(), MICRO_BATCH_SIZE).unwrap();
        let (start, mut num_tokens) = (Instant::now(), 0);
        while start.elapsed() < BUDGET {
            num_tokens += loader.next_batch().unwrap().batch.num_tokens();
        }
        let rate = num_tokens as f64 / start.elapsed().as_secs_f64();
        let memory = peak_host_memory_bytes().unwrap_or(0) >> 20;
        println!("{name:<26} {open_seconds:>7.2} s {rate:>14.0} {at_start:>12.1} ms {far_on:>12.1} ms {memory:>8} MiB");
    }
}
