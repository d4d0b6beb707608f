//! Another trainer's configuration.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::command_line::of_commands;
use super::program::{of_notebook, of_program};
use super::said::Said;
use super::trainer::Trainer;
use crate::data::files::FileKind;
use crate::schema::Problem;

/// Longest configuration that is read.
const MAX_BYTES: u64 = 1 << 20;
/// The same with what its cells have shown.
const MAX_NOTEBOOK_BYTES: u64 = 256 << 20;

/// A configuration.
pub(super) struct Foreign {
    pub(super) trainer: Trainer,
    pub(super) path: PathBuf,
    pub(super) root: Map<String, Value>,
    /// What a program or a command line says besides keys.
    pub(super) said: Said,
    /// Whether the command line names the model, and the rows, that are trained on.
    pub(super) has_model: bool,
    pub(super) has_data: bool,
}

impl Foreign {
    pub(super) fn read(path: &Path) -> Result<Self, Problem> {
        let problem = |message: String| Problem::new(message).at(path.display());
        let shown = path.display();
        let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
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
            "toml" => {
                let root: Value =
                    toml::from_str(&text).map_err(|error| problem(format!("not valid TOML: {}", error.message())))?;
                if root["model"]["path"].is_string() || root["data"]["train"].is_array() {
                    return Err(problem("a recipe already".into()).hint(format!("lora-train check {shown}")));
                }
                root
            }
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
        let mut said = Said::default();
        let root = if root.contains_key("task") && root.get("params").is_some_and(Value::is_object) {
            of_auto_train(&root, &mut said)
        } else {
            root
        };
        let trainer = Trainer::of(&root);
        if trainer == Trainer::Swift {
            let kind = root.get("rlhf_type").and_then(Value::as_str);
            said.objective_of(if kind == Some("rm") { "reward" } else { kind.unwrap_or_default() });
        }
        Self { trainer, path: path.to_owned(), root, said, has_model: false, has_data: false }
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
        let root = std::mem::take(&mut said.root);
        Ok(Self { trainer, said, ..Self::of_keys(root, path) })
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

    /// Whether keys of LLaMA-Factory, or the name of its template, say that the model sees images.
    pub(super) fn has_images(&self) -> bool {
        let starts = ["image_", "video_", "media_dir", "freeze_vision", "freeze_multi_modal"];
        let template = self.get("template").and_then(Value::as_str).unwrap_or_default();
        self.root.keys().any(|key| starts.iter().any(|start| key.starts_with(start)))
            || ["_vl", "llava", "pixtral"].iter().any(|part| template.contains(part))
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

/// The parameters of a configuration of Hugging Face's `AutoTrain`, with its model and rows by TRL's names.
fn of_auto_train(root: &Map<String, Value>, said: &mut Said) -> Map<String, Value> {
    said.objective_of(root["task"].as_str().unwrap_or_default());
    let mut flat = root["params"].as_object().cloned().unwrap_or_default();
    let data = root.get("data").unwrap_or(&Value::Null);
    let others = [
        ("model_name", root.get("base_model")),
        ("output_dir", root.get("project_name")),
        ("dataset_name", data.get("path")),
        ("dataset_train_split", data.get("train_split")),
    ];
    flat.extend(others.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.clone()))));
    flat
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
