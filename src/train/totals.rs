//! Sums and peaks over a run; checkpoints carry them from start to start.

use serde::{Deserialize, Serialize};

use crate::data::dataset::RowCounts;
use crate::metrics::{StepMetrics, TimeSpent};
use crate::stats::MeanOverTime;

/// Sums over all starts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Number of tokens, without padding.
    pub tokens: u64,
    /// Number of tokens that carried loss.
    pub target_tokens: u64,
    /// Steps without an update, because the loss or the gradient was not finite.
    pub skipped_steps: u64,
    /// Steps that the watchdog found anomalous.
    pub anomalous_steps: u64,
    /// What the training rows turned out to be.
    pub rows: RowCounts,
    /// Wall time since the start of each process. Time of a killed process after its last checkpoint is not included:
    /// those steps are repeated.
    pub wall_seconds: f64,
    /// Energy of the GPU, or of the processor's packages in starts without a GPU, where it is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_joules: Option<f64>,
    /// Where the time went, and what the machine did.
    pub figures: RunFigures,
}

/// Figures of the steps and the machine, over one start of a run or over all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunFigures {
    /// Number of starts of the process.
    pub num_starts: u64,
    /// Number of steps.
    pub num_steps: u64,
    /// Loss of the last step with target tokens, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_loss: Option<f64>,
    /// Number of tokens, without padding.
    pub tokens: u64,
    /// Number of padding tokens.
    pub padding_tokens: u64,
    /// Time of the steps, without the time between them.
    pub step_seconds: f64,
    /// All time by part.
    pub time: TimeSpent,
    /// Share of the time of forward and backward that was forward, from 0 to 1.
    pub forward_share: MeanOverTime,
    /// Model FLOPs per second over the device's peak, from 0 to 1; each start has its own device.
    pub mfu: MeanOverTime,
    /// GPU utilization, in percent.
    pub gpu_utilization_percent: MeanOverTime,
    /// Share of all processor threads that the process used, in percent.
    pub cpu_utilization_percent: MeanOverTime,
    /// Peak memory of the process in RAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_host_memory_bytes: Option<u64>,
    /// Peak memory in use on the GPU, by all processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_gpu_memory_bytes: Option<u64>,
    /// The highest measured memory of the backend's pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_gpu_memory_reserved_bytes: Option<u64>,
    /// Processor time spent on sampling the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub telemetry_seconds: Option<f64>,
}

impl RunFigures {
    /// Adds a step.
    pub(super) fn add(&mut self, line: &StepMetrics) {
        if line.target_tokens > 0 {
            self.last_loss = Some(line.loss);
        }
        self.num_steps += 1;
        self.tokens += line.tokens;
        self.padding_tokens += line.padding_tokens.unwrap_or_default();
        self.step_seconds += line.step_seconds;
        self.mfu.add(line.mfu, line.step_seconds);
        // The kernel's own peak may lag some pages behind a sample.
        self.peak_host_memory_bytes = self.peak_host_memory_bytes.max(line.host_memory_bytes);
        self.gpu_utilization_percent.add(line.gpu_utilization_percent, line.step_seconds);
        self.cpu_utilization_percent.add(line.cpu_utilization_percent, line.step_seconds);
    }

    /// These figures combined with those of the earlier starts.
    #[must_use]
    pub(super) fn after(self, earlier: &Self) -> Self {
        let sum = |one: Option<f64>, other: Option<f64>| match (one, other) {
            (None, None) => None,
            (one, other) => Some(one.unwrap_or(0.0) + other.unwrap_or(0.0)),
        };
        Self {
            num_starts: self.num_starts + earlier.num_starts,
            num_steps: self.num_steps + earlier.num_steps,
            last_loss: self.last_loss.or(earlier.last_loss),
            tokens: self.tokens + earlier.tokens,
            padding_tokens: self.padding_tokens + earlier.padding_tokens,
            step_seconds: self.step_seconds + earlier.step_seconds,
            time: self.time + earlier.time,
            forward_share: self.forward_share.and(earlier.forward_share),
            mfu: self.mfu.and(earlier.mfu),
            gpu_utilization_percent: self.gpu_utilization_percent.and(earlier.gpu_utilization_percent),
            cpu_utilization_percent: self.cpu_utilization_percent.and(earlier.cpu_utilization_percent),
            peak_host_memory_bytes: self.peak_host_memory_bytes.max(earlier.peak_host_memory_bytes),
            peak_gpu_memory_bytes: self.peak_gpu_memory_bytes.max(earlier.peak_gpu_memory_bytes),
            peak_gpu_memory_reserved_bytes: self
                .peak_gpu_memory_reserved_bytes
                .max(earlier.peak_gpu_memory_reserved_bytes),
            telemetry_seconds: sum(self.telemetry_seconds, earlier.telemetry_seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A start of two steps of a second each.
    fn start(peak_flops: f64, gpu_percent: Option<f64>, peak_host: u64) -> RunFigures {
        let line = StepMetrics {
            loss: 2.0,
            tokens: 100,
            target_tokens: 50,
            padding_tokens: Some(20),
            step_seconds: 1.0,
            mfu: Some(1e9 / peak_flops),
            gpu_utilization_percent: gpu_percent,
            ..StepMetrics::default()
        };
        let time = TimeSpent { startup_seconds: 1.0, forward_backward_seconds: 2.0, ..TimeSpent::default() };
        let telemetry_seconds = gpu_percent.map(|_| 0.25);
        let mut figures =
            RunFigures { num_starts: 1, time: time.within(3.5), telemetry_seconds, ..RunFigures::default() };
        figures.peak_host_memory_bytes = Some(peak_host);
        for _ in 0..2 {
            figures.add(&line);
        }
        figures
    }

    #[test]
    fn the_figures_of_two_starts_are_sums_means_over_time_and_the_higher_peak() {
        // The second start runs on a device with half the peak, which has no GPU.
        let sum = start(5e9, None, 100).after(&start(10e9, Some(80.0), 700));
        assert_eq!((sum.num_starts, sum.num_steps, sum.tokens, sum.padding_tokens), (2, 4, 400, 80));
        assert_eq!((sum.step_seconds, sum.time.total_seconds(), sum.time.other_seconds), (4.0, 7.0, 1.0));
        assert!((sum.mfu.get().unwrap() - 0.15).abs() < 1e-12, "half the time at 0.2, half at 0.1");
        // Utilization is the mean over the steps that have it.
        assert_eq!((sum.gpu_utilization_percent.get(), sum.cpu_utilization_percent.get()), (Some(80.0), None));
        assert_eq!((sum.peak_host_memory_bytes, sum.peak_gpu_memory_bytes), (Some(700), None));
        assert_eq!((sum.telemetry_seconds, sum.last_loss), (Some(0.25), Some(2.0)));
        let json = serde_json::to_string(&Totals { figures: sum, ..Totals::default() }).unwrap();
        assert_eq!(serde_json::from_str::<Totals>(&json).unwrap().figures, sum);
    }
}
