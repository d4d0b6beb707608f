//! Memory that runs out, grows, or is used by other processes.

use crate::diagnosis::figures::as_f64;
use crate::diagnosis::text::{bytes, change, finding, percent};
use crate::diagnosis::{Change, Finding, Line, Run, Severity};

/// Used share of a GPU's memory from which it is reported.
const FULL_GPU: f64 = 0.95;
/// Share of the host's memory that should stay available.
const MIN_LEFT: f64 = 0.05;
/// Steps needed to see growth.
const MIN_STEPS: f64 = 50.0;
/// Growth over the run, relative to the mean and in bytes, from which it is reported.
const MIN_GROWTH: f64 = 0.05;
const MIN_GROWTH_BYTES: f64 = 67_108_864.0;
/// Memory of another process, or swapped out, from which it is reported.
const MIN_OTHER_BYTES: u64 = 256 << 20;
const MIN_SWAPPED_BYTES: u64 = 64 << 20;

/// Changes that reduce the memory needed.
fn less_memory(run: &Run) -> Vec<Change> {
    let facts = &run.facts;
    let mut changes = Vec::new();
    if facts.gradient_checkpointing == "false" {
        let cost = percent(run.figures.share_of_steps(run.figures.recomputation_seconds(facts)));
        let expected = match facts.activation_bytes {
            Some(saved) => format!("{} less, for about {cost} more time", bytes(saved)),
            None => format!("what blocks keep is made again, for about {cost} more time"),
        };
        changes.push(change("train.gradient_checkpointing", false, true, expected));
    }
    if facts.micro_batch_size > 1 {
        let (rows, passes) = (facts.micro_batch_size, facts.gradient_accumulation_steps);
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
pub(in crate::diagnosis) fn pressure(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let gpu = facts.device_memory_bytes.filter(|_| facts.is_gpu).zip(figures.gpu_memory_used_bytes);
    let gpu = gpu.filter(|(all, used)| as_f64(*used) > FULL_GPU * as_f64(*all));
    let host = facts.host_memory_bytes.zip(figures.host_available_bytes);
    let host = host.filter(|(all, left)| as_f64(*left) < MIN_LEFT * as_f64(*all));
    let (rule, verdict, evidence) = match (gpu, host) {
        (Some((all, used)), _) => {
            let verdict =
                format!("MEMORY PRESSURE: {} of the GPU's memory was in use", percent(as_f64(used) / as_f64(all)));
            ("memory_pressure_gpu", verdict, format!("{} of {}; a longer row may not fit", bytes(used), bytes(all)))
        }
        (None, Some((all, left))) => {
            let verdict =
                format!("MEMORY PRESSURE: the host had {} of its memory left", percent(as_f64(left) / as_f64(all)));
            ("memory_pressure_host", verdict, format!("{} of {} left at the least", bytes(left), bytes(all)))
        }
        (None, None) => return None,
    };
    let changes = less_memory(run);
    Some(Finding { evidence: vec![evidence], changes, ..finding(rule, Severity::Advice, None, verdict) })
}

/// By how much a figure rises over the counted steps, where it rises steadily.
fn growth(points: &Line, num_steps: u64, min_correlation: f64) -> Option<f64> {
    let rises = points.count() >= MIN_STEPS && points.correlation()? > min_correlation;
    Some(points.slope()? * as_f64(num_steps)).filter(|growth| rises && *growth > 0.0)
}

/// The memory of the process keeps growing.
pub(in crate::diagnosis) fn creep(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    let is_much = |points: &Line, growth: f64| growth > MIN_GROWTH_BYTES && growth > MIN_GROWTH * points.mean_y();
    let of = |points: &Line| growth(points, figures.num_steps, 0.9).filter(|growth| is_much(points, *growth));
    let gpu_free =
        run.facts.device_memory_bytes.zip(figures.gpu_memory_used_bytes).map(|(all, used)| all.saturating_sub(used));
    let (what, growth, left) = match (of(&figures.host_memory), of(&figures.allocated)) {
        (Some(growth), _) => ("host memory", growth, figures.host_available_bytes),
        (None, Some(growth)) => ("GPU memory", growth, gpu_free),
        (None, None) => return None,
    };
    let a_step = growth / as_f64(figures.num_steps);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "shown as bytes")]
    let thousand = (1000.0 * a_step) as u64;
    let verdict = format!("MEMORY CREEP: {what} grows by {} in a thousand steps", bytes(thousand));
    let mut evidence = vec![format!("it has risen all along {} steps", figures.num_steps)];
    evidence.extend(
        left.map(|left| format!("the {} left last for about {:.0} steps more", bytes(left), as_f64(left) / a_step)),
    );
    // The recipe can only help with an earlier checkpoint, to resume from in a fresh, small process.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of steps")]
    let steps_left = left.map(|left| (as_f64(left) / a_step) as u64);
    let earlier = run.facts.save_steps.zip(steps_left).filter(|(save_steps, left)| left < save_steps);
    let changes = earlier.map(|(save_steps, left)| {
        let expected = "a checkpoint before memory runs out, from which `--resume` continues".to_owned();
        change("checkpoint.save_steps", save_steps, (left / 2).max(1), expected)
    });
    let changes = changes.into_iter().collect();
    Some(Finding { evidence, changes, ..finding("memory_creep", Severity::Problem, None, verdict) })
}

/// The backend's pools grow, while the live memory in them does not.
pub(in crate::diagnosis) fn fragmentation(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let growth = growth(&figures.reserved, figures.num_steps, 0.8)?;
    let live = figures.allocated.slope().unwrap_or(0.0) * as_f64(figures.num_steps);
    if growth < 0.1 * figures.reserved.mean_y() || growth < MIN_GROWTH_BYTES || live > growth / 4.0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "shown as bytes")]
    let grown = growth as u64;
    let verdict = format!("FRAGMENTATION: the GPU's pools have grown by {}, what lives in them has not", bytes(grown));
    let reserved = figures.reserved_bytes.unwrap_or(0);
    let evidence =
        vec![format!("{} held; rows of ever other lengths leave holes that no later one fits", bytes(reserved))];
    let even = || change("data.packing", false, true, format!("rows of one length: up to {} less", bytes(grown)));
    let changes = (!facts.packing).then(even).into_iter().collect();
    Some(Finding { evidence, changes, ..finding("fragmentation", Severity::Advice, None, verdict) })
}

/// The host swaps this process out.
pub(in crate::diagnosis) fn swapping(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    let (first, most) = figures.host_swapped_bytes?;
    let grown = most.saturating_sub(first);
    let faults = figures.major_page_faults.unwrap_or(0);
    if grown < MIN_SWAPPED_BYTES && (most < MIN_SWAPPED_BYTES || faults < figures.num_steps) {
        return None;
    }
    let verdict = format!("SWAPPING: {} of this process were swapped out", bytes(most));
    let mut evidence = vec![format!("{} of it during the run; {faults} page faults waited for a disk", bytes(grown))];
    evidence.extend(figures.host_available_bytes.map(|left| format!("the host had {} left at the least", bytes(left))));
    let changes = less_memory(run);
    Some(Finding { evidence, changes, ..finding("swapping", Severity::Problem, None, verdict) })
}

/// Another process uses the GPU.
pub(in crate::diagnosis) fn other_process(run: &Run) -> Option<Finding> {
    let others = run.figures.other_processes_memory_bytes.filter(|bytes| *bytes >= MIN_OTHER_BYTES)?;
    let verdict = format!("SHARED GPU: other processes hold {} of its memory", bytes(others));
    let mut evidence = Vec::new();
    evidence.extend(
        run.figures
            .gpu_percent
            .get()
            .map(|gpu| format!("GPU utilization {gpu:.0}% is that of all of them together; `nvidia-smi` names them")),
    );
    Some(Finding { evidence, ..finding("shared_gpu", Severity::Problem, None, verdict) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::tests::{gpu_run, run};

    #[test]
    fn a_full_gpu_and_a_full_host_are_told_of_with_what_needs_less() {
        let full = gpu_run(|line| line.gpu_memory_used_bytes = Some(78 << 30));
        let found = pressure(&full).unwrap();
        assert_eq!(found.rule, "memory_pressure_gpu");
        assert_eq!(found.changes[0].expected, "1.0 GiB less, for about 43% more time");
        assert_eq!([&found.changes[1].to, &found.changes[2].to], ["2", "4"]);
        for (rows, fewer, passes) in [(9, "3", "6"), (7, "1", "14"), (6, "3", "4")] {
            let mut odd = full.clone();
            odd.facts.micro_batch_size = rows;
            let changes = pressure(&odd).unwrap().changes;
            assert_eq!([&changes[1].to, &changes[2].to], [fewer, passes], "2 x {rows} rows in an update");
        }
        let host = run(|line| line.host_available_bytes = Some(300 << 20));
        assert_eq!(pressure(&host).unwrap().rule, "memory_pressure_host");
        assert!(pressure(&run(|_| {})).is_none() && pressure(&gpu_run(|_| {})).is_none());
    }

    #[test]
    fn memory_that_grows_all_along_is_told_from_memory_that_settles() {
        let leak = run(|line| line.host_memory_bytes = Some((2 << 30) + line.step * (10 << 20)));
        let found = creep(&leak).unwrap();
        assert!(found.verdict.starts_with("MEMORY CREEP: host memory grows by 9.8 GiB in a thousand"), "{found:#?}");
        assert!(found.evidence[1].starts_with("the 8.0 GiB left last for about 819 steps"), "{found:#?}");
        assert!(found.changes.is_empty(), "the next checkpoint comes before: {found:#?}");
        let mut rarely_saved = leak;
        rarely_saved.facts.save_steps = Some(2000);
        let changes = creep(&rarely_saved).unwrap().changes;
        assert_eq!([changes[0].key.as_str(), &changes[0].to], ["checkpoint.save_steps", "409"]);
        let settles = run(|line| line.host_memory_bytes = Some((2 << 30) + line.step.min(10) * (50 << 20)));
        assert!(creep(&settles).is_none() && creep(&run(|_| {})).is_none());
        let gpu = gpu_run(|line| line.gpu_memory_allocated_bytes = Some((20 << 30) + line.step * (50 << 20)));
        assert!(creep(&gpu).unwrap().verdict.starts_with("MEMORY CREEP: GPU memory"));
    }

    #[test]
    fn pools_that_grow_around_the_same_tensors_are_fragmented() {
        let holes = gpu_run(|line| line.gpu_memory_reserved_bytes = Some((30 << 30) + line.step * (200 << 20)));
        let found = fragmentation(&holes).unwrap();
        assert!(found.verdict.contains("grown by 19.5 GiB") && found.changes[0].key == "data.packing", "{found:#?}");
        let needed = gpu_run(|line| {
            line.gpu_memory_reserved_bytes = Some((30 << 30) + line.step * (200 << 20));
            line.gpu_memory_allocated_bytes = Some((20 << 30) + line.step * (200 << 20));
        });
        assert!(fragmentation(&needed).is_none() && fragmentation(&gpu_run(|_| {})).is_none());
    }

    #[test]
    fn being_swapped_out_is_a_problem() {
        let swapped = run(|line| line.host_swapped_bytes = Some(line.step * (1 << 20)));
        assert!(swapping(&swapped).unwrap().evidence[0].starts_with("100 MiB of it during the run"));
        let long_ago = run(|line| line.host_swapped_bytes = Some(300 << 20));
        assert!(swapping(&long_ago).is_none(), "what was swapped out before and is not missed does no harm");
        let missed = run(|line| (line.host_swapped_bytes, line.major_page_faults) = (Some(300 << 20), Some(5)));
        assert!(swapping(&missed).is_some() && swapping(&run(|_| {})).is_none());
    }

    #[test]
    fn another_process_on_the_gpu_is_a_problem() {
        let shared = gpu_run(|line| line.gpu_other_processes_memory_bytes = Some(9 << 30));
        assert!(other_process(&shared).unwrap().verdict.starts_with("SHARED GPU: other processes hold 9.0 GiB"));
        assert!(other_process(&gpu_run(|_| {})).is_none());
    }
}
