//! The memory of earlier keys and values, and attention on it in plain tensor calls.

use burn::tensor::{DType, Device, Tensor};

use super::attention::{Attended, LseOrder};
use crate::ops::cpu;
use crate::ops::product::{F32Products, Operand, matmul, product};
use crate::spec::Heads;

/// Tokens by which the memory of a cache grows.
pub(crate) const CHUNK_TOKENS: usize = 256;

/// The memory of a cache.
#[derive(Clone, Debug)]
pub enum CachedKeyValues {
    /// For the kernels; `values`: `[tokens, num_kv_heads * head_dim]`.
    Host {
        /// Keys in the order in which the kernels read them.
        keys: cpu::CachedKeys,
        /// Values, row by row.
        values: Vec<f32>,
    },
    /// For plain tensor calls: `[num_kv_heads, capacity, head_dim]` each.
    Device(Box<[Tensor<3>; 2]>, F32Products),
}

impl CachedKeyValues {
    /// Empty memory for plain tensor calls.
    pub(crate) fn on_device(heads: Heads, device: &Device, dtype: DType, products: F32Products) -> Self {
        let empty = || Tensor::zeros([heads.num_kv_heads, CHUNK_TOKENS, heads.head_dim], (device, dtype));
        Self::Device(Box::new([empty(), empty()]), products)
    }
}

impl Default for CachedKeyValues {
    fn default() -> Self {
        Self::Host { keys: cpu::CachedKeys::default(), values: Vec::new() }
    }
}

/// In plain tensor calls; `k` and `v` are the tokens that the query sees, `[num_kv_heads, tokens, head_dim]`.
pub(crate) fn plain_attention_of_last(
    q: &Tensor<2>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    heads: Heads,
    products: F32Products,
) -> Attended {
    let Heads { num_heads, num_kv_heads, head_dim, .. } = heads;
    let dtype = q.dtype();
    // As in `attention`, from operands in f32.
    let in_f32 = |x: &Tensor<3>| Operand::new(x, DType::F32, products);
    let q = in_f32(&q.clone().reshape([num_kv_heads, num_heads / num_kv_heads, head_dim]));
    let scores = product(&q, &in_f32(k).transpose()) * heads.scale; // [num_kv_heads, group, tokens]
    let scores = if let Some(cap) = heads.soft_cap { (scores / cap).tanh() * cap } else { scores };
    let max = scores.clone().max_dim(2);
    let weights = (scores - max.clone()).exp();
    let sum = weights.clone().sum_dim(2);
    let o = matmul(&(weights / sum.clone()).cast(dtype), v, products);
    let lse = (max + sum.log()).reshape([num_heads]);
    Attended { o: o.reshape([1, num_heads * head_dim]), lse, order: LseOrder::ByToken }
}
