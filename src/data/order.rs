//! The order in which rows are visited: a pure function of the seed and the epoch.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

/// What a permutation is drawn for: draws for different purposes have nothing to do with each other.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// Rows held out by `eval_split`.
    EvalSplit,
    /// Rows of one source that an epoch visits, where its weight is not a whole number.
    Subset {
        /// Index of the source.
        source: usize,
    },
    /// The order of an epoch.
    Epoch,
}

/// The numbers `0..len` in an order drawn from `(seed, epoch, purpose)`: Fisher-Yates with `ChaCha8`. The draw is
/// written out here, so that it cannot change with the version of a crate.
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

    /// Written down once: runs must resume, and be repeated, under later versions too.
    const FIRST_EPOCH_OF_SEED_42: [u32; 8] = [4, 2, 7, 5, 3, 6, 1, 0];

    #[test]
    fn every_place_is_equally_likely() {
        let mut first = [0_u32; 4];
        for epoch in 0..4000 {
            first[permutation(4, 1, epoch, Purpose::Epoch)[0] as usize] += 1;
        }
        assert!(first.iter().all(|count| (900..1100).contains(count)), "{first:?}");
    }
}
