//! LoRA (Hu et al., 2021): `y = W x + b + scale B A x`.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::ops::cpu::{Weight as HostWeight, linear_backward_input};
use crate::ops::kernels::Place;
use crate::ops::linear::{InputGrad, Weight, add_low_rank, linear, linear_backward, low_rank_input};
use crate::ops::low_rank::{Lora, LowRank};

pub(super) fn shapes(r: usize, [out_features, in_features]: [usize; 2]) -> LowRank<[usize; 2]> {
    LowRank { a: [r, in_features], b: [out_features, r] }
}

pub(super) fn forward(
    place: Place,
    x: &Tensor<2>,
    weight: &Weight,
    adapter: Lora<&Tensor<2>>,
    residual: Option<Tensor<2>>,
) -> (Tensor<2>, Option<Tensor<2>>) {
    linear(place, x, weight, Some(adapter), residual)
}

pub(super) fn add(
    place: Place,
    y: Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    adapter: Lora<&Tensor<2>>,
    rows: Range<usize>,
) -> Tensor<2> {
    add_low_rank(place, y, x, weight, adapter, rows)
}

pub(super) fn backward(
    place: Place,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    (adapter, kept): (Lora<&Tensor<2>>, Option<Tensor<2>>),
    input_grad: InputGrad,
) -> (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>) {
    let xa = kept.unwrap_or_else(|| low_rank_input(place, x, adapter));
    linear_backward(place, dy, x, weight, Some((adapter, &xa)), input_grad)
}

/// `scale B A`. The product is rounded before it is scaled, as in PEFT.
pub(super) fn difference(
    LowRank { a, b }: LowRank<&[f32]>,
    scale: f64,
    [out_features, in_features]: [usize; 2],
) -> Vec<f32> {
    let mut update = vec![0.0; out_features * in_features];
    let rank = a.len() / in_features.max(1);
    linear_backward_input(b, HostWeight::f32(a), in_features, rank, &mut update, false);
    #[expect(clippy::cast_possible_truncation, reason = "the sum is in f32")]
    let scale = scale as f32;
    update.iter_mut().for_each(|update| *update *= scale);
    update
}
