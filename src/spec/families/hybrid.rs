//! Rows of families with state spaces (Dao and Gu, 2024).

use super::dense::GRANITE_SWA;
use super::mixtures::{DEEPSEEK, GRANITE_EXPERTS, GRANITE_MOE};
use super::{GRANITE, LLAMA, QWEN2_EXPERTS};
use crate::spec::Activation;
use crate::spec::family::{
    Arrangement, Biases, ExpertForm, Experts, Family, FamilyNames, Gguf, NoRope, Router, Scales, StateSpaces,
};
use crate::spec::state_space::{IN_MAMBA, IN_MIXER};

const MAMBA: StateSpaces = StateSpaces {
    counts: [
        ("mamba_n_heads", 128),
        ("mamba_n_groups", 1),
        ("mamba_d_head", 0),
        ("mamba_d_state", 256),
        ("mamba_d_conv", 4),
    ],
    width: None,
    divides: true,
    asks_for_norm: false,
    output_bias: None,
    biases: ["mamba_conv_bias", "mamba_proj_bias"],
    activation: "hidden_act",
    least: None,
    names: &IN_MAMBA,
    is_output_bare: false,
};

/// Granite 4.
pub(super) const GRANITE_HYBRID: Family = Family {
    model_type: "granitemoehybrid",
    architecture: "GraniteMoeHybridForCausalLM",
    names: {
        let [q, k, v, output, ..] = FamilyNames::COMMON.sites;
        let [gate_up, down] = crate::spec::SHARED_MLP_NAMES;
        FamilyNames { sites: [q, k, v, output, gate_up, gate_up, down], gate_up, ..FamilyNames::COMMON }
    },
    biases: Biases::AttentionKey,
    no_rope: NoRope::UnlessNamed,
    state_spaces: Some(MAMBA),
    fused: [false, true, false],
    experts: Some(Experts { intermediate_size: Some(11_008), beside_dense: true, ..GRANITE_EXPERTS }),
    gguf: Gguf {
        interleaved: true,
        expert_width: false,
        without_states: Some("granite"),
        ..Gguf::named("granitehybrid")
    },
    ..GRANITE
};

/// Granite with a shared expert beside the others.
pub(super) const GRANITE_MOE_SHARED: Family = Family {
    model_type: "granitemoeshared",
    architecture: "GraniteMoeSharedForCausalLM",
    no_rope: NoRope::Never,
    state_spaces: None,
    gguf: GRANITE_MOE.gguf,
    ..GRANITE_HYBRID
};

/// The same with windows and sinks. llama.cpp has gate and up of the shared expert in one.
pub(super) const GRANITE_MOE_SWA: Family = Family {
    model_type: "granitemoe_swa",
    architecture: "GraniteMoeSWAForCausalLM",
    attention_extra: GRANITE_SWA.attention_extra,
    windows: GRANITE_SWA.windows,
    no_rope: GRANITE_SWA.no_rope,
    experts: Some(Experts {
        intermediate_size: Some(11_008),
        beside_dense: true,
        names: ["block_sparse_moe.router", "block_sparse_moe.experts", "gate_proj", "up_proj", "down_proj"],
        ..GRANITE_EXPERTS
    }),
    gguf: Gguf::NONE,
    ..GRANITE_MOE_SHARED
};

pub(super) const NEMOTRON_H: Family = Family {
    model_type: "nemotron_h",
    architecture: "NemotronHForCausalLM",
    names: FamilyNames {
        sites: [
            "mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj", "mixer.up_proj", "mixer.up_proj",
            "mixer.down_proj",
        ],
        embedding: Some("embeddings"),
        last_norm: "model.norm_f",
        norm_eps: "layer_norm_epsilon",
        ..FamilyNames::COMMON
    },
    norms: [[Some("norm"), None]; 2],
    arrangement: Arrangement::OneEach,
    no_rope: NoRope::All,
    activation: ("mlp_hidden_act", Activation::Relu),
    gated: false,
    state_spaces: Some(StateSpaces {
        counts: [
            ("mamba_num_heads", 128),
            ("n_groups", 8),
            ("mamba_head_dim", 64),
            ("ssm_state_size", 128),
            ("conv_kernel", 4),
        ],
        divides: false,
        biases: ["use_conv_bias", "use_bias"],
        activation: "mamba_hidden_act",
        least: Some(("time_step_min", 0.001)),
        names: &IN_MIXER,
        is_output_bare: true,
        ..MAMBA
    }),
    experts: Some(Experts {
        count: 8,
        num_per_token: 2,
        intermediate_size: Some(7688),
        shared: None,
        norm_topk_prob: Some(true),
        names: ["mixer.gate", "mixer.experts", "up_proj", "up_proj", "down_proj"],
        router: Some(Router {
            bias: Some(("mixer.gate.e_score_correction_bias", None)),
            shared: Some(("mixer.shared_experts", "moe_shared_expert_intermediate_size")),
            first: None,
            ..DEEPSEEK
        }),
        form: ExpertForm::Ungated,
        ..QWEN2_EXPERTS
    }),
    rms_norm_eps: 1e-5,
    vocab_size: Some(131_072),
    num_attention_heads: Some(32),
    head_dim: Some(128),
    num_key_value_heads: Some(8),
    max_position_embeddings: 4096,
    gguf: Gguf { interleaved: true, of_mixtures: Some("nemotron_h_moe"), ..Gguf::named("nemotron_h") },
    ..LLAMA
};

pub(super) const FALCON_H1: Family = Family {
    model_type: "falcon_h1",
    architecture: "FalconH1ForCausalLM",
    names: FamilyNames {
        sites: {
            let [q, k, v, output, ..] = FamilyNames::COMMON.sites;
            [q, k, v, output, "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"]
        },
        last_norm: "model.final_layernorm",
        ..FamilyNames::COMMON
    },
    norms: [[Some("input_layernorm"), None], [Some("pre_ff_layernorm"), None]],
    arrangement: Arrangement::MixersBeside,
    scales: Scales::Parts,
    state_spaces: Some(StateSpaces {
        width: Some(1024),
        asks_for_norm: true,
        output_bias: Some("projectors_bias"),
        is_output_bare: true,
        ..MAMBA
    }),
    rms_norm_eps: 1e-5,
    vocab_size: Some(128_000),
    num_attention_heads: Some(32),
    num_key_value_heads: Some(8),
    max_position_embeddings: 8192,
    gguf: Gguf { tied_head: Some(false), ..Gguf::named("falcon-h1") },
    ..LLAMA
};

/// llama.cpp's converter orders rows of its queries and keys as if all of a head turned.
pub(super) const BAMBA: Family = Family {
    model_type: "bamba",
    architecture: "BambaForCausalLM",
    names: FALCON_H1.names,
    norms: FALCON_H1.norms,
    state_spaces: Some(MAMBA),
    partial_rotary_factor: Some(0.5),
    rms_norm_eps: 1e-5,
    vocab_size: Some(128_000),
    num_attention_heads: Some(32),
    num_key_value_heads: Some(8),
    max_position_embeddings: 262_144,
    gguf: Gguf::NONE,
    ..LLAMA
};
