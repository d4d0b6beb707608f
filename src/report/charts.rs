//! The charts of a run: one for each figure that it measured.

use std::borrow::Cow;

use serde::Serialize;

use super::axis::Unit;
use super::chart::{Chart, Figure, Line, Look};
use super::record::Record;
use super::time;
use crate::figures::tags;
use crate::stats::as_f64;

/// The smoothed line over a noisy one is a mean over this fraction of the run.
const MEAN_SHARE: usize = 40;

/// The charts of a page by section.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Charts {
    learning: Vec<Figure>,
    throughput: Vec<Figure>,
    time: Option<Figure>,
    utilization: Vec<Figure>,
    memory: Vec<Figure>,
}

impl Charts {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            learning: drawn([loss(record), score(record), learning_rate(record), gradient_norm(record)]),
            throughput: drawn([rate(record), tokens(record)]),
            time: time::over_steps(&record.steps),
            utilization: drawn(utilization(record)),
            memory: drawn(memory(record)),
        }
    }
}

fn drawn<'a>(charts: impl IntoIterator<Item = Chart<'a>>) -> Vec<Figure> {
    charts.into_iter().filter_map(|chart| chart.figure()).collect()
}

/// A line, drawn where its figure was measured: figure, name, colour, look.
type Wanted = (&'static str, String, usize, Look);

/// The TensorBoard figures whose name `is_shown` accepts, each a line named by its tag.
fn all(is_shown: impl Fn(&str) -> bool) -> Vec<Wanted> {
    let shown = tags().filter(|(figure, ..)| is_shown(figure)).enumerate();
    let line = |(index, (figure, tag, _)): (usize, (&'static str, &str, &str))| {
        let (group, name) = tag.split_once('/').unwrap_or_default();
        let device = match group {
            "gpu" => "GPU ",
            "cpu" => "CPU ",
            _ => "",
        };
        let name = format!("{device}{}", name.replace('_', " "));
        (figure, name, 1 + index % 6, [Look::Solid, Look::Dashed, Look::Dotted][index % 3])
    };
    shown.map(line).collect()
}

/// Lines for the figures that were measured.
fn lines<'a>(record: &'a Record, wanted: &[Wanted]) -> Vec<Line<'a>> {
    let x = record.steps.get("step").unwrap_or_default();
    let line = |&(figure, ref name, color, look): &Wanted| {
        let y = match figure {
            "mfu_percent" => Cow::Owned(record.steps.get("mfu")?.iter().map(|mfu| 100.0 * mfu).collect()),
            _ => Cow::Borrowed(record.steps.get(figure)?),
        };
        Some(Line { name: name.clone(), x, y, color, look })
    };
    // Among others, a figure that was always 0, such as swapped memory, is left out.
    let says_something =
        |line: &Line<'_>| wanted.len() == 1 || line.y.iter().any(|value| value.is_finite() && *value != 0.0);
    wanted.iter().filter_map(line).filter(says_something).collect()
}

/// Steps of a running mean that makes lines calm enough to be followed; `None` in a short run, which needs none.
fn mean_width(record: &Record) -> Option<usize> {
    Some(record.steps.len() / MEAN_SHARE).filter(|width| *width >= 3)
}

/// At each index, the mean of the last `width` finite values.
fn moving_mean(values: &[f64], width: usize) -> Vec<f64> {
    // Sums and counts of all values before an index.
    let mut before = vec![(0.0, 0.0)];
    before.extend(values.iter().scan((0.0, 0.0), |(sum, count), value| {
        if value.is_finite() {
            (*sum, *count) = (*sum + value, *count + 1.0);
        }
        Some((*sum, *count))
    }));
    let mean = |at: usize| {
        let (first, last) = (before[(at + 1).saturating_sub(width)], before[at + 1]);
        // Without values: 0 / 0, which is NaN.
        (last.0 - first.0) / (last.1 - first.1)
    };
    (0..values.len()).map(mean).collect()
}

/// A figure of each step, in a long run pale, under its running mean.
fn with_mean<'a>(record: &'a Record, figure: &'static str, name: &str, color: usize) -> Vec<Line<'a>> {
    let mut lines = lines(record, &[(figure, name.to_owned(), color, Look::Solid)]);
    if let (Some(width), [line]) = (mean_width(record), &mut lines[..]) {
        let mean =
            Line { name: format!("mean of {width} steps"), y: moving_mean(&line.y, width).into(), ..line.clone() };
        (line.name, line.look) = (format!("{name} of a step"), Look::Pale);
        lines.push(mean);
    }
    lines
}

/// A chart of several figures: in a long run of their running means, so that the lines can be told apart.
fn calm<'a>(record: &'a Record, title: &'static str, unit: Unit, wanted: &[Wanted]) -> Chart<'a> {
    let mut chart = Chart { title, unit, lines: lines(record, wanted), ..Chart::default() };
    if let Some(width) = mean_width(record) {
        chart.note = format!("Means of {width} steps.");
        chart.lines.iter_mut().for_each(|line| line.y = moving_mean(&line.y, width).into());
    }
    chart
}

fn loss(record: &Record) -> Chart<'_> {
    let mut lines = with_mean(record, "loss", "training loss", 1);
    if let (Some(x), Some(y)) = (record.evaluations.get("step"), record.evaluations.get("eval_loss")) {
        lines.push(Line { name: "evaluation loss".to_owned(), x, y: y.into(), color: 4, look: Look::Dots });
    }
    let note = marked(&record.anomalies, "with which something was wrong");
    Chart { title: "Loss", note, lines, may_be_log: true, marks: &record.anomalies, ..Chart::default() }
}

/// The score of the task, in percent.
fn score(record: &Record) -> Chart<'_> {
    let scores = [("eval_score", "score", 4), ("eval_score_norm", "by length", 1)];
    let x = record.evaluations.get("step").unwrap_or_default();
    let line = |(figure, name, color): (&str, &str, usize)| {
        let y: Vec<f64> = record.evaluations.get(figure)?.iter().map(|score| 100.0 * score).collect();
        Some(Line { name: name.to_owned(), x, y: y.into(), color, look: Look::Solid })
    };
    let lines = scores.into_iter().filter_map(line).collect();
    Chart { title: "Score", unit: Unit::Percent, lines, ..Chart::default() }
}

/// The note that explains the upright lines of a chart, which mark the steps `which` ...
fn marked(marks: &[(u64, String)], which: &str) -> String {
    match marks {
        [] => String::new(),
        [(step, what)] => format!("The upright line marks step {step}: {}.", what.replace('_', " ")),
        [(first, what), .., (last, _)] => format!(
            "The upright lines mark {} steps {which}, the first at {first} ({}), the last at {last}.",
            marks.len(),
            what.replace('_', " ")
        ),
    }
}

fn learning_rate(record: &Record) -> Chart<'_> {
    let title = "Learning rate";
    let lines = lines(record, &[("learning_rate", title.to_owned(), 3, Look::Solid)]);
    Chart { title, unit: Unit::Scientific, lines, ..Chart::default() }
}

fn gradient_norm(record: &Record) -> Chart<'_> {
    Chart { title: "Gradient norm", lines: with_mean(record, "grad_norm", "norm", 6), ..Chart::default() }
}

fn rate(record: &Record) -> Chart<'_> {
    let note = marked(&record.findings, "at which the diagnosis found something");
    let lines = with_mean(record, "tokens_per_second", "tokens/s", 1);
    Chart { title: "Throughput", note, unit: Unit::TokensPerSecond, lines, marks: &record.findings, ..Chart::default() }
}

fn tokens(record: &Record) -> Chart<'_> {
    let wanted = [
        ("tokens", "not padding".into(), 1, Look::Solid),
        ("target_tokens", "carrying loss".into(), 4, Look::Dashed),
        ("padding_tokens", "padding".into(), 3, Look::Dotted),
    ];
    calm(record, "Tokens of a step", Unit::Count, &wanted)
}

fn utilization(record: &Record) -> Vec<Chart<'_>> {
    let ending = |suffix: &'static str| all(move |figure| figure.ends_with(suffix));
    let mut percent = ending("_percent");
    percent.push(("mfu_percent", "MFU".into(), 5, Look::Dashed));
    let power = with_mean(record, "gpu_power_watts", "power", 4);
    let mut charts = vec![
        Chart { at_least: 100.0, ..calm(record, "Utilization", Unit::Percent, &percent) },
        Chart { title: "GPU power", unit: Unit::Watts, lines: power, ..Chart::default() },
        calm(record, "GPU temperature", Unit::Celsius, &ending("_celsius")),
        clocks(record, &ending("_mhz")),
        calm(record, "PCIe traffic", Unit::BytesPerSecond, &ending("_bytes_per_second")),
    ];
    // A run with its rows in memory reads nothing.
    if record.steps.max("disk_read_bytes").is_some_and(|most| most > 0.0) {
        charts.push(calm(record, "Read from disks in a step", Unit::Bytes, &ending("disk_read_bytes")));
    }
    charts
}

/// With the reasons for throttling.
fn clocks<'a>(record: &'a Record, wanted: &[Wanted]) -> Chart<'a> {
    let num_steps = as_f64(record.steps.len().max(1));
    let reasons = record.throttles.iter().map(|(reason, num_throttled)| {
        format!("{} in {:.0}% of the samples", reason.replace('_', " "), 100.0 * num_throttled / num_steps)
    });
    let reasons = reasons.collect::<Vec<_>>().join(", ");
    let note = if reasons.is_empty() { String::new() } else { format!("Kept down by: {reasons}.") };
    Chart { title: "GPU clocks", note, unit: Unit::Megahertz, lines: lines(record, wanted), ..Chart::default() }
}

fn memory(record: &Record) -> [Chart<'_>; 2] {
    [("GPU memory", "gpu_"), ("Host memory", "host_")].map(|(title, device)| {
        // The machine's free memory would dwarf that of the process.
        let wanted =
            all(|figure| figure.starts_with(device) && figure.ends_with("_bytes") && figure != "host_available_bytes");
        Chart { title, unit: Unit::Bytes, lines: lines(record, &wanted), ..Chart::default() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moving_mean_looks_back_and_leaves_gaps_out() {
        assert_eq!(moving_mean(&[1.0, 3.0, f64::NAN, 5.0], 2), [1.0, 2.0, 3.0, 5.0]);
        assert!(moving_mean(&[f64::NAN], 2)[0].is_nan());
    }

    #[test]
    fn what_was_not_measured_has_no_chart() {
        let mut record = Record::default();
        record.steps.push(&serde_json::from_str(r#"{"step":1,"loss":2.0,"learning_rate":1e-3}"#).unwrap());
        let charts = Charts::of(&record);
        assert_eq!((charts.learning.len(), charts.throughput.len(), charts.utilization.len()), (2, 0, 0));
        assert!(charts.memory.is_empty() && charts.time.is_none());
    }
}
