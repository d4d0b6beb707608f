//! Chat templates: conversations to text, and which part of the text is an answer.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::{Environment, context};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;

use super::jinja;
use super::tokenizer::Tokenizer;
use crate::budget;

/// Memory that a template may take for one rendering, besides the conversation: eight times the longest text there may be.
const MAX_RENDERING_BYTES: usize = 512 << 20;
/// What is said of a template that takes more.
const OVER_BUDGET: &str = "the chat template takes more than 512 MiB for one conversation\n  hint: it may double a text or \
                           repeat a list again and again; `data.chat_template` can name a file with another one";

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
        "the chat template of {origin} writes the start up to message {last} differently once more messages follow \
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
    identity: Option<[u8; 32]>,
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
        let identity = jinja::dates(source, now)
            .map(|dates| Sha256::digest(format!("{:?}", (source, dates, &special_tokens))).into());
        Ok(Self { environment, origin: origin.to_owned(), special_tokens, identity })
    }

    /// SHA-256 of all that decides what the template writes for given messages: its source, special tokens, and the
    /// date as far as it uses it. `None` where it uses the time in a way that cannot be foreseen.
    #[must_use]
    pub fn identity(&self) -> Option<[u8; 32]> {
        self.identity
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
        self.check_length(messages)?;
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
        self.check_length(messages)?;
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

    /// Refuses a conversation of more text than a rendering may have: templates copy its parts a few times, and that must
    /// not be taken for a template that fills the memory.
    fn check_length(&self, messages: &[Value]) -> Result<(), TemplateError> {
        let bytes: usize = messages.iter().map(text_bytes).sum();
        if bytes <= jinja::MAX_RENDERED_BYTES {
            return Ok(());
        }
        let reason = format!("the conversation has {bytes} bytes of text, of at most {}", jinja::MAX_RENDERED_BYTES);
        Err(TemplateError::Render { origin: self.origin.clone(), reason })
    }

    fn render_values(
        &self,
        messages: &[minijinja::Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let variables = context! {
            messages => messages.to_vec(),
            tools => tools.map_or_else(|| ().into(), minijinja::Value::from_serialize),
            documents => (),
            add_generation_prompt,
            ..minijinja::Value::from_serialize(&self.special_tokens)
        };
        let mut out = jinja::BoundedText::default();
        let render = || {
            let template = self.environment.get_template(jinja::TEMPLATE_NAME)?;
            template.render_captured_to(variables, &mut out).map(drop)
        };
        budget::within(MAX_RENDERING_BYTES, OVER_BUDGET, render)
            .map_err(|error| full_message(&error))
            .and_then(|()| out.into_text())
            .map_err(|reason| TemplateError::Render { origin: self.origin.clone(), reason })
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

/// Bytes of all text in a value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use regex::Regex;
    use serde_json::json;

    use super::*;
    use crate::data::fixture::{CHATML, tokenizer};

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, "the test", &tokenizer()).unwrap()
    }

    fn conversation(turns: &[(&str, &str)]) -> Vec<Value> {
        turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
    }

    fn answers(source: &str, turns: &[(&str, &str)]) -> Result<Vec<String>, TemplateError> {
        let rendered = template(source).render_with_answers(&conversation(turns), None)?;
        Ok(rendered.answers.iter().map(|range| rendered.text[range.clone()].to_owned()).collect())
    }

    /// What Llama 3's template does, written anew: BOS by the template, a date, stripped content, a system turn that
    /// is always there, tools of an optional variable.
    const LLAMA_LIKE: &str = "{{- bos_token }}\n\
        {%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}\n\
        {%- if messages[0]['role'] == 'system' %}\n\
            {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}\n\
        {%- else %}{%- set system = '' %}{%- endif %}\n\
        {{- '<system>Today: ' + date_string + '\\n' + system + '<end>' }}\n\
        {%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}\n\
        {%- for message in messages %}\n\
            {{- '<' + message['role'] + '>\\n\\n' + message['content'] | trim + '<end>' }}\n\
        {%- endfor %}\n\
        {%- if add_generation_prompt %}{{- '<assistant>\\n\\n' }}{%- endif %}\n";

    #[test]
    fn answers_are_the_assistants_text_with_the_end_of_the_turn() {
        let turns = [("user", "hi"), ("assistant", "yes?"), ("user", "bye"), ("assistant", "see you")];
        assert_eq!(answers(CHATML, &turns).unwrap(), ["yes?<|im_end|>\n", "see you<|im_end|>\n"]);
        assert_eq!(answers(CHATML, &turns[..3]).unwrap(), ["yes?<|im_end|>\n"]);
        assert!(answers(CHATML, &turns[..1]).unwrap().is_empty());
    }

    #[test]
    fn default_system_messages_dates_and_stripped_content_are_no_obstacle() {
        let turns = [
            ("system", " be kind\n"),
            ("user", " hi "),
            ("assistant", "\n yes? \n"),
            ("user", "?"),
            ("assistant", "!"),
        ];
        assert_eq!(answers(LLAMA_LIKE, &turns).unwrap(), ["yes?<end>", "!<end>"]);
        assert_eq!(answers(LLAMA_LIKE, &turns[1..]).unwrap(), ["yes?<end>", "!<end>"]);
        let text = template(LLAMA_LIKE).render(&conversation(&turns[..2]), None, true).unwrap();
        let (start, rest) = text.split_once("Today: ").unwrap();
        let (date, rest) = rest.split_once('\n').unwrap();
        assert_eq!((start, rest), ("<s><system>", "be kind<end><user>\n\nhi<end><assistant>\n\n"));
        assert!(Regex::new(r"^\d\d [A-Z][a-z]{2} 20\d\d$").unwrap().is_match(date), "{date}");
    }

    #[test]
    fn tools_reach_the_template() {
        let tools = json!([{"name": "f<é>"}]);
        let text = template(LLAMA_LIKE).render(&conversation(&[("user", "hi")]), Some(&tools), false).unwrap();
        assert!(text.contains("[\n    {\n        \"name\": \"f<é>\"\n    }\n]<user>"), "{text}");
    }

    #[test]
    fn a_template_that_writes_the_start_differently_later_is_refused() {
        let last_only = "{% for m in messages %}{{ m.role }}:{{ '<think>' if loop.last }}{{ m.content }};{% endfor %}";
        let error =
            answers(last_only, &[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, TemplateError::NotAPrefix { last: 1, .. }), "{message}");
        assert!(message.contains("…\"<think>a;\" against …\"a;assistant:b;user:c;assistant\""), "{message}");
        assert!(message.contains("train_on_inputs = true"), "{message}");
    }

    #[test]
    fn what_a_template_raises_is_what_the_user_reads() {
        let source = "{% for m in messages %}\n{% if m.role == 'tool' %}\n{{ raise_exception('no tools') }}{% endif %}{% endfor %}";
        let error = answers(source, &[("tool", "a")]).unwrap_err().to_string();
        assert_eq!(error, "the chat template of the test failed: invalid operation: no tools (in chat_template:3)");
        let error = ChatTemplate::new("{% if %}", "f.jinja", &tokenizer()).unwrap_err().to_string();
        assert!(error.starts_with("chat template of f.jinja: syntax error") && error.contains(":1)"), "{error}");
    }

    #[test]
    fn a_template_can_be_the_models_a_files_or_none() {
        let folder = tempfile::TempDir::new().unwrap();
        let file = folder.path().join("t.jinja");
        std::fs::write(&file, "{{ eos_token }}").unwrap();
        let tokenizer = tokenizer();
        let opened = ChatTemplate::open(file.to_str().unwrap(), &tokenizer).unwrap().unwrap();
        assert_eq!(opened.render(&[], None, false).unwrap(), "</s>");
        assert!(ChatTemplate::open("none", &tokenizer).unwrap().is_none());
        assert!(ChatTemplate::open("auto", &tokenizer).unwrap().is_none());
        let chat = crate::data::fixture::chat_tokenizer();
        assert_eq!(ChatTemplate::open("auto", &chat).unwrap().unwrap().origin(), "the model");
        let error = ChatTemplate::open("/no/such.jinja", &tokenizer).unwrap_err().to_string();
        assert!(error.starts_with("`data.chat_template` = \"/no/such.jinja\": No such file"), "{error}");
    }

    #[test]
    fn a_conversation_of_more_text_than_there_may_be_is_a_bad_row_whatever_the_template_does() {
        let long = "x".repeat(20 << 20);
        let turns = [("user", long.as_str()), ("assistant", &long), ("user", &long), ("assistant", &long)];
        let template = template("{{ messages|length }}");
        assert!(template.render(&conversation(&turns[..3]), None, false).is_ok());
        for error in [
            template.render(&conversation(&turns), None, false).unwrap_err(),
            template.render_with_answers(&conversation(&turns), None).unwrap_err(),
        ] {
            assert!(error.to_string().contains("the conversation has 83886"), "{error}");
        }
    }
}
