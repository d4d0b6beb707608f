//! Logits, losses, gradients and a loss curve compared with transformers and PEFT, in `f32` on the CPU.
//!
//! `scripts/make_golden.py` makes the golden files and describes their content at its top. stories15M and SmolLM2-135M
//! must be in the folder that `LORA_TRAIN_MODELS` names (made by `scripts/get_models.py`). Their tests are ignored
//! unless requested, as in `.ci/run`.

#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "small numbers of tests")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::families::{FAMILIES, bits, formula, write_family};
use crate::common::{run, stderr};
use burn::tensor::{Device, Tensor};
use lora_train::config::{
    GradientCheckpointing, InitLoraWeights, LoraConfig, LrScheduler, OptimizerConfig, SchedulerConfig, TargetModules,
    TrainConfig,
};
use lora_train::data::batch::{Batch, Document, Target};
use lora_train::device::Dtype;
use lora_train::lora::{AdapterSet, FullTensor, TensorId};
use lora_train::model::Model;
use lora_train::model::decode::{NextTokens, Sequence, next_logits};
use lora_train::model::load;
use lora_train::model::weights::{WeightFiles, Weights};
use lora_train::ops::cuda::without_kernels;
use lora_train::ops::host;
use lora_train::ops::linear::Matrix;
use lora_train::save::export::{MergeOptions, adapter_set, adapter_weights, merge, read_adapter, write_adapter};
use lora_train::schema::ByName;
use lora_train::spec::{Block, ExpertForm, ModelConfig, name_alone};
use lora_train::train::schedule::Schedule;
use lora_train::train::step::TrainStep;
use safetensors::SafeTensors;
use serde_json::Value;

fn matrix(name: &str, shape: [usize; 2], bound: f64, device: &Device) -> Tensor<2> {
    host::tensor(formula(name, bound).take(shape[0] * shape[1]).collect(), shape, device)
}

/// So many projections of `values` on sign vectors derived from `name`.
fn projections(name: &str, values: &[f32], num: usize) -> Vec<f64> {
    let project = |j: usize| {
        let name = format!("{name}#{j}");
        let signs = bits(&name).map(|bits| if bits & 1 == 1 { 1.0 } else { -1.0 });
        values.iter().zip(signs).map(|(&value, sign)| f64::from(value) * sign).sum()
    };
    (0..num).map(project).collect()
}

pub(crate) fn values(tensor: &Tensor<2>) -> Vec<f32> {
    tensor.to_data().try_to_vec().unwrap()
}

pub(crate) fn numbers<T>(value: &Value, convert: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().unwrap().iter().map(convert).collect()
}

/// A golden folder with the model behind it.
pub(crate) struct Golden {
    pub(crate) json: Value,
    tensors: Vec<u8>,
    pub(crate) model_dir: PathBuf,
}

impl Golden {
    pub(crate) fn open(name: &str, model_dir: PathBuf) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let json = serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
        Self { json, tensors: std::fs::read(folder.join("golden.safetensors")).unwrap(), model_dir }
    }

    /// A model from the folder of real models.
    pub(crate) fn real(name: &str) -> Self {
        let models = std::env::var("LORA_TRAIN_MODELS").expect("LORA_TRAIN_MODELS names the folder of real models");
        Self::open(name, Path::new(&models).join(name))
    }

    /// A small model of a family, made in `folder` with the script's formula.
    pub(crate) fn family(name: &str, folder: &Path) -> Self {
        write_family(name, folder);
        Self::open(name, folder.to_owned())
    }

    pub(crate) fn model(&self, storage: Dtype) -> Model {
        let config = ModelConfig::from_file(&self.model_dir.join("config.json")).unwrap();
        let weights = Weights::Files(WeightFiles::open(&self.model_dir).unwrap());
        load::load(&config, &weights, storage, Dtype::F32, &Device::flex()).unwrap()
    }

    pub(crate) fn f32s(&self, name: &str) -> Vec<f32> {
        let tensors = SafeTensors::deserialize(&self.tensors).unwrap();
        let bytes = tensors.tensor(name).unwrap().data();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn columns(&self, case: &str) -> Vec<usize> {
        let tensors = SafeTensors::deserialize(&self.tensors).unwrap();
        let bytes = tensors.tensor(&format!("{case}.columns")).unwrap().data();
        let column = |b: &[u8]| usize::try_from(i32::from_le_bytes(b.try_into().unwrap())).unwrap();
        bytes.chunks_exact(4).map(column).collect()
    }

    /// The adapters of a case or of the curve, made with the script's formula.
    pub(crate) fn adapters(case: &Value, model: &Model) -> AdapterSet {
        let config = &model.config;
        if case["lora"].is_null() {
            return AdapterSet::none(config.num_layers());
        }
        let lora = lora_config(&case["lora"]);
        let selection = lora.select(config).unwrap();
        let mut set = AdapterSet::new(&model.config, &selection, InitLoraWeights::Kaiming, 0.0, 0, &model.device());
        let b_bound = case["b_bound"].as_f64().unwrap();
        model.start_magnitudes(&mut set);
        for adapter in set.iter_mut() {
            let alone = name_alone(&adapter.module).unwrap_or_else(|| adapter.module.clone());
            let key = |letter: char| tensor_name(&alone, &format!("lora_{letter}"));
            let (a, b) = (adapter.matrices.a.dims(), adapter.matrices.b.dims());
            #[expect(clippy::cast_precision_loss, reason = "a width")]
            let a_bound = 1.0 / (a[1] as f64).sqrt();
            adapter.matrices.a = matrix(&key('A'), a, a_bound, &model.device());
            adapter.matrices.b = matrix(&key('B'), b, b_bound, &model.device());
            if let Some(magnitude) = &mut adapter.matrices.magnitude {
                let name = tensor_name(&alone, MAGNITUDE);
                let factor = matrix(&name, magnitude.dims(), b_bound, &model.device()) * 10.0 + 1.0;
                *magnitude = magnitude.clone() * factor;
            }
        }
        let score = |bound| matrix("base_model.model.score.weight", [1, config.hidden_size], bound, &model.device());
        lora.trainable_token_indices.iter().for_each(|ids| model.start_tokens(&mut set, ids));
        model.start_modules(&mut set, selection.modules().map(|(module, _)| module));
        for (full, values) in set.full.iter_mut() {
            // A vector's formula is that of its row.
            let factor = matrix(&full_name(full), values.dims(), b_bound, &model.device()) * 10.0 + 1.0;
            *values = values.clone() * factor;
        }
        case["score_bound"].as_f64().iter().for_each(|&bound| set.full.start(FullTensor::Score, || score(bound)));
        set
    }
}

const MAGNITUDE: &str = "lora_magnitude_vector";

/// The name of a module's tensor in PEFT's files.
fn tensor_name(module: &str, matrix: &str) -> String {
    let end = if matrix == MAGNITUDE { "" } else { ".weight" };
    format!("base_model.model.{module}.{matrix}{end}")
}

pub(crate) fn lora_config(lora: &Value) -> LoraConfig {
    let target_modules = match &lora["target_modules"] {
        Value::String(name) if name == "all-linear" => TargetModules::AllLinear,
        names => TargetModules::Names(numbers(names, |name| name.as_str().unwrap().to_owned())),
    };
    let index = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let indices = |key: &str| lora[key].is_array().then(|| numbers(&lora[key], index));
    LoraConfig {
        r: usize::try_from(lora["r"].as_u64().unwrap()).unwrap(),
        lora_alpha: lora["lora_alpha"].as_f64().unwrap(),
        target_modules,
        use_rslora: lora["use_rslora"].as_bool().unwrap(),
        use_dora: lora["use_dora"].as_bool().unwrap_or_default(),
        expert_rank: lora["expert_rank"].is_u64().then(|| index(&lora["expert_rank"])),
        rank_pattern: by_name(&lora["rank_pattern"], |r| r as usize),
        alpha_pattern: by_name(&lora["alpha_pattern"], |alpha| alpha),
        trainable_token_indices: indices("trainable_token_indices"),
        layers_to_transform: indices("layers_to_transform"),
        modules_to_save: lora["modules_to_save"]
            .is_array()
            .then(|| numbers(&lora["modules_to_save"], |name| name.as_str().unwrap().to_owned())),
        ..LoraConfig::default()
    }
}

fn by_name<T>(table: &Value, convert: impl Fn(f64) -> T) -> ByName<T> {
    let entries = table.as_object().into_iter().flatten();
    entries.map(|(name, value)| (name.clone(), convert(value.as_f64().unwrap()))).collect()
}

/// Each token's mask says whether it is a target.
pub(crate) fn batch(rows: &[(Vec<u32>, Vec<u64>)]) -> Batch {
    let mut batch = Batch { row_lengths: rows.iter().map(|(ids, _)| ids.len()).collect(), ..Batch::default() };
    for (ids, mask) in rows {
        let start = batch.input_ids.len();
        batch.documents.push(Document { start, len: ids.len() });
        let predicted = (1..ids.len()).filter(|&i| mask[i] == 1);
        batch.targets.extend(predicted.map(|i| Target { position: start + i - 1, token: ids[i] }));
        batch.input_ids.extend(ids);
    }
    batch
}

pub(crate) fn rows(value: &Value) -> Vec<(Vec<u32>, Vec<u64>)> {
    let ids = numbers(&value["rows"], |row| numbers(row, |id| u32::try_from(id.as_u64().unwrap()).unwrap()));
    let masks = numbers(&value["loss_masks"], |row| numbers(row, |bit| bit.as_u64().unwrap()));
    ids.into_iter().zip(masks).collect()
}

/// The relative error.
pub(crate) fn assert_near(found: f64, expected: f64, tolerance: f64, what: &str) -> f64 {
    let error = (found - expected).abs() / expected.abs();
    assert!(error <= tolerance, "{what}: {found}, expected {expected}: relative error {error:.2e} > {tolerance:.0e}");
    error
}

/// The largest relative errors of logits, loss and gradients.
#[derive(Clone, Copy, Default)]
pub(crate) struct Worst {
    logits: f64,
    loss: f64,
    gradients: f64,
}

/// Checks logits within 1e-4 of their norm, loss within 1e-5, every gradient within 1e-3 of its norm.
pub(crate) fn compare_cases(golden: &Golden, storage: Dtype) -> Worst {
    let mut worst = Worst::default();
    let model = golden.model(storage);
    let batch = batch(&rows(&golden.json["batch"]));
    for (case, expected) in golden.json["cases"].as_object().unwrap() {
        let adapters = Golden::adapters(expected, &model);
        worst.logits = worst.logits.max(compare_logits(golden, case, &model, &adapters, &batch));
        for gradient_checkpointing in
            [GradientCheckpointing::On, GradientCheckpointing::Blocks(usize::MAX), GradientCheckpointing::Off]
        {
            let train = TrainConfig { gradient_checkpointing, ..TrainConfig::default() };
            let mut step =
                TrainStep::new(model.clone(), adapters.clone(), &train, &OptimizerConfig::default(), None, 0);
            step.forward_backward(&batch);
            if !expected["lora"].is_null() {
                #[expect(clippy::cast_precision_loss, reason = "a few hundred tokens")]
                let num_targets = batch.num_target_tokens() as f64;
                let error = compare_gradients(&step, num_targets, &expected["gradients"]);
                worst.gradients = worst.gradients.max(error);
            }
            let outcome = step.update(0.0);
            let error = assert_near(outcome.loss, expected["loss"].as_f64().unwrap(), 1e-5, &format!("{case} loss"));
            worst.loss = worst.loss.max(error);
            if expected["lora"].is_null() {
                continue;
            }
            assert_near(outcome.grad_norm, expected["grad_norm"].as_f64().unwrap(), 1e-3, &format!("{case} norm"));
        }
    }
    worst
}

/// The name of a tensor that is trained in full in PEFT's files.
fn full_name(full: FullTensor) -> String {
    format!("base_model.model.{}", full.name())
}

/// The name of a tensor that is trained in PEFT's files.
pub(crate) fn name_in_file(adapters: &AdapterSet, id: TensorId) -> String {
    match id {
        TensorId::Adapter(layer, site, matrix) => tensor_name(&adapters.blocks[layer][&site].module, matrix),
        TensorId::Full(full) => full_name(full),
    }
}

/// The largest relative error.
pub(crate) fn compare_gradients(step: &TrainStep, divisor: f64, expected: &Value) -> f64 {
    let (adapters, grads) = (step.trained_adapters(), step.grads());
    let found: Vec<_> = grads.iter().map(|(id, grad)| (name_in_file(adapters, id), values(grad))).collect();
    assert_eq!(expected.as_object().unwrap().len(), found.len());
    let errors = found.iter().map(|(key, grad)| compare_projections(key, grad, divisor, &expected[key], 1e-3));
    errors.fold(0.0, f64::max)
}

/// The mean square of a difference's projections estimates its squared norm without bias.
pub(crate) fn compare_projections(key: &str, found: &[f32], divisor: f64, expected: &Value, tolerance: f64) -> f64 {
    let expected_projections = numbers(&expected["projections"], |p| p.as_f64().unwrap());
    let num = expected_projections.len();
    let difference: f64 = projections(key, found, num)
        .iter()
        .zip(&expected_projections)
        .map(|(found, expected)| (found / divisor - expected).powi(2))
        .sum::<f64>()
        / num as f64;
    let norm = expected["norm"].as_f64().unwrap();
    let error = difference.sqrt() / norm;
    assert!(error < tolerance, "{key}: relative error {error:.2e} against {tolerance:.0e} of norm {norm}");
    error
}

pub(crate) fn compare_logits(golden: &Golden, case: &str, model: &Model, adapters: &AdapterSet, rows: &Batch) -> f64 {
    let mut worst = 0.0_f64;
    let logits = model.logits(rows, adapters);
    let [tokens, _] = logits.dims();
    let all = values(&logits);
    let columns = golden.columns(case);
    let expected = golden.f32s(&format!("{case}.logits"));
    let norms = golden.f32s(&format!("{case}.logits_norm"));
    assert_eq!(expected.len(), tokens * columns.len());
    for (token, row) in all.chunks_exact(all.len() / tokens).enumerate() {
        let norm = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        assert_near(norm, f64::from(norms[token]), 1e-4, &format!("{case}: norm of the logits of token {token}"));
        let scale = row.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        for (&column, &expected) in columns.iter().zip(&expected[token * columns.len()..]) {
            let error = (row[column] - expected).abs() / scale;
            assert!(error < 1e-4, "{case}: logit {column} of token {token}: {} against {expected}", row[column]);
            worst = worst.max(error.into());
        }
    }
    worst
}

/// Twenty steps of two micro-batches each: every loss and norm within 1e-4, and the final adapters.
pub(crate) fn compare_curve(golden: &Golden) {
    let curve = &golden.json["curve"];
    let settings = &curve["settings"];
    let number = |key: &str| settings[key].as_f64().unwrap();
    let model = golden.model(Dtype::F32);
    let adapters = Golden::adapters(curve, &model);
    let optimizer = OptimizerConfig {
        learning_rate: number("learning_rate"),
        weight_decay: number("weight_decay"),
        eps: number("eps"),
        ..OptimizerConfig::default()
    };
    let train = TrainConfig { max_grad_norm: number("max_grad_norm"), ..TrainConfig::default() };
    assert_eq!(settings["lr_scheduler"], "cosine");
    let scheduler = SchedulerConfig {
        lr_scheduler: LrScheduler::Cosine,
        warmup_steps: settings["warmup_steps"].as_u64(),
        ..SchedulerConfig::default()
    };
    let schedule = Schedule::new(&scheduler, optimizer.learning_rate, settings["steps"].as_u64().unwrap());
    let rows = rows(curve);
    let mut step = TrainStep::new(model, adapters, &train, &optimizer, None, 0);
    for (number, expected) in (1..).zip(curve["steps_done"].as_array().unwrap()) {
        for micro_batch in expected["micro_batches"].as_array().unwrap() {
            let picked = numbers(micro_batch, |row| rows[usize::try_from(row.as_u64().unwrap()).unwrap()].clone());
            step.forward_backward(&batch(&picked));
        }
        let outcome = step.update(schedule.learning_rate(number));
        assert_near(outcome.loss, expected["loss"].as_f64().unwrap(), 1e-4, &format!("loss of step {number}"));
        assert_near(
            outcome.grad_norm,
            expected["grad_norm"].as_f64().unwrap(),
            1e-3,
            &format!("norm of step {number}"),
        );
    }
    let final_b = curve["final_b"].as_object().unwrap();
    for adapter in step.adapters().iter() {
        let key = format!("base_model.model.{}.lora_B.weight", adapter.module);
        // AdamW divides by the root of the second moment: near a zero gradient, rounding decides the sign.
        compare_projections(&key, &values(&adapter.matrices.b), 1.0, &final_b[&key], 5e-3);
        if let Some(magnitude) = &adapter.matrices.magnitude {
            let key = tensor_name(&adapter.module, MAGNITUDE);
            compare_projections(&key, &values(magnitude), 1.0, &curve["final_magnitudes"][&key], 1e-5);
        }
    }
    for (full, tensor) in step.adapters().full.iter() {
        compare_projections(&full_name(full), &values(tensor), 1.0, &curve["final_whole"][full_name(full)], 1e-4);
    }
}

pub(crate) fn quickstart() -> Golden {
    Golden::open("quickstart", Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/model"))
}

#[test]
fn the_quickstart_model_gives_the_logits_losses_and_gradients_of_peft() {
    compare_cases(&quickstart(), Dtype::F32);
}

#[test]
fn the_quickstart_model_learns_along_the_loss_curve_of_peft() {
    compare_curve(&quickstart());
}

/// Logits stored by `scripts/check_peft.py`: token ids by row, some columns, and the logits in them.
struct StoredLogits {
    rows: Vec<Vec<u32>>,
    columns: Vec<usize>,
    logits: Vec<f32>,
}

impl StoredLogits {
    fn open(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let integers = |name: &str| -> Vec<u32> {
            let tensor = tensors.tensor(name).unwrap();
            let width = tensor.data().len() / tensor.shape().iter().product::<usize>();
            tensor.data().chunks_exact(width).map(|b| u32::from_le_bytes(b[..4].try_into().unwrap())).collect()
        };
        let length = tensors.tensor("input_ids").unwrap().shape()[1];
        let bytes = tensors.tensor("logits").unwrap().data();
        Self {
            rows: integers("input_ids").chunks_exact(length).map(<[u32]>::to_vec).collect(),
            columns: integers("columns").into_iter().map(|column| column as usize).collect(),
            logits: bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        }
    }
}

#[test]
fn an_adapter_that_peft_trained_gives_pefts_logits() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quickstart/peft");
    let model = quickstart().model(Dtype::F32);
    let saved = read_adapter(&folder.join("adapter")).unwrap();
    let selection = saved.config.select(&model.config).unwrap();
    let adapters =
        adapter_set(&folder, saved.weights, (&selection, None), &model.config, 0.0, &model.device()).unwrap();
    let stored = StoredLogits::open(&folder.join("logits.safetensors"));
    let all: Vec<_> = stored.rows.iter().map(|ids| (ids.clone(), vec![0; ids.len()])).collect();
    let logits = values(&model.logits(&batch(&all), &adapters));
    let largest = stored.logits.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let tokens = stored.rows.iter().map(Vec::len).sum::<usize>();
    for (row, expected) in
        logits.chunks_exact(logits.len() / tokens).zip(stored.logits.chunks_exact(stored.columns.len()))
    {
        for (&column, expected) in stored.columns.iter().zip(expected) {
            assert!((row[column] - expected).abs() < 1e-4 * largest, "{} against {expected}", row[column]);
        }
    }
}

#[test]
#[ignore = "needs LORA_TRAIN_PYTHON, a Python with peft (scripts/setup_python.sh)"]
fn peft_loads_our_adapter_and_gives_our_logits() {
    let python = std::env::var("LORA_TRAIN_PYTHON").expect("LORA_TRAIN_PYTHON names a Python with peft");
    // The installed transformers has no EXAONE 3 yet.
    let families: Vec<_> = families().filter(|(name, ..)| *name != "exaone").collect();
    let of_modules: Vec<_> = crate::modules::families().collect();
    let [quickstart, dora] = [(quickstart(), "rslora"), (crate::dora::golden(), "patterns")];
    let others = [quickstart, dora, (crate::token_rows::golden(), "all"), (crate::modules::golden(), "all")];
    let others = others.iter().map(|(golden, case)| (golden, *case));
    let others = others.chain(of_modules.iter().map(|(golden, _folder)| (golden, "all")));
    let of_experts: Vec<_> = crate::experts::families().collect();
    let others = others.chain(of_experts.iter().map(|(golden, _folder)| (golden, "experts")));
    let of_family = |golden: &Golden| if golden.json["cases"]["rslora"].is_null() { "all_linear" } else { "rslora" };
    let cases = families.iter().map(|(_, golden, _folder)| (golden, of_family(golden))).chain(others);
    let written: Vec<_> = cases.map(|(golden, case)| (golden, written_for_peft(golden, case))).collect();
    // Together: Python takes most of its time to start.
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/check_peft.py");
    let mut command = std::process::Command::new(python);
    command.arg(script).arg("load");
    for (golden, folder) in &written {
        command.arg(&golden.model_dir).args(["adapter", "logits.safetensors"].map(|name| folder.path().join(name)));
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
    assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), written.len());
    for ((name, ..), (golden, folder)) in families.iter().zip(&written) {
        reads_what_peft_saved(name, golden, folder.path());
    }
    for ((golden, folder), name) in written.iter().rev().zip(crate::experts::FAMILIES.into_iter().rev()) {
        reads_what_peft_saved(name, golden, folder.path());
    }
}

/// PEFT's file of the adapter gives our logits, and our merged weights are PEFT's.
pub(crate) fn reads_what_peft_saved(name: &str, golden: &Golden, folder: &Path) {
    let (model, ids) = (golden.model(Dtype::F32), (1..40).map(|i| i * 31 % 1344).collect::<Vec<u32>>());
    let logits_of = |adapter: &str| {
        let saved = read_adapter(&folder.join(adapter)).unwrap().named_for(&model.config);
        let selection = saved.config.select(&model.config).unwrap();
        let adapters =
            adapter_set(folder, saved.weights, (&selection, None), &model.config, 0.0, &model.device()).unwrap();
        values(&model.logits(&batch(&[(ids.clone(), vec![0; ids.len()])]), &adapters))
    };
    assert_eq!(logits_of("adapter"), logits_of("peft/adapter"), "{name}");
    let out = folder.join("merged");
    merge(&golden.model_dir, &folder.join("adapter"), &out, MergeOptions::default(), &|_, _| ()).unwrap();
    let content = std::fs::read(folder.join("peft/merged.safetensors")).unwrap();
    let (theirs, ours) = (SafeTensors::deserialize(&content).unwrap(), stored(&out));
    let before = stored(&golden.model_dir);
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let mut num_changed = 0;
    for (tensor, view) in theirs.iter() {
        let Some(found) = ours.get(tensor) else { continue };
        num_changed += usize::from(before[tensor] != *found);
        let (found, expected) = (floats(found), floats(view.data()));
        let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= 1e-6 * largest, "{name}, {tensor}: {worst} of {largest}");
    }
    assert!(num_changed > 0, "{name}: nothing was merged");
}

/// The adapter of a case, and our logits with it.
pub(crate) fn written_for_peft(golden: &Golden, case: &str) -> tempfile::TempDir {
    let model = golden.model(Dtype::F32);
    let case = &golden.json["cases"][case];
    let adapters = Golden::adapters(case, &model);
    let folder = tempfile::tempdir().unwrap();
    let (base, adapter) = (golden.model_dir.to_str().unwrap(), folder.path().join("adapter"));
    write_adapter(&adapter, &adapter_weights(&adapters), &lora_config(&case["lora"]), base).unwrap();
    let ids: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 1344).collect();
    let logits = values(&model.logits(&batch(&[(ids.clone(), vec![0; 40])]), &adapters));
    let ids: Vec<u8> = ids.iter().flat_map(|id| id.cast_signed().to_le_bytes()).collect();
    let width = logits.len() / 40;
    let logits: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    let view = |dtype, shape: Vec<usize>, bytes| safetensors::tensor::TensorView::new(dtype, shape, bytes).unwrap();
    let tensors = [
        ("input_ids", view(safetensors::Dtype::I32, vec![1, 40], &ids)),
        ("logits", view(safetensors::Dtype::F32, vec![1, 40, width], &logits)),
    ];
    safetensors::serialize_to_file(tensors, None, &folder.path().join("logits.safetensors")).unwrap();
    folder
}

#[test]
fn every_family_gives_the_logits_losses_gradients_and_loss_curve_of_peft() {
    let mut rows = String::new();
    for name in FAMILIES {
        let folder = tempfile::tempdir().unwrap();
        let golden = Golden::family(name, folder.path());
        let Worst { logits, loss, gradients } = compare_cases(&golden, Dtype::F32);
        compare_curve(&golden);
        let config = golden.model(Dtype::F32).config;
        let shape = shape(&config);
        let columns =
            [&[&*shape][..], &forms(&config).each_ref().map(|form| &**form), &[real(name)]].concat().join(" | ");
        rows += &format!("| `{name}` | {columns} | {logits:.0e} | {loss:.0e} | {gradients:.0e} |\n");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let start = page.find(DIFFERENCES).unwrap() + DIFFERENCES.len();
    let end = start + page[start..].find("\n\n").map_or(page.len() - start, |end| end + 1);
    if std::env::var_os("LORA_TRAIN_WRITE_DOCS").is_some() {
        std::fs::write(&path, [&page[..start], &rows, &page[end..]].concat()).unwrap();
        return;
    }
    // The last digits depend on the processor.
    let names = |rows: &str| rows.lines().map(|row| row.rsplitn(5, '|').last().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&page[start..end]), names(&rows), "LORA_TRAIN_WRITE_DOCS=1 writes the table of docs/models.md");
}

/// The head of the table in docs/models.md that the test above writes.
const DIFFERENCES: &str = "| folder | what it has | adapted experts | GGUF | on NVIDIA GPUs | real weights | logits | loss | gradients \
                           |\n|---|---|---|---|---|---|---|---|---|\n";

/// The real models of a family that were trained here.
fn real(name: &str) -> &'static str {
    match name {
        "llama-with-biases" => "stories15M, SmolLM2 135M",
        "gemma3" => "Gemma 3 270M",
        _ => "-",
    }
}

/// How files have adapters on experts, what GGUF files are called, and what has no kernels on NVIDIA GPUs.
fn forms(config: &ModelConfig) -> [String; 3] {
    let of_experts = match config.expert_form() {
        ExpertForm::None => "-",
        ExpertForm::Apart => "one by one",
        ExpertForm::Joined | ExpertForm::InTurn | ExpertForm::Ungated | ExpertForm::Turned => "joined",
    };
    let gguf = config.gguf_architecture().map_or("-".to_owned(), |name| format!("`{name}`"));
    let without = without_kernels(config);
    let on_gpus = if without.is_empty() { "kernels".to_owned() } else { format!("without: {}", without.join(", ")) };
    [of_experts.to_owned(), gguf, on_gpus]
}

/// What a model has, in a few words.
fn shape(config: &ModelConfig) -> String {
    let (attentions, blocks) = (|| config.blocks.iter().filter_map(Block::attention), &config.blocks);
    let heads = attentions().next().unwrap().heads;
    let mut parts = vec![
        format!("{} x {}", blocks.len(), config.hidden_size),
        format!("heads {}/{} of {}", heads.num_heads, heads.num_kv_heads, heads.head_dim),
        if config.tie_word_embeddings { "tied" } else { "untied" }.to_owned(),
        format!("{} tokens", config.vocab_size),
    ];
    parts.extend(attentions().find_map(|it| it.heads.window).map(|window| format!("windows of {window}")));
    parts.extend(attentions().find_map(|it| it.heads.chunk).map(|chunk| format!("chunks of {chunk}")));
    parts.extend(
        blocks.iter().find_map(Block::mixture).map(|it| format!("{}/{} experts", it.num_per_token, it.experts.len())),
    );
    parts.extend(blocks.iter().find_map(Block::delta_net).map(|_| "linear attention".to_owned()));
    parts.extend(blocks.iter().find_map(Block::state_space).map(|_| "state spaces".to_owned()));
    parts.extend(blocks.iter().find_map(Block::short_conv).map(|_| "convolutions".to_owned()));
    let scaling = config.ropes.iter().find_map(|rope| rope.scaling.as_ref());
    parts.extend(
        scaling.map(|scaling| serde_json::to_value(scaling).unwrap()["rope_type"].as_str().unwrap().to_owned()),
    );
    parts.join(", ")
}

/// The small models of every family, each with its golden files.
fn families() -> impl Iterator<Item = (&'static str, Golden, tempfile::TempDir)> {
    FAMILIES.into_iter().map(|name| {
        let folder = tempfile::tempdir().unwrap();
        (name, Golden::family(name, folder.path()), folder)
    })
}

#[test]
fn every_family_continues_a_text_as_transformers_does() {
    for (name, golden, _folder) in families() {
        let model = golden.model(Dtype::F32);
        let adapters = Golden::adapters(&golden.json["cases"]["all_linear"], &model);
        let ids = |key: &str| numbers(&golden.json["greedy"][key], |id| u32::try_from(id.as_u64().unwrap()).unwrap());
        let (mut next, mut found) = (ids("prompt"), Vec::new());
        let mut sequence = Sequence::new(&model);
        while found.len() < ids("text").len() {
            let part = NextTokens { sequence: &mut sequence, adapters: &adapters, token_ids: &next, num_logits: 1 };
            let logits = values(&next_logits(&model, &mut [part]));
            let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            next = vec![likeliest as u32];
            found.push(likeliest as u32);
        }
        assert_eq!(found, ids("text"), "{name}");
    }
}

/// The model with the adapter of a case merged into it, in the folder `out`.
pub(crate) fn merged(golden: &Golden, case: &str, out: &Path) -> Golden {
    let case = &golden.json["cases"][case];
    let adapter = out.with_extension("adapter");
    let adapters = Golden::adapters(case, &golden.model(Dtype::F32));
    write_adapter(&adapter, &adapter_weights(&adapters), &lora_config(&case["lora"]), "base").unwrap();
    merge(&golden.model_dir, &adapter, out, MergeOptions::default(), &|_, _| ()).unwrap();
    Golden { json: golden.json.clone(), tensors: golden.tensors.clone(), model_dir: out.to_owned() }
}

#[test]
fn a_merged_model_of_every_family_gives_the_logits_of_its_adapter() {
    for (_, golden, folder) in families() {
        let golden = merged(&golden, "all_linear", &folder.path().join("merged"));
        let model = golden.model(Dtype::F32);
        let none = AdapterSet::none(model.config.num_layers());
        compare_logits(&golden, "all_linear", &model, &none, &batch(&rows(&golden.json["batch"])));
    }
}

/// Names and bytes of the tensors of a model's file.
pub(crate) fn stored(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let content = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&content).unwrap();
    tensors.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec())).collect()
}

#[test]
fn a_multimodal_model_keeps_its_other_tensors_and_its_names_when_it_is_merged() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Golden::family("gemma3-multimodal", folder.path());
    // As before transformers 4.52, and with a tensor of the vision tower.
    let content = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&content).unwrap();
    let old_name = |name: &str| name.replace("model.language_model.", "language_model.model.");
    let vision = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2, 1, 2, 2], &[7; 32]).unwrap();
    let views = tensors.iter().map(|(name, view)| (old_name(name), view));
    let views = views.chain([("vision_tower.embeddings.patch_embedding.weight".to_owned(), vision)]);
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    compare_cases(&golden, Dtype::F32);
    let merged = merged(&golden, "all_linear", &folder.path().join("merged"));
    let [before, after] = [folder.path(), &merged.model_dir].map(stored);
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    for (name, bytes) in &before {
        assert_eq!(*bytes == after[name], !name.ends_with("_proj.weight"), "{name}");
    }
    let model = merged.model(Dtype::F32);
    let none = AdapterSet::none(model.config.num_layers());
    compare_logits(&merged, "all_linear", &model, &none, &batch(&rows(&merged.json["batch"])));
}

/// A model of the shape of a folder in `FAMILIES` whose tensors have the names that `named` gives them, and one more where it sees.
fn renamed(name: &str, folder: &Path, named: impl Fn(&str) -> String) -> Golden {
    let golden = Golden::family(name, folder);
    let content = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&content).unwrap();
    let vision = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2, 2], &[7; 16]).unwrap();
    let views = tensors.iter().map(|(name, view)| (named(name), view));
    let sees = golden.model(Dtype::F32).config.nesting.is_some();
    let views = views.chain(sees.then(|| (named("model.visual.merger.weight"), vision)));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    golden
}

#[test]
fn names_of_the_files_of_the_hub_stay_when_a_multimodal_model_is_merged() {
    let flat: fn(&str) -> String =
        |name| name.replace("model.language_model.", "model.").replace("model.visual.", "visual.");
    let inside: fn(&str) -> String = |name| match name.strip_prefix("model.language_model.") {
        Some(rest) => format!("language_model.model.{rest}"),
        None => name.replace("lm_head", "language_model.lm_head").replace("model.visual.", "vision_tower."),
    };
    let hunyuan: fn(&str) -> String = |name| {
        let name = name.replace(".mlp.gate.e_score_correction_bias", ".mlp.expert_bias");
        name.replace(".mlp.gate.", ".mlp.router.gate.").replace(".shared_experts.", ".shared_mlp.")
    };
    let exaone_moe: fn(&str) -> String = |name| name.replace(".mlp.gate.e_score", ".mlp.e_score");
    let exaone: fn(&str) -> String = |name| {
        let Some(rest) = name.strip_prefix("model.") else { return name.to_owned() };
        let names = [
            ("embed_tokens", "wte"),
            ("layers", "h"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
            ("o_proj", "out_proj"),
            ("self_attn", "attn.attention"),
            ("gate_proj", "c_fc_0"),
            ("up_proj", "c_fc_1"),
            ("down_proj", "c_proj"),
        ];
        let name = names.into_iter().fold(rest.to_owned(), |name, (ours, theirs)| name.replace(ours, theirs));
        format!("transformer.{}", if name == "norm.weight" { "ln_f.weight" } else { &name })
    };
    let inside_and_flat = [("qwen2_vl", flat), ("paddleocr_vl", flat), ("llava", inside), ("internvl", inside)];
    for (family, named) in
        inside_and_flat.into_iter().chain([("hy_v3", hunyuan), ("exaone_moe", exaone_moe), ("exaone", exaone)])
    {
        let folder = tempfile::tempdir().unwrap();
        let golden = renamed(family, folder.path(), named);
        compare_cases(&golden, Dtype::F32);
        let merged = merged(&golden, "all_linear", &folder.path().join("merged"));
        let [before, after] = [folder.path(), &merged.model_dir].map(stored);
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "{family}");
        let num_changed = before.iter().filter(|(name, bytes)| **bytes != after[*name]).count();
        let num_layers = golden.model(Dtype::F32).config.num_layers();
        assert_eq!(num_changed, 7 * num_layers, "{family}");
    }
}

/// The base that bitsandbytes has quantised in `tests/golden/NAME`.
fn quantised(name: &str) -> Golden {
    Golden::open(name, Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name))
}

#[test]
fn a_base_in_codes_gives_the_logits_losses_and_gradients_of_peft_and_bitsandbytes() {
    for name in ["bitsandbytes-nf4", "bitsandbytes-int8"] {
        compare_cases(&quantised(name), Dtype::F32);
    }
}

#[test]
fn an_adapter_merged_into_a_base_in_codes_gives_the_logits_of_peft_and_bitsandbytes() {
    for name in ["bitsandbytes-nf4", "bitsandbytes-int8"] {
        let golden = quantised(name);
        let case = &golden.json["cases"]["all_linear"];
        let folder = tempfile::tempdir().unwrap();
        let [adapter, merged] = ["adapter", "merged"].map(|name| folder.path().join(name));
        let adapters = Golden::adapters(case, &golden.model(Dtype::F32));
        write_adapter(&adapter, &adapter_weights(&adapters), &lora_config(&case["lora"]), "base").unwrap();
        let options = MergeOptions { dtype: Some(Dtype::F32), ..MergeOptions::default() };
        let [model, folder] = [&golden.model_dir, &adapter].map(|path| path.to_str().unwrap());
        let args = ["merge", "--model", model, "--adapter", folder, "--out", merged.to_str().unwrap(), "--original"];
        let refused = run(&args);
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains("--original, but the base is stored as"), "{}", stderr(&refused));
        merge(&golden.model_dir, &adapter, &merged, options, &|_, _| ()).unwrap();
        let golden = Golden { model_dir: merged, ..golden };
        let model = golden.model(Dtype::F32);
        assert_eq!(model.config.quantisation, None, "{name}");
        let none = AdapterSet::none(model.config.num_layers());
        compare_logits(&golden, "all_linear", &model, &none, &batch(&rows(&golden.json["batch"])));
    }
}

#[test]
fn a_base_in_codes_gives_the_gradients_of_the_decoded_base_to_the_bit() {
    for (name, num_whole) in [("bitsandbytes-nf4", 1), ("bitsandbytes-int8", 0)] {
        let golden = quantised(name);
        let coded = golden.model(Dtype::F32);
        let mut dense = coded.clone();
        let mut whole = 0;
        for weight in dense.blocks.iter_mut().flat_map(|block| &mut block.linears) {
            whole += usize::from(matches!(weight.values, Matrix::Dense(_)));
            weight.values = Matrix::Dense(weight.values.dense().into_owned());
        }
        assert_eq!(whole, num_whole, "{name}");
        let batch = batch(&rows(&golden.json["batch"]));
        let [coded, dense] = [coded, dense].map(|model| {
            let adapters = Golden::adapters(&golden.json["cases"]["all_linear"], &model);
            let mut step =
                TrainStep::new(model, adapters, &TrainConfig::default(), &OptimizerConfig::default(), None, 0);
            step.forward_backward(&batch);
            let grads: Vec<_> = step.grads().iter().map(|(_, grad)| values(grad)).collect();
            grads
        });
        assert!(coded == dense, "{name}");
    }
}

#[test]
#[ignore = "needs stories15M in the folder LORA_TRAIN_MODELS"]
fn stories15m_gives_the_logits_losses_and_gradients_of_peft() {
    compare_cases(&Golden::real("stories15M"), Dtype::F32);
}

#[test]
#[ignore = "needs stories15M in the folder LORA_TRAIN_MODELS"]
fn stories15m_learns_along_the_loss_curve_of_peft() {
    compare_curve(&Golden::real("stories15M"));
}

#[test]
#[ignore = "needs smollm2-135m in the folder LORA_TRAIN_MODELS"]
fn smollm2_gives_the_logits_losses_and_gradients_of_peft_with_its_base_in_f32_or_bf16() {
    // The file is in bf16, so bf16 storage loses nothing.
    let golden = Golden::real("smollm2-135m");
    compare_cases(&golden, Dtype::F32);
    compare_cases(&golden, Dtype::Bf16);
}

#[test]
fn rotary_tables_are_those_of_transformers_also_beyond_8192_and_with_scaling() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rope");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
    let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let f32s = |name: &str| -> Vec<f32> {
        let bytes = tensors.tensor(name).unwrap().data();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let positions = numbers(&json["positions"], |p| usize::try_from(p.as_u64().unwrap()).unwrap());
    assert!(positions.iter().any(|&p| p > 8192));
    let shape = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/tiny.json");
    let shape: Value = serde_json::from_str(&std::fs::read_to_string(shape).unwrap()).unwrap();
    for (name, case) in json["cases"].as_object().unwrap() {
        let mut config = shape.clone();
        for (key, value) in case.as_object().unwrap() {
            config[key] = value.clone();
        }
        let config = ModelConfig::from_json(&config.to_string()).unwrap();
        let reach = config.ropes[0].reach(positions.iter().max().unwrap() + 1);
        for (found, expected) in
            config.ropes[0].inverse_frequencies(reach).iter().zip(f32s(&format!("{name}.inv_freq")))
        {
            assert!(
                (found - expected).abs() <= 2e-7 * expected.abs(),
                "{name}: frequency {found}, expected {expected}"
            );
        }
        let table = config.ropes[0].table(positions.iter().max().unwrap() + 1, reach);
        let (cos, sin) = (f32s(&format!("{name}.cos")), f32s(&format!("{name}.sin")));
        let half = cos.len() / positions.len();
        for (row, &position) in positions.iter().enumerate() {
            for i in 0..half {
                let (found_cos, found_sin) = table.at(position, i);
                let (expected_cos, expected_sin) = (cos[row * half + i], sin[row * half + i]);
                // An f32 angle near 100,000 radians is 0.004 wide: better agreement needs frequencies equal to the last
                // bit.
                let tolerance = 1e-6 + 2.4e-7 * position as f32;
                assert!((found_cos - expected_cos).abs() < tolerance, "{name}: cos at {position}, {i}");
                assert!((found_sin - expected_sin).abs() < tolerance, "{name}: sin at {position}, {i}");
            }
        }
    }
}
