//! Dropout whose mask is a pure function of a seed and the element's place, so that no mask is ever stored.

use rayon::prelude::*;

use super::simd::{rows_per_chunk, vectorised};

/// Inverted dropout: zero with `probability`, else times `1 / (1 - probability)`.
///
/// The same seed gives the same mask, in the forward pass, in its recomputation and in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Share of the elements that become zero, in [0, 1).
    pub probability: f64,
    /// Names the mask: one per layer, projection and micro-batch.
    pub seed: u64,
    /// The mask's row for the first row of a tensor: above 0 where the rows before it are on other ranks.
    pub first_row: usize,
}

/// Mixes the bits of `value`: the finaliser of `SplitMix64` (Steele, Lea and Flood, 2014) after its increment.
#[must_use]
pub fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Factors of the hash: of the column, and of its two rounds.
pub(in crate::ops) const FACTORS: [u32; 3] = [0x9e37_79b9, 0x7feb_352d, 0x846c_a68b];

/// Of column `column` of the row with these keys.
#[inline(always)]
pub(super) fn hash(column: u32, keys: [u32; 2]) -> u32 {
    let mut h = column.wrapping_mul(FACTORS[0]) ^ keys[0];
    h = (h ^ (h >> 16)).wrapping_mul(FACTORS[1]);
    h = (h ^ keys[1] ^ (h >> 15)).wrapping_mul(FACTORS[2]);
    h ^ (h >> 16)
}

/// Whether column `column` of the row with these keys stays.
#[inline(always)]
fn stays(column: u32, keys: [u32; 2], threshold: u32) -> bool {
    hash(column, keys) >= threshold
}

vectorised! { fn dropout_row<'a, S>(
    _simd, x: &'a [f32], keys: [u32; 2], threshold: u32, factor: f32, accumulate: bool, out: &'a mut [f32],
) {
    if accumulate {
        for ((out, x), column) in out.iter_mut().zip(x).zip(0u32..) {
            *out += if stays(column, keys, threshold) { *x * factor } else { 0.0 };
        }
    } else {
        for ((out, x), column) in out.iter_mut().zip(x).zip(0u32..) {
            *out = if stays(column, keys, threshold) { *x * factor } else { 0.0 };
        }
    }
} }

impl Dropout {
    /// Hashes below this are dropped.
    pub(in crate::ops) fn threshold(self) -> u32 {
        (f64::from(self.probability as f32) * 2f64.powi(32)) as u32
    }

    /// Factor of what stays.
    pub(in crate::ops) fn factor(self) -> f32 {
        1.0 / (1.0 - self.probability as f32)
    }

    /// Keys of a row.
    pub(in crate::ops) fn keys(self, row: usize) -> [u32; 2] {
        let key = mix(mix(self.seed) ^ (self.first_row + row) as u64);
        [key as u32, (key >> 32) as u32]
    }

    /// Masks and scales rows `first_row..` of width `width`, on this thread; adds to `out` if `accumulate`.
    fn apply(self, x: &[f32], width: usize, first_row: usize, accumulate: bool, out: &mut [f32]) {
        let (threshold, factor) = (self.threshold(), self.factor());
        for (row, (x, out)) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
            dropout_row(x, self.keys(first_row + row), threshold, factor, accumulate, out);
        }
    }

    fn apply_parallel(self, x: &[f32], width: usize, accumulate: bool, out: &mut [f32]) {
        assert!(x.len() == out.len() && width > 0 && x.len().is_multiple_of(width), "dropout: {} of {width}", x.len());
        let rows = rows_per_chunk(width);
        out.par_chunks_mut(rows * width)
            .zip(x.par_chunks(rows * width))
            .enumerate()
            .for_each(|(chunk, (out, x))| self.apply(x, width, chunk * rows, accumulate, out));
    }

    /// `out += dropout(x)`.
    pub(super) fn add_masked(self, x: &[f32], width: usize, out: &mut [f32]) {
        self.apply_parallel(x, width, true, out);
    }
}

/// `out = dropout(x)`; applied to an upstream gradient, the gradient.
///
/// # Shapes
/// `x`, `out`: `[rows, width]`.
pub fn dropout(x: &[f32], width: usize, settings: Dropout, out: &mut [f32]) {
    settings.apply_parallel(x, width, false, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_rows_alone_have_the_mask_that_they_have_after_the_others() {
        let (x, width, settings) = (vec![1.0; 90 * 64], 64, Dropout { probability: 0.5, seed: 3, first_row: 0 });
        let mut whole = vec![0.0; x.len()];
        dropout(&x, width, settings, &mut whole);
        let mut later = vec![0.0; 50 * width];
        dropout(&x[40 * width..], width, Dropout { first_row: 40, ..settings }, &mut later);
        assert_eq!(later, whole[40 * width..]);
    }

    #[test]
    fn the_share_of_zeros_and_the_mean_are_those_asked_for() {
        let (rows, width) = (500, 577);
        let x = vec![1.0; rows * width];
        for probability in [0.0, 0.05, 0.5, 0.9] {
            let mut y = vec![f32::NAN; x.len()];
            dropout(&x, width, Dropout { probability, seed: 7, first_row: 0 }, &mut y);
            let zeros = y.iter().filter(|y| **y == 0.0).count() as f32 / y.len() as f32;
            let probability = probability as f32;
            let spread = (probability * (1.0 - probability) / y.len() as f32).sqrt();
            assert!((zeros - probability).abs() <= 4.0 * spread, "{zeros} for {probability}");
            let kept = 1.0 / (1.0 - probability);
            assert!(y.iter().all(|y| *y == 0.0 || *y == kept));
        }
    }

    #[test]
    fn masks_differ_by_seed_row_and_column_and_repeat_for_the_same_seed() {
        let x = vec![1.0; 64 * 256];
        let mask = |seed| {
            let mut y = vec![0.0; x.len()];
            dropout(&x, 256, Dropout { probability: 0.5, seed, first_row: 0 }, &mut y);
            y
        };
        let (one, two) = (mask(1), mask(2));
        assert_eq!(one, mask(1));
        let same = |x: &[f32], y: &[f32]| x.iter().zip(y).filter(|(x, y)| x == y).count() as f32 / x.len() as f32;
        assert!((same(&one, &two) - 0.5).abs() < 0.02);
        for shift in [1, 2, 255, 256, 257, 512] {
            let share = same(&one[shift..], &one[..one.len() - shift]);
            assert!((share - 0.5).abs() < 0.02, "shift {shift}: {share}");
        }
    }
}
