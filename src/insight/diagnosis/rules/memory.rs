//! Memory that runs out, grows, or is used by other processes.

use crate::insight::diagnosis::text::{change, finding, percent};
use crate::insight::diagnosis::{Change, Finding, Run, Severity};
use crate::util::stats::{Line, as_f64, as_u64};
use crate::util::text::bytes;

/// Used share of a GPU's memory from which it is reported.
const FULL_GPU: f64 = 0.95;
/// Share of the host's memory that should stay available.
const MIN_LEFT: f64 = 0.05;
/// Steps needed to see growth.
const MIN_STEPS: f64 = 50.0;
/// Growth over the run from which it is reported.
const MIN_GROWTH_BYTES: f64 = 67_108_864.0;
/// Memory of another process, or swapped out, from which it is reported.
const MIN_OTHER_BYTES: u64 = 256 << 20;
const MIN_SWAPPED_BYTES: u64 = 64 << 20;

/// Changes that reduce the memory needed.
fn less_memory(run: &Run) -> Vec<Change> {
    let facts = &run.facts;
    let mut changes = Vec::new();
    if !facts.recomputes() {
        let cost = percent(run.figures.share_of_steps(run.figures.recomputation_seconds(facts)));
        let expected = match facts.activation_bytes {
            Some(saved) => format!("{} less, for about {cost} more time", bytes(saved)),
            None => format!("what blocks keep is made again, for about {cost} more time"),
        };
        changes.push(change("train.gradient_checkpointing", facts.checkpointing(), true, expected));
    }
    if facts.train.micro_batch_size > 1 {
        let (rows, passes) = (facts.train.micro_batch_size, facts.train.gradient_accumulation_steps);
        // Divides by the smallest factor, so that a whole number of micro-batches still makes an update of as many
        // rows.
        let times = (2..=rows).find(|times| rows % times == 0).unwrap_or(rows);
        let fewer = format!("1/{times} of what a micro-batch needs");
        changes.push(change("train.micro_batch_size", rows, rows / times, fewer));
        let same = "the same rows in an update".to_owned();
        changes.push(change("train.gradient_accumulation_steps", passes, passes * times, same));
    }
    changes
}

/// Memory is almost full.
pub(super) fn pressure(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let share = |part: u64, all: u64| as_f64(part) / as_f64(all);
    let gpu = facts.device_memory_bytes.filter(|_| facts.is_gpu).zip(figures.max_gpu_memory_used_bytes);
    let host = facts.host_memory_bytes.zip(figures.min_host_available_bytes);
    let (rule, verdict, evidence) = match (gpu, host) {
        (Some((all, used)), _) if share(used, all) > FULL_GPU => (
            "memory_pressure_gpu",
            format!("{} of the GPU's memory was in use", percent(share(used, all))),
            format!("{} of {}; a longer row may not fit", bytes(used), bytes(all)),
        ),
        (_, Some((all, left))) if share(left, all) < MIN_LEFT => (
            "memory_pressure_host",
            format!("the host had {} of its memory left", percent(share(left, all))),
            format!("{} of {} left at the least", bytes(left), bytes(all)),
        ),
        _ => return None,
    };
    let verdict = format!("MEMORY PRESSURE: {verdict}");
    let changes = less_memory(run);
    Some(Finding { evidence: vec![evidence], changes, ..finding(rule, Severity::Advice, None, verdict) })
}

/// By how much a figure rises over the counted steps, where it rises steadily and by much.
fn growth(points: &Line, num_steps: u64, min_correlation: f64, min_share: f64) -> Option<f64> {
    let rises = points.count() >= MIN_STEPS && points.correlation()? > min_correlation;
    let growth = points.slope()? * as_f64(num_steps);
    (rises && growth > MIN_GROWTH_BYTES && growth > min_share * points.mean_y()).then_some(growth)
}

/// The memory of the process keeps growing.
pub(super) fn creep(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let num_steps = figures.num_steps();
    let of = |points| growth(points, num_steps, 0.9, 0.05);
    let gpu_left = || Some(facts.device_memory_bytes?.saturating_sub(figures.max_gpu_memory_used_bytes?));
    let (what, growth, left) = match of(&figures.host_memory) {
        Some(growth) => ("host memory", growth, figures.min_host_available_bytes),
        None => ("GPU memory", of(&figures.allocated)?, gpu_left()),
    };
    let a_step = growth / as_f64(num_steps);
    let thousand = bytes(as_u64(1000.0 * a_step));
    let verdict = format!("MEMORY CREEP: {what} grows by {thousand} in a thousand steps");
    let mut evidence = vec![format!("it has risen all along {num_steps} steps")];
    let steps_left = left.map(|left| as_f64(left) / a_step);
    evidence.extend(
        left.zip(steps_left)
            .map(|(left, steps)| format!("the {} left last for about {steps:.0} steps more", bytes(left))),
    );
    // The recipe can only help with an earlier checkpoint, to resume from in a fresh, small process.
    let earlier =
        facts.checkpoint.save_steps.zip(steps_left.map(as_u64)).filter(|(save_steps, left)| left < save_steps);
    let changes = earlier.map(|(save_steps, left)| {
        let expected = "a checkpoint before memory runs out, from which `--resume` continues".to_owned();
        change("checkpoint.save_steps", save_steps, (left / 2).max(1), expected)
    });
    let changes = changes.into_iter().collect();
    Some(Finding { evidence, changes, ..finding("memory_creep", Severity::Problem, None, verdict) })
}

/// The backend's pools grow, while the live memory in them does not.
pub(super) fn fragmentation(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let growth = growth(&figures.reserved, figures.num_steps(), 0.8, 0.1)?;
    if figures.allocated.slope().unwrap_or(0.0) * as_f64(figures.num_steps()) > growth / 4.0 {
        return None;
    }
    let grown = bytes(as_u64(growth));
    let verdict = format!("FRAGMENTATION: the GPU's pools have grown by {grown}, what lives in them has not");
    let reserved = bytes(figures.max_reserved_bytes.unwrap_or(0));
    let evidence = vec![format!("{reserved} held; rows of ever other lengths leave holes that no later one fits")];
    let even = || change("data.packing", false, true, format!("rows of one length: up to {grown} less"));
    let changes = (!facts.data.packing).then(even).into_iter().collect();
    Some(Finding { evidence, changes, ..finding("fragmentation", Severity::Advice, None, verdict) })
}

/// The host swaps this process out.
pub(super) fn swapping(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    let (first, most) = figures.host_swapped_bytes?;
    let grown = most.saturating_sub(first);
    let faults = figures.major_page_faults;
    if grown < MIN_SWAPPED_BYTES && (most < MIN_SWAPPED_BYTES || faults < figures.num_steps()) {
        return None;
    }
    let verdict = format!("SWAPPING: {} of this process were swapped out", bytes(most));
    let mut evidence = vec![format!("{} of it during the run; {faults} page faults waited for a disk", bytes(grown))];
    let left = figures.min_host_available_bytes;
    evidence.extend(left.map(|left| format!("the host had {} left at the least", bytes(left))));
    let changes = less_memory(run);
    Some(Finding { evidence, changes, ..finding("swapping", Severity::Problem, None, verdict) })
}

/// Another process uses the GPU.
pub(super) fn other_process(run: &Run) -> Option<Finding> {
    let others = run.figures.max_other_processes_memory_bytes.filter(|bytes| *bytes >= MIN_OTHER_BYTES)?;
    let verdict = format!("SHARED GPU: other processes hold {} of its memory", bytes(others));
    let of_all = |gpu| format!("GPU utilization {gpu:.0}% is that of all of them together; `nvidia-smi` names them");
    let evidence = run.figures.counted.gpu_utilization_percent.get().map(of_all).into_iter().collect();
    Some(Finding { evidence, ..finding("shared_gpu", Severity::Problem, None, verdict) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::diagnosis::tests::{finds, gpu_run, run};

    #[test]
    fn a_full_gpu_and_a_full_host_are_reported_with_what_needs_less() {
        let mut full = gpu_run(|line| line.gpu_memory_used_bytes = Some(78 << 30));
        let less = [
            "memory_pressure_gpu advice",
            "`train.gradient_checkpointing` false -> true: 1.0 GiB less, for about 43% more time",
            "`train.micro_batch_size` 4 -> 2: 1/2 of what a micro-batch needs",
            "`train.gradient_accumulation_steps` 2 -> 4: the same rows in an update",
        ];
        finds(pressure(&full), &less);
        for (rows, fewer, passes) in [(9, "9 -> 3", "2 -> 6"), (7, "7 -> 1", "2 -> 14"), (6, "6 -> 3", "2 -> 4")] {
            full.facts.train.micro_batch_size = rows;
            finds(pressure(&full), &[fewer, passes]);
        }
        let host = run(|line| line.host_available_bytes = Some(300 << 20));
        finds(pressure(&host), &["memory_pressure_host advice", "300 MiB of 16.0 GiB left at the least"]);
        finds(pressure(&run(|_| {})), &[]);
        finds(pressure(&gpu_run(|_| {})), &[]);
    }

    #[test]
    fn memory_that_grows_all_along_is_told_from_memory_that_settles() {
        let mut leak = run(|line| line.host_memory_bytes = Some((2 << 30) + line.step * (10 << 20)));
        let found = creep(&leak).unwrap();
        assert!(found.changes.is_empty(), "the next checkpoint comes before: {found:#?}");
        let verdict = "MEMORY CREEP: host memory grows by 9.8 GiB in a thousand steps";
        finds(Some(found), &["memory_creep problem", verdict, "the 8.0 GiB left last for about 819 steps more"]);
        leak.facts.checkpoint.save_steps = Some(2000);
        finds(creep(&leak), &["`checkpoint.save_steps` 2000 -> 409"]);
        let settles = run(|line| line.host_memory_bytes = Some((2 << 30) + line.step.min(10) * (50 << 20)));
        finds(creep(&settles), &[]);
        finds(creep(&run(|_| {})), &[]);
        let gpu = gpu_run(|line| line.gpu_memory_allocated_bytes = Some((20 << 30) + line.step * (50 << 20)));
        finds(creep(&gpu), &["MEMORY CREEP: GPU memory"]);
    }

    #[test]
    fn pools_that_grow_around_the_same_tensors_are_fragmented() {
        let holes = gpu_run(|line| line.gpu_memory_reserved_bytes = Some((30 << 30) + line.step * (200 << 20)));
        finds(fragmentation(&holes), &["fragmentation advice", "grown by 19.5 GiB", "`data.packing`"]);
        let needed = gpu_run(|line| {
            line.gpu_memory_reserved_bytes = Some((30 << 30) + line.step * (200 << 20));
            line.gpu_memory_allocated_bytes = Some((20 << 30) + line.step * (200 << 20));
        });
        finds(fragmentation(&needed), &[]);
        finds(fragmentation(&gpu_run(|_| {})), &[]);
    }

    #[test]
    fn being_swapped_out_and_another_process_on_the_gpu_are_problems() {
        let swapped = run(|line| line.host_swapped_bytes = Some(line.step * (1 << 20)));
        finds(swapping(&swapped), &["swapping problem", "100 MiB of it during the run"]);
        // What was swapped out before and is not missed does no harm.
        finds(swapping(&run(|line| line.host_swapped_bytes = Some(300 << 20))), &[]);
        let missed = run(|line| (line.host_swapped_bytes, line.major_page_faults) = (Some(300 << 20), Some(5)));
        finds(swapping(&missed), &["swapping problem", "500 page faults waited for a disk"]);
        finds(swapping(&run(|_| {})), &[]);
        let shared = gpu_run(|line| line.gpu_other_processes_memory_bytes = Some(9 << 30));
        finds(other_process(&shared), &["shared_gpu problem", "SHARED GPU: other processes hold 9.0 GiB"]);
        finds(other_process(&gpu_run(|_| {})), &[]);
    }
}
