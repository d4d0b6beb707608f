//! The vision tower of a multimodal model: its shape, what its images are made into, and the tokens that stand for them.

use std::path::Path;

use super::ModelConfig;
use super::block::Activation;
use super::json::activation_named;
use crate::schema::{Problem, Problems, Section, Value, read_json};

mod cut;
#[cfg(test)]
mod tests;

pub use cut::{Cut, Cutting, Grid};

/// A vision tower and what joins it to the language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Vision {
    /// What makes hidden states of an image.
    pub encoder: Encoder,
    /// What makes features of them.
    pub projector: Projector,
    /// Width of the language model.
    pub text_size: usize,
    /// The token that a feature takes the place of.
    pub image_token_id: u32,
    /// What becomes of colors.
    pub pixels: Pixels,
    /// What is seen of an image.
    pub cutting: Cutting,
}

/// A transformer over the patches of an image, each of which sees all.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoder {
    /// Its kind.
    pub kind: EncoderKind,
    /// Its width.
    pub hidden_size: usize,
    /// Width inside its feed-forward layers.
    pub intermediate_size: usize,
    /// Number of its layers.
    pub num_layers: usize,
    /// Heads of its attention.
    pub num_heads: usize,
    /// Pixels on a side of a patch.
    pub patch_size: usize,
    /// Of its feed-forward layers.
    pub activation: Activation,
    /// Added to the mean squares in its norms.
    pub eps: f64,
}

/// What encoders differ in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EncoderKind {
    /// RMSNorm, gated feed-forward layers, no biases; rows and columns turn queries and keys (Pixtral, Agrawal et al., 2024).
    Pixtral {
        /// Base of the frequencies of rows and columns.
        rope_theta: f64,
    },
    /// Layer norms, the last behind all layers, and biases; a learned vector for each place (`SigLIP`, Zhai et al., 2023).
    Siglip {
        /// Places on a side: images have as many patches.
        side: usize,
    },
    /// The same with a vector before the patches that is dropped behind them, and factors of what each layer adds (`InternViT`,
    /// Chen et al., 2023).
    InternVit {
        /// Places on a side: images have as many patches.
        side: usize,
        /// Whether queries and keys are normed, over all heads.
        has_qk_norms: bool,
        /// Whether they and values have biases.
        has_qkv_bias: bool,
        /// Whether its norms are RMSNorm.
        has_rms_norms: bool,
        /// Whether there is a layer norm behind all layers.
        has_last_norm: bool,
    },
}

/// What becomes of the patches that make a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Projector {
    /// A norm, a linear layer over the patches of a token, then two layers (Mistral Small 3.1).
    Merging {
        /// Patches on a side of a token.
        merge_size: usize,
        /// Between the two layers.
        activation: Activation,
        /// Whether these add biases.
        has_bias: bool,
        /// Added to the mean square in the norm.
        eps: f64,
    },
    /// A linear layer over the patches of a token (Idefics 3).
    Linear {
        /// Patches on a side of a token.
        merge_size: usize,
    },
    /// A norm and two layers over the patches of a token (`InternVL`).
    Normed {
        /// Patches on a side of a token.
        merge_size: usize,
        /// Between the two layers.
        activation: Activation,
    },
}

/// How an image is resized and scaled.
#[derive(Clone, Debug, PartialEq)]
pub struct Pixels {
    /// How they are resized.
    pub filter: Filter,
    /// Of red, green and blue, from 0 to 1.
    pub mean: [f64; 3],
    /// Likewise.
    pub std: [f64; 3],
}

/// What a pixel is made of, when an image is resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Lanczos with three lobes.
    Lanczos,
    /// Linear in both directions.
    Bilinear,
    /// Cubic in both directions (Keys, 1981, with a = -0.5).
    Bicubic,
}

/// Where files have towers and projectors; most within `model`.
pub const TOWER_PARTS: [&str; 4] = ["vision_tower.", "multi_modal_projector.", "vision_model.", "connector."];

/// A kind of model whose images are read.
#[derive(Clone, Copy)]
enum Family {
    Mistral3,
    Idefics3,
    InternVl,
}

impl Vision {
    /// The tower of the model in a folder; `None` where it has none whose images are read.
    ///
    /// # Errors
    /// Settings that are not supported.
    pub fn of_folder(folder: &Path, config: &ModelConfig) -> Result<Option<Self>, Problems> {
        let path = folder.join("config.json");
        let Some(text) = std::fs::read_to_string(&path).ok().filter(|_| config.nesting.is_some()) else {
            return Ok(None);
        };
        let family = |json: &mut Section| {
            let named = json.value("model_type").and_then(Value::text);
            let known = [
                ("mistral3", Family::Mistral3),
                ("idefics3", Family::Idefics3),
                ("smolvlm", Family::Idefics3),
                ("internvl", Family::InternVl),
            ];
            let known = known.into_iter().find(|(name, _)| named == Some(name) && json.has("vision_config"));
            Some(known.map(|(_, family)| family))
        };
        let path = path.display().to_string();
        let Some(family) = read_json(&path, &text, family)? else { return Ok(None) };
        let (pixels, cutting) = of_preprocessor(folder, family)?;
        let read = |json: &mut Section| Some(Self::read(json, family, config, (pixels, cutting)));
        read_json(&path, &text, read).map(Some)
    }

    fn read(json: &mut Section, family: Family, config: &ModelConfig, (pixels, cutting): (Pixels, Cutting)) -> Self {
        let key = if json.has("image_token_id") { "image_token_id" } else { "image_token_index" };
        // What the configs of transformers say where a file does not.
        let (default_id, (encoder, projector)) = match family {
            Family::Mistral3 => (10, mistral3(json, config)),
            Family::Idefics3 => (128_257, idefics3(json, cutting)),
            Family::InternVl => (151_667, internvl(json, cutting)),
        };
        let image_token_id = json.count(key, u64::from(default_id), 0..config.vocab_size as u64);
        let image_token_id = u32::try_from(image_token_id).unwrap_or(default_id);
        Self { encoder, projector, text_size: config.hidden_size, image_token_id, pixels, cutting }
    }

    /// Pixels on a side of what becomes a token.
    #[must_use]
    pub fn token_pixels(&self) -> usize {
        self.encoder.patch_size * self.projector.merge_size()
    }

    /// What is seen of an image of so many pixels, of which more than `most` are too many.
    ///
    /// # Errors
    /// An image that is so thin that nothing is left of it.
    pub fn cut(&self, size: [usize; 2], most: Option<usize>) -> Result<Cut, String> {
        self.cutting.cut(size, most, self.token_pixels())
    }
}

impl Encoder {
    /// Width of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    fn read(
        json: &mut Section,
        kind: EncoderKind,
        defaults: [usize; 4],
        patch_size: usize,
        (activation, eps): (Activation, f64),
    ) -> Self {
        let [hidden, intermediate, layers, heads] = defaults;
        json.only("num_channels", "3", |value| value.number() == Some(3.0));
        let hidden_size: usize = json.count("hidden_size", hidden, 4..=1 << 16);
        let num_heads: usize = json.count("num_attention_heads", heads, 1..=1 << 10);
        // Where places turn queries, rows and columns have half of each head, in pairs.
        let parts = if matches!(kind, EncoderKind::Pixtral { .. }) { 4 } else { 1 };
        if !hidden_size.is_multiple_of(parts * num_heads) {
            json.problem("hidden_size", "is no such multiple of `num_attention_heads` as the attention needs");
        }
        Self {
            kind,
            hidden_size,
            intermediate_size: json.count("intermediate_size", intermediate, 1..=1 << 20),
            num_layers: json.count("num_hidden_layers", layers, 1..=1 << 10),
            num_heads,
            patch_size,
            activation: activation_named(json, "hidden_act", activation),
            eps,
        }
    }
}

impl Projector {
    /// Patches on a side of a token.
    #[must_use]
    pub fn merge_size(&self) -> usize {
        match self {
            Self::Merging { merge_size, .. } | Self::Linear { merge_size } | Self::Normed { merge_size, .. } => {
                *merge_size
            }
        }
    }
}

fn mistral3(json: &mut Section, config: &ModelConfig) -> (Encoder, Projector) {
    json.only("vision_feature_layer", "-1, the last layer", |value| value.number() == Some(-1.0));
    let projector = Projector::Merging {
        merge_size: json.count("spatial_merge_size", 2, 1..=16),
        activation: activation_named(json, "projector_hidden_act", Activation::Gelu),
        has_bias: json.boolean("multimodal_projector_bias", false),
        eps: config.rms_norm_eps,
    };
    let mut tower = json.below("vision_config", "an object");
    tower.only("model_type", "\"pixtral\"", |value| value.text() == Some("pixtral"));
    let rope_theta = if tower.has("rope_parameters.rope_theta") {
        tower.below("rope_parameters", "an object").number("rope_theta", 1e4, 1.0..=1e15)
    } else {
        tower.number("rope_theta", 1e4, 1.0..=1e15)
    };
    let kind = EncoderKind::Pixtral { rope_theta };
    let patch_size = tower.count("patch_size", 16, 1..=256);
    (Encoder::read(&mut tower, kind, [1024, 4096, 24, 16], patch_size, (Activation::Gelu, 1e-5)), projector)
}

fn idefics3(json: &mut Section, cutting: Cutting) -> (Encoder, Projector) {
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
    let encoder = Encoder::read(&mut tower, kind, [1152, 3072, 12, 16], patch_size, (Activation::GeluTanh, eps));
    (encoder, Projector::Linear { merge_size })
}

fn internvl(json: &mut Section, cutting: Cutting) -> (Encoder, Projector) {
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
    let encoder = Encoder::read(&mut tower, kind, [1024, 4096, 24, 16], patch_size, (Activation::Gelu, eps));
    (encoder, Projector::Normed { merge_size, activation })
}

/// A side that may be written twice, as that of a square.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "within bounds"
)]
fn square(json: &mut Section, key: &'static str, default: usize) -> usize {
    if !matches!(json.value(key), Some(Value::Array(_))) {
        return json.count(key, default, 1..=1 << 16);
    }
    let [height, width] = json.numbers(key, [default as f64; 2], 1.0..=65536.0);
    if height.to_bits() != width.to_bits() || height.fract() > 0.0 {
        json.problem(key, "is not the side of a square, twice");
    }
    height as usize
}

/// From `preprocessor_config.json`, or from what `processor_config.json` says of images.
fn of_preprocessor(folder: &Path, family: Family) -> Result<(Pixels, Cutting), Problems> {
    let file = |name: &str| {
        let path = folder.join(name);
        std::fs::read_to_string(&path).ok().map(|text| (path.display().to_string(), text))
    };
    if let Some((path, text)) = file("preprocessor_config.json") {
        return read_json(&path, &text, |json| Some(read_preprocessor(json, family)));
    }
    let Some((path, text)) = file("processor_config.json") else {
        let message = "no preprocessor_config.json and no processor_config.json, which say how images are resized";
        return Err(Problem::new(message).at(folder.display()).into());
    };
    read_json(&path, &text, |json| Some(read_preprocessor(&mut json.below("image_processor", "an object"), family)))
}

fn read_preprocessor(json: &mut Section, family: Family) -> (Pixels, Cutting) {
    const CLIP: [[f64; 3]; 2] = [[0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_54, 0.261_302_58, 0.275_777_11]];
    const HALF: [[f64; 3]; 2] = [[0.5; 3]; 2];
    for key in ["do_resize", "do_rescale", "do_normalize"] {
        json.only(key, "true", |value| *value == Value::Boolean(true));
    }
    json.only("do_center_crop", "false", |value| *value == Value::Boolean(false));
    json.only("rescale_factor", "1/255", |value| {
        value.number().is_some_and(|factor| (factor * 255.0 - 1.0).abs() < 1e-9)
    });
    let (filter, [mean, std]) = match family {
        Family::Mistral3 | Family::InternVl => (Filter::Bicubic, CLIP),
        Family::Idefics3 => (Filter::Lanczos, HALF),
    };
    let filter = json.any("resample", filter, "1 (Lanczos), 2 (bilinear) or 3 (bicubic)", |value| {
        let known = [(1.0, Filter::Lanczos), (2.0, Filter::Bilinear), (3.0, Filter::Bicubic)];
        known.into_iter().find(|(number, _)| value.number() == Some(*number)).map(|(_, filter)| filter).ok_or(None)
    });
    let pixels = Pixels {
        filter,
        mean: json.numbers("image_mean", mean, 0.0..=1.0),
        std: json.numbers("image_std", std, 1e-3..=1.0),
    };
    if let Family::InternVl = family {
        let [least, most] =
            [("min_patches", 1), ("max_patches", 12)].map(|(key, default)| json.count(key, default, 1..=64));
        let mut size = json.below("size", "an object");
        let side: u32 = size.count("height", 384, 1..=1 << 16);
        size.only("width", "the height", |value| value.number() == Some(f64::from(side)));
        return (pixels, Cutting::Canvas { side: side as usize, least, most });
    }
    let mut edge = |name, default| json.below(name, "an object").count("longest_edge", default, 1..=1 << 16);
    let cutting = match family {
        Family::Mistral3 => Cutting::Whole { longest_edge: edge("size", 1024) },
        Family::Idefics3 | Family::InternVl => Cutting::Squares {
            longest_edge: edge("size", 4 * 364).min(cut::MOST_EDGE),
            side: edge("max_image_size", 364),
            is_cut: json.boolean("do_image_splitting", true),
        },
    };
    (pixels, cutting)
}
