//! RMSNorm of every query and key head, as in Qwen3, or of all heads together, as in `olmo2`, and then the rotary embedding;
//! RMSNorm of every value head, as in Gemma 4.

use burn::tensor::Tensor;

use super::kernels::Place;
use super::norm::{rms_norm, rms_norm_backward};
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
