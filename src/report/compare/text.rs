//! The comparison in words and as a table.

use super::super::axis::Unit;
use super::{Comparison, FIGURES, Side, Verdict};
use crate::text::thousands;

/// A side compared with the baseline.
pub(super) fn verdict(baseline: &Side, side: &Side) -> Verdict {
    let peak = side.peak_figure(baseline);
    let parts = [
        part(baseline, side, "tokens_per_second", "tokens/s", thousands, ["slower", "faster"]),
        part(baseline, side, peak, "peak memory", |bytes| Unit::Bytes.text(bytes), ["less memory", "more memory"]),
        part(baseline, side, "final_eval_loss", "evaluation loss", |loss| format!("{loss:.4}"), ["lower", "higher"]),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    let mut notes = Vec::new();
    let values = |name| baseline.value(name).zip(side.value(name)).filter(|(from, to)| from != to);
    if baseline.value("final_eval_loss").is_some() && side.value("final_eval_loss").is_none() {
        notes.push("there is no evaluation loss at the end, or it is no number".to_owned());
    }
    if let Some((from, to)) = values("eval_target_tokens") {
        let [from, to] = [from, to].map(thousands);
        notes.push(format!(
            "the evaluations are over different tokens ({from} and {to} target tokens), so their losses cannot be compared"
        ));
    }
    if let Some((from, to)) = values("steps") {
        let [from, to] = [from, to].map(thousands);
        notes.push(format!("the runs took {from} and {to} steps, so their last losses are of different moments"));
    }
    if side.device != baseline.device {
        notes.push(format!("the devices differ: {} and {}", baseline.device, side.device));
    }
    for mixed in [baseline, side].into_iter().filter(|side| side.is_mixed) {
        notes.push(format!("the runs of {} are of different recipes", mixed.name));
    }
    if baseline.paths.len().min(side.paths.len()) == 1 {
        notes.push(
            "one run does not tell a difference from chance: two starts of one recipe differ by a few percent in speed, on \
             a busy machine by 20 %; give several runs a side, joined by commas"
                .to_owned(),
        );
    }
    let text = if parts.is_empty() { "no figure can be compared".to_owned() } else { parts.join("; ") };
    Verdict { run: side.name.clone(), baseline: baseline.name.clone(), text, notes }
}

/// How one figure differs; in words only where several runs per side show it.
fn part(
    baseline: &Side,
    side: &Side,
    name: &str,
    label: &str,
    show: fn(f64) -> String,
    [down, up]: [&str; 2],
) -> Option<String> {
    let figure = side.figure(name)?;
    let change = figure.change_percent?;
    let values = format!("{label} {} -> {}", show(baseline.value(name)?), show(figure.value?));
    Some(match figure.is_clear {
        None => format!("{values} ({change:+.1} %)"),
        Some(true) => format!("{values}, {:.1} % {}", change.abs(), if change < 0.0 { down } else { up }),
        Some(false) => format!("{values} ({change:+.1} %; the ranges of the runs overlap)"),
    })
}

impl Comparison {
    /// The comparison as a table for people: figures, recipe differences, verdicts.
    #[must_use]
    pub fn text(&self) -> String {
        let header = |title: &str| self.row(title, |side| side.name.clone());
        let mut rows = vec![header("figure")];
        for (name, label, unit, _) in FIGURES {
            if self.sides.iter().any(|side| side.value(name).is_some()) {
                rows.push(self.row(label, |side| cell(side, name, unit)));
            }
        }
        let mut lines = aligned(&rows);
        if self.sides.iter().flat_map(|side| &side.figures).any(|figure| figure.is_clear == Some(false)) {
            lines.push("~ the ranges of the runs overlap".to_owned());
        }
        lines.push(String::new());
        let without_recipe = self.sides.iter().filter(|side| !side.has_recipe).map(|side| side.name.as_str());
        let without_recipe = without_recipe.collect::<Vec<_>>().join(", ");
        if !without_recipe.is_empty() {
            lines.push(format!("no recipe to compare: no resolved.toml can be read of {without_recipe}"));
        } else if self.recipe_differences.is_empty() {
            lines.push("the recipes are the same".to_owned());
        }
        if !self.recipe_differences.is_empty() {
            let mut rows = vec![header("recipe")];
            for difference in &self.recipe_differences {
                let values = difference.values.iter().map(|value| value.as_deref().unwrap_or("-").to_owned());
                rows.push(std::iter::once(difference.key.clone()).chain(values).collect());
            }
            lines.extend(aligned(&rows));
        }
        lines.push(String::new());
        for verdict in &self.verdicts {
            lines.push(format!("{} against {}: {}", verdict.run, verdict.baseline, verdict.text));
            lines.extend(verdict.notes.iter().map(|note| format!("  note: {note}")));
        }
        let names: Vec<&str> = self.sides.iter().map(|side| side.name.as_str()).collect();
        lines.extend(self.samples.iter().flat_map(|samples| samples.lines(&names)));
        lines.join("\n")
    }

    fn row(&self, label: &str, cell: impl Fn(&Side) -> String) -> Vec<String> {
        std::iter::once(label.to_owned()).chain(self.sides.iter().map(cell)).collect()
    }
}

/// A value and its change: `+3.1 %`, for shares `+3.1`, with `~` where ranges overlap.
fn cell(side: &Side, name: &str, unit: Unit) -> String {
    let Some((figure, value)) = side.figure(name).and_then(|figure| Some((figure, figure.value?))) else {
        return "-".to_owned();
    };
    let value = unit.text(value);
    // Equal steps or tokens need no mention.
    let Some(change) = figure.change_percent.filter(|change| *change != 0.0) else { return value };
    let mark = if figure.is_clear == Some(false) { "~" } else { "" };
    let percent = if unit == Unit::Percent { "" } else { " %" };
    format!("{value} ({mark}{change:+.1}{percent})")
}

/// Columns of equal width: the first aligned left, the others right.
fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let num_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..num_columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}
