//! Estimates the memory of a recipe's step, component by component, from shapes alone.
//!
//! The sizes are those of the tensors that [`backprop`](super::backprop) keeps and computes. Additional memory of the
//! CPU's kernels is counted as they allocate it. On other devices, where operations are plain tensor calls, the
//! temporary tensors of those calls are counted. `scripts/check_plan.py` compares the totals with measured peaks.

use serde::Serialize;

use super::config::GradientCheckpointing;
use crate::device::Dtype;
use crate::lora::targets::{AdapterShape, Selection};
use crate::ops::cross_entropy::LossChunk;
use crate::spec::ModelConfig;

/// Bytes of a number in adapters, gradients and moments.
const F32: usize = 4;

/// The settings that determine the memory of a step.
#[derive(Clone, Debug)]
pub struct Workload<'a> {
    /// Shape of the model.
    pub config: &'a ModelConfig,
    /// The adapted layers.
    pub selection: &'a Selection,
    /// Type in which the base is stored.
    pub storage: Dtype,
    /// Type of the computation.
    pub precision: Dtype,
    /// Sequences per micro-batch.
    pub rows: usize,
    /// Tokens per sequence.
    pub row_length: usize,
    /// What a block's forward keeps for its backward.
    pub gradient_checkpointing: GradientCheckpointing,
    /// Micro-batches per step.
    pub gradient_accumulation_steps: usize,
    /// Number of target tokens whose logits exist at a time.
    pub loss_chunk: LossChunk,
    /// Micro-batches that are prepared ahead.
    pub prefetch_batches: usize,
    /// Whether the kernels of [`crate::ops::cpu`] run, which they do on the CPU.
    pub on_cpu: bool,
}

/// One part of the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Component {
    /// What it is.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
    /// What it depends on.
    pub depends_on: &'static str,
}

/// The memory of a step at its peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// The parts that exist at the peak; their sum is [`peak_bytes`](Self::peak_bytes).
    pub components: Vec<Component>,
    /// Peak memory, in bytes.
    pub peak_bytes: usize,
    /// Number of trained parameters.
    pub num_trainable: usize,
}

/// Sizes of a block, as numbers per token.
struct BlockSizes {
    /// Tensors that the backward needs, including the block's input.
    kept: usize,
    /// Temporary tensors of the forward.
    forward: usize,
    /// Temporary tensors of the backward of the feed-forward layer and of the attention.
    backward: usize,
}

impl Workload<'_> {
    fn tokens(&self) -> usize {
        self.rows * self.row_length
    }

    /// Bytes of an activation: the CPU's kernels compute in `f32`, even where they round the operands of products.
    fn activation_bytes(&self) -> usize {
        if self.on_cpu && self.precision == Dtype::Bf16 { F32 } else { self.precision.num_bytes() }
    }

    /// The sum of ranks of the block with the largest sum, and the parameters of all blocks.
    fn adapters(&self) -> (usize, usize) {
        let ranks = |layer: &[Option<AdapterShape>; 7]| layer.iter().flatten().map(|shape| shape.r).sum();
        let most = self.selection.shapes.iter().map(ranks).max().unwrap_or(0);
        (most, self.selection.num_parameters(self.config))
    }

    /// Bytes of the adapters of all layers.
    pub(super) fn adapter_bytes(&self) -> usize {
        self.adapters().1 * F32
    }

    fn base_bytes(&self) -> usize {
        let tensors = self.config.expected_tensors();
        let bytes = tensors.iter().map(|(_, shape)| {
            // Norms and biases are kept in f32.
            let width = if shape.len() == 1 { F32 } else { self.storage.num_bytes() };
            shape.iter().product::<usize>() * width
        });
        bytes.sum()
    }

    fn block(&self, ranks: usize) -> BlockSizes {
        let ModelConfig { hidden_size: hidden, intermediate_size: ffn, .. } = *self.config;
        let query = self.config.num_attention_heads * self.config.head_dim;
        let key_value = self.config.num_key_value_heads * self.config.head_dim;
        let heads = self.config.num_attention_heads + self.config.num_key_value_heads;
        // Queries and keys before their norms, and a factor for each head.
        let qk_norm = if self.config.qk_norm { query + key_value + heads } else { 0 };
        let statistics = self.config.num_attention_heads + 2 + qk_norm;
        let kept = 2 * hidden + 2 * query + 2 * key_value + 2 * ffn + statistics + ranks;
        // In the forward: the feed-forward product, and the output beside its residual.
        let forward = ffn + hidden;
        let feed_forward = 3 * ffn + 2 * hidden;
        // The kernels keep each head's gradients of keys and values, and partial sums of the queries' gradients.
        let attention = if self.on_cpu { 6 * query } else { 4 * query } + 2 * key_value + 3 * hidden;
        BlockSizes { kept, forward, backward: feed_forward.max(attention) }
    }

    /// Bytes of the attention scores in plain tensor calls: a chunk, its exponentials and their gradients.
    fn score_bytes(&self) -> usize {
        let all = self.rows * self.config.num_attention_heads * self.row_length * self.row_length * F32;
        if self.on_cpu { 0 } else { 4 * all.min(crate::ops::attention::CHUNK_BYTES) }
    }

    /// Bytes of the logits of a chunk of target tokens.
    fn logits_bytes(&self) -> usize {
        let row = self.config.vocab_size * F32;
        let rows = self.loss_chunk.tokens(self.config.vocab_size, self.tokens());
        // In plain tensor calls: logits, log-probabilities, probabilities and the gradient.
        if self.on_cpu { rows * row } else { 4 * rows * row }
    }

    /// The memory of the step.
    #[must_use]
    pub fn plan(&self) -> MemoryPlan {
        let (tokens, width, layers) = (self.tokens(), self.activation_bytes(), self.config.num_hidden_layers);
        let (ranks, num_trainable) = self.adapters();
        let block = self.block(ranks);
        let hidden = tokens * self.config.hidden_size * width;
        let kept = match self.gradient_checkpointing {
            GradientCheckpointing::Off => layers * block.kept * tokens * width,
            GradientCheckpointing::On => layers * hidden,
            GradientCheckpointing::Offload if self.on_cpu => layers * hidden,
            // The inputs of two blocks are in transfer at a time.
            GradientCheckpointing::Offload => 2 * hidden,
        };
        let recomputed =
            if self.gradient_checkpointing == GradientCheckpointing::Off { 0 } else { block.kept * tokens * width };
        let in_forward = (block.kept + block.forward) * tokens * width;
        let in_backward = recomputed + block.backward * tokens * width + self.score_bytes();
        let rounded = if self.on_cpu && self.precision == Dtype::Bf16 {
            // Operands as pairs of bf16.
            tokens * self.config.intermediate_size * 2
        } else {
            0
        };
        let logits = self.logits_bytes();
        let in_loss = 5 * hidden;
        // On the CPU the logits' memory is kept between steps; elsewhere it returns to the pool.
        let (loss, inside) = if self.on_cpu {
            (logits, in_backward.max(in_loss).max(in_forward) + rounded)
        } else if logits + in_loss > in_backward {
            (logits, in_loss)
        } else {
            (0, in_backward)
        };
        let adapters = num_trainable * F32;
        let base = self.base_bytes();
        let overhead = if self.on_cpu { HOST_PROCESS_BYTES } else { GPU_CONTEXT_BYTES };
        let accumulated = if self.gradient_accumulation_steps > 1 { adapters } else { 0 };
        let mut components = vec![
            Component { name: "base weights", bytes: base, depends_on: "model.dtype" },
            Component { name: "adapters", bytes: adapters, depends_on: "lora.r, lora.target_modules" },
            Component { name: "gradients", bytes: adapters + accumulated / layers.max(1), depends_on: "lora.r" },
            Component { name: "optimizer state", bytes: 2 * adapters, depends_on: "lora.r" },
            Component {
                name: "kept for the backward",
                bytes: kept,
                depends_on: "train.micro_batch_size, data.max_length, train.gradient_checkpointing",
            },
            Component { name: "inside a block", bytes: inside, depends_on: "train.micro_batch_size, data.max_length" },
            Component { name: "logits of a chunk", bytes: loss, depends_on: "train.loss_chunk_tokens, the vocabulary" },
            Component { name: "process and libraries", bytes: overhead, depends_on: "the device" },
        ];
        if !self.on_cpu {
            let live: usize = components.iter().map(|component| component.bytes).sum::<usize>() - overhead;
            // Pools round sizes up and keep freed memory.
            let bytes = live / 10;
            components.push(Component { name: "the allocator's pools", bytes, depends_on: "the device" });
        }
        let peak_bytes = components.iter().map(|component| component.bytes).sum();
        MemoryPlan { components, peak_bytes, num_trainable }
    }
}

/// The binary, its threads, and memory that the two allocators keep. With this value, `scripts/check_plan.py` errs by
/// about as much upwards as downwards in its smallest recipes.
const HOST_PROCESS_BYTES: usize = 35 << 20;

/// CUDA's context and loaded kernels. An estimate: this project has not measured it; drivers take 300 to 600 MiB.
pub const GPU_CONTEXT_BYTES: usize = 500 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lora::config::LoraConfig;

    fn plan(change: impl FnOnce(&mut Workload<'_>)) -> MemoryPlan {
        let config = ModelConfig::from_json(include_str!("../../configs/smollm2-135m.json")).unwrap();
        let selection = LoraConfig { r: 16, ..LoraConfig::default() }.select(config.num_hidden_layers).unwrap();
        let mut workload = Workload {
            config: &config,
            selection: &selection,
            storage: Dtype::F32,
            precision: Dtype::F32,
            rows: 2,
            row_length: 512,
            gradient_checkpointing: GradientCheckpointing::Off,
            gradient_accumulation_steps: 1,
            loss_chunk: LossChunk::Auto,
            prefetch_batches: 4,
            on_cpu: true,
        };
        change(&mut workload);
        workload.plan()
    }

    fn bytes(plan: &MemoryPlan, name: &str) -> usize {
        plan.components.iter().find(|component| component.name == name).unwrap().bytes
    }

    #[test]
    fn weights_adapters_and_moments_are_counted_to_the_byte() {
        let plan = plan(|_| {});
        assert_eq!(bytes(&plan, "base weights"), 4 * 134_515_008);
        assert_eq!(plan.num_trainable, 4_884_480);
        assert_eq!(bytes(&plan, "optimizer state"), 8 * plan.num_trainable);
        let sum: usize = plan.components.iter().map(|component| component.bytes).sum();
        assert_eq!(plan.peak_bytes, sum);
    }

    #[test]
    fn what_saves_memory_is_planned_to_save_it() {
        let whole = plan(|_| {});
        let checkpointed = plan(|w| w.gradient_checkpointing = GradientCheckpointing::On);
        assert_eq!(bytes(&checkpointed, "kept for the backward"), 30 * 1024 * 576 * 4);
        assert!(checkpointed.peak_bytes < whole.peak_bytes * 6 / 10);
        let half = plan(|w| w.storage = Dtype::Bf16);
        // Norms stay in f32.
        assert_eq!(whole.peak_bytes - half.peak_bytes, 2 * (134_515_008 - 61 * 576));
        assert!(plan(|w| w.rows = 1).peak_bytes < whole.peak_bytes);
        let logits = |tokens| bytes(&plan(|w| w.loss_chunk = LossChunk::Tokens(tokens)), "logits of a chunk");
        assert_eq!([logits(128), logits(1024)], [128, 1024].map(|tokens| tokens * 49_152 * 4));
        // 1024 tokens are two chunks of 96 MiB.
        assert_eq!(bytes(&whole, "logits of a chunk"), logits(512));
        let gpu = |checkpointing| {
            plan(|w| (w.on_cpu, w.precision, w.gradient_checkpointing) = (false, Dtype::Bf16, checkpointing))
        };
        let [on, offload] = [GradientCheckpointing::On, GradientCheckpointing::Offload].map(gpu);
        assert_eq!(bytes(&on, "kept for the backward"), 15 * bytes(&offload, "kept for the backward"));
    }
}
