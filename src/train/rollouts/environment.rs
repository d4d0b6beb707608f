//! The environment that replies to what the model writes: a program, or a class or functions of a Python file that a program of ours
//! plays.

pub(super) mod opening;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use super::program::{LOOK, Launch, Program, absent_variable, open, printable};
use super::reward::{absent_program, check_names};
use crate::config::EnvironmentConfig;

/// What plays a Python file.
const HELPER: &str = concat!(include_str!("helper.py"), include_str!("environment/play.py"));

/// Seconds in which it says hello.
const START_SECONDS: u64 = 300;

/// Starts without a reply in between after which it is given up.
const MAX_STARTS: usize = 8;

/// What it says first.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Hello {
    /// What its rewards are called.
    #[serde(default = "default_name")]
    pub(super) name: String,
    /// The tools that the model may call.
    #[serde(default)]
    tools: Vec<Value>,
    /// Questions that it works on at the same time.
    #[serde(default = "one")]
    max_parallel: usize,
    /// Whether it replies to the end of an episode, by the reward that its turns have not had.
    #[serde(default)]
    pub(super) scores_at_close: bool,
    error: Option<String>,
    #[serde(default)]
    traceback: String,
}

fn default_name() -> String {
    "environment".into()
}

fn one() -> usize {
    1
}

/// What it replies.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(super) struct Reply {
    /// Text or messages for the model.
    #[serde(default)]
    pub(super) observation: Value,
    pub(super) reward: Option<f64>,
    /// Whether the episode is over.
    #[serde(default)]
    pub(super) done: bool,
    /// Calls of tools that have failed.
    #[serde(default)]
    pub(super) failed_calls: usize,
    #[serde(default)]
    pub(super) metrics: BTreeMap<String, f64>,
    /// Why it cannot go on with the episode, if it cannot.
    pub(super) failed: Option<String>,
    /// Whether the episode may begin anew then.
    pub(super) retry: Option<bool>,
}

/// What has been heard.
#[derive(Debug)]
pub(super) enum Heard {
    Nothing,
    /// To a question about the episode of this number.
    Reply(u64, Reply),
    /// It has ended, or does not reply.
    Ended(String),
}

/// The environment.
#[derive(Debug)]
pub(super) struct Environment {
    config: EnvironmentConfig,
    log: Option<PathBuf>,
    running: Option<(Program, Hello)>,
    /// When it was last heard.
    last_heard: Option<Instant>,
    /// Starts since it last replied.
    num_starts: usize,
    /// Number of the last episode.
    last_id: u64,
}

impl Environment {
    /// # Errors
    /// What is wrong that can be known without starting it.
    pub(super) fn new(config: &EnvironmentConfig) -> Result<Self, String> {
        let EnvironmentConfig { python, class, tools, env, .. } = config;
        let wrong = |reason: String| format!("`objective.environment`, {reason}");
        if let Some(absent) = absent_program(&command_of(config)) {
            return Err(wrong(format!("`command`: there is no {absent}")));
        }
        if let Some(absent) = absent_variable(env) {
            return Err(wrong(absent));
        }
        if let Some(file) = python {
            let class: Vec<String> = class.iter().cloned().collect();
            check_names(file, ("python", "class"), &class).map_err(wrong)?;
            check_names(file, ("python", "tools"), tools).map_err(wrong)?;
        }
        let config = config.clone();
        Ok(Self { config, log: None, running: None, last_heard: None, num_starts: 0, last_id: 0 })
    }

    /// Starts it, if it does not run. What it writes to stderr goes to `log`.
    ///
    /// # Errors
    /// One that cannot be started, says no hello in time, or has ended too often; a run that was asked to stop.
    pub(super) fn start(&mut self, log: Option<&Path>, is_stopped: &dyn Fn() -> bool) -> Result<(), String> {
        if self.running.is_some() {
            return Ok(());
        }
        self.log = log.map(Path::to_owned);
        self.num_starts += 1;
        let command = command_of(&self.config);
        let shown = match &self.config.python {
            Some(file) => file.display().to_string(),
            None => command[..command.len().min(2)].join(" "),
        };
        let mut program = Program::start(Launch { command: &command, name: &shown, env: &self.config.env, log })?;
        let line = program.answer(Duration::from_secs(START_SECONDS), is_stopped)?;
        let no_hello = || {
            format!(
                "{shown} has written {line:?}, expected {{\"hello\": 1, ...}}\n  hint: `lora-train help environments` says what one writes"
            )
        };
        let said: Value = serde_json::from_str(&line).map_err(|_| no_hello())?;
        let is_hello = said.get("hello").is_some() || said.get("error").is_some();
        let hello = if is_hello { Hello::deserialize(&said).ok() } else { None };
        let hello = hello.ok_or_else(no_hello)?;
        if let Some(error) = &hello.error {
            let traceback = printable(hello.traceback.trim_end()).replace('\n', "\n  ");
            return Err(format!("{shown}: {}\n  {traceback}", printable(error)));
        }
        (self.running, self.last_heard) = (Some((program, hello)), Some(Instant::now()));
        Ok(())
    }

    /// Starts it anew, which has `ended`.
    ///
    /// # Errors
    /// Those of [`start`](Self::start); one that ends again and again.
    pub(super) fn start_again(&mut self, ended: &str, is_stopped: &dyn Fn() -> bool) -> Result<(), String> {
        self.running = None;
        if self.num_starts > MAX_STARTS {
            return Err(format!("{ended}\n  it was started {MAX_STARTS} times and has not replied"));
        }
        let log = self.log.clone();
        self.start(log.as_deref(), is_stopped)
    }

    /// What it has said first.
    pub(super) fn hello(&self) -> Option<&Hello> {
        self.running.as_ref().map(|(_, hello)| hello)
    }

    /// Its tools, and those of a row.
    pub(super) fn tools(&self, of_row: Option<&Value>) -> Option<Value> {
        let own = self.hello().into_iter().flat_map(|hello| &hello.tools);
        let all: Vec<Value> = of_row.and_then(Value::as_array).into_iter().flatten().chain(own).cloned().collect();
        (!all.is_empty()).then(|| all.into())
    }

    /// Most questions that it is asked at the same time.
    pub(super) fn max_parallel(&self) -> usize {
        self.hello().map_or(1, |hello| hello.max_parallel).clamp(1, self.config.max_parallel)
    }

    /// A number that no episode has had.
    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Asks a question, or says something. Where it has ended, the next thing that is heard says so.
    pub(super) fn tell(&mut self, question: &Value) {
        if let Some((program, _)) = &mut self.running {
            drop(program.tell(question));
        }
    }

    /// What it has said, for which it is waited at most that long. `oldest` is when the first question was asked that is still open.
    pub(super) fn heard(&mut self, patience: Duration, oldest: Option<Instant>) -> Heard {
        let Some((program, _)) = &mut self.running else { return Heard::Ended("it does not run".into()) };
        match program.heard(patience.min(LOOK)) {
            Err(reason) => return Heard::Ended(reason),
            Ok(Some(line)) => {
                self.last_heard = Some(Instant::now());
                let said: Value = serde_json::from_str(&line).unwrap_or_default();
                if let Some(id) = said["id"].as_str().and_then(|id| id.parse().ok()) {
                    self.num_starts = 0;
                    let wrong =
                        |error| Reply { failed: Some(format!("its reply is wrong: {error}")), ..Reply::default() };
                    return Heard::Reply(id, Reply::deserialize(&said).unwrap_or_else(wrong));
                }
                self.note(format_args!("{line:?} was written, which is no reply"));
            }
            Ok(None) => {}
        }
        // Where it says nothing at all, nothing of it may go on.
        match oldest.map(|asked| self.last_heard.map_or(asked, |heard| heard.max(asked))) {
            Some(since) if since.elapsed() > self.patience() => Heard::Ended(self.too_late()),
            _ => Heard::Nothing,
        }
    }

    /// How long a reply may take.
    fn patience(&self) -> Duration {
        Duration::from_secs_f64(self.config.max_seconds)
    }

    /// Whether the reply to a question that was asked then takes too long, where others have come for long enough since then.
    pub(super) fn is_late(&self, asked: Instant) -> bool {
        let goes_on = self.last_heard.is_some_and(|heard| heard.saturating_duration_since(asked) > self.patience() / 2);
        goes_on && asked.elapsed() > self.patience()
    }

    /// That a reply has taken too long.
    pub(super) fn too_late(&self) -> String {
        format!("it has not replied within {} s", self.config.max_seconds)
    }

    /// Its section of the recipe.
    pub(super) fn config(&self) -> &EnvironmentConfig {
        &self.config
    }

    /// Writes a line to its log.
    pub(super) fn note(&self, what: impl Display) {
        if let Some(Ok((mut file, _))) = self.log.as_deref().map(open) {
            // A log that cannot be written is no reason to end.
            drop(writeln!(file, "{what}"));
        }
    }
}

/// The words of the command that is started.
fn command_of(config: &EnvironmentConfig) -> Vec<String> {
    let EnvironmentConfig { command, python, class, tools, .. } = config;
    let Some(file) = python else { return command.clone() };
    let own = if command.is_empty() { vec!["python3".to_owned()] } else { command.clone() };
    let words = ["-c".to_owned(), HELPER.to_owned(), file.display().to_string(), class.clone().unwrap_or_default()];
    own.into_iter().chain(words).chain(tools.iter().cloned()).collect()
}

/// A question about an episode.
pub(super) fn question(id: u64, what: &str, more: Value) -> Value {
    let mut question = json!({"id": id.to_string(), "do": what});
    if let (Some(all), Value::Object(more)) = (question.as_object_mut(), more) {
        all.extend(more);
    }
    question
}
