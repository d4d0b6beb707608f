//! Frozen weights that come from a disk.

use crate::insight::diagnosis::text::{at_most, change, finding, percent};
use crate::insight::diagnosis::{Finding, Run, Severity};
use crate::util::stats::as_f64;
use crate::util::text::bytes;

/// Share of a step's weights from which reading them is reported.
const MIN_READ: f64 = 0.1;
/// Share of the processors' time from which waiting is worth a change.
const MIN_IDLE: f64 = 0.1;

/// The page cache does not hold weights that stay on disk.
pub(super) fn weights_from_disk(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let (steps, read) = (as_f64(figures.num_steps().max(1)), figures.disk_read_bytes());
    let share = as_f64(read) / (as_f64(facts.weights_read_bytes?) * steps);
    let idle = 1.0 - figures.counted.cpu_utilization_percent.get()? / 100.0;
    if share < MIN_READ {
        return None;
    }
    let verdict = format!("WEIGHTS FROM DISK: {} of what a step uses of the frozen weights", percent(share.min(1.0)));
    let a_second = as_f64(read) / 1e6 / figures.counted.step_seconds.max(1e-9);
    let evidence = vec![
        format!("{} read from disks in {steps} steps, {a_second:.0} MB/s", bytes(read)),
        format!("the processors had nothing to do in {} of the time", percent(idle)),
    ];
    if idle < MIN_IDLE {
        return Some(Finding { evidence, ..finding("weights_from_disk", Severity::Note, None, verdict) });
    }
    let (rows, passes) = (facts.train.micro_batch_size, facts.train.gradient_accumulation_steps);
    let change = if passes > 1 && !facts.train.layered_accumulation {
        let gain = format!("the weights are read once for {passes} micro-batches: {}", at_most(idle));
        change("train.layered_accumulation", false, true, gain)
    } else {
        let gain = format!("the weights are read for twice the rows: {}", at_most(idle / 2.0));
        change("train.micro_batch_size", rows, 2 * rows, gain)
    };
    Some(Finding {
        evidence,
        changes: vec![change],
        ..finding("weights_from_disk", Severity::Advice, Some(idle), verdict)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::diagnosis::rules::page_cache::page_cache;
    use crate::insight::diagnosis::tests::{finds, run};

    #[test]
    fn weights_that_the_page_cache_does_not_hold_are_told_from_rows() {
        let mapped = |read: u64, cpu: f64| {
            let mut run = run(|line| {
                (line.disk_read_bytes, line.cpu_utilization_percent) = (Some(read), Some(cpu));
            });
            run.facts.weights_read_bytes = Some(4 << 30);
            run
        };
        let mut slow = mapped(1 << 30, 60.0);
        let parts = ["weights_from_disk advice", "25% of what a step uses", "nothing to do in 40%"];
        finds(weights_from_disk(&slow), &[&parts[..], &["`train.layered_accumulation` false -> true"]].concat());
        slow.facts.train.layered_accumulation = true;
        finds(weights_from_disk(&slow), &["`train.micro_batch_size` 4 -> 8"]);
        finds(weights_from_disk(&mapped(1 << 30, 97.0)), &["weights_from_disk note"]);
        finds(weights_from_disk(&mapped(1 << 20, 60.0)), &[]);
        finds(page_cache(&mapped(1 << 30, 60.0)), &[]);
        finds(weights_from_disk(&run(|line| line.disk_read_bytes = Some(1 << 30))), &[]);
    }
}
