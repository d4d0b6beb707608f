//! The score of `[eval.task]`: how often the model's answers equal those of the evaluation rows. Greedy and without
//! dropout, so that the same model has the same score; nothing of the training changes.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::answers::AnswerComparison;
use super::ranks::Ranks;
use super::step::TrainStep;
use crate::config::{Metric, TaskConfig};
use crate::data::batch::Batch;
use crate::data::dataset::{Asking, Dataset, Question};
use crate::data::error::DataError;
use crate::data::tokenizer::Tokenizer;
use crate::generate::{GenerateError, GenerateOptions, NewText, TextBatch, TextRequest};
use crate::images::Images;
use crate::schema::Choice;
use crate::util::stats::{as_f64, as_u64};
use crate::util::text::counted;

pub mod answers;

/// A task with its rows, the same ones at every evaluation.
#[derive(Debug)]
pub struct Task {
    config: TaskConfig,
    rows: TaskRows,
}

/// What is asked of the model, a row each.
#[derive(Debug)]
enum TaskRows {
    /// Prompts to answer.
    Prompts(Vec<Vec<u32>>, Answers),
    Choices(Vec<Choices>),
    /// Rows as in training.
    Tokens(Vec<Batch>),
}

/// What makes tokens of texts, and of their images.
type Reads<'a> = (&'a Tokenizer, Option<&'a Images>);

/// What is right of the texts that the model writes.
#[derive(Debug)]
enum Answers {
    /// The same part as in the row's answer.
    Same(Box<AnswerComparison>, Vec<String>),
    Json,
}

/// The choices of a row.
#[derive(Debug)]
struct Choices {
    /// The prompt with each of them, whose tokens are the targets.
    texts: Vec<Batch>,
    /// Lengths in characters.
    lengths: Vec<usize>,
    right: usize,
}

/// How good the model is at a task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// From 0 to 1.
    pub score: f64,
    /// Of multiple choice: the same with likelihoods by the length of the choice, `acc_norm` of lm-evaluation-harness.
    pub score_norm: Option<f64>,
    /// Rows that were scored.
    pub num_rows: usize,
    /// Whether these are all rows, rather than those before `max_seconds`.
    pub is_complete: bool,
    /// What the model answered and what was expected, by row; empty for tokens.
    pub answers: Vec<Value>,
}

/// Right answers of some rows, and all.
#[derive(Clone, Debug, Default)]
pub struct Count {
    right: usize,
    right_norm: usize,
    all: usize,
    num_rows: usize,
    /// By the number of the row.
    answers: Vec<(usize, Value)>,
}

impl Count {
    fn add(&mut self, right: usize, all: usize) {
        self.right += right;
        self.all += all;
        self.num_rows += 1;
    }

    /// Those of all ranks.
    #[must_use]
    pub fn of_all(self, ranks: &mut dyn Ranks) -> Self {
        if ranks.size() == 1 {
            return self;
        }
        let mut figures = [self.right, self.right_norm, self.all, self.num_rows].map(as_f64);
        ranks.sum(&mut [], &mut figures);
        let [right, right_norm, all, num_rows] = figures.map(|figure| usize::try_from(as_u64(figure)).unwrap_or(0));
        let own = serde_json::to_vec(&self.answers).unwrap_or_default();
        let read = |bytes: Vec<u8>| serde_json::from_slice::<Vec<(usize, Value)>>(&bytes).unwrap_or_default();
        let mut answers: Vec<_> = ranks.gather_bytes(&own).into_iter().flat_map(read).collect();
        answers.sort_by_key(|(row, _)| *row);
        Self { right, right_norm, all, num_rows, answers }
    }
}

impl Task {
    /// Reads the rows of a task; `None` where the recipe has no task or there are no evaluation rows.
    ///
    /// # Errors
    /// A row that the task cannot use.
    pub fn open(config: &TaskConfig, data: &Dataset) -> Result<Option<Self>, DataError> {
        let (Some(metric), true) = (config.metric, data.num_eval_rows() > 0) else { return Ok(None) };
        let asking = Asking {
            max_rows: config.rows,
            prompt: config.prompt.as_deref(),
            num_fewshot: config.num_fewshot,
            needs_choices: metric == Metric::MultipleChoice,
        };
        let reads = (data.tokenizer(), data.images().map(Arc::as_ref));
        let (tokenizer, images) = reads;
        let rows = match metric {
            Metric::ExactMatch => {
                let comparison = AnswerComparison::new(config).map_err(|error| DataError::Config(error.to_string()))?;
                let rows = data.questions(&asking, |question| comparison.question(&question, reads))?;
                let (prompts, answers) = rows.into_iter().unzip();
                TaskRows::Prompts(prompts, Answers::Same(Box::new(comparison), answers))
            }
            Metric::Json => {
                let ids =
                    |question: Question| question.prompt_ids(tokenizer, images).map_err(|error| error.to_string());
                TaskRows::Prompts(data.questions(&asking, ids)?, Answers::Json)
            }
            Metric::MultipleChoice => {
                TaskRows::Choices(data.questions(&asking, |question| Choices::new(&question, reads))?)
            }
            Metric::TokenAccuracy => TaskRows::Tokens(data.first_eval_rows(config.rows)?),
        };
        Ok(Some(Self { config: config.clone(), rows }))
    }

    fn num_rows(&self) -> usize {
        match &self.rows {
            TaskRows::Prompts(prompts, _) => prompts.len(),
            TaskRows::Choices(rows) => rows.len(),
            TaskRows::Tokens(rows) => rows.len(),
        }
    }

    /// What the score counts, and on how many rows.
    #[must_use]
    pub fn about(&self) -> String {
        format!("{} on {}", self.config.metric.map_or("", Metric::word), counted(self.num_rows(), "row"))
    }

    /// The score of what was right.
    #[must_use]
    pub fn score(&self, count: Count) -> Score {
        let share = |right: usize| as_f64(right) / as_f64(count.all.max(1));
        Score {
            score: share(count.right),
            score_norm: matches!(self.rows, TaskRows::Choices(_)).then(|| share(count.right_norm)),
            num_rows: count.num_rows,
            is_complete: count.num_rows == self.num_rows(),
            answers: count.answers.into_iter().map(|(_, answer)| answer).collect(),
        }
    }

    /// What is right of this rank's rows, which are dealt out in turn; `None` where it was stopped. `progress` gets the number of rows
    /// that were begun and of all of these.
    ///
    /// # Errors
    /// A prompt that the model cannot continue.
    pub fn count(
        &self,
        step: &TrainStep,
        data: &Dataset,
        is_stopped: impl Fn() -> bool,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Option<Count>, GenerateError> {
        let (start, limit) = (Instant::now(), Duration::from_secs(self.config.max_seconds));
        // The first row is scored in any case.
        let mut may_continue = |done: usize, all: usize| {
            progress(done, all);
            !is_stopped() && (done == 0 || start.elapsed() < limit)
        };
        let (mut count, (rank, num_ranks)) = (Count::default(), step.rank());
        let own: Vec<usize> = (rank..self.num_rows()).step_by(num_ranks).collect();
        if let TaskRows::Prompts(prompts, answers) = &self.rows {
            let prompts: Vec<&[u32]> = own.iter().map(|row| &*prompts[*row]).collect();
            let texts = self.texts(&prompts, step, data, &is_stopped, may_continue)?;
            for (row, text) in own.into_iter().zip(texts) {
                let (is_right, answer) = answers.judge(row, &text);
                count.add(usize::from(is_right), 1);
                count.answers.push((row, answer));
            }
            return Ok((!is_stopped()).then_some(count));
        }
        for row in &own {
            if !may_continue(count.num_rows, own.len()) {
                break;
            }
            match &self.rows {
                TaskRows::Choices(rows) => {
                    let ([is_right, is_right_norm], answer) = rows[*row].judge(step);
                    count.add(usize::from(is_right), 1);
                    count.right_norm += usize::from(is_right_norm);
                    count.answers.push((*row, answer));
                }
                TaskRows::Tokens(rows) => count.add(step.num_right_tokens(&rows[*row]), rows[*row].num_target_tokens()),
                TaskRows::Prompts(..) => {}
            }
        }
        Ok((!is_stopped()).then_some(count))
    }

    /// What the model writes after the first prompts, those that were begun while `may_continue`.
    fn texts(
        &self,
        prompts: &[&[u32]],
        step: &TrainStep,
        data: &Dataset,
        is_stopped: &impl Fn() -> bool,
        mut may_continue: impl FnMut(usize, usize) -> bool,
    ) -> Result<Vec<String>, GenerateError> {
        let TaskConfig { max_new_tokens, stop, num_fewshot, prompt, .. } = &self.config;
        let stops = data.stops();
        // A prompt of plain text goes through no template.
        let of_template = if prompt.is_some() { &[] } else { &stops.texts[..] };
        let stop = [&stop[..], of_template].concat();
        let mut texts: Vec<String> = Vec::new();
        let mut batch = TextBatch::new(step.model(), data.tokenizer());
        if *num_fewshot > 0 {
            batch = batch.of_equal_starts();
        }
        while !is_stopped() {
            let next = prompts.get(texts.len()).filter(|_| batch.has_room());
            let next = next.filter(|_| may_continue(texts.len(), prompts.len())).map(|prompt_ids| {
                let options = GenerateOptions { max_new_tokens: *max_new_tokens, ..GenerateOptions::default() };
                let request = TextRequest::new(prompt_ids.to_vec(), step.adapters(), options, &stops);
                TextRequest { stop: stop.clone(), ..request }
            });
            let id = texts.len() as u64;
            texts.extend(next.is_some().then(String::new));
            let mut take = |id: u64, new: NewText| {
                texts[usize::try_from(id).unwrap_or(usize::MAX)].push_str(&new.text);
                ControlFlow::Continue(())
            };
            match next {
                Some(request) => batch.add(id, request, &mut take)?,
                None if batch.is_empty() => break,
                None => batch.step(&mut take)?,
            }
        }
        Ok(texts)
    }
}

impl AnswerComparison {
    /// The prompt of a question, and the part of its answer that is compared.
    fn question(&self, question: &Question, (tokenizer, images): Reads<'_>) -> Result<(Vec<u32>, String), String> {
        let part = self.part_of(&question.answer).ok_or_else(|| {
            let start: String = question.answer.chars().rev().take(60).collect::<Vec<_>>().into_iter().rev().collect();
            format!("`eval.task.regex_pattern` finds nothing in its answer, which ends with {start:?}")
        })?;
        Ok((question.prompt_ids(tokenizer, images).map_err(|error| error.to_string())?, part))
    }
}

impl Answers {
    /// Whether the text for a row is right, and what was compared.
    fn judge(&self, row: usize, text: &str) -> (bool, Value) {
        match self {
            Self::Same(comparison, answers) => {
                let (found, expected) = (comparison.part_of(text), &answers[row]);
                let is_right = found.as_ref() == Some(expected);
                (is_right, json!({"text": text, "found": found, "expected": expected, "is_right": is_right}))
            }
            Self::Json => {
                let is_right = serde_json::from_str::<Value>(text).is_ok();
                (is_right, json!({"text": text, "is_right": is_right}))
            }
        }
    }
}

impl Choices {
    fn new(question: &Question, (tokenizer, images): Reads<'_>) -> Result<Self, String> {
        let right = question
            .right_choice()
            .ok_or_else(|| format!("its answer {:?} is none of its choices {:?}", question.answer, question.choices))?;
        let texts = question.choices.iter().map(|choice| question.answered(choice, tokenizer, images));
        let texts = texts.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        Ok(Self { texts, lengths: question.choices.iter().map(|choice| choice.chars().count()).collect(), right })
    }

    /// Whether the right choice is the likeliest, and whether it is by the likelihood over its length.
    fn judge(&self, step: &TrainStep) -> ([bool; 2], Value) {
        let likelihoods: Vec<f64> = self.texts.iter().map(|text| step.log_likelihood(text)).collect();
        let by_length =
            likelihoods.iter().zip(&self.lengths).map(|(likelihood, length)| likelihood / as_f64(*length as u64));
        // Of equal ones the first, as numpy's argmax.
        let likeliest = |likelihoods: &[f64]| {
            let most = likelihoods.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            likelihoods.iter().position(|likelihood| *likelihood == most)
        };
        let is_right =
            [likeliest(&likelihoods), likeliest(&by_length.collect::<Vec<_>>())].map(|at| at == Some(self.right));
        (is_right, json!({"loglikelihoods": likelihoods, "expected": self.right, "is_right": is_right[0]}))
    }
}
