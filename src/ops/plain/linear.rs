//! Frozen linear layers with low-rank updates, and what they compute in plain tensor calls.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::dropout::PlainDropout;
use crate::ops::blocks::Blocks;
use crate::ops::host::{self, HostBytes};
use crate::ops::low_rank::{Lora, LowRank};
use crate::ops::product::{F32Products, Operand, product};
use crate::ops::profile;
use crate::ops::quantised::Quantised;

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

    /// The bytes of its tensors, which are in host memory: of codes in the order of [`Quantised::map`].
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
    pub(crate) fn dense_in(&self, dtype: DType) -> Cow<'_, Tensor<2>> {
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

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// Its frozen weight.
    pub weight: &'a Weight,
    /// Its low-rank update, if it has one.
    pub lora: Option<Lora<&'a Tensor<2>>>,
}

/// A layer with the low-rank input of its update, as [`linear`](crate::ops::linear::linear) gave it.
pub type Applied<'a> = (Layer<'a>, Option<&'a Tensor<2>>);

/// The output of a layer, and the low-rank input of its update.
pub type LayerOutput = (Tensor<2>, Option<Tensor<2>>);

/// The gradients of a layer's input and of its update.
pub type LayerGrads = (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>);

/// The gradients of the input of several layers and of their updates.
pub type LayersGrads = (Option<Tensor<2>>, Vec<Option<LowRank<Tensor<2>>>>);

/// What [`linear_backward`](crate::ops::linear::linear_backward) computes of the input's gradient.
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

pub(crate) fn rank(lora: Lora<&Tensor<2>>) -> usize {
    lora.matrices.a.dims()[0]
}

pub(crate) fn plain_linear(
    products: F32Products,
    x: &Tensor<2>,
    layer: Layer<'_>,
    residual: Option<Tensor<2>>,
) -> LayerOutput {
    let (dtype, weight) = (x.dtype(), layer.weight);
    let operand = |x: &Tensor<2>| weight.operand(x, dtype, products);
    let base = |sum| (product(&operand(x), &operand(&weight.values.dense_in(dtype)).transpose()), sum);
    linear_by(base, products, x, layer, residual)
}

/// [`plain_linear`] whose product with the weight `base` computes: it adds its argument to it, or returns that.
pub(crate) fn linear_by(
    base: impl FnOnce(Option<Tensor<2>>) -> (Tensor<2>, Option<Tensor<2>>),
    products: F32Products,
    x: &Tensor<2>,
    Layer { weight, lora }: Layer<'_>,
    residual: Option<Tensor<2>>,
) -> LayerOutput {
    let (y, residual) = base(residual);
    let bias = weight.bias.clone().map(Tensor::unsqueeze);
    let (update, xa) = lora.map(|lora| plain_low_rank(products, x, weight, lora)).unzip();
    (rounded_once(y, [bias, update, residual]), xa)
}

pub(crate) fn plain_add_low_rank(
    products: F32Products,
    y: Tensor<2>,
    x: &Tensor<2>,
    Layer { weight, lora }: Layer<'_>,
    rows: Range<usize>,
) -> Tensor<2> {
    let Some(lora) = lora else { return y };
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

/// [`linear_backward`](crate::ops::linear::linear_backward) in plain tensor calls.
///
/// The gradients of A and B, and what they are made of, are products in `f32` whatever the type of the activations:
/// a sum over all tokens is not rounded to a half type.
pub(crate) fn plain_linear_backward(
    products: F32Products,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    layer: Applied<'_>,
    input_grad: InputGrad,
) -> LayerGrads {
    let (dtype, weight) = (x.dtype(), layer.0.weight);
    let operand = |x: &Tensor<2>| weight.operand(x, dtype, products);
    let base = |sum| (Some(product(&operand(dy), &operand(&weight.values.dense_in(dtype)))), sum);
    linear_backward_by(base, products, dy, x, layer, input_grad)
}

/// [`plain_linear_backward`] whose product with the weight `base` computes: it adds its argument to it, or returns that.
pub(crate) fn linear_backward_by(
    base: impl FnOnce(Option<Tensor<2>>) -> (Option<Tensor<2>>, Option<Tensor<2>>),
    products: F32Products,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    (Layer { weight, lora }, xa): Applied<'_>,
    input_grad: InputGrad,
) -> LayerGrads {
    let dtype = x.dtype();
    let operand = |x: &Tensor<2>| weight.operand(x, dtype, products);
    let (dx, sum) = match input_grad {
        InputGrad::Skip => (None, None),
        InputGrad::Fresh => base(None),
        InputGrad::AddTo(sum) => base(Some(sum)),
    };
    let Some((lora, xa)) = lora.zip(xa) else { return (dx.map(|dx| rounded_once(dx, [sum])), None) };
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
