//! The access token goes to the Hub and nowhere else.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Output;
use std::sync::{Arc, Mutex};

use crate::common::{Bench, lora_train};

const TOKEN: &str = "hf_OnlyTheHubMaySeeThisToken";

/// A server that answers every request with `status` and echoes the whole request.
fn echoing_server(status: &'static str) -> (String, Arc<Mutex<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let heard = Arc::new(Mutex::new(String::new()));
    let shared = heard.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = String::new();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            while reader.read_line(&mut request).is_ok_and(|length| length > 2) {}
            shared.lock().unwrap().push_str(&request);
            let body = serde_json::json!({ "error": request }).to_string();
            let length = body.len();
            // Ignore a client that disconnects early.
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\nX-Error-Message: {TOKEN}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
        }
    });
    (endpoint, heard)
}

fn holds_no_token(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            holds_no_token(&path);
        } else {
            let bytes = fs::read(&path).unwrap();
            let is_there = bytes.windows(TOKEN.len()).any(|window| window == TOKEN.as_bytes());
            assert!(!is_there, "{} holds the token", path.display());
        }
    }
}

fn says_no_token(output: &Output) {
    for stream in [&output.stdout, &output.stderr] {
        let text = String::from_utf8_lossy(stream);
        assert!(!text.contains(TOKEN), "{text}");
    }
}

#[test]
fn a_run_writes_the_token_neither_to_its_files_nor_to_the_terminal() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "[eval]\ngenerate = [\"a\"]\n[checkpoint]\nsave_steps = 1\n");
    let output = lora_train(&[recipe.to_str().unwrap(), "--set", "train.max_steps=2"])
        .env("HF_TOKEN", TOKEN)
        .env("HUGGING_FACE_HUB_TOKEN", TOKEN)
        .env("RUST_LOG", "trace")
        .env("LORA_TRAIN_CACHE", bench.path("cache"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", crate::common::stderr(&output));
    says_no_token(&output);
    assert!(bench.path("run/environment.json").is_file() && bench.path("run/resolved.toml").is_file());
    holds_no_token(bench.folder.path());
}

/// A model on the disk has everything it needs: no request goes out.
#[test]
fn a_run_of_a_local_model_says_nothing_to_anybody() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "[eval]\ngenerate = [\"a\"]\n[checkpoint]\nsave_steps = 1\n");
    let recipe = recipe.to_str().unwrap();
    let model = crate::common::quickstart_model();
    let model = model.to_str().unwrap();
    let adapter = bench.path("run/adapter");
    let run_dir = bench.path("run");
    let (run_dir, adapter) = (run_dir.to_str().unwrap(), adapter.to_str().unwrap());
    let merged = bench.path("merged");
    let commands: [&[&str]; 9] = [
        &["check", recipe],
        &["inspect", recipe],
        &["plan", recipe],
        &[recipe, "--set", "train.max_steps=2"],
        &["report", run_dir],
        &["push", run_dir, "me/adapter", "--dry-run"],
        &["generate", "--model", model, "--adapter", adapter, "--prompt", "a", "--max-new-tokens", "2"],
        &["merge", "--model", model, "--adapter", adapter, "--out", merged.to_str().unwrap()],
        &["bench", recipe, "--set", "train.max_steps=2"],
    ];
    let (endpoint, heard) = echoing_server("500 X");
    for command in commands {
        let with_hub = |mut command: std::process::Command| {
            command.env("HF_TOKEN", TOKEN).env("HF_ENDPOINT", &endpoint).env("HF_HOME", bench.path("hub"));
            for proxy in ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
                command.env(proxy, &endpoint);
            }
            command.env_remove("HF_HUB_OFFLINE").env_remove("no_proxy").env_remove("NO_PROXY").output().unwrap()
        };
        let output = with_hub(lora_train(command));
        assert!(output.status.success(), "{command:?}: {}", crate::common::stderr(&output));
        assert_eq!(*heard.lock().unwrap(), "", "{command:?}");
        #[cfg(target_os = "linux")]
        if let Some(traced) = traced(command, &bench.path("calls")) {
            fs::remove_dir_all(run_dir).unwrap();
            let output = with_hub(traced);
            assert!(output.status.success(), "{}", crate::common::stderr(&output));
            let calls = fs::read_to_string(bench.path("calls")).unwrap();
            assert!(!calls.contains("sa_family=AF_INET"), "{command:?} spoke to the network:\n{calls}");
        }
    }
    assert!(!bench.path("hub").exists(), "nothing was downloaded");
}

/// Training under strace, which writes every socket call to `calls`. `None` for the other commands, and where processes
/// cannot be traced.
#[cfg(target_os = "linux")]
fn traced(command: &[&str], calls: &Path) -> Option<std::process::Command> {
    let tracer = || {
        let mut strace = std::process::Command::new("strace");
        strace.args(["-f", "-qq", "-e", "trace=network", "-o"]).arg(calls);
        strace
    };
    let is_training = command[0].ends_with(".toml");
    let can_trace = || tracer().arg("true").output().is_ok_and(|output| output.status.success());
    if !is_training || !can_trace() {
        return None;
    }
    let plain = lora_train(command);
    let mut strace = tracer();
    strace.arg(plain.get_program()).args(plain.get_args());
    strace.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    Some(strace)
}

#[test]
fn a_hub_that_repeats_the_token_in_its_errors_is_not_quoted() {
    for status in ["500 X", "401 X", "403 X", "404 X", "429 X", "200 OK", "302 X"] {
        let bench = Bench::new();
        let recipe = bench.recipe("run", "");
        let (endpoint, heard) = echoing_server(status);
        for command in [&["check"][..], &["plan"], &[]] {
            let output = lora_train(command)
                .arg(&recipe)
                .args(["--set", "model.path=org/model"])
                .env("HF_TOKEN", TOKEN)
                .env("HF_ENDPOINT", &endpoint)
                .env("HF_HOME", bench.path("hub"))
                .env("RUST_LOG", "trace")
                .output()
                .unwrap();
            assert!(matches!(output.status.code(), Some(1 | 2)), "{status}: {}", crate::common::stderr(&output));
            says_no_token(&output);
        }
        assert!(heard.lock().unwrap().contains(TOKEN), "{status}: the Hub itself was told the token");
        holds_no_token(bench.folder.path());
    }
}
