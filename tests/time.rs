//! Where a run's time goes: every moment of it belongs to one part.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

mod common;

use std::fs;

use common::{Bench, events, json, lora_train, stderr, steps, train};
use serde_json::Value;

/// The parts of a step's wall time.
const PARTS: [&str; 8] = [
    "data_wait_seconds",
    "host_to_device_seconds",
    "forward_backward_seconds",
    "optimizer_seconds",
    "logging_seconds",
    "evaluation_seconds",
    "checkpoint_seconds",
    "other_seconds",
];

fn number(line: &Value, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("`{name}` is missing in {line}"))
}

/// Evaluations with samples every third step, checkpoints every second one.
fn busy_run(bench: &Bench) -> std::path::PathBuf {
    let settings = [
        "train.max_steps=8",
        "eval.eval_steps=3",
        "eval.generate=[\"Once\"]",
        "checkpoint.save_steps=2",
        "logging.gpu_sample_ms=10",
    ];
    train(&bench.recipe("run", ""), &settings.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>());
    bench.path("run")
}

#[test]
fn the_parts_of_every_step_add_up_to_its_wall_time_and_the_steps_to_the_runs() {
    let bench = Bench::new();
    let dir = busy_run(&bench);
    let lines = steps(&dir);
    assert_eq!(lines.len(), 8);
    for line in &lines {
        let wall = number(line, "wall_seconds");
        let parts: f64 = PARTS.iter().map(|part| number(line, part)).sum();
        assert!((parts - wall).abs() <= 1e-6 + 1e-6 * wall, "the parts are {parts}: {line}");
        let passes = number(line, "forward_seconds") + number(line, "backward_seconds");
        assert!((passes - number(line, "forward_backward_seconds")).abs() < 1e-6, "{line}");
        assert!(number(line, "forward_seconds") > 0.0 && number(line, "backward_seconds") > 0.0, "{line}");
        // What is the step's own; the first one leaves out that the device's peak was measured, a tenth of a second.
        let between = number(line, "evaluation_seconds") + number(line, "checkpoint_seconds");
        let step = number(line, "step_seconds");
        if line["step"] == 1 {
            assert!(step < wall - between - 0.05, "{line}");
        } else {
            assert!((step + between - wall).abs() < 1e-6, "{line}");
        }
        let number_of = |line: &Value| line["step"].as_u64().unwrap();
        // What comes after a step is in the wall time of the next one: evaluations after 0, 3 and 6, checkpoints after 2, 4
        // and 6.
        assert_eq!(number(line, "evaluation_seconds") > 1e-3, [1, 4, 7].contains(&number_of(line)), "{line}");
        assert_eq!(number(line, "checkpoint_seconds") > 1e-4, [3, 5, 7].contains(&number_of(line)), "{line}");
        assert!(number(line, "logging_seconds") > 0.0, "{line}");
        assert_eq!(line["rows"].as_u64(), Some(4), "{line}");
        assert!(line["padding_tokens"].is_u64() && line["truncated_rows"].is_u64(), "{line}");
    }

    let summary = json(&dir.join("summary.json"));
    let wall = number(&summary, "wall_seconds");
    let time = &summary["time"];
    let parts: f64 = time.as_object().unwrap().values().map(|part| part.as_f64().unwrap()).sum();
    assert!((parts - wall).abs() < 1e-6, "{summary}");
    let mut tail = 0.0;
    for part in PARTS {
        let of_steps: f64 = lines.iter().map(|line| number(line, part)).sum();
        let after = number(time, part) - of_steps;
        assert!(after >= -1e-6, "{part} of the steps is {of_steps}: {summary}");
        tail += after;
    }
    // Start-up, the steps, and what came after the last one: its line, an evaluation, a checkpoint, the adapter.
    let of_steps: f64 = lines.iter().map(|line| number(line, "wall_seconds")).sum();
    assert!((number(time, "startup_seconds") + of_steps + tail - wall).abs() < 1e-5, "{tail} s after the steps");
    for part in ["evaluation_seconds", "checkpoint_seconds", "logging_seconds"] {
        let of_steps: f64 = lines.iter().map(|line| number(line, part)).sum();
        assert!(number(time, part) > of_steps, "{part} after the last step is missing: {summary}");
    }
}

/// A run in which the CPU is taken for a GPU whose pools hold 700 bytes, then 300, and so on.
fn train_on_a_stand_in(bench: &Bench, args: &[&str]) -> std::path::PathBuf {
    let recipe = bench.recipe("stand-in", "");
    let mut command = lora_train(&[&[recipe.to_str().unwrap()], args].concat());
    let output = command.env("LORA_TRAIN_STAND_IN_POOLS", "700,300").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    bench.path("stand-in")
}

#[test]
fn on_a_device_that_is_not_waited_for_the_second_step_and_every_fiftieth_have_their_split() {
    let bench = Bench::new();
    let to = |steps: &str| ["--set", steps, "--set", "checkpoint.save_steps=53", "--resume"].map(ToOwned::to_owned);
    let (first, second) = (to("train.max_steps=53"), to("train.max_steps=56"));
    let [first, second] = [&first, &second].map(|args| args.each_ref().map(String::as_str));
    let dir = train_on_a_stand_in(&bench, &first);
    train(&bench.recipe("plain", ""), &first);
    let summary = json(&dir.join("summary.json"));
    let (lines, plain) = (steps(&dir), steps(&bench.path("plain")));
    assert_eq!((lines.len(), plain.len()), (53, 53));
    let mut split = Vec::new();
    for (line, plain) in lines.iter().zip(&plain) {
        for name in ["loss", "grad_norm", "tokens", "learning_rate"] {
            assert_eq!(line[name], plain[name], "waiting changes no number");
        }
        let wall = number(line, "wall_seconds");
        let parts: f64 = PARTS.iter().map(|part| number(line, part)).sum();
        assert!((parts - wall).abs() <= 1e-6 + 1e-6 * wall, "the parts are {parts}: {line}");
        assert_eq!(line.get("forward_seconds").is_some(), line.get("backward_seconds").is_some(), "{line}");
        if line.get("forward_seconds").is_some() {
            let passes = number(line, "forward_seconds") + number(line, "backward_seconds");
            assert!((passes - number(line, "forward_backward_seconds")).abs() < 1e-6, "{line}");
            split.push(line);
        }
    }
    let number_of = |line: &&Value| line["step"].as_u64().unwrap();
    assert_eq!(split.iter().map(number_of).collect::<Vec<_>>(), [2, 50]);

    // What the others took is split as in these two.
    let of_device = ["host_to_device_seconds", "forward_backward_seconds", "optimizer_seconds"];
    let sum = |lines: &[&Value], names: &[&str]| -> f64 {
        lines.iter().flat_map(|line| names.iter().map(|name| number(line, name))).sum()
    };
    let of_all = sum(&lines.iter().collect::<Vec<_>>(), &of_device);
    for part in of_device {
        let expected = of_all * sum(&split, &[part]) / sum(&split, &of_device);
        let told = number(&summary["time"], part);
        assert!((told - expected).abs() < 1e-5, "{part}: {told}, by the split {expected}");
    }
    let share = sum(&split, &["forward_seconds"]) / sum(&split, &["forward_backward_seconds"]);
    assert!((number(&summary, "forward_share") - share).abs() < 1e-6, "{share}: {summary:#}");
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    assert!(page.contains("at the end of every part in 2 of 53 steps"), "the page does not say what was measured");

    // So has the second step after another start.
    train_on_a_stand_in(&bench, &second);
    let lines = steps(&dir);
    let split: Vec<&Value> = lines.iter().filter(|line| line.get("forward_seconds").is_some()).collect();
    assert_eq!(split.iter().map(number_of).collect::<Vec<_>>(), [2, 50, 55]);
}

#[test]
fn the_pools_of_a_device_are_asked_at_the_end_of_a_step_and_now_and_then_after_its_last_forward() {
    let bench = Bench::new();
    let dir = train_on_a_stand_in(&bench, &["--set", "train.max_steps=5"]);
    // Two micro-batches a step, of which the last one's forward is followed by a question in the first step and in the second,
    // which waits; the others know its answer.
    for (line, allocated) in steps(&dir).iter().zip([300, 300, 700, 300, 700]) {
        let bytes = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("`{name}` is missing in {line}"));
        assert_eq!((bytes("gpu_memory_peak_bytes"), bytes("gpu_memory_allocated_bytes")), (700, allocated), "{line}");
        assert_eq!(bytes("gpu_memory_reserved_bytes"), 700, "{line}");
    }
    assert_eq!(json(&dir.join("summary.json"))["peak_gpu_memory_reserved_bytes"], 700);
    assert_eq!(events::values(&dir, "gpu/memory_peak"), [1, 2, 3, 4, 5].map(|step| (step, 700.0)));
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    assert!(page.contains("most seen in a step"), "the page does not show the peak");
    // The CPU has no pools.
    train(&bench.recipe("plain", ""), &["--set", "train.max_steps=2"]);
    for line in steps(&bench.path("plain")) {
        assert!(line.get("gpu_memory_peak_bytes").is_none() && line.get("forward_seconds").is_some(), "{line}");
    }
}
