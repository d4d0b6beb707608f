//! RMSNorm (Zhang and Sennrich, 2019), as Llama uses it: statistic in `f32`.

use burn::tensor::{DType, Tensor};

use super::kernels::Place;
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
    let work = || place.rms_norm_backward(dy, x, weight, rstd, residual);
    profile::measure("rms_norm_backward", || profile::passes(x, 4), work)
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

/// [`rms_norm`] in plain tensor calls.
#[must_use]
pub fn plain_rms_norm(x: &Tensor<2>, weight: &Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
    let dtype = x.dtype();
    let x = x.clone().cast(DType::F32);
    let rstd = x.clone().square().mean_dim(1).add_scalar(eps).sqrt().recip(); // [tokens, 1]
    // Rounded once.
    let y = (x * rstd.clone() * weight.clone().cast(DType::F32).unsqueeze()).cast(dtype);
    (y, rstd.squeeze_dim(1))
}

/// [`rms_norm_backward`] in plain tensor calls.
#[must_use]
pub fn plain_rms_norm_backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Tensor<1>,
    rstd: &Tensor<1>,
    residual: Tensor<2>,
) -> Tensor<2> {
    let dtype = x.dtype();
    let rstd = rstd.clone().unsqueeze_dim::<2>(1);
    let normed = x.clone().cast(DType::F32) * rstd.clone();
    let dy = dy.clone().cast(DType::F32) * weight.clone().cast(DType::F32).unsqueeze();
    let mean = (dy.clone() * normed.clone()).mean_dim(1); // [tokens, 1]
    // Rounded once.
    (residual.cast(DType::F32) + (dy - normed * mean) * rstd).cast(dtype)
}
