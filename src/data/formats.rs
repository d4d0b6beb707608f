//! The formats of data rows: what the columns of a row mean.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::config::DataFormat;
use super::template::ChatTemplate;
use crate::schema::Choice as _;

mod chat;

/// What one row trains on.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample {
    /// A conversation for the chat template.
    Chat {
        /// Objects with `role` and `content` or `tool_calls`, as in OpenAI's API and transformers; the arguments of a
        /// call are an object.
        messages: Vec<Value>,
        /// Tools for the template: objects with `type` and `function`.
        tools: Option<Value>,
    },
    /// A prompt and its completion; only the completion carries loss.
    Completion {
        /// The text without loss.
        prompt: String,
        /// The text with loss.
        completion: String,
    },
    /// A text that carries loss.
    Text(String),
}

impl DataFormat {
    /// The format's name in a recipe.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, format)| *format == self).map_or("", |(name, _)| name)
    }

    /// The required columns, then the optional ones.
    pub(super) fn columns(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            Self::Auto => (&[], &[]),
            Self::Messages => (&["messages"], &["tools"]),
            Self::Sharegpt => (&["conversations"], &["system", "tools"]),
            Self::Alpaca => (&["instruction", "output"], &["input", "system"]),
            Self::PromptCompletion => (&["prompt", "completion"], &[]),
            Self::Text => (&["text"], &[]),
        }
    }

    /// Whether rows of this format go through the chat template, if the model has one.
    pub(super) fn uses_template(self) -> bool {
        self != Self::Text
    }
}

/// Formats in the order in which `auto` tries them: the most structured first.
const DETECTION_ORDER: [DataFormat; 5] =
    [DataFormat::Messages, DataFormat::Sharegpt, DataFormat::Alpaca, DataFormat::PromptCompletion, DataFormat::Text];

/// A format, its two columns, and an optional third one: the format's names or the file's.
type Pair = (DataFormat, [&'static str; 2], Option<[&'static str; 2]>);

/// Other common names for the columns of a question and an answer. Used only where a row has exactly one of these
/// pairs.
const PAIRS: [Pair; 6] = [
    (DataFormat::Alpaca, ["instruction", "response"], Some(["input", "context"])),
    (DataFormat::PromptCompletion, ["question", "answer"], None),
    (DataFormat::PromptCompletion, ["question", "response"], None),
    (DataFormat::PromptCompletion, ["query", "response"], None),
    (DataFormat::PromptCompletion, ["prompt", "response"], None),
    (DataFormat::PromptCompletion, ["input", "output"], None),
];

/// How the rows of a file are read: the format with its columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFormat {
    format: DataFormat,
    /// For each column name of the format, the column in the file.
    columns: BTreeMap<String, String>,
    /// Whether the columns were guessed rather than named in the recipe; rows with good and bad answers are then
    /// refused.
    is_detected: bool,
}

impl RowFormat {
    /// The format of a file, from what the recipe says and the file's first row.
    ///
    /// # Errors
    /// What is wrong and how to fix it: a renamed column that does not exist, a column that the format needs and the
    /// row lacks, columns that match no known format.
    pub fn detect(format: DataFormat, columns: &BTreeMap<String, String>, first_row: &Value) -> Result<Self, String> {
        let found: Vec<&str> =
            first_row.as_object().map(|row| row.keys().map(String::as_str).collect()).unwrap_or_default();
        let absent = |columns: &BTreeMap<String, String>, is_needed: &dyn Fn(&str) -> bool| {
            let is_absent = |column: &str| first_row.get(column).is_none();
            let (name, column) = columns.iter().find(|(name, column)| is_needed(name) && is_absent(column))?;
            let found = keys_of(first_row);
            Some(format!("`columns` says that `{name}` is column `{column}`; the row has {found}"))
        };
        let mut columns = columns.clone();
        let is_detected = format == DataFormat::Auto && columns.is_empty();
        if is_detected {
            refuse_preferences(first_row)?;
        }
        if format == DataFormat::Auto && !columns.contains_key("messages") && first_row["messages"].is_null() {
            // A conversation under ShareGPT's column name, but with the keys of `messages`.
            let name = columns.get("conversations").map_or("conversations", String::as_str).to_owned();
            if !first_row[&name][0]["role"].is_null() {
                columns.remove("conversations");
                columns.insert("messages".into(), name);
            }
        }
        let has = |format: DataFormat| {
            let column = |name: &&str| first_row.get(columns.get(*name).map_or(*name, String::as_str)).is_some();
            format.columns().0.iter().all(column)
        };
        let resolved = match format {
            DataFormat::Auto => match DETECTION_ORDER.into_iter().find(|format| has(*format)) {
                Some(format) => format,
                None if columns.is_empty() => return Self::of_pair(first_row, &found),
                None => {
                    return Err(absent(&columns, &|_| true).unwrap_or_else(|| unknown_columns(first_row, &found)));
                }
            },
            given => given,
        };
        let (required, optional) = resolved.columns();
        let used = [required, optional].concat();
        if let Some(name) = columns.keys().find(|name| !used.contains(&name.as_str())) {
            let (format, used) = (resolved.name(), used.join(", "));
            return Err(format!("`columns` has `{name}`, which format `{format}` does not use; it uses {used}"));
        }
        if let Some(reason) = absent(&columns, &|name| required.contains(&name)) {
            return Err(reason);
        }
        let format = Self { format: resolved, columns, is_detected };
        for name in required {
            format.column(first_row, name)?;
        }
        Ok(format)
    }

    /// The format of a row that has one of [`PAIRS`].
    fn of_pair(row: &Value, found: &[&str]) -> Result<Self, String> {
        let pairs: Vec<_> =
            PAIRS.iter().filter(|(_, pair, _)| pair.iter().all(|name| row.get(*name).is_some())).collect();
        let [(format, pair, extra)] = pairs[..] else { return Err(unknown_columns(row, found)) };
        let mut columns: BTreeMap<String, String> = BTreeMap::new();
        for (name, column) in format.columns().0.iter().zip(pair) {
            columns.insert((*name).into(), (*column).into());
        }
        if let Some([name, column]) = extra.filter(|[_, column]| row.get(column).is_some()) {
            columns.insert(name.into(), column.into());
        }
        Ok(Self { format: *format, columns, is_detected: true })
    }

    /// The detected format.
    #[must_use]
    pub fn format(&self) -> DataFormat {
        self.format
    }

    /// Adds to `unused` the columns of `row` that this format does not read, and the message keys that neither the
    /// format nor the template reads, as `messages[].key`.
    pub fn add_unused(&self, row: &Value, template: Option<&ChatTemplate>, unused: &mut BTreeSet<String>) {
        let (required, optional) = self.format.columns();
        let is_used = |column: &str| {
            let mut used = required.iter().chain(optional).map(|name| self.name_of(name));
            used.any(|name| name == column) || (column == "functions" && optional.contains(&"tools"))
        };
        let names = row.as_object().into_iter().flat_map(Map::keys);
        for name in names.filter(|name| !is_used(name)) {
            if !unused.contains(name) {
                unused.insert(name.clone());
            }
        }
        let list = match self.format {
            DataFormat::Messages => self.name_of("messages"),
            DataFormat::Sharegpt => self.name_of("conversations"),
            _ => return,
        };
        for key in row[list].as_array().into_iter().flatten().filter_map(Value::as_object).flat_map(Map::keys) {
            let is_read = chat::KEYS.contains(&key.as_str())
                || (self.format == DataFormat::Sharegpt && ["from", "value"].contains(&key.as_str()))
                || template.is_some_and(|template| template.mentions(key));
            if !is_read {
                unused.insert(format!("{list}[].{key}"));
            }
        }
    }

    /// What `row` trains on. Without the model's `template`, a question and its answer are plain text.
    ///
    /// # Errors
    /// What is wrong with the row.
    pub fn read(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<Sample, String> {
        let question = |system: Option<&str>, question: String, answer: &str| {
            let mut messages = Vec::new();
            messages.extend(system.map(|system| json!({"role": "system", "content": system})));
            messages.push(json!({"role": "user", "content": question}));
            messages.push(json!({"role": "assistant", "content": answer}));
            Sample::Chat { messages, tools: None }
        };
        if self.is_detected {
            refuse_preferences(row)?;
        }
        match self.format {
            DataFormat::Auto => Err("the format is not known yet".into()),
            DataFormat::Messages => {
                refuse_media(row)?;
                let messages = self.list(row, "messages")?.iter().enumerate().map(|(index, message)| {
                    chat::message(message, template).map_err(|reason| format!("message {index}: {reason}"))
                });
                self.chat(messages.collect::<Result<_, _>>()?, row)
            }
            DataFormat::Sharegpt => {
                refuse_media(row)?;
                let mut messages = Vec::new();
                if let Some(system) = self.optional_text(row, "system")?.filter(|system| !system.is_empty()) {
                    messages.push(json!({"role": "system", "content": system}));
                }
                for (index, turn) in self.list(row, "conversations")?.iter().enumerate() {
                    messages.push(chat::turn(turn, template).map_err(|reason| format!("turn {index}: {reason}"))?);
                }
                self.chat(messages, row)
            }
            DataFormat::Alpaca => {
                let instruction = self.text_of(row, "instruction")?;
                let input = self.optional_text(row, "input")?.filter(|input| !input.is_empty());
                let system = self.optional_text(row, "system")?.filter(|system| !system.is_empty());
                let output = self.text_of(row, "output")?;
                if template.is_some() {
                    let text = input.map_or_else(|| instruction.to_owned(), |input| format!("{instruction}\n{input}"));
                    Ok(question(system, text, output))
                } else {
                    let system = system.map(|system| format!("{system}\n\n")).unwrap_or_default();
                    let prompt = format!("{system}{}", alpaca_prompt(instruction, input));
                    Ok(Sample::Completion { prompt, completion: output.to_owned() })
                }
            }
            DataFormat::PromptCompletion => {
                let (prompt, completion) = (self.text_of(row, "prompt")?, self.text_of(row, "completion")?);
                if template.is_some() {
                    return Ok(question(None, prompt.to_owned(), completion));
                }
                Ok(Sample::Completion { prompt: prompt.to_owned(), completion: completion.to_owned() })
            }
            DataFormat::Text => Ok(Sample::Text(self.text_of(row, "text")?.to_owned())),
        }
    }

    fn chat(&self, mut messages: Vec<Value>, row: &Value) -> Result<Sample, String> {
        chat::number_calls(&mut messages);
        let mut name = self.name_of("tools");
        // `functions` is OpenAI's older name.
        match [name, "functions"].map(|name| row.get(name).is_some_and(|tools| !tools.is_null())) {
            [true, true] => return Err(format!("has `{name}` and `functions`, which are one thing")),
            [false, true] => name = "functions",
            _ => {}
        }
        let tools = chat::tools(row.get(name)).map_err(|reason| format!("`{name}` {reason}"))?;
        Ok(Sample::Chat { messages, tools })
    }

    fn name_of<'a>(&'a self, name: &'a str) -> &'a str {
        self.columns.get(name).map_or(name, String::as_str)
    }

    fn column<'a>(&self, row: &'a Value, name: &str) -> Result<&'a Value, String> {
        let column = self.name_of(name);
        row.get(column).ok_or_else(|| {
            format!(
                "format `{}` needs a column `{column}`; the row has {}\n  hint: `columns = {{ {name} = \"...\" }}` \
                 names another column, `format` another format",
                self.format.name(),
                keys_of(row)
            )
        })
    }

    fn text_of<'a>(&self, row: &'a Value, name: &str) -> Result<&'a str, String> {
        let value = self.column(row, name)?;
        value.as_str().ok_or_else(|| format!("`{}` must be text, not {}", self.name_of(name), kind_of(value)))
    }

    fn optional_text<'a>(&self, row: &'a Value, name: &str) -> Result<Option<&'a str>, String> {
        match row.get(self.name_of(name)) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => self.text_of(row, name).map(Some),
        }
    }

    fn list<'a>(&self, row: &'a Value, name: &str) -> Result<&'a Vec<Value>, String> {
        match self.column(row, name)? {
            Value::Array(items) if items.is_empty() => Err(format!("`{}` is empty", self.name_of(name))),
            Value::Array(items) => Ok(items),
            other => Err(format!("`{}` must be a list of objects, not {}", self.name_of(name), kind_of(other))),
        }
    }
}

/// Refuses rows with good and bad answers: training on all of them would teach the bad answers.
fn refuse_preferences(row: &Value) -> Result<(), String> {
    let what = if !row["chosen"].is_null() && !row["rejected"].is_null() {
        "`chosen` and `rejected`"
    } else if row["label"].is_boolean() {
        "`label` true or false"
    } else {
        return Ok(());
    };
    let columns = match &row["chosen"] {
        Value::Array(_) => "messages = \"chosen\"",
        Value::String(_) => "completion = \"chosen\"",
        _ => "messages = \"messages\"",
    };
    Err(format!(
        "this is preference data ({what}), for DPO or KTO, which this trainer does not have\n  hint: to train on the good \
         answers alone, keep only those rows and name the columns, such as `columns = {{ {columns} }}`"
    ))
}

/// Refuses a row that has images, sound or video as well as messages.
fn refuse_media(row: &Value) -> Result<(), String> {
    let is_filled = |value: &Value| match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    };
    match ["image", "images", "audio", "audios", "video", "videos"].iter().find(|name| is_filled(&row[**name])) {
        Some(name) => Err(format!("the row has `{name}`; this trainer learns from text only")),
        None => Ok(()),
    }
}

/// The message for columns that match no format, with a hint that uses the user's own column names.
fn unknown_columns(row: &Value, found: &[&str]) -> String {
    let formats: Vec<String> =
        DETECTION_ORDER.iter().map(|format| format!("{} ({})", format.name(), format.columns().0.join(", "))).collect();
    let texts: Vec<&str> = found.iter().copied().filter(|name| row[*name].is_string()).collect();
    let lists: Vec<&str> = found.iter().copied().filter(|name| row[*name].is_array()).collect();
    let columns = match (&lists[..], &texts[..]) {
        ([list, ..], _) => format!("messages = {list:?}"),
        ([], [prompt, completion, ..]) => format!("prompt = {prompt:?}, completion = {completion:?}"),
        ([], [text]) => format!("text = {text:?}"),
        ([], []) => "prompt = \"...\", completion = \"...\"".into(),
    };
    let found = if found.is_empty() {
        "the row has no columns".to_owned()
    } else {
        format!("the columns {} are those of no format", keys_of(row))
    };
    format!("{found}; known are {}\n  hint: name yours, such as `columns = {{ {columns} }}`", formats.join(", "))
}

/// The prompt of Stanford Alpaca (Taori et al., 2023; `train.py`).
fn alpaca_prompt(instruction: &str, input: Option<&str>) -> String {
    match input {
        Some(input) => format!(
            "Below is an instruction that describes a task, paired with an input that provides further context. Write \
             a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### \
             Input:\n{input}\n\n### Response:"
        ),
        None => format!(
            "Below is an instruction that describes a task. Write a response that appropriately completes the \
             request.\n\n### Instruction:\n{instruction}\n\n### Response:"
        ),
    }
}

/// The keys of a row or a message, for a message to the user.
fn keys_of(value: &Value) -> String {
    let keys: Vec<String> = value.as_object().into_iter().flat_map(Map::keys).map(|key| format!("`{key}`")).collect();
    if keys.is_empty() { "nothing".to_owned() } else { keys.join(", ") }
}

/// JSON's name for the type of a value.
pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;
