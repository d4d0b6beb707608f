//! What the steps of a run will be like: how many, and what each takes in the mean.

use super::config::TrainConfig;
use super::flops::StepFlops;
use super::schedule::{steps_per_epoch, total_steps};
use crate::data::survey::Survey;

/// The steps of a run, before it starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// Steps of the whole run.
    pub steps: u64,
    /// Tokens of a step, padding left out, mean.
    pub step_tokens: f64,
    /// FLOPs that a step computes, mean: those of padding too, where there is any.
    pub step_flops: f64,
}

impl Forecast {
    /// The steps on rows like those of `survey`. `is_padded`: the rows of a micro-batch are computed at the length of the
    /// longest.
    #[must_use]
    pub fn new(survey: &Survey, train: &TrainConfig, flops: &StepFlops, is_padded: bool) -> Self {
        let (mut tokens, mut computed) = (0, 0.0);
        for batch in survey.micro_batches(train.micro_batch_size) {
            tokens += batch.iter().flatten().map(|document| document.tokens).sum::<usize>();
            computed += flops.of_documents(&batch, is_padded);
        }
        let batches = usize::try_from(survey.batches_per_epoch(train.micro_batch_size)).unwrap_or(usize::MAX);
        let accumulated = train.gradient_accumulation_steps;
        // Of the last step of an epoch too, which may be smaller.
        let rows_per_step = as_f64(survey.rows_per_epoch) / as_f64(steps_per_epoch(batches, accumulated).max(1));
        let of_step = rows_per_step / as_f64(survey.num_rows().max(1) as u64);
        Self {
            steps: total_steps(batches, accumulated, train.num_epochs, train.max_steps),
            step_tokens: as_f64(tokens as u64) * of_step,
            step_flops: computed * of_step,
        }
    }

    /// Tokens of the whole run, padding left out.
    #[must_use]
    pub fn tokens(&self) -> f64 {
        as_f64(self.steps) * self.step_tokens
    }
}

#[expect(clippy::cast_precision_loss, reason = "rows, steps and tokens, far below 2^53")]
fn as_f64(count: u64) -> f64 {
    count as f64
}
