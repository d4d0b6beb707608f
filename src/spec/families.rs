//! The families of models that are variations of one decoder block, one row each.

use super::block::Activation;
use super::block::attention::QueryKeyNorms;
use super::family::{
    Arrangement, AttentionExtra, Biases, ExpertForm, Experts, Family, FamilyNames, Gguf, GgufWindows, NoRope, OwnRopes,
    Scales, Windows,
};
use super::{DeltaHeads, LFM2_NAMES, NormKind, RopeAxes, RopePairs, SITE_NAMES};

pub(super) use lacking::LACKING;
pub(super) use wrappers::WRAPPERS;

mod dense;
mod hybrid;
mod lacking;
mod latent;
mod layer_norm;
mod mixtures;
mod wrappers;

const LLAMA_GGUF: Gguf = Gguf { interleaved: true, rope_factors: true, ..Gguf::named("llama") };

const LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    names: FamilyNames::COMMON,
    biases: Biases::AttentionAndMlpKeys,
    qk_norms: None,
    no_rope: NoRope::Never,
    norms: [[Some("input_layernorm"), None], [Some("post_attention_layernorm"), None]],
    norm_kind: NormKind::Rms,
    norms_less_one: false,
    activation: ("hidden_act", Activation::Silu),
    scales: Scales::HeadWidth,
    gated: true,
    has_head_bias: false,
    attention_extra: AttentionExtra::None,
    experts: None,
    fused: [false; 3],
    partial_rotary_factor: None,
    rope_pairs: RopePairs::Halves,
    own_ropes: OwnRopes::None,
    soft_caps: None,
    windows: Windows::Never,
    delta_heads: None,
    has_short_convs: false,
    state_spaces: None,
    arrangement: Arrangement::InTurn,
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
    gguf: LLAMA_GGUF,
};

const MISTRAL: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
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
    gguf: Gguf::named("qwen2"),
    ..LLAMA
};

const QWEN3: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Heads),
    head_dim: Some(128),
    gguf: Gguf::named("qwen3"),
    ..QWEN2
};

const QWEN3_5: Family = Family {
    model_type: "qwen3_5_text",
    architecture: "Qwen3_5ForCausalLM",
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Heads),
    norms_less_one: true,
    partial_rotary_factor: Some(0.25),
    own_ropes: OwnRopes::Axes(RopeAxes { sections: [11, 11, 10], are_interleaved: true }),
    attention_extra: AttentionExtra::OutputGate,
    delta_heads: Some(DeltaHeads { num_key_heads: 16, num_value_heads: 32, key_head_dim: 128, value_head_dim: 128 }),
    vocab_size: Some(248_320),
    num_attention_heads: Some(16),
    head_dim: Some(256),
    num_key_value_heads: Some(4),
    max_position_embeddings: 32_768,
    bos_token_id: None,
    eos_token_id: None,
    gguf: Gguf { post_attention_norm: true, ..Gguf::named("qwen35") },
    ..LLAMA
};

const QWEN2_EXPERTS: Experts = Experts {
    count: 60,
    num_per_token: 4,
    intermediate_size: Some(1408),
    shared: Some(5632),
    norm_topk_prob: Some(false),
    has_biases: false,
    beside_dense: false,
    weighs_inputs: false,
    names: ["mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"],
    router: None,
    form: ExpertForm::Joined,
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
    gguf: Gguf {
        windows: GgufWindows::AllButEvery { pattern: 2, largest: Some(46) },
        tied_head: Some(true),
        ..Gguf::named("gemma2")
    },
    ..LLAMA
};

const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    qk_norms: Some(QueryKeyNorms::Heads),
    soft_caps: Some([None, None]),
    windows: Windows::AllButEvery { default: 4096, pattern: 6 },
    rope_theta: 1e6,
    local_rope_theta: Some(10_000.0),
    vocab_size: Some(262_208),
    max_position_embeddings: 131_072,
    gguf: Gguf {
        windows: GgufWindows::AllButEvery { pattern: 6, largest: Some(62) },
        tied_head: Some(true),
        ..Gguf::named("gemma3")
    },
    ..GEMMA2
};

const GEMMA4: Family = Family {
    model_type: "gemma4_text",
    architecture: "Gemma4ForCausalLM",
    norms_less_one: false,
    scales: Scales::Embeddings,
    attention_extra: AttentionExtra::Gemma4 { layer_input_width: 256 },
    experts: Some(Experts {
        count: 128,
        num_per_token: 8,
        intermediate_size: Some(704),
        shared: None,
        norm_topk_prob: None,
        has_biases: false,
        beside_dense: false,
        weighs_inputs: false,
        names: ["router.proj", "experts", "gate_proj", "up_proj", "down_proj"],
        router: None,
        form: ExpertForm::Joined,
    }),
    windows: Windows::AllButEvery { default: 512, pattern: 6 },
    vocab_size: Some(262_144),
    gguf: Gguf::named("gemma4"),
    ..GEMMA3
};

const GEMMA3N: Family = Family {
    model_type: "gemma3n_text",
    architecture: "Gemma3nForCausalLM",
    norms_less_one: false,
    scales: Scales::Embeddings,
    soft_caps: Some([None, Some(30.0)]),
    attention_extra: AttentionExtra::Gemma3n,
    windows: Windows::AllButEvery { default: 512, pattern: 5 },
    vocab_size: Some(262_400),
    num_key_value_heads: Some(2),
    max_position_embeddings: 32_768,
    gguf: Gguf::named("gemma3n"),
    ..GEMMA3
};

const GLM: Family = Family {
    model_type: "glm",
    architecture: "GlmForCausalLM",
    biases: Biases::QueryKeyValueKey(true),
    fused: [false, true, false],
    partial_rotary_factor: Some(0.5),
    rope_pairs: RopePairs::Neighbours,
    rms_norm_eps: 1.5625e-7,
    head_dim: Some(128),
    num_key_value_heads: Some(2),
    max_position_embeddings: 131_072,
    bos_token_id: None,
    eos_token_id: None,
    gguf: Gguf::named("chatglm"),
    ..LLAMA
};

const OLMO2: Family = Family {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Whole),
    norms: [[None, Some("post_attention_layernorm")], [None, Some("post_feedforward_layernorm")]],
    rms_norm_eps: 1e-5,
    bos_token_id: None,
    eos_token_id: Some(50_279),
    gguf: Gguf::named("olmo2"),
    ..LLAMA
};

const GRANITE: Family = Family {
    model_type: "granite",
    architecture: "GraniteForCausalLM",
    scales: Scales::Multipliers,
    gguf: Gguf { interleaved: true, ..Gguf::named("granite") },
    ..LLAMA
};

const GLM4: Family = Family {
    model_type: "glm4",
    architecture: "Glm4ForCausalLM",
    norms: [
        [Some("input_layernorm"), Some("post_self_attn_layernorm")],
        [Some("post_attention_layernorm"), Some("post_mlp_layernorm")],
    ],
    gguf: Gguf::named("glm4"),
    ..GLM
};

const ERNIE4_5: Family = Family {
    model_type: "ernie4_5",
    architecture: "Ernie4_5ForCausalLM",
    biases: Biases::None,
    rope_pairs: RopePairs::Neighbours,
    rms_norm_eps: 1e-5,
    rope_theta: 500_000.0,
    head_dim: Some(128),
    num_key_value_heads: Some(2),
    max_position_embeddings: 131_072,
    tie_word_embeddings: true,
    gguf: Gguf::named("ernie4_5"),
    ..LLAMA
};

const LFM2: Family = Family {
    model_type: "lfm2",
    architecture: "Lfm2ForCausalLM",
    names: FamilyNames {
        sites: {
            let ([q, k, v, ..], [output, gate, up, down]) = (SITE_NAMES, LFM2_NAMES);
            [q, k, v, output, gate, up, down]
        },
        head_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
        last_norm: "model.embedding_norm",
        norm_eps: "norm_eps",
        ..FamilyNames::COMMON
    },
    biases: Biases::None,
    qk_norms: Some(QueryKeyNorms::Heads),
    norms: [[Some("operator_norm"), None], [Some("ffn_norm"), None]],
    has_short_convs: true,
    rms_norm_eps: 1e-5,
    rope_theta: 1e6,
    vocab_size: Some(65_536),
    num_attention_heads: Some(32),
    num_key_value_heads: Some(8),
    max_position_embeddings: 128_000,
    tie_word_embeddings: true,
    gguf: Gguf::named("lfm2"),
    ..LLAMA
};

/// Every supported family.
pub(super) static FAMILIES: &[Family] = &[
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
        gguf: Gguf { interleaved: true, ..Gguf::named("mistral3") },
        own_ropes: OwnRopes::Ministral,
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
        gguf: Gguf { experts_sum_to_one: false, ..Gguf::named("qwen2moe") },
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
            form: ExpertForm::Apart,
            ..QWEN2_EXPERTS
        }),
        windows: Windows::Never,
        num_key_value_heads: Some(4),
        head_dim: None,
        gguf: Gguf::named("qwen3moe"),
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
            norm_topk_prob: None,
            has_biases: false,
            beside_dense: false,
            weighs_inputs: false,
            names: ["block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"],
            router: None,
            form: ExpertForm::Apart,
        }),
        windows: Windows::Everywhere(None),
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        gguf: Gguf { expert_width: false, ..LLAMA_GGUF },
        ..LLAMA
    },
    Family {
        model_type: "gpt_oss",
        architecture: "GptOssForCausalLM",
        biases: Biases::AttentionKey,
        activation: ("hidden_act", Activation::Clamped),
        attention_extra: AttentionExtra::Sinks,
        experts: Some(Experts {
            count: 128,
            num_per_token: 4,
            intermediate_size: None,
            shared: None,
            norm_topk_prob: None,
            has_biases: true,
            beside_dense: false,
            weighs_inputs: false,
            names: ["mlp.router", "mlp.experts", "gate_proj", "up_proj", "down_proj"],
            router: None,
            form: ExpertForm::InTurn,
        }),
        windows: Windows::AllButEvery { default: 128, pattern: 2 },
        rms_norm_eps: 1e-5,
        rope_theta: 150_000.0,
        head_dim: Some(64),
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        bos_token_id: None,
        eos_token_id: None,
        gguf: Gguf {
            post_attention_norm: true,
            windows: GgufWindows::AllButEvery { pattern: 2, largest: None },
            ..Gguf::named("gpt-oss")
        },
        own_ropes: OwnRopes::GptOss,
        ..LLAMA
    },
    QWEN3_5,
    Family {
        model_type: "qwen3_5_moe_text",
        architecture: "Qwen3_5MoeForCausalLM",
        experts: Some(Experts {
            count: 256,
            num_per_token: 8,
            intermediate_size: Some(512),
            shared: Some(512),
            norm_topk_prob: None,
            ..QWEN2_EXPERTS
        }),
        num_key_value_heads: Some(2),
        gguf: Gguf { post_attention_norm: true, ..Gguf::named("qwen35moe") },
        ..QWEN3_5
    },
    Family {
        model_type: "qwen3_next",
        architecture: "Qwen3NextForCausalLM",
        experts: Some(Experts {
            count: 512,
            num_per_token: 10,
            intermediate_size: Some(512),
            shared: Some(512),
            norm_topk_prob: Some(true),
            form: ExpertForm::Apart,
            ..QWEN2_EXPERTS
        }),
        fused: [false, false, true],
        own_ropes: OwnRopes::None,
        vocab_size: Some(151_936),
        num_key_value_heads: Some(2),
        gguf: Gguf { post_attention_norm: true, ..Gguf::named("qwen3next") },
        ..QWEN3_5
    },
    GEMMA2,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    Family {
        model_type: "gemma4_unified_text",
        architecture: "Gemma4UnifiedForCausalLM",
        attention_extra: AttentionExtra::Gemma4 { layer_input_width: 0 },
        windows: Windows::AllButEvery { default: 1024, pattern: 6 },
        max_position_embeddings: 262_144,
        ..GEMMA4
    },
    Family {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        no_rope: NoRope::LastOf(4),
        rope_theta: 2e6,
        num_key_value_heads: Some(4),
        max_position_embeddings: 32_768,
        tie_word_embeddings: true,
        bos_token_id: Some(128_000),
        eos_token_id: Some(128_001),
        gguf: Gguf { interleaved: true, ..Gguf::named("smollm3") },
        ..LLAMA
    },
    OLMO2,
    GRANITE,
    Family {
        model_type: "phi3",
        architecture: "Phi3ForCausalLM",
        biases: Biases::None,
        fused: [true, true, false],
        partial_rotary_factor: Some(1.0),
        windows: Windows::Everywhere(None),
        rms_norm_eps: 1e-5,
        max_position_embeddings: 4096,
        eos_token_id: Some(32_000),
        gguf: Gguf { windows: GgufWindows::Everywhere, ..Gguf::named("phi3") },
        own_ropes: OwnRopes::Phi,
        ..LLAMA
    },
    GLM,
    GLM4,
    ERNIE4_5,
    Family {
        model_type: "nemotron",
        architecture: "NemotronForCausalLM",
        names: FamilyNames { norm_eps: "norm_eps", ..FamilyNames::COMMON },
        norm_kind: NormKind::Layer,
        norms_less_one: true,
        activation: ("hidden_act", Activation::Relu),
        gated: false,
        partial_rotary_factor: Some(0.5),
        rms_norm_eps: 1e-5,
        vocab_size: Some(256_000),
        num_attention_heads: Some(48),
        max_position_embeddings: 4096,
        bos_token_id: Some(2),
        eos_token_id: Some(3),
        gguf: Gguf { tied_head: Some(false), ..Gguf::named("nemotron") },
        ..LLAMA
    },
    LFM2,
    dense::QWEN2_VL,
    dense::QWEN2_5_VL,
    dense::QWEN3_VL,
    dense::GLM4V,
    dense::GLM_OCR,
    dense::PADDLEOCR_VL,
    dense::INTERNLM3,
    dense::IQUEST_CODER,
    dense::SEED_OSS,
    dense::MINISTRAL,
    dense::CWM,
    dense::GEMMA,
    dense::VAULT_GEMMA,
    dense::ARCEE,
    dense::APERTUS,
    dense::JAIS2,
    dense::HELIUM,
    dense::EXAONE,
    hybrid::GRANITE_HYBRID,
    hybrid::GRANITE_MOE_SHARED,
    hybrid::GRANITE_MOE_SWA,
    hybrid::BAMBA,
    hybrid::NEMOTRON_H,
    hybrid::FALCON_H1,
    layer_norm::COHERE,
    layer_norm::COHERE2,
    layer_norm::STABLELM,
    layer_norm::STARCODER2,
    layer_norm::HUNYUAN,
    layer_norm::HUNYUAN_MOE,
    layer_norm::GPT_NEOX,
    layer_norm::PHI,
    dense::OLMO3,
    dense::EXAONE4,
    mixtures::QWEN3_VL_MOE,
    mixtures::OLMOE,
    mixtures::FLEX_OLMO,
    mixtures::MELLUM,
    mixtures::FLINT,
    mixtures::GRANITE_MOE,
    mixtures::GLM4_MOE,
    mixtures::DOTS1,
    mixtures::ERNIE4_5_MOE,
    mixtures::LFM2_MOE,
    mixtures::MINIMAX_M2,
    mixtures::EXAONE_MOE,
    mixtures::SOLAR_OPEN,
    mixtures::HY_V3,
    mixtures::GLM4V_MOE,
    mixtures::LLAMA4,
    dense::MUSE_GLIMMER,
    dense::GRANITE_SWA,
    dense::HYPERCLOVAX,
    latent::DEEPSEEK_V2,
    latent::DEEPSEEK_V3,
    latent::KIMI_K2,
    latent::GLM4_MOE_LITE,
    latent::YOUTU,
    latent::MISTRAL4,
    latent::MINICPM3,
];
