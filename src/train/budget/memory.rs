//! Estimates the memory of a recipe's step, component by component, from shapes alone.
//!
//! The sizes are those of the tensors that [`backprop`](crate::train::backprop) keeps and computes. Additional memory of the
//! CPU's kernels is counted as they allocate it. On other devices, where operations are plain tensor calls, the
//! temporary tensors of those calls are counted. `scripts/check_plan.py` compares the totals with measured peaks.

use serde::Serialize;

use super::activations::Working;
use super::images::ImageMemory;
use super::workload::{F32, Workload};
use crate::config::{FileType, GradientCheckpointing, ObjectiveName, Residency};
use crate::model::budget::text_bytes;
use crate::ops::cpu::MOST_TEXTS;

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
    /// The memory of the step, or of the start of the adapters where that takes more.
    #[must_use]
    pub fn plan(&self) -> MemoryPlan {
        self.eva_rho.map_or_else(|| self.step_plan(), |rho| self.plan_from_rows(rho))
    }

    pub(super) fn step_plan(&self) -> MemoryPlan {
        let (num_trainable, Working { inside, logits, pools }) = (self.num_trainable(), self.working());
        let adapters = num_trainable * F32;
        let accumulated = if self.gradient_accumulation_steps > 1 { adapters } else { 0 };
        let held = adapters * if self.is_part_of_base { 4 } else { 1 } + self.norm_bytes() + self.cast_head_bytes();
        let overhead =
            if self.place.is_host() { HOST_PROCESS_BYTES } else { GPU_CONTEXT_BYTES + self.place.library_bytes() };
        let of_kept = if self.layered() > 1 {
            "rows of a step (train.layered_accumulation), data.max_length, train.gradient_checkpointing"
        } else {
            "train.micro_batch_size, data.max_length, train.gradient_checkpointing"
        };
        let base = self.base_bytes();
        let gradients = adapters + accumulated / self.config.num_layers().max(1);
        let mut components = vec![
            Component::new("base weights", base, "model.dtype, model.quantization, model.residency"),
            // Beside the trained matrices: those that take their start out of the base, and both joined.
            Component::new("adapters", held, "lora.r, lora.target_modules").of_adapters(),
            Component::new("gradients", gradients, "lora.r").of_adapters(),
            Component::new("optimizer state", self.state_bytes(), "lora.r, optimizer.name").of_adapters(),
            Component::new("kept for the backward", self.kept_bytes(), of_kept),
            Component::new("inside a block", inside, "train.micro_batch_size, data.max_length"),
            Component::new("logits of a chunk", logits, "train.loss_chunk_tokens, the vocabulary"),
            Component::new("process and libraries", overhead, "the device"),
        ];
        components.push(if self.place.is_host() {
            let tokenizer = self.config.vocab_size * TOKENIZER_BYTES_A_TOKEN;
            // What is written at the end: a copy, and what is read back of it.
            let written = 2 * adapters;
            Component::new(OF_A_RUN, RUN_BYTES + tokenizer + written, "the vocabulary, lora.r")
        } else {
            Component::new("the allocator's pools", pools, "the device")
        });
        if self.num_ranks > 1 {
            // Flat, beside the gradients that they are made of, or that are taken out of them.
            let sums = adapters + self.place.exchange_bytes();
            components.push(Component::new("sums over the ranks", sums, "lora.r, the device").of_adapters());
        }
        // While answers are written, nothing is kept for a backward.
        let working = self.kept_bytes() + inside + logits;
        let answers = self.answers_bytes().saturating_sub(working);
        if answers > 0 {
            let depends_on = "objective.num_generations, objective.max_completion_length";
            components.push(Component::new("answers in the making", answers, depends_on));
        }
        components.extend(self.image_components(working, held + gradients + self.state_bytes()));
        if let Some(file_type) = self.ship_as {
            let bytes = self.rounding_bytes(file_type, base);
            components.push(Component::new("rounding to the file's type", bytes, "train.ship_as"));
        }
        MemoryPlan {
            peak_bytes: components.iter().map(|component| component.bytes).sum(),
            components,
            num_trainable,
            read_bytes_per_step: self.read_bytes_per_step(),
            moved_bytes_per_step: self.moved_bytes_per_step(),
        }
    }

    /// The tower where it stays, and what encoding an image takes beyond what a step will: its `working` bytes come after it, and
    /// the `trained` ones too if all images are encoded before the first step.
    pub(super) fn image_components(&self, working: usize, trained: usize) -> Vec<Component> {
        let ImageMemory { tower_bytes, encoding_bytes, has_unkept, .. } = *self.images;
        let (stays, leaves, later) =
            if has_unkept { (tower_bytes, 0, working) } else { (0, tower_bytes, working + trained) };
        let encoding_bytes = encoding_bytes[usize::from(!self.place.is_host())];
        let encoding = (encoding_bytes + leaves).saturating_sub(later);
        let components = [
            Component::new("vision tower", stays, "the model, data.image_cache_gib"),
            Component::new("images being encoded", encoding, "the model, data.image_max_pixels"),
        ];
        components.into_iter().filter(|component| component.bytes > 0).collect()
    }

    /// What layers keep of the answers of a round that are written at the same time.
    fn answers_bytes(&self) -> usize {
        if self.objective.name != ObjectiveName::Grpo {
            return 0;
        }
        // What the model has seen of episodes that wait for an environment is kept.
        let most = MOST_TEXTS * if self.objective.environment.is_set() { 2 } else { 1 };
        let num_answers = most.min(self.sequences() * self.gradient_accumulation_steps);
        num_answers * text_bytes(self.config, self.activation_bytes(), self.row_length)
    }

    /// What training for a file takes beside the rest, `base` of which leaves when it begins: the largest tensor of the model, its sum
    /// with the adapter and its codes, all decoded, or in a step that of a matrix; the adapter as it was; and blocks in memory in the
    /// place of weights on disk.
    fn rounding_bytes(&self, file_type: FileType, base: usize) -> usize {
        let largest = |shapes: &mut dyn Iterator<Item = usize>| NUM_COPIES * F32 * shapes.max().unwrap_or(0);
        let all = self.config.expected_tensors();
        let of_all = largest(&mut all.iter().map(|(_, shape)| shape.iter().product()));
        let adapted = self.selection.iter().map(|(layer, site, _)| self.config.blocks[layer].sites[site].num_weights());
        let of_step = largest(&mut { adapted });
        let num_weights: usize = self.config.sites().map(|(_, site)| site.num_weights()).sum();
        // Some matrices have more bits than most: those of two bits take a third more with them.
        let blocks = file_type.num_bytes(num_weights) * 4 / 3;
        let is_mapped = self.storage.residency == Residency::Mapped;
        let beside = of_step + if is_mapped { blocks } else { 0 };
        of_all.saturating_sub(if is_mapped { 0 } else { base }).max(beside) + self.num_trainable() * F32
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
            let numbers = num_kept * self.config.streams_width() * tokens;
            self.layered() * numbers * self.precision.dtype().num_bytes()
        } else {
            0
        };
        // The micro-batch in use has left the queue.
        let queue = (self.prefetch_batches + 1) * tokens * TOKEN_BYTES;
        // Adapters and the states of the optimizer are copied before they are written.
        let (saving, base) = (self.num_trainable() * F32 + self.state_bytes(), self.parked_base_bytes());
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

    /// Bytes of a trained head in the type of the computation, where that is another one.
    fn cast_head_bytes(&self) -> usize {
        let size = self.precision.dtype().num_bytes();
        let [vocab_size, hidden_size] = self.head();
        if self.selection.trains_head() && size < F32 { vocab_size * hidden_size * size } else { 0 }
    }
}

/// Of a tensor that is rounded: the base's, the sum, what the codes stand for, and what is compared of these.
const NUM_COPIES: usize = 4;

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
mod tests {
    use super::*;
    use crate::config::Precision;
    use crate::device::{DeviceKind, Dtype};
    use crate::lora::FullTensor;
    use crate::ops::cross_entropy::LossChunk;
    use crate::ops::place::place_on;
    use crate::spec::PerSite;
    use crate::train::budget::workload::tests::{model, workload};

    fn plan(change: impl FnOnce(&mut Workload<'_>)) -> MemoryPlan {
        let (config, selection) = model(include_str!("../../../configs/smollm2-135m.json"), 16);
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
        let (config, plain) = model(include_str!("../../../configs/smollm2-135m.json"), 16);
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
    fn rounding_for_a_file_takes_copies_of_a_matrix_and_blocks_where_weights_were_on_disk() {
        let rounding = |residency| {
            let plan = plan(|w| (w.ship_as, w.storage.residency) = (Some(FileType::Q4), residency));
            bytes(&plan, "rounding to the file's type") - 4 * plan.num_trainable
        };
        assert_eq!(rounding(Residency::Memory), 4 * 4 * 576 * 1536);
        assert_eq!(rounding(Residency::Mapped), 4 * 4 * 49_152 * 576);
    }

    #[test]
    fn of_blocks_before_the_first_that_is_trained_nothing_is_kept() {
        let (config, all) = model(include_str!("../../../configs/smollm2-135m.json"), 16);
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
    fn logits_in_f32_and_their_gradient_have_memory_of_their_own() {
        let logits = |precision| {
            let (config, selection) = model(include_str!("../../../configs/smollm2-135m.json"), 16);
            let place = place_on(DeviceKind::Cuda);
            Workload { precision, place, ..workload(&config, &selection) }.logits_bytes() / 49_152
        };
        let [bf16, f16, f32] = [Precision::Bf16, Precision::F16, Precision::F32].map(logits);
        assert_eq!([f16, f32], [bf16, bf16 / 2 * (2 * 4 + 3 * 4)]);
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
        let (config, selection) = model(include_str!("../../../configs/llama-3.1-8b.json"), 16);
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
        let more = |tower_bytes, encoding_bytes: usize, has_unkept| {
            let encoding_bytes = [encoding_bytes; 2];
            let images =
                ImageMemory { tokens: vec![1], tower_bytes, encoding_bytes, has_unkept, ..ImageMemory::default() };
            let text = workload(&config, &selection);
            let [with, without] = [Workload { images: &images, ..text.clone() }, text].map(|of| of.plan());
            with.peak_bytes - without.peak_bytes - 576 * 4
        };
        assert_eq!([more(1 << 20, 5, false), more(1 << 20, 5, true)], [0, 1 << 20]);
        // Adapters, their gradients and moments are there already when an image is encoded in a step.
        assert_eq!(more(0, 1 << 40, true) - more(1 << 40, 0, false), 4 * 4 * 4_884_480);
    }
}
