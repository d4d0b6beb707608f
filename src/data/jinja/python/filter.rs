//! Filters and tests.
#![expect(clippy::needless_pass_by_value, reason = "the engine passes arguments so")]

use std::cmp::Ordering;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, State, Value, filters, tests};

use super::bounds::{self, Measured, fits, refused};
use super::method::{capitalized, lines, padded, replaced};
use super::{arguments, format_args, is_space, pairs, str, tuples};

pub(super) fn add_to(env: &mut Environment<'_>) {
    // Jinja2 has none of these.
    for name in ["bool", "chain", "zip", "split", "lines"] {
        env.remove_filter(name);
    }
    for name in ["startingwith", "endingwith"] {
        env.remove_test(name);
    }
    add_filters_of_texts(env);
    add_filters_of_items(env);
    add_tests(env);
}

fn add_filters_of_texts(env: &mut Environment<'_>) {
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
    for name in ["escape", "e", "forceescape"] {
        env.add_filter(name, escaped);
    }
    for name in ["length", "count"] {
        env.add_filter(name, |value: &Value| match value.len() {
            None if value.is_undefined() => Ok(0),
            len => len.ok_or_else(|| refused(format!("cannot calculate length of value of type {}", value.kind()))),
        });
    }
    env.add_filter("replace", |text: &Value, from: &Value, to: &Value, given: Rest<Value>| {
        let [count] = arguments(["count"], &given)?;
        replaced(&str(text)?, &str(from)?, &str(to)?, count.and_then(|count| i64::try_from(count).ok()))
    });
    env.add_filter("join", joined);
    env.add_filter("indent", indented);
    env.add_filter("round", rounded);
    env.add_filter("int", integer);
    env.add_filter("float", float);
    env.add_filter("title", |text: &Value| Ok::<_, Error>(title_of_words(&str(text)?)));
    env.add_filter("capitalize", |text: &Value| Ok::<_, Error>(capitalized(&str(text)?)));
    env.add_filter("center", |text: &Value, width: Option<i64>| {
        padded("center", &str(text)?, width.unwrap_or(80), " ")
    });
    env.add_filter("truncate", truncated);
    env.add_filter("wordcount", |text: &Value| {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        Ok::<_, Error>(str(text)?.split(|c| !is_word(c)).filter(|word| !word.is_empty()).count())
    });
    env.add_filter("format", |state: &State<'_, '_>, text: &Value, args: Rest<Value>| {
        filters::format(state, text, Rest(format_args(text, &args)?))
    });
}

fn add_filters_of_items(env: &mut Environment<'_>) {
    env.add_filter("batch", |state: &State<'_, '_>, items: Value, count: usize, fill: Option<Value>| {
        fits(count.saturating_mul(24))?;
        filters::batch(state, items, count, fill)
    });
    env.add_filter("slice", |state: &State<'_, '_>, items: Value, count: usize, fill: Option<Value>| {
        fits(count.saturating_mul(48))?;
        filters::slice(state, items, count, fill)
    });
    env.add_filter("list", |state: &State<'_, '_>, items: Value| {
        bounds::refuse_none(&items)?;
        filters::list(state, items)
    });
    env.add_filter("sum", |state: &State<'_, '_>, items: &Value, given: Rest<Value>| {
        let [attribute, start] = arguments(["attribute", "start"], &given)?;
        let items = items.try_iter()?.map(|item| by_attribute(&item, attribute.as_ref()));
        filters::sum(state, start.map(Ok).into_iter().chain(items).collect::<Result<Vec<_>, _>>()?.into())
    });
    env.add_filter("max", |items: &Value, given: Rest<Value>| extreme(items, &given, Ordering::Greater));
    env.add_filter("min", |items: &Value, given: Rest<Value>| extreme(items, &given, Ordering::Less));
    env.add_filter("sort", |state: &State<'_, '_>, items: Value, given: Rest<Value>| {
        filters::sort(state, items, named(["reverse", "case_sensitive", "attribute"], &given)?)
    });
    env.add_filter("dictsort", |dict: &Value, given: Rest<Value>| {
        tuples(&filters::dictsort(dict, named(["case_sensitive", "by", "reverse"], &given)?)?)
    });
    env.add_filter("groupby", |items: Value, attribute: Option<&str>, options: Kwargs| {
        let groups = filters::groupby(items, attribute, options)?.try_iter()?.map(|group| Measured::of_group(&group));
        Ok::<_, Error>(Value::from(groups.collect::<Result<Vec<_>, _>>()?))
    });
    env.add_filter(
        "items",
        |dict: &Value| {
            if dict.is_undefined() { Ok(Value::from(Vec::<Value>::new())) } else { pairs(dict) }
        },
    );
    // An attribute of Python's, which values of templates have none of, and no key.
    env.add_filter(
        "attr",
        |value: &Value, name: &Value| {
            if bounds::is_live(value) { value.get_item(name) } else { Ok(Value::UNDEFINED) }
        },
    );
}

fn add_tests(env: &mut Environment<'_>) {
    env.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_test("mapping", |value: &Value| value.kind() == ValueKind::Map && !bounds::is_live(value));
    env.add_test("iterable", |value: &Value| value.is_undefined() || !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain || bounds::is_macro(value));
    // Behind `select` it is called once for each item.
    env.add_test("in", |state: &State<'_, '_>, value: &Value, other: &Value| {
        bounds::in_time()?;
        tests::is_in(state, value, other)
    });
}

/// Arguments of one of the engine's filters, which takes them by name.
fn named<const N: usize>(names: [&str; N], given: &[Value]) -> Result<Kwargs, Error> {
    let given = arguments(names, given)?;
    Ok(names.into_iter().zip(given).filter_map(|(name, value)| Some((name, value?))).collect())
}

/// What `attribute` of filters names in an item: keys or numbers with dots between them.
fn by_attribute(item: &Value, attribute: Option<&Value>) -> Result<Value, Error> {
    let Some(attribute) = attribute.filter(|attribute| !attribute.is_none()) else { return Ok(item.clone()) };
    str(attribute)?.split('.').try_fold(item.clone(), |item, part| match part.parse::<usize>() {
        Ok(index) => item.get_item(&index.into()),
        Err(_) => item.get_attr(part),
    })
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

fn joined(items: &Value, given: Rest<Value>) -> Result<String, Error> {
    let [separator, attribute] = arguments(["d", "attribute"], &given)?;
    let separator = separator.map_or(Ok(String::new()), |separator| str(&separator))?;
    let mut out = String::new();
    for (index, item) in items.try_iter()?.enumerate() {
        if index > 0 {
            out.push_str(&separator);
        }
        out.push_str(&str(&by_attribute(&item, attribute.as_ref())?)?);
        if out.len() > bounds::MAX_VALUE_BYTES {
            break;
        }
    }
    fits(out.len())?;
    Ok(out)
}

/// The largest or the smallest of some items, the first of several.
fn extreme(items: &Value, given: &[Value], wanted: Ordering) -> Result<Value, Error> {
    let [case_sensitive, attribute] = arguments(["case_sensitive", "attribute"], given)?;
    let mut best: Option<(Value, Value)> = None;
    for item in items.try_iter()? {
        let mut key = by_attribute(&item, attribute.as_ref())?;
        if let Some(text) = key.as_str().filter(|_| !case_sensitive.as_ref().is_some_and(Value::is_true)) {
            key = text.to_lowercase().into();
        }
        if best.as_ref().is_none_or(|(other, _)| key.cmp(other) == wanted) {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}

/// A number, also of a text that says one; else `default`.
fn float(value: &Value, given: Rest<Value>) -> Result<Value, Error> {
    let [default] = arguments(["default"], &given)?;
    Ok(number(value).map_or_else(|| default.unwrap_or_else(|| 0.0.into()), Value::from))
}

/// A whole number, also of a text that says a number, in its `base`; else `default`.
fn integer(value: &Value, given: Rest<Value>) -> Result<Value, Error> {
    let [default, base] = arguments(["default", "base"], &given)?;
    let base = base.map_or(Ok(10), u32::try_from)?;
    let text = value.as_str().map(|text| text.trim_matches(is_space).replace('_', "").to_lowercase());
    let in_base = text.and_then(|text| {
        let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
        let prefix =
            [(16, "0x"), (8, "0o"), (2, "0b")].into_iter().find(|(of, _)| *of == base).map_or("", |(_, of)| of);
        let digits = digits.strip_prefix(prefix).unwrap_or(digits);
        (2..=36).contains(&base).then(|| i128::from_str_radix(&format!("{sign}{digits}"), base).ok()).flatten()
    });
    if value.is_integer() {
        return Ok(value.clone());
    }
    #[expect(clippy::cast_possible_truncation, reason = "a fraction is cut off, and larger numbers are refused")]
    let whole = |number: f64| (number.abs() < 1e30).then(|| number.trunc() as i128);
    let whole = in_base.or_else(|| whole(number(value)?));
    Ok(whole.map_or_else(
        || default.unwrap_or_else(|| 0.into()),
        |whole| i64::try_from(whole).map_or_else(|_| whole.into(), Value::from),
    ))
}

fn number(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::String => value.as_str()?.trim_matches(is_space).replace('_', "").parse().ok(),
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        _ => f64::try_from(value.clone()).ok(),
    }
}

/// A text that is cut behind a word where it is more than `leeway` longer than `length`.
fn truncated(text: &Value, given: Rest<Value>) -> Result<String, Error> {
    let text = str(text)?;
    let [length, kills_words, end, leeway] = arguments(["length", "killwords", "end", "leeway"], &given)?;
    let (length, leeway) = (length.map_or(Ok(255), usize::try_from)?, leeway.map_or(Ok(5), usize::try_from)?);
    let end = end.map_or(Ok("...".to_owned()), |end| str(&end))?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept = length.checked_sub(end.chars().count()).ok_or_else(|| refused("the end is longer than the text"))?;
    let kept = text.char_indices().nth(kept).map_or(&*text, |(at, _)| &text[..at]);
    let words = kept.rsplit_once(' ').map_or(kept, |(words, _)| words);
    Ok(if kills_words.is_some_and(|kills| kills.is_true()) { kept } else { words }.to_owned() + &end)
}

/// Jinja2's `indent`.
fn indented(text: &Value, given: Rest<Value>) -> Result<String, Error> {
    let [width, first, blank] = arguments(["width", "first", "blank"], &given)?;
    let is_set = |flag: Option<Value>| flag.is_some_and(|flag| flag.is_true());
    let (width, first, blank) = (width.unwrap_or_else(|| 4.into()), is_set(first), is_set(blank));
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
fn rounded(value: &Value, given: Rest<Value>) -> Result<Value, Error> {
    let [precision, method] = arguments(["precision", "method"], &given)?;
    let precision = precision.map_or(Ok(0), i32::try_from)?;
    let method = method.map_or(Ok("common".to_owned()), |method| str(&method))?;
    let method = method.as_str();
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
