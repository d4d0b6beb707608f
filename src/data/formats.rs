//! The formats of data rows: what the columns of a row mean.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::template::ChatTemplate;
use crate::config::{DataConfig, DataFormat, TrainOnTurns};

mod chat;
mod detect;
mod images;
mod preference;

use detect::{list_in, longest, refuse_preferences};
use images::RowImages;
pub(crate) use images::{content_of_prompt, images_in_prompt};

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
    /// A chosen and a rejected answer to one prompt, and by how much their scores shall differ, more than at all.
    Pair(Box<Sample>, Box<Sample>, f32),
    /// An answer that is good or not.
    Labelled(Box<Sample>, bool),
    /// A prompt for the chat template, or as it is.
    Prompt(Prompt),
}

/// What a model is asked.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation for the chat template.
    Chat {
        /// As those of [`Sample::Chat`].
        messages: Vec<Value>,
        /// Tools for the template.
        tools: Option<Value>,
    },
    /// A text to continue.
    Text(String),
}

impl Sample {
    /// What its messages say that their images are.
    pub(super) fn images(&self) -> Vec<&str> {
        match self {
            Self::Chat { messages, .. } | Self::Prompt(Prompt::Chat { messages, .. }) => {
                let parts = messages.iter().filter_map(|message| message["content"].as_array()).flatten();
                parts.filter(|part| part["type"] == "image").filter_map(|part| part["image"].as_str()).collect()
            }
            Self::Pair(good, bad, _) => [good.images(), bad.images()].concat(),
            Self::Labelled(answer, _) => answer.images(),
            Self::Completion { .. } | Self::Text(_) | Self::Prompt(Prompt::Text(_)) => Vec::new(),
        }
    }
}

const TEXT_ONLY: &str = "text alone is learnt from, and images with the models that `lora-train help images` lists";

/// Reads a message or a turn of a conversation.
type ReadMessage = fn(&Value, Option<&ChatTemplate>) -> Result<Value, String>;

/// Keys of a row by which people say which parts of a conversation carry loss; most are settings of other trainers.
const LOSS_KEYS: [&str; 7] = [
    "train_on_turns", "mask_history", "train_on_inputs", "train_on_input", "train_on_eos", "train_on_eot",
    "roles_to_train",
];

impl DataFormat {
    /// Whether rows of this format go through the chat template, if the model has one.
    pub(super) fn uses_template(self) -> bool {
        self != Self::Text
    }
}

/// How the rows of a file are read: the format with its columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowFormat {
    format: DataFormat,
    /// For each column name of the format, the column in the file.
    columns: BTreeMap<String, String>,
    /// Whether the columns were guessed rather than named in the recipe; rows with good and bad answers are then refused,
    /// unless they are what is trained on.
    is_detected: bool,
    /// Whether pairs have margins: where answers are scored.
    has_margins: bool,
    /// `data.system`: the system prompt of rows without one.
    system: Option<String>,
    train_on_turns: TrainOnTurns,
    train_on_inputs: bool,
    /// Where paths of images start; absent: rows with images are refused.
    images: Option<PathBuf>,
}

impl RowFormat {
    /// The format with what a section says about all rows.
    #[must_use]
    pub fn under(self, config: &DataConfig) -> Self {
        let DataConfig { system, train_on_turns, train_on_inputs, .. } = config;
        Self { system: system.clone(), train_on_turns: *train_on_turns, train_on_inputs: *train_on_inputs, ..self }
    }

    /// The same for conversations with images, whose paths start in this folder.
    #[must_use]
    pub fn with_images(self, images: Option<PathBuf>) -> Self {
        Self { images, ..self }
    }

    /// The detected format.
    #[must_use]
    pub fn format(&self) -> DataFormat {
        self.format
    }

    /// Adds to `unused` the columns of `row` that this format does not read.
    pub fn add_unused(&self, row: &Value, unused: &mut BTreeSet<String>) {
        // Rewards may read any.
        if self.format == DataFormat::Prompt {
            return;
        }
        let ((required, optional), prompt) = (self.format.columns(), self.name_of("prompt"));
        let is_completed = self.format == DataFormat::PromptCompletion && self.has_messages(row);
        let is_list = is_completed || self.list_column().is_some();
        let is_used = |column: &str| {
            let names = required.iter().chain(optional).filter(|name| self.has_margins || **name != "margin");
            let mut used = names.map(|name| self.name_of(name));
            used.any(|name| name == column)
                || (is_list && (column == "functions" || LOSS_KEYS.contains(&column)))
                || (is_completed && matches!(column, "system" | "tools"))
                || (self.images.is_some()
                    && self.format != DataFormat::Text
                    && self.columns.get("images").map_or_else(|| images::is_column(row, column), |own| own == column))
        };
        let names = row.as_object().into_iter().flat_map(Map::keys);
        for name in names.filter(|name| !is_used(name)) {
            if !unused.contains(name) {
                unused.insert(name.clone());
            }
        }
        let keys = row[prompt].as_object().filter(|keys| keys.contains_key("messages")).into_iter().flat_map(Map::keys);
        unused.extend(
            keys.filter(|key| !["messages", "tools"].contains(&key.as_str())).map(|key| format!("{prompt}.{key}")),
        );
    }

    /// The columns of a question and its answer that `row` has and that are empty.
    pub(super) fn empty_columns(&self, row: &Value) -> Vec<&str> {
        let (required, optional) = self.format.columns();
        let names = ["instruction", "prompt", "output", "completion"];
        let names = names.into_iter().filter(|name| required.iter().chain(optional).any(|own| own == name));
        names.map(|name| self.name_of(name)).filter(|column| row[*column] == "").collect()
    }

    /// The name of a key of messages for the user: `messages[].key`.
    pub(super) fn name_of_key(&self, key: &str) -> String {
        self.list_column().map_or_else(|| key.to_owned(), |list| format!("{list}[].{key}"))
    }

    /// What `row` trains on. Without the model's `template`, a question and its answer are plain text.
    ///
    /// # Errors
    /// What is wrong with the row.
    pub fn read(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<Sample, String> {
        let row = &*self.with_column_of_images(row);
        if self.is_detected {
            refuse_preferences(row)?;
            let sees = self.images.is_some() && template.is_some() && self.format != DataFormat::Text;
            if self.list_column().is_none() && !sees {
                self.refuse_other_media(row)?;
            }
        }
        match self.format {
            DataFormat::Auto => Err("the format is not known yet".into()),
            DataFormat::Messages => {
                let messages = self.list(row, "messages")?;
                self.chat(self.conversation_of(row, &messages, template, ("message", chat::message))?, row)
            }
            DataFormat::Sharegpt => {
                let mut messages = Vec::new();
                if let Some(system) = self.optional_text(row, "system")?.filter(|system| !system.is_empty()) {
                    messages.push(json!({"role": "system", "content": system}));
                }
                let turns = self.list(row, "conversations")?;
                messages.extend(self.conversation_of(row, &turns, template, ("turn", chat::turn))?);
                self.chat(messages, row)
            }
            DataFormat::Alpaca => self.alpaca(row, template),
            DataFormat::PromptCompletion if template.is_some() && self.has_messages(row) => {
                self.completed(row, template)
            }
            DataFormat::PromptCompletion => {
                let (prompt, completion) = (self.text_of(row, "prompt")?, self.completion(row)?);
                if template.is_some() {
                    return self.asked(None, &prompt, &completion, &self.images_beside(row, template)?);
                }
                Ok(Sample::Completion { prompt: prompt.into_owned(), completion: completion.into_owned() })
            }
            DataFormat::Text => Ok(Sample::Text(self.text_of(row, "text")?.into_owned())),
            DataFormat::Preference => self.pair(row, template),
            DataFormat::UnpairedPreference => self.labelled(row, template),
            DataFormat::Prompt => self.question(row, template),
        }
    }

    /// The row with its images under `images`.
    fn with_column_of_images<'a>(&self, row: &'a Value) -> Cow<'a, Value> {
        let mut row = Cow::Borrowed(row);
        if let Some(column) = self.columns.get("images")
            && let Some(keys) = row.to_mut().as_object_mut()
        {
            let images = keys.shift_remove(column);
            keys.insert("images".into(), images.unwrap_or_default());
        }
        row
    }

    /// The messages of a conversation, each read by `read`, with its images where the model sees such.
    fn conversation_of(
        &self,
        row: &Value,
        list: &[Value],
        template: Option<&ChatTemplate>,
        (what, read): (&str, ReadMessage),
    ) -> Result<Vec<Value>, String> {
        let images = self.images_of(row, template)?;
        let read = |(index, message): (usize, &Value)| {
            images
                .read(message, |message| read(message, template))
                .map_err(|reason| format!("{what} {}: {reason}", index + 1))
        };
        let mut messages = list.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
        images.place(&mut messages)?;
        Ok(messages)
    }

    /// The images of a row, which is refused where it has media that are not seen.
    fn images_of(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<RowImages<'_>, String> {
        match self.images.as_ref().filter(|_| template.is_some_and(ChatTemplate::reads_parts)) {
            Some(folder) => {
                refuse_media_but(row, &["image", "images"])?;
                RowImages::of(row, folder)
            }
            None => refuse_media(row).map(|()| RowImages::default()),
        }
    }

    /// The images of a row beside its texts; where the recipe names these and the model sees none, they alone are meant.
    fn images_beside(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<RowImages<'_>, String> {
        if self.images.is_none() && !self.is_detected && !self.columns.contains_key("images") {
            return Ok(RowImages::default());
        }
        self.images_of(row, template)
    }

    /// A question, its answer, and what goes before them.
    fn asked(
        &self,
        system: Option<&str>,
        question: &str,
        answer: &str,
        images: &RowImages<'_>,
    ) -> Result<Sample, String> {
        let system = system.or(self.system.as_deref()).map(|system| json!({"role": "system", "content": system}));
        let turns = [user(question, images)?, json!({"role": "assistant", "content": answer})];
        let mut messages: Vec<Value> = system.into_iter().chain(turns).collect();
        images.place(&mut messages)?;
        Ok(Sample::Chat { messages, tools: None })
    }

    fn alpaca(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<Sample, String> {
        let instruction = self.text_of(row, "instruction")?;
        let input = self.optional_text(row, "input")?.filter(|input| !input.is_empty());
        let system = self.optional_text(row, "system")?.filter(|system| !system.is_empty());
        let output = self.text_of(row, "output")?;
        let (system, input) = (system.as_deref(), input.as_deref());
        if template.is_some() {
            let text = input.map_or_else(|| instruction.to_string(), |input| format!("{instruction}\n{input}"));
            return self.asked(system, &text, &output, &self.images_beside(row, template)?);
        }
        let system = system.or(self.system.as_deref()).map(|system| format!("{system}\n\n")).unwrap_or_default();
        let prompt = format!("{system}{}", alpaca_prompt(&instruction, input));
        Ok(Sample::Completion { prompt, completion: output.into_owned() })
    }

    fn chat(&self, mut messages: Vec<Value>, row: &Value) -> Result<Sample, String> {
        chat::number_calls(&mut messages);
        let mut name = self.name_of("tools");
        // `functions` is OpenAI's older name.
        match [name, "functions"].map(|name| row.get(name).is_some_and(|tools| !tools.is_null() && *tools != "")) {
            [true, true] => return Err(format!("has `{name}` and `functions`, which are one thing")),
            [false, true] => name = "functions",
            _ => {}
        }
        let mut tools = chat::tools(row.get(name)).map_err(|reason| format!("`{name}` {reason}"))?;
        chat::drop_nulls_of_arrow(&mut messages, &mut tools);
        let is_system = |message: &Value| message["role"] == "system" || message["role"] == "developer";
        if let Some(system) = self.system.as_ref().filter(|_| !messages.iter().any(is_system)) {
            messages.insert(0, json!({"role": "system", "content": system}));
        }
        if self.train_on_turns(row)? == TrainOnTurns::Last {
            let mut answers = messages.iter_mut().filter(|message| message["role"] == "assistant").rev();
            answers.next();
            answers.for_each(|answer| answer["weight"] = json!(0));
        }
        Ok(Sample::Chat { messages, tools })
    }

    /// Which answers of a conversation carry loss: what the row says, or else the recipe.
    fn train_on_turns(&self, row: &Value) -> Result<TrainOnTurns, String> {
        let mut turns = self.train_on_turns;
        for key in LOSS_KEYS {
            let value = &row[key];
            // What happens anyway.
            let is_so = match key {
                "mask_history" => *value == false,
                "train_on_inputs" | "train_on_input" => *value == self.train_on_inputs,
                "train_on_eos" | "train_on_eot" => value == "turn",
                "roles_to_train" => [json!(["assistant"]), json!(["gpt"])].contains(value),
                _ => false,
            };
            turns = match (key, value) {
                (_, value) if is_so || value.is_null() => turns,
                ("train_on_turns", value) if value == "all" => TrainOnTurns::All,
                ("train_on_turns", value) if value == "last" => TrainOnTurns::Last,
                ("mask_history", Value::Bool(true)) => TrainOnTurns::Last,
                (_, value) => {
                    return Err(format!(
                        "`{key}` = {value} in a row is not followed\n  hint: `train_on_turns` = \"all\" or \"last\" in a row \
                         and `weight` 0 in a message are; `data.train_on_inputs = true` trains on every token of all rows"
                    ));
                }
            };
        }
        Ok(turns)
    }

    /// The completion of a row; a number stands for one of its `choices`, from 0.
    fn completion<'a>(&'a self, row: &'a Value) -> Result<Cow<'a, str>, String> {
        let [completion, choices] = ["completion", "choices"].map(|name| self.name_of(name));
        let (Some(number), Some(texts)) = (row[completion].as_u64(), row[choices].as_array()) else {
            return self.text_of(row, "completion");
        };
        let choice = usize::try_from(number).ok().and_then(|number| texts.get(number));
        choice.and_then(text).ok_or_else(|| format!("`{completion}` = {number} is none of the texts in `{choices}`"))
    }

    /// The choices of a row, at least two.
    ///
    /// # Errors
    /// A row without them.
    pub fn choices(&self, row: &Value) -> Result<Vec<String>, String> {
        let name = self.name_of("choices");
        let texts = row.get(name).and_then(Value::as_array);
        let texts: Option<Vec<String>> =
            texts.and_then(|texts| texts.iter().map(|text| text.as_str().map(|text| text.trim().to_owned())).collect());
        texts.filter(|texts| texts.len() > 1).ok_or_else(|| {
            let keys = keys_of(row);
            format!(
                "multiple choice needs `{name}`, a list of texts, in rows of a prompt and a completion; it has {keys}"
            )
        })
    }

    /// Refuses a row with media beside its texts, unless the recipe names the texts.
    fn refuse_other_media(&self, row: &Value) -> Result<(), String> {
        let columns = || self.format.columns().0.iter().map(|name| format!("{name} = {:?}", self.name_of(name)));
        let has_file = images::is_column(row, "file_name");
        let file = has_file.then(|| format!("the row has the `file_name` of an image; {TEXT_ONLY}"));
        refuse_media(row).and_then(|()| file.map_or(Ok(()), Err)).map_err(|reason| {
            let columns = columns().collect::<Vec<_>>().join(", ");
            let alone = format!("`columns = {{ {columns} }}` says that the text alone is meant");
            if self.images.is_none() || self.format != DataFormat::Text {
                return format!("{reason}\n  hint: {alone}");
            }
            let reason = reason.replace(TEXT_ONLY, "an image is seen in a question, and the row has none");
            format!("{reason}\n  hint: {}; {alone}", images::with_question(self.name_of("text")))
        })
    }

    /// The column of the prompt.
    #[must_use]
    pub fn prompt_column(&self) -> &str {
        self.name_of("prompt")
    }

    fn name_of<'a>(&'a self, name: &'a str) -> &'a str {
        self.columns.get(name).map_or(name, String::as_str)
    }

    fn column<'a>(&self, row: &'a Value, name: &str) -> Result<&'a Value, String> {
        let column = self.name_of(name);
        row.get(column).ok_or_else(|| {
            let (required, optional) = self.format.columns();
            let is_free = |own: &str| !required.iter().chain(optional).any(|name| self.name_of(name) == own);
            let list = list_in(row).filter(|_| self.list_column().is_some());
            let own = list.or_else(|| longest(row, 1, is_free).pop()).unwrap_or("...");
            format!(
                "format `{}` needs a column `{column}`; the row has {}\n  hint: `columns = {{ {name} = {own:?} }}` \
                 names another column, `format` another format",
                self.format.name(),
                keys_of(row)
            )
        })
    }

    /// The column of a conversation, if rows are conversations.
    fn list_column(&self) -> Option<&str> {
        match self.format {
            DataFormat::Messages => Some(self.name_of("messages")),
            DataFormat::Sharegpt => Some(self.name_of("conversations")),
            _ => None,
        }
    }

    /// The text in a column; numbers, true and false are the text that they are written as, as in a table.
    fn text_of<'a>(&self, row: &'a Value, name: &str) -> Result<Cow<'a, str>, String> {
        let value = self.column(row, name)?;
        text(value).ok_or_else(|| {
            let hint = if is_filled(value) && value.is_array() {
                "\n  hint: a list of messages needs a chat template: `data.chat_template` names a Jinja file"
            } else {
                ""
            };
            format!("`{}` must be text, not {}{hint}", self.name_of(name), kind_of(value))
        })
    }

    fn optional_text<'a>(&self, row: &'a Value, name: &str) -> Result<Option<Cow<'a, str>>, String> {
        match row.get(self.name_of(name)) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => self.text_of(row, name).map(Some),
        }
    }

    fn list<'a>(&self, row: &'a Value, name: &str) -> Result<Cow<'a, [Value]>, String> {
        let column = self.name_of(name);
        let list = list_of(self.column(row, name)?).map_err(|reason| format!("`{column}` {reason}"))?;
        let items = match list {
            Cow::Borrowed(Value::Array(items)) => Cow::Borrowed(&items[..]),
            Cow::Owned(Value::Array(items)) => Cow::Owned(items),
            other => return Err(format!("`{column}` must be a list of objects, not {}", kind_of(&other))),
        };
        if items.is_empty() { Err(format!("`{column}` is empty")) } else { Ok(items) }
    }
}

/// A text, or what a number, true or false is written as.
fn text(value: &Value) -> Option<Cow<'_, str>> {
    match value {
        Value::String(text) => Some(text.into()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string().into()),
        _ => None,
    }
}

/// A conversation and its tools as a row of training reads them: the roles, the parts and the calls that a template gets.
/// `system` is the system message of conversations without one. If the model sees images, their paths start in the working directory.
///
/// # Errors
/// What is wrong with a message or a tool.
pub fn conversation(
    messages: &[Value],
    tools: Option<&Value>,
    system: Option<&str>,
    (template, sees_images): (&ChatTemplate, bool),
) -> Result<(Vec<Value>, Option<Value>), String> {
    conversation_of_row(
        &json!({"messages": messages, "tools": tools}),
        system,
        (template, sees_images.then(PathBuf::new)),
    )
}

/// The same of a row with `messages`, which may have images beside them. Their paths start in a folder, if the model sees images.
///
/// # Errors
/// As [`conversation`].
pub(crate) fn conversation_of_row(
    row: &Value,
    system: Option<&str>,
    (template, images): (&ChatTemplate, Option<PathBuf>),
) -> Result<(Vec<Value>, Option<Value>), String> {
    let system = system.map(str::to_owned);
    let format = RowFormat { format: DataFormat::Messages, system, images, ..RowFormat::default() };
    match format.read(row, Some(template))? {
        Sample::Chat { messages, tools } => Ok((messages, tools)),
        _ => Err("is no conversation".into()),
    }
}

/// The list of a conversation. Where cells are text (CSV), it is the list's JSON.
fn list_of(value: &Value) -> Result<Cow<'_, Value>, String> {
    match value {
        Value::String(text) if text.trim_start().starts_with('[') => {
            let python =
                if text.contains("{'") { "\n  hint: Python's `json.dumps` writes it, `str` does not" } else { "" };
            let parsed = serde_json::from_str(text);
            parsed.map(Cow::Owned).map_err(|error| format!("must be a list of objects in JSON: {error}{python}"))
        }
        value => Ok(Cow::Borrowed(value)),
    }
}

/// Refuses a row that has images, sound or video as well as messages.
fn refuse_media(row: &Value) -> Result<(), String> {
    refuse_media_but(row, &[])
}

fn refuse_media_but(row: &Value, read: &[&str]) -> Result<(), String> {
    let mut media =
        ["image", "images", "audio", "audios", "video", "videos"].iter().filter(|name| !read.contains(name));
    if let Some(name) = media.find(|name| is_filled(&row[**name])) {
        return Err(format!("the row has `{name}`; {TEXT_ONLY}"));
    }
    match images::stored(row).find(|name| !read.contains(name)) {
        Some(name) if read.is_empty() => Err(format!("the row has `{name}`, an image or sound; {TEXT_ONLY}")),
        Some(name) => Err(format!(
            "the row has `{name}`, an image or sound that is not read\n  hint: `columns = {{ images = {name:?} }}` names the \
             column of images"
        )),
        None => Ok(()),
    }
}

fn is_filled(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    }
}

/// A message of the user.
fn user(text: &str, images: &RowImages<'_>) -> Result<Value, String> {
    images.read(&json!({"role": "user", "content": text}), |message| Ok(message.clone()))
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

/// Keys of a row that a message to the user names.
const MAX_NAMED: usize = 30;

/// The keys of a row or a message, for a message to the user.
fn keys_of(value: &Value) -> String {
    let keys = || value.as_object().into_iter().flat_map(Map::keys);
    let named: Vec<String> = keys().take(MAX_NAMED).map(|key| format!("`{key}`")).collect();
    match keys().count().checked_sub(MAX_NAMED) {
        _ if named.is_empty() => "nothing".to_owned(),
        None | Some(0) => named.join(", "),
        Some(more) => format!("{} and {more} more", named.join(", ")),
    }
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
