//! Keys of other trainers whose values are converted; for all others the name is enough.

use serde_json::Value;

use super::foreign::Meaning::{self, Lost, Nested, Nothing, Set};
use super::foreign::{Foreign, Trainer, is_off, one};
use super::sources;
use crate::recipe::asks_for_nothing;

/// The rule for a key of this path, if it has one.
pub(super) fn rule(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let name = path.rsplit('.').next().unwrap_or(path);
    of_trainer(from, path, value)
        .or_else(|| common(from, name, value))
        .or_else(|| asks_for_nothing(name).then_some(Nothing))
}

fn of_trainer(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    match from.trainer {
        Trainer::Axolotl => axolotl(path, value),
        Trainer::LlamaFactory => llama_factory(from, path, value),
        Trainer::MlxLm => mlx_lm(from, path, value),
        Trainer::Torchtune => torchtune(from, path, value),
        Trainer::Litgpt => litgpt(from, path, value),
        Trainer::Peft if path == "init_lora_weights" && value == true => Some(Nothing),
        Trainer::Peft if path == "base_model_name_or_path" => Some(one("model.path", value, from)),
        Trainer::Peft | Trainer::Unknown => None,
    }
}

fn axolotl(path: &str, value: &Value) -> Option<Meaning> {
    match path {
        "datasets" => Some(sources::listed("train", value)),
        "test_datasets" => Some(sources::listed("eval", value)),
        _ => None,
    }
}

fn llama_factory(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    Some(match path {
        "dataset" => sources::named(from, "train", value),
        "eval_dataset" => sources::named(from, "eval", value),
        "stage" if value != "sft" && value != "pt" => Lost("only supervised fine-tuning is done here".into()),
        "dataset_dir" | "stage" => Nothing,
        "template" => Lost("the chat template is the model's own".into()),
        _ => return None,
    })
}

fn mlx_lm(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    Some(match path {
        "model" => one("model.path", value, from),
        "data" => sources::folder(from, value),
        "num_layers" | "val_batches" if value.as_i64() == Some(-1) => Nothing,
        "num_layers" => Lost("the last layers there; name them in lora.layers_to_transform, counted from 0".into()),
        "lora_parameters.scale" => scale(from, value),
        "lora_parameters.keys" => targets(value),
        "lr_schedule" => mlx_schedule(value),
        _ => return None,
    })
}

fn torchtune(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    Some(match path {
        "checkpointer" | "tokenizer" | "optimizer" | "lr_scheduler" => Nested,
        "checkpointer.checkpoint_dir" => one("model.path", value, from),
        "tokenizer.max_seq_len" if !value.is_null() => one("data.max_length", value, from),
        "dataset" => sources::of_class(from, value),
        "model.lora_attn_modules" => targets_of_torchtune(from),
        "optimizer._component_" => last_part(value, "optimizer.name", str::to_lowercase),
        "lr_scheduler._component_" => last_part(value, "scheduler.lr_scheduler", |name| {
            name.trim_start_matches("get_").split("_schedule").next().unwrap_or_default().to_owned()
        }),
        "checkpointer.output_dir" | "optimizer.fused" | "model.apply_lora_to_mlp" | "model.apply_lora_to_output" => {
            Nothing
        }
        path if path.starts_with("tokenizer.") || path.ends_with("._component_") => Nothing,
        _ => return None,
    })
}

fn litgpt(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    Some(match path {
        "train" => Nested,
        "checkpoint_dir" => one("model.path", value, from),
        "lora_query" => targets_of_litgpt(from),
        "lora_head" if value == true => Lost("the head stays frozen here".into()),
        "lora_key" | "lora_value" | "lora_projection" | "lora_mlp" | "lora_head" => Nothing,
        "train.global_batch_size" => accumulation(from, value),
        "train.min_lr" => min_lr(from, value),
        "eval.initial_validation" => Set(vec![("eval.eval_on_start".into(), (value == true).into())]),
        "data" => sources::of_class(from, value),
        "optimizer.class_path" => last_part(value, "optimizer.name", str::to_lowercase),
        _ => return None,
    })
}

/// Keys that several trainers share.
fn common(from: &Foreign, name: &str, value: &Value) -> Option<Meaning> {
    let is_on = !is_off(value);
    let text = value.as_str().unwrap_or_default();
    let outcome = match name {
        "bf16" | "bfloat16" => precision(is_on, "bf16"),
        "fp16" | "float16" => precision(is_on, "f16"),
        "dtype" | "precision" | "torch_dtype" | "mixed_precision" => match text {
            text if text.contains("bf16") || text.contains("bfloat16") => precision(true, "bf16"),
            text if text.contains("16") => precision(true, "f16"),
            _ => Nothing,
        },
        "load_in_4bit" if is_on => four_bits(from),
        "load_in_8bit" if is_on => quantised("int8"),
        "quantization_bit" | "quantize" if is_on => match value.as_u64() {
            Some(4) => four_bits(from),
            Some(8) => quantised("int8"),
            _ => Lost("`model.quantization` has nf4, fp4 and int8".into()),
        },
        "adapter" | "finetuning_type" | "fine_tune_type" => match text {
            "lora" => Nothing,
            "qlora" => four_bits(from),
            "dora" => Set(vec![("lora.use_dora".into(), true.into())]),
            _ => Lost("only LoRA adapters are trained here".into()),
        },
        // Fused, paged or in 8 bits: the same rule.
        "optimizer" | "optim" if text.contains("adamw") => Set(vec![("optimizer.name".into(), "adamw".into())]),
        "gradient_checkpointing" if text == "unsloth" => {
            Set(vec![("train.gradient_checkpointing".into(), "offload".into())])
        }
        "lora_target_linear" if is_on => Set(vec![("lora.target_modules".into(), "all-linear".into())]),
        "target_modules" | "lora_target" | "lora_target_modules" if is_on => targets(value),
        "val_set_size" | "val_size" if is_on => one("data.eval_split", value, from),
        "load_in_4bit" | "load_in_8bit" | "quantization_bit" | "quantize" | "lora_target_linear" | "val_set_size"
        | "val_size" => Nothing,
        "mask_prompt" => Set(vec![("data.train_on_inputs".into(), (!is_on).into())]),
        "max_steps" if value.as_f64().is_none_or(|steps| steps <= 0.0) => Nothing,
        "warmup_steps" | "lr_warmup_steps" if !is_on => Nothing,
        "evals_per_epoch" | "saves_per_epoch" if is_on => {
            Lost("counted in steps here: eval.eval_steps, checkpoint.save_steps".into())
        }
        "eval_steps" | "save_steps" if value.as_f64().is_some_and(|steps| steps > 0.0 && steps < 1.0) => {
            Lost("a share of the run there, a number of steps here".into())
        }
        _ => return None,
    };
    Some(outcome)
}

fn precision(is_on: bool, name: &str) -> Meaning {
    if is_on { Set(vec![("train.precision".into(), name.into())]) } else { Nothing }
}

fn quantised(name: &str) -> Meaning {
    Set(vec![("model.quantization".into(), name.into())])
}

/// Four bits, of the kind that another key names. Where no key says whether scales are codes too, they are in
/// LLaMA-Factory, and for the `qlora` of axolotl.
fn four_bits(from: &Foreign) -> Meaning {
    let kind = from.anywhere(&["bnb_4bit_quant_type", "quantization_type"]).and_then(Value::as_str).unwrap_or("nf4");
    let by_default = from.trainer == Trainer::LlamaFactory || from.get("adapter").is_some_and(|name| name == "qlora");
    let says_nothing = from.anywhere(&["bnb_4bit_use_double_quant", "double_quantization"]).is_none();
    let double = (by_default && says_nothing).then(|| ("model.double_quantization".into(), true.into()));
    Set([("model.quantization".into(), kind.into())].into_iter().chain(double).collect())
}

/// The last part of a dotted name, changed: `torch.optim.AdamW` to `adamw`.
fn last_part(value: &Value, key: &str, change: impl Fn(&str) -> String) -> Meaning {
    let last = value.as_str().and_then(|text| text.rsplit('.').next());
    last.map_or(Nothing, |last| Set(vec![(key.into(), change(last).into())]))
}

/// Names of modules, also `all` and names with commas between them.
fn targets(value: &Value) -> Meaning {
    let key = || "lora.target_modules".to_owned();
    match value {
        Value::String(text) if text == "all" || text == "all-linear" => Set(vec![(key(), "all-linear".into())]),
        Value::String(text) if text.contains(['*', '(', '|', '\\', '^']) => Set(vec![(key(), text.as_str().into())]),
        Value::String(text) => Set(vec![(key(), names(text.split(',')))]),
        Value::Array(items) => Set(vec![(key(), names(items.iter().filter_map(Value::as_str)))]),
        _ => Nothing,
    }
}

fn names<'n>(names: impl Iterator<Item = &'n str>) -> toml::Value {
    toml::Value::Array(names.map(|name| name.trim().into()).collect())
}

/// mlx-lm multiplies by the scale, we by `lora_alpha / r`.
fn scale(from: &Foreign, value: &Value) -> Meaning {
    let rank = from.get("lora_parameters.rank").and_then(Value::as_f64).unwrap_or(8.0);
    value.as_f64().map_or(Nothing, |scale| Set(vec![("lora.lora_alpha".into(), (scale * rank).into())]))
}

/// mlx-lm's `{name, warmup, arguments: [rate, steps, end]}`.
fn mlx_schedule(value: &Value) -> Meaning {
    let name = value.get("name").and_then(Value::as_str).unwrap_or_default();
    let Some(shape) = ["cosine", "linear"].into_iter().find(|shape| name.starts_with(shape)) else {
        return Lost(format!("`{name}` is not available"));
    };
    let mut settings = vec![("scheduler.lr_scheduler".into(), shape.into())];
    if let Some(warmup) = value.get("warmup").and_then(Value::as_i64).filter(|warmup| *warmup > 0) {
        settings.push(("scheduler.warmup_steps".into(), warmup.into()));
    }
    let argument = |index: usize| value.get("arguments")?.get(index)?.as_f64();
    if let (Some(rate), Some(end)) = (argument(0), argument(2)) {
        settings.push(("scheduler.min_lr_ratio".into(), (end / rate).into()));
    }
    Set(settings)
}

/// Rows of a step there, passes of a step here.
fn accumulation(from: &Foreign, value: &Value) -> Meaning {
    let micro = from.get("train.micro_batch_size").and_then(Value::as_i64).unwrap_or(1);
    let passes = value.as_i64().map(|rows| (rows / micro.max(1)).max(1));
    passes.map_or(Nothing, |passes| Set(vec![("train.gradient_accumulation_steps".into(), passes.into())]))
}

/// A rate there, a share of the peak here.
fn min_lr(from: &Foreign, value: &Value) -> Meaning {
    let peak = from.get("optimizer.init_args.lr").and_then(Value::as_f64);
    match (value.as_f64(), peak) {
        (Some(end), Some(peak)) if peak > 0.0 => Set(vec![("scheduler.min_lr_ratio".into(), (end / peak).into())]),
        _ => Nothing,
    }
}

fn targets_of_torchtune(from: &Foreign) -> Meaning {
    let attention = from.get("model.lora_attn_modules").and_then(Value::as_array);
    let attention = attention.into_iter().flatten().filter_map(Value::as_str);
    let attention = attention.map(|name| if name == "output_proj" { "o_proj" } else { name });
    let mlp = from.get("model.apply_lora_to_mlp") == Some(&Value::Bool(true));
    let modules: Vec<&str> = attention.chain(MLP.iter().copied().filter(|_| mlp)).collect();
    Set(vec![("lora.target_modules".into(), names(modules.into_iter()))])
}

const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn targets_of_litgpt(from: &Foreign) -> Meaning {
    let parts: [(&str, &[&str]); 5] = [
        ("lora_query", &["q_proj"]),
        ("lora_key", &["k_proj"]),
        ("lora_value", &["v_proj"]),
        ("lora_projection", &["o_proj"]),
        ("lora_mlp", &MLP),
    ];
    let is_on = |key: &str| from.get(key) == Some(&Value::Bool(true));
    let modules: Vec<&str> =
        parts.iter().filter(|(key, _)| is_on(key)).flat_map(|(_, names)| *names).copied().collect();
    Set(vec![("lora.target_modules".into(), names(modules.into_iter()))])
}
