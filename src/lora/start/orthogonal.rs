//! A and B whose product is zero, though neither is: halves of one orthogonal matrix.

use rand_chacha::ChaCha8Rng;

use super::rows::StartRows;

/// A, `[r, in_features]`, and B, `[out_features, r]`, for an even r, as `LoraLayer.orthogonal_init` of PEFT draws them.
pub(super) fn orthogonal(r: usize, [out_features, in_features]: [usize; 2], rng: &mut ChaCha8Rng) -> [Vec<f32>; 2] {
    let all = StartRows::normal(r, r, rng).orthonormal();
    let half = |odd: usize| {
        let rows = all.iter().skip(odd).step_by(2).flatten().map(|value| value / 10.0);
        StartRows { values: rows.collect(), length: r }
    };
    let a = half(0).transposed().times(&StartRows::normal(r / 2, in_features, rng));
    let b = StartRows::normal(r / 2, out_features, rng).transposed().times(&half(1));
    [a.values, b.values]
}
