//! Inputs that mutating a valid file would not produce.

use proptest::prelude::*;

fn join(parts: &[String], separator: &str) -> String {
    parts.join(separator)
}

fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        proptest::sample::select(
            &[
                "model", "path", "lora", "r", "data", "train", "eval", "max_length", "target_modules", "rank_pattern",
                "messages", "role", "content", "text", "prompt", "completion", "conversations", "from", "value",
                "tools", "user", "assistant", "system", "all-linear", "seed", "output_dir", "columns", "weight",
                "format", "none",
            ][..]
        )
        .prop_map(str::to_owned),
        "[a-z_]{1,12}",
        "\\PC{0,8}",
    ]
}

fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:?}")),
        "[0-9]{1,60}",
        Just("1e999".to_owned()),
        (0..10_i64).prop_map(|number| number.to_string()),
    ]
}

/// A JSON value, nested up to ten times.
fn json() -> impl Strategy<Value = String> {
    let quoted = |text: String| serde_json::Value::String(text).to_string();
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        number(),
        word().prop_map(quoted),
        Just("\"\\ud800\"".to_owned()),
        Just("[]".to_owned()),
    ];
    leaf.prop_recursive(10, 64, 8, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..8).prop_map(|items| format!("[{}]", join(&items, ","))),
            // A key may occur twice.
            proptest::collection::vec((word(), inner), 0..8).prop_map(move |entries| {
                let entries = entries.into_iter().map(|(key, value)| format!("{}:{value}", quoted(key)));
                format!("{{{}}}", join(&entries.collect::<Vec<_>>(), ","))
            }),
        ]
    })
}

/// JSON lines, an array, or cells, with rows that resemble some format.
pub(crate) fn rows() -> impl Strategy<Value = Vec<u8>> {
    let cells = (0x40..0x42_u8, "[\",;\\t\\n\\ra\u{e9}]{0,80}")
        .prop_map(|(choice, cells)| [&[choice][..], b"text,b\n", cells.as_bytes()].concat());
    let turn = (word(), word(), json()).prop_map(|(role, key, content)| {
        let key = serde_json::Value::String(key);
        format!("{{\"role\":\"{}\",{key}:{content},\"content\":{content}}}", role.replace(['"', '\\'], ""))
    });
    let row = prop_oneof![
        json(),
        json().prop_map(|text| format!("{{\"text\":{text}}}")),
        (json(), json()).prop_map(|(a, b)| format!("{{\"prompt\":{a},\"completion\":{b}}}")),
        proptest::collection::vec(turn, 0..6).prop_map(|turns| format!("{{\"messages\":[{}]}}", join(&turns, ","))),
        (json(), json()).prop_map(|(a, b)| format!("{{\"conversations\":{a},\"tools\":{b}}}")),
    ];
    let objects =
        (any::<u8>(), proptest::collection::vec(row, 0..8), any::<bool>()).prop_map(|(choice, rows, is_array)| {
            let text = if is_array { format!("[{}]", join(&rows, ",")) } else { join(&rows, "\n") };
            [&[choice][..], text.as_bytes()].concat()
        });
    prop_oneof![4 => objects, 1 => cells]
}

/// TOML with our keys in arbitrary places.
pub(crate) fn toml() -> impl Strategy<Value = Vec<u8>> {
    let key = prop_oneof![3 => word(), 1 => "[a-z]{1,4}(\\.[a-z]{1,4}){1,30}"];
    let line = prop_oneof![
        (key.clone(), json()).prop_map(|(key, value)| format!("{key} = {value}")),
        key.clone().prop_map(|key| format!("[{key}]")),
        key.clone().prop_map(|key| format!("[[{key}]]")),
        (key.clone(), number()).prop_map(|(key, value)| format!("{key} = {value}")),
        (key.clone(), key, json()).prop_map(|(a, b, value)| format!("{a} = {{ {b} = {value} }}")),
        Just("---".to_owned()),
    ];
    let valid = "[model]\npath = \"m\"\n";
    proptest::collection::vec(line, 0..20)
        .prop_map(move |lines| [valid.as_bytes(), join(&lines, "\n").as_bytes()].concat())
}

/// A template: nested loops, growing texts, and every filter that turns little into much.
pub(crate) fn template() -> impl Strategy<Value = Vec<u8>> {
    let big =
        || prop_oneof![Just("1000000000"), Just("99999"), Just("3"), Just("-1"), Just("1e18"), Just("10000000000")];
    let value = || {
        proptest::sample::select(
            &["messages", "'ab'", "x", "messages[0].content", "loop.index", "ns.x", "[1, 2]", "{'a': 1}", "tools", "7"]
                [..],
        )
    };
    let filters = [
        "indent", "center", "batch", "slice", "tojson", "list", "join", "replace('a', 'aaaa')", "string", "length",
        "sort", "unique", "map('upper')", "round", "trim", "truncate", "format", "wordwrap", "pprint", "urlencode",
        "items",
    ];
    let expression = prop_oneof![
        value().prop_map(str::to_owned),
        (value(), big()).prop_map(|(a, b)| format!("{a} * {b}")),
        (value(), value()).prop_map(|(a, b)| format!("{a} ~ {b} ~ {a}")),
        (value(), value()).prop_map(|(a, b)| format!("{a} + {b}")),
        (value(), proptest::sample::select(filters.to_vec()), big())
            .prop_map(|(a, f, b)| { if f.contains('(') { format!("{a} | {f}") } else { format!("{a} | {f}({b})") } }),
        (value(), big()).prop_map(|(a, b)| format!("{a} | tojson(indent={b})")),
        big().prop_map(|b| format!("range({b})")),
        big().prop_map(|b| format!("'%0{b}d' | format(1)")),
        big().prop_map(|b| format!("'%{b}s'.format('a')")),
        big().prop_map(|b| format!("'%{b}d %*d' % (5, {b}, 5)")),
        // Chains, along which the compiler recurs.
        (proptest::sample::select(&["not ", "'a' ~ ", "1 if 0 else ", "1 and ", "-"][..]), 1..20_000_usize)
            .prop_map(|(part, count)| format!("{}1", part.repeat(count))),
        (proptest::sample::select(&[" | string", ".a", "[0]", " ~ x", "()"][..]), 1..20_000_usize)
            .prop_map(|(part, count)| format!("x{}", part.repeat(count))),
        Just("x.replace('', x)".to_owned()),
        Just("x.join([x, x])".to_owned()),
        Just("x.split('a')".to_owned()),
        Just("(ns, [ns], {'a': ns})".to_owned()),
        (value(), big()).prop_map(|(a, b)| format!("{a}.ljust({b})")),
        (value(), big()).prop_map(|(a, b)| format!("{a}[{b}:]")),
        big().prop_map(|b| format!("'{{:>{b}}}'.format('a')")),
        Just("strftime_now('%Y')".to_owned()),
        Just("raise_exception('x')".to_owned()),
        Just("self.b()".to_owned()),
        Just("m(m)".to_owned()),
    ];
    let leaf = prop_oneof![
        expression.clone().prop_map(|e| format!("{{{{ {e} }}}}")),
        expression.clone().prop_map(|e| format!("{{% set x = {e} %}}")),
        expression.clone().prop_map(|e| format!("{{% set ns.x = {e} %}}")),
        Just("{% set x = x ~ x %}".to_owned()),
        Just("{% set ns.x = ns.x ~ ns.x %}".to_owned()),
        Just("{% set ns.x = ns %}{{ ns }}".to_owned()),
        Just("{% set ns.x = [ns.x] %}".to_owned()),
        Just("{% set ns.x = [ns.x, ns.x] %}".to_owned()),
        Just("{% set ns.x = {'a': ns.x} %}".to_owned()),
        Just("{{ ns | tojson }}{{ ns == ns }}".to_owned()),
        Just("{% include '/etc/passwd' %}".to_owned()),
        Just("{% import 'chat_template' as t %}".to_owned()),
        Just("{% include 'chat_template' %}".to_owned()),
        Just("{% extends 'chat_template' %}".to_owned()),
        "\\PC{0,6}",
    ];
    let body = leaf.prop_recursive(6, 40, 4, move |inner| {
        let block = proptest::collection::vec(inner, 0..4).prop_map(|parts| join(&parts, ""));
        prop_oneof![
            (expression.clone(), block.clone()).prop_map(|(e, b)| format!("{{% for x in {e} %}}{b}{{% endfor %}}")),
            block.clone().prop_map(|b| format!("{{% for i in range(9999) %}}{b}{{% endfor %}}")),
            block.clone().prop_map(|b| format!("{{% for m in messages %}}{{{{ m.role }}}}{b}{{% endfor %}}")),
            (expression.clone(), block.clone()).prop_map(|(e, b)| format!("{{% if {e} %}}{b}{{% endif %}}")),
            block.clone().prop_map(|b| format!("{{% macro m(a) %}}{b}{{{{ m(a) }}}}{{% endmacro %}}")),
            block.clone().prop_map(|b| format!("{{% block b %}}{b}{{% endblock %}}")),
            block.clone().prop_map(|b| format!("{{% set x %}}{b}{{% endset %}}")),
            block.prop_map(|b| format!("{{% generation %}}{b}{{% endgeneration %}}")),
        ]
    });
    proptest::collection::vec(body, 1..6)
        .prop_map(|parts| format!("{{% set ns = namespace(x='ab') %}}{}", join(&parts, "")).into_bytes())
}
