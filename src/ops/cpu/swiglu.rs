//! The SwiGLU activation.

use pulp::Simd;
use rayon::prelude::*;

use super::simd::{CHUNK, sigmoid, vectorised};

/// `gate * sigmoid(gate) * up`.
#[inline(always)]
fn swiglu_vector<S: Simd>(simd: S, gate: S::f32s, up: S::f32s) -> S::f32s {
    simd.mul_f32s(simd.mul_f32s(gate, sigmoid(simd, gate)), up)
}

/// With s = sigmoid(gate): `(dh * up * s * (1 + gate * (1 - s)), dh * gate * s)`.
#[inline(always)]
fn swiglu_backward_vector<S: Simd>(simd: S, dh: S::f32s, gate: S::f32s, up: S::f32s) -> (S::f32s, S::f32s) {
    let one = simd.splat_f32s(1.0);
    let s = sigmoid(simd, gate);
    let slope = simd.mul_f32s(s, simd.mul_add_e_f32s(gate, simd.sub_f32s(one, s), one));
    let d_gate = simd.mul_f32s(simd.mul_f32s(dh, up), slope);
    let d_up = simd.mul_f32s(dh, simd.mul_f32s(gate, s));
    (d_gate, d_up)
}

vectorised! { fn swiglu_chunk<'a, S>(simd, gate: &'a [f32], up: &'a [f32], h: &'a mut [f32]) {
    let (gate, gate_tail) = S::as_simd_f32s(gate);
    let (up, up_tail) = S::as_simd_f32s(up);
    let (h, h_tail) = S::as_mut_simd_f32s(h);
    for ((h, gate), up) in h.iter_mut().zip(gate).zip(up) {
        *h = swiglu_vector(simd, *gate, *up);
    }
    if !h_tail.is_empty() {
        let value = swiglu_vector(simd, simd.partial_load_f32s(gate_tail), simd.partial_load_f32s(up_tail));
        simd.partial_store_f32s(h_tail, value);
    }
} }

vectorised! { fn swiglu_backward_chunk<'a, S>(
    simd, dh: &'a [f32], gate: &'a [f32], up: &'a [f32], d_gate: &'a mut [f32], d_up: &'a mut [f32],
) {
    let (dh, dh_tail) = S::as_simd_f32s(dh);
    let (gate, gate_tail) = S::as_simd_f32s(gate);
    let (up, up_tail) = S::as_simd_f32s(up);
    let (d_gate, d_gate_tail) = S::as_mut_simd_f32s(d_gate);
    let (d_up, d_up_tail) = S::as_mut_simd_f32s(d_up);
    for ((((d_gate, d_up), dh), gate), up) in d_gate.iter_mut().zip(d_up).zip(dh).zip(gate).zip(up) {
        (*d_gate, *d_up) = swiglu_backward_vector(simd, *dh, *gate, *up);
    }
    if !dh_tail.is_empty() {
        let (gate, up) = swiglu_backward_vector(
            simd,
            simd.partial_load_f32s(dh_tail),
            simd.partial_load_f32s(gate_tail),
            simd.partial_load_f32s(up_tail),
        );
        simd.partial_store_f32s(d_gate_tail, gate);
        simd.partial_store_f32s(d_up_tail, up);
    }
} }

/// `h = silu(gate) * up`, with `silu(x) = x * sigmoid(x)` (Shazeer 2020, "GLU Variants Improve Transformer").
pub fn swiglu(gate: &[f32], up: &[f32], h: &mut [f32]) {
    assert!(gate.len() == h.len() && up.len() == h.len(), "swiglu: lengths");
    h.par_chunks_mut(CHUNK)
        .zip(gate.par_chunks(CHUNK))
        .zip(up.par_chunks(CHUNK))
        .for_each(|((h, gate), up)| swiglu_chunk(gate, up, h));
}

/// Gradients of [`swiglu`] with respect to `gate` and `up`.
pub fn swiglu_backward(dh: &[f32], gate: &[f32], up: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
    let len = dh.len();
    assert!([gate.len(), up.len(), d_gate.len(), d_up.len()] == [len; 4], "swiglu_backward: lengths");
    d_gate
        .par_chunks_mut(CHUNK)
        .zip(d_up.par_chunks_mut(CHUNK))
        .zip(dh.par_chunks(CHUNK))
        .zip(gate.par_chunks(CHUNK))
        .zip(up.par_chunks(CHUNK))
        .for_each(|((((d_gate, d_up), dh), gate), up)| swiglu_backward_chunk(dh, gate, up, d_gate, d_up));
}

#[cfg(test)]
mod tests {
    use super::super::reference::{assert_close, random};
    use super::*;

    /// Value and the gradients for `gate` and `up`, in f64, with dh = 1.
    fn swiglu_f64(gate: f32, up: f32) -> (f64, f64, f64) {
        let (gate, up) = (f64::from(gate), f64::from(up));
        let s = 1.0 / (1.0 + (-gate).exp());
        (gate * s * up, up * (s + gate * s * (1.0 - s)), gate * s)
    }

    #[test]
    fn swiglu_and_its_gradients_match_f64() {
        for len in [1, 15, 16, 1000, 3 * CHUNK + 7] {
            let gate: Vec<f32> = random(len, 1).iter().map(|x| x * 8.0).collect();
            let (up, dh) = (random(len, 2), random(len, 3));
            let (mut h, mut d_gate, mut d_up) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
            swiglu(&gate, &up, &mut h);
            swiglu_backward(&dh, &gate, &up, &mut d_gate, &mut d_up);
            let exact: Vec<_> = gate.iter().zip(&up).map(|(g, u)| swiglu_f64(*g, *u)).collect();
            assert_close(&h, &exact.iter().map(|e| e.0).collect::<Vec<_>>(), 1e-6);
            let scaled = |pick: fn(&(f64, f64, f64)) -> f64| -> Vec<f64> {
                exact.iter().zip(&dh).map(|(e, d)| pick(e) * f64::from(*d)).collect()
            };
            assert_close(&d_gate, &scaled(|e| e.1), 1e-6);
            assert_close(&d_up, &scaled(|e| e.2), 1e-6);
        }
    }

    #[test]
    fn swiglu_of_extreme_gates_stays_finite() {
        let gate = [-1000.0, -100.0, -88.0, 88.0, 100.0, 1000.0];
        let mut h = [f32::NAN; 6];
        swiglu(&gate, &[1.0; 6], &mut h);
        assert_eq!(h[3..], [88.0, 100.0, 1000.0]);
        assert!(h[..3].iter().all(|x| x.abs() < 1e-30), "{h:?}");
        let (mut d_gate, mut d_up) = ([f32::NAN; 6], [f32::NAN; 6]);
        swiglu_backward(&[1.0; 6], &gate, &[1.0; 6], &mut d_gate, &mut d_up);
        assert!(d_gate.iter().chain(&d_up).all(|x| x.is_finite()));
    }
}
