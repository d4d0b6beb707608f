//! Where the loop's time goes, lap by lap: every moment belongs to one part.

use std::time::{Duration, Instant};

use crate::metrics::TimeSpent;

/// What a lap was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Waiting for a micro-batch.
    DataWait,
    /// Laying a micro-batch out and handing it to the device. On a device that is not waited for, this and the next three
    /// parts are the time of handing work over, but in steps that wait at their ends.
    HostToDevice,
    /// Forward, with the loss.
    Forward,
    /// Backward, with the gradient norm.
    Backward,
    /// Clipping and the update.
    Optimizer,
    /// Writing figures.
    Logging,
    /// Evaluations and samples.
    Evaluation,
    /// Checkpoints.
    Checkpoint,
    /// Measuring the device's peak, once: the one thing in a step that is not of the step.
    Measuring,
    /// What the loop does besides.
    Other,
}

/// What the device computes, or is given to compute with.
const OF_DEVICE: [Part; 4] = [Part::HostToDevice, Part::Forward, Part::Backward, Part::Optimizer];

const NUM_PARTS: usize = Part::Other as usize + 1;

/// Time by part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Parts([Duration; NUM_PARTS]);

impl Parts {
    /// Seconds of a part.
    pub(super) fn seconds(&self, part: Part) -> f64 {
        self.0[part as usize].as_secs_f64()
    }

    /// What is neither forward nor backward nor any other part with a name in a step's figures.
    pub(super) fn other_seconds(&self) -> f64 {
        self.seconds(Part::Other) + self.seconds(Part::Measuring)
    }

    /// Forward and backward together.
    pub(super) fn forward_backward_seconds(&self) -> f64 {
        self.seconds(Part::Forward) + self.seconds(Part::Backward)
    }

    fn add(&mut self, part: Part, time: Duration) {
        self.0[part as usize] += time;
    }
}

/// A step's time.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepTime {
    /// From the end of the step before to the end of this one, by the clock.
    pub(super) wall_seconds: f64,
    /// The same by part.
    pub(super) parts: Parts,
    /// The parts that the device computes ended when it was done with them, not when they had been handed over.
    pub(super) is_split: bool,
}

impl StepTime {
    /// The step without evaluations, checkpoints and the measuring of the device.
    pub(super) fn step_seconds(&self) -> f64 {
        let between = [Part::Evaluation, Part::Checkpoint, Part::Measuring];
        self.wall_seconds - between.into_iter().map(|part| self.parts.seconds(part)).sum::<f64>()
    }
}

/// A watch that is read wherever one part of the loop ends and the next begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Laps {
    last: Instant,
    step_start: Instant,
    step: Parts,
    total: Parts,
    /// Those of the steps whose parts ended when the device was done with them.
    split: Parts,
}

impl Laps {
    /// A watch that starts at `now`.
    pub(super) fn start(now: Instant) -> Self {
        Self { last: now, step_start: now, step: Parts::default(), total: Parts::default(), split: Parts::default() }
    }

    /// Ends a lap now: the time since the last one was for `part`.
    pub(super) fn lap(&mut self, part: Part) {
        self.lap_at(part, Instant::now());
    }

    /// The same at a moment that has just passed.
    pub(super) fn lap_at(&mut self, part: Part, end: Instant) {
        let time = end.saturating_duration_since(self.last);
        self.step.add(part, time);
        self.total.add(part, time);
        self.last = self.last.max(end);
    }

    /// Ends a step with the last lap. `is_split`: its parts ended when the device was done with them.
    pub(super) fn end_step(&mut self, is_split: bool) -> StepTime {
        if is_split {
            OF_DEVICE.into_iter().for_each(|part| self.split.add(part, self.step.0[part as usize]));
        }
        let wall_seconds = self.last.duration_since(self.step_start).as_secs_f64();
        self.step_start = self.last;
        StepTime { wall_seconds, parts: std::mem::take(&mut self.step), is_split }
    }

    /// Share of forward and backward that is forward, from 0 to 1, by the steps that tell the two apart; `None` where
    /// none does.
    pub(super) fn forward_share(&self) -> Option<f64> {
        let both = self.split.forward_backward_seconds();
        (both > 0.0).then(|| self.split.seconds(Part::Forward) / both)
    }

    /// All laps so far, those after the last step among them, after `startup_seconds` before the first. Of a device that
    /// is not waited for, the parts that it computes have their sum as measured, and their shares of it as in the steps
    /// that waited for them.
    pub(super) fn time_spent(&self, startup_seconds: f64, is_asynchronous: bool) -> TimeSpent {
        let sum = |parts: &Parts| OF_DEVICE.into_iter().map(|part| parts.seconds(part)).sum::<f64>();
        let split = sum(&self.split);
        let scale = if split > 0.0 { sum(&self.total) / split } else { 0.0 };
        let (of_device, scale) = if is_asynchronous && split > 0.0 { (&self.split, scale) } else { (&self.total, 1.0) };
        TimeSpent {
            startup_seconds,
            data_wait_seconds: self.total.seconds(Part::DataWait),
            host_to_device_seconds: scale * of_device.seconds(Part::HostToDevice),
            forward_backward_seconds: scale * of_device.forward_backward_seconds(),
            optimizer_seconds: scale * of_device.seconds(Part::Optimizer),
            evaluation_seconds: self.total.seconds(Part::Evaluation),
            checkpoint_seconds: self.total.seconds(Part::Checkpoint),
            logging_seconds: self.total.seconds(Part::Logging),
            other_seconds: self.total.other_seconds(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_moment_belongs_to_one_part_and_the_parts_are_the_wall_time() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut laps = Laps::start(start);
        laps.lap_at(Part::Evaluation, at(100));
        laps.lap_at(Part::DataWait, at(130));
        laps.lap_at(Part::Forward, at(200));
        laps.lap_at(Part::DataWait, at(210));
        laps.lap_at(Part::Backward, at(400));
        laps.lap_at(Part::Measuring, at(450));
        // A moment that lies before the last one adds nothing, and takes nothing away.
        laps.lap_at(Part::Other, at(440));
        let first = laps.end_step(true);
        assert!((first.wall_seconds - 0.45).abs() < 1e-12 && (first.step_seconds() - 0.30).abs() < 1e-12);
        assert!((first.parts.seconds(Part::DataWait) - 0.04).abs() < 1e-12);
        assert!((first.parts.forward_backward_seconds() - 0.26).abs() < 1e-12);
        laps.lap_at(Part::Logging, at(460));
        let second = laps.end_step(true);
        assert!((second.wall_seconds - 0.01).abs() < 1e-12);
        assert_eq!(second.parts.seconds(Part::DataWait), 0.0);
        laps.lap_at(Part::Checkpoint, at(500));
        assert!((laps.time_spent(2.0, false).total_seconds() - 2.5).abs() < 1e-12);
        assert!((laps.forward_share().unwrap() - 0.07 / 0.26).abs() < 1e-12);
    }

    #[test]
    fn the_steps_that_were_waited_for_say_how_the_time_of_the_others_is_split() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut laps = Laps::start(start);
        // Handed over at once, and waited for where the loss is read: with the update of the step before.
        laps.lap_at(Part::HostToDevice, at(1));
        laps.lap_at(Part::Forward, at(2));
        laps.lap_at(Part::Backward, at(98));
        laps.lap_at(Part::Optimizer, at(100));
        assert!(!laps.end_step(false).is_split);
        assert_eq!(laps.forward_share(), None);
        let unknown = laps.time_spent(0.0, true);
        assert!((unknown.forward_backward_seconds - 0.097).abs() < 1e-12, "as it was: {unknown:?}");
        laps.lap_at(Part::HostToDevice, at(110));
        laps.lap_at(Part::Forward, at(140));
        laps.lap_at(Part::Backward, at(190));
        laps.lap_at(Part::Optimizer, at(200));
        laps.end_step(true);
        // Of 200 ms a tenth, eight tenths and a tenth.
        let time = laps.time_spent(0.0, true);
        assert!((time.host_to_device_seconds - 0.02).abs() < 1e-12, "{time:?}");
        assert!((time.forward_backward_seconds - 0.16).abs() < 1e-12, "{time:?}");
        assert!(
            (time.optimizer_seconds - 0.02).abs() < 1e-12 && (time.total_seconds() - 0.2).abs() < 1e-12,
            "{time:?}"
        );
        assert!((laps.forward_share().unwrap() - 0.375).abs() < 1e-12);
        // On a device that computes within the call, each part is what it was.
        assert!((laps.time_spent(0.0, false).optimizer_seconds - 0.012).abs() < 1e-12);
    }

    #[test]
    fn a_lap_costs_less_than_a_microsecond() {
        let time = || {
            let mut laps = Laps::start(Instant::now());
            let start = Instant::now();
            (0..10_000).for_each(|_| std::hint::black_box(&mut laps).lap(Part::Other));
            start.elapsed() / 10_000
        };
        // The best of several, since the machine has other work.
        let best = (0..20).map(|_| time()).min().unwrap();
        println!("a lap takes {best:?}");
        assert!(best < Duration::from_micros(1), "{best:?}");
    }
}
