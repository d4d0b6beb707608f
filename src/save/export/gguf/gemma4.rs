//! The layers of Gemma 4 as llama.cpp describes them.

use super::file::{list, refused};
use crate::schema::Problem;
use crate::spec::{Attention, Block, ModelConfig};
use crate::util::gguf::{List, Value};

/// Its keys besides those of other families.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "the file has f32, and counts below 2^32")]
pub(super) fn keys(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>, Problem> {
    if !config.family().is_gemma4() {
        return Ok(Vec::new());
    }
    let attentions: Vec<&Attention> = config.blocks.iter().filter_map(Block::attention).collect();
    let is_local: Vec<bool> = attentions.iter().map(|attention| attention.rope == Some(1)).collect();
    let num_sharing = attentions.iter().filter(|attention| attention.key_value_layer().is_some()).count();
    // They use those of the last two layers before them: a layer with a window, and one without.
    let first = attentions.len() - num_sharing;
    let as_taken = |(attention, local): (&&Attention, &bool)| {
        attention.key_value_layer().is_none_or(|layer| layer + 1 + usize::from(*local) == first)
    };
    if !attentions.iter().zip(&is_local).all(as_taken) {
        return refused(config, "keys and values of other layers than the last two that make them");
    }
    if config.layer_inputs.is_some_and(|inputs| inputs.vocab_size != config.vocab_size) {
        return refused(config, "a `vocab_size_per_layer_input` that is not `vocab_size`");
    }
    let local = attentions.iter().find(|attention| attention.rope == Some(1)).map(|attention| attention.heads);
    let Some((local, window)) = local.and_then(|heads| Some((heads, heads.window?))) else {
        return refused(config, "no layers with a window");
    };
    let counts = [
        ("attention.shared_kv_layers", num_sharing),
        ("embedding_length_per_layer_input", config.layer_inputs.map_or(0, |inputs| inputs.width)),
        ("attention.sliding_window", window),
        ("attention.key_length_swa", local.head_dim),
        ("attention.value_length_swa", local.head_dim),
        ("rope.dimension_count", config.ropes[0].width),
        ("rope.dimension_count_swa", config.ropes[1].width),
    ];
    let cap = config.logit_soft_cap.map(|cap| ("final_logit_softcapping", Value::F32(cap as f32)));
    let others = [
        ("attention.sliding_window_pattern", list(List::Bool(is_local))),
        ("rope.freq_base_swa", Value::F32(config.ropes[1].theta as f32)),
    ];
    Ok(counts.map(|(key, count)| (key, Value::U32(count as u32))).into_iter().chain(others).chain(cap).collect())
}
