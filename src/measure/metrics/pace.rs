//! The time that a run still takes.

use std::time::Instant;

use crate::config::num_evaluations;
use crate::util::stats::as_f64;

/// The pace of the steps and of the evaluations of one start. Those of earlier starts do not count: they may have run on
/// another machine.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    first_step: u64,
    total_steps: u64,
    eval_steps: Option<u64>,
    pub(super) started: Option<Instant>,
    /// Seconds since then that were evaluations.
    evaluating_seconds: f64,
    /// The step of the last evaluation, and the seconds that it took.
    last_evaluation: Option<(u64, f64)>,
}

impl Pace {
    pub(super) fn new(first_step: u64, total_steps: u64, eval_steps: Option<u64>) -> Self {
        Self { first_step, total_steps, eval_steps, ..Self::default() }
    }

    /// The first step begins. The time before it is start-up and says nothing about the time left.
    pub(super) fn start(&mut self) {
        (self.started, self.evaluating_seconds) = (Some(Instant::now()), 0.0);
    }

    /// An evaluation after `step` has taken so long.
    pub(super) fn evaluated(&mut self, step: u64, seconds: f64) {
        self.evaluating_seconds += seconds;
        self.last_evaluation = Some((step, seconds));
    }

    /// Seconds that remain after `step`: those of the steps, and from the first evaluation on those of evaluations.
    pub(super) fn remaining_seconds(&self, step: u64) -> Option<f64> {
        let done = step.checked_sub(self.first_step).filter(|done| *done > 0)?;
        let stepping_seconds = self.started?.elapsed().as_secs_f64() - self.evaluating_seconds;
        let of_steps = stepping_seconds / as_f64(done) * as_f64(self.total_steps.saturating_sub(step));
        let of_evaluations = self.last_evaluation.map_or(0.0, |(last, seconds)| {
            // That after this step may still come.
            let after = if last == step { step } else { step - 1 };
            as_f64(num_evaluations(self.eval_steps, after, self.total_steps)) * seconds
        });
        Some(of_steps + of_evaluations)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// After steps of a second each, and an evaluation of 60 seconds that was one of them.
    fn left(pace: &Pace, step: u64) -> f64 {
        pace.remaining_seconds(step).unwrap().round()
    }

    #[test]
    fn the_time_left_is_that_of_the_steps_of_this_start_and_of_the_evaluations_to_come() {
        let mut pace = Pace::new(100, 200, Some(40));
        assert_eq!(pace.remaining_seconds(150), None);
        pace.start();
        pace.started = Instant::now().checked_sub(Duration::from_secs(50));
        assert_eq!((pace.remaining_seconds(100), left(&pace, 150)), (None, 50.0));
        // Steps 120, 160 and 200.
        pace.evaluated(120, 60.0);
        pace.started = Instant::now().checked_sub(Duration::from_secs(110));
        assert_eq!(left(&pace, 150), 50.0 + 2.0 * 60.0);
        // One is due after the step, and then done.
        pace.started = Instant::now().checked_sub(Duration::from_mins(2));
        assert_eq!(left(&pace, 160), 40.0 + 2.0 * 60.0);
        pace.evaluated(160, 30.0);
        pace.started = Instant::now().checked_sub(Duration::from_secs(150));
        assert_eq!(left(&pace, 160), 40.0 + 30.0);
        // At the end alone.
        let mut pace = Pace { eval_steps: None, ..pace };
        assert_eq!(left(&pace, 160), 40.0 + 30.0);
        pace.start();
        assert_eq!(left(&pace, 180), 30.0, "the last one's time is known from before");
    }
}
