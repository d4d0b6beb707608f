//! Jinja as Hugging Face's chat templates use it.

use std::fmt::Write as _;
use std::io;
use std::sync::LazyLock;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use regex::Regex;
use serde::Serialize;
use time::OffsetDateTime;

mod output;

pub(super) use output::BoundedText;

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

/// The dates that a template can see: the results of its calls of `strftime_now`. `None` where a call's format is not a
/// literal string, so that the results cannot be known in advance.
pub(super) fn dates(source: &str, now: OffsetDateTime) -> Option<Vec<String>> {
    let (questions, calls) = (DATE_QUESTION.as_ref()?, DATE_CALL.as_ref()?);
    let formats: Vec<&str> = calls
        .captures_iter(source)
        .filter_map(|call| call.get(1).or(call.get(2)).map(|format| format.as_str()))
        .collect();
    let num_other = source.matches("strftime_now").count() - formats.len() - questions.find_iter(source).count();
    if num_other > 0 {
        return None;
    }
    formats.into_iter().map(|format| strftime(format, now).ok()).collect()
}

/// The test whether `strftime_now` is defined.
static DATE_QUESTION: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"strftime_now\s+is\s+(?:not\s+)?defined").ok());

/// Calls of `strftime_now` with a literal format.
static DATE_CALL: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r#"strftime_now\s*\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)"#).ok());

/// Name under which [`compile`] keeps its template.
pub(super) const TEMPLATE_NAME: &str = "chat_template";

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
    let mut text = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => text.push_str(value.as_str().unwrap_or_default()),
        _ => push_repr(&mut text, value)?,
    }
    out.write_str(&text).map_err(|_| Error::from(ErrorKind::WriteFailure))
}

/// Python's `repr()` of JSON-like values.
fn push_repr(out: &mut String, value: &Value) -> Result<(), Error> {
    let separated = |out: &mut String, first: &mut bool| {
        if !std::mem::take(first) {
            out.push_str(", ");
        }
    };
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
            out.push(quote);
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
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut first = true;
            for item in value.try_iter()? {
                separated(out, &mut first);
                push_repr(out, &item)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            let mut first = true;
            for key in value.try_iter()? {
                separated(out, &mut first);
                push_repr(out, &key)?;
                out.push_str(": ");
                push_repr(out, &value.get_item(&key)?)?;
            }
            out.push('}');
        }
        _ => write!(out, "{value}").map_err(|_| Error::from(ErrorKind::WriteFailure))?,
    }
    Ok(())
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
    let separator = |index: usize, default: &str| {
        separators.as_ref().and_then(|given| given.get(index)).map_or(default, String::as_str).as_bytes().to_vec()
    };
    let item = separator(0, if indent.is_some() { "," } else { ", " });
    let formatter = PythonFormatter { item, key: separator(1, ": "), indent, level: 0, has_value: false };
    let mut out = Vec::new();
    json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter)).map_err(failed)?;
    String::from_utf8(out).map(Value::from).map_err(|_| Error::from(ErrorKind::WriteFailure))
}

/// JSON as Python's `json.dumps` writes it.
struct PythonFormatter {
    item: Vec<u8>,
    key: Vec<u8>,
    /// Spaces per level; everything on one line where absent.
    indent: Option<usize>,
    level: usize,
    has_value: bool,
}

impl PythonFormatter {
    fn new_line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        self.indent.map_or(Ok(()), |indent| write!(writer, "\n{:1$}", "", indent * self.level))
    }

    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.has_value = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if self.has_value {
            self.new_line(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(&self.item)?;
        }
        self.has_value = true;
        self.new_line(writer)
    }
}

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(&self.key)
    }

    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        // Python writes `1e+16` and `1e-05` where Rust writes `1e16` and `1e-5`.
        let text = format!("{value:?}");
        let Some((number, exponent)) = text.split_once('e') else { return writer.write_all(text.as_bytes()) };
        let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
        write!(writer, "{number}e{sign}{digits:0>2}")
    }
}

/// `datetime.strftime` in the C locale.
fn strftime(format: &str, now: OffsetDateTime) -> Result<String, Error> {
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next();
        let padded = directive != Some('-');
        if !padded {
            directive = characters.next();
        }
        let mut number = |value: u32, width: usize| {
            if padded { write!(out, "{value:0width$}") } else { write!(out, "{value}") }
        };
        let hour_of_12 = |hour: u8| (hour + 11) % 12 + 1;
        let (month, weekday) = (now.month().to_string(), now.weekday().to_string());
        let written = match directive {
            Some('Y') => number(u32::try_from(now.year()).unwrap_or(0), 4),
            Some('y') => number(u32::try_from(now.year().rem_euclid(100)).unwrap_or(0), 2),
            Some('m') => number(u8::from(now.month()).into(), 2),
            Some('d') => number(now.day().into(), 2),
            Some('j') => number(now.ordinal().into(), 3),
            Some('H') => number(now.hour().into(), 2),
            Some('I') => number(hour_of_12(now.hour()).into(), 2),
            Some('M') => number(now.minute().into(), 2),
            Some('S') => number(now.second().into(), 2),
            Some('B') => write!(out, "{month}"),
            Some('b' | 'h') => write!(out, "{month:.3}"),
            Some('A') => write!(out, "{weekday}"),
            Some('a') => write!(out, "{weekday:.3}"),
            Some('p') => write!(out, "{}", if now.hour() < 12 { "AM" } else { "PM" }),
            Some('F') => write!(out, "{:04}-{:02}-{:02}", now.year(), u8::from(now.month()), now.day()),
            Some('T') => write!(out, "{:02}:{:02}:{:02}", now.hour(), now.minute(), now.second()),
            Some('%') => write!(out, "%"),
            other => {
                let other = other.map_or_else(String::new, String::from);
                let message = format!("strftime_now: `%{other}` in {format:?} is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        written.map_err(|_| Error::from(ErrorKind::WriteFailure))?;
    }
    Ok(out)
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
    }

    #[test]
    fn the_date_is_formatted_as_strftime_does() {
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}"), "05 Jul 2024");
        assert_eq!(render("{{ strftime_now('%A %-d %B, %H:%M:%S %j%%') }}"), "Friday 5 July, 09:03:07 187%");
    }

    #[test]
    fn what_a_template_sees_of_the_date_is_known_or_said_to_be_unknown() {
        let seen = |source: &str| dates(source, now());
        assert_eq!(seen("{{ messages }}").unwrap(), Vec::<String>::new());
        let llama = "{% if strftime_now is defined %}{{ strftime_now(\"%d %b %Y\") }}{% endif %}{{strftime_now('%Y')}}";
        assert_eq!(seen(llama).unwrap(), ["05 Jul 2024", "2024"]);
        assert_eq!(seen("{% set f = '%H' %}{{ strftime_now(f) }}"), None);
        assert_eq!(seen("{% set now = strftime_now %}{{ now('%H') }}"), None);
        assert_eq!(seen("{{ strftime_now('%d') }}{{ strftime_now('%' ~ 'S') }}"), None);
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
}
