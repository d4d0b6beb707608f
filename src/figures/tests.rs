use super::*;

/// A step with every figure of TensorBoard and more, all different.
pub(crate) fn full_step(step: u64) -> StepMetrics {
    let figures = super::tags().zip(3..).map(|((name, ..), value)| (name.to_owned(), value.into()));
    let figures = figures.collect::<serde_json::Map<String, serde_json::Value>>();
    let figures: StepMetrics = serde_json::from_value(figures.into()).unwrap();
    StepMetrics {
        step,
        loss: 2.5,
        learning_rate: 2e-4,
        tokens: 2000,
        target_tokens: 1500,
        tokens_per_second: 1000.0,
        step_seconds: 2.0,
        data_wait_seconds: 0.125,
        mfu: Some(0.5),
        host_memory_bytes: Some(3 << 30),
        gpu_utilization_percent: Some(97.0),
        gpu_memory_used_bytes: Some(12 << 30),
        gpu_power_watts: Some(510.0),
        loss_scale: Some(65536.0),
        gpu_utilization_max_percent: Some(100.0),
        gpu_throttle_reasons: Some(vec!["power cap".into()]),
        gpu_throttle_shares: Some(BTreeMap::from([("power cap".into(), 0.25)])),
        ..figures
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
        "wall_seconds",
        "data_wait_seconds",
        "host_to_device_seconds",
        "forward_seconds",
        "backward_seconds",
        "forward_backward_seconds",
        "optimizer_seconds",
        "logging_seconds",
        "evaluation_seconds",
        "checkpoint_seconds",
        "other_seconds",
        "rows",
        "truncated_rows",
        "padding_tokens",
        "worker_busy_seconds",
        "worker_cpu_seconds",
        "worker_queued_seconds",
        "mfu",
        "host_memory_bytes",
        "host_available_bytes",
        "host_swapped_bytes",
        "cpu_utilization_percent",
        "disk_read_bytes",
        "major_page_faults",
        "gpu_utilization_percent",
        "gpu_utilization_max_percent",
        "gpu_memory_used_bytes",
        "gpu_memory_allocated_bytes",
        "gpu_memory_reserved_bytes",
        "gpu_memory_peak_bytes",
        "gpu_power_watts",
        "energy_joules",
        "cpu_energy_joules",
        "gpu_temperature_celsius",
        "gpu_sm_activity_percent",
        "gpu_memory_activity_percent",
        "gpu_tensor_activity_percent",
        "gpu_float_activity_percent",
        "gpu_sm_clock_mhz",
        "gpu_memory_clock_mhz",
        "gpu_throttle_reasons",
        "gpu_throttle_shares",
        "gpu_pcie_received_bytes_per_second",
        "gpu_pcie_sent_bytes_per_second",
        "gpu_other_processes_memory_bytes",
    ];
    for name in contract {
        assert!(names.contains(&name), "{name}");
    }
    let on_a_cpu = serde_json::to_value(StepMetrics { step: 1, ..StepMetrics::default() }).unwrap();
    let gpu_fields = on_a_cpu.as_object().unwrap().keys().filter(|name| name.contains("gpu")).count();
    assert_eq!(gpu_fields, 0);
    assert!(on_a_cpu.get("energy_joules").is_none() && on_a_cpu.get("skipped").is_none());
}

#[test]
fn the_tags_are_those_of_the_contract() {
    let mut tags: Vec<_> = tagged_scalars(&full_step(1)).into_iter().map(|(tag, _)| tag).collect();
    tags.extend(eval_scalars(&EvalMetrics::default()).into_iter().map(|(tag, _)| tag));
    tags.sort_unstable();
    let contract = [
        "cpu/energy",
        "cpu/utilization",
        "data/padding_tokens",
        "data/rows",
        "data/truncated_rows",
        "data/worker_busy",
        "data/worker_cpu",
        "data/worker_queued",
        "disk/major_page_faults",
        "disk/read",
        "eval/loss",
        "eval/perplexity",
        "gpu/energy",
        "gpu/float_activity",
        "gpu/memory_activity",
        "gpu/memory_allocated",
        "gpu/memory_clock",
        "gpu/memory_peak",
        "gpu/memory_reserved",
        "gpu/memory_used",
        "gpu/other_processes_memory",
        "gpu/pcie_received",
        "gpu/pcie_sent",
        "gpu/power",
        "gpu/sm_activity",
        "gpu/sm_clock",
        "gpu/temperature",
        "gpu/tensor_activity",
        "gpu/utilization",
        "memory/host",
        "memory/host_available",
        "memory/host_swapped",
        "throughput/mfu",
        "throughput/tokens_per_second",
        "time/backward",
        "time/checkpoint",
        "time/data_wait",
        "time/evaluation",
        "time/forward",
        "time/forward_backward",
        "time/host_to_device",
        "time/logging",
        "time/optimizer",
        "time/other",
        "time/step",
        "time/wall",
        "train/epoch",
        "train/grad_norm",
        "train/learning_rate",
        "train/loss",
        "train/target_tokens",
        "train/tokens",
    ];
    for tag in contract {
        assert!(tags.contains(&tag), "{tag}");
    }
    assert_eq!(tags.len(), super::tags().count(), "a tag names a field that no record has");
}

#[test]
fn a_loss_that_is_not_finite_is_null_and_comes_back_as_nan() {
    let step = StepMetrics { step: 3, loss: f64::NAN, grad_norm: f64::INFINITY, skipped: true, ..Default::default() };
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
