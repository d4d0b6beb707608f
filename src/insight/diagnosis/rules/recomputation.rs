//! Activations of blocks: recomputed although memory could keep them, or kept in memory that more rows could use.

use super::compute::{MARGIN, MIN_GAIN, twice_the_rows, unfilled};
use crate::insight::diagnosis::text::{at_most, change, finding, percent};
use crate::insight::diagnosis::{Finding, Run, Severity};
use crate::util::stats::as_f64;
use crate::util::text::bytes;

/// The backward recomputes blocks, as the recipe says, though there is free memory for their activations.
pub(super) fn not_needed(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    if !facts.recomputes() || facts.decides_checkpointing || !figures.are_enough() {
        return None;
    }
    let (kept, free) = (facts.activation_bytes?, run.free_bytes()?);
    let share = figures.share_of_steps(figures.recomputation_seconds(facts));
    if as_f64(free) < MARGIN * as_f64(kept) || share < MIN_GAIN {
        return None;
    }
    let verdict = format!(
        "RECOMPUTATION NOT NEEDED: up to {} of step time computes again what memory has room for",
        percent(share)
    );
    let evidence = vec![format!(
        "{} of memory were free at the least, and {} more are needed without it",
        bytes(free),
        bytes(kept)
    )];
    let changes = vec![change("train.gradient_checkpointing", facts.checkpointing(), false, at_most(share))];
    Some(Finding { evidence, changes, ..finding("recomputation_not_needed", Severity::Advice, Some(share), verdict) })
}

/// The device is not filled, and activations take the memory that more rows need. Recomputing them would cost less than
/// the additional rows gain.
pub(super) fn missing(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    if facts.recomputes() || !figures.are_enough() {
        return None;
    }
    let (kept, doubling, free) = (facts.activation_bytes?, facts.doubling_bytes?, run.free_bytes()?);
    let has_room = |bytes: u64| as_f64(free) >= MARGIN * as_f64(bytes);
    // Recomputation frees the activations of these rows, and the additional rows need none.
    let needed = doubling.saturating_sub(kept.saturating_mul(2));
    if has_room(doubling) || !has_room(needed) {
        return None;
    }
    let step = figures.mean_step_seconds();
    let again = figures.per_step(figures.recomputation_seconds(facts));
    let (fixed, activity) = unfilled(run);
    // For equal rows: half of the fixed time goes, or at best twice as many multiprocessors are active.
    let gain = match (fixed, activity) {
        (Some(fixed), _) => step / (step - fixed / 2.0 + again),
        (None, Some(activity)) => step / (step * activity.max(0.5) + again),
        (None, None) => return None,
    };
    if gain < 1.0 + MIN_GAIN {
        return None;
    }
    let rows = facts.train.micro_batch_size;
    let verdict = format!(
        "RECOMPUTATION MISSING: what blocks keep takes the memory that {} rows in a micro-batch instead of {rows} would need",
        2 * rows
    );
    let evidence = vec![
        format!(
            "twice the rows need up to {} more memory, of which {} were free at the least; blocks keep {}",
            bytes(doubling),
            bytes(free),
            bytes(kept)
        ),
        format!("computing them again costs about {} of step time", percent(again / step)),
    ];
    let about = if fixed.is_some() { "about" } else { "at most" };
    let together = format!("{about} {gain:.2}x the tokens a second, together with `train.micro_batch_size`");
    let mut changes = vec![change("train.gradient_checkpointing", facts.checkpointing(), true, together)];
    changes.extend(twice_the_rows(run, "the memory that becomes free".to_owned()));
    Some(Finding { evidence, changes, ..finding("recomputation_missing", Severity::Advice, None, verdict) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GradientCheckpointing;
    use crate::insight::diagnosis::tests::{finds, gpu_run, run};

    #[test]
    fn recomputation_is_not_needed_where_memory_is_free() {
        let mut wasteful = run(|_| {});
        finds(not_needed(&wasteful), &[]);
        wasteful.facts.train.gradient_checkpointing = GradientCheckpointing::On;
        // 0.3 s of forward, 8 of its 8.8 GFLOPs in the blocks: 4,000 tokens through 1 M parameters, 2,000 through 0.1 M.
        let found = not_needed(&wasteful).unwrap();
        assert!((found.share_of_time.unwrap() - 0.3 * 8000.0 / 8800.0).abs() < 1e-4);
        let off = "`train.gradient_checkpointing` true -> false: at most 1.38x";
        finds(Some(found), &["recomputation_not_needed advice", off]);
        wasteful.facts.decides_checkpointing = true;
        finds(not_needed(&wasteful), &[]);
        (wasteful.facts.decides_checkpointing, wasteful.facts.activation_bytes) = (false, Some(7 << 30));
        finds(not_needed(&wasteful), &[]);
        let mut gpu = gpu_run(|_| {});
        gpu.facts.train.gradient_checkpointing = GradientCheckpointing::Offload;
        // The end of the forward within the 0.9 s is not known: 8 of three times 8 and 0.8 GFLOPs.
        let offloaded = not_needed(&gpu).unwrap();
        assert!((offloaded.share_of_time.unwrap() - 0.9 * 8.0 / 24.8).abs() < 1e-4, "{offloaded:#?}");
        finds(
            Some(offloaded),
            &["20.0 GiB of memory were free", "`train.gradient_checkpointing` \"offload\" -> false"],
        );
    }

    #[test]
    fn recomputation_is_missing_where_its_memory_would_hold_the_rows_that_fill_the_device() {
        // At 90% of the memory, with three quarters of the step lost between kernels.
        let mut full = gpu_run(|line| {
            (line.gpu_utilization_percent, line.gpu_memory_used_bytes) = (Some(20.0), Some(72 << 30));
            line.forward_seconds = Some(0.3);
        });
        (full.facts.train.micro_batch_size, full.facts.train.gradient_accumulation_steps) = (1, 8);
        (full.facts.doubling_bytes, full.facts.activation_bytes) = (Some(30 << 30), Some(14 << 30));
        // Half of the 0.75 s between kernels is saved; of the 0.3 s of forward, 8 of 8.8 GFLOPs are recomputed.
        let gain = 1.0 / (1.0 - 0.375 + 0.3 * 8.0 / 8.8);
        let changes = [
            "recomputation_missing advice",
            "the memory that 2 rows in a micro-batch instead of 1 would need",
            &format!("`train.gradient_checkpointing` false -> true: about {gain:.2}x the tokens a second"),
            "`train.micro_batch_size` 1 -> 2: the memory that becomes free",
            "`train.gradient_accumulation_steps` 8 -> 4: the same rows in an update",
        ];
        finds(missing(&full), &changes);
        finds(missing(&gpu_run(|_| {})), &[]);
        let but = |change: fn(&mut Run)| {
            let mut run = full.clone();
            change(&mut run);
            run
        };
        // Without the time of the forward: 8 of the 16.8 GFLOPs in 0.9 s of passes without recomputation, which is more
        // than the gain.
        let unsplit = but(|run| run.figures.forward_of_passes_seconds = (0.0, 0.0));
        let again = unsplit.figures.recomputation_seconds(&unsplit.facts) / 100.0;
        assert!((again - 0.9 * 8.0 / 16.8).abs() < 1e-4, "{again} s");
        for none in [
            unsplit,
            // Recomputation would cost what more rows gain.
            but(|run| run.figures.counted.gpu_utilization_percent.add(Some(40.0), 1e6)),
            // Twice the rows fit without recomputation, or not even with it.
            but(|run| run.facts.doubling_bytes = Some(4 << 30)),
            but(|run| run.facts.activation_bytes = Some(2 << 30)),
            but(|run| run.facts.train.gradient_checkpointing = GradientCheckpointing::On),
        ] {
            finds(missing(&none), &[]);
        }
    }
}
