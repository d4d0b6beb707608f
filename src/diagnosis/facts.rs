//! What was known about a run beforehand.

/// The recipe and the machine, as far as rules need them. A fact that is not known is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "they are what a recipe says")]
pub struct Facts {
    // Keys of the recipe, named as in it.
    pub(crate) num_workers: u64,
    pub(crate) prefetch_batches: u64,
    pub(crate) packing: bool,
    pub(crate) max_length: u64,
    pub(crate) shuffle: bool,
    pub(crate) micro_batch_size: u64,
    pub(crate) gradient_accumulation_steps: u64,
    pub(crate) layered_accumulation: bool,
    pub(crate) eval_steps: Option<u64>,
    pub(crate) save_steps: Option<u64>,
    pub(crate) tensorboard: bool,
    /// `train.gradient_checkpointing` is `true` or `"offload"`: the backward computes blocks again.
    pub(crate) recomputes: bool,
    /// It is `"offload"`.
    pub(crate) offloads: bool,
    /// It is `"auto"` in the recipe.
    pub(crate) decides_checkpointing: bool,
    /// `train.precision` is `"f32"`.
    pub(crate) is_f32: bool,
    /// Every evaluation samples text (`eval.generate`).
    pub(crate) draws_samples: bool,

    // Model and rows.
    /// Positions of the model: no row can be longer.
    pub(crate) max_positions: u64,
    pub(crate) block_parameters: u64,
    pub(crate) head_parameters: u64,
    /// What one pass over the rows reads: the kept tokens of their files, or the files themselves where no tokens were
    /// kept.
    pub(crate) data_bytes: Option<u64>,
    /// What a step reads of weights that stay on disk; `None` where they are in memory.
    pub(crate) weights_read_bytes: Option<u64>,
    pub(crate) eval_batches: Option<u64>,
    /// By how much the peak would grow without checkpointing, or shrink with it.
    pub(crate) activation_bytes: Option<u64>,
    /// By how much the peak would grow with twice the rows in a micro-batch, or with rows twice as long.
    pub(crate) doubling_bytes: Option<u64>,

    // The machine.
    /// Training runs on a GPU. The host hands it work and waits for it once a step.
    pub(crate) is_gpu: bool,
    pub(crate) leaves_padding_out: bool,
    /// Threads that the process may run at the same time.
    pub(crate) num_cpu_threads: u64,
    /// Memory of the training device: the GPU's, or the host's.
    pub(crate) device_memory_bytes: Option<u64>,
    pub(crate) host_memory_bytes: Option<u64>,
    /// Highest clock of the GPU's multiprocessors when nothing limits it.
    pub(crate) max_sm_clock_mhz: Option<f64>,
    pub(crate) power_limit_watts: Option<f64>,
    pub(crate) default_power_limit_watts: Option<f64>,
}

impl Facts {
    /// `train.gradient_checkpointing` as in the recipe.
    pub(super) fn checkpointing(&self) -> &'static str {
        match (self.decides_checkpointing, self.recomputes, self.offloads) {
            (true, ..) => "\"auto\"",
            (_, _, true) => "\"offload\"",
            (_, true, _) => "true",
            _ => "false",
        }
    }
}
