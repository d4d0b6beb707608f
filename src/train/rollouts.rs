//! Answers that the model itself writes, and how much better each is than the others to its prompt: what GRPO trains on.

mod advantages;
mod environment;
mod episodes;
mod judging;
mod played;
mod program;
mod reward;
mod round;
mod writing;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::Value;

use super::step::TrainStep;
use crate::config::{ObjectiveConfig, ObjectiveName};
use crate::data::batch::{Answer, Batch, RowSource};
use crate::data::dataset::Dataset;
use crate::data::error::DataError;
use crate::data::formats::{Prompt, RowFormat, Sample as RowSample};
use crate::data::template::ChatTemplate;
use crate::generate::GenerateError;
use crate::measure::figures::{Mean, ObjectiveFigures, Rollout, Spread};
use crate::measure::metrics::Sample;
use crate::util::stats::as_f64;
use advantages::{Advantages, advantages};
pub use environment::opening::{about_environment, environment_warnings};
use environment::{Environment, opening};
use judging::Judgement;
pub use reward::JudgeState;
use reward::{PromptRow, Reward, Scores};
pub use round::{Answers, LeftOut, Round, StepAnswers, scale_advantages};
use writing::{Written, WrittenAnswer};

/// Where an environment writes what is for people, and its failures are noted: a file beside that of programs that judge.
pub const EPISODES_LOG: &str = "episodes.log";

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
        path: PathBuf,
        /// Index of the row.
        row: usize,
        /// Why.
        reason: String,
    },
    /// What judges answers has failed at none of them.
    #[error("{0}")]
    Judge(String),
}

/// Writes answers to prompts, and judges them.
#[derive(Debug)]
pub struct Rollouts {
    objective: ObjectiveConfig,
    max_length: usize,
    seed: u64,
    rewards: Vec<Reward>,
    /// What replies to answers, where they have several turns.
    environment: Option<Environment>,
    /// The rows of the prompts.
    rows: BTreeMap<RowSource, PromptRow>,
    /// After how many steps one of the answers is shown.
    sample_steps: u64,
    /// Whether a warning has said that nothing can be learned from some of them.
    has_warned: bool,
    /// Whether a warning has said that episodes fail.
    has_failed: bool,
    /// Most answers of a micro-batch that are recorded.
    max_recorded: usize,
    /// Where programs that judge write what is for people.
    log: Option<PathBuf>,
    state: JudgeState,
}

/// Answers to the prompts of a micro-batch.
#[derive(Debug)]
pub struct Answered {
    /// Prompts with their answers, which carry loss.
    pub batch: Batch,
    /// Rewards and lengths.
    pub figures: ObjectiveFigures,
    /// What the answers got of each rule or function, by its name.
    pub rewards: BTreeMap<String, Spread>,
    /// Answers that are not in `batch`.
    pub left_out: Vec<LeftOut>,
    /// What the advantages of a round are still to be divided by the standard deviation of.
    pub of_round: Spread,
    /// The first answer, for people.
    pub sample: Option<Sample>,
    /// Answers for rollouts.jsonl, without their step; of those of the micro-batch `group` counts the prompts, from 0.
    pub rollouts: Vec<Rollout>,
}

/// Answers to micro-batches that were written together.
#[derive(Debug)]
pub struct AnsweredRound {
    /// By micro-batch.
    pub answers: Vec<Answered>,
    /// Means of what functions that judge have logged.
    pub metrics: BTreeMap<String, f64>,
    /// Seconds in which answers were judged.
    pub judge_seconds: f64,
    /// Seconds in which all waited for the environment, where there is one.
    pub environment_seconds: Option<f64>,
    /// That episodes have failed, the first time that some have.
    pub trouble: Option<String>,
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
        let environment = opening::open(objective, data).map_err(DataError::Config)?;
        let template = data.template().filter(|_| environment.is_some() || data.has_images());
        let reads_prompts = environment.is_some() || rewards.iter().any(Reward::reads_prompts);
        let rows = data.values(|format, row| {
            rewards.iter().try_for_each(|reward| reward.check(row))?;
            let (value, prompt_column) = (row.clone(), format.prompt_column().to_owned());
            let (prompt, tools) = if reads_prompts { prompt_of(format, row, template)? } else { Default::default() };
            Ok(PromptRow { value, prompt, tools, prompt_column })
        })?;
        let (objective, state) = (objective.clone(), JudgeState::default());
        let (sample_steps, has_warned, has_failed, max_recorded, log) = (1, false, false, 0, None);
        Ok(Some(Self {
            objective,
            max_length,
            seed,
            rewards,
            environment,
            rows,
            sample_steps,
            has_warned,
            has_failed,
            max_recorded,
            log,
            state,
        }))
    }

    /// The same where programs that judge write what is for people to the end of a file.
    #[must_use]
    pub fn with_log(self, log: PathBuf) -> Self {
        Self { log: Some(log), ..self }
    }

    /// The same where so many answers of a round are recorded.
    #[must_use]
    pub fn with_max_recorded(self, max_recorded: usize) -> Self {
        Self { max_recorded, ..self }
    }

    /// Most answers of a round that are recorded.
    #[must_use]
    pub fn max_recorded(&self) -> usize {
        self.max_recorded
    }

    /// Says how far training is, which functions that judge may ask.
    pub fn set_state(&mut self, state: JudgeState) {
        self.state = state;
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

    /// Whether a step trains on answers that an earlier model wrote.
    #[must_use]
    pub fn reuses_answers(&self) -> bool {
        self.objective.reuses_answers()
    }

    fn num_answers(&self, draw: Draw) -> usize {
        match draw {
            Draw::Training(_) => self.objective.num_generations,
            Draw::Evaluation(_) => self.objective.num_generations_eval.unwrap_or(self.objective.num_generations),
        }
    }

    /// Answers the prompts of micro-batches, all together, with the adapters as they are. `None` where it was stopped.
    ///
    /// # Errors
    /// A prompt that cannot be continued; an answer that cannot be judged.
    pub fn answer(
        &mut self,
        step: &TrainStep,
        data: &Dataset,
        prompts: &[(Draw, Batch)],
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<AnsweredRound>, RolloutError> {
        // What cannot be started is known before the first answer is written.
        let log = self.log.as_deref();
        let started = self.rewards.iter_mut().try_for_each(|reward| reward.start(log, is_stopped));
        let log = log.map(|log| log.with_file_name(EPISODES_LOG));
        let started = started.and_then(|()| match &mut self.environment {
            Some(environment) => environment.start(log.as_deref(), is_stopped),
            None => Ok(()),
        });
        if is_stopped() {
            return Ok(None);
        }
        started.map_err(RolloutError::Judge)?;
        let Some(Written { answers: written, waited }) = self.write(step, data, prompts, is_stopped)? else {
            return Ok(None);
        };
        let trouble = self.trouble(&written)?;
        let start = Instant::now();
        let judged = self.judge(&written, data, is_stopped);
        if is_stopped() {
            return Ok(None);
        }
        let judged = judged?;
        let judge_seconds = start.elapsed().as_secs_f64();
        let (mut first, mut answers) = (0, Vec::new());
        for (draw, prompts) in prompts {
            let all = first..first + prompts.documents.len() * self.num_answers(*draw);
            first = all.end;
            let own = judged.part(all.clone());
            answers.push(self.answered(step, data, (*draw, prompts), &written[all], &own));
        }
        let environment_seconds = waited.map(|waited| waited.as_secs_f64());
        Ok(Some(AnsweredRound { answers, metrics: judged.metrics, judge_seconds, environment_seconds, trouble }))
    }

    /// That episodes have failed, where none has before.
    ///
    /// # Errors
    /// All of them have.
    fn trouble(&mut self, written: &[WrittenAnswer]) -> Result<Option<String>, RolloutError> {
        let failures: Vec<&str> = written.iter().filter_map(WrittenAnswer::failure).collect();
        let Some(last) = failures.last() else { return Ok(None) };
        let (failed, all) = (failures.len(), written.len());
        if failed == all {
            let text = format!(
                "the environment has failed in all of {all} episodes, at last: {last}\n  hint: {EPISODES_LOG} has each"
            );
            return Err(RolloutError::Judge(text));
        }
        let text = format!(
            "{failed} of {all} episodes have failed, such as: {last}; {EPISODES_LOG} has each, and `failed_episodes` their share"
        );
        Ok((!std::mem::replace(&mut self.has_failed, true)).then_some(text))
    }

    /// The answers to a micro-batch, by what they got.
    fn answered(
        &self,
        step: &TrainStep,
        data: &Dataset,
        (draw, prompts): (Draw, &Batch),
        written: &[WrittenAnswer],
        judged: &Judgement,
    ) -> Answered {
        let size = self.num_answers(draw);
        let mut figures = ObjectiveFigures::default();
        for written in written {
            written.played.iter().for_each(|played| played.report(&mut figures));
            if written.failure().is_some() {
                continue;
            }
            let length = Mean::of(as_f64(written.num_drawn()));
            figures.completion_length += length;
            figures.terminated_length += if written.is_clipped() { Mean::default() } else { length };
            figures.clipped_ratio += Mean::of(f64::from(u8::from(written.is_clipped())));
            figures.entropy += written.entropy;
        }
        let rewards: Vec<Option<f64>> = (0..written.len()).map(|index| judged.reward(index)).collect();
        let Advantages { values: advantages, of_round } =
            advantages(&rewards, &judged.scores, size, &self.objective, &mut figures);
        let (mut batch, mut left_out) = (Batch::default(), Vec::new());
        let leaves_out = draw.is_for_training() && self.objective.leaves_out_equal_answers();
        for (index, (written, advantage)) in written.iter().zip(&advantages).enumerate() {
            let prompt = prompt_ids_of(prompts, index / size, written);
            let ids = [prompt, &written.ids].concat();
            let is_masked = self.objective.mask_truncated_completions && written.is_clipped()
                || rewards[index].is_none() && written.failure().is_some();
            if leaves_out && (is_masked || advantage.abs() <= 0.0) {
                let targets = if is_masked { 0 } else { written.num_drawn() };
                left_out.push(LeftOut { targets, tokens: ids.len() });
                continue;
            }
            let is_target = |at: usize| !is_masked && at >= prompt.len() && written.is_drawn(at - prompt.len());
            let carries_loss: Vec<bool> = (0..ids.len()).map(is_target).collect();
            batch.push(written.source, &ids, &carries_loss);
            batch.row_lengths.push(ids.len());
            #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
            let advantage = *advantage as f32;
            batch.answers.push(Answer { is_good: advantage > 0.0, prompt_targets: 0, advantage, margin: 0.0 });
        }
        if self.objective.reuses_answers() && draw.is_for_training() {
            batch.written = step.log_probabilities(&batch);
        }
        let most = if draw.is_for_training() { self.max_recorded } else { 0 };
        let record = |index| Rollout {
            advantage: advantages[index],
            ..recorded(data, prompts, index / size, (&written[index], judged, index))
        };
        let rollouts = (0..written.len().min(most)).map(record).collect();
        // The first answer that was judged.
        let first = rewards.iter().take(size).position(Option::is_some).unwrap_or(0);
        let sample = written.get(first).map(|written| {
            let reward = rewards.get(first).copied().flatten();
            Sample {
                prompt: text_of(data, prompt_ids_of(prompts, 0, written)),
                text: written.text.clone(),
                reward,
                ..Sample::default()
            }
        });
        let spread = |of: &Scores| (of.name.clone(), of.by_answer.iter().flatten().copied().collect());
        let rewards = judged.scores.iter().map(spread).collect();
        Answered { batch, figures, rewards, left_out, of_round, sample, rollouts }
    }
}

/// The prompt of a row as the model is asked it, text or messages, and its tools. With a template it is messages.
fn prompt_of(
    format: &RowFormat,
    row: &Value,
    template: Option<&ChatTemplate>,
) -> Result<(Value, Option<Value>), String> {
    Ok(match format.read(row, template)? {
        RowSample::Prompt(Prompt::Text(text)) => (text.into(), None),
        RowSample::Prompt(Prompt::Chat { messages, tools }) => (messages.into(), tools),
        _ => (Value::Null, None),
    })
}

/// The tokens of the prompt of an answer, which is to prompt `index` of a micro-batch.
fn prompt_ids_of<'a>(prompts: &'a Batch, index: usize, written: &'a WrittenAnswer) -> &'a [u32] {
    let document = prompts.documents[index];
    let of_row = &prompts.input_ids[document.start..][..document.len];
    // An environment may add to it, or have failed before.
    let own = written.played.as_ref().map(|played| &played.prompt_ids[..]).filter(|ids| !ids.is_empty());
    own.unwrap_or(of_row)
}

/// The text of a prompt, without special tokens.
fn text_of(data: &Dataset, prompt: &[u32]) -> String {
    // What a tokenizer cannot decode it has not encoded.
    data.tokenizer().decode(prompt, true).unwrap_or_default()
}

/// What is recorded of an answer, one of those that were judged, to a prompt of a micro-batch.
fn recorded(
    data: &Dataset,
    prompts: &Batch,
    group: usize,
    (written, judged, index): (&WrittenAnswer, &Judgement, usize),
) -> Rollout {
    Rollout {
        file: data.files()[written.source.file].path.display().to_string(),
        row: written.source.row + 1,
        group,
        prompt: text_of(data, prompt_ids_of(prompts, group, written)),
        completion: written.text.clone(),
        tokens: written.ids.len(),
        ending: written.ending_word().into(),
        entropy: written.entropy.value(),
        rewards: judged.scores.iter().map(|of| (of.name.clone(), of.by_answer[index])).collect(),
        reward: judged.reward(index),
        extra: judged.extra.iter().map(|(name, values)| (name.clone(), values[index].clone())).collect(),
        episode: written.played.as_ref().map(|played| played.recorded()),
        ..Rollout::default()
    }
}
