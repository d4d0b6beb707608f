//! One short run of the recipe, in a process of its own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use tempfile::TempDir;

use crate::measure::metrics::{Finding, StepMetrics};
use crate::recipe::{Recipe, RecipeArgs};
use crate::util::failure::Failure;
use crate::util::stats::median;
use crate::util::terminal::NOTEBOOK;

/// Time granted to every trial, for tokenising or compiling anew.
const GRACE: Duration = Duration::from_mins(1);
/// A trial that takes this many times as long as the original recipe is ended.
const HOPELESS: u32 = 4;
/// The same limit with packing, which puts many times as many tokens into a step.
const HOPELESS_PACKED: u32 = 40;
/// Why a trial did not run, or not to its end.
pub(super) const OUT_OF_TIME: &str = "no time left (--max-minutes)";
/// Maximum number of steps of a trial, however short they are.
const MAX_STEPS: f64 = 10_000.0;
/// Unmeasured first steps: they compile kernels and touch memory for the first time.
const WARMUP: u64 = 1;
/// In long runs, the warm-up also takes one in this many of the later steps.
const WARMUP_SHARE: usize = 10;
/// The median of this many slices is the run's speed, so that a hiccup ruins only its slice. Single steps would be too
/// short: where batches come in bursts, most steps wait for none.
const NUM_SLICES: usize = 8;

/// Figures of a short run, over its measured steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Tokens that carry loss per second of the steps.
    pub(super) target_tokens_per_second: f64,
    /// Tokens without padding per second of the steps. Trials are compared by this, because the loss tokens depend on
    /// the rows.
    pub(super) tokens_per_second: f64,
    pub(super) step_seconds: f64,
    /// Share of the time spent waiting for data.
    pub(super) data_wait_share: f64,
    #[serde(skip)]
    pub(super) steps_of_epoch: f64,
    /// Time from the start of the process to its end.
    pub(super) run_seconds: f64,
    /// Recipe keys that the run's diagnosis would change, the worst first.
    #[serde(skip)]
    pub(super) advised_keys: Vec<String>,
    /// Peak memory of the GPU, or of the process when training on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peak_memory_bytes: Option<u64>,
    /// Loss of the last step that every trial reaches: equal for all trials that keep the numbers.
    pub(super) loss: f64,
}

/// Minimum length of a trial.
#[derive(Clone, Copy, Debug)]
pub(super) struct Length {
    pub(super) steps: u64,
    /// Time of the measured steps.
    pub(super) seconds: f64,
}

impl Length {
    /// Number of measured steps of a trial with this step time.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most MAX_STEPS, and not negative")]
    fn steps_of(self, step_seconds: f64) -> u64 {
        // A little more, because the warm-up takes some of them.
        let steps = (1.2 * self.seconds / step_seconds).ceil().clamp(0.0, MAX_STEPS) as u64;
        steps.max(self.steps)
    }
}

pub(super) struct Runner {
    program: PathBuf,
    recipe: RecipeArgs,
    length: Length,
    folder: TempDir,
    /// Changes without which such a short run would be refused, take long, or depend on its number of steps.
    fixed: Vec<String>,
    num_steps: u64,
    /// Measured steps of a packed trial, whose steps may take many times as long.
    num_packed_steps: u64,
    /// Time that the original recipe took.
    took: Option<Duration>,
    pub(super) exit_code: Option<i32>,
}

impl Runner {
    /// Trials of `recipe`, which was read from `args`, of at least `length`.
    pub(super) fn new(args: &RecipeArgs, recipe: &Recipe, length: Length) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(Failure::running)?;
        let output = serde_json::Value::from(folder.path().join("trial").to_string_lossy());
        let output = format!("output_dir={output}");
        // Not left to the memory that each trial finds.
        let checkpointing = format!("train.gradient_checkpointing={}", recipe.train.gradient_checkpointing);
        // Turn off what a short run has no time for, and what would end it early or distort the measurement. Learning
        // rates must not depend on the number of steps, and the steps must not end with the rows.
        let mut fixed = vec![
            output.as_str(),
            checkpointing.as_str(),
            "eval.generate=[]",
            "checkpoint.save_steps=1000000",
            "logging.tensorboard=false",
            "logging.mlflow_tracking_uri=none",
            "watchdog.patience=0",
            "watchdog.max_skipped_steps=0",
            "train.num_epochs=1000000",
            "scheduler.lr_scheduler=constant",
            "scheduler.min_lr_ratio=0",
        ];
        fixed.extend(recipe.scheduler.warmup_steps.map(|_| "scheduler.warmup_steps=0"));
        fixed.extend(recipe.scheduler.warmup_ratio.map(|_| "scheduler.warmup_ratio=0"));
        // The first file takes as long as many steps.
        if recipe.train.ship_as.is_some() {
            fixed.extend(["train.ship_as=", "train.ship_from=0.8"]);
        }
        // These keys are refused without rows to evaluate on.
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

    /// Runs the original recipe, which decides how many steps a trial has and how long it may take.
    ///
    /// # Errors
    /// The last lines of the run's output.
    pub(super) fn start(&mut self) -> Result<Figures, String> {
        let mut figures = self.measure(&[], None)?;
        let num_steps = self.length.steps_of(figures.step_seconds);
        if num_steps > self.num_steps {
            self.num_steps = num_steps;
            figures = self.measure(&[], None)?;
        }
        self.took = Some(Duration::from_secs_f64(figures.run_seconds));
        Ok(figures)
    }

    /// Trains for a while with `changes`, and reads the figures of that run. Ends a run that takes many times as long
    /// as the original recipe, or lasts beyond `deadline`.
    ///
    /// # Errors
    /// The last lines of the run's output, or why it was ended.
    pub(super) fn measure(&mut self, changes: &[String], deadline: Option<Instant>) -> Result<Figures, String> {
        let packs = changes.iter().any(|change| change == "data.packing=true");
        let num_steps = if packs { self.num_packed_steps } else { self.num_steps };
        let output = self.folder.path().join("trial");
        let log = self.folder.path().join("log");
        let mut command = Command::new(&self.program);
        command.arg(&self.recipe.recipe).arg("--quiet").stdin(Stdio::null()).stdout(Stdio::null());
        // It is ended here, and saves nothing.
        command.env(NOTEBOOK, "0");
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
                Err(error_message(&log, status))
            }
        });
        // Each trial starts with an empty folder.
        drop(fs::remove_dir_all(&output));
        let figures = figures?;
        if packs {
            self.num_packed_steps = self.length.steps_of(figures.step_seconds);
        }
        Ok(figures)
    }
}

/// Waits for a trial to end, at most until `limit`, which comes with its reason.
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

/// The error message of a failed trial.
fn error_message(log: &Path, status: ExitStatus) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let error = text.split_once("error: ").map_or(text.as_str(), |(_, error)| error).trim();
    if error.is_empty() { format!("ended with {status}") } else { error.to_owned() }
}

/// The figures of the run in a folder, which took `took`, and the loss of step `loss_step`.
fn read(output: &Path, loss_step: u64, took: Duration) -> Result<Figures, String> {
    let text = fs::read_to_string(output.join("metrics.jsonl")).map_err(|error| error.to_string())?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let steps: Vec<StepMetrics> =
        lines.filter(|line| line.get("loss").is_some()).filter_map(|line| serde_json::from_value(line).ok()).collect();
    let summary = fs::read(output.join("summary.json")).map_err(|error| error.to_string())?;
    let summary: serde_json::Value = serde_json::from_slice(&summary).map_err(|error| error.to_string())?;
    let peak = |name: &str| summary[name].as_u64();
    let diagnosis: Vec<Finding> = serde_json::from_value(summary["diagnosis"].clone()).unwrap_or_default();
    Ok(Figures {
        run_seconds: took.as_secs_f64(),
        advised_keys: diagnosis.into_iter().flat_map(|finding| finding.changes).map(|to| to.key).collect(),
        peak_memory_bytes: peak("peak_gpu_memory_bytes").or(peak("peak_host_memory_bytes")),
        loss: steps.iter().find(|step| step.step == loss_step).map_or(f64::NAN, |step| step.loss),
        ..speed(&steps).ok_or("it took no step that could be measured")?
    })
}

/// The speed of the median slice after the warm-up; `None` where no step was measured. The figures of the whole run
/// are left out.
#[expect(clippy::cast_precision_loss, reason = "tokens of a few steps")]
pub(super) fn speed(steps: &[StepMetrics]) -> Option<Figures> {
    let after_first: Vec<&StepMetrics> = steps.iter().filter(|step| step.step > WARMUP).collect();
    let measured = after_first.get(after_first.len() / WARMUP_SHARE..)?;
    let last = measured.last()?;
    let seconds = |steps: &[&StepMetrics]| steps.iter().map(|step| step.step_seconds).sum::<f64>();
    let count =
        |steps: &[&StepMetrics], of: fn(&StepMetrics) -> u64| steps.iter().map(|step| of(step)).sum::<u64>() as f64;
    let slices = measured.chunks(measured.len().div_ceil(NUM_SLICES));
    let all =
        |of: &dyn Fn(&[&StepMetrics]) -> f64| median(&slices.clone().map(of).collect::<Vec<_>>()).unwrap_or(f64::NAN);
    let tokens_per_second = all(&|slice| count(slice, |step| step.tokens) / seconds(slice));
    // The share of loss tokens does not depend on the machine, so take it from all steps, not the median slice.
    let share = count(measured, |step| step.target_tokens) / count(measured, |step| step.tokens).max(1.0);
    (seconds(measured) > 0.0).then(|| Figures {
        target_tokens_per_second: tokens_per_second * share,
        tokens_per_second,
        step_seconds: all(&|slice| seconds(slice) / slice.len() as f64),
        data_wait_share: measured.iter().map(|step| step.data_wait_seconds).sum::<f64>() / seconds(measured),
        steps_of_epoch: last.step as f64 / last.epoch,
        ..Figures::default()
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
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let started = Instant::now();
        assert_eq!(wait(child, Some((started, OUT_OF_TIME))), Err(OUT_OF_TIME.to_owned()));
        assert!(started.elapsed() < Duration::from_mins(1));
    }

    fn steps(count: u64, seconds: impl Fn(u64) -> f64) -> Vec<StepMetrics> {
        let step = |step| StepMetrics {
            step,
            step_seconds: seconds(step),
            data_wait_seconds: seconds(step) / 4.0,
            epoch: step as f64 / 12.0,
            tokens: 100,
            target_tokens: 50,
            ..StepMetrics::default()
        };
        (1..=count).map(step).collect()
    }

    #[test]
    fn figures_are_those_of_the_steps_after_the_first() {
        let of_four = speed(&steps(4, |step| [60.0, 1.0, 1.0, 2.0][step as usize - 1])).unwrap();
        assert_eq!((of_four.target_tokens_per_second, of_four.tokens_per_second), (50.0, 100.0));
        assert_eq!((of_four.step_seconds, of_four.data_wait_share, of_four.steps_of_epoch), (1.0, 0.25, 12.0));
        assert_eq!(speed(&steps(1, |_| 60.0)), None);
    }

    #[test]
    fn a_hiccup_ruins_a_slice_and_not_the_run_and_waits_in_bursts_count() {
        let hiccup = speed(&steps(81, |step| if step == 40 || step <= 8 { 0.5 } else { 0.01 })).unwrap();
        assert!((hiccup.tokens_per_second - 10_000.0).abs() < 1e-6 && (hiccup.step_seconds - 0.01).abs() < 1e-9);
        let bursts = speed(&steps(81, |step| if step % 4 == 0 { 0.05 } else { 0.01 })).unwrap();
        assert!((bursts.tokens_per_second - 5_000.0).abs() < 1_000.0);
    }
}
