//! Answers that the model itself writes, and how much better each is than the others to its prompt: what GRPO trains on.

mod advantages;
mod program;
mod reward;
mod round;

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::time::Instant;

use serde_json::Value;

use super::step::TrainStep;
use crate::config::{ObjectiveConfig, ObjectiveName};
use crate::data::batch::{Answer, Batch, Document, RowSource};
use crate::data::dataset::Dataset;
use crate::data::error::DataError;
use crate::data::formats::{Prompt, RowFormat, Sample as RowSample};
use crate::generate::{Ending, GenerateError, GenerateOptions, NewText, TextBatch, TextRequest};
use crate::measure::figures::{Mean, ObjectiveFigures, Rollout, Spread};
use crate::measure::metrics::Sample;
use crate::ops::dropout::mix;
use crate::util::stats::as_f64;
use advantages::{Advantages, advantages};
pub use reward::JudgeState;
use reward::{Failure, Judged, PromptRow, Reward, Scores};
pub use round::{Answers, LeftOut, Round, StepAnswers, scale_advantages};

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
    /// The rows of the prompts.
    rows: BTreeMap<RowSource, PromptRow>,
    /// After how many steps one of the answers is shown.
    sample_steps: u64,
    /// Whether a warning has said that nothing can be learned from some of them.
    has_warned: bool,
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

/// What micro-batches that were written together got.
#[derive(Debug, Default)]
struct Judgement {
    scores: Vec<Scores>,
    /// Means of what functions have logged.
    metrics: BTreeMap<String, f64>,
    /// Columns that they have logged, a value for each answer.
    extra: BTreeMap<String, Vec<Value>>,
}

impl Judgement {
    /// That of some of the answers.
    fn part(&self, of: Range<usize>) -> Self {
        let scores = |scores: &Scores| Scores { by_answer: scores.by_answer[of.clone()].to_vec(), ..scores.clone() };
        let column = |(name, values): (&String, &Vec<Value>)| (name.clone(), values[of.clone()].to_vec());
        let (scores, extra) = (self.scores.iter().map(scores).collect(), self.extra.iter().map(column).collect());
        Self { scores, extra, ..Self::default() }
    }

    /// The sum of what an answer got, each times its factor; `None` where nothing judges it.
    fn reward(&self, index: usize) -> Option<f64> {
        let rewards = self.scores.iter().filter_map(|of| Some(of.by_answer[index]? * of.weight));
        rewards.fold(None, |sum, reward| Some(sum.unwrap_or(0.0) + reward))
    }
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
    source: RowSource,
    ids: Vec<u32>,
    text: String,
    ending: Option<Ending>,
    /// Of its tokens.
    entropy: Mean,
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
        let reads_prompts = rewards.iter().any(Reward::reads_prompts);
        let rows = data.values(|format, row| {
            rewards.iter().try_for_each(|reward| reward.check(row))?;
            let (value, prompt_column) = (row.clone(), format.prompt_column().to_owned());
            let prompt = if reads_prompts { prompt_of(format, row)? } else { Value::Null };
            Ok(PromptRow { value, prompt, prompt_column })
        })?;
        let (objective, state) = (objective.clone(), JudgeState::default());
        let (sample_steps, has_warned, max_recorded, log) = (1, false, 0, None);
        Ok(Some(Self {
            objective,
            max_length,
            seed,
            rewards,
            rows,
            sample_steps,
            has_warned,
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
        if is_stopped() {
            return Ok(None);
        }
        started.map_err(RolloutError::Judge)?;
        let Some(written) = self.write(step, data, prompts, is_stopped)? else { return Ok(None) };
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
        Ok(Some(AnsweredRound { answers, metrics: judged.metrics, judge_seconds }))
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
            let length = Mean::of(as_f64(written.ids.len()));
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
            let (document, source) = (prompts.documents[index / size], prompts.sources[index / size]);
            let prompt = &prompts.input_ids[document.start..][..document.len];
            let ids = [prompt, &written.ids].concat();
            let is_masked = self.objective.mask_truncated_completions && written.is_clipped();
            if leaves_out && (is_masked || advantage.abs() <= 0.0) {
                let targets = if is_masked { 0 } else { written.ids.len() };
                left_out.push(LeftOut { targets, tokens: ids.len() });
                continue;
            }
            let carries_loss: Vec<bool> = (0..ids.len()).map(|at| at >= prompt.len() && !is_masked).collect();
            batch.push(source, &ids, &carries_loss);
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
        let sample = prompts.documents.first().zip(written.get(first)).map(|(document, written)| {
            let reward = rewards.get(first).copied().flatten();
            Sample {
                prompt: text_of(data, prompts, *document),
                text: written.text.clone(),
                reward,
                ..Sample::default()
            }
        });
        let spread = |of: &Scores| (of.name.clone(), of.by_answer.iter().flatten().copied().collect());
        let rewards = judged.scores.iter().map(spread).collect();
        Answered { batch, figures, rewards, left_out, of_round, sample, rollouts }
    }

    /// Writes the answers, those to one prompt after another.
    fn write(
        &self,
        step: &TrainStep,
        data: &Dataset,
        prompts: &[(Draw, Batch)],
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<WrittenAnswer>>, GenerateError> {
        let of_prompts = |(draw, prompts): &(Draw, Batch)| {
            let size = self.num_answers(*draw);
            let answer = move |index: usize| (*draw, index, index / size);
            (0..prompts.documents.len() * size).map(answer).collect::<Vec<_>>()
        };
        let asked: Vec<_> =
            prompts.iter().flat_map(|of| of_prompts(of).into_iter().map(move |answer| (&of.1, answer))).collect();
        let source = |(prompts, (.., prompt)): &(&Batch, (Draw, usize, usize))| prompts.sources[*prompt];
        let mut written: Vec<_> =
            asked.iter().map(|asked| WrittenAnswer { source: source(asked), ..WrittenAnswer::default() }).collect();
        let mut on_text = |id: u64, new: NewText| {
            if let Some(written) = usize::try_from(id).ok().and_then(|id| written.get_mut(id)) {
                written.ids.extend(new.token.or(new.end_token));
                written.text.push_str(&new.text);
                written.entropy += new.entropy.map(Mean::of).unwrap_or_default();
                written.ending = new.ending;
            }
            ControlFlow::Continue(())
        };
        // The answers to a prompt share what the model has computed of it. Their memory is a part of the plan.
        let mut texts = TextBatch::new(step.model(), data.tokenizer()).of_equal_starts().within(Some(u64::MAX));
        let stops = data.stops();
        let mut next = (0..).zip(asked).peekable();
        while next.peek().is_some() || !texts.is_empty() {
            while let Some((id, (prompts, (draw, index, prompt)))) = next.next_if(|_| texts.has_room()) {
                let document = prompts.documents[prompt];
                let (adapters, number) = match draw {
                    Draw::Training(number) => (step.trained_adapters(), number),
                    // From the other end: no answer is drawn as one in training.
                    Draw::Evaluation(number) => (step.adapters(), u64::MAX - number),
                };
                let room = self.max_length.saturating_sub(document.len).max(1);
                let options = GenerateOptions {
                    max_new_tokens: self.objective.max_completion_length.min(room),
                    temperature: self.objective.temperature,
                    top_p: self.objective.top_p,
                    top_k: self.objective.top_k,
                    min_p: self.objective.min_p,
                    seed: mix(self.seed ^ mix(number) ^ mix(index as u64 + 1)),
                };
                let prompt_ids = prompts.input_ids[document.start..][..document.len].to_vec();
                texts.add(id, TextRequest::new(prompt_ids, adapters, options, &stops), &mut on_text)?;
            }
            if is_stopped() {
                return Ok(None);
            }
            texts.step(&mut on_text)?;
        }
        Ok(Some(written))
    }

    /// What all rules and functions say of answers.
    fn judge(
        &mut self,
        written: &[WrittenAnswer],
        data: &Dataset,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Judgement, RolloutError> {
        if written.is_empty() {
            return Ok(Judgement::default());
        }
        let none = PromptRow::default();
        let rows = written.iter().map(|written| self.rows.get(&written.source).unwrap_or(&none));
        let judged = |(row, written)| {
            let WrittenAnswer { text, ids, .. }: &WrittenAnswer = written;
            Judged { row, text, ids }
        };
        let judged: Vec<Judged<'_>> = rows.zip(written).map(judged).collect();
        let mut all = Judgement::default();
        for reward in &mut self.rewards {
            let (scores, said) = reward.judge(&judged, &self.state, is_stopped).map_err(|failure| {
                let Failure { index, reason } = failure;
                match index.and_then(|index| written.get(index)).map(|written| written.source) {
                    Some(RowSource { file, row }) => {
                        RolloutError::Reward { path: data.files()[file].path.clone(), row, reason }
                    }
                    None => RolloutError::Judge(reason),
                }
            })?;
            for mut scores in scores {
                let num_equal = all.scores.iter().filter(|other| other.name.split(' ').next() == Some(&scores.name));
                match num_equal.count() {
                    0 => {}
                    before => scores.name.push_str(&format!(" {}", before + 1)),
                }
                all.scores.push(scores);
            }
            all.metrics.extend(said.metrics);
            all.extra.extend(said.extra);
        }
        Ok(all)
    }
}

/// The prompt of a row as the model is asked it: text, or messages.
fn prompt_of(format: &RowFormat, row: &Value) -> Result<Value, String> {
    Ok(match format.read(row, None)? {
        RowSample::Prompt(Prompt::Text(text)) => text.into(),
        RowSample::Prompt(Prompt::Chat { messages, .. }) => messages.into(),
        _ => Value::Null,
    })
}

/// The text of a prompt, without special tokens.
fn text_of(data: &Dataset, prompts: &Batch, document: Document) -> String {
    let prompt = &prompts.input_ids[document.start..][..document.len];
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
        prompt: text_of(data, prompts, prompts.documents[group]),
        completion: written.text.clone(),
        tokens: written.ids.len(),
        ending: if written.is_clipped() { "length" } else { "stop" }.into(),
        entropy: written.entropy.value(),
        rewards: judged.scores.iter().map(|of| (of.name.clone(), of.by_answer[index])).collect(),
        reward: judged.reward(index),
        extra: judged.extra.iter().map(|(name, values)| (name.clone(), values[index].clone())).collect(),
        ..Rollout::default()
    }
}

impl WrittenAnswer {
    /// Whether it did not end by itself.
    fn is_clipped(&self) -> bool {
        self.ending != Some(Ending::EndOfText)
    }
}
