//! Group relative policy optimisation (Shao et al., 2024): what the model wrote itself becomes likelier or less likely by its
//! advantage over the other answers to its prompt, within bounds of what it was when it was written.

use std::ops::Range;

use super::pairs::{Weights, sigmoid};
use super::{LossRows, Needs, Objective, OfLogits, OfReference, Weighed};
use crate::config::{ImportanceSamplingLevel, LossType, ObjectiveConfig};
use crate::measure::figures::{Mean, ObjectiveFigures};
use crate::util::stats::{as_f64, quantile};

/// Weighs tokens by the advantage of their answer.
#[derive(Clone, Debug)]
pub(super) struct Grpo {
    loss: LossType,
    /// Weight of the divergence from the reference.
    beta: f64,
    max_completion_length: usize,
    /// That at which the answers are drawn.
    temperature: Option<f64>,
    /// Whether answers are used again after an update.
    reuses: bool,
    level: ImportanceSamplingLevel,
    /// How much less and more likely a token may have become: beyond, it is not followed any further.
    bounds: [f64; 2],
    /// The largest ratio that counts where the advantage is negative.
    delta: f64,
    /// Of "sapo": sharpness of the gate of answers with a positive advantage, and of the others.
    gates: [f64; 2],
    /// Of "vespo": k and lambda of answers that are no worse than others, and of the others.
    vespo: [[f64; 2]; 2],
    /// By how much worse answers may have become less likely, in nats a token.
    off_policy: f64,
    /// Share of the tokens that are followed: those where the most different ones may come.
    top_entropy: f64,
}

impl Grpo {
    pub(super) fn new(config: &ObjectiveConfig) -> Self {
        let loss = config.losses().first().copied().unwrap_or(LossType::Dapo);
        Self {
            loss,
            beta: config.beta(),
            max_completion_length: config.max_completion_length,
            temperature: config.logit_temperature(),
            reuses: config.reuses_answers(),
            level: config.importance_sampling_level,
            bounds: match (loss, config.epsilon_high) {
                (LossType::Cispo, high) => [0.0, high.unwrap_or(5.0)],
                (_, high) => [1.0 - config.epsilon, 1.0 + high.unwrap_or(config.epsilon)],
            },
            delta: config.delta.unwrap_or(f64::INFINITY),
            gates: [config.sapo_temperature_pos, config.sapo_temperature_neg],
            vespo: [[config.vespo_k_pos, config.vespo_lambda_pos], [config.vespo_k_neg, config.vespo_lambda_neg]],
            off_policy: config.off_policy_mask_threshold.unwrap_or(f64::INFINITY),
            top_entropy: config.top_entropy_quantile,
        }
    }

    /// Loss of a token that is `ratio` times as likely as when it was written, and its slope with respect to its
    /// log-probability.
    fn of_token(&self, ratio: f64, advantage: f64, log_probability: f64) -> [f64; 2] {
        let [low, high] = self.bounds;
        match self.loss {
            LossType::Cispo => {
                let weight = ratio.min(high) * advantage;
                [-weight * log_probability, -weight]
            }
            LossType::Sapo => {
                let sharpness = self.gates[usize::from(advantage <= 0.0)];
                let gate = sigmoid(sharpness * (ratio - 1.0));
                [-4.0 * gate / sharpness * advantage, -4.0 * gate * (1.0 - gate) * ratio * advantage]
            }
            _ => {
                let (free, clipped) = (ratio.min(self.delta) * advantage, ratio.clamp(low, high) * advantage);
                let moves = if free <= clipped { ratio <= self.delta } else { (low..=high).contains(&ratio) };
                [-free.min(clipped), if moves { -ratio * advantage } else { 0.0 }]
            }
        }
    }

    /// How much likelier each token of an answer is than when it was written.
    fn ratios(&self, rows: &LossRows<'_>, targets: Range<usize>) -> Vec<f64> {
        let logs = Self::above_written(rows, &targets);
        if logs.is_empty() {
            return vec![1.0; targets.len()];
        }
        match self.level {
            ImportanceSamplingLevel::Token => logs.into_iter().map(f64::exp).collect(),
            ImportanceSamplingLevel::Sequence => vec![mean(&logs).exp(); logs.len()],
        }
    }

    /// By how much likelier each token of an answer is than when it was written, in nats; empty where that is not known.
    fn above_written(rows: &LossRows<'_>, targets: &Range<usize>) -> Vec<f64> {
        let written = rows.written.get(targets.clone()).unwrap_or_default().iter();
        let now = rows.log_probabilities.get(targets.clone()).unwrap_or_default();
        now.iter().zip(written).map(|(now, then)| f64::from(*now) - f64::from(*then)).collect()
    }

    /// What "vespo" multiplies an answer's slope by: 1 for one that is as likely as when it was written.
    fn weight(&self, logs: &[f64], advantage: f64) -> f64 {
        let [k, lambda] = self.vespo[usize::from(advantage < 0.0)];
        let log = logs.iter().map(|log| log.clamp(-20.0, 20.0)).sum::<f64>().clamp(1e-8_f64.ln(), 20.0);
        let lambda = lambda.max(1e-4);
        (lambda + k * log - lambda * log.exp()).exp()
    }

    /// Which tokens are followed; empty for all.
    #[expect(clippy::cast_possible_truncation, reason = "what was f32 before")]
    fn followed(&self, entropies: &[f32]) -> Vec<bool> {
        let entropies: Vec<f64> = entropies.iter().copied().map(f64::from).collect();
        let Some(least) = quantile(&entropies, 1.0 - self.top_entropy) else { return Vec::new() };
        // In f32, as TRL's: rounded otherwise, a quantile that is one of them might leave that one out.
        entropies.into_iter().map(|entropy| entropy as f32 >= least as f32).collect()
    }

    /// Reports how many ratios are beyond their bounds.
    fn report(&self, ratio: f64, advantage: f64, figures: &mut ObjectiveFigures) {
        let is_low = ratio < self.bounds[0] && advantage < 0.0;
        let is_high = ratio.min(self.delta) > self.bounds[1] && advantage > 0.0;
        for (mean, is_clipped) in [
            (&mut figures.clip_ratio_low_mean, is_low),
            (&mut figures.clip_ratio_high_mean, is_high),
            (&mut figures.clip_ratio_region_mean, is_low || is_high),
        ] {
            *mean += Mean::of(f64::from(u8::from(is_clipped)));
        }
    }
}

impl Objective for Grpo {
    fn needs(&self) -> Needs {
        let reference = (self.beta > 0.0).then_some(OfReference::Tokens);
        let of_logarithms = matches!(self.loss, LossType::Cispo | LossType::Vespo);
        let log_probabilities = reference.is_some() || self.reuses || of_logarithms;
        let of_logits = (self.top_entropy < 1.0).then_some(OfLogits::Entropy);
        Needs { log_probabilities, reference, of_logits, temperature: self.temperature, ..Needs::default() }
    }

    fn weigh(&self, rows: &LossRows<'_>) -> Weighed {
        let num_tokens = as_f64(rows.num_targets());
        let count = match self.loss {
            LossType::Bnpo => 1.0,
            LossType::Grpo | LossType::Luspo | LossType::Sapo => as_f64(rows.targets.len()),
            LossType::DrGrpo => as_f64(rows.targets.len() * self.max_completion_length),
            _ => num_tokens,
        };
        let of_sequence = self.level == ImportanceSamplingLevel::Sequence;
        let followed = self.followed(rows.of_logits);
        let is_followed =
            |target: usize| followed.get(target).map_or(1.0, |is_followed| f64::from(u8::from(*is_followed)));
        let (mut weights, mut total) = (Weights::new(rows), 0.0);
        let mut figures = ObjectiveFigures::default();
        for (answer, targets) in rows.answers.iter().zip(rows.targets) {
            let share = match self.loss {
                LossType::Bnpo => 1.0 / num_tokens,
                LossType::Grpo | LossType::Sapo => 1.0 / as_f64(targets.len().max(1)),
                _ => 1.0,
            };
            let advantage = f64::from(answer.advantage);
            let ratios = self.ratios(rows, targets.clone());
            let number = |numbers: &[f32], at: usize| numbers.get(at).map_or(0.0, |number| f64::from(*number));
            let above = |at| number(rows.log_probabilities, at) - number(rows.reference, at);
            let divergence = |at| (-above(at)).exp() + above(at) - 1.0;
            let of_answer = mean(&targets.clone().map(divergence).collect::<Vec<_>>());
            let logs = Self::above_written(rows, targets);
            // What is worse, and has become unlikely enough.
            let is_left = advantage < 0.0 && -mean(&logs) > self.off_policy;
            let weight = (self.loss == LossType::Vespo).then(|| advantage * self.weight(&logs, advantage));
            // The ratio of a sequence moves with all of its tokens.
            let moves_all = of_sequence && self.loss != LossType::Cispo;
            let share_followed = moves_all.then(|| mean(&targets.clone().map(is_followed).collect::<Vec<_>>()));
            for (target, ratio) in targets.clone().zip(ratios) {
                let log_probability = number(rows.log_probabilities, target);
                let [mut loss, mut slope] = match weight {
                    _ if is_left => [0.0; 2],
                    Some(weight) => [-weight * log_probability, -weight],
                    None => self.of_token(ratio, advantage, log_probability),
                };
                loss *= is_followed(target);
                slope *= share_followed.unwrap_or(is_followed(target));
                if self.beta > 0.0 {
                    // The divergence is multiplied by the ratio, as in TRL: this is the slope of the product.
                    let of_ratio = if of_sequence { of_answer } else { divergence(target) };
                    loss += self.beta * ratio * divergence(target);
                    slope += self.beta * ratio * (1.0 - (-above(target)).exp() + of_ratio);
                    figures.kl += Mean::of(ratio * divergence(target));
                }
                total += share * loss;
                weights.add(target..target + 1, share * slope);
                let counts = !rows.written.is_empty() && !matches!(self.loss, LossType::Sapo | LossType::Vespo);
                if counts && (!of_sequence || target == targets.start) {
                    self.report(ratio, advantage, &mut figures);
                }
            }
        }
        Weighed { count, ..weights.weighed(total, 0, figures) }
    }
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / as_f64(numbers.len().max(1))
}
