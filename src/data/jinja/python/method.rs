//! Methods of texts, lists and dicts.

use minijinja::value::ValueKind;
use minijinja::{Error, FormatStyle, State, Value, format_filter};

use super::bounds::{self, Measured, fits, refused};
use super::{arguments, format_args, is_space, pairs};

/// Python's methods: those of `minijinja_contrib::pycompat`, and others.
pub(super) fn call(state: &State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let others = || minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args);
    let Some(text) = value.as_str() else { return of_items(value, name, args).unwrap_or_else(others) };
    match name {
        "split" | "rsplit" => {
            let [separator, limit] = arguments(["sep", "maxsplit"], args)?;
            let limit = limit.map_or(Ok(-1), i64::try_from)?;
            return Ok(split(text, separator.as_ref(), usize::try_from(limit).ok(), name == "rsplit")?
                .into_iter()
                .collect());
        }
        "splitlines" => {
            let [with_ends] = arguments(["keepends"], args)?;
            return Ok(lines(text, with_ends.is_some_and(|with| with.is_true()))
                .into_iter()
                .map(Value::from)
                .collect());
        }
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" if args.len() > 1 => {
            let (start, part) = part_of(text, &args[1..])?;
            let found = call(state, &part.into(), name, &args[..1])?;
            return Ok(match i64::try_from(found.clone()) {
                Ok(at) if at >= 0 && name.ends_with(['d', 'x']) => (at + start).into(),
                _ => found,
            });
        }
        "index" | "rindex" => {
            let at = call(state, value, if name == "index" { "find" } else { "rfind" }, args)?;
            return if at == Value::from(-1) { Err(refused("substring not found")) } else { Ok(at) };
        }
        "format" => {
            let args = format_args(value, args)?;
            return format_filter(FormatStyle::StrFormat, text, &args).map(Value::from);
        }
        _ if args.last().is_some_and(Value::is_kwargs) => {
            return Err(refused(format!("`{name}` takes no arguments by name")));
        }
        _ => {}
    }
    of_text(text, name, args)?.map_or_else(others, Ok)
}

/// A method of texts whose arguments have no names here; `None`: it is none of these.
fn of_text(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let argument = args.first().and_then(Value::as_str);
    let number = |at: usize| args.get(at).and_then(|number| i64::try_from(number.clone()).ok());
    let width = || args.first().and_then(|width| i64::try_from(width.clone()).ok());
    let tuple = |parts: [&str; 3]| Measured::of(parts.iter().map(|part| Value::from(*part)).collect(), true);
    let place = |at: Option<usize>| at.map_or(-1, |at| text[..at].chars().count().try_into().unwrap_or(i64::MAX));
    Ok(Some(match (name, argument, args.len()) {
        ("strip", None, 0) => text.trim_matches(is_space).into(),
        ("lstrip", None, 0) => text.trim_start_matches(is_space).into(),
        ("rstrip", None, 0) => text.trim_end_matches(is_space).into(),
        ("removeprefix", Some(prefix), 1) => text.strip_prefix(prefix).unwrap_or(text).into(),
        ("removesuffix", Some(suffix), 1) => text.strip_suffix(suffix).unwrap_or(text).into(),
        ("partition", Some(separator), 1) if !separator.is_empty() => {
            tuple(text.split_once(separator).map_or([text, "", ""], |(head, tail)| [head, separator, tail]))?
        }
        ("rpartition", Some(separator), 1) if !separator.is_empty() => {
            tuple(text.rsplit_once(separator).map_or(["", "", text], |(head, tail)| [head, separator, tail]))?
        }
        ("replace", Some(from), 2 | 3) if args[1].as_str().is_some() => {
            replaced(text, from, args[1].as_str().unwrap_or_default(), number(2))?.into()
        }
        ("join", _, 1) => joined(text, &args[0])?.into(),
        ("swapcase", None, 0) => text.chars().flat_map(swapped).collect::<String>().into(),
        ("count", Some(part), 1) => text.matches(part).count().into(),
        ("find", Some(part), 1) => place(text.find(part)).into(),
        ("rfind", Some(part), 1) => place(text.rfind(part)).into(),
        ("title", None, 0) => title(text).into(),
        ("capitalize", None, 0) => capitalized(text).into(),
        ("isalpha" | "isdigit" | "isnumeric" | "isalnum" | "isspace", None, 0) if text.is_empty() => false.into(),
        ("islower", None, 0) => (text.contains(char::is_lowercase) && !text.contains(char::is_uppercase)).into(),
        ("isupper", None, 0) => (text.contains(char::is_uppercase) && !text.contains(char::is_lowercase)).into(),
        ("zfill", None, 1) => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let num_zeros = missing(text, width().unwrap_or(0));
            fits(num_zeros.saturating_add(text.len()))?;
            format!("{sign}{}{digits}", "0".repeat(num_zeros)).into()
        }
        ("ljust" | "rjust" | "center", None, 1 | 2) => {
            let fill = args.get(1).and_then(Value::as_str).unwrap_or(" ");
            padded(name, text, width().unwrap_or(0), fill)?.into()
        }
        _ => return Ok(None),
    }))
}

/// How many characters a text lacks to a width.
fn missing(text: &str, width: i64) -> usize {
    usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count())
}

/// A text with `fill` on the sides that `method` names.
pub(super) fn padded(method: &str, text: &str, width: i64, fill: &str) -> Result<String, Error> {
    let all = missing(text, width);
    fits(all.saturating_mul(fill.len()).saturating_add(text.len()))?;
    let left = match method {
        "ljust" => 0,
        "rjust" => all,
        // As in CPython, the odd one is on the left if the width is odd.
        _ => all / 2 + (all & 1 & usize::from(width % 2 != 0)),
    };
    Ok(format!("{}{text}{}", fill.repeat(left), fill.repeat(all - left)))
}

/// Methods of lists and dicts that the engine has not, or otherwise.
fn of_items(value: &Value, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let is_list = value.kind() == ValueKind::Seq;
    match (name, args) {
        ("copy", []) if is_list || value.kind() == ValueKind::Map => Some(Ok(value.clone())),
        ("items", []) if value.kind() == ValueKind::Map => Some(pairs(value)),
        ("index", [wanted]) if is_list => {
            let found = value.try_iter().map(|mut items| items.position(|item| item == *wanted));
            Some(found.and_then(|at| at.map(Value::from).ok_or_else(|| refused("the list has no such item"))))
        }
        _ => None,
    }
}

/// The part of a text between two of its characters, counted from its end where they are negative, and its start.
fn part_of<'a>(text: &'a str, range: &[Value]) -> Result<(i64, &'a str), Error> {
    let length = i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
    let place = |at: usize, default: i64| match range.get(at).filter(|at| !at.is_none()) {
        Some(at) => i64::try_from(at.clone()).map(|at| if at < 0 { (at + length).max(0) } else { at.min(length) }),
        None => Ok(default),
    };
    let (start, end) = (place(0, 0)?, place(1, length)?);
    let byte = |at: i64| text.char_indices().nth(usize::try_from(at).unwrap_or(0)).map_or(text.len(), |(at, _)| at);
    Ok((start, text.get(byte(start)..byte(end)).unwrap_or_default()))
}

/// The parts of a text between separators, at most `limit` times, from its end or its start.
fn split(text: &str, separator: Option<&Value>, limit: Option<usize>, is_reverse: bool) -> Result<Vec<Value>, Error> {
    let limit = limit.unwrap_or(usize::MAX - 1);
    let mut parts: Vec<&str> = match separator.filter(|separator| !separator.is_none()) {
        Some(separator) => {
            let separator = separator.as_str().filter(|separator| !separator.is_empty());
            let separator = separator.ok_or_else(|| refused("a separator is a text that is not empty"))?;
            if is_reverse {
                text.rsplitn(limit + 1, separator).collect()
            } else {
                text.splitn(limit + 1, separator).collect()
            }
        }
        None => {
            let trimmed = |text: &'_ str| if is_reverse { text.trim_end_matches(is_space).len() } else { text.len() };
            let (mut rest, mut parts) = (&text[..trimmed(text)], Vec::new());
            while let rest_of = if is_reverse { rest } else { rest.trim_start_matches(is_space) }
                && !rest_of.is_empty()
            {
                let at = if is_reverse { rest_of.rfind(is_space) } else { rest_of.find(is_space) };
                let Some(at) = at.filter(|_| parts.len() < limit) else {
                    parts.push(rest_of);
                    break;
                };
                let next = at + rest_of[at..].chars().next().map_or(1, char::len_utf8);
                let (part, left) =
                    if is_reverse { (&rest_of[next..], &rest_of[..at]) } else { (&rest_of[..at], &rest_of[next..]) };
                parts.push(part);
                rest = &left[..trimmed(left)];
            }
            parts
        }
    };
    if is_reverse {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

fn swapped(character: char) -> Vec<char> {
    if character.is_uppercase() { character.to_lowercase().collect() } else { character.to_uppercase().collect() }
}

pub(super) fn replaced(text: &str, from: &str, to: &str, count: Option<i64>) -> Result<String, Error> {
    let limit = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let count = text.matches(from).take(limit).count();
    fits(text.len().saturating_add(count.saturating_mul(to.len())))?;
    Ok(text.replacen(from, to, count))
}

fn joined(separator: &str, items: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for (index, item) in items.try_iter()?.enumerate() {
        let item = item.as_str().map(ToOwned::to_owned).ok_or_else(|| refused("`join` of a text takes texts alone"))?;
        out.push_str(if index > 0 { separator } else { "" });
        out.push_str(&item);
        if out.len() > bounds::MAX_VALUE_BYTES {
            break;
        }
    }
    fits(out.len())?;
    Ok(out)
}

/// Python's `str.splitlines`, with the ends of the lines or without.
pub(super) fn lines(text: &str, with_ends: bool) -> Vec<&str> {
    let is_end =
        |c: char| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let at = rest.find(is_end).unwrap_or(rest.len());
        let end = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(0, char::len_utf8) };
        lines.push(&rest[..if with_ends { at + end } else { at }]);
        rest = &rest[at + end..];
    }
    lines
}

/// Python's method: words are runs of letters, and the first one becomes a title-case letter.
fn title(text: &str) -> String {
    let mut in_word = false;
    let mut out = String::new();
    for character in text.chars() {
        if in_word {
            out.extend(character.to_lowercase());
        } else {
            out.push_str(&title_case(character));
        }
        in_word = character.is_lowercase() || character.is_uppercase() || is_digraph(character);
    }
    out
}

pub(super) fn capitalized(text: &str) -> String {
    let mut rest = text.chars();
    rest.next().map_or(String::new(), |first| title_case(first) + &rest.as_str().to_lowercase())
}

/// Letters that stand for two, of which the first can be large alone.
fn is_digraph(character: char) -> bool {
    matches!(character, '\u{1c4}'..='\u{1cc}' | '\u{1f1}'..='\u{1f3}')
}

fn title_case(character: char) -> String {
    if is_digraph(character) {
        // The middle one of three.
        let first = if character >= '\u{1f1}' { 0x1f1 } else { 0x1c4 };
        let place = first + (u32::from(character) - first) / 3 * 3 + 1;
        return char::from_u32(place).unwrap_or(character).into();
    }
    let mut upper = character.to_uppercase();
    let first: String = upper.next().into_iter().collect();
    first + &upper.flat_map(char::to_lowercase).collect::<String>()
}
