//! Strict reading of a TOML table.
//!
//! A [`Section`] hands out values key by key; each read names the key, its type, its range and its default, so a
//! key is described in one place. Mistakes are recorded, not returned: all of them are reported together, sorted
//! by place, and a key that nobody asked for is an error with a suggestion.

mod accept;
mod overrides;
mod problem;
mod section;
mod suggest;
mod tree;

use toml::de::DeTable;

pub use overrides::Override;
pub use problem::{Problem, Problems};
pub use section::{Choice, Section};
pub use suggest::{Peer, closest};
pub use tree::{Node, Table, Value};

use problem::Place;
use section::Record;
use tree::{Lines, Origin};

/// Reads a TOML text, with the changes of the command line, by `read`.
///
/// `file` is its name in messages; `peers` the names that other trainers have for our keys.
///
/// # Errors
///
/// All problems of the text and the changes, sorted by place. Where the text is not TOML, only the places where
/// it is not: what follows such a place cannot be trusted.
pub fn read<T>(
    file: &str,
    text: &str,
    overrides: &[Override],
    peers: &[Peer],
    read: impl FnOnce(&mut Section<'_>) -> T,
) -> Result<T, Problems> {
    match examine(file, text, overrides, peers, read) {
        (Some(value), problems) if problems.0.is_empty() => Ok(value),
        (_, problems) => Err(problems),
    }
}

/// As [`read()`], but what could be read is there beside the problems: a key that is wrong or missing has its default.
/// `None` where the text is not TOML.
pub fn examine<T>(
    file: &str,
    text: &str,
    overrides: &[Override],
    peers: &[Peer],
    read: impl FnOnce(&mut Section<'_>) -> T,
) -> (Option<T>, Problems) {
    let mut record = Record::default();
    let (mut table, is_toml) = parse(text, &mut record);
    if !is_toml {
        return (None, sorted(record, file, peers));
    }
    for (index, change) in overrides.iter().enumerate() {
        if let Err(problem) = change.apply(&mut table, index) {
            record.problems.push(problem);
        }
    }
    let mut root = Section::root(&table, &mut record);
    let value = read(&mut root);
    root.finish();
    (Some(value), sorted(record, file, peers))
}

/// The table of a TOML text, and whether it can be trusted: a key given twice is a mistake, but the rest stands.
fn parse(text: &str, record: &mut Record) -> (Table, bool) {
    let (table, errors) = DeTable::parse_recoverable(text);
    let lines = Lines::new(text);
    let mut is_toml = true;
    let mut last_line = None;
    for error in errors {
        let span = error.span().unwrap_or_default();
        let place = lines.place(span.start);
        let message = if error.message() == "duplicate key" {
            format!("`{}` is given twice", text.get(span).unwrap_or_default())
        } else {
            is_toml = false;
            format!("not valid TOML: {}", error.message())
        };
        // The parser goes on after a mistake and may stumble over its rest: the first of a line is the real one.
        let Place::Position { line, .. } = place else { continue };
        if last_line != Some(line) {
            record.problems.push((place, Problem::new(message)));
        }
        last_line = Some(line);
    }
    (Origin::File(lines).table(table.into_inner()), is_toml)
}

fn sorted(mut record: Record, file: &str, peers: &[Peer]) -> Problems {
    let unknown: Vec<_> = record
        .unknown
        .iter()
        .map(|unknown| (unknown.place.clone(), suggest::unknown_key(unknown, &record, peers)))
        .collect();
    record.problems.extend(unknown);
    record.problems.sort_by(|a, b| a.0.cmp(&b.0));
    Problems(record.problems.into_iter().map(|(place, problem)| problem.at(place.shown_in(file))).collect())
}
