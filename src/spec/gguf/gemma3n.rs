//! Gemma 3n as GGUF files describe it, and what goes without saying there.

use serde_json::{Map, Value, json};

use super::{WINDOW, WINDOW_PATTERN, missing};
use crate::schema::Problem;
use crate::util::gguf::GgufFile;

/// Layers that make keys and values; the others use those of the last two of them.
pub const NUM_MAKING: usize = 20;
/// Layers with gates that are cut, the first ones, and the share of them that becomes 0.
pub const CUT: (usize, f64) = (10, 0.95);
/// Residual streams, the width of the ranks beside attention and of layers' own embeddings.
pub const WIDTHS: [usize; 3] = [4, 64, 256];
/// What logits are capped at.
pub const LOGIT_CAP: f64 = 30.0;

/// Adds its keys to those that `config.json` shares with other families.
pub(super) fn read(
    file: &GgufFile,
    key: &dyn Fn(&str) -> String,
    json: &mut Map<String, Value>,
) -> Result<(), Problem> {
    let is_local = file.integers(&key(WINDOW_PATTERN)).ok_or_else(|| missing(file, &key(WINDOW_PATTERN)))?;
    let kinds: Vec<_> =
        is_local.iter().map(|local| if *local == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let share = |layer| if layer < CUT.0 { CUT.1 } else { 0.0 };
    let shares: Vec<_> = (0..is_local.len()).map(share).collect();
    let rows = |name: &str| file.tensors().get(name).and_then(|tensor| tensor.shape.first());
    let local_theta = file.number(&key("rope.freq_base_swa")).unwrap_or(10_000.0);
    let [num_streams, rank, width] = WIDTHS;
    let more = json!({
        "layer_types": kinds,
        "sliding_window": file.integer(&key(WINDOW))?.ok_or_else(|| missing(file, &key(WINDOW)))?,
        "num_kv_shared_layers": is_local.len().saturating_sub(NUM_MAKING),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": rows("per_layer_token_embd.weight"),
        "altup_num_inputs": num_streams,
        "altup_coef_clip": null,
        "laurel_rank": rank,
        "activation_sparsity_pattern": shares,
        "final_logit_softcapping": LOGIT_CAP,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": json["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    });
    json.extend(more.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
    Ok(())
}
