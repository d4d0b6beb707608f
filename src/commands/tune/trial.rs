//! One short run of the recipe, in a process of its own.

use std::collections::HashMap;
use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use tempfile::TempDir;

use super::slices::{self, WARMUP};
use super::verdict::median;
use crate::failure::Failure;
use crate::metrics::{StepMetrics, Summary};
use crate::recipe::{Recipe, RecipeArgs};
use crate::train::config::SchedulerConfig;

/// Time that a trial always gets, for what it has to tokenise or compile anew.
const GRACE: Duration = Duration::from_mins(1);
/// A trial that takes so many times as long as the first, of the recipe as it is, is ended.
const HOPELESS: u32 = 4;
/// The same where a step may hold many times as many tokens.
const HOPELESS_PACKED: u32 = 40;
/// What a trial gets beyond the time for all, since it may be about to end.
const LAST_GRACE: Duration = Duration::from_secs(5);
/// Why a trial was not run, or not to its end.
pub(super) const OUT_OF_TIME: &str = "not tried, since the time is spent (--max-minutes)";
/// The most steps of a trial, however short they are.
const MAX_STEPS: f64 = 10_000.0;

/// What short runs showed, over their measured steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Tokens that carry loss over the time of the steps: of the median slice of a run, and of the median run.
    pub(super) target_tokens_per_second: f64,
    /// The same of tokens that are not padding: by this trials are compared, since how many of them carry loss is the
    /// rows'.
    pub(super) tokens_per_second: f64,
    /// Time of a step.
    pub(super) step_seconds: f64,
    /// Share of that time in which the loop waited for data.
    pub(super) data_wait_share: f64,
    /// Updates of an epoch.
    #[serde(skip)]
    pub(super) steps_of_epoch: f64,
    /// Time of a run, from the start of its process to its end.
    pub(super) run_seconds: f64,
    /// Keys of the recipe that the diagnosis of a run would change, the worst first.
    #[serde(skip)]
    pub(super) advised_keys: Vec<String>,
    /// The most memory of the GPU, or of the process where it trained on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) peak_memory_bytes: Option<u64>,
    /// Loss of the last step that every trial takes: the same for all trials that keep the numbers.
    pub(super) loss: f64,
}

impl Figures {
    /// The figures of several runs of the same settings; `None` of no run.
    pub(super) fn of_runs(runs: &[Self]) -> Option<Self> {
        let all = |of: fn(&Self) -> f64| median(&runs.iter().map(of).collect::<Vec<_>>());
        Some(Self {
            target_tokens_per_second: all(|run| run.target_tokens_per_second),
            tokens_per_second: all(|run| run.tokens_per_second),
            step_seconds: all(|run| run.step_seconds),
            data_wait_share: all(|run| run.data_wait_share),
            steps_of_epoch: all(|run| run.steps_of_epoch),
            run_seconds: all(|run| run.run_seconds),
            advised_keys: runs.last()?.advised_keys.clone(),
            peak_memory_bytes: runs.iter().map(|run| run.peak_memory_bytes).max()?,
            loss: runs.first()?.loss,
        })
    }
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

/// How long trials may take.
#[derive(Debug, Default)]
struct Patience {
    /// Time that the first trial of the asked length took, loading included: that of the recipe as it is. Not the longest,
    /// or each slow trial would let the next one be slower by [`HOPELESS`] still.
    first: Option<Duration>,
}

impl Patience {
    /// Takes in the time of a trial.
    fn learn(&mut self, took: Duration) {
        self.first.get_or_insert(took);
    }

    /// The time of the next trial where so much is left for all, and why it is ended after it.
    fn limit(&self, packs: bool, left: Option<Duration>) -> Option<(Duration, &'static str)> {
        let times = if packs { HOPELESS_PACKED } else { HOPELESS };
        let hopeless = self.first.map(|first| (GRACE + times * first, "much slower, so it was ended"));
        let spent = left.map(|left| (left + LAST_GRACE, OUT_OF_TIME));
        hopeless.into_iter().chain(spent).min_by_key(|(limit, _)| *limit)
    }
}

/// Starts trials.
pub(super) struct Runner {
    program: PathBuf,
    recipe: RecipeArgs,
    length: Length,
    folder: TempDir,
    num_trials: u32,
    /// Changes without which so few steps would be refused, take long, or be others with their number.
    shortened: Vec<String>,
    /// Measured steps by the changes of a trial, and those of the last one.
    num_steps: HashMap<Vec<String>, u64>,
    latest_num_steps: u64,
    patience: Patience,
    latest_took: Duration,
    /// Exit code of the last trial.
    pub(super) exit_code: Option<i32>,
}

impl Runner {
    /// Trials of `recipe`, which `args` have been read as, of at least such a length.
    pub(super) fn new(args: &RecipeArgs, recipe: &Recipe, length: Length) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(Failure::running)?;
        // Learning rates that do not depend on the number of steps, nor do these on the number of rows.
        let mut shortened = vec![
            "train.num_epochs=1000000".to_owned(),
            "scheduler.lr_scheduler=constant".to_owned(),
            "scheduler.min_lr_ratio=0".to_owned(),
        ];
        let SchedulerConfig { warmup_steps, warmup_ratio, .. } = &recipe.scheduler;
        shortened.extend(warmup_steps.map(|_| "scheduler.warmup_steps=0".to_owned()));
        shortened.extend(warmup_ratio.map(|_| "scheduler.warmup_ratio=0".to_owned()));
        // Without rows to evaluate on these keys are refused.
        if recipe.data.eval_split.is_some() || !recipe.data.eval.is_empty() {
            shortened.push("eval.max_batches=1".to_owned());
            shortened.push("eval.eval_steps=1000000".to_owned());
        }
        let program = std::env::current_exe().map_err(Failure::running)?;
        Ok(Self {
            program,
            recipe: args.clone(),
            length,
            folder,
            num_trials: 0,
            shortened,
            num_steps: HashMap::new(),
            latest_num_steps: length.steps,
            patience: Patience::default(),
            latest_took: Duration::ZERO,
            exit_code: None,
        })
    }

    /// Trains for a while with `changes`, and reads what that run wrote. It is ended where it takes many times as long as
    /// the first one, or goes on after `until`.
    ///
    /// # Errors
    ///
    /// The last lines of what the run said.
    pub(super) fn measure(&mut self, changes: &[String], until: Option<Instant>) -> Result<Figures, String> {
        if let Some(&steps) = self.num_steps.get(changes) {
            self.latest_num_steps = steps;
            return self.train(changes, steps, until);
        }
        // Unknown settings take about as long as those before; packed ones may take many times as long.
        let steps = if packs(changes) { self.length.steps } else { self.latest_num_steps };
        let figures = self.train(changes, steps, until)?;
        let enough = self.length.steps_of(figures.step_seconds);
        // Too short by far; where it is not, trials that keep the numbers keep the number of steps, too.
        let is_long_enough = 10 * steps >= 7 * enough;
        self.latest_num_steps = if is_long_enough && steps <= 2 * enough { steps } else { enough };
        self.num_steps.insert(changes.to_vec(), self.latest_num_steps);
        let figures = if is_long_enough { figures } else { self.train(changes, enough, until)? };
        self.patience.learn(self.latest_took);
        Ok(figures)
    }

    fn train(&mut self, changes: &[String], num_steps: u64, until: Option<Instant>) -> Result<Figures, String> {
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
        let fixed = [
            format!("output_dir={}", serde_json::Value::from(output.to_string_lossy())),
            format!("train.max_steps={}", WARMUP + num_steps),
            "eval.generate=[]".to_owned(),
            "checkpoint.save_steps=1000000".to_owned(),
            "logging.tensorboard=false".to_owned(),
            "watchdog.patience=0".to_owned(),
            "watchdog.max_skipped_steps=0".to_owned(),
        ];
        for change in fixed.iter().chain(&self.shortened).chain(changes) {
            command.args(["--set", change]);
        }
        let child = command.stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
        let started = Instant::now();
        let limit = self.patience.limit(packs(changes), until.map(|until| until.saturating_duration_since(started)));
        let (exit_code, outcome) = wait(child, limit);
        self.exit_code = exit_code;
        outcome?;
        self.latest_took = started.elapsed();
        let figures = read(&output, WARMUP + self.length.steps, self.latest_took);
        // The next trial's disk and page cache are its own.
        drop(fs::remove_dir_all(&output));
        figures
    }
}

fn packs(changes: &[String]) -> bool {
    changes.iter().any(|change| change == "data.packing=true")
}

/// Waits for a trial to end, but not for longer than `limit`, which says why: its exit code, and what it said where it did
/// not end well.
fn wait(mut child: Child, limit: Option<(Duration, &str)>) -> (Option<i32>, Result<(), String>) {
    let started = Instant::now();
    let mut stderr = child.stderr.take();
    let told = std::thread::spawn(move || {
        let mut text = Vec::new();
        // What cannot be read is not told.
        drop(stderr.as_mut().map(|stderr| stderr.read_to_end(&mut text)));
        String::from_utf8_lossy(&text).into_owned()
    });
    let status = loop {
        let spent = limit.filter(|(limit, _)| started.elapsed() > *limit);
        match (child.try_wait(), spent) {
            (Ok(Some(status)), _) => break status,
            (Ok(None), Some((_, why))) => {
                drop(child.kill());
                drop(child.wait());
                return (None, Err(why.into()));
            }
            (Ok(None), None) => std::thread::sleep(Duration::from_millis(10)),
            (Err(error), _) => return (None, Err(error.to_string())),
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

/// The figures of the run in a folder, which `took` so long; the loss of step `loss_step`.
fn read(output: &std::path::Path, loss_step: u64, took: Duration) -> Result<Figures, String> {
    let text = fs::read_to_string(output.join("metrics.jsonl")).map_err(|error| error.to_string())?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let steps: Vec<StepMetrics> =
        lines.filter(|line| line.get("loss").is_some()).filter_map(|line| serde_json::from_value(line).ok()).collect();
    let summary = fs::read(output.join("summary.json")).map_err(|error| error.to_string())?;
    let summary: Summary = serde_json::from_slice(&summary).map_err(|error| error.to_string())?;
    let speed = slices::speed(&steps).ok_or("it took no step that could be measured")?;
    Ok(Figures {
        target_tokens_per_second: speed.target_tokens_per_second,
        tokens_per_second: speed.tokens_per_second,
        step_seconds: speed.step_seconds,
        data_wait_share: speed.data_wait_share,
        steps_of_epoch: speed.steps_of_epoch,
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
    fn a_slow_trial_gives_the_next_no_more_time_and_none_outlasts_the_time_for_all() {
        let seconds = Duration::from_secs;
        let mut patience = Patience::default();
        assert_eq!(patience.limit(false, None), None);
        patience.learn(seconds(10));
        patience.learn(seconds(90));
        assert_eq!(patience.limit(false, None).unwrap().0, seconds(100));
        assert_eq!(patience.limit(true, Some(seconds(1000))).unwrap().0, seconds(460));
        assert_eq!(patience.limit(true, Some(seconds(20))), Some((seconds(25), OUT_OF_TIME)));
        let child = Command::new("sleep").arg("60").stderr(Stdio::piped()).spawn().unwrap();
        let started = Instant::now();
        assert_eq!(wait(child, Some((seconds(0), OUT_OF_TIME))), (None, Err(OUT_OF_TIME.to_owned())));
        assert!(started.elapsed() < seconds(30));
    }

    #[test]
    fn figures_of_several_runs_are_those_of_the_median_run() {
        let figures = |rate: f64, peak: u64| Figures {
            target_tokens_per_second: rate,
            tokens_per_second: 2.0 * rate,
            step_seconds: 1.0 / rate,
            data_wait_share: 0.0,
            steps_of_epoch: 12.0,
            run_seconds: 1.0,
            advised_keys: Vec::new(),
            peak_memory_bytes: Some(peak),
            loss: 1.5,
        };
        let all = Figures::of_runs(&[figures(10.0, 1), figures(1.0, 3), figures(20.0, 2)]);
        assert_eq!(all, Some(figures(10.0, 3)));
        assert_eq!(Figures::of_runs(&[]), None);
    }
}
