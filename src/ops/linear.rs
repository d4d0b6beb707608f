//! A frozen linear layer with a low-rank update beside it: `y = x W^T + b + scale (drop(x) A^T) B^T`
//! (Hu et al., 2021, equation 3).

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::blocks::Blocks;
use super::dropout::PlainDropout;
use super::host::{self, HostBytes};
use super::kernels::Place;
use super::low_rank::{Lora, LowRank};
use super::product::{F32Products, Operand, product};
use super::profile::{self, Cost};
use super::quantised::Quantised;

/// The elements of a frozen matrix `[out_features, in_features]`.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a tensor is a handle of a few hundred bytes, one for a matrix")]
pub enum Matrix {
    /// In any float type.
    Dense(Tensor<2>),
    /// As codes, which the products decode.
    Quantised(Arc<Quantised>),
    /// As the blocks of a GGUF file, in host memory; likewise.
    Blocks(Arc<Blocks>),
}

impl Matrix {
    /// `[out_features, in_features]`.
    #[must_use]
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Dense(values) => values.dims(),
            Self::Quantised(values) => values.shape,
            Self::Blocks(values) => values.shape,
        }
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn num_bytes(&self) -> f64 {
        match self {
            Self::Dense(values) => profile::bytes(values),
            Self::Quantised(values) => profile::count(values.num_bytes()),
            Self::Blocks(values) => profile::count(values.num_bytes()),
        }
    }

    /// The bytes of its tensors, which are in host memory: of codes in the order of [`Quantised::map`](super::quantised::Quantised::map).
    #[must_use]
    pub fn parts(&self) -> Vec<HostBytes> {
        match self {
            Self::Dense(values) => vec![host::float_bytes(values)],
            Self::Blocks(values) => vec![host::bytes(&values.bytes)],
            Self::Quantised(values) => {
                let parts = RefCell::new(Vec::new());
                let add = |part| parts.borrow_mut().push(part);
                values.map(|floats| add(host::float_bytes(floats)), |codes| add(host::bytes(codes)));
                parts.into_inner()
            }
        }
    }

    /// The matrix as a float tensor: decoded in plain tensor calls if it is quantised, to `f32`.
    #[must_use]
    pub fn dense(&self) -> Cow<'_, Tensor<2>> {
        self.dense_in(DType::F32)
    }

    /// [`dense`](Self::dense), but codes are decoded to `dtype`.
    pub(super) fn dense_in(&self, dtype: DType) -> Cow<'_, Tensor<2>> {
        match self {
            Self::Dense(values) => Cow::Borrowed(values),
            Self::Quantised(values) => Cow::Owned(values.decoded(dtype)),
            Self::Blocks(values) => Cow::Owned(values.decoded()),
        }
    }
}

/// A matrix `[out_features, in_features]`, and how its products are computed.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The elements.
    pub values: Matrix,
    /// Added to the product, `[out_features]` in `f32`.
    pub bias: Option<Tensor<1>>,
    /// Round both operands of a product to `bf16` and sum in `f32`: the matrix products of `bf16`, while the
    /// activations stay in `f32`.
    pub rounds: bool,
}

impl Weight {
    /// A weight without a bias that is multiplied in the type of the activations.
    #[must_use]
    pub fn new(values: Tensor<2>) -> Self {
        Self { values: Matrix::Dense(values), bias: None, rounds: false }
    }

    /// `[out_features, in_features]`.
    #[must_use]
    pub fn dims(&self) -> [usize; 2] {
        self.values.dims()
    }

    /// The same without its bias.
    #[must_use]
    pub fn without_bias(&self) -> Self {
        Self { bias: None, ..self.clone() }
    }

    /// An operand of a plain product with this weight, in `dtype`.
    fn operand(&self, x: &Tensor<2>, dtype: DType, products: F32Products) -> Operand<2> {
        if self.rounds {
            Operand::new(&x.clone().cast(DType::BF16), dtype, products)
        } else {
            Operand::new(x, dtype, products)
        }
    }
}

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
) -> (Tensor<2>, Option<Tensor<2>>) {
    let work = || place.linear(x, weight, lora, residual);
    profile::measure("linear", || cost(x, weight, lora, true), work)
}

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// Its frozen weight.
    pub weight: &'a Weight,
    /// Its low-rank update, if it has one.
    pub lora: Option<Lora<&'a Tensor<2>>>,
}

/// [`linear`] by each of several layers of one input.
#[must_use]
pub fn linears(place: Place, x: &Tensor<2>, layers: &[Layer<'_>]) -> Vec<(Tensor<2>, Option<Tensor<2>>)> {
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
    place.add_low_rank(y, x, weight, lora, rows)
}

pub(super) fn rank(lora: Lora<&Tensor<2>>) -> usize {
    lora.matrices.a.dims()[0]
}

/// `drop(x) A^T`, which the backward needs, `[tokens, r]` in the type of `x`.
#[must_use]
pub fn low_rank_input(place: Place, x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
    place.low_rank_input(x, lora)
}

/// What [`linear_backward`] computes of the input's gradient.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a tensor is a handle of a few hundred bytes, passed once a layer")]
pub enum InputGrad {
    /// Nothing: the input needs no gradient.
    Skip,
    /// The gradient.
    Fresh,
    /// The gradient, added to this tensor: another layer has the same input.
    AddTo(Tensor<2>),
}

impl InputGrad {
    /// The gradient if `wanted`, added to `sum` if there is one.
    #[must_use]
    pub fn of(wanted: bool, sum: Option<Tensor<2>>) -> Self {
        match sum {
            _ if !wanted => Self::Skip,
            Some(sum) => Self::AddTo(sum),
            None => Self::Fresh,
        }
    }
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
) -> (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>) {
    let has_input_grad = !matches!(input_grad, InputGrad::Skip);
    let work = || place.linear_backward(dy, x, weight, lora, input_grad);
    let low_rank = lora.map(|(lora, _)| lora);
    profile::measure("linear_backward", || cost_of_backward(x, weight, low_rank, has_input_grad), work)
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
    layers: &[(Layer<'_>, Option<&Tensor<2>>)],
    input_grad: bool,
) -> (Option<Tensor<2>>, Vec<Option<LowRank<Tensor<2>>>>) {
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

/// [`linear`] in plain tensor calls.
#[must_use]
pub fn plain_linear(
    products: F32Products,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<Lora<&Tensor<2>>>,
    residual: Option<Tensor<2>>,
) -> (Tensor<2>, Option<Tensor<2>>) {
    let dtype = x.dtype();
    let operand = |x: &Tensor<2>| weight.operand(x, dtype, products);
    let base = |sum| (product(&operand(x), &operand(&weight.values.dense_in(dtype)).transpose()), sum);
    linear_by(base, products, x, weight, lora, residual)
}

/// [`plain_linear`] whose product with the weight `base` computes: it adds its argument to it, or returns that.
pub(super) fn linear_by(
    base: impl FnOnce(Option<Tensor<2>>) -> (Tensor<2>, Option<Tensor<2>>),
    products: F32Products,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<Lora<&Tensor<2>>>,
    residual: Option<Tensor<2>>,
) -> (Tensor<2>, Option<Tensor<2>>) {
    let (y, residual) = base(residual);
    let bias = weight.bias.clone().map(Tensor::unsqueeze);
    let (update, xa) = lora.map(|lora| plain_low_rank(products, x, weight, lora)).unzip();
    (rounded_once(y, [bias, update, residual]), xa)
}

/// [`add_low_rank`] in plain tensor calls.
#[must_use]
pub fn plain_add_low_rank(
    products: F32Products,
    y: Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Lora<&Tensor<2>>,
    rows: Range<usize>,
) -> Tensor<2> {
    let part = |x: &Tensor<2>| x.clone().narrow(0, rows.start, rows.len());
    let (update, _) = plain_low_rank(products, &part(x), weight, lora);
    let (sum, out_features) = (part(&y) + update, weight.dims()[0]);
    y.slice_assign([rows, 0..out_features], sum)
}

/// The sum in the type of `x`, to which it is rounded once.
pub(crate) fn rounded_once<const N: usize>(x: Tensor<2>, terms: [Option<Tensor<2>>; N]) -> Tensor<2> {
    let dtype = x.dtype();
    terms.into_iter().flatten().fold(x, |sum, term| sum.cast(DType::F32) + term.cast(DType::F32)).cast(dtype)
}

/// The low-rank update, and `drop(x) A^T`.
fn plain_low_rank(
    products: F32Products,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Lora<&Tensor<2>>,
) -> (Tensor<2>, Tensor<2>) {
    let dtype = x.dtype();
    let operand = |x: &Tensor<2>| weight.operand(x, dtype, products);
    let LowRank { a, b } = lora.matrices;
    let dropped = lora.dropout.map(|settings| PlainDropout::new(x, settings).apply(x));
    let [input, a] = [dropped.as_ref().unwrap_or(x), a].map(|x| Operand::new(x, dtype, products));
    let xa = product(&input, &a.transpose()); // [tokens, r]
    (product(&operand(&xa), &operand(&(b.clone() * lora.scale)).transpose()), xa)
}

/// [`linear_backward`] in plain tensor calls.
///
/// The gradients of A and B, and what they are made of, are products in `f32` whatever the type of the activations:
/// a sum over all tokens is not rounded to a half type.
#[must_use]
pub fn plain_linear_backward(
    products: F32Products,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<(Lora<&Tensor<2>>, &Tensor<2>)>,
    input_grad: InputGrad,
) -> (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>) {
    let dtype = x.dtype();
    let operand = |x: &Tensor<2>| weight.operand(x, dtype, products);
    let base = |sum| (product(&operand(dy), &operand(&weight.values.dense_in(dtype))), sum);
    linear_backward_by(base, products, dy, x, weight, lora, input_grad)
}

/// [`plain_linear_backward`] whose product with the weight `base` computes: it adds its argument to it, or returns that.
pub(super) fn linear_backward_by(
    base: impl FnOnce(Option<Tensor<2>>) -> (Tensor<2>, Option<Tensor<2>>),
    products: F32Products,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<(Lora<&Tensor<2>>, &Tensor<2>)>,
    input_grad: InputGrad,
) -> (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>) {
    let dtype = x.dtype();
    let operand = |x: &Tensor<2>| weight.operand(x, dtype, products);
    let (dx, sum) = match input_grad {
        InputGrad::Skip => None,
        InputGrad::Fresh => Some(base(None)),
        InputGrad::AddTo(sum) => Some(base(Some(sum))),
    }
    .unzip();
    let sum = sum.flatten();
    let Some((lora, xa)) = lora else { return (dx.map(|dx| rounded_once(dx, [sum])), None) };
    let LowRank { a, b } = lora.matrices;
    let dropout = lora.dropout.map(|settings| PlainDropout::new(x, settings));
    let dropped = dropout.as_ref().map(|dropout| dropout.apply(x));
    let in_f32 = |x: &Tensor<2>| Operand::new(x, DType::F32, products);
    let dy = in_f32(dy);
    let dxa = product(&dy, &in_f32(b)) * lora.scale; // [tokens, r]
    let grad = LowRank {
        a: product(&in_f32(&dxa).transpose(), &in_f32(dropped.as_ref().unwrap_or(x))),
        b: product(&dy.transpose(), &in_f32(&(xa.clone().cast(DType::F32) * lora.scale))),
    };
    let dx = dx.map(|dx| {
        let update = match dropout {
            None => product(&operand(&dxa), &operand(a)),
            Some(dropout) => {
                let [dxa, a] = [&dxa, a].map(|x| Operand::new(x, dtype, products));
                dropout.apply(&product(&dxa, &a))
            }
        };
        rounded_once(dx, [sum, Some(update)])
    });
    (dx, Some(grad))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::device::DeviceKind;
    use crate::ops::kernels;

    #[test]
    fn what_is_added_to_a_product_in_bf16_is_rounded_once() {
        let number = |x: f32| host::tensor::<2>(vec![x], [1, 1], &Device::flex()).cast(DType::BF16);
        let one = number(1.0);
        let lora = Lora { matrices: LowRank { a: &one, b: &one }, scale: 1.0, dropout: None };
        let place = kernels::place_on(DeviceKind::Cuda);
        let weight = Weight::new(number(256.0));
        let (y, xa) = linear(place, &one, &weight, Some(lora), Some(one.clone()));
        // Behind 256 comes 258: either 1 alone would be lost.
        assert_eq!(y.cast(DType::F32).into_scalar::<f32>(), 258.0);
        let sum = InputGrad::AddTo(one.clone());
        let (dx, _) = linear_backward(place, &one, &one, &weight, Some((lora, &xa.unwrap())), sum);
        assert_eq!(dx.unwrap().cast(DType::F32).into_scalar::<f32>(), 258.0);
    }
}
