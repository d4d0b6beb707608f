//! Estimates the memory of a recipe's step, component by component, from shapes alone.
//!
//! The sizes are those of the tensors that [`backprop`](super::backprop) keeps and computes. Additional memory of the
//! CPU's kernels is counted as they allocate it. On other devices, where operations are plain tensor calls, the
//! temporary tensors of those calls are counted. `scripts/check_plan.py` compares the totals with measured peaks.

use serde::Serialize;

use super::objective::needs;
use crate::config::{GradientCheckpointing, ObjectiveConfig, OptimizerConfig, Precision};
use crate::lora::targets::{AdapterShape, Selection};
use crate::model::Storage;
use crate::model::budget::{SizedBy, SublayerSizes};
use crate::ops::cross_entropy::LossChunk;
use crate::ops::kernels::Place;
use crate::spec::{Heads, ModelConfig, PerSite};
use crate::util::stats::as_f64;

pub(super) const F32: usize = 4;

/// The settings that determine the memory of a step.
#[derive(Clone, Debug)]
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
    /// Whether it is there for what is trained, and grows with the rank.
    #[serde(skip)]
    pub(super) is_of_adapters: bool,
}

impl Component {
    pub(super) fn new(name: &'static str, bytes: usize, depends_on: &'static str) -> Self {
        Self { name, bytes, depends_on, is_of_adapters: false }
    }

    fn of_adapters(self) -> Self {
        Self { is_of_adapters: true, ..self }
    }
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
    /// Bytes of frozen weights that a step reads where they stay on disk and the page cache holds none of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_step: Option<usize>,
    /// Bytes of frozen weights that a step copies from host memory to the device, where they stay there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved_bytes_per_step: Option<usize>,
}

/// Host memory beside a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostPlan {
    /// Its parts.
    pub components: Vec<Component>,
    /// Peak memory. Weights are loaded before the first step, when only the process itself takes memory.
    pub peak_bytes: usize,
}

impl MemoryPlan {
    /// Peak memory of steps alone, without the rows and the tokenizer of a run.
    #[must_use]
    pub fn steps_bytes(&self) -> usize {
        let of_run = self.components.iter().find(|component| component.name == OF_A_RUN);
        self.peak_bytes - of_run.map_or(0, |component| component.bytes)
    }
}

impl Workload<'_> {
    pub(super) fn tokens(&self) -> usize {
        self.sequences() * self.row_length
    }

    /// Sequences per micro-batch.
    fn sequences(&self) -> usize {
        self.rows * self.objective.num_sequences()
    }

    /// Micro-batches that go through a block before the next.
    #[must_use]
    pub fn layered(&self) -> usize {
        if self.layered_accumulation { self.gradient_accumulation_steps } else { 1 }
    }

    /// Of the blocks that have a backward, the share whose forward is computed again for it.
    #[must_use]
    pub fn share_recomputed(&self) -> f64 {
        let (layers, first) = (self.config.num_layers(), self.selection.first_trained());
        let num_recomputed = self.gradient_checkpointing.num_recomputed(layers).saturating_sub(first);
        as_f64(num_recomputed) / as_f64((layers - first).max(1))
    }

    /// Bytes of an activation.
    pub(super) fn activation_bytes(&self) -> usize {
        self.place.activation_dtype(self.precision.dtype()).num_bytes()
    }

    /// Shape of the head, `[vocab_size, hidden_size]`.
    pub(super) fn head(&self) -> [usize; 2] {
        [self.config.vocab_size, self.config.hidden_size]
    }

    /// The sum of ranks of the block with the largest sum, and the parameters of all blocks.
    fn adapters(&self) -> (usize, usize) {
        let ranks = |layer: &PerSite<AdapterShape>| layer.values().map(|shape| shape.r).sum();
        let most =
            self.selection.shapes.iter().map(ranks).max().unwrap_or(0) * if self.is_part_of_base { 2 } else { 1 };
        // The head that scores is small, and counted with them.
        let score = self.objective.num_score_parameters(self.config.hidden_size);
        (most, self.selection.num_parameters(self.config) + score)
    }

    fn adapter_bytes(&self) -> usize {
        self.adapters().1 * F32
    }

    /// Bytes of the optimizer's states.
    fn state_bytes(&self) -> usize {
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
            SublayerSizes { kept: sizes.kept + ranks, ..sizes }
        })
    }

    /// Numbers per token that attention gives, its output's and, in `f32`, of its scores, of those of the first `num_recomputed`
    /// blocks that keep it.
    fn attended(&self, num_recomputed: usize) -> impl Iterator<Item = [usize; 2]> {
        let kept = if self.gradient_checkpointing.keeps_attention() { num_recomputed } else { 0 };
        let blocks = self.config.blocks.iter().take(kept).skip(self.selection.first_trained());
        let attentions = blocks.filter_map(|block| block.attention());
        attentions.map(|attention| [attention.heads.query_width(), attention.heads.num_heads])
    }

    /// Bytes of which token has which trained row, as truths, integers and `f32`.
    fn token_row_bytes(&self) -> usize {
        self.tokens() * self.selection.num_tokens() * (1 + 2 * F32)
    }

    /// Bytes of the gradient of the largest module that is trained as a whole, of a micro-batch: of every one that goes through a
    /// block before the next, and of the sum over the chunks of targets beside it.
    fn module_grad_bytes(&self) -> usize {
        let largest = self.selection.modules().map(|(_, [rows, columns])| rows * columns * F32).max().unwrap_or(0);
        let of_chunks = usize::from(!self.place.is_host());
        largest * if self.selection.trains_head() { self.layered() + of_chunks } else { 1 }
    }

    /// Bytes of a trained head in the type of the computation, where that is another one.
    fn cast_head_bytes(&self) -> usize {
        let size = self.precision.dtype().num_bytes();
        let [vocab_size, hidden_size] = self.head();
        if self.selection.trains_head() && size < F32 { vocab_size * hidden_size * size } else { 0 }
    }

    /// Bytes of the attention scores in plain tensor calls: a chunk, its exponentials and their gradients.
    fn score_bytes(&self) -> usize {
        let of =
            |heads: Heads| self.place.score_bytes([self.sequences(), self.row_length], heads, self.precision.dtype());
        self.config.blocks.iter().filter_map(|block| Some(of(block.attention()?.heads))).max().unwrap_or(0)
    }

    /// Bytes of the logits of a chunk of target tokens.
    fn logits_bytes(&self) -> usize {
        if self.objective.scores() {
            return 0;
        }
        let rows = self.loss_chunk.tokens(self.place, self.head(), self.tokens());
        // In plain tensor calls, capped logits are kept for the slope of the cap.
        let is_kept = self.config.logit_soft_cap.is_some() && !self.place.is_host();
        let kept = if is_kept { self.activation_bytes() } else { 0 };
        let width = self.place.bytes_per_logit(self.place.activation_dtype(self.precision.dtype())) + kept;
        rows * self.config.vocab_size * width
    }

    /// The memory of the step, or of the start of the adapters where that takes more.
    #[must_use]
    pub fn plan(&self) -> MemoryPlan {
        self.eva_rho.map_or_else(|| self.step_plan(), |rho| self.plan_from_rows(rho))
    }

    pub(super) fn step_plan(&self) -> MemoryPlan {
        let (tokens, width, layers) = (self.tokens(), self.activation_bytes(), self.config.num_layers());
        let (ranks, num_trainable) = self.adapters();
        let blocks = || self.blocks(ranks);
        let hidden = tokens * self.config.hidden_size * width;
        let is_offloaded = self.gradient_checkpointing == GradientCheckpointing::Offload && !self.place.is_host();
        let num_recomputed = self.gradient_checkpointing.num_recomputed(layers);
        // Of the blocks before, which have no backward, nothing is kept.
        let first = self.selection.first_trained();
        let num_inputs = if is_offloaded { 0 } else { num_recomputed.saturating_sub(first) };
        let whole = blocks().skip(num_recomputed.max(first)).map(|block| block.kept).sum::<usize>();
        let attended = || self.attended(num_recomputed);
        let outputs = attended().map(|[output, _]| output).sum::<usize>();
        let of_blocks = num_inputs * hidden + if is_offloaded { 0 } else { (whole + outputs) * tokens * width };
        let of_blocks = of_blocks + attended().map(|[_, scores]| scores).sum::<usize>() * tokens * F32;
        let of_one = of_blocks + self.config.carried_size(num_recomputed.max(first)) * tokens * width;
        // The inputs of two blocks are in transfer at a time.
        let in_transfer = if is_offloaded { 2 * hidden } else { 0 };
        // Micro-batches wait between two blocks as hidden states, or their gradient.
        let of_reference = if needs(self.objective).reference.is_some() { self.layered() * hidden } else { 0 };
        let kept = self.layered() * of_one + in_transfer + (self.layered() - 1) * hidden + of_reference;
        // When the first block is computed again, those that kept everything have freed it.
        let recomputed = blocks().take(num_recomputed).skip(first).map(|block| block.kept).max();
        let recomputed = recomputed.unwrap_or(0).saturating_sub(whole);
        let backward = blocks().skip(first).map(|block| block.backward).max().unwrap_or(0);
        // In its forward, what a block keeps is already among what is kept, unless that is freed again; then what the later blocks
        // will keep is not there yet.
        let in_forward = blocks().enumerate().map(|(layer, block)| {
            let freed =
                if layer < num_recomputed.max(first) { (block.kept + block.forward).saturating_sub(whole) } else { 0 };
            freed.max(block.forward)
        });
        let in_forward = in_forward.max().unwrap_or(0) * tokens * width;
        let in_backward = (recomputed + backward) * tokens * width
            + self.score_bytes()
            + self.operand_bytes()
            + self.decomposed_bytes()
            + self.token_row_bytes();
        let in_blocks = in_backward.max(in_forward);
        let widest = self.config.sites().map(|(_, site)| site.shape[1]).max().unwrap_or(0);
        let rounded = self.place.rounded_bytes(tokens * widest, self.precision.dtype());
        let logits = self.logits_bytes();
        let in_loss = 5 * hidden + self.copied_head_bytes();
        // On the CPU the logits' memory is kept between steps; elsewhere it returns to the pool.
        let (loss, inside) = if self.place.is_host() {
            (logits, in_blocks.max(in_loss) + rounded)
        } else if logits + in_loss > in_blocks {
            (logits, in_loss)
        } else {
            (0, in_blocks)
        };
        let inside = inside + self.module_grad_bytes();
        let adapters = num_trainable * F32;
        let base = self.base_bytes();
        let overhead =
            if self.place.is_host() { HOST_PROCESS_BYTES } else { GPU_CONTEXT_BYTES + self.place.library_bytes() };
        let accumulated = if self.gradient_accumulation_steps > 1 { adapters } else { 0 };
        let of_rows = "train.micro_batch_size, data.max_length";
        let of_kept = if self.layered() > 1 {
            "rows of a step (train.layered_accumulation), data.max_length, train.gradient_checkpointing"
        } else {
            "train.micro_batch_size, data.max_length, train.gradient_checkpointing"
        };
        let mut components = vec![
            Component::new("base weights", base, "model.dtype, model.quantization, model.residency"),
            // Beside the trained matrices: those that take their start out of the base, and both joined.
            Component::new(
                "adapters",
                adapters * if self.is_part_of_base { 4 } else { 1 } + self.norm_bytes() + self.cast_head_bytes(),
                "lora.r, lora.target_modules",
            )
            .of_adapters(),
            Component::new("gradients", adapters + accumulated / layers.max(1), "lora.r").of_adapters(),
            Component::new("optimizer state", self.state_bytes(), "lora.r, optimizer.name").of_adapters(),
            Component::new("kept for the backward", kept, of_kept),
            Component::new("inside a block", inside, of_rows),
            Component::new("logits of a chunk", loss, "train.loss_chunk_tokens, the vocabulary"),
            Component::new("process and libraries", overhead, "the device"),
        ];
        if self.place.is_host() {
            let tokenizer = self.config.vocab_size * TOKENIZER_BYTES_A_TOKEN;
            // What is written at the end: a copy, and what is read back of it.
            let written = 2 * adapters;
            components.push(Component::new(OF_A_RUN, RUN_BYTES + tokenizer + written, "the vocabulary, lora.r"));
        } else {
            // Pools keep what the loss or a block has freed, in sizes of which the other uses only some: of the smaller of the
            // two 0.5 for Qwen3 0.6B, 1.0 for Llama 3.1 8B and 1.3 for Llama 3.2 1B, on the stand-in for the driver.
            let pools = (logits + in_loss).min(in_blocks) * 8 / 10;
            // Sums of gradients outlive a micro-batch, it seems in pages that lack room for the largest tensors then. Half of
            // the inputs that are kept fits four models of 0.6B to 8B on an H200; without such inputs it was not measured.
            let stranded = if self.passes() > 1 { num_inputs * hidden / 2 } else { 0 };
            components.push(Component::new("the allocator's pools", pools + stranded, "the device"));
        }
        if self.num_ranks > 1 {
            // Flat, beside the gradients that they are made of, or that are taken out of them.
            let sums = adapters + self.place.exchange_bytes();
            components.push(Component::new("sums over the ranks", sums, "lora.r, the device").of_adapters());
        }
        let peak_bytes = components.iter().map(|component| component.bytes).sum();
        MemoryPlan {
            components,
            peak_bytes,
            num_trainable,
            read_bytes_per_step: self.read_bytes_per_step(),
            moved_bytes_per_step: self.moved_bytes_per_step(),
        }
    }

    /// Memory of the host; `None` on the CPU, where [`plan`](Self::plan) already is the host's memory.
    #[must_use]
    pub fn host_plan(&self) -> Option<HostPlan> {
        if self.place.is_host() {
            return None;
        }
        let tensors = self.config.expected_tensors();
        let largest = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).max().unwrap_or(0);
        let loading = COPIES_WHILE_LOADING * largest * self.storage.dtype.num_bytes();
        let tokens = self.tokens();
        let parked = if self.gradient_checkpointing == GradientCheckpointing::Offload {
            let num_kept = self.config.num_layers() - self.selection.first_trained();
            let numbers = num_kept * self.config.hidden_size * tokens;
            self.layered() * numbers * self.precision.dtype().num_bytes()
        } else {
            0
        };
        // The micro-batch in use has left the queue.
        let queue = (self.prefetch_batches + 1) * tokens * TOKEN_BYTES;
        // Adapters and the states of the optimizer are copied before they are written.
        let (saving, base) = (self.adapter_bytes() + self.state_bytes(), self.parked_base_bytes());
        let components = vec![
            Component::new("process and driver", GPU_PROCESS_BYTES, "the device"),
            Component::new(
                "rows in the queue",
                queue,
                "data.prefetch_batches, train.micro_batch_size, data.max_length",
            ),
            Component::new("parked for the backward", parked, "train.gradient_checkpointing"),
            Component::new("blocks of the base", base, "model.residency, model.dtype, model.quantization"),
            Component::new("adapters being saved", saving, "lora.r, lora.target_modules"),
            Component::new("weights being loaded", loading, "model.dtype; before the first step"),
        ];
        Some(HostPlan { components, peak_bytes: GPU_PROCESS_BYTES + base + loading.max(queue + parked + saving) })
    }
}

/// The binary, its threads, and memory that the two allocators keep. With this value, `scripts/check_plan.py` errs by
/// about as much upwards as downwards in its smallest recipes.
const HOST_PROCESS_BYTES: usize = 38 << 20;

/// What a run has besides its steps.
pub(super) const OF_A_RUN: &str = "tokenizer, rows, files";
/// Rows, reports, and the code that makes them. With these two values `scripts/check_plan.py` errs as with the one above.
const RUN_BYTES: usize = 8 << 20;
/// A token of the vocabulary in the tokenizer: its text twice, its merge, and what reading them has left.
const TOKENIZER_BYTES_A_TOKEN: usize = 320;

/// CUDA's context and loaded kernels. An estimate: this project has not measured it; drivers take 300 to 600 MiB.
pub const GPU_CONTEXT_BYTES: usize = 500 << 20;

/// The binary, the driver's part in the process, kernels being compiled. An estimate: this project has not measured it.
const GPU_PROCESS_BYTES: usize = 1 << 30;
/// While a tensor is loaded, it is both in the mapped file and, converted, on its way to the device.
const COPIES_WHILE_LOADING: usize = 2;
/// Bytes of a token in a micro-batch: its id, its target and the target's position.
const TOKEN_BYTES: usize = 4 + 16;

#[cfg(test)]
pub(super) mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::config::{LoraConfig, Residency};
    use crate::device::DeviceKind;
    use crate::device::Dtype;
    use crate::lora::FullTensor;
    use crate::ops::place::place_on;

    static CROSS_ENTROPY: LazyLock<ObjectiveConfig> = LazyLock::new(ObjectiveConfig::default);
    static ADAMW: LazyLock<OptimizerConfig> = LazyLock::new(OptimizerConfig::default);

    pub(in crate::train) fn model(json: &str, r: usize) -> (ModelConfig, Selection) {
        let config = ModelConfig::from_json(json).unwrap();
        let selection = LoraConfig { r, ..LoraConfig::default() }.select(&config).unwrap();
        (config, selection)
    }

    pub(in crate::train) fn workload<'a>(config: &'a ModelConfig, selection: &'a Selection) -> Workload<'a> {
        Workload {
            config,
            selection,
            storage: Dtype::F32.into(),
            is_random: false,
            precision: Precision::F32,
            rows: 2,
            row_length: 512,
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
        }
    }

    fn plan(change: impl FnOnce(&mut Workload<'_>)) -> MemoryPlan {
        let (config, selection) = model(include_str!("../../configs/smollm2-135m.json"), 16);
        let mut workload = workload(&config, &selection);
        change(&mut workload);
        workload.plan()
    }

    fn part(components: &[Component], name: &str) -> usize {
        components.iter().find(|component| component.name == name).unwrap().bytes
    }

    fn bytes(plan: &MemoryPlan, name: &str) -> usize {
        part(&plan.components, name)
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
    fn a_head_that_is_trained_takes_itself_its_gradients_and_moments() {
        let (config, plain) = model(include_str!("../../configs/smollm2-135m.json"), 16);
        let mut selection = plain.clone();
        selection.full.insert(FullTensor::Tied, [49_152, 576]);
        let [with, without] = [&selection, &plain].map(|selection| workload(&config, selection).plan());
        // Itself, the sum of its gradients, that of a micro-batch, two moments, and two copies when it is written.
        assert_eq!(with.peak_bytes - without.peak_bytes, 7 * 4 * 49_152 * 576);
        let bf16 = Workload { precision: Precision::Bf16, ..workload(&config, &selection) }.plan();
        assert_eq!(bytes(&bf16, "adapters") - bytes(&with, "adapters"), 2 * 49_152 * 576);
    }

    #[test]
    fn what_saves_memory_is_planned_to_save_it() {
        let whole = plan(|_| {});
        let checkpointed = plan(|w| w.gradient_checkpointing = GradientCheckpointing::On);
        assert_eq!(bytes(&checkpointed, "kept for the backward"), 30 * 1024 * 576 * 4);
        assert!(checkpointed.peak_bytes < whole.peak_bytes * 6 / 10);
        let half = plan(|w| w.storage = Dtype::Bf16.into());
        // Norms stay in f32.
        assert_eq!(whole.peak_bytes - half.peak_bytes, 2 * (134_515_008 - 61 * 576));
        let mapped = |w: &mut Workload<'_>| w.storage.residency = Residency::Mapped;
        // The norms, a block, and the head, which is larger than another block.
        let (norms, block, head) = (61 * 576, 3_540_096 - 2 * 576, 49_152 * 576);
        let base = plan(mapped);
        assert_eq!(bytes(&base, "base weights"), 4 * (norms + block + head));
        assert_eq!((base.read_bytes_per_step, whole.read_bytes_per_step), (Some(4 * (60 * block + head)), None));
        assert!(plan(|w| w.rows = 1).peak_bytes < whole.peak_bytes);
        let logits = |tokens| bytes(&plan(|w| w.loss_chunk = LossChunk::Tokens(tokens)), "logits of a chunk");
        assert_eq!([logits(128), logits(1024)], [128, 1024].map(|tokens| tokens * 49_152 * 4));
        // 1024 tokens are two chunks of 96 MiB.
        assert_eq!(bytes(&whole, "logits of a chunk"), logits(512));
        let gpu = |checkpointing| {
            plan(|w| {
                (w.place, w.precision, w.gradient_checkpointing) =
                    (place_on(DeviceKind::Cuda), Precision::Bf16, checkpointing);
            })
        };
        let [on, offload] = [GradientCheckpointing::On, GradientCheckpointing::Offload].map(gpu);
        // Inputs of all blocks, or of two.
        assert_eq!(bytes(&on, "kept for the backward"), 30 * 1024 * 576 * 2);
        assert_eq!(bytes(&offload, "kept for the backward"), 2 * 1024 * 576 * 2);
    }

    #[test]
    fn of_blocks_before_the_first_that_is_trained_nothing_is_kept() {
        let (config, all) = model(include_str!("../../configs/smollm2-135m.json"), 16);
        let mut upper = all.clone();
        upper.shapes[..20].fill(PerSite::new());
        for place in [DeviceKind::Cpu, DeviceKind::Cuda].map(place_on) {
            let kept = |selection, gradient_checkpointing| {
                let plan = Workload { gradient_checkpointing, place, ..workload(&config, selection) }.plan();
                bytes(&plan, "kept for the backward")
            };
            let off = kept(&upper, GradientCheckpointing::Off);
            assert_eq!(off, kept(&all, GradientCheckpointing::Off) / 3);
            assert_eq!(kept(&upper, GradientCheckpointing::On), 10 * 1024 * 576 * 4);
            assert_eq!(kept(&upper, GradientCheckpointing::Blocks(20)), off, "no block is computed again");
        }
        let some = Workload { gradient_checkpointing: GradientCheckpointing::Blocks(25), ..workload(&config, &upper) };
        assert_eq!(some.share_recomputed(), 0.5);
        let gpu = Workload {
            gradient_checkpointing: GradientCheckpointing::Offload,
            place: place_on(DeviceKind::Cuda),
            ..some
        };
        assert_eq!(part(&gpu.host_plan().unwrap().components, "parked for the backward"), 10 * 1024 * 576 * 4);
    }

    #[test]
    fn logits_in_f16_and_their_gradient_have_memory_of_their_own() {
        let logits = |precision| {
            let (config, selection) = model(include_str!("../../configs/smollm2-135m.json"), 16);
            let place = place_on(DeviceKind::Cuda);
            Workload { precision, place, ..workload(&config, &selection) }.logits_bytes() / 49_152
        };
        let [bf16, f16] = [Precision::Bf16, Precision::F16].map(logits);
        assert_eq!(f16, bf16 / 2 * (2 * 2 + 3 * 4));
    }

    #[test]
    fn what_sums_of_gradients_keep_from_use_is_planned_on_gpus_that_accumulate() {
        let pools = |gradient_accumulation_steps, layered_accumulation| {
            let plan = plan(|w| {
                (w.place, w.gradient_checkpointing) = (place_on(DeviceKind::Cuda), GradientCheckpointing::On);
                (w.gradient_accumulation_steps, w.layered_accumulation) =
                    (gradient_accumulation_steps, layered_accumulation);
            });
            bytes(&plan, "the allocator's pools")
        };
        assert_eq!(pools(4, false) - pools(1, false), 30 * 1024 * 576 * 4 / 2);
        assert_eq!(pools(4, true), pools(1, false));
    }

    #[test]
    fn block_inputs_that_leave_the_gpu_are_in_host_memory() {
        let (config, selection) = model(include_str!("../../configs/llama-3.1-8b.json"), 16);
        let on_gpu = Workload {
            storage: Dtype::Bf16.into(),
            precision: Precision::Bf16,
            rows: 4,
            row_length: 4096,
            gradient_checkpointing: GradientCheckpointing::On,
            place: place_on(DeviceKind::Cuda),
            ..workload(&config, &selection)
        };
        let bytes = |plan: &HostPlan, name: &str| part(&plan.components, name);
        let kept = on_gpu.host_plan().unwrap();
        let offloaded = Workload { gradient_checkpointing: GradientCheckpointing::Offload, ..on_gpu.clone() };
        let parked = offloaded.host_plan().unwrap();
        assert_eq!(bytes(&kept, "parked for the backward"), 0);
        // 32 layers, 16,384 tokens, 4,096 numbers of two bytes.
        assert_eq!(bytes(&parked, "parked for the backward"), 4 << 30);
        assert_eq!(on_gpu.plan().peak_bytes - offloaded.plan().peak_bytes, (4 << 30) * 30 / 32);
        assert_eq!(bytes(&parked, "rows in the queue"), 5 * 16_384 * 20);
        // While loading, the process holds only two copies of the embedding: the queue is filled later.
        let loading = 2 * 128_256 * 4096 * 2;
        assert_eq!((bytes(&kept, "weights being loaded"), kept.peak_bytes), (loading, (1 << 30) + loading));
        let in_steps = bytes(&parked, "rows in the queue") + (4 << 30) + bytes(&parked, "adapters being saved");
        assert_eq!(parked.peak_bytes, (1 << 30) + in_steps);
        assert_eq!(Workload { place: place_on(DeviceKind::Cpu), ..on_gpu }.host_plan(), None);
    }
}
