//! How much better answers are than the others to their prompt.

use super::reward::Scores;
use crate::config::{Aggregation, ObjectiveConfig, ScaleRewards};
use crate::measure::figures::{Mean, ObjectiveFigures, Spread};
use crate::util::stats::as_f64;

/// Added to a standard deviation, as in TRL.
const STD_EPSILON: f64 = 1e-4;

/// By how much answers are better than the others to their prompt.
#[derive(Debug, Default)]
pub(super) struct Advantages {
    /// Of each answer; 0 where there is no reward.
    pub values: Vec<f64>,
    /// What those of all answers that were written together are still to be divided by the standard deviation of; of nothing, if they
    /// are not.
    pub of_round: Spread,
}

/// What is left to divide the advantages of answers by which have been written together.
pub(super) fn divisor(of_round: Spread) -> f64 {
    of_round.value().map_or(1.0, |(_, deviation)| deviation + STD_EPSILON)
}

/// Advantages of answers, of which a group of `group_size` is to one prompt: by how much each reward is above the mean of its group, over
/// a standard deviation. `scores` are what functions say.
pub(super) fn advantages(
    rewards: &[Option<f64>],
    scores: &[Scores],
    group_size: usize,
    objective: &ObjectiveConfig,
    figures: &mut ObjectiveFigures,
) -> Advantages {
    let mut above = Vec::with_capacity(rewards.len());
    for group in rewards.chunks(group_size) {
        let (values, deviation) = compared(group, objective.scale_rewards == ScaleRewards::Group);
        group.iter().flatten().for_each(|reward| figures.reward += Mean::of(*reward));
        figures.reward_std += Mean::of(deviation);
        figures.frac_reward_zero_std += Mean::of(f64::from(u8::from(deviation < LEAST)));
        above.extend(values);
    }
    let is_judged =
        |values: &[f64]| rewards.iter().zip(values).filter_map(|(reward, value)| reward.map(|_| *value)).collect();
    if objective.multi_objective_aggregation == Aggregation::NormalizeThenSum {
        above.fill(0.0);
        for of in scores {
            let compared = of.by_answer.chunks(group_size).flat_map(|group| compared(group, true).0);
            above.iter_mut().zip(compared).for_each(|(sum, value)| *sum += of.weight * value);
        }
        return Advantages { of_round: is_judged(&above), values: above };
    }
    let of_round = match objective.scale_rewards {
        ScaleRewards::Batch => rewards.iter().flatten().copied().collect(),
        _ => Spread::default(),
    };
    Advantages { values: above, of_round }
}

/// What rounding leaves of equal rewards is no deviation.
const LEAST: f64 = 1e-12;

/// By how much the numbers of a group are above their mean, over their standard deviation where it `is_scaled`; and that.
fn compared(group: &[Option<f64>], is_scaled: bool) -> (Vec<f64>, f64) {
    let judged: Vec<f64> = group.iter().flatten().copied().collect();
    let mean = judged.iter().sum::<f64>() / as_f64(judged.len().max(1));
    let squares: f64 = judged.iter().map(|number| (number - mean).powi(2)).sum();
    let deviation = (squares / as_f64(judged.len().max(2) - 1)).sqrt();
    let divisor = if is_scaled { deviation + STD_EPSILON } else { 1.0 };
    let above = |number: f64| if deviation < LEAST { 0.0 } else { (number - mean) / divisor };
    (group.iter().map(|number| number.map_or(0.0, above)).collect(), deviation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advantages_are_those_of_trl() {
        let rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5].map(Some);
        let of = |scale_rewards: ScaleRewards| {
            let objective = ObjectiveConfig { scale_rewards, ..ObjectiveConfig::default() };
            let mut figures = ObjectiveFigures::default();
            let Advantages { values, of_round } = advantages(&rewards, &[], 4, &objective, &mut figures);
            (values.iter().map(|value| value / divisor(of_round)).collect::<Vec<_>>(), figures)
        };
        // The deviation of 1, 0, 0, 1 is the root of 1/3; of all eight the root of 1/7.
        let close = |found: &[f64], divisor: f64| {
            let expected = [0.5, -0.5, -0.5, 0.5, 0.0, 0.0, 0.0, 0.0].map(|reward| reward / divisor);
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} {expected:?}");
        };
        let (group, figures) = of(ScaleRewards::Group);
        close(&group, (1.0_f64 / 3.0).sqrt() + 1e-4);
        close(&of(ScaleRewards::Batch).0, (1.0_f64 / 7.0).sqrt() + 1e-4);
        close(&of(ScaleRewards::None).0, 1.0);
        let means = [figures.reward, figures.frac_reward_zero_std].map(|mean| mean.value().unwrap());
        assert!((means[0] - 0.5).abs() < 1e-12 && (means[1] - 0.5).abs() < 1e-12);
        let objective = ObjectiveConfig { scale_rewards: ScaleRewards::None, ..ObjectiveConfig::default() };
        let judged = [Some(1.0), None, Some(0.0)];
        assert_eq!(advantages(&judged, &[], 3, &objective, &mut ObjectiveFigures::default()).values, [0.5, 0.0, -0.5]);
    }

    #[test]
    fn functions_that_are_compared_one_by_one_weigh_what_they_are_given_however_far_they_spread() {
        let scores =
            |weight, by_answer: [Option<f64>; 8]| Scores { name: String::new(), weight, by_answer: by_answer.into() };
        let one = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5].map(Some);
        let other = [Some(10.0), Some(30.0), None, Some(20.0), Some(-4.0), Some(0.0), Some(2.0), None];
        let scores = [scores(1.0, one), scores(0.5, other)];
        let sums: Vec<Option<f64>> =
            one.iter().zip(other).map(|(one, other)| Some(one.unwrap() + 0.5 * other.unwrap_or(0.0))).collect();
        let multi_objective_aggregation = Aggregation::NormalizeThenSum;
        let objective = ObjectiveConfig { multi_objective_aggregation, ..ObjectiveConfig::default() };
        let mut figures = ObjectiveFigures::default();
        let Advantages { values, of_round } = advantages(&sums, &scores, 4, &objective, &mut figures);
        let found: Vec<f64> = values.iter().map(|value| value / divisor(of_round)).collect();
        // By torch, as TRL 1.16 computes them.
        let expected = [0.642_789, -0.642_789, -1.521_194, 1.521_194, -0.958_397, 0.191_679, 0.766_718, 0.0];
        assert!(found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-5), "{found:?}");
    }
}
