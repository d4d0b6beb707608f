//! What of a conversation leaves no trace in the text that the template writes.
//!
//! A template is free to move, trim and escape what it is given. What it must not do is drop it: then the text is the
//! same whatever was there. That is what is asked, by changing one thing and rendering again; once for each kind of place
//! (a role between two others, with or without tools), and in each row for texts that are not found as they are.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::PoisonError;

use serde_json::{Value, json};

use super::{ChatTemplate, Prompt, TemplateError};

/// What is put into a text to see whether the rendering changes.
const MARK: &str = "qzxj";
/// Lines of a text that are looked for one by one where the whole is not found.
const MAX_LINES: usize = 8;
/// Characters of an excerpt.
const EXCERPT: usize = 40;
/// Keys of a message whose text is part of the conversation.
const TEXT_KEYS: [&str; 2] = ["content", "reasoning_content"];

/// The text of a content: a string, or the text parts of a list.
pub(super) fn text_of(content: &Value) -> Cow<'_, str> {
    match content {
        Value::String(text) => text.into(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n").into()
        }
        _ => "".into(),
    }
}

impl ChatTemplate {
    /// Refuses a conversation that is not all in `text`, which is what the template makes of it.
    pub(super) fn check_trace(
        &self,
        text: &str,
        messages: &[Value],
        tools: Option<&Value>,
    ) -> Result<(), TemplateError> {
        let tools_of = |tools: Option<&Value>| tools.and_then(Value::as_array).cloned().unwrap_or_default();
        for (index, tool) in tools_of(tools).iter().enumerate() {
            let name = tool["function"]["name"].as_str().unwrap_or_default();
            if self.is_new(&("tool", index.min(1))) || !text.contains(name) {
                let mut altered = tools_of(tools);
                altered[index]["function"]["name"] = marked(name).into();
                if self.is_same(text, messages, Some(&altered.into())) {
                    let why = if self.mentions("tools") { "" } else { ": this model's template has no tools" };
                    return Err(self.dropped(format!("tool `{name}` leaves no trace"), why));
                }
            }
        }
        let mut cursor = 0;
        for (index, message) in messages.iter().enumerate() {
            let role = message["role"].as_str().unwrap_or_default();
            let around = |at: Option<&Value>| at.and_then(|message| message["role"].as_str()).map(str::to_owned);
            let place = (role, around(index.checked_sub(1).map(|at| &messages[at])), around(messages.get(index + 1)));
            let place = (place, index.min(2), tools.is_some(), !message["tool_calls"].is_null());
            let unchanged = |alter: &dyn Fn(&mut Value)| {
                let mut altered = messages.to_vec();
                alter(&mut altered[index]);
                self.is_same(text, &altered, tools)
            };
            if !matches!(role, "user" | "assistant") && self.is_new(&("role", &place)) {
                for other in ["user", "assistant"] {
                    if unchanged(&|message| message["role"] = other.into()) {
                        let what = format!("message {index}: its role `{role}` leaves no trace");
                        return Err(self.dropped(what, &format!(": it is written as `{other}`")));
                    }
                }
            }
            for (at, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
                let name = call["function"]["name"].as_str().unwrap_or_default();
                let why = if self.mentions("tool_calls") { "" } else { ": this model's template has no tool calls" };
                let what = |what: &str| format!("message {index}: the call of `{name}` leaves no trace{what}");
                let is_new = self.is_new(&("call", &place, at.min(1)));
                if (is_new || !text.contains(name))
                    && unchanged(&|message| message["tool_calls"][at]["function"]["name"] = marked(name).into())
                {
                    return Err(self.dropped(what(""), why));
                }
                if is_new
                    && unchanged(&|message| message["tool_calls"][at]["function"]["arguments"][MARK] = json!(MARK))
                {
                    return Err(self.dropped(what(" of its arguments"), why));
                }
            }
            for key in TEXT_KEYS.into_iter().filter(|key| !message[*key].is_null()) {
                let content = text_of(&message[key]);
                let content = content.trim();
                if content.is_empty() {
                    continue;
                }
                let found = text[cursor..].find(content).map(|at| cursor + at + content.len());
                cursor = found.unwrap_or(cursor);
                if found.is_some() && !self.is_new(&(key, &place)) {
                    continue;
                }
                // A text that is not there as it was written may be escaped, or a part of it dropped.
                let lines: Vec<&str> = if found.is_some() { vec![content] } else { lines_not_in(text, content) };
                for line in lines {
                    let marked = |message: &mut Value| {
                        replace_text(&mut message[key], line, &marked(line));
                        // The same under another name.
                        if key == "reasoning_content" {
                            message["thinking"] = message[key].clone();
                        }
                    };
                    if unchanged(&marked) {
                        let excerpt: String = line.chars().take(EXCERPT).collect();
                        let why = match (role, key) {
                            ("assistant", _) if index + 1 < messages.len() && text.contains("think") => {
                                "\n  hint: a template that drops the thoughts of earlier answers wants one row for each \
                                 answer"
                            }
                            ("tool", _) if !self.names_role("tool") => ": this model's template has no tools",
                            _ => "",
                        };
                        let what = format!("message {index}: {excerpt:?} of its `{key}` leaves no trace");
                        return Err(self.dropped(what, why));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the template writes this instead as `text`. What it refuses leaves a trace.
    fn is_same(&self, text: &str, messages: &[Value], tools: Option<&Value>) -> bool {
        let values: Vec<_> = messages.iter().map(minijinja::Value::from_serialize).collect();
        self.render_values(&values, tools, Prompt::None).is_ok_and(|altered| altered == text)
    }

    /// Whether a kind of place comes up for the first time.
    fn is_new(&self, place: &impl Hash) -> bool {
        let mut hasher = DefaultHasher::new();
        place.hash(&mut hasher);
        self.traced.lock().unwrap_or_else(PoisonError::into_inner).insert(hasher.finish())
    }

    fn dropped(&self, what: String, why: &str) -> TemplateError {
        TemplateError::Dropped { what, origin: self.origin.clone(), why: why.to_owned() }
    }
}

/// The text with a mark in its middle, where no template cuts.
fn marked(text: &str) -> String {
    let middle = text.char_indices().nth(text.chars().count() / 2).map_or(text.len(), |(at, _)| at);
    format!("{}{MARK}{}", &text[..middle], &text[middle..])
}

/// Lines of `content` that are not in `text` as they are.
fn lines_not_in<'a>(text: &str, content: &'a str) -> Vec<&'a str> {
    let lines = content.lines().map(str::trim).filter(|line| !line.is_empty() && !text.contains(line));
    lines.take(MAX_LINES).collect()
}

/// Replaces the first `from` in a content.
fn replace_text(content: &mut Value, from: &str, to: &str) {
    match content {
        Value::String(text) => *text = text.replacen(from, to, 1),
        Value::Array(parts) => {
            if let Some(part) =
                parts.iter_mut().find(|part| part["text"].as_str().is_some_and(|text| text.contains(from)))
            {
                replace_text(&mut part["text"], from, to);
            }
        }
        _ => {}
    }
}
