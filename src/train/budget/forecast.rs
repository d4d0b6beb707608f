//! The number of steps of a run, and the mean size of a step.

use super::flops::StepFlops;
use crate::config::{EvalConfig, ObjectiveConfig, ObjectiveName, TrainConfig, num_evaluations};
use crate::data::batch::Batch;
use crate::data::dataset::{Cursor, Dataset};
use crate::data::error::DataError;
use crate::train::schedule::{repeated, steps_per_epoch, total_steps};
use crate::util::stats::as_f64;

/// The steps of a run, before it starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// Rows that an epoch visits.
    pub rows_per_epoch: usize,
    /// Steps of the whole run.
    pub steps: u64,
    /// Mean number of tokens of a step, without padding.
    pub step_tokens: f64,
    /// Mean FLOPs of a step, including those of padding.
    pub step_flops: f64,
    /// Evaluations of the whole run, and FLOPs of each, without those of samples and scores.
    pub evaluations: (u64, f64),
}

impl Forecast {
    /// The steps of the first epoch, or of the whole run if it is shorter. `is_padded`: the rows of a micro-batch are
    /// computed at one length. `keeps_reference`: later epochs compute the reference no more. Answers that the model writes
    /// are taken to be as long as they may be; what it takes to write them is not counted.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub fn new(
        data: &Dataset,
        train: &TrainConfig,
        objective: &ObjectiveConfig,
        max_length: usize,
        flops: &StepFlops,
        is_padded: bool,
        keeps_reference: bool,
    ) -> Result<Self, DataError> {
        let accumulated = train.gradient_accumulation_steps;
        let per_epoch = usize::try_from(data.batches_per_epoch(train.micro_batch_size)).unwrap_or(usize::MAX);
        let repeated = repeated(per_epoch, accumulated, objective.num_iterations);
        let steps = total_steps(repeated, accumulated, train.num_epochs, train.max_steps);
        let num_batches = per_epoch.min(usize::try_from(steps).unwrap_or(usize::MAX).saturating_mul(accumulated));
        let later = 1.0 - (as_f64(steps_per_epoch(per_epoch, accumulated)) / as_f64(steps.max(1))).min(1.0);
        let mut loader = data.loader(Cursor::default(), train.micro_batch_size)?;
        let (mut tokens, mut computed) = (0, 0.0);
        for _ in 0..num_batches {
            let mut batch = loader.next_batch()?.batch;
            if objective.name == ObjectiveName::Grpo {
                batch = answered(&batch, objective, max_length);
            }
            tokens += batch.num_tokens() as u64;
            computed -= if keeps_reference { later * flops.of_reference(&batch) } else { 0.0 };
            computed += flops.of(&batch) + if is_padded { flops.of_padding(batch.num_padding_tokens()) } else { 0.0 };
        }
        let num_steps = as_f64(steps_per_epoch(num_batches, accumulated).max(1));
        let (step_tokens, step_flops) = (as_f64(tokens) / num_steps, computed / num_steps);
        Ok(Self { rows_per_epoch: data.rows_per_epoch(), steps, step_tokens, step_flops, evaluations: (0, 0.0) })
    }

    /// The same with the evaluations that the recipe asks for.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub fn with_evaluations(
        self,
        data: &Dataset,
        micro_batch_size: usize,
        eval: &EvalConfig,
        flops: &StepFlops,
        is_padded: bool,
    ) -> Result<Self, DataError> {
        if data.num_eval_rows() == 0 {
            return Ok(self);
        }
        let (flops, mut computed) = (flops.of_evaluation(), 0.0);
        for loaded in data.eval_batches(micro_batch_size, eval.max_batches)?.until(|| false) {
            let batch = loaded?.batch;
            computed += flops.of(&batch) + if is_padded { flops.of_padding(batch.num_padding_tokens()) } else { 0.0 };
        }
        let number = num_evaluations(eval.eval_steps, 0, self.steps) + u64::from(eval.eval_on_start);
        Ok(Self { evaluations: (number, computed), ..self })
    }
}

/// The prompts with as many answers as each gets, of the greatest length.
fn answered(prompts: &Batch, objective: &ObjectiveConfig, max_length: usize) -> Batch {
    let mut batch = Batch::default();
    for (document, source) in prompts.documents.iter().zip(&prompts.sources) {
        let mut ids = prompts.input_ids[document.start..][..document.len].to_vec();
        ids.resize((document.len + objective.max_completion_length).min(max_length), 0);
        let carries_loss: Vec<bool> = (0..ids.len()).map(|at| at >= document.len).collect();
        for _ in 0..objective.num_generations {
            batch.push(*source, &ids, &carries_loss);
            batch.row_lengths.push(ids.len());
        }
    }
    batch
}
