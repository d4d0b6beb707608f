//! Explains in words why a text is not TOML.

use std::collections::HashMap;

use toml::de::{DeTable, Error};

use super::problem::{Problem, line_at};
use super::tree::{Node, Table, Value, ValuePlace};

/// Parses a TOML text. Returns its table, its problems, and whether the table can be trusted: a key given twice is a
/// mistake, but the rest is valid.
pub(super) fn parse(text: &str) -> (Table, Vec<(ValuePlace, Problem)>, bool) {
    let (table, mut errors) = DeTable::parse_recoverable(text);
    let table = Table::from_toml(table.into_inner(), None);
    let is_toml = errors.iter().all(is_duplicate);
    if let (false, Some(problem)) = (is_toml, another_language(text)) {
        return (table, vec![problem], false);
    }
    let mut problems = Vec::new();
    let start = |error: &Error| error.span().unwrap_or_default().start;
    // An unclosed bracket swallows the text after it, so errors after the bracket are not reported.
    let unclosed = errors
        .iter()
        .find(|error| error.message().starts_with("unclosed array,") || error.message().starts_with("unclosed inline"));
    if let Some(opening) = unclosed.and_then(|error| last_opening(&table, start(error))) {
        errors.retain(|error| start(error) < opening);
        let message = format!("not valid TOML: the bracket `{}` is not closed", &text[opening..=opening]);
        problems.push(((opening..opening + 1).into(), Problem::new(message)));
    }
    // The parser continues after a mistake and may stumble over its rest, so only the first error of a line is
    // reported.
    let line = |error: &Error| line_at(text, start(error)).0;
    errors.sort_by_cached_key(line);
    errors.dedup_by_key(|error| line(error));
    let repeated = repeated_lines(text);
    for error in errors {
        let span = error.span().unwrap_or_default();
        let found = text.get(span.clone()).unwrap_or_default();
        let message = match repeated.get(&line(&error)) {
            _ if !is_duplicate(&error) => format!("not valid TOML: {}", in_words(&error, text)),
            None => format!("`{found}` is given twice"),
            Some(first) => format!("`{found}` is given twice; the first time in line {first}"),
        };
        problems.push((span.into(), Problem::new(message)));
    }
    (table, problems, is_toml)
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
        _ if is("string values") && found.contains(['“', '”', '„', '‘', '’', '«', '»']) => {
            format!(
                "curly quotes: text needs plain ones: \"{}\"",
                found.trim_matches(['“', '”', '„', '‘', '’', '«', '»', '"'])
            )
        }
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
fn another_language(text: &str) -> Option<(ValuePlace, Problem)> {
    let line = text.trim_start_matches('\u{feff}').lines().map(str::trim);
    let line = line.clone().find(|line| !line.is_empty() && !line.starts_with('#'))?;
    let is_key = |key: &str| !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || "_-\"'".contains(c));
    let has_yaml_key = line.split_once(':').is_some_and(|(key, value)| is_key(key) && !value.starts_with(|c| c != ' '));
    let language = if line.starts_with('{') || line.starts_with("[{") || line == "[" {
        "JSON"
    } else if line == "---" || line.starts_with("- ") || has_yaml_key {
        "YAML"
    } else {
        return None;
    };
    let start = text.find(line).unwrap_or_default();
    let problem = Problem::new(format!("not valid TOML: this looks like {language}, and recipes are TOML"));
    Some(((start..start + line.len()).into(), problem.hint("`lora-train init --from FILE` makes a recipe of another trainer's configuration; `lora-train help reference` shows every key")))
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
        (Value::Array(_) | Value::Table(_), &ValuePlace::Span { start, end }) => {
            (start < offset && offset <= end).then_some(start)
        }
        _ => None,
    }
}

/// The lines that repeat a key or a section's line, each with the line of the first.
fn repeated_lines(text: &str) -> HashMap<usize, usize> {
    let mut first = HashMap::new();
    let mut repeated = HashMap::new();
    // Each `[[...]]` begins a section of its own; those that repeat `[...]` count as one.
    let mut section = ("", 0);
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        let key = match line.split_once('=') {
            _ if line.starts_with("[[") => {
                section = (line, number);
                continue;
            }
            _ if line.starts_with('[') => {
                section = (line, 0);
                ""
            }
            Some((key, _)) => key.trim(),
            None => continue,
        };
        let first = *first.entry((section, key)).or_insert(number);
        if first != number {
            repeated.insert(number, first);
        }
    }
    repeated
}
