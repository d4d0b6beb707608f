//! `lora.start_from`: training goes on from an adapter.

use crate::common::families::write_family;
use crate::common::{Bench, json, metrics, run, stderr, train};

const SHORT: [&str; 2] = ["--set", "train.max_steps=4"];

/// The recipe's shape of adapters, which the adapter itself says.
const NO_SHAPE: [&str; 4] = ["--set", "lora.r=", "--set", "lora.lora_dropout="];

#[test]
fn a_run_goes_on_where_the_adapter_of_another_ended() {
    let bench = Bench::new();
    let first = bench.recipe("first", "");
    train(&first, &SHORT);
    let ended = json(&bench.path("first/summary.json"))["final_eval_loss"].as_f64().unwrap();

    let second = bench.recipe("second", "");
    let start = format!("lora.start_from={}", bench.path("first").display());
    let arguments = [&SHORT[..], &NO_SHAPE, &["--set", &start]].concat();
    let output = train(&second, &arguments);
    assert!(stderr(&output).contains("starts from: the adapter in "), "{}", stderr(&output));
    let summary = json(&bench.path("second/summary.json"));
    assert_eq!(summary["initial_eval_loss"].as_f64(), Some(ended));
    assert!(summary["final_eval_loss"].as_f64().unwrap() < ended);
    // Rank and dropout are the first adapter's, and it is left as it was.
    let resolved = std::fs::read_to_string(bench.path("second/resolved.toml")).unwrap();
    assert!(resolved.contains("\nr = 4\n") && resolved.contains("\nlora_dropout = 0.1\n"), "{resolved}");
    let [before, after] = ["first", "second"]
        .map(|run| std::fs::read(bench.path(run).join("adapter/adapter_model.safetensors")).unwrap());
    assert!(before != after && before.len() == after.len());

    // A run of an adapter is resumed like any other: from its own checkpoint.
    let resumed = [&arguments[..], &["--resume", "--set", "train.max_steps=6"]].concat();
    let output = run(&[&[second.to_str().unwrap()], &resumed[..]].concat());
    let steps = metrics(&bench.path("second")).iter().filter(|line| line.get("loss").is_some()).count();
    assert_eq!((output.status.success(), steps), (true, 6), "{}", stderr(&output));

    // Also where what it started from is gone: the checkpoint has everything.
    std::fs::remove_dir_all(bench.path("first")).unwrap();
    let resumed = [&arguments[..], &["--resume", "--set", "train.max_steps=7"]].concat();
    let output = run(&[&[second.to_str().unwrap()], &resumed[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let output = run(&["eval", bench.path("second").to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn what_contradicts_the_adapter_is_a_mistake_at_its_key() {
    let bench = Bench::new();
    train(&bench.recipe("first", ""), &SHORT);
    let second = bench.recipe("second", "");
    let start = format!("lora.start_from={}", bench.path("first").display());
    let mistakes = [
        ("lora.r=8", "`lora.r` contradicts the adapter of `lora.start_from`, which has 4\n"),
        ("lora.target_modules=[\"q_proj\"]", "`lora.target_modules` contradicts the adapter"),
        (
            "lora.start_from=nowhere",
            "`lora.start_from`: nowhere: no adapter_config.json\n  hint: there is no such folder",
        ),
    ];
    for (change, message) in mistakes {
        let output = run(&["check", second.to_str().unwrap(), "--set", &start, "--set", change]);
        assert_eq!(output.status.code(), Some(2), "{change}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{change}: {}", stderr(&output));
    }
    // What says the same in other words does not contradict.
    let same = ["lora.r=4", "lora.lora_alpha=16", "lora.target_modules=all-linear", "lora.lora_dropout=0.3"];
    let sets = same.iter().flat_map(|change| ["--set", change]);
    let start = ["--set", start.as_str()];
    let arguments = ["check", second.to_str().unwrap()].into_iter().chain(start).chain(sets);
    let output = run(&arguments.collect::<Vec<_>>());
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn the_first_loss_from_pefts_adapter_is_pefts() {
    // transformers 5 and PEFT 0.21 with torch 2.15, in f32: mean loss of the 720 answer tokens of quickstart/eval.jsonl.
    const LOSS: f64 = 2.011_669_052;
    let bench = Bench::new();
    let repository = env!("CARGO_MANIFEST_DIR");
    let start = format!("lora.start_from={repository}/tests/golden/quickstart/peft/adapter");
    let eval = format!("data.eval.0.path={repository}/quickstart/eval.jsonl");
    let rest = ["--set", &start, "--set", &eval, "--set", "data.max_length=256", "--set", "train.max_steps=2"];
    train(&bench.recipe("run", ""), &[&NO_SHAPE[..], &rest].concat());
    let loss = json(&bench.path("run/summary.json"))["initial_eval_loss"].as_f64().unwrap();
    assert!((loss - LOSS).abs() < 1e-5 * LOSS, "{loss}");
}

#[test]
fn all_linear_layers_of_a_family_with_others_are_those_of_its_adapter() {
    for family in ["qwen2_moe", "qwen3_5", "gpt_oss", "gemma4"] {
        let bench = Bench::new();
        let model = bench.path("model");
        std::fs::create_dir(&model).unwrap();
        write_family(family, &model);
        let path = format!("model.path={model:?}");
        let all = ["--set", &path, "--set", "lora.target_modules=all-linear"];
        train(&bench.recipe("first", ""), &[&SHORT[..], &all].concat());
        let start = format!("lora.start_from={}", bench.path("first").display());
        train(&bench.recipe("second", ""), &[&SHORT[..], &NO_SHAPE, &all, &["--set", &start]].concat());
    }
}

#[test]
fn all_linear_layers_are_more_than_those_of_an_adapter_of_some() {
    let bench = Bench::new();
    let of_attention = "lora.target_modules=[\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]";
    train(&bench.recipe("first", ""), &[&SHORT[..], &["--set", of_attention]].concat());
    let start = format!("lora.start_from={}", bench.path("first").display());
    let second = bench.recipe("second", "");
    let sets = ["--set", &start, "--set", "lora.target_modules=all-linear"];
    let output = run(&[&["check", second.to_str().unwrap()], &NO_SHAPE[..], &sets].concat());
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("`lora.target_modules` contradicts the adapter"), "{}", stderr(&output));
}
