//! What a configuration trains, where that is not LoRA by supervised fine-tuning.

use serde_json::Value;

use super::foreign::{Foreign, Trainer, is_off};
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

/// Why no recipe is made of a configuration.
pub(super) fn refusal(from: &Foreign) -> Option<Problem> {
    let asked = KEYS.iter().find_map(|(key, ours)| {
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
            _ if *key == "beta" => Some(format!("{shown}: this is DPO, or another training on preferences")),
            _ => Some(format!("{shown} asks for something else")),
        }
    });
    let (why, hint) = match asked {
        Some(asked) => {
            (asked, "nothing is written; for its model and rows alone: lora-train init --model MODEL --data FILE")
        }
        None => (absent(from)?, "nothing is written; what its command line said besides, add to the file"),
    };
    let problem = Problem::new(format!("{why}; supervised fine-tuning with LoRA is all that is done here"));
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
