//! TOML values that know where they were written.

use std::borrow::Cow;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::Place;

/// A value and the place where it was written.
#[derive(Clone, Debug)]
pub struct Node {
    pub(super) place: Place,
    pub(super) value: Value,
}

/// A TOML value.
#[derive(Clone, Debug)]
pub enum Value {
    /// Text.
    String(String),
    /// A whole number.
    Integer(i128),
    /// A number with a point, an exponent, or `inf` or `nan`.
    Float(f64),
    /// `true` or `false`.
    Boolean(bool),
    /// A date, a time or both: as text, no key takes one.
    Datetime(String),
    /// A list.
    Array(Vec<Node>),
    /// A table.
    Table(Table),
}

/// Keys and values in the order in which they were written.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub(super) entries: Vec<Entry>,
}

/// One key of a table.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_place: Place,
    pub(super) node: Node,
}

impl Node {
    /// The value.
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// The table, where it is one.
    pub(super) fn table(&self) -> Option<&Table> {
        match &self.value {
            Value::Table(table) => Some(table),
            _ => None,
        }
    }

    /// The value as it is quoted in a message: on one line, not too long.
    pub(super) fn shown(&self) -> String {
        match &self.value {
            Value::String(text) => {
                let shown: String = text.chars().take(60).collect();
                let dots = if shown.len() < text.len() { "..." } else { "" };
                format!("\"{}{dots}\"", shown.escape_debug())
            }
            Value::Integer(integer) => integer.to_string(),
            Value::Float(float) => shown_number(*float),
            Value::Boolean(boolean) => boolean.to_string(),
            Value::Datetime(datetime) => datetime.clone(),
            Value::Array(items) => {
                let shown: Vec<String> = items.iter().take(6).map(Self::shown).collect();
                let dots = if items.len() > 6 { ", ..." } else { "" };
                format!("[{}{dots}]", shown.join(", "))
            }
            Value::Table(_) => "a table".to_owned(),
        }
    }
}

/// A number as TOML writes it: `1e-8` rather than `0.00000001`, `16.0` rather than `16`.
pub(super) fn shown_number(number: f64) -> String {
    format!("{number:?}").replace("NaN", "nan")
}

impl Table {
    /// The value of a key.
    pub(super) fn get(&self, key: &str) -> Option<&Node> {
        self.entry(key).map(|entry| &entry.node)
    }

    /// A key with its place and value.
    pub(super) fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// Keys and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.entries.iter().map(|entry| (entry.key.as_str(), &entry.node))
    }
}

/// Turns byte offsets into places.
pub(super) enum Origin<'t> {
    /// A file's text.
    File(Lines<'t>),
    /// Everything is at one place.
    Place(Place),
}

impl Origin<'_> {
    fn place(&self, span: &Range<usize>) -> Place {
        match self {
            Self::File(lines) => lines.place(span.start),
            Self::Place(place) => place.clone(),
        }
    }

    /// A table of TOML's parser, with places instead of offsets.
    pub(super) fn table(&self, table: DeTable<'_>) -> Table {
        let entry = |(key, value): (Spanned<Cow<'_, str>>, Spanned<DeValue<'_>>)| Entry {
            key_place: self.place(&key.span()),
            key: key.into_inner().into_owned(),
            node: self.node(value),
        };
        Table { entries: table.into_iter().map(entry).collect() }
    }

    /// A value of TOML's parser, with places instead of offsets.
    pub(super) fn node(&self, value: Spanned<DeValue<'_>>) -> Node {
        let place = self.place(&value.span());
        let value = match value.into_inner() {
            DeValue::String(text) => Value::String(text.into_owned()),
            // Beyond i128 only the magnitude matters: no key takes so large a number.
            DeValue::Integer(integer) => match i128::from_str_radix(integer.as_str(), integer.radix()) {
                Ok(integer) => Value::Integer(integer),
                Err(_) => Value::Float(integer.as_str().parse().unwrap_or(f64::INFINITY)),
            },
            DeValue::Float(float) => Value::Float(float.as_str().parse().unwrap_or(f64::NAN)),
            DeValue::Boolean(boolean) => Value::Boolean(boolean),
            DeValue::Datetime(datetime) => Value::Datetime(datetime.to_string()),
            DeValue::Array(items) => Value::Array(items.into_iter().map(|item| self.node(item)).collect()),
            DeValue::Table(table) => Value::Table(self.table(table)),
        };
        Node { place, value }
    }
}

/// Where the lines of a text begin.
pub(super) struct Lines<'t> {
    text: &'t str,
    starts: Vec<usize>,
    /// The offset that was asked for last, and its column: a long line is not counted again for each of its values.
    last: Cell<(usize, usize)>,
}

impl<'t> Lines<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        let after_newlines = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(index, _)| index + 1);
        Self { text, starts: std::iter::once(0).chain(after_newlines).collect(), last: Cell::new((0, 1)) }
    }

    /// Line and column of a byte offset.
    pub(super) fn place(&self, offset: usize) -> Place {
        let offset = offset.min(self.text.len());
        let line = self.starts.partition_point(|start| *start <= offset);
        let (last, column) = self.last.get();
        let start = self.starts[line - 1];
        let (from, column) = if (start..=offset).contains(&last) { (last, column) } else { (start, 1) };
        let before = self.text.as_bytes().get(from..offset).unwrap_or_default();
        // Every byte but those that continue a character.
        let column = column + before.iter().filter(|byte| **byte & 0b1100_0000 != 0b1000_0000).count();
        self.last.set((offset, column));
        Place::Position { line, column }
    }
}

/// The place of a command-line argument.
pub(super) fn argument(index: usize, text: &str) -> Place {
    Place::Argument { index, text: Arc::from(text) }
}
