use std::iter;

use super::*;
use crate::measure::telemetry::thread_time;
use minijinja::context;

fn now() -> OffsetDateTime {
    time::macros::datetime!(2024-07-05 09:03:07 UTC)
}

fn render(source: &str) -> String {
    rendered(source).unwrap()
}

fn rendered(source: &str) -> Result<String, String> {
    let value = serde_json::json!({"b": "<é'>", "a": [1, 2.5, true, null]});
    Jinja::compile(source, now())?.render(context! { value, text => "  a-b-c " })
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
    let marked = Jinja::compile(source, now()).unwrap().render_marked(context! {}).unwrap();
    assert_eq!(marked, Some(("a\nbc".to_owned(), iter::once(2..3).collect())));
    assert_eq!(
        split_marks("\u{fdd0}a\u{fdd0}b\u{fdd1}\u{fdd1}\u{fdd0}\u{fdd1}c"),
        ("abc".to_owned(), iter::once(0..2).collect())
    );
}

#[test]
fn line_ends_are_read_as_jinja2_does() {
    assert_eq!(render("a\r\nb\rc"), "a\nb\nc");
    assert_eq!(render("{{ \"one\\\ntwo \\\"}}\\\" \\\\ \\n|\" }}"), "onetwo \"}}\" \\ \n|");
    assert_eq!(render("it's \\\n{# it's \\\n #}{{ 'x' }}\\\ny"), "it's \\\nx\\\ny");
}

#[test]
fn a_template_reads_no_files_and_no_templates() {
    for tag in ["include", "extends"] {
        let error = rendered(&format!("{{% {tag} '/etc/passwd' %}}")).unwrap_err();
        assert!(error.starts_with("template not found"), "{error}");
    }
}

#[test]
fn a_template_that_takes_too_much_ends_with_an_error_in_seconds() {
    let ns = "{% set ns = namespace(x='a,', l=[1, 2, 3]) %}";
    let times =
        |count: usize, body: &str| format!("{ns}{{% for i in range({count}) %}}{body}{{% endfor %}}{{{{ ns.x }}}}");
    let chain = |part: &str, count: usize, last: &str| format!("{{{{ {}{last} }}}}", part.repeat(count));
    let text = "a frog ".repeat(2_000);
    let cases = [
        // Cycles and depth.
        (format!("{ns}{{% set ns.x = ns %}}{{{{ ns }}}}"), "cannot be put into"),
        (format!("{ns}{{% set ns.x = [ns] %}}{{{{ ns | tojson }}}}"), "cannot be put into"),
        (format!("{ns}{{% set o = namespace(x={{'a': ns}}) %}}{{{{ o == ns }}}}"), "cannot be put into"),
        (times(99_999, "{% set ns.x = [ns.x] %}"), "more than 160 levels"),
        (times(99_999, "{% set ns.x = {'a': ns.x} %}"), "more than 160 levels"),
        (times(99_999, "{% set ns.l = ns.l | batch(9) %}"), "more than 160 levels"),
        ("{% macro f(n) %}{{ f(n + 1) }}{{ f(n) }}{% endmacro %}{{ f(0) }}".to_owned(), "recursion limit"),
        (chain("'x' | string | ", 50_000, "upper"), "words and marks"),
        (chain("not ", 50_000, "1"), "words and marks"),
        (chain("'a' ~ ", 50_000, "'a'"), "words and marks"),
        (chain("1 and ", 50_000, "1"), "words and marks"),
        (chain("1 if 0 else ", 50_000, "1"), "words and marks"),
        (chain("x.a.a.a.", 50_000, "a"), "words and marks"),
        (format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(50_000)), "`elif`"),
        // Widths.
        ("{{ '%10000000000d' | format(5) }}".to_owned(), "more than 8 MB"),
        ("{{ '%10000000000d' % 5 }}".to_owned(), "more than 8 MB"),
        ("{{ '%*d' % (10000000000, 5) }}".to_owned(), "more than 8 MB"),
        ("{{ '{:>10000000000}'.format(5) }}".to_owned(), "more than 8 MB"),
        ("{{ '%.100000000f' % 1.5 }}".to_owned(), "more than 8 MB"),
        ("{{ [1] | batch(10000000000) }}".to_owned(), "more than 8 MB"),
        ("{{ [1] | slice(10000000000) }}".to_owned(), "more than 8 MB"),
        ("{{ {'a': {'b': 1}} | tojson(indent=10000000) }}".to_owned(), "more than 8 MB"),
        ("{{ 'a\n' | indent(1000000000) }}".to_owned(), "more than 8 MB"),
        ("{{ 'a'.ljust(1000000000) }}{{ 'a'.zfill(10) }}".to_owned(), "more than 8 MB"),
        // Growth.
        (times(40, "{% set ns.x = ns.x ~ ns.x %}"), "more than 8 MB"),
        (times(40, "{% set ns.x = ns.x + ns.x %}"), "more than 8 MB"),
        (times(40, "{% set ns.l = ns.l + ns.l %}"), "more than 8 MB"),
        (times(40, "{% set ns.l = [ns.l, ns.l] %}"), "more than 8 MB"),
        (times(40, "{% set ns.x = ns.x | replace(',', ns.x) %}"), "more than 8 MB"),
        (times(40, "{% set ns.x = ns.x.replace('', ns.x) %}"), "more than 8 MB"),
        (times(40, "{% set ns.x = [ns.x, ns.x] | join(ns.x) %}"), "more than 8 MB"),
        (times(40, "{% set ns.x = ns.x.join([ns.x, ns.x]) %}"), "more than 8 MB"),
        (times(40, "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"), "more than 8 MB"),
        (times(9_999, &format!("{{% for j in range(99) %}}{text}{{% endfor %}}")), "writes more than 64 MB"),
        ("{{ range(1000) | map('indent', 7000000, true) | list }}".to_owned(), "more than 400 MB"),
        ("{{ [1] * 10000000000 }}".to_owned(), "more than 8 MB"),
        (format!("{{{{ {} }}}}", "'a' * 99999999 ~ ".repeat(60) + "1"), "more than 8 MB"),
        ("{{ [1] * 1000000000000 == [1] * 1000000000000 }}".to_owned(), "more than 8 MB"),
    ];
    for (source, reason) in cases {
        let (start, shown) = (thread_time().cpu.unwrap_or_default(), source.chars().take(80).collect::<String>());
        let error = rendered(&source).expect_err(&shown);
        assert!(error.contains(reason), "{shown}: {error}");
        let taken = thread_time().cpu.unwrap_or_default().saturating_sub(start);
        assert!(taken.as_secs() < 5, "{shown}: {taken:?}");
    }
    let error = rendered("{{ raise_exception('x' * 5000000) }}").unwrap_err();
    assert!(error.starts_with("invalid operation: xxx") && error.len() < 2_000, "{}", error.len());
}

#[test]
fn a_template_that_took_too_long_twice_is_not_asked_again() {
    let source = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    let template = Jinja::compile(source, now()).unwrap();
    for reason in ["it takes more than", "it takes more than", "it took too long for others"] {
        let error = template.render(context! {}).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_long_conversation_stays_within_the_bounds() {
    let messages: Vec<_> =
        (0..3_000).map(|i| serde_json::json!({"role": "user", "content": format!("{i} ").repeat(200)})).collect();
    let source = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}\
                  {% for m in ns.l %}{{ '<' ~ m.role ~ '>' + m['content'] | trim }}{% endfor %}{{ ns.l[0] | tojson }}";
    let text = Jinja::compile(source, now()).unwrap().render(context! { messages }).unwrap();
    assert!(text.len() > 2_000_000 && text.ends_with("0 \"}"));
}

#[test]
fn expressions_are_as_in_jinja2() {
    let cases = [
        ("{{ 'a\\nb\\n' | indent(2) }}|{{ 'a\\n\\nb' | indent('>', true) }}", "a\n  b\n|>a\n\n>b"),
        ("{{ (1, 'a') }}{{ (1,) }}{{ [(1, [2])] }}{{ ((1)) }}", "(1, 'a')(1,)[(1, [2])]1"),
        (
            "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1}.items() | list }}{{ 'x=1'.partition('=') }}",
            "[('a', 2), ('b', 1)][('b', 1)]('x', '=', '1')",
        ),
        (
            "{{ none is iterable }}{{ nope | length }}{{ ['a'] | upper }}{{ 5 | trim }}{{ \"it's\" | e }}{{ true is number }}",
            "False0['A']5it&#39;sTrue",
        ),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}{% set (c, d) = (5, 6) %}{{ d }}", "376"),
        ("{{ 'a' in ('a', 'b') }}{{ 'abc'.endswith(('x', 'c')) }}{% if 'c' not in ('a',) %}y{% endif %}", "TrueTruey"),
        (
            "{{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 7 | round }} {{ 2.1 | round(0, 'ceil') }}",
            "2.0 4.0 2.67 7 3.0",
        ),
        ("{{ 'a' is sequence }}{{ {} is sequence }}{{ [] is sequence }}{{ 1 is sequence }}", "TrueTrueTrueFalse"),
        (
            "{{ 'é😀' | tojson(ensure_ascii=true) }}{{ {'a': [1]} | tojson(indent='-') }}",
            "\"\\u00e9\\ud83d\\ude00\"{\n-\"a\": [\n--1\n-]\n}",
        ),
        (
            "{{ 'ǆ'.title() }}{{ 'it\\'s a'.title() }}|{{ \"it's a-b\" | title }}{{ 'ß'.capitalize() }}",
            "ǅIt'S A|It's A-BSs",
        ),
        ("{{ '%s-%d' % ('a', 3) }}{{ '%s' % 'b' }}{{ 7 % 3 }}{{ -7 % 3 }}{{ 7 % -3 }}{{ 7 // -2 }}", "a-3b12-2-4"),
        ("{{ '7'.zfill(3) }}{{ '-7'.zfill(4) }}{{ 'a b, c' | wordcount }}{{ 'ab'.center(5, '*') }}", "007-0073**ab*"),
        (
            "{{ 'hello' | replace('l', 'L', 1) }}{{ 'aXbX'.replace('X', '-', 1) }}{{ 'ab'.replace('', '.') }}",
            "heLloa-bX.a.b.",
        ),
        ("{{ 'é-'.find('-') }}{{ 'abc'.count('') }}{{ ''.isdigit() }}{{ 'ab1'.islower() }}", "14FalseTrue"),
        (
            "{{ 'a\\rb\\u000cc\\n'.splitlines() | length }}{{ ', '.join(['a', 'b']) }}{% set l = ['a'] %}{{ 'x' ~ l }}",
            "3a, bx['a']",
        ),
        ("{{ 2 * 3 }}{{ '=' * 3 }}{{ 6 / 2 * 3 }}{{ [1] * 2 }}{{ 2 ** 3 }}", "6===9.0[1, 1]8"),
        ("{% raw %}{{ (1, 2) * 3 }}{% endraw %}", "{{ (1, 2) * 3 }}"),
        (
            "{{ 'x' ~ value }}{{ 'x' ~ [1, 'a'] ~ none ~ 1e-5 }}{{ '%s' % value }}{{ '{}'.format([true]) }}{{ '%s' | format(('a', 1)) }}",
            concat!(
                r#"x{'b': "<é'>", 'a': [1, 2.5, True, None]}x[1, 'a']None1e-05"#,
                r#"{'b': "<é'>", 'a': [1, 2.5, True, None]}[True]('a', 1)"#
            ),
        ),
        ("{{ ['\\u200b\\u00a0e\\u0301\\x00'] }}{{ '\\U0001F600\\/' }}{{ () }}", "['\\u200b\\xa0e\u{301}\\x00']😀\\/()"),
        (
            "{% set d = {'type': 'array', 'items': {'type': 'x'}} %}{{ d.items.type }}|{{ d['items'].type }}|{{ 'y' if {}.items }}\
             {{ {}['items'] is defined }}{{ {}['item'] is defined }}{{ d | attr('type') }}",
            "|x|yTrueFalse",
        ),
        (
            "{{ 'x' | int(7) }}{{ '5.9' | int }}{{ none | int }}{{ 'ff' | int(base=16) }}{{ 'x' | float }}{{ '.5' | float }}",
            "7502550.00.5",
        ),
        (
            "{{ [{'a': {'b': 1}}, {'a': {'b': 3}}] | sum('a.b') }}{{ [{'a': 'x'}, {'a': 'y'}] | join('-', attribute='a') }}\
             {{ ['a', 'B'] | max }}{{ [{'a': 1}, {'a': 3}] | min(attribute='a') }}{{ {'b': 1, 'A': 2} | dictsort(false, 'value') }}",
            "4x-yB{'a': 1}[('b', 1), ('A', 2)]",
        ),
        (
            "{% for g in [{'a': 1, 'b': 2}] | groupby('a') %}{{ g.grouper }}{{ g.list | length }}{{ g }}{% endfor %}",
            "11(1, [{'a': 1, 'b': 2}])",
        ),
        (
            "{% set j = joiner() %}{% set c = cycler('p', 'q') %}{% for x in range(3) %}{{ j() }}{{ c.next() }}{% endfor %}\
             {{ c.current }}{{ dict([('a', 1)], b=2) }}{{ 'foo bar baz' | truncate(9, leeway=0) }}",
            "p, q, pq{'a': 1, 'b': 2}foo...",
        ),
        (
            "{{ ' a  b c '.split(none, 1) }}{{ 'a b c'.rsplit(maxsplit=1) }}{{ 'abcb'.find('b', 2) }}{{ 'abc'.startswith('b', 1) }}\
             {{ 'ab'.index('b') }}{{ [1, 2].index(2) }}{{ 'aB'.swapcase() }}{{ 'a\\nb'.splitlines(keepends=true) }}",
            "['a', 'b c ']['a b', 'c']3True11Ab['a\\n', 'b']",
        ),
        ("{{ 'é' | tojson(true) }}{{ [1] | tojson(false, 1) }}", "\"\\u00e9\"[\n 1\n]"),
    ];
    for (source, expected) in cases {
        assert_eq!(rendered(source).as_deref(), Ok(expected), "{source}");
    }
}

#[test]
fn what_jinja2_has_not_or_refuses_is_refused_by_name() {
    let cases = [
        ("{{ 'a b' | split }}", "filter split is unknown"),
        ("{{ 'a' is startingwith('a') }}", "test startingwith is unknown"),
        ("{{ [1] | random }}", "filter random is unknown"),
        ("{% autoescape true %}{{ 1 }}{% endautoescape %}", "`autoescape` is not supported"),
        ("{% for x in none %}{% endfor %}", "`none` cannot be iterated"),
        ("{{ none | list }}", "`none` cannot be iterated"),
        ("{{ nope | tojson }}", "undefined is not JSON serializable"),
        ("{{ '-'.join([1]) }}", "takes texts alone"),
        ("{{ 'a'.replace('a', 'b', count=1) }}", "takes no arguments by name"),
        ("{{ 'a' | truncate(1, end='....', leeway=-1) }}", "cannot convert"),
        ("{% set ns = namespace(c=1) %}{% set ns.c = cycler(1) %}", "cannot be put into"),
        ("{% set c = cycler(1) %}{{ cycler(c) }}", "cannot be put into"),
        ("{% set ns = namespace(c=1) %}{{ joiner(ns)() }}{{ cycler() }}", "`cycler` takes items"),
    ];
    for (source, reason) in cases {
        let error = rendered(source).expect_err(source);
        assert!(error.contains(reason), "{source}: {error}");
    }
}
