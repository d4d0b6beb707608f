//! RMSNorm (Zhang and Sennrich, 2019), as Llama uses it, and `LayerNorm` (Ba et al., 2016): statistics in `f32`.

use burn::tensor::{DType, Tensor};

use super::kernels::Place;
use super::plain::norms::Normed;
use super::profile;

/// `y = weight * x / sqrt(mean(x^2) + eps)`.
///
/// # Shapes
/// `x`: `[tokens, width]`, `weight`: `[width]`. Returns `y` in the type of `x`, and in `f32` the factor
/// `1 / sqrt(mean(x^2) + eps)` of each token, `[tokens]`, for the backward.
#[must_use]
pub fn rms_norm(place: Place, x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
    profile::measure("rms_norm", || profile::passes(x, 2), || place.rms_norm(x, weight, eps))
}

/// Adds the gradient of [`rms_norm`] with respect to `x` to `residual`.
///
/// # Shapes
/// `dy`, `x`, `residual`: `[tokens, width]`, `rstd`: `[tokens]` as returned by the forward.
#[must_use]
pub fn rms_norm_backward(
    place: Place,
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Tensor<1>,
    rstd: &Tensor<1>,
    residual: Tensor<2>,
) -> Tensor<2> {
    let work = || place.rms_norm_backward(dy, Normed { x, weight, rstd }, residual);
    profile::measure("rms_norm_backward", || profile::passes(x, 4), work)
}

/// A norm of the residual stream: RMSNorm, or `LayerNorm` where it has a bias.
#[derive(Clone, Debug)]
pub struct Norm {
    /// `[width]`
    pub weight: Tensor<1>,
    /// `[width]`
    pub bias: Option<Tensor<1>>,
}

impl Norm {
    /// The normed rows, in the type of `x`, and the factor of each for the backward, `[tokens]`.
    ///
    /// # Shapes
    /// `x`: `[tokens, width]`.
    #[must_use]
    pub fn forward(&self, place: Place, x: &Tensor<2>, eps: f64) -> (Tensor<2>, Tensor<1>) {
        let Some(bias) = &self.bias else { return rms_norm(place, x, &self.weight, eps) };
        let (y, rstd) = rms_norm(place, &centred(x), &self.weight, eps);
        // Rounded once.
        ((y + bias.clone().unsqueeze()).cast(x.dtype()), rstd)
    }

    /// Adds the gradient of [`forward`](Self::forward) with respect to `x` to `residual`.
    ///
    /// # Shapes
    /// `dy`, `x`, `residual`: `[tokens, width]`, `rstd`: `[tokens]` as returned by the forward.
    #[must_use]
    pub fn backward(
        &self,
        place: Place,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        rstd: &Tensor<1>,
        residual: Tensor<2>,
    ) -> Tensor<2> {
        if self.bias.is_none() {
            return rms_norm_backward(place, dy, x, &self.weight, rstd, residual);
        }
        let (x, dtype) = (centred(x), residual.dtype());
        let dx = rms_norm_backward(place, &dy.clone().cast(DType::F32), &x, &self.weight, rstd, x.zeros_like());
        (residual.cast(DType::F32) + centred(&dx)).cast(dtype)
    }
}

/// Rows less their means, in `f32`.
fn centred(x: &Tensor<2>) -> Tensor<2> {
    let x = x.clone().cast(DType::F32);
    x.clone() - x.mean_dim(1)
}

/// The gradient of [`rms_norm`] with respect to its weight, `[1, width]` in `f32`, in plain tensor calls.
///
/// # Shapes
/// As in [`rms_norm_backward`].
#[must_use]
pub fn rms_norm_weight_grad(dy: &Tensor<2>, x: &Tensor<2>, rstd: &Tensor<1>) -> Tensor<2> {
    let normed = x.clone().cast(DType::F32) * rstd.clone().unsqueeze_dim::<2>(1);
    let work = || (dy.clone().cast(DType::F32) * normed).sum_dim(0);
    profile::measure("rms_norm_weight_grad", || profile::passes(x, 2), work)
}
