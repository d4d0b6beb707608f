//! Values of one type each.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::{RangeBounds, RangeInclusive};

use super::super::accept::{TEXT, accept_count, accept_number, accept_text, describe_count, describe_number};
use super::super::by_name::ByName;
use super::super::choice::Choice;
use super::super::path::expand;
use super::super::problem::Problem;
use super::super::suggest::closest;
use super::super::tree::{Entry, Value};
use super::Section;

impl Section<'_> {
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

    /// Reads `true` or `false` that may be absent.
    pub fn optional_boolean(&mut self, key: &'static str, default: Option<bool>) -> Option<bool> {
        self.value(key).is_some().then(|| self.boolean(key, false)).or(default)
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
        let absent = self.meant_as_absent(key);
        self.any(key, default, &describe_count(&range), |value| {
            accept_count(value, &range).map(Some).map_err(|hint| hint.or_else(|| absent(value)))
        })
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
        let absent = self.meant_as_absent(key);
        self.any(key, default, &describe_number(&range), |value| {
            accept_number(value, &range).map(Some).map_err(|hint| hint.or_else(|| absent(value)))
        })
    }

    /// The hint for a 0, -1 or false with which other programs say that they do without a number.
    fn meant_as_absent(&self, key: &str) -> impl Fn(&Value) -> Option<String> + use<> {
        let key = self.full_name(key);
        move |value| {
            let is_off = *value == Value::Boolean(false) || value.number().is_some_and(|number| number <= 0.0);
            is_off.then(|| format!("if none is meant, leave it out: `lora-train help {key}` says what happens then"))
        }
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
        let lower = text.to_lowercase();
        let instead = T::PEERS.iter().find(|(peer, _)| *peer == lower).map(|(_, ours)| ours);
        let note = T::NOTES.iter().find(|(starts, _)| starts.iter().any(|start| lower.starts_with(start)));
        let hint = match (instead, note) {
            (Some(ours), _) => Some(format!("this trainer calls it `{ours}`")),
            (None, Some((_, note))) => Some((*note).to_owned()),
            (None, None) => closest(text, names.iter().copied()).map(|name| format!("did you mean `{name}`?")),
        };
        self.wrong(&self.full_name(key), node, &one_of(&names), hint);
        if let Some((_, problem)) = self.record.problems.last_mut() {
            problem.instead = instead;
        }
        default
    }

    /// Records a problem at a key's value.
    fn reject_value(&mut self, key: &'static str, problem: Problem) {
        if let Some(node) = self.node(key) {
            self.record.problems.push((node.place.clone(), problem));
        }
    }

    /// Reads a table of names with a whole number each.
    pub fn counts_by_name<T>(&mut self, key: &'static str, default: ByName<T>, range: impl RangeBounds<T>) -> ByName<T>
    where
        T: Copy + PartialOrd + Display + TryFrom<i128>,
    {
        self.by_name(key, default, &describe_count(&range), |value| accept_count(value, &range))
    }

    /// Reads a table of names with a number each.
    pub fn numbers_by_name(
        &mut self,
        key: &'static str,
        default: ByName<f64>,
        range: impl RangeBounds<f64>,
    ) -> ByName<f64> {
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

    /// Reads a table of names with a value each, converted by `accept`, in the order in which they are written.
    fn by_name<T, M: FromIterator<(String, T)>>(
        &mut self,
        key: &'static str,
        default: M,
        expected: &str,
        accept: impl Fn(&Value) -> Result<T, Option<String>>,
    ) -> M {
        let Some(node) = self.node(key) else { return default };
        let Value::Table(table) = &node.value else {
            let hint = format!("write {key} = {{ name = value }}");
            self.wrong(&self.full_name(key), node, "a table", Some(hint));
            return default;
        };
        let of_entry = |Entry { key: name, node: item, .. }: &Entry| match accept(&item.value) {
            Ok(value) => Some((name.clone(), value)),
            Err(hint) => {
                self.wrong(&format!("{}.{name}", self.full_name(key)), item, expected, hint);
                None
            }
        };
        table.entries.iter().filter_map(of_entry).collect()
    }
}

/// `one of "a", "b"`, with the words as a recipe writes them.
fn one_of(names: &[&str]) -> String {
    match names {
        [only] => format!("\"{only}\""),
        _ => format!("one of {}", names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")),
    }
}
