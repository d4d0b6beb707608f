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
    fs::write(
        folder.path().join("full.py"),
        "model = AutoModelForCausalLM.from_pretrained('m/x')\nSFTConfig(seed=1)\n",
    )
    .unwrap();
    fs::write(folder.path().join("triples.jsonl"), "{\"anchor\": \"a\", \"positive\": \"b\", \"negative\": \"c\"}\n")
        .unwrap();
    fs::create_dir(folder.path().join("adapter")).unwrap();
    let adapter = "{\"base_model_name_or_path\": \"org/base\"}";
    fs::write(folder.path().join("adapter/adapter_config.json"), adapter).unwrap();
    fs::write(folder.path().join("mine.toml"), "[model]\npath = \"m/x\"\n").unwrap();
    let mistakes: [(&[&str], &str); 16] = [
        (&["init", "--from", "full.py"], "the program trains all weights"),
        (&["init", "--model", &model, "--data", "triples.jsonl"], "rows of a model of embeddings"),
        (&["init", "--model", "adapter", "--data", "rows.jsonl"], "adapter is an adapter of org/base"),
        (&["init", "--model", "mlx-community/X-4bit", "--data", "rows.jsonl"], "quantised in MLX's form"),
        (&["init", "--model", &model, "--data", "rows.jsonl", "--set", "lora.rr=4"], "--set lora.rr=4: "),
        (&["init", "--from", "ppo.yml", "--set", "lora.rr=4"], "ppo.yml: `rl: ppo`"),
        (&["init", "--from", "a.ipynb"], "a.ipynb: has no call of a training"),
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
    assert!(
        stderr(&written).contains("adamw_8bit is adamw here: the moments of this adapter are "),
        "{}",
        stderr(&written)
    );
    let text = fs::read_to_string(folder.path().join("recipe.toml")).unwrap();
    assert!(text.contains("# without effect here: datasets.0.type, adapter, wandb_project"), "{text}");
    assert!(text.contains("\nneftune_noise_alpha = 5\n"), "{text}");
    let named = [("r = 4", "lora_r"), ("max_length = 128", "sequence_len"), ("name = \"adamw\"", "optimizer")];
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

/// Runs `init` on rows, and returns what it says and the recipe.
fn written(folder: &Path, rows: &str, more: &[&str]) -> (String, String) {
    let model = quickstart_model().display().to_string();
    let path = folder.join("recipe.toml");
    drop(fs::remove_file(&path));
    let output = run(folder, &[&["init", "--model", &model, "--data", rows, "--device", "cpu"], more].concat());
    assert!(output.status.success(), "{rows}: {}", stderr(&output));
    (stderr(&output), fs::read_to_string(path).unwrap())
}

#[test]
fn a_recipe_is_written_of_rows_that_need_a_word_about_them() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let passes = || run(folder.path(), &["check", "recipe.toml"]).status.success();
    let cells = "Datum;Betreff;Anfrage;Antwort;Status\r\n2026-01-02;F\u{f6}n;Wo bleibt er, bitte?;Er kommt.;zu\r\n";
    let latin: Vec<u8> = cells.chars().map(|character| u8::try_from(u32::from(character)).unwrap()).collect();
    fs::write(path("mails.csv"), latin).unwrap();
    let (said, recipe) = written(folder.path(), "mails.csv", &[]);
    for part in [
        "columns: Anfrage -> prompt, Antwort -> completion (guessed",
        "columns not read: Betreff, Datum, Status",
        "\"F\u{f6}n\"",
    ] {
        assert!(said.contains(part) && recipe.contains(part), "{part}: {said}{recipe}");
    }
    assert!(recipe.contains("columns = { prompt = \"Anfrage\", completion = \"Antwort\" }") && passes(), "{recipe}");

    fs::write(path("films.csv"), "text,label\nfine,good\nbad,poor\n").unwrap();
    let (said, recipe) = written(folder.path(), "films.csv", &[]);
    let columns = "columns = { prompt = \"text\", completion = \"label\" }";
    assert!(said.contains(&format!("`label` is not learnt; `{columns}`")) && passes(), "{said}");
    assert!(recipe.contains(columns), "{recipe}");

    let row = "{\"prompt\": \"a?\", \"completion\": \"b\"}\n";
    fs::write(path("bad.jsonl"), row.repeat(4) + "{\"prompt\": null, \"completion\": \"b\"}\n" + row).unwrap();
    let (said, recipe) = written(folder.path(), "bad.jsonl", &[]);
    assert!(said.contains("bad.jsonl:line 5: `prompt` must be text, not null") && !said.contains("trains"), "{said}");
    assert!(recipe.contains("\n# on_bad_row = \"skip\"") && !passes(), "{recipe}");
    fs::write(path("recipe.toml"), recipe.replace("# on_bad_row", "on_bad_row")).unwrap();
    assert!(passes());

    // Longer than any guess, and than the model reads.
    let long = format!("{{\"prompt\": \"{}\", \"completion\": \"b\"}}\n", "a word ".repeat(2000));
    fs::write(path("long.jsonl"), row.to_owned() + &long).unwrap();
    let (said, _) = written(folder.path(), "long.jsonl", &[]);
    assert!(said.contains("this model reads ") && passes(), "{said}");

    // Nothing that can be read: it is said, and the recipe is there, with a length that the model reads.
    fs::write(path("numbers.jsonl"), "{\"a\": 1, \"b\": 2}\n").unwrap();
    let (said, recipe) = written(folder.path(), "numbers.jsonl", &[]);
    assert!(said.contains("are those of no format") && recipe.contains("[lora]\nr = 16"), "{said}{recipe}");
    assert!(recipe.contains("max_length = 512 "), "{recipe}");

    // A first row that names no columns, and names that are none of a row.
    fs::write(path("headless.csv"), "Where is my order?,It is on its way.\nWhy so late?,It snows.\n").unwrap();
    let (said, _) = written(folder.path(), "headless.csv", &[]);
    assert!(said.contains("such as \"Where is my order?\": if it is a row, write a line of names above it"), "{said}");
    fs::write(path("names.csv"), "What they wrote,Our reply to it (final)\nWhy so late?,It snows.\n").unwrap();
    let (said, _) = written(folder.path(), "names.csv", &[]);
    assert!(!said.contains("if it is a row") && said.contains("Our reply to it (final) -> completion"), "{said}");

    fs::write(path("about.csv"), "question,context,answer\nWho?,Ann came.,Ann\n").unwrap();
    let (said, _) = written(folder.path(), "about.csv", &[]);
    let columns = "columns = { instruction = \"question\", input = \"context\", output = \"answer\" }";
    assert!(said.contains(&format!("`context` is not read; `{columns}` puts it below the question")), "{said}");
}

#[test]
fn few_rows_are_held_out_and_the_command_line_goes_before_every_choice() {
    let folder = folder();
    let rows: String = (0..20_000).map(|row| format!("question {row},answer {row}\n")).collect();
    fs::write(folder.path().join("many.csv"), format!("prompt,completion\n{rows}")).unwrap();
    let (_, recipe) = written(folder.path(), "many.csv", &[]);
    // 19,744 rows in steps of 16.
    for part in [
        "eval_split = 256 ", "eval_steps = 100 ", "; 20,000 rows of format", "num_epochs = 1\n",
        "learning_rate = 2e-4\n",
    ] {
        assert!(recipe.contains(part), "{part}: {recipe}");
    }
    let set = [
        "--set",
        "lora.r=4",
        "--set",
        "train.max_steps=30",
        "--set",
        "data.eval_split=9",
        "--set",
        "optimizer.learning_rate=0.00001",
    ];
    let (_, recipe) = written(folder.path(), "many.csv", &set);
    for part in ["\nr = 4\n", "max_steps = 30\n", "eval_split = 9\n", "eval_steps = 3 ", "learning_rate = 1e-5\n"] {
        assert!(recipe.contains(part) && !recipe.contains("num_epochs"), "{part}: {recipe}");
    }

    // However short, every text is a row of its own.
    fs::create_dir(folder.path().join("texts")).unwrap();
    for name in 0..7 {
        fs::write(folder.path().join(format!("texts/{name}.txt")), "Once upon a time a snail sat in a basket.\n")
            .unwrap();
    }
    let (_, recipe) = written(folder.path(), "texts", &[]);
    for part in ["; 7 rows of format `text` in 7 files", "max_length = 128 ", "# a text is cut"] {
        assert!(recipe.contains(part), "{part}: {recipe}");
    }
}

#[test]
fn notebooks_programs_commands_and_jobs_become_recipes_that_pass_check() {
    let folder = folder();
    let model = quickstart_model().display().to_string();
    fs::write(
        folder.path().join("asked.jsonl"),
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a?\"}], \"right\": \"b\"}\n",
    )
    .unwrap();
    let program = "model, tokenizer = FastLanguageModel.from_pretrained('M', load_in_4bit=True)\nmodel = \
                   FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)\nrows = load_dataset('json', data_files='rows.jsonl', \
                   split='train')\nSFTTrainer(model=model, args=SFTConfig(max_steps=9, learning_rate=1e-4, bf16=is_bfloat16_supported()))\n\
                   model.save_pretrained_gguf('m', tokenizer, quantization_method='q4_k_m')\n";
    let cell = serde_json::json!({"cells": [{"cell_type": "code", "source": program}]}).to_string();
    let swift = "CUDA_VISIBLE_DEVICES=0 \\\nswift sft \\\n  --model M --tuner_type lora --dataset rows.jsonl#100 --target_modules all-linear \\\n  \
                 --lora_rank 4 --split_dataset_ratio 0.1 --quant_bits 4 --deepspeed zero2\n";
    let args = "{\"model\": \"M\", \"tuner_type\": \"lora\", \"dataset\": [\"rows.jsonl#100\"], \"target_modules\": [\"all-linear\"], \
                \"quant_method\": \"bnb\", \"quant_bits\": 4, \"split_dataset_ratio\": 0.1, \"lora_rank\": 4, \"deepspeed\": null}";
    let job = |method: &str| {
        format!(
            "{{\"model\": \"gpt-4o-mini-2024-07-18\", \"training_file\": \"file-abc\", \"seed\": 7, \"suffix\": \"mails\", \"method\": {method}}}"
        )
    };
    let supervised = job(
        "{\"type\": \"supervised\", \"supervised\": {\"hyperparameters\": {\"n_epochs\": 2, \"batch_size\": 4, \"learning_rate_multiplier\": \"auto\"}}}",
    );
    let check = "{\"type\": \"string_check\", \"name\": \"c\", \"input\": \"{{sample.output_text}}\", \"reference\": \"{{ item.right }}\", \"operation\": \"eq\"}";
    let reinforced = job(&format!(
        "{{\"type\": \"reinforcement\", \"reinforcement\": {{\"grader\": {{\"type\": \"multi\", \"graders\": {{\"c\": {check}}}, \"calculate_output\": \"0.5 * c\"}}}}}}"
    ));
    let own = ["--model", &model, "--data", "rows.jsonl"];
    let asked = ["--model", &model, "--data", "asked.jsonl"];
    let cases: [(&str, &str, &[&str], &[&str]); 8] = [
        (
            "a.ipynb",
            &cell,
            &[],
            &["r = 4", "quantization = \"nf4\"", "path = \"rows.jsonl\"", "max_steps = 9", "llama-quantize"],
        ),
        ("a.py", program, &[], &["lora_alpha = 8", "precision = \"bf16\"", "learning_rate = 1e-4"]),
        (
            "a.sh",
            swift,
            &[],
            &[
                "rows = 100",
                "r = 4",
                "eval_split = 0.1",
                "quantization = \"nf4\"",
                "deepspeed: each GPU holds the whole model",
            ],
        ),
        (
            "args.json",
            args,
            &[],
            &["rows = 100", "target_modules = \"all-linear\"", "of 9 keys, 7 are taken over, 0 lost"],
        ),
        (
            "job.json",
            &supervised,
            &own,
            &[
                "num_epochs = 2",
                "micro_batch_size = 4",
                "seed = 7",
                "output_dir = \"runs/mails\"",
                "of 8 keys, 4 are taken over, 0 lost, 4 without effect here",
            ],
        ),
        (
            "flat.toml",
            "model_name_or_path = \"M\"\nuse_peft = true\nlora_r = 4\ndataset_name = \"rows.jsonl\"\n",
            &[],
            &["\nr = 4 ", "of 4 keys, 3 are taken over, 0 lost"],
        ),
        (
            "rft.json",
            &reinforced,
            &asked,
            &["name = \"grpo\"", "kind = \"exact\"", "column = \"right\"", "weight = 0.5"],
        ),
        ("grader.json", check, &asked, &["name = \"grpo\"", "column = \"right\""]),
    ];
    for (name, text, arguments, parts) in cases {
        fs::write(
            folder.path().join(name),
            text.replace("'M'", &format!("'{model}'"))
                .replace("\"M\"", &format!("\"{model}\""))
                .replace(" M ", &format!(" {model} ")),
        )
        .unwrap();
        let output = run(folder.path(), &[&["init", "--from", name], arguments].concat());
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        let recipe = fs::read_to_string(folder.path().join("recipe.toml")).unwrap();
        for part in parts {
            assert!(recipe.contains(part), "{name}: {part} in\n{recipe}");
        }
        let output = run(folder.path(), &["check", "recipe.toml"]);
        assert!(output.status.success(), "{name}: {}\n{recipe}", stderr(&output));
        fs::remove_file(folder.path().join("recipe.toml")).unwrap();
    }
}
