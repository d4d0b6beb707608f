//! Sampling in turn with not sampling, within one run: by this its cost is measured, since two runs differ by more than it
//! costs.

use std::sync::atomic::{AtomicU64, Ordering};

/// Names a number of steps after which sampling stops, and after as many more starts again, and so on. Without a meaning
/// for training: `scripts/bench_telemetry.py --within` sets it.
pub const ALTERNATION_VARIABLE: &str = "LORA_TRAIN_TELEMETRY_SLICE";

/// Counts windows.
#[derive(Debug)]
pub(super) struct Alternation {
    num_steps: u64,
    num_windows: AtomicU64,
}

/// What the sampler thread is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Samples nothing until it is to go on, and does not even wake up.
    Pause,
    /// Goes on, on the beat that it had.
    GoOn,
}

/// What a window is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// It lies in a stretch that is sampled.
    pub(super) is_sampled: bool,
    /// What the sampler is to be told at its end.
    pub(super) order: Option<Order>,
}

impl Alternation {
    /// As the environment has it; `None` where it says nothing, or no number above 0.
    pub(super) fn from_environment() -> Option<Self> {
        Self::new(std::env::var(ALTERNATION_VARIABLE).ok()?.parse().ok()?)
    }

    pub(super) fn new(num_steps: u64) -> Option<Self> {
        (num_steps > 0).then(|| Self { num_steps, num_windows: AtomicU64::new(0) })
    }

    pub(super) fn notice(&self) -> String {
        format!("sampling stops and starts every {} steps ({ALTERNATION_VARIABLE})", self.num_steps)
    }

    /// The next window.
    pub(super) fn next(&self) -> Turn {
        let before = self.num_windows.fetch_add(1, Ordering::Relaxed);
        let is_sampled = |window: u64| (window / self.num_steps).is_multiple_of(2);
        let order = match (is_sampled(before), is_sampled(before + 1)) {
            (true, false) => Some(Order::Pause),
            (false, true) => Some(Order::GoOn),
            _ => None,
        };
        Turn { is_sampled: is_sampled(before), order }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_sampled_and_not_sampled_in_turn_and_the_thread_hears_of_each_change_once() {
        let alternation = Alternation::new(2).unwrap();
        let turns: Vec<_> = (0..7).map(|_| alternation.next()).map(|turn| (turn.is_sampled, turn.order)).collect();
        let (pause, go_on) = (Some(Order::Pause), Some(Order::GoOn));
        assert_eq!(
            turns,
            [(true, None), (true, pause), (false, None), (false, go_on), (true, None), (true, pause), (false, None)]
        );
        assert!(Alternation::new(0).is_none());
    }
}
