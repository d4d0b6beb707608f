//! Values of a TOML or JSON text, with the places where they were written.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ValuePlace {
    /// The file as a whole.
    File,
    /// A byte range of the file's text.
    Span { start: usize, end: usize },
    /// A command-line argument: its position among those that change the recipe, and its text, `--set lora.r=x`.
    Argument { index: usize, text: Arc<str> },
}

impl From<Range<usize>> for ValuePlace {
    fn from(Range { start, end }: Range<usize>) -> Self {
        Self::Span { start, end }
    }
}

/// A value and the place where it was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub(super) place: ValuePlace,
    pub(super) value: Value,
}

/// A TOML or JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// JSON's null.
    Null,
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

impl PartialEq for Table {
    /// In any order.
    fn eq(&self, other: &Self) -> bool {
        let is_there = |entry: &Entry| other.get(&entry.key) == Some(&entry.node);
        self.entries.len() == other.entries.len() && self.entries.iter().all(is_there)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_place: ValuePlace,
    pub(super) node: Node,
}

impl Value {
    /// The text; `None` for another value.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The number, whole or not; `None` for another value.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a whole number beyond 2^53 is out of every range here")]
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Float(float) => Some(*float),
            Self::Integer(integer) => Some(*integer as f64),
            _ => None,
        }
    }

    /// The value as messages quote it: on one line, shortened if long.
    #[must_use]
    pub fn shown(&self) -> String {
        match self {
            Self::Null => "null".to_owned(),
            Self::String(text) => {
                let shown: String = text.chars().take(60).collect();
                let dots = if shown.len() < text.len() { "..." } else { "" };
                format!("\"{}{dots}\"", shown.escape_debug())
            }
            Self::Integer(integer) => integer.to_string(),
            // As TOML writes it: `1e-8` instead of `0.00000001`, `16.0` instead of `16`.
            Self::Float(float) => format!("{float:?}").replace("NaN", "nan"),
            Self::Boolean(boolean) => boolean.to_string(),
            Self::Datetime(datetime) => datetime.clone(),
            Self::Array(items) => {
                let shown: Vec<String> = items.iter().take(6).map(|item| item.value.shown()).collect();
                let dots = if items.len() > 6 { ", ..." } else { "" };
                format!("[{}{dots}]", shown.join(", "))
            }
            Self::Table(_) => "a table".to_owned(),
        }
    }
}

impl Table {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entry(key).map(|entry| &entry.node)
    }

    /// A key with its place and value.
    pub(super) fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// Whether it has no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Converts a table of TOML's parser. Everything in it gets `place`; if absent, its place in the file.
    pub(super) fn from_toml(table: DeTable<'_>, place: Option<&ValuePlace>) -> Self {
        let entry = |(key, value): (Spanned<Cow<'_, str>>, Spanned<DeValue<'_>>)| Entry {
            key_place: place.cloned().unwrap_or_else(|| key.span().into()),
            key: key.into_inner().into_owned(),
            node: Node::from_toml(value, place),
        };
        Self { entries: table.into_iter().map(entry).collect() }
    }
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

    /// The value of a key of a table, or of an element of a list.
    pub(super) fn child(&self, name: &str) -> Option<&Self> {
        match &self.value {
            Value::Table(table) => table.get(name),
            Value::Array(items) => items.get(name.parse::<usize>().ok()?),
            _ => None,
        }
    }

    fn from_toml(value: Spanned<DeValue<'_>>, place: Option<&ValuePlace>) -> Self {
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
            DeValue::Array(items) => Value::Array(items.into_iter().map(|item| Self::from_toml(item, place)).collect()),
            DeValue::Table(table) => Value::Table(Table::from_toml(table, place)),
        };
        Self { place: own_place, value }
    }
}

impl From<serde_json::Value> for Node {
    /// Converts a JSON value, whose place is the file: messages name the keys that lead to it.
    fn from(value: serde_json::Value) -> Self {
        let value = match value {
            serde_json::Value::Null => Value::Null,
            serde_json::Value::Bool(boolean) => Value::Boolean(boolean),
            serde_json::Value::Number(number) => match number.as_i128() {
                Some(integer) => Value::Integer(integer),
                None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            serde_json::Value::String(text) => Value::String(text),
            serde_json::Value::Array(items) => Value::Array(items.into_iter().map(Self::from).collect()),
            serde_json::Value::Object(object) => {
                let entry = |(key, value)| Entry { key, key_place: ValuePlace::File, node: Self::from(value) };
                Value::Table(Table { entries: object.into_iter().map(entry).collect() })
            }
        };
        Self { place: ValuePlace::File, value }
    }
}
