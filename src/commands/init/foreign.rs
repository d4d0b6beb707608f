//! Another trainer's configuration.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::data::files::FileKind;
use crate::schema::Problem;

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
    Trl,
    /// Keys like those of the others.
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
            () if has("checkpoint_dir") || has("initial_checkpoint_dir") => Self::Litgpt,
            () if ["finetuning_type", "stage", "cutoff_len", "peft_config", "template"].into_iter().any(has) => {
                Self::LlamaFactory
            }
            () if has("base_model") => Self::Axolotl,
            () if has("model") && root.get("train").is_some_and(Value::is_boolean) => Self::MlxLm,
            () if ["lora_parameters", "iters", "fine_tune_type", "num_layers"].into_iter().any(has) => Self::MlxLm,
            () if has("model_name_or_path") => Self::Trl,
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
            Self::Trl => "TRL",
            Self::Unknown => "another trainer",
        }
    }

    /// What it does where its configuration says nothing, and we do something else.
    pub(super) fn defaults(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Unknown => &[],
            Self::Peft => &[("lora.lora_alpha", "8"), QUERY_AND_VALUE],
            Self::Trl => &[
                ("lora.r", "16"),
                ("lora.lora_alpha", "32"),
                ("lora.lora_dropout", "0.05"),
                QUERY_AND_VALUE,
                ("train.micro_batch_size", "8"),
                ("train.num_epochs", "3.0"),
                ("train.precision", "\"bf16\""),
                ("optimizer.learning_rate", "2e-5"),
                ("scheduler.lr_scheduler", "\"linear\""),
            ],
            Self::Axolotl => &[
                QUERY_AND_VALUE,
                ("data.max_length", "512"),
                ("train.micro_batch_size", "1"),
                ("train.precision", "\"bf16\""),
                ("scheduler.warmup_ratio", "0.03"),
            ],
            Self::LlamaFactory => &[
                ("lora.r", "8"),
                ("data.max_length", "2048"),
                ("train.micro_batch_size", "8"),
                ("train.num_epochs", "3.0"),
                ("optimizer.learning_rate", "5e-5"),
                ("scheduler.lr_scheduler", "\"linear\""),
            ],
            Self::Torchtune => &[
                ("train.max_grad_norm", "0.0"),
                ("optimizer.weight_decay", "0.01"),
                ("scheduler.lr_scheduler", "\"constant\""),
            ],
            Self::Litgpt => &[
                ("lora.lora_dropout", "0.05"),
                QUERY_AND_VALUE,
                ("data.train_on_inputs", "true"),
                ("train.micro_batch_size", "1"),
                ("train.gradient_accumulation_steps", "16"),
                ("train.num_epochs", "5"),
                ("train.max_grad_norm", "0.0"),
                ("optimizer.learning_rate", "1e-3"),
                ("optimizer.weight_decay", "0.01"),
                ("scheduler.warmup_steps", "100"),
            ],
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
                ("eval.eval_steps", "200"),
                ("eval.max_batches", "25"),
                ("checkpoint.save_steps", "100"),
                ("logging.logging_steps", "10"),
            ],
        }
    }

    /// What it does by default that no setting here does: keys that say otherwise, and what it is.
    pub(super) fn differences(self) -> &'static [(&'static [&'static str], &'static str)] {
        match self {
            Self::Torchtune => &[(
                &["tokenizer.max_seq_len"],
                "rows keep their whole length there; data.max_length cuts them here, and says how many",
            )],
            Self::Trl => &[(
                &["assistant_only_loss", "completion_only_loss", "beta", "num_generations", "reward_funcs"],
                "TRL puts loss on whole conversations; here on the answers, or data.train_on_inputs = true",
            )],
            Self::Axolotl => &[(
                &["excess_length_strategy"],
                "axolotl drops rows longer than sequence_len; here they are cut, and counted",
            )],
            _ => &[],
        }
    }

    /// Whether its steps are transformers' `Trainer`.
    pub(super) fn is_of_transformers(self) -> bool {
        matches!(self, Self::LlamaFactory | Self::Axolotl | Self::Trl | Self::Unknown)
    }
}

/// PEFT's default for a Llama.
const QUERY_AND_VALUE: (&str, &str) = ("lora.target_modules", "[\"q_proj\", \"v_proj\"]");

/// A configuration.
pub(super) struct Foreign {
    pub(super) trainer: Trainer,
    pub(super) path: PathBuf,
    pub(super) root: Map<String, Value>,
}

impl Foreign {
    pub(super) fn read(path: &Path) -> Result<Self, Problem> {
        let problem = |message: String| Problem::new(message).at(path.display());
        if path.extension().is_some_and(|extension| extension == "ipynb" || extension == "py") {
            let hint = "give its model and rows: lora-train init --model MODEL --data FILE; then write r, lora_alpha, \
                        target_modules and learning_rate of its get_peft_model and SFTConfig into the recipe; keys of DPOConfig and \
                        GRPOConfig have their names under [objective]";
            return Err(problem("a program, and programs are not read".into()).hint(hint));
        }
        let shown = path.display();
        if path.extension().is_some_and(|extension| extension == "toml") {
            return Err(problem("a recipe already: no other trainer's TOML is read".into())
                .hint(format!("lora-train check {shown}")));
        }
        let rows = || {
            problem("rows, and no configuration".into()).hint(format!("lora-train init --model MODEL --data {shown}"))
        };
        if FileKind::of(path).is_some_and(|kind| kind != FileKind::Json) {
            return Err(rows());
        }
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
            Value::Array(items) if is_json && items.first().is_some_and(Value::is_object) => Err(rows()),
            _ => Err(problem("expected keys with values, as in a configuration of axolotl or LLaMA-Factory".into())),
        }
    }

    /// The value at a dotted path, `datasets.0.path`.
    pub(super) fn get(&self, path: &str) -> Option<&Value> {
        let mut parts = path.split('.');
        let first = self.root.get(parts.next()?)?;
        parts.try_fold(first, |value, part| match value {
            Value::Array(items) => items.get(part.parse::<usize>().ok()?),
            _ => value.get(part),
        })
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

/// What a key of a configuration is in a recipe.
#[derive(Clone)]
pub(super) enum Meaning {
    /// It is these settings; none where another key's settings say what it says.
    Set(Vec<(String, toml::Value)>),
    /// It is these settings, but for a difference.
    Near(Vec<(String, toml::Value)>, String),
    /// It asks for what happens here anyway.
    Nothing,
    /// Nothing here does what it asks for; why.
    Lost(String),
}

/// Read together with another key.
pub(super) const READ: Meaning = Meaning::Set(Vec::new());

/// One key with the value it has there.
pub(super) fn one(key: &str, value: &Value, from: &Foreign) -> Meaning {
    as_toml(value, from).map_or(Meaning::Nothing, |value| Meaning::Set(vec![(key.into(), value)]))
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
