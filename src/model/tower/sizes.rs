//! What a tower takes in memory, from its shape alone.

use super::MOST_SCORES;
use super::names::Names;
use crate::spec::{Cut, EncoderKind, Grid, Projector, Vision};

const F32: usize = 4;

/// Bytes of the weights of a tower and its projectors, norms and biases apart.
#[must_use]
pub fn weight_bytes(vision: &Vision) -> usize {
    let (encoder, text) = (&vision.encoder, vision.text_size);
    let (hidden, inner) = (encoder.hidden_size, encoder.intermediate_size);
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
    let num_inner = if Names::of(encoder.kind).gate.is_some() { 3 } else { 2 };
    let of_layer = 4 * hidden * hidden + num_inner * hidden * inner;
    let of_encoder = hidden * (3 * encoder.patch_size.pow(2) + num_places) + encoder.num_layers * of_layer;
    let merged = hidden * vision.projector.merge_size().pow(2);
    let of_projector = match vision.projector {
        Projector::Merging { .. } => merged * hidden + hidden * text + text * text,
        Projector::Linear { .. } => merged * text,
        Projector::Normed { inner, .. } => merged * inner + inner * text,
        Projector::Joining { .. } => merged * merged + merged * text,
        Projector::Pooling { .. } | Projector::Standardised { .. } | Projector::Plain { .. } => hidden * text,
        Projector::Gated { inner, .. } => merged * text + text * text + 3 * text * inner,
    };
    F32 * (of_encoder + (1 + vision.deepstack.len()) * of_projector)
}

/// Bytes that an image takes while it is encoded: its pixels, and what a layer holds of its largest piece.
#[must_use]
pub fn encoding_bytes(vision: &Vision, cut: &Cut) -> usize {
    let encoder = &vision.encoder;
    let (hidden, inner) = (encoder.hidden_size, encoder.intermediate_size);
    let area = |[width, height]: [usize; 2]| width * height;
    let whole = cut.sizes.last().copied().map_or(0, area);
    let behind = cut.behind.map_or(0, |(size, _)| area(size));
    let largest = (whole / cut.squares.map_or(1, Grid::count)).max(behind);
    let patches = largest / encoder.patch_size.pow(2);
    let scores = (encoder.num_heads * patches * patches).min(MOST_SCORES);
    let in_attention = 10 * patches * hidden + if encoder.num_layers > 0 { 2 * scores } else { 0 };
    let in_feed_forward = 2 * patches * hidden + 4 * patches * inner;
    // Numbers of all pieces, and twice those of the one that is encoded.
    F32 * (3 * (whole + behind + largest) + in_attention.max(in_feed_forward))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::spec::{ModelConfig, TOWER_PARTS};

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
