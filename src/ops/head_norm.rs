//! RMSNorm of every query and key head, and then the rotary embedding, as Qwen3 has them.

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
    /// Weights, each `[head_dim]`.
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
        let (y, rstd) = place.rms_norm(&by_head(qk[which].clone(), heads), weights[which], eps);
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
    let x = |which: usize| by_head(qk[which].clone(), heads);
    let [of_q, of_k] = factors.unwrap_or_else(|| [0, 1].map(|which| place.rms_norm(&x(which), weights[which], eps).1));
    let norm = |which: usize, dy: Tensor<2>, rstd: &Tensor<1>| {
        let (shape, dy) = (dy.dims(), by_head(dy, heads));
        place.rms_norm_backward(&dy, &x(which), weights[which], rstd, dy.zeros_like()).reshape(shape)
    };
    [norm(0, dq, &of_q), norm(1, dk, &of_k)]
}

/// `[tokens * heads, head_dim]`
fn by_head(x: Tensor<2>, heads: Heads) -> Tensor<2> {
    let [tokens, width] = x.dims();
    x.reshape([tokens * width / heads.head_dim, heads.head_dim])
}
