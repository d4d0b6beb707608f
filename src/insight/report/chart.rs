//! Charts over the steps: paths for the shapes, and text beside them, which thus keeps its size on a phone. page.html
//! makes them HTML; page.js draws them anew, in the same way, when a reader changes an axis or the smoothing.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Value, json};

use super::axis::{Axis, Unit};
use crate::util::stats::{as_f64, as_u64, mean, median};

/// Points of a line, at most.
pub(super) const MAX_POINTS: usize = 600;
/// Size in the drawing's own units; it is stretched to the available width.
pub(super) const WIDTH: f64 = 1000.0;
pub(super) const HEIGHT: f64 = 400.0;

/// Ratio of highest to lowest number from which an axis is logarithmic: on a linear one, late values would be flat.
const LOG_ABOVE: f64 = 8.0;
/// Smoothing without a choice of the reader: the running mean over this share of a run's steps.
const MEAN_SHARE: f64 = 0.025;
/// Steps of a running mean, at least; a short run is not smoothed.
const MIN_MEAN_STEPS: f64 = 3.0;
/// A line whose numbers differ by less than this share does not move.
const STILL_SHARE: f64 = 0.01;

/// A drawn chart.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Drawing {
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
    /// How the lines are drawn, where that is not plain.
    pub(super) how: String,
    /// The numbers as a table: heads of the columns; name and cells of each row.
    pub(super) heads: Vec<&'static str>,
    pub(super) rows: Vec<(String, Vec<String>)>,
    /// The numbers for page.js.
    pub(super) data: Value,
}

/// How a line is drawn, since colours alone do not tell lines apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Solid,
    Dashed,
    Dotted,
    /// With large dots.
    Dots,
}

impl Look {
    fn class(self) -> &'static str {
        match self {
            Self::Solid => "solid",
            Self::Dashed => "dashed",
            Self::Dotted => "dotted",
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
    /// Whether it is smoothed in a long run.
    pub(super) is_noisy: bool,
}

/// Lines over the steps, on an axis from 0 where it is never logarithmic.
#[derive(Clone, Debug, Default)]
pub(super) struct Chart<'a> {
    pub(super) title: &'static str,
    pub(super) note: String,
    pub(super) unit: Unit,
    pub(super) lines: Vec<Line<'a>>,
    /// The axis reaches at least to this number.
    pub(super) at_least: f64,
    /// The axis is logarithmic where the highest number is many times the lowest, or the reader asks for it.
    pub(super) may_be_log: bool,
    /// Steps marked by upright lines.
    pub(super) marks: &'a [(u64, String)],
}

impl Chart<'_> {
    /// The chart on a horizontal axis; `None` where no line has a number.
    pub(super) fn figure(&self, x: &Axis) -> Option<Drawing> {
        let lines: Vec<&Line<'_>> =
            self.lines.iter().filter(|line| line.y.iter().any(|value| value.is_finite())).collect();
        // A noisy line alone stays visible, pale, under its mean.
        let is_alone = lines.iter().filter(|line| line.is_noisy).count() == 1;
        let width = |line: &Line<'_>| line.mean_steps().filter(|_| line.is_noisy);
        let (mut drawn, mut data) = (Vec::new(), Vec::new());
        for line in &lines {
            let means = Points::means(line);
            let points = if line.is_noisy && !is_alone { means.clone() } else { Points::extremes(line) };
            let mut fields = points.json();
            fields["name"] = json!(line.name);
            fields["class"] = json!(line.class());
            fields["is_noisy"] = json!(line.is_noisy);
            if line.is_noisy && is_alone && means.steps_each > 1 {
                fields["means"] = means.json();
            }
            data.push(fields);
            match width(line) {
                Some(steps) => {
                    drawn.extend(is_alone.then(|| (line.class() + " pale", points)));
                    drawn.push((line.class(), means.running_mean(steps)));
                }
                None => drawn.push((line.class(), points)),
            }
        }
        let rows: Vec<_> = lines.iter().map(|line| (line.name.clone(), line.summary(self.unit))).collect();
        let (low, high) = range(drawn.iter().flat_map(|(_, points)| &points.y))?;
        let (y, is_log) = self.vertical(low, high);
        let mut shapes = vec![grid(&y)];
        let marks = || self.marks.iter().take(MAX_POINTS).map(|(step, _)| as_f64(*step));
        shapes.extend(marks().map(|step| ("mark".to_owned(), format!("M{:.1} 0V{HEIGHT}", x.position(step) * WIDTH))));
        for (class, points) in &drawn {
            shapes.push((class.clone(), points.path(x, &y, false)));
            if let Some(class) = class.strip_suffix(" dots") {
                shapes.push((class.replace("line", "dot"), points.path(x, &y, true)));
            }
        }
        let alternative = rows.iter().map(|(name, cells)| {
            let [first, lowest, median, highest, last] = cells;
            format!("{name} from {first} to {last}, lowest {lowest}, median {median}, highest {highest}")
        });
        let means = lines.iter().find_map(|line| width(line)).map(|steps| format!("mean of {steps} steps"));
        let how: Vec<String> = is_log.then(|| "logarithmic".to_owned()).into_iter().chain(means).collect();
        let needs_legend = self.lines.len() > 1 || self.lines.iter().any(|line| line.name != self.title);
        let legend = lines.iter().filter(|_| needs_legend).map(|line| (line.name.clone(), line.class()));
        Some(Drawing {
            title: self.title,
            unit: y.scale.suffix.trim(),
            is_stacked: false,
            legend: legend.collect(),
            alternative: alternative.collect::<Vec<_>>().join("; "),
            xs: x.marks(),
            ys: y.marks(),
            shapes,
            beyond: Vec::new(),
            note: self.note.clone(),
            how: how.join(", "),
            heads: vec!["first", "lowest", "median", "highest", "last"],
            rows: rows.into_iter().map(|(name, cells)| (name, cells.to_vec())).collect(),
            data: json!({
                "divisor": y.scale.divisor, "suffix": y.scale.suffix, "is_scientific": self.unit == Unit::Scientific,
                "may_be_log": self.may_be_log, "is_log": is_log, "at_least": self.at_least, "lines": data,
                "marks": marks().collect::<Vec<_>>(),
            }),
        })
    }

    /// The vertical axis for numbers from `low` to `high`, and whether it is logarithmic.
    fn vertical(&self, low: f64, high: f64) -> (Axis, bool) {
        if self.may_be_log && low > 0.0 && high / low > LOG_ABOVE {
            return (Axis::logarithmic(low, high, self.unit), true);
        }
        // Of a loss, small differences count.
        let low = if self.may_be_log { low } else { low.min(0.0) };
        (Axis::rounded(low, high.max(self.at_least), self.unit, 5.0), false)
    }

    /// The chart's title with its numbers, where no line moves after the first steps and there is nothing to note.
    pub(super) fn still(&self, steady: impl Fn(&Line<'_>) -> Vec<f64>) -> Option<String> {
        let number = |line: &Line<'_>| {
            let steady = steady(line);
            let (low, high) = range(&steady).filter(|_| steady.len() >= 3)?;
            let text = self.unit.text(*steady.last()?);
            let text = if self.lines.len() > 1 {
                format!("{} {text}", line.name.trim_start_matches(self.title).trim_start())
            } else {
                text
            };
            (high - low <= STILL_SHARE * high.abs().max(low.abs())).then_some(text)
        };
        let numbers = self.lines.iter().map(number).collect::<Option<Vec<_>>>()?;
        (!numbers.is_empty() && self.note.is_empty()).then(|| format!("{} ({})", self.title, numbers.join(", ")))
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Points {
    x: Vec<f64>,
    y: Vec<f64>,
    /// Steps that a point is the mean of.
    steps_each: usize,
}

impl Points {
    /// All points of a short line, the most telling ones of a long one.
    fn extremes(line: &Line<'_>) -> Self {
        let kept = lowest_and_highest(&line.y, MAX_POINTS);
        let [x, y] = [line.x, &line.y[..]].map(|values| kept.iter().map(|&at| values[at]).collect());
        Self { x, y, steps_each: 1 }
    }

    /// Means of stretches of equal length, each at its last step.
    fn means(line: &Line<'_>) -> Self {
        let steps_each = line.y.len().div_ceil(MAX_POINTS).max(1);
        let x = line.x.chunks(steps_each).filter_map(|steps| steps.last().copied()).collect();
        Self { x, y: line.y.chunks(steps_each).map(mean).collect(), steps_each }
    }

    /// At each point, the mean over about this many steps around it.
    fn running_mean(mut self, steps: usize) -> Self {
        let width = (steps / self.steps_each).max(1);
        let around = |at: usize| at.saturating_sub(width / 2)..self.y.len().min(at + width - width / 2);
        self.y = (0..self.y.len()).map(|at| mean(&self.y[around(at)])).collect();
        self
    }

    /// A number that is not finite becomes `null`.
    fn json(&self) -> Value {
        let y: Vec<f64> = self.y.iter().copied().map(six_digits).collect();
        json!({"x": self.x, "y": y, "steps_each": self.steps_each})
    }

    /// The path through the points, or a dot at each: a gap where there is no number, a dot for a number alone.
    fn path(&self, x: &Axis, y: &Axis, as_dots: bool) -> String {
        let mut path = String::new();
        let mut is_open = false;
        for (at, value) in self.y.iter().enumerate() {
            if !value.is_finite() {
                is_open = false;
                continue;
            }
            let (left, top) = (WIDTH * x.position(self.x[at]), HEIGHT * (1.0 - y.position(*value)));
            let _ = write!(path, "{}{left:.1} {top:.1}", if is_open { "L" } else { "M" });
            let ends = self.y.get(at + 1).is_none_or(|next| !next.is_finite());
            if as_dots || (ends && !is_open) {
                path.push_str("h.01");
            }
            is_open = !as_dots;
        }
        path
    }
}

impl Line<'_> {
    fn class(&self) -> String {
        format!("line c{} {}", self.color, self.look.class())
    }

    /// Steps of the running mean that makes it calm enough to be followed, in whole points of [`Points::means`].
    fn mean_steps(&self) -> Option<usize> {
        let steps = Some(MEAN_SHARE * as_f64(self.y.len())).filter(|steps| *steps >= MIN_MEAN_STEPS)?;
        let each = self.y.len().div_ceil(MAX_POINTS);
        usize::try_from(as_u64(steps / as_f64(each))).ok().map(|points| points * each)
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

    fn figure(x: &[f64], y: &[f64], may_be_log: bool) -> Option<Drawing> {
        let line = Line { name: "loss".into(), x, y: y.into(), color: 1, look: Look::Solid, is_noisy: true };
        let axis = Axis::exact(*x.first()?, *x.last()?, Unit::Count, 4.0);
        Chart { title: "Loss", lines: vec![line], may_be_log, ..Chart::default() }.figure(&axis)
    }

    #[test]
    fn a_loss_that_falls_a_long_way_is_drawn_logarithmically() {
        let of = |y: &[f64]| figure(&[1.0, 2.0, 3.0], y, true).unwrap();
        let far = of(&[10.0, 1.0, 0.1]);
        assert!(far.data["is_log"] == true && far.shapes[1].1.contains("L500.0 200.0"), "{far:?}");
        assert!([[4.0, 2.0, 1.0], [40.0, 2.0, 0.0]].iter().all(|y| of(y).data["is_log"] == false));
    }

    #[test]
    fn points_lie_where_their_numbers_are_and_a_gap_breaks_the_line() {
        let whole = figure(&[1.0, 2.0, 3.0], &[0.0, 5.0, 10.0], false).unwrap();
        assert_eq!(whole.shapes[1], ("line c1 solid".into(), "M0.0 400.0L500.0 200.0L1000.0 0.0".into()));
        let data = &whole.data["lines"][0];
        assert_eq!((&data["x"], &data["y"]), (&json!([1.0, 2.0, 3.0]), &json!([0.0, 5.0, 10.0])));
        assert_eq!(whole.alternative, "loss from 0 to 10, lowest 0, median 5, highest 10");
        let gap = figure(&[1.0, 2.0, 3.0, 4.0], &[0.0, f64::NAN, 10.0, 10.0], false).unwrap();
        assert_eq!(gap.shapes[1].1, "M0.0 400.0h.01M666.7 0.0L1000.0 0.0", "a number alone is a dot");
        assert_eq!(gap.data["lines"][0]["y"], json!([0.0, null, 10.0, 10.0]));
        assert!(figure(&[1.0], &[f64::NAN], false).is_none() && figure(&[], &[], false).is_none());
    }

    #[test]
    fn a_noisy_line_of_a_long_run_is_pale_under_its_mean_which_leaves_gaps_out() {
        let x: Vec<f64> = (1..=1500).map(f64::from).collect();
        let y: Vec<f64> = (1..=1500).map(|step| if step == 7 { f64::NAN } else { f64::from(step % 2) }).collect();
        let long = figure(&x, &y, false).unwrap();
        let classes: Vec<&str> = long.shapes.iter().map(|(class, _)| class.as_str()).collect();
        assert_eq!(classes, ["grid", "line c1 solid pale", "line c1 solid"]);
        // 2.5 % of the steps are 37, which are 12 points of 3 steps.
        assert_eq!((long.how.as_str(), &long.data["lines"][0]["means"]["steps_each"]), ("mean of 36 steps", &json!(3)));
        let points = Points { x: vec![1.0, 2.0, 3.0, 4.0], y: vec![1.0, 3.0, f64::NAN, 5.0], steps_each: 2 };
        assert_eq!(points.running_mean(6).y, [2.0, 2.0, 4.0, 5.0]);
        assert!(mean(&[f64::NAN]).is_nan() && figure(&x[..100], &y[..100], false).unwrap().how.is_empty());
    }

    #[test]
    fn a_line_that_does_not_move_is_named_with_its_number() {
        let still = |y: &[f64]| {
            let line = Line { name: "a".into(), x: &[], y: y.into(), color: 1, look: Look::Solid, is_noisy: false };
            Chart { title: "Clocks", unit: Unit::Megahertz, lines: vec![line], ..Chart::default() }
                .still(|line| line.y.to_vec())
        };
        assert_eq!(still(&[1700.0, 1700.0, 1701.0]).unwrap(), "Clocks (1,701 MHz)");
        assert_eq!(still(&[0.0, 0.0, 0.0]).unwrap(), "Clocks (0 MHz)");
        assert!(still(&[1700.0, 1500.0, 1700.0]).is_none() && still(&[1700.0, 1700.0]).is_none());
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
