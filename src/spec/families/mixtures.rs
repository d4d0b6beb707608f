//! Rows of families with mixtures of experts that differ from another in little.

use super::dense::QWEN3_VL;
use super::{GRANITE, LLAMA, QWEN2_EXPERTS};
use crate::spec::block::attention::QueryKeyNorms;
use crate::spec::family::{Biases, Experts, Family, Gguf};

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
        ..QWEN2_EXPERTS
    }),
    rms_norm_eps: 1e-5,
    max_position_embeddings: 4096,
    bos_token_id: None,
    eos_token_id: Some(50_279),
    gguf: Gguf { experts_sum_to_one: false, expert_width: false, ..Gguf::named("olmoe") },
    ..LLAMA
};

pub(super) const GRANITE_MOE: Family = Family {
    model_type: "granitemoe",
    architecture: "GraniteMoeForCausalLM",
    biases: Biases::AttentionKey,
    experts: Some(Experts {
        count: 8,
        num_per_token: 2,
        intermediate_size: None,
        shared: None,
        norm_topk_prob: None,
        has_biases: false,
        names: ["block_sparse_moe.router.layer", "block_sparse_moe.experts", "gate_proj", "up_proj", "down_proj"],
    }),
    gguf: Gguf { interleaved: true, expert_width: false, ..Gguf::named("granitemoe") },
    ..GRANITE
};
