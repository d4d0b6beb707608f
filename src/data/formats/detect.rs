//! Which format a file's rows have, by the columns of the first.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{RowFormat, images, keys_of, list_of};
use crate::config::{DataFormat, RowKind};

/// Formats in the order in which `auto` tries them: the most structured first.
const DETECTION_ORDER: [DataFormat; 5] =
    [DataFormat::Messages, DataFormat::Sharegpt, DataFormat::Alpaca, DataFormat::PromptCompletion, DataFormat::Text];

/// Other common names for columns of preferences; OpenAI's are the second of each pair of answers.
const PREFERENCE_NAMES: [(&str, &[&str]); 6] = [
    ("chosen", &["preferred_output"]),
    ("rejected", &["non_preferred_output"]),
    ("prompt", &["question", "instruction", "query", "input", "problem"]),
    ("label", &["kto_tag"]),
    ("completion", &["response", "output", "answer"]),
    ("messages", &["conversations"]),
];

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

impl RowFormat {
    /// The format of a file, from what the recipe says and the file's first row.
    ///
    /// # Errors
    /// What is wrong and how to fix it: a renamed column that does not exist, a column that the format needs and the
    /// row lacks, columns that match no known format.
    pub fn detect(
        format: DataFormat,
        columns: &BTreeMap<String, String>,
        first_row: &Value,
        kind: RowKind,
    ) -> Result<Self, String> {
        let mut columns = columns.clone();
        // Whatever the format is.
        let images = columns.remove("images");
        let mut found = Self::of_texts(format, &columns, first_row, kind)?;
        if let Some(column) = images {
            if found.format == DataFormat::Text {
                return Err("`columns` has `images`, which format `text` does not use; it uses text".into());
            }
            if first_row.get(&column).is_none() {
                let keys = keys_of(first_row);
                return Err(format!("`columns` says that `images` is column `{column}`; the row has {keys}"));
            }
            found.columns.insert("images".into(), column);
        }
        Ok(found)
    }

    fn of_texts(
        format: DataFormat,
        columns: &BTreeMap<String, String>,
        first_row: &Value,
        kind: RowKind,
    ) -> Result<Self, String> {
        if kind != RowKind::Sequence {
            return Self::of_preferences(format, columns, first_row, kind);
        }
        refuse_formats_of_objectives(format)?;
        let found: Vec<&str> =
            first_row.as_object().map(|row| row.keys().map(String::as_str).collect()).unwrap_or_default();
        let mut columns = columns.clone();
        let is_detected = format == DataFormat::Auto && columns.is_empty();
        if is_detected {
            refuse_preferences(first_row)?;
            refuse_labels(first_row)?;
        }
        if format == DataFormat::Auto && !columns.contains_key("messages") && first_row["messages"].is_null() {
            // A conversation under ShareGPT's column name, but with the keys of `messages`.
            let name = columns.get("conversations").map_or("conversations", String::as_str).to_owned();
            if list_of(&first_row[&name]).is_ok_and(|list| !list[0]["role"].is_null()) {
                columns.remove("conversations");
                columns.insert("messages".into(), name);
            }
        }
        let is_there = |format: &DataFormat| has_columns(first_row, &columns, format.columns().0);
        let resolved = match format {
            DataFormat::Auto => match DETECTION_ORDER.into_iter().find(is_there) {
                Some(format) => format,
                None if columns.is_empty() => return Self::of_pair(first_row, &found),
                None => {
                    let absent = absent(first_row, &columns, |_| true);
                    return Err(absent.unwrap_or_else(|| unknown_columns(first_row, &found)));
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
        if let Some(reason) = absent(first_row, &columns, |name| required.contains(&name)) {
            return Err(reason);
        }
        for name in used {
            if let Some(column) = named(first_row, name).filter(|column| *column != name) {
                columns.entry(name.into()).or_insert_with(|| column.into());
            }
        }
        let format = Self { format: resolved, columns, is_detected, ..Self::default() };
        for name in required {
            format.column(first_row, name)?;
        }
        Ok(format)
    }

    /// The format of a row of preferences.
    fn of_preferences(
        format: DataFormat,
        columns: &BTreeMap<String, String>,
        row: &Value,
        kind: RowKind,
    ) -> Result<Self, String> {
        let is_pair = kind.is_pair();
        let (wanted, needs) = match kind {
            RowKind::Prompt => (DataFormat::Prompt, "a prompt a row"),
            RowKind::Labelled => (DataFormat::UnpairedPreference, "an answer a row and its label, true or false"),
            _ => (DataFormat::Preference, "two answers a row, the chosen and the rejected one"),
        };
        let (required, optional) = wanted.columns();
        if format != DataFormat::Auto && format != wanted {
            return Err(format!(
                "the objective learns from {needs}, and format `{}` has none\n  hint: format `{}`, or name = \"cross_entropy\" in [objective]",
                format.name(),
                wanted.name()
            ));
        }
        let columns_given = columns;
        let mut columns = columns.clone();
        let conversation = if row["conversations"].is_array() { "conversations" } else { "messages" };
        let conversation = (kind != RowKind::Labelled && row[conversation].is_array()).then_some(conversation);
        for name in required.iter().chain(optional) {
            let others = PREFERENCE_NAMES.iter().find(|(own, _)| own == name).map_or(&[][..], |(_, others)| *others);
            let conversation = conversation.filter(|_| *name == "prompt");
            let found = [*name].iter().chain(others).copied().chain(conversation).find_map(|other| named(row, other));
            if let Some(column) = found.filter(|column| column != name) {
                columns.entry((*name).to_owned()).or_insert_with(|| column.to_owned());
            }
        }
        let has_margins = kind == RowKind::ScoredPair;
        let format = Self { format: wanted, columns, has_margins, ..Self::default() };
        let name_of = |name: &&&str| format.name_of(name).to_owned();
        if let Some((name, column)) = columns_given.iter().find(|(_, column)| row.get(column.as_str()).is_none()) {
            return Err(format!("`columns` says that `{name}` is column `{column}`; the row has {}", keys_of(row)));
        }
        let absent: Vec<String> = required
            .iter()
            .filter(|name| row.get(name_of(name)).is_none())
            .map(|name| format!("{name} = \"...\""))
            .collect();
        if !absent.is_empty() {
            let other = if pair_of(row).is_none() || is_pair { "" } else { ", and pairs are for \"dpo\"" };
            return Err(format!(
                "the objective learns from {needs}{other}; the row has {}\n  hint: name what it has under another name: \
                 `columns = {{ {} }}`",
                keys_of(row),
                absent.join(", ")
            ));
        }
        Ok(format)
    }

    /// The format of a row that has one of [`PAIRS`].
    fn of_pair(row: &Value, found: &[&str]) -> Result<Self, String> {
        let pairs: Vec<_> =
            PAIRS.iter().filter(|(_, pair, _)| pair.iter().all(|name| named(row, name).is_some())).collect();
        let [(format, pair, extra)] = pairs[..] else {
            return Err(rows_of_embeddings(row).unwrap_or_else(|| unknown_columns(row, found)));
        };
        let mut columns: BTreeMap<String, String> = BTreeMap::new();
        let pair = format.columns().0.iter().copied().zip(pair.iter().copied());
        for (name, column) in pair.chain(extra.map(|[name, column]| (name, column))) {
            columns.extend(named(row, column).map(|column| (name.to_owned(), column.to_owned())));
        }
        Ok(Self { format: *format, columns, is_detected: true, ..Self::default() })
    }
}

/// Refuses formats that the cross-entropy has no use for.
fn refuse_formats_of_objectives(format: DataFormat) -> Result<(), String> {
    let objective = match format {
        DataFormat::Preference => "dpo",
        DataFormat::Prompt => "grpo",
        DataFormat::UnpairedPreference => "kto",
        _ => return Ok(()),
    };
    Err(format!(
        "format `{}` is for objectives that learn from preferences\n  hint: set `name = \"{objective}\"` in [objective]",
        format.name()
    ))
}

/// Whether a row has the columns of these names, or those in their places.
fn has_columns(row: &Value, columns: &BTreeMap<String, String>, names: &[&str]) -> bool {
    names.iter().all(|name| match columns.get(*name) {
        Some(column) => row.get(column).is_some(),
        None => named(row, name).is_some(),
    })
}

/// Says which of the columns that are needed a row lacks.
fn absent(row: &Value, columns: &BTreeMap<String, String>, is_needed: impl Fn(&str) -> bool) -> Option<String> {
    let is_absent = |column: &str| row.get(column).is_none();
    let (name, column) = columns.iter().find(|(name, column)| is_needed(name) && is_absent(column))?;
    Some(format!("`columns` says that `{name}` is column `{column}`; the row has {}", keys_of(row)))
}

/// The column of this name, or the only one that differs in capitals alone.
fn named<'r>(row: &'r Value, name: &str) -> Option<&'r str> {
    let names = || row.as_object().into_iter().flat_map(|row| row.keys().map(String::as_str));
    let mut alike = names().filter(|own| own.eq_ignore_ascii_case(name));
    names().find(|own| *own == name).or_else(|| alike.next().filter(|_| alike.next().is_none()))
}

/// The columns of a chosen and a rejected answer.
fn pair_of(row: &Value) -> Option<[&'static str; 2]> {
    let pairs = [["chosen", "rejected"], ["preferred_output", "non_preferred_output"]];
    pairs.into_iter().find(|pair| pair.iter().all(|name| !row[*name].is_null()))
}

/// Refuses rows with good and bad answers: training on all of them would teach the bad answers.
pub(super) fn refuse_preferences(row: &Value) -> Result<(), String> {
    // A label of texts alone is a class.
    let has_answer = || other_name(row, "messages").or_else(|| other_name(row, "completion")).is_some();
    let label = ["label", "kto_tag"].into_iter().find(|column| row[column].is_boolean());
    match (pair_of(row), label) {
        (Some([chosen, rejected]), _) => Err(preferences(row, &format!("`{chosen}` and `{rejected}`"))),
        (None, Some(label)) if has_answer() => Err(preferences(row, &format!("`{label}` true or false"))),
        _ => Ok(()),
    }
}

/// The column of a row for a column of preferences, whatever it is called.
fn other_name<'r>(row: &'r Value, name: &str) -> Option<&'r str> {
    let (_, others) = PREFERENCE_NAMES.iter().find(|(own, _)| *own == name)?;
    [name].into_iter().chain(others.iter().copied()).find_map(|other| named(row, other))
}

/// The message for rows of texts that are to be near to each other, or far.
fn rows_of_embeddings(row: &Value) -> Option<String> {
    const PAIRS: [[&str; 2]; 5] = [
        ["anchor", "positive"],
        ["query", "positive"],
        ["query", "pos"],
        ["sentence1", "sentence2"],
        ["sentence_A", "sentence_B"],
    ];
    let [one, other] = PAIRS.iter().find(|pair| pair.iter().all(|name| named(row, name).is_some()))?;
    Some(format!(
        "`{one}` and `{other}` are columns of rows for an embedding model, which is not trained here\n  hint: models that \
         write text are; `columns` names a prompt and its completion where the rows have them"
    ))
}

/// Refuses a first row whose label is not a boolean: in tables all values are text. Other rows may have classes there.
fn refuse_labels(row: &Value) -> Result<(), String> {
    let own = ["prompt", "completion"];
    let is_label = |value: &Value, words: [&str; 2]| {
        value.as_str().is_some_and(|text| words.iter().any(|word| text.eq_ignore_ascii_case(word)))
    };
    let is_word = |value: &Value| is_label(value, ["true", "false"]);
    let is_number = |value: &Value| *value == 0 || *value == 1 || is_label(value, ["0", "1"]);
    let has_no_more = row.as_object().is_some_and(|row| row.len() == own.len() + 1);
    let has_all = own.iter().all(|column| !row[column].is_null());
    if has_all && (is_word(&row["label"]) || (has_no_more && is_number(&row["label"]))) {
        return Err(preferences(row, "`label` true or false"));
    }
    let tag = &row["kto_tag"];
    if is_word(tag) || is_number(tag) { Err(preferences(row, "`kto_tag` true or false")) } else { Ok(()) }
}

/// What is said of a row of preferences.
fn preferences(row: &Value, what: &str) -> String {
    let of_names = |name: &str| other_name(row, name).map(|column| format!("{name} = \"{column}\""));
    // An answer alone would be learnt without its question.
    let is_asked = |message: &Value| message["role"] == "user" || message["from"] == "human";
    let (columns, objective) = match (pair_of(row), &row["chosen"]) {
        (_, Value::Array(chosen)) if chosen.iter().any(is_asked) => (Some("messages = \"chosen\"".to_owned()), "dpo"),
        (_, Value::String(_)) => (Some("completion = \"chosen\"".to_owned()), "dpo"),
        (Some(_), _) => (None, "dpo"),
        _ => {
            let answer = of_names("messages").or_else(|| of_names("completion")).into_iter();
            let prompt = of_names("prompt").filter(|_| of_names("messages").is_none());
            (Some(prompt.into_iter().chain(answer).collect::<Vec<_>>().join(", ")), "kto")
        }
    };
    let alone = columns.map(|columns| {
        format!(
            "; to train on the good answers alone, keep only those rows and name the columns, such as \
             `columns = {{ {columns} }}`"
        )
    });
    format!(
        "this is preference data ({what})\n  hint: `name = \"{objective}\"` in [objective] learns from it{}",
        alone.unwrap_or_default()
    )
}

/// The message for columns that match no format, with a hint that uses the user's own column names.
fn unknown_columns(row: &Value, found: &[&str]) -> String {
    let formats: Vec<String> =
        DETECTION_ORDER.iter().map(|format| format!("{} ({})", format.name(), format.columns().0.join(", "))).collect();
    let list = list_in(row);
    let inner =
        list.map(|list| RowFormat::detect(DataFormat::Auto, &BTreeMap::new(), &row[list][0], RowKind::Sequence));
    let texts = longest(row, 2, |name| !images::is_column(row, name));
    let columns = match (list, &texts[..]) {
        (Some(list), _) => format!("messages = {list:?}"),
        (None, [prompt, completion]) => format!("prompt = {prompt:?}, completion = {completion:?}"),
        (None, [text]) => format!("text = {text:?}"),
        (None, _) => "prompt = \"...\", completion = \"...\"".into(),
    };
    let found = if found.is_empty() {
        "the row has no columns".to_owned()
    } else {
        format!("the columns {} are those of no format", keys_of(row))
    };
    let shows = row.as_object().is_some_and(|columns| columns.keys().any(|name| images::is_column(row, name)));
    let hint = match (list, inner, &texts[..]) {
        (Some(list), Some(Ok(RowFormat { format, .. })), _) if format != DataFormat::Text => {
            format!("the rows are in `{list}`: write that list alone")
        }
        (None, _, [answer]) if shows => format!("an image is seen in a question; {}", images::with_question(answer)),
        _ => format!("name yours, such as `columns = {{ {columns} }}`"),
    };
    let answered = if named(row, "prompt").is_some() {
        "; prompts that the model answers itself, for rewards: name = \"grpo\" in [objective]"
    } else {
        ""
    };
    format!("{found}; known are {}\n  hint: {hint}{answered}", formats.join(", "))
}

/// Columns for whose sake people have rows of texts.
const LEARNT: [&str; 16] = [
    "label", "labels", "label_text", "class", "target", "category", "sentiment", "intent", "emotion", "topic", "stars",
    "rating", "answer", "summary", "translation", "response",
];

/// Columns that belong to a question, with Alpaca's name for them.
const ASKED: [(&str, &str); 5] =
    [("input", "input"), ("context", "input"), ("passage", "input"), ("document", "input"), ("system", "system")];

impl RowFormat {
    /// Says of rows that were recognised as such that a column which is the point of them is not read, if `unused` has one: of
    /// texts their answers, of questions what they are about.
    pub(in crate::data) fn unlearnt(&self, unused: &BTreeSet<String>) -> Option<String> {
        if self.is_detected && self.format == DataFormat::PromptCompletion {
            let is_named = |name: &str| unused.iter().find(|column| column.eq_ignore_ascii_case(name));
            let (column, ours) = ASKED.iter().find_map(|(name, ours)| Some((is_named(name)?, *ours)))?;
            let (prompt, completion) = (self.name_of("prompt"), self.name_of("completion"));
            let place = if ours == "system" { "makes it the system prompt" } else { "puts it below the question" };
            return Some(format!(
                "`{column}` is not read\n  hint: `columns = {{ instruction = {prompt:?}, {ours} = {column:?}, output = \
                 {completion:?} }}` {place}"
            ));
        }
        let is_answer = |column: &&String| LEARNT.iter().any(|name| column.eq_ignore_ascii_case(name));
        let column = unused.iter().find(is_answer).filter(|_| self.is_detected && self.format == DataFormat::Text)?;
        let text = self.name_of("text");
        Some(format!(
            "`{column}` is not learnt\n  hint: `columns = {{ prompt = {text:?}, completion = {column:?} }}` teaches to answer \
             with it; `columns = {{ text = {text:?} }}` says that the texts alone are meant"
        ))
    }
}

/// The first column of a row that holds a list of objects.
pub(super) fn list_in(row: &Value) -> Option<&str> {
    let mut columns = row.as_object()?.iter();
    columns.find(|(_, value)| list_of(value).is_ok_and(|list| list[0].is_object())).map(|(name, _)| name.as_str())
}

/// The free columns with the longest texts, in the order of the row: those of a question and an answer, rather than ids.
pub(super) fn longest(row: &Value, count: usize, is_free: impl Fn(&str) -> bool) -> Vec<&str> {
    let texts =
        row.as_object().into_iter().flatten().filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)));
    let mut texts: Vec<(usize, &str, usize)> =
        texts.filter(|(name, _)| is_free(name)).enumerate().map(|(at, (name, text))| (at, name, text.len())).collect();
    texts.sort_by_key(|(at, _, length)| (std::cmp::Reverse(*length), *at));
    texts.truncate(count);
    texts.sort_unstable();
    texts.into_iter().map(|(_, name, _)| name).collect()
}
