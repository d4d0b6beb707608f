//! What was known about a run beforehand.

use crate::config::{CheckpointConfig, DataConfig, EvalConfig, GradientCheckpointing, LoggingConfig, TrainConfig};

/// The recipe and the machine, as far as rules need them. A fact that is not known is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    // Sections of the recipe.
    pub(crate) data: DataConfig,
    /// With `gradient_checkpointing` as decided where the recipe has "auto".
    pub(crate) train: TrainConfig,
    pub(crate) eval: EvalConfig,
    pub(crate) checkpoint: CheckpointConfig,
    pub(crate) logging: LoggingConfig,
    /// `train.gradient_checkpointing` is `"auto"` in the recipe.
    pub(crate) decides_checkpointing: bool,

    /// Steps of the whole run.
    pub(crate) total_steps: Option<u64>,

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
    /// What the ranks exchange in a step.
    pub(crate) gradient_bytes: Option<u64>,
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
    /// Whether the backward computes blocks again.
    pub(super) fn recomputes(&self) -> bool {
        self.train.gradient_checkpointing != GradientCheckpointing::Off
    }

    /// `train.gradient_checkpointing` as in the recipe.
    pub(super) fn checkpointing(&self) -> String {
        match self.train.gradient_checkpointing {
            _ if self.decides_checkpointing => "\"auto\"".to_owned(),
            GradientCheckpointing::Off | GradientCheckpointing::On => self.train.gradient_checkpointing.to_string(),
            named => format!("\"{named}\""),
        }
    }
}
