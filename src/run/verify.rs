//! Reads the adapter back from disk and compares its output with that of the adapter in memory.

use std::path::Path;

use crate::data::batch::{Batch, Document};
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::save::export::{ExportError, adapter_set, adapter_weights, read_adapter};
use crate::util::faults;

/// Tokens whose logits are compared.
const NUM_TOKENS: usize = 16;

/// Allowed difference of logits on a GPU, relative to the largest: two calls may run different kernels, in half
/// precision too. On the CPU they must be equal.
const GPU_TOLERANCE: f32 = 0.05;

/// Whether the adapter in `folder` has the same numbers as `adapters`, bit for bit, and the same logits, for tokens
/// from the whole vocabulary.
///
/// Targets, rank and scale are read from the file's own config, so this checks the config too.
pub(super) fn adapter_reloads(
    folder: &Path,
    model: &Model,
    adapters: &AdapterSet,
    is_gpu: bool,
) -> Result<bool, ExportError> {
    let saved = read_adapter(folder)?.named_for(&model.config);
    let selection = saved.config.select(&model.config).map_err(|errors| {
        let problems = errors.iter().map(ToString::to_string).collect();
        ExportError::AdapterTensors { path: folder.to_owned(), expected_by: "its own config", problems }
    })?;
    let ids = saved.config.trainable_token_indices.as_deref();
    let has_same_numbers = saved.weights == adapter_weights(adapters);
    let mut reloaded = adapter_set(folder, saved.weights, (&selection, ids), &model.config, 0.0, &model.device())?;
    // A weight that contains its adapter is not given it twice.
    reloaded.iter_mut().zip(adapters.iter()).for_each(|(reloaded, adapter)| reloaded.kind = adapter.kind);
    let batch = batch_of_many_tokens(model.config.vocab_size);
    let logits = |adapters: &AdapterSet| faults::read(model.logits(&batch, adapters), "the logits of the adapter");
    let tolerance = if is_gpu { GPU_TOLERANCE } else { 0.0 };
    Ok(has_same_numbers && are_close(&logits(adapters), &logits(&reloaded), tolerance))
}

/// Whether two lists of numbers differ by at most `tolerance` times the largest number.
fn are_close(ours: &[f32], theirs: &[f32], tolerance: f32) -> bool {
    let largest = ours.iter().fold(0.0_f32, |largest, logit| largest.max(logit.abs()));
    let is_close = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a - b).abs() <= tolerance * largest;
    !ours.is_empty() && ours.len() == theirs.len() && ours.iter().zip(theirs).all(is_close)
}

/// One row of tokens, evenly spaced over the vocabulary.
fn batch_of_many_tokens(vocab_size: usize) -> Batch {
    let id = |index: usize| u32::try_from(index * vocab_size / NUM_TOKENS).unwrap_or_default();
    Batch {
        input_ids: (0..NUM_TOKENS).map(id).collect(),
        row_lengths: vec![NUM_TOKENS],
        documents: vec![Document { start: 0, len: NUM_TOKENS }],
        ..Batch::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_are_equal_on_the_cpu_and_close_on_a_gpu() {
        let (ours, near, far) = ([10.0, -1.0], [10.0, -1.1], [10.0, -2.0]);
        assert!(are_close(&ours, &ours, 0.0) && !are_close(&ours, &near, 0.0));
        assert!(are_close(&ours, &near, GPU_TOLERANCE) && !are_close(&ours, &far, GPU_TOLERANCE));
        assert!(!are_close(&[], &[], 0.0) && !are_close(&ours, &ours[..1], GPU_TOLERANCE));
        assert!(!are_close(&ours, &[10.0, f32::NAN], GPU_TOLERANCE));
    }

    #[test]
    fn the_tokens_are_all_different_and_in_the_vocabulary() {
        let ids = batch_of_many_tokens(100).input_ids;
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]) && ids[NUM_TOKENS - 1] < 100, "{ids:?}");
    }
}
