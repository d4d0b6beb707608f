//! `lora-train tune` on the quickstart's model.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

mod common;

use std::fs;

use common::{Bench, lora_train, run, stderr};
use serde_json::Value;

#[test]
fn the_fastest_recipe_is_written_with_what_was_tried_and_trains() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "[eval]\ngenerate = [\"a\"]\n[checkpoint]\nsave_steps = 1\n");
    let out = bench.path("fast.toml");
    // Masks of dropout belong to a micro-batch, and so would differ with its size.
    let settings = ["--set", "lora.lora_dropout=0", "--out", out.to_str().unwrap()];
    let short = ["--json", "--steps", "2", "--seconds", "0", "--max-minutes", "0.75"];
    let output = run(&[&["tune", recipe.to_str().unwrap()][..], &short, &settings].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let trials = report["trials"].as_array().unwrap();
    assert_eq!(trials[0]["settings"], serde_json::json!([]));
    for trial in trials[1..].iter().filter(|trial| trial.get("left_out").is_none()) {
        let verdict = trial["verdict"].as_str().unwrap();
        assert!(["faster", "hardly_faster", "within_noise", "not_settled", "slower"].contains(&verdict), "{trial}");
        assert!(trial["speedup"].as_f64().unwrap() > 0.0 && trial["noise"].as_f64().unwrap() >= 0.01, "{trial}");
        assert!(trial["rounds"].as_u64().unwrap() >= if verdict == "faster" { 3 } else { 1 }, "{trial}");
    }
    let tried: Vec<String> = trials.iter().map(|trial| trial["settings"].to_string()).collect();
    for change in ["train.gradient_checkpointing=false", "train.precision=bf16", "data.packing=true"] {
        assert!(tried.iter().any(|settings| settings.contains(change)), "{change} in {tried:?}");
    }
    for trial in trials.iter().filter(|trial| trial.get("left_out").is_none()) {
        assert!(trial["target_tokens_per_second"].as_f64().unwrap() > 0.0, "{trial}");
        assert!(trial["peak_memory_bytes"].as_u64().unwrap() > 1 << 20, "{trial}");
    }
    // Trials that keep the numbers give the same loss, whatever their micro-batches and their memory.
    let losses: Vec<f64> = trials
        .iter()
        .filter(|trial| trial["keeps_numbers"] == true && trial.get("loss").is_some())
        .map(|trial| trial["loss"].as_f64().unwrap())
        .collect();
    assert!(losses.len() >= 3, "{losses:?}");
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 1e-3 * losses[0]), "{losses:?}");
    assert!(!bench.path("run").exists(), "trials write elsewhere");

    // Which one is the fastest is the machine's to say; what is written is that one, and it is a recipe.
    if report.get("written").is_some() {
        assert!(report["speedup"].as_f64().unwrap() > 1.0, "{report}");
        let text = fs::read_to_string(&out).unwrap();
        assert!(text.starts_with("# Written by `lora-train tune`") && text.contains("as the recipe is"), "{text}");
        let check = run(&["check", out.to_str().unwrap()]);
        assert!(check.status.success(), "{}", stderr(&check));
    } else {
        assert!(!out.exists());
    }
}

#[test]
fn a_recipe_without_evaluation_and_with_a_long_warm_up_is_tuned() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let text = fs::read_to_string(&recipe).unwrap();
    let (start, rest) = text.split_once("[[data.eval]]").unwrap();
    let text = format!("{start}{}", rest.split_once("[train]").map(|(_, rest)| format!("[train]{rest}")).unwrap());
    fs::write(&recipe, text.replace("warmup_steps = 1", "warmup_steps = 5")).unwrap();
    let short = ["--keep-numbers", "--steps", "1", "--seconds", "0", "--max-minutes", "0.2"];
    let output = run(&[&["tune", recipe.to_str().unwrap()][..], &short].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("at most 0.2 minutes"), "{}", stderr(&output));
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("as the recipe is") && !table.contains("other numbers"), "{table}");
}

#[test]
fn a_recipe_that_does_not_run_is_told_as_training_would_tell_it() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    fs::write(bench.path("train.jsonl"), "{\"prompt\": 1}\n".repeat(8)).unwrap();
    let output = lora_train(&["tune", recipe.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("train.jsonl"), "{}", stderr(&output));
    fs::write(bench.path("run.tuned.toml"), "[model]\n").unwrap();
    let output = lora_train(&["tune", recipe.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("was not written by `tune`"), "{}", stderr(&output));
}
