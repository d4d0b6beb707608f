//! Our event files, read by the real TensorBoard.
//!
//! Ignored unless requested, because it needs Python: `scripts/setup_python.sh`, then
//! `LORA_TRAIN_PYTHON=.venv/bin/python cargo test --release --test it -- --ignored tensorboard`.

use std::path::{Path, PathBuf};
use std::process::Command;

use burn_train::Interrupter;
use lora_train::config::LoggingConfig;
use lora_train::measure::figures::tags;
use lora_train::measure::metrics::{EvalMetrics, Sample, Shows, SinkOptions, Sinks, StepMetrics};
use serde_json::{Value, json};

fn open(run_dir: &Path, resume_step: Option<u64>) -> Sinks {
    let interrupter = Interrupter::new();
    let options = SinkOptions {
        run_dir,
        resume_step,
        has_evaluated: true,
        has_rollouts: false,
        total_steps: 20,
        eval_steps: None,
        shows: Shows::Warnings,
        interrupter,
    };
    Sinks::open(&LoggingConfig::default(), options).unwrap()
}

/// A step with every figure that has a tag; those not checked below are 1.
fn step(step: u64, loss: f64) -> StepMetrics {
    let mut figures = json!({
        "step": step,
        "learning_rate": 2e-4,
        "tokens_per_second": 1000.0,
        "step_seconds": 2.0,
        "host_memory_bytes": 3_u64 << 30,
        "gpu_utilization_percent": 97.0,
        "gpu_power_watts": 510.0,
    });
    let object = figures.as_object_mut().unwrap();
    for (field, ..) in tags() {
        object.entry(field).or_insert(json!(1));
    }
    StepMetrics { loss, ..serde_json::from_value(figures).unwrap() }
}

fn read_with_tensorboard(run_dir: &Path) -> Value {
    let python = std::env::var_os("LORA_TRAIN_PYTHON")
        .expect("LORA_TRAIN_PYTHON names a Python with the package tensorboard (scripts/setup_python.sh makes one)");
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("scripts/read_tensorboard.py");
    let output = Command::new(python).arg(script).arg(run_dir.join("tensorboard")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
#[ignore = "needs LORA_TRAIN_PYTHON, a Python with the package tensorboard (scripts/setup_python.sh)"]
fn tensorboard_reads_every_tag_and_value_and_forgets_what_a_resumed_run_wrote_again() {
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path();
    let mut sinks = open(run_dir, None);
    sinks.recipe(0, "seed = 1");
    let eval = |step, eval_loss: f64| EvalMetrics {
        step,
        eval_loss: Some(eval_loss),
        eval_perplexity: Some(eval_loss.exp()),
        eval_score: Some(0.5),
        eval_score_norm: Some(0.25),
        eval_rewards_accuracies: Some(0.75),
        eval_rewards_margins: Some(0.5),
        eval_reward: Some(0.5),
        eval_reward_std: Some(0.25),
        eval_completion_length: Some(8.0),
        ..EvalMetrics::default()
    };
    sinks.eval(&eval(0, 4.0));
    sinks.sample(0, &Sample { step: 0, prompt: "Once".into(), text: " upon\na time".into(), reward: None });
    for number in 1..=10_u32 {
        let loss = if number == 2 { f64::NAN } else { 4.0 - 0.125 * f64::from(number) };
        sinks.step(&step(number.into(), loss));
    }
    drop(sinks);
    // Killed after step 10 and resumed from the checkpoint of step 5: steps 6 to 10 are written again.
    let mut sinks = open(run_dir, Some(5));
    for number in 6..=12 {
        sinks.step(&step(number, 1.0));
    }
    sinks.eval(&eval(12, 2.0));
    drop(sinks);

    let read = read_with_tensorboard(run_dir);
    let mut tags: Vec<_> = read["scalars"].as_object().unwrap().keys().map(String::as_str).collect();
    tags.sort_unstable();
    let mut expected: Vec<_> = lora_train::measure::figures::tags().map(|(_, tag, _)| tag).collect();
    expected.sort_unstable();
    assert_eq!(tags, expected);

    let losses: Vec<Value> = (1..=12)
        .map(|number| match number {
            2 => json!([2, null]),
            1..=5 => json!([number, 4.0 - 0.125 * f64::from(number)]),
            _ => json!([number, 1.0]),
        })
        .collect();
    assert_eq!(read["scalars"]["train/loss"], json!(losses));
    assert_eq!(read["scalars"]["eval/loss"], json!([[0, 4.0], [12, 2.0]]));
    let first_of = |tag: &str| read["scalars"][tag][0][1].as_f64().unwrap();
    for (tag, value) in [
        ("train/learning_rate", 2e-4),
        ("throughput/tokens_per_second", 1000.0),
        ("time/step", 2.0),
        ("memory/host", f64::from(1 << 30) * 3.0),
        ("gpu/utilization", 97.0),
        ("gpu/power", 510.0),
        ("eval/perplexity", 4_f64.exp()),
    ] {
        // TensorBoard stores 32-bit floats.
        assert!((first_of(tag) - value).abs() <= 1e-6 * value, "{tag}: {}", first_of(tag));
    }
    let description = |tag: &str| read["descriptions"][tag].as_str().unwrap().to_owned();
    assert!(tags.iter().all(|tag| !description(tag).is_empty()), "{}", read["descriptions"]);
    assert!(description("gpu/power").starts_with("Watts") && description("train/loss").contains("nats"));
    assert_eq!(read["layout"]["Learning"]["loss (nats)"], json!(["^train/loss$", "^eval/loss$"]));
    assert_eq!(read["layout"]["Memory"].as_object().unwrap().len(), 2);
    assert_eq!(read["texts"]["recipe"], json!([[0, "```toml\nseed = 1\n```"]]));
    assert_eq!(read["hparams"], json!({"seed": 1.0}));
    assert_eq!(read["texts"]["samples/0"], json!([[0, "    Once\n     upon\n    a time"]]));
}
