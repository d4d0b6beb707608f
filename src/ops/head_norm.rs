//! RMSNorm of every query and key head, as in Qwen3, or of all heads together, as in `olmo2`, and then the rotary embedding;
//! RMSNorm of every value head, as in Gemma 4; `LayerNorm` of every query and key head, as in Command R+.

use burn::tensor::{DType, Tensor};

use super::kernels::Place;
use super::norm::{Norm, rms_norm, rms_norm_backward};
use super::plain::norms::in_rows;
use super::profile::{self, Cost};

pub use super::plain::norms::{Factors, HeadNorms};

/// Normed and rotated queries and keys, and what the backward needs.
#[must_use]
pub fn norm_and_rotate(place: Place, norms: HeadNorms<'_>) -> ([Tensor<2>; 2], Factors) {
    let cost = || Cost::sum(norms.qk.iter().map(|x| profile::passes(x, 2)));
    profile::measure("norm_and_rotate", cost, || place.norm_and_rotate(norms))
}

/// The gradients of [`norm_and_rotate`] with respect to queries and keys. Nothing else may have views of `dqk`.
#[must_use]
pub fn norm_and_rotate_backward(
    place: Place,
    dqk: [Tensor<2>; 2],
    factors: Factors,
    norms: HeadNorms<'_>,
) -> [Tensor<2>; 2] {
    let cost = || Cost::sum(norms.qk.iter().map(|x| profile::passes(x, 3)));
    profile::measure("norm_and_rotate_backward", cost, || place.norm_and_rotate_backward(dqk, factors, norms))
}

/// RMSNorm of every head of values, `[tokens, heads * head_dim]`; `weight`: `[head_dim]`.
#[must_use]
pub fn norm_values(place: Place, v: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> Tensor<2> {
    rms_norm(place, &in_rows(v.clone(), weight), weight, eps).0.reshape(v.dims())
}

/// The gradient of [`norm_values`] with respect to the values `v`.
#[must_use]
pub fn norm_values_backward(place: Place, dy: Tensor<2>, v: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> Tensor<2> {
    let (x, dy) = (in_rows(v.clone(), weight), in_rows(dy, weight));
    // Cheaper to compute again than to keep.
    let (_, rstd) = rms_norm(place, &x, weight, eps);
    rms_norm_backward(place, &dy, &x, weight, &rstd, dy.zeros_like()).reshape(v.dims())
}

/// `LayerNorm` of every head of `x`, `[tokens, heads * head_dim]`, without bias; `weight`, as wide as all heads, has its own for each.
#[must_use]
pub fn norm_by_head(place: Place, x: &Tensor<2>, weight: &Tensor<1>, head_dim: usize, eps: f64) -> Tensor<2> {
    let (norm, rows) = by_head(x, head_dim);
    let normed = norm.forward(place, &rows, eps).0.reshape(x.dims());
    // Rounded once.
    (normed * weight.clone().unsqueeze()).cast(x.dtype())
}

/// The gradient of [`norm_by_head`] with respect to `x`.
#[must_use]
pub fn norm_by_head_backward(
    place: Place,
    dy: Tensor<2>,
    x: &Tensor<2>,
    weight: &Tensor<1>,
    head_dim: usize,
    eps: f64,
) -> Tensor<2> {
    let (norm, rows) = by_head(x, head_dim);
    let dy = (dy.cast(DType::F32) * weight.clone().unsqueeze()).reshape(rows.dims());
    // Cheaper to compute again than to keep.
    let (_, rstd) = norm.forward(place, &rows, eps);
    norm.backward(place, &dy, &rows, &rstd, rows.zeros_like()).reshape(x.dims()).cast(x.dtype())
}

/// A `LayerNorm` without weights, and heads as its rows, in `f32`.
fn by_head(x: &Tensor<2>, head_dim: usize) -> (Norm, Tensor<2>) {
    let [tokens, width] = x.dims();
    let options = (&x.device(), DType::F32);
    let norm = Norm { weight: Tensor::ones([head_dim], options), bias: Some(Tensor::zeros([head_dim], options)) };
    (norm, x.clone().cast(DType::F32).reshape([tokens * width / head_dim, head_dim]))
}
