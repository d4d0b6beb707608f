//! One table of a recipe, or one object of a JSON file, read key by key.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::{RangeBounds, RangeInclusive};

use super::accept::{TEXT, accept_count, accept_number, accept_text, describe_count, describe_number};
use super::keys::Keys;
use super::path::expand;
use super::places::Place;
use super::problem::Problem;
use super::suggest::closest;
use super::tree::{Entry, Node, Table, Value};

/// A type whose values recipes write as one of a few words.
pub trait Choice: Copy + PartialEq + 'static {
    /// The words and their values.
    const NAMES: &'static [(&'static str, Self)];
    /// Words of other trainers, with our words for the same value.
    const PEERS: &'static [(&'static str, &'static str)] = &[];
    /// Words that are planned: they are refused with "not available yet".
    const LATER: &'static [&'static str] = &[];
}

/// Results of reading.
#[derive(Default)]
pub(super) struct Record {
    pub(super) problems: Vec<(Place, Problem)>,
    pub(super) unknown: Vec<Unknown>,
}

/// A key that no section declares.
pub(super) struct Unknown {
    pub(super) place: Place,
    /// Name of its section: `lora`, `data.train`; empty at the top.
    pub(super) section: String,
    pub(super) key: String,
    /// Whether its value is a table or a list of tables.
    pub(super) is_section: bool,
}

/// One table of a recipe, or one object of a JSON file. Each read names a key with its type, range and default, in one
/// place.
///
/// A read never fails: it records what is wrong and returns the default, so that all mistakes of a file are reported
/// together. JSON's null counts as absent. In a recipe, a key that was never read is reported as unknown.
pub struct Section<'a> {
    /// `lora`, `data.train[0]`; empty at the top.
    path: String,
    place: Place,
    table: Option<&'a Table>,
    asked: Vec<&'static str>,
    record: &'a mut Record,
}

impl<'a> Section<'a> {
    /// The table at the top of a file.
    pub(super) fn root(node: &'a Node, record: &'a mut Record) -> Self {
        Self::new(String::new(), node.place.clone(), node.table(), record)
    }

    fn new(path: String, place: Place, table: Option<&'a Table>, record: &'a mut Record) -> Self {
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
        let node = path.split('.').try_fold((self.table, None), |(table, _), key| {
            let node = table?.get(key)?;
            Some((node.table(), Some(node)))
        });
        node.is_some()
    }

    /// Whether a key was written and its value refused; the key may be in a table below (`data.eval_split`).
    #[must_use]
    pub fn is_wrong(&self, path: &str) -> bool {
        let node = path.split('.').try_fold((self.table, None), |(table, _), key| {
            let node = table?.get(key)?;
            Some((node.table(), Some(node)))
        });
        let Some((_, Some(node))) = node else { return false };
        self.record.problems.iter().any(|(place, _)| *place == node.place)
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

    /// Reads `true` or `false`.
    pub fn boolean(&mut self, key: &'static str, default: bool) -> bool {
        self.any(key, default, "true or false", |value| match value {
            Value::Boolean(boolean) => Ok(*boolean),
            Value::String(text) if text == "true" || text == "false" => {
                Err(Some(format!("write {text} without quotes")))
            }
            _ => Err(None),
        })
    }

    /// Reads a whole number.
    pub fn count<T>(&mut self, key: &'static str, default: T, range: impl RangeBounds<T>) -> T
    where
        T: Copy + PartialOrd + Display + TryFrom<i128>,
    {
        self.any(key, default, &describe_count(&range), |value| accept_count(value, &range))
    }

    /// Reads a whole number that must be given; the first of the range stands for one that is missing or wrong.
    pub fn required_count(&mut self, key: &'static str, range: RangeInclusive<usize>) -> usize {
        self.require(key, &describe_count(&range));
        self.count(key, *range.start(), range)
    }

    /// Reads a number that must be given; the first of the range stands for one that is missing or wrong.
    pub fn required_number(&mut self, key: &'static str, range: RangeInclusive<f64>) -> f64 {
        self.require(key, &describe_number(&range));
        self.number(key, *range.start(), range)
    }

    /// Reads a whole number that may be absent.
    pub fn optional_count<T>(&mut self, key: &'static str, default: Option<T>, range: impl RangeBounds<T>) -> Option<T>
    where
        T: Copy + PartialOrd + Display + TryFrom<i128>,
    {
        self.any(key, default, &describe_count(&range), |value| accept_count(value, &range).map(Some))
    }

    /// Reads a number; a whole number needs no decimal point.
    pub fn number(&mut self, key: &'static str, default: f64, range: impl RangeBounds<f64>) -> f64 {
        self.any(key, default, &describe_number(&range), |value| accept_number(value, &range))
    }

    /// Reads a number that may be absent.
    pub fn optional_number(
        &mut self,
        key: &'static str,
        default: Option<f64>,
        range: impl RangeBounds<f64>,
    ) -> Option<f64> {
        self.any(key, default, &describe_number(&range), |value| accept_number(value, &range).map(Some))
    }

    /// Reads a list of exactly `N` numbers.
    pub fn numbers<const N: usize>(
        &mut self,
        key: &'static str,
        default: [f64; N],
        range: impl RangeBounds<f64>,
    ) -> [f64; N] {
        let expected = format!("a list of {N} numbers, each {}", describe_number(&range));
        self.any(key, default, &expected, |value| {
            let Value::Array(items) = value else { return Err(None) };
            let numbers: Result<Vec<f64>, _> = items.iter().map(|item| accept_number(&item.value, &range)).collect();
            numbers?.try_into().map_err(|_| None)
        })
    }

    /// Reads a text that is not empty.
    pub fn string(&mut self, key: &'static str, default: String) -> String {
        self.any(key, default, TEXT, accept_text)
    }

    /// Reads a text that is not empty and may be absent.
    pub fn optional_string(&mut self, key: &'static str, default: Option<String>) -> Option<String> {
        self.any(key, default, TEXT, |value| accept_text(value).map(Some))
    }

    /// Reads a path: a leading `~` is the home folder, `${VARIABLE}` an environment variable.
    pub fn path<T: From<String>>(&mut self, key: &'static str, default: T) -> T {
        self.optional_path(key, None).unwrap_or(default)
    }

    /// Reads a path that may be absent.
    pub fn optional_path<T: From<String>>(&mut self, key: &'static str, default: Option<T>) -> Option<T> {
        let Some(path) = self.optional_string(key, None) else { return default };
        match expand(&path) {
            Ok(path) => Some(path.into()),
            Err(problem) => {
                let message =
                    format!("`{}` = {}: {}", self.full_name(key), Value::String(path).shown(), problem.message);
                self.reject_value(key, Problem { message, ..problem });
                default
            }
        }
    }

    /// Reads a path that must be given; `meaning` describes it when it is missing.
    pub fn required_path(&mut self, key: &'static str, default: String, meaning: &str) -> String {
        self.require(key, meaning);
        self.path(key, default)
    }

    /// Reads a list of texts, each not empty.
    pub fn strings(&mut self, key: &'static str, default: Vec<String>) -> Vec<String> {
        self.any(key, default, "a list of texts, none of them empty", |value| match value {
            Value::Array(items) => {
                items.iter().map(|item| accept_text(&item.value).ok()).collect::<Option<_>>().ok_or(None)
            }
            single if accept_text(single).is_ok() => Err(Some("a list is written in brackets: [...]".to_owned())),
            _ => Err(None),
        })
    }

    /// Reads one of the words of [`Choice::NAMES`].
    pub fn choice<T: Choice>(&mut self, key: &'static str, default: T) -> T {
        self.optional_choice(key, None).unwrap_or(default)
    }

    /// Reads one of the words of [`Choice::NAMES`] that may be absent.
    pub fn optional_choice<T: Choice>(&mut self, key: &'static str, default: Option<T>) -> Option<T> {
        let Some(node) = self.node(key) else { return default };
        let names: Vec<&str> = T::NAMES.iter().map(|(name, _)| *name).collect();
        let Value::String(text) = &node.value else {
            self.wrong(&self.full_name(key), node, &one_of(&names), None);
            return default;
        };
        if let Some((_, value)) = T::NAMES.iter().find(|(name, _)| name == text) {
            return Some(*value);
        }
        if T::LATER.contains(&text.as_str()) {
            self.not_yet(key, &format!("what there is: {}", quoted_list(&names)));
            return default;
        }
        let lower = text.to_lowercase();
        let instead = T::PEERS.iter().find(|(peer, _)| *peer == lower).map(|(_, ours)| ours);
        let hint = match instead {
            Some(ours) => Some(format!("this trainer calls it `{ours}`")),
            None => closest(text, names.iter().copied()).map(|name| format!("did you mean `{name}`?")),
        };
        self.wrong(&self.full_name(key), node, &one_of(&names), hint);
        if let Some((_, problem)) = self.record.problems.last_mut() {
            problem.instead = instead;
        }
        default
    }

    /// Records that a key asks for something that is planned but not available yet.
    pub fn not_yet(&mut self, key: &'static str, hint: &str) {
        let Some(value) = self.value(key) else { return };
        let message = format!("`{}` = {} is not available yet", self.full_name(key), value.shown());
        self.reject_value(key, Problem::new(message).hint(hint));
    }

    /// Records a problem at a key's value.
    fn reject_value(&mut self, key: &'static str, problem: Problem) {
        if let Some(node) = self.node(key) {
            self.record.problems.push((node.place.clone(), problem));
        }
    }

    /// Reads a table of names with a whole number each.
    pub fn counts_by_name<T>(
        &mut self,
        key: &'static str,
        default: BTreeMap<String, T>,
        range: impl RangeBounds<T>,
    ) -> BTreeMap<String, T>
    where
        T: Copy + PartialOrd + Display + TryFrom<i128>,
    {
        self.by_name(key, default, &describe_count(&range), |value| accept_count(value, &range))
    }

    /// Reads a table of names with a number each.
    pub fn numbers_by_name(
        &mut self,
        key: &'static str,
        default: BTreeMap<String, f64>,
        range: impl RangeBounds<f64>,
    ) -> BTreeMap<String, f64> {
        self.by_name(key, default, &describe_number(&range), |value| accept_number(value, &range))
    }

    /// Reads a table of names with a text each.
    pub fn strings_by_name(
        &mut self,
        key: &'static str,
        default: BTreeMap<String, String>,
    ) -> BTreeMap<String, String> {
        self.by_name(key, default, TEXT, accept_text)
    }

    /// Reads a table of names with a value each, converted by `accept`.
    fn by_name<T>(
        &mut self,
        key: &'static str,
        default: BTreeMap<String, T>,
        expected: &str,
        accept: impl Fn(&Value) -> Result<T, Option<String>>,
    ) -> BTreeMap<String, T> {
        let Some(node) = self.node(key) else { return default };
        let Value::Table(table) = &node.value else {
            let hint = format!("write {key} = {{ name = value }}");
            self.wrong(&self.full_name(key), node, "a table", Some(hint));
            return default;
        };
        let mut values = BTreeMap::new();
        for Entry { key: name, node: item, .. } in &table.entries {
            match accept(&item.value) {
                Ok(value) => drop(values.insert(name.clone(), value)),
                Err(hint) => self.wrong(&format!("{}.{name}", self.full_name(key)), item, expected, hint),
            }
        }
        values
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

/// `one of "a", "b"`, with the words as a recipe writes them.
fn one_of(names: &[&str]) -> String {
    match names {
        [only] => format!("\"{only}\""),
        _ => format!("one of {}", names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")),
    }
}

/// "`a`, `b`".
pub(super) fn quoted_list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
