use std::fs;
use std::path::Path;

use super::*;
use crate::device::Dtype;
use crate::model::weights::fixture::{tiny_config, write_model};
use crate::schema::Override;

/// A tokenizer with one token per word.
const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
    "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "unk_token": "<unk>",
              "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5}}}"#;
const TOKENIZER_CONFIG: &str = r#"{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}"#;

/// A folder with a model, rows and a recipe without mistakes.
fn world() -> tempfile::TempDir {
    let world = tempfile::tempdir().unwrap();
    let model = world.path().join("model");
    fs::create_dir(&model).unwrap();
    write_model(&model, &tiny_config(), 1, Dtype::Bf16);
    fs::write(model.join("tokenizer.json"), TOKENIZER).unwrap();
    fs::write(model.join("tokenizer_config.json"), TOKENIZER_CONFIG).unwrap();
    let rows = "{\"prompt\": \"a b\", \"completion\": \" c c\"}\n".repeat(10);
    fs::write(world.path().join("rows.jsonl"), rows).unwrap();
    world
}

/// The findings about the recipe of [`world`] with some changes, with the folder's name removed.
fn findings(world: &Path, changes: &[&str]) -> (Vec<String>, Vec<String>, Vec<String>) {
    let text = "[model]\npath = \"@/model\"\n[[data.train]]\npath = \"@/rows.jsonl\"\n[data]\nmax_length = 16\n[device]\nname = \"cpu\"\n";
    let place = world.display().to_string();
    let text = format!("output_dir = \"@/out\"\n{text}").replace('@', &place);
    let overrides: Vec<Override> = changes.iter().map(|change| Override::set(change.replace('@', &place))).collect();
    let recipe = Recipe::parse(Path::new("r.toml"), &text, &overrides, Purpose::Training).unwrap();
    let findings = examine(&recipe, None);
    let anywhere = |text: String| text.replace(&format!("{place}/"), "").replace(&place, ".");
    (
        findings.facts.iter().map(|(subject, fact)| anywhere(format!("{subject}: {fact}"))).collect(),
        findings.warnings.into_iter().map(anywhere).collect(),
        findings.problems.0.iter().map(|problem| anywhere(problem.to_string())).collect(),
    )
}

#[test]
fn a_recipe_without_mistakes_is_summed_up_and_nothing_is_written() {
    let world = world();
    let (facts, warnings, problems) = findings(world.path(), &["data.eval_split=2", "train.max_steps=3"]);
    assert_eq!((warnings, problems), (vec![], vec![]));
    let config = tiny_config();
    let num_trainable: usize = config.sites().map(|(_, site)| 8 * site.shape.iter().sum::<usize>()).sum();
    assert_eq!(facts[0], "output: out (new)");
    assert!(facts[1].starts_with("device: cpu (") && facts[1].ends_with("computes in f32, base stored in f32"));
    assert!(facts[2].starts_with("model: model (llama, ") && facts[2].ends_with("parameters, stored as bf16)"));
    let trainable = crate::util::text::with_commas(num_trainable);
    assert!(facts[3].starts_with(&format!("trainable params: {trainable} || all params: ")), "{}", facts[3]);
    assert_eq!(facts[4], format!("adapted modules: {} linear layers (all-linear)", 7 * config.num_layers()));
    assert!(
        facts[5].starts_with("gradient checkpointing: off, as there is room (it would save up to "),
        "{}",
        facts[5]
    );
    assert_eq!(
        facts[6],
        "training data: rows.jsonl (10 rows, prompt_completion); prompt and completion joined as they are"
    );
    assert_eq!(facts[7], "evaluation data: 2 rows held out, 8 rows left to train on");
    assert_eq!(facts[8], "rows: 10 rows of up to 5 tokens; 30 of 50 tokens carry loss");
    assert_eq!(facts[9], "steps: 3 of 4 rows; an epoch has 2");
    assert!(!world.path().join("out").exists(), "nothing is written");
}

#[test]
fn mistakes_in_all_corners_are_found_at_once() {
    let world = world();
    fs::write(world.path().join("model/tokenizer.json"), "{").unwrap();
    fs::create_dir(world.path().join("out")).unwrap();
    fs::write(world.path().join("out/summary.json"), "{}").unwrap();
    let (_, warnings, problems) = findings(
        world.path(),
        &[
            "lora.layers_to_transform=[99]",
            "data.train[1].path=@/absent-*.jsonl",
            "data.max_length=100000",
            "device.name=cuda:77",
        ],
    );
    assert_eq!(problems.len(), 5, "{problems:#?}");
    assert!(problems[0].starts_with("`output_dir` = out: holds a finished run"), "{}", problems[0]);
    assert!(problems[1].starts_with("`lora.layers_to_transform` = 99"), "{}", problems[1]);
    assert!(problems[2].contains("cuda"), "{}", problems[2]);
    assert!(problems[3].contains("model/tokenizer.json"), "{}", problems[3]);
    assert!(
        problems[4].starts_with("`data.train[1].path` = \"absent-*.jsonl\" matches no file: looked for in"),
        "{}",
        problems[4]
    );
    assert!(warnings[0].starts_with("`data.max_length` = 100000 is longer than the "), "{warnings:?}");
}

#[test]
fn every_file_with_a_mistake_is_named() {
    let world = world();
    fs::write(world.path().join("odd.jsonl"), "{\"foo\": 1}\n").unwrap();
    fs::write(world.path().join("bad.jsonl"), "{\"text\": }\n").unwrap();
    let (_, _, problems) = findings(
        world.path(),
        &["data.train[1].path=@/odd.jsonl", "data.train[2].path=@/bad.jsonl", "data.eval[0].path=@/none.txt"],
    );
    assert_eq!(problems.len(), 3, "{problems:#?}");
    for (problem, file) in problems.iter().zip(["none.txt", "odd.jsonl", "bad.jsonl"]) {
        assert!(problem.contains(file), "{problem}");
    }
}

#[test]
fn a_bad_row_among_the_first_is_named_with_its_line() {
    let world = world();
    let good = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
    fs::write(world.path().join("rows.jsonl"), format!("{good}{{\"prompt\": \"a\", \"completion\": [3]}}\n{good}"))
        .unwrap();
    let (_, _, problems) = findings(world.path(), &[]);
    assert_eq!(problems.len(), 1, "{problems:#?}");
    assert!(problems[0].starts_with("rows.jsonl:line 2: "), "{}", problems[0]);
}

#[test]
fn weights_that_do_not_fit_the_config_are_listed_without_being_read() {
    let world = world();
    let file = world.path().join("model/config.json");
    let config = fs::read_to_string(&file).unwrap();
    let layers = tiny_config().num_layers();
    let more =
        config.replace(&format!("\"num_hidden_layers\": {layers}"), &format!("\"num_hidden_layers\": {}", layers + 1));
    assert_ne!(config, more);
    fs::write(&file, more).unwrap();
    let (_, _, problems) = findings(world.path(), &[]);
    assert_eq!(problems.len(), 1, "{problems:#?}");
    assert!(problems[0].starts_with("`model.path`: model: the weights do not fit config.json:\n"), "{}", problems[0]);
    assert_eq!(problems[0].matches("missing: ").count(), 9, "{}", problems[0]);
}

#[test]
fn an_unfinished_run_and_intervals_that_never_come_are_said() {
    let world = world();
    fs::create_dir_all(world.path().join("out/checkpoints/step-000001")).unwrap();
    let (facts, warnings, problems) = findings(world.path(), &["checkpoint.save_steps=50"]);
    assert_eq!(facts[0], "output: out (an unfinished run, which `--resume` continues)");
    assert_eq!(warnings, ["`checkpoint.save_steps` = 50 never comes: the run has 3 steps"]);
    assert!(problems.is_empty(), "{problems:?}");
    let (_, _, problems) = findings(world.path(), &["scheduler.warmup_steps=3"]);
    assert_eq!(
        problems,
        ["`scheduler.warmup_steps` = 3 leaves none of the 3 steps of this run\n  hint: make it smaller, or use \
          `warmup_ratio`"]
    );
}

#[test]
fn rows_that_are_cut_before_their_answers_are_a_problem() {
    let world = world();
    let (_, _, problems) = findings(world.path(), &["data.max_length=2"]);
    assert!(
        problems[0].starts_with("no row is left to train on\n  rows.jsonl: 10 of 10 rows carry no loss"),
        "{problems:?}"
    );
    assert!(problems[0].ends_with("\n  hint: raise `data.max_length`"), "{problems:?}");
}

#[test]
fn micro_batches_are_no_larger_than_the_rows_and_learning_rates_far_too_high_are_warned_of() {
    let world = world();
    let large = ["data.max_length=256", "train.micro_batch_size=65536"];
    assert_eq!(findings(world.path(), &large).1, Vec::<String>::new());
    assert_eq!(findings(world.path(), &["optimizer.learning_rate=0.01"]).1, Vec::<String>::new());
    let (_, warnings, _) = findings(world.path(), &["optimizer.learning_rate=0.5"]);
    assert!(warnings[0].starts_with("`optimizer.learning_rate` = 0.5 is far above the usual"), "{warnings:?}");
}

#[test]
fn the_findings_are_one_json_object() {
    let mut findings = Findings::default();
    findings.fact("output", "runs/x (new)".to_owned());
    findings.warnings.push("a warning".to_owned());
    findings.problem(Problem::new("`lora.r` = 0").at("r.toml:1:1").hint("1 or more"));
    findings.problem(Problem::new("no file\n  hint: look again"));
    let expected = json!({
        "facts": [{"subject": "output", "fact": "runs/x (new)"}],
        "warnings": ["a warning"],
        "mistakes": [
            {"place": "r.toml:1:1", "message": "`lora.r` = 0", "hint": "1 or more"},
            {"place": null, "message": "no file", "hint": "look again"},
        ],
    });
    assert_eq!(findings.json(), expected);
}
