//! Weight-decomposed adapters (Liu et al., 2024): `y = m / ||W + scale B A|| (x W^T + scale x A^T B^T) + b`, by rows of
//! the weight. As in PEFT, the norms are constants in the backward, and dropout acts on what the adapter adds, of which the
//! frozen weight is a part.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::matrices::{Applied, Matrices};
use crate::ops::dropout::dropout;
use crate::ops::kernels::Place;
use crate::ops::linear::{InputGrad, Weight, add_low_rank, linear, linear_backward, low_rank_input, rounded_once};
use crate::ops::low_rank::{Lora, LowRank};

/// What a pass through the layer needs of the adapter.
struct Decomposed<'a> {
    /// Its update, of an input from which what dropout takes is gone.
    lora: Lora<&'a Tensor<2>>,
    norms: Tensor<2>,
    /// Magnitudes over norms.
    factors: Tensor<2>,
}

impl<'a> Decomposed<'a> {
    fn new(place: Place, x: &Tensor<2>, weight: &Weight, adapter: Applied<'a>) -> Self {
        let norms = adapter.norms.of_sum(place, weight, adapter.lora(), x.dtype());
        let Some(magnitude) = adapter.matrices.magnitude else { unreachable!("the kind has magnitudes") };
        Self { lora: Lora { dropout: None, ..adapter.lora() }, factors: magnitude.clone() / norms.clone(), norms }
    }
}

/// The output of a linear layer, added to `residual` if there is one.
pub(super) fn forward(
    place: Place,
    x: &Tensor<2>,
    weight: &Weight,
    adapter: Applied<'_>,
    residual: Option<Tensor<2>>,
) -> Tensor<2> {
    let Decomposed { lora, factors, .. } = Decomposed::new(place, x, weight, adapter);
    let dropped = adapter.dropout.map(|settings| dropout(place, x, settings));
    let (z, _) = linear(place, dropped.as_ref().unwrap_or(x), &weight.without_bias(), Some(lora), None);
    let others = match dropped {
        Some(dropped) => [Some(linear(place, &(x.clone() - dropped), weight, None, residual).0), None],
        None => [weight.bias.clone().map(Tensor::unsqueeze), residual],
    };
    rounded_once(z.cast(DType::F32) * factors, others).cast(x.dtype())
}

/// Adds what the adapter adds for some of the tokens to their rows of `y`: one more product with the weight.
pub(super) fn add(
    place: Place,
    y: Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    adapter: Applied<'_>,
    rows: Range<usize>,
) -> Tensor<2> {
    let part = |x: &Tensor<2>| x.clone().narrow(0, rows.start, rows.len());
    let (x, bare, dtype) = (part(x), weight.without_bias(), y.dtype());
    let Decomposed { lora, factors, .. } = Decomposed::new(place, &x, weight, adapter);
    let (base, _) = linear(place, &x, &bare, None, None);
    let z = add_low_rank(place, base.clone(), &x, &bare, lora, 0..rows.len());
    let sum = rounded_once(z.cast(DType::F32) * factors, [Some(part(&y)), Some(-base)]).cast(dtype);
    y.slice_assign([rows, 0..weight.dims()[0]], sum)
}

/// The gradients of the input, as `input_grad` asks, and of the matrices. The forward keeps nothing: that of the magnitudes
/// needs the product with the weight, which is computed again.
pub(super) fn backward(
    place: Place,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    adapter: Applied<'_>,
    input_grad: InputGrad,
) -> (Option<Tensor<2>>, Option<Matrices<Tensor<2>>>) {
    let Decomposed { lora, norms, factors } = Decomposed::new(place, x, weight, adapter);
    let (dtype, bare) = (x.dtype(), weight.without_bias());
    let dropped = adapter.dropout.map(|settings| dropout(place, x, settings));
    let input = dropped.as_ref().unwrap_or(x);
    let (z, xa) = linear(place, input, &bare, Some(lora), None);
    let xa = xa.unwrap_or_else(|| low_rank_input(place, input, lora));
    let magnitude = (z.cast(DType::F32) * dy.clone().cast(DType::F32)).sum_dim(0) / norms;
    let dz = (dy.clone().cast(DType::F32) * factors).cast(dtype);
    let lora = Some((lora, &xa));
    let (dx, grads) = match adapter.dropout {
        None => linear_backward(place, &dz, x, &bare, lora, input_grad),
        Some(settings) => {
            let (has_input_grad, sum) = match input_grad {
                InputGrad::Skip => (false, None),
                InputGrad::Fresh => (true, None),
                InputGrad::AddTo(sum) => (true, Some(sum)),
            };
            let (d_dropped, grads) =
                linear_backward(place, &dz, input, &bare, lora, InputGrad::of(has_input_grad, None));
            let dx = d_dropped.map(|d_dropped| {
                // What dropout takes goes through the frozen weight as it is.
                let (whole, _) = linear_backward(place, dy, x, &bare, None, InputGrad::Fresh);
                let Some(whole) = whole else { unreachable!("it was asked for") };
                let update = dropout(place, &(d_dropped - whole.clone()), settings);
                rounded_once(whole, [Some(update), sum])
            });
            (dx, grads)
        }
    };
    (dx, grads.map(|LowRank { a, b }| Matrices { a, b, magnitude: Some(magnitude) }))
}

/// What brings the rows of `weight` and its `update` to their magnitudes adds to `weight`.
pub(super) fn difference(mut update: Vec<f32>, weight: &[f32], magnitude: &[f32]) -> Vec<f32> {
    let in_features = weight.len() / magnitude.len();
    let rows = update.chunks_exact_mut(in_features).zip(weight.chunks_exact(in_features));
    for ((update, weight), magnitude) in rows.zip(magnitude) {
        let squares = update.iter().zip(weight).map(|(update, weight)| f64::from(update + weight).powi(2));
        let norm = squares.sum::<f64>().sqrt();
        #[expect(clippy::cast_possible_truncation, reason = "the weight is in f32")]
        let factor = if norm > 0.0 { (f64::from(*magnitude) / norm) as f32 } else { 0.0 };
        update.iter_mut().zip(weight).for_each(|(update, weight)| *update = (*update + weight) * factor - weight);
    }
    update
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::Device;

    use super::*;
    use crate::lora::RowNorms;
    use crate::lora::kind::AdapterKind;
    use crate::model::weights::Quantisation;
    use crate::ops::dropout::Dropout;
    use crate::ops::host;
    use crate::ops::linear::Matrix;
    use crate::ops::place::place_of;
    use crate::ops::quantised::Coding;

    const SCALE: f64 = 1.5;
    const TOKENS: usize = 9;
    const SHAPE: [usize; 2] = [20, 64];

    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    fn numbers<const D: usize>(shape: [usize; D], key: usize, device: &Device) -> Tensor<D> {
        let value = |i: usize| ((i * 7919 + key * 104_729) % 2003) as f32 / 1001.0 - 1.0;
        host::tensor((0..shape.iter().product()).map(value).collect(), shape, device)
    }

    /// Input, residual, gradient of the output, and A, B and magnitudes.
    fn fixture(device: &Device) -> ([Tensor<2>; 3], Matrices<Tensor<2>>) {
        let [out_features, in_features] = SHAPE;
        let wide = |key| numbers([TOKENS, out_features], key, device);
        let matrices = AdapterKind::Dora.shapes(3, SHAPE).zip(Matrices { a: 4, b: 5, magnitude: Some(6) });
        let matrices = matrices.map(|(shape, key)| numbers(shape, key, device) + if key == 6 { 2.0 } else { 0.0 });
        ([numbers([TOKENS, in_features], 1, device), wide(2), wide(3)], matrices)
    }

    fn weight(device: &Device, is_quantised: bool) -> Weight {
        let (values, bias) = (numbers(SHAPE, 7, device), numbers([SHAPE[0]], 8, device));
        let mut weight = Weight { bias: Some(bias), ..Weight::new(values.clone()) };
        if is_quantised {
            let values: Vec<f32> = values.into_data().try_to_vec().unwrap();
            let fill = |first: usize, to: &mut [f32]| to.copy_from_slice(&values[first..first + to.len()]);
            let quantisation = Quantisation { coding: Coding::Nf4, nested: false };
            weight.values = Matrix::Quantised(Arc::new(quantisation.quantise(SHAPE, device, fill).unwrap()));
        }
        weight
    }

    /// Output, and gradients of the input and the matrices, by autodiff of what PEFT computes with the whole sum:
    /// `DoraLinearVariant.forward` and `DoraLinearLayer.forward` of PEFT 0.21.
    fn by_autodiff(is_quantised: bool, settings: Option<Dropout>) -> Vec<Tensor<2>> {
        let device = Device::flex().autodiff();
        let ([x, residual, dy], matrices) = fixture(&device);
        let (x, matrices) = (x.require_grad(), matrices.map(Tensor::require_grad));
        let weight = weight(&device, is_quantised);
        let (w, bias) = (weight.values.dense().into_owned(), weight.bias.unwrap().unsqueeze());
        let Matrices { a, b, magnitude } = matrices.clone();
        let sum = w.clone() + b.clone().matmul(a.clone()) * SCALE;
        let factors = magnitude.unwrap() / sum.square().sum_dim(1).sqrt().transpose().detach();
        let result = x.clone().matmul(w.clone().transpose()) + bias.clone();
        let (input, base) = match settings {
            None => (x.clone(), result.clone() - bias),
            Some(settings) => {
                let dropped = dropout(place_of(&device, DType::F32), &x, settings);
                (dropped.clone(), dropped.matmul(w.transpose()))
            }
        };
        let update = input.matmul(a.transpose()).matmul(b.transpose()) * SCALE;
        let y = result + (factors.clone() - 1.0) * base + factors * update + residual;
        let grads = (y.clone() * dy).sum().backward();
        let matrices = matrices.map(|matrix| matrix.grad(&grads).unwrap());
        [y.inner(), x.grad(&grads).unwrap()].into_iter().chain(matrices.values()).collect()
    }

    fn by_hand(device: &Device, is_quantised: bool, dropout: Option<Dropout>) -> Vec<Tensor<2>> {
        let ([x, residual, dy], matrices) = fixture(device);
        let (weight, place, norms) = (weight(device, is_quantised), place_of(device, DType::F32), RowNorms::default());
        let adapter = Applied { matrices: matrices.as_ref(), scale: SCALE, dropout, norms: &norms };
        let y = forward(place, &x, &weight, adapter, Some(residual));
        let other = numbers([TOKENS, SHAPE[1]], 9, device);
        let sum = InputGrad::AddTo(other.clone());
        let (dx, grads) = backward(place, &dy, &x, &weight, adapter, sum);
        let (none, same) = backward(place, &dy, &x, &weight, adapter, InputGrad::Skip);
        assert!(none.is_none() && same.is_some());
        [y, dx.unwrap() - other].into_iter().chain(grads.unwrap().values()).collect()
    }

    fn worst(found: &Tensor<2>, expected: &Tensor<2>) -> f32 {
        let [found, expected] = [found, expected].map(|x| x.to_data().try_to_vec::<f32>().unwrap());
        let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let differences = found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs());
        differences.fold(0.0, f32::max) / largest
    }

    #[test]
    fn output_and_gradients_are_those_of_pefts_formula() {
        for is_quantised in [false, true] {
            for dropout in [None, Some(Dropout { probability: 0.3, seed: 5, first_row: 0 })] {
                let expected = by_autodiff(is_quantised, dropout);
                for device in [Device::flex(), Device::flex().autodiff()] {
                    let found = by_hand(&device, is_quantised, dropout);
                    assert_eq!(found.len(), 5);
                    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let error = worst(found, expected);
                        assert!(error < 1e-5, "tensor {index}, codes {is_quantised}, {dropout:?}: {error}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_added_to_some_tokens_is_what_the_adapter_makes_of_them() {
        let device = Device::flex();
        let ([x, residual, _], matrices) = fixture(&device);
        let (weight, place, norms) = (weight(&device, true), place_of(&device, DType::F32), RowNorms::default());
        let adapter = Applied { matrices: matrices.as_ref(), scale: SCALE, dropout: None, norms: &norms };
        let (base, _) = linear(place, &x, &weight, None, Some(residual.clone()));
        let all = forward(place, &x, &weight, adapter, Some(residual));
        let found = add(place, base.clone(), &x, &weight, adapter, 2..6);
        let part = |x: &Tensor<2>, rows: Range<usize>| x.clone().narrow(0, rows.start, rows.len());
        assert!(worst(&part(&found, 2..6), &part(&all, 2..6)) < 1e-6);
        assert_eq!(part(&found, 0..2).into_data(), part(&base, 0..2).into_data());
        assert_eq!(part(&found, 6..9).into_data(), part(&base, 6..9).into_data());
    }

    #[test]
    fn the_merged_weight_gives_the_output_and_a_row_of_zeros_stays_one() {
        let device = Device::flex();
        let ([x, ..], matrices) = fixture(&device);
        let (mut weight, place) = (weight(&device, false), place_of(&device, DType::F32));
        let zeros = |x: &Tensor<2>| x.clone().slice_assign(0..1, x.clone().narrow(0, 0, 1).zeros_like());
        weight.values = Matrix::Dense(zeros(&weight.values.dense()));
        let matrices = Matrices { b: zeros(&matrices.b), ..matrices };
        let norms = RowNorms::default();
        let adapter = Applied { matrices: matrices.as_ref(), scale: SCALE, dropout: None, norms: &norms };
        let host = |x: &Tensor<2>| x.to_data().try_to_vec::<f32>().unwrap();
        let (values, on_host) = (host(&weight.values.dense()), matrices.as_ref().map(host));
        let added = AdapterKind::Dora.difference(on_host.as_ref().map(|x| &**x), SCALE, &values, SHAPE);
        let sum = values.iter().zip(&added).map(|(weight, added)| weight + added).collect();
        let merged = Weight { values: Matrix::Dense(host::tensor(sum, SHAPE, &device)), ..weight.clone() };
        let expected = forward(place, &x, &weight, adapter, None);
        assert!(worst(&linear(place, &x, &merged, None, None).0, &expected) < 1e-6);
        let (dx, grads) = backward(place, &expected, &x, &weight, adapter, InputGrad::Fresh);
        let all = grads.unwrap().values().chain(dx).chain([expected]);
        assert!(all.flat_map(|x| host(&x)).all(f32::is_finite));
    }

    #[test]
    fn a_new_magnitude_changes_nothing_and_an_adapter_that_is_changed_has_other_norms() {
        let device = Device::flex();
        let ([x, ..], matrices) = fixture(&device);
        let (weight, place) = (weight(&device, true), place_of(&device, DType::F32));
        let norms = RowNorms::default();
        let magnitude = Some(norms.of_weight(&weight));
        let new = Matrices { b: matrices.b.zeros_like(), magnitude, ..matrices.clone() };
        let adapter = Applied { matrices: new.as_ref(), scale: SCALE, dropout: None, norms: &norms };
        let (base, _) = linear(place, &x, &weight, None, None);
        assert!(worst(&forward(place, &x, &weight, adapter, None), &base) < 1e-6);
        let changed = Matrices { magnitude: new.magnitude.clone(), ..matrices };
        let of_changed = |norms: &RowNorms| {
            let adapter = Applied { matrices: changed.as_ref(), scale: SCALE, dropout: None, norms };
            forward(place, &x, &weight, adapter, None).into_data()
        };
        let fresh = of_changed(&RowNorms::default());
        assert_eq!(of_changed(&norms.clone()), fresh);
        assert_ne!(of_changed(&norms), fresh, "norms are kept");
        assert_eq!(of_changed(&norms.before_change()), fresh);
    }
}
