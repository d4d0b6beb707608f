//! What files call the parts of towers.

use crate::spec::EncoderKind;

/// What files call the parts of an encoder; a layer's follow its number.
#[expect(clippy::struct_excessive_bools, reason = "a row of a table")]
pub(super) struct Names {
    pub(super) encoder: &'static str,
    /// Before the patches, over their pixels.
    pub(super) pixels: Option<&'static str>,
    pub(super) patches: &'static str,
    pub(super) class: Option<&'static str>,
    pub(super) positions: Option<&'static str>,
    /// Before the layers and behind them.
    pub(super) ends: [Option<&'static str>; 2],
    pub(super) layers: &'static str,
    pub(super) norms: [&'static str; 2],
    pub(super) qkv: Qkv,
    pub(super) qk_norms: Option<[&'static str; 2]>,
    pub(super) output: &'static str,
    pub(super) gate: Option<&'static str>,
    pub(super) up: &'static str,
    pub(super) down: &'static str,
    pub(super) scales: Option<[&'static str; 2]>,
    pub(super) norms_behind: Option<[&'static str; 2]>,
    /// Whether norms and linear layers have biases.
    pub(super) has_bias: bool,
    /// Whether the norms of layers do.
    pub(super) has_norm_bias: bool,
    /// Whether queries, keys and values do.
    pub(super) has_qkv_bias: bool,
    /// Whether patches do.
    pub(super) has_patch_bias: bool,
    /// Equal frames that patches are of; none: they are linear layers, over colors pixel by pixel.
    pub(super) num_frames: usize,
}

/// What files call the layers of queries, keys and values.
pub(super) enum Qkv {
    Apart([&'static str; 3]),
    /// Their rows follow one another.
    Fused(&'static str),
}

/// What most have.
const MOST: Names = Names {
    encoder: "vision_tower.",
    pixels: None,
    patches: "",
    class: None,
    positions: None,
    ends: [None, None],
    layers: "encoder.layers",
    norms: ["", ""],
    qkv: Qkv::Apart(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    qk_norms: None,
    output: "",
    gate: None,
    up: "mlp.fc1",
    down: "mlp.fc2",
    scales: None,
    norms_behind: None,
    has_bias: true,
    has_norm_bias: true,
    has_qkv_bias: true,
    has_patch_bias: true,
    num_frames: 1,
};

/// What those have that are without biases.
const WITHOUT_BIASES: Names =
    Names { has_bias: false, has_norm_bias: false, has_qkv_bias: false, has_patch_bias: false, ..MOST };

const PIXTRAL: Names = Names {
    patches: "patch_conv",
    ends: [Some("ln_pre"), None],
    layers: "transformer.layers",
    norms: ["attention_norm", "ffn_norm"],
    qkv: Qkv::Apart(["attention.q_proj", "attention.k_proj", "attention.v_proj"]),
    output: "attention.o_proj",
    gate: Some("feed_forward.gate_proj"),
    up: "feed_forward.up_proj",
    down: "feed_forward.down_proj",
    ..WITHOUT_BIASES
};

const SIGLIP: Names = Names {
    encoder: "vision_model.",
    patches: "embeddings.patch_embedding",
    positions: Some("embeddings.position_embedding.weight"),
    ends: [None, Some("post_layernorm")],
    norms: ["layer_norm1", "layer_norm2"],
    output: "self_attn.out_proj",
    ..MOST
};

const INTERN_VIT: Names = Names {
    patches: "embeddings.patch_embeddings.projection",
    class: Some("embeddings.cls_token"),
    positions: Some("embeddings.position_embeddings"),
    layers: "encoder.layer",
    norms: ["layernorm_before", "layernorm_after"],
    qkv: Qkv::Apart(["attention.q_proj", "attention.k_proj", "attention.v_proj"]),
    output: "attention.projection_layer",
    scales: Some(["lambda_1", "lambda_2"]),
    ..MOST
};

const QWEN3: Names = Names {
    encoder: "visual.",
    patches: "patch_embed.proj",
    positions: Some("pos_embed.weight"),
    layers: "blocks",
    norms: ["norm1", "norm2"],
    qkv: Qkv::Fused("attn.qkv"),
    output: "attn.proj",
    up: "mlp.linear_fc1",
    down: "mlp.linear_fc2",
    num_frames: 2,
    ..MOST
};

const QWEN2_5: Names = Names {
    positions: None,
    gate: Some("mlp.gate_proj"),
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    has_norm_bias: false,
    has_patch_bias: false,
    ..QWEN3
};

const QWEN2: Names = Names { positions: None, up: "mlp.fc1", down: "mlp.fc2", has_patch_bias: false, ..QWEN3 };

const GLM: Names = Names {
    positions: Some("embeddings.position_embedding.weight"),
    ends: [Some("post_conv_layernorm"), Some("post_layernorm")],
    has_bias: false,
    has_patch_bias: true,
    ..QWEN2_5
};

const GEMMA4: Names = Names {
    patches: "patch_embedder.input_proj",
    positions: Some("patch_embedder.position_embedding_table"),
    norms: ["input_layernorm", "pre_feedforward_layernorm"],
    qkv: Qkv::Apart(["self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"]),
    qk_norms: Some(["self_attn.q_norm", "self_attn.k_norm"]),
    output: "self_attn.o_proj.linear",
    gate: Some("mlp.gate_proj.linear"),
    up: "mlp.up_proj.linear",
    down: "mlp.down_proj.linear",
    norms_behind: Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
    num_frames: 0,
    ..WITHOUT_BIASES
};

const GEMMA4_UNIFIED: Names = Names {
    encoder: "embed_vision.",
    pixels: Some("patch_ln1"),
    patches: "patch_dense",
    positions: Some("pos_embedding"),
    ends: [Some("patch_ln2"), Some("pos_norm")],
    num_frames: 0,
    ..MOST
};

impl Names {
    pub(super) fn of(kind: EncoderKind) -> Self {
        match kind {
            EncoderKind::Pixtral { .. } => PIXTRAL,
            EncoderKind::Siglip { .. } => SIGLIP,
            EncoderKind::PaddleOcr { .. } => Self { encoder: "visual.vision_model.", ..SIGLIP },
            EncoderKind::Siglip2 { .. } => Self { num_frames: 0, ..SIGLIP },
            EncoderKind::Glm { has_qkv_bias, .. } => Self { has_qkv_bias, ..GLM },
            EncoderKind::Gemma4 { .. } => GEMMA4,
            EncoderKind::Gemma4Unified { .. } => GEMMA4_UNIFIED,
            EncoderKind::Qwen3 { .. } => QWEN3,
            EncoderKind::Qwen2_5 { .. } => QWEN2_5,
            EncoderKind::Qwen2 { .. } => QWEN2,
            EncoderKind::InternVit { has_qk_norms, has_qkv_bias, has_rms_norms, has_last_norm, .. } => Self {
                ends: [None, has_last_norm.then_some("layernorm")],
                qk_norms: has_qk_norms.then_some(["attention.q_norm", "attention.k_norm"]),
                has_norm_bias: !has_rms_norms,
                has_qkv_bias,
                ..INTERN_VIT
            },
        }
    }
}
