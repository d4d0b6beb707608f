//! Strict reading of a TOML table.
//!
//! A key is a row of its section's table ([`Row`]), which says everything about it. A [`Section`] hands out values key by
//! key. Mistakes are recorded, not returned: all of them are reported together, sorted by place, and a key that nobody
//! asked for is an error with a suggestion.

mod accept;
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

pub(crate) use keys::section;
pub use keys::{Effect, Keys, Names, Row, peers, rows_to};
pub use overrides::Override;
pub use path::searched_folder;
pub use places::{Excerpt, Places};
pub use problem::{Problem, Problems};
pub use section::{Choice, Section};
pub use suggest::{Peer, closest};
pub use tree::{Node, Table, Value};

use places::Lines;
use section::Record;

/// Reads a TOML text, with the changes of the command line, by `read`; and keeps where its keys were written.
///
/// `file` is its name in messages; `peers` the names that other trainers have for our keys. What could be read is there
/// beside the problems: a key that is wrong or missing has its default.
///
/// The problems of the text and the changes are sorted by place. Where the text is not TOML there is nothing but the places
/// where it is not: what follows such a place cannot be trusted.
pub fn read<T>(
    file: &str,
    text: &str,
    overrides: &[Override],
    peers: &[Peer],
    read: impl FnOnce(&mut Section<'_>) -> T,
) -> (Option<(T, Places)>, Problems) {
    let mut record = Record::default();
    let (mut table, is_toml) = syntax::parse(text, &mut record);
    let places = |root| Places { file: file.into(), text: text.into(), root: Arc::new(root) };
    if !is_toml {
        return (None, sorted(record, &places(table), peers));
    }
    for (index, change) in overrides.iter().enumerate() {
        if let Err(problem) = change.apply(&mut table, index) {
            record.problems.push(problem);
        }
    }
    let mut root = Section::root(&table, &mut record);
    let value = read(&mut root);
    root.finish();
    let places = places(table);
    let problems = sorted(record, &places, peers);
    (Some((value, places)), problems)
}

fn sorted(mut record: Record, places: &Places, peers: &[Peer]) -> Problems {
    let unknown: Vec<_> = record
        .unknown
        .iter()
        .map(|unknown| (unknown.place.clone(), suggest::unknown_key(unknown, &record, peers)))
        .collect();
    record.problems.extend(unknown);
    record.problems.sort_by(|a, b| a.0.cmp(&b.0));
    let lines = Lines::new(&places.text);
    Problems(record.problems.into_iter().map(|(place, problem)| places.put(problem, &place, &lines)).collect())
}
