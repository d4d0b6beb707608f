//! Another trainer's configuration.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::command_line::of_commands;
use super::program::{of_notebook, of_program};
use super::said::Said;
use crate::data::files::FileKind;
use crate::schema::Problem;

/// Longest configuration that is read.
const MAX_BYTES: u64 = 1 << 20;
/// The same with what its cells have shown.
const MAX_NOTEBOOK_BYTES: u64 = 256 << 20;

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
    Swift,
    OpenAi,
    /// A program with Unsloth's classes.
    Unsloth,
    /// A program with those of transformers, PEFT and TRL.
    Python,
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
            () if has("training_file") || has("grader") || is_grader(root) => Self::OpenAi,
            () if ["tuner_backend", "tuner_type", "split_dataset_ratio", "rlhf_type"].into_iter().any(has) => {
                Self::Swift
            }
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
            Self::Swift => "ms-swift",
            Self::OpenAi => "OpenAI",
            Self::Unsloth => "Unsloth",
            Self::Python => "a program",
            Self::Unknown => "another trainer",
        }
    }

    /// What it does where its configuration says nothing, and we do something else.
    pub(super) fn defaults(self) -> &'static [(&'static str, &'static str)] {
        match self {
            // A job there says next to nothing: what `init` writes anyway.
            Self::Unknown => &[],
            Self::OpenAi => &[
                ("lora.r", "16"),
                ("lora.lora_alpha", "32"),
                ("train.num_epochs", "3"),
                ("scheduler.warmup_ratio", "0.03"),
            ],
            Self::Swift => &[
                ("lora.r", "8"),
                ("lora.lora_alpha", "32"),
                ("lora.lora_dropout", "0.05"),
                ("train.micro_batch_size", "1"),
                ("train.num_epochs", "3.0"),
                ("train.precision", "\"bf16\""),
                ("optimizer.learning_rate", "1e-4"),
                ("optimizer.weight_decay", "0.1"),
                ("optimizer.betas", "[0.9, 0.95]"),
                ("scheduler.warmup_ratio", "0.05"),
            ],
            Self::Unsloth => &[
                ("lora.r", "16"),
                ("lora.lora_alpha", "16"),
                ("train.micro_batch_size", "8"),
                ("train.num_epochs", "3.0"),
                ("optimizer.learning_rate", "5e-5"),
                ("scheduler.lr_scheduler", "\"linear\""),
            ],
            Self::Python => &[
                ("lora.r", "8"),
                ("lora.lora_alpha", "8"),
                QUERY_AND_VALUE,
                ("train.micro_batch_size", "8"),
                ("train.num_epochs", "3.0"),
                ("optimizer.learning_rate", "5e-5"),
                ("scheduler.lr_scheduler", "\"linear\""),
            ],
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
            Self::Trl | Self::Unsloth | Self::Python => &[(
                &[
                    "assistant_only_loss",
                    "completion_only_loss",
                    "train_on_responses_only",
                    "beta",
                    "num_generations",
                    "reward_funcs",
                ],
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
        matches!(self, Self::LlamaFactory | Self::Axolotl | Self::Swift) || self.is_of_trl()
    }

    /// Whether its keys are TRL's.
    pub(super) fn is_of_trl(self) -> bool {
        matches!(self, Self::Trl | Self::Unsloth | Self::Python | Self::Unknown)
    }
}

/// PEFT's default for a Llama.
const QUERY_AND_VALUE: (&str, &str) = ("lora.target_modules", "[\"q_proj\", \"v_proj\"]");

/// Whether an object is one of OpenAI's graders.
fn is_grader(root: &Map<String, Value>) -> bool {
    let kinds = ["string_check", "text_similarity", "python", "score_model", "label_model", "multi"];
    root.get("type").and_then(Value::as_str).is_some_and(|kind| kinds.contains(&kind))
}

/// A configuration.
pub(super) struct Foreign {
    pub(super) trainer: Trainer,
    pub(super) path: PathBuf,
    pub(super) root: Map<String, Value>,
    /// What a program or a command line says besides keys.
    pub(super) said: Said,
}

impl Foreign {
    pub(super) fn read(path: &Path) -> Result<Self, Problem> {
        let problem = |message: String| Problem::new(message).at(path.display());
        let shown = path.display();
        let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
        if extension == "toml" {
            return Err(problem("a recipe already: no other trainer's TOML is read".into())
                .hint(format!("lora-train check {shown}")));
        }
        let rows = || {
            problem("rows, and no configuration".into()).hint(format!("lora-train init --model MODEL --data {shown}"))
        };
        if FileKind::of(path).is_some_and(|kind| !matches!(kind, FileKind::Json | FileKind::Txt)) {
            return Err(rows());
        }
        let size = path.metadata().map_err(|error| problem(format!("cannot be read: {error}")))?.len();
        let most = if extension == "ipynb" { MAX_NOTEBOOK_BYTES } else { MAX_BYTES };
        if size > most {
            return Err(problem(format!("longer than {most} bytes, expected a configuration")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| problem(format!("cannot be read: {error}")))?;
        let json = || serde_json::from_str(&text).map_err(|error| problem(format!("not valid JSON: {error}")));
        let root = match extension {
            "ipynb" => {
                let (code, shell) = of_notebook(&json()?);
                return Self::of_program(of_program(&code), &shell, path);
            }
            "py" => return Self::of_program(of_program(&text), "", path),
            "json" => json()?,
            "sh" | "bash" | "zsh" | "txt" | "slurm" | "sbatch" | "cmd" => return Self::of_commands(&text, path),
            _ => match serde_saphyr::from_str(&text) {
                Ok(root @ (Value::Object(_) | Value::Array(_))) => root,
                _ if text.contains(" --") => return Self::of_commands(&text, path),
                Ok(root) => root,
                Err(error) => return Err(problem(format!("not valid YAML: {error}"))),
            },
        };
        match root {
            Value::Object(root) => Ok(Self::of_keys(root, path)),
            Value::Array(items) if extension == "json" && items.first().is_some_and(Value::is_object) => Err(rows()),
            _ => Err(problem("expected keys with values, as in a configuration of axolotl or LLaMA-Factory".into())),
        }
    }

    fn of_keys(root: Map<String, Value>, path: &Path) -> Self {
        let trainer = Trainer::of(&root);
        let mut said = Said::default();
        if trainer == Trainer::Swift {
            let kind = root.get("rlhf_type").and_then(Value::as_str);
            said.objective_of(if kind == Some("rm") { "reward" } else { kind.unwrap_or_default() });
        }
        Self { trainer, path: path.to_owned(), root, said }
    }

    /// What the calls of a program say, or, where it has none of a training, its commands.
    fn of_program(said: Said, shell: &str, path: &Path) -> Result<Self, Problem> {
        let mut said = said;
        if said.root.is_empty() && !shell.trim().is_empty() {
            return Self::of_commands(shell, path);
        }
        let trainer = if said.is_unsloth { Trainer::Unsloth } else { Trainer::Python };
        if said.root.is_empty() {
            let hint = "calls are read such as FastLanguageModel.from_pretrained, LoraConfig, SFTConfig and load_dataset; what \
                        another program says, write into a YAML file as `name: value`";
            return Err(Problem::new("has no call of a training that is known").at(path.display()).hint(hint));
        }
        Ok(Self { trainer, path: path.to_owned(), root: std::mem::take(&mut said.root), said })
    }

    /// The flags of a command, over the configuration that it names.
    fn of_commands(text: &str, path: &Path) -> Result<Self, Problem> {
        let problem = |message: String| Problem::new(message).at(path.display());
        let Some((mut said, config)) = of_commands(text) else {
            let hint =
                "a command is read such as `swift sft --model M --dataset D` or `python sft.py --learning_rate 1e-4`";
            return Err(problem("has no command of a training".into()).hint(hint));
        };
        let flags = std::mem::take(&mut said.root);
        let mut found = match config {
            Some(config) => {
                let beside = path.parent().map(|folder| folder.join(&config)).filter(|file| file.exists());
                let hint = format!("lora-train init --from {config}");
                Self::read(&beside.unwrap_or_else(|| config.into())).map_err(|problem| problem.hint(hint))?
            }
            None => Self::of_keys(Map::new(), path),
        };
        found.root.extend(flags);
        let found = Self::of_keys(found.root, path);
        Ok(Self {
            trainer: said.trainer.unwrap_or(found.trainer),
            said: Said { objective: said.objective.or(found.said.objective), ..said },
            ..found
        })
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
