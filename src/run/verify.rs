//! The adapter on disk is read back and must give what the one in memory gives.

use std::path::Path;

use burn::tensor::Tensor;

use crate::data::batch::{Batch, Document};
use crate::export::{ExportError, adapter_set, read_adapter};
use crate::lora::AdapterSet;
use crate::lora::targets::Selection;
use crate::model::llama::Llama;

/// Tokens of the batch whose logits are compared.
const NUM_TOKENS: usize = 16;

/// Whether the adapter in `folder` gives the logits of `adapters`, bit for bit, on the first tokens of `batch`.
///
/// `selection` is found from the file's own config, so that this also holds targets, rank and scale.
///
/// # Errors
///
/// An adapter that cannot be read, or that is not of this model.
pub(super) fn adapter_reloads(
    folder: &Path,
    model: &Llama,
    adapters: &AdapterSet,
    batch: &Batch,
) -> Result<bool, ExportError> {
    let saved = read_adapter(folder)?;
    let selection: Selection =
        saved.config.select(model.config.num_hidden_layers).map_err(|errors| ExportError::AdapterTensors {
            path: folder.to_owned(),
            expected_by: "its own config",
            problems: errors.iter().map(ToString::to_string).collect(),
        })?;
    let reloaded = adapter_set(folder, saved.weights, &selection, &model.config, 0.0, &model.device())?;
    let batch = first_tokens(batch);
    let logits = |adapters: &AdapterSet| -> Vec<f32> {
        let logits: Tensor<2> = model.logits(&batch, adapters);
        logits.into_data().try_to_vec().unwrap_or_default()
    };
    let (ours, theirs) = (logits(adapters), logits(&reloaded));
    let same = ours.len() == theirs.len() && ours.iter().zip(&theirs).all(|(a, b)| a.to_bits() == b.to_bits());
    Ok(same && !ours.is_empty())
}

/// The first tokens of the first document.
fn first_tokens(batch: &Batch) -> Batch {
    let len = batch.documents.first().map_or(0, |document| document.len.min(NUM_TOKENS));
    let start = batch.documents.first().map_or(0, |document| document.start);
    Batch {
        row_length: len,
        input_ids: batch.input_ids[start..start + len].to_vec(),
        documents: vec![Document { start: 0, len }],
        targets: Vec::new(),
        sources: batch.sources.iter().take(1).copied().collect(),
    }
}
