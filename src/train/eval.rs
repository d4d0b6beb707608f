//! Evaluation: the loss of the evaluation rows, token by token, with dropout off.

use super::step::{LossSum, TrainStep};
use super::stop::Stop;
use crate::data::error::DataError;
use crate::data::loader::LoadedBatch;

/// Loss over all target tokens of `batches`; `None` where it was stopped before the end.
///
/// A sum over tokens, not a mean over micro-batches: a short one weighs less. `progress` is told how many micro-batches
/// are done.
///
/// # Errors
///
/// A row that cannot be read.
pub fn evaluate(
    step: &TrainStep,
    batches: impl Iterator<Item = Result<LoadedBatch, DataError>>,
    stop: &Stop,
    mut progress: impl FnMut(usize),
) -> Result<Option<LossSum>, DataError> {
    let mut total = LossSum::default();
    for (done, loaded) in batches.enumerate() {
        progress(done);
        if stop.requested() {
            return Ok(None);
        }
        let batch = loaded?.batch;
        if batch.targets.is_empty() {
            continue;
        }
        let LossSum { sum, target_tokens } = step.eval_loss(&batch);
        total.sum += sum;
        total.target_tokens += target_tokens;
    }
    // They may have ended early.
    Ok((!stop.requested()).then_some(total))
}
