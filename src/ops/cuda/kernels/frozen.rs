//! Products with frozen matrices by cuBLASLt.

use std::borrow::Cow;
use std::iter::once;

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{self, rows, stacked};
use super::products::{Way, multiply};
use super::{Kernel, check, decode};
use crate::ops::custom::{Output, launch, queue, side_by_side, spec};
use crate::ops::plain::linear::{Matrix, Weight};

/// `x W^T` for each of the weights, side by side; added to `sum` if there is one, which is for one weight. Rounded once.
pub(super) fn forward(x: &Tensor<2>, weights: &[&Weight], sum: Option<&Tensor<2>>) -> Vec<Tensor<2>> {
    let outputs = side_by_side(x, weights.iter().map(|weight| weight.dims()[0]));
    let (num_weights, weights) = (weights.len(), dense(weights, x.dtype()));
    let inputs = once(x).chain(weights.iter().map(AsRef::as_ref)).chain(sum).map(|x| x.clone().into_dispatch());
    let run = move |inputs: Vec<CubeTensor>, ys: &[CubeTensor]| {
        let inputs: Vec<_> = inputs.into_iter().map(rows).collect();
        let (x, weights, sum) = (&inputs[0], &inputs[1..=num_weights], inputs.get(num_weights + 1));
        match (stacked(weights), matrix::side_by_side(ys)) {
            (Some(weight), Some(y)) => multiply(Way::Forward, x, &weight, sum, &y),
            _ => weights.iter().zip(ys).for_each(|(weight, y)| multiply(Way::Forward, x, weight, sum, y)),
        }
    };
    queue("products", inputs.collect(), outputs, run).into_iter().map(Tensor::from_dispatch).collect()
}

/// The sum of `dy W` over the weights, added to `sum` if there is one. Rounded once where the gradients are side by side and the
/// weights one below the other, else after each weight.
pub(super) fn backward(dys: &[&Tensor<2>], weights: &[&Weight], sum: Option<&Tensor<2>>) -> Tensor<2> {
    let ([tokens, _], [_, width]) = (dys[0].dims(), weights[0].dims());
    let (num_weights, weights) = (weights.len(), dense(weights, dys[0].dtype()));
    let inputs =
        dys.iter().copied().chain(weights.iter().map(AsRef::as_ref)).chain(sum).map(|x| x.clone().into_dispatch());
    let output = Output::New(spec(dys[0].dtype(), [tokens, width]));
    let [dx] = launch("products_backward", inputs, [output], move |[], inputs, [dx]| {
        let inputs: Vec<_> = inputs.into_iter().map(rows).collect();
        let (dys, rest) = inputs.split_at(num_weights);
        let (weights, mut sum) = (&rest[..num_weights], rest.get(num_weights));
        if let (Some(dy), Some(weight)) = (matrix::side_by_side(dys), stacked(weights)) {
            return multiply(Way::Backward, &dy, &weight, sum, dx);
        }
        for (dy, weight) in dys.iter().zip(weights) {
            multiply(Way::Backward, dy, weight, sum, dx);
            sum = Some(dx);
        }
    });
    Tensor::from_dispatch(dx)
}

fn dense<'a>(weights: &[&'a Weight], dtype: DType) -> Vec<Cow<'a, Tensor<2>>> {
    let dense = |weight: &&'a Weight| match &weight.values {
        Matrix::Quantised(matrix) if check::is_on(Kernel::Decode) && decode::takes(matrix) => {
            Cow::Owned(decode::decoded(matrix, dtype))
        }
        values => values.dense_in(dtype),
    };
    weights.iter().map(dense).collect()
}
