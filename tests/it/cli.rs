//! The command as users see it: exit codes, stdout and stderr.

use std::path::Path;
use std::process::{Command, Output};

/// Runs the binary in `folder`.
fn lora_train(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lora-train")).args(args).current_dir(folder).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn mistakes_in_a_recipe_end_with_2_and_go_to_stderr_without_colour() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("r.toml"), "[lora]\ntarget = \"all\"\nlora_dropout = 1.2\n").unwrap();
    for command in [&["check", "r.toml"][..], &["r.toml"]] {
        let output = lora_train(folder.path(), command);
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        assert_eq!(text(&output.stdout), "", "{command:?}");
        assert_eq!(
            text(&output.stderr),
            "error: r.toml: `model.path` is missing: a local Hugging Face folder or the id of a Hub repository\n\
             error: r.toml: there is no training data\n  hint: add [[data.train]] with the `path` of a file\n\
             error: r.toml:2:1: unknown key `target`\n  |\n2 | target = \"all\"\n  | ^^^^^^\n  \
             hint: did you mean `target_modules`?\n\
             error: r.toml:3:16: `lora.lora_dropout` = 1.2, expected a number in [0, 1)\n  |\n\
             3 | lora_dropout = 1.2\n  |                ^^^\n",
            "{command:?}"
        );
    }
}

#[test]
fn all_that_is_missing_around_a_recipe_is_found_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = "[model]\npath = \"./model\"\n[[data.train]]\npath = \"rows.jsonl\"\n[device]\nname = \"cpu\"\n";
    std::fs::write(folder.path().join("r.toml"), recipe).unwrap();
    let output = lora_train(folder.path(), &["check", "r.toml", "--set", "output_dir=r.toml"]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    let folder = folder.path().display();
    for mistake in [
        "--set output_dir=r.toml: `output_dir` = r.toml: r.toml is a file",
        &format!("r.toml:2:8: `model.path`: ./model: no such folder in {folder}"),
        "r.toml:4:8: `data.train[0].path` = \"rows.jsonl\"",
    ] {
        assert!(stderr.contains(&format!("error: {mistake}")), "{stderr}");
    }
    assert!(text(&output.stdout).contains("device: cpu ("));
}

#[test]
fn mistakes_in_a_recipe_and_in_the_files_that_it_names_are_found_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = "[model]\npath = \"./model\"\n[lora]\nrank = 4\n[[data.train]]\npath = \"rows.jsonl\"\n\
                  [[data.train]]\nweight = 2.0\n[train]\nmicro_batch_size = 0\n";
    std::fs::write(folder.path().join("r.toml"), recipe).unwrap();
    let output = lora_train(folder.path(), &["check", "r.toml"]);
    let stderr = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    let mistakes = [
        "unknown key `rank`",
        "`data.train[1].path` is missing",
        "`train.micro_batch_size` = 0",
        "./model: no such folder",
        "`data.train[0].path` = \"rows.jsonl\"",
    ];
    for mistake in mistakes {
        assert!(stderr.contains(mistake), "`{mistake}` is missing in:\n{stderr}");
    }
    assert_eq!(stderr.matches("error: ").count(), mistakes.len(), "{stderr}");
}

#[test]
fn a_recipe_that_is_not_there_may_be_a_command_with_a_slip() {
    let folder = tempfile::tempdir().unwrap();
    let output = lora_train(folder.path(), &["chekc"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stderr), "error: no command `chekc`\n  hint: did you mean `check`?\n");
}

#[test]
fn usage_errors_end_with_2_and_help_and_version_with_0() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&[][..], &["--frobnicate"], &["check"], &["r.toml", "extra"], &["r.toml", "--set"]] {
        let output = lora_train(folder.path(), args);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{args:?}");
        assert!(text(&output.stderr).contains("--help"), "{args:?}");
    }
    let version = lora_train(folder.path(), &["--version"]);
    assert_eq!(version.status.code(), Some(0));
    assert_eq!(text(&version.stdout), format!("lora-train {}\n", env!("CARGO_PKG_VERSION")));
    let help = text(&lora_train(folder.path(), &["--help"]).stdout);
    assert!(help.starts_with(env!("CARGO_PKG_DESCRIPTION")), "{help}");
    let places = ["\nBefore training:\n  demo ", "\nTraining:\n  train ", "\nAfter training:\n  chat ", "\n  doctor "];
    let places = places.map(|text| help.find(text).unwrap_or_else(|| panic!("no {text} in {help}")));
    assert!(places.is_sorted() && help.contains("\n      --resume ") && !help.contains('\u{1b}'), "{help}");
    assert_eq!(text(&lora_train(folder.path(), &["help"]).stdout), help);
    let of_check =
        [&["help", "check"][..], &["check", "--help"]].map(|args| text(&lora_train(folder.path(), args).stdout));
    assert!(of_check[0].contains("\n      --rows ") && of_check[0] == of_check[1], "{of_check:?}");
}

#[test]
fn completions_and_the_manual_page_know_every_command_and_option() {
    let folder = tempfile::tempdir().unwrap();
    for (format, start) in
        [("bash", "_lora__train() {"), ("zsh", "#compdef lora-train"), ("fish", "# Print an"), ("man", ".ie")]
    {
        let output = lora_train(folder.path(), &["completions", format]);
        let page = text(&output.stdout);
        assert!(output.status.success() && page.starts_with(start), "{format}: {page}");
        for name in ["inspect", "compare", "resume", "completions"] {
            assert!(page.contains(name), "{name} is not in the {format}");
        }
    }
}

/// Writes tensors of one value each to a safetensors file.
fn write_tensors(path: &Path, tensors: &[(String, Vec<usize>, f32)]) {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, shape, value)| value.to_le_bytes().repeat(shape.iter().product())).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

#[test]
fn merge_writes_a_model_folder_or_a_gguf_file_once_and_refuses_to_overwrite_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir_all(path("base")).unwrap();
    std::fs::create_dir_all(path("run/adapter")).unwrap();
    let json = include_str!("../../configs/tiny.json");
    std::fs::write(path("base/config.json"), json).unwrap();
    let config = lora_train::spec::ModelConfig::from_json(json).unwrap();
    let base: Vec<_> = config.expected_tensors().into_iter().map(|(name, shape)| (name, shape, 1.0)).collect();
    write_tensors(&path("base/model.safetensors"), &base);
    let module = "model.layers.1.self_attn.v_proj";
    let adapter = [("A", vec![2, 64], 0.5), ("B", vec![32, 2], 0.25)]
        .map(|(letter, shape, value)| (format!("base_model.model.{module}.lora_{letter}.weight"), shape, value));
    write_tensors(&path("run/adapter/adapter_model.safetensors"), &adapter);
    let adapter_config = format!(r#"{{"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["{module}"]}}"#);
    std::fs::write(path("run/adapter/adapter_config.json"), adapter_config).unwrap();

    // A run's folder stands for its adapter.
    let args = ["merge", "--model", "./base", "--adapter", "run", "--out", "new/merged"];
    let output = lora_train(folder.path(), &args);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), ""), "{}", text(&output.stderr));
    assert!(text(&output.stderr).starts_with("merged 1 layer of "), "{}", text(&output.stderr));
    let merged = std::fs::read(path("new/merged/model.safetensors")).unwrap();
    let merged = safetensors::SafeTensors::deserialize(&merged).unwrap();
    for (name, tensor) in merged.iter() {
        // 1 + 6/2 * (0.25 * 0.5 + 0.25 * 0.5)
        let expected = if name == format!("{module}.weight") { 1.75_f32 } else { 1.0 };
        assert!(tensor.data().chunks(4).all(|bytes| bytes == expected.to_le_bytes()), "{name}");
    }
    assert_eq!(std::fs::read_to_string(path("new/merged/config.json")).unwrap(), json);

    let again = lora_train(folder.path(), &args);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("new/merged exists and is not empty"), "{}", text(&again.stderr));

    for (out, options, code, expected) in [
        ("new/a.gguf", &["--adapter-only"][..], 0, "llama-cli -m BASE.gguf --lora new/a.gguf"),
        ("new/a.gguf", &["--adapter-only"], 2, "new/a.gguf exists"),
        ("new/b.gguf", &["--adapter-only", "--dtype", "f16"], 2, "cannot be used with"),
        ("new/b.gguf", &["--dtype", "q4_k"], 2, "[possible values: f32, f16, bf16, q8_0, "),
        ("new/b.gguf", &["--dtype", "q8_0"], 2, "no tokenizer.json"),
        ("new/b", &["--dtype", "q8_0"], 2, "--dtype q8_0 is for a GGUF file, and new/b is none"),
        ("new/b", &["--dtype", "Q4_K_M"], 2, "--dtype q4_k_m is for a GGUF file, and new/b is none"),
        ("new/b.gguf", &["--dtype", "fp8"], 2, "--dtype fp8 is for a folder, and new/b.gguf is none"),
        ("new/b", &["--dtype", "fp8", "--quantize", "nf4"], 2, "--dtype fp8 and --quantize are two forms"),
        ("new/fp8", &["--dtype", "fp8"], 0, "merged 1 layer of "),
    ] {
        let output = lora_train(folder.path(), &[&args[..6], &[out], options].concat());
        assert_eq!(output.status.code(), Some(code), "{options:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(expected), "{options:?}: {}", text(&output.stderr));
    }
    assert!(path("new/a.gguf").is_file() && !path("new/b.gguf").exists());
}

#[test]
fn inspect_shows_a_model_folder_and_the_gguf_file_made_of_it_alike_but_for_their_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::common::quickstart_model();
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    let config = lora_train::spec::ModelConfig::from_json(&config).unwrap();
    let (module, width) = ("model.layers.0.mlp.up_proj", config.hidden_size);
    let pair = [("A", vec![2, width]), ("B", vec![config.blocks[0].sites[6].shape[1], 2])]
        .map(|(letter, shape)| (format!("base_model.model.{module}.lora_{letter}.weight"), shape, 0.0));
    write_tensors(&folder.path().join("adapter_model.safetensors"), &pair);
    let adapter = format!(r#"{{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["{module}"]}}"#);
    std::fs::write(folder.path().join("adapter_config.json"), adapter).unwrap();
    let model = model.to_str().unwrap();
    let run = |args: &[&str]| lora_train(folder.path(), args);
    let merged = run(&["merge", "--model", model, "--adapter", ".", "--out", "q8.gguf", "--dtype", "q8_0"]);
    assert!(merged.status.success(), "{}", text(&merged.stderr));

    let [of_folder, of_file] = [model, "q8.gguf"].map(|name| run(&["inspect", name]));
    assert!(of_file.status.success() && of_folder.status.success(), "{}", text(&of_file.stderr));
    let is_common = |line: &&str| !["model: ", "weights: ", "  "].iter().any(|start| line.starts_with(start));
    // The file has one token that ends a text.
    let stable = |line: &str| line.split("; a text ends").next().unwrap().to_owned();
    let common =
        |output: &Output| text(&output.stdout).lines().filter(is_common).map(stable).collect::<Vec<_>>().join("\n");
    assert_eq!(common(&of_file), common(&of_folder));
    assert!(common(&of_file).contains("architecture: llama, ") && common(&of_file).contains("chat template: "));
    let matrices = 7 * config.num_layers() + 1;
    for part in ["\n  q8_0 ".into(), format!(" {matrices} tensors "), "bits a parameter".into()] {
        assert!(text(&of_file.stdout).contains(&part), "{part}: {}", text(&of_file.stdout));
    }
    let json = text(&run(&["inspect", "q8.gguf", "--json"]).stdout);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["parameters"], config.num_parameters());
    assert!(json["types"]["q8_0"]["bytes"].as_u64().unwrap() > 0 && json["tokenizer"]["tokens"].as_u64().unwrap() > 0);

    let said = run(&["generate", "--model", "q8.gguf", "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"]);
    assert!(text(&said.stderr).contains("held in the blocks of the GGUF file, the rest in "), "{}", text(&said.stderr));
}

#[test]
fn a_file_that_is_no_recipe_is_told_what_it_is_for() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["q4.gguf", "model.safetensors", "rows.jsonl"] {
        std::fs::write(folder.path().join(name), "GGUF").unwrap();
    }
    for (args, expected) in [
        (
            &["q4.gguf"][..],
            "q4.gguf: a GGUF file, expected a recipe file\n  hint: `model.path` of a recipe may name it",
        ),
        (&["inspect", "q4.gguf"], "q4.gguf: its 4 bytes are not what its header says"),
        (&["inspect", "model.safetensors"], "a file of weights, expected a recipe file\n  hint: `model.path`"),
        (
            &["check", "rows.jsonl"],
            "a file of rows, expected a recipe file\n  hint: `lora-train init --model MODEL --data",
        ),
        (&["inspect", "."], ".: this is a folder, expected a recipe file"),
        (&["inspect", "nobody/nothing", "--rows", "1"], "--rows, --set and --device belong to a recipe"),
    ] {
        let output = lora_train(folder.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(expected), "{args:?}: {}", text(&output.stderr));
    }
}
