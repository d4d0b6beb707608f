//! The figures that rules look at: sums over step lines.

use std::collections::BTreeMap;

use super::facts::Facts;
use crate::measure::metrics::{StepMetrics, TimeSpent, Totals};
use crate::util::stats::{Line, MeanOverTime, as_f64, quantile};

/// With fewer steps than this, shares of their time mean nothing.
const MIN_STEPS: usize = 5;
/// A run of fewer steps that is also shorter, in seconds, is a trial: nothing in it is worth a change.
const ADVICE_STEPS: usize = 50;
const ADVICE_SECONDS: f64 = 60.0;

/// What a rule looks at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// What stays the same from step to step.
    pub facts: Facts,
    /// What was measured.
    pub figures: Figures,
}

/// What the ranks of a run reported, summed over the counted steps; by rank in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct OfRanks {
    /// Until they had their gradients.
    pub(super) seconds: Vec<f64>,
    pub(super) data_wait_seconds: Vec<f64>,
    pub(super) tokens: Vec<f64>,
    /// In how many steps each was the slowest.
    pub(super) times_slowest: Vec<u64>,
    pub(super) exchange_seconds: f64,
}

impl OfRanks {
    fn add(&mut self, line: &StepMetrics) {
        let Some(seconds) = &line.rank_seconds else { return };
        self.exchange_seconds += line.exchange_seconds.unwrap_or(0.0);
        for (sums, numbers) in [
            (&mut self.seconds, Some(seconds)),
            (&mut self.data_wait_seconds, line.rank_data_wait_seconds.as_ref()),
            (&mut self.tokens, line.rank_tokens.as_ref()),
        ] {
            sums.resize(seconds.len(), 0.0);
            sums.iter_mut().zip(numbers.into_iter().flatten()).for_each(|(sum, number)| *sum += number);
        }
        self.times_slowest.resize(seconds.len(), 0);
        let slowest = seconds.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
        if let Some(times) = slowest.and_then(|(rank, _)| self.times_slowest.get_mut(rank)) {
            *times += 1;
        }
    }
}

/// Sums over steps. The first step of a start does not count towards the time of a step: it compiles, measures the
/// device and waits for the first batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// The counted steps.
    pub(super) steps: Vec<Step>,
    pub(super) ranks: OfRanks,
    /// Time of the first step, without evaluations.
    pub(super) first_step_seconds: Option<f64>,

    // Over all time after start-up, the first step included.
    pub(super) wall_seconds: f64,
    pub(super) evaluation_seconds: f64,
    pub(super) checkpoint_seconds: f64,
    pub(super) logging_seconds: f64,
    pub(super) num_evaluations: u64,
    /// Evaluations before the first step of a run and after its last one, which happen whatever `eval.eval_steps` is.
    pub(super) num_edge_evaluations: u64,
    pub(super) num_checkpoints: u64,
    pub(super) all: Totals,
    pub(super) rows: u64,
    pub(super) truncated_rows: u64,
    /// Length of the longest row before truncation.
    pub(crate) longest_row_tokens: Option<u64>,

    // Over the counted steps, whose time is without evaluations and checkpoints.
    pub(super) counted: Totals,
    pub(super) data_wait_seconds: f64,
    pub(super) host_to_device_seconds: f64,
    pub(super) forward_backward_seconds: f64,
    pub(super) optimizer_seconds: f64,
    pub(super) step_logging_seconds: f64,
    pub(super) other_seconds: f64,
    /// Forwards, and forwards and backwards together, over the steps that measure the two apart.
    pub(super) forward_of_passes_seconds: (f64, f64),
    /// Time of forwards, backwards and updates against the step's tokens.
    pub(super) compute_by_tokens: Line,
    /// The same against the step's tokens and padding.
    pub(super) compute_by_padded_tokens: Line,

    // All data workers together. The rest of their busy time they waited.
    pub(super) worker_busy_seconds: Option<f64>,
    pub(super) worker_cpu_seconds: Option<f64>,
    /// Waiting for a free processor.
    pub(super) worker_queued_seconds: Option<f64>,

    // The machine.
    pub(super) max_gpu_percent: Option<f64>,
    pub(super) sm_activity_percent: MeanOverTime,
    pub(super) memory_activity_percent: MeanOverTime,
    pub(super) tensor_activity_percent: MeanOverTime,
    pub(super) float_activity_percent: MeanOverTime,
    pub(super) sm_clock_mhz: MeanOverTime,
    pub(super) max_sm_clock_mhz: Option<f64>,
    pub(super) power_watts: MeanOverTime,
    pub(super) max_temperature_celsius: Option<f64>,
    /// Time in which the clocks were throttled, by reason. A step counts by the share of its samples with that reason.
    pub(super) throttled_seconds: BTreeMap<String, f64>,

    // Reads from disks.
    /// Epoch in which this start began; `None`: the epoch of the first counted step.
    pub(super) start_epoch: Option<f64>,
    pub(super) epochs: f64,
    pub(super) later_reads: LaterReads,
    /// Page faults that waited for a disk.
    pub(super) major_page_faults: u64,

    // Memory: the most or the least, or a line against the step.
    pub(super) min_host_available_bytes: Option<u64>,
    /// At the first step, and the maximum.
    pub(super) host_swapped_bytes: Option<(u64, u64)>,
    pub(super) host_memory: Line,
    /// Live tensors on the GPU.
    pub(super) allocated: Line,
    /// Held by the backend's pools.
    pub(super) reserved: Line,
    pub(super) max_reserved_bytes: Option<u64>,
    pub(super) max_gpu_memory_used_bytes: Option<u64>,
    pub(super) max_other_processes_memory_bytes: Option<u64>,
}

/// What is kept of every counted step: 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Step {
    pub(super) seconds: f64,
    pub(super) data_wait_seconds: f64,
    pub(super) disk_read_bytes: u64,
}

/// Disk reads after every row has been read once in this start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LaterReads {
    pub(super) bytes: u64,
    /// Steps that made these reads.
    pub(super) num_steps: u64,
    /// Epoch at the start of these steps.
    pub(super) from_epoch: Option<f64>,
}

impl Figures {
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
        self.steps.push(Step {
            seconds,
            data_wait_seconds: line.data_wait_seconds,
            disk_read_bytes: line.disk_read_bytes.unwrap_or(0),
        });
        self.counted.add(line);
        self.ranks.add(line);
        self.data_wait_seconds += line.data_wait_seconds;
        self.host_to_device_seconds += line.host_to_device_seconds.unwrap_or(0.0);
        self.forward_backward_seconds += line.forward_backward_seconds;
        self.optimizer_seconds += line.optimizer_seconds;
        self.step_logging_seconds += line.logging_seconds.unwrap_or(0.0);
        self.other_seconds += line.other_seconds.unwrap_or(0.0);
        if let Some(seconds) = line.forward_seconds {
            self.forward_of_passes_seconds.0 += seconds;
            self.forward_of_passes_seconds.1 += line.forward_backward_seconds;
        }
        let compute = line.forward_backward_seconds + line.optimizer_seconds;
        self.compute_by_tokens.add(as_f64(line.tokens), compute);
        self.compute_by_padded_tokens.add(as_f64(line.tokens + line.padding_tokens.unwrap_or(0)), compute);
        for (sum, seconds) in [
            (&mut self.worker_busy_seconds, line.worker_busy_seconds),
            (&mut self.worker_cpu_seconds, line.worker_cpu_seconds),
            (&mut self.worker_queued_seconds, line.worker_queued_seconds),
        ] {
            *sum = sum.iter().copied().chain(seconds).reduce(|sum, seconds| sum + seconds);
        }
        for (mean, value) in [
            (&mut self.sm_activity_percent, line.gpu_sm_activity_percent),
            (&mut self.memory_activity_percent, line.gpu_memory_activity_percent),
            (&mut self.tensor_activity_percent, line.gpu_tensor_activity_percent),
            (&mut self.float_activity_percent, line.gpu_float_activity_percent),
            (&mut self.sm_clock_mhz, line.gpu_sm_clock_mhz),
            (&mut self.power_watts, line.gpu_power_watts),
        ] {
            mean.add(value, seconds);
        }
        raise(&mut self.max_gpu_percent, line.gpu_utilization_percent);
        raise(&mut self.max_sm_clock_mhz, line.gpu_sm_clock_mhz);
        for (reason, share) in line.gpu_throttle_shares.iter().flatten() {
            *self.throttled_seconds.entry(reason.clone()).or_default() += share * seconds;
        }
        self.add_memory(line);
        self.add_later_read(line);
        self.major_page_faults += line.major_page_faults.unwrap_or(0);
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
        self.all.add(line);
        self.rows += line.rows.unwrap_or(0);
        self.truncated_rows += line.truncated_rows.unwrap_or(0);
        raise(&mut self.max_temperature_celsius, line.gpu_temperature_celsius);
        self.max_gpu_memory_used_bytes = self.max_gpu_memory_used_bytes.max(line.gpu_memory_used_bytes);
        self.max_other_processes_memory_bytes =
            self.max_other_processes_memory_bytes.max(line.gpu_other_processes_memory_bytes);
        let available = [self.min_host_available_bytes, line.host_available_bytes];
        self.min_host_available_bytes = available.into_iter().flatten().min();
    }

    fn add_later_read(&mut self, line: &StepMetrics) {
        let start = *self.start_epoch.get_or_insert(line.epoch);
        self.epochs = line.epoch;
        if line.epoch > start + 1.0 {
            let later = &mut self.later_reads;
            // The first of these steps may still have read rows of the first pass.
            if later.from_epoch.is_some() {
                later.bytes += line.disk_read_bytes.unwrap_or(0);
                later.num_steps += 1;
            }
            later.from_epoch.get_or_insert(line.epoch);
        }
    }

    fn add_memory(&mut self, line: &StepMetrics) {
        for (points, bytes) in [
            (&mut self.host_memory, line.host_memory_bytes),
            (&mut self.allocated, line.gpu_memory_allocated_bytes),
            (&mut self.reserved, line.gpu_memory_reserved_bytes),
        ] {
            if let Some(bytes) = bytes {
                points.add(as_f64(line.step), as_f64(bytes));
            }
        }
        self.max_reserved_bytes = self.max_reserved_bytes.max(line.gpu_memory_reserved_bytes);
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

    pub(super) fn num_steps(&self) -> u64 {
        self.steps.len() as u64
    }

    /// Whether there are enough steps for shares of their time to mean something.
    pub(super) fn are_enough(&self) -> bool {
        self.steps.len() >= MIN_STEPS
    }

    /// Whether the run is long enough for advice about its time.
    pub(super) fn deserve_advice(&self) -> bool {
        self.steps.len() >= ADVICE_STEPS || self.wall_seconds >= ADVICE_SECONDS
    }

    /// The mean per step of a time of all counted steps.
    pub(super) fn per_step(&self, seconds: f64) -> f64 {
        seconds / as_f64(self.num_steps().max(1))
    }

    pub(super) fn mean_step_seconds(&self) -> f64 {
        self.per_step(self.counted.step_seconds)
    }

    /// The time that a share of the steps, from 0 to 1, does not exceed.
    pub(super) fn step_quantile(&self, share: f64) -> Option<f64> {
        quantile(&self.steps.iter().map(|step| step.seconds).collect::<Vec<_>>(), share)
    }

    /// Bytes that the counted steps read from disks.
    pub(super) fn disk_read_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.disk_read_bytes).sum()
    }

    /// Time of forwards, backwards and updates.
    pub(super) fn compute_seconds(&self) -> f64 {
        self.forward_backward_seconds + self.optimizer_seconds
    }

    /// Share of the steps' time, from 0 to 1.
    pub(super) fn share_of_steps(&self, seconds: f64) -> f64 {
        if self.counted.step_seconds > 0.0 { seconds / self.counted.step_seconds } else { 0.0 }
    }

    /// Share of all time after start-up, from 0 to 1.
    pub(super) fn share_of_wall(&self, seconds: f64) -> f64 {
        if self.wall_seconds > 0.0 { seconds / self.wall_seconds } else { 0.0 }
    }

    /// Time to compute the forward of the blocks again. With checkpointing this time was spent; without, it is what
    /// checkpointing would cost. In FLOPs: a forward of the blocks takes 2 per parameter and token, and so does their
    /// backward without recomputation. Loss and its gradient, which are timed as forward, take 4 per parameter of the
    /// head and target token.
    pub(super) fn recomputation_seconds(&self, facts: &Facts) -> f64 {
        let blocks = 2.0 * as_f64(facts.block_parameters) * as_f64(self.all.tokens);
        let head = 4.0 * as_f64(facts.head_parameters) * as_f64(self.all.target_tokens);
        let share = |all: f64| if all > 0.0 { blocks / all } else { 0.0 };
        let (forward, passes) = self.forward_of_passes_seconds;
        if passes > 0.0 {
            return self.forward_backward_seconds * forward / passes * share(blocks + head);
        }
        let of_blocks = if facts.recomputes() { 3.0 } else { 2.0 };
        self.forward_backward_seconds * share(of_blocks * blocks + head)
    }

    /// Time of forwards, backwards and updates against the tokens that were computed.
    pub(super) fn compute_by_computed_tokens(&self, facts: &Facts) -> &Line {
        if facts.leaves_padding_out { &self.compute_by_tokens } else { &self.compute_by_padded_tokens }
    }

    /// Share of a step's compute that does not grow with its tokens, fitted to steps of different lengths; `None` where
    /// the fit is not sound.
    pub(super) fn fixed_share(&self, facts: &Facts) -> Option<f64> {
        let line = self.compute_by_computed_tokens(facts);
        let is_sound = line.count() >= 8.0 && line.correlation()? > 0.7 && line.mean_y() > 0.0;
        Some(line.intercept()? / line.mean_y()).filter(|share| is_sound && *share > 0.0 && *share < 1.0)
    }
}

impl Run {
    /// The lowest free memory of the training device, where it is known.
    pub(super) fn free_bytes(&self) -> Option<u64> {
        if self.facts.is_gpu {
            self.facts.device_memory_bytes?.checked_sub(self.figures.max_gpu_memory_used_bytes?)
        } else {
            self.figures.min_host_available_bytes
        }
    }
}

fn raise(most: &mut Option<f64>, value: Option<f64>) {
    *most = most.iter().copied().chain(value).reduce(f64::max);
}
