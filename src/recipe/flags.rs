//! Options as other trainers' command lines have them (`--lr`, `--batch-size`), in terms of the recipe's keys. Their
//! names are those of [`peers`] and of the keys themselves.

use std::path::Path;

use super::{Purpose, Recipe, peers};
use crate::schema::{KeyRow, Keys, Override, Problem, rows_to};

/// What an option means here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flag {
    /// `--set` does it, with this assignment.
    Set(String),
    /// The recipe's key, where there is one, and what to know about it.
    Note(Option<String>, String),
    /// The value is not one of the key's.
    Refused(Problem),
    /// Several keys have such a name.
    Several(Vec<String>),
}

/// A recipe's key that an option may mean, and a note about it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    key: Option<String>,
    note: Option<&'static str>,
}

/// What `--name value` means here; `None` where no key has that name, here or in another trainer.
#[must_use]
pub fn flag(name: &str, value: Option<&str>) -> Option<Flag> {
    let name = name.trim_start_matches('-').to_lowercase().replace('-', "_");
    let (name, value) = match name.strip_prefix("no_") {
        Some(rest) if value.is_none() => (rest, Some("false")),
        _ => (name.as_str(), value),
    };
    let mut found =
        if name.contains('.') { vec![Candidate { key: Some(name.to_owned()), note: None }] } else { candidates(name) };
    if found.len() > 1 {
        found.retain(|candidate| !matches!(candidate.meaning(value), Flag::Refused(_)));
    }
    match &found[..] {
        [] => None,
        [one] => Some(one.meaning(value)),
        several => Some(Flag::Several(several.iter().filter_map(|candidate| candidate.key.clone()).collect())),
    }
}

impl Candidate {
    fn meaning(&self, value: Option<&str>) -> Flag {
        let Some(key) = &self.key else { return Flag::Note(None, self.note.unwrap_or_default().to_owned()) };
        match self.note {
            None => assigned(key, value),
            // Such a name is a value of ours: `--bf16`.
            Some(note) if note.starts_with("write ") && is_yes(value) => {
                let value = note.split_once(" = ").map(|(_, value)| value.trim_matches('"'));
                assigned(key, value)
            }
            Some(note) => Flag::Note(Some(key.clone()), note.to_owned()),
        }
    }
}

fn is_yes(value: Option<&str>) -> bool {
    value.is_none_or(|value| value.eq_ignore_ascii_case("true"))
}

/// The keys that have this name here, or else in another trainer.
fn candidates(name: &str) -> Vec<Candidate> {
    let own = own_keys(name, Recipe::ROWS, "").into_iter().map(|key| Candidate { key: Some(key), note: None });
    let mut all: Vec<Candidate> = own.collect();
    if all.is_empty() {
        all.extend(peers().into_iter().filter(|peer| peer.names.contains(&name)).filter_map(|peer| {
            let key = peer.key.map(|key| leaf(&child(&peer.section, key)));
            (key != Some(None)).then(|| Candidate { key: key.flatten(), note: peer.note })
        }));
    }
    // Without a key, a name matters only where it has none anywhere.
    let has_key = all.iter().any(|candidate| candidate.key.is_some());
    let mut found: Vec<Candidate> = Vec::new();
    for candidate in all.into_iter().filter(|candidate| candidate.key.is_some() || !has_key) {
        // The keys of [[data.eval]] are those of [[data.train]].
        let twin = candidate.key.as_ref().map(|key| key.replacen("data.eval.", "data.train.", 1));
        let is_new = |other: &Candidate| other.key != candidate.key && other.key != twin;
        if found.iter().all(is_new) {
            found.push(candidate);
        }
    }
    found
}

/// The keys of this name, as `--set` writes them.
fn own_keys(name: &str, rows: &[KeyRow], section: &str) -> Vec<String> {
    let of = |row: &KeyRow| {
        let path = child(section, row.name);
        let own = if row.name == name { leaf(&path) } else { None };
        own.into_iter().chain(own_keys(name, row.keys, &path)).collect::<Vec<_>>()
    };
    rows.iter().flat_map(of).collect()
}

/// A key as `--set` writes it. A section stands for its `path`: `data.train.0.path` for `data`.
fn leaf(path: &str) -> Option<String> {
    let mut rows = rows_to(Recipe::ROWS, path);
    let is_key = rows.last().is_some_and(|row| row.keys.is_empty());
    while let Some(first) = rows.last().and_then(|row| row.keys.first()) {
        rows.push(first);
    }
    let is_list = |row: &KeyRow| (row.default)().is_some_and(|default| default.is_array()) && !row.keys.is_empty();
    let name = |row: &&KeyRow| if is_list(row) { format!("{}.0", row.name) } else { row.name.to_owned() };
    let is_it = is_key || rows.last().is_some_and(|row| row.name == "path");
    is_it.then(|| rows.iter().map(name).collect::<Vec<_>>().join("."))
}

fn child(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// The assignment of a value as command lines write it: `True`, `q_proj,v_proj`.
fn assigned(key: &str, value: Option<&str>) -> Flag {
    let given = value.unwrap_or("true");
    let mut spellings = Vec::new();
    if given.contains(',') {
        let items: Vec<String> = given.split(',').map(|item| format!("\"{}\"", item.trim())).collect();
        spellings.extend([format!("[{}]", items.join(", ")), format!("[{given}]")]);
    }
    let is_boolean = ["true", "false"].iter().any(|word| given.eq_ignore_ascii_case(word));
    spellings.push(if is_boolean { given.to_lowercase() } else { given.to_owned() });
    let mut refusal = None;
    for spelling in spellings {
        let assignment = format!("{key}={spelling}");
        refusal = refused(&assignment);
        if refusal.is_none() {
            return Flag::Set(assignment);
        }
    }
    match refusal {
        Some(problem) if value.is_some() => Flag::Refused(problem),
        _ => Flag::Set(format!("{key}=VALUE")),
    }
}

/// Why a recipe does not take an assignment.
fn refused(assignment: &str) -> Option<Problem> {
    const LEAST: &str = "[model]\npath = \"m\"\n[[data.train]]\npath = \"rows.jsonl\"\n";
    const WITH_EVALUATION: &str = "[[data.eval]]\npath = \"rows.jsonl\"\n[eval]\neval_steps = 1\n";
    let read = |text: &str| {
        Recipe::parse(Path::new("recipe.toml"), text, &[Override::set(assignment)], Purpose::Training).err()
    };
    let problems = read(LEAST).and_then(|_| read(&format!("{LEAST}{WITH_EVALUATION}")))?;
    problems.0.into_iter().next().map(|problem| Problem { place: None, excerpt: None, ..problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_other_trainers_become_assignments_that_a_recipe_takes() {
        for (name, value, assignment) in [
            ("--lr", Some("1e-4"), "optimizer.learning_rate=1e-4"),
            ("--learning_rate", Some("1e-4"), "optimizer.learning_rate=1e-4"),
            ("--epochs", Some("3"), "train.num_epochs=3"),
            ("--batch-size", Some("8"), "train.micro_batch_size=8"),
            ("--output_dir", Some("runs/x"), "output_dir=runs/x"),
            ("--model", Some("org/name"), "model.path=org/name"),
            ("--model_name_or_path", Some("org/name"), "model.path=org/name"),
            ("--data", Some("a.jsonl"), "data.train.0.path=a.jsonl"),
            ("--dataset", Some("a.jsonl"), "data.train.0.path=a.jsonl"),
            ("--eval", Some("e.jsonl"), "data.eval.0.path=e.jsonl"),
            ("--bf16", None, "train.precision=bf16"),
            ("--load-in-4bit", None, "model.quantization=nf4"),
            ("--fp16", Some("True"), "train.precision=f16"),
            ("--packing", Some("True"), "data.packing=true"),
            ("--no-shuffle", None, "data.shuffle=false"),
            ("--grad-checkpoint", None, "train.gradient_checkpointing=true"),
            ("--optimizer", Some("adamw"), "optimizer.name=adamw"),
            ("--scheduler", Some("linear"), "scheduler.lr_scheduler=linear"),
            ("--lora_target_modules", Some("q_proj,v_proj"), "lora.target_modules=[\"q_proj\", \"v_proj\"]"),
            ("--betas", Some("0.9,0.95"), "optimizer.betas=[0.9,0.95]"),
            ("--val_set_size", Some("0.1"), "data.eval_split=0.1"),
            ("--eval_steps", Some("50"), "eval.eval_steps=50"),
            ("--lora.r", Some("16"), "lora.r=16"),
            ("--warmup", None, "scheduler.warmup_steps=VALUE"),
        ] {
            assert_eq!(flag(name, value), Some(Flag::Set(assignment.to_owned())), "{name}");
        }
    }

    #[test]
    fn an_option_without_such_a_key_or_with_a_wrong_value_says_so_instead_of_guessing() {
        let note = |name: &str| match flag(name, None) {
            Some(Flag::Note(key, note)) => (key, note),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(
            note("--deepspeed"),
            (None, "each GPU holds the whole model: `mpirun -n N lora-train RECIPE`; `lora-train help cluster`".into())
        );
        assert!(note("--adapter").1.starts_with("LoRA is what"));
        for (name, value, part) in [
            ("--optim", "adamw_torch", "this trainer calls it `adamw`"),
            ("--lora_r", "x", "`lora.r` = \"x\", expected a whole number"),
            ("--lora.rank", "8", "unknown key `rank`; this trainer calls it `r`"),
        ] {
            match flag(name, Some(value)) {
                Some(Flag::Refused(problem)) => assert!(problem.to_string().contains(part), "{problem}"),
                other => panic!("{name}: {other:?}"),
            }
        }
        let Some(Flag::Several(keys)) = flag("--steps", Some("100")) else { panic!("one key for --steps") };
        assert!(
            keys.contains(&"train.max_steps".to_owned()) && keys.contains(&"eval.eval_steps".to_owned()),
            "{keys:?}"
        );
        assert_eq!(flag("--frobnicate", None), None);
    }
}
