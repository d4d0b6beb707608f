//! Weight-decomposed adapters, compared with PEFT's.

use std::fs;
use std::path::Path;

use burn::tensor::Tensor;
use lora_train::config::{OptimizerConfig, TrainConfig};
use lora_train::device::Dtype;
use lora_train::model::weights::WeightFiles;
use lora_train::save::export::{MergeOptions, merge, read_adapter};
use lora_train::train::step::TrainStep;
use serde_json::Value;

use crate::common::{Bench, lora_train, metrics, quickstart_model, resumes_to_the_same_bytes, run, set, stderr, train};
use crate::golden::{
    Golden, assert_near, batch, compare_cases, compare_curve, compare_gradients, compare_logits, compare_projections,
    rows, values,
};

pub(crate) fn golden() -> Golden {
    Golden::open("dora", quickstart_model())
}

#[test]
fn logits_losses_gradients_and_the_loss_curve_are_those_of_peft() {
    compare_cases(&golden(), Dtype::F32);
    compare_curve(&golden());
}

#[test]
fn dropout_acts_on_what_peft_drops() {
    let golden = golden();
    let (case, model) = (&golden.json["dropout"], golden.model(Dtype::F32));
    let mut adapters = Golden::adapters(case, &model);
    adapters.dropout = case["lora_dropout"].as_f64().unwrap();
    let mut step = TrainStep::new(model, adapters, &TrainConfig::default(), &OptimizerConfig::default(), None, 0);
    step.forward_backward(&batch(&rows(case)));
    let num_targets = case["num_target_tokens"].as_f64().unwrap();
    compare_gradients(&step, num_targets, &case["gradients"]);
    assert_near(step.update(0.0).loss, case["loss"].as_f64().unwrap(), 1e-5, "loss");
}

#[test]
fn an_adapter_that_peft_wrote_gives_its_logits_and_its_merged_weights() {
    let golden = golden();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/dora/adapter");
    let model = golden.model(Dtype::F32);
    let read = read_adapter(&folder).unwrap().into_set(&folder, &model.config, &model.device()).unwrap();
    let made = Golden::adapters(&golden.json["cases"]["patterns"], &model);
    for (read, made) in read.iter().zip(made.iter()) {
        assert_eq!((&read.module, read.scale), (&made.module, made.scale));
        for (read, made) in read.matrices.as_ref().zip(made.matrices.as_ref()).values() {
            let [read, made] = [read, made].map(|it: &Tensor<2>| values(it));
            assert!(read.iter().zip(&made).all(|(read, made)| (read - made).abs() <= 1e-6 * made.abs()));
        }
    }
    compare_logits(&golden, "patterns", &model, &read, &batch(&rows(&golden.json["batch"])));

    let out = tempfile::tempdir().unwrap();
    let options = MergeOptions { dtype: Some(Dtype::F32), ..MergeOptions::default() };
    merge(&golden.model_dir, &folder, &out.path().join("merged"), options, &|_, _| ()).unwrap();
    let merged = WeightFiles::open(&out.path().join("merged")).unwrap();
    for (module, expected) in golden.json["merged"].as_object().unwrap() {
        let name = format!("{}.weight", module.trim_start_matches("base_model.model."));
        let shape = merged.tensors()[&name].shape.clone();
        compare_projections(module, &merged.load_f32(&name, &shape).unwrap(), 1.0, expected, 1e-6);
    }
}

#[test]
fn a_run_starts_at_the_loss_of_the_base_and_is_resumed_to_the_same_bytes() {
    let bench = Bench::new();
    let first_loss = |run: &str| metrics(&bench.path(run))[0]["eval_loss"].as_f64().unwrap();
    train(&bench.recipe("plain", ""), &set(&["train.max_steps=2", "lora.lora_dropout=0"]));
    for (index, extra) in [
        &["lora.lora_dropout=0.1"][..],
        &["lora.lora_dropout=0", "lora.init_lora_weights=\"pissa\""],
        &["lora.lora_dropout=0", "optimizer.name=\"adamw_8bit\"", "optimizer.ema_decay=0.5"],
    ]
    .iter()
    .enumerate()
    {
        let run = format!("run-{index}");
        resumes_to_the_same_bytes(&bench, &run, &[&["lora.use_dora=true"], *extra].concat());
        assert_near(first_loss(&run), first_loss("plain"), 1e-5, extra[0]);
    }
}

#[test]
fn a_run_is_merged_continued_and_written_with_and_its_adapter_alone_is_no_gguf() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &set(&["lora.use_dora=true", "train.max_steps=4", "model.quantization=\"nf4\""]));
    let folder = bench.path("run");
    let saved = fs::read_to_string(folder.join("adapter/adapter_config.json")).unwrap();
    assert!(saved.contains("\"use_dora\": true"), "{saved}");
    let command = |args: &[&str]| {
        let args = [&args[..1], &[folder.to_str().unwrap()], &args[1..]].concat();
        lora_train(&args).current_dir(&bench.folder).output().unwrap()
    };
    for args in [&["merge", "--out", "merged"][..], &["generate", "--prompt", "3: "]] {
        let output = command(args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    }
    let output = command(&["merge", "--out", "adapter.gguf", "--adapter-only"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("llama.cpp has no adapters with `use_dora`"), "{}", stderr(&output));

    let start = format!("lora.start_from={folder:?}");
    train(&bench.recipe("next", ""), &set(&[&start, "train.max_steps=2", "model.quantization=\"nf4\""]));
    let losses = ["run", "next"].map(|run| {
        let metrics = metrics(&bench.path(run));
        let losses: Vec<f64> = metrics.iter().filter_map(|line: &Value| line["eval_loss"].as_f64()).collect();
        (losses[0], losses[losses.len() - 1])
    });
    assert_near(losses[1].0, losses[0].1, 1e-5, "the first loss of a run that goes on");
    let next = bench.recipe("next", "");
    let args = ["check", next.to_str().unwrap(), "--set", &start, "--set", "lora.use_dora=false"];
    let output = run(&args);
    assert!(stderr(&output).contains("`lora.use_dora` contradicts the adapter"), "{}", stderr(&output));
}
