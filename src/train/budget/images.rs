//! What images take besides the tokens of their rows.

use crate::data::dataset::Dataset;
use crate::data::error::DataError;
use crate::model::tower::{encoding_bytes, weight_bytes};
use crate::util::stats::as_f64;

/// What the images of a recipe's rows take in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageMemory {
    /// Of every row that has images, the number of their tokens, the most first.
    pub(super) tokens: Vec<usize>,
    /// Their share of all tokens of these rows; 0 without such rows.
    pub token_share: f64,
    /// Bytes of the weights of tower and projector.
    pub(super) tower_bytes: usize,
    /// Bytes that the tower takes besides, for the image for which it takes most: on the CPU, and elsewhere.
    pub(super) encoding_bytes: [usize; 2],
    /// Whether it stays during training, as the features of some images are not kept.
    pub(super) has_unkept: bool,
}

/// That of rows without images.
pub static NO_IMAGES: ImageMemory =
    ImageMemory { tokens: Vec::new(), token_share: 0.0, tower_bytes: 0, encoding_bytes: [0; 2], has_unkept: false };

impl ImageMemory {
    /// That of all rows of a data set.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub fn of(data: &Dataset) -> Result<Self, DataError> {
        let Some((images, vision)) = data.images().and_then(|images| Some((images, images.vision().ok()?))) else {
            return Ok(Self::default());
        };
        let all = images.all();
        if all.is_empty() {
            return Ok(Self::default());
        }
        let counts = data.image_tokens()?;
        let [of_images, of_rows] = [0, 1].map(|which| counts.iter().map(|counts| counts[which]).sum::<usize>());
        let mut tokens: Vec<usize> = counts.into_iter().map(|[of_images, _]| of_images).collect();
        tokens.sort_unstable_by(|a, b| b.cmp(a));
        let encoding_bytes = [0, 1]
            .map(|place| all.iter().map(|image| encoding_bytes(vision, &image.cut)[place]).max().unwrap_or_default());
        let [_, unkept] = images.feature_bytes();
        Ok(Self {
            tokens,
            token_share: as_f64(of_images) / as_f64(of_rows.max(1)),
            tower_bytes: weight_bytes(vision),
            encoding_bytes,
            has_unkept: unkept > 0,
        })
    }
}
