//! RMSNorm (Zhang and Sennrich 2019), as Llama uses it.

use pulp::Simd;
use rayon::prelude::*;

use super::simd::{dot, rows_per_chunk, vectorised};

vectorised! { fn rms_norm_rows<'a, S>(
    simd, x: &'a [f32], weight: &'a [f32], eps: f32, y: &'a mut [f32], rstd: &'a mut [f32],
) {
    let width = weight.len();
    for ((x, y), rstd) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(rstd) {
        *rstd = 1.0 / (dot(simd, x, x) / width as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = *w * (*x * *rstd);
        }
    }
} }

/// Sum of products of three equally long slices.
#[inline(always)]
fn dot3<S: Simd>(simd: S, x: &[f32], y: &[f32], z: &[f32]) -> f32 {
    let ((x, x_tail), (y, y_tail), (z, z_tail)) = (S::as_simd_f32s(x), S::as_simd_f32s(y), S::as_simd_f32s(z));
    let (x_pairs, x_rest) = pulp::as_arrays::<2, _>(x);
    let (y_pairs, y_rest) = pulp::as_arrays::<2, _>(y);
    let (z_pairs, z_rest) = pulp::as_arrays::<2, _>(z);
    let mut sums = [simd.splat_f32s(0.0); 2];
    for ((x, y), z) in x_pairs.iter().zip(y_pairs).zip(z_pairs) {
        for lane in 0..2 {
            sums[lane] = simd.mul_add_e_f32s(simd.mul_f32s(x[lane], y[lane]), z[lane], sums[lane]);
        }
    }
    for ((x, y), z) in x_rest.iter().zip(y_rest).zip(z_rest) {
        sums[0] = simd.mul_add_e_f32s(simd.mul_f32s(*x, *y), *z, sums[0]);
    }
    if !x_tail.is_empty() {
        let product = simd.mul_f32s(simd.partial_load_f32s(x_tail), simd.partial_load_f32s(y_tail));
        sums[1] = simd.mul_add_e_f32s(product, simd.partial_load_f32s(z_tail), sums[1]);
    }
    simd.reduce_sum_f32s(simd.add_f32s(sums[0], sums[1]))
}

vectorised! { fn rms_norm_backward_rows<'a, S>(
    simd, dy: &'a [f32], x: &'a [f32], weight: &'a [f32], rstd: &'a [f32], dx: &'a mut [f32], accumulate: bool,
) {
    let width = weight.len();
    let rows = dx.chunks_exact_mut(width).zip(dy.chunks_exact(width)).zip(x.chunks_exact(width)).zip(rstd);
    for (((dx, dy), x), rstd) in rows {
        let projection = dot3(simd, dy, weight, x);
        let pull = projection * rstd * rstd / width as f32;
        if accumulate {
            for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                *dx += (dy * w - x * pull) * rstd;
            }
        } else {
            for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                *dx = (dy * w - x * pull) * rstd;
            }
        }
    }
} }

/// `y = x / sqrt(mean(x^2) + eps) * weight`, row by row; `rstd` keeps the reciprocal root for the backward pass.
///
/// # Shapes
/// `x`, `y`: `[rows, width]`; `weight`: `[width]`; `rstd`: `[rows]`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f64, y: &mut [f32], rstd: &mut [f32]) {
    let width = weight.len();
    assert!(x.len() == y.len() && x.len() == rstd.len() * width, "rms_norm: {} of width {width}", x.len());
    let rows = rows_per_chunk(width);
    y.par_chunks_mut(rows * width)
        .zip(x.par_chunks(rows * width))
        .zip(rstd.par_chunks_mut(rows))
        .for_each(|((y, x), rstd)| rms_norm_rows(x, weight, eps as f32, y, rstd));
}

/// Gradient of [`rms_norm`] with respect to `x` (the weight is frozen); added to `dx` if `accumulate`.
///
/// `dx = rstd * (dy * weight - x * rstd^2 * mean(dy * weight * x))`.
pub fn rms_norm_backward(dy: &[f32], x: &[f32], weight: &[f32], rstd: &[f32], dx: &mut [f32], accumulate: bool) {
    let width = weight.len();
    assert!(
        dy.len() == x.len() && dx.len() == x.len() && x.len() == rstd.len() * width,
        "rms_norm_backward: {} of width {width}",
        x.len()
    );
    let rows = rows_per_chunk(width);
    dx.par_chunks_mut(rows * width)
        .zip(dy.par_chunks(rows * width))
        .zip(x.par_chunks(rows * width))
        .zip(rstd.par_chunks(rows))
        .for_each(|(((dx, dy), x), rstd)| rms_norm_backward_rows(dy, x, weight, rstd, dx, accumulate));
}

#[cfg(test)]
mod tests {
    use super::super::reference::{assert_close, random};
    use super::*;

    const EPS: f64 = 1e-5;

    /// `y` and, for upstream `dy`, `dx`, in f64.
    fn exact(x: &[f32], weight: &[f32], dy: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let width = weight.len();
        let (mut y, mut dx) = (Vec::new(), Vec::new());
        for (x, dy) in x.chunks(width).zip(dy.chunks(width)) {
            let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            let g: Vec<f64> = dy.iter().zip(weight).map(|(d, w)| f64::from(*d) * f64::from(*w)).collect();
            let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
            let rstd = 1.0 / (mean + EPS).sqrt();
            let dot = x.iter().zip(&g).map(|(x, g)| x * g).sum::<f64>() / width as f64;
            y.extend(x.iter().zip(weight).map(|(x, w)| x * rstd * f64::from(*w)));
            dx.extend(x.iter().zip(&g).map(|(x, g)| rstd * (g - x * rstd * rstd * dot)));
        }
        (y, dx)
    }

    #[test]
    fn values_and_gradients_match_f64_at_odd_and_even_widths() {
        for (rows, width) in [(1, 2), (3, 7), (5, 64), (37, 576), (100, 301)] {
            let (x, weight, dy) = (random(rows * width, 1), random(width, 2), random(rows * width, 3));
            let (mut y, mut rstd, mut dx) = (vec![0.0; rows * width], vec![0.0; rows], vec![0.5; rows * width]);
            rms_norm(&x, &weight, EPS, &mut y, &mut rstd);
            let (y_exact, dx_exact) = exact(&x, &weight, &dy);
            assert_close(&y, &y_exact, 1e-6);
            rms_norm_backward(&dy, &x, &weight, &rstd, &mut dx, false);
            assert_close(&dx, &dx_exact, 2e-6);
            let mut sum = vec![0.5; rows * width];
            rms_norm_backward(&dy, &x, &weight, &rstd, &mut sum, true);
            assert_close(&sum, &dx_exact.iter().map(|d| d + 0.5).collect::<Vec<_>>(), 2e-6);
        }
    }
}
