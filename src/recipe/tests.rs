mod keys;
mod overrides;
mod places;
mod syntax;
mod values;

use std::path::Path;

use super::*;
use crate::config::{DataFormat, DataSource, EvalSplit, InitLoraWeights, Precision, TargetModules};
use crate::device::Dtype;

fn parse(text: &str, set: &[&str]) -> Result<Recipe, Problems> {
    let overrides: Vec<Override> = set.iter().map(|assignment| Override::set(*assignment)).collect();
    Recipe::parse(Path::new("dir/r.toml"), text, &overrides, Purpose::Training)
}

/// The smallest recipe that trains, with `more` from line 5 on.
fn least(more: &str) -> String {
    format!("[model]\npath = \"m\"\n[[data.train]]\npath = \"rows.jsonl\"\n{more}")
}

/// The problems of the smallest recipe with `more`.
fn problems(more: &str) -> Vec<String> {
    lines(parse(&least(more), &[]))
}

fn lines(result: Result<Recipe, Problems>) -> Vec<String> {
    result.unwrap_err().0.iter().map(|problem| problem.to_string().replace("dir/r.toml", "r")).collect()
}

fn set(assignments: &[&str]) -> Result<Recipe, Problems> {
    parse(&least("[lora]\nr = 4\n"), assignments)
}

#[test]
fn the_least_recipe_has_every_default() {
    let recipe = parse(&least(""), &[]).unwrap();
    let source = DataSource { path: "rows.jsonl".into(), ..DataSource::default() };
    let expected = Recipe {
        output_dir: "runs/r".into(),
        model: ModelOptions { path: "m".into(), ..ModelOptions::default() },
        data: DataConfig { train: vec![source], ..DataConfig::default() },
        train: TrainConfig { num_epochs: Some(1.0), ..TrainConfig::default() },
        ..Recipe::default()
    };
    assert_eq!(recipe, expected);
}

#[test]
fn every_value_is_read_and_the_resolved_recipe_reads_back_equal() {
    let text = r#"
output_dir = "out"
seed = 9223372036854775807
[model]
path = "m"
revision = "v1"
dtype = "bf16"
init = "random"
[lora]
r = 16
lora_alpha = 32
lora_dropout = 0.05
target_modules = '.*\.self_attn\.[qv]_proj'
use_rslora = true
init_lora_weights = "gaussian"
layers_to_transform = [3, 1]
rank_pattern = { q_proj = 4, "layers.0.self_attn.v_proj" = 2 }
alpha_pattern = { q_proj = 8.5 }
loraplus_lr_ratio = 16
[data]
max_length = 512
train_on_inputs = true
eval_split = 0.1
shuffle = false
num_workers = 2
prefetch_batches = 8
chat_template = "none"
[[data.train]]
path = "a.jsonl"
format = "alpaca"
columns = { instruction = "question", output = "answer" }
weight = 0.5
[[data.train]]
path = "b \"quoted\".txt"
[train]
precision = "f16"
micro_batch_size = 2
gradient_accumulation_steps = 3
num_epochs = 2.5
max_steps = 100
gradient_checkpointing = false
max_grad_norm = 0
[optimizer]
name = "adamw"
learning_rate = 1e-5
weight_decay = 0.01
betas = [0.8, 0.95]
eps = 1e-6
[scheduler]
lr_scheduler = "linear"
warmup_ratio = 0.03
min_lr_ratio = 0.1
[eval]
eval_steps = 10
max_batches = 4
early_stopping_patience = 2
generate = ["Hello", "two\nlines"]
[checkpoint]
save_steps = 50
save_total_limit = 1
[logging]
logging_steps = 5
tensorboard = false
gpu_sample_ms = 250
[device]
name = "cuda:1"
"#;
    let recipe = parse(text, &[]).unwrap();
    assert_eq!(recipe.seed, i64::MAX as u64);
    assert_eq!(recipe.model.dtype, Some(Dtype::Bf16));
    assert_eq!(recipe.lora.lora_alpha.to_bits(), 32.0_f64.to_bits());
    assert_eq!(recipe.lora.target_modules, TargetModules::Regex(r".*\.self_attn\.[qv]_proj".into()));
    assert_eq!(recipe.lora.init_lora_weights, InitLoraWeights::Gaussian);
    assert_eq!(recipe.lora.layers_to_transform, Some(vec![1, 3]));
    assert_eq!(recipe.lora.rank_pattern["layers.0.self_attn.v_proj"], 2);
    assert_eq!(recipe.data.eval_split, Some(EvalSplit::Share(0.1)));
    assert_eq!(recipe.data.train[0].columns["output"], "answer");
    assert_eq!(recipe.train.precision, Precision::F16);
    assert_eq!((recipe.train.num_epochs, recipe.train.max_steps), (Some(2.5), Some(100)));
    assert_eq!(recipe.scheduler.warmup_ratio, Some(0.03));
    assert_eq!(recipe.device.name, "cuda:1");

    let others = ["data.eval_split=7", "checkpoint.save_minutes=0", "checkpoint.save_steps=5"];
    let others = others.map(|change| set(&[change]).unwrap());
    for recipe in [recipe, parse(&least(""), &[]).unwrap()].into_iter().chain(others) {
        let toml = recipe.to_toml();
        let again = Recipe::parse(Path::new("resolved.toml"), &toml, &[], Purpose::Training);
        assert_eq!(again.unwrap_or_else(|problems| panic!("{problems}\n{toml}")), recipe);
    }
}

#[test]
fn one_epoch_is_the_default_only_where_no_steps_are_given() {
    assert_eq!(parse(&least(""), &[]).unwrap().train.num_epochs, Some(1.0));
    assert_eq!(set(&["train.max_steps=3"]).unwrap().train.num_epochs, None);
}

#[test]
fn all_problems_are_reported_together_by_place() {
    let text = "seed = -1\n[lora]\nlora_dropout = 1.2\ntarget = \"all\"\n[model]\npath = \"m\"\n[eval]\neval_steps = 0";
    assert_eq!(
        lines(parse(text, &["lora.r=x", "optimizer.eps=0"])),
        [
            "r: there is no training data\n  hint: add [[data.train]] with the `path` of a file",
            "r:1:8: `seed` = -1, expected a whole number from 0 to 9223372036854775807",
            "r:3:16: `lora.lora_dropout` = 1.2, expected a number in [0, 1)",
            "r:4:1: unknown key `target`\n  hint: did you mean `target_modules`?",
            "r:8:14: `eval.eval_steps` = 0, expected a whole number of at least 1\n  hint: if none is meant, leave it out: \
             `lora-train help eval.eval_steps` says what happens then",
            "--set lora.r=x: `lora.r` = \"x\", expected a whole number from 1 to 65536",
            "--set optimizer.eps=0: `optimizer.eps` = 0, expected a number above 0",
        ]
    );
}

#[test]
fn columns_are_counted_in_characters() {
    assert_eq!(
        problems("[eval]\ngenerate = [\"äöü\"] ; x = 1\n")[0].split(": ").next(),
        Some("r:6:20"),
        "a umlaut is one column"
    );
}

#[test]
fn files_that_are_no_recipe_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let load = |name: &str| {
        let path = folder.path().join(name);
        let text = Recipe::load(&path, &[], Purpose::Training).unwrap_err().to_string();
        text.replace(&format!("{}/", folder.path().display()), "")
    };
    let folder_name = folder.path().display();
    assert_eq!(load("absent.toml"), format!("absent.toml: there is no such file in {folder_name}"));
    std::fs::write(folder.path().join("quickstart.toml"), "").unwrap();
    let said = load("quikstart.toml");
    assert!(said.ends_with("\n  hint: did you mean `quickstart.toml`?"), "{said}");
    fs::create_dir(folder.path().join("dir.toml")).unwrap();
    assert_eq!(load("dir.toml"), "dir.toml: this is a folder, expected a recipe file");
    fs::write(folder.path().join("latin1.toml"), b"# \xe9t\xe9\n").unwrap();
    assert_eq!(
        load("latin1.toml"),
        "latin1.toml: not UTF-8 text at byte 2, expected a TOML file\n  hint: save it as UTF-8"
    );
}

#[test]
fn windows_line_ends_and_a_byte_order_mark_are_no_problem() {
    let text = format!("\u{feff}{}", least("").replace('\n', "\r\n"));
    assert_eq!(parse(&text, &[]).unwrap(), parse(&least(""), &[]).unwrap());
}
