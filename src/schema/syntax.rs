//! Explains in words why a text is not TOML.

use std::collections::BTreeMap;

use toml::de::{DeTable, Error};

use super::places::{Lines, Place};
use super::problem::Problem;
use super::section::Record;
use super::tree::{Node, Table, Value};

/// Parses a TOML text. Returns its table, and whether the table can be trusted: a key given twice is a mistake, but the
/// rest is valid.
pub(super) fn parse(text: &str, record: &mut Record) -> (Table, bool) {
    let (table, mut errors) = DeTable::parse_recoverable(text);
    let table = Table::new(table.into_inner(), None);
    if errors.is_empty() {
        return (table, true);
    }
    let is_toml = errors.iter().all(is_duplicate);
    if let (false, Some(problem)) = (is_toml, another_language(text)) {
        record.problems.push(problem);
        return (table, false);
    }
    let lines = Lines::new(text);
    let start = |error: &Error| error.span().unwrap_or_default().start;
    // An unclosed bracket swallows the text after it, so errors after the bracket are not reported.
    let unclosed = errors
        .iter()
        .find(|error| error.message().starts_with("unclosed array,") || error.message().starts_with("unclosed inline"));
    if let Some(opening) = unclosed.and_then(|error| last_opening(&table, start(error))) {
        errors.retain(|error| start(error) < opening);
        let message = format!("not valid TOML: the bracket `{}` is not closed", &text[opening..=opening]);
        record.problems.push(((opening..opening + 1).into(), Problem::new(message)));
    }
    // The parser continues after a mistake and may stumble over its rest, so only the first error of a line is
    // reported.
    let line = |error: &Error| lines.position(start(error)).0;
    errors.sort_by_key(line);
    errors.dedup_by_key(|error| line(error));
    let keys = Keys::new(&table, text);
    for error in errors {
        let span = error.span().unwrap_or_default();
        let found = text.get(span.clone()).unwrap_or_default();
        let message = match (is_duplicate(&error), keys.first(found, span.start)) {
            (false, _) => format!("not valid TOML: {}", in_words(&error, text)),
            (true, None) => format!("`{found}` is given twice"),
            (true, Some(first)) => {
                format!("`{found}` is given twice; the first time in line {}", lines.position(first).0)
            }
        };
        record.problems.push((span.into(), Problem::new(message)));
    }
    (table, is_toml)
}

fn is_duplicate(error: &Error) -> bool {
    error.message() == "duplicate key"
}

/// Explains a syntax error in words; uses the parser's message where there is no better one.
pub(super) fn in_words(error: &Error, text: &str) -> String {
    let found = error.span().and_then(|span| text.get(span)).unwrap_or_default();
    let line = error.span().and_then(|span| text.get(..span.start)?.lines().next_back()).unwrap_or_default();
    let message = error.message();
    let is = |start: &str| message.starts_with(start);
    match found.to_lowercase().as_str() {
        "" if is("string values") => "a value is missing after `=`".to_owned(),
        "null" | "none" | "nil" => format!("there is no `{found}` in TOML: leave the key out"),
        "true" | "yes" | "on" => format!("`{found}` is not a TOML value: write true"),
        "false" | "no" | "off" => format!("`{found}` is not a TOML value: write false"),
        _ if is("string values") => format!("text needs quotes: \"{found}\""),
        _ if is("invalid basic string, expected `\"`") => "the quote `\"` is not closed".to_owned(),
        _ if is("invalid literal string, expected `'`") => "the quote `'` is not closed".to_owned(),
        _ if is("invalid multi-line") => "the three quotes are not closed".to_owned(),
        _ if is("unclosed table") => "the bracket `[` is not closed".to_owned(),
        _ if is("unclosed array table") => "the brackets `[[` are not closed".to_owned(),
        _ if is("key with no value") && line.contains(':') => "TOML has `key = value`, not `key: value`".to_owned(),
        _ if is("key with no value") => "`=` is missing after the key".to_owned(),
        _ if is("missing escaped value") || is("too few unicode") => {
            "`\\` begins an escape between \"...\": write '...' or `\\\\`".to_owned()
        }
        _ if is("unexpected key or value") => "something follows the value: a line holds one key".to_owned(),
        _ => message.trim_end_matches(", expected nothing").to_owned(),
    }
}

/// Recognises a file in another language by its first line.
fn another_language(text: &str) -> Option<(Place, Problem)> {
    let line = text.trim_start_matches('\u{feff}').lines().map(str::trim);
    let line = line.clone().find(|line| !line.is_empty() && !line.starts_with('#'))?;
    let is_key = |key: &str| !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || "_-\"'".contains(c));
    let has_yaml_key = line.split_once(':').is_some_and(|(key, value)| is_key(key) && !value.starts_with(|c| c != ' '));
    let language = if line.starts_with('{') {
        "JSON"
    } else if line == "---" || line.starts_with("- ") || has_yaml_key {
        "YAML"
    } else {
        return None;
    };
    let start = text.find(line).unwrap_or_default();
    let problem = Problem::new(format!("not valid TOML: this looks like {language}, and recipes are TOML"));
    Some(((start..start + line.len()).into(), problem.hint("recipes/reference.toml shows every key")))
}

/// Offset of the innermost list or table in brackets that is still open at `offset`.
fn last_opening(table: &Table, offset: usize) -> Option<usize> {
    let inside = |node: &Node| match &node.value {
        Value::Array(items) => items.iter().filter_map(|item| own_opening(item, offset)).max(),
        Value::Table(table) => last_opening(table, offset),
        _ => None,
    };
    table.entries.iter().filter_map(|entry| inside(&entry.node).max(own_opening(&entry.node, offset))).max()
}

/// Offset where a list or table in brackets begins, if `offset` is in it or at its end.
fn own_opening(node: &Node, offset: usize) -> Option<usize> {
    match (&node.value, &node.place) {
        (Value::Array(_) | Value::Table(_), &Place::Span { start, end }) => {
            (start < offset && offset <= end).then_some(start)
        }
        _ => None,
    }
}

/// Places where keys were given, to find the first place of a key given twice.
struct Keys<'t> {
    /// Offsets by name, in order.
    starts: BTreeMap<&'t str, Vec<usize>>,
    /// Lines such as `[lora]`, with their offsets.
    headers: Vec<(usize, &'t str)>,
}

impl<'t> Keys<'t> {
    fn new(table: &'t Table, text: &'t str) -> Self {
        let mut keys = Self { starts: BTreeMap::new(), headers: Vec::new() };
        keys.add(table);
        keys.starts.values_mut().for_each(|starts| starts.sort_unstable());
        let mut offset = 0;
        for line in text.split_inclusive('\n') {
            if line.starts_with('[') {
                keys.headers.push((offset, line.trim_end()));
            }
            offset += line.len();
        }
        keys
    }

    fn add(&mut self, table: &'t Table) {
        for entry in &table.entries {
            if let Place::Span { start, .. } = entry.key_place {
                self.starts.entry(&entry.key).or_default().push(start);
            }
            let items = if let Value::Array(items) = &entry.node.value { items.as_slice() } else { &[] };
            items.iter().chain([&entry.node]).filter_map(Node::table).for_each(|table| self.add(table));
        }
    }

    /// Offset where the key that is repeated at `offset` was first given in the same section.
    fn first(&self, key: &str, offset: usize) -> Option<usize> {
        let header = |offset: usize| {
            let before = self.headers.partition_point(|(start, _)| *start <= offset);
            self.headers[..before].last().map(|(_, header)| header)
        };
        let starts = self.starts.get(key.trim_matches(['"', '\'']))?;
        let before = &starts[..starts.partition_point(|start| *start < offset)];
        let in_section = before.iter().rfind(|start| header(**start) == header(offset)).or(before.last());
        // If a section is given twice, the parser keeps only the second place.
        let section = || self.headers.iter().find(|(_, line)| Some(line) == header(offset)).map(|(start, _)| *start);
        in_section.copied().or_else(section)
    }
}
