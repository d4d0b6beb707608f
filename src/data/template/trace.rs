//! Finds parts of a conversation that leave no trace in the template's text.
//!
//! A template may move, trim and escape what it is given, but must not drop it. A dropped part can be changed without
//! changing the text. So the check changes one part and renders again. This is done once for each kind of place (a role
//! between two other roles, with or without tools), and in every row for texts that are not found unchanged.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::PoisonError;

use serde_json::{Value, json};

use super::{ChatTemplate, Prompt, TemplateError};

/// Text that is inserted to see whether the rendering changes.
const MARK: &str = "qzxj";
/// How many lines are searched for one by one when the whole text is not found.
const MAX_LINES: usize = 8;
/// Characters of an excerpt.
const EXCERPT: usize = 40;
/// Keys of a message whose text is part of the conversation.
pub(super) const TEXT_KEYS: [&str; 2] = ["content", "reasoning_content"];

/// Whether the rendering stays the same after this change to a message.
type Unchanged<'a> = dyn Fn(&dyn Fn(&mut Value)) -> bool + 'a;

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
    /// Refuses a conversation unless all of it is in `text`, its rendering.
    pub(super) fn check_trace(
        &self,
        text: &str,
        messages: &[Value],
        tools: Option<&Value>,
    ) -> Result<(), TemplateError> {
        self.check_tools(text, messages, tools)?;
        let last_user = messages.iter().rposition(|message| message["role"] == "user");
        let role_at = |at: Option<usize>| at.and_then(|at| messages.get(at)?["role"].as_str());
        let mut cursor = 0;
        for (index, message) in messages.iter().enumerate() {
            let role = message["role"].as_str().unwrap_or_default();
            let place = Place {
                role,
                around: [role_at(index.checked_sub(1)), role_at(Some(index + 1))],
                from_start: index.min(2),
                from_end: (messages.len() - index).min(3),
                before_last_user: Some(index) < last_user,
                has_tools: tools.is_some(),
                calls: message["tool_calls"].as_array().map_or(0, Vec::len).min(2),
            };
            let unchanged = |alter: &dyn Fn(&mut Value)| {
                let mut altered = messages.to_vec();
                alter(&mut altered[index]);
                self.is_same(text, &altered, tools)
            };
            self.check_role(index, &place, &unchanged)?;
            self.check_calls(text, index, message, &place, &unchanged)?;
            for key in TEXT_KEYS.into_iter().filter(|key| !message[*key].is_null()) {
                let content = text_of(&message[key]);
                // Unchanged, or without an empty thought.
                let whole = content.trim();
                let content =
                    if text[cursor..].contains(whole) { Cow::from(whole) } else { without_empty_thought(whole) };
                let content = content.trim();
                let found = text[cursor..].find(content).map(|at| cursor + at + content.len());
                cursor = found.unwrap_or(cursor);
                let place = (key, &place);
                if content.is_empty() || (found.is_some() && self.is_known(&place)) {
                    continue;
                }
                // A text that is not found unchanged may be escaped, or partly dropped.
                let changed: Vec<(&str, String)> = if found.is_some() {
                    vec![(content, marked(content))]
                } else {
                    lines_of(text, content)
                        .into_iter()
                        .flat_map(|line| marks(line).map(|marked| (line, marked)))
                        .collect()
                };
                for (line, marked) in changed {
                    let alter = |message: &mut Value| {
                        replace_text(&mut message[key], line, &marked);
                        // Some templates read the reasoning under this name.
                        if key == "reasoning_content" {
                            message["thinking"] = message[key].clone();
                        }
                    };
                    if unchanged(&alter) {
                        let excerpt: String = line.chars().take(EXCERPT).collect();
                        let what = format!("message {index} ({role}): {excerpt:?} of its `{key}` leaves no trace");
                        return Err(self.dropped(what, self.why_text(role, place.1)));
                    }
                }
                if found.is_some() {
                    self.remember(&place);
                }
            }
        }
        Ok(())
    }

    fn check_tools(&self, text: &str, messages: &[Value], tools: Option<&Value>) -> Result<(), TemplateError> {
        let tools = tools.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (index, tool) in tools.iter().enumerate() {
            let name = tool["function"]["name"].as_str().unwrap_or_default();
            let place = ("tool", index.min(1));
            if text.contains(name) && self.is_known(&place) {
                continue;
            }
            let mut altered = tools.to_vec();
            altered[index]["function"]["name"] = marked(name).into();
            if self.is_same(text, messages, Some(&altered.into())) {
                let why = if self.mentions("tools") { "" } else { ": this model's template has no tools" };
                return Err(self.dropped(format!("tool `{name}` leaves no trace"), why));
            }
            self.remember(&place);
        }
        Ok(())
    }

    fn check_role(&self, index: usize, place: &Place<'_>, unchanged: &Unchanged<'_>) -> Result<(), TemplateError> {
        let role = place.role;
        if matches!(role, "user" | "assistant") || self.is_known(&("role", place)) {
            return Ok(());
        }
        for other in ["user", "assistant"] {
            if unchanged(&|message| message["role"] = other.into()) {
                let what = format!("message {index}: its role `{role}` leaves no trace");
                return Err(self.dropped(what, &format!(": it is written as `{other}`, or not at all")));
            }
        }
        self.remember(&("role", place));
        Ok(())
    }

    fn check_calls(
        &self,
        text: &str,
        index: usize,
        message: &Value,
        place: &Place<'_>,
        unchanged: &Unchanged<'_>,
    ) -> Result<(), TemplateError> {
        for (at, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let name = call["function"]["name"].as_str().unwrap_or_default();
            let place = ("call", place, at.min(1));
            if text.contains(name) && self.is_known(&place) {
                continue;
            }
            let why = if self.mentions("tool_calls") { "" } else { ": this model's template has no tool calls" };
            let what = format!("message {index}: the call of `{name}` leaves no trace");
            if unchanged(&|message| message["tool_calls"][at]["function"]["name"] = marked(name).into()) {
                return Err(self.dropped(what, why));
            }
            if unchanged(&|message| message["tool_calls"][at]["function"]["arguments"][MARK] = json!(MARK)) {
                return Err(self.dropped(format!("{what} of its arguments"), why));
            }
            self.remember(&place);
        }
        Ok(())
    }

    /// Why the template drops a text, as far as the template's source shows it.
    fn why_text(&self, role: &str, place: &Place<'_>) -> &'static str {
        match role {
            "assistant" if place.before_last_user && self.mentions("think") => {
                "\n  hint: a template that drops the thoughts of earlier answers wants one row for each answer"
            }
            "assistant" if place.calls > 0 => ": this model's template writes the calls alone",
            "tool" if !self.names_role("tool") => ": this model's template has no tools",
            "system" if !self.names_role("system") => ": this model's template has no system prompt",
            _ => "",
        }
    }

    /// Whether the changed conversation also renders as `text`. An error of the template counts as a difference.
    fn is_same(&self, text: &str, messages: &[Value], tools: Option<&Value>) -> bool {
        let values: Vec<_> = messages.iter().map(minijinja::Value::from_serialize).collect();
        self.render_values(&values, tools, Prompt::None).is_ok_and(|altered| altered == text)
    }

    /// Whether content in this kind of place is known to leave a trace.
    fn is_known(&self, place: &impl Hash) -> bool {
        self.traced.lock().unwrap_or_else(PoisonError::into_inner).contains(&hash_of(place))
    }

    fn remember(&self, place: &impl Hash) {
        self.traced.lock().unwrap_or_else(PoisonError::into_inner).insert(hash_of(place));
    }

    fn dropped(&self, what: String, why: &str) -> TemplateError {
        TemplateError::Dropped { what, origin: self.origin.clone(), why: why.to_owned() }
    }
}

/// The features of a message that a template's choice to write it may depend on.
#[derive(Hash)]
struct Place<'a> {
    role: &'a str,
    /// Roles of the previous and the next message.
    around: [Option<&'a str>; 2],
    from_start: usize,
    from_end: usize,
    before_last_user: bool,
    has_tools: bool,
    calls: usize,
}

fn hash_of(place: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    place.hash(&mut hasher);
    hasher.finish()
}

/// The text with a mark in its middle, where templates do not cut.
fn marked(text: &str) -> String {
    let middle = text.char_indices().nth(text.chars().count() / 2).map_or(text.len(), |(at, _)| at);
    format!("{}{MARK}{}", &text[..middle], &text[middle..])
}

/// The text with a mark near its start, in its middle, and near its end, since a part may be dropped.
fn marks(text: &str) -> [String; 3] {
    let last = text.char_indices().next_back().map_or(0, |(at, _)| at);
    let first = text.chars().next().map_or(0, char::len_utf8);
    let at = |at: usize| format!("{}{MARK}{}", &text[..at], &text[at..]);
    [at(first), marked(text), at(last)]
}

/// The text without an empty thought, which templates may add or remove.
pub(super) fn without_empty_thought(text: &str) -> Cow<'_, str> {
    let thought = text.split_once("<think>").and_then(|(before, rest)| Some((before, rest.split_once("</think>")?)));
    match thought {
        Some((before, (thought, after))) if thought.trim().is_empty() => format!("{before}\n{after}").into(),
        _ => text.into(),
    }
}

/// The lines of `content` to check one by one: all of them, or if there are very many, those not found in `text`.
fn lines_of<'a>(text: &str, content: &'a str) -> Vec<&'a str> {
    let lines: Vec<&str> = content.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if lines.len() <= MAX_LINES {
        return lines;
    }
    lines.into_iter().filter(|line| !text.contains(line)).take(MAX_LINES).collect()
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
