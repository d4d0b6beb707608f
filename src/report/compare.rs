//! Runs side by side: what differs in the recipe, what came of it, and whether it is more than chance.
//!
//! The first run is the baseline. Speeds are medians over the steps after warm-up, and their changes come with the
//! range that chance leaves (95 %), reckoned from how the step times of each run scatter. What differs between two
//! starts of the same recipe, such as what else the machine does, is not in that range.

mod limits;
mod page;
mod table;
mod verdict;

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::axis::Unit;
use super::page::steady;
use super::record::Record;
use super::statistics::{Change, Measured, num_warmup_steps, quantile};
use super::{ReportError, put};

pub use limits::{Checked, Limit, LimitedFigure, Regression};

/// Which way a figure should go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Better {
    Higher,
    Lower,
    Neither,
}

/// A figure of a run that is compared.
#[derive(Clone, Copy, Debug)]
struct Figure {
    key: &'static str,
    label: &'static str,
    unit: Unit,
    better: Better,
}

const fn figure(key: &'static str, label: &'static str, unit: Unit, better: Better) -> Figure {
    Figure { key, label, unit, better }
}

const FIGURES: [Figure; 23] = [
    figure("final_eval_loss", "evaluation loss, last", Unit::Plain, Better::Lower),
    figure("best_eval_loss", "evaluation loss, best", Unit::Plain, Better::Lower),
    figure("evaluations", "evaluations", Unit::Count, Better::Neither),
    figure("eval_target_tokens", "evaluation, target tokens", Unit::Count, Better::Neither),
    figure("final_loss", "training loss, last tenth", Unit::Plain, Better::Lower),
    figure("steps", "steps", Unit::Count, Better::Neither),
    figure("tokens", "tokens", Unit::Count, Better::Neither),
    figure("tokens_per_second", "tokens/s, median", Unit::Count, Better::Higher),
    figure("step_seconds", "step, median", Unit::Seconds, Better::Lower),
    figure("step_seconds_p95", "step, 95 % below", Unit::Seconds, Better::Lower),
    figure("mfu_percent", "MFU, median", Unit::Percent, Better::Higher),
    figure("peak_gpu_memory_bytes", "peak memory, GPU", Unit::Bytes, Better::Lower),
    figure("peak_host_memory_bytes", "peak memory, process", Unit::Bytes, Better::Lower),
    figure("gpu_utilization_percent", "GPU utilization, median", Unit::Percent, Better::Neither),
    figure("cpu_utilization_percent", "CPU utilization, median", Unit::Percent, Better::Neither),
    figure("wall_seconds", "wall time", Unit::Seconds, Better::Lower),
    figure("energy_kwh", "energy, kWh", Unit::Plain, Better::Lower),
    figure("cost", "cost", Unit::Plain, Better::Lower),
    figure("data_wait_percent", "time: waiting for data", Unit::Percent, Better::Neither),
    figure("forward_backward_percent", "time: forward + backward", Unit::Percent, Better::Neither),
    figure("optimizer_percent", "time: optimizer", Unit::Percent, Better::Neither),
    figure("evaluation_percent", "time: evaluation", Unit::Percent, Better::Neither),
    figure("checkpoint_percent", "time: checkpoints", Unit::Percent, Better::Neither),
];

/// Those of them that are over the evaluation's rows.
const EVAL_LOSSES: [&str; 2] = ["final_eval_loss", "best_eval_loss"];

/// Several runs side by side.
#[derive(Debug, Serialize)]
pub struct Comparison {
    runs: Vec<Run>,
    /// Keys of the resolved recipes whose values differ, with the value of each run.
    recipe_differences: Vec<Difference>,
    /// Of each run but the first, in words.
    verdicts: Vec<Verdict>,
    #[serde(skip)]
    records: Vec<Record>,
}

/// The figures of a run.
#[derive(Debug, Serialize)]
struct Run {
    name: String,
    path: PathBuf,
    device: String,
    /// Steps at the beginning that the medians leave out.
    num_warmup_steps: usize,
    figures: Vec<RunFigure>,
}

#[derive(Debug, Serialize)]
struct RunFigure {
    name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
    /// `value / baseline - 1`, in percent; of what is in percent already: the difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    change_percent: Option<f64>,
    /// Changes that chance leaves possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    interval_percent: Option<(f64, f64)>,
    /// Whether chance alone may be behind the change; absent where it cannot be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    is_noise: Option<bool>,
    #[serde(skip)]
    measured: Option<Measured>,
}

/// A key of the recipe whose value differs between runs.
#[derive(Debug, Serialize)]
struct Difference {
    key: String,
    /// One for each run, as TOML; absent where the run's recipe does not have the key.
    values: Vec<Option<String>>,
}

#[derive(Debug, Serialize)]
struct Verdict {
    run: String,
    baseline: String,
    text: String,
    notes: Vec<String>,
}

impl Comparison {
    /// Reads runs and compares them with the first.
    ///
    /// # Errors
    ///
    /// A folder that holds no run, or no step of one.
    pub fn of(folders: &[PathBuf]) -> Result<Self, ReportError> {
        let records = folders.iter().map(|folder| Record::read(folder)).collect::<Result<Vec<_>, _>>()?;
        if let Some(record) = records.iter().find(|record| record.steps.is_empty()) {
            return Err(ReportError::NoFigures { path: record.folder.clone(), num_torn_lines: record.num_torn_lines });
        }
        let names = names(&records);
        let mut runs: Vec<Run> = records.iter().zip(names).map(|(record, name)| Run::of(record, name)).collect();
        if let Some((baseline, others)) = runs.split_first_mut() {
            others.iter_mut().for_each(|run| run.against(baseline));
        }
        let recipe_differences = differences(&records);
        let verdicts = runs
            .iter()
            .skip(1)
            .enumerate()
            .map(|(index, run)| verdict::verdict(&runs[0], run, &records, &recipe_differences, index + 1));
        Ok(Self { verdicts: verdicts.collect(), runs, recipe_differences, records })
    }

    /// Names of the runs whose recipe cannot be read.
    fn without_recipe(&self) -> Vec<&str> {
        let pairs = self.runs.iter().zip(&self.records);
        pairs.filter(|(_, record)| record.settings.is_empty()).map(|(run, _)| run.name.as_str()).collect()
    }

    /// The comparison as a table for people.
    #[must_use]
    pub fn text(&self) -> String {
        table::text(self)
    }

    /// Writes the comparison as a page.
    ///
    /// # Errors
    ///
    /// A file that cannot be written.
    pub fn write_html(&self, path: &Path) -> Result<(), ReportError> {
        put(path, &page::render(self)?)
    }
}

/// The folders' own names, or their paths where two are called the same.
fn names(records: &[Record]) -> Vec<String> {
    let short: Vec<String> = records.iter().map(Record::name).collect();
    let is_unique = |name: &String| short.iter().filter(|other| *other == name).count() == 1;
    let name = |(record, name): (&Record, &String)| {
        if is_unique(name) { name.clone() } else { record.folder.display().to_string() }
    };
    records.iter().zip(&short).map(name).collect()
}

impl Run {
    fn of(record: &Record, name: String) -> Self {
        let figures = FIGURES.iter().map(|figure| {
            let measured = measured(record, figure.key);
            let value = measured.map(|measured| measured.median).or_else(|| value(record, figure.key));
            RunFigure {
                name: figure.key,
                value: value.filter(|value| value.is_finite()),
                change_percent: None,
                interval_percent: None,
                is_noise: None,
                measured,
            }
        });
        Self {
            name,
            path: record.folder.clone(),
            device: record.device().unwrap_or_default().to_owned(),
            num_warmup_steps: num_warmup_steps(record.steps.len()),
            figures: figures.collect(),
        }
    }

    /// Reckons the changes.
    fn against(&mut self, baseline: &Self) {
        let evaluates_other_tokens = self.evaluates_other_tokens(baseline);
        for ((own, base), figure) in self.figures.iter_mut().zip(&baseline.figures).zip(&FIGURES) {
            if evaluates_other_tokens && EVAL_LOSSES.contains(&figure.key) {
                continue;
            }
            let (Some(value), Some(base_value)) = (own.value, base.value) else { continue };
            if figure.unit == Unit::Percent {
                own.change_percent = Some(value - base_value);
            } else if base_value > 0.0 {
                own.change_percent = Some(100.0 * (value / base_value - 1.0));
            }
            let change = own.measured.zip(base.measured).and_then(|(own, base)| Change::between(base, own));
            if let Some(change) = change.filter(|_| figure.unit != Unit::Percent) {
                own.interval_percent = change.interval.map(|(low, high)| (100.0 * low, 100.0 * high));
                own.is_noise = change.is_noise();
            }
        }
    }

    /// Whether the evaluation losses of two runs are certainly over different tokens, and so cannot be compared.
    fn evaluates_other_tokens(&self, baseline: &Self) -> bool {
        let [own, base] = [self, baseline].map(|run| run.value("eval_target_tokens"));
        own.is_some() && base.is_some() && own != base
    }

    fn figure(&self, key: &str) -> Option<&RunFigure> {
        self.figures.iter().find(|figure| figure.name == key)
    }

    fn value(&self, key: &str) -> Option<f64> {
        self.figure(key)?.value
    }
}

/// Figures whose scatter over the steps is known.
fn measured(record: &Record, key: &str) -> Option<Measured> {
    match key {
        "tokens_per_second" | "step_seconds" => Measured::of(steady(record, key)),
        _ => None,
    }
}

fn value(record: &Record, key: &str) -> Option<f64> {
    let median = |name| quantile(steady(record, name), 0.5);
    match key {
        // That of the last record, be it no number: the last finite one would make a run that diverged look sound.
        "final_eval_loss" => record.evaluations.latest("eval_loss"),
        "best_eval_loss" => {
            let losses = record.evaluations.get("eval_loss")?.iter().copied();
            losses.filter(|loss| loss.is_finite()).reduce(f64::min)
        }
        #[expect(clippy::cast_precision_loss, reason = "a number of evaluations")]
        "evaluations" => Some(record.evaluations.len() as f64).filter(|count| *count > 0.0),
        "eval_target_tokens" => record.evaluations.latest(key),
        "final_loss" => last_tenth(record.steps.get("loss")?),
        "steps" => record.steps.last("step"),
        "tokens" => record.steps.sum("tokens"),
        "step_seconds_p95" => quantile(steady(record, "step_seconds"), 0.95),
        "mfu_percent" => median("mfu").map(|mfu| 100.0 * mfu),
        "gpu_utilization_percent" | "cpu_utilization_percent" => median(key),
        "peak_gpu_memory_bytes" => record.peak_memory_bytes(true),
        "peak_host_memory_bytes" => record.peak_memory_bytes(false),
        "wall_seconds" => record.figure(key).or_else(|| record.steps.sum("wall_seconds")),
        "energy_kwh" => record.figure(key).or_else(|| {
            let joules = ["energy_joules", "cpu_energy_joules"].into_iter().find_map(|name| record.steps.last(name));
            joules.map(|joules| joules / 3.6e6)
        }),
        "cost" => record.figure(key),
        _ => time_percent(record, key.strip_suffix("_percent")?),
    }
}

/// Share of the wall time; without a summary, of the time of the steps.
fn time_percent(record: &Record, part: &str) -> Option<f64> {
    let name = format!("{part}_seconds");
    if let Some(time) = record.summary.get("time") {
        return Some(100.0 * time.get(&name)?.as_f64()? / record.figure("wall_seconds")?);
    }
    Some(100.0 * record.steps.sum(&name)? / record.steps.sum("wall_seconds")?)
}

/// Mean of the finite values of the last tenth, of at least one.
fn last_tenth(values: &[f64]) -> Option<f64> {
    let last = &values[values.len() - values.len().div_ceil(10)..];
    let last: Vec<f64> = last.iter().copied().filter(|value| value.is_finite()).collect();
    #[expect(clippy::cast_precision_loss, reason = "a number of steps")]
    let count = last.len() as f64;
    (!last.is_empty()).then(|| last.iter().sum::<f64>() / count)
}

/// What differs between the resolved recipes, but for where the run was written.
fn differences(records: &[Record]) -> Vec<Difference> {
    let flat: Vec<Vec<(String, String)>> = records
        .iter()
        .map(|record| {
            let mut pairs = Vec::new();
            flatten("", &toml::Value::Table(record.settings.clone()), &mut pairs);
            pairs
        })
        .collect();
    let mut keys: Vec<&String> = flat.iter().flatten().map(|(key, _)| key).collect();
    let mut seen = std::collections::HashSet::new();
    keys.retain(|key| *key != "output_dir" && seen.insert(*key));
    let difference = |key: &String| {
        let value = |pairs: &Vec<(String, String)>| {
            pairs.iter().find(|(other, _)| other == key).map(|(_, value)| value.clone())
        };
        let values: Vec<Option<String>> = flat.iter().map(value).collect();
        let is_equal = values.iter().all(|value| *value == values[0]);
        (!is_equal).then(|| Difference { key: key.clone(), values })
    };
    keys.into_iter().filter_map(difference).collect()
}

fn flatten(prefix: &str, value: &toml::Value, pairs: &mut Vec<(String, String)>) {
    let join = |key: &str| if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
    match value {
        toml::Value::Table(table) => table.iter().for_each(|(key, value)| flatten(&join(key), value, pairs)),
        toml::Value::Array(values) if values.iter().any(toml::Value::is_table) => {
            let entries = values.iter().enumerate();
            entries.for_each(|(index, value)| flatten(&format!("{prefix}[{index}]"), value, pairs));
        }
        other => pairs.push((prefix.to_owned(), other.to_string())),
    }
}

/// The peak that two runs can be compared by: of the GPU where both have one, else of the process.
fn peak_key(baseline: &Run, run: &Run) -> Option<&'static str> {
    let both = |key: &'static str| (baseline.value(key).is_some() && run.value(key).is_some()).then_some(key);
    let on_gpu = |run: &Run| run.value("peak_gpu_memory_bytes").is_some();
    if on_gpu(baseline) || on_gpu(run) { both("peak_gpu_memory_bytes") } else { both("peak_host_memory_bytes") }
}

#[cfg(test)]
mod tests;
