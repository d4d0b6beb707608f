//! What is wrong or unusual with the rows of a file: grouped, counted, with the first places of each group.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

const MAX_KINDS: usize = 20;
/// Rows of each kind that are named.
const MAX_NAMED: usize = 5;

/// Rows that need a message to the user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RowFindings {
    pub(super) num_rows: u64,
    kinds: Vec<AlikeRows>,
}

/// Rows whose messages differ only in names and numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AlikeRows {
    /// The message for the first row.
    text: String,
    shape: String,
    num_rows: u64,
    /// The first rows; `places` has their positions in the file after [`RowFindings::place`].
    rows: Vec<usize>,
    places: Vec<String>,
}

impl RowFindings {
    /// Adds row `row`. Rows must come in ascending order.
    pub(super) fn add(&mut self, row: usize, text: &str) {
        self.num_rows += 1;
        let shape = shape(text);
        let index = match self.kinds.iter().position(|kind| kind.shape == shape) {
            Some(index) => index,
            None if self.kinds.len() < MAX_KINDS => {
                self.kinds.push(AlikeRows { text: text.to_owned(), shape, ..AlikeRows::default() });
                self.kinds.len() - 1
            }
            None => return,
        };
        let kind = &mut self.kinds[index];
        kind.num_rows += 1;
        if kind.rows.len() < MAX_NAMED {
            kind.rows.push(row);
        }
    }

    /// Records where the rows are in the file. `place` returns the positions of rows in ascending order.
    pub(super) fn place(&mut self, place: impl FnOnce(&[usize]) -> Vec<String>) {
        let rows: BTreeSet<usize> = self.kinds.iter().flat_map(|kind| &kind.rows).copied().collect();
        let rows: Vec<usize> = rows.into_iter().collect();
        let places: BTreeMap<usize, String> = rows.iter().copied().zip(place(&rows)).collect();
        for kind in &mut self.kinds {
            kind.places = kind.rows.iter().filter_map(|row| places.get(row).cloned()).collect();
        }
    }

    /// The place of a row that is named.
    pub(super) fn place_of(&self, row: usize) -> Option<String> {
        let place = |kind: &AlikeRows| kind.places.get(kind.rows.iter().position(|named| *named == row)?).cloned();
        self.kinds.iter().find_map(place)
    }

    /// For each kind, the place of its first row, and its message with how many more rows there are and where.
    pub(super) fn messages(&self) -> impl Iterator<Item = (String, String)> {
        self.kinds.iter().map(|kind| (kind.places.first().cloned().unwrap_or_default(), kind.message()))
    }

    /// Number of rows of kinds beyond the first `MAX_KINDS`, for which there is no message.
    pub(super) fn num_unnamed(&self) -> u64 {
        self.kinds.iter().fold(self.num_rows, |rest, kind| rest.saturating_sub(kind.num_rows))
    }
}

impl AlikeRows {
    fn message(&self) -> String {
        let Self { text, num_rows, places, .. } = self;
        if *num_rows < 2 {
            return text.clone();
        }
        let (text, hint) = text.find("\n  hint:").map_or((text.as_str(), ""), |at| text.split_at(at));
        let dots = if *num_rows > places.len() as u64 { ", ..." } else { "" };
        let others = places.get(1..).unwrap_or_default().join(", ");
        format!("{text}\n  and likewise {} more: {others}{dots}{hint}", num_rows - 1)
    }
}

/// The text without its numbers and quotations: rows with the same mistake share it.
fn shape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut quote = None;
    for character in text.chars() {
        match (quote, character) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '`') => quote = Some(character),
            (None, c) if c.is_ascii_digit() => {}
            (None, c) => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_with_the_same_mistake_are_counted_together_and_the_first_are_named() {
        let mut findings = RowFindings::default();
        for row in 0..10 {
            findings.add(row * 3, &format!("message {row}: its role is \"r{row}\"\n  hint: rename it"));
            findings.add(row * 3 + 1, "`text` must be text");
        }
        findings.place(|rows| rows.iter().map(|row| format!("line {}", row + 1)).collect());
        let texts: Vec<(String, String)> = findings.messages().collect();
        assert_eq!(texts[0].0, "line 1");
        assert_eq!(
            texts[0].1,
            "message 0: its role is \"r0\"\n  and likewise 9 more: line 4, line 7, line 10, line 13, ...\n  hint: rename it"
        );
        assert_eq!((texts.len(), texts[1].0.as_str(), findings.num_rows), (2, "line 2", 20));
        assert_eq!((findings.place_of(4), findings.place_of(15)), (Some("line 5".into()), None));
    }

    #[test]
    fn further_kinds_than_can_be_named_are_counted() {
        let mut findings = RowFindings::default();
        for row in 0..30 {
            findings.add(row, &"x".repeat(row + 1));
        }
        assert_eq!((findings.messages().count(), findings.num_unnamed()), (MAX_KINDS, 10));
    }
}
