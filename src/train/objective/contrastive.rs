//! Preferences without a reference: contrastive preference optimisation (Xu et al., 2024), simple preference optimisation
//! (Meng et al., 2024), and the rewards of `AlphaPO` (Gupta et al., 2025).

use super::pairs::{Pair, Sequence, Weights, figures, sigmoid, softplus_of_minus};
use super::{LossRows, Objective, Weighed};
use crate::config::{LossType, ObjectiveConfig, ObjectiveName};
use crate::measure::figures::Mean;
use crate::util::stats::as_f64;

/// A loss of the difference of two rewards, and the chosen answer's cross-entropy.
#[derive(Clone, Debug)]
pub(super) struct Contrastive {
    loss: LossType,
    beta: f64,
    /// The margin.
    gamma: f64,
    /// Whether rewards are those of a token in the mean.
    is_mean: bool,
    alpha: f64,
    label_smoothing: f64,
    cpo_alpha: f64,
}

impl Contrastive {
    pub(super) fn new(config: &ObjectiveConfig) -> Self {
        let is_simpo = config.name == ObjectiveName::Simpo;
        let loss = config.losses().first().copied().unwrap_or(LossType::Sigmoid);
        Self {
            beta: config.beta(),
            gamma: if is_simpo { config.simpo_gamma } else { 0.0 },
            is_mean: is_simpo || loss == LossType::Ipo,
            alpha: config.alpha,
            label_smoothing: config.label_smoothing,
            cpo_alpha: config.cpo_alpha.unwrap_or(if is_simpo { 0.0 } else { 1.0 }),
            loss,
        }
    }

    /// The reward over beta, and its slope with respect to the log-probability.
    fn reward(&self, answer: &Sequence) -> [f64; 2] {
        let (value, slope) = if self.is_mean { (answer.mean(), 1.0 / answer.count) } else { (answer.policy, 1.0) };
        if self.alpha.abs() > 0.0 {
            let power = (-self.alpha * value).exp();
            [(1.0 - power) / self.alpha, power * slope]
        } else {
            [value, slope]
        }
    }
}

impl Objective for Contrastive {
    fn weigh(&self, rows: &LossRows<'_>) -> Weighed {
        let pairs = Pair::all(rows, None);
        let (beta, smoothing) = (self.beta, self.label_smoothing);
        let (mut weights, mut total) = (Weights::new(rows), 0.0);
        for pair in &pairs {
            let [[good, of_good], [bad, of_bad]] = [self.reward(&pair.chosen), self.reward(&pair.rejected)];
            let x = beta * (good - bad) - self.gamma;
            let (loss, slope) = match self.loss {
                LossType::Hinge => ((1.0 - x).max(0.0), if x < 1.0 { -beta } else { 0.0 }),
                LossType::Ipo => {
                    let error = good - bad - 0.5 / beta;
                    (error * error, 2.0 * error)
                }
                _ => {
                    let loss = (1.0 - smoothing) * softplus_of_minus(x) + smoothing * softplus_of_minus(-x);
                    (loss, beta * (smoothing - sigmoid(-x)))
                }
            };
            total += loss;
            pair.chosen.add_slope(slope * of_good, &mut weights);
            pair.rejected.add_slope(-slope * of_bad, &mut weights);
        }
        let log_probability = |answer: &Sequence| if self.is_mean { answer.mean() } else { answer.policy };
        let mut figures = figures(pairs.iter().map(|pair| {
            let both = [&pair.chosen, &pair.rejected];
            (both.map(|answer| beta * self.reward(answer)[0]), both.map(log_probability))
        }));
        if self.cpo_alpha > 0.0 {
            let chosen: Vec<_> = pairs.iter().map(|pair| pair.chosen.targets.clone()).collect();
            let count = as_f64(pairs.len());
            let factor = self.cpo_alpha * count;
            let cross_entropy = weights.add_cross_entropy(rows, &chosen, factor);
            total += factor * cross_entropy;
            figures.nll_loss = Mean { sum: count * cross_entropy, count };
        }
        weights.weighed(total, pairs.len(), figures)
    }
}
