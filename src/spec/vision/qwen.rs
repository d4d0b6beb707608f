//! The towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

use super::others::axial_theta;
use super::{Cutting, Encoder, EncoderKind, Projector, Windows};
use crate::schema::{Section, Value};
use crate::spec::json::activation_named;
use crate::spec::{Activation, ModelConfig};

/// Added to mean squares and variances in the norms of all of them.
const EPS: f64 = 1e-6;

/// Encoder and projector, and the layers of the encoder that go beside them.
pub(super) fn qwen3(json: &mut Section, config: &ModelConfig, cutting: Cutting) -> ((Encoder, Projector), Vec<usize>) {
    let has_deepstack = config.family().delta_heads.is_none();
    let mut tower = json.below("vision_config", "an object");
    let num_places: usize = tower.count("num_position_embeddings", 2304, 1..=1 << 24);
    let side = num_places.isqrt();
    if side * side != num_places {
        tower.problem("num_position_embeddings", format!("= {num_places} are not the places of a square"));
    }
    let kind = EncoderKind::Qwen3 { side, rope_theta: axial_theta(&mut tower, 1e4) };
    let activation = activation_named(&mut tower, "hidden_act", Activation::GeluTanh);
    let found = encoder(&mut tower, kind, "hidden_size", [27, 1152, 4304, 16, 16], activation);
    let indexes = has_deepstack.then(|| layers(&mut tower, "deepstack_visual_indexes", &[8, 16, 24], found.num_layers));
    let deepstack = indexes.unwrap_or_default();
    (joined(&mut tower, found, "out_hidden_size", config, cutting), deepstack)
}

/// Encoder and projector.
pub(super) fn qwen2_5(json: &mut Section, config: &ModelConfig, cutting: Cutting) -> (Encoder, Projector) {
    let mut tower = json.below("vision_config", "an object");
    let kind = EncoderKind::Qwen2_5 { rope_theta: axial_theta(&mut tower, 1e4) };
    let activation = activation_named(&mut tower, "hidden_act", Activation::Silu);
    let found = encoder(&mut tower, kind, "hidden_size", [32, 3584, 3420, 14, 16], activation);
    let except = layers(&mut tower, "fullatt_block_indexes", &[7, 15, 23, 31], found.num_layers);
    let token = found.patch_size * tower.count("spatial_merge_size", 2, 1..=16);
    let window: usize = tower.count("window_size", 112, 1..=1 << 16);
    if window < token {
        tower.problem("window_size", format!("= {window} pixels have no token of {token}"));
    }
    // Whole tokens.
    let windows = Some(Windows { side: window / token.max(1) * token / found.patch_size, except });
    joined(&mut tower, Encoder { windows, ..found }, "out_hidden_size", config, cutting)
}

/// Encoder and projector. Its `hidden_size` is the width of the language model.
pub(super) fn qwen2(json: &mut Section, config: &ModelConfig, cutting: Cutting) -> (Encoder, Projector) {
    let mut tower = json.below("vision_config", "an object");
    let kind = EncoderKind::Qwen2 { rope_theta: axial_theta(&mut tower, 1e4) };
    tower.only("hidden_act", "\"quick_gelu\"", |value| value.text() == Some("quick_gelu"));
    let hidden_size: usize = tower.count("embed_dim", 1280, 4..=1 << 16);
    let intermediate_size = hidden_size * tower.count("mlp_ratio", 4, 1..=64);
    // Its activation follows from its kind.
    let found = encoder(&mut tower, kind, "embed_dim", [32, 1280, intermediate_size, 14, 16], Activation::Gelu);
    joined(&mut tower, found, "hidden_size", config, cutting)
}

/// Defaults: layers, width, that inside feed-forward layers, pixels on a side of a patch, and heads.
pub(super) fn encoder(
    tower: &mut Section,
    kind: EncoderKind,
    width: &'static str,
    [layers, hidden, intermediate, patch_size, heads]: [usize; 5],
    activation: Activation,
) -> Encoder {
    for key in ["in_channels", "in_chans"] {
        tower.only(key, "3", |value| value.number() == Some(3.0));
    }
    tower.only("temporal_patch_size", "2", |value| value.number() == Some(2.0));
    let hidden_size: usize = tower.count(width, hidden, 4..=1 << 16);
    let num_heads: usize = tower.count("num_heads", heads, 1..=1 << 10);
    // Rows and columns turn half of each head, in pairs.
    if !hidden_size.is_multiple_of(4 * num_heads) {
        tower.problem(width, "is no multiple of 4 times `num_heads`");
    }
    Encoder {
        kind,
        hidden_size,
        intermediate_size: tower.count("intermediate_size", intermediate, 1..=1 << 20),
        num_layers: tower.count("depth", layers, 1..=1 << 10),
        num_heads,
        patch_size: tower.count("patch_size", patch_size, 1..=256),
        activation,
        eps: EPS,
        windows: None,
    }
}

/// `text_width`: the key of the width of the language model.
pub(super) fn joined(
    tower: &mut Section,
    encoder: Encoder,
    text_width: &'static str,
    config: &ModelConfig,
    cutting: Cutting,
) -> (Encoder, Projector) {
    let merge_size = tower.count("spatial_merge_size", 2, 1..=16);
    if cutting.token_side() != Some(encoder.patch_size * merge_size) {
        let of = "and `spatial_merge_size` are others than `patch_size` and `merge_size` in the file that says how images are resized";
        tower.problem("patch_size", of);
    }
    let expected = format!("{}, the width of the language model", config.hidden_size);
    #[expect(clippy::cast_precision_loss, reason = "a width")]
    tower.only(text_width, &expected, |value| value.number() == Some(config.hidden_size as f64));
    (encoder, Projector::Joining { merge_size, eps: EPS })
}

/// Numbers of layers, in order.
#[expect(clippy::cast_precision_loss, reason = "small counts")]
fn layers(tower: &mut Section, key: &'static str, default: &[usize], num_layers: usize) -> Vec<usize> {
    let expected = format!("a list of numbers of layers, each below {num_layers} and above the one before");
    let default: Vec<usize> = default.iter().copied().filter(|layer| *layer < num_layers).collect();
    tower.any(key, default, &expected, |value| {
        let Value::Array(items) = value else { return Err(None) };
        let layer = |number: f64| (0..num_layers).find(|layer| *layer as f64 == number);
        let found: Option<Vec<usize>> = items.iter().map(|item| layer(item.value().number()?)).collect();
        found.filter(|layers| layers.is_sorted_by(|a, b| a < b)).ok_or(None)
    })
}

/// From the file that says how images are resized: its `size` counts pixels.
pub(super) fn area(json: &mut Section, num_frames: f64, [least, most]: [usize; 2]) -> Cutting {
    json.only("temporal_patch_size", &num_frames.to_string(), |value| value.number() == Some(num_frames));
    let side = json.count("patch_size", 14_usize, 1..=256) * json.count("merge_size", 2_usize, 1..=16);
    let mut bound = |old: &'static str, new: &'static str, default: usize| {
        let number = json.below("size", "an object").count(new, default, 1..=1 << 30);
        json.optional_count(old, None, 1..=1 << 30).unwrap_or(number)
    };
    let least = bound("min_pixels", "shortest_edge", least);
    let most = bound("max_pixels", "longest_edge", most);
    if least > most {
        json.problem("size", format!("asks for {least} pixels at least and {most} at most"));
    }
    Cutting::Area { side, least, most }
}
