//! Charts over the steps: paths for the shapes, and text beside them, which thus keeps its size on a phone. page.html
//! makes them HTML.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde::Serialize;
use serde_json::json;

use super::axis::{Axis, Unit};
use crate::stats::{as_f64, median};

/// Points of a line, at most.
const MAX_POINTS: usize = 600;
/// Size in the drawing's own units; it is stretched to the available width.
pub(super) const WIDTH: f64 = 1000.0;
pub(super) const HEIGHT: f64 = 400.0;

/// Ratio of highest to lowest number from which an axis is logarithmic: on a linear one, late values would be flat.
const LOG_ABOVE: f64 = 8.0;

/// A drawn chart.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Figure {
    pub(super) title: &'static str,
    /// What the vertical axis measures.
    pub(super) unit: &'static str,
    /// Stacked columns, not lines: the legend shows boxes.
    pub(super) is_stacked: bool,
    /// Name and class of each line or part; empty where the title says it.
    pub(super) legend: Vec<(String, String)>,
    /// What the drawing shows, for those who cannot see it.
    pub(super) alternative: String,
    /// Marks of the axes: position in percent and text.
    pub(super) xs: Vec<(f64, String)>,
    pub(super) ys: Vec<(f64, String)>,
    /// Class and SVG path of each shape.
    pub(super) shapes: Vec<(String, String)>,
    /// Columns that reach beyond the drawing: position in percent and number.
    pub(super) beyond: Vec<(f64, String)>,
    /// Sentences below it.
    pub(super) note: String,
    /// The numbers as a table: heads of the columns; name and cells of each row.
    pub(super) heads: Vec<&'static str>,
    pub(super) rows: Vec<(String, Vec<String>)>,
    /// The numbers for hover.js.
    pub(super) data: serde_json::Value,
}

/// How a line is drawn, since colours alone do not tell lines apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Solid,
    Dashed,
    Dotted,
    /// Under a smoother line of the same figure.
    Pale,
    /// With large dots.
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

/// Lines over the steps, on an axis from 0.
#[derive(Clone, Debug, Default)]
pub(super) struct Chart<'a> {
    pub(super) title: &'static str,
    pub(super) note: String,
    pub(super) unit: Unit,
    pub(super) lines: Vec<Line<'a>>,
    /// The axis reaches at least to this number.
    pub(super) at_least: f64,
    /// The axis is logarithmic where the highest number is many times the lowest.
    pub(super) may_be_log: bool,
    /// Steps marked by upright lines.
    pub(super) marks: &'a [(u64, String)],
}

impl Chart<'_> {
    /// The chart; `None` where no line has a number.
    pub(super) fn figure(&self) -> Option<Figure> {
        let lines: Vec<&Line<'_>> =
            self.lines.iter().filter(|line| line.y.iter().any(|value| value.is_finite())).collect();
        let (first, last) = range(lines.iter().flat_map(|line| line.x))?;
        let (low, high) = range(lines.iter().flat_map(|line| line.y.iter()))?;
        let x = Axis::exact(first, last, Unit::Count, 4.0);
        let is_log = self.may_be_log && low > 0.0 && high / low > LOG_ABOVE;
        let y = if is_log {
            Axis::logarithmic(low, high, self.unit)
        } else {
            Axis::rounded(low.min(0.0), high.max(self.at_least), self.unit, 5.0)
        };
        let mut shapes = vec![grid(&y)];
        for (step, _) in self.marks.iter().take(MAX_POINTS) {
            let at = x.position(as_f64(*step)) * WIDTH;
            shapes.push(("mark".to_owned(), format!("M{at:.1} 0V{HEIGHT}")));
        }
        let (mut data, mut rows) = (Vec::new(), Vec::new());
        for line in &lines {
            let kept = lowest_and_highest(&line.y, MAX_POINTS);
            shapes.push((line.class(), line.path(&kept, &x, &y, false)));
            if line.look == Look::Dots {
                shapes.push((format!("dot c{}", line.color), line.path(&kept, &x, &y, true)));
            }
            let [xs, ys] = [line.x, &line.y[..]].map(|values| kept.iter().map(|&at| values[at]).collect::<Vec<_>>());
            // A number that is not finite becomes `null`.
            data.push(json!({"name": line.name, "x": xs, "y": ys.into_iter().map(six_digits).collect::<Vec<_>>()}));
            rows.push((line.name.clone(), line.summary(self.unit)));
        }
        let alternative = rows.iter().map(|(name, cells)| {
            let [first, lowest, median, highest, last] = cells;
            format!("{name} from {first} to {last}, lowest {lowest}, median {median}, highest {highest}")
        });
        let needs_legend = self.lines.len() > 1 || self.lines.iter().any(|line| line.name != self.title);
        let legend = lines.iter().filter(|_| needs_legend).map(|line| (line.name.clone(), line.class()));
        Some(Figure {
            title: self.title,
            unit: if is_log { "logarithmic" } else { y.scale.suffix.trim() },
            is_stacked: false,
            legend: legend.collect(),
            alternative: alternative.collect::<Vec<_>>().join("; "),
            xs: x.marks(),
            ys: y.marks(),
            shapes,
            beyond: Vec::new(),
            note: self.note.clone(),
            heads: vec!["first", "lowest", "median", "highest", "last"],
            rows: rows.into_iter().map(|(name, cells)| (name, cells.to_vec())).collect(),
            data: json!({
                "low": x.low, "high": x.high, "divisor": y.scale.divisor, "suffix": y.scale.suffix, "lines": data,
            }),
        })
    }
}

impl Line<'_> {
    fn class(&self) -> String {
        format!("line c{} {}", self.color, self.look.class())
    }

    /// The path through the kept points, or a dot at each: a gap where there is no number, a dot for a number alone.
    fn path(&self, kept: &[usize], x: &Axis, y: &Axis, as_dots: bool) -> String {
        let mut path = String::new();
        let mut is_open = false;
        for (index, &at) in kept.iter().enumerate() {
            if !self.y[at].is_finite() {
                is_open = false;
                continue;
            }
            let (left, top) = (WIDTH * x.position(self.x[at]), HEIGHT * (1.0 - y.position(self.y[at])));
            let _ = write!(path, "{}{left:.1} {top:.1}", if is_open { "L" } else { "M" });
            let ends = kept.get(index + 1).is_none_or(|&next| !self.y[next].is_finite());
            if as_dots || (ends && !is_open) {
                path.push_str("h.01");
            }
            is_open = !as_dots;
        }
        path
    }

    /// First, lowest, median, highest and last number.
    fn summary(&self, unit: Unit) -> [String; 5] {
        let finite: Vec<f64> = self.y.iter().copied().filter(|value| value.is_finite()).collect();
        let (lowest, highest) = range(&finite).unzip();
        [finite.first().copied(), lowest, median(&finite), highest, finite.last().copied()]
            .map(|value| unit.text(value.unwrap_or(f64::NAN)))
    }
}

/// Horizontal lines at the marks of the vertical axis.
pub(super) fn grid(y: &Axis) -> (String, String) {
    let lines = y.ticks.iter().map(|tick| format!("M0 {:.1}H{WIDTH}", HEIGHT * (1.0 - y.position(*tick))));
    ("grid".to_owned(), lines.collect())
}

/// Lowest and highest of the finite numbers.
fn range<'a>(values: impl IntoIterator<Item = &'a f64>) -> Option<(f64, f64)> {
    let finite = values.into_iter().filter(|value| value.is_finite()).map(|value| (*value, *value));
    finite.reduce(|(low, high), (value, _)| (low.min(value), high.max(value)))
}

/// Six significant digits: all that a picture can show, in fewer bytes.
pub(super) fn six_digits(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

/// Indices of the values to draw, so that a run of any length makes a page of bounded size: all, if there are at most
/// `max_points`. Otherwise the lowest and highest of each of `max_points / 2` stretches, in order, with the first and
/// the last value. A stretch with a gap keeps one.
fn lowest_and_highest(values: &[f64], max_points: usize) -> Vec<usize> {
    if values.len() <= max_points {
        return (0..values.len()).collect();
    }
    let mut kept = vec![0];
    for (start, end) in stretches(values.len(), (max_points - 2) / 2) {
        let finite = || (start..end).filter(|&at| values[at].is_finite());
        let lowest = finite().min_by(|&a, &b| values[a].total_cmp(&values[b]));
        let highest = finite().max_by(|&a, &b| values[a].total_cmp(&values[b]));
        let gap = (start..end).find(|&at| !values[at].is_finite());
        kept.extend([lowest, highest, gap].into_iter().flatten());
    }
    kept.push(values.len() - 1);
    kept.sort_unstable();
    kept.dedup();
    kept
}

/// Cuts `len` places into at most `count` stretches of nearly equal length: start and end of each.
pub(super) fn stretches(len: usize, count: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = count.clamp(1, len.max(1));
    (0..count).map(move |index| (index * len / count, (index + 1) * len / count)).filter(|(start, end)| start < end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(x: &[f64], y: &[f64], may_be_log: bool) -> Option<Figure> {
        let line = Line { name: "loss".into(), x, y: y.into(), color: 1, look: Look::Solid };
        Chart { title: "Loss", lines: vec![line], may_be_log, ..Chart::default() }.figure()
    }

    #[test]
    fn a_loss_that_falls_a_long_way_is_drawn_logarithmically() {
        let of = |y: &[f64]| figure(&[1.0, 2.0, 3.0], y, true).unwrap();
        let far = of(&[10.0, 1.0, 0.1]);
        assert!(far.unit == "logarithmic" && far.shapes[1].1.contains("L500.0 200.0"), "{far:?}");
        assert_eq!((of(&[4.0, 2.0, 1.0]).unit, of(&[4.0, 2.0, 0.0]).unit), ("", ""));
    }

    #[test]
    fn points_lie_where_their_numbers_are_and_a_gap_breaks_the_line() {
        let whole = figure(&[1.0, 2.0, 3.0], &[0.0, 5.0, 10.0], false).unwrap();
        assert_eq!(whole.shapes[1], ("line c1 solid".into(), "M0.0 400.0L500.0 200.0L1000.0 0.0".into()));
        assert_eq!(whole.data["lines"][0], json!({"name": "loss", "x": [1.0, 2.0, 3.0], "y": [0.0, 5.0, 10.0]}));
        assert_eq!(whole.alternative, "loss from 0 to 10, lowest 0, median 5, highest 10");
        let gap = figure(&[1.0, 2.0, 3.0, 4.0], &[0.0, f64::NAN, 10.0, 10.0], false).unwrap();
        assert_eq!(gap.shapes[1].1, "M0.0 400.0h.01M666.7 0.0L1000.0 0.0", "a number alone is a dot");
        assert_eq!(gap.data["lines"][0]["y"], json!([0.0, null, 10.0, 10.0]));
        assert!(figure(&[1.0], &[f64::NAN], false).is_none() && figure(&[], &[], false).is_none());
    }

    #[test]
    fn numbers_keep_six_digits() {
        assert_eq!([0.123_456_789, 1_234_567.0, 0.0, -2.5].map(six_digits), [0.123_457, 1_234_570.0, 0.0, -2.5]);
    }

    #[test]
    fn a_long_series_keeps_its_ends_every_spike_and_every_gap() {
        assert_eq!(lowest_and_highest(&[3.0, f64::NAN, 1.0], 600), [0, 1, 2]);
        let mut values: Vec<f64> = (0..100_000).map(|step| f64::from(step % 7)).collect();
        (values[54_321], values[77_777], values[12_345]) = (99.0, -5.0, f64::NAN);
        let kept = lowest_and_highest(&values, 600);
        assert!(kept.len() <= 601, "{}", kept.len());
        assert!(kept.is_sorted() && kept[0] == 0 && kept.last() == Some(&99_999));
        assert!([54_321, 77_777, 12_345].iter().all(|place| kept.contains(place)));
    }

    #[test]
    fn stretches_cover_every_place_once() {
        for (len, count) in [(0, 5), (3, 5), (10, 3), (100_000, 120)] {
            let places: Vec<usize> = stretches(len, count).flat_map(|(start, end)| start..end).collect();
            assert_eq!(places, (0..len).collect::<Vec<_>>());
        }
    }
}
