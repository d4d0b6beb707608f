//! The gate of a feed-forward layer (Shazeer, 2020): `activation(gate) * up`, with `activation(x) = x share(x)`; in most,
//! `share(x) = sigmoid(w(x))`.

use burn::tensor::Tensor;

use super::kernels::Place;
use super::plain::gates::name;
use super::profile;
use crate::spec::Activation;

/// `activation(gate) * up`.
///
/// # Shapes
/// All `[tokens, intermediate_size]`.
#[must_use]
pub fn gated(place: Place, activation: Activation, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    profile::measure(name(activation)[0], || profile::passes(gate, 3), || place.gated(activation, gate, up))
}

/// The gradients of [`gated`] with respect to `gate` and `up`.
///
/// # Shapes
/// All `[tokens, intermediate_size]`.
#[must_use]
pub fn gated_backward(
    place: Place,
    activation: Activation,
    dh: &Tensor<2>,
    gate: &Tensor<2>,
    up: &Tensor<2>,
) -> (Tensor<2>, Tensor<2>) {
    let work = || place.gated_backward(activation, dh, [gate, up]).into();
    profile::measure(name(activation)[1], || profile::passes(gate, 5), work)
}
