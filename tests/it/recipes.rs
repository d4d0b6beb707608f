//! The recipes of this repository: all can be read, and `recipes/reference.toml` matches the rows of the keys.

use std::path::{Path, PathBuf};

use lora_train::recipe::{Purpose, Recipe, key_names, peers};
use lora_train::schema::{Keys, rows_to};
use toml::Value;

fn recipes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes")
}

fn reference() -> String {
    std::fs::read_to_string(recipes().join("reference.toml")).unwrap()
}

fn full(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// The text with its commented-out keys enabled: `# key = value`.
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
    let text = lora_train::recipe::reference();
    if std::env::var_os("LORA_TRAIN_REWRITE").is_some() {
        std::fs::write(recipes().join("reference.toml"), &text).unwrap();
    }
    assert!(
        reference() == text,
        "recipes/reference.toml is not what the rows say; this rewrites it:\n\
         LORA_TRAIN_REWRITE=1 cargo test --test it shows_every_key"
    );
}

#[test]
fn every_key_says_what_another_value_does_to_a_continued_run() {
    for key in key_names() {
        let path = rows_to(Recipe::ROWS, &key);
        let is_section = path.last().is_some_and(|row| !row.keys.is_empty());
        assert!(is_section || path.iter().any(|row| row.effect.is_some()), "{key}");
    }
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
    // Some contradict others, and one names an adapter that is not there.
    let of_others = [
        "eva_rho = ", "expert_rank = ", "momentum = ", "num_cycles = ", "power = ", "timescale = ",
        "num_decay_steps = ", "decay_type = ",
    ];
    let of_preferences = ["beta = ", "loss_type = ", "loss_weights = ", "ld_alpha = ", "cpo_alpha = "];
    let of_answers = [
        "num_generations_eval = ", "top_k = ", "min_p = ", "steps_per_generation = ", "epsilon_high = ", "delta = ",
        "off_policy_mask_threshold = ",
    ];
    let of_others = [&of_others[..], &of_preferences, &of_answers].concat();
    let excluded = [&["eval_split = ", "warmup_steps = ", "start_from = ", "ship_as = "][..], &of_others].concat();
    let reference = reference();
    let (before, rewards) = reference.split_once("# [[objective.reward]]").unwrap();
    // Behind them is the environment, which is of "grpo", too.
    let after = rewards.splitn(3, "\n\n").nth(2).unwrap();
    let text: Vec<String> = uncommented(&format!("{before}\n{after}"))
        .lines()
        .filter(|line| !excluded.iter().any(|key| line.starts_with(key)))
        .map(str::to_owned)
        .collect();
    let path = Path::new("reference.toml");
    Recipe::parse(path, &text.join("\n"), &[], Purpose::Training).unwrap_or_else(|problems| panic!("{problems}"));
}

#[test]
fn names_of_other_trainers_lead_to_keys_that_exist() {
    let exist = key_names();
    for peer in peers() {
        match peer.key {
            Some(key) => assert!(exist.contains(&full(&peer.section, key)), "{key} does not exist"),
            None => assert!(peer.note.is_some(), "{:?} leads nowhere", peer.names),
        }
        for name in peer.names {
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'), "{name}");
            assert!(!exist.contains(&full(&peer.section, name)), "{name} is a key of [{}] itself", peer.section);
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
        let table = text.entry(section).or_insert_with(|| Value::Table(toml::Table::new()));
        table.as_table_mut().unwrap().insert(theirs.into(), 1.into());
        let toml = toml::to_string(&text).unwrap();
        let problems = Recipe::parse(Path::new("r.toml"), &toml, &[], Purpose::Training).unwrap_err();
        let messages: Vec<&str> = problems.0.iter().map(|problem| problem.message.as_str()).collect();
        assert_eq!(messages, [format!("unknown key `{theirs}`; this trainer calls it `{ours}`")]);
    }
}
