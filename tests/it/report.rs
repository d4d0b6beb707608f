//! report.html: its numbers are those of metrics.jsonl, no foreign script can run in it, and it stays small.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::common::{Bench, json, metrics, run, stderr, steps, train};
use serde_json::Value;

/// Text that would end an element, an attribute or a script, if not escaped.
const HOSTILE: &str = "</script><img src=x onerror=alert(1)>\"'&";

/// The data of the chart with this title.
fn chart(page: &str, title: &str) -> Value {
    let heading = format!("<h3>{title}");
    let (_, rest) = page.split_once(&heading).unwrap_or_else(|| panic!("no chart `{title}`"));
    let (_, rest) = rest.split_once("<script type=\"application/json\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

/// Steps and values of a line.
fn line(chart: &Value, name: &str) -> Vec<(u64, f64)> {
    let lines = chart["lines"].as_array().unwrap();
    let line = lines.iter().find(|line| line["name"] == name).unwrap_or_else(|| panic!("no line `{name}`: {chart}"));
    let numbers = |key: &str| line[key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect();
    let (x, y): (Vec<f64>, Vec<f64>) = (numbers("x"), numbers("y"));
    x.into_iter().map(|step| step as u64).zip(y).collect()
}

/// Asserts that a line has the values of a figure, to the six digits that a page keeps.
fn holds(points: &[(u64, f64)], records: &[Value], figure: &str) {
    assert_eq!(points.len(), records.len(), "{figure}");
    for ((step, value), record) in points.iter().zip(records) {
        let expected = record[figure].as_f64().unwrap();
        assert_eq!(*step, record["step"].as_u64().unwrap());
        assert!((value - expected).abs() <= 1e-5 * expected.abs(), "{figure} at {step}: {value} for {expected}");
    }
}

/// Asserts that a page loads nothing.
fn is_self_contained(page: &str) {
    for outside in ["src=\"http", "href=\"http", "url(http", "@import", "<link", "<iframe", "fetch("] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn a_run_ends_with_a_page_whose_curves_are_its_figures() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let output = train(
        &recipe,
        &["--set", "train.max_steps=12", "--set", "eval.eval_steps=4", "--set", "eval.generate=[\"Once\"]"],
    );
    let dir = bench.path("run");
    assert!(stderr(&output).contains("report.html"), "{}", stderr(&output));
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    is_self_contained(&page);
    let steps = steps(&dir);
    let evaluations: Vec<Value> =
        metrics(&dir).into_iter().filter(|record| record.get("eval_loss").is_some()).collect();

    let loss = chart(&page, "Loss");
    holds(&line(&loss, "training loss"), &steps, "loss");
    holds(&line(&loss, "evaluation loss"), &evaluations, "eval_loss");
    holds(&line(&chart(&page, "Learning rate"), "Learning rate"), &steps, "learning_rate");
    holds(&line(&chart(&page, "Throughput"), "Throughput"), &steps, "tokens_per_second");
    holds(&line(&chart(&page, "Gradient norm"), "Gradient norm"), &steps, "grad_norm");
    assert!(!page.contains("<h3>GPU"), "there is no GPU, and so no chart of one");

    // The columns of the time chart add up to the wall time of their step.
    let time = chart(&page, "Time of a step");
    for (index, step) in steps.iter().enumerate() {
        let parts = time["parts"].as_array().unwrap().iter();
        let told: f64 = parts.map(|part| part["y"][index].as_f64().unwrap()).sum();
        let wall = step["wall_seconds"].as_f64().unwrap();
        assert!((told - wall).abs() < 1e-3 * wall, "step {}: {told} of {wall}", index + 1);
    }

    // The plan beside the measured peak is that of `plan`.
    let planned = json(&dir.join("memory_plan.json"));
    let plan = run(&["plan", recipe.to_str().unwrap(), "--json"]);
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!(planned["peak_bytes"], plan["peak_bytes"]);
    assert!(page.contains("Memory, planned and measured"));
    let summary = json(&dir.join("summary.json"));
    let share = 100.0 * summary["peak_host_memory_bytes"].as_f64().unwrap() / planned["peak_bytes"].as_f64().unwrap();
    assert!(page.contains(&format!("The measured peak is {share:.0} % of the plan.")));
    let resolved = fs::read_to_string(dir.join("resolved.toml")).unwrap();
    assert!(page.contains("gradient_accumulation_steps = 2") && resolved.contains("gradient_accumulation_steps = 2"));

    // Making it again gives an equal page.
    let again = bench.path("again.html");
    let output = run(&["report", dir.to_str().unwrap(), "--out", again.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(fs::read_to_string(again).unwrap(), page);
}

/// A run's folder with this many steps.
fn long_run(folder: &Path, num_steps: u64) {
    fs::create_dir_all(folder).unwrap();
    let mut text = String::from("{\"step\":0,\"eval_loss\":9.0}\n");
    for step in 1..=num_steps {
        let wave = (step % 97) as f64 / 97.0;
        let spike = if step == 77_777 { 50.0 } else { 0.0 };
        writeln!(
            text,
            "{{\"step\":{step},\"epoch\":0.5,\"loss\":{loss},\"learning_rate\":1e-4,\"grad_norm\":{wave},\"tokens\":900,\
             \"target_tokens\":300,\"tokens_per_second\":{rate},\"step_seconds\":0.5,\"wall_seconds\":0.6,\
             \"data_wait_seconds\":0.1,\"host_to_device_seconds\":0.01,\"forward_seconds\":0.1,\"backward_seconds\":0.2,\
             \"forward_backward_seconds\":0.3,\"optimizer_seconds\":0.05,\"logging_seconds\":0.01,\
             \"evaluation_seconds\":0.02,\"checkpoint_seconds\":0.02,\"other_seconds\":0.09,\"mfu\":0.4,\
             \"host_memory_bytes\":2000000000,\"cpu_utilization_percent\":{percent},\"gpu_utilization_percent\":{percent},\
             \"gpu_memory_used_bytes\":30000000000,\"gpu_memory_reserved_bytes\":28000000000,\
             \"gpu_memory_allocated_bytes\":25000000000,\"gpu_power_watts\":{watts},\"gpu_sm_clock_mhz\":1700,\
             \"gpu_temperature_celsius\":61,\"gpu_throttle_shares\":{{\"power_cap\":1.0}}}}",
            loss = 2.0 + wave + spike,
            rate = 1800.0 + 100.0 * wave,
            percent = 90.0 + 9.0 * wave,
            watts = 400.0 + 90.0 * wave,
        )
        .unwrap();
    }
    fs::write(folder.join("metrics.jsonl"), text).unwrap();
}

#[test]
fn a_hundred_thousand_steps_make_a_small_page_that_keeps_the_spike() {
    let folder = tempfile::tempdir().unwrap();
    long_run(folder.path(), 100_000);
    let output = run(&["report", folder.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
    let loss = line(&chart(&page, "Loss"), "training loss");
    assert!(loss.len() <= 600 && loss[0].0 == 1 && loss.last().unwrap().0 == 100_000);
    let highest = loss.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert_eq!(highest.0, 77_777);
    let expected = 52.0 + f64::from(77_777 % 97) / 97.0;
    assert!((highest.1 - expected).abs() < 1e-3, "{highest:?}");
    for title in ["GPU power", "GPU clocks", "Utilization", "Gradient norm"] {
        assert!(page.contains(&format!("<h3>{title}")), "{title}");
    }
    assert!(page.contains("Kept down by: power cap in 100% of the samples."));
    // Charts in which nothing moves are named with their numbers instead.
    assert!(!page.contains("<h3>GPU temperature"));
    let still = "Learning rate (1e-4), Tokens of a step (not padding 900, carrying loss 300), GPU temperature (61 °C), \
                 GPU memory (";
    assert!(page.contains(still) && page.contains("Host memory (1.86 GiB)."), "{page}");
    // Every part of the time appears with its share.
    assert!(page.contains("waiting for data 16.7 %") && page.contains("backward 33.3 %"));
}

#[test]
fn what_was_told_during_a_run_is_marked_at_its_step_and_said() {
    let folder = tempfile::tempdir().unwrap();
    long_run(folder.path(), 102);
    let path = folder.path().join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let told = "{\"step\":51,\"findings\":[\"input_bound_cpu\",\"padding\"],";
    fs::write(&path, text.replace("{\"step\":51,", told)).unwrap();
    let finding = serde_json::json!({"rule": "input_bound_cpu", "verdict": "INPUT-BOUND: waited", "steps": [2, 51]});
    fs::write(folder.path().join("summary.json"), serde_json::json!({"told": [finding]}).to_string()).unwrap();
    let output = run(&["report", folder.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    let (_, throughput) = page.split_once("<h3>Throughput").unwrap();
    let throughput = throughput.split("</figure>").next().unwrap();
    // The axis runs from 0 to step 102, so the middle is step 51.
    assert!(throughput.contains("<path class=\"mark\" d=\"M500.0 0V400\"/>"), "{throughput}");
    assert!(throughput.contains("The upright line marks step 51: input bound cpu, padding."), "{throughput}");
    assert_eq!(page.matches("class=\"mark\"").count(), 1, "the loss has no anomaly");
    assert!(page.contains("<h3>Reported during the run</h3>\n<ul><li>steps 2 to 51: INPUT-BOUND: waited</li></ul>"));
}

#[test]
fn nothing_of_a_run_can_run_in_its_page() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("<b>run & \"co\"");
    fs::create_dir(&dir).unwrap();
    let text = |key: &str| serde_json::json!({ key: HOSTILE });
    let step = r#"{"step":1,"loss":2.0,"learning_rate":1e-3,"anomaly":"</script><img src=x>","findings":["</script><img src=x>"],"tokens_per_second":5}"#;
    fs::write(dir.join("metrics.jsonl"), format!("{step}\n")).unwrap();
    let sample = serde_json::json!({"step": 1, "prompt": HOSTILE, "text": HOSTILE});
    fs::write(dir.join("samples.jsonl"), format!("{sample}\n")).unwrap();
    fs::write(dir.join("recipe.toml"), format!("# {HOSTILE}\n")).unwrap();
    fs::write(dir.join("resolved.toml"), format!("[model]\npath = {}\n", Value::from(HOSTILE))).unwrap();
    fs::write(dir.join("environment.json"), text("device").to_string()).unwrap();
    let finding = serde_json::json!({
        "rule": HOSTILE, "severity": "problem", "verdict": HOSTILE, "evidence": [HOSTILE],
        "changes": [{"key": HOSTILE, "from": HOSTILE, "to": HOSTILE, "expected": HOSTILE}],
    });
    let summary = serde_json::json!({"warnings": [HOSTILE], "device": HOSTILE, "diagnosis": [finding], "reported": [finding], "reason": HOSTILE});
    fs::write(dir.join("summary.json"), summary.to_string()).unwrap();
    let output = run(&["report", dir.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    assert!(!page.contains("<img") && !page.contains("<b>run"), "{page}");
    // All scripts are those of the page, each opened and closed once.
    assert_eq!(page.matches("<script").count(), page.matches("</script>").count());
    let escaped = page.matches("onerror").count();
    assert!(escaped >= 10, "what is hostile is shown as it is, {escaped} times");
}

#[test]
fn a_killed_run_has_a_report_too_and_says_that_it_is_not_finished() {
    let folder = tempfile::tempdir().unwrap();
    long_run(folder.path(), 20);
    let path = folder.path().join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, &text[..text.len() - 40]).unwrap();
    let output = run(&["report", folder.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(page.contains("not finished"));
    assert_eq!(line(&chart(&page, "Loss"), "training loss").len(), 19);
}

#[test]
fn what_is_no_run_is_refused_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("nowhere");
    for (path, said) in [(nowhere.as_path(), "there is no such folder"), (folder.path(), "there is no metrics.jsonl")] {
        let output = run(&["report", path.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
}
