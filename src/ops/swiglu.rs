//! The gate of Llama's feed-forward layer (Shazeer, 2020): `silu(gate) * up`.

use burn::tensor::{DType, Tensor, activation};

use super::kernels::Place;
use super::profile;

/// `silu(gate) * up`.
///
/// # Shapes
/// All `[tokens, intermediate_size]`.
#[must_use]
pub fn swiglu(place: Place, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    profile::measure("swiglu", || profile::passes(gate, 3), || place.swiglu(gate, up))
}

/// The gradients of [`swiglu`] with respect to `gate` and `up`.
///
/// # Shapes
/// All `[tokens, intermediate_size]`.
#[must_use]
pub fn swiglu_backward(place: Place, dh: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    profile::measure("swiglu_backward", || profile::passes(gate, 5), || place.swiglu_backward(dh, gate, up))
}

/// [`swiglu`] in plain tensor calls.
#[must_use]
pub fn plain_swiglu(gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    let dtype = gate.dtype();
    // Rounded once.
    (activation::silu(gate.clone().cast(DType::F32)) * up.clone().cast(DType::F32)).cast(dtype)
}

/// [`swiglu_backward`] in plain tensor calls.
#[must_use]
pub fn plain_swiglu_backward(dh: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    let dtype = gate.dtype();
    let (dh, gate) = (dh.clone().cast(DType::F32), gate.clone().cast(DType::F32));
    let up = up.clone().cast(DType::F32);
    let sigmoid = activation::sigmoid(gate.clone());
    let silu = gate.clone() * sigmoid.clone();
    let slope = sigmoid.clone() + silu.clone() * sigmoid.neg().add_scalar(1.0);
    ((dh.clone() * up * slope).cast(dtype), (dh * silu).cast(dtype))
}
