//! The settings that determine the memory of a step, and the sizes that follow from them alone.

use super::images::ImageMemory;
use crate::config::{FileType, GradientCheckpointing, ObjectiveConfig, ObjectiveName, OptimizerConfig, Precision};
use crate::lora::targets::{AdapterShape, Selection};
use crate::model::Storage;
use crate::model::budget::{SizedBy, SublayerSizes};
use crate::ops::cross_entropy::LossChunk;
use crate::ops::kernels::Place;
use crate::spec::{ModelConfig, PerSite};
use crate::util::stats::as_f64;

pub(super) const F32: usize = 4;

/// The settings that determine the memory of a step.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "settings, one by one")]
pub struct Workload<'a> {
    /// Shape of the model.
    pub config: &'a ModelConfig,
    /// The adapted layers.
    pub selection: &'a Selection,
    /// How the base is held.
    pub storage: Storage,
    /// Whether it is drawn at random, so that no file holds it.
    pub is_random: bool,
    /// Precision of the computation.
    pub precision: Precision,
    /// Rows per micro-batch.
    pub rows: usize,
    /// Tokens per sequence, with the padding that the device computes.
    pub row_length: usize,
    /// Whether several rows of the files make one of a micro-batch.
    pub is_packed: bool,
    /// What the rows' images take.
    pub images: &'a ImageMemory,
    /// What a block's forward keeps for its backward.
    pub gradient_checkpointing: GradientCheckpointing,
    /// Micro-batches per step.
    pub gradient_accumulation_steps: usize,
    /// Whether all of them go through a block before the next.
    pub layered_accumulation: bool,
    /// Number of target tokens whose logits exist at a time.
    pub loss_chunk: LossChunk,
    /// Micro-batches that are prepared ahead.
    pub prefetch_batches: usize,
    /// Whether adapters start as a part of the base: then what takes it out is applied beside them.
    pub is_part_of_base: bool,
    /// Where adapters start from the rows, which share the ranks out: a layer may get so many times its rank.
    pub eva_rho: Option<f64>,
    /// Whose states every adapter has.
    pub optimizer: &'a OptimizerConfig,
    /// What is minimised.
    pub objective: &'a ObjectiveConfig,
    /// Whether every token gets masks or noise of its own.
    pub is_noisy: bool,
    /// Where it is computed.
    pub place: Place,
    /// Processes that share a step.
    pub num_ranks: usize,
    /// Type of the file that the last steps train for.
    pub ship_as: Option<FileType>,
}

impl Workload<'_> {
    pub(super) fn tokens(&self) -> usize {
        self.sequences() * self.row_length
    }

    /// Sequences per micro-batch.
    pub(super) fn sequences(&self) -> usize {
        self.rows * self.objective.num_sequences()
    }

    /// Micro-batches that go through a block before the next.
    #[must_use]
    pub fn layered(&self) -> usize {
        if self.layered_accumulation { self.gradient_accumulation_steps } else { 1 }
    }

    /// Of so many blocks, the first ones, the forward is computed again for their backward, if they have one.
    pub(super) fn num_recomputed(&self) -> usize {
        self.gradient_checkpointing.num_recomputed(self.config.num_layers())
    }

    /// Of the blocks that have a backward, the share whose forward is computed again for it.
    #[must_use]
    pub fn share_recomputed(&self) -> f64 {
        let (layers, first) = (self.config.num_layers(), self.selection.first_trained());
        as_f64(self.num_recomputed().saturating_sub(first)) / as_f64((layers - first).max(1))
    }

    /// Bytes of an activation.
    pub(super) fn activation_bytes(&self) -> usize {
        self.place.activation_dtype(self.precision.dtype()).num_bytes()
    }

    /// Shape of the head, `[vocab_size, hidden_size]`.
    pub(super) fn head(&self) -> [usize; 2] {
        [self.config.vocab_size, self.config.hidden_size]
    }

    /// The sum of ranks of the block with the largest sum.
    pub(super) fn most_ranks(&self) -> usize {
        let ranks = |layer: &PerSite<AdapterShape>| layer.values().map(|shape| shape.r).sum();
        self.selection.shapes.iter().map(ranks).max().unwrap_or(0) * if self.is_part_of_base { 2 } else { 1 }
    }

    /// Number of trained parameters.
    pub(super) fn num_trainable(&self) -> usize {
        // The head that scores is small, and counted with the adapters.
        self.selection.num_parameters(self.config) + self.objective.num_score_parameters(self.config.hidden_size)
    }

    /// Bytes of the optimizer's states.
    pub(super) fn state_bytes(&self) -> usize {
        self.selection.tensors(self.config).map(|(_, shape)| self.optimizer.state_bytes(shape)).sum()
    }

    /// The sizes of every block, whose adapters have this sum of ranks.
    pub(super) fn blocks(&self, ranks: usize) -> impl Iterator<Item = SublayerSizes> {
        let ModelConfig { hidden_size, norm_kind, .. } = *self.config;
        let joins_outputs = self.joins_outputs();
        let by = SizedBy { hidden_size, place: self.place, dtype: self.precision.dtype(), norm_kind, joins_outputs };
        self.config.blocks.iter().map(move |block| {
            let sublayers = block.sublayers.iter().map(|sublayer| sublayer.sizes(by));
            let sizes = sublayers.fold(SublayerSizes::default(), SublayerSizes::and);
            // What a block is given and predicts, and in `f32` what it makes of these and their gradients.
            let streams = block.streams.map_or(0, |streams| (streams.count - 1) * hidden_size);
            SublayerSizes {
                kept: sizes.kept + ranks + 2 * streams,
                forward: sizes.forward + 3 * streams,
                backward: sizes.backward + 4 * streams,
            }
        })
    }

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
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::config::LoraConfig;
    use crate::device::{DeviceKind, Dtype};
    use crate::ops::place::place_on;
    use crate::train::budget::images::NO_IMAGES;

    static CROSS_ENTROPY: LazyLock<ObjectiveConfig> = LazyLock::new(ObjectiveConfig::default);
    static ADAMW: LazyLock<OptimizerConfig> = LazyLock::new(OptimizerConfig::default);

    pub(in crate::train::budget) fn model(json: &str, r: usize) -> (ModelConfig, Selection) {
        let config = ModelConfig::from_json(json).unwrap();
        let selection = LoraConfig { r, ..LoraConfig::default() }.select(&config).unwrap();
        (config, selection)
    }

    pub(in crate::train::budget) fn workload<'a>(config: &'a ModelConfig, selection: &'a Selection) -> Workload<'a> {
        Workload {
            config,
            selection,
            storage: Dtype::F32.into(),
            is_random: false,
            precision: Precision::F32,
            rows: 2,
            row_length: 512,
            is_packed: false,
            images: &NO_IMAGES,
            gradient_checkpointing: GradientCheckpointing::Off,
            gradient_accumulation_steps: 1,
            layered_accumulation: false,
            loss_chunk: LossChunk::Auto,
            prefetch_batches: 4,
            is_part_of_base: false,
            eva_rho: None,
            optimizer: &ADAMW,
            objective: &CROSS_ENTROPY,
            is_noisy: false,
            place: place_on(DeviceKind::Cpu),
            num_ranks: 1,
            ship_as: None,
        }
    }
}
