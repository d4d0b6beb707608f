//! The token cache with the real command: signals, full disks, two processes at once.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{Bench, lora_train, run, signal, stderr, wait_measured, wait_until};

/// File names in the cache of `bench`.
fn entries(bench: &Bench) -> Vec<String> {
    let names = fs::read_dir(bench.path("cache/tokens"));
    let mut names: Vec<_> = names
        .map(|entries| entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    names.sort();
    names
}

/// `command`, with its own cache.
fn in_cache(bench: &Bench, mut command: Command) -> Command {
    command.env("LORA_TRAIN_CACHE", bench.path("cache"));
    command
}

/// A recipe over a file large enough to keep its tokens: about 18 MB.
fn large_recipe(bench: &Bench) -> PathBuf {
    let row = |index: usize| {
        let story = format!("Once there was a fox who found {index} stones. ").repeat(12);
        serde_json::json!({"prompt": "Tell me: ", "completion": story}).to_string() + "\n"
    };
    fs::write(bench.path("train.jsonl"), (0..30_000).map(row).collect::<String>()).unwrap();
    bench.recipe("run", "")
}

fn inspect(bench: &Bench, recipe: &Path) -> Output {
    let output = in_cache(bench, lora_train(&["inspect", recipe.to_str().unwrap()])).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    output
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Starts training and waits until some megabytes of tokens are in the cache.
#[cfg(unix)]
fn start_tokenising(bench: &Bench, recipe: &Path) -> std::process::Child {
    let mut command = in_cache(bench, lora_train(&[recipe.to_str().unwrap()]));
    let before = unfinished_bytes(bench);
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the tokens to be written", || unfinished_bytes(bench) > before + (1 << 20));
    child
}

/// Size of the unfinished file, 0 without one.
fn unfinished_bytes(bench: &Bench) -> u64 {
    let names = entries(bench).into_iter().filter(|name| name.ends_with(".unfinished"));
    names.map(|name| fs::metadata(bench.path("cache/tokens").join(name)).map_or(0, |metadata| metadata.len())).sum()
}

/// The finished token files.
fn stores(bench: &Bench) -> Vec<Vec<u8>> {
    let names = entries(bench).into_iter().filter(|name| name.ends_with(".tokens"));
    names.map(|name| fs::read(bench.path("cache/tokens").join(name)).unwrap()).collect()
}

#[cfg(unix)]
#[test]
fn a_start_after_one_that_was_interrupted_or_killed_has_the_same_tokens() {
    let bench = Bench::new();
    let recipe = large_recipe(&bench);
    let undisturbed = inspect(&bench, &recipe);
    let expected = stores(&bench);
    fs::remove_dir_all(bench.path("cache")).unwrap();

    let mut child = start_tokenising(&bench, &recipe);
    signal(&child, libc::SIGINT);
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    let mut told = String::new();
    child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert!(told.ends_with("stopped before the first step\n"), "{told}");
    assert!(stores(&bench).is_empty() && !bench.path("run").join("metrics.jsonl").exists(), "nothing has begun");
    assert_eq!(unfinished_bytes(&bench), 0, "what is not whole is deleted");

    let mut child = start_tokenising(&bench, &recipe);
    signal(&child, libc::SIGKILL);
    child.wait().unwrap();
    assert!(stores(&bench).is_empty() && unfinished_bytes(&bench) > 0);

    let first = inspect(&bench, &recipe);
    assert_eq!(stdout(&first), stdout(&undisturbed));
    assert!(stdout(&first).contains("tokens now kept on disk"), "{}", stdout(&first));
    assert!(stores(&bench) == expected, "other tokens than those of an undisturbed run");
    let second = inspect(&bench, &recipe);
    assert_eq!(stdout(&second), stdout(&first).replace("tokens now kept on disk", "tokens read from disk"));
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_a_warning_and_training_goes_on() {
    let bench = Bench::new();
    let recipe = large_recipe(&bench);
    let command = |limit: &str| {
        // Writing more than 1 KiB to a file fails, with the signal for it ignored.
        let shell = format!("trap '' XFSZ; {limit} exec \"$0\" \"$@\"");
        let mut command = in_cache(&bench, Command::new("bash"));
        command.args(["-c", &shell, env!("CARGO_BIN_EXE_lora-train"), "inspect", recipe.to_str().unwrap()]);
        command.output().unwrap()
    };
    let full = command("ulimit -f 1;");
    assert!(full.status.success(), "{}", stderr(&full));
    let warned = "its tokens cannot be kept in";
    assert!(stderr(&full).contains(warned) && stderr(&full).contains("too large"), "{}", stderr(&full));
    assert!(entries(&bench).is_empty(), "{:?}", entries(&bench));
    let free = command("");
    assert!(!stderr(&free).contains(warned), "{}", stderr(&free));
    let without_notes = |output: &Output| stdout(output).replace("; tokens now kept on disk", "");
    let rows = |output: &Output| without_notes(output).split_once("\n\n").unwrap().1.to_owned();
    assert_eq!(rows(&full), rows(&free));
}

#[test]
fn two_commands_that_start_at_once_both_see_the_same_rows() {
    let bench = Bench::new();
    let recipe = large_recipe(&bench);
    let start = || {
        let mut command = in_cache(&bench, lora_train(&["inspect", recipe.to_str().unwrap()]));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children = [start(), start()];
    let outputs = children.map(|child| child.wait_with_output().unwrap());
    let texts = outputs.map(|output| {
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output).replace("now kept on", "read from")
    });
    assert_eq!(texts[0], texts[1]);
    assert_eq!(entries(&bench).iter().filter(|name| name.ends_with(".tokens")).count(), 1);
}

#[test]
fn skipped_rows_are_named_at_the_start_and_counted_in_the_summary() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("train.jsonl")).unwrap();
    let mut lines: Vec<&str> = rows.lines().collect();
    lines[4] = "{\"prompt\": [], \"completion\": \"x\"}";
    fs::write(bench.path("train.jsonl"), lines.join("\n")).unwrap();
    let recipe = bench.recipe("run", "");
    let train = |set: &str| run(&[recipe.to_str().unwrap(), "--set", set]);
    let strict = train("data.on_bad_row=error");
    assert_eq!(strict.status.code(), Some(2));
    assert!(stderr(&strict).contains("train.jsonl:line 5: `prompt` must be text"), "{}", stderr(&strict));
    fs::remove_dir_all(bench.path("run")).unwrap();
    let lenient = train("data.on_bad_row=skip");
    assert!(lenient.status.success(), "{}", stderr(&lenient));
    let told = stderr(&lenient);
    assert!(told.contains("1 of 24 rows cannot be used and are skipped:"), "{told}");
    assert!(told.contains("  line 5: `prompt` must be text"), "{told}");
    let summary = fs::read_to_string(bench.path("run/summary.json")).unwrap();
    assert!(summary.contains("1 of 24 rows cannot be used and were skipped"), "{summary}");
}

/// A model whose weights take far longer to make than a user would wait after Ctrl-C.
#[cfg(unix)]
#[test]
fn a_signal_while_rows_are_tokenised_and_weights_are_loaded_waits_for_neither() {
    let bench = Bench::new();
    let recipe = large_recipe(&bench);
    let model = bench.path("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(crate::common::quickstart_model()).unwrap() {
        let file = entry.unwrap().path();
        fs::copy(&file, model.join(file.file_name().unwrap())).unwrap();
    }
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    // 0.8 billion random numbers.
    let config = config.replace("\"hidden_size\": 128", "\"hidden_size\": 2048");
    let config = config.replace("\"intermediate_size\": 512", "\"intermediate_size\": 8192");
    fs::write(model.join("config.json"), config.replace("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 16"))
        .unwrap();
    let model = format!("model.path={}", model.display());
    let settings = ["--set", &model, "--set", "model.init=random", "--set", "model.dtype=bf16"];
    let mut command = in_cache(&bench, lora_train(&[recipe.to_str().unwrap()]));
    let mut child = command.args(settings).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the tokens to be written", || unfinished_bytes(&bench) > 0);
    signal(&child, libc::SIGINT);
    let (status, seconds) = wait_measured(&mut child);
    let mut told = String::new();
    child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!(status.code(), Some(130), "{told}");
    assert!(told.ends_with("stopped before the first step\n"), "{told}");
    // Processor time of two threads in three seconds.
    assert!(seconds < 6.0, "{seconds} s");
}
