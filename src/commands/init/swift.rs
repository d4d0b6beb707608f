//! What keys of ms-swift mean, in its args.json and on its command line.

use serde_json::Value;

use super::foreign::Meaning::{self, Lost, Nothing, Set};
use super::foreign::{Foreign, READ, is_off, one};
use super::values::{FROZEN_TOWER, OF_LANGUAGE, OWN_TEMPLATE, four_bits, quantised};

/// Keys that change no result here, or of which the values above are all that do.
const WITHOUT_EFFECT: &[&str] = &[
    "split_dataset_ratio", "quant_bits", "quant_method", "lorap_lr_ratio", "adapters", "truncation_strategy",
    "loss_scale", "freeze_vit", "freeze_aligner", "freeze_llm", "freeze_parameters_ratio", "use_hf", "check_model",
    "lazy_tokenize", "load_from_cache_file", "add_version", "create_checkpoint_symlink", "attn_impl", "tuner_backend",
    "model_author", "model_name", "model_type", "model_suffix", "model_info", "model_meta", "hub", "rank",
    "global_world_size", "local_world_size", "task_type", "dataset_shuffle", "ignore_args_error", "use_chat_template",
    "template_backend", "padding_side", "vit_gradient_checkpointing", "logprobs", "swift_version", "training_args",
];

/// The meaning of a key that only it has, or whose values are its own.
pub(super) fn of_key(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let text = value.as_str().unwrap_or_default();
    Some(match path {
        "model" | "model_id_or_path" if value.is_string() => one("model.path", value, from),
        "dataset" => datasets("train", value),
        "val_dataset" => datasets("eval", value),
        "split_dataset_ratio" if !is_off(value) => one("data.eval_split", value, from),
        "quant_bits" if !is_off(value) => match value.as_u64() {
            Some(4) => four_bits(from),
            Some(8) => quantised("int8"),
            _ => Lost("`model.quantization` has nf4, fp4, int8 and fp8".into()),
        },
        "quant_method" if text == "bnb" => READ,
        "train_type" | "tuner_type" | "sft_type" if text == "lora" => Nothing,
        "rlhf_type" => READ,
        "template" if !is_off(value) => Lost(OWN_TEMPLATE.into()),
        // How its inference draws answers.
        "temperature" | "top_k" | "top_p" | "repetition_penalty" if from.said.objective != Some("grpo") => Nothing,
        "local_rank" if value.as_i64() == Some(-1) => Nothing,
        "lorap_lr_ratio" if !is_off(value) => one("lora.loraplus_lr_ratio", value, from),
        "init_weights" if *value == true || text == "true" => Nothing,
        "init_weights" => one("lora.init_lora_weights", value, from),
        "adapters" if !is_off(value) => one("lora.start_from", value.get(0).unwrap_or(value), from),
        "truncation_strategy" if text == "delete" => {
            Lost("rows longer than `max_length` are cut, and counted, not dropped".into())
        }
        "freeze_vit" | "freeze_aligner" if is_off(value) => Lost(FROZEN_TOWER.into()),
        "freeze_llm" if !is_off(value) => Lost(OF_LANGUAGE.into()),
        "loss_scale" if text != "default" && !is_off(value) => {
            Lost("every token of an answer counts alike here; `weight` = 0 in a message takes its loss away".into())
        }
        _ if WITHOUT_EFFECT.contains(&path) => Nothing,
        _ => return None,
    })
}

/// Data sets with how many of their rows: `owner/name:subset#500`.
fn datasets(section: &str, value: &Value) -> Meaning {
    let listed = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let mut settings = Vec::new();
    for (index, source) in listed.iter().filter_map(Value::as_str).flat_map(str::split_whitespace).enumerate() {
        let key = |name: &str| format!("data.{section}.{index}.{name}");
        let (source, rows) = source.rsplit_once('#').unwrap_or((source, ""));
        let source = source.split_once("::").map_or(source, |(_, source)| source);
        let (path, name) = source.split_once(':').unwrap_or((source, ""));
        settings.push((key("path"), path.into()));
        settings.extend((!name.is_empty()).then(|| (key("name"), name.into())));
        settings.extend(rows.parse::<i64>().ok().map(|rows| (key("rows"), rows.into())));
    }
    if settings.is_empty() { Nothing } else { Set(settings) }
}
