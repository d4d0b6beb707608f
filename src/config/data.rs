//! Section `[data]` of a recipe.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::path::PathBuf;

use serde::{Deserialize, Serialize, Serializer};

use super::RowKind;
use crate::schema::{Choice, Problem, Section, Value, choice, section};

section! {
    /// Section `[data]`. Whether training rows are needed is not decided here.
    pub struct DataConfig then check {
        /// One such section for each file to train on.
        train: Vec<DataSource> = Vec::new() => sections() like { path = "data/train.jsonl" } of DataSource, OtherRows,
            ["datasets", "dataset", "train_file", "train_files", "train_data", "dataset_path", "data_path", "dataset_name",
             "data_files", "train_dataset", "training_data"];
        /// One such section for each file to evaluate on; its keys are those of `[[data.train]]`.
        eval: Vec<DataSource> = Vec::new() => sections() like { path = "data/eval.jsonl" } of DataSource, None,
            ["test_datasets", "eval_dataset", "eval_data", "eval_file", "validation_file", "val_data", "valid",
             "validation", "test", "val_dataset"];
        /// Longest sequence, in tokens; longer rows are cut, counted and reported.
        max_length: usize = 1024 => count(2..), OtherRows,
            ["sequence_len", "sequence_length", "max_seq_length", "max_seq_len", "seq_len", "seq_length", "cutoff_len",
             "model_max_length", "context_length", "block_size", "max_len", "max_tokens", "max_source_length"],
            ["max_prompt_length"; "no length of prompts alone: rows are cut at the end, and prompts that fill max_length are left out"];
        /// Several rows in one sequence of `max_length`, none of which sees another: less padding.
        packing: bool = false => boolean(), OtherRows,
            ["sample_packing", "packed", "pack", "pad_to_sequence_len", "neat_packing"];
        /// Loss on every token; false keeps it to the answers.
        train_on_inputs: bool = false => boolean(), OtherRows,
            ["train_on_input", "train_on_prompt", "train_on_source", "train_on_prompts"],
            ["mask_prompt", "mask_inputs", "completion_only_loss", "assistant_only_loss", "train_on_responses_only";
             "it means the opposite: train_on_inputs = false, the default, keeps loss to the answers"];
        /// "all" puts loss on every answer of a conversation, "last" on the last one alone.
        train_on_turns: TrainOnTurns = TrainOnTurns::All => choice(), OtherRows,
            ["mask_history"; "mask_history: true is train_on_turns = \"last\""],
            ["roles_to_train"; "answers of the assistant carry loss: all of them, or the last"];
        /// System prompt of rows that have none.
        system: Option<String> = None => optional_string() like "You are a helpful assistant.", OtherRows,
            ["default_system", "default_system_message", "default_system_prompt", "system_prompt", "system_message"];
        /// Rows held out of the training files for evaluation: a share below 1, or a number of rows. Excludes
        /// `[[data.eval]]`.
        eval_split: Option<EvalSplit> = None => any(EvalSplit::EXPECTED, EvalSplit::accept) like 0.05, OtherRows,
            ["val_set_size", "val_size", "test_size", "validation_split", "val_split_fraction"];
        /// Visit the rows of each epoch in an order drawn from the seed.
        shuffle: bool = true => boolean(), OtherRows,
            ["shuffle_dataset", "shuffle_data", "shuffle_merged_datasets", "shuffle_buffer_size"];
        /// Threads that make micro-batches ahead. Tokenising, before the first step, takes all cores.
        num_workers: usize = 1 => count(1..=256), None,
            ["dataloader_num_workers", "dataset_num_proc", "num_proc", "dataset_processes",
             "preprocessing_num_workers"];
        /// Micro-batches made ahead of the one in use.
        prefetch_batches: usize = 4 => count(1..=1024), None,
            ["dataloader_prefetch_factor", "prefetch_factor", "prefetch"];
        /// "auto" takes the model's own template, "none" takes none; otherwise a file with a Jinja template. Questions with
        /// answers (alpaca, `prompt_completion`) go through it too, where there is one.
        chat_template: String = "auto".into() => path(), OtherRows,
            ["template", "chat_template_path", "chat_template_jinja", "prompt_template"];
        /// Where the paths of images in rows start; without it, beside the file with the rows.
        image_folder: Option<PathBuf> = None => optional_path() like "images", OtherRows,
            ["image_dir", "image_root", "media_dir", "media_folder"];
        /// Images of more pixels are made smaller: fewer tokens, and less on disk.
        image_max_pixels: Option<usize> = None => optional_count(1..) like 1000000, OtherRows, ["max_pixels"];
        /// What is seen of images is kept on disk up to so many GiB, and as long as there is room; the rest is encoded again in every
        /// epoch, with the tower in memory.
        image_cache_gib: usize = 128 => count(0..), None, ["image_cache_gb"];
        /// What becomes of rows that cannot be used, or of which the template drops something: "error" ends the command
        /// before the first step and names them; "skip" leaves them out, counts them and names the first ones.
        on_bad_row: OnBadRow = OnBadRow::Error => choice(), LaterSteps;
    } with {
        /// What a row trains on: the objective says it.
        #[serde(skip)]
        pub row_kind: RowKind,
    }
}

impl DataConfig {
    fn check(self, section: &mut Section) -> Self {
        if self.eval_split.is_some() && !self.eval.is_empty() {
            let message = "`data.eval_split` excludes [[data.eval]]: evaluation rows come from one of them";
            section.reject("eval_split", Problem::new(message).hint("keep one of the two"));
        }
        if self.train_on_inputs && self.train_on_turns == TrainOnTurns::Last {
            let message =
                "`data.train_on_turns` = \"last\" excludes `data.train_on_inputs` = true, which is loss on all";
            section.reject("train_on_turns", Problem::new(message).hint("keep one of the two"));
        }
        self
    }
}

choice! {
    /// The answers of a conversation that carry loss.
    #[derive(Default)]
    pub enum TrainOnTurns {
        /// All of them.
        #[default]
        All = "all", ["assistant"];
        /// The last one.
        Last = "last", ["final"];
    }
}

choice! {
    /// What to do with a row that cannot be used: invalid JSON, a column that is missing or has another type, a
    /// conversation that the chat template refuses.
    #[derive(Default)]
    pub enum OnBadRow {
        /// End the command and name the row.
        #[default]
        Error = "error", ["raise", "fail"];
        /// Leave the row out, count it, and name the first such rows.
        Skip = "skip", ["ignore", "drop"];
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

impl EvalSplit {
    const EXPECTED: &'static str = "a share of the rows in (0, 1) or a number of rows of at least 1";

    fn accept(value: &Value) -> Result<Option<Self>, Option<String>> {
        match value {
            Value::Float(share) if *share > 0.0 && *share < 1.0 => Ok(Some(Self::Share(*share))),
            Value::Integer(rows) if *rows >= 1 => {
                usize::try_from(*rows).map(|rows| Some(Self::Rows(rows))).map_err(|_| None)
            }
            _ => Err(None),
        }
    }
}

/// How many rows of a file are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowLimit {
    /// The first rows, 1 or more.
    Rows(usize),
    /// The first rows, in percent of all, in (0, 100].
    Percent(f64),
}

impl RowLimit {
    const EXPECTED: &'static str = "a number of rows of at least 1, or a share such as \"10%\"";

    fn accept(value: &Value) -> Result<Option<Self>, Option<String>> {
        match value {
            Value::Integer(rows) if *rows >= 1 => {
                usize::try_from(*rows).map(|rows| Some(Self::Rows(rows))).map_err(|_| None)
            }
            Value::Float(share) if *share > 0.0 && *share <= 1.0 => {
                Err(Some(format!("write \"{}%\"", (share * 1e6).round() / 1e4)))
            }
            Value::String(text) => match text.strip_suffix('%').map(|percent| percent.trim().parse()) {
                Some(Ok(percent)) if percent > 0.0 && percent <= 100.0 => Ok(Some(Self::Percent(percent))),
                None if text.parse::<u64>().is_ok() => Err(Some(format!("write it without quotes: {text}"))),
                _ => Err(None),
            },
            _ => Err(None),
        }
    }

    /// The limit as a number of rows, if it is one.
    pub(crate) fn number(limit: Option<Self>) -> Option<usize> {
        limit.and_then(|limit| match limit {
            Self::Rows(rows) => Some(rows),
            Self::Percent(_) => None,
        })
    }

    /// The number of rows that are read of `num_rows`: a share is rounded, and at least one row.
    #[must_use]
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn of(self, num_rows: usize) -> usize {
        match self {
            Self::Rows(rows) => rows.min(num_rows),
            Self::Percent(percent) => ((num_rows as f64 * percent / 100.0).round() as usize).clamp(1, num_rows.max(1)),
        }
    }
}

impl Serialize for RowLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Rows(rows) => rows.serialize(serializer),
            Self::Percent(percent) => serializer.collect_str(&format_args!("{percent}%")),
        }
    }
}

section! {
    /// One `[[data.train]]` or `[[data.eval]]` entry.
    pub struct DataSource then check {
        /// A .csv, .tsv, .json, .jsonl, .parquet or .txt file, also with .gz or .zst behind it. A folder stands for its
        /// files, a glob such as data/*.jsonl for those that match. Also an https address of a file, and a data set of the
        /// Hub: owner/name, or `hf://datasets/owner/name@revision/files`, of which the last two may be left out.
        path: String = String::new() => required_path("a file, a folder, a glob, or a data set of the Hub"),
            ["file", "files", "data_files", "data_path", "dataset", "file_name", "source", "data_file", "ds_path", "url",
             "hf_hub_url", "dataset_name", "dataset_path", "data_dir"];
        /// "messages", "sharegpt", "alpaca", "`prompt_completion`", "text", "preference" (chosen and rejected answers),
        /// "`unpaired_preference`" (answers with a label) or "prompt" (for GRPO); "auto" looks at the columns of the first row.
        format: DataFormat = DataFormat::Auto => choice(),
            ["type", "ds_type", "kind", "formatting", "style", "conversation_style", "template"];
        /// Names of the columns in the file, by the names that the format expects: { prompt = "question" }.
        columns: BTreeMap<String, String> = BTreeMap::new() => strings_by_name(),
            ["column_map", "columns_map", "field", "field_messages", "field_instruction", "field_input", "field_output",
             "message_property_mappings", "text_column", "text_field", "dataset_text_field", "prompt_feature",
             "completion_feature", "text_feature", "rename";
             "our name first: columns = { prompt = \"question\", completion = \"answer\" }"];
        /// How often the rows of this file are visited in an epoch, relative to the other files.
        weight: f64 = 1.0 => number((Bound::Excluded(0.0), Bound::Included(1000.0))),
            ["weights", "probability", "interleave_probs", "mix", "ratio", "sampling_weight"];
        /// The first rows alone: a number of them over all files, or a share of each file, "10%".
        rows: Option<RowLimit> = None => any(RowLimit::EXPECTED, RowLimit::accept) like 1000,
            ["limit", "max_samples", "num_samples", "max_rows", "num_rows", "n_samples", "max_train_samples",
             "max_eval_samples", "max_examples", "sample_size"];
        /// Split of a data set, or of a folder that is laid out as one. Default: "train", and all files of a folder.
        split: Option<String> = None => optional_string() like "train",
            ["splits", "train_split", "dataset_split", "dataset_train_split", "test_split", "dataset_test_split"];
        /// Configuration of a data set that has several.
        name: Option<String> = None => optional_string() like "main",
            ["subset", "config_name", "dataset_config", "dataset_config_name", "configuration", "data_name"];
    }
}

choice! {
    /// How a row is read.
    #[derive(Default, Deserialize)]
    pub enum DataFormat {
        /// Decided by the columns of the first row.
        #[default]
        Auto = "auto";
        /// `messages`: a list of `{role, content}`.
        Messages = "messages", ["chat_template", "chat", "openai", "chatml", "conversational"];
        /// `conversations`: a list of `{from, value}`.
        Sharegpt = "sharegpt", ["conversation"];
        /// `instruction`, `input`, `output`.
        Alpaca = "alpaca", ["instruct", "instruction"];
        /// `prompt`, `completion`.
        PromptCompletion = "prompt_completion", ["completions", "input_output"];
        /// `text`, or a .txt file.
        Text = "text", ["completion", "pretrain"];
        /// `chosen`, `rejected` and mostly `prompt`.
        Preference = "preference", ["ranking", "dpo"];
        /// `prompt`, `completion`, `label`; or a conversation and `label`.
        UnpairedPreference = "unpaired_preference", ["kto"];
        /// `prompt` and any columns.
        Prompt = "prompt";
    }
}

impl DataFormat {
    /// The format's name in a recipe.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.word()
    }

    /// The required columns, then the optional ones.
    pub(crate) fn columns(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            Self::Auto => (&[], &[]),
            Self::Messages => (&["messages"], &["tools"]),
            Self::Sharegpt => (&["conversations"], &["system", "tools"]),
            Self::Alpaca => (&["instruction", "output"], &["input", "system"]),
            Self::PromptCompletion => (&["prompt", "completion"], &["choices"]),
            Self::Text => (&["text"], &[]),
            Self::Preference => (&["chosen", "rejected"], &["prompt", "input", "system", "tools", "margin"]),
            Self::Prompt => (&["prompt"], &["input", "system", "tools"]),
            Self::UnpairedPreference => (&["label"], &["prompt", "completion", "messages", "system", "tools"]),
        }
    }
}

impl DataSource {
    fn check(self, section: &mut Section) -> Self {
        if !section.is_wrong("format") {
            self.check_columns(section);
        }
        if let Some(split) = self.split.as_ref().filter(|split| split.contains(['[', '+', ':'])) {
            let message = format!("`{}` = {split:?} is not the name of a split", section.full_name("split"));
            let hint = "`rows = \"10%\"` takes the first rows; two splits are two sections";
            section.reject("split", Problem::new(message).hint(hint));
        }
        self
    }

    /// Checks that `columns` renames only columns that the format reads.
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
        used.extend((self.format != DataFormat::Text).then_some("images"));
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
