//! Divides the loop's time into laps; every moment belongs to one part.

use std::time::{Duration, Instant};

use crate::measure::metrics::{StepMetrics, TimeSpent};

/// The purpose of a lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepPart {
    DataWait,
    /// Answers that the model writes to be trained on.
    Rollout,
    /// Laying out a micro-batch and handing it to the device. On an asynchronous device, this and the next three parts
    /// only measure handing work over, except in steps that wait at the end of each part.
    HostToDevice,
    Forward,
    Backward,
    /// Clipping and the update.
    Optimizer,
    Logging,
    Evaluation,
    Checkpoint,
    /// Measuring the device's peak, once. It happens within a step but is not counted as part of it.
    Measuring,
    Other,
}

/// Parts that the device computes, and the transfer of its input.
const OF_DEVICE: [StepPart; 4] = [StepPart::HostToDevice, StepPart::Forward, StepPart::Backward, StepPart::Optimizer];

const NUM_PARTS: usize = StepPart::Other as usize + 1;

#[derive(Clone, Copy, Debug, Default)]
struct Parts([Duration; NUM_PARTS]);

impl Parts {
    fn seconds(&self, part: StepPart) -> f64 {
        self.0[part as usize].as_secs_f64()
    }

    /// Seconds in parts that have no name in a step's figures.
    fn other_seconds(&self) -> f64 {
        self.seconds(StepPart::Other) + self.seconds(StepPart::Measuring)
    }

    fn forward_backward_seconds(&self) -> f64 {
        self.seconds(StepPart::Forward) + self.seconds(StepPart::Backward)
    }

    fn add(&mut self, part: StepPart, time: Duration) {
        self.0[part as usize] += time;
    }
}

/// A stopwatch that is read wherever one part of the loop ends and the next begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Laps {
    last: Instant,
    step_start: Instant,
    step: Parts,
    total: Parts,
    /// Times of the steps in which every part ended when the device had finished it.
    split: Parts,
}

impl Laps {
    pub(super) fn start(now: Instant) -> Self {
        Self { last: now, step_start: now, step: Parts::default(), total: Parts::default(), split: Parts::default() }
    }

    /// Ends a lap now: the time since the last lap belongs to `part`.
    pub(super) fn lap(&mut self, part: StepPart) {
        self.lap_at(part, Instant::now());
    }

    /// Ends a lap at a moment that has just passed.
    pub(super) fn lap_at(&mut self, part: StepPart, end: Instant) {
        let time = end.saturating_duration_since(self.last);
        self.step.add(part, time);
        self.total.add(part, time);
        self.last = self.last.max(end);
    }

    /// Ends a step with the last lap, and sets its times. `is_split`: each part of it ended when the device had finished
    /// that part. In other steps, only the sum of forward and backward is known.
    pub(super) fn end_step(&mut self, is_split: bool, line: &mut StepMetrics) {
        let parts = std::mem::take(&mut self.step);
        if is_split {
            OF_DEVICE.into_iter().for_each(|part| self.split.add(part, parts.0[part as usize]));
        }
        let wall_seconds = self.last.duration_since(self.step_start).as_secs_f64();
        self.step_start = self.last;
        let seconds = |part| parts.seconds(part);
        let between = [StepPart::Evaluation, StepPart::Checkpoint, StepPart::Measuring];
        line.step_seconds = wall_seconds - between.into_iter().map(seconds).sum::<f64>();
        line.wall_seconds = Some(wall_seconds);
        line.data_wait_seconds = seconds(StepPart::DataWait);
        line.host_to_device_seconds = Some(seconds(StepPart::HostToDevice));
        line.rollout_seconds = Some(seconds(StepPart::Rollout)).filter(|seconds| *seconds > 0.0);
        line.forward_seconds = is_split.then(|| seconds(StepPart::Forward));
        line.backward_seconds = is_split.then(|| seconds(StepPart::Backward));
        line.forward_backward_seconds = parts.forward_backward_seconds();
        line.optimizer_seconds = seconds(StepPart::Optimizer);
        line.logging_seconds = Some(seconds(StepPart::Logging));
        line.evaluation_seconds = Some(seconds(StepPart::Evaluation));
        line.checkpoint_seconds = Some(seconds(StepPart::Checkpoint));
        line.other_seconds = Some(parts.other_seconds());
    }

    /// Share of forward in forward and backward, from 0 to 1, measured in the steps that separate the two; `None` where
    /// there is no such step.
    pub(super) fn forward_share(&self) -> Option<f64> {
        let both = self.split.forward_backward_seconds();
        (both > 0.0).then(|| self.split.seconds(StepPart::Forward) / both)
    }

    /// Time of all laps so far, including those after the last step, plus `startup_seconds` before the first lap. On an
    /// asynchronous device, the sum of the device's parts is as measured; it is divided among them in the proportions
    /// of the steps that waited for each part.
    pub(super) fn time_spent(&self, startup_seconds: f64, is_asynchronous: bool) -> TimeSpent {
        let sum = |parts: &Parts| OF_DEVICE.into_iter().map(|part| parts.seconds(part)).sum::<f64>();
        let split = sum(&self.split);
        let scale = if split > 0.0 { sum(&self.total) / split } else { 0.0 };
        let (of_device, scale) = if is_asynchronous && split > 0.0 { (&self.split, scale) } else { (&self.total, 1.0) };
        TimeSpent {
            startup_seconds,
            data_wait_seconds: self.total.seconds(StepPart::DataWait),
            rollout_seconds: self.total.seconds(StepPart::Rollout),
            host_to_device_seconds: scale * of_device.seconds(StepPart::HostToDevice),
            forward_backward_seconds: scale * of_device.forward_backward_seconds(),
            optimizer_seconds: scale * of_device.seconds(StepPart::Optimizer),
            evaluation_seconds: self.total.seconds(StepPart::Evaluation),
            checkpoint_seconds: self.total.seconds(StepPart::Checkpoint),
            logging_seconds: self.total.seconds(StepPart::Logging),
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
        laps.lap_at(StepPart::Evaluation, at(100));
        laps.lap_at(StepPart::DataWait, at(130));
        laps.lap_at(StepPart::Forward, at(200));
        laps.lap_at(StepPart::DataWait, at(210));
        laps.lap_at(StepPart::Backward, at(400));
        laps.lap_at(StepPart::Measuring, at(450));
        // A moment before the last lap's end changes nothing.
        laps.lap_at(StepPart::Other, at(440));
        let close = |seconds: f64, expected: f64| assert!((seconds - expected).abs() < 1e-12, "{seconds}");
        let mut line = StepMetrics::default();
        laps.end_step(true, &mut line);
        close(line.wall_seconds.unwrap(), 0.45);
        close(line.step_seconds, 0.30);
        close(line.data_wait_seconds, 0.04);
        close(line.forward_backward_seconds, 0.26);
        assert!(line.forward_seconds.is_some());
        laps.lap_at(StepPart::Logging, at(460));
        laps.end_step(false, &mut line);
        close(line.wall_seconds.unwrap(), 0.01);
        assert_eq!((line.data_wait_seconds, line.forward_seconds), (0.0, None));
        laps.lap_at(StepPart::Checkpoint, at(500));
        close(laps.time_spent(2.0, false).total_seconds(), 2.5);
        close(laps.forward_share().unwrap(), 0.07 / 0.26);
    }

    #[test]
    fn the_steps_that_were_waited_for_say_how_the_time_of_the_others_is_split() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut laps = Laps::start(start);
        // Handed over at once. The loop waits where the loss is read, also for an update.
        laps.lap_at(StepPart::HostToDevice, at(1));
        laps.lap_at(StepPart::Forward, at(2));
        laps.lap_at(StepPart::Backward, at(98));
        laps.lap_at(StepPart::Optimizer, at(100));
        let mut line = StepMetrics::default();
        laps.end_step(false, &mut line);
        assert_eq!(laps.forward_share(), None);
        let unknown = laps.time_spent(0.0, true);
        assert!((unknown.forward_backward_seconds - 0.097).abs() < 1e-12, "as it was: {unknown:?}");
        laps.lap_at(StepPart::HostToDevice, at(110));
        laps.lap_at(StepPart::Forward, at(140));
        laps.lap_at(StepPart::Backward, at(190));
        laps.lap_at(StepPart::Optimizer, at(200));
        laps.end_step(true, &mut line);
        // 200 ms, divided into a tenth, eight tenths and a tenth.
        let time = laps.time_spent(0.0, true);
        assert!((time.host_to_device_seconds - 0.02).abs() < 1e-12, "{time:?}");
        assert!((time.forward_backward_seconds - 0.16).abs() < 1e-12, "{time:?}");
        assert!(
            (time.optimizer_seconds - 0.02).abs() < 1e-12 && (time.total_seconds() - 0.2).abs() < 1e-12,
            "{time:?}"
        );
        assert!((laps.forward_share().unwrap() - 0.375).abs() < 1e-12);
        // On a synchronous device, each part is as measured.
        assert!((laps.time_spent(0.0, false).optimizer_seconds - 0.012).abs() < 1e-12);
    }
}
