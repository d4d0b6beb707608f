//! The keys of a recipe as people look them up: all of them, as a recipe with comments; a section; or one key.

use std::path::Path;

use toml::Value;

use super::{Purpose, Recipe, peers};
use crate::schema::{Counterpart, Effect, KeyRow, Keys as _, Override, counterpart, rows_to};
use crate::util::text::quoted;

/// Text above all keys.
const HEADER: &str = "\
# Every key of a recipe, with its default and what it means. Keys without a default are commented out with an
# example. `lora-train help reference` prints this, and `lora-train help lora.r` a key with the values that it takes.
#
# A recipe needs `path` in [model] and one [[data.train]]; everything else can be left out.

";

/// A list of sections that most recipes do not have.
const REWARDS: &str = "objective.reward";

/// No key takes a date: what is said about one is what the key takes.
const NO_VALUE: &str = "1979-05-27";

/// Every key with its default and what it means: recipes/reference.toml.
#[must_use]
pub fn reference() -> String {
    let mut text = HEADER.to_owned();
    write_table("", Recipe::ROWS, None, &mut text);
    text
}

/// The names of all keys and sections: `lora`, `lora.r`, `data.train.path`.
#[must_use]
pub fn key_names() -> Vec<String> {
    fn below(section: &str, rows: &[KeyRow], names: &mut Vec<String>) {
        for row in rows {
            let name = full(section, row.name);
            names.push(name.clone());
            below(&name, row.keys, names);
        }
    }
    let mut names = Vec::new();
    below("", Recipe::ROWS, &mut names);
    names
}

/// What a word of somebody who looks a key up stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meant {
    /// These keys or sections of ours.
    Ours(Vec<String>),
    /// Another trainer's name for this key or section of ours.
    Theirs(String),
    /// Another trainer's name of what has no key here, and what to do instead.
    Nothing(&'static str),
    /// None that is known.
    Unknown,
}

/// Finds the keys that a word names: by the whole name (`lora.r`, `data.train[0].path`, `[lora]`), by its end (`r`), or by
/// another trainer's name (`lora_r`).
#[must_use]
pub fn look_up(word: &str) -> Meant {
    let parts = word.split(['.', '[', ']']).filter(|part| !part.is_empty() && part.parse::<usize>().is_err());
    let word = parts.collect::<Vec<_>>().join(".").to_lowercase().replace('-', "_");
    let names = key_names();
    if names.contains(&word) {
        return Meant::Ours(vec![word]);
    }
    let end = format!(".{word}");
    let mut found: Vec<String> = names.into_iter().filter(|name| name.ends_with(&end)).collect();
    let mut sentences = Vec::new();
    // Two lists share their keys.
    found.retain(|name| {
        let sentence = row(name).map(|row| row.sentence);
        let is_new = !sentences.contains(&sentence);
        sentences.push(sentence);
        is_new
    });
    if !found.is_empty() {
        return Meant::Ours(found);
    }
    let (section, name) = word.rsplit_once('.').unwrap_or(("", &word));
    let peers = peers();
    let theirs = |is_section| counterpart(name, section, is_section, Recipe::ROWS, &peers);
    match (theirs(false), theirs(true)) {
        (Counterpart::Key(key), _) | (_, Counterpart::Key(key)) => Meant::Theirs(key),
        (Counterpart::Other(note), _) => Meant::Nothing(note),
        _ => Meant::Unknown,
    }
}

/// A key or section, by its whole name, as a part of a recipe; of a key also what values it takes.
#[must_use]
pub fn explained(name: &str) -> String {
    let rows = rows_to(Recipe::ROWS, name);
    let Some(row) = rows.last() else { return String::new() };
    let mut text = String::new();
    if !row.keys.is_empty() {
        write_section(name, row, &mut text);
        return text.trim_start().to_owned();
    }
    let section = name.rsplit_once('.').map_or("", |(section, _)| section);
    let above = rows.len().checked_sub(2).map(|index| rows[index]);
    text.push_str(
        &above.map_or_else(|| "# At the top, before the first section.\n".to_owned(), |row| header(section, row)),
    );
    let shown = write_key(section, row, above.and_then(entry).as_ref(), &mut text);
    // As the command line takes it: text needs no quotes there, and a list is named with a place.
    let value = shown.parse::<Value>().ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or(shown);
    let placed = if above.is_some_and(is_list) { format!("{section}.0.{}", row.name) } else { name.to_owned() };
    let mut facts = vec![("one run", format!("--set {}", quoted(&format!("{placed}={value}"))))];
    if let Some(takes) = takes(&placed) {
        facts.insert(0, ("takes", takes));
    }
    if let Some(effect) = rows.iter().rev().find_map(|row| row.effect) {
        facts.push(("--resume", on_resume(effect).to_owned()));
    }
    let others: Vec<&str> = row.peers.iter().flat_map(|(names, _)| *names).copied().collect();
    if !others.is_empty() {
        facts.push(("elsewhere", others.join(", ")));
    }
    text.push('\n');
    facts.iter().for_each(|(what, fact)| text.push_str(&format!("{what:<10} {fact}\n")));
    text
}

/// The values that a key takes, as its mistakes name them.
fn takes(placed: &str) -> Option<String> {
    let least = "model.path = \"m\"\n[[data.train]]\npath = \"rows.jsonl\"";
    let wrong = [Override::set(format!("{placed}={NO_VALUE}"))];
    let problems = Recipe::parse(Path::new("recipe.toml"), least, &wrong, Purpose::Training).err()?;
    let expected = format!("= {NO_VALUE}, expected ");
    problems.0.iter().find_map(|problem| Some(problem.message.split_once(&expected)?.1.to_owned()))
}

fn on_resume(effect: Effect) -> &'static str {
    match effect {
        Effect::None => "may change",
        Effect::LaterSteps => "may change: the steps from there on are computed with it",
        Effect::OtherRows => "may change between two epochs",
        Effect::OtherStates | Effect::OtherAdapter => "stays as the run began",
    }
}

fn row(name: &str) -> Option<&'static KeyRow> {
    rows_to(Recipe::ROWS, name).pop()
}

fn full(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

fn is_list(row: &KeyRow) -> bool {
    matches!((row.default)(), Some(Value::Array(_)))
}

/// How a section begins.
fn header(name: &str, row: &KeyRow) -> String {
    if is_list(row) { format!("[[{name}]]\n") } else { format!("[{name}]\n") }
}

/// The keys of an example of a list of sections.
fn entry(row: &KeyRow) -> Option<Value> {
    row.example?.parse().ok()
}

/// The keys of a table as shown in the reference, and the tables below it.
fn write_table(section: &str, rows: &[KeyRow], entry: Option<&Value>, text: &mut String) {
    for row in rows.iter().filter(|row| row.keys.is_empty()) {
        write_key(section, row, entry, text);
    }
    for row in rows.iter().filter(|row| !row.keys.is_empty()) {
        write_section(&full(section, row.name), row, text);
    }
}

fn write_section(name: &str, row: &KeyRow, text: &mut String) {
    text.push('\n');
    explain(row, text);
    let mark = if name == REWARDS { "# " } else { "" };
    text.push_str(&format!("{mark}{}", header(name, row)));
    write_table(name, row.keys, entry(row).as_ref(), text);
}

/// A key with its value; returns the value.
fn write_key(section: &str, row: &KeyRow, entry: Option<&Value>, text: &mut String) -> String {
    explain(row, text);
    let default = (row.default)();
    let mark = if default.is_some() && section != REWARDS { "" } else { "# " };
    let example = entry.and_then(|entry| entry.get(row.name)).map(Value::to_string);
    let value = match (example.or(row.example.map(str::to_owned)), default) {
        (Some(example), _) => example,
        (None, Some(Value::Float(small))) if small != 0.0 && small.abs() < 1e-3 => format!("{small:e}"),
        (None, default) => default.map(|value| value.to_string()).unwrap_or_default(),
    };
    text.push_str(&format!("{mark}{} = {value}\n", row.name));
    value
}

/// What a key means, as comments. Keys that two lists share are explained once.
fn explain(row: &KeyRow, text: &mut String) {
    let lines: String = row.sentence.lines().map(|line| format!("# {}\n", line.trim())).collect();
    let lines = lines.replace('`', "");
    if !text.contains(&lines) {
        text.push_str(&lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(word: &str) -> Vec<String> {
        match look_up(word) {
            Meant::Ours(names) => names,
            other => panic!("{word}: {other:?}"),
        }
    }

    #[test]
    fn a_key_is_found_by_its_name_its_end_and_the_name_that_others_give_it() {
        for (word, found) in [
            ("lora.r", &["lora.r"][..]),
            ("r", &["lora.r"]),
            ("[lora]", &["lora"]),
            ("[[data.train]]", &["data.train"]),
            ("data.train[0].path", &["data.train.path"]),
            ("data.train.0.path", &["data.train.path"]),
            ("train.path", &["data.train.path"]),
            ("Learning-Rate", &["optimizer.learning_rate"]),
            ("path", &["model.path", "data.train.path"]),
            ("seed", &["seed"]),
        ] {
            assert_eq!(ours(word), found, "{word}");
        }
        for (word, key) in [
            ("lora_r", "lora.r"),
            ("lora.rank", "lora.r"),
            ("per_device_train_batch_size", "train.micro_batch_size"),
            ("peft", "lora"),
        ] {
            assert_eq!(look_up(word), Meant::Theirs(key.to_owned()), "{word}");
        }
        assert!(matches!(look_up("wandb_project"), Meant::Nothing(_)));
        assert_eq!(look_up("zzz"), Meant::Unknown);
        assert_eq!(look_up(""), Meant::Unknown);
    }

    #[test]
    fn a_key_says_where_it_stands_what_it_takes_and_how_it_is_changed() {
        assert_eq!(
            explained("lora.r"),
            "[lora]\n# Rank of the update.\nr = 8\n\ntakes      a whole number from 1 to 65536\n\
             one run    --set lora.r=8\n--resume   stays as the run began\n\
             elsewhere  lora_r, rank, lora_rank, lora_dim, adapter_rank\n"
        );
        let optimizer = explained("optimizer.name");
        for part in ["[optimizer]\n", "takes      one of \"adamw\", \"adamw_8bit\"", "--set optimizer.name=adamw\n"] {
            assert!(optimizer.contains(part), "{part}: {optimizer}");
        }
        assert!(explained("seed").starts_with("# At the top, before the first section.\n# Seed"));
        assert!(explained("data.train.path").contains("[[data.train]]\n"));
        assert!(explained("data.train.path").contains("--set data.train.0.path=data/train.jsonl\n"));
        assert!(explained("lora").starts_with("# The adapters;") && explained("lora").contains("\n[lora]\n# Rank"));
    }

    #[test]
    fn what_every_key_takes_is_known_and_the_change_that_is_shown_can_be_made() {
        for name in key_names() {
            if row(&name).is_some_and(|row| !row.keys.is_empty()) {
                assert!(explained(&name).contains(&format!("[{name}]")), "{name}");
                continue;
            }
            let text = explained(&name);
            assert!(text.contains("\ntakes      "), "{text}");
            assert!(text.contains("\none run    --set ") && text.contains("\n--resume   "), "{text}");
        }
    }
}
