//! Softmax cross-entropy over the vocabulary, with the gradient in place of the logits.

use rayon::prelude::*;

use super::simd::{exp, vectorised};

vectorised! { fn row_max<'a, S>(simd, x: &'a [f32]) -> f32 {
    let (quads, rest) = pulp::as_arrays::<{ 4 * LANES }, _>(x);
    let mut lanes = [f32::NEG_INFINITY; 4 * LANES];
    for quad in quads {
        for (lane, x) in lanes.iter_mut().zip(quad) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    let _ = simd;
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, x| if *x > max { *x } else { max })
} }

/// Widest vector of any supported instruction set, in floats.
const LANES: usize = 16;

vectorised! {
/// Sum of `e^(x - shift)`; a NaN in `x` makes it NaN.
fn sum_exp<'a, S>(simd, x: &'a [f32], shift: f32) -> f32 {
    let shift = simd.splat_f32s(shift);
    let (body, tail) = S::as_simd_f32s(x);
    let (pairs, odd) = pulp::as_arrays::<2, _>(body);
    let mut sums = [simd.splat_f32s(0.0); 2];
    for [x, y] in pairs {
        sums[0] = simd.add_f32s(sums[0], exp(simd, simd.sub_f32s(*x, shift)));
        sums[1] = simd.add_f32s(sums[1], exp(simd, simd.sub_f32s(*y, shift)));
    }
    for x in odd {
        sums[0] = simd.add_f32s(sums[0], exp(simd, simd.sub_f32s(*x, shift)));
    }
    let total = simd.reduce_sum_f32s(simd.add_f32s(sums[0], sums[1]));
    tail.iter().fold(total, |total, x| {
        total + simd.reduce_max_f32s(exp(simd, simd.sub_f32s(simd.splat_f32s(*x), shift)))
    })
} }

vectorised! {
/// `x = e^(x - shift)`; returns the sum.
fn exp_in_place<'a, S>(simd, x: &'a mut [f32], shift: f32) -> f32 {
    let shift = simd.splat_f32s(shift);
    let (body, tail) = S::as_mut_simd_f32s(x);
    let (pairs, odd) = pulp::as_arrays_mut::<2, _>(body);
    let mut sums = [simd.splat_f32s(0.0); 2];
    for [x, y] in pairs {
        (*x, *y) = (exp(simd, simd.sub_f32s(*x, shift)), exp(simd, simd.sub_f32s(*y, shift)));
        (sums[0], sums[1]) = (simd.add_f32s(sums[0], *x), simd.add_f32s(sums[1], *y));
    }
    for x in odd {
        *x = exp(simd, simd.sub_f32s(*x, shift));
        sums[0] = simd.add_f32s(sums[0], *x);
    }
    let total = simd.reduce_sum_f32s(simd.add_f32s(sums[0], sums[1]));
    tail.iter_mut().fold(total, |total, x| {
        *x = simd.reduce_max_f32s(exp(simd, simd.sub_f32s(simd.splat_f32s(*x), shift)));
        total + *x
    })
} }

vectorised! { fn scale<'a, S>(_simd, x: &'a mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
} }

fn vocab_size(logits: usize, targets: &[u32], losses: usize) -> usize {
    assert_eq!(targets.len(), losses, "cross-entropy: one loss per target");
    let vocab_size = logits.checked_div(targets.len()).unwrap_or(0);
    assert_eq!(vocab_size * targets.len(), logits, "cross-entropy: whole rows of logits");
    assert!(targets.iter().all(|t| (*t as usize) < vocab_size), "cross-entropy: target beyond {vocab_size} logits");
    vocab_size
}

/// `losses[t] = logsumexp(logits[t]) - logits[t][targets[t]]`.
///
/// # Shapes
/// `logits`: `[tokens, vocab_size]`; `targets`, `losses`: `[tokens]`.
pub fn cross_entropy(logits: &[f32], targets: &[u32], losses: &mut [f32]) {
    let vocab_size = vocab_size(logits.len(), targets, losses.len());
    if targets.is_empty() {
        return;
    }
    logits.par_chunks(vocab_size).zip(targets).zip(losses).for_each(|((logits, target), loss)| {
        let max = row_max(logits);
        *loss = sum_exp(logits, max).ln() + (max - logits[*target as usize]);
    });
}

/// [`cross_entropy`] that turns the logits into the losses' gradient with respect to them: `softmax - onehot(target)`.
///
/// # Shapes
/// `logits`: `[tokens, vocab_size]`; `targets`, `losses`: `[tokens]`.
pub fn softmax_cross_entropy(logits: &mut [f32], targets: &[u32], losses: &mut [f32]) {
    let vocab_size = vocab_size(logits.len(), targets, losses.len());
    if targets.is_empty() {
        return;
    }
    logits.par_chunks_mut(vocab_size).zip(targets).zip(losses).for_each(|((logits, target), loss)| {
        let max = row_max(logits);
        let target_logit = logits[*target as usize];
        let sum = exp_in_place(logits, max);
        *loss = sum.ln() + (max - target_logit);
        scale(logits, 1.0 / sum);
        logits[*target as usize] -= 1.0;
    });
}

#[cfg(test)]
mod tests {
    use super::super::reference::{assert_close, random};
    use super::*;

    #[test]
    fn losses_and_gradients_match_f64() {
        for (tokens, vocab_size) in [(1, 1), (3, 2), (5, 17), (4, 1000), (2, 49_152), (3, 32_003)] {
            let logits: Vec<f32> = random(tokens * vocab_size, 1).iter().map(|x| x * 20.0).collect();
            let targets: Vec<u32> = (0..tokens).map(|t| ((t * 7919 + 1) % vocab_size) as u32).collect();
            let (mut loss_exact, mut grad_exact) = (Vec::new(), Vec::new());
            for (row, target) in logits.chunks(vocab_size).zip(&targets) {
                let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
                let max = row.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
                loss_exact.push(sum.ln() + max - row[*target as usize]);
                let onehot = |i: usize| f64::from(u8::from(i == *target as usize));
                grad_exact.extend(row.iter().enumerate().map(|(i, x)| (x - max).exp() / sum - onehot(i)));
            }
            let mut losses = vec![0.0; tokens];
            cross_entropy(&logits, &targets, &mut losses);
            assert_close(&losses, &loss_exact, 1e-6);
            let (mut grad, mut again) = (logits, vec![0.0; tokens]);
            softmax_cross_entropy(&mut grad, &targets, &mut again);
            assert_close(&again, &loss_exact, 1e-6);
            assert_close(&grad, &grad_exact, 1e-6);
        }
    }

    #[test]
    fn a_nan_logit_gives_a_nan_loss() {
        let mut logits = vec![0.0; 100];
        logits[63] = f32::NAN;
        let mut loss = [0.0];
        cross_entropy(&logits, &[3], &mut loss);
        assert!(loss[0].is_nan());
        softmax_cross_entropy(&mut logits, &[3], &mut loss);
        assert!(loss[0].is_nan());
    }

    #[test]
    fn masked_logits_at_minus_infinity_get_no_probability() {
        let mut logits = vec![f32::NEG_INFINITY; 40];
        logits[7] = 2.0;
        logits[20] = 2.0;
        let mut loss = [0.0];
        softmax_cross_entropy(&mut logits, &[7], &mut loss);
        assert!((loss[0] - 2f32.ln()).abs() < 1e-6);
        assert_eq!((logits[7], logits[20], logits[0]), (-0.5, 0.5, 0.0));
    }
}
