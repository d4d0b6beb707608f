//! Rows of families with `LayerNorm`s, or with sublayers beside each other.

use super::{LLAMA, QWEN2_EXPERTS};
use crate::spec::block::attention::{HeadWeights, QueryKeyNorms};
use crate::spec::family::{
    Arrangement, AttentionExtra, Biases, ExpertForm, Experts, Family, FamilyNames, Gguf, GgufWindows, NoRope, OwnRopes,
    Scales, Windows,
};
use crate::spec::{Activation, NormKind, RopePairs};

/// Command R.
pub(super) const COHERE: Family = Family {
    model_type: "cohere",
    architecture: "CohereForCausalLM",
    names: FamilyNames { norm_eps: "layer_norm_eps", ..FamilyNames::COMMON },
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::ByHead(HeadWeights::Together)),
    norm_kind: NormKind::LayerWithoutBias,
    arrangement: Arrangement::Beside,
    scales: Scales::Logits,
    rope_pairs: RopePairs::Neighbours,
    rms_norm_eps: 1e-5,
    rope_theta: 500_000.0,
    vocab_size: Some(256_000),
    num_attention_heads: Some(64),
    max_position_embeddings: 8192,
    tie_word_embeddings: true,
    bos_token_id: Some(5),
    eos_token_id: Some(255_001),
    gguf: Gguf { tied_head: Some(true), ..Gguf::named("command-r") },
    ..LLAMA
};

/// Command R7B and A.
pub(super) const COHERE2: Family = Family {
    model_type: "cohere2",
    architecture: "Cohere2ForCausalLM",
    qk_norms: None,
    windows: Windows::AllButEvery { default: 4096, pattern: 4 },
    no_rope: NoRope::Full,
    rope_theta: 10_000.0,
    gguf: Gguf {
        windows: GgufWindows::AllButEvery { pattern: 4, largest: None },
        tied_head: Some(true),
        ..Gguf::named("cohere2")
    },
    ..COHERE
};

pub(super) const STABLELM: Family = Family {
    model_type: "stablelm",
    architecture: "StableLmForCausalLM",
    names: FamilyNames {
        head_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
        norm_eps: "layer_norm_eps",
        ..FamilyNames::COMMON
    },
    qk_norms: Some(QueryKeyNorms::ByHead(HeadWeights::Apart)),
    biases: Biases::Keys([("use_qkv_bias", false), ("attention_out_bias", false), ("mlp_bias", false)]),
    norm_kind: NormKind::Layer,
    arrangement: Arrangement::BesideIf("use_parallel_residual"),
    partial_rotary_factor: Some(0.25),
    rms_norm_eps: 1e-5,
    vocab_size: Some(50_304),
    num_attention_heads: Some(32),
    num_key_value_heads: Some(32),
    max_position_embeddings: 4096,
    bos_token_id: Some(0),
    eos_token_id: Some(0),
    gguf: Gguf { tied_head: Some(false), ..Gguf::named("stablelm") },
    ..LLAMA
};

/// Its dropouts are not computed.
pub(super) const STARCODER2: Family = Family {
    model_type: "starcoder2",
    architecture: "Starcoder2ForCausalLM",
    names: FamilyNames {
        sites: {
            let ([q, k, v, output, ..], [inwards, down]) = (FamilyNames::COMMON.sites, crate::spec::PLAIN_MLP_NAMES);
            [q, k, v, output, inwards, inwards, down]
        },
        norm_eps: "norm_epsilon",
        ..FamilyNames::COMMON
    },
    biases: Biases::Keys([("use_bias", true); 3]),
    norm_kind: NormKind::Layer,
    activation: ("hidden_act", Activation::GeluTanh),
    gated: false,
    windows: Windows::Everywhere(None),
    rms_norm_eps: 1e-5,
    vocab_size: Some(49_152),
    num_attention_heads: Some(24),
    num_key_value_heads: Some(2),
    max_position_embeddings: 4096,
    tie_word_embeddings: true,
    bos_token_id: Some(50_256),
    eos_token_id: Some(50_256),
    gguf: Gguf::named("starcoder2"),
    ..LLAMA
};

pub(super) const HUNYUAN: Family = Family {
    model_type: "hunyuan_v1_dense",
    architecture: "HunYuanDenseV1ForCausalLM",
    names: FamilyNames { head_norms: ["self_attn.query_layernorm", "self_attn.key_layernorm"], ..FamilyNames::COMMON },
    biases: Biases::AttentionKey,
    qk_norms: Some(QueryKeyNorms::Turned),
    own_ropes: OwnRopes::Hunyuan,
    rms_norm_eps: 1e-5,
    vocab_size: Some(290_943),
    num_attention_heads: Some(32),
    gguf: Gguf::named("hunyuan-dense"),
    ..LLAMA
};

/// Its shared expert is as wide as the others.
pub(super) const HUNYUAN_MOE: Family = Family {
    model_type: "hunyuan_v1_moe",
    architecture: "HunYuanMoEV1ForCausalLM",
    names: {
        let [q, k, v, output, ..] = FamilyNames::COMMON.sites;
        let [gate, up, down] = ["mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"];
        FamilyNames { sites: [q, k, v, output, gate, up, down], ..HUNYUAN.names }
    },
    experts: Some(Experts {
        count: 1,
        num_per_token: 1,
        intermediate_size: Some(11_008),
        shared: None,
        norm_topk_prob: None,
        beside_dense: true,
        names: ["mlp.gate.wg", "mlp.experts", "gate_proj", "up_proj", "down_proj"],
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    gguf: Gguf::named("hunyuan-moe"),
    ..HUNYUAN
};

/// Phi-1, 1.5 and 2. Their dropouts are not computed.
pub(super) const PHI: Family = Family {
    model_type: "phi",
    architecture: "PhiForCausalLM",
    names: FamilyNames {
        sites: {
            let ([q, k, v, ..], [output, inwards, down]) = (FamilyNames::COMMON.sites, crate::spec::PHI_NAMES);
            [q, k, v, output, inwards, inwards, down]
        },
        last_norm: "model.final_layernorm",
        norm_eps: "layer_norm_eps",
        ..FamilyNames::COMMON
    },
    biases: Biases::All,
    norm_kind: NormKind::Layer,
    arrangement: Arrangement::Beside,
    activation: ("hidden_act", Activation::GeluTanh),
    gated: false,
    has_head_bias: true,
    partial_rotary_factor: Some(0.5),
    rms_norm_eps: 1e-5,
    vocab_size: Some(51_200),
    num_attention_heads: Some(32),
    gguf: Gguf { tied_head: Some(false), ..Gguf::named("phi2") },
    ..LLAMA
};

/// Pythia.
pub(super) const GPT_NEOX: Family = Family {
    model_type: "gpt_neox",
    architecture: "GPTNeoXForCausalLM",
    names: FamilyNames {
        sites: {
            let [qkv, output, inwards, down] = crate::spec::NEOX_NAMES;
            [qkv, qkv, qkv, output, inwards, inwards, down]
        },
        embedding: Some("embed_in"),
        nesting: Some("gpt_neox."),
        last_norm: "model.final_layer_norm",
        norm_eps: "layer_norm_eps",
        ..FamilyNames::COMMON
    },
    biases: Biases::Keys([("attention_bias", true), ("attention_bias", true), ("mlp_bias", true)]),
    norm_kind: NormKind::Layer,
    arrangement: Arrangement::NormedApartIf("use_parallel_residual"),
    attention_extra: AttentionExtra::ByHead,
    activation: ("hidden_act", Activation::Gelu),
    gated: false,
    partial_rotary_factor: Some(0.25),
    own_ropes: OwnRopes::NeoX,
    rms_norm_eps: 1e-5,
    vocab_size: Some(50_432),
    num_attention_heads: Some(64),
    bos_token_id: Some(0),
    eos_token_id: Some(2),
    gguf: Gguf { tied_head: Some(false), ..Gguf::named("gptneox") },
    ..LLAMA
};
