//! Another trainer's configuration, key by key, as a recipe.

use std::path::Path;

use serde_json::{Map, Value};

use super::InitArgs;
use super::draft::Draft;
use super::foreign::{Foreign, Meaning, Trainer, as_toml, is_off};
use super::rules::rule;
use crate::recipe::{Recipe, peers};
use crate::schema::{Counterpart, Keys as _, Peer, counterpart, rows_to};
use crate::util::failure::Failure;

/// Tables that hold the keys of a section of ours.
const OWN_SECTIONS: &[(&str, &str)] = &[("optimizer", "optimizer"), ("lr_scheduler", "scheduler"), ("train", "train")];

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
            Some(Meaning::Set(settings)) => {
                return settings.into_iter().for_each(|(key, value)| self.set(key, value, path));
            }
            Some(Meaning::Nothing) => return,
            Some(Meaning::Lost(reason)) => return self.lose(path, reason),
            Some(Meaning::Nested) => {
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

#[cfg(test)]
mod tests;
