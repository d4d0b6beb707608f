//! The charts of a run: one for each figure that it measured.

use std::borrow::Cow;

use super::axis::Unit;
use super::chart::{Chart, Line, Look};
use super::record::Record;
use super::split::split_note;
use super::stack;
use crate::figures::tags;

/// The smoothed line over a noisy one is a mean over this fraction of the run.
const MEAN_SHARE: usize = 40;

/// The charts of a page by section, each as HTML.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Charts {
    pub(super) learning: Vec<String>,
    pub(super) throughput: Vec<String>,
    pub(super) time: Vec<String>,
    pub(super) utilization: Vec<String>,
    pub(super) memory: Vec<String>,
}

/// A line, drawn where its figure was measured: figure, name, colour, look.
type Wanted = (&'static str, String, usize, Look);

/// The TensorBoard figures whose name `is_shown` accepts, each a line named by its tag.
fn all(is_shown: impl Fn(&str) -> bool) -> Vec<Wanted> {
    let shown = tags().filter(|(figure, ..)| is_shown(figure)).enumerate();
    let line = |(index, (figure, tag, _)): (usize, (&'static str, &str, &str))| {
        let name = tag.rsplit('/').next().unwrap_or(tag).replace('_', " ");
        let device = if tag.starts_with("gpu/") {
            "GPU "
        } else if tag.starts_with("cpu/") {
            "CPU "
        } else {
            ""
        };
        (figure, format!("{device}{name}"), 1 + index % 6, [Look::Solid, Look::Dashed, Look::Dotted][index % 3])
    };
    shown.map(line).collect()
}

impl Charts {
    /// The charts of a run.
    pub(super) fn of(record: &Record) -> Self {
        let steps = record.steps.get("step").unwrap_or_default();
        Self {
            learning: [loss(record, steps), learning_rate(record, steps), gradient_norm(record, steps)]
                .into_iter()
                .flatten()
                .collect(),
            throughput: throughput(record, steps),
            time: stack::over_steps(steps, &stack::parts(&record.steps), &split_note(&record.steps))
                .into_iter()
                .collect(),
            utilization: utilization(record, steps),
            memory: memory(record, steps),
        }
    }
}

/// Lines for the figures that were measured.
fn lines<'a>(record: &'a Record, steps: &'a [f64], wanted: &[Wanted]) -> Vec<Line<'a>> {
    let line = |&(figure, ref name, color, look): &Wanted| {
        let y = match figure {
            "mfu_percent" => Cow::Owned(record.steps.get("mfu")?.iter().map(|mfu| 100.0 * mfu).collect()),
            _ => Cow::Borrowed(record.steps.get(figure)?),
        };
        Some(Line { name: name.clone(), x: steps, y, color, look })
    };
    // Among others, a figure that was always 0, such as swapped memory, is left out.
    let says_something =
        |line: &Line<'_>| wanted.len() == 1 || line.y.iter().any(|value| value.is_finite() && *value != 0.0);
    wanted.iter().filter_map(line).filter(says_something).collect()
}

/// A figure of each step, pale, under its running mean.
fn with_mean<'a>(record: &'a Record, steps: &'a [f64], figure: &str, name: &str, color: usize) -> Vec<Line<'a>> {
    let Some(y) = record.steps.get(figure) else { return Vec::new() };
    let each = Line { name: format!("{name} of a step"), x: steps, y: y.into(), color, look: Look::Pale };
    let width = y.len() / MEAN_SHARE;
    if width < 3 {
        return vec![Line { name: name.to_owned(), look: Look::Solid, ..each }];
    }
    vec![each, Line { name: format!("mean of {width} steps"), x: steps, y: calmed(y), color, look: Look::Solid }]
}

/// Running means over a fortieth of the values, so that a line can be followed; few values stay as they are.
fn calmed(values: &[f64]) -> Cow<'_, [f64]> {
    match values.len() / MEAN_SHARE {
        ..3 => values.into(),
        width => moving_mean(values, width).into(),
    }
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

/// Lines that can be told apart in a long run, as running means. Second, the sentence that explains them.
fn calm_lines<'a>(record: &'a Record, steps: &'a [f64], wanted: &[Wanted]) -> (Vec<Line<'a>>, String) {
    let mut lines = lines(record, steps, wanted);
    let width = steps.len() / MEAN_SHARE;
    if width < 3 {
        return (lines, String::new());
    }
    for line in &mut lines {
        line.y = moving_mean(&line.y, width).into();
    }
    (lines, format!("Means of {width} steps."))
}

fn loss(record: &Record, steps: &[f64]) -> Option<String> {
    let mut lines = with_mean(record, steps, "loss", "training loss", 1);
    if let (Some(x), Some(y)) = (record.evaluations.get("step"), record.evaluations.get("eval_loss")) {
        lines.push(Line { name: "evaluation loss".to_owned(), x, y: y.into(), color: 4, look: Look::Dots });
    }
    Chart {
        title: "Loss",
        note: marked(&record.anomalies, "with which something was wrong"),
        unit: Unit::Plain,
        lines,
        from_zero: true,
        at_least: None,
        may_be_log: true,
        marks: &record.anomalies,
    }
    .render()
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

fn single(title: &'static str, unit: Unit, lines: Vec<Line<'_>>) -> Option<String> {
    noted(title, unit, (lines, String::new()))
}

fn noted(title: &'static str, unit: Unit, (lines, note): (Vec<Line<'_>>, String)) -> Option<String> {
    Chart { title, note, unit, lines, from_zero: true, at_least: None, may_be_log: false, marks: &[] }.render()
}

fn learning_rate(record: &Record, steps: &[f64]) -> Option<String> {
    let wanted = [("learning_rate", "Learning rate".into(), 3, Look::Solid)];
    single("Learning rate", Unit::Scientific, lines(record, steps, &wanted))
}

fn gradient_norm(record: &Record, steps: &[f64]) -> Option<String> {
    single("Gradient norm", Unit::Plain, with_mean(record, steps, "grad_norm", "norm", 6))
}

fn throughput(record: &Record, steps: &[f64]) -> Vec<String> {
    let rate = Chart {
        title: "Throughput",
        note: marked(&record.findings, "at which the diagnosis found something"),
        unit: Unit::TokensPerSecond,
        lines: with_mean(record, steps, "tokens_per_second", "tokens/s", 1),
        from_zero: true,
        at_least: None,
        may_be_log: false,
        marks: &record.findings,
    };
    let tokens = calm_lines(
        record,
        steps,
        &[
            ("tokens", "not padding".into(), 1, Look::Solid),
            ("target_tokens", "carrying loss".into(), 4, Look::Dashed),
            ("padding_tokens", "padding".into(), 3, Look::Dotted),
        ],
    );
    let charts = [rate.render(), noted("Tokens of a step", Unit::Count, tokens)];
    charts.into_iter().flatten().collect()
}

fn utilization(record: &Record, steps: &[f64]) -> Vec<String> {
    let mut percent = all(|figure| figure.ends_with("_percent"));
    percent.push(("mfu_percent", "MFU".into(), 5, Look::Dashed));
    let (lines, note) = calm_lines(record, steps, &percent);
    let chart = Chart {
        title: "Utilization",
        note,
        unit: Unit::Percent,
        lines,
        from_zero: true,
        at_least: Some(100.0),
        may_be_log: false,
        marks: &[],
    };
    let by_unit = |unit: &str| calm_lines(record, steps, &all(|figure| figure.ends_with(unit)));
    let charts = [
        chart.render(),
        single("GPU power", Unit::Watts, with_mean(record, steps, "gpu_power_watts", "power", 4)),
        noted("GPU temperature", Unit::Celsius, by_unit("_celsius")),
        clocks(record, steps),
        noted("PCIe traffic", Unit::BytesPerSecond, by_unit("_bytes_per_second")),
        // A run with its rows in memory reads nothing.
        record
            .steps
            .max("disk_read_bytes")
            .filter(|most| *most > 0.0)
            .and_then(|_| noted("Read from disks in a step", Unit::Bytes, by_unit("disk_read_bytes"))),
    ];
    charts.into_iter().flatten().collect()
}

/// With the reasons for throttling.
fn clocks(record: &Record, steps: &[f64]) -> Option<String> {
    #[allow(clippy::cast_precision_loss, reason = "far below 2^53 steps")]
    let num_steps = record.steps.len().max(1) as f64;
    let reasons = record.throttles.iter().map(|(reason, num_throttled)| {
        format!("{} in {:.0}% of the samples", reason.replace('_', " "), 100.0 * num_throttled / num_steps)
    });
    let reasons = reasons.collect::<Vec<_>>().join(", ");
    Chart {
        title: "GPU clocks",
        note: if reasons.is_empty() { String::new() } else { format!("Kept down by: {reasons}.") },
        unit: Unit::Megahertz,
        lines: lines(record, steps, &all(|figure| figure.ends_with("_mhz"))),
        from_zero: true,
        at_least: None,
        may_be_log: false,
        marks: &[],
    }
    .render()
}

fn memory(record: &Record, steps: &[f64]) -> Vec<String> {
    // The machine's free memory would dwarf that of the process.
    let of = |device: &str| {
        all(|figure| figure.starts_with(device) && figure.ends_with("_bytes") && figure != "host_available_bytes")
    };
    let charts = [
        single("GPU memory", Unit::Bytes, lines(record, steps, &of("gpu_"))),
        single("Host memory", Unit::Bytes, lines(record, steps, &of("host_"))),
    ];
    charts.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moving_mean_looks_back_and_leaves_gaps_out() {
        let mean = moving_mean(&[1.0, 3.0, f64::NAN, 5.0], 2);
        assert_eq!(mean[..3], [1.0, 2.0, 3.0]);
        assert_eq!(mean[3], 5.0);
        assert!(moving_mean(&[f64::NAN], 2)[0].is_nan());
    }

    #[test]
    fn what_was_not_measured_has_no_chart() {
        let mut record = Record::default();
        record.steps.push(&serde_json::from_str(r#"{"step":1,"loss":2.0,"learning_rate":1e-3}"#).unwrap());
        let charts = Charts::of(&record);
        assert_eq!((charts.learning.len(), charts.throughput.len(), charts.utilization.len()), (2, 0, 0));
        assert!(charts.memory.is_empty() && charts.time.is_empty());
    }
}
