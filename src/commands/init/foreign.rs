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
        format!("From {shown}, a configuration of {trainer}: after each key, what it is called there."),
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
                settings.into_iter().for_each(|(key, value)| self.draft.set(key, value, path));
                return;
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
                Some(value) => self.draft.set(key, value, path),
                None => self.lose(path, "it has a value that no key here takes"),
            },
            (_, Value::Object(below)) => self.table(below, path, section),
            _ if !is_off(value) => self.lose(path, "there is no such key here"),
            _ => {}
        }
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
                        self.lose(&setting.comment, format!("{}{hint}", problem.message).replace('\n', " "));
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
mod tests {
    use super::*;

    /// The settings of a configuration, and the keys that were not taken over.
    fn mapped(name: &str, text: &str) -> (toml::Table, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let args = InitArgs { model: None, data: None, out: "recipe.toml".into(), from: None, device: None };
        let draft = draft(&path, &args).unwrap();
        let settings = draft.settings.iter().map(|setting| (setting.key.clone(), setting.value.clone())).collect();
        let lost = draft.footer.iter().filter_map(|line| line.split(": ").nth(1)).map(str::to_owned).collect();
        (settings, lost)
    }

    /// Holds settings against TOML values.
    fn assert_settings(found: &toml::Table, expected: &[(&str, &str)]) {
        for (key, value) in expected {
            let value: toml::Value = value.parse().unwrap();
            assert_eq!(found.get(*key), Some(&value), "{key} in {found}");
        }
    }

    #[test]
    fn llama_factory_s_names_and_defaults_are_taken_over() {
        let (found, lost) = mapped(
            "sft.yaml",
            "model_name_or_path: m/x\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 4\nlora_target: \
             all\ndataset: identity,demo\ntemplate: qwen3\ncutoff_len: 512\noutput_dir: saves/x\nlogging_steps: \
             10\nplot_loss: true\nreport_to: none\nper_device_train_batch_size: 1\ngradient_accumulation_steps: \
             8\nlearning_rate: 1.0e-4\nnum_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: \
             true\nval_size: 0.1\neval_strategy: steps\neval_steps: 500\n",
        );
        let expected = [
            ("model.path", "\"m/x\""),
            ("lora.r", "4"),
            ("lora.lora_alpha", "8"),
            ("lora.target_modules", "\"all-linear\""),
            ("data.train.1.path", "\"demo\""),
            ("data.eval_split", "0.1"),
            ("train.precision", "\"bf16\""),
            ("train.micro_batch_size", "1"),
            ("train.num_epochs", "3.0"),
            ("scheduler.lr_scheduler", "\"cosine\""),
            ("eval.eval_steps", "500"),
        ];
        assert_settings(&found, &expected);
        assert_eq!(lost, ["template"]);
    }

    #[test]
    fn components_of_torchtune_are_looked_into() {
        let (found, lost) = mapped(
            "1B.yaml",
            "output_dir: /tmp/t\nmodel:\n  _component_: torchtune.models.llama3_2.lora_llama3_2_1b\n  lora_attn_modules: \
             [q_proj, output_proj]\n  apply_lora_to_mlp: true\n  lora_rank: 64\n  lora_alpha: \
             128\ntokenizer:\n  path: t\n  max_seq_len: null\ncheckpointer:\n  _component_: x.Y\n  checkpoint_dir: \
             ${output_dir}/m\n  checkpoint_files: [a]\n  output_dir: x\ndataset:\n  _component_: \
             torchtune.datasets.alpaca_cleaned_dataset\n  packed: false\nseed: null\nbatch_size: \
             4\noptimizer:\n  _component_: torch.optim.AdamW\n  fused: true\n  lr: 3e-4\nlr_scheduler:\n  _component_: \
             a.get_cosine_schedule_with_warmup\n  num_warmup_steps: 100\nepochs: 1\nclip_grad_norm: null\n",
        );
        let expected = [
            ("model.path", "\"/tmp/t/m\""),
            ("lora.target_modules", r#"["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]"#),
            ("lora.r", "64"),
            ("data.train.0.path", "\"yahma/alpaca-cleaned\""),
            ("data.train_on_inputs", "true"),
            ("train.max_grad_norm", "0.0"),
            ("optimizer.name", "\"adamw\""),
            ("optimizer.learning_rate", "3e-4"),
            ("scheduler.lr_scheduler", "\"cosine\""),
            ("scheduler.warmup_steps", "100"),
        ];
        assert_settings(&found, &expected);
        assert_eq!((lost, found.get("seed")), (vec![], None));
    }

    #[test]
    fn litgpt_s_rows_of_a_step_and_rates_are_converted() {
        let (found, lost) = mapped(
            "lora.yaml",
            "checkpoint_dir: c/m\nprecision: bf16-true\nlora_r: 32\nlora_query: true\nlora_key: false\nlora_value: \
             true\nlora_head: true\ndata:\n  class_path: litgpt.data.JSON\n  init_args:\n    json_path: \
             r.json\n    mask_prompt: true\n    val_split_fraction: 0.1\ntrain:\n  global_batch_size: \
             8\n  micro_batch_size: 2\n  lr_warmup_steps: 10\n  epochs: 3\n  max_seq_length: 512\n  min_lr: \
             1e-5\neval:\n  interval: 100\noptimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    lr: \
             0.0001\n    betas: [0.9, 0.95]\n",
        );
        let expected = [
            ("model.path", "\"c/m\""),
            ("lora.target_modules", r#"["q_proj", "v_proj"]"#),
            ("data.train.0.path", "\"r.json\""),
            ("data.train_on_inputs", "false"),
            ("data.max_length", "512"),
            ("train.gradient_accumulation_steps", "4"),
            ("train.num_epochs", "3"),
            ("optimizer.betas", "[0.9, 0.95]"),
            ("scheduler.min_lr_ratio", "0.1"),
            ("scheduler.warmup_steps", "10"),
            ("eval.eval_steps", "100"),
        ];
        assert_settings(&found, &expected);
        assert_eq!(lost, ["lora_head"]);
    }

    #[test]
    fn mlx_lm_s_scale_becomes_alpha_and_its_schedule_ours() {
        let (found, lost) = mapped(
            "lora.yaml",
            "model: m/x\ntrain: true\nfine_tune_type: lora\noptimizer: adamw\ndata: d/x\nseed: 0\nnum_layers: \
             16\nbatch_size: 4\niters: 100\nlearning_rate: 1e-5\nadapter_path: out\nsave_every: 100\nlora_parameters:\n  \
             keys: [self_attn.q_proj]\n  rank: 4\n  scale: 20.0\n  dropout: 0.0\nlr_schedule:\n  name: \
             cosine_decay\n  warmup: 10\n  arguments: [1e-5, 100, 1e-6]\n",
        );
        let expected = [
            ("lora.r", "4"),
            ("lora.lora_alpha", "80.0"),
            ("data.train_on_inputs", "true"),
            ("train.max_steps", "100"),
            ("optimizer.learning_rate", "1e-5"),
            ("scheduler.lr_scheduler", "\"cosine\""),
            ("scheduler.warmup_steps", "10"),
            ("output_dir", "\"out\""),
        ];
        assert_settings(&found, &expected);
        assert_eq!(lost, ["num_layers"]);
    }

    #[test]
    fn an_adapter_of_peft_gives_its_settings() {
        let (found, lost) = mapped(
            "adapter_config.json",
            r#"{"peft_type": "LORA", "base_model_name_or_path": "m/x", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
                "bias": "none", "target_modules": ["q_proj", "v_proj"], "use_rslora": true, "modules_to_save": null,
                "init_lora_weights": true, "task_type": "CAUSAL_LM", "rank_pattern": {}}"#,
        );
        let expected = [("lora.r", "16"), ("lora.use_rslora", "true"), ("model.path", "\"m/x\"")];
        assert_settings(&found, &expected);
        assert_eq!(lost, Vec::<String>::new());
    }
}
