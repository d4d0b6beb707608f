//! The loop: steps are the only clock. Evaluation, samples, checkpoints and figures are called here by name.

mod between;
mod line;
mod restore;
mod told;
mod whole;

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::figures::StepWork;
use super::flops::StepFlops;
use super::laps::{Laps, Part};
use super::plan::{Around, Plan};
use super::state::{Evaluations, TrainerState};
use super::step::{SkipReason, StepOutcome, TrainStep};
use super::totals::{RunFigures, Totals};
use super::watchdog::{self, Anomaly, Observation, Verdict, Watchdog};
use crate::checkpoint::CheckpointError;
use crate::data::error::DataError;
use crate::data::loader::Loader;
use crate::data::pipeline::{Cursor, RowCounts};
use crate::device::MemoryInUse;
use crate::generate::GenerateError;
use crate::metrics::{Outcome, Sinks, StepMetrics};
use crate::ops::peak::gemm_peak_flops;
pub use restore::restore_step;
use told::Gathered;

/// On a device that is not waited for, one step in so many waits at the end of every part, so that each has a time. The
/// first of them is the second step after a start.
const SPLIT_STEPS: u64 = 50;

/// Why training failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainerError {
    /// A row cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A prompt of `eval.generate` cannot be continued.
    #[error("`eval.generate`: {0}")]
    Generate(#[from] GenerateError),
    /// A checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Training was to stop, and its state could not be saved.
    #[error("stopped after step {step}, which is not saved: {source}{}", earlier_hint(earlier.as_deref()))]
    NotSaved {
        /// Steps done.
        step: u64,
        /// Why not.
        source: CheckpointError,
        /// The newest checkpoint that is whole.
        earlier: Option<PathBuf>,
    },
    /// The watchdog has lost its patience.
    #[error("step {step}: {reason}")]
    Watchdog {
        /// Steps done.
        step: u64,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A checkpoint does not fit this recipe.
    #[error("checkpoint {}: {reason}", path.display())]
    Mismatch {
        /// Folder of the checkpoint.
        path: PathBuf,
        /// What does not fit, and what would.
        reason: String,
    },
}

/// The training loop and where it stands.
pub struct Trainer<'a> {
    step: TrainStep,
    plan: Plan,
    flops: StepFlops,
    around: Around<'a>,
    state: TrainerState,
    /// The state is on disk as a checkpoint.
    is_saved: bool,
    /// When the last checkpoint was saved, or failed to be; at first, when training started.
    last_save: Instant,
    /// The newest checkpoint that was saved while nothing was wrong.
    sound_checkpoint: Option<PathBuf>,
    /// Sums of the earlier starts of this run.
    earlier: Totals,
    /// The same of time and machine.
    earlier_figures: RunFigures,
    /// What the backend's pools held after the last forward of a step, when they were last asked then.
    pools_after_forward: Option<MemoryInUse>,
    process_start: Instant,
    /// Where the time goes; writing a step's figures belongs to the next step.
    laps: Laps,
    /// Those of this start, but for what is asked at its end only.
    figures: RunFigures,
    gathered: Gathered,
}

impl<'a> Trainer<'a> {
    /// A loop before its first step. `process_start` is where the wall time starts.
    #[must_use]
    pub fn new(step: TrainStep, plan: Plan, around: Around<'a>, process_start: Instant) -> Self {
        let state = TrainerState {
            step: 0,
            cursor: Cursor::default(),
            rows_of_epoch: 0,
            order: plan.order,
            counters: step.counters(),
            evaluations: Evaluations::default(),
            watchdog: Watchdog::default(),
            totals: Totals::default(),
            inputs: plan.inputs.clone(),
            trouble: None,
        };
        Self {
            gathered: Gathered::new(plan.facts.clone()),
            earlier_figures: RunFigures { num_starts: plan.earlier_starts, ..RunFigures::default() },
            flops: StepFlops::new(&step.model().config, step.adapters().num_parameters()),
            step,
            plan,
            around,
            state,
            is_saved: false,
            last_save: Instant::now(),
            sound_checkpoint: None,
            earlier: Totals::default(),
            pools_after_forward: None,
            process_start,
            laps: Laps::start(process_start),
            figures: RunFigures::default(),
        }
    }

    /// Where training stands.
    #[must_use]
    pub fn state(&self) -> &TrainerState {
        &self.state
    }

    /// Where figures and lines go.
    pub fn sinks(&mut self) -> &mut Sinks {
        self.around.sinks
    }

    /// Model, adapters and optimizer.
    #[must_use]
    pub fn step(&self) -> &TrainStep {
        &self.step
    }

    /// Trains until all steps are done, the evaluation loss stops falling, or somebody wants to stop; then a
    /// checkpoint has been saved.
    ///
    /// # Errors
    ///
    /// A row that cannot be read; figures with which it makes no sense to go on; a stop whose checkpoint cannot be
    /// written. Wherever it can be, a checkpoint of the steps done is saved first.
    pub fn run(&mut self) -> Result<Outcome, TrainerError> {
        let first_step = self.state.step;
        let outcome = self.run_steps();
        let is_row_or_prompt = matches!(outcome, Err(TrainerError::Data(_) | TrainerError::Generate(_)));
        if is_row_or_prompt && self.state.step > first_step && !self.is_saved {
            // Once that is mended, training goes on from here.
            self.save_or_warn();
        }
        if matches!(outcome, Err(TrainerError::Watchdog { .. })) {
            self.save_beside_the_others();
        }
        outcome
    }

    fn run_steps(&mut self) -> Result<Outcome, TrainerError> {
        let mut loader = self.around.data.loader(self.state.cursor, self.plan.train.micro_batch_size)?;
        let now = Instant::now();
        self.figures.time.startup_seconds = now.duration_since(self.process_start).as_secs_f64();
        self.laps = Laps::start(now);
        self.last_save = now;
        // Only what happens in steps belongs to the first step's figures.
        let _ = self.around.telemetry.window();
        self.around.sinks.start();
        loop {
            // Evaluation comes before the checkpoint, so that the checkpoint knows its result.
            if self.is_evaluation_due() && !self.evaluate()? {
                return self.interrupt();
            }
            if self.state.evaluations.patience_is_over(self.plan.eval.early_stopping_patience) {
                return Ok(Outcome::StoppedEarly);
            }
            if self.is_checkpoint_due() {
                self.save_or_warn();
            }
            if self.state.step >= self.plan.schedule.total_steps() {
                return Ok(Outcome::Finished);
            }
            let Some((mut metrics, rows, verdict)) = self.take_step(&mut loader)? else { return self.interrupt() };
            let findings = self.gather(&mut metrics, rows);
            self.around.sinks.step(&metrics);
            for finding in &findings {
                self.around.sinks.finding(metrics.step, finding);
            }
            self.laps.lap(Part::Logging);
            if let Some(reason) = verdict.stop {
                return Err(TrainerError::Watchdog { step: self.state.step, reason });
            }
        }
    }

    /// One step: micro-batches, an update, its figures. `None` where somebody wants to stop: then nothing happened, as
    /// after an error.
    fn take_step(&mut self, loader: &mut Loader) -> Result<Option<(StepMetrics, RowCounts, Verdict)>, TrainerError> {
        let mut work = StepWork::new(self.state.cursor);
        let waits = self.is_split_due();
        if waits {
            // The update of the step before is none of this one's parts.
            self.end_part(Part::Other, waits);
        }
        let num_micro_batches = self.plan.train.gradient_accumulation_steps;
        for index in 1..=num_micro_batches {
            if self.stop_requested() {
                self.step.discard(work.num_micro_batches);
                return Ok(None);
            }
            self.laps.lap(Part::Other);
            let stop_requested = || self.stop_requested();
            let loaded = match loader.next_batch_unless(&stop_requested) {
                Ok(Some(loaded)) => loaded,
                other => {
                    self.step.discard(work.num_micro_batches);
                    return other.map(|_| None).map_err(TrainerError::from);
                }
            };
            self.laps.lap(Part::DataWait);
            if let Some(inputs) = self.step.lay_out(&loaded.batch) {
                self.end_part(Part::HostToDevice, waits);
                let forward = self.step.forward(inputs);
                self.end_part(Part::Forward, waits);
                let is_last = index == num_micro_batches || loaded.last_of_epoch;
                if is_last && (waits || self.pools_after_forward.is_none()) {
                    // All that the backward starts from is there, beside the gradients of the micro-batches before. Asking
                    // takes the host's lead over the device away.
                    self.pools_after_forward = self.around.device.memory_in_use();
                }
                self.step.backward(forward);
                self.end_part(Part::Backward, waits);
                work.num_micro_batches += 1;
                work.flops += self.flops.of(&loaded.batch);
            }
            let is_last_of_epoch = loaded.last_of_epoch;
            work.add(loaded);
            // The last step of an epoch takes what is left of it.
            if is_last_of_epoch {
                break;
            }
        }
        // The one wait for a GPU in most steps, and so the end of their forwards and backwards, and of the update before.
        self.laps.lap(Part::Other);
        let figures = self.step.read_figures();
        self.laps.lap(Part::Backward);

        let learning_rate = self.plan.schedule.learning_rate(self.state.step + 1);
        let mut outcome = self.step.apply(figures, learning_rate);
        if outcome.target_tokens == 0 {
            // A mean over nothing: no point of a curve.
            (outcome.loss, outcome.grad_norm) = (f64::NAN, f64::NAN);
        }
        self.end_part(Part::Optimizer, waits);

        self.state.advance(&work, &outcome);
        self.is_saved = false;
        let verdict = self.watch(learning_rate, &outcome, &work);
        let loading = loader.take_work();
        let machine = self.around.telemetry.window();
        self.laps.lap(Part::Other);
        // Measured once, after the first step: measuring takes a moment that is not the step's.
        let peak = gemm_peak_flops(self.around.device, self.plan.train.precision);
        if self.figures.num_steps == 0 {
            // Nor are the samples of the machine that were taken meanwhile the next step's.
            let _ = self.around.telemetry.window();
        }
        self.laps.lap(Part::Measuring);
        let time = self.laps.end_step(waits || !self.around.device.is_asynchronous());
        self.figures.add(&work, &outcome, time.step_seconds(), &machine, peak);
        let mut metrics = self.metrics(learning_rate, &outcome, &work, verdict.anomaly);
        self.describe_pools(&mut metrics);
        self.describe(&mut metrics, &work, &time, &loading, machine, peak);
        Ok(Some((metrics, work.rows, verdict)))
    }

    /// Whether the next step is to wait for the device at the end of every part. The first after a start is not: kernels
    /// are compiled in it.
    fn is_split_due(&self) -> bool {
        let num_steps = self.figures.num_steps;
        let is_due = num_steps == 1 || (num_steps > 1 && (self.state.step + 1).is_multiple_of(SPLIT_STEPS));
        is_due && self.around.device.is_asynchronous()
    }

    /// Ends a lap; where the step waits for the device, once that is done with it.
    fn end_part(&mut self, part: Part, waits: bool) {
        if waits {
            self.around.device.wait();
        }
        self.laps.lap(part);
    }

    /// What is wrong with a step; told to the user, with its rows.
    fn watch(&mut self, learning_rate: f64, outcome: &StepOutcome, work: &StepWork) -> Verdict {
        let step = self.state.step;
        let has_loss_scale = self.step.counters().loss_scale.is_some_and(|loss_scale| loss_scale.scale() > 1.0);
        let is_look_due = step.is_multiple_of(watchdog::LOOK_STEPS);
        let observation = Observation {
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            skipped: outcome.skipped,
            is_scale_search: has_loss_scale && outcome.skipped == Some(SkipReason::NonFiniteGradient),
            learning_rate,
            adapters_digest: is_look_due.then(|| self.step.adapters_digest()),
        };
        let verdict = self.state.watchdog.observe(&self.plan.watchdog, &observation);
        self.state.totals.anomalous_steps += u64::from(verdict.anomaly.is_some());
        let what = outcome.skipped.map(|reason| reason.told().to_owned()).or_else(|| verdict.warning.clone());
        if let Some(what) = what {
            let warning = work.warning(step, &what, self.around.data.files());
            self.around.sinks.warn(&warning);
        }
        verdict
    }

    /// What the line of metrics.jsonl says about the step itself.
    fn metrics(
        &self,
        learning_rate: f64,
        outcome: &StepOutcome,
        work: &StepWork,
        anomaly: Option<Anomaly>,
    ) -> StepMetrics {
        StepMetrics {
            step: self.state.step,
            epoch: self.state.epochs(),
            loss: outcome.loss,
            learning_rate,
            grad_norm: outcome.grad_norm,
            skipped: outcome.skipped.is_some(),
            anomaly: anomaly.map(|anomaly| anomaly.name().to_owned()),
            loss_scale: self.step.counters().loss_scale.map(|loss_scale| loss_scale.scale()),
            tokens: work.tokens,
            target_tokens: outcome.target_tokens,
            rows: Some(work.rows.rows),
            truncated_rows: Some(work.rows.truncated),
            padding_tokens: Some(work.padding_tokens),
            ..StepMetrics::default()
        }
    }

    /// A signal, or the dashboard's user.
    fn stop_requested(&self) -> bool {
        self.around.stop.requested() || self.around.sinks.stop_requested()
    }

    /// Before the first step if `eval_on_start`, after the last one, and every `eval_steps`; not twice after one step.
    fn is_evaluation_due(&self) -> bool {
        let (step, eval) = (self.state.step, &self.plan.eval);
        let every = eval.eval_steps.is_some_and(|every| step.is_multiple_of(every));
        let is_left_out = step == 0 && !eval.eval_on_start;
        (every || self.is_at_an_edge()) && !is_left_out && self.state.evaluations.last_step != Some(step)
    }

    /// Before the first step of the run, or after its last one.
    fn is_at_an_edge(&self) -> bool {
        self.state.step == 0 || self.state.step >= self.plan.schedule.total_steps()
    }

    /// Every `save_steps`, or `save_minutes` after the last one.
    fn is_checkpoint_due(&self) -> bool {
        let (step, checkpoint) = (self.state.step, &self.plan.checkpoint);
        let every = checkpoint.save_steps.is_some_and(|every| step.is_multiple_of(every));
        let is_late = checkpoint.save_seconds().is_some_and(|wait| self.last_save.elapsed().as_secs_f64() >= wait);
        (every || is_late) && step > 0 && !self.is_saved
    }
}

/// What is left where a stop could not be saved.
fn earlier_hint(earlier: Option<&Path>) -> String {
    match earlier {
        Some(path) => format!("\n  hint: `--resume` goes on from {}, once the disk takes files again", path.display()),
        None => "\n  hint: no checkpoint was saved before it, so the run has to start again".to_owned(),
    }
}
