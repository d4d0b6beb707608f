//! One field for each figure.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

/// Which figures TensorBoard gets, by the name of their field, and under which tag.
pub const SCALAR_TAGS: &[(&str, &str)] = &[
    ("loss", "train/loss"),
    ("learning_rate", "train/learning_rate"),
    ("grad_norm", "train/grad_norm"),
    ("epoch", "train/epoch"),
    ("tokens", "train/tokens"),
    ("target_tokens", "train/target_tokens"),
    ("tokens_per_second", "throughput/tokens_per_second"),
    ("mfu", "throughput/mfu"),
    ("step_seconds", "time/step"),
    ("wall_seconds", "time/wall"),
    ("data_wait_seconds", "time/data_wait"),
    ("host_to_device_seconds", "time/host_to_device"),
    ("forward_seconds", "time/forward"),
    ("backward_seconds", "time/backward"),
    ("forward_backward_seconds", "time/forward_backward"),
    ("optimizer_seconds", "time/optimizer"),
    ("logging_seconds", "time/logging"),
    ("evaluation_seconds", "time/evaluation"),
    ("checkpoint_seconds", "time/checkpoint"),
    ("other_seconds", "time/other"),
    ("rows", "data/rows"),
    ("truncated_rows", "data/truncated_rows"),
    ("padding_tokens", "data/padding_tokens"),
    ("worker_busy_seconds", "data/worker_busy"),
    ("worker_cpu_seconds", "data/worker_cpu"),
    ("worker_queued_seconds", "data/worker_queued"),
    ("host_memory_bytes", "memory/host"),
    ("host_available_bytes", "memory/host_available"),
    ("host_swapped_bytes", "memory/host_swapped"),
    ("cpu_utilization_percent", "cpu/utilization"),
    ("disk_read_bytes", "disk/read"),
    ("major_page_faults", "disk/major_page_faults"),
    ("gpu_utilization_percent", "gpu/utilization"),
    ("gpu_memory_used_bytes", "gpu/memory_used"),
    ("gpu_memory_allocated_bytes", "gpu/memory_allocated"),
    ("gpu_memory_reserved_bytes", "gpu/memory_reserved"),
    ("gpu_memory_peak_bytes", "gpu/memory_peak"),
    ("gpu_power_watts", "gpu/power"),
    ("energy_joules", "gpu/energy"),
    ("cpu_energy_joules", "cpu/energy"),
    ("gpu_temperature_celsius", "gpu/temperature"),
    ("gpu_sm_activity_percent", "gpu/sm_activity"),
    ("gpu_memory_activity_percent", "gpu/memory_activity"),
    ("gpu_tensor_activity_percent", "gpu/tensor_activity"),
    ("gpu_float_activity_percent", "gpu/float_activity"),
    ("gpu_sm_clock_mhz", "gpu/sm_clock"),
    ("gpu_memory_clock_mhz", "gpu/memory_clock"),
    ("gpu_pcie_received_bytes_per_second", "gpu/pcie_received"),
    ("gpu_pcie_sent_bytes_per_second", "gpu/pcie_sent"),
    ("gpu_other_processes_memory_bytes", "gpu/other_processes_memory"),
    ("eval_loss", "eval/loss"),
    ("eval_perplexity", "eval/perplexity"),
];

/// The figures of one step: a line of metrics.jsonl, field by field. What was not measured is absent; a number that
/// is not finite is `null` in JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepMetrics {
    /// Optimizer update, from 1.
    pub step: u64,
    /// Passes over the training rows so far.
    pub epoch: f64,
    /// Mean loss of the step's target tokens, in nats.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Global norm of the gradient before clipping.
    #[serde(deserialize_with = "null_is_nan")]
    pub grad_norm: f64,
    /// The update was left out, since the loss or the gradient was not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// What the watchdog found wrong with the step: `skipped_step`, `loss_spike`, `zero_gradient`, `unmoved_adapters`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anomaly: Option<String>,
    /// Rules of the diagnosis that have held for some time by this step and are told from here on; `slow_step` where it took
    /// far longer than those before it and its tokens explain.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<String>,
    /// Factor on the loss that keeps `f16` gradients above zero; only with `precision = "f16"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Tokens of the step that are not padding.
    pub tokens: u64,
    /// Tokens of the step that carry loss.
    pub target_tokens: u64,
    /// `tokens / step_seconds`.
    pub tokens_per_second: f64,
    /// Wall time of the step, from the end of the previous one; evaluations, samples and checkpoints between the two
    /// are left out. It ends when the update has been made; on a GPU, which the loop waits for where loss and gradient norm
    /// are read, when it has been handed over: the rest of the update is in the next step.
    pub step_seconds: f64,
    /// Wall time from the end of the previous step's figures to the end of this one's; for the first step, from the end
    /// of start-up. Data wait, host-to-device, forward and backward, optimizer, logging, evaluation, checkpoint and other
    /// add up to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wall_seconds: Option<f64>,
    /// Time the loop waited for data.
    pub data_wait_seconds: f64,
    /// Time in which micro-batches were laid out and handed to the device. In steps of a GPU that have no
    /// `forward_seconds` not until they were there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_to_device_seconds: Option<f64>,
    /// Time of the forward passes, with loss and its gradient. On a GPU only the second step after a start and every 50th
    /// step have it: in them, the device is waited for at the end of every part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward_seconds: Option<f64>,
    /// Time of the backward passes, with the gradient norm; absent where `forward_seconds` is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward_seconds: Option<f64>,
    /// Time of the forward and backward passes, until their loss and gradient norm had been read. In steps of a GPU that
    /// have no `forward_seconds`, the update of the step before is in it too.
    pub forward_backward_seconds: f64,
    /// Time of clipping and the update. In steps of a GPU that have no `forward_seconds`: of handing it over.
    pub optimizer_seconds: f64,
    /// Time in which figures were written, those of the step before among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logging_seconds: Option<f64>,
    /// Time of an evaluation before this step, and of the samples drawn at it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation_seconds: Option<f64>,
    /// Time in which a checkpoint was written before this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_seconds: Option<f64>,
    /// What the loop did besides; in the first step, measuring the device's peak among it, and in steps of a GPU that have
    /// `forward_seconds` the end of the update before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_seconds: Option<f64>,
    /// Rows that were read for the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Those of them that were longer than `data.max_length` and were cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truncated_rows: Option<u64>,
    /// Tokens of padding in the step's micro-batches, which a device with kernels that leave padding out does not compute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding_tokens: Option<u64>,
    /// Time in which data workers made the micro-batches that were finished during the step, all workers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_busy_seconds: Option<f64>,
    /// Processor time in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_cpu_seconds: Option<f64>,
    /// Time in it in which a worker could have run and no processor was free. The rest was waiting, for the disk mostly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_queued_seconds: Option<f64>,
    /// Model FLOPs per second over the fastest matrix product measured on the device, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Memory of the process that is in RAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<u64>,
    /// Memory that the machine, or the process's control group, has left, lowest sample of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_available_bytes: Option<u64>,
    /// Memory of the process that has been swapped out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_swapped_bytes: Option<u64>,
    /// Share of all processor threads that the process used during the step, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_utilization_percent: Option<f64>,
    /// Bytes that the process read from disks during the step: not what was found in the page cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_read_bytes: Option<u64>,
    /// Page faults of the process during the step that waited for a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major_page_faults: Option<u64>,
    /// Share of time in which the GPU ran a kernel, mean over the step, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_utilization_percent: Option<f64>,
    /// The same, highest sample of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_utilization_max_percent: Option<f64>,
    /// Memory of the GPU that is in use, by whatever process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory_used_bytes: Option<u64>,
    /// Memory of live tensors in the backend's pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory_allocated_bytes: Option<u64>,
    /// Memory that the backend's pools hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory_reserved_bytes: Option<u64>,
    /// The most memory of live tensors that the backend's pools were seen to hold: at the end of the step, and after the forward
    /// of the last micro-batch, in this step or the last one that asked then (those whose parts are measured, and the first).
    /// What a block takes for a moment in between is not seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory_peak_bytes: Option<u64>,
    /// Power that the GPU draws, mean over the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_power_watts: Option<f64>,
    /// Energy that the GPU has used since the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_joules: Option<f64>,
    /// Energy that the processor's packages have used since the start, by whatever process; only where no GPU is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_energy_joules: Option<f64>,
    /// Temperature of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_temperature_celsius: Option<f64>,
    /// Share of the GPU's multiprocessors that had work, mean over the step, in percent; absent where the driver does not
    /// count it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_sm_activity_percent: Option<f64>,
    /// Share of the bandwidth of the GPU's memory that was used, where the driver counts it; elsewhere share of time in
    /// which it was read or written. Mean over the step, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory_activity_percent: Option<f64>,
    /// Share of the time in which the GPU's tensor cores were at work, mean over the step, in percent; absent where the
    /// driver does not count it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_tensor_activity_percent: Option<f64>,
    /// Share of the time in which the GPU's pipelines of single or half precision outside of the tensor cores were at work,
    /// the busier of the two, mean over the step, in percent; absent where the driver does not count it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_float_activity_percent: Option<f64>,
    /// Clock of the GPU's multiprocessors, mean over the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_sm_clock_mhz: Option<f64>,
    /// Clock of the GPU's memory, mean over the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory_clock_mhz: Option<f64>,
    /// What kept the GPU's clocks down during the step, by name; absent where nothing did, or where the driver does not
    /// say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_throttle_reasons: Option<Vec<String>>,
    /// The share of the step's samples in which each of them did, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_throttle_shares: Option<BTreeMap<String, f64>>,
    /// What the GPU received over PCI Express, mean over the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_pcie_received_bytes_per_second: Option<f64>,
    /// What the GPU sent over PCI Express, mean over the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_pcie_sent_bytes_per_second: Option<f64>,
    /// Memory of the GPU that other processes hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_other_processes_memory_bytes: Option<u64>,
}

/// The figures of one evaluation: a line of metrics.jsonl of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EvalMetrics {
    /// Optimizer updates before this evaluation; 0 before the first.
    pub step: u64,
    /// Passes over the training rows so far.
    pub epoch: f64,
    /// Mean loss of all target tokens of the evaluation rows, in nats.
    #[serde(deserialize_with = "null_is_nan")]
    pub eval_loss: f64,
    /// `exp(eval_loss)`.
    #[serde(deserialize_with = "null_is_nan")]
    pub eval_perplexity: f64,
    /// Tokens of the evaluation rows that carry loss.
    pub eval_target_tokens: u64,
    /// Wall time of the evaluation.
    pub eval_seconds: f64,
}

/// Text that the model wrote at an evaluation: a line of samples.jsonl.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Optimizer updates before this evaluation.
    pub step: u64,
    /// The prompt as the recipe gives it.
    pub prompt: String,
    /// What the model wrote after it.
    pub text: String,
}

/// The tagged figures of a record, in the order of its fields. What is not finite comes as NaN.
pub(super) fn tagged_scalars(record: &impl Serialize) -> Vec<(&'static str, f64)> {
    // The structs above serialise to objects of numbers; nothing else is handed in.
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(record) else { return Vec::new() };
    let tag = |name: &str| SCALAR_TAGS.iter().find(|(field, _)| *field == name).map(|(_, tag)| *tag);
    fields.iter().filter_map(|(name, value)| Some((tag(name)?, value.as_f64().unwrap_or(f64::NAN)))).collect()
}

/// The tagged figures of an evaluation; its epoch is a figure of the steps.
pub(super) fn eval_scalars(eval: &EvalMetrics) -> Vec<(&'static str, f64)> {
    tagged_scalars(eval).into_iter().filter(|(tag, _)| tag.starts_with("eval/")).collect()
}

fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
pub(super) mod tests;
