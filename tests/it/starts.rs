//! Starts that are a part of the base, compared with PEFT's.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lora_train::config::{InitLoraWeights, LoraConfig, OptimizerConfig, SchedulerConfig, TrainConfig};
use lora_train::device::Dtype;
use lora_train::lora::{Adapter, AdapterSet, Directions};
use lora_train::save::export::{adapter_weights, read_adapter, write_adapter};
use lora_train::train::schedule::Schedule;
use lora_train::train::step::TrainStep;
use serde_json::Value;

use crate::common::{Bench, json, resumes_to_the_same_bytes, run, stderr, train};
use crate::golden::{assert_near, batch, compare_projections, lora_config, numbers, quickstart, rows, values};

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}/golden.json"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// B A of an adapter, of these rows of A and columns of B.
fn product(adapter: &Adapter, start: usize, r: usize) -> Vec<f32> {
    let (a, b) = (adapter.matrices.a.clone().narrow(0, start, r), adapter.matrices.b.clone().narrow(1, start, r));
    values(&b.matmul(a))
}

/// Trains along the curve of a case, and compares losses and norms of gradients.
fn after_the_curve(
    new: impl FnOnce(&OptimizerConfig) -> TrainStep,
    case: &Value,
    rows: &[(Vec<u32>, Vec<u64>)],
    name: &str,
) -> TrainStep {
    let settings = &case["settings"];
    let optimizer = OptimizerConfig {
        learning_rate: settings["learning_rate"].as_f64().unwrap(),
        weight_decay: settings["weight_decay"].as_f64().unwrap(),
        ..OptimizerConfig::default()
    };
    let scheduler = SchedulerConfig { warmup_steps: settings["warmup_steps"].as_u64(), ..SchedulerConfig::default() };
    let schedule = Schedule::new(&scheduler, optimizer.learning_rate, settings["steps"].as_u64().unwrap());
    let mut step = new(&optimizer);
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
    step
}

#[test]
fn parts_of_the_base_their_curves_and_what_they_make_of_the_weights_are_those_of_peft() {
    let golden = golden("starts");
    let rows = rows(&golden);
    let model = quickstart().model(Dtype::F32);
    for (name, case) in golden["cases"].as_object().unwrap() {
        let init = if name == "pissa" { InitLoraWeights::Pissa } else { InitLoraWeights::Olora };
        let lora = LoraConfig { init_lora_weights: init, ..lora_config(&case["lora"]) };
        let selection = lora.select(&model.config).unwrap();
        let mut adapters = AdapterSet::new(&model.config, &selection, init, 0.0, 0, &model.device());
        let negated_start = adapters.take_from_base(init, 7, |layer, site| model.weight_values(layer, site), |_| ());
        for adapter in adapters.iter() {
            let key = format!("base_model.model.{}", adapter.module);
            compare_projections(&key, &product(adapter, 0, lora.r), 1.0, &case["start"][&key], 1e-4);
            let norms = numbers(&case["row_norms"][&key], |norm| norm.as_f64().unwrap());
            for (row, norm) in values(&adapter.matrices.a).chunks_exact(adapter.matrices.a.dims()[1]).zip(norms) {
                let found = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
                assert_near(found, norm, 1e-4, &format!("{name}: a row of {key}"));
            }
        }
        let step = |optimizer: &OptimizerConfig| {
            let train = TrainConfig::default();
            TrainStep::new(model.clone(), adapters.clone(), &train, optimizer, None, 0)
                .with_negated_start(Some(negated_start.clone()))
        };
        let step = after_the_curve(step, case, &rows, name);
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
fn directions_of_inputs_the_ranks_that_they_get_and_the_curve_from_there_are_those_of_peft() {
    let golden = golden("eva");
    let rows = rows(&golden);
    let size = usize::try_from(golden["rows_per_batch"].as_u64().unwrap()).unwrap();
    let batches: Vec<_> = rows.chunks(size).map(batch).collect();
    let model = quickstart().model(Dtype::F32);
    let config = &model.config;
    for (name, case) in golden["cases"].as_object().unwrap() {
        let lora = LoraConfig {
            init_lora_weights: InitLoraWeights::Eva,
            eva_rho: case["rho"].as_f64(),
            ..lora_config(&case["lora"])
        };
        let selection = lora.select(config).unwrap();
        let mut directions = Directions::new(&selection, lora.rho());
        for batch in batches.iter().cycle() {
            if directions.last_wanted().is_none() {
                break;
            }
            model.show(batch, &mut directions);
        }
        let found = directions.found();
        let ranks: Vec<usize> =
            found.iter().map(|((layer, site), a)| a.len() / config.blocks[*layer].sites[*site].shape[1]).collect();
        let started = lora.with_ranks(config, &selection, &ranks);
        let shapes = started.select(config).unwrap();
        let mut adapters = AdapterSet::new(config, &shapes, InitLoraWeights::Kaiming, 0.0, 0, &model.device());
        adapters.start_a(&found.into_values().flatten().collect::<Vec<f32>>());
        for adapter in adapters.iter() {
            let key = format!("base_model.model.{}", adapter.module);
            let a = adapter.matrices.a.clone();
            assert_eq!(a.dims()[0] as u64, case["ranks"][&key].as_u64().unwrap(), "{name}: rank of {key}");
            compare_projections(&key, &values(&a.clone().transpose().matmul(a)), 1.0, &case["projectors"][&key], 1e-3);
        }
        assert_eq!(serde_json::to_value(&started.rank_pattern).unwrap(), case["rank_pattern"], "{name}");
        let alphas: BTreeMap<&String, f64> =
            started.alpha_pattern.keys().zip(started.alpha_pattern.values().copied()).collect();
        let expected =
            case["alpha_pattern"].as_object().unwrap().iter().map(|(name, alpha)| (name, alpha.as_f64().unwrap()));
        assert_eq!(alphas, expected.collect(), "{name}");
        let step = |optimizer: &OptimizerConfig| {
            TrainStep::new(model.clone(), adapters.clone(), &TrainConfig::default(), optimizer, None, 0)
        };
        for adapter in after_the_curve(step, case, &rows, name).adapters().iter() {
            let key = format!("base_model.model.{}", adapter.module);
            let r = adapter.matrices.a.dims()[0];
            compare_projections(&key, &product(adapter, 0, r), 1.0, &case["products"][&key], 1e-2);
        }
    }
}

#[test]
fn a_run_that_starts_from_its_rows_is_resumed_to_the_same_bytes_and_trained_on() {
    let bench = Bench::new();
    for (index, settings) in [&[][..], &["model.quantization=\"nf4\"", "lora.eva_rho=1"]].into_iter().enumerate() {
        let run = format!("run-{index}");
        resumes_to_the_same_bytes(&bench, &run, &[&["lora.init_lora_weights=\"eva\""], settings].concat());
        let config = json(&bench.path(&run).join("adapter/adapter_config.json"));
        assert_eq!(config["rank_pattern"].as_object().unwrap().is_empty(), index == 1, "{config}");
        let shares =
            |name: &str| config[name].as_object().unwrap().values().map(|it| it.as_f64().unwrap()).sum::<f64>();
        assert_near(shares("alpha_pattern").max(1.0), (4.0 * shares("rank_pattern")).max(1.0), 1e-12, "scales stay");
    }
    let from = format!("lora.start_from=\"{}\"", bench.path("run-0").display());
    train(&bench.recipe("on", ""), &["train.max_steps=2", &from].map(|setting| ["--set", setting]).concat());
    let [first, on] = ["run-0", "on"].map(|run| json(&bench.path(run).join("adapter/adapter_config.json")));
    assert_eq!(first["rank_pattern"], on["rank_pattern"]);
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
            "out of a quantised one",
        ),
        (&["lora.init_lora_weights=\"pissa\""], "`lora.lora_dropout`: the adapter starts as a part of the base"),
        (&["lora.init_lora_weights=\"pissa\"", "lora.lora_dropout=0", "lora.r=129"], "rank 129 is larger than the"),
        (&["lora.init_lora_weights=\"orthogonal\"", "lora.r=5"], "needs an even rank"),
        (&["lora.init_lora_weights=\"corda\""], "\"corda\" is not available"),
        (&["lora.eva_rho=2"], "is of no use without `init_lora_weights`"),
        (&["lora.init_lora_weights=\"eva\"", "lora.r=65"], "rank 65 times `eva_rho` = 2 is more than the 128 numbers"),
        (
            &["lora.init_lora_weights=\"eva\"", "lora.r=60", "train.micro_batch_size=1"],
            "120 tokens with loss that 120 directions",
        ),
    ] {
        let recipe = bench.recipe("refused", "");
        let args: Vec<_> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
        let refused = run(&[&[recipe.to_str().unwrap()], &args[..]].concat());
        assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
        assert!(stderr(&refused).contains(expected), "{expected}: {}", stderr(&refused));
    }
}
