//! A model as GGUF files describe it: keys of the shape and names of tensors, both ways.

pub mod gemma3n;
pub mod gemma4;
mod latent;
mod names;
mod order;
mod rope;
mod state_space;

use std::collections::BTreeMap;

use serde_json::{Map, json};

use super::delta_net::GATED_NORM;
use super::families::FAMILIES;
use super::family::{Arrangement, AttentionExtra, Biases, Family, Gguf, GgufWindows, OwnRopes, Router, Scales};
use super::{Method, ModelConfig, NormKind, QueryGrowth, RopeScaling, StoredQuantisation};
use crate::schema::{Problem, Problems};
use crate::util::gguf::{GgufFile, GgufType, decimal};
use crate::util::stats::as_f64;

pub use latent::{KEY_WIDTHS, LATENT_RANKS, YARN_GROWTH};
pub use names::{Part, curve_key, names_of, parts_of, tensor_name};
pub use order::Order;
pub use rope::{MINISTRAL_YARN, rope_factors, stored_rope_factors};
use rope::{scaling, scaling_of_factors};
pub use state_space::{HAS_ROPE, STATE_COUNTS, row_factors, scale_rows};

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

/// The families of an architecture: Mistral and Mixtral are Llamas there, and all of Gemma 4 is one.
fn families(architecture: &str) -> impl Iterator<Item = &'static Family> {
    let of = move |gguf: &Gguf| [gguf.architecture, gguf.of_mixtures].contains(&Some(architecture));
    FAMILIES.iter().filter(move |family| of(&family.gguf))
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
        if name.ends_with(".A_log") {
            return Self::MinusExp;
        }
        let is_whole = name.ends_with(GATED_NORM) || (config.family().is_muse() && name == "model.norm.weight");
        let is_less_one = config.has_norms_less_one && name.ends_with("norm.weight") && !is_whole;
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
    let (pattern, largest) = match family.gguf.windows {
        GgufWindows::AllButEvery { pattern, largest } => (pattern, largest),
        GgufWindows::OfLayers { num_layers: with_windows, pattern } if num_layers == with_windows => (pattern, None),
        _ => return None,
    };
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
        let parts = parts_of(config, &name, &shape);
        if parts.iter().any(|part| part.turned.is_some()) {
            return None;
        }
        let parts = parts.iter().map(|part| file.tensors().get(&part.name)).collect::<Option<Vec<_>>>()?;
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
        let differs =
            family.is_gemma4() || family.is_gemma3n() || family.has_short_convs || family.state_spaces.is_some();
        let by_layer = file.integers(&key(theirs)).filter(|_| differs);
        // Layers without attention have no heads, and some of Nemotron-H no other width.
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
    if let Arrangement::NormedApartIf(key) = family.arrangement {
        let architecture = file.text("general.architecture").unwrap_or_default();
        json.insert(key.to_owned(), json!(file.flag(&format!("{architecture}.{key}")).unwrap_or(true)));
    }
    if let Arrangement::BesideIf(key) = family.arrangement {
        // Sublayers beside each other have one norm.
        json.insert(key.to_owned(), json!(!tensors.contains_key("blk.0.ffn_norm.weight")));
    }
    Ok(())
}

/// The family of an architecture that is like a file: Llama's is also that of Mixtral.
fn of_like(
    file: &GgufFile,
    key: &dyn Fn(&str) -> String,
    has_experts: bool,
) -> Result<Option<&'static Family>, Problem> {
    let architecture = file.text("general.architecture").unwrap_or_default();
    let gate = file.integer(&key(EXPERT_GATE))?;
    // OLMo 3 is OLMo 2 with windows there.
    let has_windows = file.integer(&key("attention.sliding_window")).ok().flatten().is_some();
    let has_both =
        [true, false].map(|has| families(architecture).any(|it| (it.gguf.windows != GgufWindows::Never) == has));
    let is_like = |family: &&Family| {
        let of_windows = (family.gguf.windows != GgufWindows::Never) == has_windows;
        if has_both == [true, true] && !of_windows {
            return false;
        }
        let router = family.experts.and_then(|experts| experts.router);
        family.experts.is_some() == has_experts
            && gate.zip(router).is_none_or(|(gate, router)| (gate == 2) == router.sigmoid.is_some())
    };
    // GLM-4's is also that of GLM-4.1V.
    let has_axes = file.integers(&key(ROPE_SECTIONS)).is_some();
    let turns_alike = |family: &&Family| matches!(family.own_ropes, OwnRopes::Axes(_)) == has_axes;
    // Granite's with experts is also that of those with a shared one beside them.
    let has_shared = file.tensors().contains_key("blk.0.ffn_up_shexp.weight");
    let has_beside = |family: &&Family| has_shared && family.experts.is_some_and(|experts| experts.beside_dense);
    let alike = || families(architecture).filter(is_like);
    Ok(alike().find(has_beside).or_else(|| alike().find(turns_alike)).or_else(|| alike().next()))
}

/// The `config.json` of a file.
fn config_json(file: &GgufFile) -> Result<String, Problem> {
    let architecture = file.text("general.architecture").unwrap_or("unnamed");
    let family = families(architecture).next().ok_or_else(|| unknown_architecture(file, architecture))?;
    let key = |name: &str| format!("{architecture}.{name}");
    let has_experts = file.integer(&key("expert_count"))?.is_some_and(|count| count > 0);
    if has_experts && families(architecture).all(|family| family.experts.is_none()) {
        return Err(unsupported(file, &key("expert_count"), file.integer(&key("expert_count"))?.unwrap_or(0), 0));
    }
    let family = of_like(file, &key, has_experts)?.unwrap_or(family);
    let is_latent = matches!(family.attention_extra, AttentionExtra::Latent(_));
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
    refuse_unsupported(file, &key, head_dim.filter(|_| !is_partial && !is_latent))?;
    if is_partial {
        let turning = file.integer(&key("rope.dimension_count"))?.or(head_dim).unwrap_or(0);
        let share = json!(as_f64(turning) / as_f64(head_dim.unwrap_or(1).max(1)));
        json.extend(["partial_rotary_factor", "rotary_pct"].map(|key| (key.to_owned(), share.clone())));
        json.insert("rotary_emb_base".to_owned(), json["rope_theta"].clone());
    }
    if !is_gemma4 && !family.is_gemma3n() {
        windows_and_caps(file, family, &key, &mut json)?;
    }
    if family.delta_heads.is_some() {
        for (ours, theirs) in OF_DELTA_NETS {
            json.extend(file.integer(&key(theirs))?.map(|count| (ours.to_owned(), json!(count))));
        }
    }
    // Layers that predict more tokens follow the others, and are left out.
    let layers = json["num_hidden_layers"].as_u64().unwrap_or(0);
    json.insert("num_hidden_layers".to_owned(), json!(layers.saturating_sub(num_predicting(file))));
    if let Some(spaces) = &family.state_spaces {
        state_space::read(file, (family, spaces), &key, &mut json)?;
    }
    if is_latent {
        latent::read(file, family, &key, &mut json)?;
    }
    if family.has_short_convs {
        lfm2(file, &key, &mut json)?;
    }
    if has_experts {
        // What llama.cpp does, whatever the file says, but where it asks.
        json.insert("norm_topk_prob".to_owned(), json!(family.gguf.experts_sum_to_one));
        experts(file, &key, family, &mut json)?;
    }
    if family.has_chunks() {
        of_chunks(file, &key, &mut json)?;
    }
    if family.is_gemma3n() {
        gemma3n::read(file, &key, &mut json)?;
    }
    if is_gemma4 {
        gemma4::read(file, &key, &mut json)?;
    }
    of_scales(file, family, &key, &mut json);
    let mut scaling = scaling(file, family, &key)?;
    let sections = file.integers(&key(ROPE_SECTIONS)).filter(|_| matches!(family.own_ropes, OwnRopes::Axes(_)));
    if let Some(sections) = sections {
        let scaling = scaling.get_or_insert(json!({"rope_type": "default"}));
        scaling["mrope_section"] = json!(sections.iter().take(3).collect::<Vec<_>>());
    }
    match scaling {
        Some(scaling) => drop(json.insert("rope_scaling".to_owned(), scaling)),
        // Absent, it would be one that the family has.
        None if family.own_ropes == OwnRopes::GptOss || family.model_type == "apertus" => {
            json.insert("rope_scaling".to_owned(), json!({"rope_type": "default"}));
        }
        None => match family.own_ropes {
            // Those before Ministral 3.
            OwnRopes::Ministral => drop(json.insert("model_type".to_owned(), json!("mistral"))),
            OwnRopes::None
            | OwnRopes::GptOss
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

/// Multipliers of scores, embeddings, outputs and logits, in families that have such.
fn of_scales(
    file: &GgufFile,
    family: &Family,
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, serde_json::Value>,
) {
    if family.scales == Scales::Logits {
        json.extend(file.number(&key(LOGIT_SCALE)).map(|scale| (LOGIT_SCALE.to_owned(), json!(scale))));
    }
    if family.scales == Scales::Normed {
        let numbers = [
            ("output_multiplier", file.number(&key(LOGIT_SCALE))),
            ("qk_scale_factor", first_number(file, "blk.0.attn_q_norm.weight")),
        ];
        json.extend(numbers.into_iter().filter_map(|(key, number)| Some((key.to_owned(), json!(number?)))));
    }
    if family.scales == Scales::Multipliers {
        let of_file = MULTIPLIERS.map(|(ours, theirs)| Some((ours.to_owned(), json!(file.number(&key(theirs))?))));
        json.extend(of_file.into_iter().flatten());
    }
}

/// The weights of norms of queries and keys that a file has before this tensor, where the model's norms have none and scores another
/// factor than the width of a head gives.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "the file has f32, and a head is narrow"
)]
pub fn norms_of_scale(config: &ModelConfig, name: &str) -> Vec<(String, Vec<f32>)> {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.strip_suffix(".self_attn.q_proj.weight"));
    let Some((layer, attention)) = layer.zip(config.blocks[0].attention()).filter(|_| config.family().is_muse()) else {
        return Vec::new();
    };
    let width = attention.heads.head_dim;
    let scale = attention.heads.scale * (width as f64).sqrt();
    [("attn_q_norm", scale), ("attn_k_norm", 1.0)]
        .map(|(norm, weight)| (format!("blk.{layer}.{norm}.weight"), vec![weight as f32; width]))
        .into()
}

/// The first number of a tensor in `f32`.
fn first_number(file: &GgufFile, name: &str) -> Option<f64> {
    let tensor = file.tensors().get(name).filter(|tensor| tensor.kind == GgufType::F32)?;
    Some(decimal(f32::from_le_bytes(*file.bytes(tensor).first_chunk()?)))
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
    family: &Family,
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    let router = family.experts.and_then(|experts| experts.router);
    let counts = router.map_or(["num_experts", "num_experts_per_tok"], |router| router.counts);
    for (ours, theirs) in counts.into_iter().zip(["expert_count", "expert_used_count"]) {
        json.extend(file.integer(&key(theirs))?.map(|count| (ours.to_owned(), json!(count))));
    }
    let dense = first_mixture(file);
    let width = |part: &str| file.tensors().get(&format!("blk.{dense}.{part}.weight"))?.shape.first().copied();
    let of_experts = width("ffn_up.0");
    if let Some(router) = router {
        of_router(file, key, (family, router, dense), json)?;
        let shared = router.shared.filter(|(_, key)| !key.ends_with("_size"));
        let shared = shared.zip(width("ffn_up_shexp").zip(of_experts));
        json.extend(shared.map(|((_, count), (shared, width))| (count.to_owned(), json!(shared / width.max(1)))));
    }
    json.extend(of_experts.map(|width| ("moe_intermediate_size".to_owned(), json!(width))));
    json.entry("intermediate_size").or_insert(json!(of_experts));
    json.extend(file.integer(&key(LATENT_EXPERTS))?.map(|width| ("moe_latent_size".to_owned(), json!(width))));
    let of_shared = width("ffn_up_shexp").into_iter().flat_map(|width| {
        let keys =
            ["shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"];
        keys.map(|key| (key.to_owned(), json!(width)))
    });
    json.extend(of_shared);
    Ok(())
}

/// Llama 4's mixtures and chunks.
fn of_chunks(
    file: &GgufFile,
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    json.insert("intermediate_size_mlp".to_owned(), json["intermediate_size"].clone());
    json.insert("intermediate_size".to_owned(), json!(file.integer(&key("expert_feed_forward_length"))?));
    json.insert(MIXTURE_STEP.to_owned(), json!(file.integer(&key(MIXTURE_STEP))?.unwrap_or(1)));
    json.insert("use_qk_norm".to_owned(), json!(json.get("num_local_experts") != Some(&json!(128))));
    json.insert("no_rope_layers".to_owned(), json!([]));
    json.insert("attention_chunk_size".to_owned(), json!(CHUNK));
    Ok(())
}

/// The first layer with a mixture, in a file that has such.
fn first_mixture(file: &GgufFile) -> u64 {
    let has = |layer: &u64| file.tensors().contains_key(&format!("blk.{layer}.ffn_gate_inp.weight"));
    (0..1 << 16).find(has).unwrap_or(0)
}

/// Every how many layers a mixture is, in Llama 4's `config.json` and behind the architecture.
pub const MIXTURE_STEP: &str = "interleave_moe_layer_step";
/// Tokens of a chunk, and how queries grow in layers without a rotary embedding, in all of Llama 4.
pub const CHUNK: usize = 8192;
/// The second of [these](CHUNK).
pub const QUERY_GROWTH: QueryGrowth = QueryGrowth { beta: 0.1, period: CHUNK, first: 1 };

/// Width of the input of experts behind projections, behind the architecture.
pub const LATENT_EXPERTS: &str = "moe_latent_size";

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
    (family, router, dense): (&Family, Router, u64),
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    let gate = if router.sigmoid.is_some() { 2 } else { 1 };
    if let Some(found) = file.integer(&key(EXPERT_GATE))?.filter(|found| *found != gate) {
        return Err(unsupported(file, &key(EXPERT_GATE), found, gate));
    }
    json.extend(router.first.map(|(first, _)| (first.to_owned(), json!(dense))));
    json.insert("topk_method".to_owned(), json!("greedy"));
    if family.gguf.expert_factor {
        let [scale, norm] = EXPERT_WEIGHTS.map(&key);
        json.extend(file.number(&scale).map(|factor| (router.factor.0.to_owned(), json!(factor))));
        json.insert("norm_topk_prob".to_owned(), json!(file.flag(&norm).unwrap_or(false)));
    }
    if router.groups.is_some() {
        for (ours, theirs) in ["n_group", "topk_group"].into_iter().zip(EXPERT_GROUPS) {
            json.insert(ours.to_owned(), json!(file.integer(&key(theirs))?.unwrap_or(1)));
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
    if family.gguf.windows == GgufWindows::Listed {
        return listed_windows(file, key, json);
    }
    let Some(implied) = implied(family, layers, hidden, heads, head_dim) else {
        return match window.filter(|window| *window != 0) {
            Some(window) if family.gguf.windows == GgufWindows::Everywhere => {
                json.insert("sliding_window".to_owned(), json!(window));
                Ok(())
            }
            Some(window) => Err(unsupported(file, &key("attention.sliding_window"), window, 0)),
            None if matches!(family.gguf.windows, GgufWindows::OfLayers { .. }) => {
                json.insert("sliding_window".to_owned(), serde_json::Value::Null);
                Ok(())
            }
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

/// The same where a file says which layers have a window, and which a rotary embedding.
fn listed_windows(
    file: &GgufFile,
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, serde_json::Value>,
) -> Result<(), Problem> {
    let [window, pattern] = [WINDOW, WINDOW_PATTERN].map(key);
    json.insert("sliding_window".to_owned(), json!(file.integer(&window)?.ok_or_else(|| missing(file, &window))?));
    let is_local = file.integers(&pattern).ok_or_else(|| missing(file, &pattern))?;
    let kind = |local: &i64| if *local == 0 { "full_attention" } else { "sliding_attention" };
    json.insert("layer_types".to_owned(), json!(is_local.iter().map(kind).collect::<Vec<_>>()));
    if let Some(turns) = file.integers(&key(ROPE_PATTERN)) {
        let theta = &json["rope_theta"];
        let bases: Vec<_> = turns.iter().map(|turns| if *turns == 0 { json!(0) } else { theta.clone() }).collect();
        json.insert("layer_rope_theta".to_owned(), json!(bases));
    }
    json.insert("final_logit_softcapping".to_owned(), json!(file.number(&key("final_logit_softcapping"))));
    Ok(())
}

/// The width of windows, behind the architecture.
pub const WINDOW: &str = "attention.sliding_window";
/// Which layers have one, likewise.
pub const WINDOW_PATTERN: &str = "attention.sliding_window_pattern";
/// Which layers have a rotary embedding, likewise.
pub const ROPE_PATTERN: &str = "attention.rope_pattern";

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
