//! Rows of the embedding that are trained beside adapters, compared with PEFT's.

use std::fs;
use std::path::Path;

use lora_train::device::Dtype;
use lora_train::lora::AdapterSet;
use lora_train::model::decode::{Part, Sequence, next_logits};
use lora_train::model::weights::WeightFiles;
use lora_train::save::export::{MergeOptions, adapter_weights, merge, read_adapter};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::families::write_family;
use crate::common::{
    Bench, json, lora_train, metrics, quickstart_model, resumes_to_the_same_bytes, set, stderr, train,
};
use crate::golden::{
    Golden, assert_near, batch, compare_cases, compare_curve, compare_logits, compare_projections, rows, values,
};

pub(crate) fn golden() -> Golden {
    Golden::open("tokens", quickstart_model())
}

/// Tied with a scale of the embeddings and a cap of the logits, and not tied with a scale.
fn families() -> impl Iterator<Item = (Golden, TempDir)> {
    ["gemma2", "gemma3"].into_iter().map(|name| {
        let folder = tempfile::tempdir().unwrap();
        write_family(name, folder.path());
        (Golden::open(&format!("tokens-{name}"), folder.path().to_owned()), folder)
    })
}

#[test]
fn logits_losses_gradients_and_the_loss_curve_are_those_of_peft() {
    compare_cases(&golden(), Dtype::F32);
    compare_curve(&golden());
    for (golden, _folder) in families() {
        compare_cases(&golden, Dtype::F32);
    }
}

#[test]
fn an_adapter_that_peft_wrote_gives_its_logits_and_its_merged_weights() {
    let golden = golden();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokens/adapter");
    let model = golden.model(Dtype::F32);
    let read = read_adapter(&folder).unwrap().into_set(&folder, &model.config, &model.device()).unwrap();
    let made = Golden::adapters(&golden.json["cases"]["all"], &model);
    assert_eq!(adapter_weights(&read).tokens, adapter_weights(&made).tokens);
    compare_logits(&golden, "all", &model, &read, &batch(&rows(&golden.json["batch"])));

    let out = tempfile::tempdir().unwrap();
    let options = MergeOptions { dtype: Some(Dtype::F32), ..MergeOptions::default() };
    merge(&golden.model_dir, &folder, &out.path().join("merged"), options, &|_, _| ()).unwrap();
    let merged = WeightFiles::open(&out.path().join("merged")).unwrap();
    let (name, shape) = ("model.embed_tokens.weight", [model.config.vocab_size, model.config.hidden_size]);
    compare_projections(name, &merged.load_f32(name, &shape).unwrap(), 1.0, &golden.json["merged"][name], 1e-7);
}

#[test]
fn texts_with_and_without_such_rows_are_continued_in_one_pass() {
    let golden = golden();
    let model = golden.model(Dtype::F32);
    let adapters = [
        Golden::adapters(&golden.json["cases"]["all"], &model),
        AdapterSet::none(model.config.num_layers()),
        Golden::adapters(&golden.json["cases"]["last_block"], &model),
    ];
    let ids = golden.json["cases"]["all"]["lora"]["trainable_token_indices"].as_array().unwrap();
    let ids: Vec<u32> = ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
    let [mut alone, mut together] = [0, 1].map(|_| [0, 1, 2].map(|_| Sequence::new(&model)));
    for id in ids {
        let mut parts: Vec<_> = together
            .iter_mut()
            .zip(&adapters)
            .map(|(sequence, adapters)| Part { sequence, adapters, token_ids: std::slice::from_ref(&id) })
            .collect();
        let all = values(&next_logits(&model, &mut parts));
        let each = alone.iter_mut().zip(&adapters).flat_map(|(sequence, adapters)| {
            values(&next_logits(&model, &mut [Part { sequence, adapters, token_ids: &[id] }]))
        });
        assert!(all == each.collect::<Vec<_>>());
        let [with, without] = [0, 1].map(|text| &all[text * model.config.vocab_size..][..model.config.vocab_size]);
        assert!(with[id as usize] != without[id as usize]);
    }
}

#[test]
fn files_that_say_nothing_of_an_embedding_or_too_much_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokens/adapter");
    let read = |tokens: Value| {
        let mut config = json(&golden.join("adapter_config.json"));
        config["trainable_token_indices"] = tokens;
        fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        read_adapter(folder.path()).map(|saved| saved.config.trainable_token_indices).map_err(|error| error.to_string())
    };
    fs::copy(golden.join("adapter_model.safetensors"), folder.path().join("adapter_model.safetensors")).unwrap();
    for tokens in [
        serde_json::json!({"embed_tokens": [3, 1]}),
        serde_json::json!({"model.embed_tokens": [3, 1], "lm_head": [3, 1]}),
        serde_json::json!([3, 1]),
    ] {
        assert_eq!(read(tokens).unwrap(), Some(vec![3, 1]));
    }
    for (tokens, reason) in [
        (serde_json::json!([3, 1, 3]), "3 is there twice"),
        (serde_json::json!({"embed_tokens": [3], "lm_head": [1]}), "only the embedding's rows are supported"),
        (serde_json::json!({"lm_head": [1]}), "only the embedding's rows are supported"),
        (serde_json::json!([-1]), "expected a list of token numbers, each once"),
    ] {
        let error = read(tokens).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}

/// Tokens of the rows of [`Bench`].
const TOKENS: &str = "lora.trainable_token_indices=[300, 265, 12]";

#[test]
fn a_run_starts_at_the_loss_of_the_base_and_is_resumed_to_the_same_bytes() {
    let bench = Bench::new();
    let eval_losses = |run: &str| -> Vec<f64> {
        metrics(&bench.path(run)).iter().filter_map(|line: &Value| line["eval_loss"].as_f64()).collect()
    };
    train(&bench.recipe("plain", ""), &set(&["train.max_steps=2"]));
    for (index, extra) in [
        &["lora.lora_dropout=0.1", "train.gradient_accumulation_steps=3", "train.layered_accumulation=true"][..],
        &["lora.lora_dropout=0", "lora.init_lora_weights=\"pissa\"", "data.packing=true"],
        &["lora.layers_to_transform=[1]", "optimizer.name=\"adamw_8bit\"", "optimizer.ema_decay=0.5"],
        &["train.precision=bf16", "optimizer.name=\"muon\"", "train.gradient_checkpointing=true"],
    ]
    .iter()
    .enumerate()
    {
        let run = format!("run-{index}");
        resumes_to_the_same_bytes(&bench, &run, &[&[TOKENS], *extra].concat());
        if index < 3 {
            assert_near(eval_losses(&run)[0], eval_losses("plain")[0], 1e-5, extra[0]);
        }
    }
}

#[test]
fn a_run_is_merged_continued_and_written_with_and_its_adapter_alone_is_no_gguf() {
    let bench = Bench::new();
    train(&bench.recipe("run", ""), &set(&[TOKENS, "train.max_steps=6", "optimizer.learning_rate=1e-2"]));
    let folder = bench.path("run");
    let saved = json(&folder.join("adapter/adapter_config.json"));
    assert_eq!(saved["trainable_token_indices"], serde_json::json!([12, 265, 300]));
    let command = |args: &[&str]| lora_train(args).current_dir(&bench.folder).output().unwrap();
    let text = |args: &[&str]| {
        let output = command(&[&["generate"], args, &["--prompt", "3: ", "--max-new-tokens", "12"]].concat());
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    for out in ["merged", "merged.gguf"] {
        let output = command(&["merge", "run", "--out", out]);
        assert!(output.status.success(), "{out}: {}", stderr(&output));
        assert_eq!(text(&["run"]), text(&["--model", out]), "{out}");
    }
    let refused = |args: &[&str], reason: &str| {
        let output = command(args);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    };
    let alone = ["merge", "run", "--out", "adapter.gguf", "--adapter-only"];
    refused(&alone, "llama.cpp has no adapters with `trainable_token_indices`");

    let start = format!("lora.start_from={folder:?}");
    train(&bench.recipe("next", ""), &set(&[&start, "train.max_steps=2"]));
    let both = ["merge", "run", "next", "--weights", "1,1", "--out", "both"];
    refused(&both, "take the place of the model's, and have no weighted sum");
    let losses = ["run", "next"].map(|run| {
        let metrics = metrics(&bench.path(run));
        let losses: Vec<f64> = metrics.iter().filter_map(|line: &Value| line["eval_loss"].as_f64()).collect();
        (losses[0], losses[losses.len() - 1])
    });
    assert_near(losses[1].0, losses[0].1, 1e-5, "the first loss of a run that goes on");

    let next = bench.recipe("wrong", "");
    for (value, reason) in [
        ("[3, 5000]", "`lora.trainable_token_indices`: 5000, expected tokens from 0 to "),
        ("[3, 3]", "3 is there twice"),
        ("[\"<eos>\"]", "expected a list of token numbers from 0, each once"),
    ] {
        let set = format!("lora.trainable_token_indices={value}");
        refused(&["check", next.to_str().unwrap(), "--set", &set], reason);
    }
}
