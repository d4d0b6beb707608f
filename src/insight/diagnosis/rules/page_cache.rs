//! Rows that are read from a disk instead of memory.

use super::input::{Workers, lost_share};
use crate::insight::diagnosis::figures::Step;
use crate::insight::diagnosis::text::{at_most, change, finding, percent};
use crate::insight::diagnosis::{Change, Finding, Run, Severity};
use crate::util::stats::as_f64;
use crate::util::text::bytes;

/// Fewer bytes read per step say nothing.
const MIN_READ_BYTES: f64 = 1_048_576.0;
/// Share of a pass that is still read from a disk after the first one, from which memory does not hold the rows.
const MIN_AGAIN: f64 = 0.3;
/// The cache is cold in the first steps, up to this share of all reads.
const COLD_SHARE: f64 = 0.9;
/// Share of the time lost to waiting from which a change is worth it.
const MIN_COST: f64 = 0.05;
/// Share of the workers' time from which they wait for a disk.
const CAUSE: f64 = 0.4;

/// Rows come from a disk instead of the page cache, in every pass or in the first one. Where weights are read from disk too,
/// what is read for rows is not known.
pub(super) fn page_cache(run: &Run) -> Option<Finding> {
    if run.facts.weights_read_bytes.is_some() {
        return None;
    }
    thrashing(run).or_else(|| cold(run))
}

/// After the first pass, many rows are read again because memory does not hold them.
fn thrashing(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let later = figures.later_reads;
    let passes = figures.epochs - later.from_epoch?;
    let pass_bytes = facts.data_bytes.filter(|bytes| *bytes > 0)?;
    let again = as_f64(later.bytes) / (as_f64(pass_bytes) * passes);
    let is_much = as_f64(later.bytes) >= MIN_READ_BYTES * as_f64(later.num_steps.max(1));
    if passes <= 0.0 || !is_much || again < MIN_AGAIN {
        return None;
    }
    let share = lost_share(run);
    let verdict = format!(
        "THRASHING PAGE CACHE: {} of what a pass reads still comes from a disk after the first, as memory does not hold it",
        percent(again)
    );
    let mut evidence = vec![
        format!("{} read from disks in {passes:.2} passes of {} each", bytes(later.bytes), bytes(pass_bytes)),
        format!(
            "{} page faults waited for a disk; waiting for data cost {} of step time",
            figures.major_page_faults,
            percent(share)
        ),
    ];
    let left = figures.min_host_available_bytes;
    evidence.extend(left.map(|left| format!("the host had {} left at the least", bytes(left))));
    let severity = match share {
        MIN_COST.. => Severity::Problem,
        0.01.. => Severity::Advice,
        // Nothing waits for these reads.
        _ => Severity::Note,
    };
    let mut changes = Vec::new();
    if severity < Severity::Note {
        changes.push(overlapping_reads(run, share));
        let expected = format!("rows in the order of their files, which a disk reads ahead: {}", at_most(share));
        changes.extend(facts.data.shuffle.then(|| change("data.shuffle", true, false, expected)));
    }
    Some(Finding { evidence, changes, ..finding("page_cache_thrashing", severity, Some(share), verdict) })
}

/// Rows are read for the first time: at the beginning of a run, or throughout a run without a second pass.
fn cold(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    let (steps, total) = (&figures.steps, figures.disk_read_bytes());
    let (mut num_cold, mut read) = (0, 0);
    while as_f64(read) < COLD_SHARE * as_f64(total) {
        read += steps[num_cold].disk_read_bytes;
        num_cold += 1;
    }
    let is_at_first = num_cold <= steps.len() / 2 || figures.later_reads.bytes <= total / 10;
    if num_cold == 0 || steps.len() < 4 || !is_at_first || as_f64(read) < MIN_READ_BYTES * as_f64(num_cold) {
        return None;
    }
    let waited = |steps: &[Step]| steps.iter().map(|step| step.data_wait_seconds).sum::<f64>();
    let wait_share = |steps: &[Step]| {
        let seconds: f64 = steps.iter().map(|step| step.seconds).sum();
        percent(if seconds > 0.0 { waited(steps) / seconds } else { 0.0 })
    };
    let (cold, warm) = steps.split_at(num_cold);
    let verdict = if num_cold * 10 >= steps.len() * 9 {
        "COLD PAGE CACHE: rows come from a disk all along, as they are read for the first time".to_owned()
    } else {
        format!("COLD PAGE CACHE: rows came from a disk in the first {num_cold} steps; from memory since")
    };
    let evidence = vec![
        format!(
            "{} of the {} that were read from disks in {} steps were read in the first {num_cold}",
            bytes(read),
            bytes(total),
            steps.len()
        ),
        if warm.is_empty() {
            format!("data wait is {} of step time", wait_share(cold))
        } else {
            format!("data wait is {} of step time in them, {} later", wait_share(cold), wait_share(warm))
        },
    ];
    // Waiting for anything but a disk belongs to another rule.
    let waits_for_disk = Workers::of(run).is_none_or(|workers| workers.waiting > CAUSE);
    let cost = figures.share_of_steps(waited(cold)).min(lost_share(run));
    let (severity, changes) = if cost >= MIN_COST && waits_for_disk && figures.are_enough() {
        (Severity::Advice, vec![overlapping_reads(run, cost)])
    } else {
        (Severity::Note, Vec::new())
    };
    Some(Finding { evidence, changes, ..finding("page_cache_cold", severity, Some(cost), verdict) })
}

/// More reads at the same time. Waiting for a disk needs no processor.
fn overlapping_reads(run: &Run, share: f64) -> Change {
    let num_workers = run.facts.data.num_workers;
    let expected = format!("more reads at the same time: {}", at_most(share));
    change("data.num_workers", num_workers, (2 * num_workers).min(256), expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::diagnosis::tests::{facts, finds, line, run};
    use crate::insight::diagnosis::{Figures, Watch};
    use crate::measure::metrics::StepMetrics;

    #[test]
    fn a_cold_cache_is_reported_after_a_long_run_by_the_steps_in_which_it_was_cold() {
        // 2 GiB in the first 200 of 5,000 steps, which waited half of their time; an epoch is 500 steps.
        let mut figures = Figures::default();
        for step in 2..5002 {
            let is_cold = step < 202;
            figures.add(&StepMetrics {
                epoch: as_f64(step) / 500.0,
                disk_read_bytes: Some(if is_cold { (2 << 30) / 200 } else { 0 }),
                data_wait_seconds: if is_cold { 0.5 } else { 0.001 },
                ..line(step)
            });
        }
        let found = page_cache(&Run { facts: facts(), figures }).unwrap();
        assert!((found.share_of_time.unwrap() - 90.0 / 5000.0).abs() < 0.003, "{found:#?}");
        let first = "rows came from a disk in the first 180 steps; from memory since";
        finds(Some(found), &["page_cache_cold note", first, "data wait is 50% of step time in them, 0.3% later"]);
    }

    #[test]
    fn what_lasts_is_reported_during_the_run() {
        let reported = |line: &dyn Fn(u64) -> StepMetrics, num_steps: u64| {
            let mut watch = Watch::new(facts());
            let mut found = (2..2 + num_steps).flat_map(|step| watch.observe(&line(step)));
            let only = found.next();
            assert!(found.next().is_none());
            only
        };
        let cold = |step| StepMetrics {
            epoch: as_f64(step) / 500.0,
            disk_read_bytes: Some(10 << 20),
            data_wait_seconds: 0.08,
            worker_busy_seconds: Some(0.9),
            worker_cpu_seconds: Some(0.2),
            ..line(step)
        };
        // Nine tenths of it were read in 45 of the 50 steps, which waited for it.
        let more = "`data.num_workers` 1 -> 2: more reads at the same time: at most 1.08x";
        finds(reported(&cold, 50), &["page_cache_cold advice", "rows come from a disk all along", more]);
        let again = |step| StepMetrics { disk_read_bytes: Some(8 << 20), data_wait_seconds: 0.09, ..line(step) };
        finds(reported(&again, 100), &["page_cache_thrashing"]);
    }

    #[test]
    fn rows_that_are_read_again_in_every_pass_are_told_from_a_single_cold_pass() {
        // 100 MiB a pass of ten steps.
        let again = run(|line| {
            (line.disk_read_bytes, line.data_wait_seconds) = (Some(10 << 20), 0.2);
            line.major_page_faults = Some(300);
        });
        let thrashing =
            ["page_cache_thrashing problem", ": 100% of what a pass reads", "`data.num_workers`", "`data.shuffle`"];
        finds(page_cache(&again), &thrashing);
        let unseen = run(|line| (line.disk_read_bytes, line.data_wait_seconds) = (Some(10 << 20), 0.001));
        finds(page_cache(&unseen), &["page_cache_thrashing note"]);
        assert!(page_cache(&unseen).unwrap().changes.is_empty(), "nobody waits for it");
        // One cold pass whose kept tokens take five times the size of the file, in a run of slightly more than one
        // pass.
        let once = run(|line| {
            line.epoch = as_f64(line.step) / 95.0;
            line.disk_read_bytes = Some(if line.step <= 95 { 5 << 20 } else { 0 });
        });
        let cold = run(|line| line.disk_read_bytes = Some(if line.step < 11 { 10 << 20 } else { 0 }));
        // A run resumed in its fourth pass finds a cold cache too.
        let resumed = run(|line| {
            line.epoch = 3.2 + as_f64(line.step) / 200.0;
            line.disk_read_bytes = Some(10 << 20);
        });
        [once, cold, resumed].iter().for_each(|run| finds(page_cache(run), &["page_cache_cold"]));
        finds(page_cache(&run(|line| line.disk_read_bytes = Some(1000))), &[]);
    }
}
