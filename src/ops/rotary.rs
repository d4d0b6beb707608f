//! Rotary position embedding (Su et al., 2021) in Hugging Face's half-split layout: dimension `i` turns with
//! `i + head_dim / 2`.

use burn::tensor::{DType, Tensor};

use super::layout::{Angles, Layout};
use super::profile;

/// Rotates every head of `x` by its token's angles in rotary embedding `rope` of the layout; `inverse` rotates back, which is the gradient.
///
/// # Shapes
/// `x`: `[tokens, num_heads * head_dim]`.
#[must_use]
pub fn rotate(x: Tensor<2>, layout: &Layout, rope: usize, num_heads: usize, inverse: bool) -> Tensor<2> {
    // Not a clone of `x`: a second owner would make the kernel copy it.
    let cost = profile::passes(&x, 2);
    profile::measure("rotate", || cost, || layout.place().rotate(x, layout, rope, num_heads, inverse))
}

/// [`rotate`] in plain tensor calls.
#[must_use]
pub fn plain_rotate(x: Tensor<2>, layout: &Layout, rope: usize, num_heads: usize, inverse: bool) -> Tensor<2> {
    let ([tokens, width], dtype) = (x.dims(), x.dtype());
    let Angles { cos, sin, swap } = layout.angles(rope, &x.device());
    let heads = [tokens, num_heads, width / num_heads];
    // Two views: a fused kernel reads a tensor either in place or by index.
    let (kept, turned) = (x.clone().reshape(heads), x.reshape(heads).select(2, swap));
    let (turned, kept) = (turned.cast(DType::F32) * sin, kept.cast(DType::F32) * cos);
    let x = if inverse { kept - turned } else { kept + turned };
    x.cast(dtype).reshape([tokens, width])
}
