//! Line charts over the steps: SVG for the shapes, HTML for the text, which thus keeps its size on a phone.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde::Serialize;

use super::axis::{Axis, Unit};
use super::downsample::lowest_and_highest;
use super::html::{escape, script_json};
use super::statistics::quantile;

/// Points of a line, at most.
pub(super) const MAX_POINTS: usize = 600;
/// Size in the drawing's own units; it is stretched to the available width.
pub(super) const WIDTH: f64 = 1000.0;
pub(super) const HEIGHT: f64 = 400.0;

/// Ratio of highest to lowest number from which an axis is logarithmic: on a linear one, late values would be flat.
const LOG_ABOVE: f64 = 8.0;

/// How a line is drawn, since colours alone do not tell lines apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// A line.
    Solid,
    /// A dashed line.
    Dashed,
    /// A dotted line.
    Dotted,
    /// A pale line, under a smoother one of the same figure.
    Pale,
    /// A line with large dots.
    Dots,
}

impl Look {
    fn class(self) -> &'static str {
        match self {
            Self::Solid => "solid",
            Self::Dashed => "dashed",
            Self::Dotted => "dotted",
            Self::Pale => "pale",
            Self::Dots => "dots",
        }
    }
}

/// One line of a chart.
#[derive(Clone, Debug)]
pub(super) struct Line<'a> {
    pub(super) name: String,
    pub(super) x: &'a [f64],
    pub(super) y: Cow<'a, [f64]>,
    /// Number of its colour, from 1 to 8.
    pub(super) color: usize,
    pub(super) look: Look,
}

/// Lines over the steps.
#[derive(Clone, Debug)]
pub(super) struct Chart<'a> {
    pub(super) title: &'static str,
    /// A sentence below it.
    pub(super) note: String,
    pub(super) unit: Unit,
    pub(super) lines: Vec<Line<'a>>,
    /// The axis starts at 0.
    pub(super) from_zero: bool,
    /// The axis reaches at least to this number.
    pub(super) at_least: Option<f64>,
    /// The axis is logarithmic where the highest number is many times the lowest.
    pub(super) may_be_log: bool,
    /// Steps marked by upright lines.
    pub(super) marks: &'a [(u64, String)],
}

/// The data for the script.
#[derive(Serialize)]
struct Data<'a> {
    low: f64,
    high: f64,
    divisor: f64,
    suffix: &'static str,
    lines: Vec<DataLine<'a>>,
}

#[derive(Serialize)]
struct DataLine<'a> {
    name: &'a str,
    x: Vec<f64>,
    y: Vec<Option<f64>>,
}

impl Chart<'_> {
    /// The chart as HTML; `None` where no line has a number.
    pub(super) fn render(&self) -> Option<String> {
        let lines: Vec<&Line<'_>> =
            self.lines.iter().filter(|line| line.y.iter().any(|value| value.is_finite())).collect();
        let x = range(lines.iter().flat_map(|line| line.x))?;
        let y = range(lines.iter().flat_map(|line| line.y.iter()))?;
        let x = Axis::exact(x.0, x.1, Unit::Count, 4.0);
        let is_log = self.may_be_log && y.0 > 0.0 && y.1 / y.0 > LOG_ABOVE;
        let low = if self.from_zero { y.0.min(0.0) } else { y.0 };
        let linear = Axis::rounded(low, self.at_least.map_or(y.1, |least| y.1.max(least)), self.unit, 5.0);
        let y = if is_log { Axis::logarithmic(y.0, y.1, self.unit) } else { linear };
        let kept: Vec<Vec<usize>> = lines.iter().map(|line| lowest_and_highest(&line.y, MAX_POINTS)).collect();

        let mut shapes = grid(&y);
        for (step, _) in self.marks.iter().take(MAX_POINTS) {
            #[expect(clippy::cast_precision_loss, reason = "far below 2^53 steps")]
            let at = x.position(*step as f64) * WIDTH;
            let _ = write!(shapes, "<path class=\"mark\" d=\"M{at:.1} 0V{HEIGHT}\"/>");
        }
        for (line, kept) in lines.iter().zip(&kept) {
            let (color, look) = (line.color, line.look.class());
            let path = path(line, kept, &x, &y);
            let _ = write!(shapes, "<path class=\"line c{color} {look}\" d=\"{path}\"/>");
            if line.look == Look::Dots {
                let dots = dots(line, kept, &x, &y);
                let _ = write!(shapes, "<path class=\"dot c{color}\" d=\"{dots}\"/>");
            }
        }
        let data = Data {
            low: x.low,
            high: x.high,
            divisor: y.scale.divisor,
            suffix: y.scale.suffix,
            lines: lines.iter().zip(&kept).map(|(line, kept)| DataLine::of(line, kept)).collect(),
        };
        let summaries: Vec<Summary> = lines.iter().filter_map(|line| Summary::of(line)).collect();
        let alternative = summaries.iter().map(|summary| summary.sentence(self.unit)).collect::<Vec<_>>().join("; ");
        let legend = if self.lines.len() > 1 || self.lines.iter().any(|line| line.name != self.title) {
            let entries = lines.iter().map(|line| legend_entry(line));
            format!("<ul class=\"legend\">{}</ul>", entries.collect::<String>())
        } else {
            String::new()
        };
        Some(figure(&Parts {
            title: self.title,
            legend: &legend,
            suffix: if is_log { "logarithmic" } else { y.scale.suffix },
            alternative: &alternative,
            shapes: &shapes,
            over: "",
            x: &x,
            y: &y,
            note: &self.note,
            table: &table(&summaries, self.unit),
            data: &script_json(&data),
        }))
    }
}

/// The parts of any chart.
pub(super) struct Parts<'a> {
    pub(super) title: &'a str,
    pub(super) legend: &'a str,
    pub(super) suffix: &'a str,
    pub(super) alternative: &'a str,
    pub(super) shapes: &'a str,
    /// HTML over the drawing.
    pub(super) over: &'a str,
    pub(super) x: &'a Axis,
    pub(super) y: &'a Axis,
    pub(super) note: &'a str,
    pub(super) table: &'a str,
    pub(super) data: &'a str,
}

/// Title, drawing with its marks, a sentence, and the numbers as a table.
pub(super) fn figure(parts: &Parts<'_>) -> String {
    let Parts { title, legend, suffix, alternative, shapes, over, x, y, note, table, data } = parts;
    let title = escape(title);
    let unit = suffix.trim();
    let unit = if unit.is_empty() { String::new() } else { format!(" <small>{unit}</small>") };
    let ys = y
        .ticks
        .iter()
        .map(|tick| format!("<span style=\"bottom:{:.2}%\">{}</span>", 100.0 * y.position(*tick), y.label(*tick)));
    let xs = x.ticks.iter().map(|tick| {
        let left = 100.0 * x.position(*tick);
        // Cut off what would reach beyond the edge.
        let class = if left > 96.0 { " class=\"end\"" } else { "" };
        format!("<span{class} style=\"left:{left:.2}%\">{}</span>", x.label(*tick))
    });
    let note = if note.is_empty() { String::new() } else { format!("<p class=\"note\">{}</p>", escape(note)) };
    format!(
        "<figure class=\"chart\"><figcaption><h3>{title}{unit}</h3>{legend}</figcaption>\
         <div class=\"plot\"><div class=\"ys\" aria-hidden=\"true\">{}</div><div class=\"area\">\
         <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{title}: {}\">\
         {shapes}</svg>{over}<div class=\"rule\" hidden></div><div class=\"tip\" hidden></div></div>\
         <div class=\"xs\" aria-hidden=\"true\">{}</div></div>{note}\
         <details><summary>Numbers<span class=\"unseen\"> of {title}</span></summary>{table}</details>\
         <script type=\"application/json\">{data}</script></figure>\n",
        ys.collect::<String>(),
        escape(alternative),
        xs.collect::<String>(),
    )
}

/// Horizontal lines at the marks of the vertical axis.
pub(super) fn grid(y: &Axis) -> String {
    let lines = y.ticks.iter().map(|tick| format!("M0 {:.1}H{WIDTH}", HEIGHT * (1.0 - y.position(*tick))));
    format!("<path class=\"grid\" d=\"{}\"/>", lines.collect::<String>())
}

/// Lowest and highest of the finite numbers.
fn range<'a>(values: impl Iterator<Item = &'a f64>) -> Option<(f64, f64)> {
    let finite = values.copied().filter(|value| value.is_finite());
    finite.fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    })
}

fn point(line: &Line<'_>, at: usize, x: &Axis, y: &Axis) -> (f64, f64) {
    (WIDTH * x.position(line.x[at]), HEIGHT * (1.0 - y.position(line.y[at])))
}

/// The path of a line: a gap where there is no number, a dot for a number alone.
fn path(line: &Line<'_>, kept: &[usize], x: &Axis, y: &Axis) -> String {
    let mut path = String::new();
    let mut is_open = false;
    for (index, &at) in kept.iter().enumerate() {
        if !line.y[at].is_finite() {
            is_open = false;
            continue;
        }
        let (left, top) = point(line, at, x, y);
        let _ = write!(path, "{}{left:.1} {top:.1}", if is_open { "L" } else { "M" });
        let ends = kept.get(index + 1).is_none_or(|&next| !line.y[next].is_finite());
        if ends && !is_open {
            path.push_str("h.01");
        }
        is_open = true;
    }
    path
}

fn dots(line: &Line<'_>, kept: &[usize], x: &Axis, y: &Axis) -> String {
    let finite = kept.iter().filter(|&&at| line.y[at].is_finite());
    finite.fold(String::new(), |mut dots, &at| {
        let (left, top) = point(line, at, x, y);
        let _ = write!(dots, "M{left:.1} {top:.1}h.01");
        dots
    })
}

fn legend_entry(line: &Line<'_>) -> String {
    let (color, look) = (line.color, line.look.class());
    let dot =
        if line.look == Look::Dots { format!("<path class=\"dot c{color}\" d=\"M11 5h.01\"/>") } else { String::new() };
    format!(
        "<li><svg viewBox=\"0 0 22 10\" aria-hidden=\"true\"><path class=\"line c{color} {look}\" d=\"M0 5H22\"/>{dot}\
         </svg>{}</li>",
        escape(&line.name)
    )
}

impl<'a> DataLine<'a> {
    fn of(line: &'a Line<'_>, kept: &[usize]) -> Self {
        Self {
            name: &line.name,
            x: kept.iter().map(|&at| line.x[at]).collect(),
            y: kept.iter().map(|&at| Some(six_digits(line.y[at])).filter(|value| value.is_finite())).collect(),
        }
    }
}

/// Six significant digits: all that a picture can show, in fewer bytes.
pub(super) fn six_digits(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

/// A line summarised in six numbers.
struct Summary {
    name: String,
    first: f64,
    lowest: f64,
    median: f64,
    highest: f64,
    last: f64,
}

impl Summary {
    fn of(line: &Line<'_>) -> Option<Self> {
        let finite: Vec<f64> = line.y.iter().copied().filter(|value| value.is_finite()).collect();
        let (lowest, highest) = range(finite.iter())?;
        Some(Self {
            name: line.name.clone(),
            first: *finite.first()?,
            lowest,
            median: quantile(&finite, 0.5)?,
            highest,
            last: *finite.last()?,
        })
    }

    fn sentence(&self, unit: Unit) -> String {
        let Self { name, first, lowest, median, highest, last } = self;
        let [first, lowest, median, highest, last] = [first, lowest, median, highest, last].map(|v| unit.text(*v));
        format!("{name} from {first} to {last}, lowest {lowest}, median {median}, highest {highest}")
    }
}

fn table(summaries: &[Summary], unit: Unit) -> String {
    let rows = summaries.iter().map(|summary| {
        let Summary { name, first, lowest, median, highest, last } = summary;
        let cells = [first, lowest, median, highest, last].map(|value| format!("<td>{}</td>", unit.text(*value)));
        format!("<tr><th scope=\"row\">{}</th>{}</tr>", escape(name), cells.concat())
    });
    let heads = ["first", "lowest", "median", "highest", "last"].map(|head| format!("<th scope=\"col\">{head}</th>"));
    format!(
        "<div class=\"wide\"><table><thead><tr><td></td>{}</tr></thead><tbody>{}</tbody></table></div>",
        heads.concat(),
        rows.collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart<'a>(x: &'a [f64], y: &'a [f64]) -> Chart<'a> {
        Chart {
            title: "Loss",
            note: String::new(),
            unit: Unit::Plain,
            lines: vec![Line { name: "<b>".into(), x, y: y.into(), color: 1, look: Look::Solid }],
            from_zero: true,
            at_least: None,
            may_be_log: false,
            marks: &[],
        }
    }

    #[test]
    fn a_loss_that_falls_a_long_way_is_drawn_logarithmically() {
        let chart = |y: &'static [f64]| Chart { may_be_log: true, ..chart(&[1.0, 2.0, 3.0], y) };
        let html = chart(&[10.0, 1.0, 0.1]).render().unwrap();
        assert!(html.contains("<small>logarithmic</small>") && html.contains("L500.0 200.0"), "{html}");
        assert!(!chart(&[4.0, 2.0, 1.0]).render().unwrap().contains("logarithmic"));
        assert!(!chart(&[4.0, 2.0, 0.0]).render().unwrap().contains("logarithmic"));
    }

    #[test]
    fn points_lie_where_their_numbers_are() {
        let html = chart(&[1.0, 2.0, 3.0], &[0.0, 5.0, 10.0]).render().unwrap();
        assert!(html.contains("d=\"M0.0 400.0L500.0 200.0L1000.0 0.0\""), "{html}");
        assert!(html.contains(r#""x":[1.0,2.0,3.0],"y":[0.0,5.0,10.0]"#), "{html}");
        assert!(html.contains("from 0 to 10, lowest 0, median 5, highest 10"), "{html}");
        assert!(!html.contains("<b>"), "{html}");
    }

    #[test]
    fn a_gap_breaks_the_line_and_a_number_alone_is_a_dot() {
        let html = chart(&[1.0, 2.0, 3.0, 4.0], &[0.0, f64::NAN, 10.0, 10.0]).render().unwrap();
        assert!(html.contains("d=\"M0.0 400.0h.01M666.7 0.0L1000.0 0.0\""), "{html}");
        assert!(html.contains(r#""y":[0.0,null,10.0,10.0]"#), "{html}");
    }

    #[test]
    fn a_chart_without_a_number_is_left_out() {
        assert!(chart(&[1.0], &[f64::NAN]).render().is_none());
        assert!(chart(&[], &[]).render().is_none());
        assert!(chart(&[1.0], &[2.0]).render().is_some());
    }

    #[test]
    fn numbers_keep_six_digits() {
        assert_eq!([0.123_456_789, 1_234_567.0, 0.0, -2.5].map(six_digits), [0.123_457, 1_234_570.0, 0.0, -2.5]);
    }
}
