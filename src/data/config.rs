//! Section `[data]` of a recipe.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use serde::{Deserialize, Serialize};

use crate::schema::{Choice, Problem, Section, Value};

/// Section `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataConfig {
    /// Files to train on.
    pub train: Vec<DataSource>,
    /// Files to evaluate on; excludes `eval_split`.
    pub eval: Vec<DataSource>,
    /// Longest sequence in tokens; longer rows are truncated, counted and reported.
    pub max_length: usize,
    /// Several documents in one row, each of which sees itself alone.
    pub packing: bool,
    /// Loss on every token, not on answers only.
    pub train_on_inputs: bool,
    /// Rows held out of the training files for evaluation: a share below 1, or a number of rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_split: Option<EvalSplit>,
    /// Visit rows in an order drawn from the seed and the epoch.
    pub shuffle: bool,
    /// Threads that make micro-batches ahead.
    pub num_workers: usize,
    /// Micro-batches made ahead of the one in use.
    pub prefetch_batches: usize,
    /// `auto`, `none` or a file with a Jinja template.
    pub chat_template: String,
    /// What becomes of a row that cannot be used.
    pub on_bad_row: OnBadRow,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            train: Vec::new(),
            eval: Vec::new(),
            max_length: 1024,
            packing: false,
            train_on_inputs: false,
            eval_split: None,
            shuffle: true,
            num_workers: 1,
            prefetch_batches: 4,
            chat_template: "auto".into(),
            on_bad_row: OnBadRow::Error,
        }
    }
}

impl DataConfig {
    /// Reads section `[data]`. Whether training rows are needed is not decided here.
    pub fn read(section: &mut Section) -> Self {
        let default = Self::default();
        let config = Self {
            train: section.sections("train", DataSource::read),
            eval: section.sections("eval", DataSource::read),
            max_length: section.count("max_length", default.max_length, 2..),
            packing: section.boolean("packing", default.packing),
            train_on_inputs: section.boolean("train_on_inputs", default.train_on_inputs),
            eval_split: section.optional("eval_split", EvalSplit::EXPECTED, EvalSplit::accept),
            shuffle: section.boolean("shuffle", default.shuffle),
            num_workers: section.count("num_workers", default.num_workers, 1..=256),
            prefetch_batches: section.count("prefetch_batches", default.prefetch_batches, 1..=1024),
            chat_template: section.path("chat_template").unwrap_or(default.chat_template),
            on_bad_row: section.choice("on_bad_row", default.on_bad_row),
        };
        if config.eval_split.is_some() && !config.eval.is_empty() {
            let message = "`data.eval_split` excludes [[data.eval]]: evaluation rows come from one of them";
            section.reject("eval_split", Problem::new(message).hint("keep one of the two"));
        }
        config
    }
}

/// What becomes of a row that cannot be used: no valid JSON, a column that is missing or of another type, a conversation
/// that the chat template refuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadRow {
    /// The command ends and names it.
    #[default]
    Error,
    /// It is left out, counted, and the first ones are named.
    Skip,
}

impl Choice for OnBadRow {
    const NAMES: &'static [(&'static str, Self)] = &[("error", Self::Error), ("skip", Self::Skip)];
    const PEERS: &'static [(&'static str, &'static str)] =
        &[("raise", "error"), ("fail", "error"), ("ignore", "skip"), ("drop", "skip")];
}

/// How many rows are held out for evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum EvalSplit {
    /// A share of the rows, in (0, 1).
    Share(f64),
    /// A number of rows, 1 or more.
    Rows(usize),
}

impl EvalSplit {
    const EXPECTED: &'static str = "a share of the rows in (0, 1) or a number of rows of at least 1";

    fn accept(value: &Value) -> Result<Self, Option<String>> {
        match value {
            Value::Float(share) if *share > 0.0 && *share < 1.0 => Ok(Self::Share(*share)),
            Value::Integer(rows) if *rows >= 1 => usize::try_from(*rows).map(Self::Rows).map_err(|_| None),
            _ => Err(None),
        }
    }
}

/// One `[[data.train]]` or `[[data.eval]]` entry.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataSource {
    /// A .json, .jsonl, .parquet or .txt file; globs are allowed. A relative path starts at the current directory,
    /// like `output_dir` and like the data paths of other trainers.
    pub path: String,
    /// How a row is read.
    pub format: DataFormat,
    /// New name of a column, by the name that the format expects: `{ prompt = "question" }`.
    pub columns: BTreeMap<String, String>,
    /// How often the rows of this file are visited in an epoch, relative to the other files.
    pub weight: f64,
}

/// How a row is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataFormat {
    /// Decided by the columns of the first row.
    #[default]
    Auto,
    /// `messages`: a list of `{role, content}`.
    Messages,
    /// `conversations`: a list of `{from, value}`.
    Sharegpt,
    /// `instruction`, `input`, `output`.
    Alpaca,
    /// `prompt`, `completion`.
    PromptCompletion,
    /// `text`, or a .txt file.
    Text,
}

impl Choice for DataFormat {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("auto", Self::Auto),
        ("messages", Self::Messages),
        ("sharegpt", Self::Sharegpt),
        ("alpaca", Self::Alpaca),
        ("prompt_completion", Self::PromptCompletion),
        ("text", Self::Text),
    ];
    const PEERS: &'static [(&'static str, &'static str)] = &[
        ("chat_template", "messages"),
        ("chat", "messages"),
        ("openai", "messages"),
        ("chatml", "messages"),
        ("conversational", "messages"),
        ("conversation", "sharegpt"),
        ("instruct", "alpaca"),
        ("instruction", "alpaca"),
        ("completions", "prompt_completion"),
        ("input_output", "prompt_completion"),
        ("completion", "text"),
        ("pretrain", "text"),
    ];
}

impl DataSource {
    /// Reads one `[[data.train]]` or `[[data.eval]]` entry.
    pub fn read(section: &mut Section) -> Self {
        let source = Self {
            path: section.required_path("path", "a .json, .jsonl, .parquet or .txt file, or a glob of them"),
            format: section.choice("format", DataFormat::Auto),
            columns: section.strings_by_name("columns"),
            weight: section.number("weight", 1.0, (Bound::Excluded(0.0), Bound::Unbounded)),
        };
        if !section.is_wrong("format") {
            source.check_columns(section);
        }
        source
    }

    /// Holds that `columns` renames only what the format reads.
    fn check_columns(&self, section: &mut Section) {
        let formats: Vec<DataFormat> = match self.format {
            DataFormat::Auto => DataFormat::NAMES.iter().map(|(_, format)| *format).collect(),
            given => vec![given],
        };
        let mut used: Vec<&str> = formats
            .iter()
            .map(|format| format.columns())
            .flat_map(|(must, may)| must.iter().chain(may))
            .copied()
            .collect();
        let mut seen = BTreeSet::new();
        used.retain(|name| seen.insert(*name));
        let reads = match self.format {
            DataFormat::Auto => "which no format reads".to_owned(),
            given => format!("which format `{}` does not read", given.name()),
        };
        for (name, column) in self.columns.iter().filter(|(name, _)| !used.contains(&name.as_str())) {
            let message = format!("`{}` has `{name}`, {reads}", section.full_name("columns"));
            let hint = if used.contains(&column.as_str()) {
                format!("our name first: {column} = \"{name}\"")
            } else {
                format!("it reads {}", used.join(", "))
            };
            section.reject(&format!("columns.{name}"), Problem::new(message).hint(hint));
        }
    }
}
