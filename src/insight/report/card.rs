//! The README.md of an adapter on the Hub: what it was trained from, how, and what came of it. No path of this machine is
//! in it.

use std::path::Path;

use minijinja::{Environment, context};
use serde::Serialize;
use toml::{Table, Value};

use super::ReportError;
use super::axis::Unit;
use super::chart::stretches;
use super::charts;
use super::record::Record;
use crate::config::{
    DataConfig, DataSource, EvalConfig, LoraConfig, ModelOptions, ObjectiveConfig, OptimizerConfig, SchedulerConfig,
    TrainConfig,
};
use crate::data::sources::dataset_of;
use crate::hub::HubSettings;
use crate::util::stats::as_f64;
use crate::util::text::{duration, thousands};

/// Rows of the table of losses.
const NUM_LOSSES: usize = 10;
/// Keys of a recipe whose values are paths, or names on the Hub.
const PATH_KEYS: [&str; 4] = ["output_dir", "path", "start_from", "chat_template"];

/// What is published.
#[derive(Clone, Debug)]
pub struct Published<'a> {
    /// `owner/name`.
    pub repository: &'a str,
    /// The base model's id on the Hub, or else the name of its folder.
    pub base: &'a str,
    /// Whether `base` is on the Hub.
    pub is_base_on_hub: bool,
    /// Whether it is a whole model with the adapter in it.
    pub is_merged: bool,
    /// Whether it scores texts.
    pub scores: bool,
    /// The options with which vLLM serves the adapter, if it does.
    pub vllm_options: Option<&'a str>,
}

/// The card, and its picture of the losses as SVG, which it calls `loss.svg`.
///
/// # Errors
/// A folder that holds no run, or a file that cannot be read.
pub fn model_card(run: &Path, published: &Published<'_>) -> Result<(String, Option<String>), ReportError> {
    let record = Record::read(run)?;
    let figure = charts::losses(&record);
    let fill = |name: &str, template: &str, context| {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.render_named_str(name, template, context).map_err(|error| ReportError::Bug(error.to_string()))
    };
    let Published { repository, base, is_base_on_hub, is_merged, scores, vllm_options } = *published;
    let (sources, datasets) = sources(&record);
    let card = context! {
        name => repository.rsplit('/').next(),
        repository, base, is_merged, scores, vllm_options, sources, datasets,
        base_id => is_base_on_hub.then_some(base),
        version => env!("CARGO_PKG_VERSION"),
        unfinished => unfinished(&record),
        results => results(&record),
        has_curve => figure.is_some(),
        losses => losses(&record),
        training => training(&record),
        recipe => recipe(&record, base),
    };
    // Text is escaped by the ending of the name.
    let curve = figure.map(|figure| fill("loss.xml", include_str!("curve.svg"), context! { figure })).transpose()?;
    Ok((fill("README.md", include_str!("card.md"), card)?, curve))
}

/// What became of a run that did not finish.
fn unfinished(record: &Record) -> Option<String> {
    let steps = thousands(record.steps.last("step").unwrap_or(0.0));
    match record.outcome() {
        Some(outcome) if outcome.is_finished() => None,
        Some(outcome) => Some(format!("{} after {steps} steps", outcome.name())),
        None => Some(format!("has not finished: these are figures of {steps} steps")),
    }
}

/// Losses and scores.
fn results(record: &Record) -> Vec<(&'static str, String)> {
    let number = |loss: f64| Unit::Plain.text(loss);
    let evaluation = |name| record.evaluations.latest(name).filter(|figure| figure.is_finite()).map(number);
    let percent = |score: f64| Unit::Percent.text(100.0 * score);
    // The loss of answers that the model writes itself says nothing.
    let is_rewarded = record.evaluations.latest("eval_reward").is_some();
    let of_loss = |loss: Option<String>| loss.filter(|_| !is_rewarded);
    let rows = [
        ("evaluation reward", evaluation("eval_reward")),
        ("evaluation loss", of_loss(evaluation("eval_loss"))),
        ("evaluation perplexity", evaluation("eval_perplexity")),
        ("evaluation loss before training", of_loss(record.figure("initial_eval_loss").map(number))),
        ("evaluation loss of the best evaluation", of_loss(record.figure("best_eval_loss").map(number))),
        ("accuracy on pairs of answers", record.evaluations.latest("eval_rewards_accuracies").map(percent)),
        ("score", record.evaluations.latest("eval_score").map(percent)),
        ("score before training", record.figure("initial_eval_score").map(percent)),
        ("training loss of the last step", record.steps.latest("loss").map(number)),
    ];
    present(rows)
}

/// Rows that have a value.
fn present<const N: usize>(rows: [(&'static str, Option<String>); N]) -> Vec<(&'static str, String)> {
    rows.into_iter().filter_map(|(label, value)| Some((label, value?))).collect()
}

/// Step, mean training loss since the row before, and evaluation loss.
fn losses(record: &Record) -> Vec<[String; 3]> {
    let number = |loss: Option<f64>| loss.map(|loss| Unit::Plain.text(loss)).unwrap_or_default();
    let (Some(steps), Some(losses)) = (record.steps.get("step"), record.steps.get("loss")) else { return Vec::new() };
    let evaluated = record.evaluations.get("step").unwrap_or_default();
    let evaluations = evaluated.iter().zip(record.evaluations.get("eval_loss").unwrap_or_default());
    let eval_loss = |after: f64, up_to: f64| {
        let within = evaluations.clone().filter(|(step, _)| **step > after && **step <= up_to);
        within.map(|(_, loss)| *loss).next_back()
    };
    let first = eval_loss(-1.0, 0.0).map(|loss| ["0".to_owned(), String::new(), number(Some(loss))]);
    let rows = stretches(steps.len(), NUM_LOSSES).map(|(from, to)| {
        let finite: Vec<f64> = losses[from..to].iter().copied().filter(|loss| loss.is_finite()).collect();
        let mean = (!finite.is_empty()).then(|| finite.iter().sum::<f64>() / as_f64(finite.len()));
        let step = steps[to - 1];
        [thousands(step), number(mean), number(eval_loss(steps[from] - 1.0, step))]
    });
    first.into_iter().chain(rows).collect()
}

/// The sources of the rows in words, and those that are data sets of the Hub.
fn sources(record: &Record) -> (Vec<String>, Vec<String>) {
    let (mut texts, mut datasets) = (Vec::new(), Vec::new());
    for (section, used) in [("data.train", ""), ("data.eval", ", for evaluation")] {
        for source in record.setting(section).and_then(Value::as_array).into_iter().flatten() {
            let text = |key: &str| source.get(key).map(|value| value.as_str().map_or(value.to_string(), str::to_owned));
            let path = text("path").unwrap_or_default();
            datasets.extend(dataset(record, &path));
            let facts = ["name", "split", "rows", "format"]
                .into_iter()
                .filter_map(|key| Some(format!(", {key} {}", text(key)?)));
            texts.push(format!("`{}`{}{used}", shared_name(record, &path), facts.collect::<String>()));
        }
    }
    let figures = ["rows", "tokens", "target_tokens"].map(|name| record.steps.sum(name).map(thousands));
    if let [Some(rows), Some(tokens), Some(targets)] = figures {
        texts.push(format!(
            "{rows} rows, {tokens} tokens: what the steps trained on, repeated rows included; {targets} tokens carry loss"
        ));
    }
    datasets.sort();
    datasets.dedup();
    (texts, datasets)
}

/// Machine, time and energy.
fn training(record: &Record) -> Vec<(&'static str, String)> {
    let started = record.environment.get("started_at").and_then(serde_json::Value::as_str);
    let parameters = record.figure("trainable_parameters").zip(record.figure("all_parameters"));
    let epochs = record.epochs_text().map(|epochs| format!(" ({epochs})"));
    let precision = record.setting("train.precision").and_then(Value::as_str);
    let rows = [
        ("steps", record.steps.last("step").map(|steps| thousands(steps) + &epochs.unwrap_or_default())),
        ("trained parameters", parameters.map(|(some, all)| format!("{} of {}", thousands(some), thousands(all)))),
        ("precision", precision.map(str::to_owned)),
        ("device", record.device().map(str::to_owned)),
        ("date", started.and_then(|time| time.split('T').next()).map(str::to_owned)),
        ("time", record.wall_seconds().map(duration)),
        ("speed", record.figure("tokens_per_second").map(|rate| format!("{} tokens/s", thousands(rate)))),
        ("peak memory", record.peak_memory().map(|(peak, whose)| format!("{} {whose}", Unit::Bytes.text(peak)))),
        ("energy", record.energy_kwh().map(|energy| format!("{} kWh", Unit::Plain.text(energy)))),
    ];
    present(rows)
}

/// What readers look for, also where it is the default.
const LOOKED_FOR: [&str; 10] = [
    "r", "lora_alpha", "target_modules", "max_length", "micro_batch_size", "gradient_accumulation_steps", "num_epochs",
    "learning_rate", "lr_scheduler", "warmup_ratio",
];

/// Sections that say nothing about how the adapter came to be.
const ABOUT_THE_RUN: [&str; 6] = ["checkpoint", "watchdog", "logging", "cost", "device", "output_dir"];

fn default_of<T: Serialize + Default>() -> Table {
    Table::try_from(T::default()).unwrap_or_default()
}

/// The defaults of the sections.
fn defaults() -> Table {
    fn of<T: Serialize + Default>(name: &str) -> (String, Value) {
        (name.to_owned(), default_of::<T>().into())
    }
    let sections = [
        of::<ModelOptions>("model"),
        of::<LoraConfig>("lora"),
        of::<DataConfig>("data"),
        of::<TrainConfig>("train"),
        of::<ObjectiveConfig>("objective"),
        of::<OptimizerConfig>("optimizer"),
        of::<SchedulerConfig>("scheduler"),
        of::<EvalConfig>("eval"),
    ];
    sections.into_iter().collect()
}

/// Takes out what is as in `defaults`.
fn without_defaults(settings: &mut Table, defaults: &Table) {
    settings.retain(|key, value| {
        let default = defaults.get(key);
        if let (Value::Table(table), Some(Value::Table(default))) = (&mut *value, default) {
            without_defaults(table, default);
            return !table.is_empty();
        }
        LOOKED_FOR.contains(&key) || default != Some(value)
    });
}

/// The recipe as TOML without most of its defaults, paths shortened to names.
fn recipe(record: &Record, base: &str) -> String {
    let mut settings = record.settings.clone();
    settings.retain(|section, _| !ABOUT_THE_RUN.contains(&section));
    without_defaults(&mut settings, &defaults());
    let files = settings.get_mut("data").and_then(Value::as_table_mut).into_iter().flatten();
    let files = files.filter_map(|(_, value)| value.as_array_mut()).flatten().filter_map(Value::as_table_mut);
    files.for_each(|file| without_defaults(file, &default_of::<DataSource>()));
    shorten(record, &mut settings);
    if let Some(model) = settings.get_mut("model").and_then(Value::as_table_mut) {
        model.insert("path".to_owned(), base.into());
    }
    settings.to_string().trim_end().to_owned()
}

fn shorten(record: &Record, table: &mut Table) {
    for (key, value) in table {
        match value {
            Value::Table(table) => shorten(record, table),
            Value::Array(values) => {
                values.iter_mut().filter_map(Value::as_table_mut).for_each(|table| shorten(record, table));
            }
            Value::String(path) if PATH_KEYS.contains(&key.as_str()) => *path = shared_name(record, path),
            _ => {}
        }
    }
}

/// The id of the Hub's data set that a path of the run named.
fn dataset(record: &Record, path: &str) -> Option<String> {
    let started = record.environment.get("directory").and_then(serde_json::Value::as_str).unwrap_or_default();
    let dataset = dataset_of(path, &HubSettings::from_env()).filter(|_| !Path::new(started).join(path).exists());
    Some(dataset?.id().to_owned())
}

/// A path as it may be published: a data set's id, or the last part.
fn shared_name(record: &Record, path: &str) -> String {
    let last = || {
        let plain = path.split(['?', '#']).next().unwrap_or(path).trim_end_matches(['/', '\\']);
        plain.rsplit(['/', '\\']).next().unwrap_or(plain).to_owned()
    };
    dataset(record, path).unwrap_or_else(last)
}
