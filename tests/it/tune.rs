//! `lora-train tune` on the quickstart's model.

use std::fs;
use std::time::Instant;

use crate::common::{Bench, lora_train, run, stderr};
use serde_json::Value;

/// Maximum time of a search: its `--max-minutes`, plus the runs made regardless of it, which are the original recipe
/// twice and ten runs at the end. On a busy machine a run takes up to four times as long as another.
fn longest_seconds(max_minutes: f64, run_seconds: f64) -> f64 {
    60.0 * max_minutes + 4.0 * (2.0 + 10.0) * run_seconds
}

#[test]
fn the_fastest_recipe_is_written_with_what_was_tried_and_trains() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "[eval]\ngenerate = [\"a\"]\n[checkpoint]\nsave_steps = 1\n");
    // An epoch has enough updates to give up some of them.
    let rows = fs::read_to_string(bench.path("train.jsonl")).unwrap();
    fs::write(bench.path("train.jsonl"), rows.repeat(8)).unwrap();
    let out = bench.path("fast.toml");
    // Dropout masks depend on the micro-batch and so would change with its size. The targets of a micro-batch make
    // several chunks, and its rows are the whole update.
    let changes = [
        "lora.lora_dropout=0",
        "train.loss_chunk_tokens=16",
        "train.gradient_accumulation_steps=1",
        "train.gradient_checkpointing=true",
    ];
    let changes: Vec<&str> = changes.into_iter().flat_map(|change| ["--set", change]).collect();
    let max_minutes = 0.75;
    let short = ["--json", "--steps", "2", "--seconds", "0", "--max-minutes", "0.75", "--out", out.to_str().unwrap()];
    let started = Instant::now();
    let output = run(&[&["tune", recipe.to_str().unwrap()][..], &short, &changes].concat());
    let elapsed = started.elapsed().as_secs_f64();
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let trials = report["trials"].as_array().unwrap();

    // It keeps its time limit.
    let run_seconds = trials.iter().filter_map(|trial| trial["run_seconds"].as_f64()).fold(0.0, f64::max);
    let seconds = report["seconds"].as_f64().unwrap();
    assert!(run_seconds > 0.0 && seconds <= longest_seconds(max_minutes, run_seconds), "{seconds} s, {report:#}");
    assert!(seconds <= elapsed && elapsed <= seconds + 10.0, "{elapsed} s, {report:#}");
    let said = stderr(&output);
    assert!(said.find("one run takes ").unwrap() < said.find("trying: ").unwrap(), "{said}");
    // Trials are left out only for lack of time, and only if the time was used up.
    let left_out: Vec<&str> = trials.iter().filter_map(|trial| trial["left_out"].as_str()).collect();
    assert!(left_out.iter().all(|why| why.contains("--max-minutes")), "{left_out:?}");
    assert!(left_out.is_empty() || seconds >= 60.0 * max_minutes, "{seconds} s, {report:#}");
    assert_eq!(trials[0]["settings"], serde_json::json!([]));
    for trial in trials[1..].iter().filter(|trial| trial.get("left_out").is_none()) {
        let [pairs, ahead] = ["num_pairs", "num_faster"].map(|name| trial[name].as_u64().unwrap());
        assert!(trial["speedup"].as_f64().unwrap() > 0.0 && ahead <= pairs && pairs >= 2, "{trial}");
        assert!(trial["is_faster"] == false || (ahead >= 4 && trial["ratio"].as_f64().unwrap() >= 1.02), "{trial}");
    }
    let tried: Vec<String> = trials.iter().map(|trial| trial["settings"].to_string()).collect();
    let kinds = [
        "train.gradient_checkpointing=false",
        "train.micro_batch_size=1",
        "train.loss_chunk_tokens=64",
        "train.precision=bf16",
        "data.packing=true",
        "train.micro_batch_size=4",
    ];
    // Micro-batches smaller than the update can be enlarged without more rows.
    let has_smaller =
        trials.iter().any(|trial| trial["is_faster"] == true && trial["settings"].to_string().contains("accumulation"));
    for change in kinds {
        let is_needless = change == "train.micro_batch_size=4" && has_smaller;
        assert!(is_needless || tried.iter().any(|settings| settings.contains(change)), "{change} in {tried:?}");
    }
    for trial in trials {
        let settings = trial["settings"].to_string();
        let has_rows = settings.contains("batch_size") && !settings.contains("accumulation");
        let is_flagged = has_rows || ["packing", "precision", "dtype"].iter().any(|change| settings.contains(change));
        assert_eq!(trial["keeps_numbers"], !is_flagged, "{trial}");
        assert_eq!(trial["rows_of_step"].is_u64(), has_rows, "{trial}");
    }
    for trial in trials.iter().filter(|trial| trial.get("left_out").is_none()) {
        assert!(trial["target_tokens_per_second"].as_f64().unwrap() > 0.0, "{trial}");
        assert!(trial["peak_memory_bytes"].as_u64().unwrap() > 1 << 20, "{trial}");
    }
    // Trials that keep the numbers have equal losses, whatever their micro-batches and their memory.
    let losses: Vec<f64> = trials
        .iter()
        .filter(|trial| trial["keeps_numbers"] == true && trial.get("loss").is_some())
        .map(|trial| trial["loss"].as_f64().unwrap())
        .collect();
    assert!(losses.len() >= 3 || !left_out.is_empty(), "{losses:?}");
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 1e-3 * losses[0]), "{losses:?}");
    assert!(!bench.path("run").exists(), "trials write elsewhere");

    // The fastest trial depends on the machine; its settings are written as a recipe.
    let is_faster = |trial: &&Value| trial["is_faster"] == true;
    if report.get("written").is_some() {
        assert!(report["speedup"].as_f64().unwrap() > 1.0, "{report}");
        assert_eq!(trials.iter().rfind(is_faster).unwrap()["settings"], report["fastest"]);
        let text = fs::read_to_string(&out).unwrap();
        assert!(text.starts_with("# Written by `lora-train tune`") && text.contains("as the recipe is"), "{text}");
        let check = run(&["check", out.to_str().unwrap()]);
        assert!(check.status.success(), "{}", stderr(&check));
        for change in report["fastest"].as_array().unwrap() {
            let (key, value) = change.as_str().unwrap().rsplit_once('.').unwrap().1.split_once('=').unwrap();
            let line = text.lines().find(|line| line.starts_with(&format!("{key} = "))).unwrap();
            assert_eq!(line.rsplit_once(" = ").unwrap().1.trim_matches('"'), value, "{text}");
        }
        let steps = ["--set", "train.max_steps=2", "--quiet"];
        let trained = run(&[&[out.to_str().unwrap()][..], &steps].concat());
        assert!(trained.status.success(), "{}", stderr(&trained));
    } else {
        assert!(!out.exists());
        assert!(report.get("not_confirmed").is_some() || !trials.iter().any(|trial| is_faster(&trial)), "{report:#}");
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
    let started = Instant::now();
    let output = run(&[&["tune", recipe.to_str().unwrap()][..], &short].concat());
    let elapsed = started.elapsed().as_secs_f64();
    assert!(output.status.success(), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains("at most 12s in all"), "{said}");
    let (_, run_seconds) = said.split_once("one run takes ").unwrap();
    let run_seconds: f64 = run_seconds.split_once(" s").unwrap().0.parse().unwrap();
    assert!(elapsed <= longest_seconds(0.2, run_seconds + 0.1) + 10.0, "{elapsed} s: {said}");
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
