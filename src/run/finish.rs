//! Ends a run, complete or not. A complete run gets its adapter and the final figures; every run gets the diagnosis and
//! report.html.
//!
//! Nothing important can be lost here: a checkpoint is saved before this writes anything.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::Duration;

use super::Run;
use super::device_memory::panic_reason;
use super::dir::RunDir;
use super::inputs::data_failure;
use super::next_commands::{about_experts, about_servers, highest_rank, next_commands, next_scores, vllm_options};
use super::prepare::Prepared;
use super::start::Started;
use super::verify::adapter_reloads;
use crate::data::dataset::RowCounts;
use crate::insight::report;
use crate::measure::figures::evaluation::{EvalFigure, Group};
use crate::measure::metrics::{Evaluations, Outcome, Severity, Summary};
use crate::save::checkpoint::Checkpoints;
use crate::save::export::adapter_weights;
use crate::train::eval::eval_loss;
use crate::train::laps::StepPart;
use crate::train::saver::{self, BEST_ADAPTER};
use crate::train::trainer::TrainerError;
use crate::util::failure::Failure;
use crate::util::gguf::is_gguf;
use crate::util::panics::guarded;
use crate::util::stats::as_f64;

/// How long the end of a run waits for its report, which takes 1.5 s for 100,000 steps on a busy machine.
const REPORT_LIMIT: Duration = Duration::from_mins(10);
/// How long it waits after an interruption: the sender of the signal may kill the run soon.
const INTERRUPT_REPORT_LIMIT: Duration = Duration::from_secs(2);

/// Results of a complete run.
struct Done {
    outcome: Outcome,
    adapter_verified: bool,
}

/// Why a run ended early.
enum Cut {
    Interrupted,
    Failed { outcome: Outcome, failure: Failure },
    Panicked(Box<dyn Any + Send>),
}

impl Started<'_> {
    /// Trains, and ends the run in every case.
    pub(super) fn train(mut self) -> Result<(), Failure> {
        let first_step = self.trainer.state.step;
        let ran = catch_unwind(AssertUnwindSafe(|| self.train_and_export()));
        let cut = match ran {
            Ok(Ok(Some(done))) => return self.finish(&done),
            Ok(Ok(None)) => return Ok(()),
            Ok(Err(cut)) => cut,
            Err(panic) => Cut::Panicked(panic),
        };
        if !self.run.place.is_first() {
            return end_of_other(cut);
        }
        if let Err(bug) = guarded(|| self.end_early(&cut, first_step)) {
            self.trainer.sinks.warn(&format!("no report: {bug}"));
        }
        match cut {
            Cut::Interrupted => {
                let text = self.how_to_continue();
                self.trainer.sinks.say(&text);
                Err(Failure::Interrupted)
            }
            Cut::Failed { failure, .. } => Err(failure),
            Cut::Panicked(panic) => resume_unwind(panic),
        }
    }

    /// Trains and writes the adapter; `None` on a rank that leaves this to the first.
    fn train_and_export(&mut self) -> Result<Option<Done>, Cut> {
        let ran = self.trainer.run();
        if matches!(ran, Err(TrainerError::OtherRank)) && !self.run.place.is_first() {
            return Ok(None);
        }
        let outcome = ran.map_err(|error| {
            let by_watchdog = matches!(error, TrainerError::Watchdog { .. });
            let outcome = if by_watchdog { Outcome::StoppedByWatchdog } else { Outcome::Failed };
            Cut::Failed { outcome, failure: trainer_failure(error) }
        })?;
        if outcome == Outcome::Interrupted {
            return Err(Cut::Interrupted);
        }
        if !self.run.place.is_first() {
            return Ok(None);
        }
        if outcome == Outcome::StoppedEarly {
            self.take_best().map_err(|failure| Cut::Failed { outcome: Outcome::Failed, failure })?;
        }
        let adapter_verified = self.export().map_err(|failure| Cut::Failed { outcome: Outcome::Failed, failure })?;
        self.trainer.recorder.part(StepPart::Checkpoint);
        let about = self.about_file().map_err(|failure| Cut::Failed { outcome: Outcome::Failed, failure })?;
        about.iter().for_each(|about| self.trainer.sinks.note(about));
        Ok(Some(Done { outcome, adapter_verified }))
    }

    /// Goes back to the adapter of the best evaluation, after which early stopping waited in vain.
    fn take_best(&mut self) -> Result<(), Failure> {
        let folder = self.run.dir.path().join(BEST_ADAPTER);
        let Evaluations { best, best_step, .. } = &self.trainer.state.evaluations;
        let Some(step) = best_step.filter(|step| saver::best_step(&folder) == Some(*step)) else { return Ok(()) };
        self.trainer.step.replace_adapters(self.run.prepared.read_adapters(&folder)?);
        let figures = EvalFigure::headlines(&[Group::Loss, Group::Answers, Group::Score]).filter_map(|figure| {
            let label = figure.label(if figure.group == Group::Loss { "evaluation " } else { "" });
            Some(format!("{label} {}", figure.text((figure.of)(best)?)))
        });
        let figures: Vec<String> = figures.collect();
        self.trainer.sinks.note(&format!("the adapter is the best one, of step {step} ({})", figures.join(", ")));
        Ok(())
    }

    /// What the file of the trained model is worth beside the model before it is rounded, for people; `None` where the run trained
    /// for none, or has nothing to measure it by. Then the step has the model that is not rounded.
    pub(super) fn about_file(&mut self) -> Result<Option<String>, Failure> {
        let Run { prepared, stop, .. } = self.run;
        let trainer = &mut self.trainer;
        let evaluations = &trainer.state.evaluations;
        let (first, file) = (evaluations.first.eval_loss, evaluations.last.eval_loss);
        let is_last = evaluations.last_step == Some(trainer.state.step);
        let Some((shipped, file)) = trainer.step.shipped().zip(file.filter(|_| is_last)) else { return Ok(None) };
        let name = shipped.file_type.name();
        trainer.step.take_unrounded(|| prepared.load_model())?;
        let total = eval_loss(&trainer.step, trainer.data, None, &trainer.evaluator.config, stop, |_, _| ());
        let unrounded = total.ok().flatten().and_then(|total| total.mean());
        Ok(unrounded.map(|unrounded| {
            let kept = first.filter(|first| first - unrounded > 0.0).map(|first| (first - file) / (first - unrounded));
            let kept = kept.map(|kept| format!(", so that {:.0} % of the gain is in the file", 100.0 * kept));
            format!(
                "loss of the {name} file: {file:.4}; of the same model before it is rounded: {unrounded:.4}{}",
                kept.unwrap_or_default()
            )
        }))
    }

    /// Writes the adapter; returns whether it gives the same logits when it is read back.
    fn export(&mut self) -> Result<bool, Failure> {
        let (Run { dir, prepared, .. }, step) = (self.run, &self.trainer.step);
        let folder = dir.adapter();
        dir.clear_leftovers();
        let weights = adapter_weights(step.adapters());
        let write = |folder: &Path| self.trainer.saver.adapter_files().write(folder, &weights, step.shipped());
        if let Err(error) = write(&folder) {
            // Hours of work are only in memory, so any disk will do.
            let elsewhere = std::env::temp_dir().join(format!("lora-train-adapter-{}", std::process::id()));
            let place = elsewhere.display();
            return Err(Failure::running(match write(&elsewhere) {
                Ok(()) => format!("{error}\n  hint: the trained adapter was written to {place} instead"),
                Err(second) => format!(
                    "{error}\n  hint: nor could it be written elsewhere ({second}); `--resume` continues from the last \
                     checkpoint"
                ),
            }));
        }
        if let Err(error) = self.trainer.saver.adapter_files().write_tokenizer(&folder) {
            let hint = "the adapter is complete; other programs need the tokenizer of its model";
            self.trainer.sinks.warn(&format!("{error}\n  hint: {hint}"));
        }
        let step = &self.trainer.step;
        adapter_reloads(&folder, step.model(), step.adapters(), prepared.device.is_gpu()).map_err(Failure::running)
    }

    /// Writes the final figures and the report of a complete run.
    fn finish(&mut self, done: &Done) -> Result<(), Failure> {
        let mut summary = self.summary(done.outcome);
        summary.adapter_verified = Some(done.adapter_verified);
        if learned_nothing(&summary) {
            summary.diagnosis.retain(|finding| finding.severity != Severity::Healthy);
        }
        self.restore_files();
        let written = self.trainer.sinks.finish(&summary).map_err(Failure::running);
        // Without the final figures, the report still has those of the steps.
        self.write_report();
        written?;
        judge(&summary, &self.run.dir)?;
        if done.outcome == Outcome::Finished && self.trainer.state.watchdog.has_diverged() {
            self.trainer.sinks.warn(
                "the loss ended far above its start: the adapter may be worse than none\n  hint: try a lower \
                 `optimizer.learning_rate`",
            );
        }
        let Prepared { recipe, selection, source, .. } = &self.run.prepared;
        let rank = highest_rank(&source.config, selection);
        let (key, length) = match recipe.train.max_steps {
            Some(steps) => ("train.max_steps", as_f64(steps)),
            None => ("train.num_epochs", recipe.train.num_epochs.unwrap_or(1.0)),
        };
        // A full disk may have left none of the last step, and what stopped early stops again.
        let checkpoints = Checkpoints::new(self.run.dir.path(), &recipe.checkpoint).list().unwrap_or_default();
        let is_saved = checkpoints.last().is_some_and(|(step, _)| *step == self.trainer.state.step);
        let longer = (done.outcome == Outcome::Finished && is_saved)
            .then(|| self.run.args.resume_command_with(key, 2.0 * length, self.run.dir.path()));
        let lora = &recipe.lora;
        let has_more = lora.use_dora || lora.trainable_token_indices.is_some() || lora.modules_to_save.is_some();
        let is_shipped = recipe.train.ship_as.is_some();
        let vllm = vllm_options(rank, has_more || is_shipped);
        let commands = if recipe.objective.scores() {
            next_scores(&self.run.dir, longer.as_deref())
        } else {
            let vllm = (vllm.as_deref(), self.run.prepared.lora.is_plain());
            let is_file = is_shipped || is_gguf(&source.folder);
            next_commands(&self.run.dir, &recipe.model.path, is_file, vllm, longer.as_deref())
        };
        self.trainer.sinks.note(&commands);
        if !is_shipped && !recipe.objective.scores() {
            let run = self.run.dir.path().display().to_string();
            about_servers(&self.run.prepared.lora, &run, has_more, about_experts(&source.config, selection))
                .iter()
                .for_each(|line| self.trainer.sinks.note(line));
        }
        Ok(())
    }

    /// Writes diagnosis and report of an incomplete run. Failing to do so is only a warning: the outcome is decided.
    fn end_early(&mut self, cut: &Cut, first_step: u64) {
        let (outcome, reason) = match cut {
            Cut::Interrupted => (Outcome::Interrupted, self.how_to_continue()),
            Cut::Failed { outcome, failure } => (*outcome, failure.to_string()),
            Cut::Panicked(panic) => (Outcome::Failed, panic_reason(&**panic, &self.run.prepared.memory.advice)),
        };
        let mut summary = self.summary(outcome);
        summary.reason = Some(reason);
        summary.total_steps = Some(self.trainer.schedule.total_steps());
        if summary.steps == first_step {
            // This start has no step to diagnose: an empty diagnosis would call it healthy.
            summary.diagnosis.clear();
        }
        if !matches!(cut, Cut::Interrupted) {
            summary.diagnosis.retain(|finding| finding.severity != Severity::Healthy);
        }
        self.restore_files();
        if let Err(error) = self.trainer.sinks.finish(&summary) {
            self.trainer.sinks.warn(&error.to_string());
        }
        // Before the first evaluation or step there is nothing to draw.
        if summary.steps > 0 || summary.evaluations.first.eval_loss.is_some() {
            self.write_report();
        }
    }

    fn how_to_continue(&self) -> String {
        let (step, command) = (self.trainer.state.step, self.run.args.resume_command(self.run.dir.path()));
        let ranks = if self.run.place.size > 1 { " (on any number of ranks)" } else { "" };
        format!("stopped after step {step}, with a checkpoint; to continue{ranks}: {command}")
    }

    fn summary(&self, outcome: Outcome) -> Summary {
        let Prepared { recipe, device, .. } = &self.run.prepared;
        let max_length = recipe.data.max_length;
        let trainer = &self.trainer;
        let summary = Summary {
            outcome,
            device: device.label.clone(),
            precision: recipe.train.precision.name().to_owned(),
            trainable_parameters: self.run.prepared.num_trainable() as u64,
            all_parameters: self.run.prepared.num_parameters() as u64,
            // The counts were read before the first step, so ignore a failure now.
            warnings: trainer
                .data
                .train_counts()
                .map_or_else(|_| Vec::new(), |counts| rows_left_out(&counts, max_length)),
            ..trainer.recorder.summary(&trainer.state)
        };
        summary.with_cost(&recipe.cost)
    }

    /// Writes files again that were deleted from the folder during training, and reports it.
    fn restore_files(&mut self) {
        let sinks = &mut self.trainer.sinks;
        match self.run.dir.restore() {
            Ok(names) if names.is_empty() => {}
            Ok(names) => sinks.warn(&format!("deleted while training, and written again: {}", names.join(", "))),
            Err(error) => sinks.warn(&error.to_string()),
        }
    }

    /// Writes report.html. If that fails, it can be made later from the figures on disk.
    fn write_report(&mut self) {
        // Where there are other ranks, they wait for it.
        let limit =
            || if self.run.stop.requested() || self.run.place.size > 1 { INTERRUPT_REPORT_LIMIT } else { REPORT_LIMIT };
        match report::write_within(self.run.dir.path(), limit) {
            Ok(path) => self.trainer.sinks.note(&format!("report: {}", path.display())),
            Err(error) => self.trainer.sinks.warn(&format!("no report: {error}")),
        }
    }
}

/// The end of a rank other than the first, which reports what all share.
fn end_of_other(cut: Cut) -> Result<(), Failure> {
    match cut {
        Cut::Interrupted => Err(Failure::Interrupted),
        Cut::Failed { outcome: Outcome::StoppedByWatchdog, .. } => Ok(()),
        Cut::Failed { failure, .. } => Err(failure),
        Cut::Panicked(panic) => resume_unwind(panic),
    }
}

fn learned_nothing(summary: &Summary) -> bool {
    summary.steps > 0 && summary.totals.skipped_steps == summary.steps
}

/// Refuses a run that learned from nothing, and an adapter that differs from the trained one.
fn judge(summary: &Summary, dir: &RunDir) -> Result<(), Failure> {
    if learned_nothing(summary) {
        return Err(Failure::running(format!(
            "none of the {} steps made an update, so nothing was trained\n  hint: the warnings say why",
            summary.steps
        )));
    }
    if summary.adapter_verified == Some(false) {
        let folder = dir.adapter();
        return Err(Failure::running(format!(
            "{}: the adapter that was read back does not give the logits of the one that was trained",
            folder.display()
        )));
    }
    Ok(())
}

/// Warnings about rows that were cut or left out.
fn rows_left_out(counts: &RowCounts, max_length: usize) -> Vec<String> {
    let RowCounts { rows, truncated, answer_cut, without_targets, bad, .. } = *counts;
    let mut warnings = Vec::new();
    if bad > 0 {
        warnings.push(format!("{bad} of {rows} rows cannot be used and were skipped"));
    }
    if truncated > 0 {
        warnings.push(format!(
            "{truncated} of {rows} rows were longer than `data.max_length` = {max_length} and were cut; of {answer_cut} \
             nothing of the answer was left, so they were left out"
        ));
    }
    if without_targets > answer_cut {
        warnings.push(format!("{} of {rows} rows have no token that carries loss", without_targets - answer_cut));
    }
    warnings
}

/// An unreadable row or a checkpoint that does not fit is a mistake in the inputs.
pub(crate) fn trainer_failure(error: TrainerError) -> Failure {
    match error {
        TrainerError::NotSaved { .. } | TrainerError::Watchdog { .. } | TrainerError::OtherRank => {
            Failure::running(error)
        }
        TrainerError::Data(error) => data_failure(error),
        TrainerError::Shipping(error) => error.into(),
        error @ (TrainerError::Generate(_) | TrainerError::Task(_) | TrainerError::Rollout(_)) => Failure::input(error),
    }
}
