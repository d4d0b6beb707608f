//! Reads `config.json` with the defaults of transformers, and refuses settings that this trainer does not implement.

use std::path::Path;

use super::block::{Attention, Block, Gated, Heads, SITE_NAMES, Site, Sublayer, SublayerKind};
use super::families::{Biases, FAMILIES, Family, Windows};
use super::{ModelConfig, Rope, RopeScaling, stored};
use crate::schema::{Problem, Problems, Section, Value, read_json};
use crate::util::gguf::{self, GgufFile};

impl ModelConfig {
    /// Reads a `config.json`, or the shape in the metadata of a GGUF file.
    ///
    /// # Errors
    /// Where the file cannot be read, is not JSON, or describes a model that is not supported; every reason is listed.
    pub fn from_file(path: &Path) -> Result<Self, Problems> {
        if gguf::is_gguf(path) {
            return Self::from_gguf(&GgufFile::open(path)?);
        }
        let text = std::fs::read_to_string(path).map_err(|error| {
            let problem = Problem::new(format!("cannot read {}: {error}", path.display()));
            problem.hint("a model folder holds a config.json next to its weights")
        })?;
        Self::from_text(&path.display().to_string(), &text)
    }

    /// The config of a model: of its GGUF file, or of its folder.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file).
    pub fn from_model(model: &Path) -> Result<Self, Problems> {
        if gguf::is_gguf(model) { Self::from_file(model) } else { Self::from_file(&model.join("config.json")) }
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Where the text is not JSON, or describes a model that is not supported; every reason is listed.
    pub fn from_json(text: &str) -> Result<Self, Problems> {
        Self::from_text("config.json", text)
    }

    pub(super) fn from_text(file: &str, text: &str) -> Result<Self, Problems> {
        read_json(file, text, read)
    }
}

fn read(json: &mut Section) -> Option<ModelConfig> {
    let family = family(json)?;
    refuse_unsupported(json);

    let biases = biases(json, family);
    let vocab_size = json.required_count("vocab_size", 1..=1 << 24);
    let hidden_size = json.required_count("hidden_size", 1..=1 << 20);
    let intermediate_size = json.required_count("intermediate_size", 1..=1 << 22);
    let num_hidden_layers = json.required_count("num_hidden_layers", 1..=4096);
    let num_attention_heads = json.required_count("num_attention_heads", 1..=1 << 16);
    let max_position_embeddings = json.count("max_position_embeddings", family.max_position_embeddings, 1..=1 << 32);

    let default = family.num_key_value_heads.filter(|_| !json.has("num_key_value_heads"));
    let num_key_value_heads = json.count("num_key_value_heads", default.unwrap_or(num_attention_heads), 1..=1 << 16);
    let head_dim = family.head_dim.unwrap_or((hidden_size / num_attention_heads).max(1));
    let head_dim = json.count("head_dim", head_dim, 1..=1 << 16);
    if json.is_sound() {
        check_heads(json, hidden_size, num_attention_heads, num_key_value_heads, head_dim);
    }

    let (theta, scaling) = rope(json, max_position_embeddings);
    let heads = Heads {
        num_heads: num_attention_heads,
        num_kv_heads: num_key_value_heads,
        head_dim,
        #[expect(clippy::cast_precision_loss, reason = "a head is a few hundred wide at most")]
        scale: 1.0 / (head_dim as f64).sqrt(),
        window: None,
    };
    let of_window = |window| block(hidden_size, intermediate_size, Heads { window, ..heads }, biases, family.qk_norm);
    Some(ModelConfig {
        model_type: family.model_type.to_owned(),
        vocab_size,
        hidden_size,
        blocks: windows(json, family, num_hidden_layers).into_iter().map(of_window).collect(),
        ropes: vec![Rope { theta, scaling, head_dim }],
        max_position_embeddings,
        rms_norm_eps: json.number("rms_norm_eps", 1e-6, 0.0..=1.0),
        tie_word_embeddings: json.boolean("tie_word_embeddings", false),
        bos_token_id: tokens(json, "bos_token_id", family.bos_token_id, vocab_size).first().copied(),
        eos_token_ids: tokens(json, "eos_token_id", family.eos_token_id, vocab_size),
        initializer_range: json.number("initializer_range", 0.02, 0.0..=1.0),
        quantisation: stored::read(json),
    })
}

/// The family; `None` after a problem.
fn family(json: &mut Section) -> Option<&'static Family> {
    let model_type = json.value("model_type");
    let Some(family) = FAMILIES.iter().find(|family| model_type.and_then(Value::text) == Some(family.model_type))
    else {
        let found = model_type.map_or("is missing".to_owned(), |kind| format!("= {} is not supported", kind.shown()));
        let known = FAMILIES.each_ref().map(|family| format!("`{}`", family.model_type)).join(", ");
        let hint = "Llama 2, 3, 3.1 and 3.2, TinyLlama, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3 have these types";
        let problem = Problem::new(format!("`model_type` {found}, expected one of {known}"));
        json.reject("model_type", problem.hint(hint));
        return None;
    };
    let expected = format!("[\"{}\"]: only causal language models can be fine-tuned here", family.architecture);
    json.only("architectures", &expected, |names| {
        matches!(names, Value::Array(names) if names.iter().any(|name| name.value().text() == Some(family.architecture)))
    });
    Some(family)
}

/// Settings that change the computation in a way that is not implemented.
fn refuse_unsupported(json: &mut Section) {
    json.only("hidden_act", "\"silu\"", |value| matches!(value.text(), Some("silu" | "swish")));
    json.only("attention_dropout", "0.0", |value| value.number() == Some(0.0));
    json.only("partial_rotary_factor", "1.0", |value| value.number() == Some(1.0));
}

/// Whether the projections of an attention's input, that of its output and the feed-forward layers add a bias.
fn biases(json: &mut Section, family: &Family) -> [bool; 3] {
    let has_key = |key| match family.biases {
        Biases::None | Biases::QueryKeyValue => false,
        Biases::AttentionKey => key == "attention_bias",
        Biases::AttentionAndMlpKeys => true,
    };
    let mut flag = |key| {
        let is_set = json.boolean(key, false);
        if is_set && !has_key(key) {
            json.problem(key, format!("= true is not supported for `{}`", family.model_type));
        }
        is_set
    };
    let (attention, mlp) = (flag("attention_bias"), flag("mlp_bias"));
    [attention || family.biases == Biases::QueryKeyValue, attention, mlp]
}

/// The block that the families vary.
fn block(hidden: usize, intermediate_size: usize, heads: Heads, biases: [bool; 3], has_head_norms: bool) -> Block {
    let [of_qkv, of_output, of_mlp] = biases;
    let (query, key_value) = (heads.query_width(), heads.key_value_width());
    let sites = [
        ([query, hidden], of_qkv),
        ([key_value, hidden], of_qkv),
        ([key_value, hidden], of_qkv),
        ([hidden, query], of_output),
        ([intermediate_size, hidden], of_mlp),
        ([intermediate_size, hidden], of_mlp),
        ([hidden, intermediate_size], of_mlp),
    ];
    let attention = Attention { heads, rope: 0, has_head_norms, qkv: [0, 1, 2], output: 3 };
    let gated = Gated { intermediate_size, gate_up: [4, 5], down: 6 };
    let after = |norm, kind| Sublayer { norm_before: Some(norm), norm_after: None, kind };
    let named = SITE_NAMES.into_iter().zip(sites);
    Block {
        sites: named.map(|(name, (shape, has_bias))| Site { name: name.to_owned(), shape, has_bias }).collect(),
        sublayers: vec![
            after("input_layernorm", SublayerKind::Attention(attention)),
            after("post_attention_layernorm", SublayerKind::Gated(gated)),
        ],
    }
}

/// The window of each layer, from `sliding_window` and the keys that choose its layers.
fn windows(json: &mut Section, family: &Family, num_layers: usize) -> Vec<Option<usize>> {
    let (default, first) = match family.windows {
        Windows::Never => (None, 0),
        Windows::Everywhere(default) => (Some(default), 0),
        Windows::LaterLayers { .. } if !json.boolean("use_sliding_window", false) => (None, 0),
        Windows::LaterLayers { default, first } => (Some(default), json.count("max_window_layers", first, 0..=1 << 32)),
    };
    let is_null = json.has("sliding_window") && json.value("sliding_window").is_none();
    let window = default.filter(|_| !is_null).map(|default| json.count("sliding_window", default, 1..=1 << 32));
    let kinds = match json.value("layer_types") {
        Some(Value::Array(kinds)) if kinds.len() == num_layers => Some(kinds),
        None => None,
        Some(_) => {
            json.problem("layer_types", format!("must name one type for each of the {num_layers} layers"));
            None
        }
    };
    let mut windows = Vec::with_capacity(num_layers);
    for layer in 0..num_layers {
        let kind = kinds.map(|kinds| kinds[layer].value());
        let is_full = kind.map_or(layer < first, |kind| kind.text() == Some("full_attention"));
        let is_known =
            is_full || (window.is_some() && kind.is_none_or(|kind| kind.text() == Some("sliding_attention")));
        if let Some(kind) = kind.filter(|_| !is_known) {
            let message = format!("names {} for layer {layer}, which is not supported here", kind.shown());
            json.problem("layer_types", message);
            break;
        }
        windows.push(window.filter(|_| !is_full));
    }
    windows
}

/// A token id, a list of them, or null; the default where the key is absent.
fn tokens(json: &mut Section, key: &'static str, default: Option<u32>, vocab_size: usize) -> Vec<u32> {
    let default = default.filter(|token| !json.has(key) && (*token as usize) < vocab_size);
    let token = |value: &Value| match value {
        Value::Integer(token) => u32::try_from(*token).ok().filter(|token| (*token as usize) < vocab_size),
        _ => None,
    };
    let expected = format!("a token id below `vocab_size` = {vocab_size}");
    json.any(key, Vec::from_iter(default), &expected, |value| match value {
        Value::Array(tokens) => tokens.iter().map(|node| token(node.value())).collect::<Option<_>>().ok_or(None),
        single => token(single).map(|token| vec![token]).ok_or(None),
    })
}

/// Limit on the total width of all heads: with the other limits, it keeps parameter and byte counts far below 2^64.
const MAX_HEADS_WIDTH: usize = 1 << 22;

fn check_heads(json: &mut Section, hidden: usize, heads: usize, key_value_heads: usize, head_dim: usize) {
    if heads * head_dim > MAX_HEADS_WIDTH {
        let message = format!("= {heads} heads of `head_dim` = {head_dim}, expected at most {MAX_HEADS_WIDTH} in all");
        json.problem("num_attention_heads", message);
    }
    if !hidden.is_multiple_of(heads) {
        json.problem("hidden_size", format!("= {hidden} is not a multiple of `num_attention_heads` = {heads}"));
    }
    if !heads.is_multiple_of(key_value_heads) {
        let message = format!("= {heads} is not a multiple of `num_key_value_heads` = {key_value_heads}");
        json.problem("num_attention_heads", message);
    }
    if !head_dim.is_multiple_of(2) {
        json.problem("head_dim", format!("= {head_dim} is odd: rotary embeddings turn pairs of features"));
    }
}

/// `rope_theta` and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
fn rope(json: &mut Section, max_position_embeddings: usize) -> (f64, Option<RopeScaling>) {
    const THETA: std::ops::RangeInclusive<f64> = 1.0..=1e15;
    const FACTOR: std::ops::RangeInclusive<f64> = 1.0..=1e6;
    let outer = json.value("rope_theta").is_some().then(|| json.number("rope_theta", 10_000.0, THETA));
    let [new, old] = ["rope_parameters", "rope_scaling"]
        .map(|key| json.value(key).filter(|value| !matches!(value, Value::Table(table) if table.is_empty())));
    if old.is_some() && new.is_some() && old != new {
        json.problem("rope_parameters", "and `rope_scaling` differ; keep one of them");
    }
    let name = if new.is_some() { "rope_parameters" } else { "rope_scaling" };
    let mut rope = json.below(name, "an object or null");

    let theta = rope.number("rope_theta", outer.unwrap_or(10_000.0), THETA);
    if let Some(outer) = outer.filter(|outer| *outer != theta) {
        rope.problem("rope_theta", format!("= {theta} and `rope_theta` = {outer} differ; keep one"));
    }
    let [kind, old_kind] = ["rope_type", "type"].map(|key| rope.optional_string(key, None));
    if let (Some(kind), Some(old)) = (&kind, old_kind.as_ref().filter(|old| Some(*old) != kind.as_ref())) {
        rope.problem("rope_type", format!("= \"{kind}\" and `type` = \"{old}\" differ; keep one of them"));
    }
    let scaling = match kind.or(old_kind).as_deref() {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: rope.required_number("factor", FACTOR) }),
        Some("llama3") => {
            let low_freq_factor = rope.required_number("low_freq_factor", 1e-6..=1e6);
            let high_freq_factor = rope.required_number("high_freq_factor", 1e-6..=1e6);
            if rope.is_sound() && high_freq_factor <= low_freq_factor {
                let message = format!("= {high_freq_factor}, expected more than `low_freq_factor` = {low_freq_factor}");
                rope.problem("high_freq_factor", message);
            }
            let original_max_position_embeddings =
                rope.count("original_max_position_embeddings", max_position_embeddings, 1..=1 << 32);
            let factor = rope.required_number("factor", FACTOR);
            Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings })
        }
        Some(other) => {
            let message = format!("= \"{other}\" is not supported, expected `default`, `linear` or `llama3`");
            rope.problem("rope_type", message);
            None
        }
    };
    (theta, scaling)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4"#;

    fn with(more: &str) -> Result<ModelConfig, Problems> {
        ModelConfig::from_json(&format!("{BASE}{more}}}"))
    }

    fn refusal(more: &str) -> String {
        with(more).unwrap_err().to_string()
    }

    fn windows_of(config: &ModelConfig) -> Vec<Option<usize>> {
        config.blocks.iter().map(|block| block.attention().unwrap().heads.window).collect()
    }

    fn num_kv_heads(config: &ModelConfig) -> usize {
        config.blocks[0].attention().unwrap().heads.num_kv_heads
    }

    /// The linear layers of the first block that add a bias.
    fn biases_of(config: &ModelConfig) -> Vec<&str> {
        config.blocks[0].sites.iter().filter(|site| site.has_bias).map(|site| &*site.name).collect()
    }

    #[test]
    fn a_silent_config_has_the_defaults_of_transformers() {
        let config = with("").unwrap();
        let heads = config.blocks[0].attention().unwrap().heads;
        assert_eq!((heads.num_kv_heads, heads.head_dim, config.max_position_embeddings), (4, 16, 2048));
        assert_eq!((config.ropes[0].theta, config.rms_norm_eps, config.initializer_range), (10_000.0, 1e-6, 0.02));
        assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(1), &[2][..]));
        assert_eq!((config.ropes[0].scaling, config.tie_word_embeddings), (None, false));
        assert_eq!((windows_of(&config), biases_of(&config)), (vec![None; 2], vec![]));
        assert!(!config.blocks[0].attention().unwrap().has_head_norms);
    }

    #[test]
    fn mistral_has_its_own_defaults_and_null_turns_the_window_off() {
        let mistral = |more: &str| {
            let text =
                format!("{BASE}{more}}}").replace("\"llama\"", "\"mistral\"").replace("heads\": 4", "heads\": 16");
            ModelConfig::from_json(&text).unwrap()
        };
        let config = mistral("");
        assert_eq!((num_kv_heads(&config), windows_of(&config)), (8, vec![Some(4096); 2]));
        assert_eq!(config.max_position_embeddings, 131_072);
        let config = mistral(r#", "sliding_window": null, "num_key_value_heads": null"#);
        assert_eq!((num_kv_heads(&config), windows_of(&config)), (16, vec![None; 2]));
    }

    #[test]
    fn qwen_has_biases_norms_of_heads_and_windows_where_its_config_says() {
        let qwen = |kind: &str, more: &str| {
            let text =
                format!("{BASE}, \"num_key_value_heads\": 2{more}}}").replace("\"llama\"", &format!("\"{kind}\""));
            ModelConfig::from_json(&text)
        };
        let config = qwen("qwen2", "").unwrap();
        assert_eq!(biases_of(&config), ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
        let attention = config.blocks[0].attention().unwrap();
        assert_eq!(
            (attention.has_head_norms, attention.heads.head_dim, windows_of(&config)),
            (false, 16, vec![None; 2])
        );
        assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![]));
        let config = qwen("qwen3", "").unwrap();
        let attention = config.blocks[0].attention().unwrap();
        assert_eq!((biases_of(&config), attention.has_head_norms, attention.heads.head_dim), (vec![], true, 128));
        let windows =
            |more: &str| windows_of(&qwen("qwen2", &format!(r#", "use_sliding_window": true{more}"#)).unwrap());
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
        assert_eq!(old.ropes[0].theta, 5e5);
        let expected = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        assert_eq!(old.ropes[0].scaling, Some(expected));
        let plain = with(r#", "rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}"#).unwrap();
        assert_eq!((plain.ropes[0].theta, plain.ropes[0].scaling), (2e4, None));
        let linear = with(r#", "rope_scaling": {"type": "linear", "factor": 2}"#).unwrap();
        assert_eq!(linear.ropes[0].scaling, Some(RopeScaling::Linear { factor: 2.0 }));
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
        ] {
            assert!(refusal(more).contains(part), "{}", refusal(more));
        }
    }

    #[test]
    fn every_impossible_shape_is_listed_at_once() {
        let text = r#"{"model_type": "llama", "vocab_size": 0, "hidden_size": -3, "intermediate_size": 1e30,
            "num_hidden_layers": "two", "tie_word_embeddings": 1}"#;
        let problems = ModelConfig::from_json(text).unwrap_err().to_string();
        for key in [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "tie_word_embeddings",
        ] {
            assert!(problems.contains(&format!("config.json: `{key}` ")), "{key}: {problems}");
        }
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
