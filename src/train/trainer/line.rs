//! The line of metrics.jsonl: what a step took, by what was measured around it.

use super::{StepWork, Trainer};
use crate::data::work::Work;
use crate::device::MemoryInUse;
use crate::metrics::StepMetrics;
use crate::telemetry::MachineSample;
use crate::train::figures::per_second;
use crate::train::laps::{Part, StepTime};

impl Trainer<'_> {
    /// Adds time, speed, data workers and the machine to a step's line. `peak` is the device's peak in FLOP/s.
    pub(super) fn describe(
        &mut self,
        line: &mut StepMetrics,
        work: &StepWork,
        time: &StepTime,
        loading: &Work,
        machine: MachineSample,
        peak: Option<f64>,
    ) {
        describe_time(line, time);
        line.tokens_per_second = per_second(work.tokens, line.step_seconds);
        line.mfu = peak.map(|peak| work.flops / line.step_seconds / peak);
        if loading.num_batches > 0 {
            line.worker_busy_seconds = Some(loading.busy.as_secs_f64());
            line.worker_cpu_seconds = loading.cpu.map(|cpu| cpu.as_secs_f64());
            line.worker_queued_seconds = loading.queued.map(|queued| queued.as_secs_f64());
        }
        line.set_machine(machine);
        line.gpu_throttle_reasons = line.gpu_throttle_shares.as_ref().map(|shares| shares.keys().cloned().collect());
        // Of all starts.
        if self.around.telemetry.counts_packages() {
            line.cpu_energy_joules = self.energy_joules(line.cpu_energy_joules);
        } else {
            line.energy_joules = self.energy_joules(line.energy_joules);
        }
    }

    /// Adds what the backend's pools hold now, and what they held after the last forward of this step, or of the last one
    /// that asked.
    pub(super) fn describe_pools(&mut self, line: &mut StepMetrics) {
        let (at_end, after_forward) = (self.around.device.memory_in_use(), self.pools_after_forward);
        let most = |bytes: fn(MemoryInUse) -> u64| at_end.map(bytes).max(after_forward.map(bytes));
        line.gpu_memory_allocated_bytes = at_end.map(|pools| pools.allocated_bytes);
        line.gpu_memory_reserved_bytes = at_end.map(|pools| pools.reserved_bytes);
        line.gpu_memory_peak_bytes = most(|pools| pools.allocated_bytes);
        let reserved = most(|pools| pools.reserved_bytes);
        self.figures.peak_gpu_memory_reserved_bytes = self.figures.peak_gpu_memory_reserved_bytes.max(reserved);
    }
}

/// In a step that does not wait for the device between forward and backward, only the two together have a time.
fn describe_time(line: &mut StepMetrics, time: &StepTime) {
    let StepTime { wall_seconds, parts, is_split } = time;
    let alone = |part| is_split.then(|| parts.seconds(part));
    line.step_seconds = time.step_seconds();
    line.wall_seconds = Some(*wall_seconds);
    line.data_wait_seconds = parts.seconds(Part::DataWait);
    line.host_to_device_seconds = Some(parts.seconds(Part::HostToDevice));
    line.forward_seconds = alone(Part::Forward);
    line.backward_seconds = alone(Part::Backward);
    line.forward_backward_seconds = parts.forward_backward_seconds();
    line.optimizer_seconds = parts.seconds(Part::Optimizer);
    line.logging_seconds = Some(parts.seconds(Part::Logging));
    line.evaluation_seconds = Some(parts.seconds(Part::Evaluation));
    line.checkpoint_seconds = Some(parts.seconds(Part::Checkpoint));
    line.other_seconds = Some(parts.other_seconds());
}
