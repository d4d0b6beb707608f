//! What the kernels' tests share: random data and comparison with f64 results.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// `len` values uniform in [-1, 1).
pub(super) fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// Asserts `max |got - exact| <= tolerance * max |exact|`, and the same length.
#[track_caller]
pub(super) fn assert_close(got: &[f32], exact: &[f64], tolerance: f64) {
    assert_close_at_scale(got, exact, tolerance, 1e-30);
}

/// [`assert_close`] with a norm of at least `scale`, for results that cancel to zero.
#[track_caller]
pub(super) fn assert_close_at_scale(got: &[f32], exact: &[f64], tolerance: f64, scale: f64) {
    assert_eq!(got.len(), exact.len());
    let norm = exact.iter().fold(scale, |m: f64, x| m.max(x.abs()));
    for (i, (got, exact)) in got.iter().zip(exact).enumerate() {
        let error = (f64::from(*got) - exact).abs();
        assert!(error <= tolerance * norm, "element {i}: {got}, exactly {exact}; max norm {norm}");
    }
}

/// Runs `work` on a rayon pool of its own with `num_threads` threads.
pub(super) fn on_threads<R: Send>(num_threads: usize, work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap().install(work)
}

/// `[m, n] = [m, k] [k, n]` in f64; strides are `[row, column]`.
pub(super) fn matmul_f64(
    [m, n, k]: [usize; 3],
    a: &[f32],
    a_strides: [usize; 2],
    b: &[f32],
    b_strides: [usize; 2],
) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for p in 0..k {
            let a = f64::from(a[i * a_strides[0] + p * a_strides[1]]);
            for j in 0..n {
                c[i * n + j] += a * f64::from(b[p * b_strides[0] + j * b_strides[1]]);
            }
        }
    }
    c
}
