//! `lora-train init`: recipes that run as they are written.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::quickstart_model;

/// Runs the program in a folder.
fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lora-train"));
    command.current_dir(folder).args(arguments).env("HF_HUB_OFFLINE", "1").output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder with rows.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let rows = Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/train.jsonl");
    fs::copy(rows, folder.path().join("rows.jsonl")).unwrap();
    folder
}

#[test]
fn from_a_model_and_rows_comes_a_recipe_that_trains_here() {
    let folder = folder();
    let model = quickstart_model().display().to_string();
    let init = ["init", "--model", &model, "--data", "rows.jsonl", "--out", "mine.toml", "--device", "cpu"];
    let written = run(folder.path(), &init);
    assert!(written.status.success(), "{}", stderr(&written));
    let text = fs::read_to_string(folder.path().join("mine.toml")).unwrap();
    for part in ["output_dir = \"runs/mine\"", "[lora]\nr = 16", "eval_split = ", "of format `messages`"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let checked = run(folder.path(), &["check", "mine.toml"]);
    assert!(checked.status.success(), "{}", stderr(&checked));
    let longest = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(!longest.contains("warning"), "{longest}");
    let trained = run(folder.path(), &["mine.toml", "--set", "train.max_steps=2", "--set", "train.num_epochs="]);
    assert!(trained.status.success(), "{}", stderr(&trained));

    // What is there is never overwritten.
    let again = run(folder.path(), &init);
    assert_eq!(again.status.code(), Some(2), "{}", stderr(&again));
    assert!(stderr(&again).contains("name another with --out"), "{}", stderr(&again));
    assert_eq!(fs::read_to_string(folder.path().join("mine.toml")).unwrap(), text);
}

#[test]
fn mistakes_of_init_name_the_argument_and_write_nothing() {
    let folder = folder();
    let model = quickstart_model().display().to_string();
    fs::write(folder.path().join("a.ipynb"), "{\"cells\": []}").unwrap();
    fs::write(folder.path().join("ppo.yml"), "base_model: m/x\nadapter: lora\nrl: ppo\n").unwrap();
    fs::write(folder.path().join("other.yml"), "method: ties\n").unwrap();
    fs::write(folder.path().join("rows.json"), "[{\"text\": \"a\"}]").unwrap();
    let mistakes: [(&[&str], &str); 10] = [
        (&["init", "--from", "a.ipynb"], "lora-train init --model MODEL --data FILE"),
        (&["init", "--from", "ppo.yml"], "ppo.yml: `rl: ppo`: this is PPO"),
        (&["init", "--from", "other.yml"], "no key in it is one of a training with LoRA"),
        (&["init", "--data", "rows.jsonl"], "--model is missing"),
        (&["init", "--model", &model], "--data is missing"),
        (&["init", "--model", &model, "--data", "rowz.jsonl"], "--data = \"rowz.jsonl\" is no file"),
        (&["init", "--model", "./nothing", "--data", "rows.jsonl"], "error: --model: ./nothing: no such folder"),
        (&["init", "--from", "rows.jsonl"], "lora-train init --model MODEL --data rows.jsonl"),
        (&["init", "--from", "rows.json"], "rows, and no configuration"),
        (&["init", "--from", "mine.toml"], "mine.toml: a recipe already"),
    ];
    for (arguments, message) in mistakes {
        let output = run(folder.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{arguments:?}: {}", stderr(&output));
        assert!(!folder.path().join("recipe.toml").exists());
    }
}

#[test]
fn a_configuration_of_axolotl_becomes_a_recipe_that_trains() {
    let folder = folder();
    let config = format!(
        "base_model: {}\ndatasets:\n  - path: rows.jsonl\n    type: chat_template\nadapter: lora\nlora_r: 4\nlora_alpha: \
         8\nlora_target_linear: true\nsequence_len: 128\nsample_packing: true\nmicro_batch_size: 2\nmax_steps: \
         2\noptimizer: adamw_bnb_8bit\nlr_scheduler: cosine\nlearning_rate: 1e-4\nval_set_size: \
         0.05\nevals_per_epoch: 4\nwandb_project:\nload_in_4bit: true\noutput_dir: out\nneftune_noise_alpha: 5\n",
        quickstart_model().display()
    );
    fs::write(folder.path().join("lora.yml"), config).unwrap();
    let written = run(folder.path(), &["init", "--from", "lora.yml"]);
    assert!(written.status.success(), "{}", stderr(&written));
    assert!(stderr(&written).contains("not taken over: evals_per_epoch: "), "{}", stderr(&written));
    assert_eq!(stderr(&written).matches("not taken over").count(), 1, "{}", stderr(&written));
    let counts = "of 20 keys, 16 are taken over, 1 lost, 3 without effect here";
    assert!(stderr(&written).contains(counts), "{}", stderr(&written));
    let text = fs::read_to_string(folder.path().join("recipe.toml")).unwrap();
    assert!(text.contains("# without effect here: datasets.0.type, adapter, wandb_project"), "{text}");
    assert!(text.contains("\nneftune_noise_alpha = 5\n"), "{text}");
    let named = [("r = 4", "lora_r"), ("max_length = 128", "sequence_len"), ("name = \"adamw_8bit\"", "optimizer")];
    for (line, name) in named {
        let found = text.lines().find(|found| found.starts_with(line)).unwrap_or_else(|| panic!("{line} in\n{text}"));
        assert!(found.ends_with(&format!("# {name}")), "{found}");
    }
    let trained = run(folder.path(), &["recipe.toml", "--device", "cpu"]);
    assert!(trained.status.success(), "{}", stderr(&trained));
    assert!(folder.path().join("out/adapter/adapter_model.safetensors").is_file());
}

#[test]
fn what_is_written_of_any_trainer_s_configuration_passes_check() {
    let folder = folder();
    fs::create_dir(folder.path().join("rows")).unwrap();
    fs::copy(folder.path().join("rows.jsonl"), folder.path().join("rows/train.jsonl")).unwrap();
    fs::copy(folder.path().join("rows.jsonl"), folder.path().join("rows/valid.jsonl")).unwrap();
    let model = quickstart_model().display().to_string();
    fs::write(folder.path().join("qa.csv"), "Question,Answer\na,b\n").unwrap();
    fs::write(folder.path().join("alpaca.jsonl"), "{\"instruction\": \"a\", \"output\": \"b\"}\n".repeat(9)).unwrap();
    fs::write(folder.path().join("text.jsonl"), r#"{"text": "a b c"}"#).unwrap();
    let configs = [
        "base_model: M\nadapter: lora\ndatasets: [{path: rows, data_files: train.jsonl, split: train}]\n",
        "base_model: M\nadapter: lora\ndatasets: [{path: qa.csv, split: train, type: alpaca_chat.load_qa}]\n",
        "base_model: M\nadapter: lora\npretraining_dataset: [{path: text.jsonl}]\nmax_steps: 2\n",
        "base_model: M\nadapter: lora\ndatasets: [{path: alpaca.jsonl, type: alpaca}]\n",
        "model_name_or_path: M\ndataset_name: rows.jsonl\nuse_peft: true\neval_strategy: steps\ndataset_test_split: test\n",
        "model_name_or_path: M\nstage: pt\ndataset: text.jsonl\n",
        "model_name_or_path: M\ndataset_name: rows.jsonl\nuse_peft: true\nlora_r: 4\n",
        "base_model: M\nadapter: lora\nlora_r: 4\nchat_template: llama3\ndatasets:\n  - path: rows.jsonl\n",
        "model_name_or_path: M\nstage: sft\ndataset: rows.jsonl\ntemplate: llama3\nmask_history: true\nmax_samples: 9\n",
        "model: M\ndata: rows\nnum_layers: 1\niters: 50\noptimizer: adamw\n",
        "checkpoint_dir: M\nlora_r: 4\ndata:\n  class_path: JSON\n  init_args: {json_path: alpaca.jsonl}\ntrain: \
         {lr_warmup_steps: 1}\n",
        "checkpointer: {checkpoint_dir: M}\nmodel: {_component_: lora_x, lora_attn_modules: [q_proj]}\ndataset: \
         {_component_: chat_dataset, source: json, data_files: rows.jsonl}\n",
    ];
    for config in configs {
        fs::write(folder.path().join("c.yaml"), config.replace(": M", &format!(": {model}"))).unwrap();
        for arguments in [&["init", "--from", "c.yaml"][..], &["check", "recipe.toml"]] {
            let output = run(folder.path(), arguments);
            assert!(output.status.success(), "{config}: {}", stderr(&output));
        }
        fs::remove_file(folder.path().join("recipe.toml")).unwrap();
    }
}
