//! What was known of a run beforehand.

/// The recipe and the machine, as far as a rule speaks of them. What is not known is absent.
#[derive(Clone, Debug, Default, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "they are what a recipe says")]
pub struct Facts {
    /// It trains on a GPU, which is handed work and waited for once a step.
    pub is_gpu: bool,
    /// Its kernels leave padding out.
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
    /// What a pass over the rows reads: the tokens that were kept of their files, or the files where none were.
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
    /// Text is drawn at every evaluation (`eval.generate`).
    pub draws_samples: bool,
    /// `checkpoint.save_steps`.
    pub save_steps: Option<u64>,
    /// `logging.tensorboard`.
    pub tensorboard: bool,
    /// Clock that the GPU's multiprocessors may run at, where nothing keeps it down.
    pub max_sm_clock_mhz: Option<f64>,
    /// Power that the GPU is held to.
    pub power_limit_watts: Option<f64>,
    /// Power that it is held to as it is sold.
    pub default_power_limit_watts: Option<f64>,
    /// Memory of the device that trains: the GPU's, or the host's.
    pub device_memory_bytes: Option<u64>,
    /// Memory that the host has.
    pub host_memory_bytes: Option<u64>,
    /// What the peak would grow by without checkpointing, or shrink by with it.
    pub activation_bytes: Option<u64>,
    /// What the peak would grow by with twice the rows in a micro-batch, or rows of twice the length.
    pub doubling_bytes: Option<u64>,
    /// Parameters of the blocks.
    pub block_parameters: u64,
    /// Parameters of the head.
    pub head_parameters: u64,
}
