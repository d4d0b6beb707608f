//! `lora-train push`: what would be uploaded, and the card. `hub::upload` has the tests of what a server receives.

use std::fs;

use crate::common::{Bench, lora_train, run, stderr, train};

fn pushed(args: &[&str]) -> (Option<i32>, String, String) {
    let output = lora_train(&[&["push"], args].concat()).env("HF_HUB_OFFLINE", "1").output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), stderr(&output))
}

#[test]
fn the_card_says_how_the_adapter_was_made_and_names_no_path_of_this_machine() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &["--set", "train.max_steps=4"]);
    let folder = bench.path("run");
    let run_dir = folder.to_str().unwrap();
    let (code, shown, said) = pushed(&[run_dir, "me/adapter", "--dry-run", "--base", "org/base"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(shown.starts_with("would write to me/adapter, private where it is made:\n"), "{shown}");
    let (files, card) = shown.split_once("\n\n---\n").unwrap();
    let of_adapter = ["adapter_model.safetensors", "adapter_config.json", "prompt_form.json"];
    // Other programs look for the tokenizer beside the adapter.
    for file in of_adapter.into_iter().chain(["tokenizer.json", "tokenizer_config.json", "loss.svg", "README.md"]) {
        assert!(files.contains(&format!("  {file}")), "{file}: {files}");
    }
    let recipe = card.split_once("```toml\n").unwrap().1;
    assert!(recipe.lines().count() < 40 && !recipe.contains("num_generations"), "{recipe}");
    let loss = crate::common::json(&folder.join("summary.json"))["final_eval_loss"].as_f64().unwrap();
    for part in [
        "base_model: \"org/base\"\nbase_model_relation: adapter\nlibrary_name: peft\n",
        "from_pretrained(\"me/adapter\")",
        "vllm serve org/base --enable-lora --lora-modules adapter=me/adapter\n",
        "![Loss over the steps](loss.svg)",
        &format!("| evaluation loss | {} |", &loss.to_string()[..4]),
        "- `train.jsonl`, format ",
        "| steps | 4 (",
        "[lora]\nr = 4\n",
        "path = \"train.jsonl\"\n",
        "path = \"org/base\"\n",
    ] {
        // Losses are shown with four digits, rounded.
        assert!(card.contains(part.trim_end_matches(" |")), "{part}: {card}");
    }
    let place = bench.folder.path().to_str().unwrap();
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "no such host".to_owned());
    assert!(!shown.contains(place) && !shown.contains(env!("CARGO_MANIFEST_DIR")), "{shown}");
    assert!(!card.contains(host.trim()), "{card}");
    assert_eq!(card.matches("```").count() % 2, 0);

    // A base in a folder has its name alone; a merged model is another kind of thing.
    let (_, shown, said) = pushed(&[run_dir, "me/adapter", "--dry-run", "--best", "--public"]);
    assert!(
        said.contains("nobody else can load the adapter\n  hint: --base OWNER/NAME") && !shown.contains("base_model:"),
        "{said}{shown}"
    );
    assert!(shown.contains("public where it is made") && shown.contains("trained on `model`"), "{shown}");
    let merged = bench.path("merged");
    let merged = merged.to_str().unwrap();
    assert!(run(&["merge", run_dir, "--out", merged]).status.success());
    let (_, shown, _) = pushed(&[run_dir, "me/model", "--dry-run", "--merged", merged, "--base", "org/base"]);
    assert!(shown.contains("library_name: transformers") && shown.contains("  model.safetensors\n"), "{shown}");
    assert!(!shown.contains("adapter_model"), "{shown}");

    // What is not finished is pushed from its last checkpoint, and says so.
    fs::remove_file(folder.join("summary.json")).unwrap();
    let (code, shown, said) = pushed(&[run_dir, "me/adapter", "--dry-run"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("has not finished: this is ") && shown.contains("has not finished: these are"), "{said}");
}

#[test]
fn what_cannot_be_pushed_is_a_mistake_before_anything_is_sent() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &["--set", "train.max_steps=2"]);
    let folder = bench.path("run");
    let run_dir = folder.to_str().unwrap();
    let adapter = bench.path("alone");
    fs::create_dir(&adapter).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(folder.join("adapter").join(name), adapter.join(name)).unwrap();
    }
    let place = bench.folder.path().to_str().unwrap();
    for (args, message) in [
        (vec![run_dir, "adapter"], "`adapter` is no name of a repository, expected OWNER/NAME\n  hint: the owner is"),
        (vec!["runs/nothing", "me/x"], "runs/nothing: there is no adapter\n  hint: name the output folder"),
        (vec![adapter.to_str().unwrap(), "me/x"], "the adapter belongs to no run"),
        (
            vec![run_dir, "me/x", "--merged", place],
            "no model, there is no config.json in it\n  hint: `lora-train merge",
        ),
        (vec![run_dir, "me/x"], "HF_HUB_OFFLINE is set\n  hint: unset it"),
        (vec![run_dir, "me/x", "--private"], "no option `--private`"),
    ] {
        let (code, stdout, said) = pushed(&args);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{args:?}: {said}");
        assert!(said.contains(message), "{args:?}: {said}");
    }
    let mut without_token = lora_train(&["push", run_dir, "me/x"]);
    without_token.env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN").env("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1");
    let output = without_token.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("there is no access token\n  hint: make one with write access at "));
    fs::remove_dir_all(folder.join("adapter")).unwrap();
    fs::remove_dir_all(folder.join("checkpoints")).unwrap();
    let (code, _, said) = pushed(&[run_dir, "me/x", "--dry-run"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("this run has no adapter and no checkpoint yet"), "{said}");
}
