//! Where a run's time goes: every moment belongs to one part.

use crate::common::{Bench, json, steps, train};
use serde_json::Value;

/// The parts of a step's wall time.
const PARTS: [&str; 8] = [
    "data_wait_seconds", "host_to_device_seconds", "forward_backward_seconds", "optimizer_seconds", "logging_seconds",
    "evaluation_seconds", "checkpoint_seconds", "other_seconds",
];

fn number(line: &Value, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("`{name}` is missing in {line}"))
}

/// Evaluations with samples every third step, checkpoints every second one.
fn busy_run(bench: &Bench) -> std::path::PathBuf {
    let settings = [
        "train.max_steps=8", "eval.eval_steps=3", "eval.generate=[\"Once\"]", "checkpoint.save_steps=2",
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
    let mut gaps = Vec::new();
    for line in &lines {
        let wall = number(line, "wall_seconds");
        let parts: f64 = PARTS.iter().map(|part| number(line, part)).sum();
        assert!((parts - wall).abs() <= 1e-6 + 1e-6 * wall, "the parts are {parts}: {line}");
        let passes = number(line, "forward_seconds") + number(line, "backward_seconds");
        assert!((passes - number(line, "forward_backward_seconds")).abs() < 1e-6, "{line}");
        assert!(number(line, "forward_seconds") > 0.0 && number(line, "backward_seconds") > 0.0, "{line}");
        // The step's own time. In the first step it excludes measuring the device's peak, a tenth of a second.
        let between = number(line, "evaluation_seconds") + number(line, "checkpoint_seconds");
        let step = number(line, "step_seconds");
        if line["step"] == 1 {
            assert!(step < wall - between - 0.05, "{line}");
        } else {
            gaps.push((step + between - wall).abs());
        }
        let number_of = |line: &Value| line["step"].as_u64().unwrap();
        // Work after a step counts in the wall time of the next one: evaluations after 0, 3 and 6, checkpoints after 2,
        // 4 and 6.
        assert_eq!(number(line, "evaluation_seconds") > 1e-3, [1, 4, 7].contains(&number_of(line)), "{line}");
        assert_eq!(number(line, "checkpoint_seconds") > 1e-4, [3, 5, 7].contains(&number_of(line)), "{line}");
        assert!(number(line, "logging_seconds") > 0.0, "{line}");
        assert_eq!(line["rows"].as_u64(), Some(4), "{line}");
        assert!(line["padding_tokens"].is_u64() && line["truncated_rows"].is_u64(), "{line}");
    }

    // On a loaded machine, some lose their processor between two looks at the clock.
    gaps.sort_by(f64::total_cmp);
    assert!(gaps[3] < 1e-3, "{gaps:?}");

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
    // Start-up, the steps, and the work after the last one: its line, an evaluation, a checkpoint, the adapter.
    let of_steps: f64 = lines.iter().map(|line| number(line, "wall_seconds")).sum();
    assert!((number(time, "startup_seconds") + of_steps + tail - wall).abs() < 1e-5, "{tail} s after the steps");
    for part in ["evaluation_seconds", "checkpoint_seconds", "logging_seconds"] {
        let of_steps: f64 = lines.iter().map(|line| number(line, part)).sum();
        assert!(number(time, part) > of_steps, "{part} after the last step is missing: {summary}");
    }
}
