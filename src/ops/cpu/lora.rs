//! The LoRA linear layer (Hu et al. 2021): a frozen weight and a trained low-rank term.

use super::gemm::{Right, Term, gemm};
use super::linear::linear;
use super::over_tokens::{OverTokens, add_over_tokens};
use super::simd::with_scratch;
use super::weight::Weight;
use crate::ops::low_rank::{Lora, LowRank};

impl Lora<&[f32]> {
    /// The rank, after a check of the lengths of both matrices and of `xa`.
    fn check(&self, tokens: usize, in_features: usize, out_features: usize, xa: usize) -> usize {
        let LowRank { a, b } = self.matrices;
        let rank = a.len() / in_features.max(1);
        assert!(
            a.len() == rank * in_features && b.len() == out_features * rank,
            "lora: a {}, b {} for {in_features} -> {rank} -> {out_features}",
            a.len(),
            b.len(),
        );
        assert_eq!(xa, tokens * rank, "lora: x a^T of {tokens} tokens, rank {rank}");
        rank
    }

    /// Runs `work` on the input of `a`: `x`, or a copy with dropout.
    fn with_input<R>(&self, x: &[f32], in_features: usize, work: impl FnOnce(&[f32]) -> R) -> R {
        match self.dropout {
            None => work(x),
            Some(settings) => with_scratch(x.len(), |dropped| {
                super::dropout::dropout(x, in_features, settings, dropped);
                work(dropped)
            }),
        }
    }
}

/// `y = x w^T + scale * xa b^T`, or `y += ...` if `accumulate`, with `xa = dropout(x) a^T`, which the backward pass
/// needs again.
///
/// # Shapes
/// `x`: `[tokens, in_features]`; `w`: `[out_features, in_features]`; `y`: `[tokens, out_features]`;
/// `xa`: `[tokens, rank]`.
pub fn lora_linear(
    x: &[f32],
    w: Weight<'_>,
    lora: Lora<&[f32]>,
    in_features: usize,
    out_features: usize,
    y: &mut [f32],
    accumulate: bool,
    xa: &mut [f32],
) {
    let tokens = x.len() / in_features.max(1);
    let rank = lora.check(tokens, in_features, out_features, xa.len());
    let (LowRank { a: lora_a, b: lora_b }, scale) = (lora.matrices, lora.scale as f32);
    assert!(
        x.len() == tokens * in_features
            && y.len() == tokens * out_features
            && w.num_elements() == in_features * out_features,
        "lora_linear: x {}, w {}, y {} for {in_features} -> {out_features}",
        x.len(),
        w.num_elements(),
        y.len()
    );
    let a = Weight::f32(lora_a).of_texts(w.of_texts);
    lora.with_input(x, in_features, |input| linear(input, a, in_features, rank, xa, false));
    if tokens <= w.few() {
        linear(x, w, in_features, out_features, y, accumulate);
        return add_scaled(xa, scale, like(lora_b, w), rank, out_features, y);
    }
    let base = Right { weight: w, stride: in_features, transposed: true, factor: 1.0 };
    let low_rank = Right { weight: Weight::f32(lora_b), stride: rank, transposed: true, factor: scale };
    let low_rank = Term { a: xa, k: rank, b: low_rank };
    gemm(tokens, out_features, y, Term { a: x, k: in_features, b: base }, Some(low_rank), accumulate);
}

/// The low-rank term of [`lora_linear`] without dropout, added to `y`: for a few tokens to the bit what [`lora_linear`] adds.
/// `w`: a weight that is multiplied as that of the layer.
///
/// # Shapes
/// As in [`lora_linear`].
pub fn add_low_rank(
    x: &[f32],
    lora: Lora<&[f32]>,
    w: Weight<'_>,
    in_features: usize,
    out_features: usize,
    y: &mut [f32],
) {
    let LowRank { a, b } = lora.matrices;
    let (tokens, rank) = (x.len() / in_features.max(1), a.len() / in_features.max(1));
    with_scratch(tokens * rank, |xa| {
        lora.check(tokens, in_features, out_features, xa.len());
        linear(x, Weight::f32(a).of_texts(w.of_texts), in_features, rank, xa, false);
        add_scaled(xa, lora.scale as f32, like(b, w), rank, out_features, y);
    });
}

/// A matrix that is multiplied as `w` is.
fn like<'a>(values: &'a [f32], w: Weight<'_>) -> Weight<'a> {
    Weight::f32(values).rounding(w.rounds).of_texts(w.of_texts)
}

/// `y += scale * xa b^T`, for a few tokens.
fn add_scaled(xa: &[f32], scale: f32, b: Weight<'_>, rank: usize, out_features: usize, y: &mut [f32]) {
    with_scratch(xa.len(), |scaled| {
        scaled.iter_mut().zip(xa).for_each(|(scaled, xa)| *scaled = scale * xa);
        linear(scaled, b, rank, out_features, y, true);
    });
}

/// Gradients of [`lora_linear`]: `dx` is set, added to if `accumulate`, or left out; the adapter's are always added.
///
/// With `d_xa = scale * dy b`: `dx = dy w + dropout(d_xa a)`, `da = d_xa^T dropout(x)`, `db = scale * dy^T xa`.
///
/// # Shapes
/// As in [`lora_linear`]; `dy` like `y`, `dx` like `x`.
#[allow(clippy::too_many_arguments)]
pub fn lora_linear_backward(
    dy: &[f32],
    x: &[f32],
    xa: &[f32],
    w: Weight<'_>,
    lora: Lora<&[f32]>,
    [in_features, out_features]: [usize; 2],
    dx: Option<&mut [f32]>,
    accumulate: bool,
    LowRank { a: da, b: db }: LowRank<&mut [f32]>,
) {
    let tokens = x.len() / in_features.max(1);
    let rank = lora.check(tokens, in_features, out_features, xa.len());
    let (LowRank { a: lora_a, b: lora_b }, scale) = (lora.matrices, lora.scale as f32);
    assert!(da.len() == lora_a.len() && db.len() == lora_b.len(), "lora_linear_backward: gradients' lengths");
    assert!(
        x.len() == tokens * in_features
            && dy.len() == tokens * out_features
            && w.num_elements() == in_features * out_features,
        "lora_linear_backward: x {}, w {}, dy {} for {in_features} -> {out_features}",
        x.len(),
        w.num_elements(),
        dy.len()
    );
    with_scratch(tokens * rank, |d_xa| {
        let b = Right { weight: Weight::f32(lora_b), stride: rank, transposed: false, factor: scale };
        gemm(tokens, rank, d_xa, Term { a: dy, k: out_features, b }, None, false);
        if let Some(dx) = dx {
            assert_eq!(dx.len(), x.len(), "lora_linear_backward: the input's gradient");
            let base = Right { weight: w, stride: in_features, transposed: false, factor: 1.0 };
            let base = Term { a: dy, k: out_features, b: base };
            let low_rank = Right { weight: Weight::f32(lora_a), stride: in_features, transposed: false, factor: 1.0 };
            let low_rank = Term { a: d_xa, k: rank, b: low_rank };
            match lora.dropout {
                None => gemm(tokens, in_features, dx, base, Some(low_rank), accumulate),
                Some(settings) => {
                    gemm(tokens, in_features, dx, base, None, accumulate);
                    with_scratch(dx.len(), |d_input| {
                        gemm(tokens, in_features, d_input, low_rank, None, false);
                        settings.add_masked(d_input, in_features, dx);
                    });
                }
            }
        }
        let d_xa: &[f32] = d_xa;
        lora.with_input(x, in_features, |input| {
            let a = OverTokens { left: d_xa, rows: rank, stride: rank, right: input, width: in_features };
            let b = OverTokens { left: xa, rows: rank, stride: rank, right: dy, width: out_features };
            with_scratch(rank * out_features, |b_transposed| {
                b_transposed.fill(0.0);
                add_over_tokens(&mut [(a, &mut *da), (b, &mut *b_transposed)]);
                for (feature, row) in db.chunks_exact_mut(rank.max(1)).enumerate() {
                    for (i, db) in row.iter_mut().enumerate() {
                        *db += scale * b_transposed[i * out_features + feature];
                    }
                }
            });
        });
    });
}

#[cfg(test)]
mod tests {
    use super::super::dropout::{Dropout, dropout};
    use super::super::reference::{assert_close, matmul_f64, on_threads, random};
    use super::*;

    struct Case {
        x: Vec<f32>,
        w: Vec<f32>,
        a: Vec<f32>,
        b: Vec<f32>,
        dy: Vec<f32>,
    }

    fn case(tokens: usize, in_features: usize, out_features: usize, rank: usize) -> Case {
        Case {
            x: random(tokens * in_features, 1),
            w: random(out_features * in_features, 2),
            a: random(rank * in_features, 3),
            b: random(out_features * rank, 4),
            dy: random(tokens * out_features, 5),
        }
    }

    fn sum(x: &[f64], factor: f64, y: &[f64]) -> Vec<f64> {
        x.iter().zip(y).map(|(x, y)| x + factor * y).collect()
    }

    fn narrow(x: &[f64]) -> Vec<f32> {
        x.iter().map(|x| *x as f32).collect()
    }

    #[test]
    fn values_and_all_gradients_match_f64_with_and_without_dropout() {
        for (tokens, i, o, r) in [(1, 3, 2, 1), (5, 17, 33, 2), (70, 100, 200, 8), (129, 576, 192, 16)] {
            for dropout_settings in [None, Some(Dropout { probability: 0.3, seed: 11, first_row: 0 })] {
                let Case { x, w, a, b, dy } = case(tokens, i, o, r);
                let scale = 0.75;
                let matrices = LowRank { a: a.as_slice(), b: b.as_slice() };
                let lora = Lora { matrices, scale, dropout: dropout_settings };
                let mask = |x: &[f32]| match dropout_settings {
                    None => x.to_vec(),
                    Some(settings) => {
                        let mut y = vec![0.0; x.len()];
                        dropout(x, i, settings, &mut y);
                        y
                    }
                };
                let input = mask(&x);
                let xa_exact = matmul_f64([tokens, r, i], &input, [i, 1], &a, [1, i]);
                let low = matmul_f64([tokens, o, r], &narrow(&xa_exact), [r, 1], &b, [1, r]);
                let y_exact = sum(&matmul_f64([tokens, o, i], &x, [i, 1], &w, [1, i]), scale, &low);
                let (mut y, mut xa) = (vec![9.0; tokens * o], vec![9.0; tokens * r]);
                lora_linear(&x, Weight::f32(&w), lora, i, o, &mut y, false, &mut xa);
                assert_close(&xa, &xa_exact, 1e-5);
                assert_close(&y, &y_exact, 1e-5);

                let mut d_xa = matmul_f64([tokens, r, o], &dy, [o, 1], &b, [r, 1]);
                d_xa.iter_mut().for_each(|d| *d *= scale);
                let d_input = mask(&narrow(&matmul_f64([tokens, i, r], &narrow(&d_xa), [r, 1], &a, [i, 1])));
                let d_input: Vec<f64> = d_input.iter().map(|d| f64::from(*d)).collect();
                let dx_exact = sum(&d_input, 1.0, &matmul_f64([tokens, i, o], &dy, [o, 1], &w, [i, 1]));
                let da_exact = matmul_f64([r, i, tokens], &narrow(&d_xa), [1, r], &input, [i, 1]);
                let db_exact = matmul_f64([o, r, tokens], &dy, [1, o], &narrow(&xa_exact), [r, 1]);
                let db_exact: Vec<f64> = db_exact.iter().map(|d| d * scale).collect();
                let (mut da, mut db) = (vec![0.5; a.len()], vec![0.5; b.len()]);
                let mut dx = vec![0.25; x.len()];
                for (pass, accumulate) in [(1.0, false), (2.0, true)] {
                    let gradients = LowRank { a: da.as_mut_slice(), b: db.as_mut_slice() };
                    let w = Weight::f32(&w);
                    lora_linear_backward(&dy, &x, &xa, w, lora, [i, o], Some(&mut dx), accumulate, gradients);
                    let half = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| 0.5 + pass * x).collect() };
                    assert_close(&dx, &dx_exact.iter().map(|x| pass * x).collect::<Vec<_>>(), 1e-5);
                    assert_close(&da, &half(&da_exact), 1e-5);
                    assert_close(&db, &half(&db_exact), 1e-5);
                }
            }
        }
    }

    #[test]
    fn a_zero_b_leaves_the_base_output_bit_for_bit() {
        let (tokens, i, o, r) = (70, 100, 60, 8);
        let Case { x, w, a, .. } = case(tokens, i, o, r);
        let b = vec![0.0; o * r];
        let lora = Lora { matrices: LowRank { a: a.as_slice(), b: b.as_slice() }, scale: 2.0, dropout: None };
        let (mut base, mut y, mut xa) = (vec![0.0; tokens * o], vec![0.0; tokens * o], vec![0.0; tokens * r]);
        linear(&x, Weight::f32(&w), i, o, &mut base, false);
        lora_linear(&x, Weight::f32(&w), lora, i, o, &mut y, false, &mut xa);
        assert_eq!(base, y);
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let (tokens, i, o, r) = (200, 300, 500, 8);
        let Case { x, w, a, b, dy } = case(tokens, i, o, r);
        let dropout = Some(Dropout { probability: 0.1, seed: 3, first_row: 0 });
        let lora = Lora { matrices: LowRank { a: a.as_slice(), b: b.as_slice() }, scale: 2.0, dropout };
        let run = |threads| {
            on_threads(threads, || {
                let (mut y, mut xa) = (vec![0.0; tokens * o], vec![0.0; tokens * r]);
                lora_linear(&x, Weight::f32(&w), lora, i, o, &mut y, false, &mut xa);
                let (mut dx, mut da, mut db) = (vec![0.0; x.len()], vec![0.0; a.len()], vec![0.0; b.len()]);
                let gradients = LowRank { a: da.as_mut_slice(), b: db.as_mut_slice() };
                lora_linear_backward(&dy, &x, &xa, Weight::f32(&w), lora, [i, o], Some(&mut dx), false, gradients);
                (y, xa, dx, da, db)
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5));
    }
}
