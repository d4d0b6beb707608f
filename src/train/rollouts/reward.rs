//! How answers are judged.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use regex::Regex;
use serde_json::{Value, json};

use crate::config::{ObjectiveConfig, RewardConfig, RewardKind};
use crate::util::json_schema::JsonSchema;
use crate::util::stats::as_f64;

/// Beyond this, squares of rewards and what is summed of them would not be finite in the figures.
const MAX_REWARD: f64 = 1e15;

/// An answer to judge.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judged<'a> {
    /// The row of the prompt.
    pub(super) row: &'a Value,
    /// The answer without the token that ends it.
    pub(super) text: &'a str,
    /// Number of its tokens, with the one that ends it.
    pub(super) num_tokens: usize,
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
            absent_program(&config.command)
                .map_or(Ok(()), |absent| Err(format!("`objective.reward`, `command`: there is no {absent}")))?;
            Ok(Self {
                pattern: config.regex_pattern.as_ref().and_then(|pattern| Regex::new(pattern).ok()),
                schema: config.schema.as_ref().map(schema).transpose()?,
                max_tokens: objective.max_completion_length,
                program: None,
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

    /// The weighted reward of an answer; `None` where it is not judged.
    ///
    /// # Errors
    /// A row without the column that it is compared with; a program that fails.
    pub(super) fn of(&mut self, judged: Judged<'_>) -> Result<Option<f64>, String> {
        let Self { config, pattern, schema, .. } = self;
        let said = judged.text.trim();
        let one_if = |is_right: bool| Some(f64::from(u8::from(is_right)));
        let reward = match config.kind {
            Some(kind @ (RewardKind::Exact | RewardKind::Contains | RewardKind::Similarity)) => {
                let right = right_answer(config, judged.row)?;
                let same_case = |text: &str| if config.ignore_case { text.to_lowercase() } else { text.to_owned() };
                let (said, right) = (same_case(said), same_case(right.trim()));
                match kind {
                    RewardKind::Exact => one_if(said == right),
                    RewardKind::Contains => one_if(said.contains(&right)),
                    _ => Some(similarity(&said, &right)),
                }
            }
            Some(RewardKind::Number) => {
                let right = right_number(config, judged.row)?;
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
                Some(((as_f64(self.max_tokens) - room - as_f64(judged.num_tokens)) / room).clamp(-1.0, 0.0))
            }
            Some(RewardKind::Command) => {
                let program = match self.program.take() {
                    Some(program) => program,
                    None => Program::start(&config.command)?,
                };
                self.program.insert(program).ask(judged, Duration::from_secs_f64(config.max_seconds))?
            }
            None => None,
        };
        let reward = reward.map(|reward| reward * self.config.weight);
        match reward.filter(|reward| reward.abs() > MAX_REWARD) {
            Some(reward) => Err(format!("a reward of {reward:e} is beyond {MAX_REWARD:e}")),
            None => Ok(reward),
        }
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
fn absent_program(command: &[String]) -> Option<&str> {
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

/// A program that judges answers as long as it runs.
#[derive(Debug)]
struct Program {
    name: String,
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Program {
    fn start(command: &[String]) -> Result<Self, String> {
        let [program, arguments @ ..] = command else { return Err("`command` is empty".into()) };
        let failed = |error: std::io::Error| format!("{program} cannot be started: {error}");
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("{program} has no input or output"));
        };
        let (sender, lines) = mpsc::channel();
        let read = move || {
            // Ends with the program, or with the receiver.
            let _ = BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line));
        };
        std::thread::Builder::new().name("rewards".into()).spawn(read).map_err(failed)?;
        let name = command[..command.len().min(2)].join(" ");
        Ok(Self { name, child, input, lines })
    }

    fn ask(&mut self, judged: Judged<'_>, patience: Duration) -> Result<Option<f64>, String> {
        let mut question = judged.row.clone();
        question["completion"] = json!(judged.text);
        let name = self.name.clone();
        if let Ok(line) = self.lines.try_recv() {
            return Err(format!("{name} has written {line:?} without being asked"));
        }
        let asked = writeln!(self.input, "{question}").and_then(|()| self.input.flush());
        asked.map_err(|error| format!("{}, or does not read: {error}", self.ended()))?;
        let line = match self.lines.recv_timeout(patience) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                return Err(format!("{name} has not answered within {} s", patience.as_secs_f64()));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
        };
        match serde_json::from_str(&line) {
            Ok(Value::Null) => Ok(None),
            Ok(Value::Number(number)) => Ok(number.as_f64()),
            _ => Err(format!("{name} has written {line:?}, expected a number or null")),
        }
    }

    /// That it has ended, and how where it has by now: its output ends before it does.
    fn ended(&mut self) -> String {
        let status = (0..20).find_map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            self.child.try_wait().ok().flatten()
        });
        let status = status.map(|status| format!(" ({status})")).unwrap_or_default();
        format!("{} has ended{status}", self.name)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reward(config: RewardConfig, text: &str) -> Result<Option<f64>, String> {
        let objective =
            ObjectiveConfig { reward: vec![config], max_completion_length: 8, ..ObjectiveConfig::default() };
        let row = json!({"prompt": "1 + 1?", "answer": "so 1,002", "n": 3});
        let judged = Judged { row: &row, text, num_tokens: text.len() };
        Reward::all(&objective)?[0].of(judged)
    }

    #[test]
    fn answers_get_what_the_rules_say() {
        let of = |kind: RewardKind| RewardConfig { kind: Some(kind), ..RewardConfig::default() };
        let any_case = |kind: RewardKind| RewardConfig { ignore_case: true, ..of(kind) };
        let number = RewardConfig { column: "n".into(), weight: 0.5, ..of(RewardKind::Number) };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, r#"{"type": "array", "items": {"type": "integer"}, "minItems": 1}"#).unwrap();
        let schema = RewardConfig { schema: Some(file.path().to_owned()), ..of(RewardKind::Json) };
        let regex = RewardConfig { regex_pattern: Some("^a+$".into()), ..of(RewardKind::Regex) };
        for (config, text, expected) in [
            (of(RewardKind::Exact), " so 1,002\n", 1.0),
            (of(RewardKind::Exact), "1,002", 0.0),
            (of(RewardKind::Contains), "well, so 1,002!", 1.0),
            (of(RewardKind::Contains), "So 1,002", 0.0),
            (any_case(RewardKind::Contains), "Well, SO 1,002!", 1.0),
            (any_case(RewardKind::Exact), "So 1,002", 1.0),
            (RewardConfig { weight: -1.0, ..of(RewardKind::Exact) }, "so 1,002", -1.0),
            (of(RewardKind::Similarity), "so 1,002", 1.0),
            // 6 of 7 and 8 characters in order.
            (of(RewardKind::Similarity), "So 1002", 12.0 / 15.0),
            (any_case(RewardKind::Similarity), "So 1002", 14.0 / 15.0),
            (of(RewardKind::Similarity), "x", 0.0),
            (of(RewardKind::Number), "it is 5, or 1002.", 1.0),
            (of(RewardKind::Number), "1002 or 5", 0.0),
            (number.clone(), "three is 3", 0.5),
            (number, "none", 0.0),
            (regex.clone(), "aaa", 1.0),
            (regex, "aab", 0.0),
            (of(RewardKind::Json), "{\"a\": 1}", 1.0),
            (of(RewardKind::Json), "{\"a\": 1", 0.0),
            (of(RewardKind::Json), "1", 0.0),
            (schema.clone(), " [1, 2]\n", 1.0),
            (schema.clone(), "[]", 0.0),
            (schema.clone(), "[1, 2", 0.0),
            (schema, "{}", 0.0),
            (of(RewardKind::Length), "sixsix", 0.0),
            (of(RewardKind::Length), "sevenx7", -0.5),
            (of(RewardKind::Length), "eight888", -1.0),
        ] {
            assert_eq!(reward(config.clone(), text), Ok(Some(expected)), "{config:?} of {text}");
        }
        let absent = RewardConfig { column: "solution".into(), ..of(RewardKind::Exact) };
        assert!(reward(absent, "x").unwrap_err().starts_with("there is no text in `solution`"));
    }

    #[test]
    fn a_program_judges_line_by_line_and_its_failures_are_reported() {
        let program = |script: &str| RewardConfig {
            kind: Some(RewardKind::Command),
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            max_seconds: 60.0,
            ..RewardConfig::default()
        };
        let judge =
            "while read -r line; do case $line in *good*) echo 1.5;; *none*) echo null;; *) echo 0;; esac; done";
        let mut judge =
            Reward::all(&ObjectiveConfig { reward: vec![program(judge)], ..ObjectiveConfig::default() }).unwrap();
        let row = json!({"prompt": "p"});
        let mut of = |text: &str| judge[0].of(Judged { row: &row, text, num_tokens: 1 });
        assert_eq!([of("good"), of("none"), of("bad")], [Ok(Some(1.5)), Ok(None), Ok(Some(0.0))]);
        for (script, message) in [
            ("read -r line; echo no", "expected a number or null"),
            ("exit 3", "sh -c has ended (exit status: 3)"),
            ("read -r line; echo 1e300", "is beyond 1e15"),
        ] {
            let error = reward(program(script), "x").unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        let silent = RewardConfig { max_seconds: 2.0, ..program("sleep 9") };
        assert!(reward(silent, "x").unwrap_err().contains("has not answered within 2 s"));
        let missing = RewardConfig { command: vec!["no-such-program".into()], ..program("") };
        assert!(reward(missing, "x").unwrap_err().contains("there is no no-such-program"));
    }
}
