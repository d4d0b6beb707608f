//! The gate of an attention's output: `o sigmoid(gate)`.

use rayon::prelude::*;

use super::simd::{CHUNK, sigmoid, vectorised};

vectorised! { fn gate_chunk<'a, S>(simd, o: &'a [f32], gate: &'a [f32], y: &'a mut [f32]) {
    let ((o, o_tail), (gate, gate_tail)) = (S::as_simd_f32s(o), S::as_simd_f32s(gate));
    let (y, y_tail) = S::as_mut_simd_f32s(y);
    for ((y, o), gate) in y.iter_mut().zip(o).zip(gate) {
        *y = simd.mul_f32s(*o, sigmoid(simd, *gate));
    }
    if !y_tail.is_empty() {
        let (o, gate) = (simd.partial_load_f32s(o_tail), simd.partial_load_f32s(gate_tail));
        simd.partial_store_f32s(y_tail, simd.mul_f32s(o, sigmoid(simd, gate)));
    }
} }

vectorised! {
/// With s = sigmoid(gate): `d_o = dy s` and `d_gate = dy s o (1 - s)`, over `d_o = dy` and `d_gate = gate`.
fn gate_backward_chunk<'a, S>(simd, o: &'a [f32], d_o: &'a mut [f32], d_gate: &'a mut [f32]) {
    let one = simd.splat_f32s(1.0);
    let (o, o_tail) = S::as_simd_f32s(o);
    let ((d_o, d_o_tail), (d_gate, d_gate_tail)) = (S::as_mut_simd_f32s(d_o), S::as_mut_simd_f32s(d_gate));
    for ((d_o, d_gate), o) in d_o.iter_mut().zip(d_gate).zip(o) {
        let s = sigmoid(simd, *d_gate);
        *d_o = simd.mul_f32s(*d_o, s);
        *d_gate = simd.mul_f32s(simd.mul_f32s(*d_o, *o), simd.sub_f32s(one, s));
    }
    if !d_o_tail.is_empty() {
        let s = sigmoid(simd, simd.partial_load_f32s(d_gate_tail));
        let product = simd.mul_f32s(simd.partial_load_f32s(d_o_tail), s);
        simd.partial_store_f32s(d_o_tail, product);
        let slope = simd.mul_f32s(simd.partial_load_f32s(o_tail), simd.sub_f32s(one, s));
        simd.partial_store_f32s(d_gate_tail, simd.mul_f32s(product, slope));
    }
} }

/// `y = o * sigmoid(gate)`.
pub fn gate_output(o: &[f32], gate: &[f32], y: &mut [f32]) {
    assert!([o.len(), gate.len()] == [y.len(); 2], "gate_output: lengths");
    let parts = y.par_chunks_mut(CHUNK).zip(o.par_chunks(CHUNK)).zip(gate.par_chunks(CHUNK));
    parts.for_each(|((y, o), gate)| gate_chunk(o, gate, y));
}

/// Gradients of [`gate_output`] with respect to `o`, over `d_o = dy`, and to the gate, over `d_gate = gate`.
pub fn gate_output_backward(o: &[f32], d_o: &mut [f32], d_gate: &mut [f32]) {
    assert!([d_o.len(), d_gate.len()] == [o.len(); 2], "gate_output_backward: lengths");
    let parts = d_o.par_chunks_mut(CHUNK).zip(d_gate.par_chunks_mut(CHUNK)).zip(o.par_chunks(CHUNK));
    parts.for_each(|((d_o, d_gate), o)| gate_backward_chunk(o, d_o, d_gate));
}

#[cfg(test)]
mod tests {
    use super::super::reference::{assert_close, random};
    use super::*;

    #[test]
    fn gates_and_their_gradients_match_f64() {
        for len in [1, 15, 16, 1000, 2 * CHUNK + 7] {
            let gate: Vec<f32> = random(len, 1).iter().map(|x| x * 8.0).collect();
            let (o, dy) = (random(len, 2), random(len, 3));
            let (mut y, mut d_o, mut d_gate) = (vec![0.0; len], dy.clone(), gate.clone());
            gate_output(&o, &gate, &mut y);
            gate_output_backward(&o, &mut d_o, &mut d_gate);
            let exact = |of: fn(f64, f64, f64) -> f64| -> Vec<f64> {
                let sigmoids = gate.iter().map(|gate| 1.0 / (1.0 + (-f64::from(*gate)).exp()));
                sigmoids.zip(&o).zip(&dy).map(|((s, o), dy)| of(s, f64::from(*o), f64::from(*dy))).collect()
            };
            assert_close(&y, &exact(|s, o, _| o * s), 1e-6);
            assert_close(&d_o, &exact(|s, _, dy| dy * s), 1e-6);
            assert_close(&d_gate, &exact(|s, o, dy| dy * o * s * (1.0 - s)), 2e-6);
        }
    }
}
