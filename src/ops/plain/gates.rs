//! The gates of a feed-forward layer and of an attention's output in plain tensor calls.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use burn::tensor::{DType, Tensor, activation};

use crate::spec::{Activation, Curve};

/// The argument of the sigmoid in GELU's approximation is `GELU_SCALE (x + GELU_CUBE x^3)`: `sqrt(8 / pi)`, 0.044715.
pub(crate) const GELU_SCALE: f64 = 1.595_769_121_605_730_7;
pub(crate) const GELU_CUBE: f64 = 0.044_715;

/// The argument of the sigmoid in gpt-oss is this often the gate.
pub(crate) const CLAMPED_SCALE: f64 = 1.702;
/// Its bound of gate and up.
pub(crate) const CLAMP: f64 = 7.0;

/// So near to 0, `(exp(x) - 1) / x` is taken for `1 + x / 2 + x^2 / 6` in xIELU, whose last two factors follow.
pub(crate) const XIELU_NEAR: f64 = 1e-2;
pub(crate) const XIELU_SERIES: [f64; 2] = [1.0 / 6.0, 0.5];

/// Names of the operation and of its backward.
pub(crate) fn name(activation: Activation) -> [&'static str; 2] {
    match activation {
        Activation::Silu => ["swiglu", "swiglu_backward"],
        Activation::GeluTanh => ["geglu", "geglu_backward"],
        Activation::Gelu => ["erf_geglu", "erf_geglu_backward"],
        Activation::Relu => ["reglu", "reglu_backward"],
        Activation::Clamped => ["clamped_swiglu", "clamped_swiglu_backward"],
        Activation::Xielu(_) => ["xielu", "xielu_backward"],
    }
}

pub(crate) fn plain_gated(activation: Activation, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    let dtype = gate.dtype();
    let [gate, up] = clamped(activation, [gate, up].map(|x| x.clone().cast(DType::F32)));
    // Rounded once.
    (gate.clone() * share(activation, gate) * up).cast(dtype)
}

pub(crate) fn plain_gated_backward(
    activation: Activation,
    dh: &Tensor<2>,
    [gate, up]: [&Tensor<2>; 2],
) -> [Tensor<2>; 2] {
    let dtype = gate.dtype();
    let [dh, of_gate, of_up] = [dh, gate, up].map(|x| x.clone().cast(DType::F32));
    let [gate, up] = clamped(activation, [of_gate.clone(), of_up.clone()]);
    let share = share(activation, gate.clone());
    let active = gate.clone() * share.clone();
    // How the share grows with the gate, times the gate.
    let behind = || share.clone().neg().add_scalar(1.0) * active.clone();
    let steep = match activation {
        Activation::Silu => Some(behind()),
        Activation::GeluTanh => Some(behind() * (gate.square() * (3.0 * GELU_CUBE) + 1.0) * GELU_SCALE),
        Activation::Clamped => Some(behind() * CLAMPED_SCALE),
        Activation::Gelu => Some(gate.clone() * (gate.square() * -0.5).exp() * (2.0 * PI).sqrt().recip()),
        Activation::Relu => None,
        Activation::Xielu(curve) => {
            let [share, slope] = curved(gate.clone(), curve);
            Some(slope - share)
        }
    };
    let slope = match steep {
        Some(steep) => share + steep,
        None => share,
    };
    let (mut dgate, mut dup) = (dh.clone() * up * slope, dh * active);
    if activation == Activation::Clamped {
        dgate = dgate.mask_fill(of_gate.greater_elem(CLAMP), 0.0);
        dup = dup.mask_fill(of_up.abs().greater_elem(CLAMP), 0.0);
    }
    [dgate, dup].map(|grad| grad.cast(dtype))
}

/// Gate and up within the bounds of the activation, and what the activation adds to the latter.
fn clamped(activation: Activation, [gate, up]: [Tensor<2>; 2]) -> [Tensor<2>; 2] {
    if activation == Activation::Clamped { [gate.clamp_max(CLAMP), up.clamp(-CLAMP, CLAMP) + 1.0] } else { [gate, up] }
}

/// What the gate is multiplied by.
fn share(activation: Activation, gate: Tensor<2>) -> Tensor<2> {
    activation::sigmoid(match activation {
        Activation::Silu => gate,
        Activation::GeluTanh => gate.clone() * (gate.square() * GELU_CUBE + 1.0) * GELU_SCALE,
        Activation::Clamped => gate * CLAMPED_SCALE,
        Activation::Gelu => return ((gate * FRAC_1_SQRT_2).erf() + 1.0) * 0.5,
        Activation::Relu => return gate.greater_elem(0.0).float().cast(DType::F32),
        Activation::Xielu(curve) => {
            let [share, _] = curved(gate, curve);
            return share;
        }
    })
}

/// What the gate is multiplied by in xIELU, and the slope of the product.
fn curved(gate: Tensor<2>, Curve { positive, negative, beta }: Curve) -> [Tensor<2>; 2] {
    let (is_above, is_near) = (gate.clone().greater_elem(0.0), gate.clone().abs().lower_elem(XIELU_NEAR));
    let grown = gate.clone().clamp_max(0.0).exp() - 1.0;
    let [third, half] = XIELU_SERIES;
    let near = (gate.clone() * third + half) * gate.clone() + 1.0;
    let ratio = (grown.clone() / gate.clone()).mask_where(is_near, near);
    let straight = gate * positive;
    let share = ((ratio - 1.0) * negative).mask_where(is_above.clone(), straight.clone());
    let slope = (grown * negative).mask_where(is_above, straight * 2.0);
    [share, slope].map(|it| it + beta)
}

pub(crate) fn plain_gate_output(o: &Tensor<2>, gate: &Tensor<2>) -> Tensor<2> {
    let sigmoid = activation::sigmoid(gate.clone().cast(DType::F32));
    (o.clone().cast(DType::F32) * sigmoid).cast(o.dtype())
}

pub(crate) fn plain_gate_output_backward(dy: Tensor<2>, o: &Tensor<2>, gate: Tensor<2>) -> [Tensor<2>; 2] {
    let dtype = o.dtype();
    let [dy, o, gate] = [dy, o.clone(), gate].map(|x| x.cast(DType::F32));
    let sigmoid = activation::sigmoid(gate);
    let d_o = dy * sigmoid.clone();
    let d_gate = d_o.clone() * o * (sigmoid.neg() + 1.0);
    [d_o, d_gate].map(|grad| grad.cast(dtype))
}
