//! The order in which rows are visited: a pure function of the seed and the epoch.

use std::ops::Range;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

/// What a permutation is for. Draws for different purposes are independent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// Rows held out by `eval_split`.
    EvalSplit,
    /// The subset of a source's rows that an epoch visits, where the weight is not a whole number.
    Subset { source: usize },
    /// The order of an epoch.
    Epoch,
    /// The order of an epoch's packed rows.
    Packs,
}

/// The rows of batches, in the order of the visits.
#[derive(Debug)]
pub(super) enum Order {
    /// One document per row.
    Single(Vec<u32>),
    /// Several documents per row.
    Packed(Vec<Vec<u32>>),
}

impl Order {
    pub(super) fn num_rows(&self) -> usize {
        match self {
            Self::Single(rows) => rows.len(),
            Self::Packed(rows) => rows.len(),
        }
    }

    pub(super) fn truncate(&mut self, num_rows: usize) {
        match self {
            Self::Single(rows) => rows.truncate(num_rows),
            Self::Packed(rows) => rows.truncate(num_rows),
        }
    }

    pub(super) fn documents(&self, row: usize) -> &[u32] {
        match self {
            Self::Single(rows) => std::slice::from_ref(&rows[row]),
            Self::Packed(rows) => &rows[row],
        }
    }
}

/// The rows of a source that epoch `epoch` visits, in the order of the files: each of `rows` as often as `weight` says.
/// The fractional part of a weight is visited as a subset drawn for the epoch.
pub(super) fn visits(rows: &Range<u32>, weight: f64, seed: u64, epoch: u64, source: usize) -> Vec<u32> {
    let num_rows = rows.len();
    let mut visits = Vec::with_capacity(num_visits(weight, num_rows));
    let mut remaining = num_visits(weight, num_rows);
    while remaining >= num_rows && remaining > 0 {
        visits.extend(rows.clone());
        remaining -= num_rows;
    }
    if remaining > 0 {
        let mut subset = permutation(rows.end - rows.start, seed, epoch, Purpose::Subset { source });
        subset.truncate(remaining);
        subset.sort_unstable();
        visits.extend(subset.into_iter().map(|row| rows.start + row));
    }
    visits
}

/// Number of rows that an epoch visits of a source with `num_rows` rows; at least one unless the source is empty.
pub(super) fn num_visits(weight: f64, num_rows: usize) -> usize {
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let visits = (weight * num_rows as f64).round() as usize;
    if num_rows == 0 { 0 } else { visits.max(1) }
}

/// The rows held out of `0..num_rows`, ascending: `count` rows drawn by the seed.
pub(super) fn held_out(count: usize, num_rows: u32, seed: u64) -> Vec<u32> {
    let mut held_out = permutation(num_rows, seed, 0, Purpose::EvalSplit);
    held_out.truncate(count);
    held_out.sort_unstable();
    held_out
}

/// The numbers `0..len` in an order drawn from `(seed, epoch, purpose)`: Fisher-Yates with `ChaCha8`. The draw is
/// written out here, so that a new version of a crate cannot change it.
pub(super) fn permutation(len: u32, seed: u64, epoch: u64, purpose: Purpose) -> Vec<u32> {
    let mut order: Vec<u32> = (0..len).collect();
    shuffle(&mut order, seed, epoch, purpose);
    order
}

/// Puts `items` into an order drawn from `(seed, epoch, purpose)`.
pub(super) fn shuffle<T>(items: &mut [T], seed: u64, epoch: u64, purpose: Purpose) {
    let (kind, source) = match purpose {
        Purpose::EvalSplit => (1, 0),
        Purpose::Subset { source } => (2, source as u64),
        Purpose::Epoch => (3, 0),
        Purpose::Packs => (4, 0),
    };
    let mut key = [0; 32];
    for (bytes, word) in key.chunks_exact_mut(8).zip([seed, epoch, kind, source]) {
        bytes.copy_from_slice(&u64::to_le_bytes(word));
    }
    let mut random = ChaCha8Rng::from_seed(key);
    for last in (1..items.len()).rev() {
        // Multiply-shift onto 0..=last; the bias is below 2^-32 for any number of rows that a u32 can count.
        let drawn = (u128::from(random.next_u64()) * (last as u128 + 1)) >> 64;
        items.swap(last, usize::try_from(drawn).unwrap_or(last));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_permutation_fixed_by_seed_epoch_and_purpose() {
        let order = permutation(1000, 7, 3, Purpose::Epoch);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert_eq!(order, permutation(1000, 7, 3, Purpose::Epoch));
        for other in [
            permutation(1000, 8, 3, Purpose::Epoch),
            permutation(1000, 7, 4, Purpose::Epoch),
            permutation(1000, 7, 3, Purpose::EvalSplit),
            permutation(1000, 7, 3, Purpose::Subset { source: 0 }),
        ] {
            let same = order.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < 20, "{same} of 1000 places equal");
        }
    }

    #[test]
    fn the_order_never_changes_between_versions() {
        assert_eq!(permutation(8, 42, 0, Purpose::Epoch), FIRST_EPOCH_OF_SEED_42);
    }

    /// Never change these numbers: later versions must be able to resume and repeat runs.
    const FIRST_EPOCH_OF_SEED_42: [u32; 8] = [4, 2, 7, 5, 3, 6, 1, 0];

    #[test]
    fn a_weight_visits_a_share_of_the_rows_drawn_anew_for_every_epoch() {
        let rows = 10..30;
        assert_eq!(visits(&rows, 1.0, 1, 0, 0), (10..30).collect::<Vec<_>>());
        let half = visits(&rows, 0.5, 1, 0, 0);
        assert_eq!(half.len(), 10);
        assert!(half.is_sorted() && half.iter().all(|row| rows.contains(row)));
        assert_ne!(half, visits(&rows, 0.5, 1, 1, 0));
        let often = visits(&rows, 2.5, 1, 0, 0);
        assert_eq!(often.len(), 50);
        assert!(rows.clone().all(|row| (2..=3).contains(&often.iter().filter(|visit| **visit == row).count())));
        assert_eq!(visits(&rows, 0.001, 1, 0, 0).len(), 1);
        assert!(visits(&(5..5), 1.0, 1, 0, 0).is_empty());
    }

    #[test]
    fn every_place_is_equally_likely() {
        let mut first = [0_u32; 4];
        for epoch in 0..4000 {
            first[permutation(4, 1, epoch, Purpose::Epoch)[0] as usize] += 1;
        }
        assert!(first.iter().all(|count| (900..1100).contains(count)), "{first:?}");
    }
}
