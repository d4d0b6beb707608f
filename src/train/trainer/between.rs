//! What happens between steps: evaluations, samples, checkpoints.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::{Trainer, TrainerError};
use crate::checkpoint::CheckpointError;
use crate::export::{adapter_weights, write_adapter};
use crate::generate::Generator;
use crate::metrics::{EvalMetrics, Outcome, Sample};
use crate::train::eval::evaluate;
use crate::train::laps::Part;
use crate::train::step::StepState;

impl Trainer<'_> {
    /// Measures the evaluation loss and samples text. `false` where somebody wants to stop: then nothing happened.
    pub(super) fn evaluate(&mut self) -> Result<bool, TrainerError> {
        self.laps.lap(Part::Other);
        let eval_start = Instant::now();
        let epoch = self.state.epochs();
        let step = self.state.step;
        let mut metrics = None;
        if self.around.data.num_eval_rows() > 0 {
            let (micro_batch_size, max_batches) = (self.plan.train.micro_batch_size, self.plan.eval.max_batches);
            let stop = self.around.stop;
            let batches = self.around.data.eval_batches(micro_batch_size, max_batches)?.until(|| stop.requested());
            let num_batches = self.around.data.num_eval_batches(micro_batch_size, max_batches);
            let progress = |done| self.around.sinks.evaluating(done, num_batches);
            let Some(total) = evaluate(&self.step, batches, self.around.stop, progress)? else { return Ok(false) };
            metrics = total.mean().map(|eval_loss| EvalMetrics {
                step,
                epoch,
                eval_loss,
                eval_perplexity: eval_loss.exp(),
                eval_target_tokens: total.target_tokens,
                eval_seconds: eval_start.elapsed().as_secs_f64(),
            });
            if metrics.is_none() {
                self.around.sinks.warn(&format!(
                    "step {step}: there is no evaluation loss, no token of the evaluation rows carries loss"
                ));
            }
        }
        let Some(samples) = self.sample()? else { return Ok(false) };

        if let Some(EvalMetrics { eval_loss, .. }) = &metrics {
            if !eval_loss.is_finite() {
                self.around.sinks.warn(&format!("step {step}: the evaluation loss is not a finite number"));
            }
            if step == 0 {
                self.state.watchdog.start_at(*eval_loss);
            }
        }
        self.gathered.num_evaluations += 1;
        self.gathered.num_edge_evaluations += u64::from(self.is_at_an_edge());
        self.laps.lap(Part::Evaluation);
        // Written only now that all is there: an interruption leaves no half of an evaluation behind.
        if let Some(metrics) = &metrics {
            self.around.sinks.eval(metrics);
        }
        for (index, sample) in samples.iter().enumerate() {
            self.around.sinks.sample(index, sample);
        }
        self.state.evaluations.record(step, metrics.map(|metrics| metrics.eval_loss));
        self.is_saved = false;
        let _ = self.around.telemetry.window();
        self.laps.lap(Part::Logging);
        Ok(true)
    }

    /// Continues the prompts of `eval.generate`, greedily: written as the rows are, through the chat template where
    /// they are conversations. `None` where somebody wants to stop.
    fn sample(&self) -> Result<Option<Vec<Sample>>, TrainerError> {
        let (data, prompts) = (self.around.data, &self.plan.eval.generate);
        let (model, adapters) = (self.step.model(), self.step.adapters());
        let generator = Generator { model, adapters, tokenizer: data.tokenizer() };
        let texts = generator.samples(prompts, data.template(), || self.stop_requested())?;
        let sample = |(prompt, text): (&String, String)| Sample { step: self.state.step, prompt: prompt.clone(), text };
        Ok(texts.map(|texts| prompts.iter().zip(texts).map(sample).collect()))
    }

    /// Saves a checkpoint of the steps done; returns its folder.
    fn save(&mut self) -> Result<PathBuf, CheckpointError> {
        self.save_in(self.state.watchdog.trouble())
    }

    /// The same, as one that was saved in such trouble.
    fn save_in(&mut self, trouble: Option<String>) -> Result<PathBuf, CheckpointError> {
        self.laps.lap(Part::Other);
        let StepState { moments, counters } = self.step.state();
        self.state.counters = counters;
        let (wall_seconds, figures) = self.whole_run();
        (self.state.totals.wall_seconds, self.state.totals.figures) = (wall_seconds, figures);
        self.state.totals.energy_joules = self.energy_joules(self.around.telemetry.energy_joules());
        self.state.trouble = trouble;
        // What is counted as done must be on the disk before the checkpoint says that it is done.
        self.around.sinks.sync();
        let weights = adapter_weights(self.step.adapters());
        let write = |folder: &Path| {
            write_adapter(folder, &weights, &self.plan.lora, &self.plan.base_model_name_or_path)?;
            self.plan.prompt_form.write(folder)
        };
        self.last_save = Instant::now();
        let saved = self.around.checkpoints.save(self.state.step, write, &moments, &self.state, &self.plan.recipe);
        if let Ok(path) = &saved {
            if self.state.trouble.is_none() {
                self.sound_checkpoint = Some(path.clone());
            }
            self.around.sinks.note(&format!("step {}: checkpoint saved", self.state.step));
            self.is_saved = true;
            self.gathered.num_checkpoints += 1;
        }
        let _ = self.around.telemetry.window();
        self.laps.lap(Part::Checkpoint);
        saved
    }

    /// Saves a checkpoint, then deletes the oldest. Where the disk refuses, training goes on.
    pub(super) fn save_or_warn(&mut self) {
        let warning = match self.save() {
            Ok(path) => self.rotate(&path).err().map(|error| error.to_string()),
            Err(error) => Some(format!(
                "step {}: no checkpoint was saved, older ones are still there, and training goes on: {error}{}",
                self.state.step,
                self.next_save()
            )),
        };
        if let Some(warning) = warning {
            self.around.sinks.warn(&warning);
        }
        self.laps.lap(Part::Checkpoint);
    }

    /// Deletes the oldest, but not the newest one that was saved while nothing was wrong: while a run goes wrong, it is what
    /// can be gone on from.
    fn rotate(&self, newest: &Path) -> Result<(), CheckpointError> {
        let keep = [Some(newest), self.sound_checkpoint.as_deref()];
        self.around.checkpoints.rotate(&keep.into_iter().flatten().collect::<Vec<_>>())
    }

    /// Saves where it can be done without deleting an older checkpoint, which may be a better one.
    pub(super) fn save_beside_the_others(&mut self) {
        let trouble = self.state.watchdog.trouble();
        // Whoever goes on from here wants to see whether it has got better.
        self.state.watchdog.forgive();
        if let Err(error) = self.save_in(trouble) {
            self.around.sinks.warn(&format!("step {}: no checkpoint was saved: {error}", self.state.step));
        }
    }

    fn next_save(&self) -> String {
        let checkpoint = &self.plan.checkpoint;
        let next = checkpoint.save_steps.map(|every| (self.state.step / every + 1) * every);
        let next = next.filter(|next| *next <= self.plan.schedule.total_steps());
        let next = next.map(|next| format!("after step {next}"));
        let later = checkpoint.save_seconds().map(|wait| format!("in {} minutes", wait / 60.0));
        let times: Vec<String> = next.into_iter().chain(later).collect();
        if times.is_empty() { String::new() } else { format!("\n  hint: it is tried again {}", times.join(" or ")) }
    }

    /// Saves what a resumed run needs, unless it is there.
    pub(super) fn interrupt(&mut self) -> Result<Outcome, TrainerError> {
        if self.is_saved {
            return Ok(Outcome::Interrupted);
        }
        self.around.sinks.note("stopping; a checkpoint is being saved");
        match self.save() {
            Ok(path) => {
                if let Err(error) = self.rotate(&path) {
                    self.around.sinks.warn(&error.to_string());
                }
                Ok(Outcome::Interrupted)
            }
            Err(source) => {
                let earlier = self.around.checkpoints.newest_good().ok().and_then(|found| found.checkpoint);
                Err(TrainerError::NotSaved { step: self.state.step, source, earlier })
            }
        }
    }
}
