//! The towers of Mistral 3, Idefics 3, `InternVL`, Gemma 3 and `PaddleOCR-VL`.

use super::{Cutting, Encoder, EncoderKind, Projector};
use crate::schema::{Section, Value};
use crate::spec::json::activation_named;
use crate::spec::{Activation, ModelConfig};

/// Base of the frequencies of rows and columns.
pub(super) fn axial_theta(tower: &mut Section, default: f64) -> f64 {
    if tower.has("rope_parameters.rope_theta") {
        tower.below("rope_parameters", "an object").number("rope_theta", default, 1.0..=1e15)
    } else {
        tower.number("rope_theta", default, 1.0..=1e15)
    }
}

pub(super) fn mistral3(json: &mut Section, config: &ModelConfig) -> (Encoder, Projector) {
    json.only("vision_feature_layer", "-1, the last layer", |value| value.number() == Some(-1.0));
    let projector = Projector::Merging {
        merge_size: json.count("spatial_merge_size", 2, 1..=16),
        activation: activation_named(json, "projector_hidden_act", Activation::Gelu),
        has_bias: json.boolean("multimodal_projector_bias", false),
        eps: config.rms_norm_eps,
    };
    let mut tower = json.below("vision_config", "an object");
    tower.only("model_type", "\"pixtral\"", |value| value.text() == Some("pixtral"));
    let kind = EncoderKind::Pixtral { rope_theta: axial_theta(&mut tower, 1e4) };
    let patch_size = tower.count("patch_size", 16, 1..=256);
    (encoder(&mut tower, kind, [1024, 4096, 24, 16], patch_size, (Activation::Gelu, 1e-5)), projector)
}

pub(super) fn idefics3(json: &mut Section, cutting: Cutting) -> (Encoder, Projector) {
    let merge_size = json.count("scale_factor", 2, 1..=16);
    let mut tower = json.below("vision_config", "an object");
    let eps = tower.number("layer_norm_eps", 1e-6, 0.0..=1.0);
    let image_size: usize = tower.count("image_size", 224, 1..=1 << 16);
    let patch_size: usize = tower.count("patch_size", 32, 1..=256);
    let side = image_size / patch_size;
    if cutting.square() != Some(image_size) || !side.is_multiple_of(merge_size) {
        tower.problem(
            "image_size",
            "is not that of the squares that images are cut into, of whole tokens: `max_image_size` in the file beside it",
        );
    }
    let kind = EncoderKind::Siglip { side };
    let encoder = encoder(&mut tower, kind, [1152, 3072, 12, 16], patch_size, (Activation::GeluTanh, eps));
    (encoder, Projector::Linear { merge_size })
}

pub(super) fn internvl(json: &mut Section, text_size: usize, cutting: Cutting) -> (Encoder, Projector) {
    json.only("vision_feature_layer", "-1, the last layer", |value| value.number() == Some(-1.0));
    json.only("vision_feature_select_strategy", "\"default\"", |value| value.text() == Some("default"));
    json.only("downsample_ratio", "0.5", |value| value.number() == Some(0.5));
    let merge_size = 2;
    let activation = activation_named(json, "projector_hidden_act", Activation::Gelu);
    let mut tower = json.below("vision_config", "an object");
    tower.only("use_absolute_position_embeddings", "true", |value| *value == Value::Boolean(true));
    let eps = tower.number("layer_norm_eps", 1e-6, 0.0..=1.0);
    let image_size = square(&mut tower, "image_size", 448);
    let patch_size = square(&mut tower, "patch_size", 14);
    let side = image_size / patch_size;
    if cutting.square() != Some(image_size) || !side.is_multiple_of(merge_size) {
        let of = "is not that of the squares that images are cut into, of whole tokens: `size` in the file beside it";
        tower.problem("image_size", of);
    }
    let kind = EncoderKind::InternVit {
        side,
        has_qk_norms: tower.boolean("use_qk_norm", false),
        has_qkv_bias: tower.boolean("attention_bias", false),
        has_rms_norms: tower.any("norm_type", false, "\"layer_norm\" or \"rms_norm\"", |value| match value.text() {
            Some("layer_norm") => Ok(false),
            Some("rms_norm") => Ok(true),
            _ => Err(None),
        }),
        has_last_norm: !tower.boolean("use_mean_pooling", true),
    };
    let encoder = encoder(&mut tower, kind, [1024, 4096, 24, 16], patch_size, (Activation::Gelu, eps));
    (encoder, Projector::Normed { merge_size, inner: text_size, activation, has_norm: true, has_bias: true })
}

pub(super) fn gemma3(json: &mut Section, cutting: Cutting) -> (Encoder, Projector) {
    let num_tokens: usize = json.count("mm_tokens_per_image", 256, 1..=1 << 20);
    let mut tower = json.below("vision_config", "an object");
    let eps = tower.number("layer_norm_eps", 1e-6, 0.0..=1.0);
    let image_size: usize = tower.count("image_size", 224, 1..=1 << 16);
    let patch_size: usize = tower.count("patch_size", 16, 1..=256);
    let (side, tokens) = (image_size / patch_size, num_tokens.isqrt());
    if cutting.square() != Some(image_size) || tokens * tokens != num_tokens || !side.is_multiple_of(tokens) {
        let of = "is not `size` in the file that says how images are resized, or has no whole patches for the square of \
                  `mm_tokens_per_image`";
        tower.problem("image_size", of);
    }
    let kind = EncoderKind::Siglip { side };
    let found = encoder(&mut tower, kind, [768, 3072, 12, 12], patch_size, (Activation::GeluTanh, eps));
    (found, Projector::Pooling { merge_size: side / tokens, eps })
}

pub(super) fn paddleocr(json: &mut Section, cutting: Cutting) -> (Encoder, Projector) {
    let mut tower = json.below("vision_config", "an object");
    let eps = tower.number("layer_norm_eps", 1e-6, 0.0..=1.0);
    let image_size: usize = tower.count("image_size", 384, 1..=1 << 16);
    let patch_size: usize = tower.count("patch_size", 14, 1..=256);
    let merge_size = tower.count("spatial_merge_size", 2, 1..=16);
    if cutting.token_side() != Some(patch_size * merge_size) {
        let of = "and `spatial_merge_size` are others than `patch_size` and `merge_size` in the file that says how images are resized";
        tower.problem("patch_size", of);
    }
    let kind = EncoderKind::PaddleOcr { side: image_size / patch_size, rope_theta: axial_theta(&mut tower, 1e4) };
    let found = encoder(&mut tower, kind, [1152, 4304, 27, 16], patch_size, (Activation::GeluTanh, eps));
    (found, Projector::Joining { merge_size, eps: 1e-5 })
}

/// A side that may be written twice, as that of a square.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "within bounds"
)]
pub(super) fn square(json: &mut Section, key: &'static str, default: usize) -> usize {
    if !matches!(json.value(key), Some(Value::Array(_))) {
        return json.count(key, default, 1..=1 << 16);
    }
    let [height, width] = json.numbers(key, [default as f64; 2], 1.0..=65536.0);
    if height.to_bits() != width.to_bits() || height.fract() > 0.0 {
        json.problem(key, "is not the side of a square, twice");
    }
    height as usize
}

pub(super) fn encoder(
    json: &mut Section,
    kind: EncoderKind,
    defaults: [usize; 4],
    patch_size: usize,
    (activation, eps): (Activation, f64),
) -> Encoder {
    let [hidden, intermediate, layers, heads] = defaults;
    json.only("num_channels", "3", |value| value.number() == Some(3.0));
    let hidden_size: usize = json.count("hidden_size", hidden, 4..=1 << 16);
    let num_heads: usize = json.count("num_attention_heads", heads, 1..=1 << 10);
    // Where places turn queries, rows and columns have half of each head, in pairs.
    let turns =
        matches!(kind, EncoderKind::Pixtral { .. } | EncoderKind::PaddleOcr { .. } | EncoderKind::Gemma4 { .. });
    let parts = if turns { 4 } else { 1 };
    if !hidden_size.is_multiple_of(parts * num_heads) {
        json.problem("hidden_size", "is no such multiple of `num_attention_heads` as the attention needs");
    }
    Encoder {
        kind,
        hidden_size,
        intermediate_size: json.count("intermediate_size", intermediate, 1..=1 << 20),
        num_layers: json.count("num_hidden_layers", layers, 1..=1 << 10),
        num_heads,
        patch_size,
        activation: activation_named(json, "hidden_act", activation),
        eps,
        windows: None,
    }
}
