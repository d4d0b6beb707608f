//! Optimizers, averages and noise compared with torch, transformers, bitsandbytes, PEFT and schedule-free, and resumed.

use std::fs;
use std::path::Path;

use lora_train::config::{OptimizerConfig, OptimizerName, SchedulerConfig, TrainConfig};
use lora_train::device::Dtype;
use lora_train::schema::Choice as _;
use lora_train::train::schedule::Schedule;
use lora_train::train::step::TrainStep;
use serde_json::Value;

use crate::common::{Bench, train};
use crate::golden::{Golden, assert_near, batch, compare_projections, numbers, quickstart, rows, values};

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/optimizers/golden.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn optimizer(settings: &Value) -> OptimizerConfig {
    let number = |key: &str| settings[key].as_f64().unwrap();
    let of_word = |(word, _): &&(&str, OptimizerName)| settings["name"] == **word;
    OptimizerConfig {
        name: OptimizerName::NAMES.iter().find(of_word).unwrap().1,
        learning_rate: number("learning_rate"),
        weight_decay: number("weight_decay"),
        betas: numbers(&settings["betas"], |beta| beta.as_f64().unwrap()).try_into().unwrap(),
        eps: number("eps"),
        momentum: settings["momentum"].as_f64(),
        ema_decay: settings["ema_decay"].as_f64(),
    }
}

/// Twenty steps as `the_quickstart_model_learns_along_the_loss_curve_of_peft` takes them: every loss within 1e-4, and the
/// adapter afterwards.
#[test]
fn every_optimizer_learns_along_its_reference_s_curve_to_the_same_adapter() {
    let golden = golden();
    let rows = rows(&golden);
    let model = quickstart().model(Dtype::F32);
    for (name, curve) in golden["curves"].as_object().unwrap() {
        let settings = &curve["settings"];
        let optimizer = optimizer(settings);
        let scheduler =
            SchedulerConfig { warmup_steps: settings["warmup_steps"].as_u64(), ..SchedulerConfig::default() };
        let schedule = Schedule::new(&scheduler, optimizer.learning_rate, settings["steps"].as_u64().unwrap());
        let ratio = settings["loraplus_lr_ratio"].as_f64();
        let adapters = Golden::adapters(curve, &model);
        let mut step = TrainStep::new(model.clone(), adapters, &TrainConfig::default(), &optimizer, ratio, 0);
        for (number, expected) in (1..).zip(curve["steps_done"].as_array().unwrap()) {
            for micro_batch in expected["micro_batches"].as_array().unwrap() {
                let picked = numbers(micro_batch, |row| rows[usize::try_from(row.as_u64().unwrap()).unwrap()].clone());
                step.forward_backward(&batch(&picked));
            }
            let outcome = step.update(schedule.learning_rate(number));
            assert_near(
                outcome.loss,
                expected["loss"].as_f64().unwrap(),
                1e-4,
                &format!("{name}: loss of step {number}"),
            );
        }
        // Where a momentum is near zero, rounding decides the sign that Lion takes, and the code of eight bits.
        let tolerance = if ["lion", "adamw_8bit"].contains(&&**name) { 2e-2 } else { 5e-3 };
        for adapter in step.adapters().iter() {
            for (matrix, tensor) in adapter.matrices.as_ref().named() {
                let key = format!("base_model.model.{}.{matrix}.weight", adapter.module);
                compare_projections(&key, &values(tensor), 1.0, &curve["final"][&key], tolerance);
            }
        }
    }
}

#[test]
fn noise_on_the_embeddings_is_that_of_transformers() {
    let golden = golden();
    let case = &golden["neftune"];
    let model = quickstart().model(Dtype::F32);
    let alpha = case["neftune_noise_alpha"].as_f64();
    let losses = [alpha, None].map(|neftune_noise_alpha| {
        let train = TrainConfig { neftune_noise_alpha, ..TrainConfig::default() };
        let adapters = Golden::adapters(case, &model);
        let mut step = TrainStep::new(model.clone(), adapters, &train, &OptimizerConfig::default(), None, 0);
        step.forward_backward(&batch(&rows(case)));
        step.reduce(None)
    });
    let [expected, norm] = ["loss", "grad_norm"].map(|figure| case[figure].as_f64().unwrap());
    assert_near(losses[0].loss, expected, 1e-5, "loss with noise");
    assert_near(losses[0].grad_norm, norm, 1e-3, "norm with noise");
    assert!((losses[1].loss - expected).abs() > 1e-3, "noise changes the loss: {} and {expected}", losses[1].loss);
}

#[test]
fn a_resumed_run_of_every_optimizer_gives_the_same_bytes() {
    let bench = Bench::new();
    let names = OptimizerName::NAMES.iter().map(|(name, _)| vec![format!("optimizer.name={name:?}")]);
    let averaged = vec!["optimizer.ema_decay=0.9".to_owned(), "train.neftune_noise_alpha=5".to_owned()];
    let momentum = vec!["optimizer.name=\"sgd\"".to_owned(), "optimizer.momentum=0.9".to_owned()];
    for (index, changes) in names.chain([averaged, momentum]).enumerate() {
        let [whole, resumed] = ["whole", "resumed"].map(|run| format!("{run}-{index}"));
        // r = 32 makes parameters that are large enough for codes of eight bits.
        let mut settings = vec!["train.max_steps=6", "checkpoint.save_steps=3", "eval.eval_steps=3", "lora.r=32"];
        settings.extend(changes.iter().map(String::as_str));
        let mut settings: Vec<_> = settings.into_iter().flat_map(|setting| ["--set", setting]).collect();
        train(&bench.recipe(&whole, ""), &settings);
        let checkpoint = bench.path(&format!("{whole}/checkpoints/step-000003"));
        settings.extend(["--resume", checkpoint.to_str().unwrap()]);
        train(&bench.recipe(&resumed, ""), &settings);
        for file in ["adapter/adapter_model.safetensors", "checkpoints/step-000006/optimizer.safetensors"] {
            let [whole, resumed] = [&whole, &resumed].map(|run| fs::read(bench.path(run).join(file)).unwrap());
            assert!(whole == resumed, "{file} of {changes:?}");
        }
    }
}
