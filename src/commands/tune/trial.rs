//! One short run of the recipe, in a process of its own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use tempfile::TempDir;

use super::slices::{self, Speed, WARMUP};
use crate::failure::Failure;
use crate::metrics::{StepMetrics, Summary};
use crate::recipe::{Recipe, RecipeArgs};

/// Time that a trial always gets, for what it has to tokenise or compile anew.
const GRACE: Duration = Duration::from_mins(1);
/// A trial that takes so many times as long as the recipe as it is, is ended.
const HOPELESS: u32 = 4;
/// The same where packing puts many times as many tokens into a step.
const HOPELESS_PACKED: u32 = 40;
/// Why a trial was not run, or not to its end.
const OUT_OF_TIME: &str = "no time left (--max-minutes)";
/// The most steps of a trial, however short they are.
const MAX_STEPS: f64 = 10_000.0;

/// What a short run showed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Figures {
    #[serde(flatten)]
    pub(super) speed: Speed,
    /// Time of the run, from the start of its process to its end.
    pub(super) run_seconds: f64,
    /// Keys of the recipe that the run's diagnosis would change, the worst first.
    #[serde(skip)]
    pub(super) advised_keys: Vec<String>,
    /// The most memory of the GPU, or of the process where it trained on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peak_memory_bytes: Option<u64>,
    /// Loss of the last step that every trial takes: equal for all trials that keep the numbers.
    pub(super) loss: f64,
}

/// How long a trial is at least.
#[derive(Clone, Copy, Debug)]
pub(super) struct Length {
    /// Measured steps.
    pub(super) steps: u64,
    /// Time of the measured steps.
    pub(super) seconds: f64,
}

impl Length {
    /// Measured steps of a trial whose steps take so long.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most MAX_STEPS, and not negative")]
    fn steps_of(self, step_seconds: f64) -> u64 {
        // A little more, since a part of the warm-up is taken from them.
        let steps = (1.2 * self.seconds / step_seconds).ceil().clamp(0.0, MAX_STEPS) as u64;
        steps.max(self.steps)
    }
}

/// Starts trials.
pub(super) struct Runner {
    program: PathBuf,
    recipe: RecipeArgs,
    length: Length,
    folder: TempDir,
    /// Changes without which so few steps would be refused, take long, or depend on their number.
    fixed: Vec<String>,
    /// Measured steps of a trial.
    num_steps: u64,
    /// The same of a packed one, whose steps may take many times as long.
    num_packed_steps: u64,
    /// Time of the recipe as it is.
    took: Option<Duration>,
    /// Exit code of the last trial.
    pub(super) exit_code: Option<i32>,
}

impl Runner {
    /// Trials of `recipe`, which `args` have been read as, of at least such a length.
    pub(super) fn new(args: &RecipeArgs, recipe: &Recipe, length: Length) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(Failure::running)?;
        let output = serde_json::Value::from(folder.path().join("trial").to_string_lossy());
        let output = format!("output_dir={output}");
        // What a short run has no time for, and what would end it early or be measured with it; learning rates that do
        // not depend on the number of steps, and steps that do not end with the rows.
        let mut fixed = vec![
            output.as_str(),
            "eval.generate=[]",
            "checkpoint.save_steps=1000000",
            "logging.tensorboard=false",
            "watchdog.patience=0",
            "watchdog.max_skipped_steps=0",
            "train.num_epochs=1000000",
            "scheduler.lr_scheduler=constant",
            "scheduler.min_lr_ratio=0",
        ];
        fixed.extend(recipe.scheduler.warmup_steps.map(|_| "scheduler.warmup_steps=0"));
        fixed.extend(recipe.scheduler.warmup_ratio.map(|_| "scheduler.warmup_ratio=0"));
        // Without rows to evaluate on these keys are refused.
        if recipe.data.eval_split.is_some() || !recipe.data.eval.is_empty() {
            fixed.extend(["eval.max_batches=1", "eval.eval_steps=1000000"]);
        }
        Ok(Self {
            program: std::env::current_exe().map_err(Failure::running)?,
            recipe: args.clone(),
            length,
            fixed: fixed.into_iter().map(str::to_owned).collect(),
            folder,
            num_steps: length.steps,
            num_packed_steps: length.steps,
            took: None,
            exit_code: None,
        })
    }

    /// Runs the recipe as it is, which decides how many steps a trial has and how long it may take.
    ///
    /// # Errors
    ///
    /// The last lines of what the run said.
    pub(super) fn start(&mut self) -> Result<Figures, String> {
        let mut figures = self.measure(&[], None)?;
        let num_steps = self.length.steps_of(figures.speed.step_seconds);
        if num_steps > self.num_steps {
            self.num_steps = num_steps;
            figures = self.measure(&[], None)?;
        }
        self.took = Some(Duration::from_secs_f64(figures.run_seconds));
        Ok(figures)
    }

    /// Trains for a while with `changes`, and reads what that run wrote. It is ended where it takes many times as long as
    /// the recipe as it is, or goes on after `deadline`.
    ///
    /// # Errors
    ///
    /// The last lines of what the run said, or why it was ended.
    pub(super) fn measure(&mut self, changes: &[String], deadline: Option<Instant>) -> Result<Figures, String> {
        let packs = changes.iter().any(|change| change == "data.packing=true");
        let num_steps = if packs { self.num_packed_steps } else { self.num_steps };
        let output = self.folder.path().join("trial");
        let log = self.folder.path().join("log");
        let mut command = Command::new(&self.program);
        command.arg(&self.recipe.recipe).arg("--quiet").stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(&log).map_err(|error| error.to_string())?);
        if let Some(device) = &self.recipe.device {
            command.args(["--device", device]);
        }
        let max_steps = format!("train.max_steps={}", WARMUP + num_steps);
        for change in self.recipe.set.iter().chain(&self.fixed).chain([&max_steps]).chain(changes) {
            command.args(["--set", change]);
        }
        let started = Instant::now();
        let hopeless = if packs { HOPELESS_PACKED } else { HOPELESS };
        let too_slow = self.took.map(|took| (started + GRACE + hopeless * took, "much slower, so it was ended"));
        let limit = deadline.map(|deadline| (deadline, OUT_OF_TIME)).into_iter().chain(too_slow).min();
        if limit.is_some_and(|(limit, _)| limit <= started) {
            return Err(OUT_OF_TIME.into());
        }
        let status = wait(command.spawn().map_err(|error| error.to_string())?, limit);
        self.exit_code = status.as_ref().ok().and_then(ExitStatus::code);
        let figures = status.and_then(|status| {
            if status.success() {
                read(&output, WARMUP + self.length.steps, started.elapsed())
            } else {
                Err(said(&log, status))
            }
        });
        // Each trial begins with an empty folder.
        drop(fs::remove_dir_all(&output));
        let figures = figures?;
        if packs {
            self.num_packed_steps = self.length.steps_of(figures.speed.step_seconds);
        }
        Ok(figures)
    }
}

/// Waits for a trial to end, but not beyond `limit`, which says why.
fn wait(mut child: Child, limit: Option<(Instant, &str)>) -> Result<ExitStatus, String> {
    loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok(status);
        }
        if let Some((_, why)) = limit.filter(|(limit, _)| Instant::now() > *limit) {
            drop(child.kill());
            drop(child.wait());
            return Err(why.into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What a trial that failed said.
fn said(log: &Path, status: ExitStatus) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let error = text.split_once("error: ").map_or(text.as_str(), |(_, error)| error).trim();
    if error.is_empty() { format!("ended with {status}") } else { error.to_owned() }
}

/// The figures of the run in a folder, which `took` so long; the loss of step `loss_step`.
fn read(output: &Path, loss_step: u64, took: Duration) -> Result<Figures, String> {
    let text = fs::read_to_string(output.join("metrics.jsonl")).map_err(|error| error.to_string())?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let steps: Vec<StepMetrics> =
        lines.filter(|line| line.get("loss").is_some()).filter_map(|line| serde_json::from_value(line).ok()).collect();
    let summary = fs::read(output.join("summary.json")).map_err(|error| error.to_string())?;
    let summary: Summary = serde_json::from_slice(&summary).map_err(|error| error.to_string())?;
    Ok(Figures {
        speed: slices::speed(&steps).ok_or("it took no step that could be measured")?,
        run_seconds: took.as_secs_f64(),
        advised_keys: summary.diagnosis.into_iter().flat_map(|finding| finding.changes).map(|to| to.key).collect(),
        peak_memory_bytes: summary.peak_gpu_memory_bytes.or(summary.peak_host_memory_bytes),
        loss: steps.iter().find(|step| step.step == loss_step).map_or(f64::NAN, |step| step.loss),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_is_as_long_as_both_its_steps_and_its_time_ask_for() {
        let length = Length { steps: 4, seconds: 2.0 };
        assert_eq!((length.steps_of(3.0), length.steps_of(0.016)), (4, 150));
        assert_eq!(Length { steps: 4, seconds: 0.0 }.steps_of(0.016), 4);
        assert_eq!(length.steps_of(0.0), 10_000);
    }

    #[test]
    fn a_trial_is_ended_at_its_limit() {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let started = Instant::now();
        assert_eq!(wait(child, Some((started, OUT_OF_TIME))), Err(OUT_OF_TIME.to_owned()));
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}
