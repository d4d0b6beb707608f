//! Runs side by side: differences in their recipes and in their results.
//!
//! A side is one run or several; the first side is the baseline. The speed of a run is the median over its steps after
//! warm-up, and a figure of a side is the median over its runs. Two starts of one recipe differ in speed, too: such a
//! difference only counts where both sides have several runs whose ranges do not overlap. Their losses hardly differ.

mod limits;
mod ranking;
mod samples;
mod text;

use std::collections::HashSet;
use std::path::PathBuf;

use serde::Serialize;

use super::ReportError;
use super::axis::Unit;
use super::record::Record;
use crate::config::ObjectiveConfig;
use crate::measure::metrics::Outcome;
use crate::schema::flattened;
use crate::util::stats::{as_f64, quantile};
use crate::util::text::Mark;

pub use limits::{Checked, Limit, Regression};
use ranking::{Best, Ranked, ranking};
use samples::PromptSamples;

/// Whether answers that the model writes itself are rewarded: their loss says nothing.
fn is_rewarded(run: &Record) -> bool {
    run.evaluations.latest("eval_reward").is_some()
}

/// A compared figure: name, label, unit, and its value in a run.
type ComparedFigure = (&'static str, &'static str, Unit, fn(&Record) -> Option<f64>);

const FIGURES: [ComparedFigure; 26] = [
    ("final_eval_loss", "evaluation loss, last", Unit::Plain, |run| {
        run.evaluations.latest("eval_loss").filter(|_| !is_rewarded(run))
    }),
    ("best_eval_loss", "evaluation loss, best", Unit::Plain, |run| {
        quantile(run.evaluations.get("eval_loss")?, 0.0).filter(|_| !is_rewarded(run))
    }),
    ("final_eval_reward", "evaluation reward, last", Unit::Plain, |run| run.evaluations.latest("eval_reward")),
    ("final_eval_score", "score, last", Unit::Percent, |run| Some(100.0 * run.evaluations.latest("eval_score")?)),
    ("final_eval_rewards_accuracies", "accuracy, last", Unit::Percent, |run| {
        Some(100.0 * run.evaluations.latest("eval_rewards_accuracies")?)
    }),
    ("evaluations", "evaluations", Unit::Count, |run| Some(as_f64(run.evaluations.len())).filter(|count| *count > 0.0)),
    ("eval_target_tokens", "evaluation, target tokens", Unit::Count, |run| {
        run.evaluations.latest("eval_target_tokens").filter(|_| !is_rewarded(run))
    }),
    ("final_loss", "training loss, last tenth", Unit::Plain, Record::final_loss),
    ("steps", "steps", Unit::Count, |run| run.steps.last("step")),
    ("tokens", "tokens", Unit::Count, |run| run.steps.sum("tokens")),
    ("tokens_per_second", "tokens/s, median", Unit::Count, |run| run.median("tokens_per_second")),
    ("step_seconds", "step, median", Unit::Seconds, |run| run.median("step_seconds")),
    ("step_seconds_p95", "step, 95 % below", Unit::Seconds, |run| quantile(run.steps.steady("step_seconds"), 0.95)),
    ("mfu_percent", "MFU, median", Unit::Percent, |run| Some(100.0 * run.median("mfu")?)),
    ("peak_gpu_memory_bytes", "peak memory, GPU", Unit::Bytes, Record::peak_gpu_memory_bytes),
    ("peak_host_memory_bytes", "peak memory, process", Unit::Bytes, Record::peak_host_memory_bytes),
    ("gpu_utilization_percent", "GPU utilization, median", Unit::Percent, |run| run.median("gpu_utilization_percent")),
    ("cpu_utilization_percent", "CPU utilization, median", Unit::Percent, |run| run.median("cpu_utilization_percent")),
    ("wall_seconds", "wall time", Unit::Seconds, Record::wall_seconds),
    ("energy_kwh", "energy, kWh", Unit::Plain, Record::energy_kwh),
    ("cost", "cost", Unit::Plain, |run| run.figure("cost")),
    ("data_wait_percent", "time: waiting for data", Unit::Percent, |run| time_percent(run, "data_wait_seconds")),
    ("forward_backward_percent", "time: forward + backward", Unit::Percent, |run| {
        time_percent(run, "forward_backward_seconds")
    }),
    ("optimizer_percent", "time: optimizer", Unit::Percent, |run| time_percent(run, "optimizer_seconds")),
    ("evaluation_percent", "time: evaluation", Unit::Percent, |run| time_percent(run, "evaluation_seconds")),
    ("checkpoint_percent", "time: checkpoints", Unit::Percent, |run| time_percent(run, "checkpoint_seconds")),
];

/// Several runs side by side.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The best first.
    ranking: Vec<Ranked>,
    #[serde(rename = "runs")]
    sides: Vec<Side>,
    /// Keys of the resolved recipes whose values differ, with the value of each side's first run.
    recipe_differences: Vec<Difference>,
    /// For each side but the first, in words.
    verdicts: Vec<Verdict>,
    /// Texts of the last evaluations for the prompts that runs have in common.
    samples: Vec<PromptSamples>,
}

/// One run, or several compared as one.
#[derive(Debug, Serialize)]
struct Side {
    name: String,
    paths: Vec<PathBuf>,
    device: String,
    /// Of its first run.
    #[serde(skip)]
    best: Option<Best>,
    figures: Vec<Figure>,
    /// Section `[objective]` of its first run's recipe, where it has one.
    #[serde(skip)]
    objective: toml::Table,
    #[serde(skip)]
    has_recipe: bool,
    /// Whether its first run ended at its last step, or where its evaluations ended it.
    #[serde(skip)]
    is_finished: bool,
    /// Whether its runs have different recipes.
    #[serde(skip)]
    is_mixed: bool,
}

#[derive(Debug, Serialize)]
struct Figure {
    name: &'static str,
    /// The median over the runs; absent where a run lacks it.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
    /// The lowest and highest of several runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    range: Option<(f64, f64)>,
    /// `value / baseline - 1`, in percent. For figures in percent: the difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    change_percent: Option<f64>,
    /// Whether the ranges do not overlap; absent where a side has one run.
    #[serde(skip_serializing_if = "Option::is_none")]
    is_clear: Option<bool>,
}

/// A recipe key whose value differs between sides.
#[derive(Debug, Serialize)]
struct Difference {
    key: String,
    /// One value per side, as TOML; absent where the recipe does not have the key.
    values: Vec<Option<String>>,
}

#[derive(Debug, Serialize)]
struct Verdict {
    run: String,
    baseline: String,
    text: String,
    /// The figures of the text, marked as better or worse.
    #[serde(skip)]
    parts: Vec<(Mark, String)>,
    notes: Vec<String>,
}

impl Comparison {
    /// Reads the runs of each side and compares them with those of the first. Returns also what is left out: folders
    /// that hold no run, or a run without steps.
    ///
    /// # Errors
    /// A file that cannot be read; no run at all.
    pub fn of(sides: &[Vec<PathBuf>]) -> Result<(Self, Vec<ReportError>), ReportError> {
        let (mut records, mut no_runs) = (Vec::new(), Vec::new());
        for folders in sides {
            let mut of_side = Vec::new();
            for folder in folders {
                match Record::read(folder).and_then(Record::with_steps) {
                    Ok(record) => of_side.push(record),
                    Err(error) if error.is_input() => no_runs.push(error),
                    Err(error) => return Err(error),
                }
            }
            records.extend((!of_side.is_empty()).then_some(of_side));
        }
        if records.is_empty() && !no_runs.is_empty() {
            return Err(no_runs.swap_remove(0));
        }
        let mut sides: Vec<Side> = records.iter().map(|of_side| Side::of(of_side)).collect();
        let names: Vec<String> = sides.iter().map(|side| side.name.clone()).collect();
        for side in &mut sides {
            if names.iter().filter(|name| **name == side.name).count() > 1 {
                side.name = side.paths[0].display().to_string();
            }
        }
        if let Some((baseline, others)) = sides.split_first_mut() {
            others.iter_mut().for_each(|side| side.against(baseline));
        }
        let firsts: Vec<&Record> = records.iter().map(|of_side| &of_side[0]).collect();
        let (recipe_differences, samples) = (differences(&firsts), samples::of(&firsts));
        let verdicts = sides.iter().skip(1).map(|side| text::verdict(&sides[0], side)).collect();
        let ranking = ranking(&sides);
        Ok((Self { ranking, sides, recipe_differences, verdicts, samples }, no_runs))
    }
}

impl Side {
    /// A side of one or more runs.
    fn of(records: &[Record]) -> Self {
        let figures = FIGURES.iter().map(|(name, _, _, value)| {
            let values = records.iter().map(|record| value(record).filter(|value| value.is_finite()));
            let values: Option<Vec<f64>> = values.collect();
            let [lowest, value, highest] = [0.0, 0.5, 1.0].map(|share| quantile(values.as_deref()?, share));
            let range = lowest.zip(highest).filter(|_| records.len() > 1);
            Figure { name, value, range, change_percent: None, is_clear: None }
        });
        let name = records[0].name();
        Self {
            name: if records.len() > 1 { format!("{name} and {} more", records.len() - 1) } else { name },
            paths: records.iter().map(|record| record.folder.clone()).collect(),
            device: records[0].device().unwrap_or_default().to_owned(),
            best: Best::of(&records[0]),
            figures: figures.collect(),
            objective: records[0]
                .settings
                .get("objective")
                .and_then(toml::Value::as_table)
                .cloned()
                .unwrap_or_default(),
            is_finished: records[0].outcome().is_some_and(Outcome::is_finished),
            has_recipe: records.iter().all(|record| !record.settings.is_empty()),
            is_mixed: differences(&records.iter().collect::<Vec<_>>())
                .iter()
                .any(|difference| difference.key != "seed"),
        }
    }

    /// Adds how the figures differ from those of the baseline.
    fn against(&mut self, baseline: &Self) {
        let has_other_objective = self.has_other_objective(baseline);
        let evaluates_otherwise = self.evaluates_other_tokens(baseline) || has_other_objective;
        for ((own, base), (name, _, unit, _)) in self.figures.iter_mut().zip(&baseline.figures).zip(&FIGURES) {
            let (Some(value), Some(base_value)) = (own.value, base.value) else { continue };
            if has_other_objective && *name == "final_loss" {
                continue;
            }
            if evaluates_otherwise && ["final_eval_loss", "best_eval_loss"].contains(name) {
                continue;
            }
            own.change_percent = match unit {
                Unit::Percent => Some(value - base_value),
                _ => (base_value > 0.0).then(|| 100.0 * (value / base_value - 1.0)),
            };
            own.is_clear = own.range.zip(base.range).map(|(own, base)| own.0 > base.1 || own.1 < base.0);
        }
    }

    /// Whether the evaluation losses of two sides certainly cover different tokens, and so cannot be compared.
    fn evaluates_other_tokens(&self, baseline: &Self) -> bool {
        let [own, base] = [self, baseline].map(|side| side.value("eval_target_tokens"));
        own.is_some() && base.is_some() && own != base
    }

    /// Whether losses mean something else. An older version's recipe lacks keys that have been added since, and what is not
    /// there has its default.
    fn has_other_objective(&self, baseline: &Self) -> bool {
        let default = toml::Table::try_from(ObjectiveConfig::default()).unwrap_or_default();
        let differs = |key: &String| {
            let [own, base] = [self, baseline].map(|side| side.objective.get(key).or_else(|| default.get(key)));
            own != base
        };
        self.objective.keys().chain(baseline.objective.keys()).any(differs)
    }

    fn figure(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }

    fn value(&self, name: &str) -> Option<f64> {
        self.figure(name)?.value
    }

    /// The peak to compare two sides by: of the GPU where one of them trained on one.
    fn peak_figure(&self, baseline: &Self) -> &'static str {
        let on_gpu = [self, baseline].iter().any(|side| side.value("peak_gpu_memory_bytes").is_some());
        if on_gpu { "peak_gpu_memory_bytes" } else { "peak_host_memory_bytes" }
    }
}

/// Share of the wall time; without a summary, of the steps' time.
fn time_percent(run: &Record, part: &str) -> Option<f64> {
    if let Some(time) = run.summary.get("time") {
        return Some(100.0 * time.get(part)?.as_f64()? / run.figure("wall_seconds")?);
    }
    Some(100.0 * run.steps.sum(part)? / run.steps.sum("wall_seconds")?)
}

/// Differences between the resolved recipes, except the output folder.
fn differences(records: &[&Record]) -> Vec<Difference> {
    let flat = records
        .iter()
        .map(|record| flattened(&record.settings).into_iter().map(|(key, value)| (key, value.to_string())).collect());
    let flat: Vec<Vec<(String, String)>> = flat.collect();
    let mut keys: Vec<&String> = flat.iter().flatten().map(|(key, _)| key).collect();
    let mut seen = HashSet::new();
    keys.retain(|key| *key != "output_dir" && seen.insert(*key));
    let difference = |key: &String| {
        let value = |pairs: &Vec<(String, String)>| {
            pairs.iter().find(|(other, _)| other == key).map(|(_, value)| value.clone())
        };
        let values: Vec<Option<String>> = flat.iter().map(value).collect();
        // Where no recipe could be read, nothing differs from it.
        let mut known = values.iter().zip(records).filter(|(_, record)| !record.settings.is_empty());
        let first = known.next();
        let is_equal = known.all(|(value, _)| first.is_some_and(|(first, _)| value == first));
        (!is_equal).then(|| Difference { key: key.clone(), values })
    };
    keys.into_iter().filter_map(difference).collect()
}

#[cfg(test)]
mod tests;
