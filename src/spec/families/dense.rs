//! Rows of dense families that differ from another in little.

use super::{ERNIE4_5, GEMMA2, GLM4, GRANITE, LLAMA, LLAMA_GGUF, MISTRAL, OLMO2, QWEN2, QWEN3};
use crate::spec::block::attention::QueryKeyNorms;
use crate::spec::family::{
    AttentionExtra, Biases, Family, FamilyNames, Gguf, GgufWindows, NoRope, OwnRopes, Scales, Windows,
};
use crate::spec::{Activation, Curve, NormKind, RopeAxes};

/// Inside Qwen2-VL.
pub(super) const QWEN2_VL: Family = Family {
    model_type: "qwen2_vl_text",
    architecture: "Qwen2VLTextModel",
    windows: Windows::LaterLayers { default: 4096, first: 80 },
    rms_norm_eps: 1e-5,
    rope_theta: 1e6,
    own_ropes: OwnRopes::Axes(RopeAxes { sections: [16, 24, 24], are_interleaved: false }),
    num_key_value_heads: Some(8),
    bos_token_id: Some(151_643),
    eos_token_id: Some(151_645),
    gguf: Gguf::named("qwen2vl"),
    ..QWEN2
};

pub(super) const QWEN2_5_VL: Family =
    Family { model_type: "qwen2_5_vl_text", architecture: "Qwen2_5_VLTextModel", ..QWEN2_VL };

pub(super) const QWEN3_VL: Family = Family {
    model_type: "qwen3_vl_text",
    architecture: "Qwen3VLTextModel",
    windows: Windows::Never,
    rope_theta: 500_000.0,
    own_ropes: OwnRopes::Axes(RopeAxes { sections: [24, 20, 20], are_interleaved: true }),
    max_position_embeddings: 128_000,
    gguf: Gguf::named("qwen3vl"),
    ..QWEN3
};

/// Inside GLM-4.1V and GLM-4.6V.
pub(super) const GLM4V: Family = Family {
    model_type: "glm4v_text",
    architecture: "Glm4vTextModel",
    partial_rotary_factor: Some(1.0),
    own_ropes: OwnRopes::Axes(RopeAxes { sections: [8, 12, 12], are_interleaved: false }),
    rms_norm_eps: 1e-5,
    head_dim: None,
    max_position_embeddings: 32_768,
    ..GLM4
};

pub(super) const GLM_OCR: Family = Family {
    model_type: "glm_ocr_text",
    architecture: "GlmOcrTextModel",
    biases: Biases::None,
    num_key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    ..GLM4V
};

/// Beside ERNIE 4.5, halves of a head turn.
pub(super) const PADDLEOCR_VL: Family = Family {
    model_type: "paddleocr_vl_text",
    architecture: "PaddleOCRTextModel",
    gguf: Gguf::named("paddleocr"),
    rope_pairs: LLAMA.rope_pairs,
    own_ropes: QWEN2_VL.own_ropes,
    ..ERNIE4_5
};

pub(super) const INTERNLM3: Family = Family {
    model_type: "internlm3",
    architecture: "InternLM3ForCausalLM",
    biases: Biases::Keys([("qkv_bias", false), ("bias", false), ("bias", false)]),
    rms_norm_eps: 1e-5,
    head_dim: Some(128),
    num_key_value_heads: Some(2),
    max_position_embeddings: 32_768,
    ..LLAMA
};

pub(super) const IQUEST_CODER: Family = Family {
    model_type: "iquestcoder",
    architecture: "IQuestCoderForCausalLM",
    rms_norm_eps: 1e-5,
    head_dim: Some(128),
    num_key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    ..LLAMA
};

/// Its `attention_dropout` and `residual_dropout` are not computed.
pub(super) const SEED_OSS: Family = Family {
    model_type: "seed_oss",
    architecture: "SeedOssForCausalLM",
    biases: Biases::Keys([("attention_bias", true), ("attention_out_bias", false), ("mlp_bias", false)]),
    head_dim: Some(128),
    num_key_value_heads: Some(8),
    max_position_embeddings: 524_288,
    bos_token_id: Some(0),
    gguf: Gguf { post_attention_norm: true, ..Gguf::named("seed_oss") },
    ..LLAMA
};

pub(super) const MINISTRAL: Family =
    Family { model_type: "ministral", architecture: "MinistralForCausalLM", ..MISTRAL };

pub(super) const CWM: Family = Family {
    model_type: "cwm",
    architecture: "CwmForCausalLM",
    biases: Biases::None,
    windows: Windows::AllButFirst { default: 8192, pattern: 4 },
    rms_norm_eps: 1e-5,
    rope_theta: 1e6,
    head_dim: Some(128),
    num_key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    bos_token_id: Some(128_000),
    eos_token_id: Some(128_001),
    gguf: Gguf::NONE,
    ..LLAMA
};

/// Its activation is the approximation of the tangent, which its first configs call `gelu`.
pub(super) const GEMMA: Family = Family {
    model_type: "gemma",
    architecture: "GemmaForCausalLM",
    norms: LLAMA.norms,
    activation: ("hidden_act", Activation::GeluTanh),
    scales: Scales::EmbeddingsAndHeads,
    soft_caps: None,
    windows: Windows::Never,
    num_attention_heads: Some(16),
    num_key_value_heads: Some(16),
    gguf: Gguf { tied_head: Some(true), ..Gguf::named("gemma") },
    ..GEMMA2
};

pub(super) const VAULT_GEMMA: Family = Family {
    model_type: "vaultgemma",
    architecture: "VaultGemmaForCausalLM",
    norms: [[Some("input_layernorm"), None], [Some("pre_feedforward_layernorm"), None]],
    gguf: Gguf::NONE,
    ..GEMMA2
};

pub(super) const ARCEE: Family = Family {
    model_type: "arcee",
    architecture: "ArceeForCausalLM",
    activation: ("hidden_act", Activation::Relu),
    gated: false,
    rms_norm_eps: 1e-5,
    max_position_embeddings: 4096,
    bos_token_id: Some(128_000),
    eos_token_id: Some(128_001),
    gguf: Gguf { architecture: Some("arcee"), ..LLAMA_GGUF },
    ..LLAMA
};

/// Each layer has numbers of its activation in its weights, and llama.cpp in its metadata.
pub(super) const APERTUS: Family = Family {
    model_type: "apertus",
    architecture: "ApertusForCausalLM",
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Heads),
    norms: [[Some("attention_layernorm"), None], [Some("feedforward_layernorm"), None]],
    activation: ("hidden_act", Activation::Xielu(Curve { positive: 0.0, negative: 0.0, beta: 0.0 })),
    gated: false,
    rms_norm_eps: 1e-5,
    rope_theta: 12_000_000.0,
    vocab_size: Some(131_072),
    max_position_embeddings: 65_536,
    gguf: Gguf { rope_factors: true, ..Gguf::named("apertus") },
    ..LLAMA
};

pub(super) const JAIS2: Family = Family {
    model_type: "jais2",
    architecture: "Jais2ForCausalLM",
    names: FamilyNames { norm_eps: "layer_norm_eps", ..FamilyNames::COMMON },
    biases: Biases::Keys([("attention_bias", true), ("attention_bias", true), ("mlp_bias", true)]),
    norm_kind: NormKind::Layer,
    activation: ("hidden_act", Activation::Relu),
    gated: false,
    rms_norm_eps: 1e-5,
    max_position_embeddings: 8192,
    bos_token_id: Some(0),
    eos_token_id: Some(150_024),
    gguf: Gguf::named("jais2"),
    ..LLAMA
};

pub(super) const HELIUM: Family = Family {
    model_type: "helium",
    architecture: "HeliumForCausalLM",
    rms_norm_eps: 1e-8,
    rope_theta: 100_000.0,
    num_key_value_heads: None,
    max_position_embeddings: 4096,
    tie_word_embeddings: false,
    gguf: Gguf::NONE,
    ..ERNIE4_5
};

/// EXAONE 3, whose files and first configs have names of their own.
pub(super) const EXAONE: Family = Family {
    model_type: "exaone",
    architecture: "ExaoneForCausalLM",
    rms_norm_eps: 1e-5,
    rope_theta: 500_000.0,
    num_key_value_heads: Some(8),
    max_position_embeddings: 4096,
    eos_token_id: Some(361),
    gguf: Gguf { rope_factors: true, ..Gguf::named("exaone") },
    ..LLAMA
};

pub(super) const OLMO3: Family = Family {
    model_type: "olmo3",
    architecture: "Olmo3ForCausalLM",
    windows: Windows::AllButEvery { default: 4096, pattern: 4 },
    rope_theta: 500_000.0,
    local_rope_theta: Some(500_000.0),
    own_ropes: OwnRopes::Olmo,
    gguf: Gguf { windows: GgufWindows::AllButEvery { pattern: 4, largest: None }, ..Gguf::named("olmo2") },
    ..OLMO2
};

pub(super) const EXAONE4: Family = Family {
    model_type: "exaone4",
    architecture: "Exaone4ForCausalLM",
    biases: Biases::None,
    qk_norms: Some(QueryKeyNorms::Heads),
    windows: Windows::AllButEvery { default: 4096, pattern: 4 },
    no_rope: NoRope::FullUnlessNull,
    vocab_size: Some(102_400),
    num_attention_heads: Some(32),
    num_key_value_heads: Some(32),
    bos_token_id: Some(0),
    eos_token_id: Some(2),
    // That of 32B has windows.
    gguf: Gguf {
        rope_factors: true,
        windows: GgufWindows::OfLayers { num_layers: 64, pattern: 4 },
        ..Gguf::named("exaone4")
    },
    ..OLMO2
};

/// Inside Muse Glimmer.
pub(super) const MUSE_GLIMMER: Family = Family {
    model_type: "muse_glimmer_text",
    architecture: "MuseGlimmerTextModel",
    qk_norms: Some(QueryKeyNorms::Unweighted),
    activation: ("hidden_activation", Activation::Silu),
    scales: Scales::Normed,
    soft_caps: Some([None, Some(20.0)]),
    attention_extra: AttentionExtra::Muse,
    windows: Windows::AllButEvery { default: 2048, pattern: 4 },
    no_rope: NoRope::Bases,
    rms_norm_eps: 1e-5,
    vocab_size: Some(202_048),
    num_attention_heads: Some(32),
    head_dim: Some(128),
    num_key_value_heads: Some(2),
    max_position_embeddings: 131_072,
    tie_word_embeddings: false,
    bos_token_id: Some(200_000),
    eos_token_id: Some(200_001),
    gguf: Gguf {
        interleaved: true,
        tied_head: Some(false),
        windows: GgufWindows::Listed,
        ..Gguf::named("muse-glimmer")
    },
    ..GEMMA2
};

/// Granite with windows and sinks.
pub(super) const GRANITE_SWA: Family = Family {
    model_type: "granite_swa",
    architecture: "GraniteSWAForCausalLM",
    attention_extra: AttentionExtra::Sinks,
    windows: Windows::AllButFirst { default: 128, pattern: 4 },
    no_rope: NoRope::Bases,
    rms_norm_eps: 1e-5,
    vocab_size: Some(100_352),
    num_attention_heads: Some(20),
    num_key_value_heads: Some(4),
    max_position_embeddings: 8192,
    tie_word_embeddings: true,
    bos_token_id: Some(100_257),
    eos_token_id: Some(100_257),
    gguf: Gguf { interleaved: true, windows: GgufWindows::Listed, ..Gguf::named("granite_swa") },
    ..GRANITE
};

/// Granite with norms behind its sublayers, too; `logits_scaling` multiplies.
pub(super) const HYPERCLOVAX: Family = Family {
    model_type: "hyperclovax",
    architecture: "HyperCLOVAXForCausalLM",
    norms: [[Some("input_layernorm"), Some("post_norm1")], [Some("post_attention_layernorm"), Some("post_norm2")]],
    gguf: Gguf::NONE,
    ..GRANITE
};
