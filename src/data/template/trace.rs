//! Finds parts of a conversation that leave no trace in the template's text.
//!
//! A template may move, trim and escape what it is given, but must not drop it. A dropped part can be changed without
//! changing the text. So the check changes one part and renders again. This is done once for each kind of place (a role
//! between two other roles, with or without tools), and in every row for texts that are not found unchanged.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::PoisonError;

use serde_json::{Value, json};

use super::TemplateError;
use super::conversation::{Conversation, TEXT_KEYS, text_of, without_empty_thought};

/// Text that is inserted to see whether the rendering changes.
const MARK: &str = "qzxj";
/// Why tools are dropped by a template that does not know of any.
const NO_TOOLS: &str = ": this model's template has no tools\n  hint: take a model whose template has them, such as Qwen3 or \
                        Llama 3.1, or one by `data.chat_template`";
/// How many lines are searched for one by one when the whole text is not found.
const MAX_LINES: usize = 8;
/// Characters of an excerpt.
const EXCERPT: usize = 40;
/// Keys of a message that are not searched for with [`MARK`] as a value.
const OWN_KEYS: [&str; 10] = [
    "role", "content", "reasoning_content", "thinking", "tool_calls", "tool_call_id", "id", "type", "weight",
    "train_detail",
];

impl<'a> Conversation<'a> {
    /// Refuses the conversation unless all of it leaves a trace in its text.
    pub(super) fn traced(mut self) -> Result<Self, TemplateError> {
        self.check_tools()?;
        let (mut cursor, last_user) = (0, self.last_user());
        for (index, message) in self.messages.iter().enumerate() {
            let place = self.place(index, last_user);
            self.check_role(index, &place)?;
            self.check_calls(index, &place)?;
            self.unread.extend(self.unread_keys(index, &place));
            for key in TEXT_KEYS.into_iter().filter(|key| !message[*key].is_null()) {
                self.check_text(index, key, &place, &mut cursor)?;
            }
        }
        Ok(self)
    }

    /// Refuses the conversation unless its roles, tools and calls leave a trace in its text.
    pub(super) fn check_names(&self) -> Result<(), TemplateError> {
        self.check_tools()?;
        let last_user = self.last_user();
        (0..self.messages.len()).try_for_each(|index| {
            let place = self.place(index, last_user);
            self.check_role(index, &place)?;
            self.check_calls(index, &place)
        })
    }

    fn last_user(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message["role"] == "user")
    }

    fn place(&self, index: usize, last_user: Option<usize>) -> MessagePlace<'a> {
        let role_at = |at: Option<usize>| at.and_then(|at| self.messages.get(at)?["role"].as_str());
        MessagePlace {
            role: role_at(Some(index)).unwrap_or_default(),
            around: [role_at(index.checked_sub(1)), role_at(Some(index + 1))],
            from_start: index.min(2),
            from_end: (self.messages.len() - index).min(3),
            before_last_user: Some(index) < last_user,
            has_tools: self.tools.is_some(),
            calls: self.messages[index]["tool_calls"].as_array().map_or(0, Vec::len).min(2),
        }
    }

    /// Checks the text under `key` of message `index`. The texts of earlier messages end before `cursor`.
    fn check_text(
        &self,
        index: usize,
        key: &str,
        place: &MessagePlace<'_>,
        cursor: &mut usize,
    ) -> Result<(), TemplateError> {
        let content = text_of(&self.messages[index][key]);
        // Unchanged, or without an empty thought.
        let (whole, rest) = (content.trim(), &self.text[*cursor..]);
        // Templates drop thoughts of some answers only, and a later message may have the same text.
        let is_repeated = whole.contains("</think>")
            && self.messages[index + 1..].iter().any(|later| text_of(&later["content"]).contains(whole));
        let is_whole = !is_repeated && rest.contains(whole);
        let content = if is_whole { Cow::from(whole) } else { without_empty_thought(whole) };
        let content = content.trim();
        let found = rest.find(content).filter(|_| !is_repeated);
        *cursor += found.map_or(0, |at| at + content.len());
        if content.is_empty() || (found.is_some() && self.is_known(&(key, place))) {
            return Ok(());
        }
        // A text that is not found unchanged may be escaped, or partly dropped.
        let changes: Vec<(&str, String)> = if found.is_some() {
            vec![(content, marked(content))]
        } else {
            let lines = lines_of(&self.text, content).into_iter();
            lines.flat_map(|line| marks(line).map(|marked| (line, marked))).collect()
        };
        for (line, marked) in changes {
            let change = |message: &mut Value| {
                replace_text(&mut message[key], line, &marked);
                // Some templates read the reasoning under this name.
                if key == "reasoning_content" {
                    message["thinking"] = message[key].clone();
                }
            };
            if self.is_same_after(index, change) {
                let (role, excerpt) = (place.role, line.chars().take(EXCERPT).collect::<String>());
                let what = format!("message {} ({role}): {excerpt:?} of its `{key}` leaves no trace", index + 1);
                return Err(self.dropped(&what, self.why_text(place)));
            }
        }
        if found.is_some() {
            self.remember(&(key, place));
        }
        Ok(())
    }

    fn check_tools(&self) -> Result<(), TemplateError> {
        let tools = self.tools.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (index, tool) in tools.iter().enumerate() {
            let name = tool["function"]["name"].as_str().unwrap_or_default();
            let place = ("tool", index.min(1));
            if self.text.contains(name) && self.is_known(&place) {
                continue;
            }
            let mut altered = tools.to_vec();
            altered[index]["function"]["name"] = marked(name).into();
            let altered = self.template.render(self.messages, Some(&altered.into()), false);
            if altered.is_ok_and(|altered| altered == self.text) {
                let why = if self.template.mentions("tools") { "" } else { NO_TOOLS };
                return Err(self.dropped(&format!("tool `{name}` leaves no trace"), why));
            }
            self.remember(&place);
        }
        Ok(())
    }

    fn check_role(&self, index: usize, place: &MessagePlace<'_>) -> Result<(), TemplateError> {
        let role = place.role;
        if matches!(role, "user" | "assistant") || self.is_known(&("role", place)) {
            return Ok(());
        }
        for other in ["user", "assistant"] {
            if self.is_same_after(index, |message| message["role"] = other.into()) {
                let what = format!("message {}: its role `{role}` leaves no trace", index + 1);
                return Err(self.dropped(&what, &format!(": it is written as `{other}`, or not at all")));
            }
        }
        self.remember(&("role", place));
        Ok(())
    }

    fn check_calls(&self, index: usize, place: &MessagePlace<'_>) -> Result<(), TemplateError> {
        for (at, call) in self.messages[index]["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let name = call["function"]["name"].as_str().unwrap_or_default();
            let place = ("call", place, at.min(1));
            if self.text.contains(name) && self.is_known(&place) {
                continue;
            }
            let has_calls = self.template.mentions("tool_calls");
            let why = if has_calls { "" } else { ": this model's template has no tool calls" };
            let what = format!("message {}: the call of `{name}` leaves no trace", index + 1);
            let is_same_after = |change: &dyn Fn(&mut Value)| {
                self.is_same_after(index, |message| change(&mut message["tool_calls"][at]["function"]))
            };
            if is_same_after(&|function| function["name"] = marked(name).into()) {
                return Err(self.dropped(&what, why));
            }
            if is_same_after(&|function| function["arguments"][MARK] = json!(MARK)) {
                return Err(self.dropped(&format!("{what} of its arguments"), why));
            }
            self.remember(&place);
        }
        Ok(())
    }

    /// The keys of message `index` that leave no trace, besides those that are checked one by one or only tell messages
    /// apart.
    fn unread_keys(&self, index: usize, place: &MessagePlace<'_>) -> Vec<String> {
        let keys = self.messages[index].as_object().into_iter().flat_map(|message| message.keys());
        let is_unread = |key: &&String| {
            if OWN_KEYS.contains(&key.as_str()) || self.is_known(&("key", key, place)) {
                return false;
            }
            let others = [json!(MARK), json!(true), json!(false)];
            let is_unread = self.is_known(&("unread key", key, place))
                || others.iter().all(|other| self.is_same_after(index, |message| message[*key] = other.clone()));
            self.remember(&(if is_unread { "unread key" } else { "key" }, key, place));
            is_unread
        };
        keys.filter(is_unread).cloned().collect()
    }

    /// Why the template drops a text, as far as the template's source shows it.
    fn why_text(&self, place: &MessagePlace<'_>) -> &'static str {
        match place.role {
            "assistant" if place.before_last_user && self.template.mentions("think") => {
                "\n  hint: a template that drops the thoughts of earlier answers wants one row for each answer"
            }
            "assistant" if place.calls > 0 => ": this model's template writes the calls alone",
            "tool" if !self.template.names_role("tool") => NO_TOOLS,
            "system" if !self.template.names_role("system") => ": this model's template has no system prompt",
            _ => "",
        }
    }

    /// Whether content in this kind of place is known to leave a trace.
    fn is_known(&self, place: &impl Hash) -> bool {
        self.template.traced.lock().unwrap_or_else(PoisonError::into_inner).contains(&hash_of(place))
    }

    fn remember(&self, place: &impl Hash) {
        self.template.traced.lock().unwrap_or_else(PoisonError::into_inner).insert(hash_of(place));
    }

    fn dropped(&self, what: &str, why: &str) -> TemplateError {
        TemplateError(format!("{what} in the text that the chat template of {} writes{why}", self.template.origin))
    }
}

/// The features of a message that a template's choice to write it may depend on.
#[derive(Hash)]
struct MessagePlace<'a> {
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
