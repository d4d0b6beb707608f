//! The figures of the whole run, over all its starts.

use super::Trainer;
use crate::metrics::{Summary, TimeSpent};
use crate::telemetry::peak_host_memory_bytes;
use crate::train::figures::{per_second, share};
use crate::train::laps::Part;
use crate::train::state::TrainerState;
use crate::train::totals::{MeanOverTime, RunFigures};

impl Trainer<'_> {
    /// Wall time of the run until now, and its figures: of all its starts.
    pub(super) fn whole_run(&self) -> (f64, RunFigures) {
        let wall_seconds = self.process_start.elapsed().as_secs_f64();
        let telemetry = self.around.telemetry;
        let time = self.time_of_start().within(wall_seconds);
        let figures = RunFigures {
            num_starts: 1,
            time,
            forward_share: MeanOverTime::of(self.laps.forward_share(), time.forward_backward_seconds),
            peak_host_memory_bytes: peak_host_memory_bytes().max(self.figures.peak_host_memory_bytes),
            peak_gpu_memory_bytes: telemetry.peak_gpu_memory_bytes(),
            telemetry_seconds: telemetry.seconds(),
            ..self.figures
        };
        (self.earlier.wall_seconds + wall_seconds, figures.after(&self.earlier_figures))
    }

    /// Where the time of this start went, up to the last lap.
    pub(super) fn time_of_start(&self) -> TimeSpent {
        self.laps.time_spent(self.figures.time.startup_seconds, self.around.device.is_asynchronous())
    }

    /// Ends what came after the last step: writing the adapter.
    pub fn end_export(&mut self) {
        self.laps.lap(Part::Checkpoint);
    }

    /// The final figures, as far as the loop knows them: of the whole run, but for the diagnosis.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let TrainerState { step, evaluations, totals, .. } = &self.state;
        let (wall_seconds, figures) = self.whole_run();
        let has_steps = figures.step_seconds > 0.0;
        Summary {
            starts: figures.num_starts,
            steps: *step,
            skipped_steps: totals.skipped_steps,
            anomalous_steps: totals.anomalous_steps,
            epochs: self.state.epochs(),
            final_loss: figures.last_loss,
            initial_eval_loss: evaluations.first_loss,
            final_eval_loss: evaluations.last_loss,
            best_eval_loss: evaluations.best_loss,
            best_eval_step: evaluations.best_step,
            tokens: totals.tokens,
            target_tokens: totals.target_tokens,
            tokens_per_second: has_steps.then(|| per_second(figures.tokens, figures.step_seconds)),
            mfu: figures.mfu.get(),
            peak_host_memory_bytes: figures.peak_host_memory_bytes,
            peak_gpu_memory_bytes: figures.peak_gpu_memory_bytes,
            peak_gpu_memory_reserved_bytes: figures.peak_gpu_memory_reserved_bytes,
            mean_gpu_utilization_percent: figures.gpu_utilization_percent.get(),
            mean_cpu_utilization_percent: figures.cpu_utilization_percent.get(),
            padding_share: share(figures.padding_tokens, figures.tokens + figures.padding_tokens),
            energy_joules: self.energy_joules(self.around.telemetry.energy_joules()),
            diagnosis: self.diagnosis(),
            told: self.gathered.told.clone(),
            telemetry_seconds: figures.telemetry_seconds,
            wall_seconds,
            time: figures.time,
            forward_share: figures.forward_share.get(),
            ..Summary::default()
        }
    }

    /// Energy since the start of the run, from that since the start of the process.
    pub(super) fn energy_joules(&self, since_start: Option<f64>) -> Option<f64> {
        match (self.earlier.energy_joules, since_start) {
            (None, None) => None,
            (earlier, since_start) => Some(earlier.unwrap_or(0.0) + since_start.unwrap_or(0.0)),
        }
    }
}
