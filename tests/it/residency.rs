//! Frozen weights that stay on disk: the numbers are those of weights in memory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use lora_train::ops::quantised::NF4;
use lora_train::spec::ModelConfig;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json as object};

use crate::common::families::{bits, formula};
use crate::common::{Bench, json, lora_train, metrics, quickstart_model, run, stderr, train};

const MAPPED: &str = "model.residency=\"mapped\"";

/// Adapter, and the losses of steps and evaluations.
fn numbers(run: &Path) -> (Vec<u8>, Vec<String>) {
    let losses = metrics(run).iter().map(|line| format!("{} {}", line["loss"], line["eval_loss"])).collect();
    (fs::read(run.join("adapter/adapter_model.safetensors")).unwrap(), losses)
}

/// Trains on `base` in memory and from disk. What is held in another form than the files is written into the cache once.
fn assert_same_from_disk(base: &Path, forms: &[&[&str]], needs_copy: impl Fn(&[&str]) -> bool) {
    let model = format!("model.path={:?}", base.display().to_string());
    for form in forms {
        let bench = Bench::new();
        let cache = bench.path("cache");
        let (needs_copy, form) = (needs_copy(form), [&[&*model], *form].concat());
        let settings = [
            "train.max_steps=4",
            "train.gradient_accumulation_steps=2",
            "checkpoint.save_steps=2",
            "eval.eval_steps=2",
            "eval.generate=[\"Once\"]",
        ];
        let settings = settings.iter().chain(&form).flat_map(|setting| ["--set", *setting]).collect::<Vec<_>>();
        let trains = |output: &str, more: &[&str]| {
            let recipe = bench.recipe(output, "");
            let args = [&[recipe.to_str().unwrap()], &settings[..], more].concat();
            let ended = lora_train(&args).env("LORA_TRAIN_CACHE", &cache).output().unwrap();
            assert!(ended.status.success(), "{form:?}: {}", stderr(&ended));
            (numbers(&bench.path(output)), stderr(&ended))
        };
        let (resident, _) = trains("resident", &[]);
        assert!(!cache.join("weights").exists());
        let (mapped, said) = trains("mapped", &["--set", MAPPED, "--set", "train.layered_accumulation=true"]);
        assert_eq!(resident, mapped, "{form:?}");
        assert!(said.contains(", on disk"), "{said}");
        let kept = || fs::read_dir(cache.join("weights")).map_or(0, Iterator::count);
        assert_eq!((kept(), said.contains("; used from ")), (usize::from(needs_copy), needs_copy), "{form:?}: {said}");
        // A run may continue with the other. A damaged copy is made again.
        for copy in fs::read_dir(cache.join("weights")).into_iter().flatten() {
            fs::File::options().write(true).open(copy.unwrap().path()).unwrap().set_len(1000).unwrap();
        }
        let checkpoint = bench.path("resident/checkpoints/step-000002");
        let ((adapter, _), _) = trains("resumed", &["--set", MAPPED, "--resume", checkpoint.to_str().unwrap()]);
        assert!(adapter == resident.0, "{form:?}: resumed");
        assert_eq!(kept(), usize::from(needs_copy), "{form:?}");
    }
}

#[test]
fn adapters_over_weights_on_disk_are_those_over_weights_in_memory_bit_for_bit() {
    let forms: [&[&str]; 4] = [
        &["train.precision=\"bf16\""],
        &["train.precision=\"f32\""],
        &["train.precision=\"bf16\"", "model.quantization=\"int8\""],
        &["train.precision=\"f32\"", "model.quantization=\"nf4\"", "model.double_quantization=true"],
    ];
    // The model's files hold bf16.
    assert_same_from_disk(&quickstart_model(), &forms, |form| form != ["train.precision=\"bf16\""]);
}

/// A tensor of a linear layer: the end of its name, type, shape and bytes.
type Part = (&'static str, Dtype, Vec<usize>, Vec<u8>);

/// `quantization_config`, and the tensors of a linear layer `[out_features, in_features]`.
type Coded = (Value, fn([usize; 2]) -> Vec<Part>);

fn codes(len: usize) -> Vec<u8> {
    // No code of an 8-bit float is NaN.
    bits("codes").map(|bits| (bits >> 56) as u8 & 0xfe).take(len).collect()
}

fn scales(len: usize, most: f64) -> Vec<f32> {
    formula("scales", most / 2.0).map(|x| x + most as f32 / 2.0).take(len).collect()
}

fn f32s(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn nf4([out, width]: [usize; 2]) -> Vec<Part> {
    let (blocks, outer) = (out * width / 64, (out * width).div_ceil(64 * 256));
    let state = object!({"quant_type": "nf4", "blocksize": 64, "shape": [out, width], "nested_blocksize": 256,
                       "nested_offset": 0.037});
    let state = state.to_string().into_bytes();
    vec![
        (".weight", Dtype::U8, vec![out * width / 2, 1], codes(out * width / 2)),
        (".weight.absmax", Dtype::U8, vec![blocks], codes(blocks)),
        (".weight.quant_map", Dtype::F32, vec![16], f32s(&NF4)),
        (".weight.nested_absmax", Dtype::F32, vec![outer], f32s(&scales(outer, 0.01))),
        (".weight.nested_quant_map", Dtype::F32, vec![256], f32s(&formula("table", 1.0).take(256).collect::<Vec<_>>())),
        (".weight.quant_state.bitsandbytes__nf4", Dtype::U8, vec![state.len()], state),
    ]
}

fn int8([out, width]: [usize; 2]) -> Vec<Part> {
    let scb = f32s(&scales(out, 0.1));
    vec![(".weight", Dtype::I8, vec![out, width], codes(out * width)), (".SCB", Dtype::F32, vec![out], scb)]
}

/// Words of codes in that shape, groups of 32 inputs.
fn words([out, width]: [usize; 2], packed: [usize; 2]) -> Vec<Part> {
    let scales = scales(width / 32 * out, 0.01).into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect();
    vec![
        (".qweight", Dtype::I32, packed.to_vec(), codes(out * width / 2)),
        (".qzeros", Dtype::I32, vec![width / 32, out / 8], codes(width / 32 * out / 2)),
        (".scales", Dtype::F16, vec![width / 32, out], scales),
    ]
}

fn gptq([out, width]: [usize; 2]) -> Vec<Part> {
    words([out, width], [width / 8, out])
}

fn ordered_gptq(shape: [usize; 2]) -> Vec<Part> {
    let groups = (0..shape[1]).flat_map(|input| ((input % (shape[1] / 32)) as u32).to_le_bytes()).collect();
    [gptq(shape), vec![(".g_idx", Dtype::I32, vec![shape[1]], groups)]].concat()
}

fn awq([out, width]: [usize; 2]) -> Vec<Part> {
    words([out, width], [width, out / 8])
}

fn fp8([out, width]: [usize; 2]) -> Vec<Part> {
    let tiles = [out.div_ceil(48), width.div_ceil(64)];
    let scales = f32s(&scales(tiles[0] * tiles[1], 3e-4));
    let weight = (".weight", Dtype::F8_E4M3, vec![out, width], codes(out * width));
    vec![weight, (".weight_scale_inv", Dtype::F32, tiles.to_vec(), scales)]
}

fn mxfp4([out, width]: [usize; 2]) -> Vec<Part> {
    // Powers of two from 2^-23 to 2^-8.
    let scales = codes(out * width / 32).into_iter().map(|code| 104 + code / 16).collect();
    vec![
        (".weight_packed", Dtype::U8, vec![out, width / 2], codes(out * width / 2)),
        (".weight_scale", Dtype::U8, vec![out, width / 32], scales),
    ]
}

/// The quickstart's model with arbitrary codes.
fn write_coded(folder: &Path, (quantisation, parts): &Coded) {
    fs::create_dir(folder).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(quickstart_model().join(file), folder.join(file)).unwrap();
    }
    let whole = fs::read(quickstart_model().join("model.safetensors")).unwrap();
    let mut tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, view) in SafeTensors::deserialize(&whole).unwrap().tensors() {
        match (name.strip_suffix("_proj.weight"), view.shape()) {
            (Some(module), &[out, width]) => {
                let named = |(end, dtype, shape, bytes)| (format!("{module}_proj{end}"), (dtype, shape, bytes));
                tensors.extend(parts([out, width]).into_iter().map(named));
            }
            _ => drop(tensors.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))),
        }
    }
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    let mut config = json(&quickstart_model().join("config.json"));
    config["quantization_config"] = quantisation.clone();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn so_are_those_over_codes_of_every_format_and_blocks_of_gguf() {
    let words = |method: &str, is_ordered: bool| object!({"quant_method": method, "bits": 4, "group_size": 32, "desc_act": is_ordered});
    let scheme = object!({"group_0": {"weights": {"num_bits": 4, "group_size": 32}}});
    let compressed =
        object!({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": scheme});
    let bases: [(&str, Coded); 7] = [
        (
            "nf4",
            (object!({"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true}), nf4),
        ),
        ("int8", (object!({"load_in_8bit": true}), int8)),
        ("gptq", (words("gptq", false), gptq)),
        ("ordered", (words("gptq", true), ordered_gptq)),
        ("awq", (words("awq", false), awq)),
        ("fp8", (object!({"quant_method": "fp8", "weight_block_size": [48, 64]}), fp8)),
        ("mxfp4", (compressed, mxfp4)),
    ];
    let bench = Bench::new();
    for (name, coded) in bases {
        write_coded(&bench.path(name), &coded);
        assert_same_from_disk(&bench.path(name), &[&["train.precision=\"bf16\""]], |_| true);
    }
    train(&bench.recipe("run", ""), &["--set", "train.max_steps=2"]);
    let gguf = bench.path("base.gguf");
    let merged =
        run(&["merge", bench.path("run").to_str().unwrap(), "--dtype", "q8_0", "--out", gguf.to_str().unwrap()]);
    assert!(merged.status.success(), "{}", stderr(&merged));
    assert_same_from_disk(&gguf, &[&["train.precision=\"f32\""]], |_| true);
}

#[test]
fn the_cache_folder_that_cannot_be_written_and_keys_that_contradict_are_reported() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let recipe = recipe.to_str().unwrap();
    fs::write(bench.path("file"), "").unwrap();
    let args = [recipe, "--set", "train.max_steps=2", "--set", MAPPED];
    let ended = lora_train(&args).env("LORA_TRAIN_CACHE", bench.path("file")).output().unwrap();
    let said = stderr(&ended);
    assert_eq!(ended.status.code(), Some(2), "{said}");
    assert!(said.contains("cannot write ") && said.contains("LORA_TRAIN_CACHE"), "{said}");

    let random = run(&["check", recipe, "--set", MAPPED, "--set", "model.init=\"random\""]);
    assert!(stderr(&random).contains("random weights have no file to stay in"), "{}", stderr(&random));
    // Only a build for macOS can have Metal.
    for (command, device, others) in [("plan", "4090", 0), ("check", "metal", 1)] {
        let refused = run(&[command, recipe, "--device", device, "--set", MAPPED]);
        let said = stderr(&refused);
        assert_eq!((refused.status.code(), said.matches("error: ").count()), (Some(2), 1 + others), "{said}");
        let gpu = if device == "4090" { "RTX-4090-24GB" } else { device };
        let sentence = format!("--set {MAPPED}: `model.residency` = \"mapped\" is for the CPU, and {gpu} computes");
        assert!(said.contains(&sentence), "{said}");
    }
}

#[test]
fn host_memory_is_the_memory_of_the_cpu() {
    let bench = Bench::new();
    let trains = |output: &str, more: &[&str]| {
        let recipe = bench.recipe(output, "");
        let ended = train(&recipe, &[&["--set", "train.max_steps=2"], more].concat());
        (numbers(&bench.path(output)), stderr(&ended))
    };
    let (resident, _) = trains("resident", &[]);
    let (host, said) = trains("host", &["--set", "model.residency=\"host\""]);
    assert_eq!(resident, host);
    assert!(said.contains("`model.residency` = \"host\" changes nothing here"), "{said}");
}

#[test]
fn a_plan_for_a_gpu_says_what_blocks_in_host_memory_take_and_what_their_way_takes() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let plan = |more: &[&str]| {
        let args = ["plan", recipe.to_str().unwrap(), "--device", "H100-80GB", "--set", "model.residency=\"host\""];
        String::from_utf8(run(&[&args, more].concat()).stdout).unwrap()
    };
    let text = plan(&[]);
    assert!(text.contains(" of weights to the GPU in a step: ") && text.contains("assumed for the bus"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&plan(&["--json"])).unwrap();
    // Of four blocks of 245,760 numbers, three forward and three back.
    assert_eq!(json["moved_bytes_per_step"].as_u64().unwrap() % (6 * 245_760), 0, "{json}");
}

/// The quickstart's model with more and wider blocks, of arbitrary weights.
fn write_deep(folder: &Path, num_blocks: usize) {
    fs::create_dir(folder).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(quickstart_model().join(file), folder.join(file)).unwrap();
    }
    let mut config = json(&quickstart_model().join("config.json"));
    for (key, value) in [("num_hidden_layers", num_blocks), ("hidden_size", 512), ("intermediate_size", 2048)] {
        config[key] = value.into();
    }
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
    let bytes: Vec<u8> =
        formula("weights", 0.05).take(2048 * 512).flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
    let tensors = config.expected_tensors();
    let view = |shape: &Vec<usize>| {
        let len: usize = shape.iter().product();
        TensorView::new(Dtype::BF16, shape.clone(), &bytes[..2 * len]).unwrap()
    };
    let views = tensors.iter().map(|(name, shape)| (name, view(shape)));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn of_a_model_on_disk_little_is_in_memory() {
    // 24 blocks of 6 MiB.
    let bench = Bench::new();
    let model = bench.path("model");
    write_deep(&model, 24);
    let settings = |residency: &str| {
        [
            format!("model.path={:?}", model.display().to_string()),
            format!("model.residency=\"{residency}\""),
            "train.precision=\"bf16\"".to_owned(),
            "train.max_steps=2".to_owned(),
        ]
    };
    let peak = |residency: &str| {
        let recipe = bench.recipe(residency, "");
        let settings = settings(residency);
        train(&recipe, &settings.iter().flat_map(|setting| ["--set", setting]).collect::<Vec<_>>());
        json(&bench.path(residency).join("summary.json"))["peak_host_memory_bytes"].as_u64().unwrap()
    };
    let [resident, mapped] = ["memory", "mapped"].map(peak);
    assert!(resident > mapped + (100 << 20), "{resident} in memory, {mapped} on disk");
}
