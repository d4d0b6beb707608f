//! Answers that a number of steps train on, one or more times.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::data::batch::Batch;
use crate::measure::figures::{ObjectiveFigures, Spread};

/// A micro-batch of answers, the [numbers](ObjectiveFigures::numbers) of their rewards, what they got of each rule or function, and
/// those that are in no micro-batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answers(
    pub Batch,
    pub Vec<f64>,
    #[serde(default)] pub BTreeMap<String, Spread>,
    #[serde(default)] pub Vec<LeftOut>,
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
        for Answers(batch, figures, rewards, left_out) in &self.steps[self.num_done % self.steps.len()] {
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
