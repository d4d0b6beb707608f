//! NVIDIA GPUs: plain tensor calls, and kernels in CUDA C++ for what these are slow at.
//!
//! A kernel runs on burn's own stream. Where there is none for a type, a size or a GPU, and where a check found it wrong, the plain
//! version runs. [`KERNELS_VARIABLE`] switches kernels off, to find the one that is at fault.

mod check;
#[cfg(feature = "cuda-llvm")]
pub(super) mod kernels;
#[cfg(not(feature = "cuda-llvm"))]
#[expect(missing_docs, clippy::must_use_candidate, reason = "as with GPUs")]
mod kernels {
    use burn::tensor::Device;

    use super::{Cuda, KernelState};
    use crate::ops::kernels::{Attention, Linears, Losses, Norms, Recurrent, Updates};

    impl Linears for Cuda {}
    impl Norms for Cuda {}
    impl Attention for Cuda {}
    impl Recurrent for Cuda {}
    impl Losses for Cuda {}
    impl Updates for Cuda {}

    pub fn digest() -> String {
        String::new()
    }

    pub fn take_noted_bytes() -> Option<u64> {
        None
    }

    pub fn kernel_state(_: &Device) -> Option<&'static KernelState> {
        None
    }
}
#[cfg(any(test, feature = "cuda-llvm"))]
mod ptx;
mod table;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::kernels::{Place, Plain, Properties};
use super::plain::cross_entropy::PLAIN_MULTIPLE;
use super::plain::delta_rule::chunks::CHUNK_TOKENS;
use super::plain::delta_rule::plain_delta_rule_numbers;
use super::product::F32Products;
use crate::device::Dtype;
use crate::spec::{Activation, Block, DeltaHeads, Heads, ModelConfig, NormKind};

use table::Kernel;

pub use check::{KERNELS_VARIABLE, KernelState, leave_alone};
#[cfg(feature = "cuda-llvm")]
pub use kernels::{Nccl, WrittenNumbers, self_check};
pub use kernels::{digest, kernel_state, take_noted_bytes};
pub use table::names;

/// What a kernel computes, and how far it is off.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Compared {
    /// The name by which it is switched off.
    pub kernel: String,
    /// What was computed.
    pub what: String,
    /// Norm of the difference from the CPU's result in `f32`, over the norm of that; absent if it failed.
    pub error: Option<f64>,
    /// What went wrong: an error of the device, or a difference that is too large.
    pub problem: Option<String>,
}

/// Memory that a product of cuBLASLt may use beside its operands, one for a device: what NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The largest rank of a low-rank update that kernels take.
const MOST_RANK: usize = 256;

/// Columns of an output of which a block of threads sums the product with B.
const RANK_COLUMNS: usize = 256;

/// Ranks in memory are a multiple of this.
const RANK_MULTIPLE: usize = 8;

/// What the widths of a matrix are multiples of that is multiplied in eight bits.
const EIGHT_BIT_MULTIPLE: usize = 16;

/// Memory that NCCL takes on a GPU beside a sum's numbers: 544 MiB between two A100 over `NVLink` and 688 MiB between more, by
/// <https://github.com/NVIDIA/nccl/issues/964>. It grows with the number of channels, whose buffers are of 4 MiB (`NCCL_BUFFSIZE`).
const NCCL_BYTES: usize = 688 << 20;

/// Bytes of logits in `bf16` that are made at a time by default.
const LOGITS_BYTES: usize = 128 << 20;

/// NVIDIA GPUs, with kernels of our own, where this build has some, and the plain versions.
#[derive(Debug)]
pub(super) struct Cuda(Plain);

/// NVIDIA GPUs, with these products of operands in `f32`.
pub(super) fn cuda(products: F32Products) -> Place {
    match products {
        F32Products::OfDevice => &Cuda(Plain(F32Products::OfDevice)),
        F32Products::Split => &Cuda(Plain(F32Products::Split)),
    }
}

/// What NVIDIA GPUs are like, for a plan also without one.
impl Properties for Cuda {
    fn f32_products(&self) -> F32Products {
        self.0.f32_products()
    }

    fn with_f32_products(&self, products: F32Products) -> Option<Place> {
        Some(cuda(products))
    }

    fn attention_backward_numbers(&self, heads: Heads, dtype: Dtype) -> usize {
        let Some(wide) = attention_heads(heads, dtype.into()) else {
            return self.0.attention_backward_numbers(heads, dtype);
        };
        // The gradients of the output, queries, keys and values; in `f32` the row sums.
        let numbers = 2 * heads.query_width() + 2 * heads.key_value_width() + 2 * heads.num_heads;
        // The same and what they are gradients of, with zeros behind.
        let widened = 4 * wide.query_width() + 4 * wide.key_value_width();
        if wide == heads { numbers } else { numbers + widened }
    }

    fn score_bytes(&self, rows: [usize; 2], heads: Heads, dtype: Dtype) -> usize {
        if attention_heads(heads, dtype.into()).is_some() { 0 } else { self.0.score_bytes(rows, heads, dtype) }
    }

    /// Sums of the gradient's product with B, in `f32`.
    fn low_rank_bytes(&self, shape: [usize; 2], tokens: usize, rank: usize, dtype: Dtype) -> Option<usize> {
        let is_taken = is_half(dtype.into()) && rank <= MOST_RANK && shape.iter().all(|width| width.is_multiple_of(8));
        let sums = shape[0].div_ceil(RANK_COLUMNS) * tokens * rank.next_multiple_of(RANK_MULTIPLE);
        (is_taken && check::is_on(Kernel::LowRank)).then_some(sums * size_of::<f32>())
    }

    /// The transposed matrix, and the other operand rounded.
    fn eight_bit_bytes(&self, shape: [usize; 2], tokens: usize, dtype: Dtype) -> Option<usize> {
        let is_aligned = shape.iter().all(|width| width.is_multiple_of(EIGHT_BIT_MULTIPLE));
        let [out_features, in_features] = shape;
        let bytes = out_features * in_features + tokens * out_features.max(in_features);
        (dtype == Dtype::Bf16 && is_aligned && check::is_on(Kernel::Fp8)).then_some(bytes)
    }

    fn stacks_weights(&self) -> bool {
        cfg!(feature = "cuda-llvm") && check::is_on(Kernel::Products)
    }

    fn joins_outputs(&self, dtype: Dtype) -> bool {
        is_half(dtype.into()) && check::is_on(Kernel::Products)
    }

    fn delta_rule_numbers(&self, heads: DeltaHeads, dtype: Dtype) -> [usize; 2] {
        if !has_delta_rule(heads, dtype.into()) {
            return plain_delta_rule_numbers(heads, dtype);
        }
        let DeltaHeads { num_value_heads, key_head_dim, .. } = heads;
        // By head: two matrices of pairs of tokens and a chunk's numbers. Then what is written and its gradient, the states before
        // and their gradients behind every chunk, and in `f32` the gradients of queries and keys by value head.
        let prepared = num_value_heads * (2 * CHUNK_TOKENS + 6);
        let states = 2 * num_value_heads * heads.state_len() / CHUNK_TOKENS;
        [prepared, prepared + 2 * heads.value_width() + states + 4 * num_value_heads * key_head_dim]
    }

    fn has_experts(&self, dtype: Dtype) -> bool {
        is_half(dtype.into()) && check::is_on(Kernel::Experts)
    }

    fn exchange_bytes(&self) -> usize {
        NCCL_BYTES
    }

    fn library_bytes(&self) -> usize {
        if check::is_on(Kernel::Products) { WORKSPACE_BYTES } else { 0 }
    }

    /// No more than fill 128 MiB: about as much as the largest activations, whose memory they take.
    fn most_targets(&self, head: [usize; 2]) -> usize {
        let most = LOGITS_BYTES / (size_of::<half::bf16>() * head[0].max(1)) / PLAIN_MULTIPLE * PLAIN_MULTIPLE;
        self.0.most_targets(head).min(most).max(PLAIN_MULTIPLE)
    }

    /// Logits and their gradient are one tensor.
    fn bytes_per_logit(&self, dtype: Dtype) -> usize {
        if is_half(dtype.into()) && check::is_on(Kernel::CrossEntropy) {
            dtype.num_bytes()
        } else {
            self.0.bytes_per_logit(dtype)
        }
    }
}

/// Whether these are numbers of 16 bits, which kernels are for.
fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Widths of heads that kernels compute attention with.
const HEAD_DIMS: [usize; 5] = [32, 64, 96, 128, 256];

/// The heads with which kernels compute attention, if they do: others have zeros behind (of 80 and of 192).
fn attention_heads(heads: Heads, dtype: DType) -> Option<Heads> {
    let head_dim = HEAD_DIMS.into_iter().find(|head_dim| *head_dim >= heads.head_dim)?;
    (is_half(dtype) && check::is_on(Kernel::Attention)).then_some(Heads { head_dim, ..heads })
}

/// Into how many parts the query heads that share keys are split, each of which sums gradients of keys and values by itself, so that
/// `num_blocks` times as many blocks fill a GPU which runs `num_places` at a time: as few as make three blocks for two places.
#[cfg(any(test, feature = "cuda-llvm"))]
pub(super) fn parts_of_group(group: usize, num_blocks: usize, num_places: usize) -> usize {
    let fills = |parts: &usize| 2 * parts * num_blocks >= 3 * num_places;
    (1..group).filter(|parts| group.is_multiple_of(*parts)).find(fills).unwrap_or(group)
}

/// Whether a kernel computes what is made of a gate.
fn has_activation(activation: Activation) -> bool {
    matches!(activation, Activation::Silu | Activation::GeluTanh)
}

/// What of a model has no kernels of our own, however wide it is, and is burn's tensor calls on NVIDIA GPUs.
#[must_use]
pub fn without_kernels(config: &ModelConfig) -> Vec<&'static str> {
    let blocks = || config.blocks.iter();
    let parts = [
        ("LayerNorms", config.norm_kind != NormKind::Rms),
        ("activation", blocks().flat_map(Block::all_gated).any(|gated| !has_activation(gated.activation))),
        ("state spaces", blocks().any(|block| block.state_space().is_some())),
        ("residual streams", config.streams().is_some()),
    ];
    parts.into_iter().filter_map(|(part, is_there)| is_there.then_some(part)).collect()
}

/// Whether kernels compute attention on the caches of texts with such heads.
#[cfg(feature = "cuda-llvm")]
fn has_cached_attention(heads: Heads, dtype: DType) -> bool {
    let is_sized = heads.head_dim.is_multiple_of(8) && heads.head_dim <= 256;
    is_half(dtype) && is_sized && heads.chunk.is_none() && check::is_on(Kernel::CachedAttention)
}

/// Whether kernels compute the delta rule with such heads.
fn has_delta_rule(heads: DeltaHeads, dtype: DType) -> bool {
    is_half(dtype)
        && heads.key_head_dim == 128
        && heads.value_head_dim.is_multiple_of(32)
        && check::is_on(Kernel::DeltaRule)
}
