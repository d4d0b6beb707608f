//! report.html: one run on one page, in one file.

use serde::Serialize;
use serde_json::Value;

use super::ReportError;
use super::axis::Unit;
use super::figures::Charts;
use super::html;
use super::memory::{Memory, Peak};
use super::record::Record;
use super::stack::{self, Piece};
use super::statistics::{num_warmup_steps, quantile};
use crate::metrics::format::{duration, thousands};

/// Prompts whose texts are shown, and texts of each.
const MAX_PROMPTS: usize = 12;
const MAX_TEXTS: usize = 12;
/// Characters of a text that are shown.
const MAX_TEXT: usize = 4000;
/// Characters of a recipe that are shown: more than any that a person wrote.
const MAX_RECIPE: usize = 60_000;

/// Parts of the run's wall time in summary.json: field, name, class of the colour.
const TIME_PARTS: [(&str, &str, &str); 10] = [
    ("startup_seconds", "start-up", "p-startup"),
    ("forward_backward_seconds", "forward + backward", "p-passes"),
    ("optimizer_seconds", "optimizer", "p-optimizer"),
    ("data_wait_seconds", "waiting for data", "p-data"),
    ("host_to_device_seconds", "host to device", "p-transfer"),
    ("logging_seconds", "logging", "p-logging"),
    ("evaluation_seconds", "evaluation", "p-evaluation"),
    ("checkpoint_seconds", "checkpoints, adapter", "p-checkpoint"),
    ("other_seconds", "other", "p-other"),
    ("earlier_seconds", "earlier starts", "p-startup"),
];

/// What the template shows.
#[derive(Debug, Serialize)]
struct Page {
    name: String,
    status: String,
    /// Why it did not come to its end, and what to do.
    reason: Vec<String>,
    about: Vec<String>,
    tiles: Vec<Tile>,
    findings: Vec<Value>,
    /// Of which part of the run they are; empty: of all of it.
    findings_of: &'static str,
    /// Those that were told while it went on.
    told: Vec<Value>,
    charts: Charts,
    time_bar: Option<String>,
    time_list: String,
    memory_bars: Option<String>,
    memory_title: &'static str,
    memory_list: String,
    memory_notes: Vec<String>,
    samples: Vec<Texts>,
    num_samples_left_out: usize,
    given_recipe: Option<String>,
    resolved_recipe: Option<String>,
    warnings: Vec<String>,
    environment: Vec<Row>,
    version: &'static str,
}

/// A headline figure.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Tile {
    label: &'static str,
    value: String,
    note: String,
}

/// What the model wrote after one prompt.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Texts {
    prompt: String,
    /// The first and the last.
    shown: Vec<Text>,
    between: Vec<Text>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Text {
    step: u64,
    text: String,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Row {
    name: String,
    value: String,
}

/// The page of a run.
///
/// # Errors
///
/// A template that does not fit, which would be a mistake of this program.
pub(super) fn render(record: &Record) -> Result<String, ReportError> {
    let time = time_pieces(record);
    let memory = Memory::of(record);
    let (samples, num_samples_left_out) = texts(record);
    let page = Page {
        name: record.name(),
        status: status(record),
        reason: reason(record),
        about: about(record),
        tiles: tiles(record),
        findings: findings(record, "diagnosis"),
        findings_of: if record.num_starts() > 1.0 { "of the last start" } else { "" },
        told: findings(record, "told"),
        charts: Charts::of(record),
        time_bar: (!time.is_empty()).then(|| stack::bars(&[("In total", time.clone())], Unit::Seconds)),
        time_list: stack::piece_list(&time, Unit::Seconds),
        memory_bars: memory.as_ref().map(Memory::bars),
        memory_title: memory.as_ref().map_or("", |memory| memory.title),
        memory_list: memory.as_ref().map_or_else(String::new, Memory::list),
        memory_notes: memory.map_or_else(Vec::new, |memory| memory.notes),
        samples,
        num_samples_left_out,
        given_recipe: record.given_recipe.as_deref().map(|text| shortened(text, MAX_RECIPE)),
        resolved_recipe: record.resolved_recipe.as_deref().map(|text| shortened(text, MAX_RECIPE)),
        warnings: warnings(record),
        environment: environment(record),
        version: env!("CARGO_PKG_VERSION"),
    };
    html::fill(include_str!("page.html"), &page)
}

fn status(record: &Record) -> String {
    match record.outcome() {
        Some(outcome) if outcome.is_finished() => outcome.name().to_owned(),
        Some(outcome) => {
            let steps = record.figure("steps").or_else(|| record.steps.last("step")).unwrap_or(0.0);
            let of = record.figure("total_steps").map(|total| format!(" of {}", thousands(total))).unwrap_or_default();
            format!("{} at step {}{of}", outcome.name(), thousands(steps))
        }
        None => "not finished: killed, or still training".to_owned(),
    }
}

/// Of how many starts the wall time is, and what a million tokens took of it.
fn wall_note(record: &Record, per_million: Option<f64>) -> Option<String> {
    let starts = Some(record.num_starts()).filter(|starts| *starts > 1.0);
    let starts = starts.map(|starts| format!("{} starts", thousands(starts)));
    let notes: Vec<String> =
        starts.into_iter().chain(per_million.map(|s| format!("{} a million tokens", duration(s)))).collect();
    (!notes.is_empty()).then(|| notes.join(", "))
}

fn findings(record: &Record, name: &str) -> Vec<Value> {
    record.summary.get(name).and_then(Value::as_array).cloned().unwrap_or_default()
}

/// Why the run did not come to its end, line by line.
fn reason(record: &Record) -> Vec<String> {
    let reason = record.summary.get("reason").and_then(Value::as_str).unwrap_or_default();
    shortened(reason, MAX_TEXT).lines().map(ToOwned::to_owned).collect()
}

/// Model, device and time, in a line.
fn about(record: &Record) -> Vec<String> {
    let model = record.setting("model.path").and_then(toml::Value::as_str).map(ToOwned::to_owned);
    let device = record.device().map(ToOwned::to_owned);
    let precision = record.setting("train.precision").and_then(toml::Value::as_str).map(ToOwned::to_owned);
    let started = record.environment_text("started_at");
    let started = started.map(|time| time.split('.').next().unwrap_or(time).trim_end_matches('Z').replace('T', " "));
    [model, device, precision, started.map(|time| format!("started {time} UTC"))].into_iter().flatten().collect()
}

/// The headline figures; those that were not measured have no tile.
fn tiles(record: &Record) -> Vec<Tile> {
    let tile = |label, value: Option<String>, note: Option<String>| {
        value.map(|value| Tile { label, value, note: note.unwrap_or_default() })
    };
    let losses = record.evaluations.get("eval_loss").unwrap_or_default();
    let first_loss = losses.first().copied().filter(|loss| loss.is_finite());
    // Of the last record, be it no number: the last finite one would make a run that diverged look sound.
    let last_loss = record.evaluations.latest("eval_loss");
    let loss_text = |loss: f64| if loss.is_finite() { Unit::Plain.text(loss) } else { "not a number".to_owned() };
    let from_loss = first_loss.filter(|_| losses.len() > 1).map(|loss| format!("from {}", Unit::Plain.text(loss)));
    let steps = record.steps.last("step").unwrap_or(0.0);
    let epochs = record.steps.last("epoch").map(|epochs| format!("{} epochs", Unit::Plain.text(epochs)));
    let tokens = record.figure("tokens").filter(|tokens| *tokens > 0.0).or_else(|| record.steps.sum("tokens"));
    let targets = record.steps.sum("target_tokens").zip(record.steps.sum("tokens"));
    let targets = targets.map(|(targets, tokens)| format!("{:.0} % carry loss", 100.0 * targets / tokens));
    let peak = Peak::of(record);
    let wall = record.figure("wall_seconds").or_else(|| record.steps.sum("wall_seconds"));
    let step_seconds = steady(record, "step_seconds");
    let p95 = quantile(step_seconds, 0.95).map(|p95| format!("95 % below {}", Unit::Seconds.text(p95)));
    let mfu = record.figure("mfu").or_else(|| quantile(steady(record, "mfu"), 0.5));
    let gpu = record.figure("mean_gpu_utilization_percent");
    let gpu = gpu.or_else(|| quantile(steady(record, "gpu_utilization_percent"), 0.5));
    let joules = || ["energy_joules", "cpu_energy_joules"].into_iter().find_map(|name| record.steps.last(name));
    let energy = record.figure("energy_kwh").or_else(|| joules().map(|joules| joules / 3.6e6));
    let currency = record.summary.get("currency").and_then(Value::as_str).unwrap_or_default();
    let per_million = |name: &str| record.summary.get("per_million_tokens")?.get(name)?.as_f64();
    let cost = |cost: f64| format!("{} {currency}", Unit::Plain.text(cost)).trim_end().to_owned();
    let tiles = [
        tile("Evaluation loss", last_loss.map(loss_text), from_loss),
        tile("Training loss", record.steps.latest("loss").map(loss_text), Some("of the last step".to_owned())),
        tile("Steps", Some(thousands(steps)), epochs),
        tile("Throughput", rate(record).map(thousands), Some("tokens/s".to_owned())),
        tile("Step, median", quantile(step_seconds, 0.5).map(|median| Unit::Seconds.text(median)), p95),
        tile("MFU", mfu.map(|mfu| format!("{:.1} %", 100.0 * mfu)), Some("of the measured peak".to_owned())),
        tile("GPU utilization", gpu.map(|percent| format!("{percent:.0} %")), None),
        tile(
            "Peak memory",
            peak.as_ref().map(|peak| Unit::Bytes.text(peak.bytes)),
            peak.as_ref().map(|peak| peak.of.to_owned()),
        ),
        tile("Tokens", tokens.map(large_count), targets),
        tile("Wall time", wall.map(duration), wall_note(record, per_million("seconds"))),
        tile(
            "Energy",
            energy.map(|kwh| format!("{} kWh", Unit::Plain.text(kwh))),
            per_million("energy_kwh").map(|kwh| format!("{} kWh a million tokens", Unit::Plain.text(kwh))),
        ),
        tile(
            "Cost",
            record.figure("cost").map(cost),
            per_million("cost").map(|of_million| format!("{} a million tokens", cost(of_million))),
        ),
    ];
    tiles.into_iter().flatten().collect()
}

/// `73,670`, `12.3 million`, `1.50 billion`.
fn large_count(count: f64) -> String {
    match count {
        count if count >= 1e9 => format!("{:.2} billion", count / 1e9),
        count if count >= 1e7 => format!("{:.1} million", count / 1e6),
        count => thousands(count),
    }
}

fn warnings(record: &Record) -> Vec<String> {
    let warnings = record.summary.get("warnings").and_then(Value::as_array);
    warnings.into_iter().flatten().map(plain).collect()
}

/// A figure of the steps after warm-up.
pub(super) fn steady<'a>(record: &'a Record, name: &str) -> &'a [f64] {
    let column = record.steps.get(name).unwrap_or_default();
    &column[num_warmup_steps(column.len()).min(column.len())..]
}

/// Tokens a second over all steps.
fn rate(record: &Record) -> Option<f64> {
    let seconds = record.steps.sum("step_seconds").filter(|seconds| *seconds > 0.0)?;
    record.figure("tokens_per_second").or_else(|| Some(record.steps.sum("tokens")? / seconds))
}

/// Where the whole run's time went; without a summary, that of its steps.
fn time_pieces(record: &Record) -> Vec<Piece> {
    let Some(time) = record.summary.get("time").and_then(Value::as_object) else {
        let parts = stack::parts(&record.steps).into_iter();
        let piece = |part: stack::Part| Piece {
            name: part.name.to_owned(),
            class: part.class,
            value: part.seconds.iter().sum(),
        };
        return parts.map(piece).collect();
    };
    let pieces = TIME_PARTS.iter().filter_map(|&(field, name, class)| {
        let value = time.get(field)?.as_f64().filter(|seconds| *seconds > 0.0)?;
        Some(Piece { name: name.to_owned(), class, value })
    });
    pieces.flat_map(|piece| passes_apart(piece, record.figure("forward_share"))).collect()
}

/// Forward and backward, where the run knows which share of the two the first had.
fn passes_apart(piece: Piece, forward_share: Option<f64>) -> Vec<Piece> {
    let Some(share) = forward_share.filter(|_| piece.class == "p-passes") else { return vec![piece] };
    let part = |name: &str, class, share: f64| Piece { name: name.to_owned(), class, value: share * piece.value };
    vec![part("forward", "p-forward", share), part("backward", "p-backward", 1.0 - share)]
}

/// What the model wrote, by prompt, and how many texts are not shown.
fn texts(record: &Record) -> (Vec<Texts>, usize) {
    let mut prompts: Vec<(&str, Vec<Text>)> = Vec::new();
    for sample in &record.samples {
        let text = Text { step: sample.step, text: shortened(&sample.text, MAX_TEXT) };
        match prompts.iter_mut().find(|(prompt, _)| *prompt == sample.prompt) {
            Some((_, texts)) => texts.push(text),
            None => prompts.push((&sample.prompt, vec![text])),
        }
    }
    let num_texts = record.samples.len();
    let mut num_shown = 0;
    let texts = prompts.into_iter().take(MAX_PROMPTS).map(|(prompt, mut texts)| {
        let last = if texts.len() > 1 { texts.pop() } else { None };
        let first = texts.remove(0);
        let every = texts.len().div_ceil(MAX_TEXTS).max(1);
        let between: Vec<Text> = texts.into_iter().step_by(every).collect();
        let shown: Vec<Text> = std::iter::once(first).chain(last).collect();
        num_shown += shown.len() + between.len();
        Texts { prompt: shortened(prompt, MAX_TEXT), shown, between }
    });
    let texts: Vec<Texts> = texts.collect();
    (texts, num_texts - num_shown)
}

fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{} […]", &text[..end]),
        None => text.to_owned(),
    }
}

fn environment(record: &Record) -> Vec<Row> {
    let row = |(name, value): (&String, &Value)| {
        let value = match value {
            Value::String(text) => text.clone(),
            Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" "),
            Value::Object(fields) => {
                let pairs = fields.iter().map(|(name, value)| format!("{name}={}", plain(value)));
                pairs.collect::<Vec<_>>().join(" ")
            }
            Value::Number(number) if name.ends_with("_bytes") => Unit::Bytes.text(number.as_f64().unwrap_or(f64::NAN)),
            other => other.to_string(),
        };
        (!value.is_empty()).then(|| Row { name: name.replace('_', " "), value: shortened(&value, MAX_TEXT) })
    };
    record.environment.iter().filter_map(row).collect()
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_at_the_end_is_shown_as_that_and_not_as_the_one_before() {
        let mut record = Record::default();
        for (step, loss) in [(1, Some(2.5)), (2, None)] {
            let fields = |name: &str| [("step", step.into()), (name, loss.into())].map(|(n, v)| (n.to_owned(), v));
            record.steps.push(&fields("loss").into_iter().collect());
            record.evaluations.push(&fields("eval_loss").into_iter().collect());
        }
        let tiles = tiles(&record);
        let value = |label: &str| tiles.iter().find(|tile| tile.label == label).unwrap().value.as_str();
        assert_eq!((value("Evaluation loss"), value("Training loss")), ("not a number", "not a number"));
    }
}
