//! Low-rank updates as one: the combination types of PEFT's `add_weighted_adapter`.

use rand::{Rng, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::start::{Singular, StartRows, as_f32};
use crate::ops::low_rank::LowRank;

/// How updates are combined, by PEFT's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum CombinationType {
    /// Sums of the A and of the B: a rough approximation
    Linear,
    /// All A and B beside each other: exact, of the sum of the ranks
    Cat,
    /// The largest singular values of the sum of the updates
    Svd,
    /// Means of the largest numbers, of those whose signs agree with most (Yadav et al., 2023)
    Ties,
    /// Sums of numbers drawn at random, made larger in turn (Yu et al., 2023)
    DareLinear,
    /// Means of numbers drawn at random, of those whose signs agree with most
    DareTies,
    /// Sums of the largest numbers
    MagnitudePrune,
}

impl CombinationType {
    /// Whether only a share of the numbers stays.
    #[must_use]
    pub fn has_density(self) -> bool {
        !matches!(self, Self::Linear | Self::Cat | Self::Svd)
    }

    /// Whether signs are counted.
    #[must_use]
    pub fn elects_signs(self) -> bool {
        matches!(self, Self::Ties | Self::DareTies)
    }

    /// Whether numbers are drawn.
    #[must_use]
    pub fn is_random(self) -> bool {
        matches!(self, Self::DareLinear | Self::DareTies)
    }

    /// Whether A and B are combined each for itself, so that all have one rank.
    #[must_use]
    pub fn has_one_rank(self) -> bool {
        !matches!(self, Self::Cat | Self::Svd)
    }
}

/// What the sign is that most have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum MajoritySign {
    /// That of their sum
    #[default]
    Total,
    /// That which is more frequent
    Frequency,
}

/// A combination with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Combination {
    /// Its type.
    pub kind: CombinationType,
    /// Share of the numbers that stays, in `(0, 1]`.
    pub density: f64,
    /// What the sign is that most have.
    pub majority_sign: MajoritySign,
    /// Most singular values; without it, the largest rank of the parts.
    pub svd_rank: Option<usize>,
    /// Of the draws.
    pub seed: u64,
}

/// An update on one module, with its share in the combination times its scale.
#[derive(Clone, Copy, Debug)]
pub struct ScaledUpdate<'a> {
    /// A, `[r, in_features]`, and B, `[out_features, r]`.
    pub matrices: LowRank<&'a [f32]>,
    /// Its rank.
    pub r: usize,
    /// What the product is multiplied by.
    pub factor: f64,
}

impl Combination {
    /// The generator of the draws of all modules.
    #[must_use]
    pub fn rng(&self) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(self.seed)
    }

    /// A and B of the combination on one module, whose product is to be multiplied by nothing, and their rank.
    #[must_use]
    pub fn of(&self, parts: &[ScaledUpdate<'_>], rng: &mut ChaCha8Rng) -> (usize, LowRank<Vec<f32>>) {
        let ranks = parts.iter().map(|part| part.r);
        match self.kind {
            CombinationType::Cat => (ranks.sum(), cat(parts).map(|rows| rows.values)),
            CombinationType::Svd => {
                let LowRank { a, b } = cat(parts);
                let in_features = a.length;
                let wanted = self.svd_rank.or(ranks.max()).unwrap_or_default();
                let r = wanted.min(in_features).min(b.count());
                let singular = Singular::of_product(&b.transposed(), &a);
                // Of smaller values the vectors are noise.
                let least = singular.values.first().map_or(0.0, |largest| NOISE * largest);
                let count = singular.values.iter().take(r).filter(|value| **value > least).count();
                let singular = singular.first(count);
                let left = singular.left.scaled(&singular.values);
                let padded = |rows: StartRows, length: usize| {
                    let mut values = rows.values;
                    values.resize(r * length, 0.0);
                    StartRows { values, length }
                };
                let (length, b) = (left.length, left);
                let b = padded(b, length).transposed().values;
                (r, LowRank { a: padded(singular.right, in_features).values, b })
            }
            _ => {
                let root = |part: &ScaledUpdate<'_>| as_f32(part.factor.abs().sqrt());
                // The sign is in one of the two.
                let of_a: Vec<f32> = parts.iter().map(|part| root(part) * as_f32(part.factor.signum())).collect();
                let of_b: Vec<f32> = parts.iter().map(root).collect();
                let [all_a, all_b]: [Vec<&[f32]>; 2] = [
                    parts.iter().map(|part| part.matrices.a).collect(),
                    parts.iter().map(|part| part.matrices.b).collect(),
                ];
                let r = ranks.max().unwrap_or_default();
                (r, LowRank { a: self.mixed(&all_a, &of_a, rng), b: self.mixed(&all_b, &of_b, rng) })
            }
        }
    }

    /// The sum of matrices of one shape, of which each keeps a share of its numbers.
    fn mixed(&self, matrices: &[&[f32]], weights: &[f32], rng: &mut ChaCha8Rng) -> Vec<f32> {
        let kept: Vec<Vec<f32>> = matrices.iter().map(|values| self.pruned(values, rng)).collect();
        let len = kept.first().map_or(0, Vec::len);
        let at = |index: usize| kept.iter().map(move |values| values[index]);
        let weighted = |index: usize| at(index).zip(weights).map(|(value, weight)| (value, value * weight));
        if !self.kind.elects_signs() {
            return (0..len).map(|index| weighted(index).map(|(_, weighted)| weighted).sum()).collect();
        }
        let sign = |value: f32| if value == 0.0 { 0.0 } else { value.signum() };
        let elected = |index: usize| {
            let majority: f32 = match self.majority_sign {
                MajoritySign::Total => at(index).sum(),
                MajoritySign::Frequency => at(index).map(sign).sum(),
            };
            let majority = if majority >= 0.0 { 1.0 } else { -1.0 };
            let agree = weighted(index).filter(|(value, _)| sign(*value) * majority > 0.0);
            let (count, sum) = agree.fold((0.0_f32, 0.0), |(count, sum), (_, value)| (count + 1.0, sum + value));
            sum / count.max(1.0)
        };
        (0..len).map(elected).collect()
    }

    fn pruned(&self, values: &[f32], rng: &mut ChaCha8Rng) -> Vec<f32> {
        if !self.kind.has_density() || self.density >= 1.0 {
            return values.to_vec();
        }
        if self.kind.is_random() {
            let factor = as_f32(1.0 / self.density);
            return values
                .iter()
                .map(|value| if rng.random_bool(self.density) { value * factor } else { 0.0 })
                .collect();
        }
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*b].abs().total_cmp(&values[*a].abs()));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share"
        )]
        order.truncate((self.density * values.len() as f64) as usize);
        let mut kept = vec![0.0; values.len()];
        order.into_iter().for_each(|index| kept[index] = values[index]);
        kept
    }
}

/// Share of the largest singular value below which others are rounding.
const NOISE: f32 = 1e-6;

/// All A with their factors, and all B, beside each other.
fn cat(parts: &[ScaledUpdate<'_>]) -> LowRank<StartRows> {
    let scaled = |part: &ScaledUpdate<'_>| {
        let factor = as_f32(part.factor);
        part.matrices.a.iter().map(move |value| value * factor).collect::<Vec<_>>()
    };
    let in_features = parts.first().map_or(1, |part| part.matrices.a.len() / part.r);
    let columns = |part: &ScaledUpdate<'_>| StartRows { values: part.matrices.b.to_vec(), length: part.r }.transposed();
    let rows: Vec<StartRows> = parts.iter().map(columns).collect();
    let out_features = rows.first().map_or(1, |rows| rows.length);
    let b = StartRows { values: rows.into_iter().flat_map(|rows| rows.values).collect(), length: out_features };
    LowRank { a: StartRows { values: parts.iter().flat_map(scaled).collect(), length: in_features }, b: b.transposed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combination(kind: CombinationType, density: f64) -> Combination {
        Combination { kind, density, majority_sign: MajoritySign::Total, svd_rank: None, seed: 3 }
    }

    #[test]
    fn drawn_numbers_are_a_share_made_larger_in_turn_and_a_seed_names_them() {
        let dare = combination(CombinationType::DareLinear, 0.25);
        let values = vec![2.0; 40_000];
        let found = dare.pruned(&values, &mut dare.rng());
        let kept = found.iter().filter(|value| **value == 8.0).count();
        assert!(found.iter().all(|value| [0.0, 8.0].contains(value)) && (9_700..10_300).contains(&kept), "{kept}");
        assert_eq!(dare.pruned(&values, &mut dare.rng()), found);
        let other = Combination { seed: 4, ..dare };
        assert_ne!(other.pruned(&values, &mut other.rng()), found);
    }

    #[test]
    fn numbers_count_whose_sign_most_have_by_sum_or_by_number() {
        let matrices: [&[f32]; 3] = [&[3.0, 1.0, 0.0], &[-1.0, -2.0, 0.0], &[-1.0, 4.0, -0.0]];
        let ties = combination(CombinationType::Ties, 1.0);
        let weights = [1.0, 10.0, 100.0];
        assert_eq!(ties.mixed(&matrices, &weights, &mut ties.rng()), [3.0, f32::midpoint(1.0, 400.0), 0.0]);
        let by_number = Combination { majority_sign: MajoritySign::Frequency, ..ties };
        assert_eq!(by_number.mixed(&matrices, &weights, &mut ties.rng()), [f32::midpoint(-10.0, -100.0), 200.5, 0.0]);
    }

    #[test]
    fn the_largest_singular_values_of_a_sum_of_more_than_its_ranks_are_the_sum() {
        let numbers = |count: usize, key: usize| -> Vec<f32> {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            (0..count).map(|i| ((i * 37 + key * 11) % 101) as f32 / 50.0 - 1.0).collect()
        };
        let (a, b) = ([numbers(2 * 7, 1), numbers(3 * 7, 2)], [numbers(5 * 2, 3), numbers(5 * 3, 4)]);
        let part = |index: usize, r: usize, factor| ScaledUpdate {
            matrices: LowRank { a: &a[index], b: &b[index] },
            r,
            factor,
        };
        let parts = [part(0, 2, 0.5), part(1, 3, -1.5)];
        let product = |(r, LowRank { a, b }): (usize, LowRank<Vec<f32>>)| {
            assert_eq!((a.len(), b.len()), (r * 7, 5 * r));
            StartRows { values: b, length: r }.times(&StartRows { values: a, length: 7 }).values
        };
        let [exact, found] = [CombinationType::Cat, CombinationType::Svd].map(|kind| {
            let combination = Combination { svd_rank: Some(9), ..combination(kind, 1.0) };
            product(combination.of(&parts, &mut combination.rng()))
        });
        assert!(exact.iter().zip(&found).all(|(exact, found)| (exact - found).abs() < 1e-5), "{exact:?} {found:?}");
    }
}
