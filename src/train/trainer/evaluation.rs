//! What the loop measures of the model as it is: the loss of the evaluation rows, the score of a task, sample texts.

use std::time::Instant;

use super::{Trainer, TrainerError};
use crate::config::{BestBy, EvalConfig};
use crate::measure::metrics::EvalMetrics;
use crate::train::eval::{eval_loss, figures, samples};
use crate::train::laps::StepPart;
use crate::train::ranks::sums::Summed as _;
use crate::train::task::{Score, Task};

/// When and what is evaluated.
pub struct Evaluator {
    /// Section `[eval]` of the recipe.
    pub config: EvalConfig,
    /// What `[eval.task]` scores.
    pub task: Option<Task>,
    /// What makes an evaluation better than another.
    pub best_by: BestBy,
}

impl Trainer<'_> {
    /// Before the first step if `eval_on_start`, after the last one, where the weights become those of a file, and every `eval_steps`;
    /// never twice after a step.
    pub(super) fn is_evaluation_due(&self) -> bool {
        let (step, eval) = (self.state.step, &self.evaluator.config);
        let every = eval.eval_steps.is_some_and(|every| step.is_multiple_of(every));
        let is_left_out = step == 0 && !eval.eval_on_start;
        let ships = self.shipping.as_ref().is_some_and(|shipping| shipping.first_step == step);
        (every || ships || self.is_at_an_edge()) && !is_left_out && self.state.evaluations.last_step != Some(step)
    }

    /// Whether training is before the run's first step or after its last one.
    fn is_at_an_edge(&self) -> bool {
        self.state.step == 0 || self.state.step >= self.schedule.total_steps()
    }

    /// The score of the task by the rows of all ranks. `None` where the run was asked to stop.
    fn score(&mut self) -> Result<Option<Score>, TrainerError> {
        let Some(task) = &self.evaluator.task else { return Ok(None) };
        let progress = |done, num_rows| self.sinks.evaluating(done, num_rows);
        let count = task.count(&self.step, self.data, || self.stop.requested(), progress);
        let Some(count) = self.agree_on(count.map_err(TrainerError::Task))? else { return Ok(None) };
        let count = count.of_all(self.step.ranks());
        let score = self.evaluator.task.as_ref().map(|task| task.score(count));
        if let Some(Score { num_rows, is_complete: false, .. }) = &score {
            let text = format!("step {}: the score is that of {num_rows} rows", self.state.step);
            self.sinks.warn(&format!("{text}\n  hint: `eval.task.max_seconds` leaves no time for all `rows`"));
        }
        Ok(score)
    }

    /// Measures the evaluation loss and the score, and samples text. `false` where the run was asked to stop: nothing is
    /// recorded.
    pub(super) fn evaluate(&mut self) -> Result<bool, TrainerError> {
        self.recorder.part(StepPart::Other);
        let (eval_start, step, epoch) = (Instant::now(), self.state.step, self.state.epochs());
        let (mut metrics, mut score) = (None, None);
        if self.data.num_eval_rows() > 0 {
            let state = self.judge_state();
            if let Some(rollouts) = &mut self.rollouts {
                rollouts.set_state(state);
            }
            let progress = |done, num_batches| self.sinks.evaluating(done, num_batches);
            let rollouts = self.rollouts.as_mut();
            let total = eval_loss(&self.step, self.data, rollouts, &self.evaluator.config, self.stop, progress);
            let Some(total) = self.agree_on(total.map_err(TrainerError::from))? else { return Ok(false) };
            let total = total.over(self.step.ranks());
            if self.evaluator.task.is_some() {
                score = self.score()?;
                if score.is_none() {
                    return Ok(false);
                }
            }
            metrics = figures((step, epoch), &total, score.as_ref(), eval_start);
            if metrics.is_none() {
                self.sinks.warn(&format!(
                    "step {step}: there is no evaluation loss, no token of the evaluation rows carries loss"
                ));
            }
        }
        let prompts = if self.step.rank().0 == 0 { &self.evaluator.config.generate[..] } else { &[] };
        let samples = samples(step, &self.step, self.data, prompts, || self.stop_requested());
        let Some(samples) = self.agree_on(samples.map_err(TrainerError::from))? else { return Ok(false) };

        if let Some(EvalMetrics { eval_loss, eval_perplexity, .. }) = &metrics {
            let eval_loss = eval_loss.unwrap_or(f64::NAN);
            if !eval_loss.is_finite() {
                self.sinks.warn(&format!("step {step}: the evaluation loss is not a finite number"));
            }
            if step == 0 && eval_perplexity.is_some_and(f64::is_finite) {
                self.state.watchdog.start_at(eval_loss);
            }
        }
        let of_all_rows = score.is_none_or(|score| score.is_complete);
        self.state.evaluations.record(step, metrics.as_ref(), of_all_rows, self.evaluator.best_by);
        self.keep_if_best();
        self.recorder.evaluated(self.is_at_an_edge());
        // Written only when complete, so that an interruption leaves no partial evaluation behind.
        if let Some(metrics) = &metrics {
            self.sinks.eval(metrics);
        }
        for (index, sample) in samples.iter().enumerate() {
            self.sinks.sample(index, sample);
        }
        self.sinks.evaluated(step, eval_start.elapsed().as_secs_f64());
        self.saver.is_saved = false;
        self.recorder.pause(StepPart::Logging);
        Ok(true)
    }

    /// Writes the adapter of an evaluation that was the best so far. That of the first step is the base model's.
    fn keep_if_best(&mut self) {
        let (step, evaluations) = (self.state.step, &self.state.evaluations);
        if step == 0 || evaluations.best_step != Some(step) {
            return;
        }
        if let Err(error) = self.saver.keep_best(&self.step, evaluations) {
            self.sinks.warn(&format!("step {step}: the best adapter was not saved: {error}"));
        }
    }
}
