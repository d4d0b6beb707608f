//! Images that users show a model: `generate`, `chat` and `serve` answer the same about them, and what is no image is refused.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::common::{lora_train, quickstart_model, stderr};
use crate::images::{GEMMA3, MISTRAL3, QWEN3_VL, write_model};
use crate::talk::Server;

/// A file as an address.
fn address_of(file: &Path) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(fs::read(file).unwrap()))
}

/// A message with images before its text.
fn asked(images: &[&str], text: &str) -> Value {
    let images = images.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
    let parts: Vec<Value> = images.chain([json!({"type": "text", "text": text})]).collect();
    json!({"role": "user", "content": parts})
}

fn body(messages: &[Value]) -> Value {
    json!({"messages": messages, "temperature": 0, "max_tokens": 8})
}

fn answer(server: &Server, messages: &[Value]) -> String {
    let (status, answer) = server.ask("/v1/chat/completions", "", &body(messages));
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// The text of a stream.
fn streamed(server: &Server, messages: &[Value]) -> String {
    let mut body = body(messages);
    body["stream"] = json!(true);
    let (status, stream) = server.ask("/v1/chat/completions", "", &body);
    assert_eq!(status, 200, "{stream}");
    let events = stream.as_str().unwrap().lines().filter_map(|line| line.split_once("data: {"));
    let events = events.map(|(_, event)| serde_json::from_str::<Value>(&format!("{{{event}")).unwrap());
    events.map(|event| event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()).collect()
}

/// What the command prints in `folder`, with `input` on its standard input.
fn printed(folder: &Path, args: &[&str], input: &str) -> String {
    let mut command = lora_train(&[args, &["--max-new-tokens", "8", "--quiet", "--device", "cpu"]].concat());
    command.current_dir(folder).env("LORA_TRAIN_CACHE", folder.join("cache"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// An answer as the command prints it.
fn line(answer: &str) -> String {
    if answer.ends_with('\n') { answer.to_owned() } else { format!("{answer}\n") }
}

#[test]
fn generate_chat_and_serve_answer_the_same_about_images() {
    for family in [MISTRAL3, QWEN3_VL, GEMMA3] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        write_model(family, path);
        let [a, b, c] = ["a.png", "b.png", "c.png"].map(|name| address_of(&path.join(name)));
        let server = Server::start(&[path.to_str().unwrap()]);
        let models = server.ask("/v1/models", "", &Value::Null).1;
        assert_eq!(models["data"][0]["sees_images"], true);
        // Of two images, one is known already.
        let asked_twice = [asked(&[&c, &a], "Which?")];
        let first = [asked(&[&a], "What?")];
        let answers = [answer(&server, &first), answer(&server, &asked_twice)];
        assert_ne!(answers[0], answers[1], "{family}");
        let generated = printed(path, &["generate", ".", "What?", "--image", "a.png"], "");
        assert_eq!(generated, line(&answers[0]), "{family}");
        let generated = printed(path, &["generate", ".", "Which?", "--image", "c.png", "--image", "a.png"], "");
        assert_eq!(generated, line(&answers[1]), "{family}");
        assert_eq!(streamed(&server, &first), answers[0], "{family}");
        let part = json!({"type": "input_image", "image_url": a, "detail": "auto"});
        let response = json!({"input": [{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}],
                              "temperature": 0, "max_output_tokens": 8});
        let (_, response) = server.ask("/v1/responses", "", &response);
        assert_eq!(response["output"][0]["content"][0]["text"], answers[0], "{family}: {response}");

        // A conversation, and beside it others.
        let said = json!({"role": "assistant", "content": answers[0]});
        let third = [first[0].clone(), said, asked(&[&b], "And?")];
        let alone = answer(&server, &third);
        let chatted = printed(path, &["chat", "."], "/image a.png\nWhat?\n/image b.png\nAnd?\n");
        assert_eq!(chatted, line(&answers[0]) + &line(&alone), "{family}");
        std::thread::scope(|scope| {
            let ask = |index: usize| {
                let (server, messages) = (&server, [&first[..], &asked_twice, &third][index % 3]);
                scope.spawn(move || answer(server, messages))
            };
            let texts: Vec<_> = (0..6).map(ask).collect();
            for (index, text) in texts.into_iter().enumerate() {
                assert_eq!(text.join().unwrap(), [&answers[0], &answers[1], &alone][index % 3][..], "{family} {index}");
            }
        });
    }
}

/// A PNG of which only the header is there.
fn header_of([width, height]: [u32; 2]) -> String {
    let header = [&b"IHDR"[..], &width.to_be_bytes(), &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
    file.extend(&header);
    file.extend(crc32fast::hash(&header).to_be_bytes());
    format!("data:image/png;base64,{}", STANDARD.encode(file))
}

#[test]
fn what_is_no_image_or_none_of_the_request_is_refused_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    let server = Server::start(&[path.to_str().unwrap()]);
    let good = address_of(&path.join("c.png"));
    let whole = fs::read(path.join("a.png")).unwrap();
    let cut = format!("data:image/png;base64,{}", STANDARD.encode(&whole[..whole.len() / 2]));
    let file = path.join("a.png").display().to_string();
    let own_file =
        json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": good}, "image": file}]});
    let none = json!({"role": "user", "content": [{"type": "image"}]});
    let refused = |message: Value| {
        let (status, answer) = server.ask("/v1/chat/completions", "", &body(&[message]));
        let message = answer["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(status == 400 && !message.contains('\n'), "{status} {answer}");
        message
    };
    for (message, reason) in [
        (asked(&["https://example.com/a.png"], "?"), "no address and no file is read here"),
        (asked(&[&file], "?"), "no address and no file is read here"),
        (asked(&[&format!("file://{file}")], "?"), "no address and no file is read here"),
        (own_file, "`image`, which is not supported"),
        (none, "an image without `image_url`"),
        (asked(&["data:image/png;base64,%%%"], "?"), "has damaged base64"),
        (asked(&["data:image/png,abc"], "?"), "is no `data:image/...;base64,` of an image"),
        (asked(&["data:image/png;base64,PGh0bWw+"], "?"), "is no image"),
        (asked(&[&cut], "?"), "is damaged or cut short"),
        (asked(&[&header_of([400, 400])], "?"), "is damaged or cut short"),
        (asked(&[good.as_str(); 65], "?"), "an image beyond 64"),
        (asked(&[address_of(&path.join("a.png")).as_str(); 60], "?"), "the model was made for 512 tokens"),
        (asked(&[&good], "[IMG]?"), "has 1 images, and its text has 2 times \"[IMG]\""),
        (asked(&[], "[IMG]?"), "stands for none"),
    ] {
        let said = refused(message);
        assert!(said.contains(reason), "{reason}: {said}");
    }
    // No tokens of images that others have shown.
    answer(&server, &[asked(&[&good], "What?")]);
    let tokens = json!({"prompt": [5, 1_u32 << 29], "max_tokens": 2});
    let (status, said) = server.ask("/v1/completions", "", &tokens);
    assert!(status == 400 && said["error"]["message"].as_str().unwrap().contains("token 536870912"), "{said}");
    // A body may be larger than where there are no images, but not of any size.
    assert!(refused(asked(&[], &"a".repeat(3 << 20))).contains("512 tokens"));
    let (status, _) = server.ask("/v1/chat/completions", "", &body(&[asked(&[], &"a".repeat(33 << 20))]));
    assert_eq!(status, 413);
    assert_eq!(answer(&server, &[asked(&[&good], "What?")]), streamed(&server, &[asked(&[&good], "What?")]));

    let blind = Server::start(&[quickstart_model().to_str().unwrap()]);
    let (status, said) = blind.ask("/v1/chat/completions", "", &body(&[asked(&[&good], "What?")]));
    assert!(status == 400 && said["error"]["message"].as_str().unwrap().ends_with("this model sees none"), "{said}");
    assert_eq!(blind.ask("/v1/models", "", &Value::Null).1["data"][0]["sees_images"], false);
}

#[test]
fn a_chat_goes_on_after_a_file_that_is_no_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    fs::write(path.join("page.png"), "<html>404</html>").unwrap();
    let asked = "/image page.png\n/image none.png\n/image\n/image 'c.png'\n[IMG]?\n/reset\nWhat?\n";
    let mut command = lora_train(&["chat", ".", "--max-new-tokens", "8"]);
    command.current_dir(path).env("LORA_TRAIN_CACHE", path.join("cache")).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(asked.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = stderr(&output);
    for part in [
        "error: the image \"page.png\" is no image",
        "error: the image \"none.png\" cannot be read",
        "error: /image is followed by the path of a file",
        "c.png: 4 tokens, with the next message",
        "error: the prompt has 1 images, and its text has 2 times",
    ] {
        assert!(said.contains(part), "{part}\n{said}");
    }
    // What was shown is forgotten with the conversation.
    let text = printed(path, &["generate", ".", "What?"], "");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), text);
    let blind = printed(path, &["chat", quickstart_model().to_str().unwrap()], "/image c.png\n");
    assert_eq!(blind, "");
}

#[test]
#[ignore = "needs LORA_TRAIN_PYTHON, a Python with openai (scripts/setup_python.sh), and Chromium"]
fn openais_client_and_a_browser_show_images() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_model(MISTRAL3, path);
    let server = Server::start(&[path.to_str().unwrap()]);
    let python = std::env::var("LORA_TRAIN_PYTHON").expect("LORA_TRAIN_PYTHON names a Python with openai");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/check_serve.py");
    let image = path.join("a.png");
    let args = [script, &format!("http://{}", server.address), "--image", image.to_str().unwrap(), "--chromium"];
    let output = Command::new(python).args(args).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = answer(&server, &[asked(&[&address_of(&image)], "What is this?")]);
    assert_eq!((&found["text"], &found["page"][0]), (&json!(text), &json!(text)));
}
