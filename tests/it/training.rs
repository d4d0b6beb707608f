//! Training with the binary, on the pretrained model of the repository.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::families::{FAMILIES, write_family, write_model};
use crate::common::{Bench, json, lora_train, metrics, run, signal, stderr, steps, train, wait, wait_until};
use lora_train::spec::ModelConfig;
use serde_json::Value;

/// The bytes of the adapter that a run wrote.
fn adapter(run_dir: &Path) -> Vec<u8> {
    fs::read(run_dir.join("adapter/adapter_model.safetensors")).unwrap()
}

/// What must be equal in a resumed and an uninterrupted run: every figure except times.
fn curve(run_dir: &Path) -> Vec<(u64, String, String, String, u64, u64)> {
    let figure = |line: &Value, name: &str| line[name].to_string();
    steps(run_dir)
        .iter()
        .map(|line| {
            let tokens = (line["tokens"].as_u64().unwrap(), line["target_tokens"].as_u64().unwrap());
            let floats = (figure(line, "loss"), figure(line, "learning_rate"), figure(line, "grad_norm"));
            (line["step"].as_u64().unwrap(), floats.0, floats.1, floats.2, tokens.0, tokens.1)
        })
        .collect()
}

#[test]
fn a_short_run_writes_every_file_of_the_contract() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let output = train(
        &recipe,
        &[
            "--set", "train.max_steps=5", "--set", "checkpoint.save_steps=2", "--set", "eval.eval_steps=2", "--set",
            "eval.generate=[\"Once\"]",
        ],
    );
    let dir = bench.path("run");
    for file in [
        "recipe.toml",
        "resolved.toml",
        "environment.json",
        "memory_plan.json",
        "summary.json",
        "report.html",
        "metrics.jsonl",
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
        "adapter/prompt_form.json",
        "checkpoints/step-000002/adapter_model.safetensors",
        "checkpoints/step-000002/optimizer.safetensors",
        "checkpoints/step-000004/trainer_state.json",
    ] {
        assert!(dir.join(file).is_file(), "{file} is missing; the run said:\n{}", stderr(&output));
    }
    let events = fs::read_dir(dir.join("tensorboard")).unwrap().count();
    assert_eq!(events, 1);
    assert!(output.stdout.is_empty(), "data goes to stdout, and training prints none");

    let samples = fs::read_to_string(dir.join("samples.jsonl")).unwrap();
    let samples: Vec<Value> = samples.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(samples.iter().map(|sample| sample["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 2, 4, 5]);
    assert!(samples.iter().all(|sample| sample["prompt"] == "Once" && !sample["text"].as_str().unwrap().is_empty()));

    let given = fs::read_to_string(dir.join("recipe.toml")).unwrap();
    assert!(given.contains("max_steps = 5") && given.contains("r = 4"), "{given}");
    let resolved: toml::Table = fs::read_to_string(dir.join("resolved.toml")).unwrap().parse().unwrap();
    assert_eq!(resolved["train"]["max_steps"].as_integer(), Some(5));
    assert_eq!(resolved["lora"]["lora_alpha"].as_float(), Some(16.0));
    let environment = fs::read_to_string(dir.join("environment.json")).unwrap();
    assert!(environment.contains("\"device\": \"cpu") && !environment.contains("HF_TOKEN"), "{environment}");

    let git = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    if let Some(git) = git.ok().filter(|git| git.status.success()) {
        let commit = String::from_utf8_lossy(&git.stdout).trim().to_owned();
        assert!(environment.contains(&format!("\"git_commit\": \"{commit}\"")), "{commit}: {environment}");
    }

    let said = stderr(&output);
    for expected in
        ["trainable params:", "|| all params:", "|| trainable%:", "effective batch: 4 sequences", "5 steps:"]
    {
        assert!(said.contains(expected), "`{expected}` is missing in:\n{said}");
    }
}

#[test]
fn every_step_has_one_line_with_the_figures_that_exist_without_a_gpu() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &["--set", "train.max_steps=4", "--set", "eval.eval_steps=2"]);
    let dir = bench.path("run");
    let lines = steps(&dir);
    assert_eq!(lines.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4]);
    for line in &lines {
        for figure in [
            "epoch", "loss", "learning_rate", "grad_norm", "tokens", "target_tokens", "tokens_per_second",
            "step_seconds", "data_wait_seconds", "forward_backward_seconds", "optimizer_seconds", "mfu",
            "host_memory_bytes", "cpu_utilization_percent",
        ] {
            let value = line[figure].as_f64().unwrap_or_else(|| panic!("`{figure}` is missing in {line}"));
            assert!(value.is_finite() && value >= 0.0, "{figure} = {value}");
        }
        let number = |name: &str| line[name].as_f64().unwrap();
        let parts = number("data_wait_seconds") + number("forward_backward_seconds") + number("optimizer_seconds");
        assert!(parts <= number("step_seconds") * 1.001, "the parts of a step take longer than the step: {line}");
        let rate = number("tokens") / number("step_seconds");
        assert!((number("tokens_per_second") / rate - 1.0).abs() < 1e-6, "{line}");
        assert!(line.as_object().unwrap().keys().all(|name| !name.starts_with("gpu_")), "{line}");
    }
    // With warm-up the curve of transformers starts at zero.
    assert_eq!(lines[0]["learning_rate"].as_f64(), Some(0.0));
    assert_eq!(lines[1]["learning_rate"].as_f64(), Some(1e-3));
    let evaluated: Vec<u64> = metrics(&dir)
        .iter()
        .filter(|line| line.get("eval_loss").is_some())
        .map(|line| {
            let perplexity = line["eval_loss"].as_f64().unwrap().exp();
            assert!((line["eval_perplexity"].as_f64().unwrap() / perplexity - 1.0).abs() < 1e-9);
            line["step"].as_u64().unwrap()
        })
        .collect();
    assert_eq!(evaluated, [0, 2, 4]);
}

#[test]
fn the_summary_says_how_the_run_went_and_where_the_time_went() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &["--set", "train.max_steps=3"]);
    let summary = json(&bench.path("run/summary.json"));
    assert_eq!(summary["steps"].as_u64(), Some(3));
    assert_eq!(summary["skipped_steps"].as_u64(), Some(0));
    let first = summary["initial_eval_loss"].as_f64().unwrap();
    let last = summary["final_eval_loss"].as_f64().unwrap();
    assert!(last < first, "{first} -> {last}");
    assert!(summary["peak_host_memory_bytes"].as_u64().unwrap() > 1 << 20);
    let parts: f64 = summary["time"].as_object().unwrap().values().map(|part| part.as_f64().unwrap()).sum();
    assert!((parts / summary["wall_seconds"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{summary}");
    assert_eq!(summary["adapter_verified"].as_bool(), Some(true));
}

#[test]
fn ten_steps_and_ten_resumed_ones_are_twenty_bit_for_bit() {
    let bench = Bench::new();
    // 24 rows are 6 steps: the checkpoint lies within the second epoch.
    let settings = ["--set", "train.max_steps=20", "--set", "checkpoint.save_steps=10", "--set", "eval.eval_steps=5"];
    train(&bench.recipe("whole", ""), &settings);
    let checkpoint = bench.path("whole/checkpoints/step-000010");
    let mut resumed = settings.to_vec();
    resumed.extend(["--resume", checkpoint.to_str().unwrap()]);
    train(&bench.recipe("resumed", ""), &resumed);

    assert_eq!(adapter(&bench.path("whole")), adapter(&bench.path("resumed")));
    assert_eq!(curve(&bench.path("whole"))[10..], curve(&bench.path("resumed")));
    let optimizer =
        |run: &str| fs::read(bench.path(run).join("checkpoints/step-000020/optimizer.safetensors")).unwrap();
    assert_eq!(optimizer("whole"), optimizer("resumed"));
}

#[test]
fn an_interrupted_run_saves_exits_130_and_continues_to_the_same_adapter() {
    let bench = Bench::new();
    let recipe = bench.recipe("stopped", "");
    let mut child = lora_train(&arguments(&recipe, &MANY_STEPS)).stderr(Stdio::null()).spawn().unwrap();
    let dir = bench.path("stopped");
    wait_until("three steps", || metrics_lines(&dir) > 4);
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130));
    assert!(!dir.join("summary.json").exists() && !dir.join("adapter").exists());
    let checkpoints: Vec<_> = fs::read_dir(dir.join("checkpoints")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(checkpoints.len(), 1, "{checkpoints:?}");
    let done = json(&checkpoints[0].join("trainer_state.json"))["step"].as_u64().unwrap();
    assert!((3..5000).contains(&done), "stopped after step {done}");

    // Without --resume nothing is overwritten.
    let refused = run(&arguments(&recipe, &MANY_STEPS));
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("--resume"), "{}", stderr(&refused));

    let end = format!("train.max_steps={}", done + 12);
    let to_its_end = [&MANY_STEPS[..], &["--set", &end]].concat();
    train(&bench.recipe("whole", ""), &to_its_end);
    train(&recipe, &[&to_its_end[..], &["--resume"]].concat());
    assert_eq!(adapter(&bench.path("whole")), adapter(&dir));
    assert_eq!(curve(&bench.path("whole")), curve(&dir), "no step is missing or double");
}

/// A run that is stopped before its end however late the signal comes, with rates that do not depend on its length.
const MANY_STEPS: [&str; 6] =
    ["--set", "train.max_steps=5000", "--set", "scheduler.lr_scheduler=constant", "--set", "eval.eval_steps=10"];

fn arguments<'a>(recipe: &'a Path, settings: &[&'a str]) -> Vec<&'a str> {
    [&[recipe.to_str().unwrap()], settings].concat()
}

/// Number of lines of metrics.jsonl so far.
fn metrics_lines(run_dir: &Path) -> usize {
    fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default().lines().count()
}

#[test]
fn a_killed_run_continues_from_its_last_checkpoint_without_double_lines() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let saves = ["--set", "checkpoint.save_steps=2", "--set", "checkpoint.save_total_limit=2"];
    let settings = [&MANY_STEPS[..], &saves].concat();
    let mut child = lora_train(&arguments(&recipe, &settings)).stderr(Stdio::null()).spawn().unwrap();
    let dir = bench.path("run");
    wait_until("six steps", || metrics_lines(&dir) > 6);
    signal(&child, libc::SIGKILL);
    wait(&mut child);
    // An even number: the last step is saved too.
    let last = steps(&dir).last().unwrap()["step"].as_u64().unwrap().next_multiple_of(2) + 8;
    train(&recipe, &[&settings[..], &["--resume", "--set", &format!("train.max_steps={last}")]].concat());
    let seen: Vec<u64> = steps(&dir).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(seen, (1..=last).collect::<Vec<_>>());
    let mut names: Vec<_> =
        fs::read_dir(dir.join("checkpoints")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [last - 2, last].map(|step| format!("step-{step:06}")));
}

#[test]
fn a_finished_run_is_neither_overwritten_nor_resumed() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let settings = ["--set", "train.max_steps=2", "--set", "checkpoint.save_steps=1"];
    train(&recipe, &settings);
    let before = adapter(&bench.path("run"));
    let mut args = vec![recipe.to_str().unwrap()];
    args.extend(settings);
    let refused = run(&args);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("finished run"), "{}", stderr(&refused));
    args.push("--resume");
    // It is known before anything large is read: the rows may be missing.
    fs::remove_file(bench.path("train.jsonl")).unwrap();
    let checkpoint = bench.path("run/checkpoints/step-000002");
    let (folder, last) = (bench.path("run"), checkpoint.to_str().unwrap());
    for args in
        [args.clone(), [&args[..], &["--set", "optimizer.learning_rate=1.0"]].concat(), [&args[..], &[last]].concat()]
    {
        let refused = run(&args);
        assert_eq!(refused.status.code(), Some(2));
        let (folder, said) = (folder.display(), stderr(&refused));
        assert!(
            said.contains(&format!("the run in {folder} has finished after 2 steps, nothing is left to do")),
            "{said}"
        );
        assert!(
            said.contains(&format!("its adapter is in {folder}/adapter")) && said.contains("--set output_dir="),
            "{said}"
        );
    }
    assert_eq!(before, adapter(&bench.path("run")));
}

#[test]
fn a_finished_run_without_a_checkpoint_at_its_end_is_not_resumed_from_an_earlier_one() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let settings = ["--set", "train.max_steps=3", "--set", "checkpoint.save_steps=2"];
    train(&recipe, &settings);
    for steps in ["train.max_steps=3", "train.max_steps=2"] {
        let refused = run(&[recipe.to_str().unwrap(), "--set", steps, "--set", "checkpoint.save_steps=2", "--resume"]);
        assert!(stderr(&refused).contains("has finished after 3 steps"), "{}", stderr(&refused));
    }
    assert!(bench.path("run/summary.json").is_file());
}

#[test]
fn a_longer_recipe_continues_a_finished_run_and_says_what_changed() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    train(&recipe, &["--set", "train.max_steps=2"]);
    let output = train(&recipe, &["--set", "train.max_steps=4", "--resume"]);
    assert!(stderr(&output).contains("train.max_steps: 2 -> 4"), "{}", stderr(&output));
    assert_eq!(steps(&bench.path("run")).len(), 4);
    assert_eq!(json(&bench.path("run/summary.json"))["steps"].as_u64(), Some(4));
}

#[test]
fn a_run_goes_on_by_its_folder_with_what_it_was_trained_with() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    train(&recipe, &["--set", "train.max_steps=6", "--set", "lora.r=2", "--set", "optimizer.learning_rate=2e-3"]);
    fs::remove_file(&recipe).unwrap();
    fs::rename(bench.path("run"), bench.path("moved")).unwrap();
    let folder = bench.path("moved");
    let resumed = |words: &[&str], steps: u64| {
        let set = format!("train.max_steps={steps}");
        let output = run(&[words, &["--set", &set]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(json(&folder.join("summary.json"))["steps"].as_u64(), Some(steps));
        stderr(&output)
    };
    let name = folder.to_str().unwrap();
    let said = resumed(&[name, "--resume"], 12);
    assert!(said.contains("the recipe has changed: train.max_steps: 6 -> 12") && !said.contains("lora.r:"), "{said}");
    assert!(said.contains("the learning rate goes up from "), "{said}");
    resumed(&["--resume", name], 14);
    // Its own file is enough, too: what the command line changed is in it.
    resumed(&[folder.join("recipe.toml").to_str().unwrap(), "--resume"], 16);
    fs::remove_dir_all(folder.join("checkpoints")).unwrap();
    let gone = run(&[name, "--resume", "--set", "train.max_steps=18"]);
    let (said, hint) = (stderr(&gone), format!("--set lora.start_from={name} --set output_dir={name}-2"));
    assert!(said.contains("its checkpoints are gone") && said.contains(&hint), "{said}");
    let on = [name, "--set", "train.max_steps=2", "--set", &format!("lora.start_from={name}"), "--set"];
    let on = run(&[&on[..], &[&format!("output_dir={name}-2")]].concat());
    assert!(on.status.success(), "{}", stderr(&on));
}

#[test]
fn a_finished_run_is_deleted_only_where_that_is_asked_for() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let notes = bench.path("run/notes.txt");
    train(&recipe, &["--set", "train.max_steps=3", "--set", "eval.eval_steps=1"]);
    fs::write(&notes, "mine").unwrap();
    let refused = run(&[recipe.to_str().unwrap(), "--set", "train.max_steps=2"]);
    assert_eq!(refused.status.code(), Some(2));
    for way in ["--resume", &format!("--set output_dir={}-2`", bench.path("run").display()), "`--overwrite`"] {
        assert!(stderr(&refused).contains(way), "{way} in {}", stderr(&refused));
    }
    // A mistake that is found before the first step costs nothing.
    let mistaken = run(&[recipe.to_str().unwrap(), "--overwrite", "--set", "data.train.0.path=none.jsonl"]);
    assert_eq!(mistaken.status.code(), Some(2));
    assert_eq!(steps(&bench.path("run")).len(), 3);

    train(&recipe, &["--set", "train.max_steps=2", "--overwrite"]);
    assert_eq!(steps(&bench.path("run")).len(), 2);
    assert!(
        !bench.path("run/adapter-best").join("best.json").exists()
            || json(&bench.path("run/adapter-best/best.json"))["step"] == 2
    );
    assert!(!bench.path("run/checkpoints/step-000003").exists() && !bench.path("run/superseded-1").exists());
    assert_eq!(json(&bench.path("run/environment.json"))["starts"].as_u64(), Some(1));
    assert_eq!(fs::read_to_string(notes).unwrap(), "mine", "what no run wrote is left alone");
}

#[test]
fn early_stopping_gives_the_adapter_of_the_best_evaluation() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    // Rows of which the training rows teach nothing but their form.
    let other = "{\"prompt\": \"1: \", \"completion\": \"She never forgot the old horse. It was raining.\"}\n";
    fs::write(bench.path("eval.jsonl"), other.repeat(6)).unwrap();
    let settings =
        ["optimizer.learning_rate=1e-2", "train.max_steps=80", "eval.eval_steps=2", "eval.early_stopping_patience=3"];
    train(&recipe, &settings.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>());
    let summary = json(&bench.path("run/summary.json"));
    assert_eq!(summary["outcome"].as_str(), Some("stopped_early"), "{summary:#}");
    let (best, last) = (summary["best_eval_step"].as_u64().unwrap(), summary["steps"].as_u64().unwrap());
    assert!(best > 0 && best + 6 == last, "best {best} of {last}");
    let weights = |folder: &str| fs::read(bench.path(folder).join("adapter_model.safetensors")).unwrap();
    assert_eq!(weights("run/adapter"), weights("run/adapter-best"));
    assert!(weights("run/adapter") != weights(&format!("run/checkpoints/step-{last:06}")));
    // Its loss is the one that was measured.
    let next = bench.recipe("next", "");
    let start = format!("lora.start_from={}", bench.path("run").display());
    train(&next, &["--set", &start, "--set", "train.max_steps=2"]);
    assert_eq!(json(&bench.path("next/summary.json"))["initial_eval_loss"], summary["best_eval_loss"]);
}

#[test]
fn training_stops_early_when_the_evaluation_loss_does_not_improve() {
    let bench = Bench::new();
    // A learning rate below the numbers' resolution cannot improve the loss: evaluations at 0, 2 and 4.
    train(
        &bench.recipe("run", ""),
        &[
            "--set", "optimizer.learning_rate=1e-30", "--set", "train.max_steps=50", "--set", "eval.eval_steps=2",
            "--set", "eval.early_stopping_patience=2",
        ],
    );
    let summary = json(&bench.path("run/summary.json"));
    assert_eq!(summary["steps"].as_u64(), Some(4));
    assert_eq!(summary["outcome"].as_str(), Some("stopped_early"));
    assert!(bench.path("run/adapter/adapter_model.safetensors").is_file());
}

#[test]
fn the_evaluation_before_the_first_step_can_be_left_out() {
    let bench = Bench::new();
    for (eval_on_start, expected) in [("true", &[0, 2, 3][..]), ("false", &[2, 3])] {
        let (recipe, key) = (bench.recipe(eval_on_start, ""), format!("eval.eval_on_start={eval_on_start}"));
        train(&recipe, &["--set", "train.max_steps=3", "--set", "eval.eval_steps=2", "--set", &key]);
        let run = bench.path(eval_on_start);
        let evaluations = metrics(&run).into_iter().filter(|line| line.get("eval_loss").is_some());
        let evaluated: Vec<u64> = evaluations.map(|line| line["step"].as_u64().unwrap()).collect();
        assert_eq!(evaluated, expected);
        let initial = &json(&run.join("summary.json"))["initial_eval_loss"];
        assert_eq!(initial.is_number(), eval_on_start == "true", "{initial}");
    }
}

#[test]
fn a_checkpoint_of_another_shape_is_refused_by_name() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &["--set", "train.max_steps=2", "--set", "checkpoint.save_steps=1"]);
    let checkpoint = bench.path("run/checkpoints/step-000001");
    let recipe = bench.recipe("other", "");
    let refused = run(&[
        recipe.to_str().unwrap(),
        "--set",
        "lora.r=8",
        "--set",
        "train.max_steps=2",
        "--resume",
        checkpoint.to_str().unwrap(),
    ]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("`lora.r` was 4"), "{}", stderr(&refused));
}

#[test]
fn an_epoch_that_is_not_a_whole_number_of_steps_ends_with_a_smaller_one() {
    let bench = Bench::new();
    // 24 rows, 2 in a micro-batch, 5 micro-batches in a step: 10 + 10 + 4 rows.
    train(
        &bench.recipe("run", ""),
        &[
            "--set",
            "train.gradient_accumulation_steps=5",
            "--set",
            "train.num_epochs=1.5",
            "--set",
            "data.shuffle=false",
        ],
    );
    let lines = steps(&bench.path("run"));
    // ceil(1.5 * 3) steps, as in transformers.
    assert_eq!(lines.len(), 5);
    let epochs: Vec<f64> = lines.iter().map(|line| line["epoch"].as_f64().unwrap()).collect();
    assert!((epochs[2] - 1.0).abs() < 1e-9 && (epochs[0] - 10.0 / 24.0).abs() < 1e-9, "{epochs:?}");
    let tokens: Vec<u64> = lines.iter().map(|line| line["tokens"].as_u64().unwrap()).collect();
    assert!(tokens[2] < tokens[0] && tokens[3] == tokens[0], "the second epoch starts with the first rows: {tokens:?}");
}

#[test]
fn memory_stays_flat_over_many_steps() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &["--set", "train.max_steps=40", "--set", "logging.gpu_sample_ms=10"]);
    let memory: Vec<u64> =
        steps(&bench.path("run")).iter().map(|line| line["host_memory_bytes"].as_u64().unwrap()).collect();
    let largest = |range: std::ops::Range<usize>| *memory[range].iter().max().unwrap();
    // Batches differ in length, and the allocator keeps some memory: 2% of the process is far less than a leaked step.
    let (early, late) = (largest(8..20), largest(28..40));
    assert!(late <= early + early / 50, "{early} bytes at most in steps 9 to 20, {late} in steps 29 to 40");
}

#[test]
fn bench_prints_one_json_object_with_the_figures_of_the_contract() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let output = run(&["bench", recipe.to_str().unwrap(), "--set", "train.max_steps=3", "--warmup", "1"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let stdout = String::from_utf8(output.stdout).unwrap();
    let figures: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    for figure in [
        "tokens_per_second", "step_seconds", "first_step_seconds", "mfu", "gflops", "gemm_peak_gflops",
        "peak_host_memory_bytes",
    ] {
        assert!(figures[figure].as_f64().is_some_and(|value| value > 0.0), "{figure} in {figures}");
    }
    assert!(figures["device"].as_str().unwrap().starts_with("cpu"));
    assert!(figures.get("peak_gpu_memory_bytes").is_none(), "absent, not zero, without a GPU");
    // 2 rows x 2 micro-batches of max_length = 64, without padding.
    assert_eq!(figures["tokens_per_step"].as_u64(), Some(256));
    assert_eq!(figures["measured_steps"].as_u64(), Some(3));
    let rate = 256.0 / figures["step_seconds"].as_f64().unwrap();
    assert!((figures["tokens_per_second"].as_f64().unwrap() / rate - 1.0).abs() < 1e-9);
    let mfu = figures["gflops"].as_f64().unwrap() / figures["gemm_peak_gflops"].as_f64().unwrap();
    assert!((figures["mfu"].as_f64().unwrap() / mfu - 1.0).abs() < 1e-9);
    assert!(!bench.path("run").exists(), "a benchmark writes no run");
}

#[cfg(unix)]
#[test]
fn a_recipe_that_changes_while_it_is_trained_or_comes_from_a_pipe_is_kept_as_it_was_read() {
    use std::io::Write as _;
    use std::process::Stdio;

    let bench = Bench::new();
    let recipe = bench.recipe("run", "# the end of it\n");
    let text = fs::read_to_string(&recipe).unwrap();
    let mut run = crate::common::lora_train(&["/dev/stdin", "--set", "train.max_steps=2", "--quiet"]);
    let mut run = run.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    run.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = run.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let kept = fs::read_to_string(bench.path("run/recipe.toml")).unwrap();
    assert_eq!(kept, text.replace("[train]\n", "[train]\nmax_steps = 2\n"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_recipe_whose_path_is_no_text_is_trained() {
    use std::os::unix::ffi::OsStrExt as _;

    let bench = Bench::new();
    let recipe = bench.folder.path().join(std::ffi::OsStr::from_bytes(b"r\xff.toml"));
    fs::rename(bench.recipe("run", ""), &recipe).unwrap();
    let output = crate::common::lora_train(&["--set", "train.max_steps=2"]).arg(&recipe).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let environment = fs::read_to_string(bench.path("run/environment.json")).unwrap();
    assert!(environment.contains("r\u{fffd}.toml"), "{environment}");
}

#[test]
fn every_family_is_checked_planned_trained_resumed_merged_and_asked() {
    for family in FAMILIES {
        let bench = Bench::new();
        let model = bench.path("model");
        fs::create_dir(&model).unwrap();
        write_family(family, &model);
        let path = format!("model.path={model:?}");
        let settings = ["--set", &path, "--set", "train.max_steps=8", "--set", "checkpoint.save_steps=4"];
        let recipe = bench.recipe("whole", "");
        for command in ["check", "plan"] {
            let output = run(&[&[command, recipe.to_str().unwrap()], &settings[..2]].concat());
            assert!(output.status.success(), "{family}: {command}: {}", stderr(&output));
        }
        train(&recipe, &settings);
        let checkpoint = bench.path("whole/checkpoints/step-000004");
        train(&bench.recipe("resumed", ""), &[&settings[..], &["--resume", checkpoint.to_str().unwrap()]].concat());
        assert_eq!(adapter(&bench.path("whole")), adapter(&bench.path("resumed")), "{family}");

        // Greedy text of the base with the adapter, and of the merged model.
        let (adapter, merged) = (bench.path("whole/adapter"), bench.path("merged"));
        let [model, adapter, merged] = [&model, &adapter, &merged].map(|path| path.to_str().unwrap());
        let output = run(&["merge", "--model", model, "--adapter", adapter, "--out", merged]);
        assert!(output.status.success(), "{family}: {}", stderr(&output));
        let text = |args: &[&str]| {
            let args = [&["generate", "--prompt", "Once", "--raw", "--max-new-tokens", "12", "--model"], args].concat();
            let output = run(&args);
            assert!(output.status.success(), "{family}: {}", stderr(&output));
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(text(&[model, "--adapter", adapter]), text(&[merged]), "{family}");

        // As GGUF: the adapter alone, and the merged model.
        let [alone, whole] = ["alone.gguf", "whole.gguf"].map(|name| bench.path(name).to_str().unwrap().to_owned());
        let alone = run(&["merge", "--model", model, "--adapter", adapter, "--adapter-only", "--out", &alone]);
        let output = run(&["merge", "--model", model, "--adapter", adapter, "--dtype", "f32", "--out", &whole]);
        if WITHOUT_FILES.contains(&family) {
            for output in [alone, output] {
                let text = stderr(&output);
                assert!(output.status.code() == Some(2) && text.contains("are not written here"), "{family}: {text}");
            }
            continue;
        }
        if WITHOUT_ADAPTERS.contains(&family) {
            assert!(stderr(&alone).contains("llama.cpp does not add the adapter of"), "{family}: {}", stderr(&alone));
        } else {
            assert!(alone.status.success(), "{family}: {}", stderr(&alone));
        }
        match WITHOUT_PLACE.iter().find(|(name, _)| *name == family) {
            None => {
                assert!(output.status.success(), "{family}: {}", stderr(&output));
                let is_same = text(&[&whole]) == text(&[merged]);
                assert!(is_same || WITHOUT_WINDOWS.contains(&family), "{family}");
            }
            Some((_, what)) => {
                let messages = [format!("has no place for {what}"), format!("files with {what} are not written here")];
                let is_said = messages.iter().any(|message| stderr(&output).contains(message));
                assert!(!output.status.success() && is_said, "{family}: {}", stderr(&output));
            }
        }
    }
}

/// Models of `tests/golden` that are written although llama.cpp has no windows for their families.
const WITHOUT_WINDOWS: [&str; 5] = ["mixtral", "qwen2", "ministral", "llava", "starcoder2"];

/// Families whose GGUF files are not written.
const WITHOUT_FILES: [&str; 8] =
    ["vaultgemma", "cwm", "helium", "hyperclovax", "flex_olmo", "bamba", "flint", "granitemoe_swa"];

/// Families with layers whose adapters llama.cpp does not add.
const WITHOUT_ADAPTERS: [&str; 7] =
    ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "mistral4", "nemotron_h-latent", "minicpm3"];

/// Models of `tests/golden` that a GGUF file cannot hold, and why: they are not as llama.cpp takes for granted.
const WITHOUT_PLACE: [(&str, &str); 29] = [
    ("gemma3n", "an `altup_num_inputs` other than 4"),
    ("muse_glimmer", "this `post_norm_eps`"),
    ("minicpm3", "this `scale_emb`, `scale_depth` or `dim_model_base`"),
    ("llama4", "an `attention_chunk_size` other than 8192"),
    ("olmo3", "this `rope_scaling`"),
    ("granitemoehybrid-mamba", "this `time_step_limit`"),
    ("granitemoehybrid-experts", "this `time_step_limit`"),
    ("nemotron_h", "feed-forward layers among mixtures"),
    ("deepseek_v2", "queries without a latent in other than 26 or 27 layers"),
    ("deepseek_v3", "biases of attention"),
    ("glm4_moe_lite", "layers without experts"),
    ("youtu", "`rope_interleave` = false"),
    ("cohere", "biases of attention"),
    ("cohere-norms", "LayerNorms of heads"),
    ("stablelm-norms", "LayerNorms of heads"),
    ("exaone4", "windows in other than 64 layers"),
    ("dots1", "fewer heads of keys than of queries"),
    ("lfm2_moe", "this `routed_scaling_factor`"),
    ("gemma2", "this `query_pre_attn_scalar`"),
    ("gemma3", "windows in other layers than the family's"),
    ("gemma3-multimodal", "windows in other layers than the family's"),
    ("gemma4", "keys and values of other layers than the last two that make them"),
    ("mistral", "this activation"),
    ("qwen2_moe", "layers without experts"),
    ("qwen3_5", "heads of keys and values of different widths"),
    ("qwen3_5-multimodal", "heads of keys and values of different widths"),
    ("qwen3_5_moe", "heads of keys and values of different widths"),
    ("qwen3_next", "heads of keys and values of different widths"),
    ("smollm3", "`no_rope_layers` other than every fourth"),
];

/// Changes with which they and others lie otherwise in a GGUF file.
fn changes_for_gguf() -> [(&'static str, Value); 38] {
    let yarn = serde_json::json!({
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0
    });
    let kinds: Vec<_> =
        (1..=22).map(|layer| if layer % 5 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let shares: Vec<_> = (0..22).map(|layer| if layer < 10 { 0.95 } else { 0.0 }).collect();
    [
        // Tokens beyond the tokenizer's have no embeddings of layers.
        (
            "gemma3n",
            serde_json::json!({
                "num_hidden_layers": 22, "layer_types": kinds, "activation_sparsity_pattern": shares,
                "altup_num_inputs": 4, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
                "vocab_size_per_layer_input": 1344, "intermediate_size": 56, "final_logit_softcapping": 30.0
            }),
        ),
        ("muse_glimmer", serde_json::json!({"post_norm_eps": 1e-8})),
        ("minicpm3", serde_json::json!({"dim_model_base": 256})),
        (
            "llama4",
            serde_json::json!({
                "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 1e4, "factor": 16.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0, "original_max_position_embeddings": 8192
                }
            }),
        ),
        ("granitemoehybrid-mamba", serde_json::json!({"time_step_limit": null})),
        ("granitemoehybrid-experts", serde_json::json!({"time_step_limit": null})),
        ("nemotron_h", serde_json::json!({"layers_block_type": ["mamba", "moe", "attention", "moe"]})),
        ("nemotron_h", serde_json::json!({"layers_block_type": ["mamba", "mlp", "attention", "mlp"]})),
        ("deepseek_v2", serde_json::json!({"topk_method": "greedy", "q_lora_rank": 20})),
        ("deepseek_v3", serde_json::json!({"attention_bias": false, "rope_scaling": yarn})),
        ("glm4_moe_lite", serde_json::json!({"mlp_layer_types": ["dense", "sparse", "sparse"]})),
        ("youtu", serde_json::json!({"rope_interleave": true})),
        ("glm_ocr", serde_json::json!({})),
        ("olmo3", serde_json::json!({"rope_scaling": null})),
        ("qwen3_moe", serde_json::json!({})),
        ("cohere", serde_json::json!({"attention_bias": false})),
        ("cohere-norms", serde_json::json!({"use_qk_norm": false})),
        ("stablelm-norms", serde_json::json!({"qk_layernorm": false})),
        (
            "exaone4",
            serde_json::json!({
                "sliding_window": null,
                "sliding_window_pattern": null,
                "layer_types": vec!["full_attention"; 4],
                "head_dim": 12,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192
                }
            }),
        ),
        ("qwen2_moe", serde_json::json!({"mlp_only_layers": []})),
        ("mixtral", serde_json::json!({"sliding_window": null})),
        ("gpt_oss", serde_json::json!({})),
        (
            "qwen3_next",
            serde_json::json!({"mlp_only_layers": [], "linear_key_head_dim": 12, "linear_value_head_dim": 12}),
        ),
        ("qwen3_5", serde_json::json!({"linear_key_head_dim": 12, "linear_value_head_dim": 12})),
        ("qwen3_5_moe", serde_json::json!({"linear_key_head_dim": 12, "linear_value_head_dim": 12})),
        ("gemma2", serde_json::json!({"query_pre_attn_scalar": 24})),
        (
            "gemma3",
            serde_json::json!({"sliding_window_pattern": 6, "query_pre_attn_scalar": 20, "tie_word_embeddings": true}),
        ),
        ("gemma4", serde_json::json!({"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 1347})),
        ("gemma4-experts", serde_json::json!({})),
        ("lfm2", serde_json::json!({})),
        ("lfm2", serde_json::json!({"full_attn_idxs": [0, 1, 2, 3]})),
        ("mistral", serde_json::json!({"hidden_act": "silu", "sliding_window": null})),
        ("lfm2_moe", serde_json::json!({"routed_scaling_factor": 1.0})),
        ("dots1", serde_json::json!({"num_key_value_heads": 4})),
        ("nemotron", serde_json::json!({})),
        ("ernie4_5", serde_json::json!({})),
        ("smollm3", serde_json::json!({"no_rope_layers": null})),
        // Texts begin with one kind of divisors and end with the other.
        ("phi3-longrope", serde_json::json!({"original_max_position_embeddings": 8})),
    ]
}

#[test]
fn every_family_has_models_that_are_trained_and_written_as_gguf() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let configs = FAMILIES.map(|name| json(&golden.join(name).join("config.json")));
    let types = configs.iter().flat_map(|config| [&config["model_type"], &config["text_config"]["model_type"]]);
    let covered: Vec<_> = types.filter_map(serde_json::Value::as_str).collect();
    let known = ModelConfig::from_json("{\"model_type\": \"none\"}").unwrap_err().to_string();
    let known = known.split_once("expected one of ").unwrap().1.lines().next().unwrap();
    // Gemma 4 with other defaults, DeepSeek V3 under another name, what is read without its wrapper elsewhere, and a wrapper as another's.
    let missing = known.split(", ").map(|name| name.trim_matches('`')).filter(|name| !covered.contains(name));
    assert_eq!(
        missing.collect::<Vec<_>>(),
        ["gemma4_unified_text", "qwen2_vl_text", "kimi_k2", "gemma3n", "gemma4_unified", "qwen3_5_moe", "glm46v"]
    );
    let changed = changes_for_gguf().map(|(name, _)| name);
    let written = |(name, _): &(&str, &str)| changed.contains(&name.trim_end_matches("-multimodal"));
    assert!(WITHOUT_PLACE.iter().all(written), "every family has a model that GGUF holds");
}

#[test]
fn families_that_lie_otherwise_in_gguf_files_keep_their_text_there() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for (family, changes) in changes_for_gguf() {
        let bench = Bench::new();
        let model = bench.path("model");
        fs::create_dir(&model).unwrap();
        let config = fs::read_to_string(golden.join(family).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
        let changes = changes.as_object().unwrap().clone();
        // Layers of a multimodal model's folder have other names than those of its file.
        let is_nested = config["text_config"].is_object();
        let text = if is_nested { &mut config["text_config"] } else { &mut config };
        text.as_object_mut().unwrap().extend(changes);
        let changed = config.to_string();
        write_model(&changed, &model);
        train(&bench.recipe("run", ""), &["--set", &format!("model.path={model:?}"), "--set", "train.max_steps=3"]);
        let text = |model: &str| {
            let output = run(&["generate", "--prompt", "Once", "--raw", "--max-new-tokens", "12", "--model", model]);
            assert!(output.status.success(), "{family}: {}", stderr(&output));
            String::from_utf8(output.stdout).unwrap()
        };
        // Onto the base, and onto what that made.
        let [in_folder, in_file] = [["merged", "again"], ["merged.gguf", "again.gguf"]].map(|names| {
            let adapter = bench.path("run/adapter");
            let made = names.iter().fold(model.clone(), |base, name| {
                let out = bench.path(name);
                let [base, adapter, path] = [&base, &adapter, &out].map(|path| path.to_str().unwrap());
                let merge = ["merge", "--model", base, "--adapter", adapter, "--out", path, "--dtype", "f32"];
                let output = run(&merge);
                assert!(output.status.success(), "{family}: {}", stderr(&output));
                out
            });
            text(made.to_str().unwrap())
        });
        assert_eq!(in_folder, in_file, "{family}");
    }
}
