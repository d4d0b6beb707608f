//! Strict reading of a TOML table or a JSON object.
//!
//! A [`Section`] returns values key by key. Mistakes are recorded, not returned, so that all of them are reported
//! together. In a recipe, each key is a row of its section's table ([`KeyRow`]), which describes it completely, problems are
//! sorted by place, and a key that no section declares is an error with a suggestion.

mod accept;
mod by_name;
mod choice;
mod keys;
mod overrides;
mod path;
mod places;
mod problem;
mod section;
mod suggest;
mod syntax;
mod tree;

use std::sync::Arc;

pub use by_name::ByName;
pub use choice::Choice;
pub(crate) use choice::choice;
pub(crate) use keys::section;
pub use keys::{Effect, KeyRow, Names, Peer, peers, rows_to};
pub use overrides::Override;
pub use path::{did_you_mean, near_path, searched_folder};
pub use places::Places;
pub use problem::{Excerpt, Problem, Problems};
pub use section::{Keys, Section};
pub use suggest::{Counterpart, closest, counterpart};
pub use tree::{Node, Table, Value};

use section::SectionRecord;
use suggest::Known;
use tree::ValuePlace;

/// The keys of a table and of those below it, dotted (`data.train[0].path`), with their values.
#[must_use]
pub fn flattened(table: &toml::Table) -> Vec<(String, &toml::Value)> {
    fn add<'a>(name: String, value: &'a toml::Value, pairs: &mut Vec<(String, &'a toml::Value)>) {
        match value {
            toml::Value::Table(table) => {
                table.iter().for_each(|(key, value)| add(format!("{name}.{key}"), value, pairs));
            }
            toml::Value::Array(values) if values.iter().any(toml::Value::is_table) => {
                let entries = values.iter().enumerate();
                entries.for_each(|(index, value)| add(format!("{name}[{index}]"), value, pairs));
            }
            other => pairs.push((name, other)),
        }
    }
    let mut pairs = Vec::new();
    table.iter().for_each(|(key, value)| add(key.clone(), value, &mut pairs));
    pairs
}

/// Reads a TOML text, with the changes of the command line, using `read`; also returns where its keys were written.
///
/// `file` is its name in messages; `rows` are its keys, and `peers` other trainers' names for them. Whatever could be
/// read is returned beside the problems: a key that is wrong or missing gets its default.
///
/// The problems of the text and the changes are sorted by place. If the text is not TOML, only its syntax errors are
/// returned, since whatever follows a syntax error cannot be trusted.
pub fn read<T>(
    file: &str,
    text: &str,
    overrides: &[Override],
    rows: &[KeyRow],
    peers: &[Peer],
    read: impl FnOnce(&mut Section<'_>) -> T,
) -> (Option<(T, Places)>, Problems) {
    let (table, mut problems, is_toml) = syntax::parse(text);
    let mut root = Node { place: ValuePlace::File, value: Value::Table(table) };
    let mut value = None;
    if is_toml {
        problems
            .extend(overrides.iter().enumerate().filter_map(|(index, change)| change.apply(&mut root, index).err()));
        let mut record = SectionRecord { problems, unknown: Vec::new() };
        let mut section = Section::root(&root, &mut record);
        value = Some(read(&mut section));
        section.finish();
        let known = Known::new(rows);
        problems = record.problems;
        problems
            .extend(record.unknown.into_iter().map(|unknown| (unknown.place.clone(), known.explain(&unknown, peers))));
    }
    problems.sort_by(|a, b| a.0.cmp(&b.0));
    let places = Places { file: file.into(), text: text.into(), root: Some(Arc::new(root)) };
    let problems = problems.into_iter().map(|(place, problem)| places.put(problem, &place)).collect();
    (value.map(|value| (value, places)), Problems(problems))
}

/// Reads a JSON object using `read`, which returns `None` only after a problem. `file` is its name in messages.
///
/// # Errors
/// All problems, in the order in which they were found.
pub fn read_json<T>(file: &str, text: &str, read: impl FnOnce(&mut Section<'_>) -> Option<T>) -> Result<T, Problems> {
    let refused = |message: String| Problem::new(message).at(file);
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|error| refused(format!("not valid JSON: {error}")))?;
    if !value.is_object() {
        return Err(refused("not a JSON object".to_owned()).into());
    }
    let mut record = SectionRecord::default();
    match read(&mut Section::root(&value.into(), &mut record)) {
        Some(value) if record.problems.is_empty() => Ok(value),
        _ => Err(Problems(record.problems.into_iter().map(|(_, problem)| problem.at(file)).collect())),
    }
}
