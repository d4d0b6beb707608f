//! Rotary position embedding (Su et al., 2021) in Hugging Face's half-split layout: dimension `i` turns with
//! `i + head_dim / 2`.

use burn::tensor::{DType, Tensor};

use super::layout::{Angles, Layout};
use super::profile::{self, Cost};
use crate::spec::Heads;

/// Rotates every head of queries and keys by its token's angles in rotary embedding `rope` of the layout; `inverse` rotates back,
/// which is the gradient. Nothing else may have views of them.
///
/// # Shapes
/// Queries: `[tokens, num_heads * head_dim]`, keys: `[tokens, num_kv_heads * head_dim]`.
#[must_use]
pub fn rotate(qk: [Tensor<2>; 2], layout: &Layout, rope: usize, heads: Heads, inverse: bool) -> [Tensor<2>; 2] {
    // Not clones: a second owner would make the kernel copy them.
    let costs = [0, 1].map(|which| profile::passes(&qk[which], 2));
    let work = || layout.place().rotate(qk, layout, rope, heads, inverse);
    profile::measure("rotate", || Cost::sum(costs.into_iter()), work)
}

/// [`rotate`] of queries or keys in plain tensor calls.
#[must_use]
pub fn plain_rotate(x: Tensor<2>, layout: &Layout, rope: usize, head_dim: usize, inverse: bool) -> Tensor<2> {
    let ([tokens, width], dtype) = (x.dims(), x.dtype());
    let Angles { cos, sin, swap } = layout.angles(rope, &x.device());
    let heads = [tokens, width / head_dim, head_dim];
    // Two views: a fused kernel reads a tensor either in place or by index.
    let (kept, turned) = (x.clone().reshape(heads), x.reshape(heads).select(2, swap));
    let (turned, kept) = (turned.cast(DType::F32) * sin, kept.cast(DType::F32) * cos);
    let x = if inverse { kept - turned } else { kept + turned };
    x.cast(dtype).reshape([tokens, width])
}
