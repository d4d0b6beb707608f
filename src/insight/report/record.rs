//! The files in a run's folder.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::ReportError;
use super::axis::Unit;
use super::columns::Columns;
use crate::measure::figures::Rollout;
use crate::measure::metrics::{Outcome, SUMMARY_FILE, Sample, UNFINISHED_FILE};
use crate::util::stats::{mean, median};

/// How much of rollouts.jsonl is read.
const MAX_ANSWER_BYTES: u64 = 8 << 20;

/// The parsed files of a run. Only metrics.jsonl is required: a killed run has no summary.
#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    pub(super) folder: PathBuf,
    pub(super) steps: Columns,
    pub(super) evaluations: Columns,
    /// Steps with an anomaly, and its description.
    pub(super) anomalies: Vec<(u64, String)>,
    /// Steps at which the diagnosis reported a lasting finding, and steps far slower than others.
    pub(super) findings: Vec<(u64, String)>,
    /// Reasons for throttled clocks of the GPU, and in how many steps. A step counts by the share of its samples.
    pub(super) throttles: BTreeMap<String, f64>,
    /// Unreadable lines of metrics.jsonl: a killed process may leave one.
    pub(super) num_torn_lines: usize,
    pub(super) samples: Vec<Sample>,
    /// Answers of "grpo" for the last step that has some.
    pub(super) answers: Vec<Rollout>,
    /// summary.json or unfinished.json, unparsed, so that those of other versions can be read too; empty where there is
    /// neither.
    pub(super) summary: Map<String, Value>,
    pub(super) given_recipe: Option<String>,
    pub(super) resolved_recipe: Option<String>,
    /// The resolved recipe, parsed.
    pub(super) settings: toml::Table,
    pub(super) environment: Map<String, Value>,
    pub(super) memory_plan: Map<String, Value>,
}

impl Record {
    /// Reads a run's folder.
    ///
    /// # Errors
    /// A folder that does not exist or holds no run; files that cannot be read. Except for metrics.jsonl, a file with
    /// unexpected content counts as absent.
    pub(super) fn read(folder: &Path) -> Result<Self, ReportError> {
        let no_run = |why: &str| ReportError::NoRun {
            path: folder.to_owned(),
            why: format!("{why}\n  hint: give the `output_dir` of a run"),
        };
        if !folder.is_dir() {
            return Err(no_run("there is no such folder"));
        }
        let mut record = Self { folder: folder.to_owned(), ..Self::default() };
        let is_run = record.read_metrics()?;
        record.samples = lines(&folder.join("samples.jsonl"))?;
        record.answers = last_answers(&folder.join("rollouts.jsonl"))?;
        record.summary = match json(&folder.join(SUMMARY_FILE))? {
            Some(summary) => summary,
            None => json(&folder.join(UNFINISHED_FILE))?.unwrap_or_default(),
        };
        record.environment = json(&folder.join("environment.json"))?.unwrap_or_default();
        record.memory_plan = json(&folder.join("memory_plan.json"))?.unwrap_or_default();
        record.given_recipe = text(&folder.join("recipe.toml"))?;
        record.resolved_recipe = text(&folder.join("resolved.toml"))?;
        record.settings = record.resolved_recipe.as_ref().and_then(|text| text.parse().ok()).unwrap_or_default();
        if !is_run {
            return Err(no_run("not a run, there is no metrics.jsonl in it"));
        }
        if record.evaluations.len() == 0 { record.with_steps() } else { Ok(record) }
    }

    /// The record, if it has steps.
    pub(super) fn with_steps(self) -> Result<Self, ReportError> {
        if self.steps.len() > 0 {
            return Ok(self);
        }
        let torn = match self.num_torn_lines {
            0 => String::new(),
            1 => ", and one line that cannot be read".to_owned(),
            n => format!(", and {n} lines that cannot be read"),
        };
        Err(ReportError::NoRun { path: self.folder, why: format!("metrics.jsonl holds no step{torn}") })
    }

    /// How many epochs the run took: `1 epoch`, `0.5 epochs`.
    pub(super) fn epochs_text(&self) -> Option<String> {
        let epochs = Unit::Plain.text(self.steps.last("epoch")?);
        let plural = if epochs == "1" { "" } else { "s" };
        Some(format!("{epochs} epoch{plural}"))
    }

    /// The last part of the folder's name, for headings.
    pub(super) fn name(&self) -> String {
        let last = |folder: &Path| folder.file_name().map(|name| name.to_string_lossy().into_owned());
        // `.` and `..` name no folder: use the folder they stand for.
        let resolved = || last(&fs::canonicalize(&self.folder).ok()?);
        last(&self.folder).or_else(resolved).unwrap_or_else(|| self.folder.display().to_string())
    }

    /// A value of the resolved recipe, by dotted key.
    pub(super) fn setting(&self, key: &str) -> Option<&toml::Value> {
        let mut parts = key.split('.');
        let first = self.settings.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part))
    }

    /// A number of the summary.
    pub(super) fn figure(&self, name: &str) -> Option<f64> {
        self.summary.get(name)?.as_f64()
    }

    /// A text of the summary; empty where it has none.
    pub(super) fn text(&self, name: &str) -> &str {
        self.summary.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    /// A list of the summary; empty where it has none.
    pub(super) fn list(&self, name: &str) -> &[Value] {
        self.summary.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// The median of a figure over the steps after warm-up.
    pub(super) fn median(&self, name: &str) -> Option<f64> {
        median(self.steps.steady(name))
    }

    /// The mean training loss of the last tenth of the steps.
    pub(super) fn final_loss(&self) -> Option<f64> {
        let losses = self.steps.get("loss")?;
        Some(mean(&losses[losses.len() - losses.len().div_ceil(10)..])).filter(|loss| loss.is_finite())
    }

    /// The peak memory of the GPU over the whole run; without a summary, over its steps.
    pub(super) fn peak_gpu_memory_bytes(&self) -> Option<f64> {
        self.figure("peak_gpu_memory_bytes").or_else(|| self.steps.max("gpu_memory_used_bytes"))
    }

    /// The same of the process.
    pub(super) fn peak_host_memory_bytes(&self) -> Option<f64> {
        self.figure("peak_host_memory_bytes").or_else(|| self.steps.max("host_memory_bytes"))
    }

    /// The peak memory and of which device: the GPU where there is one.
    pub(super) fn peak_memory(&self) -> Option<(f64, &'static str)> {
        let of_process = || Some((self.peak_host_memory_bytes()?, "of the process"));
        self.peak_gpu_memory_bytes().map(|bytes| (bytes, "of the GPU")).or_else(of_process)
    }

    pub(super) fn wall_seconds(&self) -> Option<f64> {
        self.figure("wall_seconds").or_else(|| self.steps.sum("wall_seconds"))
    }

    pub(super) fn energy_kwh(&self) -> Option<f64> {
        let joules = || self.steps.last("energy_joules").or_else(|| self.steps.last("cpu_energy_joules"));
        self.figure("energy_kwh").or_else(|| Some(joules()? / 3.6e6))
    }

    /// How the run ended; `None` where it has not ended.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        serde_json::from_value(self.summary.get("outcome")?.clone()).ok()
    }

    pub(super) fn device(&self) -> Option<&str> {
        let device = Some(self.text("device")).filter(|device| !device.is_empty());
        device.or_else(|| self.environment.get("device")?.as_str())
    }

    /// Reads metrics.jsonl; `false` where there is none.
    fn read_metrics(&mut self) -> Result<bool, ReportError> {
        let path = self.folder.join("metrics.jsonl");
        let unreadable = |source| ReportError::Io { path: path.clone(), action: "read", source };
        let file = match fs::File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            file => file.map_err(unreadable)?,
        };
        for line in BufReader::new(file).split(b'\n') {
            let line = line.map_err(unreadable)?;
            let fields = serde_json::from_slice::<Map<String, Value>>(&line).ok();
            // A line without a step has no place in a chart.
            match fields.and_then(|fields| Some((fields.get("step")?.as_u64()?, fields))) {
                Some((_, fields)) if fields.contains_key("eval_loss") => self.evaluations.push(&fields),
                Some((step, fields)) if fields.contains_key("learning_rate") => self.add_step(step, &fields),
                _ if line.trim_ascii().is_empty() => {}
                _ => self.num_torn_lines += 1,
            }
        }
        Ok(true)
    }

    fn add_step(&mut self, step: u64, fields: &Map<String, Value>) {
        if let Some(what) = fields.get("anomaly").and_then(Value::as_str) {
            self.anomalies.push((step, what.to_owned()));
        }
        let findings = fields.get("findings").and_then(Value::as_array);
        let rules: Vec<&str> = findings.into_iter().flatten().filter_map(Value::as_str).collect();
        if !rules.is_empty() {
            self.findings.push((step, rules.join(", ")));
        }
        let shares = fields.get("gpu_throttle_shares").and_then(Value::as_object);
        for (reason, share) in shares.into_iter().flatten() {
            let share = share.as_f64().unwrap_or_default();
            *self.throttles.entry(reason.clone()).or_default() += share.clamp(0.0, 1.0);
        }
        self.steps.push(fields);
    }
}

/// A file's text; `None` where the file does not exist. Invalid UTF-8 is replaced.
fn text(path: &Path) -> Result<Option<String>, ReportError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ReportError::Io { path: path.to_owned(), action: "read", source }),
    }
}

fn json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ReportError> {
    Ok(text(path)?.and_then(|text| serde_json::from_str(&text).ok()))
}

/// The answers of the last step in a file, of which only the end is read.
fn last_answers(path: &Path) -> Result<Vec<Rollout>, ReportError> {
    let failed = |source| ReportError::Io { path: path.to_owned(), action: "read", source };
    let mut file = match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file.map_err(failed)?,
    };
    let skipped = file.metadata().map_err(failed)?.len().saturating_sub(MAX_ANSWER_BYTES);
    let mut end = Vec::new();
    file.seek(SeekFrom::Start(skipped)).and_then(|_| file.read_to_end(&mut end)).map_err(failed)?;
    let answers = end.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<Rollout>(line).ok());
    let mut answers: Vec<Rollout> = answers.collect();
    let last = answers.last().map(|answer| answer.step);
    answers.retain(|answer| Some(answer.step) == last);
    Ok(answers)
}

/// The readable lines of a file.
fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, ReportError> {
    let text = text(path)?.unwrap_or_default();
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_run_is_read_up_to_its_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = concat!(
            "{\"step\":0,\"epoch\":0,\"eval_loss\":4.5}\n",
            "{\"step\":1,\"loss\":4.0,\"learning_rate\":1e-3,\"findings\":[\"slow_step\",\"padding\"]}\n",
            "{\"step\":2,\"loss\":null,\"learning_rate\":2e-3,\"anomaly\":\"skipped_step\"}\n",
            "{\"step\":3,\"lo"
        );
        fs::write(folder.path().join("metrics.jsonl"), metrics).unwrap();
        fs::write(folder.path().join("resolved.toml"), "seed = 3\n[data]\nmax_length = 64\n").unwrap();
        fs::write(folder.path().join("summary.json"), "{ half").unwrap();
        let answer = |step: u64| serde_json::to_string(&Rollout { step, ..Rollout::default() }).unwrap();
        let rollouts = format!("{}\n{}\n{}\n{{\"step\":3", answer(1), answer(2), answer(2));
        fs::write(folder.path().join("rollouts.jsonl"), rollouts).unwrap();
        let record = Record::read(folder.path()).unwrap();
        assert_eq!((record.steps.len(), record.evaluations.len(), record.num_torn_lines), (2, 1, 1));
        assert_eq!(record.answers.iter().map(|answer| answer.step).collect::<Vec<_>>(), [2, 2]);
        assert_eq!(record.anomalies, [(2, "skipped_step".to_owned())]);
        assert_eq!(record.findings, [(1, "slow_step, padding".to_owned())]);
        assert_eq!(record.setting("data.max_length").and_then(toml::Value::as_integer), Some(64));
        assert_eq!(record.setting("seed").and_then(toml::Value::as_integer), Some(3));
        assert!(record.setting("data.nothing").is_none() && record.outcome().is_none());
    }

    #[test]
    fn a_line_without_its_step_counts_as_torn() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = concat!(
            "{\"step\":0,\"eval_loss\":4.5}\n{\"eval_loss\":4.5}\n{\"step\":-1,\"eval_loss\":4.5}\n",
            "{\"stttep\":1,\"loss\":4.0,\"learning_rate\":1e-3}\n{\"step\":\"2\",\"loss\":1,\"learning_rate\":2e-3}\n",
        );
        fs::write(folder.path().join("metrics.jsonl"), metrics).unwrap();
        let record = Record::read(folder.path()).unwrap();
        assert_eq!((record.steps.len(), record.evaluations.len(), record.num_torn_lines), (0, 1, 4));
    }

    #[test]
    fn a_folder_given_by_dots_has_the_name_of_what_it_stands_for() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("run-3/adapter")).unwrap();
        let name = |path: &str| Record { folder: folder.path().join(path), ..Record::default() }.name();
        assert_eq!(
            (name("run-3"), name("run-3/."), name("run-3/adapter/..")),
            ("run-3".into(), "run-3".into(), "run-3".into())
        );
        let here = fs::canonicalize(".").unwrap();
        let dot = Record { folder: ".".into(), ..Record::default() };
        assert_eq!(dot.name(), here.file_name().unwrap().to_str().unwrap());
    }

    #[test]
    fn what_is_no_run_says_what_it_lacks() {
        let folder = tempfile::tempdir().unwrap();
        let error = |path: &Path| Record::read(path).unwrap_err().to_string();
        assert!(error(&folder.path().join("x")).contains("x: there is no such folder"));
        assert!(error(folder.path()).contains("no metrics.jsonl"), "{}", error(folder.path()));
        fs::write(folder.path().join("metrics.jsonl"), "").unwrap();
        assert!(error(folder.path()).contains("no step"), "{}", error(folder.path()));
    }
}
