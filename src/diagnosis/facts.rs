//! What was known about a run beforehand.

/// The recipe and the machine, as far as rules need them. A fact that is not known is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "they are what a recipe says")]
pub struct Facts {
    /// Training runs on a GPU. The host hands it work and waits for it once a step.
    pub is_gpu: bool,
    /// The kernels skip padding.
    pub leaves_padding_out: bool,
    /// Threads that the process may run at the same time.
    pub num_cpu_threads: u64,
    /// `data.num_workers`.
    pub num_workers: u64,
    /// `data.prefetch_batches`.
    pub prefetch_batches: u64,
    /// `data.packing`.
    pub packing: bool,
    /// `data.max_length`.
    pub max_length: u64,
    /// Positions of the model: no row can be longer.
    pub max_positions: Option<u64>,
    /// What one pass over the rows reads: the kept tokens of their files, or the files themselves where no tokens were
    /// kept.
    pub data_bytes: Option<u64>,
    /// `data.shuffle`.
    pub shuffle: bool,
    /// `train.micro_batch_size`.
    pub micro_batch_size: u64,
    /// `train.gradient_accumulation_steps`.
    pub gradient_accumulation_steps: u64,
    /// `train.gradient_checkpointing`, as TOML.
    pub gradient_checkpointing: String,
    /// `train.precision`.
    pub precision: String,
    /// `eval.eval_steps`.
    pub eval_steps: Option<u64>,
    /// Micro-batches of an evaluation.
    pub eval_batches: Option<u64>,
    /// Every evaluation samples text (`eval.generate`).
    pub draws_samples: bool,
    /// `checkpoint.save_steps`.
    pub save_steps: Option<u64>,
    /// `logging.tensorboard`.
    pub tensorboard: bool,
    /// Highest clock of the GPU's multiprocessors when nothing limits it.
    pub max_sm_clock_mhz: Option<f64>,
    /// Power limit of the GPU.
    pub power_limit_watts: Option<f64>,
    /// Factory power limit of the GPU.
    pub default_power_limit_watts: Option<f64>,
    /// Memory of the training device: the GPU's, or the host's.
    pub device_memory_bytes: Option<u64>,
    /// Memory of the host.
    pub host_memory_bytes: Option<u64>,
    /// By how much the peak would grow without checkpointing, or shrink with it.
    pub activation_bytes: Option<u64>,
    /// By how much the peak would grow with twice the rows in a micro-batch, or with rows twice as long.
    pub doubling_bytes: Option<u64>,
    /// Parameters of the blocks.
    pub block_parameters: u64,
    /// Parameters of the head.
    pub head_parameters: u64,
}
