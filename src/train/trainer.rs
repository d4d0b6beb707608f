//! The training loop, which counts only in steps. It calls evaluation, samples, checkpoints and figures by name.

mod answers;
mod evaluation;
mod shared;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::backprop::Inputs;
use super::eval::EvalError;
use super::laps::StepPart;
use super::recorder::Recorder;
use super::rollouts::{RolloutError, Rollouts, Round};
use super::saver::Saver;
use super::schedule::Schedule;
use super::shipping::Shipping;
use super::state::TrainerState;
use super::step::{SkipReason, StepOutcome, StepState, TrainStep};
use super::step_work::StepWork;
use super::stop::Stop;
use super::watchdog::{self, Observation, Verdict, Watchdog};
use crate::config::WatchdogConfig;
use crate::data::batch::Batch;
use crate::data::dataset::Dataset;
use crate::data::error::DataError;
use crate::data::loader::{LoadedBatch, Loader};
use crate::generate::GenerateError;
use crate::measure::figures::ObjectiveFigures;
use crate::measure::metrics::{Outcome, Sinks, StepMetrics};
use crate::save::checkpoint::CheckpointError;
use crate::save::export::ExportError;

pub use evaluation::Evaluator;

/// Why training failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainerError {
    /// A row cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A prompt of `eval.generate` cannot be continued.
    #[error("`eval.generate`: {0}")]
    Generate(#[from] GenerateError),
    /// A prompt of `eval.task` cannot be continued.
    #[error("`eval.task`: {0}")]
    Task(GenerateError),
    /// Another rank has failed, which says why.
    #[error("another rank has failed, as it says itself")]
    OtherRank,
    /// Answers to train on could not be made.
    #[error("`objective`: {0}")]
    Rollout(#[from] RolloutError),
    /// Training was asked to stop, but its state could not be saved.
    #[error("stopped after step {step}, which is not saved: {source}{}", earlier_hint(earlier.as_deref()))]
    NotSaved {
        /// Number of finished steps.
        step: u64,
        /// Why saving failed.
        source: CheckpointError,
        /// The newest undamaged checkpoint.
        earlier: Option<PathBuf>,
    },
    /// The weights could not be made as the file of `train.ship_as` has them.
    #[error(transparent)]
    Shipping(#[from] ExportError),
    /// The watchdog stopped training: its patience is over.
    #[error("step {step}: {reason}")]
    Watchdog {
        /// Number of finished steps.
        step: u64,
        /// What is wrong, and how to fix it.
        reason: String,
    },
}

impl From<EvalError> for TrainerError {
    fn from(error: EvalError) -> Self {
        match error {
            EvalError::Data(error) => Self::Data(error),
            EvalError::Rollout(error) => Self::Rollout(error),
        }
    }
}

/// The training loop and its state.
pub struct Trainer<'a> {
    /// Model, adapters and optimizer.
    pub step: TrainStep,
    /// State of training.
    pub state: TrainerState,
    /// When and what is evaluated.
    pub evaluator: Evaluator,
    /// Section `[watchdog]` of the recipe.
    pub watchdog: WatchdogConfig,
    /// Learning rate by step, and the number of steps.
    pub schedule: Schedule,
    /// What the last steps train for, and from when on.
    pub shipping: Option<Shipping>,
    /// Writes the answers that GRPO trains on.
    pub rollouts: Option<Rollouts>,
    /// The rows.
    pub data: &'a Dataset,
    /// Stop requests.
    pub stop: &'a Stop,
    /// Stopwatch and figures.
    pub recorder: Recorder<'a>,
    /// Saves checkpoints.
    pub saver: Saver,
    /// Where figures and messages are written.
    pub sinks: Sinks,
}

impl Trainer<'_> {
    /// Trains until all steps are done, the evaluation loss stops falling, or the run is asked to stop; then a
    /// checkpoint has been saved.
    ///
    /// # Errors
    /// A row that cannot be read; figures with which training should not continue; a stop whose checkpoint cannot be
    /// written. Where possible, a checkpoint of the finished steps is saved first.
    pub fn run(&mut self) -> Result<Outcome, TrainerError> {
        let first_step = self.state.step;
        let outcome = self.run_steps();
        match outcome {
            Err(
                TrainerError::Data(_)
                | TrainerError::Generate(_)
                | TrainerError::Task(_)
                | TrainerError::Rollout(_)
                | TrainerError::Shipping(_)
                | TrainerError::OtherRank,
            ) if self.state.step > first_step && !self.saver.is_saved => {
                // Once the row is fixed, training can continue from here.
                self.save_or_warn();
            }
            Err(TrainerError::Watchdog { .. }) => self.save_beside_the_others(),
            // A finished run can be continued with more steps. Where a checkpoint is due, the disk has just refused it.
            Ok(Outcome::Finished | Outcome::StoppedEarly)
                if self.saver.saves() && !self.saver.is_saved && !self.saver.is_due(self.state.step) =>
            {
                self.save_or_warn();
            }
            _ => {}
        }
        outcome
    }

    fn run_steps(&mut self) -> Result<Outcome, TrainerError> {
        let mut loader = self.data.loader(self.state.cursor, self.step.config().micro_batch_size)?;
        self.recorder.start();
        self.saver.start();
        self.sinks.start();
        let first_step = self.state.step;
        loop {
            if !self.ship_if_due()? {
                return self.interrupt();
            }
            // Evaluation comes first, so that the checkpoint contains its result.
            if self.is_evaluation_due() {
                if !self.evaluate()? {
                    return self.interrupt();
                }
                if self.state.step == first_step {
                    self.sinks.start();
                }
            }
            if self.state.evaluations.patience_is_over(self.evaluator.config.early_stopping_patience) {
                return Ok(Outcome::StoppedEarly);
            }
            if self.saver.is_due(self.state.step) {
                self.save_or_warn();
            }
            if self.state.step >= self.schedule.total_steps() {
                return Ok(Outcome::Finished);
            }
            let Some(verdict) = self.take_step(&mut loader)? else { return self.interrupt() };
            if self.step.flags_of_ranks().stop {
                return self.interrupt();
            }
            if let Some(reason) = verdict.stop {
                return Err(TrainerError::Watchdog { step: self.state.step, reason });
            }
        }
    }

    /// Goes on with the weights as a file will have them, where that is due. What was the best with others is none of these. `false`
    /// where the run was asked to stop.
    fn ship_if_due(&mut self) -> Result<bool, TrainerError> {
        let (step, is_begun) = (self.state.step, self.step.shipped().is_some());
        let Some(shipping) = self.shipping.as_mut().filter(|it| step >= it.first_step && !is_begun) else {
            return Ok(true);
        };
        let (begin, name, begun) = (Instant::now(), shipping.file_type.name(), shipping.begun.take());
        let sinks = RefCell::new(&mut self.sinks);
        let at_work = |what| sinks.borrow_mut().at_work(what);
        let is_new = begun.is_none();
        let shipped = match begun {
            Some(begun) => Some(begun),
            None => shipping.start(&self.step, self.data, self.stop, &at_work)?,
        };
        let Some(shipped) = shipped else { return Ok(false) };
        shipping.begin(shipped, &mut self.step, self.saver.adapter_files(), &at_work)?;
        if is_new {
            self.state.evaluations.forget_best();
            // The losses of the rounded weights are others.
            self.state.watchdog = Watchdog::default();
            let seconds = begin.elapsed().as_secs_f64();
            self.sinks.note(&format!("step {step}: from here on weights are those of a {name} file ({seconds:.1} s)"));
        }
        Ok(true)
    }

    /// Runs one step: gradients of its micro-batches, an update, its figures. `None` where the run was asked to stop:
    /// the step is then dropped, as after an error.
    fn take_step(&mut self, loader: &mut Loader) -> Result<Option<Verdict>, TrainerError> {
        let mut work = StepWork::new(self.state.cursor);
        self.recorder.start_step(self.state.step);
        let computed =
            if self.step.is_shared() { self.compute_share(loader, &mut work) } else { self.compute(loader, &mut work) };
        if !matches!(computed, Ok(true)) {
            self.step.discard();
            computed?;
            return Ok(None);
        }
        if !self.step.is_shared() && self.rollouts.is_none() && self.state.step + 1 < self.schedule.total_steps() {
            // While a GPU still computes: it would wait for that otherwise.
            self.step.lay_out_ahead(loader.peek().map(|loaded| &loaded.batch));
            self.recorder.part(StepPart::HostToDevice);
        }
        // The only wait for a GPU in most steps: it ends their forwards and backwards, and an update.
        self.recorder.part(StepPart::Other);
        let learning_rate = self.schedule.learning_rate(self.state.step + 1);
        // Where every part is waited for, the update is one of them.
        let figures = self.step.reduce((!self.recorder.is_split()).then_some(learning_rate));
        if self.step.flags_of_ranks().failed {
            self.step.discard();
            self.step.ranks().end_together();
            return Err(TrainerError::OtherRank);
        }
        self.recorder.part(StepPart::Backward);
        let mut outcome = self.step.apply(figures, learning_rate);
        self.recorder.part(StepPart::Optimizer);

        if outcome.target_tokens == 0 {
            // A mean over no tokens: no point of a curve.
            (outcome.loss, outcome.grad_norm) = (f64::NAN, f64::NAN);
        }
        self.state.advance(&work);
        self.state.round = work.round.take().and_then(Round::after_step);
        self.saver.is_saved = false;
        self.step.round().map_err(ExportError::from)?;
        self.recorder.part(StepPart::Optimizer);
        let verdict = self.watch(learning_rate, &outcome, &work);
        let mut line = self.line(learning_rate, &outcome, &work, &verdict);
        let waited_seconds = self.step.ranks().take_seconds();
        line.set_ranks(self.step.of_ranks(), waited_seconds);
        let totals = &mut self.state.totals;
        let findings = self.recorder.end_step(&mut line, &work, &loader.take_worker_time(), totals);
        self.sinks.step(&line);
        for finding in &findings {
            self.sinks.finding(line.step, finding);
        }
        self.recorder.part(StepPart::Logging);
        Ok(Some(verdict))
    }

    /// Forward and backward of a step's micro-batches. `false` where the run was asked to stop.
    fn compute(&mut self, loader: &mut Loader, work: &mut StepWork) -> Result<bool, TrainerError> {
        let mut waiting = Vec::new();
        if self.rollouts.is_some() {
            let Some(round) = self.round(loader, work)? else { return Ok(false) };
            let batches = self.take_up(round, work);
            for (left, batch) in (0..batches.len()).rev().zip(&batches) {
                if self.stop_requested() || !self.compute_one(batch, &mut waiting, left == 0) {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let num_micro_batches = self.step.config().gradient_accumulation_steps;
        for index in 1..=num_micro_batches {
            let Some(loaded) = self.next_micro_batch(loader)? else { return Ok(false) };
            // The last step of an epoch has only the remaining micro-batches.
            let is_last = index == num_micro_batches || loaded.last_of_epoch;
            let knew_reference = self.step.knows_reference(&loaded.batch);
            if !self.compute_one(&loaded.batch, &mut waiting, is_last) {
                return Ok(false);
            }
            work.add(&loaded, &self.recorder.flops, knew_reference);
            if is_last {
                break;
            }
        }
        Ok(true)
    }

    /// Forward and backward of a micro-batch, or of all that wait for the last one. `false` where the run was asked to stop.
    fn compute_one(&mut self, batch: &Batch, waiting: &mut Vec<Inputs>, is_last: bool) -> bool {
        waiting.extend(self.step.lay_out_next(batch));
        self.recorder.part(StepPart::HostToDevice);
        if waiting.is_empty() || !is_last && self.step.config().layered_accumulation {
            return true;
        }
        let (stop, inputs) = (self.stop, std::mem::take(waiting));
        stop.unless_requested(|| self.forward_backward(inputs, is_last)).is_some()
    }

    fn forward_backward(&mut self, inputs: Vec<Inputs>, is_last: bool) {
        let forward = self.step.forward(inputs);
        self.recorder.forward(is_last);
        self.step.backward(forward);
        self.recorder.part(StepPart::Backward);
    }

    /// Waits for a micro-batch. `None` where the run was asked to stop: the step's micro-batches are then dropped.
    fn next_micro_batch(&mut self, loader: &mut Loader) -> Result<Option<LoadedBatch>, TrainerError> {
        self.recorder.part(StepPart::Other);
        let loaded = if self.stop_requested() { Ok(None) } else { loader.next_batch_unless(&|| self.stop_requested()) };
        if matches!(loaded, Ok(Some(_))) {
            self.recorder.part(StepPart::DataWait);
        }
        Ok(loaded?)
    }

    /// Asks the watchdog about a step; reports to the user what is wrong, with the step's rows.
    fn watch(&mut self, learning_rate: f64, outcome: &StepOutcome, work: &StepWork) -> Verdict {
        let step = self.state.step;
        let has_loss_scale = self.step.counters().loss_scale.is_some_and(|loss_scale| loss_scale.scale() > 1.0);
        let is_look_due = step.is_multiple_of(watchdog::LOOK_STEPS);
        if outcome.skipped == Some(SkipReason::EqualRewards) {
            if self.rollouts.as_mut().is_some_and(Rollouts::warns_of_equal_rewards) {
                self.sinks.warn(&format!("step {step}: {}", SkipReason::EqualRewards.text()));
            }
            return Verdict::default();
        }
        // A loss of preferences or rewards may jump: what is no number is skipped.
        let is_cross_entropy = outcome.figures == ObjectiveFigures::default();
        let observation = Observation {
            loss: if is_cross_entropy || !outcome.loss.is_finite() { outcome.loss } else { 0.0 },
            grad_norm: outcome.grad_norm,
            skipped: outcome.skipped,
            is_scale_search: has_loss_scale && outcome.skipped == Some(SkipReason::NonFiniteGradient),
            learning_rate,
            adapters_digest: is_look_due.then(|| self.step.adapters_digest()),
        };
        let verdict = self.state.watchdog.observe(&self.watchdog, &observation);
        let what = outcome.skipped.map(|reason| reason.text().to_owned()).or_else(|| verdict.warning.clone());
        if let Some(what) = what {
            self.sinks.warn(&work.warning(step, &what, self.data.files()));
        }
        verdict
    }

    /// The step's line of metrics.jsonl, to be completed by the recorder.
    fn line(&self, learning_rate: f64, outcome: &StepOutcome, work: &StepWork, verdict: &Verdict) -> StepMetrics {
        let mut line = StepMetrics {
            step: self.state.step,
            epoch: self.state.epochs(),
            loss: outcome.loss,
            learning_rate,
            grad_norm: outcome.grad_norm,
            skipped: outcome.skipped.is_some(),
            anomaly: verdict.anomaly.map(|anomaly| anomaly.name().to_owned()),
            loss_scale: self.step.counters().loss_scale.map(|loss_scale| loss_scale.scale()),
            tokens: work.tokens,
            target_tokens: outcome.target_tokens,
            rows: Some(work.rows.rows),
            truncated_rows: Some(work.rows.truncated),
            padding_tokens: Some(work.padding_tokens),
            ..StepMetrics::default()
        };
        line.set_objective(&outcome.figures);
        line.set_rewards(&work.rewards, &work.reward_metrics);
        (line.reward_seconds, line.environment_seconds) = (work.reward_seconds, work.environment_seconds);
        line
    }

    /// Whether a signal or the dashboard's user asked to stop.
    fn stop_requested(&self) -> bool {
        self.stop.requested() || self.sinks.stop_requested()
    }

    /// Saves a checkpoint of the finished steps, marked with `trouble`; returns its folder.
    fn save(&mut self, trouble: Option<String>) -> Result<PathBuf, CheckpointError> {
        self.recorder.part(StepPart::Other);
        if !self.saver.writes {
            return Ok(self.saver.leave_to_first());
        }
        let StepState { moments, counters } = self.step.state();
        self.state.counters = counters;
        self.recorder.update(&mut self.state.totals);
        self.state.trouble = trouble;
        // Logs of the finished steps must be on disk before the checkpoint counts these steps.
        self.sinks.sync();
        let saved = self.saver.save(&self.step, &moments, &self.state);
        if saved.is_ok() {
            self.sinks.note(&format!("step {}: checkpoint saved", self.state.step));
            self.recorder.saved();
        }
        self.recorder.pause(StepPart::Checkpoint);
        saved
    }

    /// Saves a checkpoint, then deletes the oldest. If the disk refuses, training continues.
    fn save_or_warn(&mut self) {
        let step = self.state.step;
        let warning = match self.save(self.state.watchdog.trouble()) {
            Ok(path) => self.saver.rotate(&path).err().map(|error| error.to_string()),
            Err(error) => Some(format!(
                "step {step}: no checkpoint was saved, and training continues: {error}{}",
                self.saver.next_save(step, self.schedule.total_steps())
            )),
        };
        if let Some(warning) = warning {
            self.sinks.warn(&warning);
        }
        self.recorder.part(StepPart::Checkpoint);
    }

    /// Saves a checkpoint without deleting an older one, which may be better.
    fn save_beside_the_others(&mut self) {
        let trouble = self.state.watchdog.trouble();
        // After resuming here, the user wants to see whether training has improved.
        self.state.watchdog.forgive();
        if let Err(error) = self.save(trouble) {
            self.sinks.warn(&format!("step {}: no checkpoint was saved: {error}", self.state.step));
        }
    }

    /// Saves what a resumed run needs, unless it is already saved.
    fn interrupt(&mut self) -> Result<Outcome, TrainerError> {
        // The others wait until the first has saved.
        self.step.ranks().end_together();
        if self.saver.is_saved {
            return Ok(Outcome::Interrupted);
        }
        self.sinks.note("a checkpoint is being saved");
        match self.save(self.state.watchdog.trouble()) {
            Ok(path) => {
                if let Err(error) = self.saver.rotate(&path) {
                    self.sinks.warn(&error.to_string());
                }
                Ok(Outcome::Interrupted)
            }
            Err(source) => {
                Err(TrainerError::NotSaved { step: self.state.step, source, earlier: self.saver.newest_good() })
            }
        }
    }
}

/// A hint at the last checkpoint, where a stop could not be saved.
fn earlier_hint(earlier: Option<&Path>) -> String {
    match earlier {
        Some(path) => {
            format!("\n  hint: `--resume` continues from {}, once the disk takes files again", path.display())
        }
        None => "\n  hint: no checkpoint was saved before it, so the run has to start again".to_owned(),
    }
}
