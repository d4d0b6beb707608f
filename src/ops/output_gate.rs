//! The gate of an attention's output (Qiu et al., 2025): `o sigmoid(gate)`.

use burn::tensor::{DType, Tensor, activation};

use super::kernels::Place;
use super::profile;

/// `o * sigmoid(gate)`.
///
/// # Shapes
/// Both `[tokens, num_heads * head_dim]`.
#[must_use]
pub fn gate_output(place: Place, o: &Tensor<2>, gate: &Tensor<2>) -> Tensor<2> {
    profile::measure("output_gate", || profile::passes(o, 3), || place.gate_output(o, gate))
}

/// The gradients of [`gate_output`] with respect to `o` and `gate`. Nothing else may have views of `dy` and `gate`.
#[must_use]
pub fn gate_output_backward(place: Place, dy: Tensor<2>, o: &Tensor<2>, gate: Tensor<2>) -> [Tensor<2>; 2] {
    let cost = profile::passes(o, 5);
    let work = || place.gate_output_backward(dy, o, gate);
    profile::measure("output_gate_backward", || cost, work)
}

/// [`gate_output`] in plain tensor calls.
#[must_use]
pub fn plain_gate_output(o: &Tensor<2>, gate: &Tensor<2>) -> Tensor<2> {
    let sigmoid = activation::sigmoid(gate.clone().cast(DType::F32));
    (o.clone().cast(DType::F32) * sigmoid).cast(o.dtype())
}

/// [`gate_output_backward`] in plain tensor calls.
#[must_use]
pub fn plain_gate_output_backward(dy: Tensor<2>, o: &Tensor<2>, gate: Tensor<2>) -> [Tensor<2>; 2] {
    let dtype = o.dtype();
    let [dy, o, gate] = [dy, o.clone(), gate].map(|x| x.cast(DType::F32));
    let sigmoid = activation::sigmoid(gate);
    let d_o = dy * sigmoid.clone();
    let d_gate = d_o.clone() * o * (sigmoid.neg() + 1.0);
    [d_o, d_gate].map(|grad| grad.cast(dtype))
}
