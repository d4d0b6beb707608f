//! Values, filters and methods as Jinja2 has them, where the engine differs or where they turn little into much.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, FormatStyle, State, Value, filters, format_filter, tests};

pub(super) mod bounds;

use bounds::{Measured, fits, refused};

/// Adds filters and tests. The engine's own write lists, dicts and `None` in its way.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.set_unknown_method_callback(method);
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| str(value));
    env.add_filter("upper", |text: &Value| Ok::<_, Error>(str(text)?.to_uppercase()));
    env.add_filter("lower", |text: &Value| Ok::<_, Error>(str(text)?.to_lowercase()));
    env.add_filter("trim", |text: &Value, chars: Option<&str>| {
        let text = str(text)?;
        Ok::<_, Error>(match chars {
            Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
            None => text.trim_matches(is_space).to_owned(),
        })
    });
    for name in ["escape", "e"] {
        env.add_filter(name, escaped);
    }
    for name in ["length", "count"] {
        env.add_filter(name, |value: &Value| match value.len() {
            None if value.is_undefined() => Ok(0),
            len => len.ok_or_else(|| refused(format!("cannot calculate length of value of type {}", value.kind()))),
        });
    }
    env.add_filter("replace", |text: &Value, from: &Value, to: &Value, count: Option<i64>, options: Kwargs| {
        let named: Option<i64> = options.get("count")?;
        options.assert_all_used()?;
        replaced(&str(text)?, &str(from)?, &str(to)?, count.or(named))
    });
    env.add_filter("join", |items: &Value, separator: Option<Value>| {
        joined(&separator.map_or(Ok(String::new()), |separator| str(&separator))?, items)
    });
    env.add_filter("indent", indented);
    env.add_filter("round", rounded);
    env.add_filter("title", |text: &Value| Ok::<_, Error>(title_of_words(&str(text)?)));
    env.add_filter("capitalize", |text: &Value| Ok::<_, Error>(capitalized(&str(text)?)));
    env.add_filter("wordcount", |text: &Value| {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        Ok::<_, Error>(str(text)?.split(|c| !is_word(c)).filter(|word| !word.is_empty()).count())
    });
    env.add_filter("format", |state: &State<'_, '_>, text: &Value, args: Rest<Value>| {
        format_fits(text, &args)?;
        filters::format(state, text, args)
    });
    env.add_filter("batch", |state: &State<'_, '_>, items: Value, count: usize, fill: Option<Value>| {
        fits(count.saturating_mul(24))?;
        filters::batch(state, items, count, fill)
    });
    env.add_filter("slice", |state: &State<'_, '_>, items: Value, count: usize, fill: Option<Value>| {
        fits(count.saturating_mul(48))?;
        filters::slice(state, items, count, fill)
    });
    env.add_filter("items", |dict: &Value| tuples(&filters::items(dict)?));
    env.add_filter("dictsort", |dict: &Value, options: Kwargs| tuples(&filters::dictsort(dict, options)?));
    env.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_test("iterable", |value: &Value| value.is_undefined() || !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    // Behind `select` it is called once for each item.
    env.add_test("in", |state: &State<'_, '_>, value: &Value, other: &Value| {
        bounds::in_time()?;
        tests::is_in(state, value, other)
    });
}

/// A text as it stands in HTML.
fn escaped(value: &Value) -> Result<String, Error> {
    let text = str(value)?;
    fits(text.len().saturating_mul(2))?;
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            other => out.push(other),
        }
    }
    Ok(out)
}

/// Python's `str()` of JSON-like values.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value)?,
    })
}

/// Python's `repr()` of JSON-like values.
pub(super) fn repr(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::None | ValueKind::Undefined => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.map(|item| repr(&item)).collect::<Result<Vec<_>, _>>()?;
            match (value.downcast_object_ref::<Measured>().is_some_and(Measured::is_tuple), items.len()) {
                (true, 1) => format!("({},)", items[0]),
                (true, _) => format!("({})", items.join(", ")),
                (false, _) => format!("[{}]", items.join(", ")),
            }
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

/// Python writes `1e+16` and `1e-05` where Rust writes `1e16` and `1e-5`.
fn float(value: f64) -> String {
    let text = format!("{value:?}");
    let Some((number, exponent)) = text.split_once('e') else { return text };
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    format!("{number}e{sign}{digits:0>2}")
}

/// Characters that Python's `str.strip` treats as white space: four control characters more than Rust.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// `%`: of a text, it is put together as by `format`; of numbers, the remainder has the sign of the divisor.
pub(super) fn remainder(state: &State<'_, '_>, value: &Value, by: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        let is_tuple = by.downcast_object_ref::<Measured>().is_some_and(Measured::is_tuple);
        let args: Vec<Value> = if is_tuple { by.try_iter()?.collect() } else { vec![by.clone()] };
        format_fits(value, &args)?;
        return filters::format(state, value, Rest(args));
    }
    of_numbers("%", value, by, |value, by| (value % by + by) % by, |value, by| value - by * (value / by).floor())
}

/// `//`, which rounds towards minus infinity.
pub(super) fn floor_division(value: &Value, by: &Value) -> Result<Value, Error> {
    let whole = |value: i128, by: i128| value / by - i128::from(value % by != 0 && (value < 0) != (by < 0));
    of_numbers("//", value, by, whole, |value, by| (value / by).floor())
}

fn of_numbers(
    operator: &str,
    value: &Value,
    by: &Value,
    of_integers: impl Fn(i128, i128) -> i128,
    of_floats: impl Fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let range = -(1_i128 << 100)..1_i128 << 100;
    if value.is_integer()
        && by.is_integer()
        && let (Ok(value), Ok(by)) = (i128::try_from(value.clone()), i128::try_from(by.clone()))
        && [value, by].iter().all(|number| range.contains(number))
        && by != 0
    {
        let result = of_integers(value, by);
        return Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    match (f64::try_from(value.clone()), f64::try_from(by.clone())) {
        (Ok(value), Ok(by)) if by != 0.0 => Ok(of_floats(value, by).into()),
        _ => Err(refused(format!("cannot compute {} {operator} {}", value.kind(), by.kind()))),
    }
}

/// Refuses a format that pads to a great width.
fn format_fits(format: &Value, args: &[Value]) -> Result<(), Error> {
    let text = format.as_str().unwrap_or_default();
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let mut width = numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).max().unwrap_or(0);
    let mut of_args = 0;
    for arg in args {
        of_args += str(arg)?.len();
        // A width of `*` is an argument.
        if let Some(number) = arg.as_usize().filter(|_| text.contains('*')) {
            width = width.max(number);
        }
    }
    let num_fields = text.matches(['%', '{']).count();
    fits(text.len().saturating_add(num_fields.saturating_mul(width.saturating_add(of_args))))
}

fn replaced(text: &str, from: &str, to: &str, count: Option<i64>) -> Result<String, Error> {
    let limit = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let count = text.matches(from).take(limit).count();
    fits(text.len().saturating_add(count.saturating_mul(to.len())))?;
    Ok(text.replacen(from, to, count))
}

fn joined(separator: &str, items: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for (index, item) in items.try_iter()?.enumerate() {
        if index > 0 {
            out.push_str(separator);
        }
        out.push_str(&str(&item)?);
        if out.len() > bounds::MAX_VALUE_BYTES {
            break;
        }
    }
    fits(out.len())?;
    Ok(out)
}

/// Python's `str.splitlines`, with the ends of the lines or without.
fn lines(text: &str, with_ends: bool) -> Vec<&str> {
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

/// Jinja2's `indent`.
#[expect(clippy::needless_pass_by_value, reason = "minijinja passes keyword arguments so")]
fn indented(
    text: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = width.or(options.get("width")?).unwrap_or_else(|| Value::from(4));
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let text = str(text)? + "\n";
    let lines = lines(&text, false);
    let width_bytes = match width.as_str() {
        Some(indent) => indent.len(),
        None => usize::try_from(width.clone())?,
    };
    fits(lines.len().saturating_mul(width_bytes).saturating_add(text.len()))?;
    let indent = width.as_str().map_or_else(|| " ".repeat(width_bytes), ToOwned::to_owned);
    let mut out = String::new();
    for (index, line) in lines.into_iter().enumerate() {
        out.push_str(if index > 0 { "\n" } else { "" });
        let is_indented = if index == 0 { first } else { blank || !line.is_empty() };
        out.push_str(if is_indented { &indent } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// Python's `round`, halves to even, or up or down as `method` says.
#[expect(clippy::needless_pass_by_value, reason = "minijinja passes keyword arguments so")]
fn rounded(value: &Value, precision: Option<i32>, method: Option<&str>, options: Kwargs) -> Result<Value, Error> {
    let precision = precision.or(options.get("precision")?).unwrap_or(0);
    let method = method.or(options.get("method")?).unwrap_or("common");
    if value.is_integer() && method == "common" && precision >= 0 {
        return Ok(value.clone());
    }
    let (number, factor) = (f64::try_from(value.clone())?, 10_f64.powi(precision.clamp(-300, 300)));
    let rounded = match (method, usize::try_from(precision)) {
        ("ceil", _) => (number * factor).ceil() / factor,
        ("floor", _) => (number * factor).floor() / factor,
        // The decimal digits of the number itself are rounded, not those of a product.
        ("common", Ok(digits)) => format!("{number:.*}", digits.min(300)).parse().unwrap_or(number),
        ("common", Err(_)) => (number * factor).round_ties_even() / factor,
        _ => return Err(refused("the method of `round` is \"common\", \"ceil\" or \"floor\"")),
    };
    options.assert_all_used()?;
    Ok(rounded.into())
}

/// Jinja2's filter: words begin behind white space, `-`, and brackets that open.
fn title_of_words(text: &str) -> String {
    let starts_word = |c: char| c == '-' || is_space(c) || matches!(c, '(' | '{' | '[' | '<');
    let mut is_first = true;
    let mut out = String::new();
    for character in text.chars() {
        if is_first {
            out.extend(character.to_uppercase());
        } else {
            out.extend(character.to_lowercase());
        }
        is_first = starts_word(character);
    }
    out
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

fn capitalized(text: &str) -> String {
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

/// A list of pairs as a list of tuples.
fn tuples(pairs: &Value) -> Result<Value, Error> {
    let pairs = pairs.try_iter()?.map(|pair| Measured::of(pair, true));
    Ok(Value::from(pairs.collect::<Result<Vec<_>, _>>()?))
}

/// Python's methods: those of `minijinja_contrib::pycompat`, and others.
fn method(state: &State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let others = || minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args);
    let Some(text) = value.as_str() else {
        return if name == "items" && args.is_empty() { tuples(&others()?) } else { others() };
    };
    let argument = args.first().and_then(Value::as_str);
    let number = |at: usize| args.get(at).and_then(|number| i64::try_from(number.clone()).ok());
    let width = || args.first().and_then(|width| i64::try_from(width.clone()).ok());
    let tuple = |parts: [&str; 3]| Measured::of(parts.iter().map(|part| Value::from(*part)).collect(), true);
    let list = |parts: Vec<&str>| parts.into_iter().map(Value::from).collect::<Value>();
    let place = |at: Option<usize>| at.map_or(-1, |at| text[..at].chars().count().try_into().unwrap_or(i64::MAX));
    Ok(match (name, argument, args.len()) {
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
        ("rsplit", Some(separator), 1 | 2) if !separator.is_empty() => {
            let limit = number(1).and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
            let mut parts: Vec<&str> = text.rsplitn(limit.saturating_add(1), separator).collect();
            parts.reverse();
            list(parts)
        }
        ("splitlines", None, 0) => list(lines(text, false)),
        ("splitlines", None, 1) => list(lines(text, args[0].is_true())),
        ("replace", Some(from), 2 | 3) if args[1].as_str().is_some() => {
            replaced(text, from, args[1].as_str().unwrap_or_default(), number(2))?.into()
        }
        ("join", _, 1) => joined(text, &args[0])?.into(),
        ("format", ..) => {
            format_fits(value, args)?;
            format_filter(FormatStyle::StrFormat, text, args)?.into()
        }
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
            let num_zeros = missing(text, width());
            fits(num_zeros.saturating_add(text.len()))?;
            format!("{sign}{}{digits}", "0".repeat(num_zeros)).into()
        }
        ("ljust" | "rjust" | "center", None, 1 | 2) => {
            let fill = args.get(1).and_then(Value::as_str).unwrap_or(" ");
            let all = missing(text, width());
            fits(all.saturating_mul(fill.len()).saturating_add(text.len()))?;
            let left = match name {
                "ljust" => 0,
                "rjust" => all,
                // As in CPython, the odd one is on the left if the width is odd.
                _ => all / 2 + (all & 1 & usize::from(width().is_some_and(|width| width % 2 != 0))),
            };
            format!("{}{text}{}", fill.repeat(left), fill.repeat(all - left)).into()
        }
        _ => return others(),
    })
}

/// How many characters a text lacks to a width.
fn missing(text: &str, width: Option<i64>) -> usize {
    let width = width.and_then(|width| usize::try_from(width).ok()).unwrap_or(0);
    width.saturating_sub(text.chars().count())
}

/// `json.dumps(value, ensure_ascii=False, indent=..., separators=..., sort_keys=...)`, as in transformers: no HTML
/// escaping; on one line, items are separated by `", "` and `": "`.
#[expect(clippy::needless_pass_by_value, reason = "minijinja passes keyword arguments so")]
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
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
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let is_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json =
        serde_json::to_value(value).map_err(|error| refused("cannot serialize to JSON").with_source(error))?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let mut separators = separators.unwrap_or_default().into_iter();
    let item = separators.next().unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.to_owned());
    let key = separators.next().unwrap_or_else(|| ": ".to_owned());
    let style = JsonStyle { item, key, indent, is_ascii: is_ascii == Some(true) };
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
