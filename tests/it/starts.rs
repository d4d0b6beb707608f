//! Starts that are a part of the base, compared with PEFT's.

use std::fs;
use std::path::Path;

use lora_train::config::{InitLoraWeights, LoraConfig, OptimizerConfig, SchedulerConfig, TrainConfig};
use lora_train::device::Dtype;
use lora_train::lora::{Adapter, AdapterSet};
use lora_train::save::export::{adapter_weights, read_adapter, write_adapter};
use lora_train::train::schedule::Schedule;
use lora_train::train::step::TrainStep;
use serde_json::Value;

use crate::common::{Bench, resumes_to_the_same_bytes, run, stderr, train};
use crate::golden::{assert_near, batch, compare_projections, lora_config, numbers, quickstart, rows, values};

/// B A of an adapter, of these rows of A and columns of B.
fn product(adapter: &Adapter, start: usize, r: usize) -> Vec<f32> {
    let (a, b) = (adapter.matrices.a.clone().narrow(0, start, r), adapter.matrices.b.clone().narrow(1, start, r));
    values(&b.matmul(a))
}

#[test]
fn parts_of_the_base_their_curves_and_what_they_make_of_the_weights_are_those_of_peft() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/starts/golden.json");
    let golden: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let rows = rows(&golden);
    let model = quickstart().model(Dtype::F32);
    for (name, case) in golden["cases"].as_object().unwrap() {
        let init = if name == "pissa" { InitLoraWeights::Pissa } else { InitLoraWeights::Olora };
        let lora = LoraConfig { init_lora_weights: init, ..lora_config(&case["lora"]) };
        let selection = lora.select(&model.config).unwrap();
        let mut adapters = AdapterSet::new(&model.config, &selection, init, 0.0, 0, &model.device());
        let taken = adapters.take_from_base(init, 7, |layer, site| model.weight_values(layer, site), |_| ());
        for adapter in adapters.iter() {
            let key = format!("base_model.model.{}", adapter.module);
            compare_projections(&key, &product(adapter, 0, lora.r), 1.0, &case["start"][&key], 1e-4);
            let norms = numbers(&case["row_norms"][&key], |norm| norm.as_f64().unwrap());
            for (row, norm) in values(&adapter.matrices.a).chunks_exact(adapter.matrices.a.dims()[1]).zip(norms) {
                let found = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
                assert_near(found, norm, 1e-4, &format!("{name}: a row of {key}"));
            }
        }
        let settings = &case["settings"];
        let optimizer = OptimizerConfig {
            learning_rate: settings["learning_rate"].as_f64().unwrap(),
            weight_decay: settings["weight_decay"].as_f64().unwrap(),
            ..OptimizerConfig::default()
        };
        let scheduler =
            SchedulerConfig { warmup_steps: settings["warmup_steps"].as_u64(), ..SchedulerConfig::default() };
        let schedule = Schedule::new(&scheduler, optimizer.learning_rate, settings["steps"].as_u64().unwrap());
        let train = TrainConfig::default();
        let mut step = TrainStep::new(model.clone(), adapters, &train, &optimizer, None, 0).with_taken(taken);
        for (number, expected) in (1..).zip(case["steps_done"].as_array().unwrap()) {
            for micro_batch in expected["micro_batches"].as_array().unwrap() {
                let picked = numbers(micro_batch, |row| rows[usize::try_from(row.as_u64().unwrap()).unwrap()].clone());
                step.forward_backward(&batch(&picked));
            }
            let outcome = step.update(schedule.learning_rate(number));
            let what = format!("{name}: step {number}");
            assert_near(outcome.loss, expected["loss"].as_f64().unwrap(), 1e-4, &what);
            assert_near(outcome.grad_norm, expected["grad_norm"].as_f64().unwrap(), 1e-3, &what);
        }
        for adapter in step.adapters().iter() {
            let key = format!("base_model.model.{}", adapter.module);
            let [trained, taken] = [0, lora.r].map(|start| product(adapter, start, lora.r));
            let difference: Vec<f32> = trained.iter().zip(taken).map(|(trained, taken)| trained + taken).collect();
            compare_projections(&key, &difference, 1.0, &case["difference"][&key], 1e-2);
        }
        // What is written is an adapter of the whole base.
        let folder = tempfile::tempdir().unwrap();
        write_adapter(folder.path(), &adapter_weights(step.adapters()), &lora.written(), "base").unwrap();
        let written =
            read_adapter(folder.path()).unwrap().into_set(folder.path(), &model.config, &model.device()).unwrap();
        assert_eq!(written.iter().next().unwrap().matrices.a.dims()[0], 2 * lora.r);
        let batch = batch(&rows[..3]);
        let logits = [&written, step.adapters()].map(|adapters| values(&model.logits(&batch, adapters)));
        assert!(logits[0] == logits[1], "{name}");
    }
}

#[test]
fn a_run_that_starts_as_a_part_of_the_base_starts_at_its_loss_and_is_resumed_to_the_same_bytes() {
    let bench = Bench::new();
    let first_loss = |run: &str| {
        let text = fs::read_to_string(bench.path(run).join("metrics.jsonl")).unwrap();
        let first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        first["eval_loss"].as_f64().unwrap()
    };
    let plain = ["train.max_steps=2", "lora.lora_dropout=0"].map(|setting| ["--set", setting]).concat();
    train(&bench.recipe("plain", ""), &plain);
    for (index, init) in ["pissa", "pissa_niter_2", "olora", "orthogonal"].iter().enumerate() {
        let init = format!("lora.init_lora_weights=\"{init}\"");
        let run = format!("run-{index}");
        resumes_to_the_same_bytes(&bench, &run, &["lora.lora_dropout=0", &init]);
        assert_near(first_loss(&run), first_loss("plain"), 1e-5, &init);
    }
}

#[test]
fn a_part_of_a_base_that_cannot_be_taken_out_is_refused() {
    let bench = Bench::new();
    for (settings, expected) in [
        (
            &["lora.init_lora_weights=\"pissa\"", "model.quantization=\"nf4\"", "lora.lora_dropout=0"][..],
            "a quantised base",
        ),
        (&["lora.init_lora_weights=\"pissa\""], "`lora.lora_dropout` would drop parts of the base"),
        (&["lora.init_lora_weights=\"pissa\"", "lora.lora_dropout=0", "lora.r=129"], "rank 129 is larger than the"),
        (&["lora.init_lora_weights=\"orthogonal\"", "lora.r=5"], "needs an even rank"),
        (&["lora.init_lora_weights=\"eva\""], "\"eva\" is not available"),
    ] {
        let recipe = bench.recipe("refused", "");
        let args: Vec<_> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
        let refused = run(&[&[recipe.to_str().unwrap()], &args[..]].concat());
        assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
        assert!(stderr(&refused).contains(expected), "{expected}: {}", stderr(&refused));
    }
}
