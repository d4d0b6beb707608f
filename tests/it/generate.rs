//! `lora-train generate`, and its greedy texts compared with those of transformers token by token.
//!
//! The expected ids come from `model.generate(ids, do_sample=False)` of transformers 5.23 with torch 2.15, in `f32` on
//! the CPU. stories15M and SmolLM2-135M must be in the folder that `LORA_TRAIN_MODELS` names (made by
//! `scripts/get_models.py`). Their tests are ignored unless requested, as in `.ci/run`.

use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use burn::tensor::Device;
use lora_train::data::template::{ChatTemplate, Stops};
use lora_train::data::tokenizer::Tokenizer;
use lora_train::device::Dtype;
use lora_train::generate::{Ending, GenerateOptions, Generated, Generator, encode_prompt};
use lora_train::lora::AdapterSet;
use lora_train::model::load;
use lora_train::model::weights::{WeightFiles, Weights};
use lora_train::spec::ModelConfig;

fn real(name: &str) -> PathBuf {
    Path::new(&std::env::var("LORA_TRAIN_MODELS").expect("LORA_TRAIN_MODELS names the folder of real models"))
        .join(name)
}

/// Ids of the prompt, as a user's turn or raw, and the greedy continuation.
fn greedy(folder: &Path, storage: Dtype, prompt: &str, chat: bool, max_new_tokens: usize) -> (Vec<u32>, Generated) {
    let device = Device::flex();
    let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
    let weights = Weights::Files(WeightFiles::open(folder).unwrap());
    let model = load::load(&config, &weights, storage, Dtype::F32, &device).unwrap();
    let tokenizer = Tokenizer::open(folder).unwrap();
    let template = ChatTemplate::open(if chat { "auto" } else { "none" }, &tokenizer).unwrap();
    let prompt_ids = encode_prompt(&tokenizer, template.as_ref(), None, prompt).unwrap();
    let adapters = AdapterSet::none(config.num_layers());
    let stops = Stops::of(&tokenizer, template.as_ref());
    let generator = Generator { model: &model, adapters: &adapters, tokenizer: &tokenizer, stops: &stops };
    let options = GenerateOptions { max_new_tokens, ..GenerateOptions::default() };
    let generated = generator.generate(&prompt_ids, &options, |_| ControlFlow::Continue(())).unwrap();
    (prompt_ids, generated)
}

fn quickstart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("quickstart/model")
}

/// First row of quickstart/eval.jsonl.
const STORY: &str = "Max saw a snail on the hill. Olga gave him a brown basket. The snail followed Max home. It was a \
                     hot day. He never forgot the snail.";

#[test]
fn the_quickstart_model_writes_what_it_writes_in_transformers() {
    let (prompt_ids, generated) = greedy(&quickstart(), Dtype::F32, "Once upon a time", false, 40);
    assert_eq!(prompt_ids, [530, 403, 786, 291, 265, 802]);
    assert_eq!(generated.token_ids, [16, 367, 297, 265, 1050, 390, 16, 356, 417, 265, 878, 604, 444, 270, 1079, 16]);
    assert_eq!(generated.text, ". It was a rainy day. He found a tiny owl behind the tree.");
    assert_eq!(generated.ending, Ending::EndOfText);

    let (_, generated) = greedy(&quickstart(), Dtype::F32, "The ", false, 40);
    assert_eq!(
        generated.token_ids,
        [
            1304, 14, 1100, 297, 312, 270, 870, 389, 467, 995, 16, 356, 375, 265, 978, 16, 1100, 316, 265, 878, 711,
            16, 1100, 297, 488, 1306, 16, 367, 297, 265, 1005, 390, 16
        ]
    );

    let (prompt_ids, generated) = greedy(&quickstart(), Dtype::F32, STORY, true, 40);
    assert_eq!(prompt_ids[..6], [1, 299, 201, 940, 316, 265]);
    assert_eq!(prompt_ids[prompt_ids.len() - 5..], [2, 201, 1, 298, 201]);
    assert_eq!(generated.token_ids, [940, 323, 265, 702, 349, 270, 889, 16]);
}

#[test]
fn the_command_answers_a_users_turn_or_continues_a_raw_prompt() {
    let model = quickstart();
    let model = model.to_str().unwrap();
    let output = command(&["--model", model, "--prompt", STORY]).output().unwrap();
    assert_eq!((output.status.code(), stdout_of(&output)), (Some(0), "Max met a snail on the hill.\n"));
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(stderr.contains("held in bf16, computed in f32 on cpu") && stderr.contains("text: 8 tokens, "), "{stderr}");

    let args = ["--model", model, "--prompt", "Once upon a time", "--raw", "--quiet", "--max-new-tokens", "6"];
    let output = command(&args).output().unwrap();
    assert_eq!((stdout_of(&output), output.stderr.len()), (". It was a rainy day\n", 0));

    // Samples differ by seed and repeat with the same seed.
    let draw = |seed: &str| {
        let drawing = ["--temperature", "1.5", "--top-p", "0.95", "--seed", seed];
        let output = command(&[&args[..7], &["40"], &drawing].concat()).output().unwrap();
        stdout_of(&output).to_owned()
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
}

#[test]
#[ignore = "needs stories15M in the folder LORA_TRAIN_MODELS"]
fn stories15m_writes_the_story_of_transformers() {
    let (prompt_ids, generated) = greedy(&real("stories15M"), Dtype::F32, "Once upon a time", false, 40);
    assert_eq!(prompt_ids, [1, 9038, 2501, 263, 931]);
    assert_eq!(
        generated.token_ids,
        [
            29892, 727, 471, 263, 2217, 7826, 4257, 365, 2354, 29889, 2296, 18012, 304, 1708, 5377, 297, 278, 6575,
            845, 457, 29889, 3118, 2462, 29892, 1183, 4446, 263, 4802, 29892, 2654, 8287, 297, 278, 14744, 29889, 739,
            471, 278, 6575, 29991
        ]
    );
    assert_eq!(
        generated.text,
        ", there was a little girl named Lily. She loved to play outside in the sunshine. One day, she saw a big, red \
         ball in the sky. It was the sun!"
    );
}

#[test]
#[ignore = "needs smollm2-135m in the folder LORA_TRAIN_MODELS"]
fn smollm2_answers_through_its_chat_template_as_in_transformers_and_ends_its_turn() {
    // The file is in bf16, so bf16 storage loses nothing.
    for storage in [Dtype::F32, Dtype::Bf16] {
        let prompt = "What is the capital of France?";
        let (prompt_ids, generated) = greedy(&real("smollm2-135m"), storage, prompt, true, 40);
        assert_eq!(prompt_ids.len(), 37);
        assert_eq!(prompt_ids[..10], [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365]);
        assert_eq!(generated.token_ids, [504, 3575, 282, 4649, 314, 7042, 30]);
        assert_eq!(generated.text, "The capital of France is Paris.");
        assert_eq!(generated.ending, Ending::EndOfText);
    }
}

#[test]
fn a_model_is_asked_in_the_form_it_was_trained_in() {
    let bench = crate::common::Bench::new();
    let turn = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let row = serde_json::json!({"messages": [turn("user", STORY), turn("assistant", "Max met a snail.")]});
    std::fs::write(bench.path("chat.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    std::fs::write(
        bench.path("own.jinja"),
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}\
                    {% if add_generation_prompt %}assistant: {% endif %}",
    )
    .unwrap();
    let train = |name: &str, rows: &str, template: &str| {
        let data = format!("data.train=[{{path={:?}}}]", bench.path(rows).to_str().unwrap());
        let template = format!("data.chat_template={template:?}");
        let set = ["--set", &data, "--set", "data.eval=[]", "--set", &template, "--set", "train.max_steps=2"];
        crate::common::train(
            &bench.recipe(name, ""),
            &[&set[..], &["--set", "data.max_length=256", "--set", "checkpoint.save_steps=1"]].concat(),
        );
    };
    let own = bench.path("own.jinja");
    train("raw", "train.jsonl", "none");
    train("chat", "chat.jsonl", "auto");
    train("own", "chat.jsonl", own.to_str().unwrap());
    // The text is kept, but not its file's path.
    std::fs::remove_file(own).unwrap();

    let ask = |run: &str, more: &[&str]| {
        let (model, adapter) = (quickstart(), bench.path(run));
        let args = ["--model", model.to_str().unwrap(), "--adapter", adapter.to_str().unwrap(), "--prompt", "Hi"];
        let output = command(&[&args[..], &["--max-new-tokens", "1"], more].concat()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let line = |start: &str| said.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
        (line("the prompt "), line("prompt: ").split(" tokens").next().unwrap().to_owned())
    };
    let tokenizer = Tokenizer::open(&quickstart()).unwrap();
    let tokens = |text: &str| format!("prompt: {}", tokenizer.encode(text, true).unwrap().len());
    let raw = tokens("Hi");
    let chat = tokens("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    let own = tokens("user: Hi<|im_end|>assistant: ");
    for (run, more, form, prompt) in [
        ("raw", &[][..], "is continued as it is: the adapter was trained so; --chat asks", &raw),
        ("raw/checkpoints/step-000001", &[], "is continued as it is: the adapter was trained so", &raw),
        ("raw", &["--chat"], "goes through the chat template of the model: --chat", &chat),
        ("chat", &[], "goes through the chat template of the model: the adapter was trained so; --raw", &chat),
        ("chat", &["--raw"], "is continued as it is: --raw", &raw),
        ("own", &[], "goes through the chat template of the adapter: the adapter was trained so", &own),
    ] {
        let (line, asked) = ask(run, more);
        assert!(line.starts_with(&format!("the prompt {form}")), "{run} {more:?}: {line}");
        assert_eq!(&asked, prompt, "{run} {more:?}");
    }
    // A run knows its model, and one that has not finished has its newest checkpoint.
    let run = bench.path("raw");
    let by_run = || {
        let args = [run.to_str().unwrap(), "Hi", "--max-new-tokens", "8"];
        let output = command(&args).output().unwrap();
        (stdout_of(&output).to_owned(), String::from_utf8(output.stderr).unwrap())
    };
    let (text, said) = by_run();
    assert!(!text.is_empty() && said.contains("raw/adapter: adapter of rank 4"), "{said}");
    std::fs::remove_file(run.join("summary.json")).unwrap();
    let (from_checkpoint, said) = by_run();
    assert!(
        said.contains("raw has not finished: this is ") && said.contains("step-000002: adapter of rank 4"),
        "{said}"
    );
    assert_eq!(from_checkpoint, text);
    std::fs::write(run.join("summary.json"), "{}").unwrap();

    // An adapter of another program.
    std::fs::remove_file(bench.path("raw/adapter/prompt_form.json")).unwrap();
    assert_eq!(
        ask("raw", &[]),
        ("the prompt goes through the chat template of the model: --raw continues it as it is".into(), chat)
    );
}

#[test]
fn a_base_that_has_changed_under_its_name_is_told_by_what_opens_its_run() {
    let bench = crate::common::Bench::new();
    let [model, run, out] = ["model", "run", "merged"].map(|name| bench.path(name).display().to_string());
    std::fs::create_dir(&model).unwrap();
    for file in std::fs::read_dir(quickstart()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), bench.path("model").join(file.file_name())).unwrap();
    }
    let set = format!("model.path={model:?}");
    crate::common::train(&bench.recipe("run", ""), &["--set", &set, "--set", "train.max_steps=2"]);
    let told = |args: &[&str]| {
        let output = crate::common::run(args);
        let said = crate::common::stderr(&output);
        assert!(output.status.success(), "{said}");
        said.contains("warning: the model's weights are no longer what the checkpoint was trained with")
    };
    assert!(!told(&["eval", &run]));
    let weights = bench.path("model/model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // The last bit of every number, or of every second one.
    bytes[8 + header_len..].iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
    std::fs::write(&weights, bytes).unwrap();
    let ask = ["generate", &run, "Hi", "--max-new-tokens", "1"];
    assert!(told(&["eval", &run]) && told(&ask) && told(&["merge", &run, "--out", &out]));
    assert!(!told(&["eval", &run, "--base"]) && !told(&[&ask[..], &["--model", &model]].concat()));
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lora-train"));
    command.arg("generate").args(args).stdin(Stdio::null());
    command
}

fn stdout_of(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

/// Exit code and stderr of a call that generates no text.
fn refused(args: &[&str]) -> String {
    let output = command(args).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    assert_eq!(stdout_of(&output), "", "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn what_cannot_be_used_is_refused_before_any_weight_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().to_str().unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let with = |more: &[&str]| {
        let args: Vec<&str> = ["--model", model, "--prompt", "Hello"].iter().chain(more).copied().collect();
        refused(&args)
    };
    let error = with(&["--adapter", "nowhere"]);
    assert_eq!(error, "error: nowhere: no adapter_config.json\n  hint: there is no such folder\n");
    assert!(with(&["--adapter", model]).contains("this is a model, not an adapter"));
    let error = with(&["--temperature", "0", "--top-p", "0.9"]);
    assert!(
        error.contains("`--top-p` does nothing at temperature 0") && error.contains("--temperature 0.7"),
        "{error}"
    );
    assert!(with(&["--seed", "3"]).contains("--temperature"));
    assert!(with(&["--temperature", "-1"]).contains("expected a number from 0 on"));
    assert!(with(&["--temperature", "1", "--top-p", "1.5"]).contains("expected a number above 0, at most 1"));
    assert!(with(&["--temperature", "1", "--min-p", "2"]).contains("expected a number from 0 to 1"));
    assert!(with(&["--max-new-tokens", "0"]).contains("expected a whole number from 1 on"));
    assert!(with(&["--dtype", "int8"]).contains("expected f32, bf16 or f16"));
    assert!(with(&["--raw", "--system", "Be brief"]).contains("cannot be used with"));
    assert!(with(&["--raw", "--chat"]).contains("cannot be used with"));
    assert!(refused(&["--model", "no/such/model", "--prompt", "x"]).starts_with("error: "));
}

#[test]
#[ignore = "needs stories15M in the folder LORA_TRAIN_MODELS"]
fn a_reader_may_leave_early() {
    let model = real("stories15M");
    let model = model.to_str().unwrap();
    let mut child = command(&["--model", model, "--prompt", "Once", "--quiet", "--device", "cpu"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut start = [0; 5];
    child.stdout.take().unwrap().read_exact(&mut start).unwrap();
    assert_eq!(&start, b" upon");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}
