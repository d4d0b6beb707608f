//! A model as GGUF files describe it: keys of the shape and names of tensors, both ways.

pub mod gemma4;
mod order;
mod rope;

use std::collections::BTreeMap;

use serde_json::{Map, json};

use super::delta_net::{A_LOG, DELTA_NET_FUSED_NAMES, DELTA_NET_NAMES, DT_BIAS, GATED_NORM};
use super::families::FAMILIES;
use super::family::{Arrangement, Biases, Family, GgufWindows, OwnRopes, Router, Scales};
use super::{
    BLOCK_SCALE, Block, EXPERT_SCALES, Method, ModelConfig, NormKind, ROUTER_SCALE, RopeScaling, SINKS,
    StoredQuantisation, name_alone,
};
use crate::schema::{Problem, Problems};
use crate::util::gguf::GgufFile;
use crate::util::stats::as_f64;

pub use order::Order;
pub use rope::{MINISTRAL_YARN, rope_factors, stored_rope_factors};
use rope::{scaling, scaling_of_factors};

/// Modules of a block, in Hugging Face's files and in GGUF.
const MODULES: [(&str, &str); 63] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("feed_forward.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.out_proj", "ssm_out"),
    ("router.proj", "ffn_gate_inp"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.query_layernorm", "attn_q_norm"),
    ("self_attn.key_layernorm", "attn_k_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("mlp.gate.wg", "ffn_gate_inp"),
    ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
    ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
];
/// Tensors of a block that are no weight or bias, likewise.
const NO_MODULES: [(&str, &str); 10] = [
    (A_LOG, "ssm_a"),
    (DT_BIAS, "ssm_dt.bias"),
    (SINKS, "attn_sinks.weight"),
    (BLOCK_SCALE, "layer_output_scale.weight"),
    (ROUTER_SCALE, "ffn_gate_inp.scale"),
    (EXPERT_SCALES, "ffn_down_exps.scale"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
    ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
];
/// Matrices of an expert, likewise.
const OF_EXPERT: [(&str, &str); 6] = [
    ("gate_proj", "ffn_gate"),
    ("up_proj", "ffn_up"),
    ("down_proj", "ffn_down"),
    ("w1", "ffn_gate"),
    ("w3", "ffn_up"),
    ("w2", "ffn_down"),
];
/// The norm after the attention, which in most families is that before the feed-forward layer.
const POST_ATTENTION: [&str; 2] = ["post_attention_layernorm", "post_attention_norm"];

/// Counts of the delta rules of `config.json`, and their keys behind the architecture.
const OF_DELTA_NETS: [(&str, &str); 6] = [
    ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ("linear_key_head_dim", "ssm.state_size"),
    ("linear_value_head_dim", "ssm.state_size"),
    ("linear_num_key_heads", "ssm.group_count"),
    ("linear_num_value_heads", "ssm.time_step_rank"),
    ("full_attention_interval", "full_attention_interval"),
];

/// Multipliers of `config.json` and their keys behind the architecture, for Granite.
pub const MULTIPLIERS: [(&str, &str); 4] = [
    ("attention_multiplier", "attention.scale"),
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("logits_scaling", "logit_scale"),
];

/// What logits are multiplied by, in `config.json` and behind the architecture, for Cohere.
pub const LOGIT_SCALE: &str = "logit_scale";

/// Counts of `config.json`, their keys in GGUF behind the architecture, and whether a file must have them.
const COUNTS: [(&str, &str, bool); 7] = [
    ("num_hidden_layers", "block_count", true),
    ("max_position_embeddings", "context_length", true),
    ("hidden_size", "embedding_length", true),
    ("intermediate_size", "feed_forward_length", true),
    ("num_attention_heads", "attention.head_count", true),
    ("num_key_value_heads", "attention.head_count_kv", false),
    ("head_dim", "attention.key_length", false),
];

/// The name in GGUF of a tensor such as `model.layers.0.mlp.up_proj.weight`; `None` where there is no place for it.
#[must_use]
pub fn tensor_name(config: &ModelConfig, name: &str) -> Option<String> {
    let alone = name_alone(name);
    let name = alone.as_deref().unwrap_or(name);
    let in_block = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let no_module = in_block.and_then(|(_, part)| NO_MODULES.iter().find(|(ours, _)| *ours == part));
    if let (Some((layer, _)), Some((_, theirs))) = (in_block, no_module) {
        return Some(format!("blk.{layer}.{theirs}"));
    }
    let (module, part) = name.rsplit_once('.')?;
    let module = match module {
        "model.embed_tokens" => "token_embd".to_owned(),
        "model.norm" => "output_norm".to_owned(),
        "model.embedding_norm" => "token_embd_norm".to_owned(),
        "lm_head" => "output".to_owned(),
        "model.embed_tokens_per_layer" => "per_layer_token_embd".to_owned(),
        "model.per_layer_model_projection" => "per_layer_model_proj".to_owned(),
        "model.per_layer_projection_norm" => "per_layer_proj_norm".to_owned(),
        block => {
            let (layer, module) = block.strip_prefix("model.layers.")?.split_once('.')?;
            let of_expert = module.split_once("experts.").filter(|(before, _)| !before.ends_with("shared_"));
            if let Some((_, expert)) = of_expert {
                let (index, matrix) = expert.split_once('.')?;
                let (_, theirs) = OF_EXPERT.iter().find(|(ours, _)| *ours == matrix)?;
                return Some(format!("blk.{layer}.{theirs}.{index}.{part}"));
            }
            let is_after = || {
                config.family().gguf.post_attention_norm
                    || config.blocks[0].sublayers.iter().any(|sublayer| sublayer.norm_after == Some(module))
            };
            let module = match MODULES.iter().find(|(theirs, _)| *theirs == module)? {
                (theirs, _) if *theirs == POST_ATTENTION[0] && is_after() => POST_ATTENTION[1],
                (_, module) => module,
            };
            format!("blk.{layer}.{module}")
        }
    };
    Some(format!("{module}.{part}"))
}

/// The tensors there that together have the `num_rows` rows of one, each with its number of them; none where there is no place for
/// it.
#[must_use]
pub fn tensors_of(config: &ModelConfig, name: &str, num_rows: usize) -> Vec<(String, usize)> {
    let ([qkvz, _], [qkv, z, ..]) = (DELTA_NET_FUSED_NAMES, DELTA_NET_NAMES);
    let net = config.blocks.iter().find_map(Block::delta_net).filter(|_| name.contains(qkvz));
    let parts = match net {
        Some(net) => {
            vec![(name.replace(qkvz, qkv), net.heads.qkv_width()), (name.replace(qkvz, z), net.heads.value_width())]
        }
        None => vec![(name.to_owned(), num_rows)],
    };
    parts.into_iter().filter_map(|(name, num_rows)| Some((tensor_name(config, &name)?, num_rows))).collect()
}

/// The shape of a tensor there: a vector that is multiplied by a vector is none of a matrix, and a convolution has a row for
/// every channel.
#[must_use]
pub fn stored_shape(shape: &[usize]) -> Vec<usize> {
    match shape {
        [1, rest @ ..] if !rest.is_empty() => rest.to_vec(),
        [channels, 1, kernel] => vec![*channels, *kernel],
        _ => shape.to_vec(),
    }
}

/// The families of an architecture: Mistral and Mixtral are Llamas there, and all of Gemma 4 is one.
fn families(architecture: &str) -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().filter(move |family| family.gguf.architecture == Some(architecture))
}

/// What the numbers of a tensor are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// The same.
    Same,
    /// 1 more.
    PlusOne,
    /// Less than 0: what the logarithm was taken of, negated.
    MinusExp,
}

impl Coding {
    /// That of a tensor.
    #[must_use]
    pub fn of(config: &ModelConfig, name: &str) -> Self {
        if name.ends_with(A_LOG) {
            return Self::MinusExp;
        }
        let is_less_one = config.has_norms_less_one && name.ends_with("norm.weight") && !name.ends_with(GATED_NORM);
        if is_less_one { Self::PlusOne } else { Self::Same }
    }

    /// A number as it is written.
    #[must_use]
    pub fn written(self, number: f32) -> f32 {
        match self {
            Self::Same => number,
            Self::PlusOne => number + 1.0,
            Self::MinusExp => -number.exp(),
        }
    }

    /// A number as it was before it was written.
    #[must_use]
    pub fn read(self, number: f32) -> f32 {
        match self {
            Self::Same => number,
            Self::PlusOne => number - 1.0,
            Self::MinusExp => (-number).ln(),
        }
    }
}

/// What llama.cpp takes for granted in a family with windows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Implied {
    /// Every how many layers one has no window.
    pub pattern: usize,
    /// What the root of divides the scores.
    pub query_scalar: f64,
    /// Base of the rotary frequencies in layers with a window, where a file has none.
    pub local_theta: f64,
}

/// The same for a family and its shape; `None` for families without such.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "widths")]
pub(crate) fn implied(
    family: &Family,
    num_layers: usize,
    hidden: usize,
    num_heads: usize,
    head_dim: usize,
) -> Option<Implied> {
    let GgufWindows::AllButEvery { pattern, largest } = family.gguf.windows else { return None };
    let scalar = if largest == Some(num_layers) { hidden / num_heads.max(1) } else { head_dim };
    Some(Implied { pattern, query_scalar: scalar as f64, local_theta: 10_000.0 })
}

impl ModelConfig {
    /// The model that a GGUF file describes.
    ///
    /// # Errors
    /// A model that is not supported, or metadata that lacks a part of the shape.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, Problems> {
        let json = config_json(file)?;
        let mut config = Self::from_text(&file.path().display().to_string(), &json)?;
        let (family, rope) = (config.family(), &mut config.ropes[0]);
        if matches!(rope.scaling, None | Some(RopeScaling::Proportional { .. })) {
            rope.scaling = scaling_of_factors(file, family, rope)?;
        }
        config.quantisation =
            Some(StoredQuantisation { method: Method::Gguf, whole: Vec::new(), blocks: blocks(file, &config) });
        Ok(config)
    }
}

/// Bytes of the quantised matrices of linear layers and of the head that are held as they are: those whose columns are in
/// another order are decoded, and those in several tensors of different types.
fn blocks(file: &GgufFile, config: &ModelConfig) -> BTreeMap<String, usize> {
    let in_blocks = config.expected_tensors().into_iter().filter(|(name, _)| name != "model.embed_tokens.weight");
    let in_blocks = in_blocks.filter(|(name, _)| Order::of(config, name).is_none_or(|order| !order.is_of_columns));
    let sizes = in_blocks.filter_map(|(name, shape)| {
        let parts = tensors_of(config, &name, shape[0]).into_iter().map(|(name, _)| file.tensors().get(&name));
        let parts = parts.collect::<Option<Vec<_>>>()?;
        let kind = parts.first()?.kind;
        let are_blocks = kind.is_quantized() && parts.iter().all(|part| part.kind == kind);
        are_blocks.then(|| (name, parts.iter().map(|part| part.num_bytes()).sum()))
    });
    sizes.collect()
}

/// Names the architectures that are.
fn unknown_architecture(file: &GgufFile, architecture: &str) -> Problem {
    let mut known: Vec<String> = Vec::new();
    for name in FAMILIES.iter().filter_map(|family| family.gguf.architecture) {
        let name = format!("`{name}`");
        known.extend((!known.contains(&name)).then_some(name));
    }
    let known = known.join(", ");
    file.problem(format!("`general.architecture` = \"{architecture}\" is not supported, expected one of {known}"))
}

fn missing(file: &GgufFile, key: &str) -> Problem {
    file.problem(format!("`{key}` is missing"))
}

/// The numbers of layers, heads and the like.
fn counts(
    file: &GgufFile,
    family: &Family,
    key: &dyn Fn(&str) -> String,
    has_experts: bool,
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    for (ours, theirs, is_required) in COUNTS {
        let by_layer = file.integers(&key(theirs)).filter(|_| family.is_gemma4() || family.has_short_convs);
        // Layers of LFM2 without attention have no heads.
        let of_first = by_layer.and_then(|layers| u64::try_from(*layers.iter().find(|count| **count > 0)?).ok());
        match of_first.map_or_else(|| file.integer(&key(theirs)), |count| Ok(Some(count)))? {
            Some(count) => drop(json.insert(ours.to_owned(), json!(count))),
            // Where all feed-forward layers are mixtures, some families have no other width.
            None if is_required && !(has_experts && ours == "intermediate_size") => {
                return Err(missing(file, &key(theirs)));
            }
            None => {}
        }
    }
    Ok(())
}

/// What the tensors say: the size of the vocabulary, and which ones there are.
fn of_tensors(file: &GgufFile, family: &Family, json: &mut Map<String, serde_json::Value>) -> Result<(), Problem> {
    let tensors = file.tensors();
    let embedding = tensors.get("token_embd.weight").ok_or_else(|| file.problem("no tensor `token_embd.weight`"))?;
    json.insert("vocab_size".to_owned(), json!(embedding.shape.first()));
    json.insert("tie_word_embeddings".to_owned(), json!(!tensors.contains_key("output.weight")));
    if family.biases != Biases::QueryKeyValue {
        json.insert("attention_bias".to_owned(), json!(tensors.contains_key("blk.0.attn_q.bias")));
        json.insert("mlp_bias".to_owned(), json!(tensors.contains_key("blk.0.ffn_up.bias")));
    }
    if let Biases::Keys(keys) = family.biases {
        let modules = ["attn_q", "attn_output", "ffn_up"].map(|module| format!("blk.0.{module}.bias"));
        let keys = keys.into_iter().zip(modules);
        json.extend(keys.map(|((key, _), bias)| (key.to_owned(), json!(tensors.contains_key(&bias)))));
    }
    if let Arrangement::BesideIf(key) = family.arrangement {
        // Sublayers beside each other have one norm.
        json.insert(key.to_owned(), json!(!tensors.contains_key("blk.0.ffn_norm.weight")));
    }
    Ok(())
}

/// The `config.json` of a file.
fn config_json(file: &GgufFile) -> Result<String, Problem> {
    let architecture = file.text("general.architecture").unwrap_or("unnamed");
    let family = families(architecture).next().ok_or_else(|| unknown_architecture(file, architecture))?;
    let key = |name: &str| format!("{architecture}.{name}");
    let has_experts = file.integer(&key("expert_count"))?.is_some_and(|count| count > 0);
    // Llama's is also that of Mixtral, and GLM-4's that of GLM-4.1V.
    let has_axes = file.integers(&key(ROPE_SECTIONS)).is_some();
    let fits = |family: &&Family| {
        family.experts.is_some() == has_experts && matches!(family.own_ropes, OwnRopes::Axes(_)) == has_axes
    };
    let of_experts = || families(architecture).find(|family| family.experts.is_some() == has_experts);
    let family = families(architecture).find(fits).or_else(of_experts).unwrap_or(family);
    let [is_partial, is_gemma4] = [family.partial_rotary_factor.is_some(), family.is_gemma4()];
    let mut json = Map::from_iter([("model_type".to_owned(), json!(family.model_type))]);
    counts(file, family, &key, has_experts, &mut json)?;
    let norm = norm_key(family.norm_kind);
    let norm_eps = file.number(&key(norm)).ok_or_else(|| missing(file, &key(norm)))?;
    json.insert("rms_norm_eps".to_owned(), json!(norm_eps));
    json.insert(family.names.norm_eps.to_owned(), json["rms_norm_eps"].clone());
    json.insert("rope_theta".to_owned(), json!(file.number(&key("rope.freq_base")).unwrap_or(10_000.0)));
    let [hidden, heads] = ["hidden_size", "num_attention_heads"].map(|key| json[key].as_u64().unwrap_or(0));
    let head_dim = json.entry("head_dim").or_insert(json!(hidden / heads.max(1))).as_u64();
    json.entry("num_key_value_heads").or_insert(json!(heads));
    refuse_unsupported(file, &key, head_dim.filter(|_| !is_partial))?;
    if is_partial {
        let turning = file.integer(&key("rope.dimension_count"))?.or(head_dim).unwrap_or(0);
        json.insert("partial_rotary_factor".to_owned(), json!(as_f64(turning) / as_f64(head_dim.unwrap_or(1).max(1))));
    }
    if !is_gemma4 {
        windows_and_caps(file, family, &key, &mut json)?;
    }
    if family.delta_heads.is_some() {
        for (ours, theirs) in OF_DELTA_NETS {
            json.extend(file.integer(&key(theirs))?.map(|count| (ours.to_owned(), json!(count))));
        }
    }
    let router = family.experts.and_then(|experts| experts.router);
    if family.delta_heads.is_some() || router.is_some() {
        // Layers that predict more tokens follow the others, and are left out.
        let layers = json["num_hidden_layers"].as_u64().unwrap_or(0);
        json.insert("num_hidden_layers".to_owned(), json!(layers.saturating_sub(num_predicting(file))));
    }
    if family.has_short_convs {
        lfm2(file, &key, &mut json)?;
    }
    if has_experts {
        // What llama.cpp does, whatever the file says, but where it asks.
        json.insert("norm_topk_prob".to_owned(), json!(family.gguf.experts_sum_to_one));
        experts(file, &key, router, &mut json)?;
    }
    if is_gemma4 {
        gemma4::read(file, &key, &mut json)?;
    }
    if family.scales == Scales::Logits {
        json.extend(file.number(&key(LOGIT_SCALE)).map(|scale| (LOGIT_SCALE.to_owned(), json!(scale))));
    }
    if family.scales == Scales::Multipliers {
        let of_file = MULTIPLIERS.map(|(ours, theirs)| Some((ours.to_owned(), json!(file.number(&key(theirs))?))));
        json.extend(of_file.into_iter().flatten());
    }
    let mut scaling = scaling(file, family, &key)?;
    let sections = file.integers(&key(ROPE_SECTIONS)).filter(|_| matches!(family.own_ropes, OwnRopes::Axes(_)));
    if let Some(sections) = sections {
        let scaling = scaling.get_or_insert(json!({"rope_type": "default"}));
        scaling["mrope_section"] = json!(sections.iter().take(3).collect::<Vec<_>>());
    }
    match scaling {
        Some(scaling) => drop(json.insert("rope_scaling".to_owned(), scaling)),
        None => match family.own_ropes {
            OwnRopes::GptOss => drop(json.insert("rope_scaling".to_owned(), json!({"rope_type": "default"}))),
            // Those before Ministral 3.
            OwnRopes::Ministral => drop(json.insert("model_type".to_owned(), json!("mistral"))),
            OwnRopes::None
            | OwnRopes::Phi
            | OwnRopes::Olmo
            | OwnRopes::Hunyuan
            | OwnRopes::NeoX
            | OwnRopes::Axes(_) => {}
        },
    }
    of_tensors(file, family, &mut json)?;
    json.insert("bos_token_id".to_owned(), json!(file.token_id("bos")?));
    json.insert("eos_token_id".to_owned(), json!(file.end_ids()?));
    Ok(serde_json::Value::Object(json).to_string())
}

/// The key of what norms add to the mean square, behind the architecture.
#[must_use]
pub fn norm_key(kind: NormKind) -> &'static str {
    match kind {
        NormKind::Layer | NormKind::LayerWithoutBias => "attention.layer_norm_epsilon",
        NormKind::Rms => "attention.layer_norm_rms_epsilon",
    }
}

/// Layers at the end that predict more tokens, which are not used.
#[must_use]
pub fn num_predicting(file: &GgufFile) -> u64 {
    let architecture = file.text("general.architecture").unwrap_or_default();
    file.integer(&format!("{architecture}.nextn_predict_layers")).ok().flatten().unwrap_or(0)
}

/// The layers of LFM2 that have attention, and its convolutions.
fn lfm2(
    file: &GgufFile,
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    // A number where all layers have attention.
    if let Some(heads) = file.integers(&key("attention.head_count_kv")) {
        let kind = |count: &i64| if *count > 0 { "full_attention" } else { "conv" };
        json.insert("layer_types".to_owned(), json!(heads.iter().map(kind).collect::<Vec<_>>()));
    }
    json.extend(file.integer(&key(CONV_KERNEL))?.map(|count| ("conv_L_cache".to_owned(), json!(count))));
    json.insert("block_auto_adjust_ff_dim".to_owned(), json!(false));
    Ok(())
}

/// How many pairs each of the three positions turns, behind the architecture; a fourth number is of no use to text and images.
pub const ROPE_SECTIONS: &str = "rope.dimension_sections";

/// Tokens that LFM2's convolutions see, behind the architecture.
pub const CONV_KERNEL: &str = "shortconv.l_cache";

/// The mixtures of experts, in families that have such.
fn experts(
    file: &GgufFile,
    key: &dyn Fn(&str) -> String,
    router: Option<Router>,
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    let counts = router.map_or(["num_experts", "num_experts_per_tok"], |router| router.counts);
    for (ours, theirs) in counts.into_iter().zip(["expert_count", "expert_used_count"]) {
        json.extend(file.integer(&key(theirs))?.map(|count| (ours.to_owned(), json!(count))));
    }
    let dense = file.integer(&key(DENSE_LAYERS))?.unwrap_or(0);
    let width = |part: &str| file.tensors().get(&format!("blk.{dense}.{part}.weight"))?.shape.first().copied();
    let of_experts = width("ffn_up.0");
    if let Some(router) = router {
        of_router(file, key, (router, dense), json)?;
        let shared = router.shared.zip(width("ffn_up_shexp").zip(of_experts));
        json.extend(shared.map(|((_, count), (shared, width))| (count.to_owned(), json!(shared / width.max(1)))));
    }
    json.extend(of_experts.map(|width| ("moe_intermediate_size".to_owned(), json!(width))));
    json.entry("intermediate_size").or_insert(json!(of_experts));
    json.extend(width("ffn_up_shexp").map(|width| ("shared_expert_intermediate_size".to_owned(), json!(width))));
    Ok(())
}

/// Layers before the first mixture, behind the architecture.
pub const DENSE_LAYERS: &str = "leading_dense_block_count";
/// Groups of experts, and how many stay, likewise.
pub const EXPERT_GROUPS: [&str; 2] = ["expert_group_count", "expert_group_used_count"];
/// What weights of experts are multiplied by, and whether they are made to sum to 1 before, likewise.
pub const EXPERT_WEIGHTS: [&str; 2] = ["expert_weights_scale", "expert_weights_norm"];
/// The function that probabilities of experts are, likewise: 1 is the softmax, 2 the sigmoid.
pub const EXPERT_GATE: &str = "expert_gating_func";

/// What a router has beside its probabilities.
fn of_router(
    file: &GgufFile,
    key: &dyn Fn(&str) -> String,
    (router, dense): (Router, u64),
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    let gate = if router.sigmoid.is_some() { 2 } else { 1 };
    if let Some(found) = file.integer(&key(EXPERT_GATE))?.filter(|found| *found != gate) {
        return Err(unsupported(file, &key(EXPERT_GATE), found, gate));
    }
    json.extend(router.first.map(|(first, _)| (first.to_owned(), json!(dense))));
    if router.groups.is_some() {
        let [scale, norm] = EXPERT_WEIGHTS.map(&key);
        json.extend(file.number(&scale).map(|factor| ("routed_scaling_factor".to_owned(), json!(factor))));
        json.insert("norm_topk_prob".to_owned(), json!(file.flag(&norm).unwrap_or(false)));
        for (ours, theirs) in ["n_group", "topk_group"].into_iter().zip(EXPERT_GROUPS) {
            json.extend(file.integer(&key(theirs))?.map(|count| (ours.to_owned(), json!(count))));
        }
    }
    let has = |name: &str| json!(file.tensors().contains_key(name));
    json.insert("use_qk_norm".to_owned(), has("blk.0.attn_q_norm.weight"));
    json.extend(
        router.bias.and_then(|(_, key)| key).map(|key| (key.to_owned(), has(&format!("blk.{dense}.exp_probs_b.bias")))),
    );
    Ok(())
}

/// Windows, caps and what goes with them, in families that have such.
fn windows_and_caps(
    file: &GgufFile,
    family: &Family,
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    let window = file.integer(&key("attention.sliding_window"))?;
    let count = |name: &str| json[name].as_u64().and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    let [layers, hidden, heads, head_dim] =
        ["num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"].map(count);
    let Some(implied) = implied(family, layers, hidden, heads, head_dim) else {
        return match window.filter(|window| *window != 0) {
            Some(window) if family.gguf.windows == GgufWindows::Everywhere => {
                json.insert("sliding_window".to_owned(), json!(window));
                Ok(())
            }
            Some(window) => Err(unsupported(file, &key("attention.sliding_window"), window, 0)),
            None => Ok(()),
        };
    };
    json.insert("sliding_window".to_owned(), json!(window));
    let pattern = file.integer(&key("attention.sliding_window_pattern")).ok().flatten();
    json.insert("sliding_window_pattern".to_owned(), json!(pattern.unwrap_or(implied.pattern as u64)));
    json.insert("query_pre_attn_scalar".to_owned(), json!(implied.query_scalar));
    let local = file.number(&key("rope.freq_base_swa")).unwrap_or(implied.local_theta);
    json.insert("rope_local_base_freq".to_owned(), json!(local));
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        json.extend(file.number(&key(name)).map(|cap| (name.to_owned(), json!(cap))));
    }
    Ok(())
}

fn unsupported(file: &GgufFile, key: &str, found: u64, expected: u64) -> Problem {
    let message = format!("`{key}` = {found} is not supported, expected {expected}");
    file.problem(message).hint("use the model's original safetensors")
}

/// Settings that change the computation in a way that is not implemented.
fn refuse_unsupported(file: &GgufFile, key: &dyn Fn(&str) -> String, head_dim: Option<u64>) -> Result<(), Problem> {
    for (name, expected) in [("rope.dimension_count", head_dim), ("attention.value_length", head_dim)] {
        let found = file.integer(&key(name))?;
        if let (Some(found), Some(expected)) = (found, expected)
            && found != expected
        {
            return Err(unsupported(file, &key(name), found, expected));
        }
    }
    Ok(())
}
