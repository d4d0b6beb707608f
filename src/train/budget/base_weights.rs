//! The frozen weights in the memory of a step, and what is read or copied of them where they stay on disk or in host memory.

use super::memory::MemoryPlan;
use super::workload::Workload;
use crate::config::Residency;
use crate::spec::{Block, LAYER_INPUT_PROJECTION, LAYER_INPUT_TABLE, STREAM_PROJECTIONS, is_of_expert};
use crate::util::stats::{as_f64, as_u64};

/// Bytes of the frozen weights as the model holds them.
#[derive(Default)]
struct Sizes {
    /// What is no matrix, such as norms and biases, in `f32`; and the matrices that make the layers' own embeddings and residual streams.
    vectors: usize,
    /// The matrices of a block on average, and of the largest one.
    block: usize,
    largest: usize,
    /// Those of its experts, on average.
    experts: usize,
    head: usize,
    embedding: usize,
    /// The layers' own embeddings of the tokens.
    layer_inputs: usize,
}

impl Workload<'_> {
    fn sizes(&self) -> Sizes {
        let (mut sizes, num_layers) = (Sizes::default(), self.config.num_layers().max(1));
        let mut blocks = vec![0; num_layers];
        for (name, shape) in self.config.expected_tensors() {
            let num_bytes = self.storage.tensor_bytes(self.config, &name, &shape, self.place);
            let layer =
                name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            match (shape.len(), layer) {
                (2, Some(layer)) => {
                    blocks[layer] += num_bytes;
                    sizes.experts += if is_of_expert(&name) { num_bytes } else { 0 };
                }
                (2, None) if name == "lm_head.weight" => sizes.head += num_bytes,
                (2, None) if name == LAYER_INPUT_TABLE => sizes.layer_inputs += num_bytes,
                (2, None) if name == LAYER_INPUT_PROJECTION || is_of_streams(&name) => sizes.vectors += num_bytes,
                (2, None) => sizes.embedding += num_bytes,
                _ => sizes.vectors += num_bytes,
            }
        }
        sizes.block = blocks.iter().sum::<usize>() / num_layers;
        sizes.largest = blocks.into_iter().max().unwrap_or(0);
        sizes.experts /= num_layers;
        sizes
    }

    /// Bytes in the device's memory. Weights on disk: two blocks, or one and the head; rows of the embedding come before
    /// activations exist. Weights in host memory: the block that is computed, the next block, and the previous block if
    /// the device has not computed it yet.
    pub(super) fn base_bytes(&self) -> usize {
        let Sizes { vectors, block, largest, experts, head, embedding, layer_inputs } = self.sizes();
        let (layers, embeddings) = (self.config.num_layers(), embedding + layer_inputs);
        match self.storage.residency {
            Residency::Host if !self.place.is_host() => vectors + layers.min(3) * block + head + embeddings,
            Residency::Memory | Residency::Host => vectors + layers * block + head + embeddings,
            // Which experts of the next block are used is not known yet.
            Residency::Mapped => {
                // Tables that are grown are in memory.
                let grown = if self.config.num_new_rows > 0 { head + embedding } else { 0 };
                vectors + largest + (block - experts).max(head).max(self.tied(embedding)) + grown
            }
        }
    }

    /// Bytes of the blocks where a GPU copies them from host memory.
    pub(super) fn parked_base_bytes(&self) -> usize {
        let is_parked = self.storage.residency == Residency::Host && !self.place.is_host();
        if is_parked { self.config.num_layers() * self.sizes().block } else { 0 }
    }

    /// Times that a step uses every weight: once for each micro-batch, or for all of them.
    pub(super) fn passes(&self) -> usize {
        self.gradient_accumulation_steps / self.layered()
    }

    /// Bytes that a step copies from host memory: for each pass the blocks forward and back to the first adapted block.
    /// The forward's last block is the backward's first, and the backward's last may be the next forward's first.
    pub(super) fn moved_bytes_per_step(&self) -> Option<usize> {
        let (layers, first) = (self.config.num_layers(), self.first_adapted());
        let turns =
            if first < layers { (2 * layers - first).saturating_sub(1 + usize::from(first == 0)) } else { layers };
        let of_blocks = self.parked_base_bytes() / layers.max(1) * turns * self.passes();
        (of_blocks > 0).then_some(of_blocks)
    }

    fn first_adapted(&self) -> usize {
        self.selection.first_trained()
    }

    /// Bytes that a step reads from disk if the page cache holds none of them: for each pass the blocks forward and,
    /// from the first adapted block on, back, and the head.
    pub(super) fn read_bytes_per_step(&self) -> Option<usize> {
        let Sizes { block, experts, head, embedding, .. } = self.sizes();
        let block = block - experts + self.used(experts);
        let of_pass = (2 * self.config.num_layers() - self.first_adapted()) * block + head.max(self.tied(embedding));
        (self.storage.residency == Residency::Mapped).then_some(self.passes() * of_pass)
    }

    /// Bytes of a layer's experts that the tokens of a micro-batch use, if all experts are used alike.
    fn used(&self, experts: usize) -> usize {
        let Some(mixture) = self.config.blocks.iter().find_map(Block::mixture) else { return experts };
        let unused = 1.0 - as_f64(mixture.num_per_token) / as_f64(mixture.experts.len());
        let used = as_u64(as_f64(experts) * (1.0 - unused.powf(as_f64(self.tokens()))));
        usize::try_from(used).unwrap_or(experts)
    }

    fn tied(&self, embedding: usize) -> usize {
        if self.config.tie_word_embeddings { embedding } else { 0 }
    }
}

impl MemoryPlan {
    /// Seconds that those copies take at the rate of `PCIe` 4.0 with 16 lanes: assumed, measured nowhere.
    #[must_use]
    pub fn seconds_of_copies(&self) -> Option<f64> {
        self.moved_bytes_per_step.map(|bytes| as_f64(bytes) / BUS_BYTES_PER_SECOND)
    }
}

/// What is left of 31.5 GB/s for copies from page-locked memory.
const BUS_BYTES_PER_SECOND: f64 = 25e9;

/// Whether a matrix makes residual streams, or makes one of them.
fn is_of_streams(name: &str) -> bool {
    STREAM_PROJECTIONS.iter().any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;
    use crate::device::Dtype;
    use crate::model::Storage;
    use crate::ops::place::place_on;
    use crate::spec::PerSite;
    use crate::train::budget::workload::tests::{model, workload};

    #[test]
    fn of_a_mixture_on_disk_the_experts_that_tokens_use_are_read() {
        let text = r#"{"model_type": "qwen3_moe", "vocab_size": 9, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": true}"#;
        let (config, selection) = model(text, 4);
        let storage = Storage { residency: Residency::Mapped, ..Dtype::F32.into() };
        let read = |row_length| {
            let workload = Workload { storage, rows: 1, row_length, ..workload(&config, &selection) };
            workload.plan().read_bytes_per_step.unwrap()
        };
        let (experts, others, embedding) = (4 * 8 * 3 * 32 * 64, 4 * (4 * 64 * 64 + 8 * 64), 4 * 9 * 64);
        assert_eq!(read(1), 4 * (experts / 4 + others) + embedding);
        assert_eq!(read(2), 4 * (experts * 7 / 16 + others) + embedding);
        assert_eq!(read(1000), 4 * (experts + others) + embedding);
    }

    #[test]
    fn blocks_that_stay_in_host_memory_are_planned_there_and_on_the_bus() {
        let (config, selection) = model(include_str!("../../../configs/smollm2-135m.json"), 16);
        let storage = Storage { residency: Residency::Host, ..Dtype::F32.into() };
        let on_gpu = Workload {
            storage,
            place: place_on(DeviceKind::Cuda),
            gradient_accumulation_steps: 4,
            ..workload(&config, &selection)
        };
        let resident = Workload { storage: Dtype::F32.into(), ..on_gpu.clone() };
        let (plan, block) = (on_gpu.plan(), 4 * (3_540_096 - 2 * 576));
        assert_eq!(resident.plan().peak_bytes - plan.peak_bytes, 27 * block);
        assert_eq!(on_gpu.parked_base_bytes(), 30 * block);
        // Forward all but the first block, which is there; back all but the last.
        assert_eq!((plan.moved_bytes_per_step, plan.read_bytes_per_step), (Some(4 * 58 * block), None));
        assert!((plan.seconds_of_copies().unwrap() - (4 * 58 * block) as f64 / 25e9).abs() < 1e-9);
        let mut upper = selection.clone();
        upper.shapes[..10].fill(PerSite::new());
        // No gradient passes the tenth block, and the first one is no longer there when the next forward begins.
        let moved = Workload { selection: &upper, ..on_gpu.clone() }.plan().moved_bytes_per_step;
        assert_eq!(moved, Some(4 * (30 + 19) * block));
        let layered = Workload { layered_accumulation: true, ..on_gpu.clone() }.plan();
        assert_eq!(layered.moved_bytes_per_step, Some(58 * block));
        let on_cpu = Workload { place: place_on(DeviceKind::Cpu), ..on_gpu };
        assert_eq!(on_cpu.plan(), Workload { place: place_on(DeviceKind::Cpu), ..resident }.plan());
    }
}
