//! Reads `config.json` with the defaults of transformers, and refuses settings that this trainer does not implement.

use std::path::Path;

use serde_json::{Map, Value};

use super::families::{Biases, FAMILIES, Family, Windows};
use super::problems::{ConfigError, ConfigProblem, Problems, Reader};
use super::{Linear, ModelConfig, RopeScaling};

impl ModelConfig {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// Where the file cannot be read, is not JSON, or describes a model that is not supported.
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        parse(&path.display().to_string(), &text)
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Where the text is not JSON, or describes a model that is not supported.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        parse("config.json", text)
    }
}

fn parse(place: &str, text: &str) -> Result<ModelConfig, ConfigError> {
    let value: Value =
        serde_json::from_str(text).map_err(|source| ConfigError::Syntax { place: place.to_owned(), source })?;
    let empty = Map::new();
    let mut reader = Reader { object: value.as_object().unwrap_or(&empty), problems: Vec::new() };
    if !value.is_object() {
        reader.problem("(whole file)", "is not a JSON object", None);
    }
    let config = read(&mut reader);
    if reader.problems.is_empty() {
        Ok(config)
    } else {
        Err(ConfigError::Refused { place: place.to_owned(), problems: Problems(reader.problems) })
    }
}

fn read(reader: &mut Reader) -> ModelConfig {
    let Some(family) = family(reader) else { return placeholder() };
    refuse_unsupported(reader);

    let biases = biases(reader, family);
    let vocab_size = reader.count("vocab_size", 1..=1 << 24, None);
    let hidden_size = reader.count("hidden_size", 1..=1 << 20, None);
    let intermediate_size = reader.count("intermediate_size", 1..=1 << 22, None);
    let num_hidden_layers = reader.count("num_hidden_layers", 1..=4096, None);
    let num_attention_heads = reader.count("num_attention_heads", 1..=1 << 16, None);
    let max_position_embeddings =
        reader.count("max_position_embeddings", 1..=1 << 32, Some(family.max_position_embeddings));

    let default = match family.num_key_value_heads {
        Some(heads) if !reader.object.contains_key("num_key_value_heads") => heads,
        _ => num_attention_heads,
    };
    let num_key_value_heads = reader.count("num_key_value_heads", 1..=1 << 16, Some(default));
    let head_dim = family.head_dim.unwrap_or((hidden_size / num_attention_heads).max(1));
    let head_dim = reader.count("head_dim", 1..=1 << 16, Some(head_dim));
    if reader.problems.is_empty() {
        check_heads(reader, hidden_size, num_attention_heads, num_key_value_heads, head_dim);
    }

    let (rope_theta, rope_scaling) = rope(reader, max_position_embeddings);
    ModelConfig {
        model_type: family.model_type.to_owned(),
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        max_position_embeddings,
        rms_norm_eps: reader.number("rms_norm_eps", 0.0..=1.0, Some(1e-6)),
        rope_theta,
        rope_scaling,
        tie_word_embeddings: reader.flag("tie_word_embeddings"),
        windows: windows(reader, family, num_hidden_layers),
        biases,
        qk_norm: family.qk_norm,
        bos_token_id: reader.tokens("bos_token_id", family.bos_token_id, vocab_size).first().copied(),
        eos_token_ids: reader.tokens("eos_token_id", family.eos_token_id, vocab_size),
        initializer_range: reader.number("initializer_range", 0.0..=1.0, Some(0.02)),
    }
}

/// A placeholder for a config with an unknown family, which is refused anyway.
fn placeholder() -> ModelConfig {
    ModelConfig {
        model_type: String::new(),
        vocab_size: 0,
        hidden_size: 0,
        intermediate_size: 0,
        num_hidden_layers: 0,
        num_attention_heads: 0,
        num_key_value_heads: 0,
        head_dim: 0,
        max_position_embeddings: 0,
        rms_norm_eps: 0.0,
        rope_theta: 0.0,
        rope_scaling: None,
        tie_word_embeddings: false,
        windows: Vec::new(),
        biases: [false; 7],
        qk_norm: false,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        initializer_range: 0.0,
    }
}

fn family(reader: &mut Reader) -> Option<&'static Family> {
    let known = FAMILIES.each_ref().map(|family| format!("`{}`", family.model_type)).join(", ");
    let hint = "Llama 2, 3, 3.1 and 3.2, TinyLlama, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3 have these types";
    let Some(model_type) = reader.object.get("model_type") else {
        reader.problem("model_type", &format!("is missing, expected one of {known}"), Some(hint));
        return None;
    };
    let Some(family) = FAMILIES.iter().find(|family| model_type == family.model_type) else {
        reader.problem("model_type", &format!("= {model_type} is not supported, expected one of {known}"), Some(hint));
        return None;
    };
    match reader.object.get("architectures") {
        None | Some(Value::Null) => {}
        Some(Value::Array(names)) if names.iter().any(|name| name == family.architecture) => {}
        Some(other) => reader.problem(
            "architectures",
            &format!("= {other} is not supported, expected [\"{}\"]", family.architecture),
            Some("only causal language models can be fine-tuned here"),
        ),
    }
    Some(family)
}

/// Settings that change the computation in a way that is not implemented.
fn refuse_unsupported(reader: &mut Reader) {
    match reader.object.get("hidden_act") {
        None => {}
        Some(Value::String(name)) if name == "silu" || name == "swish" => {}
        Some(other) => reader.problem("hidden_act", &format!("= {other} is not supported, expected \"silu\""), None),
    }
    match reader.object.get("attention_dropout") {
        None | Some(Value::Null) => {}
        Some(value) if value.as_f64() == Some(0.0) => {}
        Some(other) => {
            reader.problem("attention_dropout", &format!("= {other} is not supported, expected 0.0"), None);
        }
    }
    match reader.object.get("partial_rotary_factor") {
        None | Some(Value::Null) => {}
        Some(value) if value.as_f64() == Some(1.0) => {}
        Some(other) => {
            reader.problem("partial_rotary_factor", &format!("= {other} is not supported, expected 1.0"), None);
        }
    }
    if let Some(quantization) = reader.object.get("quantization_config").filter(|value| !value.is_null()) {
        let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
        reader.problem(
            "quantization_config",
            &format!("is present (method: {method}): weights that are already quantised cannot be trained on"),
            Some("use the repository with the original bf16 or f16 weights"),
        );
    }
}

fn biases(reader: &mut Reader, family: &Family) -> [bool; 7] {
    use Linear::{Key, Query, Value};
    let has_key = |key| match family.biases {
        Biases::None | Biases::QueryKeyValue => false,
        Biases::AttentionKey => key == "attention_bias",
        Biases::AttentionAndMlpKeys => true,
    };
    let mut flag = |key| {
        let is_set = reader.flag(key);
        if is_set && !has_key(key) {
            reader.problem(key, &format!("= true is not supported for `{}`", family.model_type), None);
        }
        is_set
    };
    let (attention, mlp) = (flag("attention_bias"), flag("mlp_bias"));
    Linear::ALL.map(|linear| match linear {
        Query | Key | Value => attention || family.biases == Biases::QueryKeyValue,
        Linear::Output => attention,
        Linear::Gate | Linear::Up | Linear::Down => mlp,
    })
}

/// The window of each layer, from `sliding_window` and the keys that choose its layers.
fn windows(reader: &mut Reader, family: &Family, num_layers: usize) -> Vec<Option<usize>> {
    let (default, first) = match family.windows {
        Windows::Never => (None, 0),
        Windows::Everywhere(default) => (Some(default), 0),
        Windows::LaterLayers { .. } if !reader.flag("use_sliding_window") => (None, 0),
        Windows::LaterLayers { default, first } => {
            (Some(default), reader.count("max_window_layers", 0..=1 << 32, Some(first)))
        }
    };
    let window = match (reader.object.get("sliding_window"), default) {
        (_, None) | (Some(Value::Null), _) => None,
        (None, Some(default)) => Some(default),
        (Some(_), Some(_)) => Some(reader.count("sliding_window", 1..=1 << 32, None)),
    };
    let kinds = match reader.object.get("layer_types") {
        Some(Value::Array(kinds)) if kinds.len() == num_layers => Some(kinds),
        None | Some(Value::Null) => None,
        Some(_) => {
            reader.problem("layer_types", &format!("must name one type for each of the {num_layers} layers"), None);
            None
        }
    };
    let mut windows = Vec::with_capacity(num_layers);
    for layer in 0..num_layers {
        let kind = kinds.map(|kinds| &kinds[layer]);
        let is_full = kind.map_or(layer < first, |kind| kind == "full_attention");
        if let Some(kind) = kind.filter(|kind| !is_full && (window.is_none() || *kind != "sliding_attention")) {
            let message = format!("names {kind} for layer {layer}, which is not supported here");
            reader.problem("layer_types", &message, None);
            break;
        }
        windows.push(window.filter(|_| !is_full));
    }
    windows
}

/// Limit on the total width of all heads: with the other limits, it keeps parameter and byte counts far below 2^64.
const MAX_HEADS_WIDTH: usize = 1 << 22;

fn check_heads(reader: &mut Reader, hidden: usize, heads: usize, key_value_heads: usize, head_dim: usize) {
    if heads * head_dim > MAX_HEADS_WIDTH {
        let message = format!("= {heads} heads of `head_dim` = {head_dim}, expected at most {MAX_HEADS_WIDTH} in all");
        reader.problem("num_attention_heads", &message, None);
    }
    if !hidden.is_multiple_of(heads) {
        let message = format!("= {hidden} is not a multiple of `num_attention_heads` = {heads}");
        reader.problem("hidden_size", &message, None);
    }
    if !heads.is_multiple_of(key_value_heads) {
        let message = format!("= {heads} is not a multiple of `num_key_value_heads` = {key_value_heads}");
        reader.problem("num_attention_heads", &message, None);
    }
    if !head_dim.is_multiple_of(2) {
        let message = format!("= {head_dim} is odd: rotary embeddings turn pairs of features");
        reader.problem("head_dim", &message, None);
    }
}

/// `rope_theta` and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
fn rope(reader: &mut Reader, max_position_embeddings: usize) -> (f64, Option<RopeScaling>) {
    let empty = Map::new();
    let mut found: Option<(&str, &Map<String, Value>)> = None;
    for key in ["rope_scaling", "rope_parameters"] {
        match reader.object.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::Object(object)) if object.is_empty() => {}
            Some(Value::Object(object)) => match found {
                Some((_, first)) if first != object => {
                    reader.problem(key, "and `rope_scaling` differ; keep one of them", None);
                }
                _ => found = Some((key, object)),
            },
            Some(other) => reader.problem(key, &format!("= {other}, expected an object or null"), None),
        }
    }
    let (name, object) = found.unwrap_or(("rope_parameters", &empty));
    let mut inner = Reader { object, problems: Vec::new() };

    let mut theta = reader.number("rope_theta", 1.0..=1e15, Some(10_000.0));
    if object.contains_key("rope_theta") {
        let nested = inner.number("rope_theta", 1.0..=1e15, None);
        #[allow(clippy::float_cmp)] // the same text must have been written twice
        if reader.object.contains_key("rope_theta") && nested != theta {
            inner.problem("rope_theta", &format!("= {nested} and `rope_theta` = {theta} differ; keep one"), None);
        }
        theta = nested;
    }
    let kind = match (object.get("rope_type"), object.get("type")) {
        (Some(first), Some(second)) if first != second => {
            inner.problem("rope_type", &format!("= {first} and `type` = {second} differ; keep one of them"), None);
            None
        }
        (Some(Value::String(kind)), _) | (None, Some(Value::String(kind))) => Some(kind.as_str()),
        (None, None) => Some("default"),
        (Some(other), _) | (None, Some(other)) => {
            inner.problem("rope_type", &format!("= {other}, expected a name"), None);
            None
        }
    };
    let factor = 1.0..=1e6;
    let scaling = match kind {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: inner.number("factor", factor, None) }),
        Some("llama3") => {
            let low_freq_factor = inner.number("low_freq_factor", 1e-6..=1e6, None);
            let high_freq_factor = inner.number("high_freq_factor", 1e-6..=1e6, None);
            if inner.problems.is_empty() && high_freq_factor <= low_freq_factor {
                let message = format!("= {high_freq_factor}, expected more than `low_freq_factor` = {low_freq_factor}");
                inner.problem("high_freq_factor", &message, None);
            }
            Some(RopeScaling::Llama3 {
                factor: inner.number("factor", factor, None),
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: inner.count(
                    "original_max_position_embeddings",
                    1..=1 << 32,
                    Some(max_position_embeddings),
                ),
            })
        }
        Some(other) => {
            let message = format!("= \"{other}\" is not supported, expected `default`, `linear` or `llama3`");
            inner.problem("rope_type", &message, None);
            None
        }
    };
    let problems = inner.problems;
    reader.problems.extend(
        problems.into_iter().map(|problem| ConfigProblem { key: format!("{name}.{}", problem.key), ..problem }),
    );
    (theta, scaling)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4"#;

    fn with(more: &str) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_json(&format!("{BASE}{more}}}"))
    }

    fn refusal(more: &str) -> String {
        with(more).unwrap_err().to_string()
    }

    #[test]
    fn a_silent_config_has_the_defaults_of_transformers() {
        let config = with("").unwrap();
        assert_eq!((config.num_key_value_heads, config.head_dim, config.max_position_embeddings), (4, 16, 2048));
        assert_eq!((config.rope_theta, config.rms_norm_eps, config.initializer_range), (10_000.0, 1e-6, 0.02));
        assert_eq!((config.bos_token_id, config.eos_token_ids), (Some(1), vec![2]));
        assert_eq!((config.rope_scaling, config.windows, config.tie_word_embeddings), (None, vec![None; 2], false));
        assert_eq!((config.biases, config.qk_norm), ([false; 7], false));
    }

    #[test]
    fn mistral_has_its_own_defaults_and_null_turns_the_window_off() {
        let mistral = |more: &str| {
            let text =
                format!("{BASE}{more}}}").replace("\"llama\"", "\"mistral\"").replace("heads\": 4", "heads\": 16");
            ModelConfig::from_json(&text).unwrap()
        };
        let config = mistral("");
        assert_eq!((config.num_key_value_heads, config.windows), (8, vec![Some(4096); 2]));
        assert_eq!(config.max_position_embeddings, 131_072);
        let config = mistral(r#", "sliding_window": null, "num_key_value_heads": null"#);
        assert_eq!((config.num_key_value_heads, config.windows), (16, vec![None; 2]));
    }

    #[test]
    fn qwen_has_biases_norms_of_heads_and_windows_where_its_config_says() {
        let qwen = |kind: &str, more: &str| {
            let text =
                format!("{BASE}, \"num_key_value_heads\": 2{more}}}").replace("\"llama\"", &format!("\"{kind}\""));
            ModelConfig::from_json(&text)
        };
        let config = qwen("qwen2", "").unwrap();
        assert_eq!(config.biases, [true, true, true, false, false, false, false]);
        assert_eq!((config.qk_norm, config.head_dim, config.windows), (false, 16, vec![None; 2]));
        assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![]));
        let config = qwen("qwen3", "").unwrap();
        assert_eq!((config.biases, config.qk_norm, config.head_dim), ([false; 7], true, 128));
        let windows = |more: &str| qwen("qwen2", &format!(r#", "use_sliding_window": true{more}"#)).unwrap().windows;
        assert_eq!(windows(""), [None, None]);
        assert_eq!(windows(r#", "max_window_layers": 1"#), [None, Some(4096)]);
        assert_eq!(
            windows(r#", "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]"#),
            [Some(7), None]
        );
        let refused = qwen("qwen2", r#", "attention_bias": true"#).unwrap_err().to_string();
        assert!(refused.contains("`attention_bias` = true is not supported for `qwen2`"), "{refused}");
    }

    #[test]
    fn rope_of_transformers_4_and_5_read_the_same() {
        let inner = r#""factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192"#;
        let old = with(&format!(r#", "rope_theta": 5e5, "rope_scaling": {{"type": "llama3", {inner}}}"#)).unwrap();
        let new =
            with(&format!(r#", "rope_parameters": {{"rope_theta": 5e5, "rope_type": "llama3", {inner}}}"#)).unwrap();
        assert_eq!(old, new);
        assert_eq!(old.rope_theta, 5e5);
        let expected = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        assert_eq!(old.rope_scaling, Some(expected));
        let plain = with(r#", "rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}"#).unwrap();
        assert_eq!((plain.rope_theta, plain.rope_scaling), (2e4, None));
        let linear = with(r#", "rope_scaling": {"type": "linear", "factor": 2}"#).unwrap();
        assert_eq!(linear.rope_scaling, Some(RopeScaling::Linear { factor: 2.0 }));
    }

    #[test]
    fn rope_kinds_that_are_not_implemented_are_refused_by_name() {
        for kind in ["dynamic", "yarn", "longrope"] {
            let message = refusal(&format!(r#", "rope_scaling": {{"rope_type": "{kind}", "factor": 2.0}}"#));
            assert!(message.contains(&format!("`rope_scaling.rope_type` = \"{kind}\" is not supported")), "{message}");
        }
        assert!(refusal(r#", "rope_scaling": {"rope_type": "linear", "type": "llama3"}"#).contains("differ"));
        assert!(refusal(r#", "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}"#).contains("differ"));
        assert!(refusal(r#", "rope_scaling": {"type": "linear"}"#).contains("`rope_scaling.factor` is missing"));
    }

    #[test]
    fn end_tokens_are_a_number_a_list_or_null() {
        assert_eq!(with(r#", "eos_token_id": [7, 9]"#).unwrap().eos_token_ids, [7, 9]);
        let config = with(r#", "eos_token_id": null, "bos_token_id": null"#).unwrap();
        assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![], None));
        assert!(refusal(r#", "eos_token_id": 100"#).contains("`eos_token_id` = 100, expected a token id below"));
    }

    #[test]
    fn other_families_and_heads_are_refused_with_the_list_of_known_ones() {
        let gemma = ModelConfig::from_json(r#"{"model_type": "gemma2"}"#).unwrap_err().to_string();
        let expected = "= \"gemma2\" is not supported, expected one of `llama`, `mistral`, `qwen2`, `qwen3`";
        assert!(gemma.contains(expected), "{gemma}");
        assert!(ModelConfig::from_json("{}").unwrap_err().to_string().contains("`model_type` is missing"));
        assert!(ModelConfig::from_json("[]").unwrap_err().to_string().contains("not a JSON object"));
        assert!(ModelConfig::from_json("{").unwrap_err().to_string().contains("not valid JSON"));
        assert!(refusal(r#", "architectures": ["LlamaForSequenceClassification"]"#).contains("LlamaForCausalLM"));
    }

    #[test]
    fn settings_that_change_the_computation_are_refused() {
        for (more, part) in [
            (r#", "hidden_act": "gelu""#, "`hidden_act` = \"gelu\" is not supported, expected \"silu\""),
            (r#", "attention_dropout": 0.1"#, "`attention_dropout` = 0.1"),
            (r#", "partial_rotary_factor": 0.5"#, "`partial_rotary_factor` = 0.5"),
            (r#", "layer_types": ["full_attention", "sliding_attention"]"#, "names \"sliding_attention\" for layer 1"),
            (r#", "layer_types": ["full_attention"]"#, "must name one type for each of the 2 layers"),
            (r#", "quantization_config": {"quant_method": "gptq"}"#, "method: gptq"),
        ] {
            assert!(refusal(more).contains(part), "{}", refusal(more));
        }
    }

    #[test]
    fn every_impossible_shape_is_listed_at_once() {
        let text = r#"{"model_type": "llama", "vocab_size": 0, "hidden_size": -3, "intermediate_size": 1e30,
            "num_hidden_layers": "two", "tie_word_embeddings": 1}"#;
        let Err(ConfigError::Refused { problems, .. }) = ModelConfig::from_json(text) else { panic!("accepted") };
        let keys: Vec<&str> = problems.0.iter().map(|problem| problem.key.as_str()).collect();
        let expected = [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "tie_word_embeddings",
        ];
        assert!(expected.iter().all(|key| keys.contains(key)), "{keys:?}");
        let heads = refusal(r#", "num_key_value_heads": 3, "head_dim": 7"#);
        assert!(heads.contains("`num_attention_heads` = 4 is not a multiple of `num_key_value_heads` = 3"), "{heads}");
        assert!(heads.contains("`head_dim` = 7 is odd"), "{heads}");
        let text = format!("{BASE}}}").replace("64", "66");
        assert!(
            ModelConfig::from_json(&text).unwrap_err().to_string().contains("`hidden_size` = 66 is not a multiple")
        );
    }

    #[test]
    fn sizes_whose_product_is_no_number_are_refused() {
        let huge = r#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 65536, "intermediate_size": 96,
            "num_hidden_layers": 4096, "num_attention_heads": 65536, "head_dim": 65536}"#;
        let error = ModelConfig::from_json(huge).unwrap_err().to_string();
        assert!(error.contains("65536 heads of `head_dim` = 65536, expected at most 4194304 in all"), "{error}");
    }
}
