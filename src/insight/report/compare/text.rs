//! The comparison in words and as a table.

use super::super::axis::Unit;
use super::{Comparison, FIGURES, Side, Verdict, ranking};
use crate::util::text::{Mark, aligned, shortened, thousands};

/// Most characters of a recipe's value in the table.
const MAX_VALUE: usize = 40;
/// Of more runs than these, the ranking alone is shown.
const MAX_SIDES: usize = 4;
/// The loss of one run tells more than chance from this change on, in percent: its rows and their order come from the seed.
const CLEAR_LOSS: f64 = 1.0;

/// A side compared with the baseline.
pub(super) fn verdict(baseline: &Side, side: &Side) -> Verdict {
    let peak = side.peak_figure(baseline);
    let parts = [
        part(baseline, side, "tokens_per_second", "tokens/s", thousands, ["slower", "faster"]),
        part(baseline, side, peak, "peak memory", |bytes| Unit::Bytes.text(bytes), ["less memory", "more memory"]),
        part(baseline, side, "final_eval_loss", "evaluation loss", |loss| format!("{loss:.4}"), ["lower", "higher"]),
    ];
    let parts: Vec<(Mark, String)> = parts.into_iter().flatten().collect();
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
    if side.has_other_objective(baseline) {
        notes.push("the objectives differ, so their losses cannot be compared".to_owned());
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
            "speed: one run each shows nothing below 20 %, as two starts of one recipe differ; give several a side: compare \
             a1,a2 b1,b2"
                .to_owned(),
        );
    }
    if parts.is_empty() {
        notes.push("no figure can be compared".to_owned());
    }
    let text = parts.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("; ");
    Verdict { run: side.name.clone(), baseline: baseline.name.clone(), text, parts, notes }
}

/// How one figure differs; better or worse only where several runs per side show it.
fn part(
    baseline: &Side,
    side: &Side,
    name: &str,
    label: &str,
    show: fn(f64) -> String,
    [down, up]: [&str; 2],
) -> Option<(Mark, String)> {
    let figure = side.figure(name)?;
    let change = figure.change_percent?;
    let values = format!("{label} {} -> {}", show(baseline.value(name)?), show(figure.value?));
    let open = if change.abs() < 0.05 { Mark::Equal } else { Mark::Open };
    let is_clear_loss = name == "final_eval_loss" && change.abs() >= CLEAR_LOSS;
    Some(match figure.is_clear.or(is_clear_loss.then_some(true)) {
        None => (open, format!("{values} ({change:+.1} %)")),
        Some(false) => (open, format!("{values} ({change:+.1} %; the ranges of the runs overlap)")),
        Some(true) => {
            let is_better = (change > 0.0) == (name == "tokens_per_second");
            let words = if change < 0.0 { down } else { up };
            let mark = if is_better { Mark::Good } else { Mark::Bad };
            (mark, format!("{values}, {:.1} % {words}", change.abs()))
        }
    })
}

impl Comparison {
    /// The comparison for people: the ranking; of a few runs also verdicts, and tables of figures and recipe differences.
    #[must_use]
    pub fn text(&self) -> String {
        let mut lines = ranking::lines(&self.ranking, &self.sides, &self.recipe_differences);
        lines.push(String::new());
        // What holds for all is said once.
        let is_of_all = |note: &&String| self.verdicts.iter().all(|verdict| verdict.notes.contains(note));
        let of_all: Vec<&String> =
            self.verdicts.first().into_iter().flat_map(|one| &one.notes).filter(is_of_all).collect();
        if self.sides.len() > MAX_SIDES {
            lines.extend(of_all.iter().map(|note| format!("{} {note}", Mark::Note)));
            lines.push("side by side: `lora-train compare` with a few of them; --json has all figures".to_owned());
            return lines.join("\n");
        }
        for Verdict { run, baseline, parts, notes, .. } in &self.verdicts {
            lines.push(format!("{run} against {baseline}"));
            lines.extend(parts.iter().map(|(mark, part)| format!("  {mark} {part}")));
            let own = notes.iter().filter(|note| !of_all.contains(note));
            lines.extend(own.map(|note| format!("  {} {note}", Mark::Note)));
        }
        lines.extend(of_all.iter().map(|note| format!("  {} {note}", Mark::Note)));
        lines.push(String::new());
        let header = |title: &str| self.row(title, |side| side.name.clone());
        let mut rows = vec![header("figure")];
        for (name, label, unit, _) in FIGURES {
            if self.sides.iter().any(|side| side.value(name).is_some()) {
                rows.push(self.row(label, |side| cell(side, name, unit)));
            }
        }
        lines.extend(aligned(&rows));
        if self.sides.iter().flat_map(|side| &side.figures).any(|figure| figure.is_clear == Some(false)) {
            lines.push("~ the ranges of the runs overlap".to_owned());
        }
        lines.push(String::new());
        let without_recipe = self.sides.iter().filter(|side| !side.has_recipe).map(|side| side.name.as_str());
        let without_recipe = without_recipe.collect::<Vec<_>>().join(", ");
        if !without_recipe.is_empty() {
            lines.push(format!("no recipe to compare: no resolved.toml can be read of {without_recipe}"));
        } else if self.recipe_differences.is_empty() && self.sides.len() > 1 {
            lines.push("the recipes are the same".to_owned());
        }
        if !self.recipe_differences.is_empty() {
            let mut rows = vec![header("recipe")];
            for difference in &self.recipe_differences {
                let values =
                    difference.values.iter().map(|value| shortened(value.as_deref().unwrap_or("-"), MAX_VALUE));
                rows.push(std::iter::once(difference.key.clone()).chain(values).collect());
            }
            lines.extend(aligned(&rows));
        }
        let names: Vec<&str> = self.sides.iter().map(|side| side.name.as_str()).collect();
        lines.extend(self.samples.iter().flat_map(|samples| samples.lines(&names)));
        lines.join("\n")
    }

    fn row(&self, label: &str, cell: impl Fn(&Side) -> String) -> Vec<String> {
        std::iter::once(label.to_owned()).chain(self.sides.iter().map(cell)).collect()
    }
}

/// A value and its change: `+3.1 %`, for shares `+3.1 points`, with `~` where ranges overlap.
fn cell(side: &Side, name: &str, unit: Unit) -> String {
    let Some((figure, value)) = side.figure(name).and_then(|figure| Some((figure, figure.value?))) else {
        return "-".to_owned();
    };
    let value = unit.text(value);
    // Equal steps or tokens need no mention.
    let Some(change) = figure.change_percent.filter(|change| *change != 0.0) else { return value };
    let mark = if figure.is_clear == Some(false) { "~" } else { "" };
    let percent = if unit == Unit::Percent { " points" } else { " %" };
    format!("{value} ({mark}{change:+.1}{percent})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_does_not_widen_the_table() {
        assert_eq!(shortened("4", MAX_VALUE), "4");
        assert_eq!(shortened(&"x".repeat(40), MAX_VALUE).chars().count(), 40);
        let long = shortened(&"ä".repeat(200), MAX_VALUE);
        assert!(long.chars().count() == 40 && long.ends_with('…'), "{long}");
    }
}
