//! One table of a recipe, or one object of a JSON file, read key by key.

mod reads;

use std::fmt::Display;

use serde::Serialize;

use super::keys::KeyRow;
use super::problem::Problem;
use super::suggest::Unknown;
use super::tree::{Entry, Node, Table, Value, ValuePlace};

/// Results of reading.
#[derive(Default)]
pub(super) struct SectionRecord {
    pub(super) problems: Vec<(ValuePlace, Problem)>,
    pub(super) unknown: Vec<Unknown>,
}

/// A table of a recipe; `section!` generates it from rows.
pub trait Keys: Default + Serialize {
    /// Its keys.
    const ROWS: &'static [KeyRow];

    /// Reads every key. A key that is absent or wrong gets its value from `default`.
    fn read(section: &mut Section<'_>, default: Self) -> Self;
}

/// One table of a recipe, or one object of a JSON file. Each read names a key with its type, range and default, in one
/// place.
///
/// A read never fails: it records what is wrong and returns the default, so that all mistakes of a file are reported
/// together. JSON's null counts as absent. In a recipe, a key that was never read is reported as unknown.
pub struct Section<'a> {
    /// `lora`, `data.train[0]`; empty at the top.
    path: String,
    place: ValuePlace,
    table: Option<&'a Table>,
    asked: Vec<&'static str>,
    record: &'a mut SectionRecord,
}

impl<'a> Section<'a> {
    /// The table at the top of a file.
    pub(super) fn root(node: &'a Node, record: &'a mut SectionRecord) -> Self {
        Self::new(String::new(), node.place.clone(), node.table(), record)
    }

    fn new(path: String, place: ValuePlace, table: Option<&'a Table>, record: &'a mut SectionRecord) -> Self {
        Self { path, place, table, asked: vec![], record }
    }

    /// The name of a key for messages: `lora.r`.
    #[must_use]
    pub fn full_name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Whether a key was written, if only as null; the key may be in a table below (`data.eval_split`).
    #[must_use]
    pub fn has(&self, path: &str) -> bool {
        self.node_at(path).is_some()
    }

    /// Whether a key was written as null.
    pub fn is_null(&mut self, key: &'static str) -> bool {
        self.has(key) && self.value(key).is_none()
    }

    /// Whether a key was written and its value refused; the key may be in a table below (`data.eval_split`).
    #[must_use]
    pub fn is_wrong(&self, path: &str) -> bool {
        self.node_at(path).is_some_and(|node| self.record.problems.iter().any(|(place, _)| *place == node.place))
    }

    fn node_at(&self, path: &str) -> Option<&'a Node> {
        let (above, key) = path.rsplit_once('.').map_or((None, path), |(above, key)| (Some(above), key));
        let table = above.map_or(self.table, |above| self.node_at(above)?.table());
        table?.get(key)
    }

    /// Whether everything that was read so far was as expected.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.record.problems.is_empty()
    }

    fn node(&mut self, key: &'static str) -> Option<&'a Node> {
        self.asked.push(key);
        self.table?.get(key).filter(|node| node.value != Value::Null)
    }

    /// The value of a key as it was written.
    pub fn value(&mut self, key: &'static str) -> Option<&'a Value> {
        self.node(key).map(|node| &node.value)
    }

    /// The keys that were not read, with their values.
    pub fn unread(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.unread_entries().map(|entry| (entry.key.as_str(), &entry.node.value))
    }

    fn unread_entries(&self) -> impl Iterator<Item = &'a Entry> {
        self.table
            .into_iter()
            .flat_map(|table| &table.entries)
            .filter(|entry| !self.asked.contains(&entry.key.as_str()))
    }

    /// Records that a value is not the expected one.
    fn wrong(&mut self, name: &str, node: &Node, expected: &str, hint: Option<String>) {
        let message = format!("`{name}` = {}, expected {expected}", node.value.shown());
        self.record.problems.push((node.place.clone(), Problem { hint, ..Problem::new(message) }));
    }

    /// Records a problem at a key, which may be in a table below (`eval.eval_steps`). If the key was not written, the
    /// problem is placed at the section.
    pub fn reject(&mut self, path: &str, problem: Problem) {
        let mut place = self.place.clone();
        let mut table = self.table;
        for key in path.split('.') {
            let Some(entry) = table.and_then(|table| table.entry(key)) else { break };
            place = entry.key_place.clone();
            table = entry.node.table();
        }
        self.record.problems.push((place, problem));
    }

    /// Records a problem of a key of this table; the message follows the key's name.
    pub fn problem(&mut self, key: &str, message: impl Display) {
        self.reject(key, Problem::new(format!("`{}` {message}", self.full_name(key))));
    }

    /// Records that a key is of no use to the `name` of this table, unless that is wrong itself.
    pub(crate) fn of_no_use(&mut self, key: &str, name: &str) {
        if !self.is_wrong("name") {
            self.problem(key, format!("is of no use to \"{name}\": leave it out"));
        }
    }

    /// Records that a value is not supported, unless it is absent or `is_supported`.
    pub fn only(&mut self, key: &'static str, expected: &str, is_supported: impl FnOnce(&Value) -> bool) {
        if let Some(value) = self.value(key).filter(|value| !is_supported(value)) {
            self.problem(key, format!("= {} is not supported, expected {expected}", value.shown()));
        }
    }

    /// Records that a key is missing; `meaning` describes its value.
    fn require(&mut self, key: &'static str, meaning: &str) {
        if self.node(key).is_none() {
            self.problem(key, format!("is missing: {meaning}"));
        }
    }

    /// Reads a value of any form: `accept` converts it, or refuses it with an optional hint.
    pub fn any<T>(
        &mut self,
        key: &'static str,
        default: T,
        expected: &str,
        accept: impl FnOnce(&Value) -> Result<T, Option<String>>,
    ) -> T {
        let Some(node) = self.node(key) else { return default };
        accept(&node.value).unwrap_or_else(|hint| {
            self.wrong(&self.full_name(key), node, expected, hint);
            default
        })
    }

    /// The table below this one, empty where the key is absent; `expected` describes it where it is another value.
    pub fn below(&mut self, key: &'static str, expected: &str) -> Section<'_> {
        let node = self.node(key);
        if let Some(node) = node.filter(|node| node.table().is_none()) {
            self.wrong(&self.full_name(key), node, expected, None);
        }
        let place = node.map_or(&self.place, |node| &node.place).clone();
        Section::new(self.full_name(key), place, node.and_then(Node::table), self.record)
    }

    /// Reads the tables below this one, whatever their names; `expected` describes them where one is another value.
    pub fn each<T>(&mut self, expected: &str, mut read: impl FnMut(&mut Section<'_>) -> T) -> Vec<T> {
        let mut values = Vec::new();
        for Entry { key, node, .. } in self.table.into_iter().flat_map(|table| &table.entries) {
            let name = self.full_name(key);
            match node.table() {
                None => self.wrong(&name, node, expected, None),
                table => values.push(read(&mut Section::new(name, node.place.clone(), table, self.record))),
            }
        }
        values
    }

    /// Reads a table below this one.
    pub fn section<T: Keys>(&mut self, key: &'static str, default: T) -> T {
        let expected = format!("a section [{}]", self.full_name(key));
        self.below(key, &expected).read_keys(default)
    }

    /// Reads a list of tables below this one.
    pub fn sections<T: Keys>(&mut self, key: &'static str, default: Vec<T>) -> Vec<T> {
        let Some(node) = self.node(key) else { return default };
        let name = self.full_name(key);
        let expected = format!("sections [[{name}]]");
        let Value::Array(items) = &node.value else {
            let hint = format!("write [[{name}]], in double brackets: there can be several");
            self.wrong(&name, node, &expected, node.table().map(|_| hint));
            return Vec::new();
        };
        let mut values = Vec::new();
        for (index, item) in items.iter().enumerate() {
            let path = format!("{name}[{index}]");
            match item.table() {
                None => self.wrong(&path, item, &expected, None),
                table => {
                    let section = Section::new(path, item.place.clone(), table, self.record);
                    values.push(section.read_keys(T::default()));
                }
            }
        }
        values
    }

    fn read_keys<T: Keys>(mut self, default: T) -> T {
        let value = T::read(&mut self, default);
        self.finish();
        value
    }

    /// Records the keys that were never read as unknown.
    pub(super) fn finish(self) {
        let section: Vec<&str> = self.path.split('.').filter_map(|part| part.split('[').next()).collect();
        let section = section.join(".");
        let unknown = self.unread_entries().map(|entry| Unknown {
            place: entry.key_place.clone(),
            section: section.clone(),
            key: entry.key.clone(),
            is_section: match &entry.node.value {
                Value::Table(_) => true,
                Value::Array(items) => items.iter().any(|item| item.table().is_some()),
                _ => false,
            },
        });
        let unknown: Vec<Unknown> = unknown.collect();
        self.record.unknown.extend(unknown);
    }
}
