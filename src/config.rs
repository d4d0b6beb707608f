//! The sections of a recipe as plain data: keys with their defaults and ranges, from which everything above is configured.
//!
//! To add a key: one row in its section's table, and the place that uses it.

mod checkpoint;
mod cost;
mod data;
mod device;
mod eval;
mod file_type;
mod logging;
mod lora;
mod model;
mod objective;
mod optimizer;
mod scheduler;
mod train;
mod watchdog;

use std::ops::Bound;

pub use checkpoint::CheckpointConfig;
pub use cost::CostConfig;
pub use data::{DataConfig, DataFormat, DataSource, EvalSplit, OnBadRow, RowLimit, TrainOnTurns};
pub use device::DeviceConfig;
pub use eval::{BestBy, EvalConfig, Metric, Take, TaskConfig, num_evaluations};
pub use file_type::FileType;
pub use logging::{LoggingConfig, MostRollouts};
pub use lora::{InitLoraWeights, LoraConfig, TargetModules};
pub(crate) use lora::{is_of_tower, layers_regex, meant_layer};
pub use model::{Init, ModelOptions, Quantization, Residency};
pub use objective::{
    Aggregation, Divergence, EnvironmentConfig, ImportanceSamplingLevel, LossType, ObjectiveConfig, ObjectiveName,
    OnFailure, OrpoNll, RewardConfig, RewardKind, RowKind, ScaleRewards,
};
pub use optimizer::{OptimizerConfig, OptimizerName};
pub use scheduler::{DecayType, LrScheduler, SchedulerConfig};
pub use train::{GradientCheckpointing, Precision, TrainConfig};
pub use watchdog::WatchdogConfig;

/// Any number above 0.
const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

/// The last line of a regular expression's error: the reason, without the drawing above it.
fn last_line(error: &regex::Error) -> String {
    error.to_string().lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}
