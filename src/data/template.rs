//! Chat templates: they turn conversations into text, and the assistant's answers are located in that text.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::{Mutex, OnceLock};

use minijinja::context;
use regex::Regex;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;

use super::jinja::{self, Jinja};
use super::tokenizer::Tokenizer;

mod between;
mod conversation;
mod ends;
mod parts;
mod trace;

pub use between::GoesOn;
use conversation::Conversation;
use ends::Vocabulary;
pub use ends::{Stops, TurnEnds};

/// Why a chat template could not be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TemplateError(String);

/// A conversation as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The whole conversation.
    pub text: String,
    /// Byte ranges of `text` that the assistant writes, ascending. Each starts after the generation prompt and ends
    /// with what ends the turn (`<|im_end|>`, `<|eot_id|>`; in GLM's the token of the next role). Empty answers, answers of
    /// `weight` 0 and what `train_detail` does not name are left out.
    pub answers: Vec<Range<usize>>,
    /// The token that ends the last answer, where the template writes it only before another message.
    pub unwritten_end: Option<String>,
    /// Index of the first message that is an empty assistant answer.
    pub empty_answer: Option<usize>,
    /// Keys of messages that leave no trace in the text.
    pub unread: BTreeSet<String>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    jinja: Jinja,
    source: String,
    origin: String,
    /// `bos_token` and the other special tokens, by name.
    special_tokens: BTreeMap<String, String>,
    /// The one for conversations with tools.
    with_tools: Option<Box<Self>>,
    identity: Option<[u8; 32]>,
    vocabulary: Vocabulary,
    /// Any of the special tokens.
    special: Option<Regex>,
    /// The strings in the tags of `source`.
    strings: HashSet<String>,
    /// Roles whose contents the template reads as lists of parts alone.
    list_roles: Vec<&'static str>,
    ends: OnceLock<TurnEnds>,
    reads_parts: OnceLock<bool>,
    /// Hashes of the kinds of places in a conversation that the template is known to write.
    traced: Mutex<HashSet<u64>>,
}

impl ChatTemplate {
    /// The template that `data.chat_template` asks for: `"auto"` (the model's own), `"none"`, or a file. `None` where
    /// there is no template.
    ///
    /// # Errors
    /// A file that cannot be read, a template that is not valid.
    pub fn open(setting: &str, tokenizer: &Tokenizer) -> Result<Option<Self>, TemplateError> {
        match setting {
            "none" => Ok(None),
            "auto" => {
                let Some(source) = tokenizer.chat_template() else { return Ok(None) };
                let mut template = Self::new(source, "the model", tokenizer)?;
                if let Some(source) = tokenizer.tool_template() {
                    template.use_with_tools(Self::new(source, "the model (`tool_use`)", tokenizer)?);
                }
                Ok(Some(template))
            }
            file => {
                let source = std::fs::read_to_string(file).map_err(|error| {
                    TemplateError(format!(
                        "`data.chat_template` = {file:?}: {error}\n  hint: \"auto\" (the model's own), \"none\", or a \
                         Jinja file"
                    ))
                })?;
                Self::new(&source, file, tokenizer).map(Some)
            }
        }
    }

    /// Compiles `source`. `origin` names it in errors. `strftime_now` gives the date at which this function was called.
    ///
    /// # Errors
    /// A syntax error, with its line.
    pub fn new(source: &str, origin: &str, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let now = OffsetDateTime::now_local().unwrap_or_else(|_| OffsetDateTime::now_utc());
        let jinja = Jinja::compile(source, now).map_err(|reason| {
            TemplateError(format!(
                "chat template of {origin}: {reason}\n  hint: `data.chat_template` can name a file with another one"
            ))
        })?;
        let special_tokens = tokenizer.named_tokens().clone();
        let identity = jinja::date(source, now)
            .map(|date| Sha256::digest(format!("{:?}", (source, date, &special_tokens))).into());
        let vocabulary = Vocabulary::of(tokenizer);
        let special: Vec<String> = vocabulary.special.iter().map(|text| regex::escape(text)).collect();
        let mut template = Self {
            jinja,
            source: source.to_owned(),
            origin: origin.to_owned(),
            special_tokens,
            with_tools: None,
            identity,
            vocabulary,
            special: (!special.is_empty()).then(|| Regex::new(&special.join("|")).ok()).flatten(),
            strings: jinja::strings(source),
            list_roles: Vec::new(),
            ends: OnceLock::new(),
            reads_parts: OnceLock::new(),
            traced: Mutex::default(),
        };
        template.find_list_roles();
        Ok(template)
    }

    /// Takes another template for conversations with tools.
    fn use_with_tools(&mut self, other: Self) {
        let both = |one: [u8; 32], other: [u8; 32]| Sha256::digest([one, other].concat()).into();
        self.identity = self.identity.zip(other.identity).map(|(one, other)| both(one, other));
        self.with_tools = Some(Box::new(other));
    }

    /// The template for a conversation with these tools.
    fn for_tools(&self, tools: Option<&Value>) -> &Self {
        self.with_tools.as_deref().filter(|_| tools.is_some()).unwrap_or(self)
    }

    /// Its Jinja source.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template's source contains this word, be it in its text.
    fn mentions(&self, word: &str) -> bool {
        self.source.contains(word)
    }

    /// Whether an expression of the template has this role as a string.
    #[must_use]
    pub fn names_role(&self, role: &str) -> bool {
        self.strings.contains(role) || self.with_tools.as_ref().is_some_and(|other| other.names_role(role))
    }

    /// Whether the template reads a `content` that is a list of parts. Other templates would print the list itself.
    #[must_use]
    pub fn reads_parts(&self) -> bool {
        *self.reads_parts.get_or_init(|| {
            let parts = json!([{"type": "text", "text": "qxa"}, {"type": "text", "text": "qxb"}]);
            let text = self.render(&[json!({"role": "user", "content": parts})], None, false).unwrap_or_default();
            let reads =
                text.contains("qxa") && text.contains("qxb") && !text.contains("'type'") && !text.contains("\"type\"");
            reads && self.with_tools.as_ref().is_none_or(|other| other.reads_parts())
        })
    }

    /// What ends the assistant's turns.
    #[must_use]
    pub fn ends(&self) -> &TurnEnds {
        self.ends.get_or_init(|| TurnEnds::of(self))
    }

    /// SHA-256 of everything besides the messages that decides the template's text: its source, the special tokens, and
    /// today's date where it uses it. `None` where it uses the time of day.
    #[must_use]
    pub fn identity(&self) -> Option<[u8; 32]> {
        self.identity
    }

    /// Where the template came from: "the model" or a file.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The text of a conversation. `messages` are objects with `role` and `content`. With `add_generation_prompt`, the
    /// text ends where the assistant's answer starts.
    ///
    /// # Errors
    /// An exception that the template raises; a template that runs too long.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let template = self.for_tools(tools);
        template.render_values(
            &template.values(messages),
            tools,
            if add_generation_prompt { Prompt::Answer } else { Prompt::None },
        )
    }

    /// The text of a conversation up to where the next answer starts.
    ///
    /// # Errors
    /// The errors of [`render`](Self::render); a role, a tool or a call that leaves no trace in the text. Texts may be left
    /// out: templates leave out the thoughts of earlier answers.
    pub fn render_prompt(&self, messages: &[Value], tools: Option<&Value>) -> Result<String, TemplateError> {
        Conversation::new(self.for_tools(tools), messages, tools)?.check_names()?;
        self.render(messages, tools, true)
    }

    /// The text of a conversation, and the parts of it that the assistant writes.
    ///
    /// The parts are found by rendering prefixes of the conversation: up to an assistant's message, with the generation
    /// prompt, and up to the end of that message. The difference is the answer.
    ///
    /// # Errors
    /// The errors of [`render`](Self::render); a part of the conversation that leaves no trace in the text; a template
    /// that writes the start of a conversation differently once more messages follow.
    pub fn render_with_answers(&self, messages: &[Value], tools: Option<&Value>) -> Result<Rendered, TemplateError> {
        Conversation::new(self.for_tools(tools), messages, tools)?.traced()?.with_answers()
    }

    /// As [`render_with_answers`](Self::render_with_answers). Where the template marks with `{% generation %}` what the
    /// assistant generates, the answers are what it marks.
    ///
    /// # Errors
    /// Those of [`render_with_answers`](Self::render_with_answers); a conversation of which nothing is marked.
    pub fn render_with_marks(&self, messages: &[Value], tools: Option<&Value>) -> Result<Rendered, TemplateError> {
        Conversation::new(self.for_tools(tools), messages, tools)?.traced()?.with_marks()
    }

    /// The text of a whole conversation, checked to contain all of it, without its answers.
    ///
    /// # Errors
    /// The errors of [`render`](Self::render); a part of the conversation that leaves no trace in the text.
    pub fn render_traced(&self, messages: &[Value], tools: Option<&Value>) -> Result<Rendered, TemplateError> {
        let conversation = Conversation::new(self.for_tools(tools), messages, tools)?.traced()?;
        let unwritten_end = conversation.unwritten_end(&conversation.text);
        let Conversation { text, unread, .. } = conversation;
        Ok(Rendered { text, answers: Vec::new(), unwritten_end, empty_answer: None, unread })
    }

    /// The first message with a special token in its text, and the token.
    pub(super) fn special_token_in<'a>(&self, messages: &'a [Value]) -> Option<(usize, &'a str)> {
        let special = self.special.as_ref()?;
        messages.iter().enumerate().find_map(|(index, message)| {
            let content = &message["content"];
            let texts = content.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str());
            let mut texts = texts.chain(content.as_str()).chain(message["reasoning_content"].as_str());
            Some((index, texts.find_map(|text| special.find(text))?.as_str()))
        })
    }

    fn render_values(
        &self,
        messages: &[minijinja::Value],
        tools: Option<&Value>,
        prompt: Prompt,
    ) -> Result<String, TemplateError> {
        self.jinja.render(self.variables(messages, tools, prompt)).map_err(|reason| self.failed(&reason))
    }

    fn failed(&self, reason: &str) -> TemplateError {
        TemplateError(format!("the chat template of {} failed: {reason}", self.origin))
    }

    /// What a template gets.
    fn variables(&self, messages: &[minijinja::Value], tools: Option<&Value>, prompt: Prompt) -> minijinja::Value {
        // Set only where needed: templates test whether the variable is defined.
        let thinking: BTreeMap<&str, bool> =
            (prompt == Prompt::WithoutThinking).then_some(("enable_thinking", false)).into_iter().collect();
        context! {
            messages => messages.to_vec(),
            tools => tools.map_or_else(|| ().into(), minijinja::Value::from_serialize),
            documents => (),
            add_generation_prompt => prompt != Prompt::None,
            ..minijinja::value::merge_maps([
                minijinja::Value::from_serialize(&self.special_tokens),
                minijinja::Value::from_serialize(&thinking),
            ])
        }
    }
}

/// The end of a rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prompt {
    None,
    /// The generation prompt.
    Answer,
    /// The generation prompt for an answer without thinking.
    WithoutThinking,
}

#[cfg(test)]
mod tests;
