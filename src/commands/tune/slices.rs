//! The speed of a run, from its step lines.

use serde::Serialize;

use crate::metrics::StepMetrics;
use crate::stats::median;

/// Unmeasured first steps: they compile kernels and touch memory for the first time.
pub(super) const WARMUP: u64 = 1;
/// In long runs, the warm-up also takes one in this many of the later steps.
const WARMUP_SHARE: usize = 10;
/// The median of this many slices is the run's speed, so that a hiccup ruins only its slice. Single steps would be too
/// short: where batches come in bursts, most steps wait for none.
const NUM_SLICES: usize = 8;

/// Speed of a run, over its measured steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Speed {
    /// Tokens that carry loss per second of the steps.
    pub(super) target_tokens_per_second: f64,
    /// Tokens without padding per second of the steps. Trials are compared by this, because the loss tokens depend on
    /// the rows.
    pub(super) tokens_per_second: f64,
    pub(super) step_seconds: f64,
    /// Share of the time spent waiting for data.
    pub(super) data_wait_share: f64,
    /// Updates per epoch.
    #[serde(skip)]
    pub(super) steps_of_epoch: f64,
}

/// The speed of the median slice after the warm-up; `None` where no step was measured.
#[expect(clippy::cast_precision_loss, reason = "tokens of a few steps")]
pub(super) fn speed(steps: &[StepMetrics]) -> Option<Speed> {
    let after_first: Vec<&StepMetrics> = steps.iter().filter(|step| step.step > WARMUP).collect();
    let measured = after_first.get(after_first.len() / WARMUP_SHARE..)?;
    let last = measured.last()?;
    let seconds = |steps: &[&StepMetrics]| steps.iter().map(|step| step.step_seconds).sum::<f64>();
    let count =
        |steps: &[&StepMetrics], of: fn(&StepMetrics) -> u64| steps.iter().map(|step| of(step)).sum::<u64>() as f64;
    let slices = measured.chunks(measured.len().div_ceil(NUM_SLICES));
    let all =
        |of: &dyn Fn(&[&StepMetrics]) -> f64| median(&slices.clone().map(of).collect::<Vec<_>>()).unwrap_or(f64::NAN);
    let tokens_per_second = all(&|slice| count(slice, |step| step.tokens) / seconds(slice));
    // The share of loss tokens does not depend on the machine, so take it from all steps, not the median slice.
    let share = count(measured, |step| step.target_tokens) / count(measured, |step| step.tokens).max(1.0);
    (seconds(measured) > 0.0).then(|| Speed {
        target_tokens_per_second: tokens_per_second * share,
        tokens_per_second,
        step_seconds: all(&|slice| seconds(slice) / slice.len() as f64),
        data_wait_share: measured.iter().map(|step| step.data_wait_seconds).sum::<f64>() / seconds(measured),
        steps_of_epoch: last.step as f64 / last.epoch,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(count: u64, seconds: impl Fn(u64) -> f64) -> Vec<StepMetrics> {
        let step = |step| StepMetrics {
            step,
            step_seconds: seconds(step),
            data_wait_seconds: seconds(step) / 4.0,
            epoch: step as f64 / 12.0,
            tokens: 100,
            target_tokens: 50,
            ..StepMetrics::default()
        };
        (1..=count).map(step).collect()
    }

    #[test]
    fn figures_are_those_of_the_steps_after_the_first() {
        let of_four = speed(&steps(4, |step| [60.0, 1.0, 1.0, 2.0][step as usize - 1])).unwrap();
        assert_eq!((of_four.target_tokens_per_second, of_four.tokens_per_second), (50.0, 100.0));
        assert_eq!((of_four.step_seconds, of_four.data_wait_share, of_four.steps_of_epoch), (1.0, 0.25, 12.0));
        assert_eq!(speed(&steps(1, |_| 60.0)), None);
    }

    #[test]
    fn a_hiccup_ruins_a_slice_and_not_the_run_and_waits_in_bursts_count() {
        let hiccup = speed(&steps(81, |step| if step == 40 || step <= 8 { 0.5 } else { 0.01 })).unwrap();
        assert!((hiccup.tokens_per_second - 10_000.0).abs() < 1e-6 && (hiccup.step_seconds - 0.01).abs() < 1e-9);
        let bursts = speed(&steps(81, |step| if step % 4 == 0 { 0.05 } else { 0.01 })).unwrap();
        assert!((bursts.tokens_per_second - 5_000.0).abs() < 1_000.0);
    }
}
