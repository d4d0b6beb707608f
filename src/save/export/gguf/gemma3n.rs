//! Gemma 3n as llama.cpp describes it.

use super::file::{Tensor, list, refused};
use crate::schema::Problem;
use crate::spec::gguf::gemma3n::{CUT, LOGIT_CAP, NUM_MAKING, WIDTHS};
use crate::spec::gguf::{WINDOW, WINDOW_PATTERN};
use crate::spec::{Attention, Block, Gated, ModelConfig, SublayerKind};
use crate::util::gguf::{List, Value};

/// How many standard deviations above the mean a gate begins that is cut there.
const CUTOFF: f64 = 1.644_853_6;

/// Its keys besides those of other families.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "the file has f32, and counts below 2^32")]
pub(super) fn keys(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>, Problem> {
    let Some(streams) = config.streams() else { return Ok(Vec::new()) };
    let attentions: Vec<&Attention> = config.blocks.iter().filter_map(Block::attention).collect();
    let gated: Vec<&Gated> = config.blocks.iter().filter_map(Block::gated).collect();
    let is_local: Vec<bool> = attentions.iter().map(|attention| attention.heads.window.is_some()).collect();
    let num_sharing = attentions.iter().filter(|attention| attention.key_value_layer().is_some()).count();
    let as_taken = |(attention, local): (&&Attention, &bool)| {
        attention.key_value_layer().is_none_or(|layer| layer + 1 + usize::from(*local) == NUM_MAKING)
    };
    let mut ranks = config.blocks.iter().flat_map(|block| &block.sublayers).filter_map(|it| match &it.kind {
        SublayerKind::Laurel(laurel) => Some(laurel.rank),
        _ => None,
    });
    let [num_streams, rank, width] = WIDTHS;
    let cutoff = |layer| (layer < CUT.0).then_some(CUTOFF);
    let is_cut = |(layer, gated): (usize, &&Gated)| match (gated.cutoff, cutoff(layer)) {
        (Some(found), Some(usual)) => (found - usual).abs() < 1e-6,
        (found, usual) => found == usual,
    };
    let window = attentions.iter().find_map(|attention| attention.heads.window);
    let what = if streams.count != num_streams {
        "an `altup_num_inputs` other than 4"
    } else if ranks.any(|found| found != rank) {
        "a `laurel_rank` other than 64"
    } else if config.layer_inputs.is_none_or(|inputs| inputs.width != width) {
        "a `hidden_size_per_layer_input` other than 256"
    } else if attentions.len() != NUM_MAKING + num_sharing || !attentions.iter().zip(&is_local).all(as_taken) {
        "keys and values of other layers than the 19th and 20th"
    } else if gated.iter().any(|it| it.intermediate_size != gated[0].intermediate_size) {
        "feed-forward layers of different widths"
    } else if !gated.iter().enumerate().all(is_cut) {
        "this `activation_sparsity_pattern`"
    } else if config.logit_soft_cap != Some(LOGIT_CAP) {
        "this `final_logit_softcapping`"
    } else if window.is_none() {
        "no layers with a window"
    } else {
        let counts = [
            ("attention.shared_kv_layers", num_sharing),
            ("embedding_length_per_layer_input", width),
            ("altup.active_idx", 0),
            ("altup.num_inputs", num_streams),
            (WINDOW, window.unwrap_or(0)),
        ];
        let cutoffs = gated.iter().map(|gated| gated.cutoff.map_or(f32::NEG_INFINITY, |cutoff| cutoff as f32));
        let others = [
            (WINDOW_PATTERN, list(List::Bool(is_local))),
            ("activation_sparsity_scale", list(List::F32(cutoffs.collect()))),
            ("final_logit_softcapping", Value::F32(LOGIT_CAP as f32)),
            ("rope.freq_base_swa", Value::F32(config.ropes[1].theta as f32)),
        ];
        return Ok(counts.map(|(key, count)| (key, Value::U32(count as u32))).into_iter().chain(others).collect());
    };
    refused(config, what)
}

/// Keys and values of layers that use those of others, which llama.cpp reads and does not use: zeros.
pub(super) fn unused<'a>(config: &ModelConfig) -> Vec<Tensor<'a>> {
    let layers = config.blocks.iter().enumerate().filter(|_| config.streams().is_some());
    let layers = layers.filter_map(|(layer, block)| Some((layer, block.attention()?)));
    let sharing = layers.filter(|(_, attention)| attention.key_value_layer().is_some());
    let zeros = sharing.flat_map(|(layer, attention)| {
        let (rows, hidden, head) = (attention.heads.key_value_width(), config.hidden_size, attention.heads.head_dim);
        let shapes = [("attn_k", vec![rows, hidden]), ("attn_k_norm", vec![head]), ("attn_v", vec![rows, hidden])];
        shapes.map(|(module, shape)| {
            let num = shape.iter().product();
            Tensor::of(format!("blk.{layer}.{module}.weight"), shape, move || vec![0.0; num])
        })
    });
    zeros.collect()
}
