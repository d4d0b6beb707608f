//! Answers as sequences of target tokens, and the slopes of a loss with respect to their log-probabilities.

use std::ops::Range;

use super::{LossRows, Weighed};
use crate::measure::figures::{Mean, ObjectiveFigures};
use crate::util::stats::as_f64;

/// -log sigmoid(x)
pub(super) fn softplus_of_minus(x: f64) -> f64 {
    (-x.abs()).exp().ln_1p() + (-x).max(0.0)
}

/// 1 / (1 + e^-x)
pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// One answer: its target tokens, and sums over them.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    /// Its target tokens among those of the micro-batch, without those of the prompt.
    pub(super) targets: Range<usize>,
    /// The same with the prompt's.
    pub(super) with_prompt: Range<usize>,
    /// From this one on, its tokens weigh `tail_weight`.
    tail: usize,
    tail_weight: f64,
    /// Number of its tokens.
    pub(super) count: f64,
    /// Log-probability.
    pub(super) policy: f64,
    /// Log-probability by the reference; 0 without one.
    pub(super) reference: f64,
}

impl Sequence {
    /// Document `index`; its tokens beyond the first `head` weigh `tail_weight`.
    fn new(rows: &LossRows<'_>, index: usize, (head, tail_weight): (usize, f64)) -> Self {
        let with_prompt = rows.targets[index].clone();
        let prompt = rows.answers.get(index).map_or(0, |answer| answer.prompt_targets);
        let targets = with_prompt.start + prompt..with_prompt.end;
        let tail = targets.end.min(targets.start.saturating_add(head));
        let sum = |log_probabilities: &[f32]| {
            let sum = |range: Range<usize>| {
                log_probabilities.get(range).unwrap_or_default().iter().map(|p| f64::from(*p)).sum::<f64>()
            };
            sum(targets.start..tail) + tail_weight * sum(tail..targets.end)
        };
        Self {
            count: as_f64(targets.len().max(1)),
            policy: sum(rows.log_probabilities),
            reference: rows.reference_answers.get(index).copied().unwrap_or_else(|| sum(rows.reference)),
            tail,
            tail_weight,
            targets,
            with_prompt,
        }
    }

    /// The sequence of every document.
    pub(super) fn all(rows: &LossRows<'_>) -> Vec<Self> {
        (0..rows.targets.len()).map(|index| Self::new(rows, index, (usize::MAX, 1.0))).collect()
    }

    /// By how much the log-probability is above the reference's.
    pub(super) fn log_ratio(&self) -> f64 {
        self.policy - self.reference
    }

    /// Log-probability of a token, in the mean.
    pub(super) fn mean(&self) -> f64 {
        self.policy / self.count
    }

    /// How likely the model is to write the answer, a token of it in the mean, over how likely it is to write anything twice.
    pub(super) fn weight(&self, rows: &LossRows<'_>) -> f64 {
        let sum = |numbers: &[f32]| numbers[self.targets.clone()].iter().map(|number| f64::from(*number)).sum::<f64>();
        ((sum(rows.log_probabilities) - sum(rows.of_logits)) / self.count).exp()
    }

    /// Gives the tokens the slope of a loss with respect to the log-probability.
    pub(super) fn add_slope(&self, slope: f64, weights: &mut Weights) {
        weights.add(self.targets.start..self.tail, slope);
        weights.add(self.tail..self.targets.end, slope * self.tail_weight);
    }
}

/// A chosen and a rejected answer.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub(super) chosen: Sequence,
    pub(super) rejected: Sequence,
}

impl Pair {
    /// The pairs of a micro-batch. Tokens by which one answer is longer than the other weigh `ld_alpha`.
    pub(super) fn all(rows: &LossRows<'_>, ld_alpha: Option<f64>) -> Vec<Self> {
        let pair = |index: usize| {
            let length = |index: usize| Sequence::new(rows, index, (usize::MAX, 1.0)).targets.len();
            let tail = ld_alpha.map_or((usize::MAX, 1.0), |alpha| (length(index).min(length(index + 1)), alpha));
            Self { chosen: Sequence::new(rows, index, tail), rejected: Sequence::new(rows, index + 1, tail) }
        };
        (0..rows.targets.len() / 2).map(|number| pair(2 * number)).collect()
    }
}

/// The weight of every target token of a micro-batch.
pub(super) struct Weights(Vec<f32>);

impl Weights {
    pub(super) fn new(rows: &LossRows<'_>) -> Self {
        Self(vec![0.0; rows.num_targets()])
    }

    /// Adds the slope of a loss with respect to the log-probabilities of some tokens, which are minus their cross-entropies.
    #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
    pub(super) fn add(&mut self, targets: Range<usize>, slope: f64) {
        self.0[targets].iter_mut().for_each(|weight| *weight -= slope as f32);
    }

    /// Adds `factor` times the mean cross-entropy of some tokens; returns the mean.
    pub(super) fn add_cross_entropy(&mut self, rows: &LossRows<'_>, targets: &[Range<usize>], factor: f64) -> f64 {
        let count = as_f64(targets.iter().map(ExactSizeIterator::len).sum::<usize>().max(1));
        let mut sum = 0.0;
        for range in targets {
            sum -= rows.log_probabilities[range.clone()].iter().map(|p| f64::from(*p)).sum::<f64>();
            self.add(range.clone(), -factor / count);
        }
        sum / count
    }

    #[expect(clippy::large_types_passed_by_value, reason = "the result holds it")]
    pub(super) fn weighed(self, loss: f64, count: usize, figures: ObjectiveFigures) -> Weighed {
        Weighed { loss: Some(loss), count: as_f64(count), weights: Some(self.0), figures }
    }
}

/// The figures of pairs with the rewards `[chosen, rejected]` and log-probabilities likewise.
pub(super) fn figures(pairs: impl Iterator<Item = ([f64; 2], [f64; 2])>) -> ObjectiveFigures {
    let mut figures = ObjectiveFigures::default();
    for ([good, bad], [logp_good, logp_bad]) in pairs {
        for (mean, value) in [
            (&mut figures.rewards_chosen, good),
            (&mut figures.rewards_rejected, bad),
            (&mut figures.rewards_accuracies, f64::from(u8::from(good > bad))),
            (&mut figures.rewards_margins, good - bad),
            (&mut figures.logps_chosen, logp_good),
            (&mut figures.logps_rejected, logp_bad),
        ] {
            *mean += Mean::of(value);
        }
    }
    figures
}
