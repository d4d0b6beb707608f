//! Final figures of resumed runs: they cover all starts and count nothing twice.

#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::{Bench, json, lora_train, run, signal, stderr, steps, train, wait, wait_until};
use serde_json::Value;

fn number(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or_else(|| panic!("`{name}` is missing in {value}"))
}

fn lines_so_far(dir: &Path) -> usize {
    fs::read_to_string(dir.join("metrics.jsonl")).unwrap_or_default().lines().count()
}

/// Starts or resumes a run, waits for some steps, and ends it; returns the time it took, measured here.
fn start_and_end(recipe: &Path, dir: &Path, args: &[&str], which: i32) -> Duration {
    let started = Instant::now();
    let before = lines_so_far(dir);
    let mut all = vec![recipe.to_str().unwrap(), "--resume", "--set", "train.max_steps=5000"];
    all.extend(args);
    let mut child = lora_train(&all).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("steps of this start", || lines_so_far(dir) > before + 8);
    signal(&child, which);
    wait(&mut child);
    started.elapsed()
}

/// Sum over the step lines of metrics.jsonl.
fn sum(lines: &[Value], name: &str) -> f64 {
    lines.iter().map(|line| number(line, name)).sum()
}

/// Mean of a figure, weighted by step time.
fn mean(lines: &[Value], name: &str) -> f64 {
    lines.iter().map(|line| number(line, name) * number(line, "step_seconds")).sum::<f64>() / sum(lines, "step_seconds")
}

/// Compares the figures of a run with the steps of metrics.jsonl, which cover all starts.
fn is_of_all_steps(figures: &Value, dir: &Path) {
    let lines = steps(dir);
    let close = |name: &str, expected: f64| {
        let value = number(figures, name);
        assert!((value - expected).abs() <= 1e-6 * expected.abs(), "`{name}` is {value}, by the steps {expected}");
    };
    close("tokens_per_second", sum(&lines, "tokens") / sum(&lines, "step_seconds"));
    close("mfu", mean(&lines, "mfu"));
    close("mean_cpu_utilization_percent", mean(&lines, "cpu_utilization_percent"));
    let (padding, tokens) = (sum(&lines, "padding_tokens"), sum(&lines, "tokens"));
    close("padding_share", padding / (padding + tokens));
    let wall = number(figures, "wall_seconds");
    let time = figures["time"].as_object().unwrap();
    let parts: f64 = time.values().map(|part| part.as_f64().unwrap()).sum();
    assert!((parts - wall).abs() < 1e-6 * wall, "the parts are {parts}: {figures:#}");
    for part in ["data_wait_seconds", "forward_backward_seconds", "optimizer_seconds"] {
        let (all, of_steps) = (time[part].as_f64().unwrap(), sum(&lines, part));
        assert!(
            (of_steps - 1e-6..of_steps + 0.1 * wall + 1.0).contains(&all),
            "{part}: {all}, of the steps {of_steps}"
        );
    }
    close("wall_seconds", number(&figures["per_million_tokens"], "seconds") * number(figures, "tokens") / 1e6);
    close("cost", wall / 3600.0 * 3.6);
    assert!(wall >= number(&figures["time"], "startup_seconds") + sum(&lines, "wall_seconds"), "{figures:#}");
}

#[test]
fn a_run_that_was_interrupted_twice_has_the_time_the_speed_and_the_peaks_of_all_its_starts() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "[cost]\nprice_per_hour = 3.6\n[eval]\neval_steps = 7\n");
    let dir = bench.path("run");
    let sample = ["--set", "logging.gpu_sample_ms=10"];
    let (mut elapsed, mut last) = (Duration::ZERO, Value::Null);
    for start in 1..=2 {
        elapsed += start_and_end(&recipe, &dir, &sample, libc::SIGINT);
        let ended = json(&dir.join("unfinished.json"));
        assert_eq!(ended["starts"], start, "{ended:#}");
        is_of_all_steps(&ended, &dir);
        // What a start measures after its last checkpoint is lost: of the peak, what writing the checkpoint took.
        for (name, share) in [("wall_seconds", 1.0), ("telemetry_seconds", 1.0), ("peak_host_memory_bytes", 0.9)] {
            assert!(start == 1 || number(&ended, name) >= share * number(&last, name), "{name}: {ended:#}");
        }
        last = ended;
    }
    let started = Instant::now();
    let more = format!("train.max_steps={}", steps(&dir).len() + 3);
    let output = train(&recipe, &["--resume", "--set", &more, sample[0], sample[1]]);
    elapsed += started.elapsed();
    let summary = json(&dir.join("summary.json"));
    assert_eq!(summary["starts"], 3);
    is_of_all_steps(&summary, &dir);
    let wall = number(&summary, "wall_seconds");
    assert!(wall > number(&last, "wall_seconds") && wall <= elapsed.as_secs_f64(), "{wall} s of {elapsed:?}");
    assert!(number(&summary, "telemetry_seconds") > number(&last, "telemetry_seconds"));
    // The console, the page and the comparison use equal figures.
    let said = stderr(&output);
    assert!(said.contains(" (3 starts), "), "{said}");
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    assert!(page.contains("3 starts, ") && page.contains("of the last start"), "no word of the starts in the page");
    let dir = dir.to_str().unwrap();
    let compared: Value = serde_json::from_slice(&run(&["compare", dir, dir, "--json"]).stdout).unwrap();
    let figures = compared["runs"][0]["figures"].as_array().unwrap();
    let told = figures.iter().find(|figure| figure["name"] == "wall_seconds").unwrap();
    assert_eq!(told["value"], summary["wall_seconds"]);
}

#[test]
fn a_peak_before_the_resumption_is_seen_by_the_summary_and_by_the_check_for_regressions() {
    let bench = Bench::new();
    // An epoch of two steps, with long rows before resuming and short ones after.
    let story = "Once there was a little cat in the garden. ".repeat(150);
    let row = serde_json::json!({"prompt": "", "completion": story}).to_string();
    fs::write(bench.path("train.jsonl"), format!("{row}\n").repeat(8)).unwrap();
    let start = |name: &str, length: &str, steps: u32| -> PathBuf {
        let steps = format!("train.max_steps={steps}");
        let mut args = vec!["--resume", "--set", &steps, "--set", "checkpoint.save_steps=2", "--set", length];
        args.extend(["--set", "train.gradient_checkpointing=false", "--set", "logging.gpu_sample_ms=10"]);
        train(&bench.recipe(name, ""), &args);
        bench.path(name)
    };
    let flat = start("flat", "data.max_length=16", 4);
    let high = start("high", "data.max_length=1024", 2);
    let first = number(&json(&high.join("summary.json")), "peak_host_memory_bytes");
    start("high", "data.max_length=16", 4);
    let summary = json(&high.join("summary.json"));
    assert_eq!((&summary["starts"], summary["steps"].as_u64()), (&2.into(), Some(4)));
    // The figures of the first start after its last checkpoint are lost.
    let peak = number(&summary, "peak_host_memory_bytes");
    assert!((0.9 * first..=first).contains(&peak), "{peak}, and {first} before");
    let after = steps(&high)[2..].iter().map(|line| number(line, "host_memory_bytes")).fold(0.0, f64::max);
    assert!(after < 0.8 * first, "{after} bytes after the resumption, {first} before");
    let (flat, high) = (flat.to_str().unwrap(), high.to_str().unwrap());
    let output = run(&["compare", flat, high, "--max-regression", "peak_memory=20"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("high: peak_memory is "), "{}", stderr(&output));
}

#[test]
fn checkpointing_is_decided_by_the_memory_kept_when_resumed_and_changes_no_bit() {
    let bench = Bench::new();
    let start = |name: &str, more: &[&str]| {
        let set = ["train.max_steps=4", "scheduler.lr_scheduler=constant", "checkpoint.save_steps=2"];
        let set: Vec<&str> = set.iter().flat_map(|change| ["--set", change]).collect();
        let said = stderr(&train(&bench.recipe(name, ""), &[&set[..], more].concat()));
        let resolved = fs::read_to_string(bench.path(name).join("resolved.toml")).unwrap();
        (said, resolved, fs::read(bench.path(name).join("adapter/adapter_model.safetensors")).unwrap())
    };
    let (said, resolved, adapter) = start("whole", &[]);
    assert!(said.contains("gradient checkpointing: off, as there is room (it would save up to "), "{said}");
    assert!(resolved.contains("\ngradient_checkpointing = false\n"), "{resolved}");

    start("parts", &["--set", "train.max_steps=2", "--set", "train.gradient_checkpointing=true"]);
    let (said, resolved, in_parts) = start("parts", &["--resume"]);
    assert!(said.contains("gradient checkpointing: on, as in the run that is resumed"), "{said}");
    assert!(!said.contains("the recipe has changed: train.gradient_checkpointing"), "{said}");
    assert!(resolved.contains("\ngradient_checkpointing = true\n"), "{resolved}");
    assert!(adapter == in_parts, "the adapters differ");
}

#[test]
fn what_a_killed_run_did_after_its_last_checkpoint_is_not_counted_twice() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "[cost]\nprice_per_hour = 3.6\n[checkpoint]\nsave_steps = 3\n");
    let dir = bench.path("run");
    start_and_end(&recipe, &dir, &[], libc::SIGKILL);
    // A start without a checkpoint.
    start_and_end(&recipe, &dir, &["--set", "checkpoint.save_steps=100000"], libc::SIGKILL);
    let mut checkpoints: Vec<_> =
        fs::read_dir(dir.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path()).collect();
    checkpoints.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with("step-"));
    checkpoints.sort();
    let state = json(&checkpoints.last().unwrap().join("trainer_state.json"));
    let saved = number(&state["totals"], "wall_seconds");
    // The last line may be torn.
    let kept = lines_so_far(&dir) as u64 + 1 - state["step"].as_u64().unwrap();
    // Steps after the checkpoint, if any, are repeated.
    let started = Instant::now();
    let more = format!("train.max_steps={}", state["step"].as_u64().unwrap() + kept + 3);
    train(&recipe, &["--resume", "--set", &more]);
    let second = started.elapsed().as_secs_f64();
    let summary = json(&dir.join("summary.json"));
    assert_eq!(summary["starts"], 3);
    assert_eq!(json(&dir.join("environment.json"))["starts"], 3);
    is_of_all_steps(&summary, &dir);
    let wall = number(&summary, "wall_seconds");
    assert!(wall > saved && wall <= saved + second, "{wall} s, {saved} at the checkpoint and {second} since");
}
