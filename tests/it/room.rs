//! Too little memory: reported before the first step, and again when it runs out.

#![cfg(target_os = "linux")]

use std::fs;
use std::process::{Command, Output};

use crate::common::{Bench, lora_train, stderr};

/// Rows as long as `data.max_length`, so that a step is as large as estimated.
fn large_recipe(bench: &Bench) -> std::path::PathBuf {
    let row = serde_json::json!({"prompt": "a: ", "completion": "Once there was a fox. ".repeat(400)}).to_string();
    fs::write(bench.path("train.jsonl"), format!("{row}\n").repeat(64)).unwrap();
    let recipe = bench.recipe("run", "");
    let text = fs::read_to_string(&recipe).unwrap();
    let text = text
        .replace("warmup_steps = 1", "warmup_steps = 0")
        .replace("max_length = 64", "max_length = 512")
        .replace("micro_batch_size = 2", "micro_batch_size = 64");
    fs::write(&recipe, text + "[watchdog]\npatience = 0\n").unwrap();
    recipe
}

/// The command with a limited address space.
fn within(kib: u64, arguments: &[&str]) -> Output {
    let shell = format!("ulimit -v {kib}; exec \"$0\" \"$@\"");
    let mut command = Command::new("bash");
    command.args(["-c", &shell, env!("CARGO_BIN_EXE_lora-train")]).args(arguments);
    command.env("RAYON_NUM_THREADS", "2").env("MALLOC_ARENA_MAX", "1").output().unwrap()
}

#[test]
fn memory_that_runs_out_ends_with_1_and_the_settings_that_save_most_with_their_sizes() {
    let bench = Bench::new();
    let recipe = large_recipe(&bench);
    let recipe = recipe.to_str().unwrap();
    let output = within(1_000_000, &[recipe, "--set", "train.gradient_checkpointing=false"]);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("memory allocation of"), "{told}");
    let advice = told.split("error: if this was for want of memory: ").nth(1).unwrap();
    assert!(advice.contains("is estimated to need") && advice.contains("kept for the backward"), "{told}");
    assert!(advice.contains("`--set train.gradient_checkpointing=true"), "{told}");
    let size = advice.split("` (").nth(1).unwrap().split(')').next().unwrap();
    assert!(size.ends_with("iB"), "{size}");
    // The warning also came before.
    let (before, _) = told.split_once("memory allocation of").unwrap();
    assert!(before.contains("warning: a step whose rows are all as long as `data.max_length`"), "{told}");
}

#[test]
fn what_the_advice_proposes_runs_within_the_memory() {
    let bench = Bench::new();
    let recipe = large_recipe(&bench);
    let recipe = recipe.to_str().unwrap();
    let check = within(1_000_000, &["check", recipe, "--set", "train.gradient_checkpointing=false"]);
    let told = stderr(&check);
    assert!(check.status.success(), "a warning is no mistake: {told}");
    let change = told.split("less is needed with `").nth(1).and_then(|rest| rest.split('`').next()).unwrap();
    let mut arguments = vec![recipe, "--set", "train.gradient_checkpointing=false", "--set", "train.max_steps=1"];
    arguments.extend(change.split(' '));
    let output = within(1_000_000, &arguments);
    assert!(output.status.success(), "{change}: {}", stderr(&output));
}

#[test]
fn a_run_with_room_is_told_nothing() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let output = lora_train(&["check", recipe.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success() && !stderr(&output).contains("estimated to need"), "{}", stderr(&output));
}
