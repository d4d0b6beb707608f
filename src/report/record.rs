//! The files in a run's folder.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::ReportError;
use super::columns::Columns;
use crate::metrics::{Outcome, SUMMARY_FILE, Sample, UNFINISHED_FILE};

/// The parsed files of a run. Only metrics.jsonl is required: a killed run has no summary.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The run's folder.
    pub folder: PathBuf,
    /// Records of steps.
    pub steps: Columns,
    /// Steps with an anomaly, and its description.
    pub anomalies: Vec<(u64, String)>,
    /// Steps at which the diagnosis reported a lasting finding, and steps far slower than others.
    pub findings: Vec<(u64, String)>,
    /// Reasons for throttled clocks of the GPU, and in how many steps. A step counts by the share of its samples.
    pub throttles: BTreeMap<String, f64>,
    /// Records of evaluations.
    pub evaluations: Columns,
    /// Unreadable lines of metrics.jsonl: a killed process may leave one.
    pub num_torn_lines: usize,
    /// samples.jsonl.
    pub samples: Vec<Sample>,
    /// summary.json or unfinished.json, unparsed, so that those of other versions can be read too; empty where there is
    /// neither.
    pub summary: Map<String, Value>,
    /// recipe.toml.
    pub given_recipe: Option<String>,
    /// resolved.toml.
    pub resolved_recipe: Option<String>,
    /// resolved.toml, parsed.
    pub settings: toml::Table,
    /// environment.json.
    pub environment: Map<String, Value>,
    /// `memory_plan.json`.
    pub memory_plan: Option<PlannedMemory>,
}

/// The planned memory of a run: `memory_plan.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PlannedMemory {
    /// The parts.
    pub components: Vec<PlannedComponent>,
    /// Their sum, with every row at `data.max_length`.
    pub peak_bytes: u64,
}

/// A part of the planned memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PlannedComponent {
    /// What the memory is for.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

impl Record {
    /// Reads a run's folder.
    ///
    /// # Errors
    ///
    /// A folder that does not exist or holds no run; files that cannot be read. Except for metrics.jsonl, a file with
    /// unexpected content counts as absent.
    pub fn read(folder: &Path) -> Result<Self, ReportError> {
        if !folder.is_dir() {
            return Err(ReportError::NoFolder { path: folder.to_owned() });
        }
        let mut record = Self { folder: folder.to_owned(), ..Self::default() };
        let is_run = record.read_metrics()?;
        record.samples = lines(&folder.join("samples.jsonl"))?;
        record.summary = match json(&folder.join(SUMMARY_FILE))? {
            Some(summary) => summary,
            None => json(&folder.join(UNFINISHED_FILE))?.unwrap_or_default(),
        };
        record.environment = json(&folder.join("environment.json"))?.unwrap_or_default();
        record.memory_plan = json(&folder.join("memory_plan.json"))?;
        record.given_recipe = text(&folder.join("recipe.toml"))?;
        record.resolved_recipe = text(&folder.join("resolved.toml"))?;
        record.settings = record.resolved_recipe.as_ref().and_then(|text| text.parse().ok()).unwrap_or_default();
        if !is_run {
            return Err(ReportError::NotARun { path: folder.to_owned() });
        }
        if record.steps.is_empty() && record.evaluations.is_empty() {
            return Err(ReportError::NoFigures { path: folder.to_owned(), num_torn_lines: record.num_torn_lines });
        }
        Ok(record)
    }

    /// The last part of the folder's name, for headings.
    #[must_use]
    pub fn name(&self) -> String {
        let last = |folder: &Path| folder.file_name().map(|name| name.to_string_lossy().into_owned());
        // `.` and `..` name no folder: use the folder they stand for.
        let resolved = || last(&fs::canonicalize(&self.folder).ok()?);
        last(&self.folder).or_else(resolved).unwrap_or_else(|| self.folder.display().to_string())
    }

    /// A value of the resolved recipe, by dotted key.
    #[must_use]
    pub fn setting(&self, key: &str) -> Option<&toml::Value> {
        let mut parts = key.split('.');
        let first = self.settings.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part))
    }

    /// A number of summary.json.
    #[must_use]
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.summary.get(name)?.as_f64()
    }

    /// The peak memory of the GPU, or of the process, over the whole run; without a summary, over its steps.
    #[must_use]
    pub fn peak_memory_bytes(&self, of_gpu: bool) -> Option<f64> {
        let (summary, step) = if of_gpu {
            ("peak_gpu_memory_bytes", "gpu_memory_used_bytes")
        } else {
            ("peak_host_memory_bytes", "host_memory_bytes")
        };
        self.figure(summary).or_else(|| self.steps.max(step))
    }

    /// Starts of the process; 0 where the run does not record them.
    #[must_use]
    pub fn num_starts(&self) -> f64 {
        self.figure("starts").unwrap_or(0.0)
    }

    /// How the run ended; `None` where it has not ended.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        serde_json::from_value(self.summary.get("outcome")?.clone()).ok()
    }

    /// The device, as shown on the page.
    #[must_use]
    pub fn device(&self) -> Option<&str> {
        let device = self.summary.get("device").and_then(Value::as_str).filter(|device| !device.is_empty());
        device.or_else(|| self.environment_text("device"))
    }

    /// A text of environment.json.
    #[must_use]
    pub fn environment_text(&self, key: &str) -> Option<&str> {
        self.environment.get(key)?.as_str()
    }

    /// Reads metrics.jsonl; `false` where there is none.
    fn read_metrics(&mut self) -> Result<bool, ReportError> {
        let path = self.folder.join("metrics.jsonl");
        let file = match fs::File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            file => file.map_err(|source| ReportError::Io { path: path.clone(), action: "read", source })?,
        };
        for line in BufReader::new(file).split(b'\n') {
            let line = line.map_err(|source| ReportError::Io { path: path.clone(), action: "read", source })?;
            match serde_json::from_slice::<Map<String, Value>>(&line) {
                // A line without a step has no place in a chart.
                Ok(fields) if !fields.get("step").is_some_and(Value::is_u64) => self.num_torn_lines += 1,
                Ok(fields) if fields.contains_key("eval_loss") => self.evaluations.push(&fields),
                Ok(fields) if fields.contains_key("learning_rate") => {
                    let step = fields.get("step").and_then(Value::as_u64).unwrap_or_default();
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
                    self.steps.push(&fields);
                }
                _ if line.trim_ascii().is_empty() => {}
                _ => self.num_torn_lines += 1,
            }
        }
        Ok(true)
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
        let record = Record::read(folder.path()).unwrap();
        assert_eq!((record.steps.len(), record.evaluations.len(), record.num_torn_lines), (2, 1, 1));
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
