//! Where the time went: the parts of each step's wall time.

use std::fmt::Write as _;

use serde_json::json;

use super::axis::{Axis, Unit};
use super::chart::{Drawing, HEIGHT, WIDTH, grid, six_digits, stretches};
use super::columns::Columns;
use crate::util::stats::{as_f64, quantile};

const MAX_COLUMNS: usize = 100;
/// A column this many times as high as nine tenths of them is cut off, so that the others stay visible.
const CUT_ABOVE: f64 = 4.0;

/// A part of the time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TimePart {
    pub(super) name: &'static str,
    /// Colour class.
    pub(super) class: &'static str,
    /// Seconds of each step.
    pub(super) seconds: Vec<f64>,
}

/// Parts of the wall time: figure, display name, colour class.
const PARTS: [(&str, &str, &str); 10] = [
    ("forward_seconds", "forward", "p-forward"),
    ("backward_seconds", "backward", "p-backward"),
    ("optimizer_seconds", "optimizer", "p-optimizer"),
    ("data_wait_seconds", "waiting for data", "p-data"),
    ("host_to_device_seconds", "host to device", "p-transfer"),
    ("rollout_seconds", "rollouts", "p-rollouts"),
    ("logging_seconds", "logging", "p-logging"),
    ("evaluation_seconds", "evaluation", "p-evaluation"),
    ("checkpoint_seconds", "checkpoints", "p-checkpoint"),
    ("other_seconds", "other", "p-other"),
];

/// Work of the device, and handing it over.
const OF_DEVICE: [&str; 4] = ["host_to_device_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"];

/// The parts of each step's wall time, which add up to `wall_seconds`.
pub(super) fn parts(steps: &Columns) -> Vec<TimePart> {
    let of_device = of_device(steps);
    let seconds = |figure: &str| {
        let at = OF_DEVICE.iter().position(|part| *part == figure);
        of_device.as_ref().zip(at).map_or_else(|| steps.or_zero(figure), |(parts, at)| parts[at].clone())
    };
    let mut parts: Vec<TimePart> =
        PARTS.iter().map(|&(figure, name, class)| TimePart { name, class, seconds: seconds(figure) }).collect();
    if of_device.is_none() {
        // Forward and backward together, where they cannot be told apart.
        let seconds = steps.or_zero("forward_backward_seconds");
        parts.insert(0, TimePart { name: "forward + backward", class: "p-passes", seconds });
    }
    parts.retain(|part| part.total() > 0.0);
    parts
}

impl TimePart {
    /// Seconds of all steps.
    pub(super) fn total(&self) -> f64 {
        self.seconds.iter().sum()
    }

    /// Its row of the table: median, 95th percentile, highest, sum.
    fn row(&self) -> (String, Vec<String>) {
        let [median, p95, highest] = [0.5, 0.95, 1.0].map(|share| quantile(&self.seconds, share).unwrap_or(f64::NAN));
        (self.name.to_owned(), [median, p95, highest, self.total()].map(|value| Unit::Seconds.text(value)).to_vec())
    }
}

/// The parts of [`OF_DEVICE`] of each step; `None` where no step measures forward and backward apart. Only some steps
/// wait for the GPU at the end of each part. In the others a part's time is only that of launching it, so their sum is
/// split as in the last step that waited, or, before there was one, as in the first.
fn of_device(steps: &Columns) -> Option<[Vec<f64>; 4]> {
    let forward = steps.get("forward_seconds")?;
    let (columns, passes) = (OF_DEVICE.map(|name| steps.or_zero(name)), steps.or_zero("forward_backward_seconds"));
    let measured = |at: usize| [0, 1, 2, 3].map(|part| columns[part][at]);
    let mut last = measured(forward.iter().position(|seconds| seconds.is_finite())?);
    let mut parts = OF_DEVICE.map(|_| Vec::with_capacity(steps.len()));
    for at in 0..steps.len() {
        let values = if forward[at].is_finite() {
            last = measured(at);
            last
        } else {
            let [host_to_device, _, _, optimizer] = measured(at);
            let sum = host_to_device + passes[at] + optimizer;
            let whole = last.iter().sum::<f64>();
            last.map(|part| if whole > 0.0 { sum * part / whole } else { 0.0 })
        };
        parts.iter_mut().zip(values).for_each(|(part, value)| part.push(value));
    }
    Some(parts)
}

/// How many steps are split like others; `None` where all were measured.
fn split_note(steps: &Columns) -> Option<String> {
    let forward = steps.get("forward_seconds")?;
    let num_measured = forward.iter().filter(|seconds| seconds.is_finite()).count();
    (num_measured < forward.len()).then(|| {
        format!(
            "The device was waited for at the end of every part in {num_measured} of {} steps; what it took in the \
             others is split as in these.",
            forward.len()
        )
    })
}

/// What a column stands for, if not for a step.
fn each_note(least: usize, most: usize) -> Option<String> {
    match (least, most) {
        (_, 1) => None,
        (least, most) if least == most => Some(format!("Each column is the mean of {most} steps.")),
        (least, most) => Some(format!("Each column is the mean of {least} to {most} steps.")),
    }
}

/// The paths of parts, of each of which a column has a mean, on top of those before it. `sides`: where a column begins and ends.
fn stacked(means: &[Vec<f64>], sides: &[[f64; 2]], y: &Axis) -> Vec<String> {
    let mut floors = vec![0.0; sides.len()];
    let path_of = |means: &Vec<f64>| {
        let mut path = String::new();
        for ((sides, floor), mean) in sides.iter().zip(&mut floors).zip(means) {
            let [left, right] = sides.map(|position| WIDTH * position);
            let bottom = HEIGHT * (1.0 - y.position(*floor).min(1.0));
            *floor += mean;
            let top = HEIGHT * (1.0 - y.position(*floor).min(1.0));
            if bottom - top > 0.05 {
                let _ = write!(path, "M{left:.1} {bottom:.1}V{top:.1}H{right:.1}V{bottom:.1}z");
            }
        }
        path
    };
    means.iter().map(path_of).collect()
}

/// Where columns reach beyond the highest of the chart, in percent of its width, and their totals.
fn marks_beyond(sides: &[[f64; 2]], totals: &[f64], highest: f64) -> Vec<(f64, String)> {
    let columns = sides.iter().zip(totals).filter(|(_, total)| **total > highest);
    let mark = |([left, right], total): (&[f64; 2], &f64)| {
        ((1e4 * f64::midpoint(*left, *right)).round() / 100.0, Unit::Seconds.text(*total))
    };
    columns.map(mark).collect()
}

/// Columns over the steps, each the mean of its steps.
pub(super) fn over_steps(record: &Columns, x: &Axis) -> Option<Drawing> {
    let (steps, parts) = (record.get("step")?, parts(record));
    if parts.is_empty() {
        return None;
    }
    let columns: Vec<(usize, usize)> = stretches(steps.len(), MAX_COLUMNS).collect();
    let mean = |part: &TimePart, &(start, end): &(usize, usize)| {
        part.seconds[start..end].iter().sum::<f64>() / as_f64(end - start)
    };
    let means: Vec<Vec<f64>> =
        parts.iter().map(|part| columns.iter().map(|column| mean(part, column)).collect()).collect();
    let totals: Vec<f64> =
        (0..columns.len()).map(|column| means.iter().map(|part| part[column]).sum::<f64>()).collect();
    let highest = totals.iter().copied().fold(0.0, f64::max);
    let most = quantile(&totals, 0.9)?;
    let is_cut = highest > CUT_ABOVE * most && most > 0.0;
    let y = Axis::rounded(0.0, if is_cut { 2.0 * most } else { highest }, Unit::Seconds, 5.0);
    // From the end of the step before to that of the last one.
    let edges = |&(start, end): &(usize, usize)| [steps[start] - 1.0, steps[end - 1]].map(|step| x.position(step));

    let mut shapes = vec![grid(&y)];
    let sides: Vec<[f64; 2]> = columns.iter().map(edges).collect();
    let classes = parts.iter().map(|part| format!("stack {}", part.class));
    shapes.extend(classes.zip(stacked(&means, &sides, &y)));
    let beyond = marks_beyond(&sides, &totals, y.high);
    let num_steps = || columns.iter().map(|(start, end)| end - start);
    let each = each_note(num_steps().min()?, num_steps().max()?);
    let cut = (!beyond.is_empty()).then(|| {
        let highest = Unit::Seconds.text(highest);
        format!("▲ marks columns that reach beyond the chart; the highest is {highest} a step.")
    });
    let whole: f64 = parts.iter().map(TimePart::total).sum();
    let shares = parts.iter().map(|part| format!("{} {:.1} %", part.name, 100.0 * part.total() / whole));
    let data = parts.iter().zip(&means).map(|(part, means)| {
        let means: Vec<f64> = means.iter().copied().map(six_digits).collect();
        json!({"name": part.name, "class": format!("stack {}", part.class), "y": means})
    });
    Some(Drawing {
        title: "Time of a step",
        unit: y.scale.suffix.trim(),
        is_stacked: true,
        legend: parts.iter().map(|part| (part.name.to_owned(), part.class.to_owned())).collect(),
        alternative: shares.collect::<Vec<_>>().join(", "),
        xs: x.marks(),
        ys: y.marks(),
        shapes,
        beyond,
        how: String::new(),
        note: [each, split_note(record), cut].into_iter().flatten().collect::<Vec<_>>().join(" "),
        heads: vec!["median", "95 % below", "highest", "all steps"],
        rows: parts.iter().map(TimePart::row).collect(),
        data: json!({
            "divisor": y.scale.divisor, "suffix": y.scale.suffix, "top": y.high,
            // First and last step of each column.
            "columns": columns.iter().map(|&(start, end)| [steps[start], steps[end - 1]]).collect::<Vec<_>>(),
            // Mean seconds per step.
            "parts": data.collect::<Vec<_>>(),
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::report::columns::tests::columns;

    /// Steps of which a part takes these seconds.
    fn steps(part: &str, seconds: impl IntoIterator<Item = f64>) -> Columns {
        let line = |(index, seconds): (usize, f64)| format!(r#"{{"step":{},"{part}":{seconds}}}"#, index + 1);
        let lines: Vec<String> = seconds.into_iter().enumerate().map(line).collect();
        columns(&lines.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[test]
    fn the_parts_of_a_step_add_up_to_its_wall_time() {
        let steps = columns(&[concat!(
            r#"{"step":1,"wall_seconds":1.0,"step_seconds":0.8,"forward_backward_seconds":0.5,"forward_seconds":0.2,"#,
            r#""backward_seconds":0.3,"optimizer_seconds":0.1,"data_wait_seconds":0.05,"host_to_device_seconds":0.0,"#,
            r#""logging_seconds":0.05,"evaluation_seconds":0.2,"checkpoint_seconds":0.0,"other_seconds":0.1}"#
        )]);
        let parts = parts(&steps);
        let names: Vec<_> = parts.iter().map(|part| part.name).collect();
        let expected = ["forward", "backward", "optimizer", "waiting for data", "logging", "evaluation", "other"];
        assert_eq!(names, expected);
        assert!((parts.iter().map(TimePart::total).sum::<f64>() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn steps_that_were_not_waited_for_are_split_as_those_that_were() {
        let line = |passes: f64, optimizer: f64, apart: &str| {
            format!(
                r#"{{"host_to_device_seconds":0.01,"forward_backward_seconds":{passes},"optimizer_seconds":{optimizer}{apart}}}"#
            )
        };
        let apart = r#","forward_seconds":0.3,"backward_seconds":0.5"#;
        // Launched at once, and waited for at the end of the backward; the third step waited at every end.
        let lines = [line(0.98, 0.01, ""), line(0.38, 0.01, ""), line(0.8, 0.19, apart), line(1.98, 0.01, "")];
        let steps = columns(&lines.each_ref().map(String::as_str));
        let told: Vec<(&str, Vec<f64>)> = parts(&steps)
            .into_iter()
            .map(|part| (part.name, part.seconds.iter().map(|seconds| (seconds * 1e6).round() / 1e6).collect()))
            .collect();
        let expected = [
            ("forward", vec![0.3, 0.12, 0.3, 0.6]),
            ("backward", vec![0.5, 0.2, 0.5, 1.0]),
            ("optimizer", vec![0.19, 0.076, 0.19, 0.38]),
            ("host to device", vec![0.01, 0.004, 0.01, 0.02]),
        ];
        assert_eq!(told, expected);
        assert!(split_note(&steps).unwrap().contains("in 1 of 4 steps"));
        assert_eq!(split_note(&columns(&[&lines[2]])), None);
    }

    #[test]
    fn columns_stand_on_each_other_and_hold_the_mean_of_their_steps() {
        let line = r#"{"forward_backward_seconds":0.25,"other_seconds":0.25,"step":"#;
        let x = |last| Axis::exact(0.0, last, Unit::Count, 5.0);
        let two = columns(&[1, 2].map(|step| format!("{line}{step}}}")).each_ref().map(String::as_str));
        let two = over_steps(&two, &x(2.0));
        let two = two.unwrap();
        assert_eq!(two.shapes[1].1, "M0.0 400.0V200.0H500.0V400.0zM500.0 400.0V200.0H1000.0V400.0z");
        assert!(two.shapes[2].1.starts_with("M0.0 200.0V0.0H500.0V200.0z"), "{two:?}");
        assert_eq!((two.alternative.as_str(), two.note.as_str()), ("forward + backward 50.0 %, other 50.0 %", ""));
        let long = over_steps(&steps("other_seconds", (0..300).map(|at| f64::from(at % 3))), &x(300.0)).unwrap();
        assert_eq!(long.note, "Each column is the mean of 3 steps.");
        assert_eq!((&long.data["columns"][1], &long.data["parts"][0]["y"][99]), (&json!([4.0, 6.0]), &json!(1.0)));
    }

    #[test]
    fn one_step_a_thousand_times_as_long_does_not_hide_the_others() {
        let steps = steps("other_seconds", (0..50).map(|at| if at == 0 { 10.0 } else { 0.01 }));
        let figure = over_steps(&steps, &Axis::exact(0.0, 50.0, Unit::Count, 5.0)).unwrap();
        assert_eq!(figure.beyond, [(1.0, "10 s".to_owned())]);
        assert!(figure.note.ends_with("the highest is 10 s a step.") && figure.shapes[1].1.contains("V200.0H40.0"));
    }
}
