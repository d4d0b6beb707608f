//! Common mistakes and their messages: the place, the value, the correction, and the exit code.
//!
//! `room` tests memory that runs out, on the host and on a GPU. A unit test covers the message about a dtype that the
//! device lacks, because a CPU has all of them.

mod rows;
mod table;
mod tasks;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

use rows::DATA_MISTAKES;
use table::{MISTAKES, RECIPE, ROW, Wrong};
use tasks::TASK_MISTAKES;

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lora-train"));
    command.args(arguments).current_dir(folder).env("HF_HUB_OFFLINE", "1").env("HF_HOME", folder.join("hub"));
    command.env("LORA_TRAIN_CACHE", folder.join("cache")).output().unwrap()
}

/// A folder with the quickstart's model, eight rows and a recipe.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/model");
    fs::create_dir(folder.path().join("model")).unwrap();
    for entry in fs::read_dir(model).unwrap() {
        let file = entry.unwrap().path();
        fs::copy(&file, folder.path().join("model").join(file.file_name().unwrap())).unwrap();
    }
    fs::write(folder.path().join("rows.jsonl"), ROW.repeat(8)).unwrap();
    fs::write(folder.path().join("r.toml"), RECIPE).unwrap();
    folder
}

/// Makes the mistake in a folder of [`folder`]; returns its arguments.
fn make<'a>(folder: &Path, mistake: &Wrong<'a>) -> Vec<&'a str> {
    match mistake {
        Wrong::Recipe(old, new) => {
            assert!(RECIPE.contains(old), "{old}");
            fs::write(folder.join("r.toml"), RECIPE.replace(old, new)).unwrap();
        }
        Wrong::Whole(text) => fs::write(folder.join("r.toml"), text).unwrap(),
        Wrong::File(file, text) => fs::write(folder.join(file), text).unwrap(),
        Wrong::Gone(file) => fs::remove_file(folder.join(file)).unwrap(),
        Wrong::Made(make) => make(folder),
        Wrong::Set(changes) => return changes.iter().flat_map(|change| ["--set", change]).collect(),
        Wrong::FileAndSet(file, text, change) => {
            fs::write(folder.join(file), text).unwrap();
            return vec!["--set", change];
        }
    }
    Vec::new()
}

#[test]
fn every_mistake_names_its_place_and_what_would_be_right_and_ends_with_2() {
    let count = MISTAKES.len() + DATA_MISTAKES.len() + TASK_MISTAKES.len();
    assert!(count >= 110, "{count} mistakes");
    let mut wrong = Vec::new();
    for (name, mistake, parts) in MISTAKES.iter().chain(DATA_MISTAKES).chain(TASK_MISTAKES) {
        let folder = folder();
        let settings = make(folder.path(), mistake);
        for command in [&["check", "r.toml"][..], &["r.toml"]] {
            let output = run(folder.path(), &[command, &settings[..]].concat());
            let stderr = String::from_utf8_lossy(&output.stderr);
            let missing: Vec<_> = parts.iter().filter(|part| !stderr.contains(**part)).collect();
            let code = output.status.code();
            if code != Some(2) || !missing.is_empty() || !stderr.contains("error: ") {
                wrong.push(format!("{name}, {command:?}: {code:?}, without {missing:?}:\n{stderr}"));
            }
            if stderr.matches("error: ").count() > 1
                && stderr.lines().filter(|line| line.contains(parts[0])).count() > 1
            {
                wrong.push(format!("{name}, {command:?}: told twice:\n{stderr}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_run_whose_rows_all_lost_their_answers_ends_with_2_and_says_so() {
    let folder = folder();
    let row = format!("{{\"prompt\": \"{}\", \"completion\": \"c\"}}\n", "a ".repeat(300));
    fs::write(folder.path().join("rows.jsonl"), row.repeat(8)).unwrap();
    let output = run(folder.path(), &["r.toml", "--device", "cpu"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("no row is left to train on"), "{stderr}");
}

/// A server that answers every request with the Hub's message for gated models.
fn gated_hub() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let (mut reader, mut line) = (BufReader::new(stream.try_clone().unwrap()), String::new());
            while reader.read_line(&mut line).is_ok_and(|length| length > 2) {}
            // Ignore a client that disconnects early.
            let _ = write!(
                stream,
                "HTTP/1.1 403 Forbidden\r\nX-Error-Code: GatedRepo\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
        }
    });
    endpoint
}

/// The command with a Hub model served at `endpoint`.
fn with_hub(folder: &Path, endpoint: &str, command: &[&str]) -> Output {
    let mut process = Command::new(env!("CARGO_BIN_EXE_lora-train"));
    process.args(command).args(["--set", "model.path=org/model"]).current_dir(folder);
    process.env("HF_ENDPOINT", endpoint).env("HF_HOME", folder.join("hub"));
    process.env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN").env("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1");
    process.output().unwrap()
}

#[test]
fn a_gated_model_ends_with_2_and_says_where_its_licence_is_accepted() {
    let (folder, endpoint) = (folder(), gated_hub());
    for command in [&["check", "r.toml"][..], &["plan", "r.toml"], &["r.toml"]] {
        let output = with_hub(folder.path(), &endpoint, command);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {stderr}");
        let hint = format!("accept its licence at {endpoint}/org/model, then set HF_TOKEN");
        assert!(stderr.contains("org/model is gated") && stderr.contains(&hint), "{command:?}: {stderr}");
    }
}

#[test]
fn a_hub_that_cannot_be_reached_is_named_with_what_works_without_it() {
    let folder = folder();
    // Nothing listens on a port that was just free.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    for (command, code) in [(&["check", "r.toml"][..], 2), (&["r.toml"], 1)] {
        let output = with_hub(folder.path(), &endpoint, command);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{command:?}: {stderr}");
        let parts = [&*format!("cannot reach {endpoint}"), "a local folder works without a network"];
        assert!(parts.iter().all(|part| stderr.contains(part)), "{command:?}: {stderr}");
    }
}

#[test]
fn rows_longer_than_the_models_positions_are_warned_of_with_both_numbers() {
    let folder = folder();
    for command in [&["check", "r.toml"][..], &["r.toml"]] {
        let output = run(folder.path(), &[command, &["--set", "data.max_length=1024"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{command:?}: {stderr}");
        let warning = "warning: `data.max_length` = 1024 is longer than the 512 positions that the model was made for\n  \
                       hint: set it to 512 or less";
        assert!(stderr.contains(warning), "{command:?}: {stderr}");
    }
}

#[test]
fn a_device_that_is_not_there_ends_with_2_and_a_way_to_go_on() {
    let folder = folder();
    // Not compiled in, no driver, or fewer GPUs, depending on this machine.
    for command in [&["check", "r.toml"][..], &["r.toml"], &["bench", "r.toml"]] {
        let output = run(folder.path(), &[command, &["--device", "cuda:93"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {stderr}");
        assert!(stderr.contains("error: device `cuda") && stderr.contains("\n  hint: "), "{command:?}: {stderr}");
        assert!(["`--device cpu`", "`cuda:0`"].iter().any(|way| stderr.contains(way)), "{command:?}: {stderr}");
    }
}

#[test]
fn an_adapter_of_another_model_ends_with_2_and_names_its_matrices_and_its_model() {
    let folder = folder();
    let adapter = folder.path().join("adapter");
    fs::create_dir(&adapter).unwrap();
    let name = |letter: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight");
    let header = serde_json::json!({
        name("A"): {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, 1024]},
        name("B"): {"dtype": "F32", "shape": [256, 4], "data_offsets": [1024, 5120]},
    })
    .to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 5120]);
    fs::write(adapter.join("adapter_model.safetensors"), bytes).unwrap();
    let config = serde_json::json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "another/model", "r": 4,
        "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj"], "bias": "none", "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true, "use_rslora": false, "use_dora": false,
        "layers_to_transform": [0],
    });
    fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    for command in [&["generate", "--prompt", "a"][..], &["merge", "--out", "merged"]] {
        let output = run(folder.path(), &[command, &["--model", "model", "--adapter", "adapter"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {stderr}");
        for part in [
            "model.layers.0.self_attn.q_proj.lora_A` is [4, 64], expected [4, 128]",
            "model.layers.0.self_attn.q_proj.lora_B` is [256, 4], expected [128, 4]",
            "another/model",
        ] {
            assert!(stderr.contains(part), "{command:?}, {part}: {stderr}");
        }
    }
}
