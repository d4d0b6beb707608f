//! What a configuration trains, where that is not LoRA by supervised fine-tuning.

use serde_json::Value;

use super::draft::Draft;
use super::foreign::{Foreign, Meaning, READ, is_off, one};
use super::grpo;
use super::trainer::Trainer;
use crate::schema::Problem;

/// Keys of other objectives and of commands that train nothing, each with the values that are ours.
const KEYS: &[(&str, &[&str])] = &[
    ("rl", &[]),
    ("rlhf_type", &["sft"]),
    // Pre-training is the format `text`.
    ("stage", &["sft", "pt"]),
    ("adapter", &["lora", "qlora"]),
    ("finetuning_type", &["lora"]),
    ("fine_tune_type", &["lora", "dora"]),
    ("train_type", &["lora", "qlora"]),
    ("tuner_type", &["lora"]),
    ("peft_type", &["LORA"]),
    ("task_type", &["CAUSAL_LM", "causal_lm"]),
    ("lora_task_type", &["CAUSAL_LM"]),
    ("peft_config.name", &["lora"]),
    ("full_finetune", &[]),
    ("full_finetuning", &[]),
    ("beta", &[]),
    ("loss_type", &["nll"]),
    ("reward_model", &[]),
    ("process_reward_model", &[]),
    ("reward_model_path", &[]),
    ("reward_funcs", &[]),
    ("reward_functions", &[]),
    ("num_generations", &[]),
    ("max_prompt_length", &[]),
    ("ref_model", &[]),
    ("ref_checkpointer", &[]),
    ("teacher_model", &[]),
    ("initial_checkpoint_dir", &[]),
    ("tokenizer_dir", &[]),
    ("infer_backend", &[]),
    ("export_dir", &[]),
    ("peft_config.export_dir", &[]),
];

/// The objective of preferences that a configuration asks for, and its loss where the objective's name says it.
fn preferences(from: &Foreign) -> Option<(&'static str, Option<&'static str>)> {
    let word = |key: &str| from.get(key).and_then(Value::as_str);
    if let Some(said) = from.said.objective {
        let known = ["dpo", "kto", "orpo", "cpo", "simpo", "reward"].into_iter().find(|known| *known == said)?;
        return Some((if word("loss_type") == Some("simpo") { "simpo" } else { known }, None));
    }
    let trainer = if from.trainer.is_of_trl() { Trainer::Trl } else { from.trainer };
    let has = |key: &str| from.get(key).is_some_and(|value| !value.is_null());
    Some(match (trainer, word("rl").or_else(|| word("stage")), word("pref_loss")) {
        (Trainer::Axolotl, Some("ipo"), _) | (Trainer::LlamaFactory, Some("dpo"), Some("ipo")) => ("dpo", Some("ipo")),
        (Trainer::Axolotl, Some("orpo"), _) | (Trainer::LlamaFactory, Some("dpo"), Some("orpo")) => ("orpo", None),
        (Trainer::Axolotl, Some("simpo"), _) | (Trainer::LlamaFactory, Some("dpo"), Some("simpo")) => ("simpo", None),
        (Trainer::LlamaFactory, Some("dpo"), Some("hinge")) => ("dpo", Some("hinge")),
        (Trainer::Axolotl | Trainer::LlamaFactory, Some("kto"), _) => ("kto", None),
        (Trainer::LlamaFactory, Some("rm"), _) => ("reward", None),
        (Trainer::Axolotl, None, _) if from.get("reward_model").is_some_and(|value| !is_off(value)) => ("reward", None),
        (Trainer::Trl, None, None) if word("lora_task_type") == Some("SEQ_CLS") => ("reward", None),
        (Trainer::LlamaFactory, Some("dpo"), Some("sigmoid") | None) | (Trainer::Axolotl, Some("dpo"), _) => {
            ("dpo", None)
        }
        // TRL's classes of configurations are not in their files; these keys are.
        (Trainer::Trl, None, None) if word("loss_type") == Some("simpo") => ("simpo", None),
        (Trainer::Trl, None, None) if has("desirable_weight") || has("undesirable_weight") => ("kto", None),
        (Trainer::Trl, None, None) if has("center_rewards_coefficient") => ("reward", None),
        // GRPO has a beta, too.
        (Trainer::Trl, None, None) if from.get("beta").is_some() => ("dpo", None),
        _ => return None,
    })
}

/// Whether it learns from preferences or rewards.
pub(super) fn learns_otherwise(from: &Foreign) -> bool {
    grpo::is_asked(from) || preferences(from).is_some()
}

/// What a key of preferences means.
pub(super) fn of_key(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    if grpo::is_asked(from) {
        return grpo::of_key(from, path, value);
    }
    let (name, loss) = preferences(from)?;
    let named = || {
        let loss = loss.map(|loss| ("objective.loss_type".to_owned(), loss.into()));
        [("objective.name".to_owned(), name.into())].into_iter().chain(loss).collect()
    };
    Some(match path {
        "rl" | "stage" | "reward_model" | "lora_task_type" => Meaning::Set(named()),
        "beta" => match one("objective.beta", value, from) {
            Meaning::Set(beta) if name == "dpo" && from.said.objective.is_none() => {
                let why = "a configuration with a beta is taken for one of DPO".to_owned();
                Meaning::Near([named(), beta].concat(), why)
            }
            other => other,
        },
        "loss_type" if name != "simpo" => one("objective.loss_type", value, from),
        "loss_type" | "pref_loss" => READ,
        "max_prompt_length" if !is_off(value) => {
            Meaning::Lost("rows are cut at their end here, and prompts that fill data.max_length are left out".into())
        }
        "pref_ftx" if !is_off(value) && name != "dpo" => {
            Meaning::Lost(format!("the answers' own loss is added to \"dpo\" alone, not to \"{name}\""))
        }
        "pref_ftx" if !is_off(value) => {
            let weights = toml::Value::Array(vec![1.0.into(), value.as_f64().unwrap_or(0.0).into()]);
            let losses = toml::Value::Array(vec!["sigmoid".into(), "sft".into()]);
            Meaning::Set(vec![("objective.loss_type".into(), losses), ("objective.loss_weights".into(), weights)])
        }
        _ => return None,
    })
}

/// The objective where no key of its own says it, and what other trainers do by default.
pub(super) fn fill(from: &Foreign, draft: &mut Draft) {
    if grpo::is_asked(from) {
        return;
    }
    let Some((name, _)) = preferences(from) else { return };
    if draft.get("objective.name").is_none() {
        draft.set("objective.name", name, "as its keys say");
    }
    let mut default = |key: &str, value: toml::Value| {
        if draft.get(key).is_none() {
            draft.set(key, value, "the default there");
        }
    };
    match (name, from.trainer) {
        ("simpo", trainer) => {
            default("objective.beta", 0.1.into());
            default("objective.simpo_gamma", 0.5.into());
            if trainer != Trainer::LlamaFactory {
                default("objective.cpo_alpha", 1.0.into());
            }
        }
        ("orpo", Trainer::LlamaFactory) => default("objective.orpo_nll", "completion".into()),
        _ => {}
    }
}

const DONE: &str = "LoRA on answers, preferences and rewards is what is done here";
const ALONE: &str = "nothing is written; for its model and rows alone: lora-train init --model MODEL --data FILE";

/// Why no recipe is made of a configuration.
pub(super) fn refusal(from: &Foreign) -> Option<Problem> {
    let known: &[&str] = match (grpo::is_asked(from), preferences(from)) {
        (true, _) => &["rl", "rlhf_type", "beta", "loss_type", "reward_funcs", "num_generations", "max_prompt_length"],
        (_, Some(_)) => &[
            "rl", "rlhf_type", "stage", "beta", "loss_type", "reward_model", "lora_task_type", "task_type",
            "max_prompt_length",
        ],
        _ => &[],
    };
    if let Some(objective) = from.said.objective.filter(|_| known.is_empty()) {
        let problem = Problem::new(format!("this is {}; {DONE}", objective.to_uppercase())).at(from.path.display());
        return Some(problem.hint(ALONE));
    }
    let asked = KEYS.iter().find_map(|(key, ours)| {
        if known.contains(key) {
            return None;
        }
        let value = from.get(key).filter(|value| !is_off(value))?;
        let shown = match value {
            Value::Array(_) | Value::Object(_) => format!("`{key}`"),
            value => format!("`{key}: {}`", value.to_string().trim_matches('"')),
        };
        match value.as_str() {
            Some(word) if ours.contains(&word) => None,
            Some(word @ ("dpo" | "kto" | "orpo" | "ipo" | "simpo" | "grpo" | "ppo")) => {
                Some(format!("{shown}: this is {}", word.to_uppercase()))
            }
            _ => Some(format!("{shown} asks for something else")),
        }
    });
    let (why, hint) = match asked {
        Some(asked) => (asked, ALONE),
        None => (absent(from)?, "nothing is written; what its command line said besides, add to the file"),
    };
    let problem = Problem::new(format!("{why}; {DONE}"));
    Some(problem.at(from.path.display()).hint(hint))
}

/// The same, where a trainer is told by what is not there, or by the name of a class.
fn absent(from: &Foreign) -> Option<String> {
    let last = |key: &str| from.get(key)?.as_str()?.rsplit('.').next();
    let has_lora = |prefix: &str| from.root.keys().any(|key| key.starts_with(prefix));
    let is_on = |key: &str| from.get(key).is_some_and(|value| !is_off(value));
    match from.trainer {
        Trainer::Axolotl if !is_on("adapter") && !is_on("lora_model_dir") => {
            Some("without `adapter` axolotl trains all weights".into())
        }
        Trainer::LlamaFactory if is_on("model_class") && !is_on("peft_config") => {
            Some("without `peft_config` LLaMA-Factory trains all weights".into())
        }
        Trainer::LlamaFactory if is_on("do_predict") && !is_on("do_train") => {
            Some("without `do_train` LLaMA-Factory trains nothing".into())
        }
        Trainer::Python if !from.said.has_lora => {
            Some("without LoraConfig or FastLanguageModel.get_peft_model the program trains all weights".into())
        }
        Trainer::Litgpt if !has_lora("lora_") => Some("without `lora_r` litgpt trains all weights".into()),
        Trainer::Trl if !has_lora("lora_") && !["use_peft", "load_in_4bit", "load_in_8bit"].into_iter().any(is_on) => {
            Some("without `use_peft: true` TRL trains all weights".into())
        }
        Trainer::Torchtune => match (last("loss._component_"), last("model._component_")) {
            (Some(loss), _) if !loss.contains("CrossEntropy") && !loss.contains("CEWith") => {
                Some(format!("`loss: {loss}` asks for something else"))
            }
            (_, Some(model)) if !model.contains("lora") => Some(format!("`model: {model}` trains all weights")),
            (_, None) => Some("there is no `model` to train".into()),
            _ => None,
        },
        _ => None,
    }
}
