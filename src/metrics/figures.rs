//! One field for each figure.

use serde::{Deserialize, Deserializer, Serialize};

/// Which figures TensorBoard gets, by the name of their field, and under which tag.
pub const SCALAR_TAGS: &[(&str, &str)] = &[
    ("loss", "train/loss"),
    ("learning_rate", "train/learning_rate"),
    ("grad_norm", "train/grad_norm"),
    ("tokens_per_second", "throughput/tokens_per_second"),
    ("mfu", "throughput/mfu"),
    ("step_seconds", "time/step"),
    ("data_wait_seconds", "time/data_wait"),
    ("forward_backward_seconds", "time/forward_backward"),
    ("optimizer_seconds", "time/optimizer"),
    ("host_memory_bytes", "memory/host"),
    ("cpu_utilization_percent", "cpu/utilization"),
    ("gpu_utilization_percent", "gpu/utilization"),
    ("gpu_memory_used_bytes", "gpu/memory_used"),
    ("gpu_memory_allocated_bytes", "gpu/memory_allocated"),
    ("gpu_memory_reserved_bytes", "gpu/memory_reserved"),
    ("gpu_power_watts", "gpu/power"),
    ("energy_joules", "gpu/energy"),
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
    /// are left out. The device is synchronised at both ends.
    pub step_seconds: f64,
    /// Time the loop waited for data.
    pub data_wait_seconds: f64,
    /// Time of the forward and backward passes, until their loss and gradient norm had been read. On a GPU, which the
    /// loop waits for at that point only, the update of the step before is in it too.
    pub forward_backward_seconds: f64,
    /// Time of clipping and the update. On a GPU: of handing it over, which does not wait for it.
    pub optimizer_seconds: f64,
    /// Model FLOPs per second over the fastest matrix product measured on the device, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Memory of the process that is in RAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<u64>,
    /// Share of all processor threads that the process used during the step, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_utilization_percent: Option<f64>,
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
    /// Power that the GPU draws, mean over the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_power_watts: Option<f64>,
    /// Energy that the GPU has used since the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_joules: Option<f64>,
    /// Temperature of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_temperature_celsius: Option<f64>,
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

fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A step with every figure, all different.
    pub(in super::super) fn full_step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            epoch: 0.25,
            loss: 2.5,
            learning_rate: 2e-4,
            grad_norm: 0.75,
            skipped: false,
            anomaly: None,
            loss_scale: Some(65536.0),
            tokens: 2000,
            target_tokens: 1500,
            tokens_per_second: 1000.0,
            step_seconds: 2.0,
            data_wait_seconds: 0.125,
            forward_backward_seconds: 1.5,
            optimizer_seconds: 0.25,
            mfu: Some(0.5),
            host_memory_bytes: Some(3 << 30),
            cpu_utilization_percent: Some(75.0),
            gpu_utilization_percent: Some(97.0),
            gpu_utilization_max_percent: Some(100.0),
            gpu_memory_used_bytes: Some(12 << 30),
            gpu_memory_allocated_bytes: Some(10 << 30),
            gpu_memory_reserved_bytes: Some(11 << 30),
            gpu_power_watts: Some(510.0),
            energy_joules: Some(1020.0),
            gpu_temperature_celsius: Some(61.0),
        }
    }

    #[test]
    fn a_line_has_the_names_of_the_contract_and_leaves_out_what_is_absent() {
        let json = serde_json::to_value(full_step(7)).unwrap();
        let names: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        let contract = [
            "step",
            "epoch",
            "loss",
            "learning_rate",
            "grad_norm",
            "loss_scale",
            "tokens",
            "target_tokens",
            "tokens_per_second",
            "step_seconds",
            "data_wait_seconds",
            "forward_backward_seconds",
            "optimizer_seconds",
            "mfu",
            "host_memory_bytes",
            "cpu_utilization_percent",
            "gpu_utilization_percent",
            "gpu_utilization_max_percent",
            "gpu_memory_used_bytes",
            "gpu_memory_allocated_bytes",
            "gpu_memory_reserved_bytes",
            "gpu_power_watts",
            "energy_joules",
            "gpu_temperature_celsius",
        ];
        assert_eq!(names, contract);
        let on_a_cpu = serde_json::to_value(StepMetrics { step: 1, ..StepMetrics::default() }).unwrap();
        let gpu_fields = on_a_cpu.as_object().unwrap().keys().filter(|name| name.contains("gpu")).count();
        assert_eq!(gpu_fields, 0);
        assert!(on_a_cpu.get("energy_joules").is_none() && on_a_cpu.get("skipped").is_none());
    }

    #[test]
    fn the_tags_are_those_of_the_contract() {
        let mut tags: Vec<_> = tagged_scalars(&full_step(1)).into_iter().map(|(tag, _)| tag).collect();
        tags.extend(tagged_scalars(&EvalMetrics::default()).into_iter().map(|(tag, _)| tag));
        tags.sort_unstable();
        let contract = [
            "cpu/utilization",
            "eval/loss",
            "eval/perplexity",
            "gpu/energy",
            "gpu/memory_allocated",
            "gpu/memory_reserved",
            "gpu/memory_used",
            "gpu/power",
            "gpu/utilization",
            "memory/host",
            "throughput/mfu",
            "throughput/tokens_per_second",
            "time/data_wait",
            "time/forward_backward",
            "time/optimizer",
            "time/step",
            "train/grad_norm",
            "train/learning_rate",
            "train/loss",
        ];
        assert_eq!(tags, contract);
        assert_eq!(tags.len(), SCALAR_TAGS.len(), "a tag names a field that no record has");
    }

    #[test]
    fn a_loss_that_is_not_finite_is_null_and_comes_back_as_nan() {
        let step =
            StepMetrics { step: 3, loss: f64::NAN, grad_norm: f64::INFINITY, skipped: true, ..Default::default() };
        let line = serde_json::to_string(&step).unwrap();
        assert!(line.contains(r#""loss":null,"learning_rate":0.0,"grad_norm":null,"skipped":true"#), "{line}");
        let back: StepMetrics = serde_json::from_str(&line).unwrap();
        assert!(back.loss.is_nan() && back.grad_norm.is_nan() && back.skipped);
        let loss = tagged_scalars(&step).into_iter().find(|(tag, _)| *tag == "train/loss").unwrap().1;
        assert!(loss.is_nan());
    }

    #[test]
    fn a_step_survives_the_way_to_json_and_back() {
        let step = full_step(41);
        assert_eq!(serde_json::from_str::<StepMetrics>(&serde_json::to_string(&step).unwrap()).unwrap(), step);
    }
}
