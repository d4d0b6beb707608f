//! The vision tower of a multimodal model: its shape, what its images are made into, and the tokens that stand for them.

use std::path::Path;

use super::ModelConfig;
use super::block::Activation;
use crate::schema::{Problem, Problems, Section, Value, read_json};

mod cut;
mod gemma4;
mod glm;
mod lfm2;
mod others;
mod qwen;
#[cfg(test)]
mod tests;

pub use cut::{Cut, Cutting, Grid, Tiles};

/// A vision tower and what joins it to the language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Vision {
    /// What makes hidden states of an image.
    pub encoder: Encoder,
    /// What makes features of them.
    pub projector: Projector,
    /// Layers of the encoder of which other projectors make what the first layers of the language model add at images (`DeepStack`,
    /// Meng et al., 2024).
    pub deepstack: Vec<usize>,
    /// Width of the language model.
    pub text_size: usize,
    /// The token that a feature takes the place of.
    pub image_token_id: u32,
    /// The token whose row of layers' own tables these have.
    pub table_id: u32,
    /// What becomes of colors.
    pub pixels: Pixels,
    /// What is seen of an image.
    pub cutting: Cutting,
    /// Where the tokens of an image see each other both ways in the language model.
    pub seen_both_ways: SeenBothWays,
}

/// In which layers of a language model the tokens of an image see each other both ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenBothWays {
    /// In none.
    Nowhere,
    /// In all.
    Everywhere,
    /// In those with a window.
    InWindows,
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
    /// Layers in which patches see those of their window alone.
    pub windows: Option<Windows>,
}

/// Windows of an encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Windows {
    /// Patches on a side; those at the right and at the bottom may be smaller.
    pub side: usize,
    /// Layers in which patches see all.
    pub except: Vec<usize>,
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
    /// Patches of two equal frames; layer norms and biases; learned vectors of places between which those of an image lie, and rows
    /// and columns turn queries and keys (Qwen3-VL).
    Qwen3 {
        /// Places on a side.
        side: usize,
        /// Base of the frequencies of rows and columns.
        rope_theta: f64,
    },
    /// As `SigLIP`, with vectors of places between which those of an image lie, and rows and columns turn queries and keys
    /// (`PaddleOCR-VL`).
    PaddleOcr {
        /// Places on a side.
        side: usize,
        /// Base of the frequencies of rows and columns.
        rope_theta: f64,
    },
    /// As `SigLIP`, with vectors of places between which those of an image lie, smoothed where it has fewer (`SigLIP 2`, Tschannen et
    /// al., 2025).
    Siglip2 {
        /// Places on a side.
        side: usize,
    },
    /// As Qwen2.5-VL, with vectors of places that are cubic between those (GLM-4.1V).
    Glm {
        /// Places on a side.
        side: usize,
        /// Base of the frequencies of rows and columns.
        rope_theta: f64,
        /// Whether queries, keys and values have biases.
        has_qkv_bias: bool,
    },
    /// RMSNorm before and behind gated feed-forward layers and attention, and of its heads; vectors of rows and of columns, which turn
    /// queries and keys, each a half of a head (Gemma 4).
    Gemma4 {
        /// Rows, and columns, that have vectors.
        num_places: usize,
        /// Base of the frequencies of rows and columns.
        rope_theta: f64,
        /// Whether linear layers keep inputs and outputs within bounds.
        has_bounds: bool,
    },
    /// No layers: a layer norm, a linear layer and a layer norm, vectors of rows and of columns, and another layer norm (Gemma 4
    /// Unified).
    Gemma4Unified {
        /// Rows, and columns, that have vectors.
        num_places: usize,
    },
    /// As Qwen3-VL without these vectors, with `x sigmoid(1.702 x)` as its activation (Qwen2-VL).
    Qwen2 {
        /// Base of the frequencies of rows and columns.
        rope_theta: f64,
    },
    /// The same without these vectors, with RMSNorm and gated feed-forward layers (Qwen2.5-VL).
    Qwen2_5 {
        /// Base of the frequencies of rows and columns.
        rope_theta: f64,
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
    /// A norm and two layers over the patches of a token (`InternVL`, LFM2-VL).
    Normed {
        /// Patches on a side of a token.
        merge_size: usize,
        /// Width between the two layers.
        inner: usize,
        /// Between the two layers.
        activation: Activation,
        /// Whether there is a norm at all.
        has_norm: bool,
        /// Whether the layers add biases.
        has_bias: bool,
    },
    /// A norm of each patch, and two layers over the patches of a token (Qwen).
    Joining {
        /// Patches on a side of a token.
        merge_size: usize,
        /// Added to the variance or the mean square in the norm.
        eps: f64,
    },
    /// The mean of the patches of a token, a norm, and a linear layer (Gemma 3).
    Pooling {
        /// Patches on a side of a token.
        merge_size: usize,
        /// Added to the mean square in the norm.
        eps: f64,
    },
    /// The mean of the patches of a token, a bias and a factor for each number, a norm without weights, and a linear layer (Gemma 4).
    Standardised {
        /// Patches on a side of a token.
        merge_size: usize,
        /// Added to the mean square in the norm.
        eps: f64,
        /// Whether files have these biases and factors.
        has_statistics: bool,
    },
    /// A norm without weights, and a linear layer; a token has one patch (Gemma 4 Unified).
    Plain {
        /// Added to the mean square in the norm.
        eps: f64,
    },
    /// Two linear layers over the patches of a token, a norm, and a gated feed-forward layer (GLM-4.1V).
    Gated {
        /// Patches on a side of a token.
        merge_size: usize,
        /// Width inside the feed-forward layer.
        inner: usize,
    },
}

/// How an image is resized and scaled.
#[derive(Clone, Debug, PartialEq)]
pub struct Pixels {
    /// How they are resized.
    pub filter: Filter,
    /// Mean and standard deviation of red, green and blue, from 0 to 1, where they are normed.
    pub norm: Option<[[f64; 3]; 2]>,
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
pub const TOWER_PARTS: [&str; 7] =
    ["vision_tower.", "multi_modal_projector.", "vision_model.", "connector.", "visual.", "mlp_AR.", "embed_vision."];

/// A kind of model whose images are read.
#[derive(Clone, Copy)]
enum Family {
    Mistral3,
    Idefics3,
    InternVl,
    Qwen3,
    Qwen2_5,
    Qwen2,
    Gemma3,
    PaddleOcr,
    Gemma4,
    Gemma4Unified,
    Lfm2,
    Glm,
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
                ("gemma3", Family::Gemma3),
                ("paddleocr_vl", Family::PaddleOcr),
                ("gemma4", Family::Gemma4),
                ("gemma4_unified", Family::Gemma4Unified),
                ("lfm2_vl", Family::Lfm2),
                ("glm4v", Family::Glm),
                ("glm46v", Family::Glm),
                ("glm4v_moe", Family::Glm),
                ("qwen2_vl", Family::Qwen2),
                ("qwen2_5_vl", Family::Qwen2_5),
                ("qwen3_vl", Family::Qwen3),
                ("qwen3_vl_moe", Family::Qwen3),
                ("qwen3_5", Family::Qwen3),
                ("qwen3_5_moe", Family::Qwen3),
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
        let default_id = match family {
            Family::Mistral3 => 10,
            Family::Idefics3 => 128_257,
            Family::InternVl => 151_667,
            Family::Gemma3 => 262_144,
            Family::PaddleOcr => 100_295,
            Family::Gemma4 | Family::Gemma4Unified => 258_880,
            Family::Lfm2 => 396,
            Family::Glm if config.family().experts.is_some() => 151_363,
            Family::Glm => 151_343,
            Family::Qwen3 if config.family().delta_heads.is_some() => 248_056,
            Family::Qwen3 | Family::Qwen2_5 | Family::Qwen2 => 151_655,
        };
        let ((encoder, projector), deepstack) = match family {
            Family::Mistral3 => (others::mistral3(json, config), Vec::new()),
            Family::Idefics3 => (others::idefics3(json, cutting), Vec::new()),
            Family::InternVl => (others::internvl(json, config.hidden_size, cutting), Vec::new()),
            Family::Gemma3 => (others::gemma3(json, cutting), Vec::new()),
            Family::PaddleOcr => (others::paddleocr(json, cutting), Vec::new()),
            Family::Gemma4 => (gemma4::tower(json, cutting), Vec::new()),
            Family::Gemma4Unified => (gemma4::unified(json, cutting), Vec::new()),
            Family::Lfm2 => (lfm2::tower(json, cutting), Vec::new()),
            Family::Glm => (glm::tower(json, config, cutting), Vec::new()),
            Family::Qwen3 => qwen::qwen3(json, config, cutting),
            Family::Qwen2_5 => (qwen::qwen2_5(json, config, cutting), Vec::new()),
            Family::Qwen2 => (qwen::qwen2(json, config, cutting), Vec::new()),
        };
        let image_token_id = json.count(key, u64::from(default_id), 0..config.vocab_size as u64);
        let image_token_id = u32::try_from(image_token_id).unwrap_or(default_id);
        let (table_id, seen_both_ways) = match family {
            Family::Gemma3 => (image_token_id, SeenBothWays::Everywhere),
            Family::Gemma4 | Family::Gemma4Unified => gemma4::in_text(json, config),
            _ => (image_token_id, SeenBothWays::Nowhere),
        };
        let text_size = config.hidden_size;
        Self { encoder, projector, deepstack, text_size, image_token_id, table_id, pixels, cutting, seen_both_ways }
    }

    /// Numbers of a feature: what takes the place of an embedding, and what is added later.
    #[must_use]
    pub fn feature_size(&self) -> usize {
        self.text_size * (1 + self.deepstack.len())
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
}

impl Projector {
    /// Patches on a side of a token.
    #[must_use]
    pub fn merge_size(&self) -> usize {
        match self {
            Self::Plain { .. } => 1,
            Self::Merging { merge_size, .. }
            | Self::Linear { merge_size }
            | Self::Normed { merge_size, .. }
            | Self::Joining { merge_size, .. }
            | Self::Pooling { merge_size, .. }
            | Self::Standardised { merge_size, .. }
            | Self::Gated { merge_size, .. } => *merge_size,
        }
    }
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
    for key in ["do_resize", "do_rescale"] {
        json.only(key, "true", |value| *value == Value::Boolean(true));
    }
    json.only("do_center_crop", "false", |value| *value == Value::Boolean(false));
    json.only("rescale_factor", "1/255", |value| {
        value.number().is_some_and(|factor| (factor * 255.0 - 1.0).abs() < 1e-9)
    });
    let (filter, [mean, std]) = match family {
        Family::Idefics3 => (Filter::Lanczos, HALF),
        Family::Gemma3 | Family::Lfm2 => (Filter::Bilinear, HALF),
        _ => (Filter::Bicubic, CLIP),
    };
    let filter = json.any("resample", filter, "1 (Lanczos), 2 (bilinear) or 3 (bicubic)", |value| {
        let known = [(1.0, Filter::Lanczos), (2.0, Filter::Bilinear), (3.0, Filter::Bicubic)];
        known.into_iter().find(|(number, _)| value.number() == Some(*number)).map(|(_, filter)| filter).ok_or(None)
    });
    let norm = [json.numbers("image_mean", mean, 0.0..=1.0), json.numbers("image_std", std, 1e-3..=1.0)];
    let is_normed = json.boolean("do_normalize", !matches!(family, Family::Gemma4 | Family::Gemma4Unified));
    let pixels = Pixels { filter, norm: is_normed.then_some(norm) };
    match family {
        Family::Gemma4 | Family::Gemma4Unified => return (pixels, gemma4::cutting(json)),
        Family::Lfm2 => return (pixels, lfm2::cutting(json)),
        Family::Glm => return (pixels, glm::cutting(json)),
        _ => {}
    }
    if let Family::Gemma3 = family {
        json.only("do_pan_and_scan", "false", |value| matches!(value, Value::Boolean(false) | Value::Null));
        return (pixels, Cutting::Square { side: side_of(json, 224) });
    }
    if let Family::InternVl = family {
        let [least, most] =
            [("min_patches", 1), ("max_patches", 12)].map(|(key, default)| json.count(key, default, 1..=64));
        return (pixels, Cutting::Canvas { side: side_of(json, 384), least, most });
    }
    if let Family::Qwen3 | Family::Qwen2_5 | Family::Qwen2 = family {
        return (pixels, qwen::area(json, 2.0, [56 * 56, 28 * 28 * 1280]));
    }
    if let Family::PaddleOcr = family {
        let area = qwen::area(json, 1.0, [384 * 384, 1536 * 1536]);
        let Cutting::Area { side, least, most } = area else { return (pixels, area) };
        return (pixels, Cutting::Page { side, least, most });
    }
    let mut edge = |name, default| json.below(name, "an object").count("longest_edge", default, 1..=1 << 16);
    let cutting = match family {
        Family::Mistral3 => Cutting::Whole { longest_edge: edge("size", 1024) },
        _ => Cutting::Squares {
            longest_edge: edge("size", 4 * 364).min(cut::MOST_EDGE),
            side: edge("max_image_size", 364),
            is_cut: json.boolean("do_image_splitting", true),
        },
    };
    (pixels, cutting)
}

/// The side of the square in `size`.
fn side_of(json: &mut Section, default: u32) -> usize {
    let mut size = json.below("size", "an object");
    let side: u32 = size.count("height", default, 1..=1 << 16);
    size.only("width", "the height", |value| value.number() == Some(f64::from(side)));
    side as usize
}
