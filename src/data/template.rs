//! Chat templates: conversations to text, and which part of the text is an answer.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::{Environment, context};
use serde_json::Value;
use time::OffsetDateTime;

use super::jinja;
use super::tokenizer::Tokenizer;

/// Why a chat template could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The file that `data.chat_template` names cannot be read.
    #[error("`data.chat_template` = {path:?}: {reason}\n  hint: \"auto\" (the model's own), \"none\", or a Jinja file")]
    File {
        /// The file.
        path: PathBuf,
        /// Why it cannot be read.
        reason: String,
    },
    /// The template is not valid Jinja.
    #[error("chat template of {origin}: {reason}\n  hint: `data.chat_template` can name a file with another one")]
    Syntax {
        /// Where the template came from.
        origin: String,
        /// What is wrong, with the line.
        reason: String,
    },
    /// The template refused a conversation.
    #[error("the chat template of {origin} failed: {reason}")]
    Render {
        /// Where the template came from.
        origin: String,
        /// What it said.
        reason: String,
    },
    /// What the template wrote for the first messages is not how it starts the whole conversation.
    #[error(
        "the chat template of {origin} writes messages 0 to {last} differently once more messages follow \
         (…{alone:?} against …{within:?}), so the text of answer {last} cannot be told from the rest\n  hint: give a \
         template that only appends in `data.chat_template`, or set `data.train_on_inputs = true`, which needs no mask"
    )]
    NotAPrefix {
        /// Where the template came from.
        origin: String,
        /// Index of the last message that was rendered.
        last: usize,
        /// What the first messages alone look like where the two differ.
        alone: String,
        /// What the whole conversation looks like there.
        within: String,
    },
}

/// A conversation as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The whole conversation.
    pub text: String,
    /// Bytes of `text` that the assistant writes, ascending: after the generation prompt, up to where the next message
    /// starts. So the token that ends the turn (`<|im_end|>`, `<|eot_id|>`) is part of it.
    pub answers: Vec<Range<usize>>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    origin: String,
    /// `bos_token` and the like.
    special_tokens: BTreeMap<&'static str, String>,
}

impl ChatTemplate {
    /// The template that `data.chat_template` asks for: `"auto"`, the model's own; `"none"`; or a file. `None` where
    /// there is none.
    ///
    /// # Errors
    /// A file that cannot be read, a template that is not valid.
    pub fn open(setting: &str, tokenizer: &Tokenizer) -> Result<Option<Self>, TemplateError> {
        match setting {
            "none" => Ok(None),
            "auto" => tokenizer.chat_template().map(|source| Self::new(source, "the model", tokenizer)).transpose(),
            file => {
                let source = std::fs::read_to_string(file)
                    .map_err(|error| TemplateError::File { path: Path::new(file).into(), reason: error.to_string() })?;
                Self::new(&source, file, tokenizer).map(Some)
            }
        }
    }

    /// Compiles `source`. `origin` names it in errors. The date that `strftime_now` gives is that of this call.
    ///
    /// # Errors
    /// A syntax error, with its line.
    pub fn new(source: &str, origin: &str, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let now = OffsetDateTime::now_local().unwrap_or_else(|_| OffsetDateTime::now_utc());
        let environment = jinja::compile(source, now)
            .map_err(|error| TemplateError::Syntax { origin: origin.to_owned(), reason: full_message(&error) })?;
        let special_tokens = [
            ("bos_token", tokenizer.bos()),
            ("eos_token", tokenizer.eos()),
            ("pad_token", tokenizer.pad()),
            ("unk_token", tokenizer.unk()),
        ];
        let special_tokens = special_tokens
            .into_iter()
            .filter_map(|(key, token)| token.map(|token| (key, token.text.clone())))
            .collect();
        Ok(Self { environment, origin: origin.to_owned(), special_tokens })
    }

    /// Where the template came from: "the model" or a file.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Text of a conversation. `messages` are objects with `role` and `content`; with `add_generation_prompt` the text
    /// ends where the assistant's answer starts.
    ///
    /// # Errors
    /// What the template raises, and a template that runs too long.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let messages: Vec<_> = messages.iter().map(minijinja::Value::from_serialize).collect();
        self.render_values(&messages, tools, add_generation_prompt)
    }

    /// Text of a conversation, and which parts of it the assistant writes.
    ///
    /// The parts are found by rendering prefixes: what is written up to an assistant's message, with the generation
    /// prompt, and what is written up to its end. The difference is the answer.
    ///
    /// # Errors
    /// As [`render`](Self::render), and a template that writes the start of a conversation differently once more
    /// messages follow.
    pub fn render_with_answers(&self, messages: &[Value], tools: Option<&Value>) -> Result<Rendered, TemplateError> {
        let values: Vec<_> = messages.iter().map(minijinja::Value::from_serialize).collect();
        let text = self.render_values(&values, tools, false)?;
        let mut answers = Vec::new();
        for (index, _) in messages.iter().enumerate().filter(|(_, message)| message["role"] == "assistant") {
            let prompt = self.render_values(&values[..index], tools, true)?;
            let start = self.prefix_of(&text, &prompt, index)?;
            let end = if index + 1 == values.len() {
                text.len()
            } else {
                let answered = self.render_values(&values[..=index], tools, false)?;
                self.prefix_of(&text, &answered, index)?
            };
            if start < end {
                answers.push(start..end);
            }
        }
        Ok(Rendered { text, answers })
    }

    fn render_values(
        &self,
        messages: &[minijinja::Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let variables = context! {
            messages => messages.to_vec(),
            tools => tools.map(minijinja::Value::from_serialize).unwrap_or_else(|| ().into()),
            documents => (),
            add_generation_prompt,
            ..minijinja::Value::from_serialize(&self.special_tokens)
        };
        self.environment
            .get_template(jinja::TEMPLATE_NAME)
            .and_then(|template| template.render(variables))
            .map_err(|error| TemplateError::Render { origin: self.origin.clone(), reason: full_message(&error) })
    }

    /// Length of `prefix` if `text` starts with it.
    fn prefix_of(&self, text: &str, prefix: &str, last: usize) -> Result<usize, TemplateError> {
        if text.starts_with(prefix) {
            return Ok(prefix.len());
        }
        let common = text.char_indices().zip(prefix.chars()).find(|((_, a), b)| a != b);
        let at = common.map_or(text.len().min(prefix.len()), |((at, _), _)| at);
        let excerpt = |text: &str| text[at..].chars().take(30).collect();
        Err(TemplateError::NotAPrefix {
            origin: self.origin.clone(),
            last,
            alone: excerpt(prefix),
            within: excerpt(text),
        })
    }
}

/// A template's error with its causes and its line.
fn full_message(error: &minijinja::Error) -> String {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    message
}
