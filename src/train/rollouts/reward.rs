//! How answers are judged.

mod python;

use std::path::{Path, PathBuf};
use std::time::Duration;

use regex::Regex;
use serde::Serialize;
use serde_json::{Value, json};

pub(super) use self::python::check_names;
use self::python::{Python, Said};
use super::played::Played;
use super::program::{Launch, Program, absent_variable};
use crate::config::{ObjectiveConfig, RewardConfig, RewardKind};
use crate::util::json_schema::JsonSchema;
use crate::util::stats::as_f64;

/// Beyond this, squares of rewards and what is summed of them would not be finite in the figures.
pub(super) const MAX_REWARD: f64 = 1e15;

/// Seconds that a program may take for an answer where the recipe says nothing.
const MAX_SECONDS: f64 = 60.0;

/// The row of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PromptRow {
    /// As it is written.
    pub(super) value: Value,
    /// The prompt as the model is asked it, where functions judge: text, or messages.
    pub(super) prompt: Value,
    /// Its tools, where an environment replies.
    pub(super) tools: Option<Value>,
    /// Its column.
    pub(super) prompt_column: String,
}

/// An answer to judge.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judged<'a> {
    /// The row of the prompt.
    pub(super) row: &'a PromptRow,
    /// The answer without the token that ends it.
    pub(super) text: &'a str,
    /// Its tokens, with the one that ends it.
    pub(super) ids: &'a [u32],
    /// Its turns, where it has several; `text` is then the last.
    pub(super) played: Option<&'a Played>,
}

/// The prompt of an answer as functions read it: text or messages.
fn prompt_of(judged: &Judged<'_>) -> Value {
    judged.played.map_or_else(|| judged.row.prompt.clone(), |played| played.prompt.clone().into())
}

/// The answer likewise.
fn completion_of(judged: &Judged<'_>) -> Value {
    match (judged.played, &judged.row.prompt) {
        (Some(played), _) => played.messages.clone().into(),
        (None, Value::Array(_)) => json!([{"role": "assistant", "content": judged.text}]),
        _ => judged.text.into(),
    }
}

/// How far training is when answers are judged, as TRL's functions read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct JudgeState {
    /// Number of finished steps.
    pub global_step: u64,
    /// Number of steps in all.
    pub max_steps: u64,
    /// Passes over the training rows so far.
    pub epoch: f64,
}

/// Why answers could not be judged, and at which of them that was seen.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failure {
    pub(super) index: Option<usize>,
    pub(super) reason: String,
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self { index: None, reason }
    }
}

/// What each answer got; `None` where it is not judged.
pub(super) type ByAnswer = Vec<Option<f64>>;

/// What answers got of one rule or function, its factor not counted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scores {
    pub(super) name: String,
    pub(super) weight: f64,
    pub(super) by_answer: ByAnswer,
}

/// One way to judge answers.
#[derive(Debug)]
pub(super) struct Reward {
    config: RewardConfig,
    pattern: Option<Regex>,
    /// Of "json", where there is one.
    schema: Option<JsonSchema>,
    /// Most tokens of an answer.
    max_tokens: usize,
    /// Of "command", once it was needed.
    program: Option<Program>,
    /// Of "python", once it was started.
    python: Option<Python>,
}

impl Reward {
    /// # Errors
    /// A schema that cannot be read; a program that is not there.
    pub(super) fn all(objective: &ObjectiveConfig) -> Result<Vec<Self>, String> {
        let schema = |path: &PathBuf| {
            JsonSchema::open(path)
                .map_err(|reason| format!("`objective.reward`, `schema` = {}: {reason}", path.display()))
        };
        let reward = |config: &RewardConfig| {
            let program = match absent_program(&config.command) {
                Some(absent) => Err(format!("`command`: there is no {absent}")),
                None if config.kind == Some(RewardKind::Command) => absent_variable(&config.env).map_or(Ok(()), Err),
                None => python::check(config),
            };
            program.map_err(|reason| format!("`objective.reward`, {reason}"))?;
            Ok(Self {
                pattern: config.regex_pattern.as_ref().and_then(|pattern| Regex::new(pattern).ok()),
                schema: config.schema.as_ref().map(schema).transpose()?,
                max_tokens: objective.max_completion_length,
                program: None,
                python: None,
                config: config.clone(),
            })
        };
        objective.reward.iter().map(reward).collect()
    }

    /// # Errors
    /// A row without what the answers to it are compared with.
    pub(super) fn check(&self, row: &Value) -> Result<(), String> {
        match self.config.kind {
            Some(RewardKind::Exact | RewardKind::Contains | RewardKind::Similarity) => {
                right_answer(&self.config, row).map(drop)
            }
            Some(RewardKind::Number) => right_number(&self.config, row).map(drop),
            _ => Ok(()),
        }
    }

    /// Whether functions judge, which get the prompt as the model is asked it.
    pub(super) fn reads_prompts(&self) -> bool {
        self.config.kind == Some(RewardKind::Python)
    }

    /// Starts what takes a while to start. What it writes to stderr goes to `log`.
    ///
    /// # Errors
    /// A file that cannot be imported.
    pub(super) fn start(&mut self, log: Option<&Path>, is_stopped: &dyn Fn() -> bool) -> Result<(), String> {
        if self.config.kind == Some(RewardKind::Python) && self.python.is_none() {
            self.python = Some(Python::start(&self.config, log, is_stopped)?);
        }
        if self.config.kind == Some(RewardKind::Command) && self.program.is_none() {
            let RewardConfig { command, env, .. } = &self.config;
            let name = command[..command.len().min(2)].join(" ");
            self.program = Some(Program::start(Launch { command, name: &name, env, log })?);
        }
        Ok(())
    }

    /// What all answers of a round get, and what its functions have logged.
    ///
    /// # Errors
    /// A row without the column that an answer is compared with; a program that fails.
    pub(super) fn judge(
        &mut self,
        answers: &[Judged<'_>],
        state: &JudgeState,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<(Vec<Scores>, Said), Failure> {
        let (scores, said) = match &mut self.python {
            Some(python) => python.judge(&self.config, answers, state, is_stopped)?,
            None => {
                let of_one = |(index, judged): (usize, &Judged<'_>)| {
                    self.of(*judged, is_stopped).map_err(|reason| Failure { index: Some(index), reason })
                };
                (vec![answers.iter().enumerate().map(of_one).collect::<Result<_, _>>()?], Said::default())
            }
        };
        let parts = self.config.parts().into_iter().zip(scores);
        let parts = parts.map(|((name, weight), by_answer)| Scores { name: name.to_owned(), weight, by_answer });
        let parts: Vec<Scores> = parts.collect();
        for Scores { weight, by_answer, .. } in &parts {
            let rewards = by_answer.iter().enumerate().filter_map(|(index, score)| Some((index, (*score)? * weight)));
            if let Some((index, reward)) = rewards.into_iter().find(|(_, reward)| reward.abs() > MAX_REWARD) {
                let reason = format!("a reward of {reward:e} is beyond {MAX_REWARD:e}");
                return Err(Failure { index: Some(index), reason });
            }
        }
        Ok((parts, said))
    }

    /// What an answer gets; `None` where it is not judged.
    fn of(&mut self, judged: Judged<'_>, is_stopped: &dyn Fn() -> bool) -> Result<Option<f64>, String> {
        let Self { config, pattern, schema, .. } = self;
        let said = judged.text.trim();
        let one_if = |is_right: bool| Some(f64::from(u8::from(is_right)));
        let reward = match config.kind {
            Some(kind @ (RewardKind::Exact | RewardKind::Contains | RewardKind::Similarity)) => {
                let right = right_answer(config, &judged.row.value)?;
                let same_case = |text: &str| if config.ignore_case { text.to_lowercase() } else { text.to_owned() };
                let (said, right) = (same_case(said), same_case(right.trim()));
                match kind {
                    RewardKind::Exact => one_if(said == right),
                    RewardKind::Contains => one_if(said.contains(&right)),
                    _ => Some(similarity(&said, &right)),
                }
            }
            Some(RewardKind::Number) => {
                let right = right_number(config, &judged.row.value)?;
                one_if(last_number(said).is_some_and(|number| (number - right).abs() <= 1e-9 * right.abs()))
            }
            Some(RewardKind::Regex) => one_if(pattern.as_ref().is_some_and(|pattern| pattern.is_match(judged.text))),
            Some(RewardKind::Json) => {
                let is_right = |value: Value| match schema {
                    Some(schema) => schema.is_satisfied_by(&value),
                    None => value.is_object() || value.is_array(),
                };
                one_if(serde_json::from_str(said).is_ok_and(is_right))
            }
            Some(RewardKind::Length) => {
                let room = as_f64(self.max_tokens.div_ceil(4));
                Some(((as_f64(self.max_tokens) - room - as_f64(judged.ids.len())) / room).clamp(-1.0, 0.0))
            }
            Some(RewardKind::Command) => match &mut self.program {
                Some(program) => said_by(program, config, judged, is_stopped)?,
                None => None,
            },
            Some(RewardKind::Python) | None => None,
        };
        Ok(reward)
    }
}

/// What a program says of an answer.
fn said_by(
    program: &mut Program,
    config: &RewardConfig,
    judged: Judged<'_>,
    is_stopped: &dyn Fn() -> bool,
) -> Result<Option<f64>, String> {
    let mut question = judged.row.value.clone();
    question["completion"] = if judged.played.is_some() { completion_of(&judged) } else { judged.text.into() };
    let patience = Duration::from_secs_f64(config.max_seconds.unwrap_or(MAX_SECONDS));
    let line = program.ask(&question, patience, is_stopped)?;
    match serde_json::from_str(&line) {
        Ok(Value::Null) => Ok(None),
        Ok(Value::Number(number)) => Ok(number.as_f64()),
        _ => Err(format!("{} has written {line:?}, expected a number or null", program.name)),
    }
}

/// The text in the column of what is right.
fn right_answer(config: &RewardConfig, row: &Value) -> Result<String, String> {
    match &row[&config.column] {
        Value::String(text) => Ok(text.clone()),
        value @ (Value::Number(_) | Value::Bool(_)) => Ok(value.to_string()),
        _ => Err(format!(
            "there is no text in `{}`, with which answers are compared\n  hint: `column` in [[objective.reward]] names another",
            config.column
        )),
    }
}

/// The share of the characters of two texts that both have in the same order: 1 where they are equal, 0 where they have none in
/// common. It is `fuzz.ratio` of rapidfuzz, over 100.
fn similarity(one: &str, other: &str) -> f64 {
    let [one, other] = [one, other].map(|text| text.chars().collect::<Vec<_>>());
    if one.is_empty() && other.is_empty() {
        return 1.0;
    }
    // Lengths of the longest common subsequence of what was seen of `one` and of each start of `other`.
    let mut lengths = vec![0; other.len() + 1];
    for character in &one {
        let mut diagonal = 0;
        for (at, also) in other.iter().enumerate() {
            let above = lengths[at + 1];
            lengths[at + 1] = if character == also { diagonal + 1 } else { above.max(lengths[at]) };
            diagonal = above;
        }
    }
    2.0 * as_f64(lengths[other.len()]) / as_f64(one.len() + other.len())
}

/// The last number in the column of what is right.
fn right_number(config: &RewardConfig, row: &Value) -> Result<f64, String> {
    last_number(&right_answer(config, row)?).ok_or_else(|| format!("`{}` has no number", config.column))
}

/// The last number of a text; commas between its digits are left out.
fn last_number(text: &str) -> Option<f64> {
    let is_part = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | '-');
    let words = text.split(|c: char| !is_part(c)).map(|word| word.replace(',', ""));
    words.rev().find_map(|word| word.trim_end_matches(['.', '-']).parse().ok())
}

/// The part of a command that is not there: its program, or the script that an interpreter is to run.
pub(super) fn absent_program(command: &[String]) -> Option<&str> {
    let program = command.first()?;
    let name = Path::new(program).file_name()?.to_str()?;
    let script = command.get(1).filter(|script| name.starts_with("python") && script.ends_with(".py"));
    let is_found = match std::env::var_os("PATH") {
        _ if program.contains('/') => Path::new(program).is_file(),
        Some(folders) => std::env::split_paths(&folders).any(|folder| folder.join(program).is_file()),
        None => true,
    };
    let script = script.filter(|script| !Path::new(script).is_file());
    if is_found { script.map(String::as_str) } else { Some(program) }
}

#[cfg(test)]
mod tests;
