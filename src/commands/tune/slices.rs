//! The speed of a run from the lines of its steps.

use super::verdict::median;
use crate::metrics::StepMetrics;

/// Steps before those that are measured: they compile kernels and touch memory for the first time.
pub(super) const WARMUP: u64 = 1;
/// Of the steps after it one in so many belongs to the warm-up as well, where they are many.
const WARMUP_SHARE: usize = 10;
/// Slices of a run whose median is its speed: a hiccup ruins the slice that it falls into, and not the run. A step alone
/// would be too little: where batches come in bursts, most steps wait for none.
const NUM_SLICES: usize = 8;

/// Speed of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Speed {
    pub(super) target_tokens_per_second: f64,
    pub(super) tokens_per_second: f64,
    pub(super) step_seconds: f64,
    pub(super) data_wait_share: f64,
    /// Updates of an epoch.
    pub(super) steps_of_epoch: f64,
}

/// The speed of the steps after the warm-up: of the median slice. `None` where no step was measured.
#[expect(clippy::cast_precision_loss, reason = "tokens of a few steps")]
pub(super) fn speed(steps: &[StepMetrics]) -> Option<Speed> {
    let after_first: Vec<&StepMetrics> = steps.iter().filter(|step| step.step > WARMUP).collect();
    let measured = after_first.get(after_first.len() / WARMUP_SHARE..)?;
    let seconds = |steps: &[&StepMetrics]| steps.iter().map(|step| step.step_seconds).sum::<f64>();
    let count =
        |steps: &[&StepMetrics], of: fn(&StepMetrics) -> u64| steps.iter().map(|step| of(step)).sum::<u64>() as f64;
    let slices = || measured.chunks(measured.len().div_ceil(NUM_SLICES).max(1));
    let all = |of: &dyn Fn(&[&StepMetrics]) -> f64| median(&slices().map(of).collect::<Vec<_>>());
    let tokens_per_second = all(&|slice| count(slice, |step| step.tokens) / seconds(slice));
    // How many of the tokens carry loss is the rows' and not the machine's, so all of them tell it.
    let share = count(measured, |step| step.target_tokens) / count(measured, |step| step.tokens).max(1.0);
    (seconds(measured) > 0.0).then(|| Speed {
        target_tokens_per_second: tokens_per_second * share,
        tokens_per_second,
        step_seconds: all(&|slice| seconds(slice) / slice.len() as f64),
        steps_of_epoch: measured.last().map_or(f64::INFINITY, |last| last.step as f64 / last.epoch),
        data_wait_share: measured.iter().map(|step| step.data_wait_seconds).sum::<f64>() / seconds(measured),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, seconds: f64) -> StepMetrics {
        StepMetrics {
            step,
            step_seconds: seconds,
            data_wait_seconds: seconds / 4.0,
            epoch: step as f64 / 12.0,
            tokens: 100,
            target_tokens: 50,
            loss: 2.0,
            ..StepMetrics::default()
        }
    }

    #[test]
    fn figures_are_those_of_the_steps_after_the_first() {
        let speed_of = speed(&[step(1, 60.0), step(2, 1.0), step(3, 1.0), step(4, 2.0)]).unwrap();
        assert_eq!((speed_of.target_tokens_per_second, speed_of.tokens_per_second), (50.0, 100.0));
        assert_eq!((speed_of.step_seconds, speed_of.data_wait_share, speed_of.steps_of_epoch), (1.0, 0.25, 12.0));
        assert_eq!(speed(&[step(1, 60.0)]), None);
    }

    #[test]
    fn a_hiccup_ruins_a_slice_and_not_the_run() {
        let seconds = |number: u64| match number {
            // A slow start, and a second in which the machine did something else.
            0..=8 => 0.05,
            40 | 41 => 0.5,
            _ => 0.01,
        };
        let steps: Vec<_> = (1..=81).map(|number| step(number, seconds(number))).collect();
        let speed = speed(&steps).unwrap();
        assert!((speed.tokens_per_second - 10_000.0).abs() < 1e-6 && (speed.step_seconds - 0.01).abs() < 1e-9);
    }

    #[test]
    fn waits_that_come_in_bursts_are_in_the_speed() {
        let steps: Vec<_> = (1..=81).map(|number| step(number, if number % 4 == 0 { 0.05 } else { 0.01 })).collect();
        assert!((speed(&steps).unwrap().tokens_per_second - 5_000.0).abs() < 1_000.0);
    }
}
