//! The gate of Llama's feed-forward layer (Shazeer, 2020): `silu(gate) * up`.

use burn::tensor::{DType, Tensor, activation};

use super::{cpu, host, profile};

/// `silu(gate) * up`.
///
/// # Shapes
/// All `[tokens, intermediate_size]`.
#[must_use]
pub fn swiglu(gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    profile::measure("swiglu", || profile::passes(gate, 3), || run(gate, up))
}

fn run(gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    let (Some(host_gate), Some(host_up)) = (host::view(gate), host::view(up)) else {
        return plain_swiglu(gate, up);
    };
    let mut h = vec![0.0; host_gate.as_slice().len()];
    cpu::swiglu(host_gate.as_slice(), host_up.as_slice(), &mut h);
    host::tensor(h, gate.dims(), &gate.device())
}

/// The gradients of [`swiglu`] with respect to `gate` and `up`.
///
/// # Shapes
/// All `[tokens, intermediate_size]`.
#[must_use]
pub fn swiglu_backward(dh: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    profile::measure("swiglu_backward", || profile::passes(gate, 5), || run_backward(dh, gate, up))
}

fn run_backward(dh: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    let (Some(host_dh), Some(host_gate), Some(host_up)) = (host::view(dh), host::view(gate), host::view(up)) else {
        return plain_swiglu_backward(dh, gate, up);
    };
    let len = host_gate.as_slice().len();
    let (mut dgate, mut dup) = (vec![0.0; len], vec![0.0; len]);
    cpu::swiglu_backward(host_dh.as_slice(), host_gate.as_slice(), host_up.as_slice(), &mut dgate, &mut dup);
    (host::tensor(dgate, gate.dims(), &gate.device()), host::tensor(dup, up.dims(), &up.device()))
}

/// [`swiglu`] in plain tensor calls.
#[must_use]
pub fn plain_swiglu(gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    activation::silu(gate.clone()) * up.clone()
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
