//! What images take besides the tokens of their rows.

use super::memory::Component;
use super::workload::Workload;
use crate::config::ObjectiveName;
use crate::data::dataset::Dataset;
use crate::data::error::DataError;
use crate::model::tower::{encoding_bytes, weight_bytes};
use crate::spec::ModelConfig;

/// What the images of a recipe's rows take in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageMemory {
    /// Of every row that has images, the number of their tokens, the most first.
    tokens: Vec<usize>,
    /// Bytes of the weights of tower and projector.
    tower_bytes: usize,
    /// Bytes that the tower takes besides, for the image for which it takes most.
    encoding_bytes: usize,
    /// Whether it stays during training, as the features of some images are not kept.
    has_unkept: bool,
}

/// That of rows without images.
pub static NO_IMAGES: ImageMemory =
    ImageMemory { tokens: Vec::new(), tower_bytes: 0, encoding_bytes: 0, has_unkept: false };

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
        let mut tokens = data.image_tokens()?;
        tokens.sort_unstable_by(|a, b| b.cmp(a));
        let encoding_bytes = all.iter().map(|image| encoding_bytes(vision, &image.cut)).max().unwrap_or(0);
        let [_, unkept] = images.feature_bytes();
        Ok(Self { tokens, tower_bytes: weight_bytes(vision), encoding_bytes, has_unkept: unkept > 0 })
    }
}

impl Workload<'_> {
    /// Tokens of images in a micro-batch, at most.
    fn image_tokens(&self) -> usize {
        let ImageMemory { tokens, .. } = self.images;
        // As many rows as fit are packed into one.
        let num_rows = if self.is_packed { tokens.len() } else { self.rows };
        let copies = if self.objective.name == ObjectiveName::Grpo { self.objective.num_generations } else { 1 };
        (copies * tokens.iter().take(num_rows).sum::<usize>()).min(self.tokens())
    }

    /// Bytes of what is seen of the images of a micro-batch: in place of their embeddings, and what the first blocks add.
    pub(super) fn image_bytes(&self) -> usize {
        let ModelConfig { hidden_size, num_deepstack_layers, .. } = *self.config;
        self.image_tokens() * (1 + num_deepstack_layers) * hidden_size * self.activation_bytes()
    }

    /// The tower where it stays, and what encoding an image takes beyond what a step will: its `working` bytes come after it, and
    /// the `trained` ones too if all images are encoded before the first step.
    pub(super) fn image_components(&self, working: usize, trained: usize) -> Vec<Component> {
        let ImageMemory { tower_bytes, encoding_bytes, has_unkept, .. } = *self.images;
        let (stays, leaves, later) =
            if has_unkept { (tower_bytes, 0, working) } else { (0, tower_bytes, working + trained) };
        let encoding = (encoding_bytes + leaves).saturating_sub(later);
        let components = [
            Component::new("vision tower", stays, "the model, data.image_cache_gib"),
            Component::new("images being encoded", encoding, "the model, data.image_max_pixels"),
        ];
        components.into_iter().filter(|component| component.bytes > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::budget::workload::tests::{model, workload};

    #[test]
    fn what_is_seen_of_images_is_held_by_every_micro_batch() {
        let (mut config, selection) = model(include_str!("../../../configs/smollm2-135m.json"), 16);
        config.num_deepstack_layers = 3;
        let images = ImageMemory { tokens: vec![80, 20, 7, 5], ..ImageMemory::default() };
        let more = |change: &dyn Fn(&mut Workload<'_>)| {
            let mut text = Workload { gradient_accumulation_steps: 2, ..workload(&config, &selection) };
            change(&mut text);
            Workload { images: &images, ..text.clone() }.plan().peak_bytes - text.plan().peak_bytes
        };
        let of_token = (1 + 3) * 576 * 4;
        // Two rows at a time: at most those with most.
        assert_eq!(more(&|_| {}), 100 * of_token);
        assert_eq!(more(&|text| text.layered_accumulation = true), 2 * 100 * of_token);
        assert_eq!(more(&|text| text.rows = 1), 80 * of_token);
        assert_eq!(more(&|text| (text.rows, text.row_length) = (1, 64)), 64 * of_token);
        assert_eq!(more(&|text| text.is_packed = true), 112 * of_token);
    }

    #[test]
    fn a_tower_that_stays_is_beside_every_step_and_one_that_goes_only_where_a_step_takes_less() {
        let (config, selection) = model(include_str!("../../../configs/smollm2-135m.json"), 16);
        let more = |tower_bytes, encoding_bytes, has_unkept| {
            let images = ImageMemory { tokens: vec![1], tower_bytes, encoding_bytes, has_unkept };
            let text = workload(&config, &selection);
            let [with, without] = [Workload { images: &images, ..text.clone() }, text].map(|of| of.plan());
            with.peak_bytes - without.peak_bytes - 576 * 4
        };
        assert_eq!([more(1 << 20, 5, false), more(1 << 20, 5, true)], [0, 1 << 20]);
        // Adapters, their gradients and moments are there already when an image is encoded in a step.
        assert_eq!(more(0, 1 << 40, true) - more(1 << 40, 0, false), 4 * 4 * 4_884_480);
    }
}
