//! Norms, and the rotary embedding of normed heads.

use burn::tensor::Tensor;

use super::Properties;
use crate::ops::layout::Layout;
use crate::ops::plain::norms::{
    Factors, HeadNorms, Normed, in_rows, plain_rms_norm, plain_rms_norm_backward, plain_rotate,
};
use crate::spec::Heads;

/// Norms and rotations, as in [`norm`](crate::ops::norm), [`rotary`](crate::ops::rotary) and
/// [`head_norm`](crate::ops::head_norm).
#[expect(missing_docs, reason = "the doors describe the operations")]
pub trait Norms: Properties {
    fn rms_norm(&self, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        plain_rms_norm(x, weight, eps)
    }

    fn rms_norm_backward(&self, dy: &Tensor<2>, normed: Normed<'_>, residual: Tensor<2>) -> Tensor<2> {
        plain_rms_norm_backward(dy, normed, residual)
    }

    fn rotate(&self, qk: [Tensor<2>; 2], layout: &Layout, rope: usize, heads: Heads, inverse: bool) -> [Tensor<2>; 2] {
        qk.map(|x| plain_rotate(x, layout, rope, heads.head_dim, inverse))
    }

    fn norm_and_rotate(&self, norms: HeadNorms<'_>) -> ([Tensor<2>; 2], Factors) {
        norm_then_rotate(self, norms)
    }

    fn norm_and_rotate_backward(&self, dqk: [Tensor<2>; 2], factors: Factors, norms: HeadNorms<'_>) -> [Tensor<2>; 2] {
        rotate_then_norm_backward(self, dqk, factors, norms)
    }
}

/// [`Norms::norm_and_rotate`] by the place's norm and rotation.
pub(crate) fn norm_then_rotate<N: Norms + ?Sized>(
    place: &N,
    HeadNorms { qk, weights, eps, layout, rope, heads }: HeadNorms<'_>,
) -> ([Tensor<2>; 2], Factors) {
    let norm = |which: usize| {
        let (y, rstd) = place.rms_norm(&in_rows(qk[which].clone(), weights[which]), weights[which], eps);
        (y.reshape(qk[which].dims()), rstd)
    };
    let ((q, of_q), (k, of_k)) = (norm(0), norm(1));
    (place.rotate([q, k], layout, rope, heads, false), Some([of_q, of_k]))
}

/// [`Norms::norm_and_rotate_backward`] likewise.
pub(crate) fn rotate_then_norm_backward<N: Norms + ?Sized>(
    place: &N,
    dqk: [Tensor<2>; 2],
    factors: Factors,
    HeadNorms { qk, weights, eps, layout, rope, heads }: HeadNorms<'_>,
) -> [Tensor<2>; 2] {
    let [dq, dk] = place.rotate(dqk, layout, rope, heads, true);
    let x = |which: usize| in_rows(qk[which].clone(), weights[which]);
    let [of_q, of_k] = factors.unwrap_or_else(|| [0, 1].map(|which| place.rms_norm(&x(which), weights[which], eps).1));
    let norm = |which: usize, dy: Tensor<2>, rstd: &Tensor<1>| {
        let (shape, dy) = (dy.dims(), in_rows(dy, weights[which]));
        let normed = Normed { x: &x(which), weight: weights[which], rstd };
        place.rms_norm_backward(&dy, normed, dy.zeros_like()).reshape(shape)
    };
    [norm(0, dq, &of_q), norm(1, dk, &of_k)]
}
