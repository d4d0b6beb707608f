//! Rows of families with mixtures of experts that differ from another in little.

use super::dense::{EXAONE4, GLM4V, QWEN3_VL};
use super::{ERNIE4_5, GRANITE, LFM2, LLAMA, OLMO2, QWEN2_EXPERTS, QWEN3};
use crate::spec::RopePairs;
use crate::spec::block::attention::QueryKeyNorms;
use crate::spec::family::{
    AttentionExtra, Biases, ExpertForm, Experts, Family, FamilyNames, Gguf, GgufWindows, NoRope, OwnRopes, Router,
    RouterGroups, Windows,
};

pub(super) const QWEN3_VL_MOE: Family = Family {
    model_type: "qwen3_vl_moe_text",
    architecture: "Qwen3VLMoeTextModel",
    experts: Some(Experts { shared: None, norm_topk_prob: Some(true), ..QWEN2_EXPERTS }),
    num_key_value_heads: Some(16),
    gguf: Gguf::named("qwen3vlmoe"),
    ..QWEN3_VL
};

pub(super) const OLMOE: Family = Family {
    model_type: "olmoe",
    architecture: "OlmoeForCausalLM",
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Whole),
    experts: Some(Experts {
        count: 64,
        num_per_token: 8,
        intermediate_size: None,
        shared: None,
        norm_topk_prob: Some(false),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    rms_norm_eps: 1e-5,
    max_position_embeddings: 4096,
    bos_token_id: None,
    eos_token_id: Some(50_279),
    gguf: Gguf { experts_sum_to_one: false, expert_width: false, ..Gguf::named("olmoe") },
    ..LLAMA
};

/// `OLMo` 2 with experts.
pub(super) const FLEX_OLMO: Family = Family {
    model_type: "flex_olmo",
    architecture: "FlexOlmoForCausalLM",
    norms: OLMO2.norms,
    experts: Some(Experts {
        count: 7,
        num_per_token: 5,
        intermediate_size: None,
        shared: None,
        norm_topk_prob: Some(false),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    rms_norm_eps: 1e-6,
    rope_theta: 500_000.0,
    eos_token_id: Some(100_257),
    gguf: Gguf::NONE,
    ..OLMOE
};

/// Mellum 2: Qwen3 with experts and windows. Layers with a window have a rotary embedding of their own.
pub(super) const MELLUM: Family = Family {
    model_type: "mellum",
    architecture: "MellumForCausalLM",
    experts: Some(Experts {
        count: 64,
        num_per_token: 8,
        intermediate_size: Some(896),
        shared: None,
        norm_topk_prob: Some(true),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    // All are full where no list says otherwise.
    windows: Windows::AllButEvery { default: 1024, pattern: 1 },
    rope_theta: 500_000.0,
    local_rope_theta: Some(10_000.0),
    own_ropes: OwnRopes::Olmo,
    num_key_value_heads: Some(4),
    max_position_embeddings: 131_072,
    gguf: Gguf { windows: GgufWindows::Listed, tied_head: Some(false), ..Gguf::named("mellum") },
    ..QWEN3
};

/// Qwen3 with experts of which sigmoids choose, sinks, and no rotary embedding in layers without a window.
pub(super) const FLINT: Family = Family {
    model_type: "flint",
    architecture: "FlintForCausalLM",
    no_rope: NoRope::Full,
    attention_extra: AttentionExtra::Sinks,
    experts: Some(Experts {
        count: 256,
        num_per_token: 6,
        intermediate_size: Some(512),
        shared: None,
        norm_topk_prob: Some(true),
        router: Some(Router {
            counts: ["num_experts", "num_experts_per_tok"],
            sigmoid: Some(0.0),
            bias: None,
            groups: None,
            shared: Some(("mlp.shared_expert", "shared_expert_intermediate_size")),
            first: None,
            ..DEEPSEEK
        }),
        form: ExpertForm::Joined,
        ..QWEN2_EXPERTS
    }),
    windows: Windows::AllButEvery { default: 513, pattern: 4 },
    vocab_size: Some(150_144),
    num_attention_heads: Some(32),
    num_key_value_heads: Some(4),
    max_position_embeddings: 262_144,
    gguf: Gguf::NONE,
    ..QWEN3
};

pub(super) const GRANITE_EXPERTS: Experts = Experts {
    count: 8,
    num_per_token: 2,
    intermediate_size: None,
    shared: None,
    norm_topk_prob: None,
    has_biases: false,
    beside_dense: false,
    weighs_inputs: false,
    names: ["block_sparse_moe.router.layer", "block_sparse_moe.experts", "gate_proj", "up_proj", "down_proj"],
    form: ExpertForm::Joined,
    router: None,
};

pub(super) const GRANITE_MOE: Family = Family {
    model_type: "granitemoe",
    architecture: "GraniteMoeForCausalLM",
    biases: Biases::AttentionKey,
    experts: Some(GRANITE_EXPERTS),
    gguf: Gguf { interleaved: true, expert_width: false, ..Gguf::named("granitemoe") },
    ..GRANITE
};

/// That of `DeepSeek` V3.
pub(super) const DEEPSEEK: Router = Router {
    counts: ["n_routed_experts", "num_experts_per_tok"],
    sigmoid: Some(1e-20),
    bias: Some(("mlp.gate.e_score_correction_bias", None)),
    groups: Some(RouterGroups { counts: [1, 1], by_method: false, num_best: 2 }),
    factor: ("routed_scaling_factor", 1.0),
    shared: Some(("mlp.shared_experts", "n_shared_experts")),
    first: Some(("first_k_dense_replace", 1)),
};

pub(super) const GLM4_MOE: Family = Family {
    model_type: "glm4_moe",
    architecture: "Glm4MoeForCausalLM",
    biases: Biases::QueryKeyValueKey(false),
    // Where `use_qk_norm` says so.
    qk_norms: Some(QueryKeyNorms::Heads),
    experts: Some(Experts {
        count: 128,
        num_per_token: 8,
        intermediate_size: Some(1408),
        shared: None,
        norm_topk_prob: Some(true),
        router: Some(DEEPSEEK),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    partial_rotary_factor: Some(0.5),
    rms_norm_eps: 1e-5,
    num_key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    bos_token_id: None,
    eos_token_id: None,
    gguf: Gguf { post_attention_norm: true, ..Gguf::named("glm4moe") },
    ..LLAMA
};

/// The text of GLM-4.5V.
pub(super) const GLM4V_MOE: Family = Family {
    model_type: "glm4v_moe_text",
    architecture: "Glm4vMoeTextModel",
    biases: Biases::QueryKeyValueKey(true),
    qk_norms: None,
    own_ropes: GLM4V.own_ropes,
    max_position_embeddings: 65_536,
    ..GLM4_MOE
};

pub(super) const DOTS1: Family = Family {
    model_type: "dots1",
    architecture: "Dots1ForCausalLM",
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Heads),
    experts: Some(Experts {
        count: 128,
        num_per_token: 6,
        intermediate_size: Some(1408),
        shared: None,
        norm_topk_prob: Some(false),
        router: Some(Router { first: Some(("first_k_dense_replace", 0)), ..DEEPSEEK }),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    num_key_value_heads: Some(32),
    bos_token_id: None,
    eos_token_id: None,
    gguf: Gguf::named("dots1"),
    ..LLAMA
};

pub(super) const ERNIE4_5_MOE: Family = Family {
    model_type: "ernie4_5_moe",
    architecture: "Ernie4_5_MoeForCausalLM",
    experts: Some(Experts {
        count: 64,
        num_per_token: 6,
        intermediate_size: Some(1536),
        shared: None,
        norm_topk_prob: Some(true),
        router: Some(Router {
            counts: ["moe_num_experts", "moe_k"],
            sigmoid: None,
            bias: Some(("mlp.moe_statics.e_score_correction_bias", None)),
            groups: None,
            factor: DEEPSEEK.factor,
            shared: Some(("mlp.shared_experts", "moe_num_shared_experts")),
            first: Some(("moe_layer_start_index", 1)),
        }),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    head_dim: None,
    num_key_value_heads: Some(4),
    gguf: Gguf { expert_factor: false, ..Gguf::named("ernie4_5-moe") },
    ..ERNIE4_5
};

pub(super) const LFM2_MOE: Family = Family {
    model_type: "lfm2_moe",
    architecture: "Lfm2MoeForCausalLM",
    experts: Some(Experts {
        count: 32,
        num_per_token: 4,
        intermediate_size: Some(1792),
        shared: None,
        norm_topk_prob: Some(true),
        has_biases: false,
        beside_dense: false,
        weighs_inputs: false,
        names: ["feed_forward.gate", "feed_forward.experts", "w1", "w3", "w2"],
        form: ExpertForm::Joined,
        router: Some(Router {
            counts: ["num_experts", "num_experts_per_tok"],
            sigmoid: Some(1e-6),
            bias: Some(("feed_forward.expert_bias", Some("use_expert_bias"))),
            groups: None,
            factor: DEEPSEEK.factor,
            shared: None,
            first: Some(("num_dense_layers", 2)),
        }),
    }),
    gguf: Gguf { expert_factor: false, ..Gguf::named("lfm2moe") },
    ..LFM2
};

pub(super) const MINIMAX_M2: Family = Family {
    model_type: "minimax_m2",
    architecture: "MiniMaxM2ForCausalLM",
    biases: Biases::None,
    qk_norms: Some(QueryKeyNorms::Whole),
    experts: Some(Experts {
        count: 256,
        num_per_token: 8,
        intermediate_size: None,
        shared: None,
        norm_topk_prob: None,
        has_biases: false,
        beside_dense: false,
        weighs_inputs: false,
        names: ["block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"],
        form: ExpertForm::Apart,
        router: Some(Router {
            counts: ["num_local_experts", "num_experts_per_tok"],
            sigmoid: Some(0.0),
            bias: Some(("block_sparse_moe.e_score_correction_bias", None)),
            groups: None,
            factor: DEEPSEEK.factor,
            shared: None,
            first: None,
        }),
    }),
    partial_rotary_factor: Some(1.0),
    rope_theta: 5e6,
    head_dim: Some(128),
    num_key_value_heads: Some(8),
    max_position_embeddings: 196_608,
    bos_token_id: Some(200_034),
    eos_token_id: Some(200_020),
    gguf: Gguf { expert_factor: false, ..Gguf::named("minimax-m2") },
    ..LLAMA
};

pub(super) const EXAONE_MOE: Family = Family {
    model_type: "exaone_moe",
    architecture: "ExaoneMoeForCausalLM",
    norms: LLAMA.norms,
    experts: Some(Experts {
        count: 64,
        num_per_token: 8,
        intermediate_size: Some(1024),
        shared: None,
        norm_topk_prob: Some(true),
        router: Some(Router {
            counts: ["num_experts", "num_experts_per_tok"],
            factor: ("routed_scaling_factor", 2.5),
            shared: Some(("mlp.shared_experts", "num_shared_experts")),
            ..DEEPSEEK
        }),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    bos_token_id: Some(1),
    eos_token_id: Some(53),
    gguf: Gguf {
        rope_factors: true,
        windows: GgufWindows::AllButEvery { pattern: 4, largest: None },
        ..Gguf::named("exaone-moe")
    },
    ..EXAONE4
};

pub(super) const SOLAR_OPEN: Family = Family {
    model_type: "solar_open",
    architecture: "SolarOpenForCausalLM",
    qk_norms: None,
    experts: Some(Experts {
        intermediate_size: Some(1280),
        shared: None,
        count: 128,
        num_per_token: 8,
        norm_topk_prob: Some(true),
        router: Some(Router { first: None, ..DEEPSEEK }),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    partial_rotary_factor: Some(1.0),
    rope_theta: 1e6,
    vocab_size: Some(196_608),
    num_attention_heads: Some(64),
    head_dim: Some(128),
    ..GLM4_MOE
};

/// Hunyuan 3.
pub(super) const HY_V3: Family = Family {
    model_type: "hy_v3",
    architecture: "HYV3ForCausalLM",
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Heads),
    experts: Some(Experts {
        count: 192,
        num_per_token: 8,
        intermediate_size: Some(1536),
        shared: None,
        norm_topk_prob: None,
        router: Some(Router {
            counts: ["num_experts", "num_experts_per_tok"],
            groups: None,
            factor: ("router_scaling_factor", 2.826),
            shared: Some(("mlp.shared_experts", "num_shared_experts")),
            ..DEEPSEEK
        }),
        form: ExpertForm::Joined,
        ..QWEN2_EXPERTS
    }),
    rms_norm_eps: 1e-5,
    rope_theta: 11_158_840.0,
    vocab_size: Some(120_832),
    num_attention_heads: Some(64),
    head_dim: Some(128),
    num_key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    bos_token_id: None,
    eos_token_id: None,
    gguf: Gguf { rope_factors: true, ..Gguf::named("hy_v3") },
    ..LLAMA
};

/// Inside Llama 4. It has one shared expert, without a key.
pub(super) const LLAMA4: Family = Family {
    model_type: "llama4_text",
    architecture: "Llama4ForCausalLM",
    names: FamilyNames {
        sites: {
            let [q, k, v, output, ..] = FamilyNames::COMMON.sites;
            [q, k, v, output, "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"]
        },
        ..FamilyNames::COMMON
    },
    biases: Biases::AttentionKey,
    // Where `use_qk_norm` does not say no.
    qk_norms: Some(QueryKeyNorms::Unweighted),
    no_rope: NoRope::LastOf(4),
    experts: Some(Experts {
        count: 16,
        num_per_token: 1,
        intermediate_size: Some(8192),
        shared: None,
        norm_topk_prob: Some(false),
        weighs_inputs: true,
        names: ["feed_forward.router", "feed_forward.experts", "gate_proj", "up_proj", "down_proj"],
        router: Some(Router {
            counts: ["num_local_experts", "num_experts_per_tok"],
            sigmoid: Some(0.0),
            bias: None,
            groups: None,
            shared: Some(("feed_forward.shared_expert", "num_shared_experts")),
            first: None,
            ..DEEPSEEK
        }),
        form: ExpertForm::Turned,
        ..QWEN2_EXPERTS
    }),
    rope_pairs: RopePairs::Neighbours,
    rms_norm_eps: 1e-5,
    rope_theta: 500_000.0,
    vocab_size: Some(202_048),
    num_attention_heads: Some(40),
    head_dim: Some(128),
    num_key_value_heads: Some(8),
    max_position_embeddings: 131_072,
    gguf: Gguf { rope_factors: true, experts_sum_to_one: false, expert_factor: false, ..Gguf::named("llama4") },
    ..LLAMA
};
