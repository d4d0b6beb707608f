//! Frozen weights that stay on disk: the numbers are those of weights in memory.

use std::fs;
use std::path::Path;

use half::bf16;
use lora_train::spec::ModelConfig;
use safetensors::tensor::{Dtype, TensorView};

use crate::common::families::formula;
use crate::common::{Bench, json, lora_train, metrics, quickstart_model, run, stderr, train};

const MAPPED: &str = "model.residency=\"mapped\"";

/// Adapter, and the losses of steps and evaluations.
fn numbers(run: &Path) -> (Vec<u8>, Vec<String>) {
    let losses = metrics(run).iter().map(|line| format!("{} {}", line["loss"], line["eval_loss"])).collect();
    (fs::read(run.join("adapter/adapter_model.safetensors")).unwrap(), losses)
}

#[test]
fn adapters_over_weights_on_disk_are_those_over_weights_in_memory_bit_for_bit() {
    // The model's files hold bf16. What is held otherwise is written into the cache folder once.
    let forms: [&[&str]; 4] = [
        &["train.precision=\"bf16\""],
        &["train.precision=\"f32\""],
        &["train.precision=\"bf16\"", "model.quantization=\"int8\""],
        &["train.precision=\"f32\"", "model.quantization=\"nf4\"", "model.double_quantization=true"],
    ];
    for form in forms {
        let bench = Bench::new();
        let cache = bench.path("cache");
        let settings =
            ["train.max_steps=6", "checkpoint.save_steps=3", "eval.eval_steps=3", "eval.generate=[\"Once\"]"];
        let settings = settings.iter().chain(form).flat_map(|setting| ["--set", *setting]).collect::<Vec<_>>();
        let trains = |output: &str, more: &[&str]| {
            let recipe = bench.recipe(output, "");
            let args = [&[recipe.to_str().unwrap()], &settings[..], more].concat();
            let ended = lora_train(&args).env("LORA_TRAIN_CACHE", &cache).output().unwrap();
            assert!(ended.status.success(), "{form:?}: {}", stderr(&ended));
            (numbers(&bench.path(output)), stderr(&ended))
        };
        let (resident, _) = trains("resident", &[]);
        assert!(!cache.join("weights").exists());
        let (mapped, said) = trains("mapped", &["--set", MAPPED]);
        assert_eq!(resident, mapped, "{form:?}");
        assert!(said.contains(", on disk"), "{said}");
        let kept = || fs::read_dir(cache.join("weights")).map_or(0, Iterator::count);
        let needs_copy = form.len() > 1 || form[0].contains("f32");
        assert_eq!((kept(), said.contains("; used from ")), (usize::from(needs_copy), needs_copy), "{form:?}: {said}");
        // A run may continue with the other. A damaged copy is made again.
        for copy in fs::read_dir(cache.join("weights")).into_iter().flatten() {
            fs::File::options().write(true).open(copy.unwrap().path()).unwrap().set_len(1000).unwrap();
        }
        let checkpoint = bench.path("resident/checkpoints/step-000003");
        let ((adapter, _), _) = trains("resumed", &["--set", MAPPED, "--resume", checkpoint.to_str().unwrap()]);
        assert!(adapter == resident.0, "{form:?}: resumed");
        assert_eq!(kept(), usize::from(needs_copy), "{form:?}");
    }
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
