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
            // Other escapes of Python's.
            (Some(_), Some(_)) if rest.starts_with("\\/") => out.push('\\'),
            (Some(_), Some(_)) if let Some(escaped) = wide_escape(rest) => {
                out.push(escaped);
                rest = &rest[10..];
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

/// The character of an escape with eight digits.
fn wide_escape(text: &str) -> Option<char> {
    let digits = text.strip_prefix("\\U")?.get(..8)?;
    u32::from_str_radix(digits, 16).ok().and_then(char::from_u32)
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
fn write_as_python(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    if state.auto_escape() != AutoEscape::None {
        return Err(bounds::refused("`autoescape` is not supported"));
    }
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
mod tests;
