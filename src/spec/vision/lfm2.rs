//! The tower of LFM2-VL.

use super::others::encoder;
use super::{Cutting, Encoder, EncoderKind, Projector, Tiles};
use crate::schema::Section;
use crate::spec::Activation;
use crate::spec::json::activation_named;

pub(super) fn tower(json: &mut Section, cutting: Cutting) -> (Encoder, Projector) {
    json.only("vision_feature_layer", "-1, the last layer", |value| value.number() == Some(-1.0));
    let merge_size: usize = json.count("downsample_factor", 2, 1..=16);
    let projector = Projector::Normed {
        merge_size,
        inner: json.count("projector_hidden_size", 2560, 1..=1 << 20),
        activation: activation_named(json, "projector_hidden_act", Activation::Gelu),
        has_norm: json.boolean("projector_use_layernorm", true),
        has_bias: json.boolean("projector_bias", true),
    };
    let mut tower = json.below("vision_config", "an object");
    tower.only("model_type", "\"siglip2_vision_model\"", |value| value.text() == Some("siglip2_vision_model"));
    let eps = tower.number("layer_norm_eps", 1e-6, 0.0..=1.0);
    let patch_size: usize = tower.count("patch_size", 16, 1..=256);
    if cutting.token_side() != Some(patch_size * merge_size) {
        let of = "and `downsample_factor` are others than `encoder_patch_size` and `downsample_factor` in the file that says how images \
                  are resized";
        tower.problem("patch_size", of);
    }
    let num_places: usize = tower.count("num_patches", 256, 1..=1 << 24);
    let kind = EncoderKind::Siglip2 { side: num_places.isqrt() };
    if num_places.isqrt().pow(2) != num_places {
        tower.problem("num_patches", format!("= {num_places} are not the places of a square"));
    }
    (encoder(&mut tower, kind, [768, 3072, 12, 12], patch_size, (Activation::GeluTanh, eps)), projector)
}

/// From the file that says how images are resized.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "within bounds; whole pixels"
)]
pub(super) fn cutting(json: &mut Section) -> Cutting {
    let token = json.count("encoder_patch_size", 16_usize, 1..=256) * json.count("downsample_factor", 2_usize, 1..=16);
    let [least, most] = [("min_image_tokens", 64), ("max_image_tokens", 256)]
        .map(|(key, default)| json.count(key, default, 1..=1 << 16));
    let [fewest, tiles] = [("min_tiles", 2), ("max_tiles", 10)].map(|(key, default)| json.count(key, default, 1..=64));
    let tolerance = json.number("max_pixels_tolerance", 2.0, 0.0..=1e3);
    let side: usize = json.count("tile_size", 512, 1..=1 << 16);
    if least > most || fewest > tiles {
        let of = format!(
            "to {most} tokens and {fewest} to {tiles} tiles leave none: `min_image_tokens`, `max_image_tokens`, `max_tiles`"
        );
        json.problem("min_tiles", format!("= {fewest}: {least} {of}"));
    }
    if !side.is_multiple_of(token) {
        json.problem("tile_size", format!("= {side} has no whole tokens of {token} pixels"));
    }
    Cutting::Tiles(Tiles {
        token,
        tokens: [least, most],
        most_pixels: ((most * token * token) as f64 * tolerance) as usize,
        side,
        number: (json.boolean("do_image_splitting", true) && tiles > 1).then_some([fewest, tiles]),
        has_whole: json.boolean("use_thumbnail", true),
    })
}
