//! Keys that several trainers share, and values as a recipe has them.

use std::path::Path;

use serde_json::Value;

use super::foreign::Meaning::{self, Lost, Near, Nothing, Set};
use super::foreign::{Foreign, READ, is_off, one};
use super::trainer::Trainer;

/// What becomes of the name of a chat template.
pub(super) const OWN_TEMPLATE: &str =
    "the chat template is the model's own; data.chat_template names a file with another";

/// What becomes of adapters or of training that a vision tower or its projector is to have.
pub(super) const FROZEN_TOWER: &str = "vision tower and projector stay as they are here";

/// What becomes of a wish for these alone.
pub(super) const OF_LANGUAGE: &str = "adapters are those of the language model here";

/// Keys that several trainers share.
pub(super) fn common(from: &Foreign, name: &str, value: &Value) -> Option<Meaning> {
    of_weights(from, name, value).or_else(|| of_adapters(from, name, value)).or_else(|| of_training(from, name, value))
}

/// Types of weights and of arithmetic.
fn of_weights(from: &Foreign, name: &str, value: &Value) -> Option<Meaning> {
    let is_on = !is_off(value);
    let text = value.as_str().unwrap_or_default();
    Some(match name {
        "bf16" | "bfloat16" => precision(is_on, "bf16"),
        "fp16" | "float16" => precision(is_on, "f16"),
        "dtype" | "precision" | "torch_dtype" | "mixed_precision" | "bnb_4bit_compute_dtype" => match text {
            text if text.contains("bf16") || text.contains("bfloat16") => precision(true, "bf16"),
            text if text.contains("16") => precision(true, "f16"),
            _ => Nothing,
        },
        "load_in_4bit" | "quantization" if is_on && (name == "load_in_4bit" || text == "int4") => four_bits(from),
        "load_in_8bit" if is_on => quantised("int8"),
        // litgpt's bnb.nf4, bnb.fp4-dq, bnb.int8-training.
        "quantization_bit" | "quantize" if is_on => match (value.as_u64(), text.strip_prefix("bnb.").unwrap_or(text)) {
            (Some(4), _) => four_bits(from),
            (Some(8), _) | (_, "int8" | "int8-training") => quantised("int8"),
            (_, "nf4" | "fp4" | "nf4-dq" | "fp4-dq") => {
                let double = ("model.double_quantization".to_owned(), text.ends_with("-dq").into());
                let kind = if text.contains("nf4") { "nf4" } else { "fp4" };
                Set(vec![("model.quantization".into(), kind.into()), double])
            }
            _ => Lost("`model.quantization` has nf4, fp4, int8 and fp8".into()),
        },
        "adapter" | "finetuning_type" | "fine_tune_type" => match text {
            "lora" => Nothing,
            "qlora" if from.get("load_in_8bit").is_some_and(|on| !is_off(on)) => READ,
            "qlora" => four_bits(from),
            "dora" => Set(vec![("lora.use_dora".into(), true.into())]),
            _ => Lost("only LoRA adapters are trained here".into()),
        },
        "bnb_4bit_quant_type" | "quantization_type" => READ,
        "tf32" if is_on && !["bf16", "fp16"].iter().any(|key| from.get(key).is_some_and(|on| !is_off(on))) => {
            precision(true, "tf32")
        }
        "quantization_method" if matches!(text, "bnb" | "bitsandbytes") => Nothing,
        "tf32" | "load_in_4bit" | "load_in_8bit" | "quantization_bit" | "quantize" => Nothing,
        _ => return None,
    })
}

/// Which layers have adapters.
fn of_adapters(from: &Foreign, name: &str, value: &Value) -> Option<Meaning> {
    let is_on = !is_off(value);
    let text = value.as_str().unwrap_or_default();
    Some(match name {
        "lora_target_linear" if is_on => Set(vec![("lora.target_modules".into(), "all-linear".into())]),
        // axolotl adds the list to all linear layers.
        "lora_target_modules" if from.get("lora_target_linear") == Some(&Value::Bool(true)) => READ,
        "target_modules" | "lora_target" | "lora_target_modules" if is_on => targets(value),
        "additional_target" if is_on => Set(vec![("lora.modules_to_save".into(), names(text.split(',')))]),
        "lora_target_linear" => Nothing,
        _ => return None,
    })
}

/// Rows, steps, and what is done after so many of them.
fn of_training(from: &Foreign, name: &str, value: &Value) -> Option<Meaning> {
    let is_on = !is_off(value);
    let text = value.as_str().unwrap_or_default();
    Some(match name {
        "optimizer" | "optim" if !text.is_empty() => optimizer(text, text),
        "report_to" | "logger_name" => trackers(value),
        "save_strategy" | "eval_strategy" | "evaluation_strategy" | "logging_strategy"
            if text == "epoch" || text == "best" =>
        {
            Lost("counted in steps here: eval.eval_steps, checkpoint.save_steps, logging.logging_steps".into())
        }
        "roles_to_train" => match value.as_array().map_or(&[][..], Vec::as_slice) {
            [] => Nothing,
            [role] if role == "assistant" || role == "gpt" => Nothing,
            _ => Lost("answers of the assistant carry loss; data.train_on_inputs puts it on all".into()),
        },
        "train_on_eos" if text == "turn" => Nothing,
        "chat_template" | "chat_template_path" | "chat_template_jinja" => chat_template(name, text, from),
        "gradient_checkpointing" | "use_gradient_checkpointing" if text == "unsloth" => {
            Set(vec![("train.gradient_checkpointing".into(), "offload".into())])
        }
        "val_set_size" | "val_size" if is_on => one("data.eval_split", value, from),
        "evals_per_epoch" | "saves_per_epoch" if is_on => {
            Lost("counted in steps here: eval.eval_steps, checkpoint.save_steps".into())
        }
        "evals_per_epoch"
        | "saves_per_epoch"
        | "logging_strategy"
        | "save_strategy"
        | "eval_strategy"
        | "evaluation_strategy"
        | "val_set_size"
        | "val_size" => Nothing,
        "train_on_responses_only" if is_on => Set(vec![("data.train_on_inputs".into(), false.into())]),
        "mask_prompt" => Set(vec![("data.train_on_inputs".into(), (!is_on).into())]),
        // transformers counts steps alone where both are given.
        "num_epochs" | "num_train_epochs"
            if from.trainer.is_of_transformers()
                && from.get("max_steps").and_then(Value::as_f64).is_some_and(|steps| steps > 0.0) =>
        {
            Nothing
        }
        "data_seed" if from.get("seed").is_some_and(|seed| !seed.is_null() && seed != value) => {
            Lost("there is one seed here: `seed`".into())
        }
        "excess_length_strategy" if text == "truncate" => Nothing,
        "max_steps" if value.as_f64().is_none_or(|steps| steps <= 0.0) => Nothing,
        "warmup_steps" | "lr_warmup_steps" if !is_on => Nothing,
        // transformers 5.
        "warmup_steps" if value.as_f64().is_some_and(|share| share < 1.0) => one("scheduler.warmup_ratio", value, from),
        "adam_beta1" | "adam_beta2" => {
            let beta = |key: &str, default: f64| from.anywhere(&[key]).and_then(Value::as_f64).unwrap_or(default);
            let betas = [beta("adam_beta1", 0.9), beta("adam_beta2", 0.999)];
            Set(vec![("optimizer.betas".into(), toml::Value::Array(betas.map(toml::Value::from).to_vec()))])
        }
        "activation_offloading" if is_on => Set(vec![("train.gradient_checkpointing".into(), "offload".into())]),
        "eval_steps" | "save_steps" if value.as_f64().is_some_and(|steps| steps > 0.0 && steps < 1.0) => {
            Lost("a share of the run there, a number of steps here".into())
        }
        _ => return None,
    })
}

fn precision(is_on: bool, name: &str) -> Meaning {
    if is_on { Set(vec![("train.precision".into(), name.into())]) } else { Nothing }
}

pub(super) fn quantised(name: &str) -> Meaning {
    Set(vec![("model.quantization".into(), name.into())])
}

/// Four bits, of the kind that another key names. Where no key says whether scales are codes too, they are in
/// LLaMA-Factory, and for the `qlora` of axolotl.
pub(super) fn four_bits(from: &Foreign) -> Meaning {
    let kind = from.anywhere(&["bnb_4bit_quant_type", "quantization_type"]).and_then(Value::as_str).unwrap_or("nf4");
    let by_default = from.trainer == Trainer::LlamaFactory || from.get("adapter").is_some_and(|name| name == "qlora");
    let says_nothing = from.anywhere(&["bnb_4bit_use_double_quant", "double_quantization"]).is_none();
    let double = (by_default && says_nothing).then(|| ("model.double_quantization".into(), true.into()));
    Set([("model.quantization".into(), kind.into())].into_iter().chain(double).collect())
}

/// An optimizer of a name that many spell otherwise, fused or not, and what is taken for it.
pub(super) fn optimizer(theirs: &str, name: &str) -> Meaning {
    let lower = theirs.to_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    let (ours, is_near) = match () {
        () if has(&["schedule_free", "schedulefree"]) => (name, false),
        () if has(&["adamw"]) && has(&["8bit"]) && !has(&["ao_", "torchao"]) => ("adamw_8bit", has(&["paged"])),
        () if has(&["adamw"]) => ("adamw", has(&["8bit", "4bit", "fp8", "paged"])),
        () if has(&["lion"]) => ("lion", has(&["8bit", "paged"])),
        () => (name, false),
    };
    let settings = vec![("optimizer.name".into(), ours.into())];
    match (is_near, ours) {
        (false, _) => Set(settings),
        (true, "adamw_8bit") => {
            Near(settings, format!("`{theirs}` is adamw_8bit here, with its state in the device's memory"))
        }
        (true, _) => Near(settings, format!("`{theirs}` is {ours} here, with its state in 32 bits and in memory")),
    }
}

/// Where figures go.
fn trackers(value: &Value) -> Meaning {
    let text = match value {
        Value::Array(items) => items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","),
        value => value.as_str().unwrap_or_default().to_owned(),
    };
    let mut names = text.split(',').map(str::trim);
    match names.find(|name| !matches!(*name, "" | "none" | "csv" | "tensorboard" | "all" | "mlflow")) {
        Some(name) => Lost(format!(
            "figures go to metrics.jsonl, TensorBoard and MLflow, not to {name}; `lora-train help telemetry` has the way to W&B"
        )),
        None => Nothing,
    }
}

/// A template that is a file; the names of others are known to their trainer alone.
fn chat_template(key: &str, text: &str, from: &Foreign) -> Meaning {
    let is_file = !text.contains('\n') && (text.ends_with(".jinja") || text.ends_with(".jinja2"));
    match text {
        "" | "auto" | "tokenizer_default" => Nothing,
        "jinja" if from.get("chat_template_jinja").is_some() => READ,
        _ if is_file => Set(vec![("data.chat_template".into(), text.into())]),
        _ if key == "chat_template_jinja" => Lost(
            "a template's text there, the file of one here: write it to a file, and name that in data.chat_template"
                .into(),
        ),
        _ => Lost(OWN_TEMPLATE.into()),
    }
}

/// mlx-lm adapts the last layers; which these are, config.json says.
pub(super) fn last_layers(from: &Foreign, number: u64) -> Meaning {
    let config = from.get("model").and_then(Value::as_str).map(|model| Path::new(model).join("config.json"));
    let config: Option<Value> = config.and_then(|path| serde_json::from_slice(&std::fs::read(path).ok()?).ok());
    match config.and_then(|config| config.get("num_hidden_layers")?.as_u64()) {
        Some(all) if number >= all => Nothing,
        Some(all) => {
            let layers = (all - number..all).filter_map(|layer| i64::try_from(layer).ok()).map(toml::Value::from);
            Set(vec![("lora.layers_to_transform".into(), toml::Value::Array(layers.collect()))])
        }
        None => Lost(format!(
            "the last {number} layers there, all here: without its config.json their numbers are not known; \
             lora.layers_to_transform lists them, of 28 layers {} to 27",
            28_u64.saturating_sub(number)
        )),
    }
}

/// The last part of a dotted name, changed: `torch.optim.AdamW` to `adamw`.
pub(super) fn last_part(value: &Value, change: impl Fn(&str) -> String) -> String {
    value.as_str().and_then(|text| text.rsplit('.').next()).map(change).unwrap_or_default()
}

/// Names of modules, also `all` and names with commas between them.
pub(super) fn targets(value: &Value) -> Meaning {
    let key = || "lora.target_modules".to_owned();
    match value {
        Value::String(text) if text == "all" || text == "all-linear" => Set(vec![(key(), "all-linear".into())]),
        Value::String(text) if text.contains(['*', '(', '|', '\\', '^']) => Set(vec![(key(), text.as_str().into())]),
        Value::String(text) => Set(vec![(key(), names(text.split(',')))]),
        Value::Array(items) => match &items[..] {
            [Value::String(only)] if only == "all" || only == "all-linear" => Set(vec![(key(), "all-linear".into())]),
            _ => Set(vec![(key(), names(items.iter().filter_map(Value::as_str)))]),
        },
        _ => Nothing,
    }
}

fn names<'n>(names: impl Iterator<Item = &'n str>) -> toml::Value {
    toml::Value::Array(names.map(|name| name.trim().into()).collect())
}

/// mlx-lm multiplies by the scale, we by `lora_alpha / r`.
pub(super) fn scale(from: &Foreign, value: &Value) -> Meaning {
    let rank = from.get("lora_parameters.rank").and_then(Value::as_f64).unwrap_or(8.0);
    value.as_f64().map_or(Nothing, |scale| Set(vec![("lora.lora_alpha".into(), (scale * rank).into())]))
}

pub(super) fn shape(name: &Value) -> Option<&'static str> {
    let name = name.as_str()?;
    ["cosine", "linear"].into_iter().find(|shape| name.starts_with(shape))
}

/// Rates of mlx-lm's schedule: `cosine_decay`'s [rate, steps, end], and `linear_schedule`'s [rate, end, steps].
pub(super) fn mlx_schedule(from: &Foreign, value: &Value) -> Meaning {
    let argument = |index: usize| value.get(index).and_then(Value::as_f64);
    let (end, steps) = match from.get("lr_schedule.name").and_then(shape) {
        Some("cosine") => (argument(2).unwrap_or(0.0), argument(1)),
        Some(_) => (argument(1).unwrap_or(0.0), argument(2)),
        None => return Lost("here are cosine, linear and constant".into()),
    };
    let Some(rate) = argument(0).filter(|rate| *rate > 0.0) else { return Lost("no rate to start from".into()) };
    let settings =
        vec![("optimizer.learning_rate".into(), rate.into()), ("scheduler.min_lr_ratio".into(), share(end, rate))];
    let number = |path: &str, default: f64| from.get(path).and_then(Value::as_f64).unwrap_or(default);
    let run = number("iters", 1000.0) - number("lr_schedule.warmup", 0.0);
    match steps {
        Some(steps) if (steps - run).abs() > 0.1 * run => {
            Near(settings, format!("the rate falls for {steps} steps there, to the end of the run here"))
        }
        _ => Set(settings),
    }
}

/// One rate as a share of another, without the last digits of the division.
fn share(rate: f64, of: f64) -> toml::Value {
    ((rate / of * 1e9).round() / 1e9).into()
}

/// Rows of a step there, passes of a step here.
pub(super) fn accumulation(from: &Foreign, value: &Value) -> Meaning {
    let micro = from
        .get("train.micro_batch_size")
        .or_else(|| from.get("micro_batch_size"))
        .and_then(Value::as_i64)
        .unwrap_or(1);
    let passes = value.as_i64().map(|rows| (rows / micro.max(1)).max(1));
    passes.map_or(Nothing, |passes| Set(vec![("train.gradient_accumulation_steps".into(), passes.into())]))
}

pub(super) fn targets_of_torchtune(from: &Foreign) -> Meaning {
    let attention = from.get("model.lora_attn_modules").and_then(Value::as_array);
    let attention = attention.into_iter().flatten().filter_map(Value::as_str);
    let attention = attention.map(|name| if name == "output_proj" { "o_proj" } else { name });
    let mlp = from.get("model.apply_lora_to_mlp") == Some(&Value::Bool(true));
    let modules: Vec<&str> = attention.chain(MLP.iter().copied().filter(|_| mlp)).collect();
    Set(vec![("lora.target_modules".into(), names(modules.into_iter()))])
}

/// The layers that Unsloth gives adapters to, where no list of modules says it.
pub(super) fn targets_of_unsloth(from: &Foreign) -> Meaning {
    let has = |key: &str| from.get(key).is_none_or(|on| !is_off(on));
    let modules: &[&str] = match (has("finetune_attention_modules"), has("finetune_mlp_modules")) {
        (true, true) => return Nothing,
        (true, false) => &["q_proj", "k_proj", "v_proj", "o_proj"],
        (false, true) => &MLP,
        (false, false) => return Lost("no layer would have an adapter".into()),
    };
    Set(vec![("lora.target_modules".into(), names(modules.iter().copied()))])
}

const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

pub(super) fn targets_of_litgpt(from: &Foreign) -> Meaning {
    let parts: [(&str, &[&str]); 5] = [
        ("lora_query", &["q_proj"]),
        ("lora_key", &["k_proj"]),
        ("lora_value", &["v_proj"]),
        ("lora_projection", &["o_proj"]),
        ("lora_mlp", &MLP),
    ];
    let is_on = |key: &str| match from.get(key) {
        Some(on) => *on == Value::Bool(true),
        None => matches!(key, "lora_query" | "lora_value"),
    };
    let modules: Vec<&str> =
        parts.iter().filter(|(key, _)| is_on(key)).flat_map(|(_, names)| *names).copied().collect();
    Set(vec![("lora.target_modules".into(), names(modules.into_iter()))])
}
