//! The time that making micro-batches takes.

use std::ops::AddAssign;
use std::time::{Duration, Instant};

use crate::measure::telemetry::thread_time;

/// The time that making micro-batches took, summed over all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerTime {
    /// Micro-batches made.
    pub num_batches: u64,
    /// Wall-clock time.
    pub busy: Duration,
    /// CPU time; absent where the system does not count it by thread.
    pub cpu: Option<Duration>,
    /// Time in which the thread could have run but no processor was free; absent where the system does not report it.
    /// The part of `busy` beyond this and `cpu` was spent waiting, mostly for a disk.
    pub queued: Option<Duration>,
}

impl WorkerTime {
    /// Runs a job on this thread; returns its result and the time it took.
    pub(super) fn of<R>(job: impl FnOnce() -> R) -> (R, Self) {
        let (start, before) = (Instant::now(), thread_time());
        let result = job();
        let (busy, after) = (start.elapsed(), thread_time());
        let between = |from: Option<Duration>, to: Option<Duration>| Some(to?.saturating_sub(from?));
        let (cpu, queued) = (between(before.cpu, after.cpu), between(before.queued, after.queued));
        (result, Self { num_batches: 1, busy, cpu, queued })
    }
}

impl AddAssign for WorkerTime {
    fn add_assign(&mut self, other: Self) {
        let sum = |a: Option<Duration>, b: Option<Duration>| match (a, b) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        self.num_batches += other.num_batches;
        self.busy += other.busy;
        self.cpu = sum(self.cpu, other.cpu);
        self.queued = sum(self.queued, other.queued);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn computing_takes_processor_time_and_sleeping_takes_none() {
        let spin = || {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(50) {
                std::hint::black_box(0);
            }
        };
        let ((), mut work) = WorkerTime::of(spin);
        // On a busy machine the rest was spent waiting for a processor.
        let running = |work: &WorkerTime| work.cpu.unwrap() + work.queued.unwrap_or_default();
        assert!(running(&work) >= Duration::from_millis(40), "{work:?}");
        let ((), asleep) = WorkerTime::of(|| std::thread::sleep(Duration::from_millis(50)));
        assert!(asleep.cpu.unwrap() < Duration::from_millis(10), "{asleep:?}");
        work += asleep;
        assert!(work.busy >= Duration::from_millis(100) && work.num_batches == 2, "{work:?}");
    }
}
