//! Hostile and careless input: everything from outside is refused or read, with no other effect.
//!
//! Valid files with many kinds of changes, and files made by a grammar, go through the functions that the commands
//! call. The fuzzers in `fuzz/` run the same targets for any length of time; their findings are kept in `fuzz/corpus`
//! and replayed here. Each test run draws the same inputs. With `PROPTEST_CASES`, which sets their number, it draws
//! others.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where something is missing")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "small numbers"
)]

mod folder;
mod grammar;
mod limits;
mod mutations;
mod seeds;
mod targets;
mod token_store;

use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use targets::{TARGETS, Target};

#[global_allocator]
static ALLOCATOR: limits::Limited = limits::Limited;

/// Maximum processor time for an input of some kilobytes. Wall time would fail on a busy machine.
const MAX_TIME: Duration = Duration::from_secs(20);

fn target(name: &str) -> Target {
    *TARGETS.iter().find(|(target, _)| *target == name).unwrap()
}

fn run((name, read): Target, input: &[u8]) {
    let start = limits::thread_time();
    read(input);
    let taken = limits::thread_time().saturating_sub(start);
    assert!(taken < MAX_TIME, "{name} took {taken:?} for {} bytes", input.len());
}

/// Asserts that target `name` survives the inputs of `strategy`. The inputs are the same each time, so that a failure
/// is due to the code and not to the draw; `PROPTEST_CASES` and the fuzzers draw others.
fn holds(name: &str, cases: u32, strategy: impl Strategy<Value = Vec<u8>>) {
    let target = target(name);
    let config = Config { failure_persistence: None, max_shrink_time: 20_000, ..Config::default() };
    let (cases, rng_seed) = match std::env::var("PROPTEST_CASES") {
        Ok(cases) => (cases.parse().unwrap(), RngSeed::Random),
        Err(_) => (cases, RngSeed::Fixed(7)),
    };
    let result = TestRunner::new(Config { cases, rng_seed, ..config }).run(&strategy, |input| {
        run(target, &input);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{name}: {error}"));
}

/// A valid file with up to four changes.
fn mutated(name: &str) -> impl Strategy<Value = Vec<u8>> + use<> {
    let seeds = seeds::seeds(name);
    (proptest::sample::select(seeds), proptest::collection::vec(mutations::mutation(), 0..5)).prop_map(
        |(mut bytes, changes)| {
            changes.iter().for_each(|change| change.apply(&mut bytes));
            bytes
        },
    )
}

#[test]
fn valid_files_pass_every_target() {
    // The fuzzers start from these seeds.
    let corpus = std::env::var_os("LORA_TRAIN_WRITE_SEEDS").map(std::path::PathBuf::from);
    for target in TARGETS {
        for (number, seed) in seeds::seeds(target.0).into_iter().enumerate() {
            run(target, &seed);
            if let Some(folder) = corpus.as_ref().map(|corpus| corpus.join(target.0)) {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(folder.join(format!("valid-{number}")), seed).unwrap();
            }
        }
    }
}

#[test]
fn what_the_fuzzers_kept_is_read_or_refused() {
    let corpus = targets::repository().join("fuzz/corpus");
    let mut inputs = 0;
    for target in TARGETS {
        for entry in std::fs::read_dir(corpus.join(target.0)).into_iter().flatten() {
            run(target, &std::fs::read(entry.unwrap().path()).unwrap());
            inputs += 1;
        }
    }
    assert!(inputs >= TARGETS.len() || !Path::new(&corpus).is_dir(), "{inputs} inputs");
}

#[test]
fn changed_recipes_are_read_or_refused() {
    holds("recipe", 2000, mutated("recipe"));
}

#[test]
fn recipes_made_by_a_grammar_are_read_or_refused() {
    holds("recipe", 2000, grammar::toml());
}

#[test]
fn changed_rows_are_read_or_refused() {
    holds("rows", 1500, mutated("rows"));
}

#[test]
fn rows_made_by_a_grammar_are_read_or_refused() {
    holds("rows", 1500, grammar::rows());
}

#[test]
fn changed_model_configs_are_read_or_refused() {
    holds("config", 3000, mutated("config"));
}

#[test]
fn changed_tokenizers_are_read_or_refused() {
    holds("tokenizer", 1000, mutated("tokenizer"));
}

#[test]
fn changed_templates_end() {
    holds("template", 500, mutated("template"));
}

#[test]
fn templates_made_by_a_grammar_end() {
    holds("template", 200, grammar::template());
}

#[test]
fn changed_weights_are_read_or_refused() {
    holds("weights", 2000, mutated("weights"));
}

#[test]
fn changed_gguf_files_are_read_or_refused() {
    holds("gguf", 2000, mutated("gguf"));
}

#[test]
fn changed_bases_are_loaded_or_refused() {
    holds("base", 2000, mutated("base"));
}

#[test]
fn changed_adapters_are_read_or_refused() {
    holds("adapter", 2000, mutated("adapter"));
}

#[test]
fn changed_checkpoints_are_read_or_refused() {
    holds("checkpoint", 1500, mutated("checkpoint"));
}

#[test]
fn changed_logs_are_gone_on_with() {
    holds("logs", 1500, mutated("logs"));
}

#[test]
fn changed_images_are_decoded_or_refused() {
    holds("picture", 1000, mutated("picture"));
}

#[test]
fn changed_runs_are_reported_or_refused() {
    holds("report", 500, mutated("report"));
}

#[test]
fn changed_token_files_are_read_or_made_anew() {
    holds("tokens", 500, mutated("tokens"));
}
