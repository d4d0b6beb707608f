//! The language-model head with its softmax cross-entropy, and the gradient in the memory of the logits.

use pulp::Simd;
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::gemm::gemm_of_pairs;
use super::gemm::{Right, Term, gemm, gemm_strided, round_to_pairs};
use super::over_tokens::{OverTokens, add_over_tokens};
use super::simd::{exp, tanh, vectorised, with_scratch};
use super::weight::Weight;

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

// Closures would not be compiled for the instruction set.
#[inline(always)]
fn capped<S: Simd>(simd: S, x: S::f32s, cap: f32) -> S::f32s {
    simd.mul_f32s(simd.splat_f32s(cap), tanh(simd, simd.mul_f32s(x, simd.splat_f32s(1.0 / cap))))
}

/// `e^(x - shift)`, and that times `1 - (x / cap)^2`.
#[inline(always)]
fn capped_exp<S: Simd>(simd: S, x: S::f32s, shift: f32, cap: f32) -> [S::f32s; 2] {
    let power = exp(simd, simd.sub_f32s(x, simd.splat_f32s(shift)));
    let share = simd.mul_f32s(x, simd.splat_f32s(1.0 / cap));
    let slope = simd.sub_f32s(simd.splat_f32s(1.0), simd.mul_f32s(share, share));
    [power, simd.mul_f32s(power, slope)]
}

vectorised! {
/// `x = cap tanh(x / cap)`
fn cap_in_place<'a, S>(simd, x: &'a mut [f32], cap: f32) {
    let (body, tail) = S::as_mut_simd_f32s(x);
    for x in body {
        *x = capped(simd, *x, cap);
    }
    if !tail.is_empty() {
        let last = capped(simd, simd.partial_load_f32s(tail), cap);
        simd.partial_store_f32s(tail, last);
    }
} }

vectorised! {
/// `x = e^(x - shift) (1 - (x / cap)^2)`, of logits that [`cap_in_place`] left; returns the sum of the exponentials.
fn capped_exp_in_place<'a, S>(simd, x: &'a mut [f32], shift: f32, cap: f32) -> f32 {
    let (body, tail) = S::as_mut_simd_f32s(x);
    // As in `sum_exp`, so that a loss does not depend on whether its gradient is wanted.
    let (pairs, odd) = pulp::as_arrays_mut::<2, _>(body);
    let mut sums = [simd.splat_f32s(0.0); 2];
    for pair in pairs {
        for (x, sum) in pair.iter_mut().zip(&mut sums) {
            let power;
            [power, *x] = capped_exp(simd, *x, shift, cap);
            *sum = simd.add_f32s(*sum, power);
        }
    }
    for x in odd {
        let power;
        [power, *x] = capped_exp(simd, *x, shift, cap);
        sums[0] = simd.add_f32s(sums[0], power);
    }
    let mut total = simd.reduce_sum_f32s(simd.add_f32s(sums[0], sums[1]));
    for x in tail {
        let [power, value] = capped_exp(simd, simd.splat_f32s(*x), shift, cap);
        *x = simd.reduce_max_f32s(value);
        total += simd.reduce_max_f32s(power);
    }
    total
} }

vectorised! { fn scale<'a, S>(_simd, x: &'a mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
} }

/// Floats between rows of logits. Distances close to a multiple of 64 KiB are avoided: the rows of a block would share
/// a few sets of the caches.
fn row_stride(vocab_size: usize) -> usize {
    const LINE_FLOATS: usize = 16;
    const WAY_LINES: usize = 1024;
    /// The longest stretch of a row that the products keep in the caches.
    const MIN_DISTANCE: usize = 65;
    let mut lines = vocab_size.div_ceil(LINE_FLOATS);
    while lines.is_multiple_of(2) || !(MIN_DISTANCE..=WAY_LINES - MIN_DISTANCE).contains(&(lines % WAY_LINES)) {
        lines += 1;
    }
    // If all rows fit together, nothing needs spreading.
    if vocab_size < WAY_LINES { vocab_size } else { lines * LINE_FLOATS }
}

/// The head of a model.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// `[vocab_size, width]`
    pub weight: Weight<'a>,
    /// What is added to the logits, `[vocab_size]`; not beside rows of their own.
    pub bias: Option<&'a [f32]>,
    /// Tokens with rows of their own, `[ids, width]`.
    pub rows: Option<(&'a [u32], Weight<'a>)>,
    /// Logits `l` become `cap tanh(l / cap)`.
    pub soft_cap: Option<f64>,
}

/// Where the gradient of the sum of the losses goes, times a scale.
pub struct HeadGradient<'a> {
    /// With respect to `hidden`, `[rows, width]`.
    pub dhidden: &'a mut [f32],
    /// With respect to the logits of the head's own rows, before their cap, `[rows, ids]`.
    pub drows: &'a mut [f32],
    /// Where the weight is trained, what its gradient is made of, `[rows, width]`, and the sum to which it is added,
    /// `[vocab_size, width]`.
    pub weight: Option<(&'a [f32], &'a mut [f32])>,
    /// The scale.
    pub scale: f32,
}

/// Writes the cross-entropy of `softmax(hidden head^T)` at `targets`, in nats, to `losses`, and its gradient where that is wanted.
///
/// The logits of all rows exist at once, in a buffer that the thread keeps, so pass rows in chunks.
///
/// # Shapes
/// `hidden`: `[rows, width]`; `head`: `[vocab_size, width]`; `targets`, `losses`: `[rows]`.
pub fn linear_cross_entropy(
    hidden: &[f32],
    Head { weight: head, bias, rows: own, soft_cap }: Head<'_>,
    width: usize,
    targets: &[u32],
    losses: &mut [f32],
    gradient: Option<HeadGradient<'_>>,
) {
    let (rows, cap) = (targets.len(), soft_cap.map(|cap| cap as f32));
    assert!(
        width > 0 && head.num_elements().is_multiple_of(width),
        "cross-entropy: head of {} for {width}",
        head.num_elements()
    );
    let vocab_size = head.num_elements() / width;
    assert!(
        hidden.len() == rows * width && losses.len() == rows,
        "cross-entropy: hidden {}, losses {} for {rows} targets",
        hidden.len(),
        losses.len()
    );
    assert!(targets.iter().all(|t| (*t as usize) < vocab_size), "cross-entropy: target beyond {vocab_size} logits");
    if rows == 0 {
        return;
    }
    let stride = row_stride(vocab_size);
    let (ids, own) = own.unwrap_or((&[], head));
    let own_stride = ids.len().max(1);
    with_scratch(rows * (stride + 1 + own_stride), |scratch| {
        let (logits, rest) = scratch.split_at_mut(rows * stride);
        let (factors, of_own) = rest.split_at_mut(rows);
        let forward = Right { weight: head, stride: width, transposed: true, factor: 1.0 };
        let hidden = Term { a: hidden, k: width, b: forward };
        if let Some(bias) = bias {
            logits.chunks_mut(stride).for_each(|logits| logits[..vocab_size].copy_from_slice(bias));
        }
        gemm_strided(rows, vocab_size, logits, stride, hidden, width, None, bias.is_some());
        let own_hidden = Term { b: Right { weight: own, ..forward }, ..hidden };
        gemm_strided(rows, ids.len(), of_own, own_stride, own_hidden, width, None, false);
        for (logits, own) in logits.chunks_mut(stride).zip(of_own.chunks(own_stride)) {
            ids.iter().zip(own).for_each(|(id, logit)| logits[*id as usize] = *logit);
        }
        let by_row = logits.par_chunks_mut(stride).zip(targets).zip(losses);
        let Some(HeadGradient { dhidden, drows, weight: trained, scale: scale_of_all }) = gradient else {
            return by_row
                .for_each(|((logits, target), loss)| *loss = row_loss(&mut logits[..vocab_size], *target, cap));
        };
        assert_eq!(dhidden.len(), rows * width, "cross-entropy: the gradient of {rows} rows");
        by_row.zip(&mut *factors).zip(of_own.par_chunks_mut(own_stride)).for_each(
            |((((logits, target), loss), factor), own)| {
                let sum;
                (*loss, sum) = row_gradient(&mut logits[..vocab_size], *target, cap);
                *factor = scale_of_all / sum;
                for (id, own) in ids.iter().zip(own) {
                    *own = std::mem::take(&mut logits[*id as usize]) * *factor;
                }
            },
        );
        if let Some((inputs, sum)) = trained {
            assert_eq!(inputs.len(), rows * width, "cross-entropy: the inputs of {rows} rows");
            with_scratch(inputs.len(), |scaled| {
                for ((scaled, row), factor) in scaled.chunks_mut(width).zip(inputs.chunks(width)).zip(&*factors) {
                    scaled.iter_mut().zip(row).for_each(|(scaled, x)| *scaled = x * factor);
                }
                let sum_of = OverTokens { left: logits, rows: vocab_size, stride, right: scaled, width };
                add_over_tokens(&mut [(sum_of, sum)]);
            });
        }
        if head.rounds {
            logits.par_chunks_mut(stride).for_each(|logits| to_pairs_in_place(&mut logits[..vocab_size]));
        }
        multiply_gradient(logits, stride, head, width, dhidden);
        dhidden.par_chunks_mut(width).zip(factors).for_each(|(row, factor)| scale(row, *factor));
        if !ids.is_empty() {
            drows.copy_from_slice(of_own);
            let backward = Right { weight: own, stride: width, transposed: false, factor: 1.0 };
            gemm(rows, width, dhidden, Term { a: drows, k: ids.len(), b: backward }, None, true);
        }
    });
}

/// `logsumexp(logits) - logits[target]`, of the logits after their cap.
fn row_loss(logits: &mut [f32], target: u32, cap: Option<f32>) -> f32 {
    cap.into_iter().for_each(|cap| cap_in_place(logits, cap));
    let max = row_max(logits);
    sum_exp(logits, max).ln() + (max - logits[target as usize])
}

/// [`row_loss`], and the sum of `e^(logit - max)`. The logits become the loss's gradient times that sum:
/// `e^(logit - max) - sum onehot(target)`, both times the slope of the cap. The product has fewer numbers, so the sum is
/// divided out after it.
fn row_gradient(logits: &mut [f32], target: u32, cap: Option<f32>) -> (f32, f32) {
    cap.into_iter().for_each(|cap| cap_in_place(logits, cap));
    let max = row_max(logits);
    let target_logit = logits[target as usize];
    let (sum, slope) = match cap {
        None => (exp_in_place(logits, max), 1.0),
        Some(cap) => (capped_exp_in_place(logits, max, cap), 1.0 - (target_logit / cap).powi(2)),
    };
    logits[target as usize] -= sum * slope;
    (sum.ln() + (max - target_logit), sum)
}

/// Rounds a row to pairs of bfloat16 in its first half.
fn to_pairs_in_place(row: &mut [f32]) {
    let num_words = row.len().div_ceil(2);
    with_scratch(num_words, |words| {
        round_to_pairs(row, bytemuck::cast_slice_mut(words));
        row[..num_words].copy_from_slice(words);
    });
}

/// `dhidden = gradient head`, from rows as [`row_gradient`] and [`to_pairs_in_place`] left them.
fn multiply_gradient(gradient: &[f32], stride: usize, head: Weight<'_>, width: usize, dhidden: &mut [f32]) {
    let (rows, vocab_size) = (dhidden.len() / width, head.num_elements() / width);
    let backward = Right { weight: head, stride: width, transposed: false, factor: 1.0 };
    #[cfg(target_arch = "x86_64")]
    if head.rounds {
        return gemm_of_pairs(rows, width, dhidden, bytemuck::cast_slice(gradient), stride, vocab_size, backward);
    }
    gemm_strided(rows, width, dhidden, width, Term { a: gradient, k: vocab_size, b: backward }, stride, None, false);
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::reference::{assert_close, matmul_f64, on_threads, random};
    use super::*;

    /// Losses and the gradient of `hidden` of their sum times `scale`, in f64.
    fn exact(
        hidden: &[f32],
        head: &[f32],
        width: usize,
        targets: &[u32],
        scale: f32,
        cap: Option<f64>,
    ) -> (Vec<f64>, Vec<f64>) {
        let (rows, vocab_size) = (targets.len(), head.len() / width);
        let logits = matmul_f64([rows, vocab_size, width], hidden, [width, 1], head, [1, width]);
        let (mut losses, mut dhidden) = (Vec::new(), Vec::new());
        for (row, target) in logits.chunks(vocab_size).zip(targets) {
            let row: Vec<f64> = row.iter().map(|x| cap.map_or(*x, |cap| cap * (x / cap).tanh())).collect();
            let slope = |x: f64| cap.map_or(1.0, |cap| 1.0 - (x / cap).powi(2));
            let max = row.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
            losses.push(sum.ln() + max - row[*target as usize]);
            let onehot = |i: usize| f64::from(u8::from(i == *target as usize));
            let dlogits: Vec<f64> =
                row.iter().enumerate().map(|(i, x)| slope(*x) * ((x - max).exp() / sum - onehot(i))).collect();
            for d in 0..width {
                let column = head[d..].iter().step_by(width);
                dhidden
                    .push(f64::from(scale) * dlogits.iter().zip(column).map(|(d, w)| d * f64::from(*w)).sum::<f64>());
            }
        }
        (losses, dhidden)
    }

    fn case(rows: usize, vocab_size: usize, width: usize) -> (Vec<f32>, Vec<f32>, Vec<u32>) {
        let hidden = random(rows * width, 1).iter().map(|x| x * 6.0).collect();
        let targets = (0..rows).map(|t| ((t * 7919 + 1) % vocab_size) as u32).collect();
        (hidden, random(vocab_size * width, 2), targets)
    }

    const SHAPES: [[usize; 3]; 6] = [[1, 1, 1], [3, 2, 5], [5, 17, 8], [4, 1000, 33], [9, 16_384, 12], [3, 32_003, 7]];

    #[test]
    fn losses_and_gradients_match_f64() {
        let caps = [None, Some(2.0)];
        for ([rows, vocab_size, width], soft_cap) in SHAPES.into_iter().flat_map(|shape| caps.map(|cap| (shape, cap))) {
            let (hidden, head, targets) = case(rows, vocab_size, width);
            let (loss_exact, grad_exact) = exact(&hidden, &head, width, &targets, -0.25, soft_cap);
            let head = Head { weight: Weight::f32(&head), bias: None, rows: None, soft_cap };
            let mut losses = vec![9.0; rows];
            linear_cross_entropy(&hidden, head, width, &targets, &mut losses, None);
            assert_close(&losses, &loss_exact, 1e-5);
            let (mut again, mut dhidden) = (vec![9.0; rows], vec![9.0; rows * width]);
            let gradient = Some(HeadGradient { dhidden: &mut dhidden, drows: &mut [], weight: None, scale: -0.25 });
            linear_cross_entropy(&hidden, head, width, &targets, &mut again, gradient);
            assert_eq!(losses, again);
            assert_close(&dhidden, &grad_exact, 1e-5);
        }
    }

    #[test]
    fn products_of_rounded_numbers_stay_within_their_rounding() {
        for [rows, vocab_size, width] in SHAPES {
            let (hidden, head, targets) = case(rows, vocab_size, width);
            let round = |x: &[f32]| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
            let widen = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
            let head = round(&head);
            let weight = Weight::bf16(&head).rounding(true);
            let operand = if weight.rounds { widen(&round(&hidden)) } else { hidden.clone() };
            let (loss_exact, grad_exact) = exact(&operand, &widen(&head), width, &targets, 2.0, None);
            let (mut losses, mut dhidden) = (vec![9.0; rows], vec![9.0; rows * width]);
            let gradient = Some(HeadGradient { dhidden: &mut dhidden, drows: &mut [], weight: None, scale: 2.0 });
            let head = Head { weight, bias: None, rows: None, soft_cap: None };
            linear_cross_entropy(&hidden, head, width, &targets, &mut losses, gradient);
            // The operands of the first product are exact; the probabilities are rounded for the second.
            assert_close(&losses, &loss_exact, 1e-5);
            assert_close(&dhidden, &grad_exact, 4e-3);
        }
    }

    #[test]
    fn a_nan_logit_gives_a_nan_loss_and_one_at_minus_infinity_no_probability() {
        let mut logits = vec![0.0; 100];
        logits[63] = f32::NAN;
        assert!(row_loss(&mut logits, 3, None).is_nan() && row_gradient(&mut logits, 3, None).0.is_nan());
        assert!(row_gradient(&mut [f32::NAN, 1.0, 2.0], 1, Some(30.0)).0.is_nan());
        let mut logits = vec![f32::NEG_INFINITY; 40];
        (logits[7], logits[20]) = (2.0, 2.0);
        let (loss, sum) = row_gradient(&mut logits, 7, None);
        assert!((loss - 2f32.ln()).abs() < 1e-6);
        assert_eq!((sum, logits[7], logits[20], logits[0]), (2.0, -1.0, 1.0, 0.0));
    }

    #[test]
    fn rows_of_large_vocabularies_do_not_lie_on_the_same_sets_of_the_caches() {
        for vocab_size in [4096, 32_000, 32_768, 49_152, 65_536, 128_256, 151_936] {
            let stride = row_stride(vocab_size);
            assert!(stride >= vocab_size && stride < vocab_size + 4096, "{vocab_size}: {stride}");
            let distance = stride / 16 % 1024;
            assert!((65..=959).contains(&distance) && distance % 2 == 1, "{vocab_size}: {distance} lines");
        }
        assert_eq!(row_stride(17), 17);
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let (hidden, head, targets) = case(70, 3000, 48);
        let run = |threads| {
            on_threads(threads, || {
                let (mut losses, mut dhidden) = (vec![0.0; 70], vec![0.0; 70 * 48]);
                let gradient = Some(HeadGradient { dhidden: &mut dhidden, drows: &mut [], weight: None, scale: 1.0 });
                let head = Head { weight: Weight::f32(&head), bias: None, rows: None, soft_cap: Some(3.0) };
                linear_cross_entropy(&hidden, head, 48, &targets, &mut losses, gradient);
                (losses, dhidden)
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5));
    }
}
