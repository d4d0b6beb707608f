//! TOML values with the places where they were written.

use std::borrow::Cow;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::places::Place;

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
    /// A date, a time or both, kept as text: no key takes one.
    Datetime(String),
    /// A list.
    Array(Vec<Node>),
    /// A table.
    Table(Table),
}

/// Keys and values in the order of the text.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub(super) entries: Vec<Entry>,
}

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

    /// The table; `None` for another value.
    pub(super) fn table(&self) -> Option<&Table> {
        match &self.value {
            Value::Table(table) => Some(table),
            _ => None,
        }
    }

    /// The value as messages quote it: on one line, shortened if long.
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

/// A number as TOML writes it: `1e-8` instead of `0.00000001`, `16.0` instead of `16`.
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

impl Table {
    /// Converts a table of TOML's parser. Everything in it gets `place`; if absent, its place in the file.
    pub(super) fn new(table: DeTable<'_>, place: Option<&Place>) -> Self {
        let entry = |(key, value): (Spanned<Cow<'_, str>>, Spanned<DeValue<'_>>)| Entry {
            key_place: place.cloned().unwrap_or_else(|| key.span().into()),
            key: key.into_inner().into_owned(),
            node: Node::new(value, place),
        };
        Self { entries: table.into_iter().map(entry).collect() }
    }
}

impl Node {
    /// Converts a value of TOML's parser and everything in it. It gets `place`; if absent, its place in the file.
    fn new(value: Spanned<DeValue<'_>>, place: Option<&Place>) -> Self {
        let own_place = place.cloned().unwrap_or_else(|| value.span().into());
        let value = match value.into_inner() {
            DeValue::String(text) => Value::String(text.into_owned()),
            // Beyond i128 the exact value does not matter: no key takes so large a number.
            DeValue::Integer(integer) => match i128::from_str_radix(integer.as_str(), integer.radix()) {
                Ok(integer) => Value::Integer(integer),
                Err(_) => Value::Float(integer.as_str().parse().unwrap_or(f64::INFINITY)),
            },
            DeValue::Float(float) => Value::Float(float.as_str().parse().unwrap_or(f64::NAN)),
            DeValue::Boolean(boolean) => Value::Boolean(boolean),
            DeValue::Datetime(datetime) => Value::Datetime(datetime.to_string()),
            DeValue::Array(items) => Value::Array(items.into_iter().map(|item| Self::new(item, place)).collect()),
            DeValue::Table(table) => Value::Table(Table::new(table, place)),
        };
        Self { place: own_place, value }
    }
}

/// The place of a command-line argument.
pub(super) fn argument(index: usize, text: &str) -> Place {
    Place::Argument { index, text: Arc::from(text) }
}
