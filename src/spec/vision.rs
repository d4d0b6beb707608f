//! The vision tower of a multimodal model: its shape, what its images are made into, and the tokens that stand for them.

use std::path::Path;

use super::ModelConfig;
use super::block::Activation;
use super::json::activation_named;
use crate::schema::{Problem, Problems, Section, Value, read_json};

/// A vision tower and what joins it to the language model, as Mistral Small 3 and Ministral 3 have them (Pixtral, Agrawal et al.,
/// 2024).
#[derive(Clone, Debug, PartialEq)]
pub struct Vision {
    /// Width of the tower.
    pub hidden_size: usize,
    /// Width inside its feed-forward layers.
    pub intermediate_size: usize,
    /// Number of its layers.
    pub num_layers: usize,
    /// Heads of its attention.
    pub num_heads: usize,
    /// Pixels on a side of a patch.
    pub patch_size: usize,
    /// Base of the frequencies of rows and columns.
    pub rope_theta: f64,
    /// Of its feed-forward layers.
    pub activation: Activation,
    /// Patches on a side of what becomes a token.
    pub merge_size: usize,
    /// What the projector computes between its two layers.
    pub projector_activation: Activation,
    /// Whether these add biases.
    pub has_projector_bias: bool,
    /// Added to the mean square in the projector's norm.
    pub projector_eps: f64,
    /// Width of the language model.
    pub text_size: usize,
    /// The token that a feature takes the place of.
    pub image_token_id: u32,
    /// What becomes of pixels.
    pub pixels: Pixels,
}

/// How an image is resized and scaled.
#[derive(Clone, Debug, PartialEq)]
pub struct Pixels {
    /// Longer images are made smaller.
    pub longest_edge: usize,
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

/// The tokens of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Rows of tokens.
    pub rows: usize,
    /// Tokens in a row.
    pub columns: usize,
}

/// What a chat template writes for an image, and what ends a row of its tokens, and the last.
pub const MARKERS: [&str; 3] = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"];

/// Where files have the tower and the projector; newer ones within `model`.
pub const TOWER_PARTS: [&str; 2] = ["vision_tower.", "multi_modal_projector."];

const CLIP_MEAN: [f64; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const CLIP_STD: [f64; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];

impl Vision {
    /// The tower of the model in a folder; `None` where it has none whose images are read.
    ///
    /// # Errors
    /// Settings that are not supported.
    pub fn of_folder(folder: &Path, config: &ModelConfig) -> Result<Option<Self>, Problems> {
        let Some(text) = std::fs::read_to_string(folder.join("config.json")).ok().filter(|_| config.is_nested) else {
            return Ok(None);
        };
        let is_known = |json: &mut Section| {
            Some(json.value("model_type").and_then(Value::text) == Some("mistral3") && json.has("vision_config"))
        };
        if !read_json("config.json", &text, is_known)? {
            return Ok(None);
        }
        let pixels = Pixels::of_folder(folder)?;
        let path = folder.join("config.json");
        read_json(&path.display().to_string(), &text, |json| Some(Self::read(json, config, pixels))).map(Some)
    }

    fn read(json: &mut Section, config: &ModelConfig, pixels: Pixels) -> Self {
        json.only("vision_feature_layer", "-1, the last layer", |value| value.number() == Some(-1.0));
        let default_id = u64::from(DEFAULT_IMAGE_TOKEN);
        let key = if json.has("image_token_id") { "image_token_id" } else { "image_token_index" };
        let image_token_id = json.count(key, default_id, 0..config.vocab_size as u64);
        let merge_size = json.count("spatial_merge_size", 2, 1..=16);
        let projector_activation = activation_named(json, "projector_hidden_act", Activation::Gelu);
        let has_projector_bias = json.boolean("multimodal_projector_bias", false);
        let mut tower = json.below("vision_config", "an object");
        tower.only("model_type", "\"pixtral\"", |value| value.text() == Some("pixtral"));
        tower.only("num_channels", "3", |value| value.number() == Some(3.0));
        let hidden_size: usize = tower.count("hidden_size", 1024, 4..=1 << 16);
        let num_heads: usize = tower.count("num_attention_heads", 16, 1..=1 << 10);
        if !hidden_size.is_multiple_of(4 * num_heads) {
            tower.problem("hidden_size", "is not four times a multiple of `num_attention_heads`");
        }
        let rope_theta = if tower.has("rope_parameters.rope_theta") {
            tower.below("rope_parameters", "an object").number("rope_theta", 1e4, 1.0..=1e15)
        } else {
            tower.number("rope_theta", 1e4, 1.0..=1e15)
        };
        Self {
            hidden_size,
            intermediate_size: tower.count("intermediate_size", 4096, 1..=1 << 20),
            num_layers: tower.count("num_hidden_layers", 24, 1..=1 << 10),
            num_heads,
            patch_size: tower.count("patch_size", 16, 1..=256),
            rope_theta,
            activation: activation_named(&mut tower, "hidden_act", Activation::Gelu),
            merge_size,
            projector_activation,
            has_projector_bias,
            projector_eps: config.rms_norm_eps,
            text_size: config.hidden_size,
            image_token_id: u32::try_from(image_token_id).unwrap_or(DEFAULT_IMAGE_TOKEN),
            pixels,
        }
    }

    /// Width of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Pixels on a side of what becomes a token.
    #[must_use]
    pub fn token_pixels(&self) -> usize {
        self.patch_size * self.merge_size
    }

    /// The tokens of an image of so many pixels, which is made smaller where it is longer than the tower takes, or has more
    /// than `most` pixels.
    ///
    /// # Errors
    /// An image that is so thin that nothing is left of it.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "as Python computes it"
    )]
    pub fn grid(&self, [width, height]: [usize; 2], most: Option<usize>) -> Result<Grid, String> {
        let longest = self.pixels.longest_edge as f64;
        let of_area = most.map_or(0.0, |most| ((width * height) as f64 / most as f64).sqrt());
        let ratio = (height as f64 / longest).max(width as f64 / longest).max(of_area);
        let resized = |side: usize| if ratio > 1.0 { (side as f64 / ratio).floor() as usize } else { side };
        let tokens = |side: usize| resized(side).div_ceil(self.token_pixels());
        let (rows, columns) = (tokens(height), tokens(width));
        if rows * columns == 0 {
            return Err(format!("has {width} x {height} pixels, too thin to be made smaller"));
        }
        Ok(Grid { rows, columns })
    }
}

/// [`Vision::image_token_id`] where the config has none.
const DEFAULT_IMAGE_TOKEN: u32 = 10;

impl Pixels {
    /// From `preprocessor_config.json`, or from what `processor_config.json` says of images.
    fn of_folder(folder: &Path) -> Result<Self, Problems> {
        let file = |name: &str| {
            let path = folder.join(name);
            std::fs::read_to_string(&path).ok().map(|text| (path.display().to_string(), text))
        };
        if let Some((path, text)) = file("preprocessor_config.json") {
            return read_json(&path, &text, |json| Some(Self::read(json)));
        }
        let Some((path, text)) = file("processor_config.json") else {
            let message = "no preprocessor_config.json and no processor_config.json, which say how images are resized";
            return Err(Problem::new(message).at(folder.display()).into());
        };
        read_json(&path, &text, |json| Some(Self::read(&mut json.below("image_processor", "an object"))))
    }

    fn read(json: &mut Section) -> Self {
        for key in ["do_resize", "do_rescale", "do_normalize"] {
            json.only(key, "true", |value| *value == Value::Boolean(true));
        }
        json.only("do_center_crop", "false", |value| *value == Value::Boolean(false));
        json.only("rescale_factor", "1/255", |value| {
            value.number().is_some_and(|factor| (factor * 255.0 - 1.0).abs() < 1e-9)
        });
        let filter = json.any("resample", Filter::Bicubic, "1 (Lanczos), 2 (bilinear) or 3 (bicubic)", |value| {
            let known = [(1.0, Filter::Lanczos), (2.0, Filter::Bilinear), (3.0, Filter::Bicubic)];
            known.into_iter().find(|(number, _)| value.number() == Some(*number)).map(|(_, filter)| filter).ok_or(None)
        });
        Self {
            filter,
            mean: json.numbers("image_mean", CLIP_MEAN, 0.0..=1.0),
            std: json.numbers("image_std", CLIP_STD, 1e-3..=1.0),
            longest_edge: json.below("size", "an object").count("longest_edge", 1024, 1..=1 << 16),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vision(longest_edge: usize) -> Vision {
        let pixels = Pixels { longest_edge, filter: Filter::Bicubic, mean: CLIP_MEAN, std: CLIP_STD };
        Vision {
            hidden_size: 16,
            intermediate_size: 16,
            num_layers: 1,
            num_heads: 2,
            patch_size: 14,
            rope_theta: 1e4,
            activation: Activation::Silu,
            merge_size: 2,
            projector_activation: Activation::Gelu,
            has_projector_bias: false,
            projector_eps: 1e-5,
            text_size: 16,
            image_token_id: 10,
            pixels,
        }
    }

    #[test]
    fn images_become_as_many_tokens_as_pixtral_makes_of_them() {
        // Sizes and rows by columns of `_get_num_multimodal_tokens`.
        for (size, expected) in [
            ([1280, 960], [35, 46]),
            ([1, 1], [1, 1]),
            ([1540, 1540], [55, 55]),
            ([1541, 29], [1, 55]),
            ([4000, 3000], [42, 55]),
            ([3000, 4001], [55, 42]),
        ] {
            let Grid { rows, columns } = vision(1540).grid(size, None).unwrap();
            assert_eq!([rows, columns], expected, "{size:?}");
        }
        let smaller = vision(1540).grid([1280, 960], Some(640 * 480)).unwrap();
        assert_eq!(smaller, Grid { rows: 18, columns: 23 });
        assert!(vision(1540).grid([9000, 1], None).unwrap_err().contains("too thin"));
    }
}
