//! Another trainer's configuration, key by key, as a recipe.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::InitArgs;
use super::draft::Draft;
use super::rules::{Outcome, rule};
use crate::failure::Failure;
use crate::recipe::{Recipe, peers};
use crate::schema::{Counterpart, Keys as _, Peer, Problem, counterpart, rows_to};

/// Tables that hold the keys of a section of ours.
const OWN_SECTIONS: &[(&str, &str)] = &[("optimizer", "optimizer"), ("lr_scheduler", "scheduler"), ("train", "train")];

/// Longest configuration that is read.
const MAX_BYTES: u64 = 1 << 20;

/// Whose configuration it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trainer {
    Peft,
    Torchtune,
    Litgpt,
    MlxLm,
    LlamaFactory,
    Axolotl,
    /// Keys of transformers' and TRL's arguments, and of others that are like them.
    Unknown,
}

impl Trainer {
    /// Recognises a configuration by keys that only it has.
    fn of(root: &Map<String, Value>) -> Self {
        let has = |key: &str| root.contains_key(key);
        let is_component = |value: &Value| value.get("_component_").is_some();
        match () {
            () if has("peft_type") => Self::Peft,
            () if root.values().any(is_component) => Self::Torchtune,
            () if has("checkpoint_dir") => Self::Litgpt,
            () if has("model_name_or_path") && (has("finetuning_type") || has("stage") || has("cutoff_len")) => {
                Self::LlamaFactory
            }
            () if has("base_model") => Self::Axolotl,
            () if has("lora_parameters") || has("iters") || has("fine_tune_type") => Self::MlxLm,
            () => Self::Unknown,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Peft => "PEFT",
            Self::Torchtune => "torchtune",
            Self::Litgpt => "litgpt",
            Self::MlxLm => "mlx-lm",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Axolotl => "axolotl",
            Self::Unknown => "another trainer",
        }
    }

    /// What it does where its configuration says nothing, and we do something else.
    fn defaults(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Peft | Self::Unknown => &[],
            Self::Axolotl => &[("data.max_length", "512"), ("train.micro_batch_size", "1")],
            Self::LlamaFactory => &[
                ("lora.r", "8"),
                ("data.max_length", "2048"),
                ("train.micro_batch_size", "8"),
                ("train.num_epochs", "3.0"),
                ("optimizer.learning_rate", "5e-5"),
                ("scheduler.lr_scheduler", "\"linear\""),
            ],
            Self::Torchtune => &[("scheduler.lr_scheduler", "\"constant\""), ("train.max_grad_norm", "0.0")],
            Self::Litgpt => &[("data.train_on_inputs", "true"), ("train.max_grad_norm", "0.0")],
            Self::MlxLm => &[
                ("lora.r", "8"),
                ("data.max_length", "2048"),
                ("data.train_on_inputs", "true"),
                ("train.micro_batch_size", "4"),
                ("train.max_steps", "1000"),
                ("train.gradient_checkpointing", "false"),
                ("train.max_grad_norm", "0.0"),
                ("optimizer.learning_rate", "1e-5"),
                ("scheduler.lr_scheduler", "\"constant\""),
            ],
        }
    }
}

/// A configuration.
pub(super) struct Foreign {
    pub(super) trainer: Trainer,
    pub(super) path: PathBuf,
    pub(super) root: Map<String, Value>,
}

impl Foreign {
    fn read(path: &Path) -> Result<Self, Problem> {
        let problem = |message: String| Problem::new(message).at(path.display());
        let size = path.metadata().map_err(|error| problem(format!("cannot be read: {error}")))?.len();
        if size > MAX_BYTES {
            return Err(problem(format!("longer than {MAX_BYTES} bytes, expected a configuration")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| problem(format!("cannot be read: {error}")))?;
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let root = if is_json {
            serde_json::from_str(&text).map_err(|error| problem(format!("not valid JSON: {error}")))?
        } else {
            serde_saphyr::from_str(&text).map_err(|error| problem(format!("not valid YAML: {error}")))?
        };
        match root {
            Value::Object(root) => Ok(Self { trainer: Trainer::of(&root), path: path.to_owned(), root }),
            _ => Err(problem("expected keys with values, as in a configuration of axolotl or LLaMA-Factory".into())),
        }
    }

    /// The value at a dotted path.
    pub(super) fn get(&self, path: &str) -> Option<&Value> {
        let mut parts = path.split('.');
        let first = self.root.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part))
    }

    /// The value of a key of one of these names, in whatever table.
    pub(super) fn anywhere(&self, names: &[&str]) -> Option<&Value> {
        fn within<'v>(table: &'v Map<String, Value>, names: &[&str]) -> Option<&'v Value> {
            let own = names.iter().find_map(|name| table.get(*name)).filter(|value| !value.is_null());
            own.or_else(|| table.values().filter_map(Value::as_object).find_map(|below| within(below, names)))
        }
        within(&self.root, names)
    }

    /// torchtune's `${output_dir}`, replaced by the value of that key.
    pub(super) fn expanded(&self, text: &str) -> String {
        let mut expanded = text.to_owned();
        for (key, value) in &self.root {
            if let Some(value) = value.as_str() {
                expanded = expanded.replace(&format!("${{{key}}}"), value);
            }
        }
        expanded
    }
}

/// A recipe that does what a configuration says, as far as that is possible here; the rest is listed at its end.
pub(super) fn draft(path: &Path, args: &InitArgs) -> Result<Draft, Failure> {
    let foreign = Foreign::read(path)?;
    let mut mapping = Mapping { foreign: &foreign, peers: peers(), draft: Draft::default(), lost: Vec::new() };
    mapping.table(&foreign.root, "", "");
    mapping.fill(args);
    mapping.settle();
    let Mapping { mut draft, lost, .. } = mapping;
    let (trainer, shown) = (foreign.trainer.name(), path.display());
    draft.header = vec![
        format!("From {shown}, a configuration of {trainer}: after a key, its name there."),
        "Every key: recipes/reference.toml".into(),
    ];
    draft.footer.extend(lost.into_iter().map(|(key, reason)| format!("not taken over: {key}: {reason}")));
    Ok(draft)
}

/// A configuration while it is mapped.
struct Mapping<'a> {
    foreign: &'a Foreign,
    peers: Vec<Peer>,
    draft: Draft,
    /// Keys without a counterpart, and why.
    lost: Vec<(String, String)>,
}

impl Mapping<'_> {
    /// The keys of a table, whose counterpart is the section `section`.
    fn table(&mut self, table: &Map<String, Value>, path: &str, section: &str) {
        for (name, value) in table {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            self.key(name, value, &path, section);
        }
    }

    fn key(&mut self, name: &str, value: &Value, path: &str, section: &str) {
        match rule(self.foreign, path, value) {
            Some(Outcome::Set(settings)) => {
                return settings.into_iter().for_each(|(key, value)| self.set(key, value, path));
            }
            Some(Outcome::Nothing) => return,
            Some(Outcome::Lost(reason)) => return self.lose(path, reason),
            Some(Outcome::Nested) => {
                let section = OWN_SECTIONS.iter().find(|(theirs, _)| *theirs == name).map_or(section, |(_, ours)| ours);
                return value.as_object().into_iter().for_each(|below| self.table(below, path, section));
            }
            None => {}
        }
        let is_section = |key: &str| rows_to(Recipe::ROWS, key).last().is_some_and(|row| !row.keys.is_empty());
        match (counterpart(name, section, value.is_object(), Recipe::ROWS, &self.peers), value) {
            (Counterpart::Key(key), Value::Object(below)) if is_section(&key) => self.table(below, path, &key),
            (Counterpart::Other(note), _) if !is_off(value) => self.lose(path, note),
            (Counterpart::Key(key), _) if !value.is_null() && !is_section(&key) => match as_toml(value, self.foreign) {
                Some(value) => self.set(key, value, path),
                None => self.lose(path, "it has a value that no key here takes"),
            },
            (_, Value::Object(below)) => self.table(below, path, section),
            _ if !is_off(value) => self.lose(path, "there is no such key here"),
            _ => {}
        }
    }

    /// Sets a key; its comment is what it is called there, where that is another name.
    fn set(&mut self, key: String, value: toml::Value, path: &str) {
        let is_same = key.rsplit('.').next() == Some(path);
        self.draft.set(key, value, if is_same { "" } else { path });
    }

    fn lose(&mut self, path: &str, reason: impl Into<String>) {
        self.lost.push((path.to_owned(), reason.into()));
    }

    /// What the command line says, and what the other trainer does by default.
    fn fill(&mut self, args: &InitArgs) {
        if let Some(model) = &args.model {
            self.draft.set("model.path", model.as_str(), "");
        }
        if let Some(data) = &args.data {
            self.draft.settings.retain(|setting| !setting.key.starts_with("data.train."));
            self.draft.set("data.train.0.path", data.as_str(), "");
        }
        if let Some(device) = &args.device {
            self.draft.set("device.name", device.as_str(), "");
        }
        let trainer = self.foreign.trainer;
        for (key, value) in trainer.defaults() {
            let is_excluded = *key == "train.max_steps" && self.draft.get("train.num_epochs").is_some();
            if self.draft.get(key).is_none() && !is_excluded {
                let value: Option<toml::Value> = value.parse().ok();
                value
                    .into_iter()
                    .for_each(|value| self.draft.set(*key, value, format!("{}'s default", trainer.name())));
            }
        }
        let has_alpha = self.draft.get("lora.lora_alpha").is_some();
        let rank = self.draft.get("lora.r").and_then(toml::Value::as_integer);
        if let (Trainer::LlamaFactory, false, Some(rank)) = (trainer, has_alpha, rank) {
            self.draft.set("lora.lora_alpha", 2 * rank, "LLaMA-Factory's default: twice the rank");
        }
    }

    /// Writes values as we spell them, and takes out what a recipe refuses.
    fn settle(&mut self) {
        loop {
            let (refused, _) = self.draft.refused();
            if refused.is_empty() {
                return;
            }
            for (key, problem) in refused {
                let Some(index) = self.draft.settings.iter().position(|setting| setting.key == key) else { continue };
                match problem.instead {
                    Some(word) => self.draft.settings[index].value = (*word).into(),
                    None => {
                        let setting = self.draft.settings.remove(index);
                        let hint = problem.hint.map(|hint| format!("; {hint}")).unwrap_or_default();
                        let name = if setting.comment.is_empty() { &setting.key } else { &setting.comment };
                        self.lose(name, format!("{}{hint}", problem.message).replace('\n', " "));
                    }
                }
            }
        }
    }
}

/// Whether a value turns nothing on: what we lack is not missed then.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => matches!(text.as_str(), "" | "none" | "None" | "no" | "false"),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Bool(true) => false,
    }
}

/// The same value in TOML, with numbers that YAML 1.1 reads as text (`1e-4`).
pub(super) fn as_toml(value: &Value, foreign: &Foreign) -> Option<toml::Value> {
    match value {
        Value::String(text) => Some(match text.parse::<f64>() {
            Ok(number) if number.is_finite() && text.starts_with(|c: char| c.is_ascii_digit()) => number.into(),
            _ => foreign.expanded(text).into(),
        }),
        _ => toml::Value::try_from(value).ok(),
    }
}

#[cfg(test)]
mod tests;
