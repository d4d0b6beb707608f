//! A model that scores answers: beside TRL and PEFT, and what a user does with it.

use std::fs;
use std::path::Path;

use lora_train::config::OptimizerConfig;
use lora_train::device::Dtype;
use lora_train::train::objective::objective;
use lora_train::train::step::TrainStep;
use serde_json::{Value, json as value};

use crate::common::{Bench, json, run, stderr, train};
use crate::golden::{Golden, assert_near, name_in_file, quickstart};
use crate::preferences::{assert_figures, batches, compare_curves, norm, recipe};
use crate::talk::Server;

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/reward/golden.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn scores_of_pairs_have_trls_loss_figures_and_gradients() {
    let (plain, folder, base) = (golden(), tempfile::tempdir().unwrap(), quickstart());
    let model = base.model(Dtype::F32);
    for (name, case) in plain["cases"].as_object().unwrap() {
        let mut golden = plain.clone();
        if name == "margins" {
            let margins = plain["margins"].as_array().unwrap();
            let rows = golden["reward"].as_array_mut().unwrap();
            rows.iter_mut().zip(margins).for_each(|(row, margin)| row["margin"] = margin.clone());
        }
        let recipe = recipe(case, &golden, folder.path(), 4);
        let batch = batches(&recipe, &base.model_dir, 1).remove(0);
        // TRL has all chosen answers before all rejected ones.
        for (index, document) in batch.documents.iter().enumerate() {
            let ids = &batch.input_ids[document.start..][..document.len];
            assert_eq!(value!(ids), golden["tokens"][index / 2 + index % 2 * 4], "sequence {index}");
        }
        let optimizer = OptimizerConfig::default();
        let step = TrainStep::new(model.clone(), Golden::adapters(&golden, &model), &recipe.train, &optimizer, None, 0);
        let mut step = step.with_objective(objective(&recipe.objective));
        let evaluated = step.eval_loss(&batch);
        step.forward_backward(&batch);
        let norms = &case["gradient_norms"];
        for (id, grad) in step.grads().iter() {
            let key = name_in_file(step.adapters(), id);
            assert_near(norm(grad) / 4.0, norms[&key].as_f64().unwrap(), 1e-3, &format!("{name}: {key}"));
        }
        assert_eq!(step.grads().iter().count(), norms.as_object().unwrap().len());
        let outcome = step.reduce(None);
        let loss = case["loss"].as_f64().unwrap();
        assert_near(outcome.loss, loss, 1e-5, name);
        assert_near(evaluated.mean().unwrap(), loss, 1e-5, &format!("{name}, evaluated"));
        assert_near(outcome.grad_norm, case["grad_norm"].as_f64().unwrap(), 1e-3, &format!("{name}: norm"));
        assert_figures(&outcome.figures, &case["figures"], name);
        let mean = |of: &lora_train::measure::figures::Mean| of.value().unwrap();
        let mean = f64::midpoint(mean(&outcome.figures.rewards_chosen), mean(&outcome.figures.rewards_rejected));
        assert_near(mean, case["mean"].as_f64().unwrap(), 1e-4, "mean");
    }
}

#[test]
fn scores_are_learned_along_trls_curve() {
    compare_curves(&golden(), &quickstart());
}

/// A bench with pairs, of which good answers praise and bad ones do not, and settings that learn to score them.
fn scored() -> (Bench, Vec<&'static str>) {
    let bench = Bench::new();
    let rows: String = (0..24)
        .map(|i| {
            let (animal, place) = (["cat", "dog", "bird", "fox"][i % 4], ["garden", "forest", "house"][i % 3]);
            let good = format!("The {animal} is happy in the {place}.").repeat(1 + i % 2);
            let bad = format!("The {animal} is sad in the {place}.").repeat(1 + i % 3);
            format!("{}\n", value!({"prompt": format!("{i}: "), "chosen": good, "rejected": bad}))
        })
        .collect();
    fs::write(bench.path("train.jsonl"), &rows).unwrap();
    fs::write(bench.path("eval.jsonl"), rows).unwrap();
    let settings = [
        "objective.name=reward", "data.chat_template=none", "data.max_length=96", "train.max_steps=12",
        "checkpoint.save_steps=6", "eval.eval_steps=6", "eval.metric_for_best=accuracy",
        "optimizer.learning_rate=0.003", "scheduler.warmup_steps=0",
    ];
    (bench, settings.into_iter().flat_map(|setting| ["--set", setting]).collect())
}

#[test]
fn a_run_learns_to_score_is_resumed_to_the_same_bytes_and_scores_alike_everywhere() {
    let (bench, settings) = scored();
    let whole = bench.path("whole");
    train(&bench.recipe("whole", ""), &settings);
    let checkpoint = bench.path("whole/checkpoints/step-000006");
    train(&bench.recipe("resumed", ""), &[&settings[..], &["--resume", checkpoint.to_str().unwrap()]].concat());
    for file in ["adapter/adapter_model.safetensors", "checkpoints/step-000012/optimizer.safetensors"] {
        let [whole, resumed] = ["whole", "resumed"].map(|run| fs::read(bench.path(run).join(file)).unwrap());
        assert!(whole == resumed, "{file}");
    }
    let config = json(&whole.join("adapter/adapter_config.json"));
    assert_eq!((&config["task_type"], &config["modules_to_save"]), (&value!("SEQ_CLS"), &value!(["score"])));

    let scores = bench.path("scores.jsonl");
    let output = run(&["eval", whole.to_str().unwrap(), "--json", "--answers", scores.to_str().unwrap()]);
    let evaluated: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(evaluated["eval_rewards_accuracies"].as_f64().unwrap() > 0.95, "{evaluated}");
    assert_eq!(evaluated["eval_rewards_margins"], json(&whole.join("summary.json"))["final_eval_rewards_margins"]);
    let lines = fs::read_to_string(&scores).unwrap();
    let line: Value = serde_json::from_str(lines.lines().nth(2).unwrap()).unwrap();
    assert_eq!((lines.lines().count(), &line["row"]), (24, &value!(3)));

    // Without its run, the adapter says that it scores, and what its prompts are.
    let alone = bench.path("alone");
    fs::create_dir(&alone).unwrap();
    for file in fs::read_dir(whole.join("adapter")).unwrap().flatten() {
        fs::copy(file.path(), alone.join(file.file_name())).unwrap();
    }
    let output =
        run(&["eval", alone.to_str().unwrap(), "--data", bench.path("eval.jsonl").to_str().unwrap(), "--json"]);
    let of_adapter: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    assert_near(
        of_adapter["eval_rewards_margins"].as_f64().unwrap(),
        evaluated["eval_rewards_margins"].as_f64().unwrap(),
        1e-4,
        "the margin of the adapter alone",
    );

    let server = Server::start(&[whole.to_str().unwrap()]);
    let row: Value =
        serde_json::from_str(fs::read_to_string(bench.path("eval.jsonl")).unwrap().lines().nth(2).unwrap()).unwrap();
    let text = |side: &str| format!("{}{}", row["prompt"].as_str().unwrap(), row[side].as_str().unwrap());
    let (status, answer) = server.ask("/v1/score", "", &value!({"input": [text("chosen"), text("rejected")]}));
    assert_eq!(status, 200, "{answer}");
    for (index, side) in ["chosen", "rejected"].into_iter().enumerate() {
        let score = answer["data"][index]["score"].as_f64().unwrap();
        assert!((score - line[side].as_f64().unwrap()).abs() < 1e-4, "{answer} {line}");
    }
    let messages = value!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]);
    assert_eq!(server.ask("/v1/score", "", &value!({"messages": messages})).0, 200);
    let (status, answer) = server.ask("/v1/chat/completions", "", &value!({"messages": messages}));
    assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains("ask /v1/score"), "{answer}");
    let (status, answer) = server.ask("/v1/score", "", &value!({"input": "Hi", "temperature": 0.5}));
    assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains("not supported"), "{answer}");
    let (status, answer) = server.ask("/v1/score", "", &value!({"model": "base", "input": "Hi"}));
    assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains("no head that scores"), "{answer}");
}

#[test]
fn what_a_model_that_scores_cannot_do_is_said() {
    let (bench, mut settings) = scored();
    settings.extend(["--set", "train.max_steps=1"]);
    train(&bench.recipe("run", ""), &settings);
    let folder = bench.path("run");
    let (folder, out) = (folder.to_str().unwrap(), bench.path("out"));
    let start = format!("lora.start_from={folder}");
    let recipe = bench.recipe("next", "");
    let recipe = recipe.to_str().unwrap();
    for (args, message) in [
        (vec!["generate", folder, "Hi"], "scores texts, and writes none"),
        (vec!["merge", folder, "--out", out.to_str().unwrap()], "scores texts, and writes none"),
        (vec!["eval", folder, "--base"], "which the base lacks"),
        (vec!["check", recipe, "--set", &start], "scores texts, and writes none"),
        (
            vec!["check", recipe, "--set", "objective.name=reward", "--set", "eval.task.metric=exact_match"],
            "writes no text",
        ),
        (vec!["check", recipe, "--set", "objective.name=reward", "--set", "optimizer.name=muon"], "brings a vector"),
        (vec!["check", recipe, "--set", "objective.center_rewards_coefficient=0.01"], "is of no use"),
    ] {
        let output = run(&args);
        assert!(output.status.code() == Some(2) && stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
    }
    // Longer ones would be scored before their end.
    settings.extend(["--set", "data.max_length=24"]);
    let output = run(&[&["check", recipe], &settings[..]].concat());
    let text = [output.stdout, output.stderr].concat();
    assert!(
        String::from_utf8_lossy(&text).contains("rows carry no loss and are left out"),
        "{}",
        String::from_utf8_lossy(&text)
    );
    // Its head belongs to the adapter.
    let other = [&["--set", "objective.name=dpo", "--set", "data.max_length=96", "--resume"][..]].concat();
    let output = run(&[&[bench.recipe("run", "").to_str().unwrap()], &settings[..settings.len() - 2], &other].concat());
    assert!(stderr(&output).contains("its adapter is of that shape"), "{}", stderr(&output));
    // A run of scores goes on from one.
    settings
        .extend(["--set", "data.max_length=96", "--set", &start, "--set", "lora.r=", "--set", "lora.lora_dropout="]);
    train(Path::new(recipe), &settings);
    let initial = json(&bench.path("next/summary.json"))["initial_eval_loss"].as_f64().unwrap();
    let last = json(&bench.path("run/summary.json"))["final_eval_loss"].as_f64().unwrap();
    assert_near(initial, last, 1e-6, "where the other ended");
}

#[test]
#[ignore = "needs LORA_TRAIN_PYTHON, a Python with peft (scripts/setup_python.sh)"]
fn peft_scores_with_our_adapter_as_we_do() {
    let python = std::env::var("LORA_TRAIN_PYTHON").expect("LORA_TRAIN_PYTHON names a Python with peft");
    let (bench, settings) = scored();
    train(&bench.recipe("run", ""), &settings);
    let scores = bench.path("scores.jsonl");
    let output = run(&["eval", bench.path("run").to_str().unwrap(), "--answers", scores.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/check_peft.py");
    let mut command = std::process::Command::new(python);
    command.arg(script).arg("score").arg(crate::common::quickstart_model());
    let output = command.args([bench.path("run/adapter"), bench.path("eval.jsonl"), scores]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
}
