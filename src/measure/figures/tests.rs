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

/// Names and tags that scripts and dashboards are written against, by the part of the tag before the slash.
const CONTRACT: &str = "
    -: step loss_scale gpu_utilization_max_percent gpu_throttle_reasons gpu_throttle_shares
    train: epoch loss learning_rate grad_norm tokens target_tokens
    throughput: tokens_per_second mfu tokens_per_joule
    time: step=step_seconds wall=wall_seconds data_wait=data_wait_seconds host_to_device=host_to_device_seconds
    time: forward=forward_seconds backward=backward_seconds forward_backward=forward_backward_seconds
    time: optimizer=optimizer_seconds logging=logging_seconds evaluation=evaluation_seconds
    time: checkpoint=checkpoint_seconds other=other_seconds
    data: rows truncated_rows padding_tokens worker_busy=worker_busy_seconds worker_cpu=worker_cpu_seconds
    data: worker_queued=worker_queued_seconds
    memory: host=host_memory_bytes host_available=host_available_bytes host_swapped=host_swapped_bytes
    cpu: utilization=cpu_utilization_percent energy=cpu_energy_joules
    disk: read=disk_read_bytes major_page_faults
    gpu: utilization=gpu_utilization_percent memory_used=gpu_memory_used_bytes power=gpu_power_watts
    gpu: memory_allocated=gpu_memory_allocated_bytes memory_reserved=gpu_memory_reserved_bytes
    gpu: memory_peak=gpu_memory_peak_bytes energy=energy_joules temperature=gpu_temperature_celsius
    gpu: sm_activity=gpu_sm_activity_percent memory_activity=gpu_memory_activity_percent
    gpu: tensor_activity=gpu_tensor_activity_percent float_activity=gpu_float_activity_percent
    gpu: sm_clock=gpu_sm_clock_mhz memory_clock=gpu_memory_clock_mhz
    gpu: pcie_received=gpu_pcie_received_bytes_per_second pcie_sent=gpu_pcie_sent_bytes_per_second
    gpu: other_processes_memory=gpu_other_processes_memory_bytes
    eval: loss=eval_loss perplexity=eval_perplexity score=eval_score score_norm=eval_score_norm";

#[test]
fn names_and_tags_are_those_of_the_contract_and_what_is_absent_is_left_out() {
    let line = serde_json::to_value(full_step(7)).unwrap();
    let mut tags: Vec<_> = tagged_scalars(&full_step(1)).into_iter().map(|(tag, _)| tag).collect();
    let scored = EvalMetrics { eval_score: Some(0.5), eval_score_norm: Some(0.5), ..EvalMetrics::default() };
    let scored = EvalMetrics { eval_reward: Some(0.5), eval_reward_std: Some(0.1), ..scored };
    let scored = EvalMetrics { eval_completion_length: Some(8.0), ..scored };
    let scored = EvalMetrics { eval_rewards_accuracies: Some(0.5), eval_rewards_margins: Some(0.1), ..scored };
    tags.extend(eval_scalars(&scored).into_iter().map(|(tag, _)| tag));
    for row in CONTRACT.trim().lines() {
        let (group, figures) = row.trim().split_once(": ").unwrap();
        for figure in figures.split(' ') {
            let (tag, name) = figure.split_once('=').unwrap_or((figure, figure));
            assert!(line.get(name).is_some() || group == "eval", "{name}");
            assert!(tags.contains(&format!("{group}/{tag}").as_str()) || group == "-", "{group}/{tag}");
        }
    }
    assert_eq!(tags.len(), super::tags().count(), "a tag names a field that no record has");
    let on_a_cpu = serde_json::to_value(StepMetrics { step: 1, ..StepMetrics::default() }).unwrap();
    let is_absent = |name: &String| !name.contains("gpu") && name != "energy_joules" && name != "skipped";
    assert!(on_a_cpu.as_object().unwrap().keys().all(is_absent), "{on_a_cpu}");
}

#[test]
fn a_line_survives_the_way_to_json_and_back_and_a_loss_that_is_not_finite_is_null_in_it() {
    let step = full_step(41);
    assert_eq!(serde_json::from_str::<StepMetrics>(&serde_json::to_string(&step).unwrap()).unwrap(), step);
    let step = StepMetrics { step: 3, loss: f64::NAN, grad_norm: f64::INFINITY, skipped: true, ..Default::default() };
    let line = serde_json::to_string(&step).unwrap();
    assert!(line.contains(r#""loss":null,"learning_rate":0.0,"grad_norm":null,"skipped":true"#), "{line}");
    let back: StepMetrics = serde_json::from_str(&line).unwrap();
    assert!(back.loss.is_nan() && back.grad_norm.is_nan() && back.skipped);
    let loss = tagged_scalars(&step).into_iter().find(|(tag, _)| *tag == "train/loss").unwrap().1;
    assert!(loss.is_nan());
}

#[test]
fn samples_become_means_extremes_and_counts_and_without_a_sample_the_latest_stands_in() {
    let mut samples = MachineSamples::default();
    assert_eq!(samples.take(), MachineSample::default(), "what was never read stays absent");
    let sample = |percent, memory, watts, free, read| MachineSample {
        gpu_utilization_percent: Some(percent),
        gpu_utilization_max_percent: Some(percent),
        gpu_memory_used_bytes: Some(memory),
        gpu_power_watts: Some(watts),
        host_available_bytes: Some(free),
        disk_read_bytes: Some(read),
        ..MachineSample::default()
    };
    samples.add(&sample(10.0, 99, 9.0, 9, 1000));
    samples.take();
    samples.add(&sample(80.0, 5, 300.0, 80, 1500));
    samples.add(&sample(100.0, 9, 500.0, 40, 1700));
    samples.add(&sample(60.0, 7, 100.0, 60, 1800));
    let step = samples.take();
    let expected = MachineSample { gpu_utilization_max_percent: Some(100.0), ..sample(80.0, 9, 300.0, 40, 800) };
    assert_eq!(step, expected);
    assert_eq!(samples.take(), sample(60.0, 7, 100.0, 60, 0));
}

#[test]
fn a_throttle_reason_has_its_share_of_the_samples() {
    let mut samples = MachineSamples::default();
    let shares = |shares: &[(&str, f64)]| -> BTreeMap<String, f64> {
        shares.iter().map(|(name, share)| ((*name).to_owned(), *share)).collect()
    };
    let add = |samples: &mut MachineSamples, reasons: &[(&str, f64)]| {
        samples.add(&MachineSample { gpu_throttle_shares: Some(shares(reasons)), ..MachineSample::default() });
    };
    add(&mut samples, &[]);
    add(&mut samples, &[("power cap", 1.0)]);
    add(&mut samples, &[("power cap", 1.0), ("thermal slowdown", 1.0)]);
    add(&mut samples, &[]);
    let expected = shares(&[("power cap", 0.5), ("thermal slowdown", 0.25)]);
    assert_eq!(samples.take().gpu_throttle_shares, Some(expected));
    assert_eq!(samples.take().gpu_throttle_shares, None, "nothing did in the latest sample");
    add(&mut samples, &[("power cap", 1.0)]);
    samples.take();
    assert_eq!(samples.take().gpu_throttle_shares, Some(shares(&[("power cap", 1.0)])), "the latest stands in");
}
