//! Kahneman-Tversky optimisation (Ethayarajh et al., 2024): answers that are good or bad, without pairs.

use super::pairs::{Sequence, Weights, sigmoid};
use super::{LossRows, Needs, Objective, OfReference, Weighed};
use crate::config::ObjectiveConfig;
use crate::measure::figures::{Mean, ObjectiveFigures};

/// How far an answer is above or below the divergence from the reference.
#[derive(Clone, Debug)]
pub(super) struct Kto {
    beta: f64,
    /// Whether the divergence counts.
    has_divergence: bool,
    desirable_weight: f64,
    undesirable_weight: f64,
}

impl Kto {
    pub(super) fn new(config: &ObjectiveConfig) -> Self {
        Self {
            beta: config.beta(),
            has_divergence: config.needs_divergence(),
            desirable_weight: config.desirable_weight,
            undesirable_weight: config.undesirable_weight,
        }
    }
}

impl Objective for Kto {
    fn needs(&self) -> Needs {
        let (reference, divergence) = (Some(OfReference::Documents), self.has_divergence);
        Needs { log_probabilities: true, reference, divergence, ..Needs::default() }
    }

    fn weigh(&self, rows: &LossRows<'_>) -> Weighed {
        let divergence = if self.has_divergence { rows.divergence.max(0.0) } else { 0.0 };
        let (mut weights, mut total) = (Weights::new(rows), 0.0);
        let mut figures = ObjectiveFigures { kl: Mean::of(divergence), ..ObjectiveFigures::default() };
        for (answer, sequence) in rows.answers.iter().zip(Sequence::all(rows)) {
            let (log_ratio, is_good) = (sequence.log_ratio(), answer.is_good);
            let (weight, sign) = if is_good { (self.desirable_weight, 1.0) } else { (self.undesirable_weight, -1.0) };
            let x = sign * self.beta * (log_ratio - divergence);
            total += weight * sigmoid(-x);
            sequence.add_slope(-sign * weight * self.beta * sigmoid(x) * sigmoid(-x), &mut weights);
            let [reward, log_probability] = if is_good {
                [&mut figures.rewards_chosen, &mut figures.logps_chosen]
            } else {
                [&mut figures.rewards_rejected, &mut figures.logps_rejected]
            };
            *reward += Mean::of(self.beta * log_ratio);
            *log_probability += Mean::of(sequence.policy);
        }
        weights.weighed(total, rows.targets.len(), figures)
    }
}
