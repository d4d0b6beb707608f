//! Calls of tools in what a model writes. How they are written is the template's choice, so it is asked: a call with known
//! words is rendered, and what stands around the words is the form.

use std::ops::Range;

use rand::Rng as _;
use rand::distr::Alphanumeric;
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;

/// Words of the calls that are rendered to see their form.
const NAMES: [&str; 2] = ["qzname", "qzother"];
const KEYS: [&str; 2] = ["qzfirst", "qzsecond"];
const VALUES: [&str; 2] = ["qzone", "qztwo"];

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    pub(super) name: String,
    pub(super) arguments: Map<String, Value>,
}

/// How a template writes calls.
#[derive(Clone, Debug)]
pub(super) struct CallForm {
    /// What stands before each call; nothing where an answer that is a call consists of it.
    opening: String,
    /// What more stands before the first.
    before_first: String,
    shape: Shape,
    /// Texts of special tokens, which are no content.
    special: Vec<String>,
}

#[derive(Clone, Debug)]
enum Shape {
    /// JSON: an object or a list of objects, with the name and the arguments at these places of each.
    Json { name: String, arguments: String },
    /// A name, and somewhere behind it the arguments as a JSON object.
    Named,
    /// A name, and behind it each argument between marks: `key` and `value` are groups.
    Marked(Regex),
}

impl CallForm {
    /// The form in which `template` writes calls; `None` where it writes none, or in a way that is not understood.
    pub(super) fn of(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<Self> {
        let special = tokenizer.special_texts();
        // Some templates allow one call in an answer.
        [2, 1].into_iter().find_map(|num_calls| {
            let probe = Probe::of(template, num_calls)?;
            let form = Self { special: special.clone(), ..probe.form()? };
            // What was written is what is read.
            let (_, calls) = form.read(&probe.answer, &probe.tools)?;
            (calls == probe.calls).then_some(form)
        })
    }

    /// The calls in what a model wrote, and where the text ends that stands before them; `None` where there are none.
    pub(super) fn read(&self, text: &str, tools: &Value) -> Option<(usize, Vec<Call>)> {
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
    pub(super) fn content_so_far(&self, text: &str) -> usize {
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
    pub(super) fn without_special(&self, text: &str) -> String {
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
            Shape::Json { name, arguments } => {
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
            Shape::Named => {
                let (name, rest) = name_at(text)?;
                let upto = rest.find(&self.opening).unwrap_or(rest.len());
                let at = rest[..upto].find('{')?;
                let (value, length) = json_at(&rest[at..])?;
                let Value::Object(arguments) = value else { return None };
                Some((vec![Call { name, arguments }], text.len() - rest.len() + at + length))
            }
            Shape::Marked(argument) => {
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
pub(super) struct CallReader {
    form: CallForm,
    tools: Value,
    one_call: bool,
    text: String,
    /// How much of it has been given as content.
    shown: usize,
}

impl CallReader {
    pub(super) fn new(form: CallForm, tools: &Value, one_call: bool) -> Self {
        let tools = tools.as_array().into_iter().flatten().map(|tool| {
            // Some clients leave the frame of a function out.
            if tool["function"].is_object() { tool.clone() } else { json!({"function": tool}) }
        });
        Self { form, tools: tools.collect(), one_call, text: String::new(), shown: 0 }
    }

    /// Takes more of the text; returns what of its content can be shown now.
    pub(super) fn push(&mut self, text: &str) -> String {
        self.text.push_str(text);
        self.show(self.form.content_so_far(&self.text))
    }

    /// The rest of the content, and the calls in OpenAI's form.
    pub(super) fn end(&mut self) -> (String, Vec<Value>) {
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
    pub(super) fn json(&self) -> Value {
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
        let called = calls.iter().enumerate().map(|(index, Call { name, arguments })| {
            json!({"id": format!("call{index:05}"), "type": "function",
                   "function": {"name": name, "arguments": arguments}})
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
        let form = |before: &str, second: Option<&str>, shape: Shape| {
            let opening = second.map_or(before, |second| &before[before.len() - common_suffix(before, second)..]);
            let opening = if opening.trim().is_empty() { before } else { opening };
            // Not the end of the mark before it.
            let opening = &opening[opening.find(['<', '[']).unwrap_or(0)..];
            let before_first = before[..before.len() - opening.len()].trim_start().to_owned();
            CallForm { opening: opening.trim().to_owned(), before_first, shape, special: Vec::new() }
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
                return Some(form(&text[..at], second, Shape::Json { name, arguments }));
            }
        }
        let key = find(text, KEYS[0], name.end)?;
        let arguments = text[name.end..key.start].find('{').and_then(|at| json_at(&text[name.end + at..]));
        let before_second = |from: usize| second.as_ref().map(|second| &text[from..second.start]);
        if arguments.is_some_and(|(value, _)| value == json!(self.calls[0].arguments)) {
            return Some(form(&text[..name.start], before_second(key.end), Shape::Named));
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
        let shape = Shape::Marked(Regex::new(&argument).ok()?);
        Some(form(&text[..name.start], before_second(other_value.end), shape))
    }
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
mod tests {
    use super::*;
    use crate::data::fixture::chat_tokenizer;

    /// A template that writes a turn's calls as `calls` does.
    fn form(calls: &str) -> Option<CallForm> {
        let source = format!(
            "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}\
             {{{{ '<|im_start|>' + m.role + '\n' + m.content }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}\
             {{{{ '<|im_end|>\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
        );
        let tokenizer = chat_tokenizer();
        CallForm::of(&ChatTemplate::new(&source, "the test", &tokenizer).unwrap(), &tokenizer)
    }

    const EACH: &str = "{% for call in m.tool_calls %}{% set f = call.function %}";
    const ONE: &str = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}\
        {% set f = m.tool_calls[0].function %}";

    /// The forms of well-known families, an answer in each with content, and whether it has two calls.
    fn families() -> Vec<(String, &'static str, usize)> {
        let each = |call: &str| format!("{EACH}{call}{{% endfor %}}");
        let arguments = "{% for k, v in f.arguments.items() %}";
        vec![
            (
                each(
                    "{{ '\n<tool_call>\n{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments | tojson + '}\n</tool_call>' }}",
                ),
                "Yes.\n<tool_call>\n{\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}\n</tool_call>\n\
                 <tool_call>{\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}</tool_call>",
                2,
            ),
            (
                format!(
                    "{ONE}{{{{ '{{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}}' }}}}"
                ),
                "{\"name\": \"find\", \"parameters\": {\"city\": \"Bern\", \"days\": 3}}",
                1,
            ),
            (
                format!(
                    "{{{{ '[TOOL_CALLS] [' }}}}{EACH}{{{{ '{{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments | tojson \
                     + ', \"id\": \"' + call.id + '\"}}' }}}}{{{{ '' if loop.last else ', ' }}}}{{% endfor %}}{{{{ ']' }}}}"
                ),
                "Yes.[TOOL_CALLS][{\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}, \
                 {\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}]",
                2,
            ),
            (
                each("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"),
                "Yes. [TOOL_CALLS]find[ARGS]{\"city\": \"Bern\", \"days\": 3}[TOOL_CALLS]find[ARGS]{\"city\": \"Bern\", \"days\": 3}",
                2,
            ),
            (
                format!(
                    "{{{{ '<calls>' }}}}{}{{{{ '</calls>' }}}}",
                    each(
                        "{{ '<call>function<sep>' + f.name + '\n```json\n' + f.arguments | tojson + '\n```</call>' }}"
                    )
                ),
                "Yes.<calls><call>function<sep>find\n```json\n{\"city\": \"Bern\", \"days\": 3}\n```</call>\
                 <call>function<sep>find\n```json\n{\"city\": \"Bern\", \"days\": 3}\n```</call></calls>",
                2,
            ),
            (
                each(&format!(
                    "{{{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}}}{arguments}\
                     {{{{ '<parameter=' + k + '>\n' + v | string + '\n</parameter>\n' }}}}{{% endfor %}}\
                     {{{{ '</function>\n</tool_call>' }}}}"
                )),
                "Yes.\n\n<tool_call>\n<function=find>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
                 </function>\n</tool_call>",
                1,
            ),
            (
                each(&format!(
                    "{{{{ '\n<tool_call>' + f.name }}}}{arguments}{{{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v | string \
                     + '</arg_value>' }}}}{{% endfor %}}{{{{ '\n</tool_call>' }}}}"
                )),
                "Yes.\n<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n\
                 <arg_value>3</arg_value>\n</tool_call>",
                1,
            ),
            (
                each(&format!(
                    "{{{{ 'Go ' + f.name }}}}{arguments}{{{{ ' a ' + k + ' is ' + v | string + '.' }}}}{{% endfor %}}"
                )),
                "Yes. Go find a city is Bern. a days is 3.",
                1,
            ),
        ]
    }

    fn tools() -> Value {
        let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
        json!([{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": properties}}}])
    }

    #[test]
    fn calls_are_read_as_each_template_writes_them_and_are_no_content() {
        let arguments = json!({"city": "Bern", "days": 3});
        let call = Call { name: "find".to_owned(), arguments: arguments.as_object().unwrap().clone() };
        for (template, text, num_calls) in families() {
            let form = form(&template).unwrap_or_else(|| panic!("{template}"));
            let (content, calls) = form.read(text, &tools()).unwrap_or_else(|| panic!("{form:?}: {text}"));
            assert_eq!(calls, vec![call.clone(); num_calls], "{form:?}");
            let content = text[..content].to_owned();
            assert_eq!(content, if text.starts_with('{') { "" } else { "Yes." });
            // As it is written, piece by piece.
            for size in [1, 7] {
                let mut reader = CallReader::new(form.clone(), &tools(), false);
                let letters: Vec<char> = text.chars().collect();
                let shown: String =
                    letters.chunks(size).map(|part| reader.push(&part.iter().collect::<String>())).collect();
                let (rest, calls) = reader.end();
                assert_eq!((format!("{shown}{rest}"), calls.len()), (content.clone(), num_calls), "{form:?}");
                assert_eq!(calls[0]["function"]["name"], "find");
                assert_eq!(calls[0]["function"]["arguments"], r#"{"city":"Bern","days":3}"#);
            }
            assert!(form.read("Yes. It is 3.", &tools()).is_none());
        }
    }

    #[test]
    fn what_is_no_call_stays_text() {
        let whole = |form: &CallForm, text: &str| {
            let mut reader = CallReader::new(form.clone(), &tools(), true);
            let shown = reader.push(text);
            let (rest, calls) = reader.end();
            (format!("{shown}{rest}"), calls.len())
        };
        let [tags, bare, ..] = &families()[..] else { panic!() };
        let (tags, bare) = (form(&tags.0).unwrap(), form(&bare.0).unwrap());
        for text in ["<tool_call>\n{\"name\": \"find\", \"argu", "Is 1 <tool 2? ", "<tool_call>no</tool_call>"] {
            assert_eq!(whole(&tags, text), (text.to_owned(), 0));
        }
        for text in ["{\"name\": \"other\", \"parameters\": {}}", "[1, 2]", "{\"a\": 1}", "Yes."] {
            assert_eq!(whole(&bare, text), (text.to_owned(), 0));
        }
        let call = "{\"name\": \"find\", \"parameters\": {\"city\": \"Bern\"}}";
        assert_eq!(whole(&bare, &format!("<|im_start|> {call}; {call}")), (String::new(), 1));
        // A template without calls has no form, nor one that writes other things than it is given.
        assert!(form("{{ 'called' }}").is_none());
        assert!(form("{{ '<call>' + m.tool_calls[0].function.name }}").is_none());
    }
}
