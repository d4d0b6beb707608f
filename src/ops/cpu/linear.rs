//! Products with frozen weights.

use super::few_tokens::linear_of_few;
use super::gemm::{Right, Term, gemm};
use super::weight::Weight;

/// `y = x w^T`, or `y += x w^T` if `accumulate`.
///
/// # Shapes
/// `x`: `[tokens, in_features]`; `w`: `[out_features, in_features]`; `y`: `[tokens, out_features]`.
pub fn linear(x: &[f32], w: Weight<'_>, in_features: usize, out_features: usize, y: &mut [f32], accumulate: bool) {
    let tokens = x.len() / in_features.max(1);
    assert!(
        x.len() == tokens * in_features
            && w.num_elements() == in_features * out_features
            && y.len() == tokens * out_features,
        "linear: x {}, w {}, y {} for {in_features} -> {out_features}",
        x.len(),
        w.num_elements(),
        y.len()
    );
    if (1..=w.few()).contains(&tokens) {
        return linear_of_few(x, w, in_features, y, accumulate);
    }
    let b = Right { weight: w, stride: in_features, transposed: true, factor: 1.0 };
    gemm(tokens, out_features, y, Term { a: x, k: in_features, b }, None, accumulate);
}

/// Gradient of [`linear`] with respect to `x`: `dx = dy w`, or `dx += dy w` if `accumulate`.
///
/// # Shapes
/// `dy`: `[tokens, out_features]`; `w`: `[out_features, in_features]`; `dx`: `[tokens, in_features]`.
pub fn linear_backward_input(
    dy: &[f32],
    w: Weight<'_>,
    in_features: usize,
    out_features: usize,
    dx: &mut [f32],
    accumulate: bool,
) {
    let tokens = dy.len() / out_features.max(1);
    assert!(
        dy.len() == tokens * out_features
            && w.num_elements() == in_features * out_features
            && dx.len() == tokens * in_features,
        "linear_backward_input: dy {}, w {}, dx {} for {in_features} -> {out_features}",
        dy.len(),
        w.num_elements(),
        dx.len()
    );
    let b = Right { weight: w, stride: in_features, transposed: false, factor: 1.0 };
    gemm(tokens, in_features, dx, Term { a: dy, k: out_features, b }, None, accumulate);
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::reference::{assert_close, matmul_f64, on_threads, random};
    use super::*;

    const SHAPES: [(usize, usize, usize); 7] =
        [(1, 1, 1), (3, 5, 7), (1, 2, 3), (1, 64, 33), (1, 700, 101), (65, 48, 100), (130, 600, 1000)];

    /// The same weight in the three dtypes, each with its exact values.
    fn stored(w: &[f32]) -> (Vec<bf16>, Vec<f16>) {
        (w.iter().map(|w| bf16::from_f32(*w)).collect(), w.iter().map(|w| f16::from_f32(*w)).collect())
    }

    #[test]
    fn both_products_match_f64_in_every_storage_dtype() {
        for (tokens, in_features, out_features) in SHAPES {
            let (x, w) = (random(tokens * in_features, 1), random(out_features * in_features, 2));
            let dy = random(tokens * out_features, 3);
            let (w_bf16, w_f16) = stored(&w);
            let widened_bf16: Vec<f32> = w_bf16.iter().map(|w| w.to_f32()).collect();
            let widened_f16: Vec<f32> = w_f16.iter().map(|w| w.to_f32()).collect();
            for (weight, values) in
                [(Weight::f32(&w), &w), (Weight::bf16(&w_bf16), &widened_bf16), (Weight::f16(&w_f16), &widened_f16)]
            {
                let y_exact =
                    matmul_f64([tokens, out_features, in_features], &x, [in_features, 1], values, [1, in_features]);
                let mut y = vec![7.0; tokens * out_features];
                linear(&x, weight, in_features, out_features, &mut y, false);
                assert_close(&y, &y_exact, 1e-5);
                linear(&x, weight, in_features, out_features, &mut y, true);
                assert_close(&y, &y_exact.iter().map(|y| 2.0 * y).collect::<Vec<_>>(), 1e-5);
                let dx_exact =
                    matmul_f64([tokens, in_features, out_features], &dy, [out_features, 1], values, [in_features, 1]);
                let mut dx = vec![7.0; tokens * in_features];
                linear_backward_input(&dy, weight, in_features, out_features, &mut dx, false);
                assert_close(&dx, &dx_exact, 1e-5);
                linear_backward_input(&dy, weight, in_features, out_features, &mut dx, true);
                assert_close(&dx, &dx_exact.iter().map(|y| 2.0 * y).collect::<Vec<_>>(), 1e-5);
            }
        }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let (tokens, in_features, out_features) = (200, 600, 1000);
        let (x, w) = (random(tokens * in_features, 1), random(out_features * in_features, 2));
        let run = |threads| {
            on_threads(threads, || {
                let mut y = vec![0.0; tokens * out_features];
                linear(&x, Weight::f32(&w), in_features, out_features, &mut y, false);
                let mut dx = vec![0.0; tokens * in_features];
                linear_backward_input(&y, Weight::f32(&w), in_features, out_features, &mut dx, false);
                (y, dx)
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5));
    }

    #[test]
    fn no_tokens_is_no_work() {
        linear(&[], Weight::f32(&[1.0, 2.0]), 2, 1, &mut [], false);
        linear_backward_input(&[], Weight::f32(&[1.0, 2.0]), 2, 1, &mut [], true);
    }
}
