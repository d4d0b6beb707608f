//! Values, filters and methods as Jinja2 has them, where the engine differs or where they turn little into much.

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, State, Value, filters};

pub(super) mod bounds;
mod filter;
mod json;
mod method;
mod object;

use bounds::{Measured, fits, refused};

/// Adds filters, tests, functions and methods. The engine's own write lists, dicts and `None` in its way.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.set_unknown_method_callback(method::call);
    env.add_filter("tojson", json::tojson);
    filter::add_to(env);
    object::add_to(env);
}

/// What a function, a filter or a method is given, by the names of its parameters.
///
/// # Errors
/// More than it has parameters, or another name.
fn arguments<const N: usize>(names: [&str; N], given: &[Value]) -> Result<[Option<Value>; N], Error> {
    let (options, given) = match given.split_last() {
        Some((last, given)) if last.is_kwargs() => (Some(last), given),
        _ => (None, given),
    };
    let mut found = [const { None }; N];
    let unknown = || refused(format!("it takes {N} arguments at most: {}", names.join(", ")));
    for (index, value) in given.iter().enumerate() {
        *found.get_mut(index).ok_or_else(unknown)? = Some(value.clone());
    }
    for name in options.map(Value::try_iter).transpose()?.into_iter().flatten() {
        let index = names.iter().position(|known| name.as_str() == Some(known)).ok_or_else(unknown)?;
        found[index] = options.map(|options| options.get_item(&name)).transpose()?;
    }
    Ok(found)
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
        ValueKind::None => "None".to_owned(),
        ValueKind::Undefined => "Undefined".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.map(|item| repr(&item)).collect::<Result<Vec<_>, _>>()?;
            match (is_tuple(value), items.len()) {
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
            c if is_printable(c) => out.push(c),
            c => out.push_str(&match u32::from(c) {
                code @ ..=0xff => format!("\\x{code:02x}"),
                code @ ..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(quote);
    out
}

/// Whether Python writes a character of a list's text as it is.
fn is_printable(character: char) -> bool {
    // Behind another one, as marks on letters are.
    matches!(character, ' '..='~') || !character.is_ascii() && format!("a{character}").escape_debug().count() == 2
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

fn is_tuple(value: &Value) -> bool {
    value.downcast_object_ref::<Measured>().is_some_and(Measured::is_tuple)
}

/// `~`.
pub(super) fn concatenation(left: &Value, right: &Value) -> Result<String, Error> {
    let text = str(left)? + &str(right)?;
    fits(text.len())?;
    Ok(text)
}

/// `%`: of a text, it is put together as by `format`; of numbers, the remainder has the sign of the divisor.
pub(super) fn remainder(state: &State<'_, '_>, value: &Value, by: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        let args: Vec<Value> = if is_tuple(by) { by.try_iter()?.collect() } else { vec![by.clone()] };
        return filters::format(state, value, Rest(format_args(value, &args)?));
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

/// What a format is given, each a value that prints as in Python.
///
/// # Errors
/// A format that pads to a great width.
fn format_args(format: &Value, args: &[Value]) -> Result<Vec<Value>, Error> {
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
    fits(text.len().saturating_add(num_fields.saturating_mul(width.saturating_add(of_args))))?;
    args.iter().map(|arg| bounds::held(arg.clone())).collect()
}

/// The keys and values of a dict.
pub(super) fn pairs(dict: &Value) -> Result<Value, Error> {
    tuples(&filters::items(dict)?)
}

/// A list of pairs as a list of tuples.
pub(super) fn tuples(pairs: &Value) -> Result<Value, Error> {
    let pairs = pairs.try_iter()?.map(|pair| Measured::of(pair, true));
    Ok(Value::from(pairs.collect::<Result<Vec<_>, _>>()?))
}
