//! `adapter_config.json`, with the keys of PEFT's `LoraConfig`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::lora::config::{InitLoraWeights, LoraConfig, TargetModules};
use crate::spec::Linear;

/// Keys that change neither what the adapter computes nor where it sits.
const WITHOUT_EFFECT: [&str; 11] = [
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
];

/// `adapter_config.json` of an adapter on `modules`.
///
/// Only keys that PEFT has had for a long time are written: older versions refuse keys that they do not know.
pub(super) fn to_json<'a>(
    config: &LoraConfig,
    modules: impl Iterator<Item = &'a String>,
    base_model_name_or_path: &str,
) -> Value {
    // PEFT cannot combine a regular expression with `layers_to_transform`, so the layers are listed one by one.
    let one_by_one = matches!(config.target_modules, TargetModules::Regex(_)) && config.layers_to_transform.is_some();
    let target_modules = match &config.target_modules {
        TargetModules::AllLinear => {
            // PEFT writes the layer names once it has resolved "all-linear" for a model.
            let mut names = Linear::ALL.map(Linear::short_name);
            names.sort_unstable();
            json!(names)
        }
        TargetModules::Names(names) => json!(names),
        TargetModules::Regex(_) if one_by_one => json!(modules.collect::<Vec<_>>()),
        TargetModules::Regex(regex) => json!(regex),
    };
    let alpha_pattern: BTreeMap<&String, Value> =
        config.alpha_pattern.iter().map(|(name, alpha)| (name, number(*alpha))).collect();
    let keys: BTreeMap<&str, Value> = [
        ("alpha_pattern", json!(alpha_pattern)),
        ("base_model_name_or_path", json!(base_model_name_or_path)),
        ("bias", json!("none")),
        ("fan_in_fan_out", json!(false)),
        ("inference_mode", json!(true)),
        (
            "init_lora_weights",
            match config.init_lora_weights {
                InitLoraWeights::Kaiming => json!(true),
                InitLoraWeights::Gaussian => json!("gaussian"),
            },
        ),
        ("layers_pattern", Value::Null),
        ("layers_to_transform", json!(config.layers_to_transform.as_ref().filter(|_| !one_by_one))),
        ("lora_alpha", number(config.lora_alpha)),
        ("lora_dropout", json!(config.lora_dropout)),
        ("modules_to_save", Value::Null),
        ("peft_type", json!("LORA")),
        ("r", json!(config.r)),
        ("rank_pattern", json!(config.rank_pattern)),
        ("target_modules", target_modules),
        ("task_type", json!("CAUSAL_LM")),
        ("use_dora", json!(config.use_dora)),
        ("use_rslora", json!(config.use_rslora)),
    ]
    .into();
    json!(keys)
}

/// Writes whole numbers without a fraction: PEFT declares `lora_alpha` as an integer.
fn number(value: f64) -> Value {
    #[allow(clippy::cast_possible_truncation)] // checked in the line that follows
    let whole = value as i64;
    #[allow(clippy::cast_precision_loss, clippy::float_cmp)]
    if whole as f64 == value { json!(whole) } else { json!(value) }
}

/// Reads `adapter_config.json` and the base model's name in it; `modules` are the module names of the tensors.
///
/// # Errors
/// Every setting that this trainer does not support.
pub(super) fn from_json<'a>(
    text: &str,
    modules: impl Iterator<Item = &'a String>,
) -> Result<(LoraConfig, Option<String>), Vec<String>> {
    let object = match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(object)) => object,
        Ok(_) => return Err(vec!["not a JSON object".to_owned()]),
        Err(error) => return Err(vec![format!("not valid JSON: {error}")]),
    };
    let mut reader = Reader { object, problems: Vec::new() };
    reader.refuse_other_methods();

    let default = LoraConfig::default();
    let mut config = LoraConfig {
        // PEFT's own defaults, for missing keys.
        r: reader.take("r", "a whole number from 1", count).unwrap_or(8),
        lora_alpha: reader.take("lora_alpha", "a number above 0", positive).unwrap_or(8.0),
        lora_dropout: reader.take("lora_dropout", "a number in [0, 1)", share).unwrap_or(0.0),
        target_modules: default.target_modules,
        use_rslora: reader.take("use_rslora", "true or false", Value::as_bool).unwrap_or(false),
        use_dora: false,
        init_lora_weights: reader.init_lora_weights(),
        layers_to_transform: reader.layers_to_transform(),
        rank_pattern: reader.pattern("rank_pattern", count),
        alpha_pattern: reader.pattern("alpha_pattern", positive),
        loraplus_lr_ratio: None,
    };
    let targets = reader.target_modules();
    let excludes = reader.object.remove("exclude_modules").is_some_and(|value| !is_empty(&value));
    config.target_modules = match targets {
        Some(targets) if !excludes => targets,
        // PEFT chose the modules by model, or some are excluded: take the modules from the tensors.
        _ => TargetModules::Names(modules.cloned().collect()),
    };
    let base = reader.take("base_model_name_or_path", "a name", |value| value.as_str().map(str::to_owned));
    reader.refuse_unknown();
    if reader.problems.is_empty() { Ok((config, base)) } else { Err(reader.problems) }
}

fn count(value: &Value) -> Option<usize> {
    value.as_u64().filter(|count| *count > 0).and_then(|count| usize::try_from(count).ok())
}

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| *number > 0.0)
}

fn share(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| (0.0..1.0).contains(number))
}

/// Null, false or empty: treated as absent.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// Removes the known keys from the object; the keys that are left are unknown.
struct Reader {
    object: Map<String, Value>,
    problems: Vec<String>,
}

impl Reader {
    fn take<T>(&mut self, key: &str, expected: &str, read: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let value = self.object.remove(key).filter(|value| !value.is_null())?;
        let taken = read(&value);
        if taken.is_none() {
            self.problems.push(format!("`{key}` = {value}, expected {expected}"));
        }
        taken
    }

    /// A key with one supported value; a missing key means the same value.
    fn only(&mut self, key: &str, supported: &Value, hint: &str) {
        let value = self.object.remove(key).filter(|value| !value.is_null());
        if let Some(value) = value.filter(|value| value != supported) {
            self.problems.push(format!("`{key}` = {value} is not supported, expected {supported}: {hint}"));
        }
    }

    fn refuse_other_methods(&mut self) {
        match self.object.remove("peft_type") {
            Some(Value::String(kind)) if kind == "LORA" => {}
            Some(other) => self.problems.push(format!("`peft_type` = {other} is not supported, expected \"LORA\"")),
            None => self.problems.push("`peft_type` is missing, expected \"LORA\"".to_owned()),
        }
        self.only("task_type", &json!("CAUSAL_LM"), "adapters of other tasks bring a head of their own");
        self.only("bias", &json!("none"), "trained biases have no place in this model");
        self.only("use_dora", &json!(false), "DoRA adapters carry a magnitude vector");
        self.only("fan_in_fan_out", &json!(false), "weights are [out, in] here");
        self.only("lora_bias", &json!(false), "B has no bias here");
        if let Some(modules) = self.object.remove("modules_to_save").filter(|value| !is_empty(value)) {
            let message = format!("`modules_to_save` = {modules} is not supported: only low-rank updates are");
            self.problems.push(message);
        }
    }

    fn init_lora_weights(&mut self) -> InitLoraWeights {
        match self.object.remove("init_lora_weights") {
            Some(Value::String(name)) => match name.as_str() {
                "gaussian" => return InitLoraWeights::Gaussian,
                "eva" | "orthogonal" => {}
                _ => self.problems.push(format!(
                    "`init_lora_weights` = \"{name}\" is not supported: it changes the base weights too\n    hint: \
                     convert the adapter with `path_initial_model_for_weight_conversion` of PEFT's save_pretrained"
                )),
            },
            None | Some(Value::Null | Value::Bool(_)) => {}
            Some(other) => self.problems.push(format!("`init_lora_weights` = {other}, expected true or a name")),
        }
        InitLoraWeights::Kaiming
    }

    fn layers_to_transform(&mut self) -> Option<Vec<usize>> {
        let layer = |value: &Value| value.as_u64().and_then(|layer| usize::try_from(layer).ok());
        let layers = self.take("layers_to_transform", "a layer number or a list of them", |value| match value {
            Value::Array(layers) => layers.iter().map(layer).collect(),
            single => layer(single).map(|layer| vec![layer]),
        });
        match self.object.remove("layers_pattern") {
            Some(Value::String(pattern)) if pattern == "layers" => {}
            Some(Value::Array(patterns)) if patterns.iter().all(|pattern| pattern == "layers") => {}
            Some(other) if !is_empty(&other) => {
                self.problems.push(format!("`layers_pattern` = {other}, expected \"layers\" or null"));
            }
            _ => {}
        }
        layers.filter(|layers| !layers.is_empty())
    }

    fn pattern<T>(&mut self, key: &str, read: impl Fn(&Value) -> Option<T>) -> BTreeMap<String, T> {
        let mut pattern = BTreeMap::new();
        match self.object.remove(key) {
            Some(Value::Object(entries)) => {
                for (name, value) in entries {
                    match read(&value) {
                        Some(value) => drop(pattern.insert(name, value)),
                        None => self.problems.push(format!("`{key}.{name}` = {value}, expected a number above 0")),
                    }
                }
            }
            None | Some(Value::Null) => {}
            Some(other) => self.problems.push(format!("`{key}` = {other}, expected an object")),
        }
        pattern
    }

    fn target_modules(&mut self) -> Option<TargetModules> {
        let expected = "a list of names, a regular expression or \"all-linear\"";
        self.take("target_modules", expected, |value| match value {
            Value::String(name) if name == "all-linear" => Some(TargetModules::AllLinear),
            Value::String(regex) => Some(TargetModules::Regex(regex.clone())),
            Value::Array(names) => {
                let names: Option<Vec<String>> = names.iter().map(|name| name.as_str().map(str::to_owned)).collect();
                names.map(|mut names| {
                    // PEFT writes a set, in random order.
                    names.sort();
                    TargetModules::Names(names)
                })
            }
            _ => None,
        })
    }

    /// Refuses unknown keys, which may change the computation, unless they have no effect or are switched off.
    fn refuse_unknown(&mut self) {
        for (key, value) in &self.object {
            if !WITHOUT_EFFECT.contains(&key.as_str()) && !is_empty(value) {
                self.problems.push(format!("`{key}` = {value} is not supported"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules() -> Vec<String> {
        vec!["model.layers.0.self_attn.q_proj".into(), "model.layers.1.self_attn.q_proj".into()]
    }

    fn read(text: &str) -> Result<LoraConfig, Vec<String>> {
        from_json(text, modules().iter()).map(|(config, _)| config)
    }

    #[test]
    fn the_keys_are_the_long_known_ones_and_come_back_as_they_were() {
        let config = LoraConfig {
            r: 16,
            lora_alpha: 24.5,
            lora_dropout: 0.05,
            target_modules: TargetModules::Names(vec!["q_proj".into(), "v_proj".into()]),
            use_rslora: true,
            init_lora_weights: InitLoraWeights::Gaussian,
            layers_to_transform: Some(vec![0, 1]),
            rank_pattern: [("v_proj".to_owned(), 4)].into(),
            alpha_pattern: [("v_proj".to_owned(), 2.0)].into(),
            ..LoraConfig::default()
        };
        let json = to_json(&config, modules().iter(), "base");
        let text = serde_json::to_string_pretty(&json).unwrap();
        assert_eq!(read(&text).unwrap(), config);
        let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
        assert!(keys.is_sorted() && keys.len() == 18, "{keys:?}");
        assert!(text.contains("\"lora_alpha\": 24.5") && text.contains("\"v_proj\": 2\n"), "{text}");
        assert_eq!(json["base_model_name_or_path"], "base");
    }

    #[test]
    fn all_linear_is_written_as_names_and_a_regex_with_layers_as_modules() {
        let json = to_json(&LoraConfig::default(), modules().iter(), "base");
        let all = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
        assert_eq!(json["target_modules"], json!(all));
        assert_eq!(json["lora_alpha"], json!(16));
        let mut config =
            LoraConfig { target_modules: TargetModules::Regex(".*q_proj".into()), ..LoraConfig::default() };
        assert_eq!(to_json(&config, modules().iter(), "base")["target_modules"], ".*q_proj");
        config.layers_to_transform = Some(vec![0, 1]);
        let json = to_json(&config, modules().iter(), "base");
        assert_eq!(json["target_modules"], json!(modules()));
        assert_eq!(json["layers_to_transform"], Value::Null);
    }

    #[test]
    fn keys_of_newer_versions_are_read_over_where_they_are_switched_off() {
        let text = r#"{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "auto_mapping": null,
            "target_modules": ["v_proj", "q_proj"], "peft_version": "0.21.2", "megatron_core": "megatron.core",
            "qalora_group_size": 16, "use_qalora": false, "layer_replication": null, "loftq_config": {},
            "trainable_token_indices": null, "use_bdlora": null, "lora_bias": false, "some_future_key": []}"#;
        let config = read(text).unwrap();
        assert_eq!(config.target_modules, TargetModules::Names(vec!["q_proj".into(), "v_proj".into()]));
        assert_eq!((config.r, config.lora_alpha, config.lora_dropout), (4, 8.0, 0.0));
    }

    #[test]
    fn modules_come_from_the_tensors_where_the_config_leaves_them_open() {
        let by_tensors = TargetModules::Names(modules());
        assert_eq!(read(r#"{"peft_type": "LORA"}"#).unwrap().target_modules, by_tensors);
        let text = r#"{"peft_type": "LORA", "target_modules": "all-linear", "exclude_modules": ["k_proj"]}"#;
        assert_eq!(read(text).unwrap().target_modules, by_tensors);
    }

    #[test]
    fn everything_that_would_compute_something_else_is_refused_at_once() {
        let text = r#"{"peft_type": "LOHA", "task_type": "SEQ_CLS", "bias": "all", "use_dora": true,
            "modules_to_save": ["lm_head"], "init_lora_weights": "pissa", "r": 0, "alora_invocation_tokens": [1],
            "layer_replication": [[0, 2]], "fan_in_fan_out": true, "rank_pattern": {"q_proj": "x"}}"#;
        let problems = read(text).unwrap_err().join("\n");
        for key in [
            "peft_type",
            "task_type",
            "bias",
            "use_dora",
            "modules_to_save",
            "init_lora_weights",
            "r",
            "alora_invocation_tokens",
            "layer_replication",
            "fan_in_fan_out",
            "rank_pattern.q_proj",
        ] {
            assert!(problems.contains(&format!("`{key}` = ")), "{key}: {problems}");
        }
        assert!(read("{").unwrap_err()[0].contains("not valid JSON"));
    }
}
