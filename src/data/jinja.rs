//! Jinja as Hugging Face's chat templates use it.

use std::collections::HashSet;
use std::io;
use std::sync::LazyLock;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use regex::Regex;
use time::OffsetDateTime;
use time::format_description::parse_strftime_owned;

/// Name under which [`compile`] keeps its template.
pub(super) const TEMPLATE_NAME: &str = "chat_template";
/// Longest text of one rendering; a conversation of a million tokens has some megabytes.
const MAX_RENDERED_BYTES: usize = 64_000_000;
/// Most steps for one rendering; a long conversation needs some ten thousand.
const FUEL_PER_RENDERING: u64 = 5_000_000;

/// `{% generation %}` and `{% endgeneration %}`, with their white-space marks.
static GENERATION_TAG: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").ok());

/// An environment with transformers' settings and functions, in which `source` is compiled as [`TEMPLATE_NAME`].
///
/// It has `trim_blocks`, `lstrip_blocks`, loop controls, Python's methods on strings, lists and dicts,
/// `raise_exception`, `strftime_now` (always of `now`, so that all rows see one date) and `tojson` as
/// `json.dumps(ensure_ascii=False)`. It has no loader, so a template cannot read files. `{% generation %}` does not
/// change the text; it is replaced.
///
/// # Errors
/// A syntax error, with its line.
pub(super) fn compile(source: &str, now: OffsetDateTime) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_fuel(Some(FUEL_PER_RENDERING));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_formatter(write_as_python);
    env.set_unknown_method_callback(python_method);
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| str(value));
    env.add_filter("trim", |text: &str, chars: Option<&str>| match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => text.trim_matches(is_python_space).to_owned(),
    });
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", move |format: &str| strftime(format, now));
    env.add_template_owned(TEMPLATE_NAME, without_generation_tags(&with_tags_as_jinja(source)))?;
    Ok(env)
}

/// The date that a template can see, empty where it asks for none. `None` where it asks for the time of day, so that its
/// text differs each time.
pub(super) fn date(source: &str, now: OffsetDateTime) -> Option<String> {
    if !source.contains("strftime_now") {
        return Some(String::new());
    }
    let asks_for_time = TIME_OF_DAY.as_ref().is_none_or(|call| call.is_match(source));
    (!asks_for_time).then(|| now.date().to_string())
}

/// A call of `strftime_now` with a directive that is more exact than a day, or with anything but a literal.
static TIME_OF_DAY: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r#"strftime_now\s*\(\s*([^"'\s]|["'][^"']*(%[-_0]?[cHIklMpPrRsSTX]|["']\s*[^)\s]))"#).ok()
});

/// A comment, or a tag whose strings may hold the marks of its end.
static TAG: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r#"(?s)\{#.*?#\}|\{[{%](?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'])*?[}%]\}"#).ok());
static STRING: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r#"(?s)"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'"#).ok());

/// The strings in the tags of a template, as they are written there.
pub(super) fn strings(source: &str) -> HashSet<String> {
    let (Some(tag), Some(string)) = (TAG.as_ref(), STRING.as_ref()) else { return HashSet::new() };
    let tags = tag.find_iter(source).map(|tag| tag.as_str()).filter(|tag| !tag.starts_with("{#"));
    let strings = tags.flat_map(|tag| string.captures_iter(tag));
    strings.filter_map(|found| Some(found.get(1).or(found.get(2))?.as_str().to_owned())).collect()
}

/// The text that a template writes, with a limit on its length.
#[derive(Debug, Default)]
pub(super) struct BoundedText(Vec<u8>);

impl BoundedText {
    pub(super) fn into_text(self) -> Result<String, String> {
        String::from_utf8(self.0).map_err(|error| error.to_string())
    }
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERED_BYTES {
            return Err(io::Error::other(format!("it writes more than {} MB", MAX_RENDERED_BYTES / 1_000_000)));
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `source` with plain line ends, and without line ends after a backslash in a string of a tag: Jinja2 reads both this
/// way.
fn with_tags_as_jinja(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    // The closing mark of the current tag, and the quote of the current string in the tag.
    let (mut tag_end, mut quote) = (None, None);
    let mut rest = source.as_str();
    while let Some(character) = rest.chars().next() {
        let mut taken = character.len_utf8();
        match (tag_end, quote) {
            (None, _) => {
                let tags = [("{{", "}}"), ("{%", "%}"), ("{#", "#}")];
                tag_end = tags.iter().find(|(start, _)| rest.starts_with(start)).map(|(_, end)| *end);
                taken = if tag_end.is_some() { 2 } else { taken };
            }
            (Some(end), None) if rest.starts_with(end) => (tag_end, taken) = (None, 2),
            (Some(end), None) if end != "#}" && matches!(character, '"' | '\'') => quote = Some(character),
            (Some(_), Some(_)) if rest.starts_with("\\\n") => {
                rest = &rest[2..];
                continue;
            }
            (Some(_), Some(_)) if character == '\\' => taken += rest.chars().nth(1).map_or(0, char::len_utf8),
            (Some(_), Some(open)) if character == open => quote = None,
            (Some(_), _) => {}
        }
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    out
}

/// Replaces `{% generation %}...{% endgeneration %}` with a condition that is always true, which keeps text and white
/// space.
fn without_generation_tags(source: &str) -> String {
    let Some(tag) = GENERATION_TAG.as_ref() else { return source.to_owned() };
    tag.replace_all(source, |captures: &regex::Captures<'_>| {
        let keyword = if captures.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {keyword} {}%}}", &captures[1], &captures[3])
    })
    .into_owned()
}

/// Writes a value as Python's `str()` would.
fn write_as_python(out: &mut Output<'_>, _state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    out.write_str(&str(value)?).map_err(|_| Error::from(ErrorKind::WriteFailure))
}

/// Python's `str()` of JSON-like values.
fn str(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value)?,
    })
}

/// Python's `repr()` of JSON-like values.
fn repr(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::None | ValueKind::Undefined => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.map(|item| repr(&item)).collect::<Result<Vec<_>, _>>()?;
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let item = |key: Value| Ok::<_, Error>(format!("{}: {}", repr(&key)?, repr(&value.get_item(&key)?)?));
            format!("{{{}}}", value.try_iter()?.map(item).collect::<Result<Vec<_>, _>>()?.join(", "))
        }
        ValueKind::Number if !value.is_integer() => float(f64::try_from(value.clone())?),
        _ => value.to_string(),
    })
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Characters that Python's `str.strip` treats as white space: four control characters more than Rust.
fn is_python_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// The methods of `minijinja_contrib::pycompat`, and some methods that it lacks.
fn python_method(state: &State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let argument = args.first().and_then(Value::as_str);
    if let (Some(text), [], "strip" | "lstrip" | "rstrip") = (value.as_str(), args, method) {
        let text = if method == "rstrip" { text } else { text.trim_start_matches(is_python_space) };
        return Ok(if method == "lstrip" { text } else { text.trim_end_matches(is_python_space) }.into());
    }
    let list = |parts: &[&str]| Ok(parts.iter().map(|part| Value::from(*part)).collect());
    match (value.as_str(), method, argument) {
        (Some(text), "removeprefix", Some(prefix)) => Ok(text.strip_prefix(prefix).unwrap_or(text).into()),
        (Some(text), "removesuffix", Some(suffix)) => Ok(text.strip_suffix(suffix).unwrap_or(text).into()),
        (Some(text), "partition", Some(separator)) if !separator.is_empty() => match text.split_once(separator) {
            Some((head, tail)) => list(&[head, separator, tail]),
            None => list(&[text, "", ""]),
        },
        (Some(text), "rpartition", Some(separator)) if !separator.is_empty() => match text.rsplit_once(separator) {
            Some((head, tail)) => list(&[head, separator, tail]),
            None => list(&["", "", text]),
        },
        (Some(text), "rsplit", Some(separator)) if !separator.is_empty() => {
            let limit = args.get(1).and_then(|limit| usize::try_from(limit.clone()).ok());
            let mut parts: Vec<&str> = match limit {
                Some(limit) => text.rsplitn(limit.saturating_add(1), separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            list(&parts)
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// `json.dumps(value, ensure_ascii=False, indent=..., separators=..., sort_keys=...)`, as in transformers: no HTML
/// escaping; on one line, items are separated by `", "` and `": "`.
#[expect(clippy::needless_pass_by_value, reason = "minijinja passes keyword arguments so")]
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, "cannot serialize to JSON").with_source(error)
    };
    let mut json = serde_json::to_value(value).map_err(failed)?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let mut separators = separators.unwrap_or_default().into_iter();
    let item = separators.next().unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.to_owned());
    let style = JsonStyle { item, key: separators.next().unwrap_or_else(|| ": ".to_owned()), indent };
    let mut out = String::new();
    style.write(&mut out, &json, 0);
    Ok(out.into())
}

/// How `json.dumps` separates values.
struct JsonStyle {
    item: String,
    key: String,
    /// Spaces per level; everything on one line where absent.
    indent: Option<usize>,
}

impl JsonStyle {
    fn write(&self, out: &mut String, json: &serde_json::Value, level: usize) {
        use serde_json::Value as Json;
        let (brackets, items): ([char; 2], Vec<(Option<&String>, &Json)>) = match json {
            Json::Array(items) => (['[', ']'], items.iter().map(|item| (None, item)).collect()),
            Json::Object(items) => (['{', '}'], items.iter().map(|(key, item)| (Some(key), item)).collect()),
            Json::Number(number) if number.is_f64() => {
                return out.push_str(&float(number.as_f64().unwrap_or_default()));
            }
            scalar => return out.push_str(&scalar.to_string()),
        };
        let new_line = |out: &mut String, level: usize| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * level));
            }
        };
        out.push(brackets[0]);
        for (index, (key, item)) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            new_line(out, level + 1);
            if let Some(key) = key {
                out.push_str(&Json::from(key.as_str()).to_string());
                out.push_str(&self.key);
            }
            self.write(out, item, level + 1);
        }
        if !items.is_empty() {
            new_line(out, level);
        }
        out.push(brackets[1]);
    }
}

/// Python writes `1e+16` and `1e-05` where Rust writes `1e16` and `1e-5`.
fn float(value: f64) -> String {
    let text = format!("{value:?}");
    let Some((number, exponent)) = text.split_once('e') else { return text };
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    format!("{number}e{sign}{digits:0>2}")
}

/// `datetime.strftime` in the C locale.
fn strftime(format: &str, now: OffsetDateTime) -> Result<String, Error> {
    let failed = |reason: String| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {format:?} is not supported: {reason}"))
    };
    if format.contains("%w") {
        return Err(failed("`%w` counts weekdays from another day here".to_owned()));
    }
    let items = parse_strftime_owned(format).map_err(|error| failed(error.to_string()))?;
    now.format(&items).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::context;

    fn now() -> OffsetDateTime {
        time::macros::datetime!(2024-07-05 09:03:07 UTC)
    }

    fn render(source: &str) -> String {
        let env = compile(source, now()).unwrap();
        let value = serde_json::json!({"b": "<é'>", "a": [1, 2.5, true, null]});
        env.get_template(TEMPLATE_NAME).unwrap().render(context! { value, text => "  a-b-c " }).unwrap()
    }

    #[test]
    fn json_is_written_as_python_does() {
        assert_eq!(render("{{ value | tojson }}"), r#"{"b": "<é'>", "a": [1, 2.5, true, null]}"#);
        assert_eq!(render("{{ value.a[:1] | tojson(indent=4) }}"), "[\n    1\n]");
        let nested = "{\n  \"a\": [],\n  \"b\": {\n    \"c\": {},\n    \"d\": [\n      2.5\n    ]\n  }\n}";
        assert_eq!(render("{{ {'a': [], 'b': {'c': {}, 'd': [2.5]}} | tojson(indent=2) }}"), nested);
        let numbers = "{{ [1.0, 1e16, 1e15, 2.5e-7, 0.0001, 0.00001, 1e100] | tojson }}";
        assert_eq!(render(numbers), "[1.0, 1e+16, 1000000000000000.0, 2.5e-07, 0.0001, 1e-05, 1e+100]");
        assert_eq!(
            render("{{ value | tojson(sort_keys=true, separators=(',', ':')) }}"),
            r#"{"a":[1,2.5,true,null],"b":"<é'>"}"#
        );
    }

    #[test]
    fn values_print_as_in_python() {
        assert_eq!(
            render("{{ true }} {{ none }} {{ value }} {{ missing }}|"),
            concat!("True None ", r#"{'b': "<é'>", 'a': [1, 2.5, True, None]} |"#)
        );
        assert_eq!(
            render("{{ 1e-5 }} {{ 0.00001 | string }} {{ [1e22] | string }} {{ true | string }}"),
            "1e-05 1e-05 [1e+22] True"
        );
    }

    #[test]
    fn the_date_is_formatted_as_strftime_does() {
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}"), "05 Jul 2024");
        assert_eq!(render("{{ strftime_now('%A %-d %B, %H:%M:%S %j%%') }}"), "Friday 5 July, 09:03:07 187%");
    }

    #[test]
    fn the_date_that_a_template_sees_is_known_and_the_time_is_not() {
        let seen = |source: &str| date(source, now());
        assert_eq!(seen("{{ messages }}{{ '%H' }}").unwrap(), "");
        let llama = "{% if strftime_now is defined %}{{ strftime_now(\"%d %b %Y\") }}{% endif %}{%set a = 1 %}";
        assert_eq!(seen(llama).unwrap(), "2024-07-05");
        assert_eq!(seen("{% set f = '%-H' %}{{ strftime_now(f) }}"), None);
        assert_eq!(seen("{{ strftime_now('%d') }}{{ strftime_now('%' ~ 'S') }}"), None);
    }

    #[test]
    fn the_strings_of_a_template_are_those_of_its_tags() {
        let source = "a 'text' {# 'comment' #}{{ 'one }} \\'x' ~ \"it's\" }}'text'{% if a == 'two' %}";
        let expected = ["it's", "one }} \\'x", "two"];
        let mut found: Vec<String> = strings(source).into_iter().collect();
        found.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn python_methods_loop_controls_and_reversed_slices_work() {
        assert_eq!(render("{{ text.strip().split('-')[-1] }}{{ text.strip().rsplit('-', 1)[0] }}"), "ca-b");
        assert_eq!(render("{{ 'ab'.removeprefix('a') }}{{ 'a.b.c'.partition('.')[2] }}"), "bb.c");
        assert_eq!(render("{% for x in [1,2,3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}"), "13");
        assert_eq!(render("{% for x in [1,2,3][::-1] %}{{ x }}{% endfor %}"), "321");
        assert_eq!(render("{% for k, v in value.items() %}{{ k }}{% endfor %}"), "ba");
    }

    #[test]
    fn generation_tags_leave_text_and_white_space_as_they_are() {
        let source = "a\n  {% generation %}\nb\n{%- endgeneration -%}\n c";
        assert_eq!(render(source), "a\nbc");
    }

    #[test]
    fn line_ends_are_read_as_jinja2_does() {
        assert_eq!(render("a\r\nb\rc"), "a\nb\nc");
        assert_eq!(render("{{ \"one\\\ntwo \\\"}}\\\" \\\\ \\n|\" }}"), "onetwo \"}}\" \\ \n|");
        assert_eq!(render("it's \\\n{# it's \\\n #}{{ 'x' }}\\\ny"), "it's \\\nx\\\ny");
    }

    #[test]
    fn a_template_cannot_run_for_ever_nor_read_files() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        let env = compile(endless, now()).unwrap();
        let error = env.get_template(TEMPLATE_NAME).unwrap().render(context! {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfFuel);
        let env = compile("{% include '/etc/passwd' %}", now()).unwrap();
        let error = env.get_template(TEMPLATE_NAME).unwrap().render(context! {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TemplateNotFound);
    }

    #[test]
    fn a_template_that_writes_without_end_is_stopped() {
        let text = "a frog ".repeat(2_000);
        let source =
            format!("{{% for a in range(9999) %}}{{% for b in range(99) %}}{text}{{% endfor %}}{{% endfor %}}");
        let env = compile(&source, now()).unwrap();
        let template = env.get_template(TEMPLATE_NAME).unwrap();
        let error = template.render_captured_to(context! {}, &mut BoundedText::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WriteFailure);
    }
}
