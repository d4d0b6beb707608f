//! Runs with one deliberate fault each, and a healthy one: the diagnosis names the fault.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::{Bench, json, lora_train, stderr, steps, train};
use serde_json::Value;

/// Trains with settings; returns the findings and stderr.
fn diagnosed(bench: &Bench, settings: &[&str]) -> (Vec<Value>, String) {
    let recipe = bench.recipe("run", "[cost]\nprice_per_hour = 3.6\ncurrency = \"EUR\"\n");
    let output = train(&recipe, &settings.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>());
    let summary = json(&bench.path("run/summary.json"));
    (summary["diagnosis"].as_array().unwrap().clone(), stderr(&output))
}

fn found<'a>(findings: &'a [Value], rule: &str) -> &'a Value {
    findings.iter().find(|finding| finding["rule"] == rule).unwrap_or_else(|| panic!("no {rule} in {findings:#?}"))
}

fn share(finding: &Value) -> f64 {
    finding["share_of_time"].as_f64().unwrap()
}

/// Rows of a prompt and an answer.
fn write_rows(path: &Path, rows: impl Iterator<Item = String>) {
    let rows: String =
        rows.map(|text| format!("{}\n", serde_json::json!({"prompt": "Tell: ", "completion": text}))).collect();
    fs::write(path, rows).unwrap();
}

const SENTENCE: &str = "Once there was a little cat in the garden. ";

#[test]
fn padding_that_costs_no_time_is_a_figure_and_no_finding() {
    let bench = Bench::new();
    write_rows(&bench.path("train.jsonl"), (0..24).map(|row| SENTENCE.repeat(if row % 4 == 0 { 10 } else { 1 })));
    let settings = ["train.max_steps=52", "train.micro_batch_size=4", "data.shuffle=false", "data.max_length=256"];
    let (findings, said) = diagnosed(&bench, &settings);
    let lines = steps(&bench.path("run"));
    let sum = |name: &str| lines.iter().map(|line| line[name].as_u64().unwrap()).sum::<u64>() as f64;
    let padding = sum("padding_tokens") / (sum("padding_tokens") + sum("tokens"));
    assert!(padding > 0.5, "{padding}");
    // The kernels of the CPU leave padding out: nothing would be gained.
    assert!(findings.iter().all(|finding| finding["rule"] != "padding") && !said.contains("PADDING"), "{said}");
    let summary = json(&bench.path("run/summary.json"));
    assert!((summary["padding_share"].as_f64().unwrap() - padding).abs() < 1e-9);
}

#[test]
fn packed_rows_have_next_to_no_padding() {
    let bench = Bench::new();
    write_rows(&bench.path("train.jsonl"), (0..96).map(|row| SENTENCE.repeat(if row % 4 == 0 { 10 } else { 1 })));
    let (findings, _) = diagnosed(&bench, &["train.max_steps=52", "data.packing=true", "data.max_length=256"]);
    assert!(findings.iter().all(|finding| finding["rule"] != "padding"), "{findings:#?}");
}

#[test]
fn a_checkpoint_after_every_step_is_told_of() {
    let bench = Bench::new();
    let settings =
        ["train.max_steps=52", "checkpoint.save_steps=1", "checkpoint.save_total_limit=2", "eval.max_batches=1"];
    let (findings, said) = diagnosed(&bench, &settings);
    let finding = found(&findings, "checkpoint");
    assert!(share(finding) > 0.05 && finding["severity"] != "note", "{finding:#}");
    assert!(finding["evidence"][0].as_str().unwrap().starts_with("52 checkpoints of "), "{finding:#}");
    let change = &finding["changes"][0];
    assert_eq!((&change["key"], &change["from"]), (&"checkpoint.save_steps".into(), &"1".into()));
    assert!(change["to"].as_str().unwrap().parse::<u64>().unwrap() > 1, "{change}");
    assert!(said.contains("CHECKPOINTS: "), "{said}");
}

#[test]
fn an_evaluation_after_every_step_is_told_of() {
    let bench = Bench::new();
    fs::copy(bench.path("train.jsonl"), bench.path("eval.jsonl")).unwrap();
    let (findings, said) = diagnosed(&bench, &["train.max_steps=52", "eval.eval_steps=1"]);
    let finding = found(&findings, "evaluation");
    assert!(share(finding) > 0.3 && finding["severity"] == "problem", "{finding:#}");
    assert!(finding["evidence"][0].as_str().unwrap().starts_with("53 evaluations of "), "{finding:#}");
    let keys: Vec<&Value> = finding["changes"].as_array().unwrap().iter().map(|change| &change["key"]).collect();
    assert_eq!(keys, ["eval.eval_steps", "eval.max_batches"]);
    assert_eq!((&finding["changes"][1]["from"], &finding["changes"][1]["to"]), (&"12".into(), &"10".into()));
    assert!(said.contains("EVALUATION: "), "{said}");
}

#[test]
fn a_trial_of_a_few_steps_gets_no_advice() {
    let bench = Bench::new();
    let (findings, said) = diagnosed(&bench, &["train.max_steps=12", "eval.eval_steps=1", "checkpoint.save_steps=1"]);
    assert_eq!((findings.len(), &findings[0]["rule"]), (1, &"healthy".into()), "{findings:#?}");
    assert!(said.contains("HEALTHY: nothing stands out; advice needs a run of 50 steps or a minute"), "{said}");
}

#[test]
fn a_run_that_computes_most_of_the_time_is_healthy_and_says_what_it_took() {
    let settings = [
        "train.max_steps=52",
        "train.micro_batch_size=4",
        "train.gradient_checkpointing=false",
        "data.max_length=256",
        "eval.max_batches=1",
    ];
    let attempt = || {
        let bench = Bench::new();
        // All rows alike, so steps differ only because of the machine.
        write_rows(&bench.path("train.jsonl"), (0..24).map(|_| SENTENCE.repeat(18)));
        let (findings, said) = diagnosed(&bench, &settings);
        (bench, findings, said)
    };
    // If other work takes the processors, that finding is correct: try again, unless the work goes on.
    let is_disturbed = |findings: &[Value]| {
        let is_shared = |finding: &Value| finding["rule"] == "shared_cpu";
        findings[0]["rule"] == "uneven_steps" || findings.iter().any(is_shared)
    };
    let mut attempts = (0..3).map(|_| attempt());
    let (bench, findings, said) = attempts.find(|(_, findings, _)| !is_disturbed(findings)).unwrap_or_else(attempt);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default();
    #[expect(clippy::cast_precision_loss, reason = "a few")]
    let has_other_work = load > std::thread::available_parallelism().unwrap().get() as f64 + 1.0;
    if !(has_other_work && is_disturbed(&findings)) {
        assert_eq!(findings[0]["rule"], "healthy", "{findings:#?}");
        assert!(findings.iter().skip(1).all(|finding| finding["severity"] == "note"), "{findings:#?}");
        assert!(said.contains("HEALTHY: "), "{said}");
    }

    let summary = json(&bench.path("run/summary.json"));
    let number = |name: &str| summary[name].as_f64().unwrap_or_else(|| panic!("{name} in {summary:#}"));
    let wall = number("wall_seconds");
    assert!((number("cost") - 3.6 * wall / 3600.0).abs() < 1e-9 && summary["currency"] == "EUR", "{summary:#}");
    let million = &summary["per_million_tokens"];
    let millions = number("tokens") / 1e6;
    assert!((million["seconds"].as_f64().unwrap() - wall / millions).abs() < 1e-6 * wall / millions);
    assert!((million["cost"].as_f64().unwrap() * millions - number("cost")).abs() < 1e-9);
    let busy = number("mean_cpu_utilization_percent");
    assert!(busy > 0.0 && busy <= 100.0, "{summary:#}");
    assert!(!said.contains("GPU") && !said.contains("no energy"), "{said}");
    for text in [" tokens, ", "1M tokens: ", "CPU ", "\n  time: ", "\n  try it    lora-train chat "] {
        assert!(said.contains(text), "`{text}` in {said}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_slow_output_disk_is_named_as_what_holds_a_run_back() {
    let bench = Bench::new();
    let library = bench.path("slow_disk.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/slow_disk.c");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&library).arg(source).arg("-ldl");
    assert!(cc.status().unwrap().success());
    let recipe = bench.recipe("run", "");
    let settings = ["--set", "train.max_steps=52", "--set", "eval.max_batches=1"];
    let mut command = lora_train(&[recipe.to_str().unwrap()]);
    let output = command.args(settings).env("LD_PRELOAD", &library).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let summary = json(&bench.path("run/summary.json"));
    let findings = summary["diagnosis"].as_array().unwrap();
    let finding = found(findings, "logging");
    assert_eq!(finding["severity"], "problem", "{findings:#?}");
    assert!(share(finding) > 0.25, "{finding:#}");
    // Each of 52 steps waited 200 ms for its line.
    let logging: f64 = steps(&bench.path("run")).iter().map(|line| line["logging_seconds"].as_f64().unwrap()).sum();
    assert!(logging >= 51.0 * 0.2, "{logging} s");
    assert!(stderr(&output).contains("LOGGING: writing figures takes "), "{}", stderr(&output));
}

#[cfg(unix)]
#[test]
fn a_step_in_which_the_process_was_stopped_is_marked_as_slow_and_longer_rows_are_not() {
    let bench = Bench::new();
    write_rows(&bench.path("train.jsonl"), (0..40).map(|row| SENTENCE.repeat(if row % 13 == 5 { 44 } else { 1 })));
    let recipe = bench.recipe("run", "");
    let mut command = lora_train(&[recipe.to_str().unwrap()]);
    let settings = ["train.max_steps=100000", "data.max_length=512", "train.micro_batch_size=1", "eval.max_batches=1"];
    command.args(settings.iter().flat_map(|set| ["--set", set])).stdout(Stdio::null()).stderr(Stdio::null());
    let mut program = command.spawn().unwrap();
    let dir = bench.path("run");
    let num_steps = || fs::read_to_string(dir.join("metrics.jsonl")).map_or(0, |text| text.lines().count());
    crate::common::wait_until("steps", || num_steps() > 60);
    crate::common::signal(&program, libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(2500));
    crate::common::signal(&program, libc::SIGCONT);
    let stopped_at = num_steps();
    crate::common::wait_until("more steps", || num_steps() > stopped_at + 20);
    crate::common::signal(&program, libc::SIGINT);
    assert_eq!(crate::common::wait(&mut program).code(), Some(130));
    let lines = steps(&dir);
    let is_slow = |line: &Value| {
        line["findings"].as_array().is_some_and(|findings| findings.iter().any(|rule| rule == "slow_step"))
    };
    let is_long = |line: &Value| line["tokens"].as_u64().unwrap() > 200;
    assert!(lines.iter().filter(|line| is_long(line)).count() > 5, "{} steps", lines.len());
    let slow: Vec<&Value> = lines.iter().filter(|line| is_slow(line)).collect();
    assert!(slow.iter().any(|line| line["step_seconds"].as_f64().unwrap() > 2.4), "{slow:#?}");
    let long_and_slow = |line: &&&Value| is_long(line) && line["step_seconds"].as_f64().unwrap() < 2.4;
    // On a loaded machine, one of them may have lost its processor.
    assert!(slow.iter().filter(long_and_slow).count() <= 1, "{slow:#?}");
}
