//! Preferences compared with TRL: rows as tokens, losses, figures, gradients, curves.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::Tensor;
use lora_train::config::{OptimizerConfig, SchedulerConfig};
use lora_train::data::batch::{Answer, Batch, Document, Target};
use lora_train::data::dataset::{Cursor, Dataset, OpenOptions};
use lora_train::data::tokenizer::Tokenizer;
use lora_train::device::Dtype;
use lora_train::measure::figures::{ObjectiveFigures, StepMetrics};
use lora_train::recipe::{Purpose, Recipe};
use lora_train::train::objective::objective;
use lora_train::train::schedule::Schedule;
use lora_train::train::step::TrainStep;
use serde_json::{Value, json as value};

use crate::common::{Bench, json, metrics, run, stderr, train};
use crate::golden::{Golden, assert_near, name_in_file, quickstart};

/// The recipe of a case: our keys have TRL's names, and `SimPO` is an objective of its own.
pub(crate) fn recipe(case: &Value, golden: &Value, folder: &Path, micro_batch_size: u64) -> Recipe {
    let mut options = case["options"].as_object().unwrap().clone();
    let mut name = case["kind"].as_str().unwrap();
    if options.get("loss_type").is_some_and(|loss| loss == "simpo") {
        options.remove("loss_type");
        name = "simpo";
    }
    let lines: String =
        golden[case["kind"].as_str().unwrap()].as_array().unwrap().iter().map(|row| format!("{row}\n")).collect();
    let path = folder.join(format!("{name}.jsonl"));
    fs::write(&path, lines).unwrap();
    let keys: String = options.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
    let text = format!(
        "[model]\npath = 'x'\n[objective]\nname = '{name}'\n{keys}[train]\nmicro_batch_size = {micro_batch_size}\n[data]\n\
         shuffle = false\nchat_template = 'none'\nmax_length = {}\n[[data.train]]\npath = '{}'\n",
        golden["max_length"],
        path.display()
    );
    Recipe::parse(Path::new("case.toml"), &text, &[], Purpose::Training)
        .unwrap_or_else(|error| panic!("{text}\n{error}"))
}

/// The rows of a recipe in micro-batches.
pub(crate) fn batches(recipe: &Recipe, model_dir: &Path, count: usize) -> Vec<Batch> {
    let tokenizer = Arc::new(Tokenizer::open(model_dir).unwrap());
    let data = Dataset::open(&recipe.data, tokenizer, 0, &OpenOptions::default()).unwrap();
    let mut loader = data.loader(Cursor::default(), recipe.train.micro_batch_size).unwrap();
    (0..count).map(|_| loader.next_batch().unwrap().batch).collect()
}

pub(crate) fn assert_figures(found: &ObjectiveFigures, expected: &Value, what: &str) {
    let mut line = StepMetrics::default();
    line.set_objective(found);
    let found = serde_json::to_value(line).unwrap();
    for (name, expected) in expected.as_object().unwrap() {
        let expected = expected.as_f64().unwrap();
        let Some(found) = found[name.replace('/', "_")].as_f64() else {
            assert!(name == "nll_loss" && expected == 0.0, "{what}: no {name}");
            continue;
        };
        // A reward is a tenth of the difference of two sums of hundreds of nats in f32.
        let is_near = (found - expected).abs() <= 1e-4 * expected.abs().max(1.0);
        assert!(is_near, "{what}: {name} is {found}, expected {expected}");
    }
}

pub(crate) fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/preferences/golden.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

pub(crate) fn norm(tensor: &Tensor<2>) -> f64 {
    crate::golden::values(tensor).iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn every_loss_of_preferences_has_trls_value_figures_and_gradients() {
    let (golden, folder) = (golden(), tempfile::tempdir().unwrap());
    let base = quickstart();
    let model = base.model(Dtype::F32);
    for (name, case) in golden["cases"].as_object().unwrap() {
        let recipe = recipe(case, &golden, folder.path(), 4);
        let batch = batches(&recipe, &base.model_dir, 1).remove(0);
        let adapter = value!({"lora": golden["lora"], "b_bound": golden["b_bound"]});
        let adapters = Golden::adapters(&adapter, &model);
        let fresh = || {
            let optimizer = OptimizerConfig::default();
            TrainStep::new(model.clone(), adapters.clone(), &recipe.train, &optimizer, None, 0)
                .with_objective(objective(&recipe.objective))
        };
        let evaluated = fresh().eval_loss(&batch);
        let mut step = fresh();
        step.forward_backward(&batch);
        // The reference does not change: what it made of the answers is kept, unless more than one number of each is needed.
        let is_kept = step.needs_reference() && recipe.objective.ld_alpha.is_none();
        assert_eq!((step.knows_reference(&batch), fresh().knows_reference(&batch)), (is_kept, false), "{name}");
        assert_eq!(step.eval_loss(&batch), evaluated, "{name}");
        for (id, grad) in step.grads().iter() {
            let key = name_in_file(step.adapters(), id);
            let (expected, found) = (case["gradient_norms"][&key].as_f64().unwrap(), norm(grad) / 4.0);
            assert!((found - expected).abs() <= 1e-3 * expected.max(1e-9), "{name}: {key}: {found} and {expected}");
        }
        let outcome = step.reduce(None);
        let expected = case["loss"].as_f64().unwrap();
        assert_near(outcome.loss, expected, 1e-5, name);
        assert_near(evaluated.mean().unwrap(), expected, 1e-5, &format!("{name}, evaluated"));
        assert_near(outcome.grad_norm, case["grad_norm"].as_f64().unwrap(), 1e-3, &format!("{name}: norm"));
        assert_figures(&outcome.figures, &case["figures"], name);
        assert_figures(&evaluated.figures, &case["figures"], &format!("{name}, evaluated"));
    }
}

#[test]
fn rows_of_preferences_become_trls_tokens() {
    let (golden, folder) = (golden(), tempfile::tempdir().unwrap());
    for (kind, sequences) in golden["tokens"].as_object().unwrap() {
        let recipe = recipe(&value!({"kind": kind, "options": {}}), &golden, folder.path(), 4);
        let batch = batches(&recipe, &quickstart().model_dir, 1).remove(0);
        let sequences = sequences.as_array().unwrap();
        let num_pairs = sequences.len() / 2;
        for (index, document) in batch.documents.iter().enumerate() {
            // TRL has all chosen answers before all rejected ones.
            let expected =
                if kind == "dpo" { &sequences[index / 2 + index % 2 * num_pairs] } else { &sequences[index] };
            let ids = &batch.input_ids[document.start..][..document.len];
            assert_eq!(value!(ids), expected["ids"], "{kind}: sequence {index}");
            let is_in = |position: usize| (document.start..document.start + document.len).contains(&position);
            let first =
                batch.targets.iter().find(|target| is_in(target.position)).unwrap().position + 1 - document.start;
            assert_eq!(value!(first), expected["prompt"], "{kind}: prompt of {index}");
        }
    }
}

/// Twenty steps as TRL takes them from B = 0.
pub(crate) fn compare_curves(golden: &Value, base: &Golden) {
    let folder = tempfile::tempdir().unwrap();
    let model = base.model(Dtype::F32);
    let settings = &golden["settings"];
    for (name, curve) in golden["curves"].as_object().unwrap() {
        let recipe = recipe(curve, golden, folder.path(), 4);
        let adapters = Golden::adapters(
            &value!({"lora": golden["lora"], "b_bound": 0.0, "score_bound": golden["score_bound"]}),
            &model,
        );
        let learning_rate = settings["learning_rate"].as_f64().unwrap();
        let optimizer = OptimizerConfig { learning_rate, ..OptimizerConfig::default() };
        let scheduler =
            SchedulerConfig { warmup_steps: settings["warmup_steps"].as_u64(), ..SchedulerConfig::default() };
        let schedule = Schedule::new(&scheduler, learning_rate, settings["steps"].as_u64().unwrap());
        let step = TrainStep::new(model.clone(), adapters, &recipe.train, &optimizer, None, 0);
        let mut step = step.with_objective(objective(&recipe.objective));
        let steps = curve["steps"].as_array().unwrap();
        for ((number, expected), batch) in (1..).zip(steps).zip(batches(&recipe, &base.model_dir, steps.len())) {
            step.forward_backward(&batch);
            let outcome = step.update(schedule.learning_rate(number));
            let what = format!("{name}: step {number}");
            if name == "dpo" && number == 1 {
                assert_near(outcome.loss, std::f64::consts::LN_2, 1e-6, "the first loss");
            }
            assert_near(outcome.loss, expected["loss"].as_f64().unwrap(), 1e-4, &what);
            assert_near(outcome.grad_norm, expected["grad_norm"].as_f64().unwrap(), 1e-3, &what);
            // The first learning rate is 0.
            if number > 2 {
                assert_figures(&outcome.figures, &expected["figures"], &what);
            }
        }
    }
}

#[test]
fn preferences_are_learned_along_trls_curves() {
    compare_curves(&golden(), &quickstart());
}

#[test]
#[ignore = "needs LORA_TRAIN_MODELS"]
fn smollm2_learns_preferences_along_trls_curves() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/preferences-smollm2");
    let golden = serde_json::from_str(&fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
    compare_curves(&golden, &Golden::real("smollm2-135m"));
}

#[test]
fn rewarded_answers_have_trls_losses_and_gradients() {
    let golden = golden();
    let model = quickstart().model(Dtype::F32);
    let rewarded = &golden["rewarded"];
    let mut batch = Batch::default();
    let ids = |tokens: &Value| crate::golden::numbers(tokens, |id| u32::try_from(id.as_u64().unwrap()).unwrap());
    for (row, advantage) in rewarded["rows"].as_array().unwrap().iter().zip(rewarded["advantages"].as_array().unwrap())
    {
        let (prompt, answer) = (ids(&row["prompt"]), ids(&row["answer"]));
        let start = batch.input_ids.len();
        let first = start + prompt.len() - 1;
        batch
            .targets
            .extend(answer.iter().enumerate().map(|(at, token)| Target { position: first + at, token: *token }));
        batch.documents.push(Document { start, len: prompt.len() + answer.len() });
        batch.row_lengths.push(prompt.len() + answer.len());
        batch.input_ids.extend([prompt, answer].concat());
        let advantage = advantage.as_f64().unwrap() as f32;
        batch.answers.push(Answer { is_good: advantage > 0.0, prompt_targets: 0, advantage, margin: 0.0 });
    }
    for (name, case) in rewarded["cases"].as_object().unwrap() {
        let options = case["options"].as_object().unwrap().iter();
        let keys: String = options.map(|(key, value)| format!("{key} = {value}\n")).collect();
        let text = format!(
            "model.path = 'x'\n[objective]\nname = 'grpo'\nmax_completion_length = 32\n{keys}[[objective.reward]]\nkind = 'json'\n"
        );
        let recipe = Recipe::parse(Path::new("case.toml"), &text, &[], Purpose::Benchmark);
        let recipe = recipe.unwrap_or_else(|error| panic!("{text}\n{error}"));
        let adapters = Golden::adapters(&value!({"lora": golden["lora"], "b_bound": golden["b_bound"]}), &model);
        let step = TrainStep::new(model.clone(), adapters, &recipe.train, &OptimizerConfig::default(), None, 0);
        let mut step = step.with_objective(objective(&recipe.objective));
        let written = case["written"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
        let written: Vec<_> = written.map(|logp| logp.as_f64().unwrap() as f32).collect();
        // A ratio is that of two log-probabilities in f32, whose last digits are millionths.
        let least = if written.is_empty() { 0.1 } else { 1.0 };
        step.forward_backward(&Batch { written, ..batch.clone() });
        let of_tensor = |(id, grad)| (name_in_file(step.adapters(), id), norm(grad));
        let gradients: Vec<_> = step.grads().iter().map(of_tensor).collect();
        let outcome = step.reduce(None);
        for (key, found) in gradients {
            let expected = case["gradient_norms"][&key].as_f64().unwrap();
            assert_near(found / outcome.count, expected, 1e-3, &format!("{name}: {key}"));
        }
        let (found, expected) = (outcome.loss, case["loss"].as_f64().unwrap());
        // The ratio of a sequence has the last digits of all its tokens.
        let bound = if name.starts_with("vespo") { 3e-5 } else { 1e-5 };
        assert!((found - expected).abs() <= bound * expected.abs().max(least), "{name}: {found} and {expected}");
        assert_near(outcome.grad_norm, case["grad_norm"].as_f64().unwrap(), 1e-3, &format!("{name}: norm"));
        let mut figures = case["figures"].as_object().unwrap().clone();
        if let Some(clipped) = figures.remove("cispo_clip_ratio") {
            figures.insert("clip_ratio/high_mean".into(), clipped);
        }
        // Nothing is clipped where answers are used once.
        figures.retain(|key, value| !key.starts_with("clip_ratio") || *value != 0.0 || case["written"] != value!([]));
        assert_figures(&outcome.figures, &Value::Object(figures), name);
    }
}

/// A bench whose rows are preferences, and the arguments that say so.
fn preferences(objective: &str) -> (Bench, Vec<String>) {
    let bench = Bench::new();
    let rows: String = (0..24)
        .map(|i| {
            let (animal, place) = (["cat", "dog", "bird", "fox"][i % 4], ["garden", "forest", "house"][i % 3]);
            let good = format!("Once there was a little {animal} in the {place}. ").repeat(1 + i % 3);
            let bad = format!("{animal} {i} no ").repeat(1 + i % 2);
            let row = match objective {
                "kto" => value!({"prompt": format!("{i}:"), "completion": if i % 2 == 0 { good } else { bad }, "label": i % 2 == 0}),
                _ => value!({"prompt": format!("{i}:"), "chosen": good, "rejected": bad}),
            };
            format!("{row}\n")
        })
        .collect();
    fs::write(bench.path("train.jsonl"), &rows).unwrap();
    fs::write(bench.path("eval.jsonl"), rows).unwrap();
    let name = format!("objective.name={objective}");
    let settings = [&name, "train.max_steps=6", "checkpoint.save_steps=3", "eval.eval_steps=3", "data.max_length=96"];
    (bench, settings.into_iter().flat_map(|setting| ["--set".to_owned(), setting.to_owned()]).collect())
}

#[test]
fn a_resumed_run_of_every_objective_gives_the_same_bytes_and_learns() {
    for objective in ["dpo", "orpo", "cpo", "simpo", "kto"] {
        let (bench, mut settings) = preferences(objective);
        let mut go = |run: &str, more: &[&str]| {
            settings.extend(more.iter().map(|text| (*text).to_owned()));
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            train(&bench.recipe(run, ""), &settings)
        };
        go("whole", if objective == "kto" { &[] } else { &["--set", "data.packing=true"] });
        let checkpoint = bench.path("whole/checkpoints/step-000003");
        go("resumed", &["--resume", checkpoint.to_str().unwrap()]);
        for file in ["adapter/adapter_model.safetensors", "checkpoints/step-000006/optimizer.safetensors"] {
            let [whole, resumed] = ["whole", "resumed"].map(|run| fs::read(bench.path(run).join(file)).unwrap());
            assert!(whole == resumed, "{objective}: {file}");
        }
        let lines = metrics(&bench.path("whole"));
        let margin = lines.iter().rev().find_map(|line| line["rewards_margins"].as_f64()).unwrap();
        // Without a reference, a longer answer has a lower reward.
        assert!(margin > 0.0 || !["dpo", "kto"].contains(&objective), "{objective}: {margin}");
        let summary = json(&bench.path("whole/summary.json"));
        assert!(summary["final_eval_loss"].as_f64() < summary["initial_eval_loss"].as_f64(), "{objective}: {summary}");
        let evaluated = run(&["eval", bench.path("whole").to_str().unwrap(), "--json"]);
        let evaluated: Value = serde_json::from_slice(&evaluated.stdout).unwrap();
        assert_near(
            evaluated["eval_loss"].as_f64().unwrap(),
            summary["final_eval_loss"].as_f64().unwrap(),
            1e-6,
            "eval of the run",
        );
        assert_eq!(evaluated["eval_perplexity"], Value::Null);
    }
}

#[test]
fn many_good_answers_to_few_bad_ones_are_pointed_out_and_a_weight_evens_them_out() {
    let (bench, settings) = preferences("kto");
    let rows = fs::read_to_string(bench.path("train.jsonl")).unwrap();
    let rows: String =
        rows.lines().enumerate().filter(|(i, _)| i % 2 == 0 || i % 8 == 1).map(|(_, row)| format!("{row}\n")).collect();
    fs::write(bench.path("train.jsonl"), rows).unwrap();
    let recipe = bench.recipe("run", "");
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let check = |more: &[&str]| {
        let output = run(&[&["check", recipe.to_str().unwrap()], &settings[..], more].concat());
        format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output))
    };
    let text = check(&[]);
    assert!(text.contains("by their weights 4.00 to 1") && text.contains("undesirable_weight = 4.00"), "{text}");
    let text = check(&["--set", "objective.undesirable_weight=4"]);
    assert!(!text.contains("by their weights"), "{text}");
}

#[test]
fn the_reference_is_the_adapter_that_training_started_from_also_where_that_is_gone() {
    let (bench, settings) = preferences("dpo");
    train(&bench.recipe("first", ""), &settings.iter().map(String::as_str).collect::<Vec<_>>());
    let start = format!("lora.start_from={}", bench.path("first").display());
    let mut settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    settings.extend([
        "--set", "lora.r=", "--set", "lora.lora_dropout=", "--set", &start, "--set", "eval.metric_for_best=margin",
    ]);
    let second = bench.recipe("second", "");
    train(&second, &settings);
    let initial = json(&bench.path("second/summary.json"))["initial_eval_loss"].as_f64().unwrap();
    assert_near(initial, std::f64::consts::LN_2, 1e-6, "the loss before the first step");
    let summary = json(&bench.path("second/summary.json"));
    assert!(summary["best_eval_rewards_margins"].as_f64().unwrap() > 0.0, "{summary}");

    fs::remove_dir_all(bench.path("first")).unwrap();
    settings.extend(["--resume", "--set", "train.max_steps=7"]);
    let output = run(&[&[second.to_str().unwrap()], &settings[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let last = metrics(&bench.path("second")).into_iter().rfind(|line| line.get("loss").is_some()).unwrap();
    assert!(last["rewards_margins"].as_f64().unwrap() > 0.0, "still against where it started: {last}");
}

#[test]
fn what_does_not_go_together_is_a_mistake_at_its_key() {
    let (bench, _) = preferences("dpo");
    for (settings, message) in [
        (&["objective.name=ppo"][..], "this trainer does not have it yet"),
        (&["objective.name=grpo"], "add [[objective.reward]] with a `kind`"),
        (&["objective.num_generations=4"], "`objective.num_generations` is of no use to \"cross_entropy\""),
        (&["objective.beta=0.1"], "`objective.beta` is of no use to \"cross_entropy\""),
        (&["objective.name=dpo", "objective.loss_type=kto"], "\"kto\" is none of \"dpo\""),
        (&["objective.name=dpo", "objective.loss_type=exo_pair"], "must be above 0 for \"exo_pair\""),
        (
            &["objective.name=dpo", "objective.loss_type=[\"sigmoid\",\"sft\"]", "objective.loss_weights=[1]"],
            "one number for each of 2",
        ),
        (&["objective.name=dpo", "objective.loss_type=sigmoyd"], "there is no loss \"sigmoyd\""),
        (
            &["objective.name=dpo", "objective.f_divergence_type=js_divergence", "objective.loss_type=aot"],
            "no meaning with the loss \"aot\"",
        ),
        (&["objective.name=simpo", "objective.loss_type=hinge"], "`objective.loss_type` is of no use to \"simpo\""),
        (&["objective.name=dpo", "data.train_on_inputs=true"], "compares answers"),
        (&["objective.name=kto", "train.micro_batch_size=1"], "use 4 or more"),
        (&["eval.metric_for_best=margin"], "is measured on pairs of answers"),
        (&["objective.name=kto"], "pairs are for \"dpo\""),
        (&["objective.name=cross_entropy"], "`name = \"dpo\"` in [objective] learns from it"),
    ] {
        let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        let recipe = bench.recipe("run", "");
        let output = run(&[&["check", recipe.to_str().unwrap()], &settings[..]].concat());
        let text = stderr(&output);
        assert!(output.status.code() == Some(2) && text.contains(message), "{settings:?}: {text}");
    }
}
