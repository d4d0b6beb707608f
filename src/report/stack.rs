//! Where the time went: parts of a step's wall time, over the steps and in total.

use std::fmt::Write as _;

use serde::Serialize;

use super::axis::{Axis, Unit};
use super::chart::{HEIGHT, Parts, WIDTH, figure, grid, six_digits};
use super::columns::Columns;
use super::downsample::stretches;
use super::html::{escape, script_json};
use super::split::{OF_DEVICE, of_device};
use super::statistics::quantile;

/// Columns of the chart, at most.
const MAX_COLUMNS: usize = 100;
/// A column this much higher than nine tenths of them is cut off, so that the others can be seen.
const CUT_ABOVE: f64 = 4.0;

/// A part of the time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    pub(super) name: &'static str,
    /// Class of its colour.
    pub(super) class: &'static str,
    /// Of each step.
    pub(super) seconds: Vec<f64>,
}

/// Parts of the wall time by the name of their figure, for people, and the class of their colour.
const PARTS: [(&str, &str, &str); 9] = [
    ("forward_seconds", "forward", "p-forward"),
    ("backward_seconds", "backward", "p-backward"),
    ("optimizer_seconds", "optimizer", "p-optimizer"),
    ("data_wait_seconds", "waiting for data", "p-data"),
    ("host_to_device_seconds", "host to device", "p-transfer"),
    ("logging_seconds", "logging", "p-logging"),
    ("evaluation_seconds", "evaluation", "p-evaluation"),
    ("checkpoint_seconds", "checkpoints", "p-checkpoint"),
    ("other_seconds", "other", "p-other"),
];

/// The parts of each step's wall time; they add up to `wall_seconds`, in runs of older versions to `step_seconds`.
pub(super) fn parts(steps: &Columns) -> Vec<Part> {
    let column = |name: &str| -> Vec<f64> {
        let finite = |value: &f64| if value.is_finite() { *value } else { 0.0 };
        steps.get(name).map_or_else(|| vec![0.0; steps.len()], |column| column.iter().map(finite).collect())
    };
    let of_device = of_device(steps);
    let seconds = |figure: &str| {
        let at = OF_DEVICE.iter().position(|part| *part == figure);
        of_device.as_ref().zip(at).map_or_else(|| column(figure), |(parts, at)| parts[at].clone())
    };
    let mut parts: Vec<Part> = PARTS
        .iter()
        .filter(|(figure, ..)| steps.get(figure).is_some())
        .map(|&(figure, name, class)| Part { name, class, seconds: seconds(figure) })
        .collect();
    if of_device.is_none() {
        // What of the two passes cannot be told apart.
        let passes = column("forward_backward_seconds");
        parts.insert(0, Part { name: "forward + backward", class: "p-passes", seconds: passes });
    }
    if steps.get("other_seconds").is_none()
        && let Some(whole) = steps.get("wall_seconds").or_else(|| steps.get("step_seconds"))
    {
        let told = |at: usize| parts.iter().map(|part| part.seconds[at]).sum::<f64>();
        let seconds = (0..steps.len()).map(|at| (whole[at] - told(at)).max(0.0)).map(|s| if s > 0.0 { s } else { 0.0 });
        parts.push(Part { name: "other", class: "p-other", seconds: seconds.collect() });
    }
    parts.retain(|part| part.seconds.iter().sum::<f64>() > 0.0);
    parts
}

#[derive(Serialize)]
struct Data<'a> {
    low: f64,
    high: f64,
    divisor: f64,
    suffix: &'static str,
    /// First and last step of each column.
    columns: Vec<(f64, f64)>,
    /// Mean seconds a step.
    parts: Vec<DataPart<'a>>,
}

#[derive(Serialize)]
struct DataPart<'a> {
    name: &'a str,
    y: Vec<f64>,
}

/// Columns over the steps, each the mean of its steps. `split` says how they come to their parts.
pub(super) fn over_steps(steps: &[f64], parts: &[Part], split: &str) -> Option<String> {
    if parts.is_empty() || steps.is_empty() {
        return None;
    }
    let columns: Vec<(usize, usize)> = stretches(steps.len(), MAX_COLUMNS).collect();
    #[expect(clippy::cast_precision_loss, reason = "numbers of steps")]
    let mean =
        |part: &Part, (start, end): (usize, usize)| part.seconds[start..end].iter().sum::<f64>() / (end - start) as f64;
    let means: Vec<Vec<f64>> =
        parts.iter().map(|part| columns.iter().map(|&column| mean(part, column)).collect()).collect();
    let totals: Vec<f64> =
        (0..columns.len()).map(|column| means.iter().map(|part| part[column]).sum::<f64>()).collect();
    let highest = totals.iter().copied().fold(0.0, f64::max);
    let most = quantile(&totals, 0.9)?;
    let is_cut = highest > CUT_ABOVE * most && most > 0.0;
    let y = Axis::rounded(0.0, if is_cut { 2.0 * most } else { highest }, Unit::Seconds, 5.0);
    // Columns stand around their steps.
    let x = Axis::exact(steps[0] - 0.5, steps[steps.len() - 1] + 0.5, Unit::Count, 5.0);
    let edges = |(start, end): (usize, usize)| {
        (WIDTH * x.position(steps[start] - 0.5), WIDTH * x.position(steps[end - 1] + 0.5))
    };

    let mut shapes = grid(&y);
    let mut floors = vec![0.0; columns.len()];
    for (part, means) in parts.iter().zip(&means) {
        let mut path = String::new();
        for ((column, floor), mean) in columns.iter().zip(&mut floors).zip(means) {
            let (left, right) = edges(*column);
            let bottom = HEIGHT * (1.0 - y.position(*floor).min(1.0));
            *floor += mean;
            let top = HEIGHT * (1.0 - y.position(*floor).min(1.0));
            if bottom - top > 0.05 {
                let _ = write!(path, "M{left:.1} {bottom:.1}V{top:.1}H{right:.1}V{bottom:.1}z");
            }
        }
        let _ = write!(shapes, "<path class=\"stack {}\" d=\"{path}\"/>", part.class);
    }
    let mut over = String::new();
    for (column, total) in columns.iter().zip(&totals).filter(|(_, total)| **total > y.high) {
        let (left, right) = edges(*column);
        let _ = write!(
            over,
            "<span class=\"beyond\" style=\"left:{:.2}%\" title=\"{}\">▲</span>",
            f64::midpoint(left, right) / WIDTH * 100.0,
            Unit::Seconds.text(*total)
        );
    }
    let mut note = if columns.len() < steps.len() {
        format!("Each column is the mean of {} steps.", describe(&columns))
    } else {
        String::new()
    };
    if !split.is_empty() {
        let _ = write!(note, "{}{split}", if note.is_empty() { "" } else { " " });
    }
    if !over.is_empty() {
        let _ = write!(
            note,
            "{}▲ marks columns that reach beyond the chart; the highest is {} a step.",
            if note.is_empty() { "" } else { " " },
            Unit::Seconds.text(highest)
        );
    }
    let data = Data {
        low: x.low,
        high: x.high,
        divisor: y.scale.divisor,
        suffix: y.scale.suffix,
        columns: columns.iter().map(|&(start, end)| (steps[start], steps[end - 1])).collect(),
        parts: parts
            .iter()
            .zip(&means)
            .map(|(part, means)| DataPart { name: part.name, y: means.iter().copied().map(six_digits).collect() })
            .collect(),
    };
    Some(figure(&Parts {
        title: "Seconds of a step",
        legend: &legend(parts),
        suffix: y.scale.suffix,
        alternative: &alternative(parts),
        shapes: &shapes,
        over: &over,
        x: &x,
        y: &y,
        note: &note,
        table: &table(parts),
        data: &script_json(&data),
    }))
}

/// `2` or `2 to 3`.
fn describe(columns: &[(usize, usize)]) -> String {
    let lengths = || columns.iter().map(|(start, end)| end - start);
    match (lengths().min().unwrap_or(1), lengths().max().unwrap_or(1)) {
        (least, most) if least == most => most.to_string(),
        (least, most) => format!("{least} to {most}"),
    }
}

pub(super) fn legend(parts: &[Part]) -> String {
    let entries = parts.iter().map(|part| legend_entry(part.class, part.name));
    format!("<ul class=\"legend\">{}</ul>", entries.collect::<String>())
}

fn legend_entry(class: &str, name: &str) -> String {
    format!(
        "<li><svg viewBox=\"0 0 12 12\" class=\"box\" aria-hidden=\"true\"><path class=\"{class}\" \
         d=\"M0 0H12V12H0z\"/></svg>{}</li>",
        escape(name)
    )
}

fn alternative(parts: &[Part]) -> String {
    let totals = totals(parts);
    let whole: f64 = totals.iter().map(|(_, seconds)| seconds).sum();
    let shares = totals.iter().map(|(name, seconds)| format!("{name} {:.1} %", 100.0 * seconds / whole));
    shares.collect::<Vec<_>>().join(", ")
}

/// Seconds of all steps by part.
fn totals(parts: &[Part]) -> Vec<(&'static str, f64)> {
    parts.iter().map(|part| (part.name, part.seconds.iter().sum())).collect()
}

fn table(parts: &[Part]) -> String {
    let rows = parts.iter().map(|part| {
        let [median, p95] = [0.5, 0.95].map(|share| quantile(&part.seconds, share).unwrap_or(f64::NAN));
        let highest = part.seconds.iter().copied().fold(0.0, f64::max);
        let total: f64 = part.seconds.iter().sum();
        let cells = [median, p95, highest, total].map(|value| format!("<td>{}</td>", Unit::Seconds.text(value)));
        format!("<tr><th scope=\"row\">{}</th>{}</tr>", escape(part.name), cells.concat())
    });
    let heads = ["median", "95 % below", "highest", "all steps"];
    let heads = heads.map(|head| format!("<th scope=\"col\">{head}</th>"));
    format!(
        "<div class=\"wide\"><table><thead><tr><td></td>{}</tr></thead><tbody>{}</tbody></table></div>",
        heads.concat(),
        rows.collect::<String>()
    )
}

/// A piece of a bar.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) name: String,
    pub(super) class: &'static str,
    pub(super) value: f64,
}

/// Bars of pieces, one above the other on the same scale. Each comes with what stands before it and after it.
pub(super) fn bars(bars: &[(&str, Vec<Piece>)], unit: Unit) -> String {
    let sum = |pieces: &[Piece]| pieces.iter().map(|piece| piece.value).sum::<f64>();
    let longest = bars.iter().map(|(_, pieces)| sum(pieces)).fold(0.0, f64::max);
    if longest <= 0.0 {
        return String::new();
    }
    let mut html = String::from("<div class=\"bars\">");
    for (name, pieces) in bars {
        let total = sum(pieces);
        let mut shapes = String::new();
        let mut left = 0.0;
        for piece in pieces {
            let right = left + piece.value / longest * WIDTH;
            let (class, name) = (piece.class, escape(&piece.name));
            let _ = write!(
                shapes,
                "<path class=\"stack {class}\" d=\"M{left:.2} 0H{right:.2}V20H{left:.2}z\"><title>{name}: {}</title></path>",
                unit.text(piece.value)
            );
            left = right;
        }
        let spoken = pieces.iter().map(|piece| format!("{} {}", piece.name, unit.text(piece.value)));
        let _ = write!(
            html,
            "<div class=\"bar\"><p><span>{}</span> <b>{}</b></p><svg viewBox=\"0 0 {WIDTH} 20\" \
             preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">{shapes}</svg></div>",
            escape(name),
            unit.text(total),
            escape(&spoken.collect::<Vec<_>>().join(", ")),
        );
    }
    html.push_str("</div>");
    html
}

/// The pieces of a bar as a list: name, value, share.
pub(super) fn piece_list(pieces: &[Piece], unit: Unit) -> String {
    let total: f64 = pieces.iter().map(|piece| piece.value).sum();
    let entries = pieces.iter().map(|piece| {
        format!(
            "<li><svg viewBox=\"0 0 12 12\" class=\"box\" aria-hidden=\"true\"><path class=\"{}\" \
             d=\"M0 0H12V12H0z\"/></svg><span>{}</span> <b>{}</b> <span>{:.1} %</span></li>",
            piece.class,
            escape(&piece.name),
            unit.text(piece.value),
            if total > 0.0 { 100.0 * piece.value / total } else { 0.0 },
        )
    });
    format!("<ul class=\"pieces\">{}</ul>", entries.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(lines: &[&str]) -> Columns {
        let mut columns = Columns::default();
        lines.iter().for_each(|line| columns.push(&serde_json::from_str(line).unwrap()));
        columns
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
        assert!((parts.iter().map(|part| part.seconds[0]).sum::<f64>() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_run_of_an_older_version_has_the_passes_in_one_and_what_is_left() {
        let line = r#"{"step":1,"step_seconds":0.8,"forward_backward_seconds":0.5,"optimizer_seconds":0.1}"#;
        let parts = parts(&columns(&[line]));
        let told: Vec<_> = parts.iter().map(|part| (part.name, (part.seconds[0] * 1e6).round() / 1e6)).collect();
        assert_eq!(told, [("forward + backward", 0.5), ("optimizer", 0.1), ("other", 0.2)]);
    }

    #[test]
    fn columns_stand_on_each_other_and_hold_the_mean_of_their_steps() {
        let parts = [
            Part { name: "a", class: "p-forward", seconds: vec![0.25; 2] },
            Part { name: "b", class: "p-other", seconds: vec![0.25; 2] },
        ];
        let html = over_steps(&[1.0, 2.0], &parts, "").unwrap();
        assert!(html.contains("d=\"M0.0 400.0V200.0H500.0V400.0zM500.0 400.0V200.0H1000.0V400.0z\""), "{html}");
        assert!(html.contains("d=\"M0.0 200.0V0.0H500.0V200.0z"), "{html}");
        assert!(html.contains("a 50.0 %, b 50.0 %"), "{html}");
        let steps: Vec<f64> = (1..=300).map(f64::from).collect();
        let long = Part { name: "a", class: "p-forward", seconds: (0..300).map(|at| f64::from(at % 3)).collect() };
        let html = over_steps(&steps, &[long], "").unwrap();
        assert!(html.contains("mean of 3 steps") && html.contains("[[1.0,3.0],[4.0,6.0],"), "{html}");
        assert!(html.contains(r#""y":[1.0,1.0,"#), "{html}");
    }

    #[test]
    fn one_step_a_thousand_times_as_long_does_not_hide_the_others() {
        let steps: Vec<f64> = (1..=50).map(f64::from).collect();
        let mut seconds = vec![0.01; 50];
        seconds[0] = 10.0;
        let html = over_steps(&steps, &[Part { name: "a", class: "p-forward", seconds }], "").unwrap();
        assert!(html.contains("▲</span>") && html.contains("the highest is 10 s a step"), "{html}");
        assert!(html.contains("V200.0H40.0"), "{html}");
    }
}
