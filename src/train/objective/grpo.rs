//! Group relative policy optimisation (Shao et al., 2024), one update for each answer: what the model wrote itself becomes
//! likelier or less likely by its advantage over the other answers to its prompt.

use super::pairs::Weights;
use super::{Objective, Rows, Weighed};
use crate::config::{LossType, ObjectiveConfig};
use crate::measure::figures::{Mean, ObjectiveFigures};
use crate::util::stats::as_f64;

/// Weighs tokens by the advantage of their answer.
#[derive(Clone, Debug)]
pub(super) struct Grpo {
    loss: LossType,
    /// Weight of the divergence from the reference.
    beta: f64,
    max_completion_length: usize,
}

impl Grpo {
    pub(super) fn new(config: &ObjectiveConfig) -> Self {
        let loss = config.losses().first().copied().unwrap_or(LossType::Dapo);
        Self { loss, beta: config.beta(), max_completion_length: config.max_completion_length }
    }
}

impl Objective for Grpo {
    fn needs_log_probabilities(&self) -> bool {
        self.needs_reference()
    }

    fn needs_reference(&self) -> bool {
        self.beta > 0.0
    }

    fn weigh(&self, rows: &Rows<'_>) -> Weighed {
        let num_tokens = as_f64(rows.num_targets());
        let count = match self.loss {
            LossType::Bnpo => 1.0,
            LossType::Grpo => as_f64(rows.targets.len()),
            LossType::DrGrpo => as_f64(rows.targets.len() * self.max_completion_length),
            _ => num_tokens,
        };
        let (mut weights, mut total) = (Weights::new(rows), 0.0);
        let mut figures = ObjectiveFigures::default();
        for (answer, targets) in rows.answers.iter().zip(rows.targets) {
            let share = match self.loss {
                LossType::Bnpo => 1.0 / num_tokens,
                LossType::Grpo => 1.0 / as_f64(targets.len().max(1)),
                _ => 1.0,
            };
            let advantage = f64::from(answer.advantage);
            // The ratio to what wrote the answer, the model itself, is 1.
            weights.add(targets.clone(), -advantage * share);
            total -= advantage * share * as_f64(targets.len());
            if self.beta > 0.0 {
                for target in targets.clone() {
                    let above = f64::from(rows.log_probabilities[target]) - f64::from(rows.reference[target]);
                    let divergence = (-above).exp() + above - 1.0;
                    total += self.beta * share * divergence;
                    // The divergence is multiplied by that ratio, as in TRL: this is the slope of the product.
                    weights.add(target..target + 1, self.beta * share * above);
                    figures.kl += Mean::of(divergence);
                }
            }
        }
        Weighed { count, ..weights.weighed(total, 0, figures) }
    }
}
