//! Adapters on experts against autograd's numbers, through files, merged, and resumed.

use std::collections::BTreeMap;
use std::fs;

use burn::tensor::Device;
use lora_train::device::Dtype;
use lora_train::lora::AdapterSet;
use lora_train::save::export::{SavedAdapter, adapter_weights, read_adapter, write_adapter};

use crate::common::families::write_family;
use crate::common::{Bench, run, stderr, train};
use crate::golden::{Golden, batch, compare_cases, compare_curve, lora_config, merged, rows, values};

/// Small models with their golden files.
pub(crate) fn families() -> impl Iterator<Item = (Golden, tempfile::TempDir)> {
    ["qwen3_moe", "glm4_moe", "mixtral"].into_iter().map(|name| {
        let folder = tempfile::tempdir().unwrap();
        write_family(name, folder.path());
        (Golden::open(&format!("experts-{name}"), folder.path().to_owned()), folder)
    })
}

#[test]
fn experts_give_the_logits_losses_gradients_and_loss_curve_of_autograd() {
    for (golden, _folder) in families() {
        compare_cases(&golden, Dtype::F32);
        compare_curve(&golden);
    }
}

#[test]
fn adapters_of_experts_go_through_files_one_by_one_and_merged_give_the_same() {
    for (golden, folder) in families() {
        let case = &golden.json["cases"]["experts"];
        let model = golden.model(Dtype::F32);
        let adapters = Golden::adapters(case, &model);
        let (weights, lora) = (adapter_weights(&adapters), lora_config(&case["lora"]));
        let expert = weights.keys().find(|module| module.contains(".experts.2.")).unwrap();
        assert_eq!(weights[expert].a.num_rows, 3);
        let path = folder.path().join("adapter");
        write_adapter(&path, &weights, &lora, "base").unwrap();
        let read = read_adapter(&path).unwrap();
        assert!(read.weights == weights && read.config.expert_rank == Some(3) && read.config.r == 3);
        // Written again it is the same.
        let SavedAdapter { weights, config, .. } = &read;
        write_adapter(&folder.path().join("again"), weights, config, "base").unwrap();
        let text = |name: &str| fs::read_to_string(folder.path().join(name).join("adapter_config.json")).unwrap();
        let json = |name: &str| -> BTreeMap<String, serde_json::Value> { serde_json::from_str(&text(name)).unwrap() };
        let (mut first, mut again) = (json("adapter"), json("again"));
        // Of names a set.
        first.remove("target_modules");
        again.remove("target_modules");
        assert_eq!(first, again);
        let set = read.into_set(&path, &model.config, &Device::flex()).unwrap();
        let batch = batch(&rows(&golden.json["batch"]));
        let expected = values(&model.logits(&batch, &adapters));
        assert_eq!(values(&model.logits(&batch, &set)), expected);
        let merged = merged(&golden, "experts", &folder.path().join("merged")).model(Dtype::F32);
        let merged = values(&merged.logits(&batch, &AdapterSet::none(model.config.num_layers())));
        let scale = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let worst = merged.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5 * scale, "{worst} of {scale}");
    }
}

#[test]
fn experts_are_trained_resumed_to_the_bit_merged_and_asked_also_on_a_quantised_base() {
    let bench = Bench::new();
    let model = bench.path("model");
    fs::create_dir(&model).unwrap();
    write_family("glm4_moe", &model);
    let path = format!("model.path={model:?}");
    let settings = [
        "--set", &path, "--set", "train.max_steps=6", "--set", "checkpoint.save_steps=3", "--set",
        "lora.expert_rank=2", "--set", "lora.lora_dropout=0", "--set", "lora.r=4", "--set", "lora.lora_alpha=12",
        "--set", "optimizer.learning_rate=3e-3",
    ];
    let recipe = bench.recipe("whole", "");
    for command in ["check", "plan"] {
        let output = run(&[&[command, recipe.to_str().unwrap()], &settings[..]].concat());
        assert!(output.status.success(), "{command}: {}", stderr(&output));
    }
    train(&recipe, &settings);
    let checkpoint = bench.path("whole/checkpoints/step-000003");
    train(&bench.recipe("resumed", ""), &[&settings[..], &["--resume", checkpoint.to_str().unwrap()]].concat());
    let adapter = |run: &str| fs::read(bench.path(run).join("adapter/adapter_model.safetensors")).unwrap();
    assert_eq!(adapter("whole"), adapter("resumed"));
    train(&bench.recipe("quantised", ""), &[&settings[..], &["--set", "model.quantization=\"nf4\""]].concat());
    assert_ne!(adapter("whole"), adapter("quantised"));

    let (trained, out, file) = (bench.path("whole/adapter"), bench.path("merged"), bench.path("whole.gguf"));
    let [model, trained, out, file] = [&model, &trained, &out, &file].map(|path| path.to_str().unwrap());
    let merge = ["merge", "--model", model, "--adapter", trained, "--out"];
    for more in [&[out][..], &[file, "--dtype", "f32"]] {
        let output = run(&[&merge[..], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let text = |args: &[&str]| {
        let output =
            run(&[&["generate", "--prompt", "Once", "--raw", "--max-new-tokens", "12", "--model"], args].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let expected = text(&[model, "--adapter", trained]);
    assert!(expected == text(&[out]) && expected == text(&[file]) && expected != text(&[model]));
    let refused = |args: &[&str], reason: &str| {
        let output = run(args);
        assert!(output.status.code() == Some(2) && stderr(&output).contains(reason), "{}", stderr(&output));
    };
    refused(&[&merge[..], &["alone.gguf", "--adapter-only"]].concat(), "adapters on experts are written whole alone");
    let check = |more: &str, reason: &str| {
        refused(&[&["check", recipe.to_str().unwrap()], &settings[..], &["--set", more]].concat(), reason);
    };
    check("lora.use_dora=true", "adapters on experts have no `use_dora`");
    check("lora.target_modules=[\"gate_proj\", \"q_proj\"]", "experts' gate and up are one in PEFT");
    check("lora.target_modules=[\"q_proj\"]", "no layer of experts is among");
}
