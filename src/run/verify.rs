//! The adapter on disk is read back and must give what the one in memory gives.

use std::path::Path;

use crate::data::batch::{Batch, Document};
use crate::export::{ExportError, adapter_set, read_adapter};
use crate::lora::AdapterSet;
use crate::model::llama::Llama;

/// Tokens whose logits are compared.
const NUM_TOKENS: usize = 16;

/// Whether the adapter in `folder` gives the logits of `adapters`, bit for bit, on tokens from all over the vocabulary.
///
/// Targets, rank and scale are taken from the file's own config, so that this holds them too.
///
/// # Errors
///
/// An adapter that cannot be read, or that is not of this model.
pub(super) fn adapter_reloads(folder: &Path, model: &Llama, adapters: &AdapterSet) -> Result<bool, ExportError> {
    let saved = read_adapter(folder)?;
    let selection = saved.config.select(model.config.num_hidden_layers).map_err(|errors| {
        let problems = errors.iter().map(ToString::to_string).collect();
        ExportError::AdapterTensors { path: folder.to_owned(), expected_by: "its own config", problems }
    })?;
    let reloaded = adapter_set(folder, saved.weights, &selection, &model.config, 0.0, &model.device())?;
    let batch = batch_of_many_tokens(model.config.vocab_size);
    let logits = |adapters: &AdapterSet| -> Vec<f32> {
        // What cannot be read is empty, and then not equal.
        model.logits(&batch, adapters).into_data().try_to_vec().unwrap_or_default()
    };
    let (ours, theirs) = (logits(adapters), logits(&reloaded));
    let is_same = ours.iter().map(|logit| logit.to_bits()).eq(theirs.iter().map(|logit| logit.to_bits()));
    Ok(is_same && !ours.is_empty())
}

/// One row of tokens, evenly spaced in the vocabulary.
fn batch_of_many_tokens(vocab_size: usize) -> Batch {
    let id = |index: usize| u32::try_from(index * vocab_size / NUM_TOKENS).unwrap_or_default();
    Batch {
        row_length: NUM_TOKENS,
        input_ids: (0..NUM_TOKENS).map(id).collect(),
        documents: vec![Document { start: 0, len: NUM_TOKENS }],
        targets: Vec::new(),
        sources: Vec::new(),
    }
}
