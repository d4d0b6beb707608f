//! Devices that are not used to the full.

use crate::config::Precision;
use crate::insight::diagnosis::text::{at_most, change, faster, finding, percent, seconds};
use crate::insight::diagnosis::{Change, Finding, Run, Severity};
use crate::util::stats::as_f64;
use crate::util::text::bytes;

/// Share of the steps' time from which handing over micro-batches is reported.
const MIN_COPY_SHARE: f64 = 0.05;
/// A GPU whose kernels run for less of the time, in percent, waits for the host.
pub(super) const BUSY_GPU_PERCENT: f64 = 85.0;
/// Share of compute that does not grow with the tokens, from which a step is too small.
const MIN_FIXED_SHARE: f64 = 0.2;
/// Active multiprocessors, in percent, below which a GPU counts as half empty.
const HALF_EMPTY_PERCENT: f64 = 50.0;
/// Below this MFU, a device that is always busy computes slowly.
const LOW_MFU: f64 = 0.3;
/// Memory activity, in percent, from which memory limits a GPU.
const BUSY_MEMORY_PERCENT: f64 = 60.0;
/// Arithmetic activity, in percent, from which arithmetic limits a GPU.
const BUSY_ARITHMETIC_PERCENT: f64 = 60.0;
/// Threads that are busy at the least where a CPU computes all the time: this many, and this share of each further one.
const BUSY_THREADS: [f64; 2] = [0.7, 0.05];
/// A smaller gain is not worth a change.
pub(super) const MIN_GAIN: f64 = 0.05;

/// Free memory required per byte of additional need: rows may come that are longer than those seen.
pub const MARGIN: f64 = 1.5;

/// Doubles the rows of a micro-batch and, where a step has several micro-batches, halves their number.
pub(super) fn twice_the_rows(run: &Run, expected: String) -> Vec<Change> {
    let (rows, passes) = (run.facts.train.micro_batch_size, run.facts.train.gradient_accumulation_steps);
    let rows_change = change("train.micro_batch_size", rows, 2 * rows, expected);
    let passes_change =
        (passes > 1).then(|| change("train.gradient_accumulation_steps", passes, passes.div_ceil(2), update(run)));
    [Some(rows_change), passes_change].into_iter().flatten().collect()
}

/// The effect of doubled rows in a micro-batch on the rows of an update.
fn update(run: &Run) -> String {
    let (rows, passes) = (run.facts.train.micro_batch_size, run.facts.train.gradient_accumulation_steps);
    match passes % 2 {
        0 => "the same rows in an update".to_owned(),
        _ => format!("{} rows in an update instead of {}", 2 * rows * passes.div_ceil(2), rows * passes),
    }
}

/// The gain of doubled rows in a micro-batch if `seconds` of a step do not depend on the number of rows, so that each
/// row costs half as many.
fn gain(run: &Run, seconds: f64) -> String {
    let step = run.figures.mean_step_seconds();
    let after = step - seconds / 2.0;
    if run.facts.train.gradient_accumulation_steps.is_multiple_of(2) {
        return faster(step, after);
    }
    format!("about {:.2}x the tokens a second, with {}", step / after, update(run))
}

/// Doubled rows, if the memory for them is known to be free; otherwise the evidence says how much they need.
fn twice_the_rows_if_they_fit(run: &Run, expected: String, evidence: &mut Vec<String>) -> Vec<Change> {
    let Some((more, free)) = run.facts.doubling_bytes.zip(run.free_bytes()) else { return Vec::new() };
    if as_f64(free) >= MARGIN * as_f64(more) {
        return twice_the_rows(run, expected);
    }
    let (more, free) = (bytes(more), bytes(free));
    evidence.push(format!(
        "twice the rows in a micro-batch need up to {more} more memory, of which {free} were free at the least"
    ));
    Vec::new()
}

/// Seconds of a step's compute that do not grow with its tokens, if they are many.
fn fixed_seconds(run: &Run) -> Option<f64> {
    let share = run.figures.fixed_share(&run.facts).filter(|share| *share >= MIN_FIXED_SHARE)?;
    Some(share * run.figures.per_step(run.figures.compute_seconds()))
}

/// Percent of the multiprocessors at work on a GPU that is always busy, if they are few.
fn half_empty(run: &Run) -> Option<f64> {
    run.figures.counted.gpu_utilization_percent.get().filter(|percent| *percent >= BUSY_GPU_PERCENT)?;
    run.figures.sm_activity_percent.get().filter(|activity| *activity < HALF_EMPTY_PERCENT)
}

/// Seconds of a step that do not depend on the number of rows, as far as known: pauses between kernels, or work that
/// does not grow with the tokens. Second, the share of active multiprocessors on a GPU that is always busy.
pub(super) fn unfilled(run: &Run) -> (Option<f64>, Option<f64>) {
    let pauses = launch_share(run).map(|share| share * run.figures.mean_step_seconds());
    let seconds = pauses.into_iter().chain(fixed_seconds(run)).reduce(f64::max);
    (seconds, half_empty(run).map(|percent| percent / 100.0))
}

/// What computes all the time keeps one thread busy at the least: where a CPU gave this process less, others had it.
pub(super) fn shared_cpu(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let share = figures.counted.cpu_utilization_percent.get()? / 100.0;
    let threads = as_f64(facts.num_cpu_threads.max(1));
    let (used, compute) = (share * threads, figures.share_of_steps(figures.compute_seconds()));
    // Or it waited for weights.
    let waits_for_disk = facts.weights_read_bytes.is_some() || figures.major_page_faults > figures.num_steps();
    let is_short = used < BUSY_THREADS[0] + BUSY_THREADS[1] * (threads - 1.0);
    if facts.is_gpu || compute < 0.8 || !is_short || waits_for_disk || !figures.are_enough() {
        return None;
    }
    let evidence = vec![
        format!(
            "this process computed {} of step time, and had {used:.1} of {threads} threads meanwhile",
            percent(compute)
        ),
        "`top` shows what else runs; in a container, its limit of processors may be lower".to_owned(),
    ];
    let verdict = format!("SHARED CPU: training got {} of the processors; others use this machine", percent(share));
    Some(Finding { evidence, ..finding("shared_cpu", Severity::Problem, Some(1.0 - share), verdict) })
}

/// Building and copying micro-batches takes a noticeable part of the steps.
pub(super) fn host_to_device(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    let share = figures.share_of_steps(figures.host_to_device_seconds);
    if share < MIN_COPY_SHARE || !figures.are_enough() {
        return None;
    }
    let copy = figures.per_step(figures.host_to_device_seconds);
    let verdict = format!("HOST TO DEVICE: handing micro-batches to the device takes {} of step time", percent(share));
    let passes = run.facts.train.gradient_accumulation_steps;
    let mut evidence = vec![format!("{} a step, in {passes} micro-batches", seconds(copy))];
    evidence
        .extend(run.facts.is_gpu.then(|| "the GPU has nothing to do meanwhile, unless work is still queued".into()));
    // Half as many micro-batches, each as slow to hand over as now.
    let changes = if passes > 1 { twice_the_rows_if_they_fit(run, gain(run, copy), &mut evidence) } else { Vec::new() };
    Some(Finding { evidence, changes, ..finding("host_to_device", Severity::Advice, Some(share), verdict) })
}

/// Share of the steps' time in which the GPU waits for the next kernel, while its data is there and the host only
/// launches kernels; `None` where the GPU mostly waits for something else. The host's other work is subtracted in full,
/// although the GPU may have computed meanwhile: launching must not be blamed for it.
fn launch_share(run: &Run) -> Option<f64> {
    let figures = &run.figures;
    let resting = 1.0 - figures.counted.gpu_utilization_percent.get().filter(|busy| *busy < BUSY_GPU_PERCENT)? / 100.0;
    if !run.facts.is_gpu || !figures.are_enough() {
        return None;
    }
    let not_launching = [
        figures.data_wait_seconds, figures.host_to_device_seconds, figures.step_logging_seconds, figures.other_seconds,
    ];
    let idle = resting - figures.share_of_steps(not_launching.iter().sum());
    (idle >= resting / 2.0).then_some(idle)
}

/// The GPU waits for the next kernel, though its data is there.
pub(super) fn launch_overhead(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    let busy = figures.counted.gpu_utilization_percent.get()?;
    let idle = launch_share(run)?;
    let verdict =
        format!("LAUNCH-BOUND: the GPU ran no kernel for {} of step time, while its data was there", percent(idle));
    let share = |seconds| percent(figures.share_of_steps(seconds));
    let mut evidence = vec![format!(
        "GPU utilization {busy:.0}% on average, {:.0}% at most; data wait {}, host to device {}, logging {}, other {}",
        figures.max_gpu_percent.unwrap_or(busy),
        share(figures.data_wait_seconds),
        share(figures.host_to_device_seconds),
        share(figures.step_logging_seconds),
        share(figures.other_seconds),
    )];
    evidence.extend(
        figures
            .counted
            .cpu_utilization_percent
            .get()
            .map(|cpu| format!("the host hands over kernels one by one; CPU at {cpu:.0}%")),
    );
    // Twice the rows take as many kernels: the pauses between them halve per row.
    let expected = gain(run, idle * figures.mean_step_seconds());
    let changes = twice_the_rows_if_they_fit(run, expected, &mut evidence);
    let severity = if idle > 0.3 { Severity::Problem } else { Severity::Advice };
    Some(Finding { evidence, changes, ..finding("launch_overhead", severity, Some(idle), verdict) })
}

/// A step's time hardly depends on its number of tokens, or the GPU's multiprocessors are half empty.
pub(super) fn small_batches(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    if !figures.are_enough() {
        return None;
    }
    let passes = (figures.num_steps() + 1) * run.facts.train.gradient_accumulation_steps as u64;
    let mut evidence = vec![format!("{:.0} tokens in a micro-batch", as_f64(figures.all.tokens) / as_f64(passes))];
    let (share, verdict, expected) = if let Some(fixed) = fixed_seconds(run) {
        let compute = seconds(figures.per_step(figures.compute_seconds()));
        evidence.push(format!("{} of {compute} are the same however many tokens a step has", seconds(fixed)));
        let share = fixed / figures.mean_step_seconds().max(1e-9);
        (Some(share), format!("{} of step time does not grow with the tokens", percent(share)), gain(run, fixed))
    } else {
        let activity = half_empty(run)?;
        let verdict = format!("kernels run all the time, on {activity:.0}% of the multiprocessors");
        // Twice the rows fill at most twice as many multiprocessors.
        (None, verdict, at_most((1.0 - activity / 100.0).min(0.5)))
    };
    let changes = twice_the_rows_if_they_fit(run, expected, &mut evidence);
    let verdict = format!("SMALL BATCHES: {verdict}");
    Some(Finding { evidence, changes, ..finding("small_batches", Severity::Advice, share, verdict) })
}

/// bf16 in place of f32, at this MFU, and with this percentage of the memory's bandwidth where that is what limits.
fn half_the_bits(mfu: f64, memory: Option<f64>) -> Change {
    let expected = match memory {
        Some(memory) => {
            let half = memory / 2.0;
            format!("half the bytes: {half:.0}% of the bandwidth instead of {memory:.0}%, {}", at_most(0.5))
        }
        None => format!("products on tensor cores instead of the {} of the f32 peak that is reached now", percent(mfu)),
    };
    change("train.precision", "\"f32\"", "\"bf16\"", expected)
}

/// The device computes all the time, but slowly: limited by its memory, its arithmetic, or neither.
pub(super) fn low_mfu(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let mfu = figures.counted.mfu.get().filter(|mfu| *mfu < LOW_MFU)?;
    let compute = figures.share_of_steps(figures.compute_seconds());
    let is_busy = figures.counted.gpu_utilization_percent.get().is_none_or(|percent| percent >= BUSY_GPU_PERCENT);
    if compute < 0.8 || !is_busy || !figures.are_enough() {
        return None;
    }
    let activity = figures.sm_activity_percent.get();
    let accessed = figures.memory_activity_percent.get();
    // Only with the counters of the multiprocessors is this the bandwidth; without them it is the time with any access.
    let memory = accessed.filter(|_| activity.is_some());
    let by_memory = memory.is_some_and(|percent| percent >= BUSY_MEMORY_PERCENT);
    let (tensor, float) = (figures.tensor_activity_percent.get(), figures.float_activity_percent.get());
    let arithmetic = tensor.into_iter().chain(float).reduce(f64::max);
    let (rule, what) = match (memory, arithmetic) {
        (Some(_), _) if by_memory => ("low_mfu_bandwidth", ", held up by memory bandwidth"),
        (_, Some(busy)) if busy >= BUSY_ARITHMETIC_PERCENT => ("low_mfu_arithmetic", ", held up by arithmetic"),
        (Some(_), Some(_)) => {
            ("low_mfu_kernels", ": neither bandwidth nor arithmetic is busy, kernels are small or unfused")
        }
        // Do not blame what was not counted.
        _ => ("low_mfu", ", computing all the time"),
    };
    let mut evidence = vec![format!(
        "forward, backward and update take {} of step time, at an MFU of {}",
        percent(compute),
        percent(mfu)
    )];
    evidence.extend(accessed.map(|accessed| match memory {
        Some(memory) => format!("{memory:.0}% of the bandwidth of the GPU's memory is used"),
        None => format!(
            "the GPU's memory is read or written {accessed:.0}% of the time, which says nothing of its bandwidth"
        ),
    }));
    evidence.extend(activity.map(|activity| format!("{activity:.0}% of its multiprocessors are at work")));
    evidence.extend(tensor.zip(float).map(|(tensor, float)| {
        format!("its tensor cores are at work {tensor:.0}% of the time, other arithmetic {float:.0}%")
    }));
    let padding = if facts.leaves_padding_out { 0.0 } else { figures.all.padding_share().unwrap_or(0.0) };
    evidence.extend(
        (padding > 0.05)
            .then(|| format!("{} of the tokens computed are padding, which MFU does not count", percent(padding))),
    );
    let changes = if !facts.is_gpu {
        Vec::new()
    } else if facts.train.precision == Precision::F32 {
        vec![half_the_bits(mfu, memory.filter(|_| by_memory))]
    } else {
        twice_the_rows_if_they_fit(run, at_most((1.0 - mfu).min(0.5)), &mut evidence)
    };
    let severity = if changes.is_empty() { Severity::Note } else { Severity::Advice };
    let verdict = format!("LOW MFU: {} of the device's peak{what}", percent(mfu));
    Some(Finding { evidence, changes, ..finding(rule, severity, None, verdict) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::diagnosis::diagnose;
    use crate::insight::diagnosis::tests::{finds, gpu_run, run};

    #[test]
    fn handing_over_is_halved_by_half_as_many_micro_batches() {
        let slow = run(|line| line.host_to_device_seconds = Some(0.1));
        let halved = [
            "host_to_device advice",
            "`train.micro_batch_size` 4 -> 8: about 1.05x (a step 1.000 s -> 0.950 s)",
            "`train.gradient_accumulation_steps` 2 -> 1: the same rows in an update",
        ];
        finds(host_to_device(&slow), &halved);
        finds(host_to_device(&run(|_| {})), &[]);
    }

    #[test]
    fn a_cpu_that_gives_a_run_less_than_one_thread_while_it_computes_is_shared_with_others() {
        let of = |percent: f64, threads: u64| {
            let mut run = run(move |line| line.cpu_utilization_percent = Some(percent));
            run.facts.num_cpu_threads = threads;
            run
        };
        let shared = "SHARED CPU: training got 17% of the processors; others use this machine";
        finds(shared_cpu(&of(17.0, 2)), &["shared_cpu problem", shared, "0.3 of 2 threads"]);
        assert!(diagnose(&of(17.0, 2)).iter().all(|finding| finding.rule != "healthy"));
        for (percent, threads) in [(91.0, 2), (50.0, 2), (17.0, 64)] {
            finds(shared_cpu(&of(percent, threads)), &[]);
        }
        let mut reading = of(17.0, 2);
        reading.facts.weights_read_bytes = Some(1 << 30);
        finds(shared_cpu(&reading), &[]);
        finds(shared_cpu(&gpu_run(|line| line.cpu_utilization_percent = Some(5.0))), &[]);
    }

    #[test]
    fn a_gpu_that_rests_with_its_data_there_waits_for_the_host() {
        let mut idle = gpu_run(|line| line.gpu_utilization_percent = Some(59.0));
        let about = "about 1.22x (a step 1.000 s -> 0.820 s)";
        finds(launch_overhead(&idle), &["launch_overhead problem", "no kernel for 36% of step time", about]);
        // A step of twice the rows: 0.64 s of kernels and other work for each half, and the pauses once. The step itself
        // does not get shorter.
        idle.facts.train.gradient_accumulation_steps = 1;
        finds(launch_overhead(&idle), &["about 1.22x the tokens a second, with 8 rows in an update instead of 4"]);
        idle.facts.train.gradient_accumulation_steps = 3;
        finds(
            launch_overhead(&idle),
            &["`train.gradient_accumulation_steps` 3 -> 2: 16 rows in an update instead of 12"],
        );
        idle.facts.doubling_bytes = Some(15 << 30);
        let no_room = launch_overhead(&idle).unwrap();
        assert!(no_room.changes.is_empty(), "20 GiB are free: {no_room:#?}");
        finds(Some(no_room), &["up to 15.0 GiB more memory, of which 20.0 GiB were free at the least"]);
        idle.figures.max_gpu_memory_used_bytes = None;
        assert!(launch_overhead(&idle).unwrap().changes.is_empty(), "nobody knows whether they fit");
        finds(launch_overhead(&gpu_run(|_| {})), &[]);
        finds(launch_overhead(&run(|_| {})), &[]);
    }

    #[test]
    fn what_the_host_does_besides_is_not_blamed_on_handing_kernels_over() {
        for (data, copy, logging, other) in
            [(0.38, 0.005, 0.005, 0.03), (0.01, 0.25, 0.005, 0.03), (0.01, 0.005, 0.005, 0.2)]
        {
            let elsewhere = gpu_run(|line| {
                (line.gpu_utilization_percent, line.data_wait_seconds) = (Some(65.0), data);
                line.host_to_device_seconds = Some(copy);
                (line.logging_seconds, line.other_seconds) = (Some(logging), Some(other));
            });
            finds(launch_overhead(&elsewhere), &[]);
        }
        // A slow output disk: the GPU idles for 38% of the time, and writing figures takes 35%.
        let slow_disk = gpu_run(|line| {
            (line.gpu_utilization_percent, line.logging_seconds) = (Some(62.0), Some(0.35));
            line.forward_backward_seconds = 0.55;
        });
        let findings = diagnose(&slow_disk);
        assert!(findings[0].rule == "logging" && findings.iter().all(|finding| finding.rule != "launch_overhead"));
        // Both: launching accounts for the rest of the pauses.
        let both = gpu_run(|line| (line.gpu_utilization_percent, line.logging_seconds) = (Some(40.0), Some(0.2)));
        let found = launch_overhead(&both).unwrap();
        assert!((found.share_of_time.unwrap() - (0.6 - 0.245)).abs() < 1e-9, "{found:#?}");
        finds(Some(found), &["data wait 1.0%, host to device 0.5%, logging 20%, other 3.0%"]);
    }

    #[test]
    fn what_a_step_takes_whatever_its_tokens_is_found_by_their_number() {
        // 0.5 s and 0.1 ms a token.
        let mut small = run(|line| {
            (line.tokens, line.padding_tokens) = (2000 + 100 * (line.step % 21), Some(0));
            line.forward_backward_seconds = 0.45 + 1e-4 * as_f64(line.tokens);
            line.step_seconds = line.forward_backward_seconds + 0.15;
        });
        let found = small_batches(&small).unwrap();
        assert!((found.share_of_time.unwrap() - 0.5 / (0.6 + 1e-4 * 3000.0)).abs() < 0.01, "{found:#?}");
        finds(Some(found), &["small_batches advice", "`train.micro_batch_size` 4 -> 8: about 1.39x"]);
        small.facts.train.gradient_accumulation_steps = 1;
        finds(small_batches(&small), &["x the tokens a second, with 8 rows"]);
        let empty = gpu_run(|line| line.gpu_sm_activity_percent = Some(40.0));
        let half = "SMALL BATCHES: kernels run all the time, on 40% of the multiprocessors";
        finds(small_batches(&empty), &[half, "4 -> 8: at most 2.00x"]);
        // Computed padding takes time as other tokens do: no time is fixed, unless padding is skipped.
        let mut padded = gpu_run(|line| {
            (line.tokens, line.padding_tokens) = (1000 + 100 * (line.step % 21), Some(3000));
            line.forward_backward_seconds = 1e-4 * as_f64(line.tokens + 3000);
            (line.optimizer_seconds, line.step_seconds) = (0.0, line.forward_backward_seconds + 0.01);
        });
        finds(small_batches(&padded), &[]);
        padded.facts.leaves_padding_out = true;
        assert!((padded.figures.fixed_share(&padded.facts).unwrap() - 0.6).abs() < 0.01);
        finds(small_batches(&run(|_| {})), &[]);
        finds(small_batches(&gpu_run(|_| {})), &[]);
    }

    #[test]
    fn a_low_mfu_is_blamed_only_on_what_counters_say_is_busy() {
        let counted = |memory, tensor, float| {
            gpu_run(move |line| {
                (line.mfu, line.gpu_memory_activity_percent) = (Some(0.1), Some(memory));
                (line.gpu_tensor_activity_percent, line.gpu_float_activity_percent) = (tensor, float);
            })
        };
        finds(low_mfu(&counted(80.0, Some(70.0), Some(5.0))), &["low_mfu_bandwidth advice"]);
        finds(low_mfu(&counted(20.0, Some(70.0), Some(5.0))), &["low_mfu_arithmetic advice"]);
        // At a tenth of the tensor cores' peak, the tensor cores may well be what idles.
        let idle = [
            "low_mfu_kernels advice",
            "neither bandwidth nor arithmetic is busy, kernels are small or unfused",
            "its tensor cores are at work 9% of the time, other arithmetic 20%",
            "`train.micro_batch_size` 4 -> 8: at most 2.00x",
        ];
        finds(low_mfu(&counted(20.0, Some(9.0), Some(20.0))), &idle);
        // Nobody counted arithmetic, or the bandwidth.
        finds(low_mfu(&counted(20.0, None, None)), &["low_mfu advice", ", computing all the time"]);
        let without_counters = gpu_run(|line| {
            (line.mfu, line.gpu_memory_activity_percent) = (Some(0.1), Some(80.0));
            line.gpu_sm_activity_percent = None;
        });
        finds(low_mfu(&without_counters), &["low_mfu advice", "80% of the time, which says nothing of its bandwidth"]);
        let mut f32 = counted(20.0, Some(0.0), Some(75.0));
        f32.facts.train.precision = Precision::F32;
        finds(
            low_mfu(&f32),
            &["low_mfu_arithmetic advice", "`train.precision` \"f32\" -> \"bf16\": products on tensor"],
        );
        finds(low_mfu(&run(|line| line.mfu = Some(0.1))), &["low_mfu note"]);
        finds(low_mfu(&gpu_run(|_| {})), &[]);
        // It waits: another rule says why.
        finds(low_mfu(&run(|line| (line.mfu, line.forward_backward_seconds) = (Some(0.1), 0.3))), &[]);
    }
}
