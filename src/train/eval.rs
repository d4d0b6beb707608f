//! Evaluation: the loss of the evaluation rows, summed over tokens without dropout, and sample texts of the model.

use std::sync::Arc;
use std::time::Instant;

use super::loss::LossSum;
use super::rollouts::{Draw, RolloutError, Rollouts};
use super::step::TrainStep;
use super::stop::Stop;
use super::task::Score;
use crate::config::EvalConfig;
use crate::data::dataset::Dataset;
use crate::data::error::DataError;
use crate::generate::{GenerateError, Generator};
use crate::measure::metrics::{EvalMetrics, Sample};

/// Why an evaluation failed.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A row cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A prompt could not be answered, or its answer judged.
    #[error(transparent)]
    Rollout(#[from] RolloutError),
}

/// Loss over all target tokens of the evaluation rows, of several ranks of this one's; `None` where it was stopped early. Prompts
/// alone are answered with `rollouts`, and have rewards, too.
///
/// This is a sum over tokens, not a mean over micro-batches, so a short micro-batch weighs less. `progress` gets the
/// number of finished micro-batches and the total.
///
/// # Errors
/// A row that cannot be read; an answer that cannot be judged.
pub fn eval_loss(
    step: &TrainStep,
    data: &Dataset,
    rollouts: Option<&mut Rollouts>,
    eval: &EvalConfig,
    stop: &Stop,
    mut progress: impl FnMut(usize, usize),
) -> Result<Option<LossSum>, EvalError> {
    let mut rollouts = rollouts;
    let (micro_batch_size, max_batches) = (step.config().micro_batch_size, eval.max_batches);
    let num_batches = data.num_eval_batches(micro_batch_size, max_batches);
    let batches = data.eval_batches(micro_batch_size, max_batches)?.until(|| stop.requested());
    let mut total = LossSum::default();
    let (rank, num_ranks) = step.rank();
    for (done, loaded) in batches.enumerate() {
        // Of several ranks, each takes every so many of them.
        if done % num_ranks != rank {
            loaded?;
            continue;
        }
        progress(done, num_batches);
        if stop.requested() {
            return Ok(None);
        }
        let mut batch = loaded?.batch;
        if let Some(rollouts) = &mut rollouts {
            let prompts = [(Draw::Evaluation(done as u64), batch)];
            let answered = rollouts.answer(step, data, &prompts, &|| stop.requested())?;
            let Some(answered) = answered.and_then(|mut round| round.answers.pop()) else { return Ok(None) };
            total.figures += answered.figures;
            batch = answered.batch;
        }
        if batch.targets.is_empty() {
            continue;
        }
        let Some(loss) = stop.unless_requested(|| step.eval_loss(&batch)) else { return Ok(None) };
        total += loss;
    }
    // The micro-batches may have ended early.
    Ok((!stop.requested()).then_some(total))
}

/// The figures of an evaluation that began at `start`; `None` where no token carries loss.
#[must_use]
pub fn figures(
    (step, epoch): (u64, f64),
    total: &LossSum,
    score: Option<&Score>,
    start: Instant,
) -> Option<EvalMetrics> {
    total.mean().map(|eval_loss| EvalMetrics {
        step,
        epoch,
        eval_loss: Some(eval_loss),
        eval_perplexity: total.perplexity(),
        eval_rewards_accuracies: total.figures.rewards_accuracies.value(),
        eval_rewards_margins: total.figures.margin(),
        eval_reward: total.figures.reward.value(),
        eval_reward_std: total.figures.reward_std.value(),
        eval_completion_length: total.figures.completion_length.value(),
        eval_target_tokens: total.target_tokens,
        eval_seconds: start.elapsed().as_secs_f64(),
        eval_score: score.map(|score| score.score),
        eval_score_norm: score.and_then(|score| score.score_norm),
        eval_score_rows: score.map(|score| score.num_rows as u64),
    })
}

/// Continues the prompts of `eval.generate` after `num_steps`, greedily. Prompts are formatted like the rows: with the
/// chat template where these are conversations. `None` where it was stopped.
pub(super) fn samples(
    num_steps: u64,
    step: &TrainStep,
    data: &Dataset,
    prompts: &[String],
    is_stopped: impl Fn() -> bool,
) -> Result<Option<Vec<Sample>>, GenerateError> {
    let (tokenizer, stops) = (data.tokenizer(), data.stops());
    let generator = Generator { model: step.model(), adapters: step.adapters(), tokenizer, stops: &stops };
    let texts = generator.samples(prompts, (data.template(), data.images().map(Arc::as_ref)), is_stopped)?;
    let sample = |(prompt, text): (&String, String)| Sample {
        step: num_steps,
        prompt: prompt.clone(),
        text,
        ..Sample::default()
    };
    Ok(texts.map(|texts| prompts.iter().zip(texts).map(sample).collect()))
}
