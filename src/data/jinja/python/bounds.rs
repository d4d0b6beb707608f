//! What a template may take: time, text, memory and depth.
//!
//! The engine counts steps, but not what a step costs. So instructions are added to a compiled template: behind those that make
//! a value, one that measures it, and behind those that read one, one that looks at the clock. As every value is bounded, so is
//! each single step; filters and methods that turn little into much ask before they do.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use minijinja::machinery::{Instruction, Instructions, Token, WhitespaceConfig, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Enumerator, Object, ObjectRepr, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::{concatenation, floor_division, remainder, repr};

/// Longest source; templates have some ten kilobytes.
const MAX_SOURCE_BYTES: usize = 1_000_000;
/// Most words and marks between the ends of one tag, and most `elif`. The compiler recurs along chains of operators.
const MAX_TAG_TOKENS: usize = 5_000;
/// Largest value, with all that it holds; a conversation of a million tokens has some megabytes.
pub(in crate::data::jinja) const MAX_VALUE_BYTES: usize = 8_000_000;
/// What one place in a list or a dict counts.
const PLACE_BYTES: usize = 24;
/// Deepest value. JSON has at most 127 levels.
const MAX_DEPTH: usize = 160;
/// Most text that one rendering makes in all, to hold it or to write it into another.
const MAX_MADE_BYTES: usize = 400_000_000;
/// Most text that one rendering writes, with what it writes into blocks and macros.
const MAX_WRITTEN_BYTES: usize = 64_000_000;
/// Longest time of one rendering; a long conversation takes milliseconds.
const MAX_TIME: Duration = Duration::from_secs(4);
const MAX_UNTIMED_BYTES: usize = 50_000;
/// Most steps of one rendering; a long conversation needs some ten thousand.
const MAX_STEPS: u64 = 5_000_000;

/// Names that no template can spell.
const HELD: &str = "~held";
const STORED: &str = "~stored";
const READ: &str = "~read";
const JOINED: &str = "~joined";
pub(super) const ITEM: &str = "~item";
const LOOPED: &str = "~looped";
const REMAINDER: &str = "~remainder";
const FLOOR_DIVISION: &str = "~quotient";
/// The engine finds a filter by its number again; the last ones are for those above.
const UNNUMBERED: u8 = u8::MAX;
const FIRST_OWN_NUMBER: u8 = 45;

/// Names of a dict's methods: `dict.items` is the method in Jinja2 whatever keys there are, and `dict['items']` where there is
/// no such key. With the names of the filters that give them.
pub(super) const METHODS: [(&str, &str); 11] = [
    ("clear", "~clear"),
    ("copy", "~copy"),
    ("fromkeys", "~fromkeys"),
    ("get", "~get"),
    ("items", "~items"),
    ("keys", "~keys"),
    ("pop", "~pop"),
    ("popitem", "~popitem"),
    ("setdefault", "~setdefault"),
    ("update", "~update"),
    ("values", "~values"),
];

thread_local! {
    /// Until when this thread's rendering may last.
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
    /// How much more text it may make, and write.
    static MAKES: Cell<usize> = const { Cell::new(0) };
    static WRITES: Cell<usize> = const { Cell::new(0) };
    /// Bytes that were made since it looked at the clock.
    static UNTIMED: Cell<usize> = const { Cell::new(0) };
}

/// Begins a rendering on this thread.
pub(in crate::data::jinja) fn begin() {
    END.set(Some(Instant::now() + MAX_TIME));
    MAKES.set(MAX_MADE_BYTES);
    WRITES.set(MAX_WRITTEN_BYTES);
}

pub(in crate::data::jinja) fn refused(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Refuses to go on once the time is up.
pub(in crate::data::jinja) fn in_time() -> Result<(), Error> {
    match END.get() {
        Some(end) if Instant::now() > end => {
            Err(Error::new(ErrorKind::OutOfFuel, format!("it takes more than {} seconds", MAX_TIME.as_secs())))
        }
        _ => Ok(()),
    }
}

/// As [`in_time`], after some work on so many bytes: to look at the clock takes as long as some hundred.
fn in_time_after(num_bytes: usize) -> Result<(), Error> {
    let num_bytes = UNTIMED.get() + num_bytes + 1_000;
    UNTIMED.set(if num_bytes < MAX_UNTIMED_BYTES { num_bytes } else { 0 });
    if num_bytes < MAX_UNTIMED_BYTES { Ok(()) } else { in_time() }
}

/// Why a rendering ends that the engine ends.
pub(in crate::data::jinja) fn too_many_steps() -> String {
    format!("it takes more than {} million steps", MAX_STEPS / 1_000_000)
}

/// Asks whether a text or list of so many bytes can be made.
pub(in crate::data::jinja) fn fits(num_bytes: usize) -> Result<(), Error> {
    in_time_after(num_bytes)?;
    if num_bytes > MAX_VALUE_BYTES {
        return Err(refused(format!("it makes a value of more than {} MB", MAX_VALUE_BYTES / 1_000_000)));
    }
    made(num_bytes)
}

/// Counts text that was made.
pub(in crate::data::jinja) fn made(num_bytes: usize) -> Result<(), Error> {
    let left = MAKES.get().checked_sub(num_bytes);
    MAKES.set(left.ok_or_else(|| refused(format!("it makes more than {} MB of text", MAX_MADE_BYTES / 1_000_000)))?);
    Ok(())
}

/// Counts text that is written.
pub(in crate::data::jinja) fn written(num_bytes: usize) -> Result<(), Error> {
    in_time_after(num_bytes)?;
    let left = WRITES.get().checked_sub(num_bytes);
    WRITES.set(left.ok_or_else(|| refused(format!("it writes more than {} MB", MAX_WRITTEN_BYTES / 1_000_000)))?);
    Ok(())
}

/// Adds what [`bounded`] calls.
pub(in crate::data::jinja) fn add_to(env: &mut Environment<'_>) {
    env.set_fuel(Some(MAX_STEPS));
    env.set_recursion_limit(100);
    env.add_filter(HELD, held);
    env.add_filter(STORED, |value: Value| if is_live(&value) { Err(unstored()) } else { Ok(value) });
    env.add_filter(READ, |value: Value| in_time().map(|()| value));
    env.add_filter(JOINED, concatenation);
    env.add_filter(LOOPED, |value: Value| refuse_none(&value).map(|()| value));
    env.add_filter(REMAINDER, remainder);
    env.add_filter(FLOOR_DIVISION, floor_division);
    env.add_global(ONE, 1);
    env.add_global(NO_TEXT, "");
    env.add_function(TUPLE, |items: Rest<Value>| Measured::of(Value::from(items.0), true));
    // They write what a template holds in a form of the engine's own.
    env.remove_filter("pprint");
    env.remove_global("debug");
}

fn unstored() -> Error {
    refused("a namespace, a macro or a loop cannot be put into a list, a dict or a namespace")
}

/// Whether a value can change, or hold what changes.
pub(super) fn is_live(value: &Value) -> bool {
    is_any(value, &["Namespace", "Macro", "Loop", "Closure", "Module", "KwargsValues", "Cycler"])
}

pub(super) fn is_macro(value: &Value) -> bool {
    is_any(value, &["Macro"])
}

fn is_any(value: &Value, kinds: &[&str]) -> bool {
    value.as_object().is_some_and(|object| kinds.iter().any(|kind| object.type_name().ends_with(kind)))
}

pub(super) fn is_dict(value: &Value) -> bool {
    value.kind() == ValueKind::Map && !is_live(value)
}

pub(super) fn refuse_none(value: &Value) -> Result<(), Error> {
    if value.is_none() { Err(refused("`none` cannot be iterated")) } else { Ok(()) }
}

/// A value as it may be held: a list or dict becomes a [`Measured`].
pub(super) fn held(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        fits(text.len())?;
        return Ok(value);
    }
    in_time()?;
    if value.downcast_object_ref::<Measured>().is_some() {
        return Ok(value);
    }
    if is_live(&value) {
        if value.kind() == ValueKind::Map {
            Size::of_items(value.try_iter()?.map(|key| value.get_item(&key)))?;
        }
        return Ok(value);
    }
    Measured::of(value, false)
}

/// How large a value is, with all that it holds, and how deep.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    num_bytes: usize,
    depth: usize,
}

impl Size {
    fn of(value: &Value, above: usize) -> Result<Self, Error> {
        if above > MAX_DEPTH {
            return Err(refused(format!("it makes a value of more than {MAX_DEPTH} levels")));
        }
        if let Some(measured) = value.downcast_object_ref::<Measured>() {
            return Ok(measured.size);
        }
        if is_live(value) {
            return Err(unstored());
        }
        let mut size = Self { num_bytes: PLACE_BYTES + value.as_str().map_or(0, str::len), depth: 0 };
        let is_map = value.kind() == ValueKind::Map;
        if is_map || matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            for item in value.try_iter()? {
                size.add(Self::of(&item, above + 1)?)?;
                if is_map {
                    size.add(Self::of(&value.get_item(&item)?, above + 1)?)?;
                }
            }
        }
        Ok(size)
    }

    fn of_items(items: impl Iterator<Item = Result<Value, Error>>) -> Result<Self, Error> {
        let mut size = Self::default();
        for item in items {
            size.add(Self::of(&item?, 1)?)?;
        }
        Ok(size)
    }

    /// Takes in an item.
    fn add(&mut self, item: Self) -> Result<(), Error> {
        self.num_bytes += item.num_bytes + PLACE_BYTES;
        self.depth = self.depth.max(item.depth + 1);
        if self.depth > MAX_DEPTH {
            return Err(refused(format!("it makes a value of more than {MAX_DEPTH} levels")));
        }
        if self.num_bytes > MAX_VALUE_BYTES {
            return Err(refused(format!("it makes a value of more than {} MB", MAX_VALUE_BYTES / 1_000_000)));
        }
        Ok(())
    }
}

/// A list, a tuple or a dict whose size is known.
#[derive(Debug)]
pub(in crate::data::jinja) struct Measured {
    content: Content,
    size: Size,
}

#[derive(Debug)]
enum Content {
    List(Vec<Value>),
    Tuple(Vec<Value>),
    /// What `groupby` gives: a tuple of a key and a list, which have names.
    Group(Vec<Value>),
    /// The dict as the engine has it.
    Dict(Value),
}

impl Measured {
    /// A list or dict with its size, or any other value as it is. Lists that are made while they are read are made here.
    pub(in crate::data::jinja) fn of(value: Value, is_tuple: bool) -> Result<Value, Error> {
        let (content, size) = match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                let (mut items, mut size) = (Vec::new(), Size::default());
                for item in value.try_iter()? {
                    let of_item = Size::of(&item, 1)?;
                    size.add(of_item)?;
                    let is_foreign = of_item.depth > 0 && item.downcast_object_ref::<Self>().is_none();
                    items.push(if is_foreign { Self::of(item, false)? } else { item });
                }
                (if is_tuple { Content::Tuple(items) } else { Content::List(items) }, size)
            }
            ValueKind::Map => {
                let size = Size::of(&value, 0)?;
                (Content::Dict(value), size)
            }
            _ => return Ok(value),
        };
        if let Content::List(items) | Content::Tuple(items) = &content {
            made(items.len() * PLACE_BYTES)?;
        }
        Ok(Value::from_object(Self { content, size }))
    }

    /// A group of `groupby`.
    pub(in crate::data::jinja) fn of_group(group: &Value) -> Result<Value, Error> {
        let (key, list) = (group.get_item_by_index(0)?, Self::of(group.get_item_by_index(1)?, false)?);
        let mut size = Size::of(&key, 1)?;
        size.add(Size::of(&list, 1)?)?;
        Ok(Value::from_object(Self { content: Content::Group(vec![key, list]), size }))
    }

    pub(in crate::data::jinja) fn is_tuple(&self) -> bool {
        matches!(self.content, Content::Tuple(_) | Content::Group(_))
    }
}

impl Object for Measured {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        if matches!(self.content, Content::Dict(_)) { ObjectRepr::Map } else { ObjectRepr::Seq }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match &self.content {
            Content::Group(items) => match key.as_str() {
                Some(name) => items.get(["grouper", "list"].iter().position(|known| *known == name)?).cloned(),
                None => items.get(key.as_usize()?).cloned(),
            },
            Content::List(items) | Content::Tuple(items) => items.get(key.as_usize()?).cloned(),
            Content::Dict(dict) => dict.as_object()?.get_value(key),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        match &self.content {
            Content::List(items) | Content::Tuple(items) | Content::Group(items) => Enumerator::Seq(items.len()),
            Content::Dict(dict) => Enumerator::Values(dict.try_iter().into_iter().flatten().collect()),
        }
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&repr(&Value::from_dyn_object(self.clone())).map_err(|_| fmt::Error)?)
    }
}

/// The factor behind every `*`, and what makes tuples; see [`checked_source`].
const ONE: &str = "__one";
/// The text behind every `~`.
const NO_TEXT: &str = "__none";
const TUPLE: &str = "__tuple";

/// The source of a template with calls of [`TUPLE`] in front of its tuples, which the engine would read as lists, and [`ONE`].
///
/// The compiler computes what constants say, in its own way and however large; not where a factor is one that it does not know.
///
/// # Errors
/// A source that is too long, or a tag with too many parts.
pub(in crate::data::jinja) fn checked_source(source: &str, whitespace: WhitespaceConfig) -> Result<String, Error> {
    let syntax = |reason: String| Error::new(ErrorKind::SyntaxError, reason);
    if source.len() > MAX_SOURCE_BYTES {
        return Err(syntax(format!("it has more than {} kB", MAX_SOURCE_BYTES / 1_000)));
    }
    // Where a text is put in; tokens since the tag began; `elif`s.
    let (mut edits, mut num_tokens, mut num_elif): (Vec<(usize, &str)>, _, _) = (Vec::new(), 0, 0);
    // For each open bracket: the place, if it may begin a tuple.
    let mut open: Vec<Option<usize>> = Vec::new();
    let (mut is_value, mut follows_call, mut is_empty) = (false, false, false);
    for token in tokenize(source, false, SyntaxConfig, whitespace) {
        // The parser says what is wrong.
        let Ok((token, span)) = token else { break };
        num_tokens += 1;
        match &token {
            Token::BlockStart | Token::VariableStart => {
                num_tokens = 0;
                open.clear();
            }
            Token::Ident("elif") => num_elif += 1,
            // Behind a bracket or a comma it unpacks a list.
            Token::Mul if follows_call => {}
            Token::Mul | Token::Mod | Token::FloorDiv => edits.push((span.start_offset as usize, "* __one ")),
            Token::Tilde => edits.push((span.start_offset as usize, "~ __none ")),
            Token::ParenOpen => open.push((!is_value).then_some(span.start_offset as usize)),
            Token::BracketOpen | Token::BraceOpen => open.push(None),
            Token::Comma => {
                if let Some(Some(place)) = open.last_mut().map(Option::take) {
                    edits.push((place, TUPLE));
                }
            }
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                if let (Some(Some(place)), true) = (open.pop(), is_empty) {
                    edits.push((place, TUPLE));
                }
            }
            _ => {}
        }
        is_empty = matches!(token, Token::ParenOpen);
        follows_call = is_empty || matches!(token, Token::Comma);
        // What is called, or lists the targets of a loop or a `set`.
        is_value = match token {
            Token::Ident(word) => !["in", "not", "and", "or", "if", "else", "elif", "is"].contains(&word),
            token => matches!(token, Token::ParenClose | Token::BracketClose | Token::Str(_) | Token::String(_)),
        };
        if num_tokens.max(num_elif * 5) > MAX_TAG_TOKENS {
            return Err(syntax(format!(
                "a tag has more than {MAX_TAG_TOKENS} words and marks, or the template more than {} `elif` (in line {})",
                MAX_TAG_TOKENS / 5,
                span.start_line
            )));
        }
    }
    edits.sort_unstable();
    Ok(with_texts(source, &edits))
}

/// A text with others put in at their places, which ascend.
fn with_texts(source: &str, texts: &[(usize, &str)]) -> String {
    let (mut out, mut from) = (String::with_capacity(source.len()), 0);
    for &(place, text) in texts {
        out.push_str(&source[from..place]);
        out.push_str(text);
        from = place;
    }
    out + &source[from..]
}

/// The instructions, with those that keep the bounds.
pub(in crate::data::jinja) fn bounded(instructions: &Instructions<'static>) -> Instructions<'static> {
    let mut out = Instructions::new(instructions.name(), instructions.source());
    let mut places = Vec::new();
    let position = |out: &Instructions<'_>| u32::try_from(out.len()).unwrap_or(u32::MAX);
    for at in 0..position(instructions) {
        places.push(position(&out));
        let line = instructions.get_line(at).and_then(|line| u16::try_from(line).ok()).unwrap_or(0);
        for instruction in instructions.get(at).map(with_bounds).unwrap_or_default() {
            out.add_with_line(instruction, line);
        }
    }
    places.push(position(&out));
    for at in 0..position(&out) {
        use Instruction as I;
        if let Some(
            I::Iterate(target)
            | I::Jump(target)
            | I::JumpIfFalse(target)
            | I::JumpIfFalseOrPop(target)
            | I::JumpIfTrueOrPop(target)
            | I::BuildMacro(_, target, _),
        ) = out.get_mut(at)
        {
            *target = places.get(*target as usize).copied().unwrap_or(*target);
        }
    }
    out
}

fn with_bounds(instruction: &Instruction<'static>) -> Vec<Instruction<'static>> {
    use Instruction as I;
    let own = |name, number| I::ApplyFilter(name, Some(1), FIRST_OWN_NUMBER + number);
    let (held, looped, read) = (own(HELD, 0), own(LOOPED, 1), own(READ, 2));
    let same = instruction.clone();
    match instruction {
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        I::LoadConst(value) if !is_live(value) => {
            vec![I::LoadConst(Measured::of(value.clone(), false).unwrap_or_default())]
        }
        I::Rem => vec![I::ApplyFilter(REMAINDER, Some(2), UNNUMBERED), held],
        I::IntDiv => vec![I::ApplyFilter(FLOOR_DIVISION, Some(2), UNNUMBERED)],
        // The namespace lies above the value.
        I::SetAttr(_) => vec![I::Swap, I::ApplyFilter(STORED, Some(1), UNNUMBERED), I::Swap, held, same],
        I::ApplyFilter(name, count, number) => {
            let number = if *number < FIRST_OWN_NUMBER { *number } else { UNNUMBERED };
            vec![I::ApplyFilter(name, *count, number), held]
        }
        I::StringConcat => vec![I::ApplyFilter(JOINED, Some(2), FIRST_OWN_NUMBER + 3)],
        I::GetItem => vec![I::ApplyFilter(ITEM, Some(2), FIRST_OWN_NUMBER + 4)],
        I::GetAttr(name) => {
            let method = METHODS.iter().find(|(known, _)| known == name);
            vec![method.map_or(same, |(_, filter)| I::ApplyFilter(filter, Some(1), UNNUMBERED))]
        }
        I::PushLoop(_) => vec![looped, same],
        I::Slice
        | I::Add
        | I::Mul
        | I::BuildList(_)
        | I::BuildMap(_)
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(_)
        | I::EndCapture => vec![same, held],
        I::In | I::Eq | I::Ne | I::Lt | I::Lte | I::Gt | I::Gte | I::CompareAndPreserve(_) | I::PerformTest(..) => {
            vec![same, read]
        }
        _ => vec![same],
    }
}
