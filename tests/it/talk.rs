//! What a finished run is good for: `chat`, `serve`, `eval`, `generate` of a file, and that all of them write the same text.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Bench, json, lora_train, processor_seconds, quickstart_model, run, signal, stderr, train, wait};

const STORY: &str = "Max saw a snail on the hill. Olga gave him a brown basket.";

/// ChatML with tools, whose calls are what the quickstart's model writes anyway.
const TOOL_TEMPLATE: &str = "{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ ' ' + tool.function.name }}\
    {% endfor %}{{ '.<|im_end|>\\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}\
    {% for call in m.tool_calls %}{{ 'Max ' + call.function.name }}{% for key, value in call.function.arguments.items() %}\
    {{ ' a ' + key + ' on the ' + value + '.' }}{% endfor %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A run of some steps on conversations, and its folder.
fn chat_run(bench: &Bench) -> PathBuf {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let row = json!({"messages": [turn("user", STORY), turn("assistant", "A snail sat in a basket.")]});
    std::fs::write(bench.path("chat.jsonl"), format!("{row}\n").repeat(8)).unwrap();
    let data = format!("data.train=[{{path={:?}}}]", bench.path("chat.jsonl").to_str().unwrap());
    let set = ["--set", &data, "--set", "data.eval=[]", "--set", "data.max_length=256", "--set", "train.max_steps=6"];
    let rate = ["--set", "optimizer.learning_rate=0.02", "--set", "scheduler.warmup_steps=0"];
    train(&bench.recipe("run", ""), &[&set[..], &rate].concat());
    bench.path("run")
}

fn stdout(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// A server that ends with the test.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
}

impl Server {
    pub(crate) fn start(args: &[&str]) -> Self {
        let mut command = lora_train(&[&["serve", "--port", "0", "--device", "cpu"], args].concat());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let line = lines.find_map(|line| line.unwrap().strip_prefix("http://").map(str::to_owned)).unwrap();
        // Whatever it says later must not block it.
        std::thread::spawn(move || lines.count());
        Self { child, address: line.split(' ').next().unwrap().to_owned() }
    }

    /// Status and body of a request.
    pub(crate) fn ask(&self, path: &str, headers: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let method = if body.is_empty() { "GET" } else { "POST" };
        let headers =
            if headers.contains("Host:") { headers.to_owned() } else { format!("Host: localhost\r\n{headers}") };
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\n{headers}Connection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or_else(|_| json!(body)))
    }

    fn answer(&self, model: &str) -> String {
        let messages = json!([{"role": "user", "content": STORY}]);
        self.reply(model, &messages)["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }

    fn reply(&self, model: &str, messages: &Value) -> Value {
        let body = json!({"model": model, "messages": messages, "temperature": 0, "max_tokens": 40});
        let (status, answer) = self.ask("/v1/chat/completions", "", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        signal(&self.child, libc::SIGINT);
        wait(&mut self.child);
    }
}

#[test]
fn generate_chat_and_serve_write_the_same_text_alone_and_together() {
    let bench = Bench::new();
    let folder = chat_run(&bench);
    let run_dir = folder.to_str().unwrap();
    let model = quickstart_model();
    let generate = |name: &str, prompt: &str| {
        stdout(&["generate", name, prompt, "--max-new-tokens", "40", "--quiet"]).trim_end().to_owned()
    };
    let (adapted, base) = (generate(run_dir, STORY), generate(model.to_str().unwrap(), STORY));
    assert_ne!(adapted, base);
    // Where options name the model, the only word is the prompt.
    let by_option = ["generate", "--adapter", run_dir, STORY, "--max-new-tokens", "40", "--quiet"];
    assert_eq!(stdout(&by_option).trim_end(), adapted);
    let output = run(&["generate", "--adapter", run_dir]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("no prompt"), "{}", stderr(&output));
    let swapped = run(&["generate", STORY, run_dir]);
    let first =
        format!("the run or model comes first, then the prompt\n  hint: lora-train generate {run_dir} '{STORY}'");
    assert!(swapped.status.code() == Some(2) && stderr(&swapped).contains(&first), "{}", stderr(&swapped));

    // One message a line, a conversation, and a switch of adapters.
    let mut chat = lora_train(&["chat", run_dir, "--max-new-tokens", "40", "--quiet"]);
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let typed =
        format!("{STORY}\n/reset\n/adapter base\n{STORY}\n/adapter run\n\n/system\n{STORY}\nAgain.\n/nonsense\n");
    chat.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    let output = chat.wait_with_output().unwrap();
    let answers: Vec<&str> = std::str::from_utf8(&output.stdout).unwrap().lines().collect();
    assert_eq!(answers[..3], [&adapted, &base, &adapted]);
    assert_eq!(answers.len(), 4);
    assert!(stderr(&output).contains("there is no /nonsense; /help"), "{}", stderr(&output));
    let silent = lora_train(&["chat", run_dir, "--quiet"]).stdin(Stdio::null()).output().unwrap();
    assert!(stderr(&silent).contains("no terminal and has no message\n  hint: "), "{}", stderr(&silent));

    // A file of prompts, in its order, as Windows writes it.
    let rows = [json!({"id": 7, "prompt": STORY}), json!({"prompt": "Tom saw a cat."}), json!({"prompt": STORY})];
    let file = bench.path("prompts.jsonl");
    std::fs::write(&file, format!("\u{feff}{}", rows.map(|row| format!("{row}\r\n")).concat())).unwrap();
    let lines =
        stdout(&["generate", run_dir, "--prompts", file.to_str().unwrap(), "--max-new-tokens", "40", "--quiet"]);
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        lines[0],
        json!({"id": 7, "prompt": STORY, "text": adapted, "tokens": lines[0]["tokens"], "finish_reason": "stop"})
    );
    assert_eq!((&lines[1]["text"], &lines[2]["text"]), (&json!(generate(run_dir, "Tom saw a cat.")), &json!(adapted)));

    std::fs::write(&file, "[\n]\n").unwrap();
    let refused = run(&["generate", run_dir, "--prompts", file.to_str().unwrap()]);
    assert!(stderr(&refused).contains("prompts.jsonl:1: expected a JSON object a line"), "{}", stderr(&refused));

    let server = Server::start(&[run_dir]);
    let (_, models) = server.ask("/v1/models", "", &Value::Null);
    let (adapter, base_model) = (&models["data"][0], &models["data"][1]);
    assert_eq!((&adapter["id"], &adapter["parent"]), (&json!("run"), &json!("base")));
    assert_eq!((&base_model["id"], &base_model["root"]), (&json!("base"), &json!(model.to_str().unwrap())));
    assert_eq!(server.ask("/v1/models/base", "", &Value::Null), (200, base_model.clone()));
    for (model, file) in
        [(adapter, folder.join("adapter/adapter_model.safetensors")), (base_model, model.join("config.json"))]
    {
        let written = file.metadata().unwrap().modified().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(model["created"], written.as_secs(), "{model}");
    }
    let texts: Vec<String> = std::thread::scope(|scope| {
        let server = &server;
        let ask = |index: usize| scope.spawn(move || server.answer(["run", "base"][index % 2]));
        let asked: Vec<_> = (0..8).map(ask).collect();
        asked.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(text.trim_end(), [&adapted, &base][index % 2], "{index}");
    }
    let page = server.ask("/", "", &Value::Null).1;
    assert!(page.as_str().unwrap().contains("<title>lora-train serve</title>"));
}

#[test]
fn the_system_message_of_training_is_that_of_requests_without_one() {
    let bench = Bench::new();
    let folder = chat_run(&bench);
    let form = folder.join("adapter/prompt_form.json");
    let mut changed = json(&form);
    changed["system"] = json!("Be a pirate.");
    std::fs::write(&form, changed.to_string()).unwrap();
    let server = Server::start(&[folder.to_str().unwrap()]);
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let tokens = |model: &str, system: &[&str]| {
        let system = system.iter().map(|text| turn("system", text));
        let messages: Vec<Value> = system.chain([turn("user", STORY)]).collect();
        server.reply(model, &json!(messages))["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens("run", &[]), tokens("base", &["Be a pirate."]));
    assert!(tokens("run", &[""]) < tokens("run", &[]) && tokens("base", &[]) < tokens("run", &[]));
    let generated = stdout(&["generate", folder.to_str().unwrap(), STORY, "--max-new-tokens", "40", "--quiet"]);
    assert_eq!(server.answer("run").trim_end(), generated.trim_end());
}

#[test]
fn requests_that_are_wrong_or_from_elsewhere_are_refused_in_openais_form() {
    let server = Server::start(&[quickstart_model().to_str().unwrap()]);
    let completion = |more: Value| {
        let mut body = json!({"prompt": "Once", "max_tokens": 2, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let ask = |body: &Value| server.ask("/v1/completions", "", body);
    assert_eq!(ask(&completion(json!({}))).0, 200);
    for (body, status, code) in [
        (completion(json!({"model": "nobody"})), 404, json!("model_not_found")),
        (completion(json!({"best_of": 3})), 400, Value::Null),
        (completion(json!({"prompt": ""})), 400, Value::Null),
        (completion(json!({"prompt": [999_999]})), 400, Value::Null),
        (completion(json!({"prompt": "word ".repeat(9000)})), 400, json!("context_length_exceeded")),
        (json!("{"), 400, Value::Null),
    ] {
        let (found, answer) = ask(&body);
        assert_eq!((found, &answer["error"]["code"]), (status, &code), "{answer}");
        assert!(!answer["error"]["message"].as_str().unwrap().is_empty());
    }
    for (path, body, status) in [
        ("/v1/nothing", Value::Null, 404),
        ("/v1/models/nobody", Value::Null, 404),
        ("/v1/completions", Value::Null, 405),
        ("/v1/completions", json!("x".repeat(3 << 20)), 413),
    ] {
        let (found, answer) = server.ask(path, "", &body);
        assert_eq!((found, &answer["error"]["type"]), (status, &json!("invalid_request_error")), "{answer}");
    }
    let message = |path: &str| server.ask(path, "", &Value::Null).1["error"]["message"].as_str().unwrap().to_owned();
    assert!(message("/v1/nothing").starts_with("there is no /v1/nothing here; there are GET /v1/models, "));
    assert_eq!(message("/v1/models/nobody"), "there is no model `nobody`; this server has: base");
    let twice = server.ask("/v1/completions", "Host: localhost\r\nHost: evil.example\r\n", &completion(json!({})));
    assert_eq!(twice.0, 400, "{}", twice.1);
    // A page of another site that has its name point here.
    assert_eq!(server.ask("/v1/completions", "Host: evil.example\r\n", &completion(json!({}))).0, 401);
    drop(server);

    let server = Server::start(&[quickstart_model().to_str().unwrap(), "--token", "secret"]);
    assert_eq!(server.ask("/v1/models", "", &Value::Null).0, 401);
    assert_eq!(server.ask("/health", "", &Value::Null), (200, json!({"status": "ok"})));
    assert_eq!(server.ask("/v1/models", "Authorization: Bearer secret\r\n", &Value::Null).0, 200);

    let output = run(&["serve", "--model", quickstart_model().to_str().unwrap(), "--host", "0.0.0.0"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("`--host 0.0.0.0` without `--token`"), "{}", stderr(&output));
}

#[test]
fn one_client_keeps_no_other_waiting() {
    let server = Server::start(&[quickstart_model().to_str().unwrap()]);
    let connect = |head: &str| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        write!(stream, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}").unwrap();
        stream
    };
    // For its head the server waits five seconds, for a body a minute.
    let (mut idle, _slow) = (connect(""), connect("Content-Length: 9\r\n\r\n"));
    let (started, before) = (Instant::now(), processor_seconds(server.child.id()));
    let slow = [
        json!({"prompt": "a".repeat(1_900_000)}),
        json!({"messages": vec![json!({"role": "user", "content": "a"}); 50_000]}),
    ];
    std::thread::scope(|scope| {
        let server = &server;
        for (path, body) in ["/v1/completions", "/v1/chat/completions"].into_iter().zip(&slow) {
            scope.spawn(move || {
                let (status, answer) = server.ask(path, "", body);
                assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")), "{answer}");
            });
        }
        assert_eq!(server.ask("/health", "", &Value::Null).0, 200);
    });
    assert!(started.elapsed() < Duration::from_secs(50), "{:?}", started.elapsed());
    // What two threads take in four seconds.
    let seconds = processor_seconds(server.child.id()) - before;
    assert!(seconds < 8.0, "{seconds} s");
    idle.set_read_timeout(Some(Duration::from_secs(50))).unwrap();
    // The server ends it: a read that waits longer is an error.
    idle.read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn each_prompt_of_a_list_has_its_choice_and_the_text_that_it_has_alone() {
    let server = Server::start(&[quickstart_model().to_str().unwrap()]);
    let ask = |prompt: Value, stream: bool| {
        let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0, "stream": stream,
            "stream_options": {"include_usage": true}});
        let (status, answer) = server.ask("/v1/completions", "", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let prompts = ["Once upon", "A cat", "Once upon"];
    let alone = prompts.map(|prompt| ask(json!(prompt), false));
    let together = ask(json!(prompts), false);
    for (index, alone) in alone.iter().enumerate() {
        let mut choice = alone["choices"][0].clone();
        choice["index"] = json!(index);
        assert_eq!(together["choices"][index], choice);
    }
    let total = |answer: &Value| answer["usage"]["total_tokens"].as_u64().unwrap();
    assert_eq!(total(&together), alone.iter().map(total).sum::<u64>());

    let stream = ask(json!(prompts), true);
    let events: Vec<&str> =
        stream.as_str().unwrap().lines().filter_map(|line| Some(&line[line.find("data: ")? + 6..])).collect();
    let (done, events) = events.split_last().unwrap();
    assert_eq!((*done, events.iter().filter(|event| **event == "[DONE]").count()), ("[DONE]", 0));
    let mut texts = vec![String::new(); 3];
    for event in events {
        let event: Value = serde_json::from_str(event).unwrap();
        for choice in event["choices"].as_array().unwrap() {
            let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
            texts[index] += choice["text"].as_str().unwrap();
        }
    }
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(together["choices"][index]["text"], *text);
    }
}

#[test]
fn eval_measures_what_training_measured() {
    let bench = Bench::new();
    for (name, more) in [("run", &[][..]), ("split", &["--set", "data.eval=[]", "--set", "data.eval_split=0.25"])] {
        train(&bench.recipe(name, ""), &[&["--set", "train.max_steps=4"], more].concat());
        let summary = json(&bench.path(name).join("summary.json"));
        let folder = bench.path(name);
        let measure = |more: &[&str]| -> Value {
            serde_json::from_str(&stdout(&[&["eval", folder.to_str().unwrap()], more].concat())).unwrap()
        };
        let found = measure(&[]);
        assert_eq!(found["eval_loss"], summary["final_eval_loss"], "{name}");
        assert_eq!(found["eval_perplexity"], json!(found["eval_loss"].as_f64().unwrap().exp()));
        assert_eq!(measure(&["--base"])["eval_loss"], summary["initial_eval_loss"], "{name}");
        if name == "run" {
            let eval = bench.path("eval.jsonl");
            assert_eq!(measure(&["--data", eval.to_str().unwrap(), "--json"]), found);
        }
    }
    let model = quickstart_model();
    let output = run(&["eval", model.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("no evaluation rows\n  hint: --data FILE"), "{}", stderr(&output));
}

#[test]
fn eval_finds_the_rows_of_a_run_from_another_folder_and_reads_others_as_the_run_did() {
    let bench = Bench::new();
    for name in ["train.jsonl", "eval.jsonl"] {
        let rows = fs::read_to_string(bench.path(name)).unwrap();
        fs::write(bench.path(name), rows.replace("\"prompt\"", "\"ask\"").replace("\"completion\"", "\"reply\""))
            .unwrap();
    }
    let recipe = bench.recipe("run", "");
    let [train, eval] = [("train", "train.jsonl"), ("eval", "ev*.jsonl")].map(|(section, path)| {
        let columns = "{ prompt = 'ask', completion = 'reply' }";
        format!("data.{section}=[{{ path = {path:?}, columns = {columns} }}]")
    });
    let args = [recipe.to_str().unwrap(), "--set", &train, "--set", &eval, "--set", "train.max_steps=2"];
    let trained = lora_train(&args).current_dir(&bench.folder).output().unwrap();
    assert!(trained.status.success(), "{}", stderr(&trained));
    let (folder, data) = (bench.path("run"), bench.path("eval.jsonl"));
    let folder = folder.to_str().unwrap();
    let loss = json(&bench.path("run/summary.json"))["final_eval_loss"].clone();
    for more in [&[][..], &["--data", data.to_str().unwrap()]] {
        let found: Value = serde_json::from_str(&stdout(&[&["eval", folder], more].concat())).unwrap();
        assert_eq!(found["eval_loss"], loss, "{more:?}");
    }
    let usual =
        fs::read_to_string(&data).unwrap().replace("\"ask\"", "\"prompt\"").replace("\"reply\"", "\"completion\"");
    let usual = (bench.path("usual.jsonl"), usual);
    fs::write(&usual.0, usual.1).unwrap();
    let found: Value = serde_json::from_str(&stdout(&["eval", folder, "--data", usual.0.to_str().unwrap()])).unwrap();
    assert_eq!(found["eval_loss"], loss, "other columns than the run's are found by themselves");
    let output = run(&["eval", folder, "--set", "data.max_length=2"]);
    assert!(stderr(&output).contains("no row is left to evaluate on\n"), "{}", stderr(&output));
    fs::remove_file(data).unwrap();
    let output = run(&["eval", folder]);
    assert!(stderr(&output).contains("`data.eval[0].path` = \"ev*.jsonl\" matches no file"), "{}", stderr(&output));
}

#[test]
#[ignore = "needs LORA_TRAIN_PYTHON, a Python with openai (scripts/setup_python.sh), and Chromium"]
fn openais_client_and_a_browser_get_along_with_the_server() {
    let bench = Bench::new();
    let folder = chat_run(&bench);
    let found = check_serve(&folder, "--chromium");
    assert_eq!(found["models"], json!(["run", "base"]));
    assert_eq!(found["page"], json!([found["texts"]["run"], found["texts"]["base"]]));
}

/// What `scripts/check_serve.py` finds of the server of a run.
fn check_serve(folder: &Path, option: &str) -> Value {
    let server = Server::start(&[folder.to_str().unwrap()]);
    let python = std::env::var("LORA_TRAIN_PYTHON").expect("LORA_TRAIN_PYTHON names a Python with openai");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/check_serve.py");
    let address = format!("http://{}", server.address);
    let output = Command::new(python).args([script, &address, option]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
#[ignore = "needs LORA_TRAIN_PYTHON, a Python with openai (scripts/setup_python.sh)"]
fn openais_client_gets_calls_of_tools() {
    let bench = Bench::new();
    let folder = bench.path("model");
    fs::create_dir(&folder).unwrap();
    for file in fs::read_dir(quickstart_model()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    fs::write(folder.join("chat_template.jinja"), TOOL_TEMPLATE).unwrap();
    check_serve(&folder, "--tools");
}
