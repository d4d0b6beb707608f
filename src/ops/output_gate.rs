//! The gate of an attention's output (Qiu et al., 2025): `o sigmoid(gate)`.

use burn::tensor::Tensor;

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
