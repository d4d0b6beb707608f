//! A frozen linear layer with a low-rank update beside it: `y = x W^T + scale (drop(x) A^T) B^T`
//! (Hu et al., 2021, equation 3).

use burn::tensor::{DType, Tensor};

use super::{dropout, linear_host};

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
/// `x`: `[tokens, in_features]`, `weight`: `[out_features, in_features]` in any float type. Returns
/// `[tokens, out_features]` and `[tokens, r]`, in the type of `x`.
#[must_use]
pub fn linear(x: &Tensor<2>, weight: &Tensor<2>, lora: Option<&LowRank<'_>>) -> (Tensor<2>, Option<Tensor<2>>) {
    linear_host::linear(x, weight, lora, None).unwrap_or_else(|_| plain_linear(x, weight, lora))
}

/// [`linear`] added to `residual`, `[tokens, out_features]`.
#[must_use]
pub fn linear_residual(
    x: &Tensor<2>,
    weight: &Tensor<2>,
    lora: Option<&LowRank<'_>>,
    residual: Tensor<2>,
) -> (Tensor<2>, Option<Tensor<2>>) {
    match linear_host::linear(x, weight, lora, Some(residual)) {
        Ok(done) => done,
        Err(residual) => {
            let (y, xa) = plain_linear(x, weight, lora);
            (residual.unwrap_or_else(|| y.zeros_like()) + y, xa)
        }
    }
}

/// `drop(x) A^T`, which the backward needs, `[tokens, r]` in the type of `x`.
#[must_use]
pub fn low_rank_input(x: &Tensor<2>, lora: &LowRank<'_>) -> Tensor<2> {
    linear(&lora.dropped(x), lora.a, None).0
}

/// What [`linear_backward`] is to compute of the input's gradient.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a tensor is a handle of a few hundred bytes, passed once a layer")]
pub enum InputGrad {
    /// Nothing: the input needs no gradient.
    Skip,
    /// The gradient.
    Fresh,
    /// The gradient, added to this one: another layer has the same input.
    AddTo(Tensor<2>),
}

/// The gradients of [`linear`]: with respect to `x` as `input_grad` asks, and to the low-rank update.
///
/// # Shapes
/// `dy`: `[tokens, out_features]`, `x`: `[tokens, in_features]`, `xa`: as returned by the forward.
#[must_use]
pub fn linear_backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Tensor<2>,
    lora: Option<(&LowRank<'_>, &Tensor<2>)>,
    input_grad: InputGrad,
) -> (Option<Tensor<2>>, Option<LowRankGrad>) {
    match linear_host::linear_backward(dy, x, weight, lora, input_grad) {
        Ok(done) => done,
        Err(input_grad) => plain_linear_backward(dy, x, weight, lora, input_grad),
    }
}

/// [`linear`] in plain tensor calls.
#[must_use]
pub fn plain_linear(x: &Tensor<2>, weight: &Tensor<2>, lora: Option<&LowRank<'_>>) -> (Tensor<2>, Option<Tensor<2>>) {
    let dtype = x.dtype();
    let y = x.clone().matmul(weight.clone().cast(dtype).transpose());
    let Some(lora) = lora else { return (y, None) };
    let xa = lora.dropped(x).matmul(lora.a.clone().cast(dtype).transpose()); // [tokens, r]
    let update = xa.clone().matmul((lora.b.clone() * lora.scale).cast(dtype).transpose());
    (y + update, Some(xa))
}

/// [`linear_backward`] in plain tensor calls.
#[must_use]
pub fn plain_linear_backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Tensor<2>,
    lora: Option<(&LowRank<'_>, &Tensor<2>)>,
    input_grad: InputGrad,
) -> (Option<Tensor<2>>, Option<LowRankGrad>) {
    let dtype = x.dtype();
    let frozen = || dy.clone().matmul(weight.clone().cast(dtype));
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
        let low_rank = dxa.matmul(lora.a.clone().cast(dtype));
        dx + match lora.dropout {
            None => low_rank,
            Some(Dropout { probability, seed }) => {
                let mask = dropout::mask(low_rank.dims(), probability, seed, &low_rank.device(), dtype);
                low_rank * mask
            }
        }
    });
    (dx, Some(grad))
}
