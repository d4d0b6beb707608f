//! The recipes of this repository: all of them can be read, and `recipes/reference.toml` shows every key.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use lora_train::checkpoint::CheckpointConfig;
use lora_train::data::config::{DataConfig, DataFormat, DataSource, EvalSplit};
use lora_train::device::{DeviceConfig, Dtype};
use lora_train::lora::config::LoraConfig;
use lora_train::metrics::{CostConfig, LoggingConfig};
use lora_train::model::{Init, ModelOptions, Quantization};
use lora_train::recipe::{PEERS, Purpose, Recipe};
use lora_train::schema::Places;
use lora_train::train::config::{EvalConfig, OptimizerConfig, SchedulerConfig, TrainConfig};
use lora_train::train::watchdog::WatchdogConfig;

fn recipes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes")
}

fn reference() -> String {
    std::fs::read_to_string(recipes().join("reference.toml")).unwrap()
}

/// A recipe that says everything that can be said: nothing is absent, so that every key is serialised.
fn complete() -> Recipe {
    let source =
        DataSource { path: "rows.jsonl".into(), format: DataFormat::Auto, columns: BTreeMap::new(), weight: 1.0 };
    Recipe {
        output_dir: "out".into(),
        seed: 0,
        model: ModelOptions {
            path: "m".into(),
            revision: Some("main".into()),
            dtype: Some(Dtype::F32),
            quantization: Quantization::None,
            init: Init::Pretrained,
        },
        lora: LoraConfig { layers_to_transform: Some(vec![0]), loraplus_lr_ratio: Some(1.0), ..LoraConfig::default() },
        data: DataConfig {
            train: vec![source.clone()],
            eval: vec![source],
            eval_split: Some(EvalSplit::Rows(1)),
            ..DataConfig::default()
        },
        train: TrainConfig {
            num_epochs: Some(1.0),
            max_steps: Some(1),
            loss_chunk_tokens: Some(1),
            ..TrainConfig::default()
        },
        optimizer: OptimizerConfig::default(),
        scheduler: SchedulerConfig { warmup_ratio: Some(0.1), warmup_steps: Some(1), ..SchedulerConfig::default() },
        eval: EvalConfig {
            eval_steps: Some(1),
            max_batches: Some(1),
            early_stopping_patience: Some(1),
            generate: vec![],
        },
        checkpoint: CheckpointConfig { save_steps: Some(1), save_minutes: Some(1.0), save_total_limit: Some(1) },
        logging: LoggingConfig::default(),
        cost: CostConfig { price_per_hour: Some(1.0), price_per_kwh: Some(1.0), ..CostConfig::default() },
        watchdog: WatchdogConfig::default(),
        device: DeviceConfig::default(),
        places: Places::default(),
    }
}

/// Every key of a TOML text: `lora.r`, `data.train.path`. A table that says something by names of the user's own
/// is one key.
fn keys(toml: &str) -> BTreeSet<String> {
    fn walk(value: &toml::Value, path: &str, keys: &mut BTreeSet<String>) {
        let by_name = ["columns", "rank_pattern", "alpha_pattern"].iter().any(|name| path.ends_with(name));
        match value {
            toml::Value::Table(table) if !by_name => {
                for (key, value) in table {
                    walk(value, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, keys);
                }
            }
            toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
                items.iter().for_each(|item| walk(item, path, keys));
            }
            _ => {
                keys.insert(path.to_owned());
            }
        }
    }
    let mut found = BTreeSet::new();
    walk(&toml::Value::Table(toml.parse().unwrap()), "", &mut found);
    found
}

/// The text with its commented-out keys in force: `# key = value`.
fn uncommented(text: &str) -> String {
    let uncomment = |line: &str| match line.strip_prefix("# ").and_then(|rest| Some((rest, rest.split_once(" = ")?.0)))
    {
        Some((rest, key)) if key.chars().all(|c| c.is_ascii_lowercase() || c == '_') => rest.to_owned(),
        _ => line.to_owned(),
    };
    text.lines().map(uncomment).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_recipe_of_the_repository_can_be_read() {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(recipes()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            Recipe::load(&path, &[], Purpose::Training).unwrap_or_else(|problems| panic!("{problems}"));
            names.push(path.file_stem().unwrap().to_string_lossy().into_owned());
        }
    }
    for name in ["llama", "quickstart", "reference", "smollm2"] {
        assert!(names.iter().any(|found| found == name), "{name} is not among {names:?}");
    }
}

#[test]
fn the_reference_shows_every_key_and_no_other() {
    let shown = keys(&uncommented(&reference()));
    let exist = keys(&complete().to_toml());
    let missing: Vec<_> = exist.difference(&shown).collect();
    let unknown: Vec<_> = shown.difference(&exist).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "not shown: {missing:?}; shown and unknown: {unknown:?}");
}

#[test]
fn the_reference_shows_the_defaults() {
    let path = recipes().join("reference.toml");
    let shown = Recipe::load(&path, &[], Purpose::Training).unwrap();
    let least = format!(
        "model.path = {:?}\ndata.train = [{{ path = {:?} }}]\ndata.eval = [{{ path = {:?} }}]",
        shown.model.path, shown.data.train[0].path, shown.data.eval[0].path
    );
    let defaults = Recipe::parse(&path, &least, &[], Purpose::Training).unwrap();
    assert_eq!(shown, defaults);
}

#[test]
fn the_examples_of_the_reference_are_valid() {
    let excluded = ["eval_split = ", "warmup_steps = "];
    let text: Vec<String> = uncommented(&reference())
        .lines()
        .filter(|line| !excluded.iter().any(|key| line.starts_with(key)))
        .map(str::to_owned)
        .collect();
    let path = Path::new("reference.toml");
    Recipe::parse(path, &text.join("\n"), &[], Purpose::Training).unwrap_or_else(|problems| panic!("{problems}"));
}

#[test]
fn names_of_other_trainers_lead_to_keys_that_exist() {
    let exist = keys(&complete().to_toml());
    let full = |section: &str, key: &str| if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
    for peer in PEERS {
        if let Some(key) = peer.key {
            let ours = full(peer.section, key);
            let is_section = exist.iter().any(|exists| exists.starts_with(&format!("{ours}.")));
            assert!(exist.contains(&ours) || is_section, "{ours} does not exist");
        }
        assert!(peer.key.is_some() || peer.note.is_some(), "{:?} leads nowhere", peer.names);
        for name in peer.names {
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'), "{name}");
            assert!(!exist.contains(&full(peer.section, name)), "{name} is a key of [{}] itself", peer.section);
        }
    }
}

#[test]
fn names_of_other_trainers_are_explained() {
    let cases = [
        ("lora", "lora_r", "r"),
        ("lora", "rank", "r"),
        ("lora", "lora_target_modules", "target_modules"),
        ("data", "sequence_len", "max_length"),
        ("data", "max_seq_length", "max_length"),
        ("data", "val_set_size", "eval_split"),
        ("train", "batch_size", "micro_batch_size"),
        ("train", "per_device_train_batch_size", "micro_batch_size"),
        ("train", "num_train_epochs", "num_epochs"),
        ("train", "gradient_clipping", "max_grad_norm"),
        ("train", "iters", "max_steps"),
        ("model", "base_model", "path"),
        ("model", "model_name_or_path", "path"),
        ("model", "torch_dtype", "dtype"),
        ("optimizer", "lr", "learning_rate"),
        ("scheduler", "lr_scheduler_type", "lr_scheduler"),
        ("scheduler", "warmup", "warmup_steps"),
        ("checkpoint", "save_limit", "save_total_limit"),
        ("checkpoint", "steps", "save_steps"),
        ("eval", "steps", "eval_steps"),
        ("train", "steps", "max_steps"),
        ("logging", "report_to", "tensorboard"),
    ];
    for (section, theirs, ours) in cases {
        let mut text: toml::Table =
            "model.path = \"m\"\ndata.train = [{ path = \"rows.jsonl\" }]".parse::<toml::Table>().unwrap();
        let table = text.entry(section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        table.as_table_mut().unwrap().insert(theirs.into(), 1.into());
        let toml = toml::to_string(&text).unwrap();
        let problems = Recipe::parse(Path::new("r.toml"), &toml, &[], Purpose::Training).unwrap_err();
        let messages: Vec<&str> = problems.0.iter().map(|problem| problem.message.as_str()).collect();
        assert_eq!(messages, [format!("unknown key `{theirs}`; this trainer calls it `{ours}`")]);
    }
}
