//! Which charts a run has: those whose figures it measured.

use std::borrow::Cow;

use super::axis::Unit;
use super::chart::{Chart, Line, Look};
use super::record::Record;
use super::split::split_note;
use super::stack;

/// Steps whose mean the calmer line over a noisy one shows: a fortieth of the run.
const MEAN_SHARE: usize = 40;

/// The charts of a page, by its sections. Each is HTML.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Charts {
    pub(super) learning: Vec<String>,
    pub(super) throughput: Vec<String>,
    pub(super) time: Vec<String>,
    pub(super) utilization: Vec<String>,
    pub(super) memory: Vec<String>,
}

/// A line to draw where its figure was measured: figure, name, colour, look.
type Wanted = (&'static str, &'static str, usize, Look);

const UTILIZATION: [Wanted; 6] = [
    ("gpu_utilization_percent", "GPU", 1, Look::Solid),
    ("gpu_sm_activity_percent", "GPU multiprocessors", 2, Look::Dashed),
    // Of its bandwidth where the driver counts it, else of the time: the same name must do for both.
    ("gpu_memory_activity_percent", "GPU memory activity", 3, Look::Dotted),
    ("gpu_tensor_activity_percent", "GPU tensor cores", 6, Look::Dotted),
    ("cpu_utilization_percent", "CPU", 4, Look::Solid),
    ("mfu_percent", "MFU", 5, Look::Dashed),
];
const GPU_MEMORY: [Wanted; 5] = [
    ("gpu_memory_used_bytes", "used, by all processes", 1, Look::Solid),
    ("gpu_memory_reserved_bytes", "reserved by this process", 2, Look::Dashed),
    ("gpu_memory_peak_bytes", "allocated in it, most seen in a step", 3, Look::Solid),
    ("gpu_memory_allocated_bytes", "allocated in it, at the end of a step", 3, Look::Dotted),
    ("gpu_other_processes_memory_bytes", "of other processes", 4, Look::Dashed),
];
const HOST_MEMORY: [Wanted; 2] =
    [("host_memory_bytes", "process", 1, Look::Solid), ("host_swapped_bytes", "swapped out", 4, Look::Dashed)];
const TEMPERATURE: [Wanted; 1] = [("gpu_temperature_celsius", "GPU temperature", 4, Look::Solid)];
const CLOCKS: [Wanted; 2] =
    [("gpu_sm_clock_mhz", "multiprocessors", 1, Look::Solid), ("gpu_memory_clock_mhz", "memory", 3, Look::Dashed)];
const DISK: [Wanted; 1] = [("disk_read_bytes", "Read from disks in a step", 3, Look::Solid)];
const PCIE: [Wanted; 2] = [
    ("gpu_pcie_received_bytes_per_second", "to the GPU", 1, Look::Solid),
    ("gpu_pcie_sent_bytes_per_second", "from the GPU", 3, Look::Dashed),
];

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

/// The lines of the figures that were measured.
fn lines<'a>(record: &'a Record, steps: &'a [f64], wanted: &[Wanted]) -> Vec<Line<'a>> {
    let line = |&(figure, name, color, look): &Wanted| {
        let y = match figure {
            "mfu_percent" => Cow::Owned(record.steps.get("mfu")?.iter().map(|mfu| 100.0 * mfu).collect()),
            _ => Cow::Borrowed(record.steps.get(figure)?),
        };
        Some(Line { name: name.to_owned(), x: steps, y, color, look })
    };
    // Beside others, what was nothing all the time, such as memory swapped out, says nothing.
    let says_something =
        |line: &Line<'_>| wanted.len() == 1 || line.y.iter().any(|value| value.is_finite() && *value != 0.0);
    wanted.iter().filter_map(line).filter(says_something).collect()
}

/// A figure of each step, pale, under the mean of some steps.
fn with_mean<'a>(record: &'a Record, steps: &'a [f64], figure: &str, name: &str, color: usize) -> Vec<Line<'a>> {
    let Some(y) = record.steps.get(figure) else { return Vec::new() };
    let each = Line { name: format!("{name} of a step"), x: steps, y: y.into(), color, look: Look::Pale };
    let width = y.len() / MEAN_SHARE;
    if width < 3 {
        return vec![Line { name: name.to_owned(), look: Look::Solid, ..each }];
    }
    vec![each, Line { name: format!("mean of {width} steps"), x: steps, y: calmed(y), color, look: Look::Solid }]
}

/// Means of the last fortieth of the values, so that a line can be followed; of few values, the values.
fn calmed(values: &[f64]) -> Cow<'_, [f64]> {
    match values.len() / MEAN_SHARE {
        ..3 => values.into(),
        width => moving_mean(values, width).into(),
    }
}

/// The mean of the last `width` finite values at each place.
fn moving_mean(values: &[f64], width: usize) -> Vec<f64> {
    // Sums and counts of all values before a place.
    let mut before = vec![(0.0, 0.0)];
    before.extend(values.iter().scan((0.0, 0.0), |(sum, count), value| {
        if value.is_finite() {
            (*sum, *count) = (*sum + value, *count + 1.0);
        }
        Some((*sum, *count))
    }));
    let mean = |at: usize| {
        let (first, last) = (before[(at + 1).saturating_sub(width)], before[at + 1]);
        // Of none: 0 / 0, which is no number.
        (last.0 - first.0) / (last.1 - first.1)
    };
    (0..values.len()).map(mean).collect()
}

/// Lines that can be told apart in a long run: means of some steps. With what to say of them.
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

/// What the upright lines of a chart mark: steps `which` ...
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
    let wanted = [("learning_rate", "Learning rate", 3, Look::Solid)];
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
            ("tokens", "not padding", 1, Look::Solid),
            ("target_tokens", "carrying loss", 4, Look::Dashed),
            ("padding_tokens", "padding", 3, Look::Dotted),
        ],
    );
    let charts = [rate.render(), noted("Tokens of a step", Unit::Count, tokens)];
    charts.into_iter().flatten().collect()
}

fn utilization(record: &Record, steps: &[f64]) -> Vec<String> {
    let (lines, note) = calm_lines(record, steps, &UTILIZATION);
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
    let charts = [
        chart.render(),
        single("GPU power", Unit::Watts, with_mean(record, steps, "gpu_power_watts", "power", 4)),
        noted("GPU temperature", Unit::Celsius, calm_lines(record, steps, &TEMPERATURE)),
        clocks(record, steps),
        noted("PCIe traffic", Unit::BytesPerSecond, calm_lines(record, steps, &PCIE)),
        // A run whose rows are in memory reads nothing.
        record
            .steps
            .max("disk_read_bytes")
            .filter(|most| *most > 0.0)
            .and_then(|_| noted("Read from disks in a step", Unit::Bytes, calm_lines(record, steps, &DISK))),
    ];
    charts.into_iter().flatten().collect()
}

/// With what kept them down.
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
        lines: lines(record, steps, &CLOCKS),
        from_zero: true,
        at_least: None,
        may_be_log: false,
        marks: &[],
    }
    .render()
}

fn memory(record: &Record, steps: &[f64]) -> Vec<String> {
    let charts = [
        single("GPU memory", Unit::Bytes, lines(record, steps, &GPU_MEMORY)),
        single("Host memory", Unit::Bytes, lines(record, steps, &HOST_MEMORY)),
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
