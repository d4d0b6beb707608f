//! `tojson`.

use std::fmt::Write as _;

use minijinja::value::{Rest, ValueKind};
use minijinja::{Error, Value};

use super::bounds::{self, fits, refused};
use super::{arguments, float};

/// `json.dumps(value, ensure_ascii=False, indent=..., separators=..., sort_keys=...)`, as in transformers: no HTML
/// escaping; on one line, items are separated by `", "` and `": "`.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes arguments so")]
pub(super) fn tojson(value: &Value, given: Rest<Value>) -> Result<String, Error> {
    let [is_ascii, indent, separators, sort_keys] =
        arguments(["ensure_ascii", "indent", "separators", "sort_keys"], &given)?;
    if matches!(value.kind(), ValueKind::Undefined | ValueKind::Plain) {
        return Err(refused(format!("{} is not JSON serializable", value.kind())));
    }
    let is_set = |flag: Option<Value>| flag.is_some_and(|flag| flag.is_true());
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => {
                let width = usize::try_from(indent.clone())?;
                fits(width)?;
                Some(" ".repeat(width))
            }
        },
    };
    let separators = separators.filter(|separators| !separators.is_none());
    let separators = separators.iter().flat_map(Value::try_iter).flatten();
    let separators = separators.map(|text| text.as_str().map(ToOwned::to_owned)).collect::<Option<Vec<_>>>();
    let separators = separators.ok_or_else(|| refused("the separators are two texts"))?;
    let mut json =
        serde_json::to_value(value).map_err(|error| refused("cannot serialize to JSON").with_source(error))?;
    if is_set(sort_keys) {
        json.sort_all_objects();
    }
    let mut separators = separators.into_iter();
    let item = separators.next().unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.to_owned());
    let key = separators.next().unwrap_or_else(|| ": ".to_owned());
    let style = JsonStyle { item, key, indent, is_ascii: is_set(is_ascii) };
    let mut out = String::new();
    style.write(&mut out, &json, 0)?;
    bounds::made(out.len())?;
    Ok(out)
}

/// How `json.dumps` writes values.
struct JsonStyle {
    item: String,
    key: String,
    /// The text in front of each level; everything on one line where absent.
    indent: Option<String>,
    is_ascii: bool,
}

impl JsonStyle {
    fn write(&self, out: &mut String, json: &serde_json::Value, level: usize) -> Result<(), Error> {
        use serde_json::Value as Json;
        let indent_bytes = self.indent.as_ref().map_or(0, |indent| indent.len() * (level + 1));
        if out.len() + indent_bytes > bounds::MAX_VALUE_BYTES {
            return fits(out.len() + indent_bytes);
        }
        let (brackets, items): ([char; 2], Vec<(Option<&String>, &Json)>) = match json {
            Json::Array(items) => (['[', ']'], items.iter().map(|item| (None, item)).collect()),
            Json::Object(items) => (['{', '}'], items.iter().map(|(key, item)| (Some(key), item)).collect()),
            Json::Number(number) if number.is_f64() => {
                out.push_str(&float(number.as_f64().unwrap_or_default()));
                return Ok(());
            }
            scalar => {
                self.push_scalar(out, &scalar.to_string());
                return Ok(());
            }
        };
        let new_line = |out: &mut String, level: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), level));
            }
        };
        out.push(brackets[0]);
        for (index, (key, item)) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            new_line(out, level + 1);
            if let Some(key) = key {
                self.push_scalar(out, &Json::from(key.as_str()).to_string());
                out.push_str(&self.key);
            }
            self.write(out, item, level + 1)?;
        }
        if !items.is_empty() {
            new_line(out, level);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn push_scalar(&self, out: &mut String, text: &str) {
        if !self.is_ascii {
            return out.push_str(text);
        }
        let mut units = [0; 2];
        for character in text.chars() {
            match character {
                ..='\x7f' => out.push(character),
                _ => character.encode_utf16(&mut units).iter().for_each(|unit| {
                    let _ = write!(out, "\\u{unit:04x}");
                }),
            }
        }
    }
}
