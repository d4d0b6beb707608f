//! The formats of data rows: what a JSON object means.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::config::DataFormat;
use crate::schema::Choice as _;

/// Names of the roles in `sharegpt` rows, and what chat templates call them.
const SHAREGPT_ROLES: [(&str, &str); 12] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("assistant", "assistant"),
    ("model", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("observation", "tool"),
    ("function_response", "tool"),
];

/// What a row is to be trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample {
    /// A conversation for the chat template.
    Chat {
        /// Objects with `role` and `content`.
        messages: Vec<Value>,
        /// Tools for the template, as JSON schemas.
        tools: Option<Value>,
    },
    /// A text of which only the second part carries loss.
    Completion {
        /// Without loss.
        prompt: String,
        /// With loss.
        completion: String,
    },
    /// A text that carries loss.
    Text(String),
}

impl DataFormat {
    /// As it is written in a recipe.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, format)| *format == self).map_or("", |(name, _)| name)
    }

    /// Columns that a row must have, then those that it may have.
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
}

/// Formats in the order in which `auto` tries them: the most structured first.
const DETECTION_ORDER: [DataFormat; 5] =
    [DataFormat::Messages, DataFormat::Sharegpt, DataFormat::Alpaca, DataFormat::PromptCompletion, DataFormat::Text];

/// How the rows of a file are read: the format with its columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFormat {
    format: DataFormat,
    /// Column of the file by the name that the format expects.
    columns: BTreeMap<String, String>,
}

impl RowFormat {
    /// The format of a file, from what the recipe says and the file's first row.
    ///
    /// # Errors
    /// What is wrong and what would help: a renamed column that does not exist, a column that the format needs and the
    /// row does not have, columns of no known format.
    pub fn detect(format: DataFormat, columns: &BTreeMap<String, String>, first_row: &Value) -> Result<Self, String> {
        let found: Vec<&str> =
            first_row.as_object().map(|row| row.keys().map(String::as_str).collect()).unwrap_or_default();
        let mut columns = columns.clone();
        if format == DataFormat::Auto && !columns.contains_key("messages") && first_row["messages"].is_null() {
            // Conversations under ShareGPT's name, with the keys of `messages`.
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
            DataFormat::Auto => DETECTION_ORDER.into_iter().find(|format| has(*format)).ok_or_else(|| {
                let formats: Vec<String> = DETECTION_ORDER
                    .iter()
                    .map(|format| format!("{} ({})", format.name(), format.columns().0.join(", ")))
                    .collect();
                format!(
                    "the columns {found:?} are those of no format; known are {}\n  hint: `columns` renames, such as \
                     `columns = {{ prompt = \"question\", completion = \"answer\" }}`",
                    formats.join(", ")
                )
            })?,
            given => given,
        };
        let (required, optional) = resolved.columns();
        for (name, column) in &columns {
            if !required.contains(&name.as_str()) && !optional.contains(&name.as_str()) {
                return Err(format!(
                    "`columns` has `{name}`, which format `{}` does not use; it uses {}",
                    resolved.name(),
                    [required, optional].concat().join(", ")
                ));
            }
            if required.contains(&name.as_str()) && first_row.get(column).is_none() {
                return Err(format!("`columns` says that `{name}` is column `{column}`; the row has {found:?}"));
            }
        }
        let format = Self { format: resolved, columns };
        for name in required {
            format.column(first_row, name)?;
        }
        Ok(format)
    }

    /// Rows that are text, as the windows of a .txt file are.
    #[must_use]
    pub fn text() -> Self {
        Self { format: DataFormat::Text, columns: BTreeMap::new() }
    }

    /// The format that was found.
    #[must_use]
    pub fn format(&self) -> DataFormat {
        self.format
    }

    /// Columns of `row` that this format does not read.
    #[must_use]
    pub fn unused_columns(&self, row: &Value) -> Vec<String> {
        let (required, optional) = self.format.columns();
        let used: Vec<&str> = required.iter().chain(optional).map(|name| self.name_of(name)).collect();
        let names = row.as_object().into_iter().flat_map(Map::keys);
        names.filter(|name| !used.contains(&name.as_str())).cloned().collect()
    }

    /// What `row` is to be trained on. `has_template` is whether the model has a chat template.
    ///
    /// # Errors
    /// What is wrong with the row.
    pub fn read(&self, row: &Value, has_template: bool) -> Result<Sample, String> {
        match self.format {
            DataFormat::Auto => Err("the format is not known yet".into()),
            DataFormat::Messages => {
                let messages = self.list(row, "messages")?;
                for (index, message) in messages.iter().enumerate() {
                    check_message(message).map_err(|reason| format!("message {index}: {reason}"))?;
                }
                Ok(Sample::Chat { messages: messages.iter().map(without_nulls).collect(), tools: self.tools(row)? })
            }
            DataFormat::Sharegpt => {
                let mut messages = Vec::new();
                if let Some(system) = self.optional_text(row, "system")?.filter(|system| !system.is_empty()) {
                    messages.push(json!({"role": "system", "content": system}));
                }
                for (index, turn) in self.list(row, "conversations")?.iter().enumerate() {
                    messages.push(sharegpt_message(turn).map_err(|reason| format!("turn {index}: {reason}"))?);
                }
                Ok(Sample::Chat { messages, tools: self.tools(row)? })
            }
            DataFormat::Alpaca => {
                let instruction = self.text_of(row, "instruction")?;
                let input = self.optional_text(row, "input")?.filter(|input| !input.is_empty());
                let system = self.optional_text(row, "system")?.filter(|system| !system.is_empty());
                let output = self.text_of(row, "output")?;
                if has_template {
                    let question =
                        input.map_or_else(|| instruction.to_owned(), |input| format!("{instruction}\n{input}"));
                    let mut messages = Vec::new();
                    messages.extend(system.map(|system| json!({"role": "system", "content": system})));
                    messages.push(json!({"role": "user", "content": question}));
                    messages.push(json!({"role": "assistant", "content": output}));
                    Ok(Sample::Chat { messages, tools: None })
                } else {
                    let system = system.map(|system| format!("{system}\n\n")).unwrap_or_default();
                    let prompt = format!("{system}{}", alpaca_prompt(instruction, input));
                    Ok(Sample::Completion { prompt, completion: output.to_owned() })
                }
            }
            DataFormat::PromptCompletion => Ok(Sample::Completion {
                prompt: self.text_of(row, "prompt")?.to_owned(),
                completion: self.text_of(row, "completion")?.to_owned(),
            }),
            DataFormat::Text => Ok(Sample::Text(self.text_of(row, "text")?.to_owned())),
        }
    }

    fn name_of<'a>(&'a self, name: &'a str) -> &'a str {
        self.columns.get(name).map_or(name, String::as_str)
    }

    fn column<'a>(&self, row: &'a Value, name: &str) -> Result<&'a Value, String> {
        let column = self.name_of(name);
        row.get(column).ok_or_else(|| {
            let found: Vec<&String> = row.as_object().into_iter().flat_map(Map::keys).collect();
            format!(
                "format `{}` needs a column `{column}`; the row has {found:?}\n  hint: `columns = {{ {name} = \"...\" \
                 }}` names another column, `format` another format",
                self.format.name()
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

    /// Tools are a list of schemas; some data sets keep it as JSON text.
    fn tools(&self, row: &Value) -> Result<Option<Value>, String> {
        let name = self.name_of("tools");
        match row.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
            Some(Value::Array(tools)) if tools.is_empty() => Ok(None),
            Some(tools @ Value::Array(_)) => Ok(Some(tools.clone())),
            Some(Value::String(text)) => match serde_json::from_str::<Vec<Value>>(text) {
                Ok(tools) if tools.is_empty() => Ok(None),
                Ok(tools) => Ok(Some(Value::Array(tools))),
                Err(error) => Err(format!("`{name}` must be a list of schemas: {error}")),
            },
            Some(other) => Err(format!("`{name}` must be a list of schemas, not {}", kind_of(other))),
        }
    }
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

/// A message needs a role, and content unless it calls tools.
fn check_message(message: &Value) -> Result<(), String> {
    let Some(object) = message.as_object() else {
        return Err(format!("must be an object with `role` and `content`, not {}", kind_of(message)));
    };
    let keys = || object.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
    if !message["role"].is_string() {
        let hint = if message["from"].is_null() { "" } else { "\n  hint: `from` and `value` are format \"sharegpt\"" };
        return Err(format!("has no text in `role`; it has {}{hint}", keys()));
    }
    match &message["content"] {
        Value::String(_) | Value::Array(_) => Ok(()),
        Value::Null if !message["tool_calls"].is_null() => Ok(()),
        Value::Null => Err(format!("has no `content`; it has {}", keys())),
        other => Err(format!("`content` must be text, not {}", kind_of(other))),
    }
}

/// A message without the keys that are null: Parquet writes those that a message does not have so, and templates ask
/// whether a key is there.
fn without_nulls(message: &Value) -> Value {
    let keys = message.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    Value::Object(keys.map(|(key, value)| (key.clone(), value.clone())).collect())
}

fn sharegpt_message(turn: &Value) -> Result<Value, String> {
    let Some(object) = turn.as_object() else {
        return Err(format!("must be an object with `from` and `value`, not {}", kind_of(turn)));
    };
    let (Some(from), Some(value)) = (turn["from"].as_str(), turn["value"].as_str()) else {
        let keys: Vec<&String> = object.keys().collect();
        let hint = if turn["role"].is_null() { "" } else { "\n  hint: `role` and `content` are format \"messages\"" };
        return Err(format!("needs text in `from` and `value`; it has {keys:?}{hint}"));
    };
    let Some((_, role)) = SHAREGPT_ROLES.iter().find(|(name, _)| *name == from) else {
        let known: Vec<&str> = SHAREGPT_ROLES.iter().map(|(name, _)| *name).collect();
        return Err(format!("`from` is {from:?}; known are {}", known.join(", ")));
    };
    Ok(json!({"role": role, "content": value}))
}

/// What JSON calls the type of a value.
fn kind_of(value: &Value) -> &'static str {
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
