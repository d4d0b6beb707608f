//! How much better answers are than the others to their prompt.

use crate::config::ScaleRewards;
use crate::measure::figures::{Mean, ObjectiveFigures};
use crate::util::stats::as_f64;

/// Added to a standard deviation, as in TRL.
const STD_EPSILON: f64 = 1e-4;

/// By how much each reward is above the mean of its group, over a standard deviation; 0 where there is no reward.
pub(super) fn advantages(
    rewards: &[Option<f64>],
    group_size: usize,
    scale: ScaleRewards,
    figures: &mut ObjectiveFigures,
) -> Vec<f64> {
    let spread = |rewards: &[f64]| {
        let mean = rewards.iter().sum::<f64>() / as_f64(rewards.len().max(1));
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        (mean, (squares / as_f64(rewards.len().max(2) - 1)).sqrt())
    };
    let all: Vec<f64> = rewards.iter().flatten().copied().collect();
    let (_, of_batch) = spread(&all);
    let mut advantages = Vec::with_capacity(rewards.len());
    for group in rewards.chunks(group_size) {
        let judged: Vec<f64> = group.iter().flatten().copied().collect();
        let (mean, deviation) = spread(&judged);
        judged.iter().for_each(|reward| figures.reward += Mean::of(*reward));
        figures.reward_std += Mean::of(deviation);
        figures.frac_reward_zero_std += Mean::of(f64::from(u8::from(deviation < 1e-12)));
        let divisor = match scale {
            ScaleRewards::Group => deviation + STD_EPSILON,
            ScaleRewards::Batch => of_batch + STD_EPSILON,
            ScaleRewards::None => 1.0,
        };
        // What rounding leaves of equal rewards is no advantage.
        let above = |reward: f64| if deviation < 1e-12 { 0.0 } else { (reward - mean) / divisor };
        advantages.extend(group.iter().map(|reward| reward.map_or(0.0, above)));
    }
    advantages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advantages_are_those_of_trl() {
        let rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5].map(Some);
        let of = |scale: ScaleRewards| {
            let mut figures = ObjectiveFigures::default();
            (advantages(&rewards, 4, scale, &mut figures), figures)
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
        let found = advantages(&[Some(1.0), None, Some(0.0)], 3, ScaleRewards::None, &mut ObjectiveFigures::default());
        assert_eq!(found, [0.5, 0.0, -0.5]);
    }
}
