//! What keys of each trainer mean whose values are converted or whose names mean something else elsewhere.

use serde_json::Value;

use super::foreign::Meaning::{self, Lost, Near, Nothing, Set};
use super::foreign::{Foreign, as_toml, is_off, one};
use super::trainer::Trainer;
use super::values::{
    FROZEN_TOWER, OF_LANGUAGE, OWN_TEMPLATE, accumulation, last_layers, last_part, mlx_schedule, optimizer, quantised,
    scale, shape, targets, targets_of_litgpt, targets_of_torchtune, targets_of_unsloth,
};
use super::{objective, openai, sources, swift};

/// What stands in the place of several devices that share a model.
const ON_SEVERAL: &str = "each GPU holds the whole model: `mpirun -n N lora-train RECIPE`; `lora-train help cluster`";

/// The rule of a trainer for the key of this path, if it has one.
pub(super) fn of_trainer(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    if from.trainer == Trainer::OpenAi {
        return Some(openai::of_key(from, path, value));
    }
    if let Some(meaning) = objective::of_key(from, path, value) {
        return Some(meaning);
    }
    match from.trainer {
        Trainer::Swift => swift::of_key(from, path, value),
        Trainer::Axolotl => axolotl(from, path, value),
        Trainer::LlamaFactory => llama_factory(from, path, value),
        Trainer::MlxLm => mlx_lm(from, path, value),
        Trainer::Torchtune => torchtune(from, path, value),
        Trainer::Litgpt => litgpt(from, path, value),
        Trainer::Peft if path == "init_lora_weights" && value == true => Some(Nothing),
        Trainer::Peft if path == "base_model_name_or_path" => Some(one("model.path", value, from)),
        Trainer::Peft if path.starts_with("rank_pattern.") => pattern(from, "rank_pattern"),
        Trainer::Peft if path.starts_with("alpha_pattern.") => pattern(from, "alpha_pattern"),
        Trainer::Unsloth if path.starts_with("finetune_") => unsloth(from, path, value),
        Trainer::Trl | Trainer::Unsloth | Trainer::Python | Trainer::Unknown => trl(from, path, value),
        Trainer::OpenAi | Trainer::Peft => None,
    }
}

/// All ranks or alphas of PEFT's patterns.
fn pattern(from: &Foreign, key: &str) -> Option<Meaning> {
    Some(one(&format!("lora.{key}"), from.get(key)?, from))
}

fn axolotl(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let (list, below) = path.split_once('.').unwrap_or((path, ""));
    match list {
        "datasets" | "pretraining_dataset" => sources::listed(from, list, "train", below, value),
        "test_datasets" => sources::listed(from, list, "eval", below, value),
        "batch_size" => Some(accumulation(from, value)),
        "special_tokens" if below == "pad_token" => Some(Nothing),
        "plugins" => {
            let mut names = value.as_array().into_iter().flatten().filter_map(Value::as_str);
            let is_kernel = |name: &str| name.contains("liger") || name.contains("cut_cross_entropy");
            Some(names.find(|name| !is_kernel(name)).map_or(Nothing, |name| Lost(format!("`{name}` is not available"))))
        }
        _ => None,
    }
}

fn llama_factory(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    Some(match path {
        "dataset" => sources::named(from, "train", value),
        "eval_dataset" => sources::named(from, "eval", value),
        "max_samples" => sources::rows(from, value),
        "model" if value.is_string() => one("model.path", value, from),
        "train_dataset" if value.as_str().is_some_and(|path| path.ends_with(".yaml")) => {
            Lost("a list of data sets: write a [[data.train]] for each".into())
        }
        "disable_gradient_checkpointing" => Set(vec![("train.gradient_checkpointing".into(), is_off(value).into())]),
        "mask_history" if !is_off(value) => Set(vec![("data.train_on_turns".into(), "last".into())]),
        // It packs by default then.
        "stage" if value == "pt" => Near(
            from.get("packing").is_none().then(|| ("data.packing".to_owned(), true.into())).into_iter().collect(),
            "a text goes on in the next sequence there; here data.max_length cuts it, and says how many".into(),
        ),
        "freeze_vision_tower" | "freeze_multi_modal_projector" if is_off(value) => Lost(FROZEN_TOWER.into()),
        "freeze_vision_tower"
        | "freeze_multi_modal_projector"
        | "dataset_dir"
        | "stage"
        | "peft_config.name"
        | "mask_history" => Nothing,
        "template" if !is_off(value) => Lost(OWN_TEMPLATE.into()),
        _ => return None,
    })
}

fn trl(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let text = value.as_str().unwrap_or_default();
    Some(match path {
        // `model_name` is Unsloth's.
        "model" | "model_name" if value.is_string() => one("model.path", value, from),
        "dataset_config" | "dataset_config_name" => one("data.train.0.name", value, from),
        "dataset_train_split" => sources::split("train", 0, text),
        "dataset_test_split" => {
            let evaluates = from.get("eval_strategy").is_some_and(|strategy| !is_off(strategy));
            let (name, path) = (from.get("dataset_name").and_then(Value::as_str), "data.eval.0.path".to_owned());
            match (name.filter(|_| evaluates), sources::split("eval", 0, text)) {
                (Some(name), Set(split)) => Set([(path, name.into())].into_iter().chain(split).collect()),
                (Some(_), other) => other,
                (None, _) => Nothing,
            }
        }
        "dataset_text_field" if text != "text" && !text.is_empty() => {
            let columns = toml::Table::from_iter([("text".to_owned(), text.into())]);
            Set(vec![("data.train.0.columns".into(), toml::Value::Table(columns))])
        }
        "dataset_text_field" | "use_peft" | "dataset_mixture.seed" => Nothing,
        "dataset_mixture.test_split_size" => one("data.eval_split", value, from),
        path if path.starts_with("dataset_mixture.datasets.") => sources::mixed(path, value),
        // TRL's name for what is false for conversations by default.
        "assistant_only_loss" | "completion_only_loss" => {
            Set(vec![("data.train_on_inputs".into(), is_off(value).into())])
        }
        _ => return None,
    })
}

/// Which parts of a model that sees have adapters; a list of modules says it alone.
fn unsloth(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let is_listed = from.get("target_modules").is_some_and(|modules| !is_off(modules));
    Some(match path {
        "finetune_language_layers" | "finetune_attention_modules" | "finetune_mlp_modules"
            if is_listed || !is_off(value) =>
        {
            Nothing
        }
        "finetune_language_layers" => Lost(OF_LANGUAGE.into()),
        "finetune_attention_modules" | "finetune_mlp_modules" => targets_of_unsloth(from),
        _ => return None,
    })
}

fn mlx_lm(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let optimizer = from.get("optimizer").and_then(Value::as_str).unwrap_or("adam");
    if let Some(rest) = path.strip_prefix("optimizer_config.") {
        let key = rest.strip_prefix(optimizer).and_then(|rest| rest.strip_prefix('.'));
        return Some(match key {
            Some(key @ ("betas" | "eps" | "weight_decay")) => one(&format!("optimizer.{key}"), value, from),
            Some("bias_correction") if is_off(value) => Lost("moments are corrected for their start here".into()),
            Some("bias_correction") | None => Nothing,
            Some(_) => Lost("there is no such key here".into()),
        });
    }
    Some(match path {
        "model" => one("model.path", value, from),
        "data" => sources::folder(from, value, ["train.jsonl", "valid.jsonl"]),
        "train" => Nothing,
        "test" | "lr_schedule.warmup" | "lr_schedule.warmup_init" if is_off(value) => Nothing,
        "test" => Lost("`lora-train eval RUN --data FILE` measures the loss on other rows after the run".into()),
        "num_layers" | "lora_layers" | "val_batches" if value.as_i64() == Some(-1) => Nothing,
        "num_layers" | "lora_layers" => last_layers(from, value.as_u64().unwrap_or(0)),
        "lora_parameters.scale" => scale(from, value),
        "lora_parameters.keys" => targets(value),
        "lr_schedule.name" => match shape(value) {
            Some(shape) => Set(vec![("scheduler.lr_scheduler".into(), shape.into())]),
            None => Lost("here are cosine, linear and constant".into()),
        },
        "lr_schedule.warmup" => one("scheduler.warmup_steps", value, from),
        "lr_schedule.warmup_init" => Lost("warm-up starts at a rate of 0 here".into()),
        "lr_schedule.arguments" => mlx_schedule(from, value),
        path if path.starts_with("hf_dataset.") => sources::hugging_face(from, path, value),
        _ => return None,
    })
}

fn torchtune(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let text = value.as_str().unwrap_or_default();
    Some(match path {
        "checkpointer.checkpoint_dir" => one("model.path", value, from),
        "tokenizer.max_seq_len" if !value.is_null() => one("data.max_length", value, from),
        "tokenizer.max_seq_len" => Near(
            Vec::new(),
            "rows keep their whole length there; data.max_length cuts them here, and says how many".into(),
        ),
        "tokenizer.prompt_template" if !is_off(value) => Lost(OWN_TEMPLATE.into()),
        "model._component_" if text.contains("qlora") => quantised("nf4"),
        "model.quantize_base" if !is_off(value) => quantised("nf4"),
        "model.lora_attn_modules" | "model.apply_lora_to_mlp" => targets_of_torchtune(from),
        "model.apply_lora_to_output" if !is_off(value) => Lost("the head stays frozen here".into()),
        "optimizer._component_" => optimizer(text, &last_part(value, str::to_lowercase)),
        "lr_scheduler._component_" => {
            let name = last_part(value, |name| {
                name.trim_start_matches("get_").split("_schedule").next().unwrap_or_default().to_owned()
            });
            Set(vec![("scheduler.lr_scheduler".into(), name.into())])
        }
        "max_steps_per_epoch" if value.is_null() => Nothing,
        "max_steps_per_epoch" => Near(
            as_toml(value, from).map(|steps| ("train.max_steps".to_owned(), steps)).into_iter().collect(),
            "steps of each epoch there, of the whole run here".into(),
        ),
        "device" if text == "cpu" => one("device.name", value, from),
        "metric_logger._component_" if text.contains("WandB") || text.contains("Comet") => Lost(
            "figures go to metrics.jsonl, TensorBoard and MLflow; `lora-train help telemetry` has the way to W&B"
                .into(),
        ),
        "quantizer._component_" => Lost("training that foresees a later quantisation is not available".into()),
        "checkpointer.output_dir" if from.get("output_dir").is_none() => one("output_dir", value, from),
        "device"
        | "checkpointer.output_dir"
        | "optimizer.fused"
        | "model.quantize_base"
        | "model.apply_lora_to_output" => Nothing,
        path if path.starts_with("dataset.") => sources::of_torchtune(from, path, value),
        path if path.starts_with("dataset_val.") => {
            Lost("data.eval_split holds out rows of the training files; [[data.eval]] names others".into())
        }
        path if path.starts_with("tokenizer.") || path.ends_with("._component_") => Nothing,
        _ => return None,
    })
}

fn litgpt(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    Some(match path {
        "checkpoint_dir" => one("model.path", value, from),
        "lora_query" | "lora_key" | "lora_value" | "lora_projection" | "lora_mlp" => targets_of_litgpt(from),
        "lora_head" if value == true => Lost("the head stays frozen here".into()),
        "train.global_batch_size" => accumulation(from, value),
        "eval.initial_validation" => Set(vec![("eval.eval_on_start".into(), (value == true).into())]),
        "devices" if value.as_u64().is_some_and(|devices| devices > 1) => Lost(ON_SEVERAL.into()),
        // litgpt's fine-tuning decays to 0, whatever min_lr says.
        "lora_head" | "train.min_lr" | "devices" => Nothing,
        "data" => sources::of_litgpt_class(from, value),
        path if path.starts_with("data.") => return sources::of_litgpt(from, path, value),
        "optimizer" | "optimizer.class_path" => {
            optimizer(value.as_str().unwrap_or_default(), &last_part(value, str::to_lowercase))
        }
        _ => return None,
    })
}
