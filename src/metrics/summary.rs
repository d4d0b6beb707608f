//! The final figures: summary.json, or unfinished.json of a run that did not finish.

use std::ops::Add;

use serde::{Deserialize, Serialize};

use super::finding::Finding;

/// The final figures of a run that finished; the file exists only then.
pub const SUMMARY_FILE: &str = "summary.json";
/// The final figures of a run that was interrupted, stopped or failed, until it is resumed and takes a step.
pub const UNFINISHED_FILE: &str = "unfinished.json";

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All steps were taken.
    #[default]
    Finished,
    /// The evaluation loss stopped falling.
    StoppedEarly,
    /// SIGINT, SIGTERM or the dashboard; a checkpoint was saved.
    Interrupted,
    /// The watchdog's patience ran out; a checkpoint was saved.
    StoppedByWatchdog,
    /// An error ended it.
    Failed,
}

impl Outcome {
    /// For people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::StoppedEarly => "stopped early",
            Self::Interrupted => "interrupted",
            Self::StoppedByWatchdog => "stopped by the watchdog",
            Self::Failed => "failed",
        }
    }

    /// Whether the run finished, with an adapter.
    #[must_use]
    pub fn is_finished(self) -> bool {
        matches!(self, Self::Finished | Self::StoppedEarly)
    }
}

/// The final figures of a run, over all its starts if it was resumed, unless a field says otherwise. The work of a
/// killed start after its last checkpoint is not included: its steps were made again.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// How the run ended.
    pub outcome: Outcome,
    /// Why the run did not finish, and what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Optimizer updates.
    pub steps: u64,
    /// Starts of the process, including those that were killed.
    pub starts: u64,
    /// Updates that the run was to make, if it did not finish.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// Steps without an update, because the loss or the gradient was not finite.
    pub skipped_steps: u64,
    /// Steps with which the watchdog found something wrong; `anomaly` in metrics.jsonl says what.
    pub anomalous_steps: u64,
    /// Passes over the training rows.
    pub epochs: f64,
    /// Training loss of the last step, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_loss: Option<f64>,
    /// Evaluation loss before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_eval_loss: Option<f64>,
    /// Evaluation loss after the last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_eval_loss: Option<f64>,
    /// Evaluation loss of the best evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_eval_loss: Option<f64>,
    /// Step of the best evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_eval_step: Option<u64>,
    /// Score of `eval.task` before the first step, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_eval_score: Option<f64>,
    /// Score after the last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_eval_score: Option<f64>,
    /// Score of the best evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_eval_score: Option<f64>,
    /// Tokens trained on that are not padding.
    pub tokens: u64,
    /// Tokens trained on that carry loss.
    pub target_tokens: u64,
    /// Tokens over the time of the steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Mean model FLOPs utilization over the time of the steps, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// The most memory of the process that was in RAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_host_memory_bytes: Option<u64>,
    /// The most memory of the GPU that was in use, by whatever process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_gpu_memory_bytes: Option<u64>,
    /// The most memory that the backend's pools were seen to hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_gpu_memory_reserved_bytes: Option<u64>,
    /// Mean GPU utilization over the time of the steps, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_gpu_utilization_percent: Option<f64>,
    /// Mean share of all processor threads that the process used over the time of the steps, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_cpu_utilization_percent: Option<f64>,
    /// Share of the micro-batches' tokens that was padding, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding_share: Option<f64>,
    /// Energy that the GPU used or, in a run without a GPU, the processor's packages, other processes included. If only
    /// some starts of a run used a GPU, the sum of both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_joules: Option<f64>,
    /// `energy_joules` in kWh.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_kwh: Option<f64>,
    /// What the run cost by the recipe's `[cost]`: the hours of the machine and the energy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Currency of `cost`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub currency: Option<String>,
    /// Time, energy and cost of a million tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_million_tokens: Option<PerMillionTokens>,
    /// Processor time that sampling the machine took, on its own thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub telemetry_seconds: Option<f64>,
    /// Wall time, counted from the start of each process.
    pub wall_seconds: f64,
    /// How the wall time was spent.
    pub time: TimeSpent,
    /// Share of `time.forward_backward_seconds` that was the forward with the loss, from 0 to 1. On a GPU it is
    /// measured in the steps that waited between forward and backward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward_share: Option<f64>,
    /// The device, for people.
    pub device: String,
    /// Type of activations and matrix products.
    pub precision: String,
    /// Parameters that are trained.
    pub trainable_parameters: u64,
    /// Parameters of the base model and the adapters.
    pub all_parameters: u64,
    /// Whether the exported adapter was read back and gave the same logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter_verified: Option<bool>,
    /// What held the run back since the last start, the worst first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub diagnosis: Vec<Finding>,
    /// Findings reported while the run was going, since the last start, with the steps through which each had lasted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub told: Vec<Finding>,
    /// Warnings of the run, in order.
    pub warnings: Vec<String>,
}

/// What a million tokens took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerMillionTokens {
    /// Wall time, start-up and evaluations included.
    pub seconds: f64,
    /// Energy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_kwh: Option<f64>,
    /// Cost, in the summary's currency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// Where wall time went, in seconds. The parts do not overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimeSpent {
    /// From the start of each process to its first step: reading data, loading weights, opening the device.
    pub startup_seconds: f64,
    /// Waiting for data.
    pub data_wait_seconds: f64,
    /// Laying out micro-batches and handing them to the device. A GPU is not waited for after every part: the sum of
    /// this and the next two parts is measured, and divided as in the steps that did wait.
    pub host_to_device_seconds: f64,
    /// Forward and backward passes.
    pub forward_backward_seconds: f64,
    /// Clipping and updates.
    pub optimizer_seconds: f64,
    /// Evaluations, and the samples drawn at them.
    pub evaluation_seconds: f64,
    /// Writing checkpoints and the adapter.
    pub checkpoint_seconds: f64,
    /// Writing figures.
    pub logging_seconds: f64,
    /// The rest: bookkeeping, measuring the device's peak, ending the run.
    pub other_seconds: f64,
}

impl Add for TimeSpent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            startup_seconds: self.startup_seconds + other.startup_seconds,
            data_wait_seconds: self.data_wait_seconds + other.data_wait_seconds,
            host_to_device_seconds: self.host_to_device_seconds + other.host_to_device_seconds,
            forward_backward_seconds: self.forward_backward_seconds + other.forward_backward_seconds,
            optimizer_seconds: self.optimizer_seconds + other.optimizer_seconds,
            evaluation_seconds: self.evaluation_seconds + other.evaluation_seconds,
            checkpoint_seconds: self.checkpoint_seconds + other.checkpoint_seconds,
            logging_seconds: self.logging_seconds + other.logging_seconds,
            other_seconds: self.other_seconds + other.other_seconds,
        }
    }
}

impl TimeSpent {
    /// Adds the time that is missing in the parts, compared with `wall_seconds`, to `other_seconds`.
    #[must_use]
    pub fn within(mut self, wall_seconds: f64) -> Self {
        self.other_seconds += (wall_seconds - self.total_seconds()).max(0.0);
        self
    }

    /// Sum of the parts.
    #[must_use]
    pub fn total_seconds(&self) -> f64 {
        self.parts().into_iter().map(|(_, seconds)| seconds).sum()
    }

    /// The parts with their names for people.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, f64); 9] {
        [
            ("startup", self.startup_seconds),
            ("data", self.data_wait_seconds),
            ("host to device", self.host_to_device_seconds),
            ("forward+backward", self.forward_backward_seconds),
            ("optimizer", self.optimizer_seconds),
            ("evaluation", self.evaluation_seconds),
            ("checkpoint", self.checkpoint_seconds),
            ("logging", self.logging_seconds),
            ("other", self.other_seconds),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_time_sum_to_the_wall_time() {
        let time = TimeSpent { startup_seconds: 1.5, forward_backward_seconds: 6.0, ..TimeSpent::default() };
        let time = TimeSpent { other_seconds: 0.5, ..time }.within(10.0);
        assert_eq!((time.other_seconds, time.total_seconds()), (2.5, 10.0));
        assert_eq!(time.within(10.0), time, "asked twice, the same");
    }

    #[test]
    fn an_empty_summary_has_no_gpu_figures_and_reads_back() {
        let summary = Summary { steps: 3, device: "cpu".into(), ..Summary::default() };
        let json = serde_json::to_string(&summary).unwrap();
        assert!(!json.contains("gpu") && !json.contains("energy"), "{json}");
        assert_eq!(serde_json::from_str::<Summary>(&json).unwrap(), summary);
        assert!(!json.contains("reason") && !json.contains("total_steps"), "{json}");
    }
}
