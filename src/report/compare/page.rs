//! The comparison as a page, with the curves of the runs over each other.

use serde::Serialize;

use super::super::axis::Unit;
use super::super::chart::{Chart, Line, Look};
use super::super::figures::calmed;
use super::super::page::time_pieces;
use super::super::record::Record;
use super::super::{ReportError, html, stack};
use super::{Comparison, Difference, FIGURES, Figure, Verdict, table};

#[derive(Debug, Serialize)]
struct Page<'a> {
    names: Vec<&'a str>,
    verdicts: &'a [Verdict],
    differences: &'a [Difference],
    without_recipe: Vec<&'a str>,
    rows: Vec<Row>,
    sections: Vec<Section>,
    version: &'static str,
}

#[derive(Debug, Serialize)]
struct Row {
    label: &'static str,
    cells: Vec<Cell>,
}

#[derive(Debug, Serialize)]
struct Cell {
    value: String,
    change: Option<String>,
    direction: &'static str,
}

#[derive(Debug, Serialize)]
struct Section {
    title: &'static str,
    html: String,
    charts: Vec<String>,
}

/// The page of a comparison.
///
/// # Errors
///
/// A template that does not fit, which would be a mistake of this program.
pub(super) fn render(comparison: &Comparison) -> Result<String, ReportError> {
    let names: Vec<&str> = comparison.runs.iter().map(|run| run.name.as_str()).collect();
    let page = Page {
        verdicts: &comparison.verdicts,
        differences: &comparison.recipe_differences,
        without_recipe: comparison.without_recipe(),
        rows: FIGURES.iter().filter_map(|figure| row(comparison, figure)).collect(),
        sections: sections(comparison, &names),
        version: env!("CARGO_PKG_VERSION"),
        names,
    };
    html::fill(include_str!("compare.html"), &page)
}

fn row(comparison: &Comparison, figure: &Figure) -> Option<Row> {
    let cells = comparison.runs.iter().map(|run| Cell {
        value: run.value(figure.key).map_or_else(|| "–".to_owned(), |value| figure.unit.text(value)),
        change: table::change(run, figure),
        direction: table::direction(run, figure),
    });
    let has_value = comparison.runs.iter().any(|run| run.value(figure.key).is_some());
    has_value.then(|| Row { label: figure.label, cells: cells.collect() })
}

fn sections(comparison: &Comparison, names: &[&str]) -> Vec<Section> {
    let records = &comparison.records;
    let of_steps = |title, figure: &str, unit, calm| chart(title, unit, records, names, figure, false, calm);
    let evaluation = chart("Evaluation loss", Unit::Plain, records, names, "eval_loss", true, false);
    let learning = [of_steps("Training loss", "loss", Unit::Plain, true), evaluation];
    let throughput = [
        of_steps("Throughput", "tokens_per_second", Unit::TokensPerSecond, true),
        of_steps("Time of a step", "step_seconds", Unit::Seconds, true),
    ];
    let utilization = [
        of_steps("GPU utilization", "gpu_utilization_percent", Unit::Percent, true),
        of_steps("CPU utilization", "cpu_utilization_percent", Unit::Percent, true),
        of_steps("GPU power", "gpu_power_watts", Unit::Watts, true),
    ];
    let memory = [
        of_steps("GPU memory", "gpu_memory_used_bytes", Unit::Bytes, false),
        of_steps("Host memory", "host_memory_bytes", Unit::Bytes, false),
    ];
    let section = |title, charts: Vec<Option<String>>| Section {
        title,
        html: String::new(),
        charts: charts.into_iter().flatten().collect(),
    };
    let time: Vec<(&str, Vec<stack::Piece>)> = names.iter().copied().zip(records.iter().map(time_pieces)).collect();
    let sections = [
        section("Learning", learning.into()),
        section("Throughput", throughput.into()),
        Section {
            title: "Where the time went",
            html: format!("{}{}", stack::bars(&time, Unit::Seconds), stack::piece_legend(&time)),
            charts: Vec::new(),
        },
        section("Utilization", utilization.into()),
        section("Memory", memory.into()),
    ];
    sections.into_iter().filter(|section| !section.charts.is_empty() || !section.html.is_empty()).collect()
}

/// One figure of all runs.
fn chart(
    title: &'static str,
    unit: Unit,
    records: &[Record],
    names: &[&str],
    figure: &str,
    is_evaluation: bool,
    calm: bool,
) -> Option<String> {
    let lines = records.iter().zip(names).enumerate().filter_map(|(index, (record, name))| {
        let columns = if is_evaluation { &record.evaluations } else { &record.steps };
        let (x, y) = (columns.get("step")?, columns.get(figure)?);
        let look = match (is_evaluation, index % 3) {
            (true, _) => Look::Dots,
            (false, 0) => Look::Solid,
            (false, 1) => Look::Dashed,
            (false, _) => Look::Dotted,
        };
        let y = if calm { calmed(y) } else { y.into() };
        Some(Line { name: (*name).to_owned(), x, y, color: COLORS[index % COLORS.len()], look })
    });
    let lines: Vec<Line<'_>> = lines.collect();
    let note = if calm { "Means over a fortieth of the steps.".to_owned() } else { String::new() };
    let at_least = (unit == Unit::Percent).then_some(100.0);
    Chart { title, note, unit, lines, from_zero: true, at_least, may_be_log: figure.ends_with("loss"), marks: &[] }
        .render()
}

/// Colours of the runs, those that differ most first.
const COLORS: [usize; 8] = [1, 4, 3, 6, 2, 5, 7, 8];
