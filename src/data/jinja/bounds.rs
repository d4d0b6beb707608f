//! Filters that make much of a number in a template: the number is held down.
//!
//! Fuel counts steps, and one of these filters is one step whatever it makes.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

/// Largest width, indent or count: no conversation needs as much.
const MAX_NUMBER: u16 = 10_000;

/// Puts bounds before minijinja's own filters.
pub(super) fn add(env: &mut Environment<'static>) {
    env.add_filter("unbounded batch", filters::batch);
    env.add_filter("unbounded format", filters::format);
    env.add_filter("unbounded indent", filters::indent);
    env.add_filter("unbounded round", filters::round);
    env.add_filter("unbounded slice", filters::slice);
    for name in ["batch", "format", "indent", "round", "slice"] {
        env.add_filter(name, move |state: &State<'_, '_>, args: Rest<Value>| -> Result<Value, Error> {
            if name == "format" {
                // What follows is data, which may be any number.
                check_percent(args.first().and_then(Value::as_str).unwrap_or_default())?;
            } else {
                args.iter().skip(1).try_for_each(check)?;
            }
            state.apply_filter(&format!("unbounded {name}"), &args)
        });
    }
}

/// Refuses a number above [`MAX_NUMBER`], also among keyword arguments.
pub(super) fn check(value: &Value) -> Result<(), Error> {
    if value.is_kwargs() {
        let arguments = Kwargs::try_from(value.clone())?;
        return arguments.args().try_for_each(|name| check(&arguments.peek(name)?));
    }
    let is_too_large = value.kind() == ValueKind::Number
        && f64::try_from(value.clone()).is_ok_and(|number| number > f64::from(MAX_NUMBER));
    if is_too_large { Err(too_large(value)) } else { Ok(()) }
}

/// Refuses widths and precisions above [`MAX_NUMBER`], and those that are taken from the arguments, in a text of
/// Python's `%`.
fn check_percent(text: &str) -> Result<(), Error> {
    text.split('%').skip(1).try_for_each(|conversion| {
        let key = conversion.starts_with('(').then(|| conversion.split_once(')')).flatten();
        let specification = key.map_or(conversion, |(_, rest)| rest);
        let end = specification.find(|c: char| !(c.is_ascii_digit() || " #+-.*".contains(c)));
        check_specification(&specification[..end.unwrap_or(specification.len())])
    })
}

/// As [`check_percent`], in a text of Python's `str.format`.
pub(super) fn check_braces(text: &str) -> Result<(), Error> {
    let text = text.replace("{{", "").replace("}}", "");
    text.split('{').skip(1).try_for_each(|field| {
        // A field without an end has another one in it.
        let Some((field, _)) = field.split_once('}') else { return Err(too_large(&"a width in braces".into())) };
        field.split_once(':').map_or(Ok(()), |(_, specification)| check_specification(specification))
    })
}

fn check_specification(specification: &str) -> Result<(), Error> {
    let mut numbers = specification.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let is_small = |digits: &str| digits.parse::<u16>().is_ok_and(|number| number <= MAX_NUMBER);
    let is_bounded = numbers.all(is_small) && !specification.contains('*');
    if is_bounded { Ok(()) } else { Err(too_large(&specification.into())) }
}

fn too_large(number: &Value) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("{number} is no number up to {MAX_NUMBER}, which widths and counts are here"),
    )
}

#[cfg(test)]
mod tests {
    use minijinja::context;

    use super::super::{TEMPLATE_NAME, compile};

    fn render(source: &str) -> Result<String, String> {
        let env = compile(source, time::macros::datetime!(2024-07-05 09:03:07 UTC)).unwrap();
        env.get_template(TEMPLATE_NAME).unwrap().render(context! {}).map_err(|error| error.to_string())
    }

    #[test]
    fn widths_and_counts_of_a_template_are_bounded() {
        for source in [
            "{{ 'a\\nb' | indent(1000000000) }}",
            "{{ 'a\\nb' | indent(width=1000000000) }}",
            "{{ [1] | batch(1000000000000) | list }}",
            "{{ [1] | slice(1000000000) | list }}",
            "{{ '%01000000000d' | format(1) }}",
            "{{ '%*d' | format(1000000000, 1) }}",
            "{{ '%(a).99999999f' | format(a=1.0) }}",
            "{{ '{:>1000000000}'.format('a') }}",
            "{{ '{:{}}'.format('a', 1000000000) }}",
            "{{ '{0:.99999f}'.format(1.5) }}",
            "{{ 1.5 | round(1000000000) }}",
            "{{ [1] | tojson(indent=1000000000) }}",
            "{{ 'a' * 1000000000 }}",
            "{{ range(1000000000) | list }}",
        ] {
            assert!(render(source).is_err(), "{source}");
        }
    }

    #[test]
    fn what_templates_use_is_within_the_bounds() {
        for (source, text) in [
            ("{{ 'a\\nb' | indent(4) }}{{ 'a\\nb' | indent(width=2, first=true) }}", "a\n    b  a\n  b"),
            ("{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3]][[1, 2], [3]]"),
            ("{{ '%05d of %s' | format(7, 1234567) }}", "00007 of 1234567"),
            ("{{ '100000 of {}: {:>3}'.format(99999, 'a') }}", "100000 of 99999:   a"),
            ("{{ '{{}}{a}'.format(a=1) }}{{ 2.567 | round(1) }}", "{}12.6"),
        ] {
            assert_eq!(render(source).as_deref(), Ok(text), "{source}");
        }
    }
}
