//! RMSNorm, the rotary embedding, and both of heads, in plain tensor calls.

use burn::tensor::{DType, Tensor};

use crate::ops::layout::{Angles, Layout};
use crate::spec::Heads;

/// What the backward of a norm takes of its forward.
#[derive(Clone, Copy, Debug)]
pub struct Normed<'a> {
    /// `[tokens, width]`
    pub x: &'a Tensor<2>,
    /// `[width]`
    pub weight: &'a Tensor<1>,
    /// The factor of each token, `[tokens]`.
    pub rstd: &'a Tensor<1>,
}

pub(crate) fn plain_rms_norm(x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
    let dtype = x.dtype();
    let x = x.clone().cast(DType::F32);
    let rstd = x.clone().square().mean_dim(1).add_scalar(eps).sqrt().recip(); // [tokens, 1]
    // Rounded once.
    let y = (x * rstd.clone() * weight.clone().cast(DType::F32).unsqueeze()).cast(dtype);
    (y, rstd.squeeze_dim(1))
}

pub(crate) fn plain_rms_norm_backward(dy: &Tensor<2>, normed: Normed<'_>, residual: Tensor<2>) -> Tensor<2> {
    let Normed { x, weight, rstd } = normed;
    let dtype = x.dtype();
    let rstd = rstd.clone().unsqueeze_dim::<2>(1);
    let normed = x.clone().cast(DType::F32) * rstd.clone();
    let dy = dy.clone().cast(DType::F32) * weight.clone().cast(DType::F32).unsqueeze();
    let mean = (dy.clone() * normed.clone()).mean_dim(1); // [tokens, 1]
    // Rounded once.
    (residual.cast(DType::F32) + (dy - normed * mean) * rstd).cast(dtype)
}

pub(crate) fn plain_rotate(x: Tensor<2>, layout: &Layout, rope: usize, head_dim: usize, inverse: bool) -> Tensor<2> {
    let ([tokens, width], dtype) = (x.dims(), x.dtype());
    let Angles { cos, sin, swap } = layout.angles(rope, &x.device());
    let heads = [tokens, width / head_dim, head_dim];
    // Two views: a fused kernel reads a tensor either in place or by index.
    let (kept, turned) = (x.clone().reshape(heads), x.reshape(heads).select(2, swap));
    let (turned, kept) = (turned.cast(DType::F32) * sin, kept.cast(DType::F32) * cos);
    let x = if inverse { kept - turned } else { kept + turned };
    x.cast(dtype).reshape([tokens, width])
}

/// What norms and turns the heads of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// Queries and keys as they come from their projections: `[tokens, num_heads * head_dim]` and
    /// `[tokens, num_kv_heads * head_dim]`.
    pub qk: [&'a Tensor<2>; 2],
    /// Weights, each `[head_dim]`, or as wide as all query and as all key heads.
    pub weights: [&'a Tensor<1>; 2],
    /// Added to the mean square.
    pub eps: f64,
    /// Angles of the tokens.
    pub layout: &'a Layout,
    /// The rotary embedding, by its number in the layout.
    pub rope: usize,
    /// The heads.
    pub heads: Heads,
}

/// The factor of each head of each token, in `f32`, `[tokens * heads]`; nothing, where the backward computes it again.
pub type Factors = Option<[Tensor<1>; 2]>;

/// A row for each norm: of heads, `[tokens * heads, head_dim]`.
pub(crate) fn in_rows(x: Tensor<2>, weight: &Tensor<1>) -> Tensor<2> {
    let ([tokens, width], [of_norm]) = (x.dims(), weight.dims());
    x.reshape([tokens * width / of_norm, of_norm])
}
