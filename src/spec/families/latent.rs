//! Rows of families whose attention has latents (DeepSeek-AI, 2024).

use super::mixtures::DEEPSEEK;
use super::{LLAMA, QWEN2_EXPERTS};
use crate::spec::RopePairs;
use crate::spec::family::{
    AttentionExtra, Biases, ExpertForm, Experts, Family, Gguf, LatentWidths, OwnRopes, Router, RouterGroups, Scales,
};

pub(super) const DEEPSEEK_V3: Family = Family {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    biases: Biases::AttentionKey,
    attention_extra: AttentionExtra::Latent(LatentWidths {
        queries: Some(1536),
        key_values: 512,
        of_head: [128, 64, 128],
    }),
    experts: Some(Experts {
        count: 256,
        num_per_token: 8,
        intermediate_size: Some(2048),
        shared: None,
        norm_topk_prob: Some(true),
        router: Some(Router {
            groups: Some(RouterGroups { counts: [8, 4], by_method: false, num_best: 2 }),
            factor: ("routed_scaling_factor", 2.5),
            first: Some(("first_k_dense_replace", 3)),
            ..DEEPSEEK
        }),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    rope_pairs: RopePairs::Neighbours,
    vocab_size: Some(129_280),
    num_attention_heads: Some(128),
    max_position_embeddings: 4096,
    bos_token_id: Some(0),
    eos_token_id: Some(1),
    gguf: Gguf { splits_latents: true, ..Gguf::named("deepseek2") },
    ..LLAMA
};

/// `DeepSeek` V3's under a name of their own; transformers reads the language model of Kimi K2.5 so.
pub(super) const KIMI_K2: Family = Family { model_type: "kimi_k2", ..DEEPSEEK_V3 };

pub(super) const DEEPSEEK_V2: Family = Family {
    model_type: "deepseek_v2",
    architecture: "DeepseekV2ForCausalLM",
    biases: Biases::AttentionAndMlpKeys,
    experts: Some(Experts {
        count: 64,
        num_per_token: 6,
        intermediate_size: Some(1407),
        shared: None,
        norm_topk_prob: Some(false),
        router: Some(Router {
            sigmoid: None,
            bias: None,
            groups: Some(RouterGroups { counts: [1, 1], by_method: true, num_best: 1 }),
            first: Some(("first_k_dense_replace", 0)),
            ..DEEPSEEK
        }),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    vocab_size: Some(102_400),
    num_attention_heads: Some(32),
    max_position_embeddings: 2048,
    bos_token_id: Some(1),
    eos_token_id: Some(2),
    ..DEEPSEEK_V3
};

pub(super) const GLM4_MOE_LITE: Family = Family {
    model_type: "glm4_moe_lite",
    architecture: "Glm4MoeLiteForCausalLM",
    attention_extra: AttentionExtra::Latent(LatentWidths {
        queries: Some(768),
        key_values: 512,
        of_head: [192, 64, 256],
    }),
    experts: Some(Experts {
        count: 64,
        num_per_token: 4,
        intermediate_size: Some(1536),
        shared: None,
        norm_topk_prob: Some(true),
        router: Some(Router { factor: ("routed_scaling_factor", 1.8), ..DEEPSEEK }),
        form: ExpertForm::Apart,
        ..QWEN2_EXPERTS
    }),
    rms_norm_eps: 1e-5,
    vocab_size: Some(154_880),
    num_attention_heads: Some(20),
    max_position_embeddings: 202_752,
    ..DEEPSEEK_V3
};

pub(super) const YOUTU: Family = Family {
    model_type: "youtu",
    architecture: "YoutuForCausalLM",
    experts: None,
    vocab_size: Some(128_256),
    num_attention_heads: Some(16),
    max_position_embeddings: 131_072,
    tie_word_embeddings: true,
    bos_token_id: Some(128_000),
    eos_token_id: Some(128_001),
    ..DEEPSEEK_V3
};

pub(super) const MISTRAL4: Family = Family {
    model_type: "mistral4",
    architecture: "Mistral4ForCausalLM",
    attention_extra: AttentionExtra::Latent(LatentWidths {
        queries: Some(1024),
        key_values: 256,
        of_head: [64, 64, 128],
    }),
    experts: Some(Experts {
        count: 128,
        num_per_token: 4,
        intermediate_size: Some(2048),
        shared: None,
        norm_topk_prob: Some(true),
        router: Some(Router { sigmoid: None, bias: None, first: Some(("first_k_dense_replace", 0)), ..DEEPSEEK }),
        form: ExpertForm::Joined,
        ..QWEN2_EXPERTS
    }),
    own_ropes: OwnRopes::Ministral,
    gguf: Gguf { splits_latents: true, ..Gguf::named("mistral4") },
    vocab_size: Some(131_072),
    num_attention_heads: Some(32),
    max_position_embeddings: 1 << 20,
    bos_token_id: Some(1),
    eos_token_id: Some(2),
    ..DEEPSEEK_V3
};

pub(super) const MINICPM3: Family = Family {
    model_type: "minicpm3",
    architecture: "MiniCPM3ForCausalLM",
    biases: Biases::AttentionAndMlpKeys,
    attention_extra: AttentionExtra::Latent(LatentWidths { queries: Some(768), key_values: 256, of_head: [64, 32, 0] }),
    scales: Scales::Depth,
    gguf: Gguf { rope_factors: true, ..Gguf::named("minicpm3") },
    rope_pairs: RopePairs::Halves,
    rms_norm_eps: 1e-5,
    vocab_size: Some(73_448),
    num_attention_heads: Some(40),
    max_position_embeddings: 32_768,
    bos_token_id: Some(1),
    eos_token_id: Some(2),
    ..YOUTU
};
