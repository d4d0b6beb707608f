//! A frozen linear layer with a low-rank update beside it: `y = x W^T + b + scale (drop(x) A^T) B^T`
//! (Hu et al., 2021, equation 3).

use std::ops::Range;

use burn::tensor::Tensor;

use super::kernels::Place;
use super::low_rank::Lora;
use super::plain::linear::rank;
use super::profile::{self, Cost};

pub(crate) use super::plain::linear::rounded_once;
pub use super::plain::linear::{Applied, InputGrad, Layer, LayerGrads, LayerOutput, LayersGrads, Matrix, Weight};

/// The layer's output, added to `residual` if there is one, and with a low-rank update `drop(x) A^T` for the backward.
///
/// # Shapes
/// `x`: `[tokens, in_features]`, `weight`: `[out_features, in_features]`, `residual`: `[tokens, out_features]`. Returns
/// `[tokens, out_features]` and `[tokens, r]`, in the type of `x`.
#[must_use]
pub fn linear(
    place: Place,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<Lora<&Tensor<2>>>,
    residual: Option<Tensor<2>>,
) -> LayerOutput {
    let work = || place.linear(x, Layer { weight, lora }, residual);
    profile::measure("linear", || cost(x, weight, lora, true), work)
}

/// [`linear`] by each of several layers of one input.
#[must_use]
pub fn linears(place: Place, x: &Tensor<2>, layers: &[Layer<'_>]) -> Vec<LayerOutput> {
    let cost = || Cost::sum(layers.iter().map(|layer| cost(x, layer.weight, layer.lora, true)));
    profile::measure("linear", cost, || place.linears(x, layers))
}

/// Adds the low-rank update of some of the tokens to their rows of `y`, a [`linear`] of `x` without one. Dropout is off.
///
/// # Shapes
/// As in [`linear`].
#[must_use]
pub fn add_low_rank(
    place: Place,
    y: Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Lora<&Tensor<2>>,
    rows: Range<usize>,
) -> Tensor<2> {
    place.add_low_rank(y, x, Layer { weight, lora: Some(lora) }, rows)
}

/// `drop(x) A^T`, which the backward needs, `[tokens, r]` in the type of `x`.
#[must_use]
pub fn low_rank_input(place: Place, x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
    place.low_rank_input(x, lora)
}

/// The gradients of [`linear`] with respect to `x`, as `input_grad` asks, and to the matrices of the low-rank update,
/// in `f32`.
///
/// # Shapes
/// `dy`: `[tokens, out_features]`, `x`: `[tokens, in_features]`, `xa`: as returned by the forward.
#[must_use]
pub fn linear_backward(
    place: Place,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<(Lora<&Tensor<2>>, &Tensor<2>)>,
    input_grad: InputGrad,
) -> LayerGrads {
    let (has_input_grad, (lora, xa)) = (!matches!(input_grad, InputGrad::Skip), lora.unzip());
    let work = || place.linear_backward(dy, x, (Layer { weight, lora }, xa), input_grad);
    profile::measure("linear_backward", || cost_of_backward(x, weight, lora, has_input_grad), work)
}

/// The gradients of [`linears`]: of the input, which is the sum over the layers, and of each low-rank update.
///
/// # Shapes
/// As in [`linear_backward`], for each layer.
#[must_use]
pub fn linears_backward(
    place: Place,
    dys: Vec<Tensor<2>>,
    x: &Tensor<2>,
    layers: &[Applied<'_>],
    input_grad: bool,
) -> LayersGrads {
    let cost = || Cost::sum(layers.iter().map(|(layer, _)| cost_of_backward(x, layer.weight, layer.lora, input_grad)));
    profile::measure("linear_backward", cost, || place.linears_backward(dys, x, layers, input_grad))
}

/// Cost of the base product and, with a low-rank update, of `x A^T` and the product with B.
fn cost(x: &Tensor<2>, weight: &Weight, lora: Option<Lora<&Tensor<2>>>, with_base: bool) -> Cost {
    let ([tokens, _], [out_features, in_features]) = (x.dims(), weight.dims());
    let r = lora.map_or(0, rank);
    let base = if with_base { in_features * out_features } else { 0 };
    let activations = profile::count(tokens * (in_features + out_features) * x.dtype().size());
    Cost {
        shape: format!("{in_features} -> {out_features}"),
        flops: profile::count(2 * tokens * (base + r * (in_features + out_features))),
        bytes: weight.values.num_bytes() + activations,
    }
}

/// The transposes of both and, with a low-rank update, the gradients of A and B; each operand is read for two of them.
fn cost_of_backward(x: &Tensor<2>, weight: &Weight, lora: Option<Lora<&Tensor<2>>>, has_input_grad: bool) -> Cost {
    let once = cost(x, weight, lora, has_input_grad);
    let Some(lora) = lora else { return once };
    let r = rank(lora);
    let [out_features, in_features] = weight.dims();
    let gradients = profile::count(2 * x.dims()[0] * r * (in_features + out_features));
    Cost { flops: once.flops + gradients, bytes: once.bytes + profile::bytes(x), ..once }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::host;
    use crate::ops::low_rank::LowRank;
    use crate::ops::place::place_on;

    #[test]
    fn what_is_added_to_a_product_in_bf16_is_rounded_once() {
        let number = |x: f32| host::tensor::<2>(vec![x], [1, 1], &Device::flex()).cast(DType::BF16);
        let one = number(1.0);
        let lora = Lora { matrices: LowRank { a: &one, b: &one }, scale: 1.0, dropout: None };
        let place = place_on(DeviceKind::Cuda);
        let weight = Weight::new(number(256.0));
        let (y, xa) = linear(place, &one, &weight, Some(lora), Some(one.clone()));
        // Behind 256 comes 258: either 1 alone would be lost.
        assert_eq!(y.cast(DType::F32).into_scalar::<f32>(), 258.0);
        let sum = InputGrad::AddTo(one.clone());
        let (dx, _) = linear_backward(place, &one, &one, &weight, Some((lora, &xa.unwrap())), sum);
        assert_eq!(dx.unwrap().cast(DType::F32).into_scalar::<f32>(), 258.0);
    }
}
