//! What a tower takes in memory, from its shape alone.

use super::names::Names;
use crate::ops::plain::attention::both_ways::MOST_SCORES;
use crate::spec::{Cut, EncoderKind, Grid, Projector, Vision};
use crate::util::stats::as_f64;

const F32: usize = 4;

/// Bytes of the weights of a tower and its projectors, norms and biases apart.
#[must_use]
pub fn weight_bytes(vision: &Vision) -> usize {
    let encoder = &vision.encoder;
    let hidden = encoder.hidden_size;
    let num_places = match encoder.kind {
        EncoderKind::Siglip { side }
        | EncoderKind::Siglip2 { side }
        | EncoderKind::InternVit { side, .. }
        | EncoderKind::Glm { side, .. }
        | EncoderKind::Qwen3 { side, .. }
        | EncoderKind::PaddleOcr { side, .. } => side * side,
        EncoderKind::Gemma4 { num_places, .. } | EncoderKind::Gemma4Unified { num_places } => 2 * num_places,
        EncoderKind::Pixtral { .. } | EncoderKind::Qwen2 { .. } | EncoderKind::Qwen2_5 { .. } => 0,
    };
    let of_encoder = hidden * (3 * encoder.patch_size.pow(2) + num_places) + encoder.num_layers * layer_size(vision);
    F32 * (of_encoder + (1 + vision.deepstack.len()) * projector_size(vision))
}

/// Numbers of the matrices of a layer.
fn layer_size(vision: &Vision) -> usize {
    let (hidden, inner) = (vision.encoder.hidden_size, vision.encoder.intermediate_size);
    let num_inner = if Names::of(vision.encoder.kind).gate.is_some() { 3 } else { 2 };
    4 * hidden * hidden + num_inner * hidden * inner
}

/// Numbers of the matrices of a projector.
fn projector_size(vision: &Vision) -> usize {
    let (hidden, text) = (vision.encoder.hidden_size, vision.text_size);
    let merged = hidden * vision.projector.merge_size().pow(2);
    match vision.projector {
        Projector::Merging { .. } => merged * hidden + hidden * text + text * text,
        Projector::Linear { .. } => merged * text,
        Projector::Normed { inner, .. } => merged * inner + inner * text,
        Projector::Joining { .. } => merged * merged + merged * text,
        Projector::Pooling { .. } | Projector::Standardised { .. } | Projector::Plain { .. } => hidden * text,
        Projector::Gated { inner, .. } => merged * text + text * text + 3 * text * inner,
    }
}

/// FLOPs of the products that encode an image: two for every number of a matrix and each patch or token that it is used for, and those
/// of attention.
#[must_use]
pub fn encoding_flops(vision: &Vision, cut: &Cut) -> f64 {
    let encoder = &vision.encoder;
    let area = |[width, height]: [usize; 2]| width * height;
    let whole = cut.sizes.last().copied().map_or(0, area);
    let num_squares = cut.squares.map_or(1, Grid::count);
    let behind = cut.behind.map(|(size, _)| (1, area(size)));
    let of_pieces = [(num_squares, whole / num_squares)].into_iter().chain(behind).map(|(num_pieces, area)| {
        let num_patches = area / encoder.patch_size.pow(2);
        // Patches that see each other, in all layers, one by one.
        let seen: usize = (0..encoder.num_layers)
            .map(|layer| match &encoder.windows {
                Some(windows) if !windows.except.contains(&layer) => num_patches.min(windows.side.pow(2)),
                _ => num_patches,
            })
            .sum();
        let of_patch =
            encoder.hidden_size * (3 * encoder.patch_size.pow(2) + 2 * seen) + encoder.num_layers * layer_size(vision);
        let num_tokens = num_patches / vision.projector.merge_size().pow(2);
        let of_tokens = num_tokens * (1 + vision.deepstack.len()) * projector_size(vision);
        2.0 * as_f64(num_pieces) * (as_f64(num_patches) * as_f64(of_patch) + as_f64(of_tokens))
    });
    of_pieces.sum()
}

/// Bytes that an image takes while it is encoded: its pixels, and what a layer holds of its largest piece. On the CPU, and elsewhere,
/// where scores of attention are held.
#[must_use]
pub fn encoding_bytes(vision: &Vision, cut: &Cut) -> [usize; 2] {
    let encoder = &vision.encoder;
    let (hidden, inner) = (encoder.hidden_size, encoder.intermediate_size);
    let area = |[width, height]: [usize; 2]| width * height;
    let whole = cut.sizes.last().copied().map_or(0, area);
    let behind = cut.behind.map_or(0, |(size, _)| area(size));
    let largest = (whole / cut.squares.map_or(1, Grid::count)).max(behind);
    let patches = largest / encoder.patch_size.pow(2);
    let all_scores = (encoder.num_heads * patches * patches).min(MOST_SCORES);
    let scores = if encoder.num_layers > 0 { 2 * all_scores } else { 0 };
    let in_feed_forward = 2 * patches * hidden + 4 * patches * inner;
    // Numbers of all pieces, and twice those of the one that is encoded.
    let pixels = 3 * (whole + behind + largest);
    [0, scores].map(|scores| F32 * (pixels + (10 * patches * hidden + scores).max(in_feed_forward)))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::spec::{ModelConfig, TOWER_PARTS};

    #[test]
    fn flops_are_two_for_each_number_of_a_matrix_and_patch_or_token_and_those_of_attention() {
        let vision = |family: &str| {
            let folder = std::path::Path::new("tests/golden").join(family);
            let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
            Vision::of_folder(&folder, &config).unwrap().unwrap()
        };
        let flops = |vision: &Vision| {
            let cut = vision.cut([64, 48], None).unwrap();
            (encoding_flops(vision, &cut), cut.sizes.last().copied())
        };
        // Patches of 8 x 8, 48 of them, and 12 tokens; two layers.
        let of_layers = 48 * 2 * (4 * 24 * 24 + 3 * 24 * 40 + 2 * 48 * 24);
        let of_projector = 12 * (96 * 24 + 24 * 32 + 32 * 32);
        let expected = as_f64(2 * (48 * 192 * 24 + of_layers + of_projector));
        assert_eq!(flops(&vision("images-mistral3")), (expected, Some([64, 48])));
        // In two of its three layers, patches see the 16 of their window.
        let windows = vision("images-qwen2_5_vl");
        let (with, size) = flops(&windows);
        let encoder = crate::spec::Encoder { windows: None, ..windows.encoder.clone() };
        assert_eq!(size, Some([64, 48]));
        assert_eq!(flops(&Vision { encoder, ..windows }).0 - with, as_f64(2 * 2 * 48 * (48 - 16) * 2 * 24));
    }

    #[test]
    fn weights_are_counted_to_their_norms_and_biases() {
        let mut num_families = 0;
        for folder in glob::glob("tests/golden/images-*").unwrap() {
            let folder = folder.unwrap();
            let golden: Value = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
            let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
            let vision = Vision::of_folder(&folder, &config).unwrap().unwrap();
            let is_of_tower = |name: &str| {
                let name = name.trim_start_matches("model.");
                name.starts_with("projector.") || TOWER_PARTS.iter().any(|part| name.starts_with(part))
            };
            let tensors = golden["tensors"].as_object().unwrap().iter().filter(|(name, _)| is_of_tower(name));
            let number = |made: &Value| {
                let shape = made["shape"].as_array().unwrap();
                // Frames are added.
                let frames = if shape.len() == 5 { shape[2].as_u64().unwrap() } else { 1 };
                shape.iter().map(|side| side.as_u64().unwrap()).product::<u64>() / frames
            };
            let all: u64 = tensors.clone().map(|(_, made)| number(made)).sum();
            let large: u64 = tensors
                .filter(|(_, made)| made["shape"].as_array().unwrap().len() > 1)
                .map(|(_, made)| number(made))
                .sum();
            let counted = weight_bytes(&vision) as u64 / 4;
            assert!(counted >= large * 95 / 100 && counted <= all, "{}: {counted}, {large} of {all}", folder.display());
            num_families += 1;
        }
        assert!(num_families > 10);
    }
}
