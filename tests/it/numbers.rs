//! Numbers that go wrong: weights that are NaN, learning rates that are too high or too low.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Bench, json, quickstart_model, run, stderr, steps, train};

/// A copy of the quickstart model with NaN in its final norm.
fn broken_model(bench: &Bench) -> PathBuf {
    let (from, to) = (quickstart_model(), bench.path("model"));
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let file = to.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let norm = tensors.tensor("model.norm.weight").unwrap();
    let offset = norm.data().as_ptr() as usize - bytes.as_ptr() as usize;
    // All bits set is NaN in every float type.
    let width = norm.data().len() / norm.shape()[0];
    let mut broken = bytes.clone();
    broken[offset..offset + width].fill(0xff);
    fs::write(file, broken).unwrap();
    to
}

fn has_checkpoint(run_dir: &Path, step: u64) -> bool {
    run_dir.join(format!("checkpoints/step-{step:06}/SHA256SUMS")).is_file()
}

#[test]
fn weights_that_are_no_numbers_skip_every_step_name_its_rows_and_stop_the_run() {
    let bench = Bench::new();
    let model = format!("model.path={}", broken_model(&bench).display());
    let recipe = bench.recipe("run", "");
    let set = [
        "--set", &model, "--set", "watchdog.max_skipped_steps=5", "--set", "data.shuffle=false", "--set",
        "train.max_steps=100",
    ];
    let mut args = vec![recipe.to_str().unwrap()];
    args.extend(set);
    let output = run(&args);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("step 0: the evaluation loss is not a finite number"), "{said}");
    let rows = bench.path("train.jsonl").display().to_string();
    let first = format!(
        "warning: step 1: no update, its loss is not a finite number; its rows: {rows}:1, {rows}:2, {rows}:3, {rows}:4\n"
    );
    assert!(said.contains(&first), "{said}");
    assert!(said.contains("error: step 5: 5 steps in a row made no update"), "{said}");
    let dir = bench.path("run");
    let lines = steps(&dir);
    assert_eq!(lines.len(), 5);
    assert!(lines.iter().all(|line| line["loss"].is_null() && line["skipped"] == true));
    assert!(lines.iter().all(|line| line["anomaly"] == "skipped_step"));
    assert!(has_checkpoint(&dir, 5) && !dir.join("summary.json").exists());

    // Resuming restores the full patience.
    args.push("--resume");
    let output = run(&args);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(steps(&dir).len(), 10);
}

#[test]
fn a_loss_that_runs_away_is_told_at_once_and_stops_the_run_with_a_checkpoint() {
    let bench = Bench::new();
    // Rows like those of pretraining, so that the loss starts low.
    let rows: String = ["beach", "castle", "forest", "river"]
        .iter()
        .flat_map(|place| {
            ["Clara", "Tom", "Nina", "Leo", "Anna", "Ben"].iter().map(move |name| {
                let user = format!("At the {place}, {name} met a big frog.");
                let assistant = format!("{name} met a frog at the {place}.");
                let messages =
                    serde_json::json!([{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]);
                serde_json::json!({"messages": messages}).to_string() + "\n"
            })
        })
        .collect();
    fs::write(bench.path("train.jsonl"), &rows).unwrap();
    fs::write(bench.path("eval.jsonl"), &rows).unwrap();
    let recipe = bench.recipe("run", "");
    let set = [
        "--set", "optimizer.learning_rate=1.0", "--set", "train.max_grad_norm=0", "--set", "train.max_steps=100",
        "--set", "watchdog.patience=10", "--set", "watchdog.max_skipped_steps=10",
    ];
    let mut args = vec![recipe.to_str().unwrap()];
    args.extend(set);
    let output = run(&args);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: step ") && said.contains("hint: resume from a checkpoint before that"), "{said}");
    let dir = bench.path("run");
    let lines = steps(&dir);
    let spikes = lines.iter().filter(|line| line["anomaly"] == "loss_spike").count();
    assert!(lines.len() < 40 && spikes >= 10, "{} steps, {spikes} spikes:\n{said}", lines.len());
    assert_eq!(
        said.matches("are far above the").count() + said.matches("standard deviations above").count(),
        1,
        "{said}"
    );
    assert!(has_checkpoint(&dir, lines.len() as u64));

    // With stopping disabled, trouble is only reported, and counted in the summary.
    let mut args = vec!["--set", "watchdog.patience=0", "--set", "watchdog.max_skipped_steps=0"];
    args.extend(&set[..4]);
    args.extend(["--set", "train.max_steps=20"]);
    let said = stderr(&train(&bench.recipe("told", ""), &args));
    assert!(said.contains("the loss ended far above its start: the adapter may be worse than none"), "{said}");
    let summary = json(&bench.path("told/summary.json"));
    assert!(summary["anomalous_steps"].as_u64().unwrap() >= 10, "{summary}");
}

#[test]
fn a_learning_rate_below_all_numbers_moves_nothing_and_is_told() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let set =
        ["--set", "optimizer.learning_rate=1e-60", "--set", "train.max_steps=80", "--set", "watchdog.patience=30"];
    let mut args = vec![recipe.to_str().unwrap()];
    args.extend(set);
    let output = run(&args);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("updates have left the adapters exactly as they were"), "{said}");
    assert!(said.contains("hint: raise `optimizer.learning_rate`"), "{said}");
    assert!(steps(&bench.path("run")).len() <= 50, "{said}");
}

#[test]
fn a_healthy_run_has_no_anomalies() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &["--set", "train.max_steps=60"]);
    assert_eq!(json(&bench.path("run/summary.json"))["anomalous_steps"].as_u64(), Some(0));
    assert!(steps(&bench.path("run")).iter().all(|line| line.get("anomaly").is_none()));
}

#[test]
fn a_run_none_of_whose_steps_made_an_update_has_failed() {
    let bench = Bench::new();
    let model = format!("model.path={}", broken_model(&bench).display());
    let recipe = bench.recipe("run", "");
    let output = run(&[recipe.to_str().unwrap(), "--set", &model, "--set", "train.max_steps=3"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("none of the 3 steps made an update"), "{}", stderr(&output));
    assert!(bench.path("run/adapter/adapter_model.safetensors").is_file());
}

#[test]
fn while_a_run_goes_wrong_the_last_checkpoint_from_before_is_kept_and_offered() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    train(&recipe, &["--set", "train.max_steps=6", "--set", "checkpoint.save_steps=6"]);
    let dir = bench.path("run");
    fs::remove_file(dir.join("summary.json")).unwrap();
    let mut args = vec![recipe.to_str().unwrap(), "--resume"];
    for setting in [
        "optimizer.learning_rate=1.0", "train.max_grad_norm=0", "train.max_steps=200", "watchdog.patience=20",
        "watchdog.max_skipped_steps=20", "checkpoint.save_steps=2", "checkpoint.save_total_limit=2",
    ] {
        args.extend(["--set", setting]);
    }
    let output = run(&args);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    // Three checkpoints saved in trouble, the last of them by the watchdog, and the newest from before.
    let trouble = |step: u64| {
        let state = dir.join(format!("checkpoints/step-{step:06}/trainer_state.json"));
        fs::read(state).ok().map(|text| serde_json::from_slice::<serde_json::Value>(&text).unwrap()["trouble"].clone())
    };
    let saved: Vec<_> = (1..=200).filter_map(|step| Some((step, trouble(step)?))).collect();
    let sound: Vec<u64> = saved.iter().filter(|(_, trouble)| trouble.is_null()).map(|(step, _)| *step).collect();
    assert_eq!(sound.len(), 1, "{saved:?}\n{said}");
    assert!((3..=4).contains(&saved.len()) && sound[0] == saved[0].0, "{saved:?}");
    let output = run(&args);
    let told = format!("step-{:06} was saved before that: `--resume ", sound[0]);
    assert!(
        stderr(&output).contains("this checkpoint was saved while ") && stderr(&output).contains(&told),
        "{}",
        stderr(&output)
    );
}
