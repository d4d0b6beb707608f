//! Jinja as Hugging Face's chat templates use it.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use minijinja::machinery::{CodeGenerator, Instructions, Vm, WhitespaceConfig, make_string_output, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use regex::Regex;
use time::OffsetDateTime;
use time::format_description::parse_strftime_owned;

use crate::util::panics::guarded;

mod python;

use python::bounds;

/// What the engine calls a template in errors.
const NAME: &str = "chat_template";
/// Longest message of an error, in characters.
const MAX_MESSAGE: usize = 1_000;
/// A template that so often took too long is not asked again.
const MAX_OVERRUNS: usize = 2;
/// Stack of the thread that compiles: the compiler recurs along chains of operators, of which a tag may have some thousands.
const STACK_BYTES: usize = 128 << 20;
const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
/// Stand around marked text: two code points that are no characters and that no text has.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// `{% generation %}` and `{% endgeneration %}`, with their white-space marks.
static GENERATION_TAG: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").ok());

/// A compiled template.
///
/// It has transformers' settings and functions: `trim_blocks`, `lstrip_blocks`, loop controls, Python's methods on strings,
/// lists and dicts, `raise_exception`, `strftime_now` (always of the same time, so that all rows see one date) and `tojson` as
/// `json.dumps(ensure_ascii=False)`. It cannot read files or other templates, and what it may take is [bounded](bounds).
#[derive(Debug)]
pub(super) struct Jinja {
    environment: Environment<'static>,
    plain: Program,
    /// Writes [`MARKS`] around what `{% generation %}` tags enclose, where there are such tags.
    marked: Option<Program>,
    overruns: AtomicUsize,
}

/// A text, and the parts of it that are marked, ascending.
pub(super) type Marked = (String, Vec<Range<usize>>);

#[derive(Debug)]
struct Program {
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl Jinja {
    /// Compiles `source`, whose `strftime_now` is of `now`.
    ///
    /// # Errors
    /// A syntax error, with its line.
    pub(super) fn compile(source: &str, now: OffsetDateTime) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(write_as_python);
        python::add_to(&mut environment);
        bounds::add_to(&mut environment);
        environment.add_filter("generation", |text: &str| format!("{}{text}{}", MARKS[0], MARKS[1]));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(bounds::refused(message))
        });
        environment.add_function("strftime_now", move |format: &str| strftime(format, now));
        let source = with_tags_as_jinja(source);
        let is_marked = GENERATION_TAG.as_ref().is_some_and(|tag| tag.is_match(&source));
        let marked = || Program::compile(&with_generation_tags_as(["filter generation", "endfilter"], &source));
        Ok(Self {
            environment,
            plain: Program::compile(&with_generation_tags_as(["if true", "endif"], &source))?,
            marked: is_marked.then(marked).transpose()?,
            overruns: AtomicUsize::new(0),
        })
    }

    /// The text that the template writes.
    ///
    /// # Errors
    /// An exception that the template raises, and whatever it does that is not bounded.
    pub(super) fn render(&self, variables: Value) -> Result<String, String> {
        self.run(&self.plain, variables)
    }

    /// The text that the template writes, and the parts of it that its `{% generation %}` tags enclose, ascending; `None` where
    /// it has no such tags.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub(super) fn render_marked(&self, variables: Value) -> Result<Option<Marked>, String> {
        let Some(marked) = &self.marked else { return Ok(None) };
        Ok(Some(split_marks(&self.run(marked, variables)?)))
    }

    fn run(&self, program: &Program, variables: Value) -> Result<String, String> {
        if self.overruns.load(Ordering::Relaxed) >= MAX_OVERRUNS {
            return Err("it took too long for others".to_owned());
        }
        bounds::begin();
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        let Program { instructions, blocks } = program;
        // minijinja panics on some formats.
        guarded(|| {
            let vm = Vm::new(&self.environment);
            vm.eval(instructions, variables, blocks, &mut out, AutoEscape::None).map(drop)
        })?
        .map_err(|error| {
            if error.kind() != ErrorKind::OutOfFuel {
                return full_message(&error);
            }
            self.overruns.fetch_add(1, Ordering::Relaxed);
            error.detail().map_or_else(bounds::too_many_steps, ToOwned::to_owned)
        })?;
        Ok(text)
    }
}

impl Program {
    fn compile(source: &str) -> Result<Self, String> {
        let compile = || -> Result<Self, Error> {
            bounds::begin();
            let source = kept(bounds::checked_source(source, WHITESPACE)?);
            let tree = parse(source, NAME, SyntaxConfig, WHITESPACE)?;
            let mut generator = CodeGenerator::new(NAME, source);
            generator.compile_stmt(&tree);
            let (instructions, blocks) = generator.finish();
            let blocks = blocks.iter().map(|(name, block)| (*name, bounds::bounded(block)));
            Ok(Self { instructions: bounds::bounded(&instructions), blocks: blocks.collect() })
        };
        let compile = || compile().map_err(|error| full_message(&error));
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
            thread.join().unwrap_or_else(|_| Err("the compiler failed".to_owned()))
        })
    }
}

/// A source that is kept for ever, as its instructions name parts of it. A process has few templates; each is kept once.
fn kept(source: String) -> &'static str {
    static SOURCES: Mutex<BTreeMap<String, &'static str>> = Mutex::new(BTreeMap::new());
    let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    let kept: &mut &'static str =
        sources.entry(source).or_insert_with_key(|source| Box::leak(source.clone().into_boxed_str()));
    kept
}

/// A template's error with its causes and its line.
fn full_message(error: &Error) -> String {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    match message.char_indices().nth(MAX_MESSAGE) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message,
    }
}

/// The text without [`MARKS`], and what they enclose, ascending.
fn split_marks(marked: &str) -> Marked {
    let (mut text, mut parts, mut open) = (String::with_capacity(marked.len()), Vec::new(), Vec::new());
    for piece in marked.split_inclusive(MARKS) {
        let mark = piece.chars().next_back().filter(|last| MARKS.contains(last));
        text.push_str(piece.trim_end_matches(MARKS));
        match (mark, open.last()) {
            (Some(mark), _) if mark == MARKS[0] => open.push(text.len()),
            (Some(_), Some(start)) => {
                // Of marks in marks, the outer ones count.
                parts.extend((open.len() == 1 && *start < text.len()).then_some(*start..text.len()));
                open.pop();
            }
            _ => {}
        }
    }
    (text, parts)
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

/// Replaces `{% generation %}` and `{% endgeneration %}` with other tags, which keeps text and white space.
fn with_generation_tags_as(tags: [&str; 2], source: &str) -> String {
    let Some(tag) = GENERATION_TAG.as_ref() else { return source.to_owned() };
    tag.replace_all(source, |captures: &regex::Captures<'_>| {
        let keyword = tags[usize::from(captures.get(2).is_some())];
        format!("{{%{} {keyword} {}%}}", &captures[1], &captures[3])
    })
    .into_owned()
}

/// Writes a value as Python's `str()` would.
fn write_as_python(out: &mut Output<'_>, _state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = match value.as_str() {
        Some(text) => text.into(),
        None => std::borrow::Cow::from(python::str(value)?),
    };
    bounds::written(text.len())?;
    out.write_str(&text).map_err(|_| Error::from(ErrorKind::WriteFailure))
}

/// `datetime.strftime` in the C locale.
fn strftime(format: &str, now: OffsetDateTime) -> Result<String, Error> {
    let failed = |reason: String| bounds::refused(format!("strftime_now: {format:?} is not supported: {reason}"));
    if format.contains("%w") {
        return Err(failed("`%w` counts weekdays from another day here".to_owned()));
    }
    let items = parse_strftime_owned(format).map_err(|error| failed(error.to_string()))?;
    now.format(&items).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::iter;
    use std::time::Instant;

    use super::*;
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
            let (start, shown) = (Instant::now(), source.chars().take(80).collect::<String>());
            let error = rendered(&source).expect_err(&shown);
            assert!(error.contains(reason), "{shown}: {error}");
            assert!(start.elapsed().as_secs() < 5, "{shown}: {:?}", start.elapsed());
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
            (
                "{{ 'a' in ('a', 'b') }}{{ 'abc'.endswith(('x', 'c')) }}{% if 'c' not in ('a',) %}y{% endif %}",
                "TrueTruey",
            ),
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
            (
                "{{ '7'.zfill(3) }}{{ '-7'.zfill(4) }}{{ 'a b, c' | wordcount }}{{ 'ab'.center(5, '*') }}",
                "007-0073**ab*",
            ),
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
        ];
        for (source, expected) in cases {
            assert_eq!(rendered(source).as_deref(), Ok(expected), "{source}");
        }
    }
}
