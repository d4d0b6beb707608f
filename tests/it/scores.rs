//! `[eval.task]`: scores at the evaluations of a run, in every sink, and by `lora-train eval`.

use std::fs;

use serde_json::{Value, json};

use crate::common::events::values;
use crate::common::{Bench, json, lora_train, metrics, quickstart_model, run, signal, stderr, train, wait, wait_until};

/// A task on the first rows of the quickstart, whose model answers in another form until it is trained.
const SETTINGS: [&str; 9] = [
    "data.max_length=256",
    "train.micro_batch_size=8",
    "train.gradient_accumulation_steps=1",
    "optimizer.learning_rate=8e-3",
    "eval.task.metric=exact_match",
    "eval.task.rows=12",
    "eval.task.max_new_tokens=60",
    "eval.task.regex_pattern=\"name: (.*)\"",
    "eval.metric_for_best=score",
];

fn settings<'a>(more: &[&'a str]) -> Vec<&'a str> {
    SETTINGS.iter().chain(more).flat_map(|set| ["--set", set]).collect()
}

fn quickstart_rows(bench: &Bench) {
    for name in ["train.jsonl", "eval.jsonl"] {
        let rows = fs::read_to_string(quickstart_model().parent().unwrap().join(name)).unwrap();
        fs::write(bench.path(name), rows).unwrap();
    }
}

fn scores(bench: &Bench) -> Vec<(u64, f64)> {
    let of = |line: &Value| Some((line["step"].as_u64()?, line["eval_score"].as_f64()?));
    metrics(&bench.path("run")).iter().filter_map(of).collect()
}

#[test]
fn a_score_rises_from_that_of_the_base_and_is_in_every_sink_and_its_best_adapter_is_kept() {
    let bench = Bench::new();
    quickstart_rows(&bench);
    let recipe = bench.recipe("run", "");
    let output = train(&recipe, &settings(&["train.max_steps=80", "eval.eval_steps=20"]));
    let scores = scores(&bench);
    assert_eq!(scores.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 20, 40, 60, 80]);
    let best = scores.iter().map(|(_, score)| *score).fold(0.0, f64::max);
    assert!(scores[0].1 < 0.1 && best > 0.5, "{scores:?}");
    let first_best = scores.iter().find(|(_, score)| *score == best).unwrap().0;

    #[expect(clippy::cast_possible_truncation, reason = "TensorBoard stores f32")]
    let as_f32: Vec<f32> = scores.iter().map(|(_, score)| *score as f32).collect();
    let drawn: Vec<f32> = values(&bench.path("run"), "eval/score").iter().map(|(_, value)| *value).collect();
    assert_eq!(drawn, as_f32);
    let summary = json(&bench.path("run/summary.json"));
    assert_eq!((&summary["initial_eval_score"], &summary["best_eval_score"]), (&json!(scores[0].1), &json!(best)));
    assert_eq!(summary["best_eval_step"], first_best);
    let kept = json(&bench.path("run/adapter-best/best.json"));
    assert_eq!((&kept["step"], &kept["eval_score"]), (&json!(first_best), &json!(best)));
    assert!(stderr(&output).contains(&format!("eval at step 80: score {:.1}% of 12 rows", 100.0 * scores[4].1)));
    let page = fs::read_to_string(bench.path("run/report.html")).unwrap();
    assert!(page.contains("<h3>Score"), "a chart of the score");
    let run_dir = bench.path("run");
    let compared = run(&["compare", run_dir.to_str().unwrap(), run_dir.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&compared.stdout).contains("score, last"));

    // `eval` finds the same, and writes what was answered.
    let answers = bench.path("answers.jsonl");
    let measured = run(&["eval", run_dir.to_str().unwrap(), "--json", "--answers", answers.to_str().unwrap()]);
    let report: Value = serde_json::from_slice(&measured.stdout).unwrap();
    assert_eq!(report["tasks"], json!({"exact_match": {"score": scores[4].1, "rows": 12}}), "{}", stderr(&measured));
    let lines = fs::read_to_string(answers).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let right = lines.iter().filter(|line| line["found"] == line["expected"]).count();
    assert_eq!(right, lines.iter().filter(|line| line["is_right"] == true).count());
    assert_eq!((lines.len(), right as f64 / 12.0), (12, scores[4].1));
    let base = run(&["eval", run_dir.to_str().unwrap(), "--base", "--json"]);
    let base: Value = serde_json::from_slice(&base.stdout).unwrap();
    assert_eq!(base["tasks"]["exact_match"]["score"], scores[0].1);
    // Another metric has no use for the pattern of the run, but for one of the command line it should.
    let other = ["eval", run_dir.to_str().unwrap(), "--set", "eval.task.metric=json", "--set", "eval.task.rows=2"];
    let of_other = run(&other);
    let report: Value = serde_json::from_slice(&of_other.stdout).unwrap_or_else(|_| panic!("{}", stderr(&of_other)));
    assert_eq!(report["tasks"]["json"]["rows"], 2);
    for (more, message) in [
        (["--set", "eval.task.regex_pattern=a"], "`eval.task.regex_pattern` does nothing here"),
        (["--answers", run_dir.to_str().unwrap()], "is a directory"),
    ] {
        let refused = run(&[&other[..], &more].concat());
        assert!(refused.status.code() == Some(2) && stderr(&refused).contains(message), "{}", stderr(&refused));
    }
}

#[test]
fn a_task_changes_nothing_of_the_training_also_where_it_was_interrupted() {
    let bench = Bench::new();
    quickstart_rows(&bench);
    let weights = |folder: &str| fs::read(bench.path(folder).join("adapter/adapter_model.safetensors")).unwrap();
    let steps = ["train.max_steps=6", "eval.eval_steps=2", "checkpoint.save_steps=2"];
    train(&bench.recipe("run", ""), &settings(&steps));
    let plain = [&SETTINGS[..4], &steps].concat();
    train(&bench.recipe("plain", ""), &plain.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>());
    assert_eq!(weights("run"), weights("plain"));

    // A signal within the task of an evaluation.
    let recipe = bench.recipe("cut", "");
    let mut args = vec![recipe.to_str().unwrap()];
    let settings = settings(&[&steps[..], &["eval.task.rows=400", "eval.task.max_new_tokens=100"]].concat());
    args.extend(&settings);
    let mut child = lora_train(&args).stderr(std::process::Stdio::null()).spawn().unwrap();
    let log = bench.path("cut/metrics.jsonl");
    wait_until("the second step", || fs::read_to_string(&log).is_ok_and(|text| text.contains("\"step\":2,")));
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130));
    train(&recipe, &[&settings[..], &["--resume", "--set", "eval.task.rows=12"]].concat());
    assert_eq!(weights("cut"), weights("run"));
}

#[test]
fn every_metric_has_a_score_and_one_that_runs_out_of_time_says_of_how_many_rows() {
    let bench = Bench::new();
    let row = |index: usize| {
        let choices = ["cat", "dog", "bird", "fox"];
        json!({"prompt": format!("{index}: Once there was a little"), "completion": choices[index % 4], "choices": choices})
    };
    let rows: String = (0..40).map(|index| format!("{}\n", row(index))).collect();
    fs::write(bench.path("choices.jsonl"), rows).unwrap();
    let (model, data) = (quickstart_model(), bench.path("choices.jsonl"));
    let eval = |sets: &[&str]| -> Value {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let output =
            run(&[&["eval", model.to_str().unwrap(), "--data", data.to_str().unwrap(), "--json"], &sets[..]].concat());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)))
    };
    let choice = eval(&["eval.task.metric=multiple_choice", "eval.task.prompt=\"{prompt}\""]);
    let choice = &choice["tasks"]["multiple_choice"];
    // Whatever the model finds likely, it is one of four answers, each right in ten of the rows.
    assert!((0.1..=0.5).contains(&choice["score"].as_f64().unwrap()), "{choice}");
    assert!(choice["score_norm"].is_number() && choice["rows"] == 40);
    let json = eval(&["eval.task.metric=json", "eval.task.max_new_tokens=8", "eval.task.rows=5"]);
    assert_eq!(json["tasks"]["json"], json!({"score": 0.0, "rows": 5}));
    // Thousands of rows take longer than a second.
    let text = fs::read_to_string(&data).unwrap().repeat(100);
    fs::write(&data, text).unwrap();
    let path = format!("data.eval.0.path={:?}", data.to_str().unwrap());
    let sets =
        [&*path, "eval.max_batches=1", "eval.task.metric=json", "eval.task.rows=4000", "eval.task.max_seconds=1"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    let few = run(&[&["eval", model.to_str().unwrap(), "--json"], &sets[..]].concat());
    let few: Value = serde_json::from_slice(&few.stdout).unwrap_or_else(|_| panic!("{}", stderr(&few)));
    let rows = few["tasks"]["json"]["rows"].as_u64().unwrap();
    assert!(0 < rows && rows < 4000, "{few}");
}

#[test]
fn an_answer_that_the_model_itself_wrote_is_right_to_the_token_and_as_a_whole() {
    let bench = Bench::new();
    let (model, data) = (quickstart_model(), bench.path("own.jsonl"));
    let prompt = "Max saw a snail on the hill. Olga gave him a brown basket.";
    let model = model.to_str().unwrap();
    let written = run(&["generate", model, prompt, "--quiet"]);
    let written = String::from_utf8(written.stdout).unwrap();
    let row = |completion: &str| format!("{}\n", json!({"prompt": prompt, "completion": completion}));
    fs::write(&data, row(written.trim()) + &row("something else")).unwrap();
    for (metric, least, most) in [("exact_match", 0.5, 0.5), ("token_accuracy", 0.3, 0.9)] {
        let set = format!("eval.task.metric={metric}");
        let score = |rows: &str| {
            let rows = format!("eval.task.rows={rows}");
            let data = data.to_str().unwrap();
            let output = run(&["eval", model, "--data", data, "--json", "--set", &set, "--set", &rows]);
            let report: Value =
                serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)));
            report["tasks"][metric]["score"].as_f64().unwrap()
        };
        assert_eq!(score("1"), 1.0, "{metric}");
        assert!((least..=most).contains(&score("2")), "{metric}: {}", score("2"));
    }
}
