//! Rows of the embedding that are trained beside adapters, compared with PEFT's.

use std::fs;
use std::path::Path;

use lora_train::device::Dtype;
use lora_train::lora::AdapterSet;
use lora_train::model::decode::{NextTokens, Sequence, next_logits};
use lora_train::model::weights::convert::float_dtype;
use lora_train::model::weights::{WeightFiles, convert};
use lora_train::save::export::{MergeOptions, adapter_weights, merge, read_adapter};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
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
    assert_eq!(adapter_weights(&read).full, adapter_weights(&made).full);
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
            .map(|(sequence, adapters)| NextTokens {
                sequence,
                adapters,
                token_ids: std::slice::from_ref(&id),
                num_logits: 1,
            })
            .collect();
        let all = values(&next_logits(&model, &mut parts));
        let each = alone.iter_mut().zip(&adapters).flat_map(|(sequence, adapters)| {
            values(&next_logits(&model, &mut [NextTokens { sequence, adapters, token_ids: &[id], num_logits: 1 }]))
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
        &["train.precision=bf16", "optimizer.name=\"lion\"", "train.gradient_checkpointing=true"],
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
    refused(&both, "replaces rows or modules of the model, which cannot be added up");
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

/// Copies the quickstart model to `model`, with two tokens in its tokenizer for which it has no rows, and to `resized` with rows
/// that are the mean of the others. Rows to train on have the tokens.
fn with_new_tokens(bench: &Bench) {
    let quickstart = quickstart_model();
    for folder in ["model", "resized"] {
        fs::create_dir(bench.path(folder)).unwrap();
        for file in fs::read_dir(&quickstart).unwrap().map(Result::unwrap) {
            fs::copy(file.path(), bench.path(folder).join(file.file_name())).unwrap();
        }
        let mut tokenizer = json(&quickstart.join("tokenizer.json"));
        let mut token = tokenizer["added_tokens"][0].clone();
        for (id, text) in [(1344, "<|new|>"), (1345, "<|newer|>")] {
            (token["id"], token["content"], token["special"]) = (id.into(), text.into(), false.into());
            tokenizer["added_tokens"].as_array_mut().unwrap().push(token.clone());
        }
        fs::write(bench.path(folder).join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }
    let path = bench.path("resized/config.json");
    let mut config = json(&path);
    config["vocab_size"] = 1346.into();
    fs::write(path, config.to_string()).unwrap();
    let content = fs::read(quickstart.join("model.safetensors")).unwrap();
    let mut tensors: Vec<_> = SafeTensors::deserialize(&content).unwrap().tensors();
    let embedding = tensors.iter_mut().find(|(name, _)| name == "model.embed_tokens.weight").unwrap();
    let (width, dtype) = (embedding.1.shape()[1], float_dtype(embedding.1.dtype()).unwrap());
    let numbers = convert::to_f32(embedding.1.data(), dtype);
    let mean = |column| numbers[column..].iter().step_by(width).map(|x| f64::from(*x)).sum::<f64>() / 1344.0;
    let means: Vec<f32> = (0..width).map(|column| mean(column) as f32).collect();
    let bytes = convert::from_f32(&[numbers.clone(), means.clone(), means].concat(), dtype).unwrap();
    embedding.1 = TensorView::new(embedding.1.dtype(), vec![1346, width], &bytes).unwrap();
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize_to_file(tensors, Some(metadata), &bench.path("resized/model.safetensors")).unwrap();
    let rows = fs::read_to_string(bench.path("train.jsonl")).unwrap();
    fs::write(bench.path("new.jsonl"), rows.replace("garden", "<|new|>").replace("forest", "<|newer|>")).unwrap();
}

#[test]
fn tokens_without_rows_get_rows_that_are_trained_as_those_of_a_resized_model() {
    let bench = Bench::new();
    with_new_tokens(&bench);
    let on = |model: &str| format!("model.path={:?}", bench.path(model));
    let rows = format!("data.train=[{{path={:?}}}]", bench.path("new.jsonl"));
    let train_on = |run: &str, model: &str, settings: &[&str]| {
        train(&bench.recipe(run, ""), &set(&[&[&*rows, &*on(model), "train.max_steps=4"], settings].concat()));
    };
    let command = |args: &[&str]| lora_train(args).current_dir(&bench.folder).output().unwrap();
    let text = |args: &[&str]| {
        let prompt = ["--prompt", "3: <|new|> ", "--max-new-tokens", "12"];
        let output = command(&[&["generate"], args, &prompt].concat());
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    for (run, setting) in
        [("rows", "lora.trainable_token_indices=[1344, 7, 1345]"), ("whole", "lora.modules_to_save=[\"embed_tokens\"]")]
    {
        let resized = format!("{run}-resized");
        train_on(run, "model", &[setting, "optimizer.learning_rate=1e-2"]);
        train_on(&resized, "resized", &[setting, "optimizer.learning_rate=1e-2"]);
        for out in [run, &resized] {
            for suffix in ["merged", "merged.gguf"] {
                let output = command(&["merge", out, "--out", &format!("{out}-{suffix}")]);
                assert!(output.status.success(), "{out}: {}", stderr(&output));
            }
        }
        for file in ["adapter/adapter_model.safetensors", "-merged/model.safetensors"] {
            let path = |run: &str| if file.starts_with('-') { format!("{run}{file}") } else { format!("{run}/{file}") };
            let [own, resized] = [run, &resized].map(|run| fs::read(bench.path(&path(run))).unwrap());
            assert!(own == resized, "{file} of {setting}");
        }
        let continued = text(&[run]);
        for model in [format!("{run}-merged"), format!("{run}-merged.gguf")] {
            assert_eq!(continued, text(&["--model", &model]), "{model}");
        }
        assert_eq!(json(&bench.path(&format!("{run}-merged/config.json")))["vocab_size"], 1346);
        let start = format!("lora.start_from={:?}", bench.path(run));
        train_on("next", "model", &[&start]);
        fs::remove_dir_all(bench.path("next")).unwrap();
    }
    let eval = command(&["eval", "rows", "--data", "new.jsonl"]);
    assert!(eval.status.success(), "{}", stderr(&eval));
    resumes_to_the_same_bytes(&bench, "resumed", &[&rows, &on("model"), "lora.trainable_token_indices=[1345]"]);

    // As PEFT has it, an adapter of embeddings that are not grown trains on as it is.
    train(&bench.recipe("stock", ""), &set(&["train.max_steps=2", "lora.modules_to_save=[\"embed_tokens\"]"]));
    let start = format!("lora.start_from={:?}", bench.path("stock"));
    train(&bench.recipe("next", ""), &set(&[&on("model"), &start, "train.max_steps=2"]));
    let refused = |args: &[&str]| {
        let output = command(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        stderr(&output)
    };
    let quickstart = quickstart_model();
    // The tokenizer that lies beside an adapter has its new tokens, whatever the base has.
    let others = command(&["merge", "rows", "--model", quickstart.to_str().unwrap(), "--out", "others-merged"]);
    assert!(others.status.success(), "{}", stderr(&others));
    let [own, others] = ["rows-merged", "others-merged"].map(|run| fs::read(bench.path(run).join("model.safetensors")));
    assert!(own.unwrap() == others.unwrap());
    let message = refused(&[&["inspect", "rows.toml"], &*set(&[&rows, &on("model")])].concat());
    assert!(message.contains("has no row for \"<|new|>\", token 1344"), "{message}");

    // A token that is neither trained nor in the rows needs none.
    train(&bench.recipe("others", ""), &set(&[&on("model"), "train.max_steps=2"]));
    let check = |settings: &[&str], reason: &str| {
        let recipe = bench.recipe("checked", "");
        let message = refused(&[&["check", recipe.to_str().unwrap()], &*set(settings)].concat());
        assert!(message.contains(reason), "{message}");
    };
    check(&[&rows, &on("model")], "the model's embedding has no row for \"<|new|>\", token 1344");
    check(&[&on("model"), "lora.trainable_token_indices=[1346]"], "1346, expected tokens from 0 to 1343");
}
