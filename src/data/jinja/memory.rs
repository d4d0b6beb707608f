//! What a template holds in memory while it renders.
//!
//! Each of a few steps can double a text, so fuel does not bound it. What is held is looked at wherever a template calls
//! code of ours: before it writes, where it calls a method, and at each `{% set %}`, whose value is passed through a
//! filter. One that holds too much fails like any other template that does, for the row that it was at. What grows
//! between two such places, as in the arguments of a macro that calls itself, is left to [`budget::within`], which ends
//! the process.

use std::sync::LazyLock;

use minijinja::value::Rest;
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use regex::Regex;

use crate::budget;

/// Most that a template may hold beside the conversation and what it has written, in bytes. Three times as much in one
/// step, twice in memory while it is put together, is still within what the process allows.
const MAX_HELD_BYTES: usize = 48 << 20;
/// Most elements of a list that a filter makes anew: a list can be repeated by a number, which takes no memory until then.
const MAX_ELEMENTS: usize = 100_000;

/// Name of the filter that an assignment's value is passed through: none that a template uses.
const FILTER: &str = "lora_train_held";

/// `{% set name = `: up to the value.
static ASSIGNMENT: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^\{%[-+]?\s*set\s+[\w.]+\s*=").ok());

/// Puts the bounds into an environment.
pub(super) fn add(env: &mut Environment<'static>) {
    env.add_filter(FILTER, |value: Value| check().map(|()| value));
    env.add_filter("unbounded list", filters::list);
    env.add_filter("unbounded sort", filters::sort);
    env.add_filter("unbounded reverse", filters::reverse);
    env.add_filter("unbounded unique", filters::unique);
    env.add_filter("unbounded join", filters::join);
    env.add_filter("unbounded map", filters::map);
    for name in ["list", "sort", "reverse", "unique", "join", "map"] {
        env.add_filter(name, move |state: &State<'_, '_>, args: Rest<Value>| -> Result<Value, Error> {
            check()?;
            args.first().map_or(Ok(()), check_length)?;
            state.apply_filter(&format!("unbounded {name}"), &args)
        });
    }
}

/// Refuses to go on where too much is held.
pub(super) fn check() -> Result<(), Error> {
    if budget::taken().is_none_or(|bytes| bytes <= MAX_HELD_BYTES) {
        return Ok(());
    }
    let message = format!(
        "it takes more than {} MiB for one conversation: that is very long, or a text is doubled again and again",
        MAX_HELD_BYTES >> 20
    );
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Refuses a list of more than [`MAX_ELEMENTS`].
pub(super) fn check_length(value: &Value) -> Result<(), Error> {
    // Of a text the characters would be counted one by one.
    match value.as_str().map_or_else(|| value.len(), |_| None) {
        Some(length) if length > MAX_ELEMENTS => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a list of {length} elements is longer than {MAX_ELEMENTS}"),
        )),
        _ => Ok(()),
    }
}

/// A tag, from `{%` to before `%}`, whose assigned value, if it assigns one, is looked at.
pub(super) fn checked_assignment(tag: &str) -> Option<String> {
    let start = ASSIGNMENT.as_ref()?.find(tag)?.end();
    let (head, value) = tag.split_at(start);
    let (value, mark) = match value.strip_suffix(['-', '+']) {
        Some(shorter) => (shorter, &value[shorter.len()..]),
        None => (value, ""),
    };
    (!value.trim().is_empty()).then(|| format!("{head} ({value})|{FILTER} {mark}"))
}

#[cfg(test)]
mod tests {
    use minijinja::context;

    use super::super::{TEMPLATE_NAME, compile};

    fn render(source: &str) -> Result<String, String> {
        let env = compile(source, time::macros::datetime!(2024-07-05 09:03:07 UTC)).unwrap();
        let variables = context! { messages => vec!["a", "b"] };
        env.get_template(TEMPLATE_NAME).unwrap().render(variables).map_err(|error| error.to_string())
    }

    #[test]
    fn an_assignment_has_the_value_that_it_would_have() {
        for (source, text) in [
            ("{% set a = 1 %}{% set a = a + 1 if a == 1 else 0 %}{{ a }}", "2"),
            ("{%- set b = messages|join('=') -%} {{ b }}", "a=b"),
            ("{% set ns = namespace(x=1, y='%}') %}{% set ns.x = ns.x + 1 %}{{ ns.x }}{{ ns.y }}", "2%}"),
            ("{% set c = none if true %}{{ c is none }}{% set d = 1 if false %}{{ d is defined }}", "TrueFalse"),
            ("{% set e %}text = {{ 1 }}{% endset %}{{ e }}", "text = 1"),
            ("{% set f\n  =\n 'a' ~\n 'b'\n%}{{ f }}", "ab"),
            ("{% set g, h = (1, 2) %}{{ g }}{{ h }}", "12"),
            ("{% raw %}{% set i = 1 %}{% endraw %}", "{% set i = 1 %}"),
            (
                "{% set j = [3, 1, 2] | sort(reverse=true) %}{{ j | list }}{{ j | map('string') | join }}",
                "[3, 2, 1]321",
            ),
        ] {
            assert_eq!(render(source).as_deref(), Ok(text), "{source}");
        }
    }

    #[test]
    fn lists_that_were_made_long_by_a_number_are_refused() {
        for source in [
            "{{ (messages * 100000000) | list | length }}",
            "{{ (messages * 100000000) | join }}",
            "{{ (messages * 100000000) | tojson }}",
            "{{ messages * 100000000 }}",
        ] {
            let error = render(source).unwrap_err();
            assert!(error.contains("a list of 200000000 elements is longer than 100000"), "{source}: {error}");
        }
        assert_eq!(render("{{ (messages * 3) | list | length }}").as_deref(), Ok("6"));
    }
}
