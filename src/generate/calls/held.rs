//! Rules that hold an answer to a call of a tool, in the form in which a template writes calls.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::super::grammar::{Grammar, Grammars, json_of, quoted};
use super::{KEYS, Marks, NAMES, VALUES, find, json_at};

/// The text around the names and the arguments of calls.
#[derive(Clone, Debug)]
pub(crate) struct CallText {
    before: String,
    /// From a name to its arguments.
    middle: String,
    /// Around each argument; none where they are one JSON object.
    marks: Option<Marks>,
    /// From the arguments of a call to the next name; none where an answer has one call.
    between: Option<String>,
    after: String,
}

/// What an answer may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowed<'a> {
    /// The functions that may be called.
    pub(crate) functions: &'a [&'a Value],
    /// Whether several may.
    pub(crate) several: bool,
    /// The schema of what may be said instead.
    pub(crate) content: Option<&'a Value>,
}

impl CallText {
    /// That of answers with `one` and with `two` calls of the words of [`calls`](super), before the first of `ends`.
    pub(super) fn of(one: &str, two: Option<&str>, marks: Option<&Marks>, ends: &[String]) -> Option<Self> {
        let first = CallPlace::of(one, 0, 0, marks)?;
        let after = |from: usize, text: &str| {
            let rest = &text[from..];
            let end = ends.iter().filter_map(|end| rest.find(end.as_str())).min().unwrap_or(rest.len());
            rest[..end].trim_end().to_owned()
        };
        let (before, after_one) = (&one[..first.name], after(first.end, one));
        let between = two.and_then(|two| {
            let first = CallPlace::of(two, 0, 0, marks)?;
            let second = CallPlace::of(two, 1, first.end, marks)?;
            let is_alike = two[..first.name] == *before && after(second.end, two) == after_one;
            is_alike.then(|| two[first.end..second.name].to_owned())
        });
        Some(Self {
            before: before.to_owned(),
            middle: one[first.name + NAMES[0].len()..first.arguments].to_owned(),
            marks: marks.cloned(),
            between,
            after: after_one,
        })
    }

    /// The grammar of what is `allowed`.
    ///
    /// # Errors
    /// The function whose parameters cannot be followed, and why.
    pub(crate) fn grammar(&self, allowed: Allowed<'_>, grammars: &Grammars) -> Result<Grammar, String> {
        let literal = |text: &str| grammars.literal(text);
        let mut rules = format!("start: calls{}\n", if allowed.content.is_some() { " | content" } else { "" });
        if let Some(schema) = allowed.content {
            // The lexer does not go back from the start of a call to other JSON.
            if self.before.trim_start().starts_with('{') {
                let text = "this model's chat template writes calls as JSON without a mark: leave `response_format` or `tools` out";
                return Err(text.to_owned());
            }
            grammars.of_schema(schema).map_err(|error| error.to_string())?;
            let _ = writeln!(rules, "content: {}", json_of(schema));
        }
        let more = self.between.as_ref().filter(|_| allowed.several);
        let more = more.map(|between| format!("({} call)*", literal(between))).unwrap_or_default();
        let _ = writeln!(rules, "calls: {} call {more} {}", literal(&self.before), literal(&self.after));
        let names: Vec<String> = (0..allowed.functions.len()).map(|at| format!("call{at}")).collect();
        let _ = writeln!(rules, "call: {}", names.join(" | "));
        for (at, function) in allowed.functions.iter().enumerate() {
            let Some(name) = function["name"].as_str() else { return Err("a function has no `name`".to_owned()) };
            let parameters = parameters(function);
            grammars.of_schema(&parameters).map_err(|error| format!("the parameters of `{name}`: {error}"))?;
            let start = format!("call{at}: {} {}", literal(name), literal(&self.middle));
            match &self.marks {
                None => drop(writeln!(rules, "{start} {}", json_of(&parameters))),
                Some(marks) => marks.rules(&mut rules, &start, &parameters, at, grammars),
            }
        }
        grammars.of_rules(rules).map_err(|error| error.to_string())
    }
}

impl Marks {
    /// The rule of a call, whose arguments are in the order of their schema.
    fn rules(&self, rules: &mut String, start: &str, parameters: &Value, call: usize, grammars: &Grammars) {
        let (mut call_rule, mut values) = (start.to_owned(), String::new());
        let is_required = |key: &str| parameters["required"].as_array().is_some_and(|keys| keys.contains(&json!(key)));
        let properties = parameters["properties"].as_object().into_iter().flatten();
        for (at, (key, schema)) in properties.enumerate() {
            let before = [&self.before_key, key, &self.before_value].map(|part| grammars.literal(part)).join(" ");
            let optional = if is_required(key) { "" } else { "?" };
            let _ = write!(call_rule, " ({before} value{call}_{at}){optional}");
            let value = match (schema["type"] == "string", schema["enum"].as_array()) {
                (true, None) => format!("[suffix={}]: /(?s:.*)/", quoted(&self.after_value)),
                (true, Some(texts)) => {
                    let texts: Vec<String> =
                        texts.iter().filter_map(Value::as_str).map(|text| grammars.literal(text)).collect();
                    format!(": ({}) {}", texts.join(" | "), grammars.literal(&self.after_value))
                }
                (false, _) => {
                    let mut schema = schema.clone();
                    for definitions in ["$defs", "definitions"] {
                        if let (Some(schema), Some(all)) = (schema.as_object_mut(), parameters.get(definitions)) {
                            schema.insert(definitions.to_owned(), all.clone());
                        }
                    }
                    format!(": {} {}", json_of(&schema), grammars.literal(&self.after_value))
                }
            };
            let _ = writeln!(values, "value{call}_{at}{value}");
        }
        let _ = write!(rules, "{call_rule}\n{values}");
    }
}

/// Where a call stands in a text.
struct CallPlace {
    name: usize,
    arguments: usize,
    end: usize,
}

impl CallPlace {
    /// That of a call of `NAMES[call]` behind `from`.
    fn of(text: &str, call: usize, from: usize, marks: Option<&Marks>) -> Option<Self> {
        let name = find(text, NAMES[call], from)?;
        let Some(marks) = marks else {
            let is_of_call = |value: &Value| KEYS.iter().zip(VALUES).all(|(key, word)| value[key] == word);
            let objects = text[name.end..].match_indices('{').map(|(at, _)| name.end + at);
            let found = objects.filter_map(|at| Some((at, json_at(&text[at..])?)));
            let (at, (_, length)) = found.into_iter().find(|(_, (value, _))| is_of_call(value))?;
            return Some(Self { name: name.start, arguments: at, end: at + length });
        };
        let key = find(text, KEYS[0], name.end)?;
        let arguments = key.start.checked_sub(marks.before_key.len()).filter(|at| *at >= name.end)?;
        let value = find(text, VALUES[1], find(text, KEYS[1], key.end)?.end)?;
        let is_marked =
            text[arguments..].starts_with(&marks.before_key) && text[value.end..].starts_with(&marks.after_value);
        is_marked.then(|| Self { name: name.start, arguments, end: value.end + marks.after_value.len() })
    }
}

/// The schema of a function's arguments: an object, without keys that the function does not declare.
fn parameters(function: &Value) -> Value {
    const OTHERS: [&str; 6] = ["additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"];
    let nothing = json!({"type": "object", "properties": {}});
    let mut schema = if function["parameters"].is_object() { function["parameters"].clone() } else { nothing };
    if !OTHERS.iter().any(|key| schema.get(key).is_some()) {
        schema["type"] = json!("object");
        if schema["properties"].is_object() {
            schema["additionalProperties"] = json!(false);
        }
    }
    schema
}
