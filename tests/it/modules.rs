//! Modules that are trained as a whole beside adapters, compared with PEFT's.

use std::collections::BTreeSet;

use lora_train::config::OptimizerConfig;
use lora_train::device::Dtype;
use lora_train::lora::FullTensor;
use lora_train::model::weights::WeightFiles;
use lora_train::save::export::{MergeOptions, adapter_weights, merge, read_adapter, write_adapter};
use lora_train::train::objective::objective;
use lora_train::train::step::TrainStep;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::families::write_family;
use crate::common::{
    Bench, json as read_json, lora_train, metrics, quickstart_model, resumes_to_the_same_bytes, set, stderr, train,
};
use crate::golden::{
    Golden, assert_near, batch, compare_cases, compare_curve, compare_logits, compare_projections, lora_config,
    quickstart, rows, values,
};
use crate::preferences;

/// Tied.
pub(crate) fn golden() -> Golden {
    Golden::open("modules", quickstart_model())
}

/// Tied and not, with scaled embeddings and norms less one, four to a block; with a cap of the logits.
pub(crate) fn families() -> impl Iterator<Item = (Golden, TempDir)> {
    ["gemma2", "gemma3"].into_iter().map(|name| {
        let folder = tempfile::tempdir().unwrap();
        write_family(name, folder.path());
        (Golden::open(&format!("modules-{name}"), folder.path().to_owned()), folder)
    })
}

#[test]
fn logits_losses_gradients_curves_and_merged_weights_are_those_of_peft() {
    let quickstart = tempfile::tempdir().unwrap();
    for (golden, _folder) in [(golden(), quickstart)].into_iter().chain(families()) {
        compare_cases(&golden, Dtype::F32);
        compare_curve(&golden);
        comes_back_and_merges(&golden);
    }
}

/// An adapter in PEFT's names that comes back from its files with its logits, and makes PEFT's `merge_and_unload`.
fn comes_back_and_merges(golden: &Golden) {
    let (model, case) = (golden.model(Dtype::F32), &golden.json["cases"]["all"]);
    let adapters = Golden::adapters(case, &model);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter");
    let base = golden.model_dir.to_str().unwrap();
    write_adapter(&path, &adapter_weights(&adapters), &lora_config(&case["lora"]), base).unwrap();
    let read = read_adapter(&path).unwrap().into_set(&path, &model.config, &model.device()).unwrap();
    assert_eq!(adapter_weights(&read), adapter_weights(&adapters));
    compare_logits(golden, "all", &model, &read, &batch(&rows(&golden.json["batch"])));
    let is_tied = model.config.tie_word_embeddings;
    assert_eq!(read_json(&path.join("adapter_config.json"))["ensure_weight_tying"] == json!(true), is_tied);

    let options = MergeOptions { dtype: Some(Dtype::F32), ..MergeOptions::default() };
    let merged = folder.path().join("merged");
    merge(&golden.model_dir, &path, &merged, options, &|_, _| ()).unwrap();
    let merged = WeightFiles::open(&merged).unwrap();
    for (name, expected) in golden.json["merged"].as_object().unwrap() {
        let shape = &merged.tensors()[name].shape;
        compare_projections(name, &merged.load_f32(name, shape).unwrap(), 1.0, expected, 1e-6);
    }
    assert_eq!(golden.json["merged"].as_object().unwrap().len(), merged.tensors().len());
}

#[test]
fn the_embedding_has_the_gradients_of_every_objective_that_its_rows_have_alone() {
    let (golden, folder) = (preferences::golden(), tempfile::tempdir().unwrap());
    let base = quickstart();
    let model = base.model(Dtype::F32);
    for (name, case) in golden["cases"].as_object().unwrap() {
        let recipe = preferences::recipe(case, &golden, folder.path(), 4);
        let batch = preferences::batches(&recipe, &base.model_dir, 1).remove(0);
        let adapters = Golden::adapters(&json!({"lora": golden["lora"], "b_bound": golden["b_bound"]}), &model);
        let ids: Vec<usize> =
            batch.input_ids.iter().map(|id| *id as usize).collect::<BTreeSet<_>>().into_iter().collect();
        let mut with_rows = adapters.clone();
        model.start_tokens(&mut with_rows, &ids);
        let mut with_all = adapters;
        model.start_modules(&mut with_all, std::iter::once(FullTensor::Tied));
        let [rows, all] = [(with_rows, FullTensor::Tokens), (with_all, FullTensor::Tied)].map(|(adapters, full)| {
            let optimizer = OptimizerConfig::default();
            let step = TrainStep::new(model.clone(), adapters, &recipe.train, &optimizer, None, 0);
            let mut step = step.with_objective(objective(&recipe.objective));
            step.forward_backward(&batch);
            values(step.grads().get(full.into()).unwrap())
        });
        let width = model.config.hidden_size;
        let of_all = ids.iter().flat_map(|id| &all[id * width..(id + 1) * width]);
        let difference: f64 = rows.iter().zip(of_all).map(|(one, other)| f64::from(one - other).powi(2)).sum();
        let norm: f64 = rows.iter().map(|one| f64::from(*one).powi(2)).sum();
        assert!((difference / norm).sqrt() < 1e-5, "{name}: {difference} of {norm}");
    }
}

/// Everything that can be trained of the model of [`Bench`].
const ALL: &str = "lora.modules_to_save=[\"embed_tokens\", \"lm_head\", \"norm\"]";

#[test]
fn a_run_starts_at_the_loss_of_the_base_and_is_resumed_to_the_same_bytes() {
    let bench = Bench::new();
    let eval_losses = |run: &str| -> Vec<f64> {
        metrics(&bench.path(run)).iter().filter_map(|line: &Value| line["eval_loss"].as_f64()).collect()
    };
    train(&bench.recipe("plain", ""), &set(&["train.max_steps=2"]));
    for (index, extra) in [
        &["lora.lora_dropout=0.1", "train.gradient_accumulation_steps=3", "train.layered_accumulation=true"][..],
        &["lora.lora_dropout=0", "lora.init_lora_weights=\"pissa\"", "data.packing=true"],
        &["lora.layers_to_transform=[1]", "optimizer.name=\"adamw_8bit\"", "optimizer.ema_decay=0.5"],
        &["train.precision=bf16", "optimizer.name=\"schedule_free_adamw\"", "train.gradient_checkpointing=true"],
    ]
    .iter()
    .enumerate()
    {
        let run = format!("run-{index}");
        resumes_to_the_same_bytes(&bench, &run, &[&[ALL], *extra].concat());
        if index < 3 {
            assert_near(eval_losses(&run)[0], eval_losses("plain")[0], 1e-5, extra[0]);
        }
    }
}

#[test]
fn a_run_is_merged_continued_and_written_with_and_what_it_cannot_be_is_said() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &set(&[ALL, "train.max_steps=6", "optimizer.learning_rate=1e-2"]));
    let command = |args: &[&str]| lora_train(args).current_dir(&bench.folder).output().unwrap();
    let text = |args: &[&str]| {
        let output = command(&[&["generate"], args, &["--prompt", "3: ", "--max-new-tokens", "12"]].concat());
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    for out in ["merged", "merged.gguf"] {
        let output = command(&["merge", "run", "--out", out]);
        assert!(output.status.success(), "{out}: {}", stderr(&output));
        assert_eq!(text(&["run"]), text(&["--model", out]), "{out}");
    }
    let refused = |args: &[&str], reason: &str| {
        let output = command(args);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    };
    let alone = ["merge", "run", "--out", "adapter.gguf", "--adapter-only"];
    refused(&alone, "llama.cpp has no adapters with `modules_to_save`");
    let start = format!("lora.start_from={:?}", bench.path("run"));
    train(&bench.recipe("next", ""), &set(&[&start, "train.max_steps=2"]));
    let both = ["merge", "run", "next", "--weights", "1,1", "--out", "both"];
    refused(&both, "replaces rows or modules of the model, which cannot be added up");
    let losses = ["run", "next"].map(|run| {
        let metrics = metrics(&bench.path(run));
        let losses: Vec<f64> = metrics.iter().filter_map(|line: &Value| line["eval_loss"].as_f64()).collect();
        (losses[0], losses[losses.len() - 1])
    });
    assert_near(losses[1].0, losses[0].1, 1e-5, "the first loss of a run that goes on");

    let next = bench.recipe("wrong", "");
    for (value, reason) in [
        (
            "[\"q_proj\"]",
            "`q_proj` names `model.layers.0.self_attn.q_proj`, and only the embedding, the head and the norms",
        ),
        ("[\"wte\"]", "no module with weights of its own has a name that ends in `wte`: take `embed_tokens`, "),
        ("[3]", "expected a name or a list of names"),
    ] {
        let set = format!("lora.modules_to_save={value}");
        refused(&["check", next.to_str().unwrap(), "--set", &set], reason);
    }
    let rows = ["--set", ALL, "--set", "lora.trainable_token_indices=[3]"];
    refused(&[&["check", next.to_str().unwrap()], &rows[..]].concat(), "the whole embedding, beside its rows");
    let config = bench.path("run").join("adapter/adapter_config.json");
    let mut apart = read_json(&config);
    apart["ensure_weight_tying"] = json!(false);
    std::fs::write(&config, apart.to_string()).unwrap();
    refused(&["merge", "run", "--out", "apart"], "embedding and head were trained apart");
}
