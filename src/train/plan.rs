//! What the loop is told: how long it runs, and what it works with.

use super::config::{EvalConfig, TrainConfig};
use super::schedule::Schedule;
use super::state::{Inputs, RowOrder};
use super::stop::Stop;
use super::watchdog::WatchdogConfig;
use crate::checkpoint::{CheckpointConfig, Checkpoints};
use crate::data::pipeline::DataPipeline;
use crate::device::OpenDevice;
use crate::diagnosis::Facts;
use crate::export::PromptForm;
use crate::lora::config::LoraConfig;
use crate::metrics::Sinks;
use crate::telemetry::Telemetry;

/// What the loop works with.
pub struct Around<'a> {
    /// Rows.
    pub data: &'a DataPipeline,
    /// Where it is computed.
    pub device: &'a OpenDevice,
    /// Figures of the machine.
    pub telemetry: &'a Telemetry,
    /// Where checkpoints go.
    pub checkpoints: &'a Checkpoints,
    /// Where figures go.
    pub sinks: &'a mut Sinks,
    /// Whether to stop.
    pub stop: &'a Stop,
}

/// How long the loop runs and what it does between steps.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Micro-batches and steps.
    pub train: TrainConfig,
    /// Evaluations.
    pub eval: EvalConfig,
    /// Checkpoints.
    pub checkpoint: CheckpointConfig,
    /// What is watched.
    pub watchdog: WatchdogConfig,
    /// Learning rate by step; knows the number of steps.
    pub schedule: Schedule,
    /// What the data cursor counts in.
    pub order: RowOrder,
    /// What is read, to be known again.
    pub inputs: Inputs,
    /// Starts of the run before this one.
    pub earlier_starts: u64,
    /// What the diagnosis knows beforehand.
    pub facts: Facts,
    /// The whole recipe as TOML, every default filled in: kept in checkpoints.
    pub recipe: String,
    /// Written into `adapter_config.json` of checkpoints.
    pub lora: LoraConfig,
    /// The same: the model that the adapter belongs to.
    pub base_model_name_or_path: String,
    /// Written beside the adapter of checkpoints.
    pub prompt_form: PromptForm,
}
