//! Bars of pieces: where the time of a whole run went, and its peak memory against the plan.

use serde::Serialize;
use serde_json::Value;

use super::axis::Unit;
use super::chart::WIDTH;
use super::record::Record;
use super::time;
use crate::util::stats::as_f64;

/// A bar. All bars of one picture are on the same scale.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Bar {
    name: String,
    total: String,
    pieces: Vec<Drawn>,
}

/// A piece of a bar as it is drawn.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Drawn {
    name: String,
    class: &'static str,
    path: String,
    value: String,
    percent: String,
}

/// Name, colour class, value.
type Piece = (String, &'static str, f64);

fn bars(of: Vec<(String, Vec<Piece>)>, unit: Unit) -> Vec<Bar> {
    let sum = |pieces: &[Piece]| pieces.iter().map(|(.., value)| value).sum::<f64>();
    let longest = of.iter().map(|(_, pieces)| sum(pieces)).fold(0.0, f64::max);
    let bar = |(name, pieces): (String, Vec<Piece>)| {
        let total = sum(&pieces);
        let mut left = 0.0;
        let drawn = pieces.into_iter().map(|(name, class, value)| {
            let right = left + value / longest * WIDTH;
            let path = format!("M{left:.2} 0H{right:.2}V20H{left:.2}z");
            left = right;
            Drawn { name, class, path, value: unit.text(value), percent: format!("{:.1} %", 100.0 * value / total) }
        });
        Bar { name, pieces: drawn.collect(), total: unit.text(total) }
    };
    if longest > 0.0 { of.into_iter().map(bar).collect() } else { Vec::new() }
}

/// Parts of the run's wall time in summary.json: field, name, colour class.
const TIME_PARTS: [(&str, &str, &str); 10] = [
    ("startup_seconds", "start-up", "p-startup"),
    ("forward_backward_seconds", "forward + backward", "p-passes"),
    ("optimizer_seconds", "optimizer", "p-optimizer"),
    ("data_wait_seconds", "waiting for data", "p-data"),
    ("host_to_device_seconds", "host to device", "p-transfer"),
    ("rollout_seconds", "rollouts", "p-rollouts"),
    ("logging_seconds", "logging", "p-logging"),
    ("evaluation_seconds", "evaluation", "p-evaluation"),
    ("checkpoint_seconds", "checkpoints, adapter", "p-checkpoint"),
    ("other_seconds", "other", "p-other"),
];

/// Where the time of the whole run went; without a summary, that of its steps.
pub(super) fn time(record: &Record) -> Vec<Bar> {
    let mut pieces: Vec<Piece> = match record.summary.get("time").and_then(Value::as_object) {
        Some(time) => {
            let value = |field: &str| time.get(field)?.as_f64().filter(|seconds| *seconds > 0.0);
            let piece = |&(field, name, class): &(&str, &str, _)| Some((name.to_owned(), class, value(field)?));
            TIME_PARTS.iter().filter_map(piece).collect()
        }
        None => {
            let piece = |part: &time::TimePart| (part.name.to_owned(), part.class, part.total());
            time::parts(&record.steps).iter().map(piece).collect()
        }
    };
    // Forward and backward, where the run knows the forward's share of the two.
    let passes = pieces.iter().position(|(_, class, _)| *class == "p-passes");
    if let Some((at, share)) = passes.zip(record.figure("forward_share")) {
        let seconds = pieces[at].2;
        let apart = [("forward", "p-forward", share), ("backward", "p-backward", 1.0 - share)];
        pieces.splice(at..=at, apart.map(|(name, class, share)| (name.to_owned(), class, share * seconds)));
    }
    bars(vec![("In total".to_owned(), pieces)], Unit::Seconds)
}

const MEMORY_CLASSES: [&str; 9] = [
    "p-backward", "p-optimizer", "p-data", "p-evaluation", "p-transfer", "p-logging", "p-forward", "p-other",
    "p-checkpoint",
];

/// The planned memory above the measured peak, and what to say about the two.
pub(super) fn memory(record: &Record) -> Option<(Vec<Bar>, Vec<String>)> {
    let plan = &record.memory_plan;
    let peak_of_plan = plan.get("peak_bytes")?.as_f64().filter(|bytes| *bytes > 0.0)?;
    let (peak, of) = record.peak_memory()?;
    let component = |(component, class): (&Value, &'static str)| {
        let bytes = component.get("bytes")?.as_f64().filter(|bytes| *bytes > 0.0)?;
        Some((component.get("name")?.as_str()?.to_owned(), class, bytes))
    };
    let components = plan.get("components").and_then(Value::as_array).into_iter().flatten();
    let planned = components.zip(MEMORY_CLASSES.into_iter().cycle()).filter_map(component);
    let measured = format!("measured, {of}");
    let of_plan = 100.0 * peak / peak_of_plan;
    let mut notes = vec![format!("The measured peak is {of_plan:.0} % of the plan.")];
    notes.extend(fullness(record));
    let both = vec![("planned".to_owned(), planned.collect()), (measured.clone(), vec![(measured, "p-passes", peak)])];
    Some((bars(both, Unit::Bytes), notes))
}

/// By how much the rows are shorter than the plan assumes.
fn fullness(record: &Record) -> Option<String> {
    let count = |key: &str| record.setting(key)?.as_integer().filter(|count| *count > 0);
    let longest = count("data.max_length")?;
    let rows = count("train.micro_batch_size")? * count("train.gradient_accumulation_steps")?;
    let share = 100.0 * record.steps.max("tokens")? / as_f64(rows * longest);
    Some(format!(
        "The plan assumes every row at data.max_length = {longest}; the fullest step of this run held {share:.0} % of \
         that many tokens."
    ))
}
