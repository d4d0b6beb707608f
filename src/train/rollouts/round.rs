//! Answers that a number of steps train on, one or more times.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::advantages::divisor;
use crate::data::batch::Batch;
use crate::measure::figures::{ObjectiveFigures, Rollout, Spread};

/// A micro-batch of answers, the [numbers](ObjectiveFigures::numbers) of their rewards, what they got of each rule or function, those
/// that are in no micro-batch, and what the advantages of all are still to be divided by the standard deviation of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answers(
    pub Batch,
    pub Vec<f64>,
    #[serde(default)] pub BTreeMap<String, Spread>,
    #[serde(default)] pub Vec<LeftOut>,
    #[serde(default)] pub Spread,
);

/// An answer that is in no micro-batch, as it has no gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Its tokens that would carry loss.
    pub targets: usize,
    /// Its tokens and those of its prompt.
    pub tokens: usize,
}

/// What a step trains on.
#[derive(Debug, Default)]
pub struct StepAnswers {
    /// Its micro-batches.
    pub batches: Vec<Batch>,
    /// What is reported of them.
    pub figures: ObjectiveFigures,
    /// What they got of each rule or function.
    pub rewards: BTreeMap<String, Spread>,
    /// Answers that are in none of them.
    pub left_out: Vec<LeftOut>,
}

/// Answers that a number of steps train on, one or more times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// The micro-batches of each step.
    steps: Vec<Vec<Answers>>,
    /// Number of steps that have trained on them.
    num_done: usize,
    /// How often each is used.
    num_iterations: usize,
}

/// Divides the advantages of answers that were written together, and those that are recorded of them, by what is left to divide by.
pub fn scale_advantages(answered: &mut [(usize, Answers)], recorded: &mut [(usize, Vec<Rollout>)]) {
    let mut of_round = Spread::default();
    answered.iter().for_each(|(_, Answers(.., spread))| of_round += *spread);
    let divisor = divisor(of_round);
    for answer in answered.iter_mut().flat_map(|(_, Answers(batch, ..))| &mut batch.answers) {
        #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
        let advantage = (f64::from(answer.advantage) / divisor) as f32;
        answer.advantage = advantage;
    }
    recorded.iter_mut().flat_map(|(_, rollouts)| rollouts).for_each(|rollout| rollout.advantage /= divisor);
}

impl Round {
    /// Divides micro-batches, which come with their numbers, among steps of `per_step`.
    #[must_use]
    pub fn new(answered: Vec<(usize, Answers)>, per_step: usize, num_iterations: usize) -> Self {
        let answered: Vec<_> = answered.into_iter().map(|(_, answers)| answers).collect();
        let steps = answered.chunks(per_step.max(1)).map(<[Answers]>::to_vec).collect();
        Self { steps, num_done: 0, num_iterations }
    }

    /// What the next step trains on.
    #[must_use]
    pub fn next_step(&self) -> StepAnswers {
        let mut all = StepAnswers::default();
        for Answers(batch, figures, rewards, left_out, _) in &self.steps[self.num_done % self.steps.len()] {
            all.batches.push(batch.clone());
            all.left_out.extend(left_out);
            all.figures += ObjectiveFigures::of_numbers(figures);
            rewards.iter().for_each(|(name, spread)| *all.rewards.entry(name.clone()).or_default() += *spread);
        }
        all
    }

    /// What is left after that step.
    #[must_use]
    pub fn after_step(self) -> Option<Self> {
        let num_done = self.num_done + 1;
        (num_done < self.steps.len() * self.num_iterations).then_some(Self { num_done, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::batch::Answer;

    #[test]
    fn advantages_are_divided_by_the_deviation_of_all_micro_batches_that_were_written_together() {
        let answers = |rewards: [f64; 2]| {
            let advantages = [(rewards[0] - rewards[1]) / 2.0, (rewards[1] - rewards[0]) / 2.0];
            let answer = |advantage: f64| Answer { advantage: advantage as f32, ..Answer::default() };
            let batch = Batch { answers: advantages.map(answer).into(), ..Batch::default() };
            let recorded = advantages.map(|advantage| Rollout { advantage, ..Rollout::default() });
            let answers = Answers(batch, Vec::new(), BTreeMap::new(), Vec::new(), rewards.into_iter().collect());
            ((0, answers), (0, Vec::from(recorded)))
        };
        let (mut answered, mut recorded): (Vec<_>, Vec<_>) =
            [answers([1.0, 0.0]), answers([3.0, 0.0])].into_iter().unzip();
        scale_advantages(&mut answered, &mut recorded);
        // Of 1, 0, 3, 0 the squares of what is off the mean add up to 6.
        let divisor = 2.0_f64.sqrt() + 1e-4;
        let found = answered.iter().map(|(_, Answers(batch, ..))| f64::from(batch.answers[0].advantage));
        let noted = recorded.iter().map(|(_, rollouts)| rollouts[0].advantage);
        for (found, expected) in found.chain(noted).zip([0.5, 1.5, 0.5, 1.5]) {
            assert!((found - expected / divisor).abs() < 1e-6, "{found}");
        }
    }
}
