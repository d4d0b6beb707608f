//! Another trainer's configuration, key by key, as a recipe.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::InitArgs;
use super::draft::{Draft, Setting};
use super::foreign::{Foreign, Meaning, as_toml, is_off};
use super::rules::of_trainer;
use super::trainer::Trainer;
use super::values::{FROZEN_TOWER, common, last_layers};
use super::{experts, grpo, mlx, moments, objective, openai};
use crate::data::sources::names_files;
use crate::hub::HubSettings;
use crate::recipe::{Purpose, Recipe, asks_for_nothing, peers};
use crate::schema::{Counterpart, Keys as _, Override, Peer, Problem, Problems, counterpart, rows_to};
use crate::util::failure::Failure;

/// A recipe that does what a configuration says, as far as that is possible here; the rest is listed at its end.
pub(super) fn draft(path: &Path, args: &InitArgs) -> Result<Draft, Failure> {
    let mut foreign = Foreign::read(path)?;
    (foreign.has_model, foreign.has_data) = (args.model.is_some(), args.data.is_some());
    if let Some(problem) = objective::refusal(&foreign) {
        return Err(problem.into());
    }
    let changes: Vec<Override> = args.set.iter().map(Override::set).collect();
    if let Err(Problems(mut problems)) = Recipe::parse(Path::new("recipe.toml"), "", &changes, Purpose::Training) {
        problems.retain(|problem| problem.place.as_ref().is_some_and(|place| place.starts_with("--set")));
        if !problems.is_empty() {
            return Err(Failure::Input(Problems(problems)));
        }
    }
    let mapping = Mapping::of(&foreign, args);
    let footer = mapping.footer();
    let idle = mapping.keys_of(&Fate::NoEffect).join(", ");
    let last = (!idle.is_empty()).then(|| format!("without effect here: {idle}"));
    let mut draft = mapping.draft;
    if !draft.settings.iter().any(|setting| mapping.origins.contains_key(&setting.key)) {
        let problem = Problem::new("no key in it is one of a training with LoRA").at(path.display());
        return Err(problem.hint("lora-train init --help names the trainers whose configurations are read").into());
    }
    let (trainer, shown) = (foreign.trainer.name(), path.display());
    draft.header = vec![
        format!("From {shown} ({trainer}): after a key, its name there."),
        "Every key: `lora-train help reference`; one: `lora-train help lora.r`".into(),
    ];
    (draft.footer, draft.last) = (footer, last);
    Ok(draft)
}

/// What became of a key; every key of a configuration has one.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    Taken,
    /// Why.
    Lost(String),
    /// It asks for nothing that would have to be said here.
    NoEffect,
}

/// A configuration while it is mapped.
struct Mapping<'a> {
    foreign: &'a Foreign,
    peers: Vec<Peer>,
    draft: Draft,
    /// Every key, by its dotted path.
    keys: Vec<(String, Fate)>,
    /// The key that each setting comes from.
    origins: BTreeMap<String, usize>,
    /// What the recipe does otherwise, by the key that it concerns.
    differences: Vec<(String, String)>,
}

impl<'a> Mapping<'a> {
    fn of(foreign: &'a Foreign, args: &InitArgs) -> Self {
        let mut mapping = Self {
            foreign,
            peers: peers(),
            draft: Draft::default(),
            keys: Vec::new(),
            origins: BTreeMap::new(),
            differences: Vec::new(),
        };
        mapping.table(&foreign.root, "", "", None);
        for name in &foreign.said.unknown {
            mapping.put(name, Meaning::Lost("no value is written there, but an expression: set it yourself".into()));
        }
        mapping.fill(args);
        mapping.drop_splits();
        mapping.settle();
        mapping.differences.extend(moments::in_full(&mut mapping.draft));
        let model = mapping.draft.get("model.path").and_then(toml::Value::as_str);
        let of_mlx = model.and_then(mlx::of_base).map(|text| ("model.path".to_owned(), text));
        mapping.draft.has_mistakes |= of_mlx.is_some() || mapping.lacks_files();
        mapping.differences.extend(of_mlx);
        mapping
    }

    /// Whether rows, or programs that judge, are not there: the recipe does not train before.
    fn lacks_files(&self) -> bool {
        self.draft.settings.iter().any(|Setting { key, value, .. }| match value {
            // An id of the Hub has a slash.
            toml::Value::String(path) if key.starts_with("data.") && key.ends_with(".path") => {
                !path.contains(['/', '*']) && !Path::new(path).exists()
            }
            toml::Value::String(path)
                if key.starts_with("objective.") && (key.ends_with(".file") || key.ends_with(".python")) =>
            {
                !Path::new(path).exists() && self.draft.files.iter().all(|(name, _)| name != path)
            }
            toml::Value::Array(words) if key.ends_with(".command") => {
                words.last().and_then(toml::Value::as_str).is_some_and(|file| !Path::new(file).exists())
            }
            _ => false,
        })
    }

    /// The keys of a table, whose counterpart is the section `section`. `of_table` is what its name alone says of them.
    fn table(&mut self, table: &Map<String, Value>, path: &str, section: &str, of_table: Option<&Meaning>) {
        for (name, value) in table {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            self.value(name, value, &path, section, of_table);
        }
    }

    /// A key, or the keys of a table or of a list of tables.
    fn value(&mut self, name: &str, value: &Value, path: &str, section: &str, of_table: Option<&Meaning>) {
        match value {
            Value::Object(below) if !below.is_empty() => {
                let (section, meaning) = self.of_table(name, section);
                self.table(below, path, &section, meaning.as_ref().or(of_table));
            }
            Value::Array(items)
                if !items.is_empty()
                    && items.iter().all(|item| item.as_object().is_some_and(|table| !table.is_empty())) =>
            {
                for (index, item) in items.iter().enumerate() {
                    self.value(name, item, &format!("{path}.{index}"), section, of_table);
                }
            }
            _ => {
                let meaning = self.meaning(name, value, path, section, of_table);
                let meaning = experts::with_parameters(meaning, self.foreign);
                self.put(path, meaning);
            }
        }
    }

    /// The section that a table is, and what its name says of all keys in it.
    fn of_table(&self, name: &str, section: &str) -> (String, Option<Meaning>) {
        match name {
            "lr_scheduler" | "lr_scheduler_kwargs" => return ("scheduler".into(), None),
            "bnb_config_kwargs" | "quantization_config" => return ("model".into(), None),
            // Axolotl's, of GRPO.
            "trl" => return ("objective".into(), None),
            // Of a class, in litgpt.
            "init_args" => return (section.into(), None),
            _ => {}
        }
        if asks_for_nothing(name) {
            return (section.into(), Some(Meaning::Nothing));
        }
        match counterpart(name, section, true, Recipe::ROWS, &self.peers) {
            Counterpart::Key(key) => (key, None),
            Counterpart::Other(note) => (section.into(), Some(Meaning::Lost(note.into()))),
            Counterpart::Unknown(_) => (section.into(), Some(Meaning::Lost("there is no such section here".into()))),
        }
    }

    fn meaning(&self, name: &str, value: &Value, path: &str, section: &str, of_table: Option<&Meaning>) -> Meaning {
        if let Some(meaning) = of_trainer(self.foreign, path, value) {
            return meaning;
        }
        if let Some(meaning) = of_table {
            return if is_off(value) { Meaning::Nothing } else { meaning.clone() };
        }
        if value.is_null() {
            return Meaning::Nothing;
        }
        let meaning = experts::of_key(self.foreign, name, value);
        if let Some(meaning) = meaning.or_else(|| common(self.foreign, name, value)) {
            return meaning;
        }
        if asks_for_nothing(name) {
            return Meaning::Nothing;
        }
        let lost = |reason: &str| if is_off(value) { Meaning::Nothing } else { Meaning::Lost(reason.into()) };
        let key = match counterpart(name, section, false, Recipe::ROWS, &self.peers) {
            Counterpart::Key(key) => key,
            Counterpart::Other(note) => return lost(note),
            Counterpart::Unknown(near) => {
                let meant = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
                return lost(&format!("there is no such key here{meant}"));
            }
        };
        let of_source = of_source(&key, path);
        let is_section = rows_to(Recipe::ROWS, &key).pop().is_some_and(|row| !row.keys.is_empty());
        if is_section && of_source == key {
            return lost("there is no such key here");
        }
        match as_toml(value, self.foreign) {
            Some(value) => Meaning::Set(vec![(of_source, value)]),
            None => lost("it has a value that no key here takes"),
        }
    }

    /// Notes what becomes of a key. A setting's comment is what it is called there, where that is another name.
    fn put(&mut self, path: &str, meaning: Meaning) {
        let is_of_rows = |settings: &[(String, toml::Value)]| {
            !settings.is_empty() && settings.iter().all(|(key, _)| key.starts_with("data.train."))
        };
        let (settings, fate) = match meaning {
            // Rows of the command line stand in their place.
            Meaning::Set(settings) | Meaning::Near(settings, _) if self.foreign.has_data && is_of_rows(&settings) => {
                (Vec::new(), Fate::NoEffect)
            }
            Meaning::Set(settings) => (settings, Fate::Taken),
            Meaning::Near(settings, difference) => {
                match self.differences.last_mut().filter(|other| other.1 == difference) {
                    Some((paths, _)) => paths.extend([", ", path]),
                    None => self.differences.push((path.to_owned(), difference)),
                }
                (settings, Fate::Taken)
            }
            Meaning::Nothing => (Vec::new(), Fate::NoEffect),
            Meaning::Lost(reason) => (Vec::new(), Fate::Lost(reason)),
        };
        let index = self.keys.len();
        self.keys.push((path.to_owned(), fate));
        for (key, value) in settings {
            if self.draft.get(&key).is_some_and(|other| *other != value) {
                self.lose(&key, format!("`{path}` says otherwise"));
            }
            let is_same = key.rsplit('.').next() == Some(path);
            self.draft.set(key.as_str(), value, if is_same { "" } else { path });
            self.origins.insert(key, index);
        }
    }

    /// The key that a setting comes from is lost; a setting that comes from none is a difference.
    fn lose(&mut self, key: &str, reason: String) {
        match self.origins.get(key) {
            Some(index) => self.keys[*index].1 = Fate::Lost(reason),
            None => self.differences.push((key.to_owned(), reason)),
        }
    }

    /// Files have neither splits nor configurations: all their rows are those of `train`.
    fn drop_splits(&mut self) {
        let settings = HubSettings::from_env();
        let keys: Vec<String> = self.draft.settings.iter().map(|setting| setting.key.clone()).collect();
        for key in keys {
            let Some((source, name @ ("split" | "name"))) = key.rsplit_once('.') else { continue };
            let path = self.draft.get(&format!("{source}.path")).and_then(toml::Value::as_str).map(str::to_owned);
            let Some(path) = path.filter(|path| names_files(path, &settings)) else { continue };
            let is_all = name == "name" || self.draft.get(&key).and_then(toml::Value::as_str) == Some("train");
            self.draft.settings.retain(|setting| setting.key != key);
            let is_of_training = |setting: &Setting| {
                setting.key.starts_with("data.train.") && setting.value.as_str() == Some(path.as_str())
            };
            if source.starts_with("data.eval.") && self.draft.settings.iter().any(is_of_training) {
                self.draft.settings.retain(|setting| !setting.key.starts_with(source));
            }
            let index = self.origins.get(&key).copied();
            let is_used = self.origins.iter().any(|(key, at)| Some(*at) == index && self.draft.get(key).is_some());
            match index.filter(|_| !is_used) {
                Some(index) if is_all => self.keys[index].1 = Fate::NoEffect,
                _ if is_all => {}
                _ => {
                    let reason = format!("{path} is a file, which has no splits; data.eval_split holds rows out");
                    if is_used { self.differences.push((key, reason)) } else { self.lose(&key, reason) }
                }
            }
        }
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
        args.set.iter().for_each(|change| self.draft.give(&Override::set(change)));
        let trainer = self.foreign.trainer;
        if grpo::is_asked(self.foreign) {
            grpo::fill(self.foreign, &mut self.draft);
        }
        objective::fill(self.foreign, &mut self.draft);
        if trainer == Trainer::OpenAi {
            openai::fill(self.foreign, &mut self.draft);
        }
        self.fill_defaults(trainer);
        let has_alpha = self.draft.get("lora.lora_alpha").is_some();
        let rank = self.draft.get("lora.r").and_then(toml::Value::as_integer);
        match (trainer, rank) {
            (Trainer::LlamaFactory, Some(rank)) if !has_alpha => {
                self.draft.set("lora.lora_alpha", 2 * rank, "LLaMA-Factory's default: twice the rank");
            }
            (Trainer::MlxLm, Some(rank)) if !has_alpha => {
                self.draft.set("lora.lora_alpha", 20 * rank, "mlx-lm's default: a scale of 20");
            }
            _ => {}
        }
        if trainer == Trainer::MlxLm {
            self.fill_mlx_lm();
        }
        let sees = self.foreign.said.program.as_ref().is_some_and(|program| program.contains("FastVisionModel"));
        if sees && ["finetune_vision_layers", "target_modules"].iter().all(|key| self.foreign.get(key).is_none()) {
            let difference = format!("on in FastVisionModel by default; {FROZEN_TOWER}");
            self.differences.push(("finetune_vision_layers".to_owned(), difference));
        }
        for (keys, difference) in trainer.differences() {
            if keys.iter().all(|key| self.foreign.get(key).is_none()) {
                self.differences.push((keys[0].to_owned(), (*difference).to_owned()));
            }
        }
    }

    /// The trainer's defaults where nothing else is said.
    fn fill_defaults(&mut self, trainer: Trainer) {
        for (key, value) in trainer.defaults() {
            // Keys that exclude each other, or of which one is of no use without another.
            let excluding: &[&str] = match key {
                "train.max_steps" => &["train.num_epochs"],
                "train.num_epochs" => &["train.max_steps"],
                "scheduler.warmup_steps" => &["scheduler.warmup_ratio"],
                "scheduler.warmup_ratio" => &["scheduler.warmup_steps"],
                _ => &[],
            };
            let is_off = match key {
                "train.precision" => self.foreign.get("bf16") == Some(&Value::Bool(false)),
                "data.image_max_pixels" => !self.foreign.has_images(),
                _ => false,
            };
            let is_said = |key: &str| self.draft.get(key).is_some() || is_off;
            if !is_said(key) && !excluding.iter().any(|key| is_said(key)) {
                let objective = self.draft.get("objective.name").and_then(toml::Value::as_str);
                let value = match (trainer, key, objective) {
                    (_, "optimizer.learning_rate", None) if self.foreign.said.is_sft_config => "2e-5",
                    (of_trl, "optimizer.learning_rate", Some("reward")) if of_trl.is_of_trl() => "1e-4",
                    (of_trl, "optimizer.learning_rate", Some(_)) if of_trl.is_of_trl() => "1e-6",
                    _ => value,
                };
                let value: Option<toml::Value> = value.parse().ok();
                value.into_iter().for_each(|value| self.draft.set(key, value, default_of(trainer)));
            }
        }
    }

    /// mlx-lm adapts the last 16 layers, and decays weights with adamw alone.
    fn fill_mlx_lm(&mut self) {
        if self.foreign.get("num_layers").is_none() && self.foreign.get("lora_layers").is_none() {
            match last_layers(self.foreign, 16) {
                Meaning::Set(settings) => {
                    settings
                        .into_iter()
                        .for_each(|(key, value)| self.draft.set(key, value, "mlx-lm's default: the last 16"));
                }
                Meaning::Lost(reason) => {
                    self.differences.push(("num_layers".into(), format!("16 by default: {reason}")));
                }
                _ => {}
            }
        }
        let is_adamw = self.foreign.get("optimizer").is_some_and(|name| name == "adamw");
        if is_adamw && self.draft.get("optimizer.weight_decay").is_none() {
            self.draft.set("optimizer.weight_decay", 0.01, default_of(Trainer::MlxLm));
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
                    None if self.draft.is_given(&key) => {
                        self.draft.settings.remove(index);
                        self.differences.push((format!("--set {key}"), problem.message.replace('\n', " ")));
                    }
                    None => {
                        // A default that has no place here asks for nothing.
                        if self.draft.settings.remove(index).comment == default_of(self.foreign.trainer) {
                            continue;
                        }
                        let hint = problem.hint.map(|hint| format!("; {hint}")).unwrap_or_default();
                        let default = rows_to(Recipe::ROWS, &key).pop().and_then(|row| (row.default)());
                        let used = default.map(|value| format!("; {value} is used")).unwrap_or_default();
                        self.lose(&key, format!("{}{hint}{used}", problem.message).replace('\n', " "));
                    }
                }
            }
        }
    }

    /// The keys of a fate.
    fn keys_of(&self, fate: &Fate) -> Vec<&str> {
        self.keys.iter().filter(|key| key.1 == *fate).map(|key| key.0.as_str()).collect()
    }

    /// What became of the keys: counts, those that are lost with the reason, and what is done otherwise.
    fn footer(&self) -> Vec<String> {
        let [num_taken, num_idle] = [Fate::Taken, Fate::NoEffect].map(|fate| self.keys_of(&fate).len());
        let num_keys = self.keys.len();
        let mut lines = vec![format!(
            "of {num_keys} keys, {num_taken} {} taken over, {} lost, {num_idle} without effect here",
            if num_taken == 1 { "is" } else { "are" },
            num_keys - num_taken - num_idle
        )];
        let mut lost: Vec<&Fate> = Vec::new();
        for (_, fate) in &self.keys {
            if let (Fate::Lost(reason), false) = (fate, lost.contains(&fate)) {
                lost.push(fate);
                lines.push(format!("not taken over: {}: {reason}", self.keys_of(fate).join(", ")));
            }
        }
        lines.extend(self.differences.iter().map(|(key, text)| format!("differs: {key}: {text}")));
        lines.extend(self.foreign.said.asides.iter().map(|(name, text)| format!("{name}: {text}")));
        lines
    }
}

fn default_of(trainer: Trainer) -> String {
    if trainer == Trainer::OpenAi {
        return "chosen here".into();
    }
    format!("{}'s default", trainer.name())
}

/// A data set by its name alone, or a key of one: of the first source, or of that whose number the path has.
fn of_source(key: &str, path: &str) -> String {
    let mut parts = key.split('.').skip(1);
    let (section, name) = (parts.next().unwrap_or_default(), parts.next().unwrap_or("path"));
    let index = path.split('.').find_map(|part| part.parse::<usize>().ok()).unwrap_or(0);
    if section == "train" || section == "eval" { format!("data.{section}.{index}.{name}") } else { key.to_owned() }
}

#[cfg(test)]
mod tests;
