//! The comparison for a terminal.

use super::{Better, Comparison, FIGURES, Figure, Run};

/// Verdicts, what differs in the recipe, figures.
pub(super) fn text(comparison: &Comparison) -> String {
    let mut lines = Vec::new();
    let mut header = vec!["figure".to_owned()];
    header.extend(comparison.runs.iter().map(|run| run.name.clone()));
    let mut rows = vec![header];
    for figure in &FIGURES {
        if comparison.runs.iter().all(|run| run.value(figure.key).is_none()) {
            continue;
        }
        let mut row = vec![figure.label.to_owned()];
        row.extend(comparison.runs.iter().map(|run| cell(run, figure)));
        rows.push(row);
    }
    lines.extend(aligned(&rows));
    lines.push(String::new());
    let without_recipe = comparison.without_recipe();
    if !without_recipe.is_empty() {
        lines.push(format!("no recipe to compare: no resolved.toml can be read of {}", without_recipe.join(", ")));
    }
    if comparison.recipe_differences.is_empty() {
        lines.extend(without_recipe.is_empty().then(|| "the recipes are the same".to_owned()));
    } else {
        let mut header = vec!["recipe".to_owned()];
        header.extend(comparison.runs.iter().map(|run| run.name.clone()));
        let mut rows = vec![header];
        for difference in &comparison.recipe_differences {
            let mut row = vec![difference.key.clone()];
            row.extend(difference.values.iter().map(|value| value.clone().unwrap_or_else(|| "-".to_owned())));
            rows.push(row);
        }
        lines.extend(aligned(&rows));
    }
    lines.push(String::new());
    for verdict in &comparison.verdicts {
        lines.push(format!("{} against {}: {}", verdict.run, verdict.baseline, verdict.text));
        lines.extend(verdict.notes.iter().map(|note| format!("  note: {note}")));
    }
    lines.join("\n")
}

/// A value and its change, `~` before what chance may be behind.
fn cell(run: &Run, figure: &Figure) -> String {
    let Some(compared) = run.figure(figure.key) else { return "-".to_owned() };
    let Some(value) = compared.value else { return "-".to_owned() };
    let value = figure.unit.text(value);
    match change(run, figure) {
        Some(change) => format!("{value} ({change})"),
        None => value,
    }
}

/// `+3.1 %`, `~+0.4 %`, and for shares `+3.1`.
pub(super) fn change(run: &Run, figure: &Figure) -> Option<String> {
    let compared = run.figure(figure.key)?;
    // The same steps or tokens are not worth a word.
    let change = compared.change_percent.filter(|change| *change != 0.0)?;
    let mark = if compared.is_noise == Some(true) { "~" } else { "" };
    let percent = if figure.unit == super::Unit::Percent { "" } else { " %" };
    Some(format!("{mark}{change:+.1}{percent}"))
}

/// `good`, `bad` or nothing: which way a figure went, where that says something.
pub(super) fn direction(run: &Run, figure: &Figure) -> &'static str {
    let Some(compared) = run.figure(figure.key).filter(|compared| compared.is_noise != Some(true)) else { return "" };
    match (figure.better, compared.change_percent) {
        (Better::Higher, Some(change)) if change >= 1.0 => "good",
        (Better::Higher, Some(change)) if change <= -1.0 => "bad",
        (Better::Lower, Some(change)) if change <= -1.0 => "good",
        (Better::Lower, Some(change)) if change >= 1.0 => "bad",
        _ => "",
    }
}

/// Columns of equal width: the first to the left, the others to the right.
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
