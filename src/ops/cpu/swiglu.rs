//! The gate of a feed-forward layer: `activation(gate) * up`, with `activation(x) = x share(x)`; in most, `share(x) = sigmoid(w(x))`.

use pulp::Simd;
use rayon::prelude::*;

use super::simd::{CHUNK, exp, sigmoid, vectorised};
use crate::ops::plain::gates::{CLAMP, CLAMPED_SCALE, GELU_CUBE, GELU_SCALE, XIELU_NEAR, XIELU_SERIES};
use crate::spec::{Activation, Curve};

/// What the gate is multiplied by, and the slope of the product.
#[inline(always)]
fn share<S: Simd>(simd: S, activation: Activation, x: S::f32s) -> (S::f32s, S::f32s) {
    let one = simd.splat_f32s(1.0);
    match activation {
        Activation::Gelu => {
            let (below, density) = normal(simd, x);
            (below, simd.mul_add_e_f32s(x, density, below))
        }
        Activation::Relu => {
            let zero = simd.splat_f32s(0.0);
            let step = simd.select_f32s(simd.greater_than_f32s(x, zero), one, zero);
            (step, step)
        }
        Activation::Xielu(curve) => curved(simd, curve, x),
        Activation::Silu | Activation::GeluTanh | Activation::Clamped => {
            let (w, steep) = argument(simd, activation, x);
            let s = sigmoid(simd, w);
            (s, simd.mul_f32s(s, simd.mul_add_e_f32s(steep, simd.sub_f32s(one, s), one)))
        }
    }
}

/// The share of a standard normal distribution below `x`, within 1e-7 (Abramowitz and Stegun, 7.1.26), and its density there.
#[inline(always)]
fn normal<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    const POLYNOMIAL: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];
    let (zero, one) = (simd.splat_f32s(0.0), simd.splat_f32s(1.0));
    let far = simd.abs_f32s(x);
    let scale = simd.splat_f32s(0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2);
    let t = simd.div_f32s(one, simd.mul_add_e_f32s(far, scale, one));
    let sum = POLYNOMIAL.into_iter().fold(zero, |sum, c| simd.mul_add_e_f32s(sum, t, simd.splat_f32s(c)));
    let bell = exp(simd, simd.mul_f32s(simd.mul_f32s(x, x), simd.splat_f32s(-0.5)));
    let tail = simd.mul_f32s(simd.mul_f32s(sum, t), simd.mul_f32s(bell, simd.splat_f32s(0.5)));
    let below = simd.select_f32s(simd.less_than_f32s(x, zero), tail, simd.sub_f32s(one, tail));
    (below, simd.mul_f32s(bell, simd.splat_f32s(0.398_942_3)))
}

/// The same of xIELU.
#[inline(always)]
fn curved<S: Simd>(simd: S, Curve { positive, negative, beta }: Curve, x: S::f32s) -> (S::f32s, S::f32s) {
    let splat = |number: f32| simd.splat_f32s(number);
    let (one, negative, beta) = (splat(1.0), splat(negative), splat(beta));
    let grown = simd.sub_f32s(exp(simd, simd.min_f32s(x, splat(0.0))), one);
    let [third, half] = XIELU_SERIES.map(|number| splat(number as f32));
    let near = simd.mul_add_e_f32s(simd.mul_add_e_f32s(x, third, half), x, one);
    let is_near = simd.less_than_f32s(simd.abs_f32s(x), splat(XIELU_NEAR as f32));
    let ratio = simd.select_f32s(is_near, near, simd.div_f32s(grown, x));
    let is_above = simd.greater_than_f32s(x, splat(0.0));
    let straight = simd.mul_f32s(x, splat(positive));
    let share = simd.select_f32s(is_above, straight, simd.mul_f32s(simd.sub_f32s(ratio, one), negative));
    let slope = simd.select_f32s(is_above, simd.add_f32s(straight, straight), simd.mul_f32s(grown, negative));
    (simd.add_f32s(share, beta), simd.add_f32s(slope, beta))
}

/// `w(x)`, and `x` times its derivative.
#[inline(always)]
fn argument<S: Simd>(simd: S, activation: Activation, x: S::f32s) -> (S::f32s, S::f32s) {
    match activation {
        Activation::Silu | Activation::Gelu | Activation::Relu | Activation::Xielu(_) => (x, x),
        Activation::GeluTanh => {
            let linear = simd.mul_f32s(x, simd.splat_f32s(GELU_SCALE as f32));
            let cube = simd.mul_f32s(simd.mul_f32s(x, x), simd.splat_f32s(GELU_CUBE as f32));
            let cubes = simd.mul_f32s(linear, cube);
            let tripled = simd.mul_add_e_f32s(cubes, simd.splat_f32s(3.0), linear);
            (simd.add_f32s(linear, cubes), tripled)
        }
        Activation::Clamped => {
            let scaled = simd.mul_f32s(x, simd.splat_f32s(CLAMPED_SCALE as f32));
            (scaled, scaled)
        }
    }
}

/// `gate * share * up`.
#[inline(always)]
fn gated_vector<S: Simd>(simd: S, activation: Activation, gate: S::f32s, up: S::f32s) -> S::f32s {
    let (gate, up) = clamped(simd, activation, gate, up);
    let (share, _) = share(simd, activation, gate);
    simd.mul_f32s(simd.mul_f32s(gate, share), up)
}

/// `(dh * up * slope, dh * gate * share)`
#[inline(always)]
fn gated_backward_vector<S: Simd>(
    simd: S,
    activation: Activation,
    dh: S::f32s,
    gate: S::f32s,
    up: S::f32s,
) -> (S::f32s, S::f32s) {
    let (of_gate, of_up) = (gate, up);
    let (gate, up) = clamped(simd, activation, gate, up);
    let (s, slope) = share(simd, activation, gate);
    let d_gate = simd.mul_f32s(simd.mul_f32s(dh, up), slope);
    let d_up = simd.mul_f32s(dh, simd.mul_f32s(gate, s));
    if activation != Activation::Clamped {
        return (d_gate, d_up);
    }
    let (zero, most) = (simd.splat_f32s(0.0), simd.splat_f32s(CLAMP as f32));
    let within = |x, d| simd.select_f32s(simd.less_than_or_equal_f32s(x, most), d, zero);
    (within(of_gate, d_gate), within(simd.abs_f32s(of_up), d_up))
}

/// Gate and up within the bounds of the activation, and what the activation adds to the latter.
#[inline(always)]
fn clamped<S: Simd>(simd: S, activation: Activation, gate: S::f32s, up: S::f32s) -> (S::f32s, S::f32s) {
    if activation != Activation::Clamped {
        return (gate, up);
    }
    let (most, least) = (simd.splat_f32s(CLAMP as f32), simd.splat_f32s(-CLAMP as f32));
    let up = simd.max_f32s(simd.min_f32s(up, most), least);
    (simd.min_f32s(gate, most), simd.add_f32s(up, simd.splat_f32s(1.0)))
}

vectorised! { fn gated_chunk<'a, S>(simd, activation: Activation, gate: &'a [f32], up: &'a [f32], h: &'a mut [f32]) {
    let (gate, gate_tail) = S::as_simd_f32s(gate);
    let (up, up_tail) = S::as_simd_f32s(up);
    let (h, h_tail) = S::as_mut_simd_f32s(h);
    for ((h, gate), up) in h.iter_mut().zip(gate).zip(up) {
        *h = gated_vector(simd, activation, *gate, *up);
    }
    if !h_tail.is_empty() {
        let value = gated_vector(simd, activation, simd.partial_load_f32s(gate_tail), simd.partial_load_f32s(up_tail));
        simd.partial_store_f32s(h_tail, value);
    }
} }

vectorised! { fn gated_backward_chunk<'a, S>(
    simd, activation: Activation, dh: &'a [f32], gate: &'a [f32], up: &'a [f32], d_gate: &'a mut [f32], d_up: &'a mut [f32],
) {
    let (dh, dh_tail) = S::as_simd_f32s(dh);
    let (gate, gate_tail) = S::as_simd_f32s(gate);
    let (up, up_tail) = S::as_simd_f32s(up);
    let (d_gate, d_gate_tail) = S::as_mut_simd_f32s(d_gate);
    let (d_up, d_up_tail) = S::as_mut_simd_f32s(d_up);
    for ((((d_gate, d_up), dh), gate), up) in d_gate.iter_mut().zip(d_up).zip(dh).zip(gate).zip(up) {
        (*d_gate, *d_up) = gated_backward_vector(simd, activation, *dh, *gate, *up);
    }
    if !dh_tail.is_empty() {
        let (gate, up) = gated_backward_vector(
            simd,
            activation,
            simd.partial_load_f32s(dh_tail),
            simd.partial_load_f32s(gate_tail),
            simd.partial_load_f32s(up_tail),
        );
        simd.partial_store_f32s(d_gate_tail, gate);
        simd.partial_store_f32s(d_up_tail, up);
    }
} }

/// `h = activation(gate) * up` (Shazeer 2020, "GLU Variants Improve Transformer").
pub fn gated(activation: Activation, gate: &[f32], up: &[f32], h: &mut [f32]) {
    assert!(gate.len() == h.len() && up.len() == h.len(), "gated: lengths");
    h.par_chunks_mut(CHUNK)
        .zip(gate.par_chunks(CHUNK))
        .zip(up.par_chunks(CHUNK))
        .for_each(|((h, gate), up)| gated_chunk(activation, gate, up, h));
}

/// Gradients of [`gated`] with respect to `gate` and `up`.
pub fn gated_backward(
    activation: Activation,
    dh: &[f32],
    gate: &[f32],
    up: &[f32],
    d_gate: &mut [f32],
    d_up: &mut [f32],
) {
    let len = dh.len();
    assert!([gate.len(), up.len(), d_gate.len(), d_up.len()] == [len; 4], "gated_backward: lengths");
    d_gate
        .par_chunks_mut(CHUNK)
        .zip(d_up.par_chunks_mut(CHUNK))
        .zip(dh.par_chunks(CHUNK))
        .zip(gate.par_chunks(CHUNK))
        .zip(up.par_chunks(CHUNK))
        .for_each(|((((d_gate, d_up), dh), gate), up)| gated_backward_chunk(activation, dh, gate, up, d_gate, d_up));
}

#[cfg(test)]
mod tests {
    use super::super::reference::{assert_close, random};
    use super::*;

    const CURVE: Curve = Curve { positive: 0.8, negative: 1.3, beta: 0.5 };
    const ACTIVATIONS: [Activation; 4] =
        [Activation::Silu, Activation::GeluTanh, Activation::Clamped, Activation::Xielu(CURVE)];

    /// Value and the gradients for `gate` and `up`, in f64, with dh = 1.
    fn exact(activation: Activation, gate: f32, up: f32) -> (f64, f64, f64) {
        let (gate, up) = (f64::from(gate), f64::from(up));
        if activation == Activation::GeluTanh {
            // As it is written in terms of the tangent.
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let t = (root * (gate + 0.044_715 * gate.powi(3))).tanh();
            let slope = root * (1.0 + 3.0 * 0.044_715 * gate * gate);
            let active = 0.5 * gate * (1.0 + t);
            return (active * up, up * (0.5 * (1.0 + t) + 0.5 * gate * (1.0 - t * t) * slope), active);
        }
        if activation == Activation::Clamped {
            let (within, bounded) = (gate.min(7.0), up.clamp(-7.0, 7.0) + 1.0);
            let s = 1.0 / (1.0 + (-1.702 * within).exp());
            let slope = if gate <= 7.0 { s + 1.702 * within * s * (1.0 - s) } else { 0.0 };
            let of_up = if up.abs() <= 7.0 { within * s } else { 0.0 };
            return (within * s * bounded, bounded * slope, of_up);
        }
        if let Activation::Xielu(Curve { positive, negative, beta }) = activation {
            let [positive, negative, beta] = [positive, negative, beta].map(f64::from);
            let (active, slope) = if gate > 0.0 {
                (positive * gate * gate + beta * gate, 2.0 * positive * gate + beta)
            } else {
                (negative * (gate.exp_m1() - gate) + beta * gate, negative * gate.exp_m1() + beta)
            };
            return (active * up, up * slope, active);
        }
        let s = 1.0 / (1.0 + (-gate).exp());
        (gate * s * up, up * (s + gate * s * (1.0 - s)), gate * s)
    }

    #[test]
    fn gates_and_their_gradients_match_f64() {
        let lengths = [1, 15, 16, 1000, 3 * CHUNK + 7];
        for (len, activation) in lengths.into_iter().flat_map(|len| ACTIVATIONS.map(|activation| (len, activation))) {
            let gate: Vec<f32> = random(len, 1).iter().map(|x| x * 8.0).collect();
            let mut up = random(len, 2);
            if activation == Activation::Clamped {
                up.iter_mut().for_each(|up| *up *= 9.0);
            }
            let dh = random(len, 3);
            let (mut h, mut d_gate, mut d_up) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
            gated(activation, &gate, &up, &mut h);
            gated_backward(activation, &dh, &gate, &up, &mut d_gate, &mut d_up);
            let exact: Vec<_> = gate.iter().zip(&up).map(|(g, u)| exact(activation, *g, *u)).collect();
            assert_close(&h, &exact.iter().map(|e| e.0).collect::<Vec<_>>(), 1e-6);
            let scaled = |pick: fn(&(f64, f64, f64)) -> f64| -> Vec<f64> {
                exact.iter().zip(&dh).map(|(e, d)| pick(e) * f64::from(*d)).collect()
            };
            // The argument of GELU's sigmoid is large where the gate is.
            assert_close(&d_gate, &scaled(|e| e.1), 3e-6);
            assert_close(&d_up, &scaled(|e| e.2), 1e-6);
        }
    }

    #[test]
    fn extreme_gates_stay_finite() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            check_extremes(activation);
        }
    }

    fn check_extremes(activation: Activation) {
        let gate = [-1000.0, -100.0, -88.0, 88.0, 100.0, 1000.0];
        let mut h = [f32::NAN; 6];
        gated(activation, &gate, &[1.0; 6], &mut h);
        assert_eq!(h[3..], [88.0, 100.0, 1000.0]);
        assert!(h[..3].iter().all(|x| x.abs() < 1e-30), "{h:?}");
        let (mut d_gate, mut d_up) = ([f32::NAN; 6], [f32::NAN; 6]);
        gated_backward(activation, &[1.0; 6], &gate, &[1.0; 6], &mut d_gate, &mut d_up);
        assert!(d_gate.iter().chain(&d_up).all(|x| x.is_finite()));
    }
}
