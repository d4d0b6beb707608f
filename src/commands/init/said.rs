//! What a program or a command line says of a training.

use serde_json::{Map, Value};

use super::trainer::Trainer;

/// Keys with their values, and what is said besides.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) root: Map<String, Value>,
    /// Names whose values are no literals.
    pub(super) unknown: Vec<String>,
    /// What it does after the training, with what does it here.
    pub(super) asides: Vec<(String, String)>,
    /// The program, where it is one.
    pub(super) program: Option<String>,
    /// The objective that a class or a command names.
    pub(super) objective: Option<&'static str>,
    pub(super) trainer: Option<Trainer>,
    pub(super) is_unsloth: bool,
    pub(super) has_lora: bool,
    /// Whether it is TRL's class, whose rate is another by default than that of transformers.
    pub(super) is_sft_config: bool,
}

/// Objectives in names of classes and commands, each before those that it is a part of; "" trains nothing else than answers.
const OBJECTIVES: &[(&str, &str)] = &[
    ("grpo", "grpo"),
    ("orpo", "orpo"),
    ("simpo", "simpo"),
    ("cpo", "cpo"),
    ("kto", "kto"),
    ("onlinedpo", "online dpo"),
    ("dpo", "dpo"),
    ("ppo", "ppo"),
    ("rloo", "rloo"),
    ("reward", "reward"),
    ("sequenceclassification", "classification"),
];

impl Said {
    /// Notes a key. The first value counts; another is reported.
    pub(super) fn key(&mut self, name: &str, value: Value) {
        match self.root.get(name) {
            Some(known) if *known != value => {
                let text = format!("said more than once: {known} is taken, not {value}");
                self.aside(name, text);
            }
            Some(_) => {}
            None => {
                self.root.insert(name.to_owned(), value);
            }
        }
    }

    /// Notes what is done after the training, once.
    pub(super) fn aside(&mut self, name: &str, text: String) {
        if self.asides.iter().all(|(own, _)| own != name) {
            self.asides.push((name.to_owned(), text));
        }
    }

    /// Takes the objective from a name, unless another has said it.
    pub(super) fn objective_of(&mut self, name: &str) {
        let name = name.to_lowercase();
        let found = OBJECTIVES.iter().find(|(part, _)| name.contains(part)).map(|(_, objective)| *objective);
        self.objective = self.objective.or(found);
    }
}

/// Whether the arguments of a class are those of a training.
pub(super) fn is_of_training(class: &str) -> bool {
    let Some(name) =
        ["TrainingArguments", "Config", "Trainer", "ScriptArguments"].iter().find_map(|end| class.strip_suffix(end))
    else {
        return false;
    };
    let name = name.trim_start_matches("Unsloth").trim_start_matches("Seq2Seq").to_lowercase();
    matches!(&*name, "" | "sft" | "model" | "bitsandbytes") && class != "Config"
        || OBJECTIVES.iter().any(|(part, _)| name == *part)
}
