//! Functions of a Python file that judge answers: a process of its own imports it, and gets a line a round.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use regex::Regex;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::program::{Launch, Program, absent_variable, printable};
use super::{ByAnswer, Failure, JudgeState, Judged, absent_program, completion_of, prompt_of};
use crate::config::RewardConfig;
use crate::schema::closest;

/// What the process runs.
const HELPER: &str = concat!(include_str!("../helper.py"), include_str!("rewards.py"));

/// Seconds for a round where the recipe says nothing.
const MAX_SECONDS: f64 = 600.0;

/// What is wrong that can be known without importing the file.
pub(super) fn check(config: &RewardConfig) -> Result<(), String> {
    let Some(file) = &config.file else { return Ok(()) };
    if let Some(absent) = absent_program(std::slice::from_ref(&config.python)) {
        return Err(format!("`python`: there is no {absent}"));
    }
    if let Some(absent) = absent_variable(&config.env) {
        return Err(absent);
    }
    check_names(file, ("file", "functions"), &config.functions)
}

/// Refuses names that the text of a Python file does not have, both of which these keys name.
pub(in crate::train::rollouts) fn check_names(
    file: &Path,
    (file_key, key): (&str, &str),
    names: &[String],
) -> Result<(), String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("`{file_key}` = {}: {error}", file.display()))?;
    // A name may come from anywhere, but not from nowhere.
    let is_there = |name: &str| {
        let word = Regex::new(&format!(r"\b{}\b", regex::escape(name)));
        word.is_ok_and(|word| word.is_match(&text)) || text.contains("import *")
    };
    let Some(absent) = names.iter().find(|name| !is_there(name)) else { return Ok(()) };
    let defined = text.lines().filter_map(|line| {
        let name = line.strip_prefix("async ").unwrap_or(line);
        let name = name.strip_prefix("def ").or_else(|| name.strip_prefix("class "))?;
        name.split(['(', ':']).next().map(str::trim)
    });
    let near = closest(absent, defined).map(|name| format!("\n  hint: did you mean `{name}`?")).unwrap_or_default();
    Err(format!("`{key}`: {} has no `{absent}`{near}", file.display()))
}

/// The process.
#[derive(Debug)]
pub(super) struct Python {
    program: Program,
    /// The file, to people.
    file: String,
    /// Number of the last round.
    id: u64,
}

/// What its functions say of a round.
#[derive(Debug, Default, Deserialize)]
pub(in crate::train::rollouts) struct Said {
    #[serde(default)]
    rewards: BTreeMap<String, Vec<Option<f64>>>,
    /// Means of what they have logged.
    #[serde(default)]
    pub(in crate::train::rollouts) metrics: BTreeMap<String, f64>,
    /// Columns that they have logged.
    #[serde(default)]
    pub(in crate::train::rollouts) extra: BTreeMap<String, Vec<Value>>,
    id: Option<u64>,
    function: Option<String>,
    index: Option<usize>,
    error: Option<String>,
    #[serde(default)]
    traceback: String,
}

impl Python {
    /// Imports the file.
    ///
    /// # Errors
    /// A file that cannot be imported, or not in time.
    pub(super) fn start(
        config: &RewardConfig,
        log: Option<&Path>,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Self, String> {
        let file = config.file.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
        let mut command = [&*config.python, "-c", HELPER, &*file].map(str::to_owned).to_vec();
        command.extend_from_slice(&config.functions);
        let mut program = Program::start(Launch { command: &command, name: &file, env: &config.env, log })?;
        let line = program.answer(Duration::from_secs_f64(config.start_seconds), is_stopped)?;
        let said = said(&line).map_err(|reason| format!("{file}: {reason}"))?;
        match said.error {
            Some(error) => Err(format!("{file}: {}{}", printable(&error), shown(&said.traceback))),
            None => Ok(Self { program, file, id: 0 }),
        }
    }

    /// What each function says of all answers of a round, and what it has logged.
    ///
    /// # Errors
    /// A function that fails.
    pub(super) fn judge(
        &mut self,
        config: &RewardConfig,
        answers: &[Judged<'_>],
        state: &JudgeState,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<(Vec<ByAnswer>, Said), Failure> {
        self.id += 1;
        let patience = Duration::from_secs_f64(config.max_seconds.unwrap_or(MAX_SECONDS));
        let line = self.program.ask(&question(self.id, answers, state), patience, is_stopped)?;
        let mut said = said(&line).map_err(|reason| format!("{}: {reason}", self.file))?;
        if let (Some(function), Some(error)) = (&said.function, &said.error) {
            let reason = format!("`{function}` of {}: {}{}", self.file, printable(error), shown(&said.traceback));
            return Err(Failure { index: said.index, reason });
        }
        let rewards: Vec<_> = config.functions.iter().filter_map(|name| said.rewards.remove(name)).collect();
        let is_whole = rewards.len() == config.functions.len() && rewards.iter().all(|of| of.len() == answers.len());
        if said.id != Some(self.id) || !is_whole {
            return Err(format!("{} has written {line:?}, which is no answer to the last question", self.file).into());
        }
        if let Some(column) = said.extra.iter().find(|(_, values)| values.len() != answers.len()).map(|(name, _)| name)
        {
            let text = format!("{}: `log_extra` has not one value for each answer in {column:?}", self.file);
            return Err(text.into());
        }
        Ok((rewards, said))
    }
}

fn said(line: &str) -> Result<Said, String> {
    serde_json::from_str(line).map_err(|_| format!("expected a line of JSON, and {line:?} was written"))
}

fn shown(traceback: &str) -> String {
    let lines = printable(traceback.trim_end()).replace('\n', "\n  ");
    if lines.is_empty() { lines } else { format!("\n  {lines}") }
}

/// A round as the process reads it: answers to messages are messages, and every other column of a row is a list.
fn question(id: u64, answers: &[Judged<'_>], state: &JudgeState) -> Value {
    let list = |of: fn(&Judged<'_>) -> Value| Value::Array(answers.iter().map(of).collect());
    let mut columns = Map::new();
    for (index, answer) in answers.iter().enumerate() {
        let own = answer.row.value.as_object().into_iter().flatten();
        // What the functions get anyway.
        let own = own.filter(|(name, _)| **name != answer.row.prompt_column && !GIVEN.contains(&name.as_str()));
        for (name, value) in own {
            let column = columns.entry(name.clone()).or_insert_with(|| vec![Value::Null; answers.len()].into());
            column[index] = value.clone();
        }
    }
    json!({
        "id": id,
        "prompts": list(prompt_of),
        "completions": list(completion_of),
        "completion_ids": list(|answer| answer.ids.into()),
        "columns": columns,
        "state": state,
    })
}

/// Arguments that no column can be.
const GIVEN: [&str; 8] =
    ["prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"];
