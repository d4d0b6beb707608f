//! Small dense algebra on rows of numbers: what starts from the base weights need.

use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::normal;
use crate::ops::cpu::{Weight, linear, linear_backward_input};

/// Vectors of one length, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::lora) struct StartRows {
    pub(in crate::lora) values: Vec<f32>,
    pub(in crate::lora) length: usize,
}

impl StartRows {
    pub(in crate::lora) fn normal(count: usize, length: usize, rng: &mut ChaCha8Rng) -> Self {
        Self { values: (0..count * length).map(|_| normal(rng)).collect(), length }
    }

    pub(in crate::lora) fn iter(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.length)
    }

    pub(in crate::lora) fn count(&self) -> usize {
        self.values.len() / self.length
    }

    /// `x w^T` of a matrix `w`, `[out_features, length]`.
    pub(in crate::lora) fn times_transposed(&self, w: &Self) -> Self {
        let mut values = vec![0.0; self.count() * w.count()];
        linear(&self.values, Weight::f32(&w.values), w.length, w.count(), &mut values, false);
        Self { values, length: w.count() }
    }

    /// `x w` of a matrix `w`, `[length, in_features]`.
    pub(in crate::lora) fn times(&self, w: &Self) -> Self {
        let mut values = vec![0.0; self.count() * w.length];
        linear_backward_input(&self.values, Weight::f32(&w.values), w.length, w.count(), &mut values, false);
        Self { values, length: w.length }
    }

    /// The transpose.
    pub(in crate::lora) fn transposed(&self) -> Self {
        let (count, length) = (self.count(), self.length);
        let values = (0..length).flat_map(|column| (0..count).map(move |row| self.values[row * length + column]));
        Self { values: values.collect(), length: count }
    }

    /// The first rows.
    pub(in crate::lora) fn first(mut self, count: usize) -> Self {
        self.values.truncate(count * self.length);
        self
    }

    /// Each row times its factor.
    pub(in crate::lora) fn scaled(mut self, factors: &[f32]) -> Self {
        for (row, factor) in self.values.chunks_exact_mut(self.length).zip(factors) {
            row.iter_mut().for_each(|value| *value *= factor);
        }
        self
    }

    /// Makes the rows orthonormal, by the method of Gram and Schmidt, repeated until a row hardly gets shorter: what is left of
    /// one that lies in the span of those before it is noise.
    pub(in crate::lora) fn orthonormal(mut self) -> Self {
        const MOST_REPEATS: usize = 8;
        let length = self.length;
        for row in 0..self.count() {
            let (before, rest) = self.values.split_at_mut(row * length);
            let this = &mut rest[..length];
            normalise(this);
            for _ in 0..MOST_REPEATS {
                let shares: Vec<f32> = before.par_chunks_exact(length).map(|other| as_f32(dot(other, this))).collect();
                for (other, share) in before.chunks_exact(length).zip(shares) {
                    this.iter_mut().zip(other).for_each(|(value, other)| *value -= share * other);
                }
                if normalise(this) > 0.5 {
                    break;
                }
            }
        }
        self
    }
}

/// Returns the length that it had.
fn normalise(row: &mut [f32]) -> f32 {
    let norm = as_f32(dot(row, row).sqrt().max(f64::from(f32::MIN_POSITIVE)));
    row.iter_mut().for_each(|value| *value /= norm);
    norm
}

pub(in crate::lora) fn dot(a: &[f32], b: &[f32]) -> f64 {
    /// Sums that do not wait for each other.
    const LANES: usize = 16;
    let product = |a: &f32, b: &f32| f64::from(*a) * f64::from(*b);
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += product(a, b));
    }
    sums.into_iter().chain(a_rest.iter().zip(b_rest).map(|(a, b)| product(a, b))).sum()
}

#[expect(clippy::cast_possible_truncation, reason = "summed in f64, kept in f32")]
pub(in crate::lora) fn as_f32(number: f64) -> f32 {
    number as f32
}
