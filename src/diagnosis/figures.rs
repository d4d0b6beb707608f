//! The figures that rules look at: sums over step lines.

use std::collections::BTreeMap;

use super::facts::Facts;
use super::statistics::{Buckets, Distribution, Line, Mean};
use crate::metrics::{StepMetrics, TimeSpent};

/// With fewer steps than this, shares of their time mean nothing.
const MIN_STEPS: u64 = 5;

/// What a rule looks at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Facts that stay the same from step to step.
    pub facts: Facts,
    /// Measured figures.
    pub figures: Figures,
}

/// Sums over steps. The first step of a start does not count towards the time of a step: it compiles, measures the
/// device and waits for the first batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// First and last counted step.
    pub steps: Option<(u64, u64)>,
    /// Number of counted steps.
    pub num_steps: u64,
    /// Time of the first step, without evaluations.
    pub first_step_seconds: Option<f64>,
    /// All time after start-up, including the first step and evaluations.
    pub wall_seconds: f64,
    /// Time of evaluations within `wall_seconds`.
    pub evaluation_seconds: f64,
    /// Time of checkpoints within `wall_seconds`.
    pub checkpoint_seconds: f64,
    /// Time of writing figures within `wall_seconds`.
    pub logging_seconds: f64,
    /// Time of the counted steps, without evaluations and checkpoints.
    pub step_seconds: f64,
    /// Time that the counted steps waited for data.
    pub data_wait_seconds: f64,
    /// Time of handing micro-batches to the device.
    pub host_to_device_seconds: f64,
    /// Time of forwards, and of forwards and backwards together, over the steps that measure the two apart.
    pub forward_of_passes_seconds: Option<(f64, f64)>,
    /// Time of forwards and backwards.
    pub forward_backward_seconds: f64,
    /// Time of updates.
    pub optimizer_seconds: f64,
    /// Time of writing figures within the counted steps.
    pub step_logging_seconds: f64,
    /// Other time of the loop within the counted steps.
    pub other_seconds: f64,
    /// Steps before which an evaluation ran.
    pub num_evaluations: u64,
    /// Evaluations before the first step of a run and after its last one, which happen whatever `eval.eval_steps` is.
    pub num_edge_evaluations: u64,
    /// Steps before which a checkpoint was written.
    pub num_checkpoints: u64,
    /// Times of single steps.
    pub step_time: Distribution,
    /// Time of forwards, backwards and updates against the step's tokens.
    pub compute_by_tokens: Line,
    /// Time of forwards, backwards and updates against the step's tokens and padding.
    pub compute_by_padded_tokens: Line,
    /// Tokens that were not padding.
    pub tokens: u64,
    /// Tokens that carried loss.
    pub target_tokens: u64,
    /// Padding tokens.
    pub padding_tokens: u64,
    /// Rows read.
    pub rows: u64,
    /// Rows that were truncated.
    pub truncated_rows: u64,
    /// Length of the longest row before truncation.
    pub longest_row_tokens: Option<u64>,
    /// Time that data workers were working.
    pub worker_busy_seconds: Option<f64>,
    /// Processor time within `worker_busy_seconds`.
    pub worker_cpu_seconds: Option<f64>,
    /// Time within `worker_busy_seconds` in which the workers waited for a free processor.
    pub worker_queued_seconds: Option<f64>,
    /// Model FLOPs utilization.
    pub mfu: Mean,
    /// Share of all threads that the process kept busy, in percent.
    pub cpu_percent: Mean,
    /// GPU utilization, in percent.
    pub gpu_percent: Mean,
    /// Share of active multiprocessors, in percent.
    pub sm_activity_percent: Mean,
    /// Activity of the GPU's memory, in percent.
    pub memory_activity_percent: Mean,
    /// Activity of the tensor cores, in percent.
    pub tensor_activity_percent: Mean,
    /// Activity of single and half precision arithmetic outside the tensor cores, in percent.
    pub float_activity_percent: Mean,
    /// Clock of the multiprocessors.
    pub sm_clock_mhz: Mean,
    /// Power of the GPU.
    pub power_watts: Mean,
    /// Temperature of the GPU.
    pub temperature_celsius: Mean,
    /// Time in which the clocks were throttled, by reason. A step counts by the share of its samples with that reason.
    pub throttled_seconds: BTreeMap<String, f64>,
    /// Bytes read from disks, over the steps.
    pub disk_reads: Buckets,
    /// Waiting for data, over the steps, in microseconds.
    pub data_waits: Buckets,
    /// Step times, over the steps, in microseconds.
    pub step_times: Buckets,
    /// Step time against its waiting for data.
    pub step_by_wait: Line,
    /// Epoch in which this start began; `None`: the epoch of the first counted step.
    pub start_epoch: Option<f64>,
    /// Reads after the first pass of this start.
    pub later_reads: LaterReads,
    /// Page faults that waited for a disk.
    pub major_page_faults: Option<u64>,
    /// Epochs so far.
    pub epochs: f64,
    /// The lowest available memory of the host.
    pub host_available_bytes: Option<u64>,
    /// Swapped-out memory: at the first step, and the maximum.
    pub host_swapped_bytes: Option<(u64, u64)>,
    /// Resident memory of the process, against the step.
    pub host_memory: Line,
    /// Memory of live tensors on the GPU, against the step.
    pub allocated: Line,
    /// Memory held by the backend's pools, against the step.
    pub reserved: Line,
    /// The most memory that the backend's pools held.
    pub reserved_bytes: Option<u64>,
    /// The most GPU memory in use.
    pub gpu_memory_used_bytes: Option<u64>,
    /// The most GPU memory held by other processes.
    pub other_processes_memory_bytes: Option<u64>,
}

/// Disk reads after every row has been read once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaterReads {
    /// Bytes.
    pub bytes: u64,
    /// Steps that made these reads.
    pub num_steps: u64,
    /// Epoch at the start of these steps.
    pub from_epoch: Option<f64>,
}

impl Figures {
    /// Figures of steps that all count.
    #[must_use]
    pub fn of<'a>(lines: impl IntoIterator<Item = &'a StepMetrics>) -> Self {
        Self::since(None, lines)
    }

    /// Figures of steps that all count, in a start that began at the epoch `start_epoch`.
    #[must_use]
    pub fn since<'a>(start_epoch: Option<f64>, lines: impl IntoIterator<Item = &'a StepMetrics>) -> Self {
        let mut figures = Self { start_epoch, ..Self::default() };
        lines.into_iter().for_each(|line| figures.add(line));
        figures
    }

    /// Adds the first step of a start.
    pub fn add_first(&mut self, line: &StepMetrics) {
        self.add_totals(line);
        self.first_step_seconds = Some(line.step_seconds);
        self.start_epoch = Some(line.epoch);
        self.host_swapped_bytes = line.host_swapped_bytes.map(|bytes| (bytes, bytes));
    }

    /// Adds a step.
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

    /// Figures that count every step, including the first.
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
            // The first of these steps may still have read rows of the first pass.
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

    /// Replaces the times by those of the whole start, which include the last evaluation and checkpoint.
    /// `num_edge_evaluations` counts the evaluations before the first step of the run and after its last one.
    pub fn end(&mut self, time: &TimeSpent, [num_evaluations, num_edge_evaluations]: [u64; 2], num_checkpoints: u64) {
        self.wall_seconds = time.total_seconds() - time.startup_seconds;
        self.evaluation_seconds = time.evaluation_seconds;
        self.checkpoint_seconds = time.checkpoint_seconds;
        self.logging_seconds = time.logging_seconds;
        (self.num_evaluations, self.num_checkpoints) = (num_evaluations, num_checkpoints);
        self.num_edge_evaluations = num_edge_evaluations;
    }

    /// Whether there are enough steps for shares of their time to mean something.
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

    /// Time to compute the forward of the blocks again. With checkpointing this time was spent; without, it is what
    /// checkpointing would cost. In FLOPs: a forward of the blocks takes 2 per parameter and token, and so does their
    /// backward without recomputation. Loss and its gradient, which are timed as forward, take 4 per parameter of the
    /// head and target token.
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

    /// Time of forwards, backwards and updates against the tokens that were computed.
    #[must_use]
    pub fn compute_by_computed_tokens(&self, facts: &Facts) -> &Line {
        if facts.leaves_padding_out { &self.compute_by_tokens } else { &self.compute_by_padded_tokens }
    }

    /// Share of a step's compute that does not grow with its tokens, fitted to steps of different lengths; `None` where
    /// the fit is not sound.
    #[must_use]
    pub fn fixed_share(&self, facts: &Facts) -> Option<f64> {
        let line = self.compute_by_computed_tokens(facts);
        let is_sound = line.count() >= 8.0 && line.correlation()? > 0.7 && line.mean_y() > 0.0;
        Some(line.intercept()? / line.mean_y()).filter(|share| is_sound && *share > 0.0 && *share < 1.0)
    }
}

impl Run {
    /// The lowest free memory of the training device, where it is known.
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

/// Counts and bytes of a run fit into the 53 bits of an `f64`.
#[allow(clippy::cast_precision_loss, reason = "see above")]
pub(super) fn as_f64(count: u64) -> f64 {
    count as f64
}
