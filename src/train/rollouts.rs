//! Answers that the model itself writes, and how much better each is than the others to its prompt: what GRPO trains on.

mod reward;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::step::TrainStep;
use crate::config::{ObjectiveConfig, ObjectiveName, ScaleRewards};
use crate::data::batch::{Answer, Batch, RowSource};
use crate::data::dataset::Dataset;
use crate::data::error::DataError;
use crate::generate::{Ending, GenerateError, GenerateOptions, NewText, TextBatch, TextRequest};
use crate::measure::figures::{Mean, ObjectiveFigures};
use crate::measure::metrics::Sample;
use crate::ops::dropout::mix;
use crate::util::stats::as_f64;
use reward::{Judged, Reward};

/// Added to a standard deviation, as in TRL.
const STD_EPSILON: f64 = 1e-4;

/// Why answers could not be made or judged.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    /// A prompt that the model cannot continue.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// An answer that could not be judged.
    #[error("{path}, row {row}: {reason}", path = path.display(), row = row + 1)]
    Reward {
        /// The file.
        path: std::path::PathBuf,
        /// Index of the row.
        row: usize,
        /// Why.
        reason: String,
    },
}

/// Writes answers to prompts, and judges them.
#[derive(Debug)]
pub struct Rollouts {
    objective: ObjectiveConfig,
    max_length: usize,
    seed: u64,
    rewards: Vec<Reward>,
    /// The rows of the prompts.
    rows: BTreeMap<RowSource, Value>,
    /// After how many steps one of the answers is shown.
    sample_steps: u64,
    /// Whether a warning has said that nothing can be learned from some of them.
    has_warned: bool,
}

/// A micro-batch of answers, and the [numbers](ObjectiveFigures::numbers) of their rewards.
pub type Answers = (Batch, Vec<f64>);

/// Answers that a number of steps train on, one or more times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// The micro-batches of each step.
    steps: Vec<Vec<Answers>>,
    /// Number of steps that have trained on them.
    num_done: usize,
    /// How often each is used.
    num_iterations: usize,
}

impl Round {
    /// Divides micro-batches, which come with their numbers, among steps of `per_step`.
    #[must_use]
    pub fn new(answered: Vec<(usize, Answers)>, per_step: usize, num_iterations: usize) -> Self {
        let answered: Vec<_> = answered.into_iter().map(|(_, answers)| answers).collect();
        let steps = answered.chunks(per_step.max(1)).map(<[Answers]>::to_vec).collect();
        Self { steps, num_done: 0, num_iterations }
    }

    /// The micro-batches of the next step, and what is reported of them.
    #[must_use]
    pub fn next_step(&self) -> (Vec<Batch>, ObjectiveFigures) {
        let step = &self.steps[self.num_done % self.steps.len()];
        let mut sum = ObjectiveFigures::default();
        step.iter().for_each(|(_, figures)| sum += ObjectiveFigures::of_numbers(figures));
        (step.iter().map(|(batch, _)| batch.clone()).collect(), sum)
    }

    /// What is left after that step.
    #[must_use]
    pub fn after_step(self) -> Option<Self> {
        let num_done = self.num_done + 1;
        (num_done < self.steps.len() * self.num_iterations).then_some(Self { num_done, ..self })
    }
}

/// Answers to the prompts of a micro-batch.
#[derive(Debug)]
pub struct Answered {
    /// Prompts with their answers, which carry loss.
    pub batch: Batch,
    /// Rewards and lengths.
    pub figures: ObjectiveFigures,
    /// The first answer, for people.
    pub sample: Option<Sample>,
}

/// What a micro-batch is answered for. Its number, in the run or in an evaluation, decides the draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// To be trained on.
    Training(u64),
    /// To see what the model has learned.
    Evaluation(u64),
}

impl Draw {
    fn is_for_training(self) -> bool {
        matches!(self, Self::Training(_))
    }
}

/// An answer in the making.
#[derive(Clone, Debug, Default)]
struct WrittenAnswer {
    ids: Vec<u32>,
    text: String,
    ending: Option<Ending>,
}

impl Rollouts {
    /// Reads the rows of the prompts again, in which the rewards find what is right; `None` where the model answers none.
    ///
    /// # Errors
    /// A file that has changed; a row in which a reward does not find it; a schema that cannot be read.
    pub fn open(
        objective: &ObjectiveConfig,
        data: &Dataset,
        max_length: usize,
        seed: u64,
    ) -> Result<Option<Self>, DataError> {
        if objective.name != ObjectiveName::Grpo {
            return Ok(None);
        }
        let rewards = Reward::all(objective).map_err(DataError::Config)?;
        let rows = data.values(|row| rewards.iter().try_for_each(|reward| reward.check(row)))?;
        let objective = objective.clone();
        Ok(Some(Self { objective, max_length, seed, rewards, rows, sample_steps: 1, has_warned: false }))
    }

    /// The same with one of the answers shown every so many steps.
    #[must_use]
    pub fn with_sample_steps(self, sample_steps: u64) -> Self {
        Self { sample_steps, ..self }
    }

    /// Whether one of the answers is shown that are for `num_steps` steps after `done`.
    pub(super) fn is_sample_due(&self, done: u64, num_steps: u64) -> bool {
        done == 0 || (done + num_steps) / self.sample_steps > done / self.sample_steps
    }

    /// Whether a step of equal rewards is the first: of a task that is solved, or too hard, every step says so in its figures.
    pub(super) fn warns_of_equal_rewards(&mut self) -> bool {
        !std::mem::replace(&mut self.has_warned, true)
    }

    /// How many micro-batches of prompts are answered together where a step has `per_step`, and how often each is used.
    #[must_use]
    pub fn size(&self, per_step: usize) -> (usize, usize) {
        (self.objective.steps_per_generation.unwrap_or(per_step), self.objective.num_iterations)
    }

    fn num_answers(&self, draw: Draw) -> usize {
        match draw {
            Draw::Training(_) => self.objective.num_generations,
            Draw::Evaluation(_) => self.objective.num_generations_eval.unwrap_or(self.objective.num_generations),
        }
    }

    /// Answers the prompts of a micro-batch with the adapters as they are. `None` where it was stopped.
    ///
    /// # Errors
    /// A prompt that cannot be continued; an answer that cannot be judged.
    pub fn answer(
        &mut self,
        step: &TrainStep,
        data: &Dataset,
        prompts: &Batch,
        draw: Draw,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Answered>, RolloutError> {
        let Some(written) = self.write(step, data, prompts, draw, is_stopped)? else { return Ok(None) };
        let size = self.num_answers(draw);
        let (mut rewards, mut batch) = (Vec::new(), Batch::default());
        let mut figures = ObjectiveFigures::default();
        for (written, source) in written.chunks(size).zip(&prompts.sources) {
            for written in written {
                let reward = self.reward(written, *source, data);
                // A program gets the signal, too.
                if is_stopped() {
                    return Ok(None);
                }
                rewards.push(reward?);
                figures.completion_length += Mean::of(as_f64(written.ids.len()));
                figures.clipped_ratio += Mean::of(f64::from(u8::from(written.is_clipped())));
            }
        }
        let advantages = advantages(&rewards, size, self.objective.scale_rewards, &mut figures);
        for (index, (written, advantage)) in written.iter().zip(advantages).enumerate() {
            let (document, source) = (prompts.documents[index / size], prompts.sources[index / size]);
            let prompt = &prompts.input_ids[document.start..][..document.len];
            let ids = [prompt, &written.ids].concat();
            let is_masked = self.objective.mask_truncated_completions && written.is_clipped();
            let carries_loss: Vec<bool> = (0..ids.len()).map(|at| at >= prompt.len() && !is_masked).collect();
            batch.push(source, &ids, &carries_loss);
            batch.row_lengths.push(ids.len());
            #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
            let advantage = advantage as f32;
            batch.answers.push(Answer { is_good: advantage > 0.0, prompt_targets: 0, advantage, margin: 0.0 });
        }
        if self.objective.reuses_answers() && draw.is_for_training() {
            batch.written = step.log_probabilities(&batch);
        }
        // The first answer that was judged.
        let first = rewards.iter().take(size).position(Option::is_some).unwrap_or(0);
        let sample = prompts.documents.first().zip(written.get(first)).map(|(document, written)| {
            let prompt = &prompts.input_ids[document.start..][..document.len];
            // What a tokenizer cannot decode it has not encoded.
            let prompt = data.tokenizer().decode(prompt, true).unwrap_or_default();
            let reward = rewards.get(first).copied().flatten();
            Sample { prompt, text: written.text.clone(), reward, ..Sample::default() }
        });
        Ok(Some(Answered { batch, figures, sample }))
    }

    /// Writes the answers, those to one prompt after another.
    fn write(
        &self,
        step: &TrainStep,
        data: &Dataset,
        prompts: &Batch,
        draw: Draw,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<WrittenAnswer>>, GenerateError> {
        let size = self.num_answers(draw);
        let (adapters, number) = match draw {
            Draw::Training(number) => (step.trained_adapters(), number),
            // From the other end: no answer is drawn as one in training.
            Draw::Evaluation(number) => (step.adapters(), u64::MAX - number),
        };
        let mut written = vec![WrittenAnswer::default(); prompts.documents.len() * size];
        let mut on_text = |id: u64, new: NewText| {
            if let Some(written) = usize::try_from(id).ok().and_then(|id| written.get_mut(id)) {
                written.ids.extend(new.token.or(new.end_token));
                written.text.push_str(&new.text);
                written.ending = new.ending;
            }
            ControlFlow::Continue(())
        };
        // The answers to a prompt share what the model has computed of it.
        let mut texts = TextBatch::new(step.model(), data.tokenizer()).of_equal_starts();
        let stops = data.stops();
        let mut next = (0..prompts.documents.len() * size).peekable();
        while next.peek().is_some() || !texts.is_empty() {
            while let Some(index) = next.next_if(|_| texts.has_room()) {
                let document = prompts.documents[index / size];
                let room = self.max_length.saturating_sub(document.len).max(1);
                let seed = mix(self.seed ^ mix(number) ^ mix(index as u64 + 1));
                let options = GenerateOptions {
                    max_new_tokens: self.objective.max_completion_length.min(room),
                    temperature: self.objective.temperature,
                    top_p: self.objective.top_p,
                    top_k: self.objective.top_k,
                    min_p: self.objective.min_p,
                    seed,
                };
                let prompt_ids = prompts.input_ids[document.start..][..document.len].to_vec();
                texts.add(index as u64, TextRequest::new(prompt_ids, adapters, options, &stops), &mut on_text)?;
            }
            if is_stopped() {
                return Ok(None);
            }
            texts.step(&mut on_text)?;
        }
        Ok(Some(written))
    }

    /// The sum of all rewards of an answer; `None` where none of them judges it.
    fn reward(
        &mut self,
        written: &WrittenAnswer,
        source: RowSource,
        data: &Dataset,
    ) -> Result<Option<f64>, RolloutError> {
        let row = self.rows.get(&source).unwrap_or(&Value::Null);
        let judged = Judged { row, text: &written.text, num_tokens: written.ids.len() };
        let mut sum = None;
        for reward in &mut self.rewards {
            let reward = reward.of(judged).map_err(|reason| RolloutError::Reward {
                path: data.files()[source.file].path.clone(),
                row: source.row,
                reason,
            })?;
            sum = reward.map(|reward| sum.unwrap_or(0.0) + reward).or(sum);
        }
        Ok(sum)
    }
}

impl WrittenAnswer {
    /// Whether it did not end by itself.
    fn is_clipped(&self) -> bool {
        self.ending != Some(Ending::EndOfText)
    }
}

/// By how much each reward is above the mean of its group, over a standard deviation; 0 where there is no reward.
fn advantages(
    rewards: &[Option<f64>],
    group_size: usize,
    scale: ScaleRewards,
    figures: &mut ObjectiveFigures,
) -> Vec<f64> {
    let spread = |rewards: &[f64]| {
        let mean = rewards.iter().sum::<f64>() / as_f64(rewards.len().max(1));
        let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        (mean, (squares / as_f64(rewards.len().max(2) - 1)).sqrt())
    };
    let all: Vec<f64> = rewards.iter().flatten().copied().collect();
    let (_, of_batch) = spread(&all);
    let mut advantages = Vec::with_capacity(rewards.len());
    for group in rewards.chunks(group_size) {
        let judged: Vec<f64> = group.iter().flatten().copied().collect();
        let (mean, deviation) = spread(&judged);
        judged.iter().for_each(|reward| figures.reward += Mean::of(*reward));
        figures.reward_std += Mean::of(deviation);
        figures.frac_reward_zero_std += Mean::of(f64::from(u8::from(deviation < 1e-12)));
        let divisor = match scale {
            ScaleRewards::Group => deviation + STD_EPSILON,
            ScaleRewards::Batch => of_batch + STD_EPSILON,
            ScaleRewards::None => 1.0,
        };
        // What rounding leaves of equal rewards is no advantage.
        let above = |reward: f64| if deviation < 1e-12 { 0.0 } else { (reward - mean) / divisor };
        advantages.extend(group.iter().map(|reward| reward.map_or(0.0, above)));
    }
    advantages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advantages_are_those_of_trl() {
        let rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5].map(Some);
        let of = |scale: ScaleRewards| {
            let mut figures = ObjectiveFigures::default();
            (advantages(&rewards, 4, scale, &mut figures), figures)
        };
        // The deviation of 1, 0, 0, 1 is the root of 1/3; of all eight the root of 1/7.
        let close = |found: &[f64], divisor: f64| {
            let expected = [0.5, -0.5, -0.5, 0.5, 0.0, 0.0, 0.0, 0.0].map(|reward| reward / divisor);
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} {expected:?}");
        };
        let (group, figures) = of(ScaleRewards::Group);
        close(&group, (1.0_f64 / 3.0).sqrt() + 1e-4);
        close(&of(ScaleRewards::Batch).0, (1.0_f64 / 7.0).sqrt() + 1e-4);
        close(&of(ScaleRewards::None).0, 1.0);
        let means = [figures.reward, figures.frac_reward_zero_std].map(|mean| mean.value().unwrap());
        assert!((means[0] - 0.5).abs() < 1e-12 && (means[1] - 0.5).abs() < 1e-12);
        let found = advantages(&[Some(1.0), None, Some(0.0)], 3, ScaleRewards::None, &mut ObjectiveFigures::default());
        assert_eq!(found, [0.5, 0.0, -0.5]);
    }
}
