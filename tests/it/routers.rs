//! Adapters of mixtures that PEFT has made with "all-linear", on routers too, against PEFT's numbers: read, trained, written, merged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::Device;
use lora_train::config::{OptimizerConfig, TrainConfig};
use lora_train::device::Dtype;
use lora_train::lora::{Adapter, AdapterSet};
use lora_train::save::export::{
    MergeOptions, SavedAdapter, check_adapter, check_written, merge, read_adapter, write_adapter,
};
use lora_train::train::step::TrainStep;
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::common::families::{formula, write_family};
use crate::common::{Bench, run, stderr, train};
use crate::golden::{Golden, assert_near, batch, compare_logits, compare_projections, name_in_file, rows, values};

const FAMILIES: [&str; 8] =
    ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "hunyuan_v1_moe", "gemma4-experts", "gpt_oss", "granitemoe"];

fn is_router(name: &str) -> bool {
    [".gate.lora_", ".gate.wg.lora_", ".router.lora_", ".router.proj.lora_"].iter().any(|end| name.contains(end))
}

fn is_of_router(adapter: &Adapter) -> bool {
    is_router(&format!("{}.lora_", adapter.module.replace(".layer", "")))
}

/// Writes the adapter as PEFT did.
#[expect(clippy::cast_precision_loss, reason = "a width")]
fn write_peft(golden: &Value, folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let tensors = golden["tensors"].as_object().unwrap().iter().map(|(name, shape)| {
        let shape: Vec<usize> = serde_json::from_value(shape.clone()).unwrap();
        let bound = match (name.contains(".lora_A."), is_router(name)) {
            (true, _) => 1.0 / (shape[1] as f64).sqrt(),
            (false, true) => golden["router_bound"].as_f64().unwrap(),
            (false, false) => golden["b_bound"].as_f64().unwrap(),
        };
        let bytes = formula(name, bound).take(shape[0] * shape[1]).flat_map(f32::to_le_bytes).collect();
        (name.clone(), (shape, bytes))
    });
    let tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = tensors.collect();
    let views = tensors
        .iter()
        .map(|(name, (shape, bytes))| (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("adapter_model.safetensors")).unwrap();
    fs::write(folder.join("adapter_config.json"), golden["adapter_config"].to_string()).unwrap();
}

#[test]
fn routers_of_pefts_adapters_give_its_logits_losses_and_gradients_also_written_again_and_merged() {
    for family in FAMILIES {
        let folder = tempfile::tempdir().unwrap();
        let [peft, again, out] = ["peft", "again", "merged"].map(|name| folder.path().join(name));
        write_family(family, folder.path());
        let golden = Golden::open(&format!("routers-{family}"), folder.path().to_owned());
        write_peft(&golden.json, &peft);
        let model = golden.model(Dtype::F32);
        let read = read_adapter(&peft).unwrap().named_for(&model.config);
        let set = read.clone().into_set(&peft, &model.config, &Device::flex()).unwrap();
        let batch = batch(&rows(&golden.json["batch"]));
        compare_logits(&golden, "adapter", &model, &set, &batch);
        // Without the routers' part they are others.
        let zeroed = |is_zeroed: fn(bool) -> bool| {
            let mut set = set.clone();
            for adapter in set.iter_mut().filter(|adapter| is_zeroed(is_of_router(adapter))) {
                adapter.matrices.b = adapter.matrices.b.zeros_like();
            }
            set
        };
        let without = zeroed(|is_router| is_router);
        let [expected, other] = [&set, &without].map(|set| values(&model.logits(&batch, set)));
        let scale = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let worst = |found: &[f32]| found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / scale;
        assert!(worst(&other) > 1e-2, "{family}: {}", worst(&other));

        let step = |set: AdapterSet| {
            let (train, optimizer) = (TrainConfig::default(), OptimizerConfig::default());
            let mut step = TrainStep::new(model.clone(), set, &train, &optimizer, None, 0);
            step.forward_backward(&batch);
            step
        };
        // Where routers alone are trained, nothing else asks for the gradient of the first one's input.
        let others_zero = zeroed(|is_router| !is_router);
        let mut alone = others_zero.clone();
        alone.blocks.iter_mut().for_each(|block| block.retain(|_, adapter| is_of_router(adapter)));
        let (alone, beside) = (step(alone), step(others_zero));
        for (id, grad) in alone.grads().iter() {
            let (_, expected) = beside.grads().iter().find(|(other, _)| *other == id).unwrap();
            assert_eq!(values(grad), values(expected), "{family}: {id:?}");
        }
        let mut step = step(set.clone());
        #[expect(clippy::cast_precision_loss, reason = "a few tokens")]
        let num_targets = batch.num_target_tokens() as f64;
        let (mut num_routers, gradients) = (0, golden.json["figures"]["gradients"].as_object().unwrap());
        for (id, grad) in step.grads().iter() {
            let name = name_in_file(step.trained_adapters(), id);
            let name = name.replace("router.layer", "router");
            let name = if family == "mixtral" { name.replace("block_sparse_moe.gate", "mlp.gate") } else { name };
            if let Some(expected) = gradients.get(&name) {
                compare_projections(&name, &values(grad), num_targets, expected, 1e-3);
                num_routers += usize::from(is_router(&name));
            }
        }
        assert_eq!(num_routers, gradients.keys().filter(|name| is_router(name)).count(), "{family}");
        let loss = golden.json["figures"]["loss"].as_f64().unwrap();
        assert_near(step.update(0.0).loss, loss, 1e-5, family);

        let SavedAdapter { weights, config, .. } = &read;
        check_written(config, &model.config, false).unwrap();
        write_adapter(&again, weights, config, "base").unwrap();
        let back = read_adapter(&again).unwrap().named_for(&model.config);
        assert!(back.weights.adapters == weights.adapters, "{family}");
        // Experts may have the scale of another rank, computed anew.
        #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
        let [first, second] = [&read, &back].map(|saved| {
            let selection = check_adapter(&again, saved, &model.config).unwrap();
            selection.iter().map(|(layer, site, shape)| (layer, site, shape.r, shape.scale as f32)).collect::<Vec<_>>()
        });
        assert_eq!(first, second, "{family}");

        let options = MergeOptions { dtype: Some(Dtype::F32), ..MergeOptions::default() };
        merge(folder.path(), &peft, &out, options, &|_, _| ()).unwrap();
        let merged = Golden::open(&format!("routers-{family}"), out).model(Dtype::F32);
        let found = values(&merged.logits(&batch, &AdapterSet::none(merged.config.num_layers())));
        assert!(worst(&found) < 1e-4, "{family}: {}", worst(&found));
    }
}

#[test]
fn training_goes_on_from_an_adapter_on_routers_and_its_run_resumes_to_the_bit_and_is_merged() {
    let bench = Bench::new();
    let [model, peft, out] = ["model", "peft", "merged"].map(|name| bench.path(name));
    fs::create_dir(&model).unwrap();
    write_family("mixtral", &model);
    let golden = Golden::open("routers-mixtral", model.clone());
    write_peft(&golden.json, &peft);
    let [of_model, start] =
        [("model.path", &model), ("lora.start_from", &peft)].map(|(key, path)| format!("{key}=\"{}\"", path.display()));
    let settings = [
        "--set", &of_model, "--set", &start, "--set", "train.max_steps=4", "--set", "checkpoint.save_steps=2", "--set",
        "optimizer.learning_rate=3e-3", "--set", "lora.r=", "--set", "lora.lora_dropout=",
    ];
    let recipe = bench.recipe("whole", "");
    for command in ["check", "plan"] {
        let output = run(&[&[command, recipe.to_str().unwrap()], &settings[..]].concat());
        assert!(output.status.success(), "{command}: {}", stderr(&output));
    }
    train(&recipe, &settings);
    let checkpoint = bench.path("whole/checkpoints/step-000002");
    train(&bench.recipe("resumed", ""), &[&settings[..], &["--resume", checkpoint.to_str().unwrap()]].concat());
    let [whole, resumed, before] =
        [&bench.path("whole/adapter"), &bench.path("resumed/adapter"), &peft].map(|path| read_adapter(path).unwrap());
    assert_eq!(whole.weights, resumed.weights);
    let router = "model.layers.0.mlp.gate";
    assert!(whole.weights[router].a != before.weights[router].a && whole.weights[router].b != before.weights[router].b);

    let trained = bench.path("whole/adapter");
    let [model, trained, out] = [&model, &trained, &out].map(|path| path.to_str().unwrap());
    let [file, alone] = ["whole.gguf", "alone.gguf"].map(|name| bench.path(name).to_str().unwrap().to_owned());
    let merge = ["merge", "--model", model, "--adapter", trained, "--out"];
    for more in [&[out][..], &[&file, "--dtype", "f32"], &[&alone, "--adapter-only"]] {
        let output = run(&[&merge[..], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let text = |args: &[&str]| {
        let output =
            run(&[&["generate", "--prompt", "Once", "--raw", "--max-new-tokens", "6", "--model"], args].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let expected = text(&[model, "--adapter", trained]);
    assert!(expected == text(&[out]) && expected == text(&[&file]) && expected != text(&[model]));
    // The run's own recipe names them, others can, too, but not for the blocks of a file.
    let (resolved, other) = (bench.path("whole/resolved.toml"), format!("output_dir={:?}", bench.path("other")));
    let named =
        [recipe.to_str().unwrap(), "--set", &other, "--set", &of_model, "--set", "lora.target_modules=[\"gate\"]"];
    let [again, named, shipped] = [
        run(&["check", resolved.to_str().unwrap(), "--set", &other]),
        run(&[&["check"], &named[..]].concat()),
        run(&[&["check"], &named[..], &["--set", "train.ship_as=\"q8_0\""]].concat()),
    ];
    assert!(again.status.success() && named.status.success(), "{}{}", stderr(&again), stderr(&named));
    let expected = "`model.layers.0.block_sparse_moe.gate`, a router, is not rounded";
    assert!(stderr(&shipped).contains(expected), "{}", stderr(&shipped));
}
