//! The tower of GLM-4.1V, GLM-4.5V and GLM-4.6V.

use super::others::{axial_theta, square};
use super::qwen::{area, encoder, joined};
use super::{Cutting, Encoder, EncoderKind, Projector};
use crate::schema::Section;
use crate::spec::json::activation_named;
use crate::spec::{Activation, ModelConfig};

pub(super) fn tower(json: &mut Section, config: &ModelConfig, cutting: Cutting) -> (Encoder, Projector) {
    let mut tower = json.below("vision_config", "an object");
    let image_size = square(&mut tower, "image_size", 336);
    let patch_size: usize = tower.count("patch_size", 14, 1..=256);
    let kind = EncoderKind::Glm {
        side: image_size / patch_size,
        rope_theta: axial_theta(&mut tower, 1e4),
        has_qkv_bias: tower.boolean("attention_bias", false),
    };
    let activation = activation_named(&mut tower, "hidden_act", Activation::Silu);
    let found = encoder(&mut tower, kind, "hidden_size", [24, 1536, 13_696, 14, 12], activation);
    let (found, projector) = joined(&mut tower, found, "out_hidden_size", config, cutting);
    let projector = Projector::Gated { merge_size: projector.merge_size(), inner: found.intermediate_size };
    // The width of the text is that inside the tower's feed-forward layers.
    let eps = tower.number("rms_norm_eps", 1e-5, 0.0..=1.0);
    (Encoder { intermediate_size: config.hidden_size, eps, ..found }, projector)
}

/// From the file that says how images are resized.
pub(super) fn cutting(json: &mut Section) -> Cutting {
    let cutting = area(json, 2.0, [112 * 112, 28 * 28 * 15_000]);
    let Cutting::Area { side, least, most } = cutting else { return cutting };
    Cutting::Frames { side, least, most }
}
