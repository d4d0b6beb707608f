//! A frozen linear layer with a low-rank update beside it: `y = x W^T + b + scale (drop(x) A^T) B^T`
//! (Hu et al., 2021, equation 3).

use burn::tensor::{DType, Tensor};

use super::profile::{self, Cost};
use super::{dropout, linear_host};

/// A matrix `[out_features, in_features]` in any float type, and how its products are computed.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The elements.
    pub values: Tensor<2>,
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
        Self { values, bias: None, rounds: false }
    }

    /// `[out_features, in_features]`.
    #[must_use]
    pub fn dims(&self) -> [usize; 2] {
        self.values.dims()
    }

    /// An operand as the products see it.
    fn operand(&self, x: Tensor<2>, dtype: DType) -> Tensor<2> {
        if self.rounds { x.cast(DType::BF16).cast(dtype) } else { x.cast(dtype) }
    }
}

/// The low-rank update of one linear layer, as the operation needs it.
#[derive(Clone, Copy, Debug)]
pub struct LowRank<'a> {
    /// `A`, `[r, in_features]`, in `f32`.
    pub a: &'a Tensor<2>,
    /// `B`, `[out_features, r]`, in `f32`.
    pub b: &'a Tensor<2>,
    /// Factor of the update.
    pub scale: f64,
    /// Dropout on the input of A; absent in evaluation.
    pub dropout: Option<Dropout>,
}

/// Dropout on the input of A.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Share of inputs that are zeroed, in (0, 1).
    pub probability: f64,
    /// Names the mask: the same seed gives the same mask.
    pub seed: u64,
}

/// Gradients of a low-rank update, in `f32`.
#[derive(Clone, Debug)]
pub struct LowRankGrad {
    /// Gradient of `A`, `[r, in_features]`.
    pub a: Tensor<2>,
    /// Gradient of `B`, `[out_features, r]`.
    pub b: Tensor<2>,
}

impl LowRank<'_> {
    /// The input of A: `x`, or `x` with the mask of the seed applied.
    pub(super) fn dropped(&self, x: &Tensor<2>) -> Tensor<2> {
        match self.dropout {
            None => x.clone(),
            Some(Dropout { probability, seed }) => {
                x.clone() * dropout::mask(x.dims(), probability, seed, &x.device(), x.dtype())
            }
        }
    }
}

/// The layer's output and, with a low-rank update, `drop(x) A^T` for the backward.
///
/// # Shapes
/// `x`: `[tokens, in_features]`, `weight`: `[out_features, in_features]`. Returns
/// `[tokens, out_features]` and `[tokens, r]`, in the type of `x`.
#[must_use]
pub fn linear(x: &Tensor<2>, weight: &Weight, lora: Option<&LowRank<'_>>) -> (Tensor<2>, Option<Tensor<2>>) {
    let work = || linear_host::linear(x, weight, lora, None).unwrap_or_else(|_| plain_linear(x, weight, lora));
    profile::measure("linear", || cost(x, weight, lora, true), work)
}

/// [`linear`] added to `residual`, `[tokens, out_features]`.
#[must_use]
pub fn linear_residual(
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<&LowRank<'_>>,
    residual: Tensor<2>,
) -> (Tensor<2>, Option<Tensor<2>>) {
    let work = || match linear_host::linear(x, weight, lora, Some(residual)) {
        Ok(done) => done,
        Err(residual) => {
            let (y, xa) = plain_linear(x, weight, lora);
            (residual.unwrap_or_else(|| y.zeros_like()) + y, xa)
        }
    };
    profile::measure("linear", || cost(x, weight, lora, true), work)
}

/// `drop(x) A^T`, which the backward needs, `[tokens, r]` in the type of `x`.
#[must_use]
pub fn low_rank_input(x: &Tensor<2>, lora: &LowRank<'_>) -> Tensor<2> {
    linear(&lora.dropped(x), &Weight::new(lora.a.clone()), None).0
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

/// The gradients of [`linear`] with respect to `x`, as `input_grad` asks, and to the low-rank update.
///
/// # Shapes
/// `dy`: `[tokens, out_features]`, `x`: `[tokens, in_features]`, `xa`: as returned by the forward.
#[must_use]
pub fn linear_backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<(&LowRank<'_>, &Tensor<2>)>,
    input_grad: InputGrad,
) -> (Option<Tensor<2>>, Option<LowRankGrad>) {
    let has_input_grad = !matches!(input_grad, InputGrad::Skip);
    let work = || match linear_host::linear_backward(dy, x, weight, lora, input_grad) {
        Ok(done) => done,
        Err(input_grad) => plain_linear_backward(dy, x, weight, lora, input_grad),
    };
    let low_rank = lora.map(|(lora, _)| lora);
    profile::measure("linear_backward", || cost_of_backward(x, weight, low_rank, has_input_grad), work)
}

/// Cost of the base product and, with a low-rank update, of `x A^T` and the product with B.
fn cost(x: &Tensor<2>, weight: &Weight, lora: Option<&LowRank<'_>>, with_base: bool) -> Cost {
    let ([tokens, _], [out_features, in_features]) = (x.dims(), weight.dims());
    let r = lora.map_or(0, |lora| lora.a.dims()[0]);
    let base = if with_base { in_features * out_features } else { 0 };
    let activations = profile::count(tokens * (in_features + out_features) * x.dtype().size());
    Cost {
        shape: format!("{in_features} -> {out_features}"),
        flops: profile::count(2 * tokens * (base + r * (in_features + out_features))),
        bytes: profile::bytes(&weight.values) + activations,
    }
}

/// The transposes of both and, with a low-rank update, the gradients of A and B; each operand is read for two of them.
fn cost_of_backward(x: &Tensor<2>, weight: &Weight, lora: Option<&LowRank<'_>>, has_input_grad: bool) -> Cost {
    let once = cost(x, weight, lora, has_input_grad);
    let Some(lora) = lora else { return once };
    let r = lora.a.dims()[0];
    let [out_features, in_features] = weight.dims();
    let gradients = profile::count(2 * x.dims()[0] * r * (in_features + out_features));
    Cost { flops: once.flops + gradients, bytes: once.bytes + profile::bytes(x), ..once }
}

/// [`linear`] in plain tensor calls.
#[must_use]
pub fn plain_linear(x: &Tensor<2>, weight: &Weight, lora: Option<&LowRank<'_>>) -> (Tensor<2>, Option<Tensor<2>>) {
    let dtype = x.dtype();
    let operand = |x: Tensor<2>| weight.operand(x, dtype);
    let mut y = operand(x.clone()).matmul(operand(weight.values.clone()).transpose());
    if let Some(bias) = &weight.bias {
        y = y + bias.clone().cast(dtype).unsqueeze();
    }
    let Some(lora) = lora else { return (y, None) };
    let xa = lora.dropped(x).matmul(lora.a.clone().cast(dtype).transpose()); // [tokens, r]
    let update = operand(xa.clone()).matmul(operand(lora.b.clone() * lora.scale).transpose());
    (y + update, Some(xa))
}

/// [`linear_backward`] in plain tensor calls.
#[must_use]
pub fn plain_linear_backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Weight,
    lora: Option<(&LowRank<'_>, &Tensor<2>)>,
    input_grad: InputGrad,
) -> (Option<Tensor<2>>, Option<LowRankGrad>) {
    let dtype = x.dtype();
    let operand = |x: Tensor<2>| weight.operand(x, dtype);
    let frozen = || operand(dy.clone()).matmul(operand(weight.values.clone()));
    let dx = match input_grad {
        InputGrad::Skip => None,
        InputGrad::Fresh => Some(frozen()),
        InputGrad::AddTo(sum) => Some(sum + frozen()),
    };
    let Some((lora, xa)) = lora else { return (dx, None) };
    let dxa = dy.clone().matmul((lora.b.clone() * lora.scale).cast(dtype)); // [tokens, r]
    let grad = LowRankGrad {
        a: dxa.clone().transpose().matmul(lora.dropped(x)).cast(DType::F32),
        b: dy.clone().transpose().matmul(xa.clone()).cast(DType::F32) * lora.scale,
    };
    let dx = dx.map(|dx| {
        dx + match lora.dropout {
            None => operand(dxa).matmul(operand(lora.a.clone())),
            Some(Dropout { probability, seed }) => {
                let low_rank = dxa.matmul(lora.a.clone().cast(dtype));
                let mask = dropout::mask(low_rank.dims(), probability, seed, &low_rank.device(), dtype);
                low_rank * mask
            }
        }
    });
    (dx, Some(grad))
}
