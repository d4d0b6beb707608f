//! Waiting for data: its causes, and what helps.

use crate::insight::diagnosis::text::{at_most, change, faster, finding, percent, seconds};
use crate::insight::diagnosis::{Change, Figures, Finding, Run, Severity};
use crate::util::stats::{as_f64, as_u64};

/// Share of the steps' time from which waiting for data is reported.
const MIN_SHARE: f64 = 0.10;
/// Workers that were busy for less of the time sometimes had a full queue, so they are not too slow.
const BUSY: f64 = 0.75;
/// Share of the workers' time from which one of its uses is the cause.
const CAUSE: f64 = 0.4;

/// How the workers spent their time, as shares.
pub(super) struct Workers {
    /// Share of wall time in which they were working.
    busy: f64,
    cpu: f64,
    queued: f64,
    /// The remainder: waiting for a disk.
    pub(super) waiting: f64,
    /// Time of all workers together for one step.
    seconds_a_step: f64,
}

impl Workers {
    pub(super) fn of(Run { facts, figures }: &Run) -> Option<Self> {
        let (busy, cpu) = (figures.worker_busy_seconds?, figures.worker_cpu_seconds?);
        let queued = figures.worker_queued_seconds.unwrap_or(0.0);
        let all = figures.counted.step_seconds * as_f64(facts.data.num_workers);
        (busy > 0.0 && all > 0.0).then(|| Self {
            busy: (busy / all).min(1.0),
            cpu: cpu / busy,
            queued: queued / busy,
            waiting: ((busy - cpu - queued) / busy).max(0.0),
            seconds_a_step: figures.per_step(busy),
        })
    }
}

/// The loop waits for data: because workers compute, because they wait for a disk, or because the queue is too short.
pub(super) fn input_bound(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let num_workers = facts.data.num_workers as u64;
    let share = lost_share(run);
    if share < MIN_SHARE || !figures.are_enough() {
        return None;
    }
    let workers = Workers::of(run);
    let (rule, why, changes) = match &workers {
        Some(workers) if workers.busy < BUSY => {
            ("input_bound_queue", "the queue is too short", longer_queue(run, share))
        }
        Some(workers) if workers.waiting > CAUSE => {
            ("input_bound_disk", what_is_waited_for(figures), more_workers(run, workers, share, true))
        }
        Some(workers) => {
            let (rule, why) = if workers.queued > CAUSE {
                ("input_bound_processors", "data workers wait for a free processor")
            } else {
                ("input_bound_cpu", "data workers compute all the time")
            };
            (rule, why, more_workers(run, workers, share, false))
        }
        None => {
            let to = (num_workers * 2).min(facts.num_cpu_threads.max(1));
            let more = || change("data.num_workers", num_workers, to, at_most(share / 2.0));
            let changes = (to > num_workers).then(more).into_iter().collect();
            ("input_bound", "what data workers do is not known", changes)
        }
    };
    let who = if facts.is_gpu { "the GPU" } else { "training" };
    let severity = if share >= 0.25 { Severity::Problem } else { Severity::Advice };
    let verdict = format!("INPUT-BOUND: {who} waited for data {} of step time; {why}", percent(share));
    let mut evidence = vec![format!(
        "a step waits {} of {}",
        seconds(figures.per_step(figures.data_wait_seconds)),
        seconds(figures.mean_step_seconds())
    )];
    if let Some(workers) = &workers {
        evidence.push(format!(
            "{} data workers: at work {} of the time, of which computing {}, without a free processor {}, waiting for a \
             disk {}; a step's rows take them {}",
            num_workers,
            percent(workers.busy),
            percent(workers.cpu.min(1.0)),
            percent(workers.queued.min(1.0)),
            percent(workers.waiting),
            seconds(workers.seconds_a_step)
        ));
    }
    let read = as_f64(figures.disk_read_bytes()) / figures.counted.step_seconds;
    let cpu =
        figures.counted.cpu_utilization_percent.get().map_or_else(String::new, |cpu| format!("CPU at {cpu:.0}%, "));
    let disk = if read < 1e4 { "disk idle".to_owned() } else { format!("disk read at {:.1} MB/s", read / 1e6) };
    evidence.push(format!("{cpu}{disk}"));
    Some(Finding { evidence, changes, ..finding(rule, severity, Some(share), verdict) })
}

/// Share of the steps' time lost to waiting for data. A GPU may still compute while the loop waits: it lost at most the
/// time in which it ran no kernel.
pub(super) fn lost_share(run: &Run) -> f64 {
    let waited = run.figures.share_of_steps(run.figures.data_wait_seconds);
    match run.figures.counted.gpu_utilization_percent.get().filter(|_| run.facts.is_gpu) {
        Some(percent) => waited.min(1.0 - percent / 100.0),
        None => waited,
    }
}

/// Not everything that a worker waits for is a disk of this machine.
fn what_is_waited_for(figures: &Figures) -> &'static str {
    if figures.disk_read_bytes() > 0 || figures.major_page_faults > 0 {
        "data workers wait for a disk"
    } else {
        "data workers wait, and not for a disk of this machine: for files on a network, or for its hypervisor"
    }
}

pub(super) fn longer_queue(run: &Run, share: f64) -> Vec<Change> {
    let now = run.facts.data.prefetch_batches as u64;
    // A queue long enough to bridge the slowest step, by its ratio to the median step.
    let [middle, slow] = [0.5, 0.95].map(|share| run.figures.step_quantile(share));
    let spread = slow.zip(middle).map_or(1.0, |(slow, middle)| slow / middle.max(1e-9));
    let factor = as_u64(spread.ceil()).clamp(2, 8);
    vec![change("data.prefetch_batches", now, now * factor, at_most(share))]
}

/// More workers where there are processors for them; otherwise tokens that are made once and kept.
fn more_workers(run: &Run, workers: &Workers, share: f64, waits: bool) -> Vec<Change> {
    let Run { facts, figures } = run;
    let num_workers = facts.data.num_workers as u64;
    let step = figures.mean_step_seconds();
    let without_wait = step * (1.0 - share);
    let unused = figures
        .counted
        .cpu_utilization_percent
        .get()
        .map_or(0.0, |percent| as_f64(facts.num_cpu_threads) * (1.0 - percent / 100.0));
    // Processors that this process leaves idle may be in use by others: then its workers queue for them.
    let free = if workers.queued > CAUSE { 0.0 } else { unused };
    let needed = (workers.seconds_a_step / without_wait.max(1e-9)).ceil();
    // Waiting for a disk needs no processor.
    let possible = if waits { needed } else { as_f64(num_workers) + (free + 0.25).floor() };
    let to = as_u64(needed.min(possible).clamp(1.0, 256.0));
    let mut changes = Vec::new();
    if to > num_workers {
        let after = (workers.seconds_a_step / as_f64(to)).max(without_wait);
        changes.push(change("data.num_workers", num_workers, to, faster(step, after)));
    }
    if !facts.data.packing && !waits && workers.cpu + workers.queued > 0.5 {
        let expected =
            format!("{}; rows are tokenised once, before the first step, and kept", faster(step, without_wait));
        changes.push(change("data.packing", false, true, expected));
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::diagnosis::tests::{finds, gpu_run, run};
    use crate::util::stats::MeanOverTime;

    #[test]
    fn workers_that_compute_all_the_time_are_the_cause_and_free_processors_the_remedy() {
        let mut busy = gpu_run(|line| {
            // A worker makes a step's rows in 1.5 s, while the GPU needs 0.5 s.
            (line.step_seconds, line.data_wait_seconds) = (1.5, 1.0);
            (line.worker_busy_seconds, line.worker_cpu_seconds) = (Some(1.5), Some(1.47));
            (line.cpu_utilization_percent, line.gpu_utilization_percent) = (Some(20.0), Some(34.0));
        });
        let found = [
            "input_bound_cpu problem",
            "INPUT-BOUND: the GPU waited for data 66% of step time; data workers compute all the time",
            "CPU at 20%, disk idle",
            "`data.num_workers` 1 -> 3: about 2.94x (a step 1.500 s -> 0.510 s)",
        ];
        finds(input_bound(&busy), &found);
        // Without a free processor, more workers would only take time from each other.
        (busy.facts.num_cpu_threads, busy.facts.is_gpu) = (1, false);
        busy.figures.counted.cpu_utilization_percent = MeanOverTime::default();
        let found = input_bound(&busy).unwrap();
        assert_eq!((found.changes.len(), found.changes[0].key.as_str()), (1, "data.packing"));
        finds(input_bound(&run(|line| line.data_wait_seconds = 0.05)), &[]);
        // The GPU computes meanwhile.
        finds(input_bound(&gpu_run(|line| line.data_wait_seconds = 0.4)), &[]);
    }

    #[test]
    fn what_workers_wait_for_is_told_from_computing_and_from_each_other() {
        let mut slow = run(|line| {
            (line.data_wait_seconds, line.disk_read_bytes) = (0.4, Some(20_000_000));
            (line.worker_busy_seconds, line.worker_cpu_seconds) = (Some(0.98), Some(0.1));
            line.worker_queued_seconds = Some(0.05);
        });
        let disk = ["input_bound_disk problem", "data workers wait for a disk\n", "disk read at 20.0 MB/s", "1 -> 2: "];
        finds(input_bound(&slow), &disk);
        slow.figures.steps.iter_mut().for_each(|step| step.disk_read_bytes = 0);
        finds(input_bound(&slow), &["input_bound_disk problem", "for files on a network"]);
        let crowded = run(|line| {
            line.data_wait_seconds = 0.5;
            (line.worker_busy_seconds, line.worker_cpu_seconds) = (Some(0.98), Some(0.3));
            (line.worker_queued_seconds, line.cpu_utilization_percent) = (Some(0.65), Some(20.0));
        });
        let found = input_bound(&crowded).unwrap();
        assert_eq!(found.changes.len(), 1, "more workers would stand in the same line: {found:#?}");
        finds(Some(found), &["input_bound_processors problem", "wait for a free processor", "`data.packing`"]);
    }

    #[test]
    fn workers_that_rest_while_the_loop_waits_have_too_short_a_queue() {
        let short = run(|line| line.data_wait_seconds = 0.2);
        finds(input_bound(&short), &["input_bound_queue advice", "`data.prefetch_batches` 4 -> 8: at most 1.25x"]);
        let unknown = run(|line| (line.data_wait_seconds, line.worker_busy_seconds) = (0.2, None));
        finds(input_bound(&unknown), &["input_bound advice", "`data.num_workers` 1 -> 2: at most 1.11x"]);
    }
}
