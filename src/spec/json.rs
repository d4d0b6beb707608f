//! Reads `config.json` with the defaults of transformers, and refuses settings that this trainer does not implement.

use std::path::Path;

use self::layers::{Layer, PartFactors, Widths};
use super::block::Activation;
use super::block::attention::{HeadWeights, Heads, QueryKeyNorms};
use super::families::{FAMILIES, LACKING, WRAPPERS};
use super::family::{Arrangement, AttentionExtra, Biases, Experts, Family, LatentWidths, NoRope, Scales, Wrapper};
use super::{ModelConfig, NormKind, QueryGrowth, SHARED_MLP_NAMES, stored};
use crate::schema::{Problem, Problems, Section, Value, read_json};
use crate::util::gguf::{self, GgufFile};

mod delta_net;
mod experts;
mod latent;
mod layers;
mod rope;
mod state_space;

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
    let (family, wrapper) = family(json)?;
    let Some(wrapper) = wrapper else { return Some(decoder(json, family)) };
    let mut config = if json.value("text_config").is_some() {
        let mut text = json.below("text_config", "an object");
        if family.model_type == "gemma3_text" {
            let null =
                "null: transformers caps the logits of this language model alone, and not inside a multimodal one";
            text.only("final_logit_softcapping", null, |_| false);
        }
        decoder(&mut text, family)
    } else {
        // The first of Qwen2-VL and their like have its keys beside the others.
        decoder(json, family)
    };
    config.nesting = Some(wrapper.nesting);
    config.num_deepstack_layers = deepstack_layers(json, family);
    config.tie_word_embeddings = json.boolean("tie_word_embeddings", config.tie_word_embeddings);
    if json.value("eos_token_id").is_some() {
        config.eos_token_ids = tokens(json, "eos_token_id", None, config.vocab_size);
    }
    config.quantisation = stored::read(json);
    Some(config)
}

/// How many layers add something at images, in a family that has such.
fn deepstack_layers(json: &mut Section, family: &Family) -> usize {
    if !matches!(family.model_type, "qwen3_vl_text" | "qwen3_vl_moe_text") {
        return 0;
    }
    match json.below("vision_config", "an object").value("deepstack_visual_indexes") {
        Some(Value::Array(layers)) => layers.len(),
        _ => 3,
    }
}

/// Width of feed-forward layers that are no mixtures.
fn feed_forward_width(json: &mut Section, family: &Family) -> usize {
    // Where all feed-forward layers are mixtures with a key of their own, it means nothing.
    let is_needed = |experts: Experts| experts.norm_topk_prob.is_some() || experts.intermediate_size.is_none();
    let is_needed = family.experts.is_none_or(is_needed) || family.is_gemma4();
    let is_needed = is_needed && family.model_type != "solar_open";
    if family.has_short_convs && family.experts.is_none() {
        lfm2_width(json)
    } else if family.is_gemma3n() {
        // By layer.
        1
    } else if family.has_chunks() {
        json.count("intermediate_size_mlp", 16_384, 1..=1 << 22)
    } else if family.names.gate_up == SHARED_MLP_NAMES[0] {
        // Without any, nothing stands beside the experts.
        let (default, least) = if family.state_spaces.is_some() { (1024, 1) } else { (0, 0) };
        json.count("shared_intermediate_size", default, least..=1 << 22)
    } else {
        count_or(json, "intermediate_size", (!is_needed).then_some(1), 1 << 22)
    }
}

/// Reads a language model.
fn decoder(json: &mut Section, family: &Family) -> ModelConfig {
    refuse_unsupported(json, family);
    let biases = biases(json, family);
    let vocab_size = count_or(json, "vocab_size", family.vocab_size, 1 << 24);
    let hidden = json.required_count("hidden_size", 1..=1 << 20);
    let intermediate = feed_forward_width(json, family);
    let kinds = if family.arrangement == Arrangement::OneEach { layers::kinds_of_each(json) } else { Vec::new() };
    let num_hidden_layers = if kinds.is_empty() {
        json.required_count(key(json, family, "num_hidden_layers"), 1..=4096)
    } else {
        kinds.len()
    };
    let max_position_embeddings = json.count("max_position_embeddings", family.max_position_embeddings, 1..=1 << 32);
    let [attention_cap, logit_soft_cap] = soft_caps(json, family);
    let latent = latent::widths(json, family, hidden);
    let mut heads = Heads { soft_cap: attention_cap, ..heads(json, family, hidden, latent) };
    let [embedding_scale, output_scale, logit_divisor] = multipliers(json, family, hidden, num_hidden_layers);
    let original = json.value("original_max_position_embeddings").is_some();
    let original = original.then(|| json.count("original_max_position_embeddings", 1, 1..=1 << 32));
    let mixtures = experts::mixtures(json, family, intermediate, num_hidden_layers);
    let delta_net = delta_net::shape(json, family);
    let qk_norms = family.qk_norms.filter(|norms| match (family.model_type, norms) {
        ("glm4_moe", _) | (_, QueryKeyNorms::ByHead(HeadWeights::Together)) => json.boolean("use_qk_norm", false),
        (_, QueryKeyNorms::Unweighted) => json.boolean("use_qk_norm", true),
        (_, QueryKeyNorms::ByHead(HeadWeights::Apart)) => json.boolean("qk_layernorm", false),
        _ => true,
    });
    let (short_conv, activation) = (short_conv(json, family), activation(json, family));
    let mut layers = if kinds.is_empty() {
        layers::layers(json, family, num_hidden_layers)
    } else {
        kinds.into_iter().map(Layer::alone).collect()
    };
    let of_spaces = family.state_spaces.as_ref().filter(|_| layers.iter().any(|layer| layer.has_other));
    let state_space = of_spaces.map(|keys| state_space::shape(json, keys, hidden));
    let gemma4 = layers::gemma4::read(json, family, &mut layers, heads);
    let head_dims = match latent {
        Some(LatentWidths { of_head: [_, turning, _], .. }) => [turning; 2],
        None => [gemma4.as_ref().map_or(heads.head_dim, |gemma4| gemma4.full.head_dim), heads.head_dim],
    };
    let facts = rope::RopeFacts { family, head_dims, longest: max_position_embeddings, original };
    let mut ropes = rope::ropes(json, facts);
    if family.no_rope == NoRope::Bases && !family.is_muse() {
        rope::base_of_layers(json, &mut ropes[0]);
    }
    if latent.is_some() {
        heads.scale *= latent::turn(json, &mut ropes[0]);
    }
    let layer_inputs = gemma4.as_ref().and_then(|gemma4| gemma4.layer_inputs(json, vocab_size));
    let widths = Widths {
        hidden,
        intermediate,
        heads,
        activation,
        delta_net,
        short_conv,
        state_space,
        latent,
        gemma4,
        qk_norms,
        norms: norms(json, family),
        biases,
        output_scale,
        mixtures,
        arrangement: arrangement(json, family),
        query_growths: [growth_without_rope(json, family), ropes[0].query_growth],
        factors: PartFactors::read(json, family),
    };
    let layers = layers.into_iter().enumerate();
    ModelConfig {
        model_type: family.model_type.to_owned(),
        vocab_size,
        num_new_rows: 0,
        hidden_size: hidden,
        blocks: layers.map(|(index, layer)| widths.block(family, index, layer)).collect(),
        ropes,
        layer_inputs,
        max_position_embeddings,
        last_norm: family.names.last_norm,
        norm_kind: family.norm_kind,
        rms_norm_eps: json.number(key(json, family, family.names.norm_eps), family.rms_norm_eps, 0.0..=1.0),
        post_norm_eps: family.is_muse().then(|| json.number("post_norm_eps", 1e-8, 0.0..=1.0)),
        has_norms_less_one: family.norms_less_one,
        embedding_scale,
        logit_divisor: logit_divisor.unwrap_or(1.0),
        logit_soft_cap,
        nesting: family.names.nesting,
        num_deepstack_layers: 0,
        tie_word_embeddings: {
            // LFM2's first configs.
            let tied = json.boolean("tie_word_embeddings", family.tie_word_embeddings);
            if family.has_short_convs { json.boolean("tie_embedding", tied) } else { tied }
        },
        bos_token_id: tokens(json, "bos_token_id", family.bos_token_id, vocab_size).first().copied(),
        eos_token_ids: tokens(json, "eos_token_id", family.eos_token_id, vocab_size),
        initializer_range: json.number("initializer_range", 0.02, 0.0..=1.0),
        quantisation: stored::read(json),
    }
}

/// What a config calls a key: the maker's own of EXAONE 3 has other names for some.
fn key(json: &Section, family: &Family, name: &'static str) -> &'static str {
    const OF_EXAONE: [(&str, &str); 3] = [
        ("num_hidden_layers", "num_layers"),
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "activation_function"),
    ];
    let other = OF_EXAONE.iter().find(|(ours, theirs)| *ours == name && json.has(theirs));
    other.filter(|_| family.model_type == "exaone").map_or(name, |(_, theirs)| theirs)
}

/// Names of the norms around sublayers.
fn norms(json: &mut Section, family: &Family) -> [[Option<&'static str>; 2]; 2] {
    let has_all = family.model_type != "hyperclovax" || json.boolean("use_post_norm", true);
    family.norms.map(|[before, after]| [before, after.filter(|_| has_all)])
}

/// How queries grow in layers without a rotary embedding.
fn growth_without_rope(json: &mut Section, family: &Family) -> Option<QueryGrowth> {
    // A number in the first configs.
    let is_off = |value: Option<&Value>| matches!(value, Some(Value::Boolean(false) | Value::Integer(0)));
    if !family.has_chunks() || is_off(json.value("attn_temperature_tuning")) || json.is_null("attn_temperature_tuning")
    {
        return None;
    }
    let (beta, period) = (json.number("attn_scale", 0.1, 0.0..=1e3), json.count("floor_scale", 8192, 1..=1 << 32));
    Some(QueryGrowth { beta, period, first: 1 })
}

/// The family, and what is around its language model; `None` after a problem.
fn family(json: &mut Section) -> Option<(&'static Family, Option<&'static Wrapper>)> {
    let name = json.value("model_type").and_then(Value::text).unwrap_or_default();
    let wrapper = WRAPPERS.iter().find(|wrapper| wrapper.model_type == name);
    // What is in a multimodal model says its own type.
    let inner = json.value("text_config").filter(|_| wrapper.is_some()).and_then(|config| match config {
        Value::Table(table) => Some(table.get("model_type")?.value()),
        _ => None,
    });
    let of_text = inner.and_then(Value::text).or_else(|| wrapper.map(|wrapper| wrapper.text));
    let of_text = of_text.unwrap_or(name);
    let Some(family) = FAMILIES.iter().find(|family| family.model_type == of_text) else {
        let key = if inner.is_some() { "text_config.model_type" } else { "model_type" };
        let found = inner.or(json.value("model_type"));
        let found = found.map_or("is missing".to_owned(), |kind| format!("= {} is not supported", kind.shown()));
        let text = json.below("text_config", "an object").value("model_type").and_then(Value::text);
        let message = format!("`{key}` {found}{}", lacking(of_text, text.unwrap_or_default()));
        json.reject("model_type", Problem::new(message).hint(KNOWN_MODELS));
        return None;
    };
    let architecture = wrapper.map_or(family.architecture, |wrapper| wrapper.architecture);
    let expected = format!("[\"{architecture}\"]: only causal language models can be fine-tuned here");
    json.only("architectures", &expected, |names| {
        // transformers 5 saves InternLM 3 and its like as Llama.
        let is_ours = |name: &str| name == architecture || (wrapper.is_none() && name == FAMILIES[0].architecture);
        matches!(names, Value::Array(names) if names.iter().filter_map(|name| name.value().text()).any(is_ours))
    });
    Some((family, wrapper))
}

/// Why models of a type are not supported, around a text of another, or which are.
fn lacking(name: &str, text: &str) -> String {
    let starts = LACKING.iter().flat_map(|(lacking, types)| types.split(' ').map(move |start| (start, *lacking)));
    let lacking = starts.filter(|(start, _)| name.starts_with(start)).max_by_key(|(start, _)| start.len());
    let known = FAMILIES.iter().map(|family| family.model_type).chain(WRAPPERS.iter().map(|it| it.model_type));
    let is_trained = FAMILIES.iter().any(|family| family.model_type == text);
    match lacking.map(|(_, lacking)| lacking) {
        Some(lacking) if !(is_trained && lacking.starts_with("it reads images; ")) => format!(": {lacking}"),
        _ if is_trained => format!(": it stands around `{text}`, which is trained here where that is saved by itself"),
        _ => format!(", expected one of {}", known.map(|kind| format!("`{kind}`")).collect::<Vec<_>>().join(", ")),
    }
}

const KNOWN_MODELS: &str = "Llama 2, 3, 3.1, 3.2 and 4, TinyLlama, SmolLM2 and 3, Mistral, Ministral 3, Mixtral, Qwen2, Qwen2.5, \
                            Qwen3, Qwen3-Next and Qwen3.5, gpt-oss, Gemma 1 to 4, OLMo 2 and 3, OLMoE, Granite 3 and 4, \
                            Phi-3 and 4, GLM-4, DeepSeek V2 and V3, ERNIE 4.5, LFM2, Nemotron, Nemotron-H, Falcon-H1, Cohere, StableLM, Starcoder 2, Hunyuan, GPT-NeoX, Phi-1 and 2, EXAONE 4, Solar Open, Seed-OSS and the text of Qwen2-VL \
                            to Qwen3-VL, InternVL, LLaVA and SmolVLM are trained here: lora-train help models";

/// How the sublayers of a layer follow each other, without a key.
fn arrangement(json: &mut Section, family: &Family) -> Arrangement {
    match family.arrangement {
        Arrangement::BesideIf(key) if json.boolean(key, false) => Arrangement::Beside,
        Arrangement::NormedApartIf(key) if json.boolean(key, true) => Arrangement::NormedApart,
        Arrangement::BesideIf(_) | Arrangement::NormedApartIf(_) => Arrangement::InTurn,
        other => other,
    }
}

/// A count that must be given, unless the family has a default.
fn count_or(json: &mut Section, key: &'static str, default: Option<usize>, most: usize) -> usize {
    match default {
        Some(default) => json.count(key, default, 1..=most),
        None => json.required_count(key, 1..=most),
    }
}

/// The width inside LFM2's feed-forward layers: two thirds of that in the config, times a factor, rounded up to a multiple.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "as Python rounds"
)]
fn lfm2_width(json: &mut Section) -> usize {
    let key = if json.value("block_ff_dim").is_some() { "block_ff_dim" } else { "intermediate_size" };
    let width = json.count(key, 12_288, 1..=1 << 22);
    if !json.boolean("block_auto_adjust_ff_dim", true) {
        return width;
    }
    let two_thirds = (2.0 * width as f64 / 3.0).floor();
    if json.is_null("block_ffn_dim_multiplier") {
        return (two_thirds as usize).max(1);
    }
    let factor = json.number("block_ffn_dim_multiplier", 1.0, 1e-3..=16.0);
    let multiple = json.count("block_multiple_of", 256, 1..=1 << 20);
    ((factor * two_thirds) as usize).max(1).next_multiple_of(multiple)
}

/// Tokens that short convolutions see, in a family that has such.
fn short_conv(json: &mut Section, family: &Family) -> Option<usize> {
    if !family.has_short_convs {
        return None;
    }
    json.only("conv_bias", "false", |value| *value == Value::Boolean(false));
    Some(json.count("conv_L_cache", 3, 1..=64))
}

/// The heads of every layer, without window and cap.
fn heads(json: &mut Section, family: &Family, hidden: usize, latent: Option<LatentWidths>) -> Heads {
    let num_heads = count_or(json, "num_attention_heads", family.num_attention_heads, 1 << 16);
    if let Some(latent) = latent {
        return latent.heads(json, num_heads);
    }
    let default = family.num_key_value_heads.filter(|_| !json.has("num_key_value_heads"));
    let num_kv_heads = json.count("num_key_value_heads", default.unwrap_or(num_heads), 1..=1 << 16);
    let is_null = json.is_null("head_dim");
    let head_dim = family.head_dim.filter(|_| !is_null).unwrap_or((hidden / num_heads).max(1));
    let head_dim = json.count("head_dim", head_dim, 1..=1 << 16);
    if json.is_sound() {
        // GLM-4.5 has 96 heads of 128 in a width of 5120, Qwen3.5 27B 24 of 256.
        let is_said = json.value("head_dim").is_some() || (family.head_dim.is_some() && !is_null);
        let is_free = is_said || family.state_spaces.is_some();
        let divided = (!is_free).then_some(hidden);
        check_heads(json, divided, num_heads, num_kv_heads, head_dim);
    }
    #[expect(clippy::cast_precision_loss, reason = "a head is a few hundred wide at most")]
    let scale = match family.scales {
        Scales::Parts => json.number("key_multiplier", 1.0, MULTIPLIER) / (head_dim as f64).sqrt(),
        Scales::Normed => json.number("qk_scale_factor", 3.87, MULTIPLIER) / (head_dim as f64).sqrt(),
        Scales::HeadWidth | Scales::EmbeddingsAndHeads | Scales::Depth | Scales::Logits => {
            1.0 / (head_dim as f64).sqrt()
        }
        Scales::QueryScalar(scalar) => 1.0 / json.number("query_pre_attn_scalar", scalar, MULTIPLIER).sqrt(),
        Scales::Embeddings => 1.0,
        Scales::Multipliers => {
            let default = if family.model_type == "hyperclovax" { 1.0 / (head_dim as f64).sqrt() } else { 1.0 };
            json.number("attention_multiplier", default, MULTIPLIER)
        }
    };
    Heads { num_heads, num_kv_heads, head_dim, scale, window: None, chunk: None, soft_cap: None }
}

const MULTIPLIER: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

/// Factors of the embeddings and of the outputs of sublayers, and the divisor of the logits, where they are not 1.
#[expect(clippy::cast_precision_loss, reason = "a width")]
fn multipliers(json: &mut Section, family: &Family, hidden: usize, num_layers: usize) -> [Option<f64>; 3] {
    match family.scales {
        Scales::HeadWidth => [None; 3],
        Scales::Normed => {
            [None, None, Some(1.0 / json.number("output_multiplier", 0.196_116_135_138_184_04, MULTIPLIER))]
        }
        Scales::Logits => [None, None, Some(1.0 / json.number("logit_scale", 0.0625, MULTIPLIER))],
        Scales::Parts => {
            let of_logits = json.number("lm_head_multiplier", 1.0, MULTIPLIER);
            [Some(json.number("embedding_multiplier", 1.0, MULTIPLIER)), None, Some(1.0 / of_logits)]
        }
        Scales::QueryScalar(_) | Scales::Embeddings | Scales::EmbeddingsAndHeads => {
            [Some((hidden as f64).sqrt()), None, None]
        }
        Scales::Depth => {
            // What is null does nothing.
            let mut number = |key, default, none| {
                let is_null = json.has(key) && json.value(key).is_none();
                json.number(key, if is_null { none } else { default }, MULTIPLIER)
            };
            let depth = (num_layers as f64).sqrt();
            let of_outputs = number("scale_depth", 1.4, depth) / depth;
            let base = number("dim_model_base", 256.0, hidden as f64);
            [Some(number("scale_emb", 12.0, 1.0)), Some(of_outputs), Some(hidden as f64 / base)]
        }
        Scales::Multipliers => {
            let keys = ["embedding_multiplier", "residual_multiplier", "logits_scaling"];
            let [embeddings, outputs, logits] =
                keys.map(|key| Some(json.number(key, 1.0, MULTIPLIER)).filter(|number| *number != 1.0));
            let multiplies = family.model_type == "hyperclovax";
            [embeddings, outputs, if multiplies { logits.map(f64::recip) } else { logits }]
        }
    }
}

/// The caps of attention scores and of logits.
fn soft_caps(json: &mut Section, family: &Family) -> [Option<f64>; 2] {
    let Some([of_scores, of_logits]) = family.soft_caps else { return [None; 2] };
    if of_scores.is_none() {
        let null = "null: transformers caps no scores of attention in this model, whatever its config says";
        json.only("attn_logit_softcapping", null, |_| false);
    }
    [("attn_logit_softcapping", of_scores), ("final_logit_softcapping", of_logits)].map(|(key, default)| {
        let is_null = json.has(key) && json.value(key).is_none();
        let is_given = json.value(key).is_some();
        let default = default.filter(|_| !is_null);
        (is_given || default.is_some()).then(|| json.number(key, default.unwrap_or(1.0), 1e-3..=1e6))
    })
}

/// Settings that change the computation in a way that is not implemented.
fn refuse_unsupported(json: &mut Section, family: &Family) {
    json.only("swiglu_alpha", "1.702", |value| value.number() == Some(1.702));
    json.only("swiglu_limit", "7.0", |value| value.number() == Some(7.0));
    if !matches!(family.biases, Biases::Keys([("use_bias", _), ..])) {
        json.only("use_bias", "false", |value| *value == Value::Boolean(false));
    }
    // Those of all published Seed-OSS and Starcoder 2 are 0.1, and one of Phi-2's.
    let are_ignored = matches!(family.model_type, "seed_oss" | "starcoder2" | "phi");
    // In HyperCLOVA X transformers uses the first alone.
    let is_used = |key: &&str| family.model_type != "hyperclovax" || *key == "attention_dropout";
    let keys = ["attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "embed_dropout"].into_iter();
    for key in keys.filter(is_used).filter(|_| !are_ignored) {
        json.only(key, "0.0", |value| value.number() == Some(0.0));
    }
    json.only("clip_qkv", "null", |_| false);
    // It adds to the loss of Bamba.
    json.only("z_loss_coefficient", "0.0", |value| value.number() == Some(0.0));
    if family.has_head_bias {
        json.only("tie_word_embeddings", "false", |value| *value == Value::Boolean(false));
    }
    if family.norm_kind != NormKind::Rms && !matches!(family.qk_norms, Some(QueryKeyNorms::ByHead(_))) {
        for key in ["use_qk_norm", "qk_layernorm"] {
            json.only(key, "false: LayerNorms of heads are not computed here", |value| *value == Value::Boolean(false));
        }
    }
    if family.attention_extra == AttentionExtra::OutputGate {
        json.only("attn_output_gate", "true", |value| *value == Value::Boolean(true));
    }
    // Gemma 4's "vision" is about images: see `Vision`.
    let is_causal = |value: &Value| *value == Value::Boolean(false) || value.text() == Some("vision");
    json.only("use_bidirectional_attention", "false", is_causal);
}

/// The activation of the feed-forward layers, under the names of transformers.
fn activation(json: &mut Section, family: &Family) -> Activation {
    let (key, default) = family.activation;
    // LFM2 has the one, whatever its config says.
    if family.has_short_convs {
        return default;
    }
    if !family.gated && default == Activation::Relu {
        json.only(key, "\"relu2\"", |value| value.text() == Some("relu2"));
        return default;
    }
    if matches!(default, Activation::Xielu(_)) {
        json.only(key, "\"xielu\"", |value| value.text() == Some("xielu"));
        return default;
    }
    if default == Activation::Clamped {
        json.only(key, "\"silu\"", |value| matches!(value.text(), Some("silu" | "swish")));
        return default;
    }
    if family.delta_heads.is_some() {
        let silu = "\"silu\", which linear attention has behind its convolution";
        json.only(key, silu, |value| matches!(value.text(), Some("silu" | "swish")));
        return default;
    }
    // Which in Gemma's first files means the approximation.
    if !family.gated && json.value(key).and_then(Value::text) == Some("gelu") {
        return Activation::Gelu;
    }
    activation_named(json, self::key(json, family, key), default)
}

/// An activation under the names of transformers.
pub(super) fn activation_named(json: &mut Section, key: &'static str, default: Activation) -> Activation {
    const NAMES: [(&str, Activation); 7] = [
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("gelu", Activation::Gelu),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("gelu_new", Activation::GeluTanh),
        ("gelu_fast", Activation::GeluTanh),
        ("relu", Activation::Relu),
    ];
    let expected = "\"silu\", \"gelu\", \"gelu_pytorch_tanh\" or \"relu\"";
    json.any(key, default, expected, |value| {
        let name = value.text();
        let known = NAMES.iter().find(|(known, _)| name == Some(*known)).map(|(_, activation)| *activation);
        let is_gemma = (key, default) == ("hidden_act", Activation::GeluTanh);
        known.map(|known| if is_gemma && known == Activation::Gelu { default } else { known }).ok_or(None)
    })
}

/// Whether the projections of an attention's input, that of its output and the feed-forward layers add a bias.
fn biases(json: &mut Section, family: &Family) -> [bool; 3] {
    if let Biases::QueryKeyValueKey(default) = family.biases {
        return [json.boolean("attention_bias", default), false, false];
    }
    if let Biases::Keys(keys) = family.biases {
        return keys.map(|(key, default)| json.boolean(key, default));
    }
    if family.biases == Biases::All {
        return [true; 3];
    }
    let has_key = |key| match family.biases {
        Biases::None | Biases::All | Biases::QueryKeyValue | Biases::QueryKeyValueKey(_) | Biases::Keys(_) => false,
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

pub(super) fn check_heads(
    json: &mut Section,
    hidden: Option<usize>,
    heads: usize,
    key_value_heads: usize,
    head_dim: usize,
) {
    if heads * head_dim > MAX_HEADS_WIDTH {
        let message = format!("= {heads} heads of `head_dim` = {head_dim}, expected at most {MAX_HEADS_WIDTH} in all");
        json.problem("num_attention_heads", message);
    }
    if let Some(hidden) = hidden.filter(|hidden| !hidden.is_multiple_of(heads)) {
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

#[cfg(test)]
mod tests;
