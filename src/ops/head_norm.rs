//! RMSNorm of every query and key head, as in Qwen3, or of all heads together, as in `olmo2`, and then the rotary embedding;
//! RMSNorm of every value head, as in Gemma 4.

use burn::tensor::Tensor;

use super::kernels::{Kernels, Place};
use super::layout::Layout;
use super::norm::{rms_norm, rms_norm_backward};
use super::profile::{self, Cost};
use crate::spec::Heads;

/// Queries and keys as they come from their projections: `[tokens, num_heads * head_dim]` and
/// `[tokens, num_kv_heads * head_dim]`.
pub type QueriesKeys<T> = [T; 2];

/// What norms and turns the heads of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// Weights, each `[head_dim]`, or as wide as all query and as all key heads.
    pub weights: QueriesKeys<&'a Tensor<1>>,
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
pub type Factors = Option<QueriesKeys<Tensor<1>>>;

/// Normed and rotated queries and keys, and what the backward needs.
#[must_use]
pub fn norm_and_rotate(qk: QueriesKeys<&Tensor<2>>, norms: HeadNorms<'_>) -> (QueriesKeys<Tensor<2>>, Factors) {
    let cost = || Cost::sum(qk.iter().map(|x| profile::passes(x, 2)));
    profile::measure("norm_and_rotate", cost, || norms.layout.place().norm_and_rotate(qk, norms))
}

/// The gradients of [`norm_and_rotate`] with respect to queries and keys `qk`. Nothing else may have views of `dqk`.
#[must_use]
pub fn norm_and_rotate_backward(
    dqk: QueriesKeys<Tensor<2>>,
    qk: QueriesKeys<&Tensor<2>>,
    factors: Factors,
    norms: HeadNorms<'_>,
) -> QueriesKeys<Tensor<2>> {
    let cost = || Cost::sum(qk.iter().map(|x| profile::passes(x, 3)));
    profile::measure("norm_and_rotate_backward", cost, || {
        norms.layout.place().norm_and_rotate_backward(dqk, qk, factors, norms)
    })
}

/// [`norm_and_rotate`] by the place's norm and rotation.
pub(super) fn norm_then_rotate<K: Kernels + ?Sized>(
    place: &K,
    qk: QueriesKeys<&Tensor<2>>,
    norms: HeadNorms<'_>,
) -> (QueriesKeys<Tensor<2>>, Factors) {
    let HeadNorms { weights, eps, layout, rope, heads } = norms;
    let norm = |which: usize| {
        let (y, rstd) = place.rms_norm(&in_rows(qk[which].clone(), weights[which]), weights[which], eps);
        (y.reshape(qk[which].dims()), rstd)
    };
    let ((q, of_q), (k, of_k)) = (norm(0), norm(1));
    (place.rotate([q, k], layout, rope, heads, false), Some([of_q, of_k]))
}

/// [`norm_and_rotate_backward`] likewise.
pub(super) fn rotate_then_norm_backward<K: Kernels + ?Sized>(
    place: &K,
    dqk: QueriesKeys<Tensor<2>>,
    qk: QueriesKeys<&Tensor<2>>,
    factors: Factors,
    norms: HeadNorms<'_>,
) -> QueriesKeys<Tensor<2>> {
    let HeadNorms { weights, eps, layout, rope, heads } = norms;
    let [dq, dk] = place.rotate(dqk, layout, rope, heads, true);
    let x = |which: usize| in_rows(qk[which].clone(), weights[which]);
    let [of_q, of_k] = factors.unwrap_or_else(|| [0, 1].map(|which| place.rms_norm(&x(which), weights[which], eps).1));
    let norm = |which: usize, dy: Tensor<2>, rstd: &Tensor<1>| {
        let (shape, dy) = (dy.dims(), in_rows(dy, weights[which]));
        place.rms_norm_backward(&dy, &x(which), weights[which], rstd, dy.zeros_like()).reshape(shape)
    };
    [norm(0, dq, &of_q), norm(1, dk, &of_k)]
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

/// A row for each norm: of heads, `[tokens * heads, head_dim]`.
fn in_rows(x: Tensor<2>, weight: &Tensor<1>) -> Tensor<2> {
    let ([tokens, width], [of_norm]) = (x.dims(), weight.dims());
    x.reshape([tokens * width / of_norm, of_norm])
}
