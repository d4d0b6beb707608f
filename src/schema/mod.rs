//! Strict reading of a TOML table.
//!
//! Each key is a row of its section's table ([`Row`]), which describes it completely. A [`Section`] returns values key
//! by key. Mistakes are recorded, not returned, so that all of them are reported together, sorted by place. A key that
//! no section declares is an error with a suggestion.

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

/// Reads a TOML text, with the changes of the command line, using `read`; also returns where its keys were written.
///
/// `file` is its name in messages; `peers` are other trainers' names for our keys. Whatever could be read is returned
/// beside the problems: a key that is wrong or missing gets its default.
///
/// The problems of the text and the changes are sorted by place. If the text is not TOML, only its syntax errors are
/// returned, since whatever follows a syntax error cannot be trusted.
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
