//! The charts of a run: one for each figure that it measured and that moves.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::{Value, json};

use super::axis::{Axis, Unit};
use super::chart::{Chart, Drawing, Line, Look, MAX_POINTS};
use super::columns::Columns;
use super::record::Record;
use super::time;
use crate::measure::figures::tags;
use crate::util::stats::as_f64;

/// The charts of a page, all over the same steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Charts {
    loss: Option<Drawing>,
    others: Vec<Drawing>,
    /// Those left out because nothing moves in them, with their numbers.
    still: Vec<String>,
    time: Option<Drawing>,
    /// Steps, and the tokens and seconds up to each, for the horizontal axis.
    axes: Value,
}

impl Charts {
    pub(super) fn of(record: &Record) -> Self {
        let x = x_axis(record);
        let charts = [score(record), learning_rate(record), gradient_norm(record), rate(record), tokens(record)];
        let charts = charts.into_iter().chain(preferences(record)).chain(utilization(record)).chain(memory(record));
        let num_warmup = record.steps.len() - record.steps.steady("step").len();
        let steady =
            |line: &Line<'_>| line.y.iter().skip(num_warmup).copied().filter(|value| value.is_finite()).collect();
        let (mut others, mut still) = (Vec::new(), Vec::new());
        for chart in charts {
            match chart.still(steady) {
                Some(text) => still.push(text),
                None => others.extend(chart.figure(&x)),
            }
        }
        let loss = loss(record).figure(&x);
        Self { loss, others, still, time: time::over_steps(&record.steps, &x), axes: axes(&record.steps, &x) }
    }
}

/// The losses over the steps; `None` where there are none.
pub(super) fn losses(record: &Record) -> Option<Drawing> {
    loss(record).figure(&x_axis(record))
}

/// From before the first step to the last, with the evaluations. A step takes up what lies between it and the one before.
fn x_axis(record: &Record) -> Axis {
    let of = |columns: &Columns, before: f64| {
        let steps = columns.get("step")?;
        Some((steps.first()? - before, *steps.last()?))
    };
    let both = [of(&record.steps, 1.0), of(&record.evaluations, 0.0)];
    let low = both.iter().flatten().map(|(low, _)| *low).fold(f64::INFINITY, f64::min);
    let high = both.iter().flatten().map(|(_, high)| *high).fold(0.0, f64::max);
    Axis::exact(if low.is_finite() { low } else { 0.0 }, high, Unit::Count, 5.0)
}

fn axes(steps: &Columns, x: &Axis) -> Value {
    let numbers = steps.get("step").unwrap_or_default();
    let every = numbers.len().div_ceil(MAX_POINTS).max(1);
    let kept: Vec<usize> = (0..numbers.len()).filter(|at| (at + 1) % every == 0 || at + 1 == numbers.len()).collect();
    let sums = |figure: &str| {
        steps.get(figure)?;
        let mut sum = 0.0;
        let sums: Vec<f64> = steps
            .or_zero(figure)
            .iter()
            .map(|value| {
                sum += value;
                sum
            })
            .collect();
        Some([0.0].into_iter().chain(kept.iter().map(|&at| sums[at])).collect::<Vec<_>>())
    };
    let steps = numbers.first().map(|first| first - 1.0).into_iter().chain(kept.iter().map(|&at| numbers[at]));
    let steps: Vec<f64> = steps.collect();
    json!({
        "low": x.low, "high": x.high, "step": steps, "tokens": sums("tokens"),
        "time": sums("wall_seconds").or_else(|| sums("step_seconds")),
    })
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
        Some(Line { name: name.clone(), x, y, color, look, is_noisy: true })
    };
    // Among others, a figure that was always 0, such as swapped memory, is left out.
    let says_something =
        |line: &Line<'_>| wanted.len() == 1 || line.y.iter().any(|value| value.is_finite() && *value != 0.0);
    wanted.iter().filter_map(line).filter(says_something).collect()
}

/// A chart of the figures that were measured.
fn chart<'a>(record: &'a Record, title: &'static str, unit: Unit, wanted: &[Wanted]) -> Chart<'a> {
    Chart { title, unit, lines: lines(record, wanted), ..Chart::default() }
}

fn loss(record: &Record) -> Chart<'_> {
    let mut lines = lines(record, &[("loss", "training loss".to_owned(), 1, Look::Solid)]);
    if let (Some(x), Some(y)) = (record.evaluations.get("step"), record.evaluations.get("eval_loss")) {
        let name = "evaluation loss".to_owned();
        lines.push(Line { name, x, y: y.into(), color: 4, look: Look::Dots, is_noisy: false });
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
        Some(Line { name: name.to_owned(), x, y: y.into(), color, look: Look::Solid, is_noisy: false })
    };
    let lines = scores.into_iter().filter_map(line).collect();
    Chart { title: "Score", unit: Unit::Percent, lines, ..Chart::default() }
}

/// Rewards and accuracy of pairs of answers, of the steps and of the evaluations.
fn preferences(record: &Record) -> [Chart<'_>; 6] {
    let rewards = [
        ("rewards_chosen", "chosen".into(), 1, Look::Solid),
        ("rewards_rejected", "rejected".into(), 4, Look::Solid),
        ("rewards_margins", "margin".into(), 3, Look::Dashed),
    ];
    let log_probabilities =
        [("logps_chosen", "chosen".into(), 1, Look::Solid), ("logps_rejected", "rejected".into(), 4, Look::Solid)];
    let mut rewards = chart(record, "Rewards", Unit::Plain, &rewards);
    let mut accuracy =
        chart(record, "Accuracy", Unit::Plain, &[("rewards_accuracies", "training".into(), 1, Look::Solid)]);
    let of_answers = [
        ("reward", "reward".into(), 1, Look::Solid),
        ("reward_std", "deviation among the answers to a prompt".into(), 4, Look::Dashed),
    ];
    let mut of_answers = chart(record, "Reward of an answer", Unit::Plain, &of_answers);
    let evaluated = [
        (&mut of_answers, "eval_reward", "evaluated"),
        (&mut rewards, "eval_rewards_margins", "margin, evaluated"),
        (&mut accuracy, "eval_rewards_accuracies", "evaluated"),
    ];
    for (chart, figure, name) in evaluated {
        if let (Some(x), Some(y)) = (record.evaluations.get("step"), record.evaluations.get(figure)) {
            let name = name.to_owned();
            chart.lines.push(Line { name, x, y: y.into(), color: 5, look: Look::Dots, is_noisy: false });
        }
    }
    let lengths = [
        ("completion_length", "all".into(), 1, Look::Solid),
        ("terminated_length", "of those that ended by themselves".into(), 4, Look::Dashed),
    ];
    let entropy = [("entropy", "entropy in nats".into(), 1, Look::Solid)];
    [
        of_answers,
        chart(record, "Tokens of an answer", Unit::Count, &lengths),
        chart(record, "Entropy of a token of an answer", Unit::Plain, &entropy),
        accuracy,
        rewards,
        chart(record, "Log-probability of an answer", Unit::Plain, &log_probabilities),
    ]
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
    let mut chart = chart(record, title, Unit::Scientific, &[("learning_rate", title.to_owned(), 3, Look::Solid)]);
    chart.lines.iter_mut().for_each(|line| line.is_noisy = false);
    chart
}

fn gradient_norm(record: &Record) -> Chart<'_> {
    let title = "Gradient norm";
    let wanted = [("grad_norm", title.to_owned(), 6, Look::Solid)];
    Chart { may_be_log: true, ..chart(record, title, Unit::Plain, &wanted) }
}

fn rate(record: &Record) -> Chart<'_> {
    let (title, note) = ("Throughput", marked(&record.findings, "at which the diagnosis found something"));
    let wanted = [("tokens_per_second", title.to_owned(), 1, Look::Solid)];
    Chart { note, marks: &record.findings, ..chart(record, title, Unit::TokensPerSecond, &wanted) }
}

fn tokens(record: &Record) -> Chart<'_> {
    let wanted = [
        ("tokens", "not padding".into(), 1, Look::Solid),
        ("target_tokens", "carrying loss".into(), 4, Look::Dashed),
        ("padding_tokens", "padding".into(), 3, Look::Dotted),
    ];
    chart(record, "Tokens of a step", Unit::Count, &wanted)
}

fn utilization(record: &Record) -> [Chart<'_>; 6] {
    let ending = |suffix: &'static str| all(move |figure| figure.ends_with(suffix));
    let mut percent = ending("_percent");
    percent.push(("mfu_percent", "MFU".into(), 5, Look::Dashed));
    let power = [("gpu_power_watts", "GPU power".into(), 4, Look::Solid)];
    [
        Chart { at_least: 100.0, ..chart(record, "Utilization", Unit::Percent, &percent) },
        chart(record, "GPU power", Unit::Watts, &power),
        chart(record, "GPU temperature", Unit::Celsius, &ending("_celsius")),
        clocks(record, &ending("_mhz")),
        chart(record, "PCIe traffic", Unit::BytesPerSecond, &ending("_bytes_per_second")),
        chart(record, "Read from disks in a step", Unit::Bytes, &ending("disk_read_bytes")),
    ]
}

/// With the reasons for throttling.
fn clocks<'a>(record: &'a Record, wanted: &[Wanted]) -> Chart<'a> {
    let num_steps = as_f64(record.steps.len().max(1));
    let reasons = record.throttles.iter().map(|(reason, num_throttled)| {
        format!("{} in {:.0}% of the samples", reason.replace('_', " "), 100.0 * num_throttled / num_steps)
    });
    let reasons = reasons.collect::<Vec<_>>().join(", ");
    let note = if reasons.is_empty() { String::new() } else { format!("Kept down by: {reasons}.") };
    Chart { note, ..chart(record, "GPU clocks", Unit::Megahertz, wanted) }
}

fn memory(record: &Record) -> [Chart<'_>; 2] {
    [("GPU memory", "gpu_"), ("Host memory", "host_")].map(|(title, device)| {
        // The machine's free memory would dwarf that of the process.
        let wanted =
            all(|figure| figure.starts_with(device) && figure.ends_with("_bytes") && figure != "host_available_bytes");
        chart(record, title, Unit::Bytes, &wanted)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_has_no_chart() {
        let mut record = Record::default();
        record.steps.push(&serde_json::from_str(r#"{"step":1,"loss":2.0,"learning_rate":1e-3}"#).unwrap());
        let charts = Charts::of(&record);
        let titles: Vec<&str> = charts.loss.iter().chain(&charts.others).map(|chart| chart.title).collect();
        assert!(titles == ["Loss", "Learning rate"] && charts.still.is_empty() && charts.time.is_none());
        assert_eq!(charts.axes, json!({"low": 0.0, "high": 1.0, "step": [0.0, 1.0], "tokens": null, "time": null}));
    }
}
