//! RMSNorm of every query and key head, as in Qwen3, or of all heads together, as in `olmo2`, and then the rotary embedding.

use burn::tensor::Tensor;

use super::kernels::Kernels;
use super::layout::Layout;
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

/// Normed and rotated queries and keys; and in `f32` the factor of each head of each token, `[tokens * heads]`, for the backward.
#[must_use]
pub fn norm_and_rotate(
    qk: QueriesKeys<&Tensor<2>>,
    norms: HeadNorms<'_>,
) -> (QueriesKeys<Tensor<2>>, QueriesKeys<Tensor<1>>) {
    let cost = || Cost::sum(qk.iter().map(|x| profile::passes(x, 2)));
    profile::measure("norm_and_rotate", cost, || norms.layout.place().norm_and_rotate(qk, norms))
}

/// The gradients of [`norm_and_rotate`] with respect to queries and keys `qk`. Nothing else may have views of `dqk`.
#[must_use]
pub fn norm_and_rotate_backward(
    dqk: QueriesKeys<Tensor<2>>,
    qk: QueriesKeys<&Tensor<2>>,
    rstd: QueriesKeys<&Tensor<1>>,
    norms: HeadNorms<'_>,
) -> QueriesKeys<Tensor<2>> {
    let cost = || Cost::sum(qk.iter().map(|x| profile::passes(x, 3)));
    profile::measure("norm_and_rotate_backward", cost, || {
        norms.layout.place().norm_and_rotate_backward(dqk, qk, rstd, norms)
    })
}

/// [`norm_and_rotate`] by the place's norm and rotation.
pub(super) fn norm_then_rotate<K: Kernels + ?Sized>(
    place: &K,
    qk: QueriesKeys<&Tensor<2>>,
    norms: HeadNorms<'_>,
) -> (QueriesKeys<Tensor<2>>, QueriesKeys<Tensor<1>>) {
    let HeadNorms { weights, eps, layout, rope, heads } = norms;
    let norm = |which: usize| {
        let (y, rstd) = place.rms_norm(&in_rows(qk[which].clone(), weights[which]), weights[which], eps);
        (y.reshape(qk[which].dims()), rstd)
    };
    let ((q, of_q), (k, of_k)) = (norm(0), norm(1));
    (place.rotate([q, k], layout, rope, heads, false), [of_q, of_k])
}

/// [`norm_and_rotate_backward`] likewise.
pub(super) fn rotate_then_norm_backward<K: Kernels + ?Sized>(
    place: &K,
    dqk: QueriesKeys<Tensor<2>>,
    qk: QueriesKeys<&Tensor<2>>,
    rstd: QueriesKeys<&Tensor<1>>,
    norms: HeadNorms<'_>,
) -> QueriesKeys<Tensor<2>> {
    let HeadNorms { weights, layout, rope, heads, .. } = norms;
    let mut which = 0..;
    place.rotate(dqk, layout, rope, heads, true).map(|dy| {
        let which = which.next().unwrap_or_default();
        let (shape, dy) = (dy.dims(), in_rows(dy, weights[which]));
        let x = in_rows(qk[which].clone(), weights[which]);
        place.rms_norm_backward(&dy, &x, weights[which], rstd[which], dy.zeros_like()).reshape(shape)
    })
}

/// A row for each norm: of heads, `[tokens * heads, head_dim]`.
fn in_rows(x: Tensor<2>, weight: &Tensor<1>) -> Tensor<2> {
    let ([tokens, width], [of_norm]) = (x.dims(), weight.dims());
    x.reshape([tokens * width / of_norm, of_norm])
}
