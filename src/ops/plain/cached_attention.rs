//! The memory of earlier keys and values, and attention on it in plain tensor calls.

use std::ops::Range;

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
    /// Elsewhere: `[num_kv_heads, capacity, head_dim]` each.
    Device(Box<[Tensor<3>; 2]>),
}

/// The caches of several texts on a device, whose new tokens lie one behind the other.
#[derive(Debug)]
pub struct TextsOnDevice {
    /// The heads.
    pub heads: Heads,
    /// Keys and values of each, with room for its new tokens.
    pub held: Vec<[Tensor<3>; 2]>,
    /// The rows of the new tokens of each.
    pub rows: Vec<Range<usize>>,
    /// The position in its text of the first of these.
    pub positions: Vec<usize>,
}

impl CachedKeyValues {
    /// Empty memory on a device.
    pub(crate) fn on_device(heads: Heads, device: &Device, dtype: DType) -> Self {
        let empty = || Tensor::zeros([heads.num_kv_heads, CHUNK_TOKENS, heads.head_dim], (device, dtype));
        Self::Device(Box::new([empty(), empty()]))
    }
}

impl Default for CachedKeyValues {
    fn default() -> Self {
        Self::Host { keys: cpu::CachedKeys::default(), values: Vec::new() }
    }
}

/// Writes the keys and values of the new tokens.
pub(crate) fn plain_append(texts: TextsOnDevice, kv: [&Tensor<2>; 2]) -> Vec<[Tensor<3>; 2]> {
    let TextsOnDevice { heads: Heads { num_kv_heads, head_dim, .. }, held, rows, positions } = texts;
    let appended = held.into_iter().zip(rows).zip(positions).map(|(([keys, values], rows), position)| {
        let range = [0..num_kv_heads, position..position + rows.len(), 0..head_dim];
        [(keys, kv[0]), (values, kv[1])].map(|(held, new)| {
            let new = part(new, &rows).reshape([rows.len(), num_kv_heads, head_dim]).swap_dims(0, 1);
            held.slice_assign(range.clone(), new)
        })
    });
    appended.collect()
}

/// Attention of the new tokens, each on those of its text up to itself.
pub(crate) fn plain_attend(products: F32Products, texts: &TextsOnDevice, q: &Tensor<2>) -> Attended {
    let heads = texts.heads;
    let of_text = |((held, rows), position): ((&[Tensor<3>; 2], &Range<usize>), &usize)| {
        let (q, held, position) = (part(q, rows), held.clone(), *position);
        (0..rows.len()).map(move |index| {
            let end = position + index + 1;
            let first = heads.first_seen(end - 1);
            let [k, v] = held.each_ref().map(|all| all.clone().narrow(1, first, end - first));
            plain_attention_of_last(&q.clone().narrow(0, index, 1), &k, &v, heads, products)
        })
    };
    let mut parts: Vec<_> = texts.held.iter().zip(&texts.rows).zip(&texts.positions).flat_map(of_text).collect();
    if parts.len() == 1
        && let Some(only) = parts.pop()
    {
        return only;
    }
    let (o, lse) = parts.into_iter().map(|part| (part.o, part.lse)).unzip();
    Attended { o: Tensor::cat(o, 0), lse: Tensor::cat(lse, 0), order: LseOrder::ByToken }
}

fn part(x: &Tensor<2>, rows: &Range<usize>) -> Tensor<2> {
    x.clone().narrow(0, rows.start, rows.len())
}

/// In plain tensor calls; `k` and `v` are the tokens that the query sees, `[num_kv_heads, tokens, head_dim]`.
fn plain_attention_of_last(
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
