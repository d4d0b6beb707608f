//! Calls of tools in what a model writes. How they are written is the template's choice, so it is asked: a call with known
//! words is rendered, and what stands around the words is the form.

mod held;

use std::ops::Range;

use rand::Rng as _;
use rand::distr::Alphanumeric;
use regex::Regex;
use serde_json::{Map, Value, json};

pub(crate) use self::held::Allowed;
use self::held::CallText;
use crate::data::template::{ChatTemplate, Stops};
use crate::data::tokenizer::Tokenizer;

/// Words of the calls that are rendered to see their form.
const NAMES: [&str; 2] = ["qzname", "qzother"];
const KEYS: [&str; 2] = ["qzfirst", "qzsecond"];
const VALUES: [&str; 2] = ["qzone", "qztwo"];

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) arguments: Map<String, Value>,
}

/// How a template writes calls.
#[derive(Clone, Debug)]
pub(crate) struct CallForm {
    /// What stands before each call; nothing where an answer that is a call consists of it.
    opening: String,
    /// What more stands before the first.
    before_first: String,
    shape: CallShape,
    /// Texts of special tokens, which are no content.
    special: Vec<String>,
    /// How they are written, where a text can be held to it.
    pub(crate) written: Option<CallText>,
}

#[derive(Clone, Debug)]
enum CallShape {
    /// JSON: an object or a list of objects, with the name and the arguments at these places of each.
    Json { name: String, arguments: String },
    /// A name, and somewhere behind it the arguments as a JSON object.
    Named,
    /// A name, and behind it each argument between marks: `key` and `value` are groups of the pattern.
    Marked(Regex, Marks),
}

/// What stands around the words of an argument.
#[derive(Clone, Debug)]
struct Marks {
    before_key: String,
    before_value: String,
    after_value: String,
}

impl CallForm {
    /// The form in which `template` writes calls; `None` where it writes none, or in a way that is not understood.
    pub(crate) fn of(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<Self> {
        let special = tokenizer.special_texts();
        let probes = [2, 1].map(|num_calls| Probe::of(template, num_calls));
        // Some templates allow one call in an answer.
        let form = probes.iter().flatten().find_map(|probe| {
            let form = Self { special: special.clone(), ..probe.form()? };
            // What was written is what is read.
            let (_, calls) = form.read(&probe.answer, &probe.tools)?;
            (calls == probe.calls).then_some(form)
        })?;
        let marks = if let CallShape::Marked(_, marks) = &form.shape { Some(marks) } else { None };
        let stops = Stops::of(tokenizer, Some(template));
        let ends: Vec<String> =
            stops.ids.iter().filter_map(|id| tokenizer.token_text(*id)).chain(stops.texts).collect();
        let [two, one] = probes.map(|probe| probe.map(|probe| probe.answer));
        let written = one.and_then(|one| CallText::of(&one, two.as_deref(), marks, &ends));
        Some(Self { written, ..form })
    }

    /// The calls in what a model wrote, and where the text ends that stands before them; `None` where there are none.
    pub(crate) fn read(&self, text: &str, tools: &Value) -> Option<(usize, Vec<Call>)> {
        let start = self.start(text)?;
        let mut calls = Vec::new();
        let mut rest = &text[start..];
        loop {
            let (new, end) = self.one(rest, tools)?;
            calls.extend(new);
            rest = &rest[end..];
            match self.opening.as_str() {
                "" => {
                    rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ';' || c == ',');
                    if !rest.starts_with('{') {
                        break;
                    }
                }
                opening => match rest.find(opening) {
                    Some(at) => rest = &rest[at + opening.len()..],
                    None => break,
                },
            }
        }
        // JSON that is an answer is no call.
        let is_known = |call: &Call| function(tools, &call.name).is_some();
        let is_answer = self.opening.is_empty() && !calls.iter().all(is_known);
        (!calls.is_empty() && !is_answer).then(|| (self.content_end(text, start), calls))
    }

    /// How much of a text that may go on is content for sure.
    fn content_so_far(&self, text: &str) -> usize {
        if let Some(start) = self.start(text) {
            return self.content_end(text, start);
        }
        if self.opening.is_empty() {
            let is_open = self.without_special(text).trim().is_empty();
            return if is_open { 0 } else { text.len() };
        }
        let marks = [format!("{}{}", self.before_first, self.opening), self.opening.clone()];
        let is_held = |at: usize| {
            let rest = text[at..].trim_start();
            rest.is_empty() || marks.iter().any(|mark| mark.starts_with(rest))
        };
        text.char_indices().map(|(at, _)| at).find(|at| is_held(*at)).unwrap_or(text.len())
    }

    /// A text without the names of special tokens.
    pub(crate) fn without_special(&self, text: &str) -> String {
        self.special.iter().fold(text.to_owned(), |text, special| text.replace(special.as_str(), ""))
    }

    /// Where the first call begins, behind its opening.
    fn start(&self, text: &str) -> Option<usize> {
        if !self.opening.is_empty() {
            return Some(text.find(&self.opening)? + self.opening.len());
        }
        let mut rest = text.trim_start();
        while let Some(special) = self.special.iter().find(|special| rest.starts_with(special.as_str())) {
            rest = rest[special.len()..].trim_start();
        }
        rest.starts_with(['{', '[']).then(|| text.len() - rest.len())
    }

    fn content_end(&self, text: &str, start: usize) -> usize {
        if self.opening.is_empty() {
            return 0;
        }
        let before = text[..start - self.opening.len()].trim_end();
        before.strip_suffix(self.before_first.trim_end()).unwrap_or(before).trim_end().len()
    }

    /// The calls at the start of a text, and where they end.
    fn one(&self, text: &str, tools: &Value) -> Option<(Vec<Call>, usize)> {
        match &self.shape {
            CallShape::Json { name, arguments } => {
                let (value, end) = json_at(text)?;
                let objects = if let Value::Array(list) = value { list } else { vec![value] };
                let call = |object: Value| {
                    let name = object.pointer(name)?.as_str()?.to_owned();
                    let arguments = match object.pointer(arguments).cloned() {
                        Some(Value::Object(arguments)) => arguments,
                        Some(Value::String(text)) => serde_json::from_str(&text).ok()?,
                        None | Some(Value::Null) => Map::new(),
                        Some(_) => return None,
                    };
                    Some(Call { name, arguments })
                };
                Some((objects.into_iter().map(call).collect::<Option<_>>()?, end))
            }
            CallShape::Named => {
                let (name, rest) = name_at(text)?;
                let upto = rest.find(&self.opening).unwrap_or(rest.len());
                let at = rest[..upto].find('{')?;
                let (value, length) = json_at(&rest[at..])?;
                let Value::Object(arguments) = value else { return None };
                Some((vec![Call { name, arguments }], text.len() - rest.len() + at + length))
            }
            CallShape::Marked(argument, _) => {
                let (name, rest) = name_at(text)?;
                let end = rest.find(&self.opening).unwrap_or(rest.len());
                let schema =
                    function(tools, &name).map_or(&Value::Null, |function| &function["parameters"]["properties"]);
                let arguments = argument.captures_iter(&rest[..end]).map(|found| {
                    let (key, value) = (found["key"].to_owned(), &found["value"]);
                    let is_text = schema[&key]["type"] == "string";
                    let value = serde_json::from_str(value).ok().filter(|_| !is_text).unwrap_or_else(|| json!(value));
                    (key, value)
                });
                Some((vec![Call { name, arguments: arguments.collect() }], text.len() - rest.len() + end))
            }
        }
    }
}

/// Takes a text as it is written, and tells its content from its calls.
#[derive(Debug)]
pub(crate) struct CallReader {
    form: CallForm,
    tools: Value,
    one_call: bool,
    text: String,
    /// How much of it has been given as content.
    shown: usize,
}

impl CallReader {
    pub(crate) fn new(form: CallForm, tools: &Value, one_call: bool) -> Self {
        let tools = functions(tools).map(|function| json!({"function": function})).collect();
        Self { form, tools, one_call, text: String::new(), shown: 0 }
    }

    /// Takes more of the text; returns what of its content can be shown now.
    pub(crate) fn push(&mut self, text: &str) -> String {
        self.text.push_str(text);
        self.show(self.form.content_so_far(&self.text))
    }

    /// The rest of the content, and the calls in OpenAI's form.
    pub(crate) fn end(&mut self) -> (String, Vec<Value>) {
        match self.form.read(&self.text, &self.tools) {
            Some((content, calls)) => {
                let num_calls = if self.one_call { 1 } else { calls.len() };
                (self.show(content), calls.iter().take(num_calls).map(Call::json).collect())
            }
            None => (self.show(self.text.len()), Vec::new()),
        }
    }

    fn show(&mut self, upto: usize) -> String {
        let new = self.form.without_special(self.text.get(self.shown..upto).unwrap_or_default());
        self.shown = upto.max(self.shown);
        new
    }
}

impl Call {
    /// In OpenAI's form, with an id that all templates accept.
    pub(crate) fn json(&self) -> Value {
        let id: String = rand::rng().sample_iter(Alphanumeric).take(9).map(char::from).collect();
        let arguments = Value::Object(self.arguments.clone()).to_string();
        json!({"id": id, "type": "function", "function": {"name": self.name, "arguments": arguments}})
    }
}

/// The calls that are rendered, and their text.
struct Probe {
    calls: Vec<Call>,
    tools: Value,
    answer: String,
}

impl Probe {
    fn of(template: &ChatTemplate, num_calls: usize) -> Option<Self> {
        let arguments: Map<String, Value> =
            KEYS.into_iter().zip(VALUES).map(|(key, value)| (key.to_owned(), json!(value))).collect();
        let call = |name: &&str| Call { name: (*name).to_owned(), arguments: arguments.clone() };
        let calls: Vec<Call> = NAMES.iter().take(num_calls).map(call).collect();
        // Nothing that differs between two calls but their words: an id may be written.
        let called = calls.iter().map(|Call { name, arguments }| {
            json!({"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}})
        });
        let messages = [
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": "", "tool_calls": called.collect::<Vec<_>>()}),
        ];
        let properties: Map<String, Value> =
            KEYS.map(|key| (key.to_owned(), json!({"type": "string"}))).into_iter().collect();
        let tools: Value = NAMES.iter().map(|name| {
            let parameters = json!({"type": "object", "properties": properties, "required": KEYS});
            json!({"type": "function", "function": {"name": name, "description": "None.", "parameters": parameters}})
        }).collect();
        let rendered = template.render_with_answers(&messages, Some(&tools)).ok()?;
        let answer = rendered.text.get(rendered.answers.first()?.clone())?;
        // A template may write an empty thought first.
        let answer = answer.rsplit_once("</think>").map_or(answer, |(_, answer)| answer).to_owned();
        Some(Self { calls, tools, answer })
    }

    fn form(&self) -> Option<CallForm> {
        let text = self.answer.as_str();
        let name = find(text, NAMES[0], 0)?;
        let form = |before: &str, second: Option<&str>, shape: CallShape| {
            let opening = second.map_or(before, |second| &before[before.len() - common_suffix(before, second)..]);
            let opening = if opening.trim().is_empty() { before } else { opening };
            // Not the end of the mark before it.
            let opening = &opening[opening.find(['<', '[']).unwrap_or(0)..];
            let before_first = before[..before.len() - opening.len()].trim_start().to_owned();
            CallForm { opening: opening.trim().to_owned(), before_first, shape, special: Vec::new(), written: None }
        };
        let second = find(text, NAMES[1], name.end);
        let whole = text[..name.start].match_indices(['{', '[']).map(|(at, _)| at);
        let whole = whole.filter_map(|at| Some((at, json_at(&text[at..])?.0)));
        for (at, value) in whole {
            let object = value.get(0).unwrap_or(&value);
            let places = (place_of(object, &json!(NAMES[0])), place_of(object, &json!(self.calls[0].arguments)));
            if let (Some(name), Some(arguments)) = places {
                // Of several objects, each has its opening.
                let second = second.as_ref().filter(|_| !value.is_array()).and_then(|second| {
                    let between = &text[name_end(text, at)?..second.start];
                    Some(&between[..between.rfind('{')?])
                });
                return Some(form(&text[..at], second, CallShape::Json { name, arguments }));
            }
        }
        let key = find(text, KEYS[0], name.end)?;
        let arguments = text[name.end..key.start].find('{').and_then(|at| json_at(&text[name.end + at..]));
        let before_second = |from: usize| second.as_ref().map(|second| &text[from..second.start]);
        if arguments.is_some_and(|(value, _)| value == json!(self.calls[0].arguments)) {
            return Some(form(&text[..name.start], before_second(key.end), CallShape::Named));
        }
        let value = find(text, VALUES[0], key.end)?;
        let other_key = find(text, KEYS[1], value.end)?;
        let other_value = find(text, VALUES[1], other_key.end)?;
        let (between, after) = (&text[value.end..other_key.start], &text[other_value.end..]);
        let close = &between[..between.len().min(common_prefix(between, after))];
        // Not the start of another mark.
        let close = if close.rfind('<') > close.rfind('>') { &close[..close.rfind('<')?] } else { close };
        let (before_key, before_value) = (&between[close.len()..], &text[key.end..value.start]);
        if close.trim().is_empty() || before_key.trim().is_empty() {
            return None;
        }
        let blank_before = if before_value.ends_with(char::is_whitespace) { r"\s?" } else { "" };
        let blank_after = if close.starts_with(char::is_whitespace) { r"\s?" } else { "" };
        let argument = format!(
            r"(?s){}\s*(?<key>\S+?)\s*{}{blank_before}(?<value>.*?){blank_after}{}",
            pattern(before_key.trim()),
            pattern(before_value.trim()),
            pattern(close.trim()),
        );
        let [before_key, before_value, after_value] = [before_key, before_value, close].map(str::to_owned);
        let shape = CallShape::Marked(Regex::new(&argument).ok()?, Marks { before_key, before_value, after_value });
        Some(form(&text[..name.start], before_second(other_value.end), shape))
    }
}

/// The definitions of the functions; some clients leave the frame around one out.
pub(crate) fn functions(tools: &Value) -> impl Iterator<Item = &Value> {
    tools
        .as_array()
        .into_iter()
        .flatten()
        .map(|tool| if tool["function"].is_object() { &tool["function"] } else { tool })
}

/// The definition of a function.
fn function<'a>(tools: &'a Value, name: &str) -> Option<&'a Value> {
    tools.as_array()?.iter().map(|tool| &tool["function"]).find(|function| function["name"] == name)
}

/// The JSON at the start of a text, after white space, and where it ends.
fn json_at(text: &str) -> Option<(Value, usize)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next()?.ok()?;
    Some((value, values.byte_offset()))
}

fn name_end(text: &str, at: usize) -> Option<usize> {
    Some(at + json_at(&text[at..])?.1)
}

/// The name at the start of a text, and the rest.
fn name_at(text: &str) -> Option<(String, &str)> {
    let text = text.trim_start();
    let end = text.find(|c: char| !(c.is_alphanumeric() || "_-.".contains(c))).unwrap_or(text.len());
    (end > 0).then(|| (text[..end].to_owned(), &text[end..]))
}

/// The JSON pointer of a value in another.
fn place_of(object: &Value, value: &Value) -> Option<String> {
    if object == value {
        return Some(String::new());
    }
    object.as_object()?.iter().find_map(|(key, inner)| Some(format!("/{key}{}", place_of(inner, value)?)))
}

fn find(text: &str, word: &str, from: usize) -> Option<Range<usize>> {
    let at = from + text[from..].find(word)?;
    Some(at..at + word.len())
}

/// A pattern for a mark, in which any white space stands for any other.
fn pattern(mark: &str) -> String {
    mark.split_whitespace().map(regex::escape).collect::<Vec<_>>().join(r"\s*")
}

fn common_prefix(one: &str, other: &str) -> usize {
    let same = one.char_indices().zip(other.chars()).find(|((_, a), b)| a != b);
    same.map_or(one.len().min(other.len()), |((at, _), _)| at)
}

fn common_suffix(one: &str, other: &str) -> usize {
    one.chars().rev().zip(other.chars().rev()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

#[cfg(test)]
mod tests;
