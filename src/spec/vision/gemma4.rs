//! The towers of Gemma 4, and what its images are in the text.

use super::others::{axial_theta, encoder};
use super::{Cutting, Encoder, EncoderKind, Projector, SeenBothWays};
use crate::schema::{Section, Value};
use crate::spec::json::activation_named;
use crate::spec::{Activation, ModelConfig};

pub(super) fn tower(json: &mut Section, cutting: Cutting) -> (Encoder, Projector) {
    let mut tower = json.below("vision_config", "an object");
    let eps = tower.number("rms_norm_eps", 1e-6, 0.0..=1.0);
    let patch_size: usize = tower.count("patch_size", 16, 1..=256);
    let merge_size: usize = tower.count("pooling_kernel_size", 3, 1..=16);
    let num_places: usize = tower.count("position_embedding_size", 10_240, 1..=1 << 20);
    if !matches!(cutting, Cutting::Budget { side, most } if side == patch_size * merge_size && most * merge_size <= num_places)
    {
        let of = "and `pooling_kernel_size` are others than in the file that says how images are resized, or its `max_soft_tokens` in a \
                  row are more patches than `position_embedding_size`";
        tower.problem("patch_size", of);
    }
    tower.only("attention_bias", "false", |value| matches!(value, Value::Boolean(false) | Value::Null));
    let kind = EncoderKind::Gemma4 {
        num_places,
        rope_theta: axial_theta(&mut tower, 100.0),
        has_bounds: tower.boolean("use_clipped_linears", false),
    };
    let activation = activation_named(&mut tower, "hidden_activation", Activation::GeluTanh);
    let found = encoder(&mut tower, kind, [768, 3072, 16, 12], patch_size, (activation, eps));
    for (key, default, expected) in [("head_dim", 64, found.head_dim()), ("num_key_value_heads", 12, found.num_heads)] {
        let number: usize = tower.count(key, default, 1..=1 << 16);
        if number != expected {
            tower.problem(
                key,
                format!(
                    "= {number} is not supported, expected {expected}: as many keys as queries, over the whole width"
                ),
            );
        }
    }
    let has_statistics = tower.boolean("standardize", false);
    (found, Projector::Standardised { merge_size, eps, has_statistics })
}

/// What Gemma 4 Unified has in place of a tower: norms and a linear layer for every square of pixels.
pub(super) fn unified(json: &mut Section, cutting: Cutting) -> (Encoder, Projector) {
    let mut tower = json.below("vision_config", "an object");
    let eps = tower.number("rms_norm_eps", 1e-6, 0.0..=1.0);
    let side = tower.count("patch_size", 16_usize, 1..=256) * tower.count("pooling_kernel_size", 3_usize, 1..=16);
    let num_places: usize = tower.count("mm_posemb_size", 1120, 1..=1 << 20);
    if !matches!(cutting, Cutting::Budget { side: of_file, most } if of_file == side && most <= num_places) {
        let of = "and `pooling_kernel_size` are others than in the file that says how images are resized, or its `max_soft_tokens` in a \
                  row are more than `mm_posemb_size`";
        tower.problem("patch_size", of);
    }
    let hidden_size = tower.count("mm_embed_dim", 3840, 1..=1 << 16);
    let encoder = Encoder {
        kind: EncoderKind::Gemma4Unified { num_places },
        hidden_size,
        intermediate_size: 0,
        num_layers: 0,
        num_heads: 1,
        patch_size: side,
        activation: Activation::GeluTanh,
        eps: 1e-5,
        windows: None,
    };
    (encoder, Projector::Plain { eps })
}

/// The token whose row of the layers' tables the tokens of an image have, and in which layers they see each other both ways.
pub(super) fn in_text(json: &mut Section, config: &ModelConfig) -> (u32, SeenBothWays) {
    let mut text = json.below("text_config", "an object");
    let table_id = text.count("pad_token_id", 0, 0..config.vocab_size as u64);
    let is_seen = text.value("use_bidirectional_attention").and_then(Value::text) == Some("vision");
    let seen = if is_seen { SeenBothWays::InWindows } else { SeenBothWays::Nowhere };
    (u32::try_from(table_id).unwrap_or(0), seen)
}

/// From the file that says how images are resized.
pub(super) fn cutting(json: &mut Section) -> Cutting {
    let side = json.count("patch_size", 16_usize, 1..=256) * json.count("pooling_kernel_size", 3_usize, 1..=16);
    Cutting::Budget { side, most: json.count("max_soft_tokens", 280, 1..=1 << 16) }
}
