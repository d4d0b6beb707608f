//! One short run of the recipe, in a process of its own.

use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use tempfile::TempDir;

use crate::failure::Failure;
use crate::metrics::{StepMetrics, Summary};
use crate::recipe::{Recipe, RecipeArgs};

/// Steps before those that are measured: they compile kernels and touch memory for the first time.
const WARMUP: u64 = 1;
/// Time that a trial always gets, for what it has to tokenise or compile anew.
const GRACE: Duration = Duration::from_mins(1);
/// A trial that takes so many times as long as the first one, which is the recipe as it is, is ended.
const HOPELESS: u32 = 4;
/// The same where a step may hold many times as many tokens.
const HOPELESS_PACKED: u32 = 40;

/// What a short run showed, over its measured steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Tokens that carry loss over the time of the steps.
    pub(super) target_tokens_per_second: f64,
    /// Tokens that are not padding over the time of the steps.
    pub(super) tokens_per_second: f64,
    /// Mean time of a step.
    pub(super) step_seconds: f64,
    /// Share of that time in which the loop waited for data.
    pub(super) data_wait_share: f64,
    /// The most memory of the GPU, or of the process where it trained on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peak_memory_bytes: Option<u64>,
    /// Loss of the last step: the same for all trials that keep the numbers.
    pub(super) loss: f64,
}

/// Starts trials.
pub(super) struct Runner {
    program: PathBuf,
    recipe: RecipeArgs,
    steps: u64,
    folder: TempDir,
    num_trials: u32,
    /// Changes without which so few steps would be refused, or take long.
    shortened: Vec<String>,
    /// Time that the first trial took, loading included.
    first: Option<Duration>,
    /// Exit code of the last trial.
    pub(super) exit_code: Option<i32>,
}

impl Runner {
    /// Trials of `recipe`, which `args` have been read as, of so many measured steps.
    pub(super) fn new(args: &RecipeArgs, recipe: &Recipe, steps: u64) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(Failure::running)?;
        let mut shortened = Vec::new();
        if recipe.scheduler.warmup_steps.is_some() {
            shortened.push("scheduler.warmup_steps=0".to_owned());
        }
        // Without rows to evaluate on these keys are refused.
        if recipe.data.eval_split.is_some() || !recipe.data.eval.is_empty() {
            shortened.push("eval.max_batches=1".to_owned());
            shortened.push("eval.eval_steps=1000000".to_owned());
        }
        let program = std::env::current_exe().map_err(Failure::running)?;
        Ok(Self {
            program,
            recipe: args.clone(),
            steps,
            folder,
            num_trials: 0,
            shortened,
            first: None,
            exit_code: None,
        })
    }

    /// Trains for a few steps with `changes`, and reads what that run wrote. It is ended where it takes many times as long
    /// as the first one.
    ///
    /// # Errors
    ///
    /// The last lines of what the run said.
    pub(super) fn measure(&mut self, changes: &[String]) -> Result<Figures, String> {
        self.num_trials += 1;
        let output = self.folder.path().join(format!("trial-{}", self.num_trials));
        let mut command = Command::new(&self.program);
        command.arg(&self.recipe.recipe).arg("--quiet").stdin(Stdio::null()).stdout(Stdio::null());
        for change in &self.recipe.set {
            command.args(["--set", change]);
        }
        if let Some(device) = &self.recipe.device {
            command.args(["--device", device]);
        }
        // What a short run has no time for, and what would end it early or be measured with it.
        let steps = WARMUP + self.steps;
        let fixed = [
            format!("output_dir={}", serde_json::Value::from(output.to_string_lossy())),
            format!("train.max_steps={steps}"),
            "eval.generate=[]".to_owned(),
            "checkpoint.save_steps=1000000".to_owned(),
            "logging.tensorboard=false".to_owned(),
        ];
        for change in fixed.iter().chain(&self.shortened).chain(changes) {
            command.args(["--set", change]);
        }
        let child = command.stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
        let packs = changes.iter().any(|change| change == "data.packing=true");
        let times = if packs { HOPELESS_PACKED } else { HOPELESS };
        let limit = self.first.map(|first| GRACE + times * first);
        let started = Instant::now();
        let (exit_code, outcome) = wait(child, limit);
        self.exit_code = exit_code;
        outcome?;
        self.first.get_or_insert_with(|| started.elapsed());
        let figures = read(&output);
        // The next trial's disk and page cache are its own.
        drop(fs::remove_dir_all(&output));
        figures
    }
}

/// Waits for a trial to end: its exit code, and what it said where it did not end well.
fn wait(mut child: Child, limit: Option<Duration>) -> (Option<i32>, Result<(), String>) {
    let started = Instant::now();
    let mut stderr = child.stderr.take();
    let told = std::thread::spawn(move || {
        let mut text = Vec::new();
        // What cannot be read is not told.
        drop(stderr.as_mut().map(|stderr| stderr.read_to_end(&mut text)));
        String::from_utf8_lossy(&text).into_owned()
    });
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if limit.is_some_and(|limit| started.elapsed() > limit) => {
                drop(child.kill());
                drop(child.wait());
                return (None, Err("much slower, so it was ended".into()));
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            Err(error) => return (None, Err(error.to_string())),
        }
    };
    let told = told.join().unwrap_or_default();
    if status.success() {
        return (Some(0), Ok(()));
    }
    let error = told.split_once("error: ").map_or(told.as_str(), |(_, error)| error);
    let error = if error.trim().is_empty() { format!("ended with {status}") } else { error.trim().to_owned() };
    (status.code(), Err(error))
}

/// The figures of the run in a folder.
fn read(output: &std::path::Path) -> Result<Figures, String> {
    let text = fs::read_to_string(output.join("metrics.jsonl")).map_err(|error| error.to_string())?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let steps: Vec<StepMetrics> =
        lines.filter(|line| line.get("loss").is_some()).filter_map(|line| serde_json::from_value(line).ok()).collect();
    let summary = fs::read(output.join("summary.json")).map_err(|error| error.to_string())?;
    let summary: Summary = serde_json::from_slice(&summary).map_err(|error| error.to_string())?;
    let figures = of_steps(&steps).ok_or("it took no step that could be measured")?;
    let peak_memory_bytes = summary.peak_gpu_memory_bytes.or(summary.peak_host_memory_bytes);
    Ok(Figures { peak_memory_bytes, ..figures })
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a few steps")]
fn of_steps(steps: &[StepMetrics]) -> Option<Figures> {
    let measured: Vec<_> = steps.iter().filter(|step| step.step > WARMUP).collect();
    let seconds: f64 = measured.iter().map(|step| step.step_seconds).sum();
    let count = |of: fn(&StepMetrics) -> u64| measured.iter().map(|step| of(step)).sum::<u64>() as f64;
    (seconds > 0.0).then(|| Figures {
        target_tokens_per_second: count(|step| step.target_tokens) / seconds,
        tokens_per_second: count(|step| step.tokens) / seconds,
        step_seconds: seconds / measured.len() as f64,
        data_wait_share: measured.iter().map(|step| step.data_wait_seconds).sum::<f64>() / seconds,
        peak_memory_bytes: None,
        loss: measured.last().map_or(f64::NAN, |step| step.loss),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_steps_after_the_first() {
        let step = |step: u64, seconds: f64| StepMetrics {
            step,
            step_seconds: seconds,
            data_wait_seconds: seconds / 4.0,
            tokens: 100,
            target_tokens: 50,
            loss: 2.0,
            ..StepMetrics::default()
        };
        let figures = of_steps(&[step(1, 60.0), step(2, 1.0), step(3, 3.0)]).unwrap();
        assert_eq!((figures.target_tokens_per_second, figures.tokens_per_second), (25.0, 50.0));
        assert_eq!((figures.step_seconds, figures.data_wait_share), (2.0, 0.25));
        assert_eq!(of_steps(&[step(1, 60.0)]), None);
    }
}
