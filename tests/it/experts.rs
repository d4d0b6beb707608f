//! Adapters on experts against autograd's numbers, through files, merged, and resumed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::Device;
use lora_train::config::{LoraConfig, TargetModules};
use lora_train::device::Dtype;
use lora_train::lora::combine::{Combination, CombinationType, MajoritySign};
use lora_train::lora::{AdapterSet, Matrices};
use lora_train::save::export::{
    HostMatrix, MergeOptions, SavedAdapter, adapter_weights, check_adapter, check_written, combine, merge,
    read_adapter, write_adapter, write_combined, write_plain,
};
use lora_train::spec::{ExpertForm, ModelConfig};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::common::families::{write_family, write_model};
use crate::common::{Bench, run, stderr, train};
use crate::golden::{Golden, batch, compare_cases, compare_curve, lora_config, merged, rows, stored, values};

/// Those whose experts PEFT reads one by one, and those of which it has one adapter for all.
pub(crate) const FAMILIES: [&str; 12] = [
    "qwen3_moe", "glm4_moe", "mixtral", "qwen2_moe", "gpt_oss", "gemma4-experts", "granitemoe", "lfm2_moe",
    "qwen3_5_moe", "qwen3_vl_moe", "nemotron_h-latent", "llama4",
];

/// Small models with their golden files.
pub(crate) fn families() -> impl Iterator<Item = (Golden, tempfile::TempDir)> {
    FAMILIES.into_iter().map(|name| {
        let folder = tempfile::tempdir().unwrap();
        write_family(name, folder.path());
        (Golden::open(&format!("experts-{name}"), folder.path().to_owned()), folder)
    })
}

#[test]
fn experts_give_the_logits_losses_gradients_and_loss_curve_of_autograd() {
    for (golden, _folder) in families() {
        compare_cases(&golden, Dtype::F32);
        if golden.json["curve"].is_object() {
            compare_curve(&golden);
        }
    }
}

#[test]
fn adapters_of_experts_go_through_files_and_merged_give_the_same() {
    for (golden, folder) in families() {
        let case = &golden.json["cases"]["experts"];
        let model = golden.model(Dtype::F32);
        let adapters = Golden::adapters(case, &model);
        let (weights, lora) = (adapter_weights(&adapters), lora_config(&case["lora"]));
        let expert = weights.keys().find(|module| module.contains(".experts.2.")).unwrap();
        assert_eq!(weights[expert].a.num_rows, 3);
        let path = folder.path().join("adapter");
        write_adapter(&path, &weights, &lora, "base").unwrap();
        let read = read_adapter(&path).unwrap().named_for(&model.config);
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
fn combined_adapters_of_experts_give_the_sum_of_their_updates() {
    for (golden, folder) in families().filter(|(golden, _)| golden.json["curve"].is_object()) {
        let case = &golden.json["cases"]["experts"];
        let model = golden.model(Dtype::F32);
        let adapters = Golden::adapters(case, &model);
        let (mut weights, lora) = (adapter_weights(&adapters), lora_config(&case["lora"]));
        let paths = ["one", "twice"].map(|name| folder.path().join(name));
        write_adapter(&paths[0], &weights, &lora, "base").unwrap();
        weights.values_mut().for_each(|pair| pair.b.values.iter_mut().for_each(|value| *value *= 2.0));
        write_adapter(&paths[1], &weights, &lora, "base").unwrap();
        // In the form that every server reads, where it has experts one by one.
        let plain = folder.path().join("plain");
        let written = write_plain(&paths[0], &golden.model_dir, "base", &plain);
        let batch = batch(&rows(&golden.json["batch"]));
        if model.config.expert_form() == ExpertForm::Apart {
            assert_eq!(written.unwrap(), lora.r.max(3));
            let read = read_adapter(&plain).unwrap().named_for(&model.config);
            assert!(read.config.rank_pattern.is_empty() && read.config.expert_rank == Some(read.config.r));
            let set = read.into_set(&plain, &model.config, &Device::flex()).unwrap();
            let [expected, found] = [&adapters, &set].map(|set| values(&model.logits(&batch, set)));
            let scale = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5 * scale));
        } else {
            assert!(written.unwrap_err().to_string().contains("experts' adapters are joined in the file"));
        }
        let [one, twice] = paths;
        let kind = CombinationType::Cat;
        let combination =
            Combination { kind, density: 1.0, majority_sign: MajoritySign::default(), svd_rank: None, seed: 0 };
        // Half of the one, and a quarter of its double.
        let combined = combine(&[(one, 0.5), (twice, 0.25)], &combination, &golden.model_dir).unwrap();
        let out = folder.path().join("combined");
        write_combined(&out, &combined, "base").unwrap();
        let read = read_adapter(&out).unwrap().named_for(&model.config);
        // The file's rank is that of experts.
        assert_eq!((read.config.r, read.config.expert_rank), (6, Some(6)));
        let set = read.into_set(&out, &model.config, &Device::flex()).unwrap();
        let [expected, found] = [&adapters, &set].map(|set| values(&model.logits(&batch, set)));
        let scale = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5 * scale, "{worst} of {scale}");
    }
}

/// A file of tensors, by name.
type File = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// An adapter on experts alone, all of one rank; `shared`: one A for gate and up, and one of each outer matrix for all experts.
fn of_experts_alone(golden: &Golden, shared: bool) -> SavedAdapter {
    let case = &golden.json["cases"]["experts"];
    let mut weights = adapter_weights(&Golden::adapters(case, &golden.model(Dtype::F32)));
    weights.retain(|module, _| module.contains(".experts."));
    let like = |module: &str| {
        let (block, rest) = module.rsplit_once(".experts.").unwrap();
        let (expert, name) = rest.split_once('.').unwrap();
        let (expert, gate) =
            (if shared { "0" } else { expert }, if name.starts_with('w') { "w1" } else { "gate_proj" });
        [(expert, gate), ("0", name)].map(|(expert, name)| format!("{block}.experts.{expert}.{name}"))
    };
    let before = weights.clone();
    for (module, pair) in weights.iter_mut() {
        let [gate, first] = like(module);
        if module.ends_with("up_proj") || module.ends_with("w3") || (shared && !is_down(module)) {
            pair.a = before[&gate].a.clone();
        } else if shared {
            pair.b = before[&first].b.clone();
        }
    }
    let names = weights.keys().filter(|module| module.contains(".experts.0."));
    let lora = lora_config(&case["lora"]);
    let config = LoraConfig {
        r: 3,
        lora_alpha: lora.lora_alpha / 4.0 * 3.0,
        expert_rank: Some(3),
        target_modules: TargetModules::Names(names.cloned().collect()),
        ..lora
    };
    SavedAdapter { weights, config, base_model_name_or_path: None }
}

fn is_down(module: &str) -> bool {
    module.ends_with("down_proj") || module.ends_with("w2")
}

/// The matrices of gate, up and down, expert by expert, by what holds the experts.
fn by_layer(saved: &SavedAdapter) -> BTreeMap<String, [Vec<Matrices<HostMatrix>>; 3]> {
    let mut layers: BTreeMap<String, [Vec<Matrices<HostMatrix>>; 3]> = BTreeMap::new();
    for (module, pair) in saved.weights.iter() {
        let part = [&["gate_proj", "w1"], &["up_proj", "w3"], &["down_proj", "w2"]];
        let part = part.iter().position(|names| names.iter().any(|name| module.ends_with(name))).unwrap();
        let experts = format!("{}.experts", module.rsplit_once(".experts.").unwrap().0);
        layers.entry(experts).or_default()[part].push(pair.clone());
    }
    layers
}

/// An A, and the rows of a B.
type AAndRows = (HostMatrix, Vec<Vec<f32>>);

/// The file of PEFT 0.19.1 and later, or, `swapped`, the one in which A and B have each other's places.
fn joined(saved: &SavedAdapter, in_turn: bool, swapped: bool) -> File {
    let mut file = File::new();
    for (experts, [gate, up, down]) in by_layer(saved) {
        let both = gate.iter().zip(&up).map(|(gate, up)| {
            let rows = |matrix: &HostMatrix| matrix.values.chunks(3).map(<[f32]>::to_vec).collect::<Vec<_>>();
            let (gate_rows, up_rows) = (rows(&gate.b), rows(&up.b));
            let b: Vec<Vec<f32>> = if in_turn {
                gate_rows.into_iter().zip(up_rows).flat_map(|(gate, up)| [gate, up]).collect()
            } else {
                [gate_rows, up_rows].concat()
            };
            (gate.a.clone(), b)
        });
        let down = down.iter().map(|down| (down.a.clone(), down.b.values.chunks(3).map(<[f32]>::to_vec).collect()));
        let parts: [(&str, Vec<AAndRows>); 2] = [(".base_layer", both.collect()), ("", down.collect())];
        for (end, parts) in parts {
            let (num_experts, width, num_rows) = (parts.len(), parts[0].0.num_columns, parts[0].1.len());
            // The first has expert by expert its ranks below each other, the second expert beside expert, rank by rank.
            let mut first = Vec::new();
            let [wide, high] = if swapped { [num_rows, width] } else { [width, num_rows] };
            for (a, b) in &parts {
                for rank in 0..3 {
                    let of_a = a.values[rank * width..][..width].to_vec();
                    let of_b = b.iter().map(|row| row[rank]).collect();
                    first.extend(if swapped { of_b } else { of_a });
                }
            }
            let mut second = vec![0.0; high * 3 * num_experts];
            for (expert, (a, b)) in parts.iter().enumerate() {
                for row in 0..high {
                    for rank in 0..3 {
                        let value = if swapped { a.values[rank * width + row] } else { b[row][rank] };
                        second[(row * 3 + rank) * num_experts + expert] = value;
                    }
                }
            }
            let named = |letter: &str| format!("base_model.model.{experts}{end}.lora_{letter}.weight");
            file.insert(named("A"), (vec![3 * num_experts, wide], first));
            file.insert(named("B"), (vec![high, 3 * num_experts], second));
        }
    }
    file
}

/// The file of Tinker, in which the outer matrices are one for all experts.
fn outer(saved: &SavedAdapter) -> File {
    let mut file = File::new();
    for (experts, parts) in by_layer(saved) {
        for (name, parts) in ["w1", "w3", "w2"].into_iter().zip(parts) {
            for (letter, is_one) in [("A", name != "w2"), ("B", name == "w2")] {
                let matrices: Vec<_> = parts.iter().map(|pair| if letter == "A" { &pair.a } else { &pair.b }).collect();
                let matrices = if is_one { &matrices[..1] } else { &matrices };
                let shape = vec![matrices.len(), matrices[0].num_rows, matrices[0].num_columns];
                let values = matrices.iter().flat_map(|matrix| matrix.values.clone()).collect();
                file.insert(format!("base_model.model.{experts}.{name}.lora_{letter}"), (shape, values));
            }
        }
    }
    file
}

/// The adapter as another program has written it.
fn written(folder: &Path, file: &File, config: &serde_json::Value) -> SavedAdapter {
    fs::create_dir_all(folder).unwrap();
    let bytes: Vec<Vec<u8>> =
        file.values().map(|(_, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let views = file.iter().zip(&bytes).map(|((name, (shape, _)), bytes)| {
        (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("adapter_model.safetensors")).unwrap();
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    read_adapter(folder).unwrap()
}

#[test]
fn a_pair_whose_shapes_do_not_tell_is_read_as_the_version_of_peft_says() {
    let folder = tempfile::tempdir().unwrap();
    write_family("qwen3_moe", folder.path());
    let golden = Golden::open("experts-qwen3_moe", folder.path().to_owned());
    let mut saved = of_experts_alone(&golden, false);
    let mut json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("config.json")).unwrap()).unwrap();
    json["moe_intermediate_size"] = 32.into();
    fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    let model = ModelConfig::from_file(&folder.path().join("config.json")).unwrap();
    // Gate and up are as high together as they are wide.
    for (_, pair) in saved.weights.iter_mut().filter(|(module, _)| !is_down(module)) {
        pair.b.num_rows = 32;
        pair.b.values.truncate(32 * 3);
    }
    for (version, swapped) in [("0.18.1", true), ("0.19.0", true), ("0.19.1", false), ("0.21.2", false)] {
        let inner = joined(&saved, false, swapped).into_iter().filter(|(name, _)| name.contains("base_layer"));
        let alone = inner.map(|(name, tensor)| (name.replace(".base_layer", ""), tensor)).collect();
        let config = serde_json::json!({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 3, "target_modules": [],
                                        "peft_version": version, "target_parameters": ["experts.gate_up_proj"]});
        let read = written(&folder.path().join("adapter"), &alone, &config).named_for(&model);
        check_adapter(Path::new("a"), &read, &model).unwrap();
        assert!(!read.weights.is_empty());
        assert!(read.weights.iter().all(|(module, pair)| saved.weights[module] == *pair), "{version}");
    }
}

#[test]
fn adapters_of_all_experts_are_read_in_the_forms_of_every_version_of_peft_and_of_tinker() {
    for name in ["qwen3_moe", "mixtral", "gpt_oss", "gemma4-experts", "lfm2_moe", "llama4"] {
        let folder = tempfile::tempdir().unwrap();
        write_family(name, folder.path());
        let golden = Golden::open(&format!("experts-{name}"), folder.path().to_owned());
        let model = ModelConfig::from_file(&folder.path().join("config.json")).unwrap();
        let (saved, shared) = (of_experts_alone(&golden, false), of_experts_alone(&golden, true));
        let alpha = saved.config.lora_alpha;
        let config = |version: &str| {
            serde_json::json!({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": alpha, "peft_version": version,
                               "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]})
        };
        let in_turn = name == "gpt_oss";
        // In transformers 5, Mixtral's feed-forward layer has another name.
        let renamed = |file: File| -> File {
            file.into_iter().map(|(name, tensor)| (name.replace("block_sparse_moe", "mlp"), tensor)).collect()
        };
        let usual = ["0.21.2", if in_turn { "0.19.0" } else { "0.18.1" }];
        // PEFT takes Llama 4's for turned ones since 0.19.
        let [straight, swapped] = if name == "llama4" { ["0.18.1", "0.21.2"] } else { usual };
        let files = [
            (renamed(joined(&saved, in_turn, false)), straight, &saved),
            (renamed(joined(&saved, in_turn, true)), swapped, &saved),
            (outer(&shared), "0.21.2", &shared),
        ];
        for (file, version, expected) in files {
            let read = written(&folder.path().join("adapter"), &file, &config(version)).named_for(&model);
            assert_eq!(read.weights.adapters, expected.weights.adapters, "{name}, {version}");
            assert_eq!(read.config.expert_rank, Some(3));
            let [read, expected] =
                [read, expected.clone()].map(|saved| check_adapter(Path::new("a"), &saved, &model).unwrap());
            assert_eq!(read.shapes, expected.shapes, "{name}, {version}");
        }
        // What an adapter was trained with is no matter when it is read.
        let mut with_dropout = config("0.21.2");
        with_dropout["lora_dropout"] = 0.1.into();
        let read = written(&folder.path().join("adapter"), &joined(&saved, in_turn, false), &with_dropout);
        check_adapter(Path::new("a"), &read.named_for(&model), &model).unwrap();
        // Gate and up without down have no module around them.
        let inner = joined(&saved, in_turn, false).into_iter().filter(|(name, _)| name.contains("base_layer"));
        let alone = inner.map(|(name, tensor)| (name.replace(".base_layer", ""), tensor)).collect();
        let read = written(&folder.path().join("adapter"), &alone, &config("0.21.2")).named_for(&model);
        check_adapter(Path::new("a"), &read, &model).unwrap();
        assert!(!read.weights.is_empty() && read.weights.keys().all(|module| !is_down(module)));
        assert!(read.weights.iter().all(|(module, pair)| saved.weights[module] == *pair));
        // Ranks and scales of their own become one of all: here gate and up have twice the scale of down, which has one rank less.
        let mut file = joined(&saved, in_turn, false);
        let num_experts = saved.weights.len() / by_layer(&saved).len() / 3;
        for (name, (shape, values)) in file.iter_mut().filter(|(name, _)| !name.contains("base_layer")) {
            if name.ends_with("lora_A.weight") {
                *values = values.chunks(3 * shape[1]).flat_map(|ranks| ranks[..2 * shape[1]].to_vec()).collect();
                shape[0] = 2 * num_experts;
            } else {
                *values = values.chunks(3 * num_experts).flat_map(|row| row[..2 * num_experts].to_vec()).collect();
                shape[1] = 2 * num_experts;
            }
        }
        let mut config = config("0.21.2");
        (config["r"], config["lora_alpha"]) = (2.into(), (alpha / 1.5).into());
        config["rank_pattern"] = serde_json::json!({"experts.gate_up_proj": 3});
        config["alpha_pattern"] = serde_json::json!({"experts.gate_up_proj": 2.0 * alpha});
        let read = written(&folder.path().join("adapter"), &file, &config).named_for(&model);
        check_adapter(Path::new("a"), &read, &model).unwrap();
        for (module, pair) in read.weights.iter() {
            let expected = &saved.weights[module];
            let (factor, ranks) = if is_down(module) { (1.0, 2) } else { (2.0, 3) };
            for (index, value) in pair.b.values.iter().enumerate() {
                let wanted = if index % 3 < ranks { factor * expected.b.values[index] } else { 0.0 };
                assert!((value - wanted).abs() <= 1e-6 * wanted.abs(), "{module}: {value}, expected {wanted}");
            }
            assert_eq!(pair.a.values[..ranks * pair.a.num_columns], expected.a.values[..ranks * pair.a.num_columns]);
        }
    }
}

#[test]
fn names_of_pefts_parameters_are_those_of_experts_alone() {
    for name in ["glm4_moe", "lfm2_moe", "gemma4-experts"] {
        let folder = tempfile::tempdir().unwrap();
        write_family(name, folder.path());
        let model = ModelConfig::from_file(&folder.path().join("config.json")).unwrap();
        let names = ["q_proj", "experts.gate_up_proj", "experts.down_proj"].map(str::to_owned);
        let lora = LoraConfig {
            expert_rank: Some(2),
            target_modules: TargetModules::Names(names.into()),
            ..LoraConfig::default()
        };
        let selection = lora.select(&model).unwrap();
        let modules: Vec<String> = selection.adapted_modules(&model).map(|(module, ..)| module).collect();
        assert!(modules.iter().any(|module| module.contains(".experts.1.")), "{name}");
        assert!(modules.iter().all(|module| module.contains(".experts.") || module.ends_with("q_proj")), "{name}");
        check_written(&lora, &model, false).unwrap();
        let frozen = LoraConfig { expert_rank: None, ..lora };
        let refused = frozen.select(&model).unwrap_err()[0].to_string();
        assert!(refused.contains("names only experts, which have adapters with `lora.expert_rank`"), "{refused}");
    }
}

#[test]
fn experts_that_are_codes_become_numbers_where_an_adapter_changes_them() {
    let folder = tempfile::tempdir().unwrap();
    let [base, adapter, out] = ["base", "adapter", "merged"].map(|name| folder.path().join(name));
    fs::create_dir(&base).unwrap();
    let text =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gpt_oss/config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["intermediate_size"] = 64.into();
    write_model(&json.to_string(), &base);
    json["quantization_config"] = serde_json::json!({"quant_method": "mxfp4"});
    fs::write(base.join("config.json"), json.to_string()).unwrap();
    let mut tensors: BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, bytes) in stored(&base) {
        let (num_experts, rows) = (6, if name.ends_with("gate_up_proj") { 128 } else { 64 });
        if name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj") {
            // The model's numbers serve as codes of four bits.
            let codes = bytes[..num_experts * rows * 32].to_vec();
            let scales = codes.iter().map(|code| 120 + code % 4).take(num_experts * rows * 2).collect();
            tensors.insert(format!("{name}_blocks"), (safetensors::Dtype::U8, vec![num_experts, rows, 2, 16], codes));
            tensors.insert(format!("{name}_scales"), (safetensors::Dtype::U8, vec![num_experts, rows, 2], scales));
        } else {
            let content = fs::read(base.join("model.safetensors")).unwrap();
            let shape = SafeTensors::deserialize(&content).unwrap().tensor(&name).unwrap().shape().to_vec();
            tensors.insert(name, (safetensors::Dtype::F32, shape, bytes));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, (kind, shape, bytes))| (name, TensorView::new(*kind, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &base.join("model.safetensors")).unwrap();

    let mut golden = Golden::open("experts-gpt_oss", base);
    let case = &golden.json["cases"]["experts"];
    let model = golden.model(Dtype::F32);
    let adapters = Golden::adapters(case, &model);
    write_adapter(&adapter, &adapter_weights(&adapters), &lora_config(&case["lora"]), "base").unwrap();
    let options = MergeOptions { dtype: Some(Dtype::F32), ..MergeOptions::default() };
    merge(&golden.model_dir, &adapter, &out, options, &|_, _| ()).unwrap();
    golden.model_dir = out;
    assert!(stored(&golden.model_dir).keys().all(|name| !name.ends_with("_blocks") && !name.ends_with("_scales")));
    let merged = golden.model(Dtype::F32);
    assert_eq!(merged.config.quantisation, None);
    let batch = batch(&[((1..30).collect(), vec![0; 29])]);
    let [expected, without] = [&adapters, &AdapterSet::none(3)].map(|set| values(&model.logits(&batch, set)));
    let found = values(&merged.logits(&batch, &AdapterSet::none(3)));
    let scale = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let difference = |a: &[f32]| a.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / scale;
    assert!(
        difference(&found) < 1e-5 && difference(&without) > 1e-3,
        "{} {}",
        difference(&found),
        difference(&without)
    );
}

#[test]
fn experts_are_trained_resumed_to_the_bit_merged_and_asked_also_on_a_quantised_base() {
    ["glm4_moe", "gpt_oss"].into_iter().for_each(trained_resumed_merged_and_asked);
}

/// Of a family whose experts' adapters are one by one in a file, and of one whose are joined.
fn trained_resumed_merged_and_asked(family: &str) {
    let bench = Bench::new();
    let model = bench.path("model");
    fs::create_dir(&model).unwrap();
    write_family(family, &model);
    let path = format!("model.path=\"{}\"", model.display());
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
    let alone = bench.path("alone.gguf");
    for more in [&[out][..], &[file, "--dtype", "f32"], &[alone.to_str().unwrap(), "--adapter-only"]] {
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
    let check = |more: &str, reason: &str| {
        refused(&[&["check", recipe.to_str().unwrap()], &settings[..], &["--set", more]].concat(), reason);
    };
    check("lora.use_dora=true", "adapters on experts have no `use_dora`");
    check("lora.target_modules=[\"gate_proj\", \"q_proj\"]", "experts' gate and up are one in PEFT");
    check("lora.target_modules=[\"q_proj\"]", "no layer of experts is among");
}
