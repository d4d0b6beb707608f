use super::super::adapter_file::tests::{adapter, adapter_on};
use super::super::tokenizer_files::{CHAT_TEMPLATE, PROCESSOR_TEMPLATE};
use super::super::write_adapter;
use burn::tensor::Device;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::*;
use crate::lora::Matrices;
use crate::model::weights::fixture::{self, TINY_CONFIG_JSON, tiny_config};
use crate::model::weights::{WeightFiles, convert};
use crate::save::export::{HostMatrix, SavedAdapter};
use crate::spec::in_layer;

/// A tiny model and an adapter for it, in a temporary folder.
fn folders(num_shards: usize, dtype: Dtype, adapter: &SavedAdapter) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("base")).unwrap();
    fixture::write_model(&root.path().join("base"), &tiny_config(), num_shards, dtype);
    std::fs::write(root.path().join("base/tokenizer.json"), "{}").unwrap();
    std::fs::write(root.path().join("base/pytorch_model.bin"), "not for the copy").unwrap();
    write_adapter(&root.path().join("adapter"), &adapter.weights, &adapter.config, "org/base").unwrap();
    root
}

fn merge_in(root: &Path) -> Result<MergeSummary, ExportError> {
    merge(&root.join("base"), &root.join("adapter"), &root.join("out"), MergeOptions::default(), &|_, _| ())
}

/// `W + scale B A`, in f64.
fn expected(weight: &[f32], pair: &Matrices<HostMatrix>, scale: f64) -> Vec<f64> {
    let [rank, in_features] = pair.a.shape();
    let number = |index: usize| -> f64 {
        let (row, column) = (index / in_features, index % in_features);
        (0..rank)
            .map(|k| {
                let (b, a) = (pair.b.values[row * rank + k], pair.a.values[k * in_features + column]);
                f64::from(b) * f64::from(a)
            })
            .sum()
    };
    weight.iter().enumerate().map(|(index, weight)| f64::from(*weight) + scale * number(index)).collect()
}

#[test]
fn merged_weights_are_the_base_plus_the_scaled_product_in_the_bases_type_and_files() {
    for (num_shards, dtype, epsilon) in
        [(1, Dtype::F32, 1e-6), (3, Dtype::Bf16, 1.0 / 256.0), (2, Dtype::F16, 1.0 / 2048.0)]
    {
        let mut adapter = adapter();
        adapter.config.use_rslora = true;
        adapter.config.lora_alpha = 0.5;
        let scale = 0.5 / 3.0_f64.sqrt();
        let root = folders(num_shards, dtype, &adapter);
        let summary = merge_in(root.path()).unwrap();
        assert_eq!((summary.num_modules, summary.num_files), (4, num_shards));
        assert_eq!(summary.trained_on.as_deref(), Some("org/base"));

        let base = WeightFiles::open(&root.path().join("base")).unwrap();
        let merged = WeightFiles::open(&root.path().join("out")).unwrap();
        assert!(base.shard_names().eq(merged.shard_names()));
        let mut num_merged = 0;
        for (name, stored) in base.tensors() {
            let found = &merged.tensors()[name];
            assert_eq!((found.dtype, found.shard), (stored.dtype, stored.shard));
            let before = base.load_f32(name, &stored.shape).unwrap();
            let after = merged.load_f32(name, &stored.shape).unwrap();
            match adapter.weights.get(name.trim_end_matches(".weight")) {
                None => assert_eq!(before, after, "{name}"),
                Some(pair) => {
                    num_merged += 1;
                    assert_ne!(before, after);
                    for (after, expected) in after.iter().zip(expected(&before, pair, scale)) {
                        // Half a unit in the last place of the type, plus the rounding of the sum in f32.
                        let allowed = expected.abs() * epsilon + 1e-6;
                        assert!((f64::from(*after) - expected).abs() <= allowed, "{name}: {after} {expected}");
                    }
                }
            }
        }
        assert_eq!(num_merged, 4);
        let out = root.path().join("out");
        assert_eq!(std::fs::read_to_string(out.join("tokenizer.json")).unwrap(), "{}");
        assert!(out.join("config.json").is_file() && !out.join("pytorch_model.bin").exists());
        let metadata = merged.shard_metadata(0).unwrap();
        assert_eq!(metadata["format"], "pt");
    }
}

#[test]
fn on_a_quantised_base_the_sum_is_with_the_decoded_weights_of_every_linear_layer() {
    let adapter = adapter();
    let root = folders(1, Dtype::Bf16, &adapter);
    let quantisation = Quantisation { coding: Coding::Nf4, nested: true };
    let options = MergeOptions { decoded: Some(quantisation), dtype: Some(Dtype::F32), quantise: None };
    let [base, out] = ["base", "out"].map(|name| root.path().join(name));
    let summary = merge(&base, &root.path().join("adapter"), &out, options, &|_, _| ()).unwrap();
    let (base, merged) = (WeightFiles::open(&base).unwrap(), WeightFiles::open(&out).unwrap());
    let scale = adapter.config.lora_alpha / 3.0;
    let mut largest = 0.0f32;
    for (name, stored) in base.tensors() {
        let before = base.load_f32(name, &stored.shape).unwrap();
        let after = merged.load_f32(name, &stored.shape).unwrap();
        if !name.ends_with("_proj.weight") {
            assert_eq!(before, after, "{name}");
            continue;
        }
        let fill = |first: usize, to: &mut [f32]| to.copy_from_slice(&before[first..first + to.len()]);
        let shape = [stored.shape[0], stored.shape[1]];
        let decoded = quantisation.quantise(shape, &Device::flex(), fill).unwrap().to_f32();
        largest = before.iter().zip(&decoded).fold(largest, |most, (a, b)| (a - b).abs().max(most));
        match adapter.weights.get(name.trim_end_matches(".weight")) {
            None => assert_eq!(after, decoded, "{name}"),
            Some(pair) => {
                for (after, expected) in after.iter().zip(expected(&decoded, pair, scale)) {
                    assert!((f64::from(*after) - expected).abs() < 1e-6, "{name}: {after} {expected}");
                }
            }
        }
    }
    let differences = summary.differences;
    assert_eq!((differences.written, differences.decoded, differences.share_lost()), (0.0, largest, 0.0));
    assert!(largest > 0.0);
}

#[test]
fn what_rounding_takes_from_an_update_is_all_of_a_small_one_on_the_grid_of_the_base() {
    let share = |factor: f32, quantise: Option<Codes>| {
        let mut adapter = adapter();
        for pair in adapter.weights.values_mut() {
            pair.b.values.iter_mut().for_each(|value| *value *= factor);
        }
        let root = folders(1, Dtype::Bf16, &adapter);
        let decoded = Some(Quantisation { coding: Coding::Nf4, nested: false });
        let options = MergeOptions { decoded, dtype: Some(Dtype::F32), quantise };
        let [base, adapter, out] = ["base", "adapter", "out"].map(|name| root.path().join(name));
        merge(&base, &adapter, &out, options, &|_, _| ()).unwrap().differences.share_lost()
    };
    assert_eq!(share(1e-3, None), 0.0);
    let [small, large] = [1e-3, 1.0].map(|factor| share(factor, Some(Codes::Bitsandbytes(Coding::Nf4))));
    assert!(small > 0.8 && large.abs() < 0.05, "{small} {large}");
}

#[test]
fn codes_of_every_packer_are_decoded_and_layers_that_are_stored_whole_stay() {
    let golden = SafeTensors::deserialize(include_bytes!("../../../../tests/golden/packed.safetensors")).unwrap();
    let [module, whole_module] = [0, 1].map(|layer| in_layer(layer, "mlp.up_proj"));
    let weights = json!({"num_bits": 4, "group_size": 32});
    let compressed = |format: &str| json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}});
    for (case, described) in [
        ("gptq4_zeros", json!({"quant_method": "gptq", "bits": 4, "group_size": 32})),
        ("gptq4_ordered", json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true})),
        ("gptq8", json!({"quant_method": "gptq", "bits": 8, "group_size": 32})),
        ("awq", json!({"quant_method": "awq", "bits": 4, "group_size": 32})),
        ("int4", compressed("pack-quantized")),
        ("fp8", json!({"quant_method": "fp8", "weight_block_size": [48, 32]})),
        ("mxfp4", compressed("mxfp4-pack-quantized")),
        ("nvfp4", compressed("nvfp4-pack-quantized")),
    ] {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().join("base");
        std::fs::create_dir(&base).unwrap();
        let mut config: Value = serde_json::from_str(TINY_CONFIG_JSON).unwrap();
        (config["hidden_size"], config["intermediate_size"]) = (96.into(), 64.into());
        config["quantization_config"] = described;
        std::fs::write(base.join("config.json"), config.to_string()).unwrap();

        let mut tensors = fixture::random_tensors(&ModelConfig::from_model(&base).unwrap());
        tensors.remove(&format!("{module}.weight"));
        let whole = tensors[&format!("{whole_module}.weight")].1.clone();
        fixture::write_tensors(&base.join("a.safetensors"), &tensors, Dtype::F16);
        let parts = golden.tensors().into_iter().filter_map(|(name, view)| {
            let part = name.strip_prefix(case)?.strip_prefix('.').filter(|part| *part != "decoded")?;
            Some((format!("{module}.{part}"), view))
        });
        let parts: BTreeMap<String, TensorView<'_>> = parts.collect();
        safetensors::serialize_to_file(&parts, None, &base.join("b.safetensors")).unwrap();
        let places = tensors.keys().map(|name| (name, "a.safetensors"));
        let places: BTreeMap<_, _> = places.chain(parts.keys().map(|name| (name, "b.safetensors"))).collect();
        std::fs::write(base.join(INDEX), json!({"weight_map": places}).to_string()).unwrap();

        let saved = adapter_on("mlp.up_proj", [64, 96]);
        write_adapter(&root.path().join("adapter"), &saved.weights, &saved.config, "org/base").unwrap();
        let summary = merge_in(root.path()).unwrap();
        assert_eq!((summary.num_files, summary.differences.decoded), (2, 0.0), "{case}");

        let merged = WeightFiles::open(&root.path().join("out")).unwrap();
        let found = &merged.tensors()[&format!("{module}.weight")];
        assert_eq!((found.dtype, found.shard), (safetensors::Dtype::F16, 1), "{case}: as the embedding, in its file");
        let decoded = golden.tensor(&format!("{case}.decoded")).unwrap();
        let dtype = convert::float_dtype(decoded.dtype()).unwrap();
        let decoded = convert::to_f32(decoded.data(), dtype);
        for (module, before) in [(&module, &decoded), (&whole_module, &whole)] {
            let after = merged.load_f32(&format!("{module}.weight"), &[64, 96]).unwrap();
            let sums = expected(before, &saved.weights[module], saved.config.lora_alpha / 3.0);
            for ((after, sum), before) in after.iter().zip(sums).zip(before) {
                // Rounded: the golden numbers, and the sum to f16.
                let rounding = if dtype == Dtype::F16 { 2048.0 } else { 256.0 };
                let allowed = sum.abs() / 2048.0 + f64::from(before.abs()) / rounding + 1e-6;
                assert!((f64::from(*after) - sum).abs() <= allowed, "{case} {module}: {after} {sum}");
            }
        }
        let described = std::fs::read_to_string(root.path().join("out/config.json")).unwrap();
        assert!(!described.contains("quantization_config"), "{described}");
    }
}

#[test]
fn an_embedding_and_a_head_beside_the_adapter_take_the_place_of_the_bases_and_equal_ones_are_read_over() {
    let config = tiny_config();
    let shape = [config.vocab_size, config.hidden_size];
    let mut with_head = adapter();
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let values = (0..shape[0] * shape[1]).map(|at| (at % 97) as f32).collect();
    let table = HostMatrix { num_rows: shape[0], num_columns: shape[1], values };
    with_head.weights.beside.insert("lm_head.weight".to_owned(), table.clone());
    let root = folders(1, Dtype::F32, &with_head);
    merge_in(root.path()).unwrap();
    let [base, merged] = ["base", "out"].map(|name| WeightFiles::open(&root.path().join(name)).unwrap());
    // The head is the embedding here.
    assert_eq!(merged.load_f32("model.embed_tokens.weight", &shape).unwrap(), table.values);
    let values = base.load_f32("model.embed_tokens.weight", &shape).unwrap();
    let base = Weights::Files(base);
    with_head.weights.beside.insert("lm_head.weight".to_owned(), HostMatrix { values, ..table.clone() });
    assert!(with_head.weights.replaces_weights());
    assert_eq!(with_head.named_for(&config).without_equal_tables(&base, &config), adapter());
}

#[test]
fn written_as_codes_a_linear_layer_has_the_names_of_bitsandbytes() {
    let root = folders(2, Dtype::Bf16, &adapter());
    for (coding, extra) in
        [(Coding::Fp4, ["weight.absmax", "weight.quant_map"]), (Coding::Int8, ["SCB", "weight_format"])]
    {
        let out = root.path().join(coding.to_string());
        let options = MergeOptions { quantise: Some(Codes::Bitsandbytes(coding)), ..MergeOptions::default() };
        let [base, adapter] = ["base", "adapter"].map(|name| root.path().join(name));
        let summary = merge(&base, &adapter, &out, options, &|_, _| ()).unwrap();
        let index: Value = serde_json::from_slice(&std::fs::read(out.join(INDEX)).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], summary.num_bytes);
        for name in extra {
            let name = format!("model.layers.1.mlp.up_proj.{name}");
            assert!(index["weight_map"][&name].is_string(), "{name} in {index:#}");
        }
        let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["quantization_config"]["load_in_8bit"], coding == Coding::Int8);
    }
}

#[test]
fn in_the_forms_of_compressed_tensors_a_model_is_read_back_with_the_numbers_that_its_codes_stand_for() {
    let root = tempfile::tempdir().unwrap();
    let [base, folder, plain] = ["base", "adapter", "plain"].map(|name| root.path().join(name));
    std::fs::create_dir(&base).unwrap();
    let mut config: Value = serde_json::from_str(TINY_CONFIG_JSON).unwrap();
    (config["hidden_size"], config["intermediate_size"]) = (96.into(), 64.into());
    std::fs::write(base.join("config.json"), config.to_string()).unwrap();
    let tensors = fixture::random_tensors(&ModelConfig::from_model(&base).unwrap());
    fixture::write_tensors(&base.join("model.safetensors"), &tensors, Dtype::F32);
    let saved = adapter_on("mlp.up_proj", [64, 96]);
    write_adapter(&folder, &saved.weights, &saved.config, "org/base").unwrap();
    merge(&base, &folder, &plain, MergeOptions::default(), &|_, _| ()).unwrap();
    let plain = WeightFiles::open(&plain).unwrap();
    for (packing, most) in [
        (Packing::w4a16(&[96, 64]).unwrap(), 0.08),
        (Packing::Fp8, 0.065),
        (Packing::Nvfp4, 0.24),
        (Packing::Mxfp4, 0.26),
    ] {
        let out = root.path().join(format!("{packing:?}"));
        let options = MergeOptions { quantise: Some(Codes::Packed(packing)), ..MergeOptions::default() };
        merge(&base, &folder, &out, options, &|_, _| ()).unwrap();
        let config = ModelConfig::from_model(&out).unwrap();
        let weights = Weights::open(&out, &config).unwrap();
        let largest = |name: &str| {
            plain.load_f32(name, &plain.tensors()[name].shape.clone()).unwrap().iter().fold(0f32, |m, x| m.max(x.abs()))
        };
        let mut num_codes = 0;
        for (name, shape) in config.expected_tensors().into_iter().filter(|(_, shape)| shape.len() == 2) {
            let before = plain.load_f32(&name, &shape).unwrap();
            let matrix =
                weights.matrix(&name, [shape[0], shape[1]], Dtype::F32.into(), &config, &Device::flex()).unwrap();
            let after = matrix.dense().to_data().try_to_vec::<f32>().unwrap();
            let is_whole = name.starts_with("model.embed") || name.starts_with("lm_head");
            assert_eq!(before == after, is_whole, "{packing:?} {name}");
            if is_whole {
                continue;
            }
            num_codes += 1;
            let shares = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
            let beside: &[&str] = if shares(&["q_proj", "k_proj", "v_proj"]) {
                &["q_proj", "k_proj", "v_proj"]
            } else if shares(&["gate_proj", "up_proj"]) {
                &["gate_proj", "up_proj"]
            } else {
                &["_proj"]
            };
            let own = beside.iter().find(|part| name.contains(**part)).unwrap();
            let largest = beside.iter().map(|part| largest(&name.replace(own, part))).fold(0f32, f32::max);
            let packed = packing.pack(&before, shape[1], Dtype::F32, largest);
            assert_eq!(packed.decoded, after, "{packing:?} {name}");
            for (before, after) in before.chunks(32).zip(after.chunks(32)) {
                let most_of_block = before.iter().fold(0f32, |m, x| m.max(x.abs()));
                let error = before.iter().zip(after).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(error <= most * most_of_block.max(f32::MIN_POSITIVE), "{packing:?} {name}: {error}");
            }
        }
        assert_eq!(num_codes, 14, "{packing:?}");
    }
    let wide =
        MergeOptions { quantise: Some(Codes::Packed(Packing::W4a16 { group_len: 128 })), ..MergeOptions::default() };
    let error = merge(&base, &folder, &root.path().join("no"), wide, &|_, _| ()).unwrap_err().to_string();
    assert!(error.contains("has rows of ") && error.contains("--dtype fp8"), "{error}");
    assert!(Packing::w4a16(&[96, 40]).is_err() && !root.path().join("no").exists());
}

#[test]
fn an_output_that_is_not_empty_is_refused_and_an_empty_one_filled() {
    let root = folders(1, Dtype::F32, &adapter());
    let out = root.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("mine"), "").unwrap();
    let exists = || merge_in(root.path()).unwrap_err().to_string().contains("exists and is not empty");
    assert!(exists());
    std::fs::remove_file(out.join("mine")).unwrap();
    let form = PromptForm::ChatTemplate { chat_template: Some("{{ messages }}\n".into()), system: None };
    form.write(&root.path().join("adapter")).unwrap();
    // Processors would read it first.
    std::fs::write(root.path().join("base").join(PROCESSOR_TEMPLATE), r#"{"chat_template": "{{ old }}"}"#).unwrap();
    merge_in(root.path()).unwrap();
    assert_eq!(std::fs::read_to_string(out.join(CHAT_TEMPLATE)).unwrap(), "{{ messages }}\n");
    assert!(!out.join(PROCESSOR_TEMPLATE).exists());
    assert!(exists());
}

#[test]
fn a_failed_merge_leaves_nothing_behind() {
    let mut adapter = adapter();
    adapter.config.lora_alpha = 1e6;
    let root = folders(1, Dtype::F16, &adapter);
    let error = merge_in(root.path()).unwrap_err().to_string();
    assert!(error.contains("is too large for f16"), "{error}");
    let mut names: Vec<_> = std::fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["adapter", "base"]);

    adapter.weights.remove("model.layers.0.mlp.down_proj");
    write_adapter(&root.path().join("adapter"), &adapter.weights, &adapter.config, "x").unwrap();
    let error = merge_in(root.path()).unwrap_err().to_string();
    assert!(error.contains("missing: `model.layers.0.mlp.down_proj.lora_A`"), "{error}");
}

/// Two layers of a mixture with the experts of each in two tensors, and a layer for several tokens at once whose are apart.
fn folder_with_joined_experts() -> tempfile::TempDir {
    let adapter = adapter_on("self_attn.q_proj", [64, 64]);
    let root = folders(1, Dtype::F32, &adapter);
    let base = root.path().join("base");
    let text = r#"{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 256, "hidden_size": 64,
        "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "tie_word_embeddings": true, "torch_dtype": "float32"}"#;
    std::fs::write(base.join("config.json"), text).unwrap();
    let config = ModelConfig::from_json(text).unwrap();
    let mut tensors = fixture::random_tensors(&config);
    for layer in 0..2 {
        for (joined, parts, rows, columns) in
            [("gate_up_proj", &["gate_proj", "up_proj"][..], 48, 64), ("down_proj", &["down_proj"], 64, 24)]
        {
            let name = |rest: &str| in_layer(layer, &format!("mlp.experts.{rest}"));
            let each = (0..3).flat_map(|expert| parts.iter().map(move |part| format!("{expert}.{part}.weight")));
            let values = each.flat_map(|part| tensors.remove(&name(&part)).unwrap().1).collect();
            tensors.insert(name(joined), (vec![3, rows, columns], values));
        }
    }
    fixture::write_tensors(&base.join("model.safetensors"), &tensors, Dtype::F32);
    root
}

#[test]
fn experts_in_one_tensor_are_copied_and_the_rest_is_merged() {
    let root = folder_with_joined_experts();
    let sizes = std::cell::RefCell::new((0, 0));
    let options = MergeOptions::default();
    let [base, adapter, out] = ["base", "adapter", "out"].map(|name| root.path().join(name));
    let on_bytes = |size, all| {
        let done = sizes.borrow().0 + size;
        sizes.replace((done, all));
    };
    merge(&base, &adapter, &out, options, &on_bytes).unwrap();
    let (done, all) = sizes.into_inner();
    assert_eq!(done, all);
    let files = WeightFiles::open(&base).unwrap();
    let merged = WeightFiles::open(&out).unwrap();
    assert_eq!(merged.joined().len(), 4);
    assert_eq!((merged.joined(), merged.num_bytes()), (files.joined(), files.num_bytes()));
    for (name, stored) in files.tensors() {
        let [before, after] = [&files, &merged].map(|files| files.load_f32(name, &stored.shape).unwrap());
        assert_eq!(before != after, name.contains("q_proj"), "{name}");
    }
    // Experts are no linear layers to others.
    let coded = MergeOptions { quantise: Some(Codes::Bitsandbytes(Coding::Int8)), ..options };
    let coded_out = root.path().join("coded");
    merge(&base, &adapter, &coded_out, coded, &|_, _| ()).unwrap();
    let coded = WeightFiles::open(&coded_out).unwrap();
    let is_coded = |name: &str| coded.tensors()[name].dtype == safetensors::Dtype::I8;
    assert!(is_coded("model.layers.0.self_attn.k_proj.weight") && !is_coded("model.layers.0.mlp.gate.weight"));
    // Of an adapter that was trained on codes, they are decoded like the others.
    let quantisation = Quantisation { coding: Coding::Nf4, nested: false };
    let decoded = MergeOptions { decoded: Some(quantisation), ..options };
    let out = root.path().join("decoded");
    merge(&base, &adapter, &out, decoded, &|_, _| ()).unwrap();
    let merged = WeightFiles::open(&out).unwrap();
    assert_eq!((merged.joined(), merged.num_bytes()), (files.joined(), files.num_bytes()));
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    let [before, after] = [&files, &merged].map(|files| files.load_f32(name, &[24, 64]).unwrap());
    let fill = |first: usize, to: &mut [f32]| to.copy_from_slice(&before[first..first + to.len()]);
    let codes = quantisation.quantise([24, 64], &Device::flex(), fill).unwrap();
    assert!(after == codes.to_f32() && after != before);
}

#[test]
fn other_tensors_with_experts_in_their_names_are_kept() {
    let root = folder_with_joined_experts();
    let path = root.path().join("base/model.safetensors");
    let content = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&content).unwrap();
    let names: Vec<String> = tensors.names().into_iter().map(str::to_owned).collect();
    let (apart, joined): (Vec<_>, Vec<_>) = names.iter().partition(|name| !name.contains("layers.0.mlp.experts"));
    assert_eq!(joined.len(), 2);
    // Of the first layer, the experts are apart.
    let files = WeightFiles::open(&root.path().join("base")).unwrap();
    let expert = |name: &&String| name.contains("layers.0.mlp.experts");
    let parts: Vec<(String, Vec<usize>, Vec<u8>)> = files
        .tensors()
        .iter()
        .filter(|(name, _)| expert(name))
        .map(|(name, stored)| (name.clone(), stored.shape.clone(), files.bytes(stored).into_owned()))
        .collect();
    let whole = apart.iter().map(|name| ((*name).clone(), tensors.tensor(name).unwrap()));
    let views = parts.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    let mixed = safetensors::serialize(whole.chain(views), None).unwrap();
    drop(files);
    std::fs::write(&path, mixed).unwrap();
    merge_in(root.path()).unwrap();
    let [base, merged] = ["base", "out"].map(|name| WeightFiles::open(&root.path().join(name)).unwrap());
    assert_eq!((merged.joined().len(), merged.tensors().len()), (2, base.tensors().len()));
}
