//! The families of models that are variations of one decoder block, one row each.

use super::block::{Activation, QueryKeyNorms};
use super::{DeltaHeads, RopePairs};

/// What varies between families, and the values that transformers assumes if a config lacks a key.
pub(super) struct Family {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    /// `model_type` and architecture of the multimodal models that have it as their language model.
    pub(super) nested_in: Option<(&'static str, &'static str)>,
    pub(super) biases: Biases,
    /// How queries and keys are normed before the rotary embedding.
    pub(super) qk_norms: Option<QueryKeyNorms>,
    /// Value of `no_rope_layer_interval` where absent: the last of as many layers has no rotary embedding, unless
    /// `no_rope_layers` says otherwise. Absent: all layers have one.
    pub(super) no_rope_interval: Option<usize>,
    /// The norms before and after the attention, and before and after the feed-forward layer.
    pub(super) norms: [[Option<&'static str>; 2]; 2],
    /// Files have the weights of norms less 1.
    pub(super) norms_less_one: bool,
    /// The key that names the activation, and what it means where it is absent.
    pub(super) activation: (&'static str, Activation),
    pub(super) scales: Scales,
    /// What its attention has besides.
    pub(super) extra: Extra,
    /// The feed-forward layers are mixtures of experts.
    pub(super) experts: Option<Experts>,
    /// Whether the layers of queries, keys and values are one, and whether those of gate and up are.
    pub(super) fused: [bool; 2],
    /// Value of `partial_rotary_factor`, the share of a head that turns, where absent; absent: all of it turns.
    pub(super) partial_rotary_factor: Option<f64>,
    /// Which numbers of a head turn together.
    pub(super) rope_pairs: RopePairs,
    /// Values of `attn_logit_softcapping` and `final_logit_softcapping` where absent; absent: the family has no such keys.
    pub(super) soft_caps: Option<[Option<f64>; 2]>,
    pub(super) windows: Windows,
    /// The heads of layers with linear attention where the config has none: all but the last of each `full_attention_interval`,
    /// unless `layer_types` says otherwise. Absent: no layer has it.
    pub(super) delta_heads: Option<DeltaHeads>,
    pub(super) rms_norm_eps: f64,
    /// Base of the rotary frequencies where the config has none.
    pub(super) rope_theta: f64,
    /// Layers with a window have a rotary embedding of their own, with this base where the config has none.
    pub(super) local_rope_theta: Option<f64>,
    /// Absent: it must be given.
    pub(super) vocab_size: Option<usize>,
    /// Absent: it must be given.
    pub(super) num_attention_heads: Option<usize>,
    /// Width of a head; absent: `hidden_size` divided by the number of heads.
    pub(super) head_dim: Option<usize>,
    /// Absent: as many as query heads.
    pub(super) num_key_value_heads: Option<usize>,
    pub(super) max_position_embeddings: usize,
    pub(super) tie_word_embeddings: bool,
    pub(super) bos_token_id: Option<u32>,
    pub(super) eos_token_id: Option<u32>,
}

/// What an attention may have besides.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Extra {
    None,
    /// Every head has one more score, without a value (gpt-oss).
    Sinks,
    /// The layer of queries also makes a gate of the output (Qwen3.5).
    OutputGate,
}

/// A family's mixtures of experts, and the values of their keys where absent.
#[derive(Clone, Copy)]
pub(super) struct Experts {
    /// `num_experts`, or `num_local_experts`.
    pub(super) count: usize,
    /// `num_experts_per_tok`.
    pub(super) num_per_token: usize,
    /// `moe_intermediate_size`; absent: `intermediate_size` is theirs.
    pub(super) intermediate_size: Option<usize>,
    /// `shared_expert_intermediate_size`; absent: there is no shared expert.
    pub(super) shared: Option<usize>,
    /// Whether `norm_topk_prob` decides that the weights of a token's experts sum to 1, and whether `decoder_sparse_step` and
    /// `mlp_only_layers` decide which layers are mixtures. Otherwise they do, and all are.
    pub(super) has_keys: bool,
    /// Whether router and experts add biases.
    pub(super) has_biases: bool,
    /// Names within the block of the router and of what holds the experts, and within an expert of gate, up and down.
    pub(super) names: [&'static str; 5],
}

/// What scores of attention, embeddings, outputs of sublayers and logits are multiplied by.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Scales {
    /// Scores: over the root of the width of a head. Others: by 1.
    HeadWidth,
    /// Scores: over the root of `query_pre_attn_scalar`, whose value is this where absent. Embeddings: by the root of
    /// `hidden_size`. Others: by 1.
    QueryScalar(f64),
    /// By `attention_multiplier`, `embedding_multiplier`, `residual_multiplier` and over `logits_scaling`, each 1 where absent.
    Multipliers,
}

/// Which linear layers add a bias.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Biases {
    /// No layer, whatever the config says: the family has no such key.
    None,
    /// The layers of queries, keys and values, whatever the config says.
    QueryKeyValue,
    /// `attention_bias` decides for the layers of queries, keys and values; this is its value where absent.
    QueryKeyValueKey(bool),
    /// `attention_bias` decides for the four attention layers.
    AttentionKey,
    /// `attention_bias`, and `mlp_bias` for the feed-forward layers.
    AttentionAndMlpKeys,
}

/// Which layers have a sliding window.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// No layer.
    Never,
    /// All layers, unless `sliding_window` is null; the number is its value where absent.
    Everywhere(Option<usize>),
    /// With `use_sliding_window`: the layers that `layer_types` names, or otherwise the layers from `max_window_layers`
    /// on.
    LaterLayers {
        /// Value of `sliding_window` where absent.
        default: usize,
        /// Value of `max_window_layers` where absent.
        first: usize,
    },
    /// The layers that `layer_types` names, or otherwise all but the last of each `sliding_window_pattern`.
    AllButEvery {
        /// Value of `sliding_window` where absent.
        default: usize,
        /// Value of `sliding_window_pattern` where absent.
        pattern: usize,
    },
}

const LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    nested_in: None,
    biases: Biases::AttentionAndMlpKeys,
    qk_norms: None,
    no_rope_interval: None,
    norms: [[Some("input_layernorm"), None], [Some("post_attention_layernorm"), None]],
    norms_less_one: false,
    activation: ("hidden_act", Activation::Silu),
    scales: Scales::HeadWidth,
    extra: Extra::None,
    experts: None,
    fused: [false; 2],
    partial_rotary_factor: None,
    rope_pairs: RopePairs::Halves,
    soft_caps: None,
    windows: Windows::Never,
    delta_heads: None,
    rms_norm_eps: 1e-6,
    rope_theta: 10_000.0,
    local_rope_theta: None,
    vocab_size: None,
    num_attention_heads: None,
    head_dim: None,
    num_key_value_heads: None,
    max_position_embeddings: 2048,
    tie_word_embeddings: false,
    bos_token_id: Some(1),
    eos_token_id: Some(2),
};

const MISTRAL: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    nested_in: Some(("mistral3", "Mistral3ForConditionalGeneration")),
    biases: Biases::None,
    windows: Windows::Everywhere(Some(4096)),
    num_key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    ..LLAMA
};

const QWEN2: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    biases: Biases::QueryKeyValue,
    windows: Windows::LaterLayers { default: 4096, first: 28 },
    num_key_value_heads: Some(32),
    max_position_embeddings: 32_768,
    bos_token_id: None,
    eos_token_id: None,
    ..LLAMA
};

const QWEN3: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Heads),
    head_dim: Some(128),
    ..QWEN2
};

const QWEN3_5: Family = Family {
    model_type: "qwen3_5_text",
    architecture: "Qwen3_5ForCausalLM",
    nested_in: Some(("qwen3_5", "Qwen3_5ForConditionalGeneration")),
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Heads),
    norms_less_one: true,
    partial_rotary_factor: Some(0.25),
    extra: Extra::OutputGate,
    delta_heads: Some(DeltaHeads { num_key_heads: 16, num_value_heads: 32, key_head_dim: 128, value_head_dim: 128 }),
    vocab_size: Some(248_320),
    num_attention_heads: Some(16),
    head_dim: Some(256),
    num_key_value_heads: Some(4),
    max_position_embeddings: 32_768,
    bos_token_id: None,
    eos_token_id: None,
    ..LLAMA
};

const QWEN2_EXPERTS: Experts = Experts {
    count: 60,
    num_per_token: 4,
    intermediate_size: Some(1408),
    shared: Some(5632),
    has_keys: true,
    has_biases: false,
    names: ["mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"],
};

const GEMMA2: Family = Family {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    biases: Biases::AttentionKey,
    norms: [
        [Some("input_layernorm"), Some("post_attention_layernorm")],
        [Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm")],
    ],
    norms_less_one: true,
    activation: ("hidden_activation", Activation::GeluTanh),
    scales: Scales::QueryScalar(256.0),
    soft_caps: Some([Some(50.0), Some(30.0)]),
    windows: Windows::AllButEvery { default: 4096, pattern: 2 },
    vocab_size: Some(256_000),
    num_attention_heads: Some(8),
    head_dim: Some(256),
    num_key_value_heads: Some(4),
    max_position_embeddings: 8192,
    tie_word_embeddings: true,
    bos_token_id: Some(2),
    eos_token_id: Some(1),
    ..LLAMA
};

const GLM: Family = Family {
    model_type: "glm",
    architecture: "GlmForCausalLM",
    biases: Biases::QueryKeyValueKey(true),
    fused: [false, true],
    partial_rotary_factor: Some(0.5),
    rope_pairs: RopePairs::Neighbours,
    rms_norm_eps: 1.5625e-7,
    head_dim: Some(128),
    num_key_value_heads: Some(2),
    max_position_embeddings: 131_072,
    bos_token_id: None,
    eos_token_id: None,
    ..LLAMA
};

/// Every supported family.
pub(super) const FAMILIES: [Family; 19] = [
    LLAMA,
    MISTRAL,
    Family {
        model_type: "ministral3",
        architecture: "Ministral3ForCausalLM",
        windows: Windows::Everywhere(None),
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        head_dim: Some(128),
        max_position_embeddings: 262_144,
        ..MISTRAL
    },
    QWEN2,
    QWEN3,
    Family {
        model_type: "qwen2_moe",
        architecture: "Qwen2MoeForCausalLM",
        experts: Some(QWEN2_EXPERTS),
        windows: Windows::Never,
        num_key_value_heads: Some(16),
        ..QWEN2
    },
    Family {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        experts: Some(Experts {
            count: 128,
            num_per_token: 8,
            intermediate_size: Some(768),
            shared: None,
            ..QWEN2_EXPERTS
        }),
        windows: Windows::Never,
        num_key_value_heads: Some(4),
        head_dim: None,
        ..QWEN3
    },
    Family {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        biases: Biases::None,
        experts: Some(Experts {
            count: 8,
            num_per_token: 2,
            intermediate_size: None,
            shared: None,
            has_keys: false,
            has_biases: false,
            names: ["block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"],
        }),
        windows: Windows::Everywhere(None),
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        ..LLAMA
    },
    Family {
        model_type: "gpt_oss",
        architecture: "GptOssForCausalLM",
        biases: Biases::AttentionKey,
        activation: ("hidden_act", Activation::Clamped),
        extra: Extra::Sinks,
        experts: Some(Experts {
            count: 128,
            num_per_token: 4,
            intermediate_size: None,
            shared: None,
            has_keys: false,
            has_biases: true,
            names: ["mlp.router", "mlp.experts", "gate_proj", "up_proj", "down_proj"],
        }),
        windows: Windows::AllButEvery { default: 128, pattern: 2 },
        rms_norm_eps: 1e-5,
        rope_theta: 150_000.0,
        head_dim: Some(64),
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        bos_token_id: None,
        eos_token_id: None,
        ..LLAMA
    },
    QWEN3_5,
    Family {
        model_type: "qwen3_5_moe_text",
        architecture: "Qwen3_5MoeForCausalLM",
        nested_in: Some(("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")),
        experts: Some(Experts {
            count: 256,
            num_per_token: 8,
            intermediate_size: Some(512),
            shared: Some(512),
            has_keys: false,
            ..QWEN2_EXPERTS
        }),
        num_key_value_heads: Some(2),
        ..QWEN3_5
    },
    GEMMA2,
    Family {
        model_type: "gemma3_text",
        architecture: "Gemma3ForCausalLM",
        nested_in: Some(("gemma3", "Gemma3ForConditionalGeneration")),
        qk_norms: Some(QueryKeyNorms::Heads),
        soft_caps: Some([None, None]),
        windows: Windows::AllButEvery { default: 4096, pattern: 6 },
        rope_theta: 1e6,
        local_rope_theta: Some(10_000.0),
        vocab_size: Some(262_208),
        max_position_embeddings: 131_072,
        ..GEMMA2
    },
    Family {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        no_rope_interval: Some(4),
        num_key_value_heads: Some(4),
        max_position_embeddings: 32_768,
        tie_word_embeddings: true,
        bos_token_id: Some(128_000),
        eos_token_id: Some(128_001),
        ..LLAMA
    },
    Family {
        model_type: "olmo2",
        architecture: "Olmo2ForCausalLM",
        biases: Biases::AttentionKey,
        qk_norms: Some(QueryKeyNorms::Whole),
        norms: [[None, Some("post_attention_layernorm")], [None, Some("post_feedforward_layernorm")]],
        rms_norm_eps: 1e-5,
        bos_token_id: None,
        eos_token_id: Some(50_279),
        ..LLAMA
    },
    Family { model_type: "granite", architecture: "GraniteForCausalLM", scales: Scales::Multipliers, ..LLAMA },
    Family {
        model_type: "phi3",
        architecture: "Phi3ForCausalLM",
        biases: Biases::None,
        fused: [true; 2],
        partial_rotary_factor: Some(1.0),
        windows: Windows::Everywhere(None),
        rms_norm_eps: 1e-5,
        max_position_embeddings: 4096,
        eos_token_id: Some(32_000),
        ..LLAMA
    },
    GLM,
    Family {
        model_type: "glm4",
        architecture: "Glm4ForCausalLM",
        norms: [
            [Some("input_layernorm"), Some("post_self_attn_layernorm")],
            [Some("post_attention_layernorm"), Some("post_mlp_layernorm")],
        ],
        ..GLM
    },
];

/// What models of other types need that is not implemented here, by how their types begin.
pub(super) const LACKING: &[(&str, &str)] = &[
    ("qwen3_next", "linear attention"),
    ("kimi_linear", "linear attention"),
    ("minimax", "a mixture of experts, in some versions with linear attention"),
    ("mamba", "state-space layers"),
    ("jamba", "state-space layers and a mixture of experts"),
    ("falcon_h1", "state-space layers"),
    ("granitemoe", "a mixture of experts"),
    ("olmoe", "a mixture of experts"),
    ("phimoe", "a mixture of experts"),
    ("glm4_moe", "a mixture of experts"),
    ("llama4", "a mixture of experts"),
    ("deepseek", "a mixture of experts and latent attention"),
    ("gemma4", "keys and values shared between layers"),
    ("gemma3n", "keys and values shared between layers"),
    ("cohere", "LayerNorm and sublayers side by side"),
    ("gpt_neox", "LayerNorm and sublayers side by side"),
    ("phi", "LayerNorm and sublayers side by side"),
    ("falcon", "LayerNorm and sublayers side by side"),
    ("gpt2", "LayerNorm and learned positions"),
];
