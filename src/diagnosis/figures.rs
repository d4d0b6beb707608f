//! The figures that rules look at: sums over step lines.

use std::collections::BTreeMap;

use super::facts::Facts;
use super::statistics::{Buckets, Distribution, Line, Mean};
use crate::metrics::{StepMetrics, TimeSpent};

/// Steps from which on a share of their time means something.
const MIN_STEPS: u64 = 5;

/// What a rule looks at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// What does not change from step to step.
    pub facts: Facts,
    /// What was measured.
    pub figures: Figures,
}

/// Sums over steps. The first step of a start is not in what a step takes: it compiles, measures the device and waits for
/// the first batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// First and last step that are counted.
    pub steps: Option<(u64, u64)>,
    /// Steps that are counted.
    pub num_steps: u64,
    /// Time of the first step, evaluations left out.
    pub first_step_seconds: Option<f64>,
    /// All time after start-up, that of the first step and evaluations included.
    pub wall_seconds: f64,
    /// Evaluations in it.
    pub evaluation_seconds: f64,
    /// Checkpoints in it.
    pub checkpoint_seconds: f64,
    /// Writing figures in it.
    pub logging_seconds: f64,
    /// Time of the steps, evaluations and checkpoints left out.
    pub step_seconds: f64,
    /// Waiting for data in them.
    pub data_wait_seconds: f64,
    /// Handing micro-batches to the device.
    pub host_to_device_seconds: f64,
    /// Share of forwards and backwards that was forwards, by the steps that tell the two apart: sum of the times of the
    /// first, and of both.
    pub forward_of_passes_seconds: Option<(f64, f64)>,
    /// Forwards and backwards.
    pub forward_backward_seconds: f64,
    /// Updates.
    pub optimizer_seconds: f64,
    /// Writing figures in the steps that are counted.
    pub step_logging_seconds: f64,
    /// What the loop did in them besides.
    pub other_seconds: f64,
    /// Steps before which an evaluation ran.
    pub num_evaluations: u64,
    /// Those of them before the first step of a run and after its last one, which are made in any case.
    pub num_edge_evaluations: u64,
    /// Steps before which a checkpoint was written.
    pub num_checkpoints: u64,
    /// Time of a step.
    pub step_time: Distribution,
    /// Time of forwards, backwards and updates, by the step's tokens.
    pub compute_by_tokens: Line,
    /// The same by its tokens and padding.
    pub compute_by_padded_tokens: Line,
    /// Tokens that were not padding.
    pub tokens: u64,
    /// Tokens that carried loss.
    pub target_tokens: u64,
    /// Padding.
    pub padding_tokens: u64,
    /// Rows read.
    pub rows: u64,
    /// Rows that were cut.
    pub truncated_rows: u64,
    /// Length of the longest row before it was cut.
    pub longest_row_tokens: Option<u64>,
    /// Time in which data workers were at work.
    pub worker_busy_seconds: Option<f64>,
    /// Processor time in it.
    pub worker_cpu_seconds: Option<f64>,
    /// Time in it in which no processor was free for them.
    pub worker_queued_seconds: Option<f64>,
    /// Model FLOPs utilization.
    pub mfu: Mean,
    /// Share of all threads that the process used, in percent.
    pub cpu_percent: Mean,
    /// GPU utilization, in percent.
    pub gpu_percent: Mean,
    /// Share of multiprocessors at work, in percent.
    pub sm_activity_percent: Mean,
    /// Memory of the GPU at work, in percent.
    pub memory_activity_percent: Mean,
    /// Tensor cores at work, in percent.
    pub tensor_activity_percent: Mean,
    /// Arithmetic of single or half precision outside of them at work, in percent.
    pub float_activity_percent: Mean,
    /// Clock of the multiprocessors.
    pub sm_clock_mhz: Mean,
    /// Power of the GPU.
    pub power_watts: Mean,
    /// Temperature of the GPU.
    pub temperature_celsius: Mean,
    /// Time in which something kept the clocks down, by its name: a step's by the share of its samples.
    pub throttled_seconds: BTreeMap<String, f64>,
    /// Bytes read from disks, over the steps.
    pub disk_reads: Buckets,
    /// Waiting for data, over the steps, in microseconds.
    pub data_waits: Buckets,
    /// Time of the steps, over them, in microseconds.
    pub step_times: Buckets,
    /// Time of a step, by what it waited for data.
    pub step_by_wait: Line,
    /// Passes over the rows where this start began; `None`: with the first step that is counted.
    pub start_epoch: Option<f64>,
    /// What was read after the first pass of this start.
    pub later_reads: LaterReads,
    /// Page faults that waited for a disk.
    pub major_page_faults: Option<u64>,
    /// Passes over the rows.
    pub epochs: f64,
    /// The least memory that the host had left.
    pub host_available_bytes: Option<u64>,
    /// Memory swapped out: at the first step, and the most.
    pub host_swapped_bytes: Option<(u64, u64)>,
    /// Memory of the process in RAM, by step.
    pub host_memory: Line,
    /// Memory of live tensors on the GPU, by step.
    pub allocated: Line,
    /// Memory that the backend's pools hold, by step.
    pub reserved: Line,
    /// The most of it.
    pub reserved_bytes: Option<u64>,
    /// The most memory of the GPU that was in use.
    pub gpu_memory_used_bytes: Option<u64>,
    /// The most memory of the GPU that other processes held.
    pub other_processes_memory_bytes: Option<u64>,
}

/// Bytes read from disks when all rows had been read once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaterReads {
    /// Bytes.
    pub bytes: u64,
    /// Steps in which they were read.
    pub num_steps: u64,
    /// Passes at the beginning of these steps.
    pub from_epoch: Option<f64>,
}

impl Figures {
    /// Figures of steps that are all counted.
    #[must_use]
    pub fn of<'a>(lines: impl IntoIterator<Item = &'a StepMetrics>) -> Self {
        Self::since(None, lines)
    }

    /// The same of a start that began after so many passes over the rows.
    #[must_use]
    pub fn since<'a>(start_epoch: Option<f64>, lines: impl IntoIterator<Item = &'a StepMetrics>) -> Self {
        let mut figures = Self { start_epoch, ..Self::default() };
        lines.into_iter().for_each(|line| figures.add(line));
        figures
    }

    /// Takes in the first step of a start.
    pub fn add_first(&mut self, line: &StepMetrics) {
        self.add_totals(line);
        self.first_step_seconds = Some(line.step_seconds);
        self.start_epoch = Some(line.epoch);
        self.host_swapped_bytes = line.host_swapped_bytes.map(|bytes| (bytes, bytes));
    }

    /// Takes in a step.
    pub fn add(&mut self, line: &StepMetrics) {
        self.add_totals(line);
        let seconds = line.step_seconds;
        self.steps = Some((self.steps.map_or(line.step, |(first, _)| first), line.step));
        self.num_steps += 1;
        self.epochs = line.epoch;
        self.step_seconds += seconds;
        self.step_time.add(seconds);
        self.data_wait_seconds += line.data_wait_seconds;
        self.host_to_device_seconds += line.host_to_device_seconds.unwrap_or(0.0);
        if let Some(seconds) = line.forward_seconds {
            let (forward, passes) = self.forward_of_passes_seconds.unwrap_or_default();
            self.forward_of_passes_seconds = Some((forward + seconds, passes + line.forward_backward_seconds));
        }
        self.forward_backward_seconds += line.forward_backward_seconds;
        self.optimizer_seconds += line.optimizer_seconds;
        self.step_logging_seconds += line.logging_seconds.unwrap_or(0.0);
        self.other_seconds += line.other_seconds.unwrap_or(0.0);
        let (compute, padding) = (line.forward_backward_seconds + line.optimizer_seconds, line.padding_tokens);
        self.compute_by_tokens.add(as_f64(line.tokens), compute);
        self.compute_by_padded_tokens.add(as_f64(line.tokens + padding.unwrap_or(0)), compute);
        add(&mut self.worker_busy_seconds, line.worker_busy_seconds);
        add(&mut self.worker_cpu_seconds, line.worker_cpu_seconds);
        add(&mut self.worker_queued_seconds, line.worker_queued_seconds);
        self.mfu.add(line.mfu, seconds);
        self.cpu_percent.add(line.cpu_utilization_percent, seconds);
        self.gpu_percent.add(line.gpu_utilization_percent, seconds);
        self.sm_activity_percent.add(line.gpu_sm_activity_percent, seconds);
        self.memory_activity_percent.add(line.gpu_memory_activity_percent, seconds);
        self.tensor_activity_percent.add(line.gpu_tensor_activity_percent, seconds);
        self.float_activity_percent.add(line.gpu_float_activity_percent, seconds);
        self.sm_clock_mhz.add(line.gpu_sm_clock_mhz, seconds);
        self.power_watts.add(line.gpu_power_watts, seconds);
        for (reason, share) in line.gpu_throttle_shares.iter().flatten() {
            *self.throttled_seconds.entry(reason.clone()).or_default() += share * seconds;
        }
        self.add_memory(line);
        self.add_reads(line);
        if let Some(faults) = line.major_page_faults {
            self.major_page_faults = Some(self.major_page_faults.unwrap_or(0) + faults);
        }
    }

    /// What counts of every step, the first one too.
    fn add_totals(&mut self, line: &StepMetrics) {
        self.wall_seconds += line.wall_seconds.unwrap_or(line.step_seconds);
        self.evaluation_seconds += line.evaluation_seconds.unwrap_or(0.0);
        self.checkpoint_seconds += line.checkpoint_seconds.unwrap_or(0.0);
        self.logging_seconds += line.logging_seconds.unwrap_or(0.0);
        let has_evaluation = line.evaluation_seconds.is_some_and(|seconds| seconds > 1e-3);
        self.num_evaluations += u64::from(has_evaluation);
        self.num_edge_evaluations += u64::from(has_evaluation && line.step == 1);
        self.num_checkpoints += u64::from(line.checkpoint_seconds.is_some_and(|seconds| seconds > 1e-4));
        self.tokens += line.tokens;
        self.target_tokens += line.target_tokens;
        self.padding_tokens += line.padding_tokens.unwrap_or(0);
        self.rows += line.rows.unwrap_or(0);
        self.truncated_rows += line.truncated_rows.unwrap_or(0);
        self.temperature_celsius.add(line.gpu_temperature_celsius, line.step_seconds);
        self.gpu_memory_used_bytes = self.gpu_memory_used_bytes.max(line.gpu_memory_used_bytes);
        self.other_processes_memory_bytes =
            self.other_processes_memory_bytes.max(line.gpu_other_processes_memory_bytes);
        let available = [self.host_available_bytes, line.host_available_bytes];
        self.host_available_bytes = available.into_iter().flatten().min();
    }

    fn add_reads(&mut self, line: &StepMetrics) {
        let read = line.disk_read_bytes.unwrap_or(0);
        self.disk_reads.add(read);
        self.data_waits.add(microseconds(line.data_wait_seconds));
        self.step_times.add(microseconds(line.step_seconds));
        self.step_by_wait.add(line.data_wait_seconds, line.step_seconds);
        let start = *self.start_epoch.get_or_insert(line.epoch);
        if line.epoch > start + 1.0 {
            let later = &mut self.later_reads;
            // The first of these steps may have read rows of the first pass still.
            if later.from_epoch.is_some() {
                (later.bytes, later.num_steps) = (later.bytes + read, later.num_steps + 1);
            }
            later.from_epoch.get_or_insert(line.epoch);
        }
    }

    fn add_memory(&mut self, line: &StepMetrics) {
        let step = as_f64(line.step);
        let point = |points: &mut Line, bytes: Option<u64>| {
            if let Some(bytes) = bytes {
                points.add(step, as_f64(bytes));
            }
        };
        point(&mut self.host_memory, line.host_memory_bytes);
        point(&mut self.allocated, line.gpu_memory_allocated_bytes);
        point(&mut self.reserved, line.gpu_memory_reserved_bytes);
        self.reserved_bytes = self.reserved_bytes.max(line.gpu_memory_reserved_bytes);
        if let Some(bytes) = line.host_swapped_bytes {
            let (first, most) = self.host_swapped_bytes.unwrap_or((bytes, bytes));
            self.host_swapped_bytes = Some((first, most.max(bytes)));
        }
    }

    /// Takes the time of the whole start, in which the last evaluation and checkpoint are too. Evaluations are counted with
    /// those of them before the first step of the run and after its last one.
    pub fn end(&mut self, time: &TimeSpent, [num_evaluations, num_edge_evaluations]: [u64; 2], num_checkpoints: u64) {
        self.wall_seconds = time.total_seconds() - time.startup_seconds;
        self.evaluation_seconds = time.evaluation_seconds;
        self.checkpoint_seconds = time.checkpoint_seconds;
        self.logging_seconds = time.logging_seconds;
        (self.num_evaluations, self.num_checkpoints) = (num_evaluations, num_checkpoints);
        self.num_edge_evaluations = num_edge_evaluations;
    }

    /// There are enough steps for shares of their time to mean something.
    #[must_use]
    pub fn are_enough(&self) -> bool {
        self.num_steps >= MIN_STEPS
    }

    /// Mean time of a step.
    #[must_use]
    pub fn mean_step_seconds(&self) -> f64 {
        self.step_seconds / as_f64(self.num_steps.max(1))
    }

    /// Time of forwards, backwards and updates.
    #[must_use]
    pub fn compute_seconds(&self) -> f64 {
        self.forward_backward_seconds + self.optimizer_seconds
    }

    /// Share of the steps' time, from 0 to 1.
    #[must_use]
    pub fn share_of_steps(&self, seconds: f64) -> f64 {
        if self.step_seconds > 0.0 { seconds / self.step_seconds } else { 0.0 }
    }

    /// Share of all time after start-up, from 0 to 1.
    #[must_use]
    pub fn share_of_wall(&self, seconds: f64) -> f64 {
        if self.wall_seconds > 0.0 { seconds / self.wall_seconds } else { 0.0 }
    }

    /// Share of the tokens in micro-batches that was padding, from 0 to 1.
    #[must_use]
    pub fn padding_share(&self) -> f64 {
        as_f64(self.padding_tokens) / as_f64((self.tokens + self.padding_tokens).max(1))
    }

    /// Time in which a forward of the blocks is computed again, where it is. By FLOPs a forward of the blocks is 2 a
    /// parameter and token; loss and its gradient, which are in a forward's time, are 4 a parameter of the head and target
    /// token; and the backward of the blocks is 2 beside what it computes again, which is in its time only where it does so:
    /// where nothing is computed again, this is what it would take.
    #[must_use]
    pub fn recomputation_seconds(&self, facts: &Facts) -> f64 {
        let blocks = 2.0 * as_f64(facts.block_parameters) * as_f64(self.tokens);
        let head = 4.0 * as_f64(facts.head_parameters) * as_f64(self.target_tokens);
        let share = |all: f64| if all > 0.0 { blocks / all } else { 0.0 };
        match self.forward_of_passes_seconds.filter(|(_, passes)| *passes > 0.0) {
            Some((forward, passes)) => self.forward_backward_seconds * forward / passes * share(blocks + head),
            None => {
                let of_blocks = if facts.gradient_checkpointing == "false" { 2.0 } else { 3.0 };
                self.forward_backward_seconds * share(of_blocks * blocks + head)
            }
        }
    }

    /// Time of forwards, backwards and updates, by the tokens that were computed.
    #[must_use]
    pub fn compute_by_computed_tokens(&self, facts: &Facts) -> &Line {
        if facts.leaves_padding_out { &self.compute_by_tokens } else { &self.compute_by_padded_tokens }
    }

    /// Share of a step's compute that does not grow with its tokens, by the steps' own lengths; `None` where they do not
    /// tell.
    #[must_use]
    pub fn fixed_share(&self, facts: &Facts) -> Option<f64> {
        let line = self.compute_by_computed_tokens(facts);
        let is_sound = line.count() >= 8.0 && line.correlation()? > 0.7 && line.mean_y() > 0.0;
        Some(line.intercept()? / line.mean_y()).filter(|share| is_sound && *share > 0.0 && *share < 1.0)
    }
}

impl Run {
    /// Memory of the device that trains which was free at the least, where it is known.
    #[must_use]
    pub fn free_bytes(&self) -> Option<u64> {
        if self.facts.is_gpu {
            self.facts.device_memory_bytes?.checked_sub(self.figures.gpu_memory_used_bytes?)
        } else {
            self.figures.host_available_bytes
        }
    }
}

fn add(sum: &mut Option<f64>, value: Option<f64>) {
    if let Some(value) = value {
        *sum = Some(sum.unwrap_or(0.0) + value);
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time of a step is no negative number")]
fn microseconds(seconds: f64) -> u64 {
    (1e6 * seconds).round() as u64
}

/// Counts and bytes of a run need no more than the 53 bits of an `f64`.
#[allow(clippy::cast_precision_loss, reason = "see above")]
pub(super) fn as_f64(count: u64) -> f64 {
    count as f64
}
