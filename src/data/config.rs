//! Section `[data]` of a recipe.

use std::collections::BTreeMap;

use serde::Serialize;

/// Section `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataConfig {
    /// Files to train on.
    pub train: Vec<DataSource>,
    /// Files to evaluate on; excludes `eval_split`.
    pub eval: Vec<DataSource>,
    /// Longest sequence in tokens; longer rows are truncated, counted and reported.
    pub max_length: usize,
    /// Several documents in one row (not available yet: `true` is refused).
    pub packing: bool,
    /// Loss on every token, not on answers only.
    pub train_on_inputs: bool,
    /// Rows held out of the training files for evaluation: a share below 1, or a number of rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_split: Option<EvalSplit>,
    /// Visit rows in an order drawn from the seed and the epoch.
    pub shuffle: bool,
    /// Threads that read and tokenise.
    pub num_workers: usize,
    /// Micro-batches made ahead of the one in use.
    pub prefetch_batches: usize,
    /// `auto`, `none` or a file with a Jinja template.
    pub chat_template: String,
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
        }
    }
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

/// One `[[data.train]]` or `[[data.eval]]` entry.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataSource {
    /// A .json, .jsonl, .parquet or .txt file; globs are allowed. Relative paths start at the recipe's folder.
    pub path: String,
    /// How a row is read.
    pub format: DataFormat,
    /// New name of a column, by the name that the format expects: `{ prompt = "question" }`.
    pub columns: BTreeMap<String, String>,
    /// How often the rows of this file are visited in an epoch, relative to the other files.
    pub weight: f64,
}

/// How a row is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
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
