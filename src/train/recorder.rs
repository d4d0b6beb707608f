//! Records what a run takes: time by part, use of the machine, sums over steps and starts. Passes them to the
//! diagnosis.

use std::time::Instant;

use super::budget::flops::StepFlops;
use super::laps::{Laps, StepPart};
use super::state::TrainerState;
use super::step_work::StepWork;
use crate::data::worker_time::WorkerTime;
use crate::device::{Dtype, MemoryInUse, OpenDevice};
use crate::insight::diagnosis::{Facts, Figures, Finding, Run, Watch, diagnose};
use crate::measure::metrics::{StepMetrics, Summary, TimeSpent, Totals};
use crate::measure::telemetry::{Telemetry, peak_host_memory_bytes};
use crate::ops::cuda::take_noted_bytes;
use crate::ops::peak::gemm_peak_flops;
use crate::util::stats::as_f64;

/// On an asynchronous device, one step in this many waits at the end of every part, so that each part has a time. The
/// first such step is the second step after a start.
const SPLIT_STEPS: u64 = 50;

/// Stopwatch and figures of a run.
pub struct Recorder<'a> {
    pub(super) flops: StepFlops,
    device: &'a OpenDevice,
    telemetry: Telemetry,
    precision: Dtype,
    process_start: Instant,
    startup_seconds: f64,
    laps: Laps,
    /// Whether the current step waits for the device at the end of every part.
    is_split: bool,
    /// Memory of the backend's pools after the last forward of a step, when last measured.
    pools_after_forward: Option<MemoryInUse>,
    earlier: Totals,
    num_steps: u64,
    /// Input of the diagnosis, for this start.
    run: Run,
    watch: Watch,
    reported: Vec<Finding>,
    /// Evaluations of this start: all, and those before the first step or after the last one.
    num_evaluations: [u64; 2],
    num_checkpoints: u64,
}

impl<'a> Recorder<'a> {
    /// A recorder of the start whose process began at `process_start`; `earlier` are the totals of the earlier starts.
    #[must_use]
    pub fn new(
        flops: StepFlops,
        device: &'a OpenDevice,
        telemetry: Telemetry,
        precision: Dtype,
        facts: Facts,
        earlier: Totals,
        process_start: Instant,
    ) -> Self {
        Self {
            flops,
            device,
            telemetry,
            precision,
            process_start,
            startup_seconds: 0.0,
            laps: Laps::start(process_start),
            is_split: false,
            pools_after_forward: None,
            earlier,
            num_steps: 0,
            watch: Watch::new(facts.clone()),
            run: Run { facts, figures: Figures::default() },
            reported: Vec::new(),
            num_evaluations: [0; 2],
            num_checkpoints: 0,
        }
    }

    pub(super) fn start(&mut self) {
        let now = Instant::now();
        self.startup_seconds = now.duration_since(self.process_start).as_secs_f64();
        self.laps = Laps::start(now);
        let _ = self.telemetry.window();
    }

    /// Ends a part of the loop; in a split step, after the device has finished it.
    pub(crate) fn part(&mut self, part: StepPart) {
        if self.is_split {
            self.device.wait();
        }
        self.laps.lap(part);
    }

    /// Ends a part between two steps. Samples of the machine during it count for neither step.
    pub(super) fn pause(&mut self, part: StepPart) {
        let _ = self.telemetry.window();
        self.part(part);
    }

    /// Begins the step after `step`. The first step after a start is not split, because kernels are compiled in it.
    pub(super) fn start_step(&mut self, step: u64) {
        let is_due = self.num_steps == 1 || (self.num_steps > 1 && (step + 1).is_multiple_of(SPLIT_STEPS));
        self.is_split = is_due && self.device.is_gpu();
        // What an evaluation noted is not the step's.
        let _ = take_noted_bytes();
        // In a split step, this waits for what the previous one has left to do.
        self.part(StepPart::Other);
    }

    /// Whether the step in progress waits for the device at the end of every part.
    pub(super) fn is_split(&self) -> bool {
        self.is_split
    }

    /// Ends a forward. After a step's last forward, all input of the backward exists, so the pools are measured. This
    /// is not done in every step, since it ends the host's lead over the device.
    pub(super) fn forward(&mut self, is_last: bool) {
        self.part(StepPart::Forward);
        if is_last && (self.is_split || self.pools_after_forward.is_none()) {
            self.pools_after_forward = self.device.memory_in_use();
        }
    }

    /// Ends a step, completes its line and adds it to the totals. Returns the new findings of the diagnosis.
    pub(super) fn end_step(
        &mut self,
        line: &mut StepMetrics,
        work: &StepWork,
        loading: &WorkerTime,
        totals: &mut Totals,
    ) -> Vec<Finding> {
        let machine = self.telemetry.window();
        self.part(StepPart::Other);
        // Measured once, after the first step; the time for it is not counted as the step's.
        let peak = gemm_peak_flops(self.device, self.precision);
        if self.num_steps == 0 {
            // Samples of the machine during the measurement do not belong to the next step.
            let _ = self.telemetry.window();
        }
        self.part(StepPart::Measuring);
        self.num_steps += 1;
        let is_split = std::mem::take(&mut self.is_split) || !self.device.is_gpu();

        self.laps.end_step(is_split, line);
        line.tokens_per_second = as_f64(work.tokens) / line.step_seconds;
        // Of this rank, as the watts are.
        let share = 1.0 / as_f64(line.ranks.unwrap_or(1));
        let flops_per_second = share * work.flops / line.step_seconds;
        // A step that is faster shows that others used the device while its peak was measured.
        line.mfu = peak.map(|peak| flops_per_second / peak.max(flops_per_second));
        if loading.num_batches > 0 {
            line.worker_busy_seconds = Some(loading.busy.as_secs_f64());
            line.worker_cpu_seconds = loading.cpu.map(|cpu| cpu.as_secs_f64());
            line.worker_queued_seconds = loading.queued.map(|queued| queued.as_secs_f64());
        }
        line.set_machine(machine);
        let watts = line.gpu_power_watts.filter(|watts| *watts > 0.0);
        line.tokens_per_joule = watts.map(|watts| share * line.tokens_per_second / watts);
        line.gpu_throttle_reasons = line.gpu_throttle_shares.as_ref().map(|shares| shares.keys().cloned().collect());
        // Energy counts from the start of the run.
        match line.cpu_energy_joules {
            Some(_) => line.cpu_energy_joules = sum(self.earlier.energy_joules, line.cpu_energy_joules),
            None => line.energy_joules = sum(self.earlier.energy_joules, line.energy_joules),
        }
        let reserved = self.set_pools(line);
        totals.peak_gpu_memory_reserved_bytes = totals.peak_gpu_memory_reserved_bytes.max(reserved);
        totals.add(line);
        self.diagnose_step(line, work)
    }

    /// Sets the memory of the backend's pools: now, and the most that kernels noted; where they note none, after the last
    /// forward of this step, or of the last step that measured it. Returns the higher size of the pools.
    fn set_pools(&self, line: &mut StepMetrics) -> Option<u64> {
        let (at_end, after_forward) = (self.device.memory_in_use(), self.pools_after_forward);
        let most = |bytes: fn(MemoryInUse) -> u64| at_end.map(bytes).max(after_forward.map(bytes));
        line.gpu_memory_allocated_bytes = at_end.map(|pools| pools.allocated_bytes);
        line.gpu_memory_reserved_bytes = at_end.map(|pools| pools.reserved_bytes);
        let noted = take_noted_bytes().map(|bytes| bytes.max(line.gpu_memory_allocated_bytes.unwrap_or_default()));
        line.gpu_memory_peak_bytes = noted.or_else(|| most(|pools| pools.allocated_bytes));
        most(|pools| pools.reserved_bytes)
    }

    /// Passes a step to the diagnosis. Lasting problems are marked in the step's line.
    fn diagnose_step(&mut self, line: &mut StepMetrics, work: &StepWork) -> Vec<Finding> {
        let figures = &mut self.run.figures;
        let longest = work.rows.longest_tokens;
        figures.longest_row_tokens = figures.longest_row_tokens.max((longest > 0).then_some(longest));
        if self.num_steps == 1 {
            figures.add_first(line);
            return Vec::new();
        }
        if self.watch.is_slow(line) {
            line.findings.push("slow_step".into());
        }
        figures.add(line);
        let findings = self.watch.observe(line);
        line.findings.extend(findings.iter().map(|finding| finding.rule.clone()));
        self.reported.extend_from_slice(&findings);
        findings
    }

    /// Ends an evaluation; `is_at_an_edge`: it ran before the run's first step or after its last one.
    pub(super) fn evaluated(&mut self, is_at_an_edge: bool) {
        self.num_evaluations[0] += 1;
        self.num_evaluations[1] += u64::from(is_at_an_edge);
        self.part(StepPart::Evaluation);
    }

    pub(super) fn saved(&mut self) {
        self.num_checkpoints += 1;
    }

    /// Sets the totals that are not sums over steps, up to now and over all starts.
    pub(super) fn update(&self, totals: &mut Totals) {
        let Self { earlier, telemetry, .. } = self;
        let wall_seconds = self.process_start.elapsed().as_secs_f64();
        let time = self.time_of_start().within(wall_seconds);
        totals.num_starts = earlier.num_starts + 1;
        totals.wall_seconds = earlier.wall_seconds + wall_seconds;
        totals.time = earlier.time + time;
        totals.forward_share = earlier.forward_share;
        totals.forward_share.add(self.laps.forward_share(), time.forward_backward_seconds);
        totals.energy_joules = sum(earlier.energy_joules, telemetry.energy_joules());
        totals.telemetry_seconds = sum(earlier.telemetry_seconds, telemetry.seconds());
        totals.peak_host_memory_bytes = totals.peak_host_memory_bytes.max(peak_host_memory_bytes());
        totals.peak_gpu_memory_bytes = totals.peak_gpu_memory_bytes.max(telemetry.peak_gpu_memory_bytes());
    }

    /// The final figures of the whole run, as far as the loop knows them; the diagnosis is of this start only.
    #[must_use]
    pub fn summary(&self, state: &TrainerState) -> Summary {
        let TrainerState { step, evaluations, mut totals, .. } = state.clone();
        self.update(&mut totals);
        let (diagnosis, reported) = (self.diagnosis(), self.reported.clone());
        Summary { steps: step, epochs: state.epochs(), totals, evaluations, diagnosis, reported, ..Summary::default() }
    }

    /// What slowed down the steps of this start, the worst first.
    fn diagnosis(&self) -> Vec<Finding> {
        let mut run = self.run.clone();
        run.figures.end(&self.time_of_start(), self.num_evaluations, self.num_checkpoints);
        diagnose(&run)
    }

    fn time_of_start(&self) -> TimeSpent {
        self.laps.time_spent(self.startup_seconds, self.device.is_gpu())
    }
}

/// The sum; where one of the two is absent, the other.
fn sum(earlier: Option<f64>, now: Option<f64>) -> Option<f64> {
    earlier.zip(now).map(|(earlier, now)| earlier + now).or(earlier).or(now)
}
