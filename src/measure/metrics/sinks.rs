//! All sinks of a run, called by name from the loop.

use std::io;
use std::path::{Path, PathBuf};

use burn_train::Interrupter;

use super::append::AppendLog;
use super::console::Console;
use super::dashboard::Dashboard;
use super::jsonl::{self, KeepUpTo};
use super::mlflow::MlFlow;
use super::pace::Pace;
use super::tensorboard::TensorBoard;
use super::{EvalMetrics, Finding, MetricsError, SUMMARY_FILE, Sample, StepMetrics, Summary, UNFINISHED_FILE};
use crate::config::LoggingConfig;
use crate::measure::figures::{Rollout, eval_scalars, tagged_scalars};
use crate::util::faults::backend_log;
use crate::util::files;

const MAX_SUMMARY_WARNINGS: usize = 100;

/// What the console shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    /// Nothing at all: another rank shows it.
    Nothing,
    /// Warnings only.
    Warnings,
    /// Everything, with a bar on a terminal.
    All,
    /// The dashboard instead of the bar.
    Dashboard,
}

/// What [`Sinks::open`] needs besides the recipe's `[logging]`.
pub struct SinkOptions<'a> {
    /// The run's folder; it exists.
    pub run_dir: &'a Path,
    /// The step of the checkpoint that the run resumes from. Anything in the files after it is dropped.
    pub resume_step: Option<u64>,
    /// Whether that checkpoint includes the evaluation after its step; if not, it is made and written again.
    pub has_evaluated: bool,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Steps between evaluations; at its end alone where absent.
    pub eval_steps: Option<u64>,
    /// What people see.
    pub shows: Shows,
    /// Whether answers that are trained on are recorded.
    pub has_rollouts: bool,
    /// Where the dashboard's user asks training to stop.
    pub interrupter: Interrupter,
}

/// Everything that figures are written to. No call fails: a file that cannot be written warns once and is tried again at
/// every step, while training continues.
pub struct Sinks {
    console: Console,
    metrics: AppendLog,
    samples: AppendLog,
    rollouts: Option<AppendLog>,
    tensorboard: Option<TensorBoard>,
    mlflow: Option<MlFlow>,
    run_dir: PathBuf,
    interrupter: Interrupter,
    warnings: Vec<String>,
    num_warnings_left_out: u64,
    has_ended: bool,
    /// Files that are no longer true after a step.
    outdated_by_step: Vec<PathBuf>,
}

impl Sinks {
    /// Opens `metrics.jsonl`, `samples.jsonl`, `rollouts.jsonl` where answers are recorded, and `tensorboard/` in the run's folder, and the console.
    ///
    /// # Errors
    /// If one of the files cannot be opened. This is an error, since nothing has been computed yet.
    pub fn open(config: &LoggingConfig, options: SinkOptions<'_>) -> Result<Self, MetricsError> {
        let SinkOptions { run_dir, resume_step, has_evaluated, total_steps, eval_steps, shows, .. } = options;
        let interrupter = options.interrupter;
        let resume = resume_step.map(|step| KeepUpTo { step, has_evaluated });
        let open = |name| {
            let path = run_dir.join(name);
            jsonl::open(name, &path, resume).map_err(|source| MetricsError { path, action: "open", source })
        };
        let ((metrics, lost), (samples, lost_samples)) = (open("metrics.jsonl")?, open("samples.jsonl")?);
        let rollouts = options.has_rollouts.then(|| open("rollouts.jsonl")).transpose()?;
        let (rollouts, lost_rollouts) = rollouts.map_or((None, None), |(log, lost)| (Some(log), lost));
        let tensorboard = config.tensorboard.then(|| {
            let path = run_dir.join("tensorboard");
            TensorBoard::open(&path, resume_step).map_err(|source| MetricsError { path, action: "open", source })
        });
        let tensorboard = tensorboard.transpose()?;
        let mlflow = MlFlow::open(config, run_dir, resume_step.is_some());
        let mlflow =
            mlflow.map_err(|source| MetricsError { path: run_dir.to_owned(), action: "use MLflow", source })?;
        // Before the console: its bar would leave traces on the dashboard's terminal.
        let first_step = resume_step.unwrap_or(0);
        let (steps, pace) = ([first_step, total_steps], Pace::new(first_step, total_steps, eval_steps));
        let dashboard = (shows == Shows::Dashboard)
            .then(|| Dashboard::open(interrupter.clone(), steps, pace.clone(), &run_dir.display().to_string()));
        let (dashboard, refusal) = match dashboard.transpose() {
            Ok(dashboard) => (dashboard, None),
            Err(reason) => (None, Some(reason)),
        };
        if let (Some(dashboard), Some(_)) = (&dashboard, resume_step) {
            dashboard.earlier(&std::fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default());
        }
        let console = Console::new(shows == Shows::Warnings, dashboard, config.logging_steps, steps, pace);
        let mut sinks = Self {
            console: if shows == Shows::Nothing { console.silent() } else { console },
            metrics,
            samples,
            rollouts,
            tensorboard,
            mlflow,
            run_dir: run_dir.to_owned(),
            interrupter,
            warnings: Vec::new(),
            num_warnings_left_out: 0,
            has_ended: false,
            outdated_by_step: Vec::new(),
        };
        if let Some(reason) = refusal {
            sinks.warn(&format!("no dashboard: {reason}"));
        }
        sinks.warn_all(lost.into_iter().chain(lost_samples).chain(lost_rollouts));
        backend_log::hold();
        Ok(sinks)
    }

    /// Writes the recipe of the steps after `step` to TensorBoard's text and `HParams` tabs and to MLflow's parameters.
    pub fn recipe(&mut self, step: u64, toml: &str) {
        self.tensorboard(|sink| sink.recipe(step, toml));
        self.mlflow(|sink| sink.recipe(toml));
    }

    /// Takes files of an earlier end of the run. They are deleted when a step is taken or the run ends.
    pub fn delete_with_first_step(&mut self, files: impl IntoIterator<Item = PathBuf>) {
        self.outdated_by_step.extend(files);
    }

    /// The first step begins: the time left is estimated from here.
    pub fn start(&mut self) {
        self.console.start();
    }

    /// Writes the figures of a step everywhere.
    pub fn step(&mut self, step: &StepMetrics) {
        self.delete_outdated(None);
        self.warn_all(backend_log::take_held());
        let warning = self.metrics.append(jsonl::line(step));
        self.warn_all(warning);
        let mut scalars = tagged_scalars(step);
        // A mean over no target tokens is not a point of a curve.
        scalars.retain(|(_, value)| step.target_tokens > 0 || value.is_finite());
        let of_rewards = step.reward_scalars();
        let scalars: Vec<_> =
            scalars.into_iter().map(|(tag, value)| (tag.to_owned(), value)).chain(of_rewards).collect();
        self.tensorboard(|sink| sink.scalars(step.step, &scalars));
        self.mlflow(|sink| sink.scalars(step.step, &scalars));
        if step.anomaly.is_some() || !step.findings.is_empty() {
            let names = step.anomaly.iter().chain(&step.findings).cloned().collect::<Vec<_>>().join(", ");
            self.tensorboard(|sink| sink.text(step.step, "anomalies", &names));
        }
        self.console.step(step);
    }

    /// Shows a finding that has lasted for some time at this step.
    pub fn finding(&mut self, step: u64, finding: &Finding) {
        self.tensorboard(|sink| sink.text(step, &format!("diagnosis/{}", finding.rule), &finding.markdown()));
        self.console.finding(step, finding);
    }

    /// Shows that an evaluation has done a number of its micro-batches.
    pub fn evaluating(&mut self, done: usize, total: usize) {
        self.console.evaluating(done, total);
    }

    /// An evaluation after `step` has ended: it took so long, samples and score included.
    pub fn evaluated(&mut self, step: u64, seconds: f64) {
        self.console.evaluated(step, seconds);
    }

    /// Writes the figures of an evaluation everywhere.
    pub fn eval(&mut self, eval: &EvalMetrics) {
        let warning = self.metrics.append(jsonl::line(eval));
        self.warn_all(warning);
        let scalars = eval_scalars(eval);
        self.tensorboard(|sink| sink.scalars(eval.step, &scalars));
        self.mlflow(|sink| sink.scalars(eval.step, &scalars));
        self.console.eval(eval);
    }

    /// Writes a text that the model wrote. `index` is the number of its prompt in the recipe.
    pub fn sample(&mut self, index: usize, sample: &Sample) {
        let warning = self.samples.append(jsonl::line(sample));
        self.warn_all(warning);
        // Markdown shows text that is indented by four as it is.
        let text = format!("{}\n{}", sample.prompt, sample.text).replace('\n', "\n    ");
        self.tensorboard(|sink| sink.text(sample.step, &format!("samples/{index}"), &format!("    {text}")));
        self.console.sample(index, sample);
    }

    /// Records answers that are trained on.
    pub fn rollouts(&mut self, rollouts: &[Rollout]) {
        let lines: Vec<u8> = rollouts.iter().flat_map(jsonl::line).collect();
        let warning = self.rollouts.as_mut().filter(|_| !lines.is_empty()).and_then(|log| log.append(lines));
        self.warn_all(warning);
    }

    /// Shows people a line that is not a figure.
    pub fn note(&mut self, text: &str) {
        self.console.note(text);
    }

    /// Shows people a line, even with `--quiet`.
    pub fn say(&mut self, text: &str) {
        self.console.say(text);
    }

    /// Forces the files to disk. Failures are not reported here but where the files are written.
    pub fn sync(&mut self) {
        for log in self.logs() {
            drop(log.sync());
        }
    }

    /// Shows a warning, even with `--quiet`. summary.json lists the first of them.
    pub fn warn(&mut self, text: &str) {
        self.console.warn(text);
        if self.warnings.len() < MAX_SUMMARY_WARNINGS {
            self.warnings.push(text.to_owned());
        } else {
            self.num_warnings_left_out += 1;
        }
    }

    /// Whether the dashboard's user, or another holder of the interrupter, asks training to stop.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        self.interrupter.should_stop()
    }

    /// Writes the final figures, with this run's warnings added, to summary.json, or to unfinished.json if the run did
    /// not finish. Gives the terminal back and shows the figures.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn finish(&mut self, summary: &Summary) -> Result<(), MetricsError> {
        self.console.release();
        self.warn_all(backend_log::take_held());
        let findings = summary.diagnosis.iter().map(Finding::markdown).collect::<Vec<_>>().join("\n\n");
        self.tensorboard(|sink| sink.text(summary.steps, "diagnosis", &findings));
        self.tensorboard(|sink| sink.end(summary.steps, summary.outcome.is_finished()));
        self.mlflow(|sink| sink.end(summary.outcome));
        self.tell_unwritten();
        let path = self.run_dir.join(if summary.outcome.is_finished() { SUMMARY_FILE } else { UNFINISHED_FILE });
        self.delete_outdated(Some(&path));
        let mut summary = summary.clone();
        summary.warnings.append(&mut self.warnings);
        if self.num_warnings_left_out > 0 {
            summary.warnings.push(format!("{} more warnings", self.num_warnings_left_out));
        }
        self.console.finish(&summary);
        // The folder may have been deleted meanwhile.
        let written = std::fs::create_dir_all(&self.run_dir).and_then(|()| {
            let mut json = serde_json::to_vec_pretty(&summary)?;
            json.push(b'\n');
            files::write(&path, &json)
        });
        written.map_err(|source| MetricsError { path, action: "write", source })
    }

    /// Deletes files that are no longer true, except for a file that is about to be replaced.
    fn delete_outdated(&mut self, replaced: Option<&Path>) {
        for file in std::mem::take(&mut self.outdated_by_step) {
            if replaced == Some(&file) {
                continue;
            }
            match std::fs::remove_file(&file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    self.warn(&format!("{}: of an earlier start, cannot be deleted: {error}", file.display()));
                }
                _ => {}
            }
        }
    }

    /// Warns once of the records that are in no file.
    fn tell_unwritten(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let warnings: Vec<String> = self.logs().filter_map(AppendLog::finish).collect();
        self.warn_all(warnings);
    }

    fn logs(&mut self) -> impl Iterator<Item = &mut AppendLog> {
        let tensorboard = self.tensorboard.as_mut().map(|sink| &mut sink.log);
        [&mut self.metrics, &mut self.samples].into_iter().chain(self.rollouts.as_mut()).chain(tensorboard)
    }

    fn tensorboard(&mut self, write: impl FnOnce(&mut TensorBoard) -> Option<String>) {
        let warning = self.tensorboard.as_mut().and_then(write);
        self.warn_all(warning);
    }

    fn mlflow(&mut self, send: impl FnOnce(&mut MlFlow)) {
        let warnings = self.mlflow.as_mut().map(|sink| {
            send(sink);
            sink.warnings()
        });
        self.warn_all(warnings.unwrap_or_default());
    }

    /// Takes a warning or several.
    fn warn_all(&mut self, warnings: impl IntoIterator<Item = String>) {
        warnings.into_iter().for_each(|warning| self.warn(&warning));
    }
}

impl Drop for Sinks {
    fn drop(&mut self) {
        self.console.release();
        self.warn_all(backend_log::release());
        self.tell_unwritten();
        self.console.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::figures::tests::full_step;

    fn open(run_dir: &Path, resume_step: Option<u64>) -> Result<Sinks, MetricsError> {
        let options = SinkOptions {
            run_dir,
            resume_step,
            has_evaluated: true,
            total_steps: 10,
            eval_steps: None,
            shows: Shows::Warnings,
            has_rollouts: false,
            interrupter: Interrupter::new(),
        };
        Sinks::open(&LoggingConfig::default(), options)
    }

    #[test]
    fn a_run_leaves_every_file_of_the_contract() {
        let folder = tempfile::tempdir().unwrap();
        let mut sinks = open(folder.path(), None).unwrap();
        sinks.recipe(0, "seed = 1");
        sinks.eval(&EvalMetrics { eval_loss: Some(2.0), ..EvalMetrics::default() });
        sinks.sample(0, &Sample { step: 0, prompt: "Hi".into(), text: " there\nyou".into(), reward: None });
        sinks.step(&full_step(1));
        sinks.warn("two rows were cut");
        sinks.finish(&Summary { steps: 1, warnings: vec!["from before".into()], ..Summary::default() }).unwrap();
        let lines = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!((&lines[0]["eval_loss"], &lines[1]["loss"]), (&2.0.into(), &2.5.into()));
        let sample = std::fs::read_to_string(folder.path().join("samples.jsonl")).unwrap();
        assert_eq!(sample, "{\"step\":0,\"prompt\":\"Hi\",\"text\":\" there\\nyou\"}\n");
        let summary: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.path().join("summary.json")).unwrap()).unwrap();
        assert_eq!(summary["warnings"], serde_json::json!(["from before", "two rows were cut"]));
        assert_eq!(std::fs::read_dir(folder.path().join("tensorboard")).unwrap().count(), 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_warns_once_and_training_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("samples.jsonl")).unwrap();
        let mut sinks = open(folder.path(), Some(0)).unwrap();
        for step in 0..3 {
            sinks.sample(0, &Sample { step, ..Sample::default() });
        }
        sinks.step(&full_step(1));
        assert_eq!(sinks.warnings.len(), 1, "{:?}", sinks.warnings);
        assert!(
            sinks.warnings[0].starts_with("samples.jsonl cannot be written (No space left"),
            "{:?}",
            sinks.warnings
        );
        drop(sinks);
        assert_eq!(std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap().lines().count(), 1);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let error = open(&folder.path().join("nowhere"), None).err().unwrap().to_string();
        assert!(error.contains("nowhere/metrics.jsonl: cannot open: "), "{error}");
    }
}
