//! Which run is the best, by its evaluations.

use serde::Serialize;

use super::super::axis::Unit;
use super::super::record::Record;
use super::{Difference, Side};
use crate::measure::figures::evaluation::EvalFigure;
use crate::util::text::{aligned, shortened};

/// Most keys of recipes that the table has as columns.
const MAX_KEYS: usize = 8;
/// Most characters of a value of one.
const MAX_VALUE: usize = 24;

/// The best evaluation of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Best {
    pub(super) figure: &'static str,
    pub(super) value: f64,
    pub(super) step: Option<f64>,
    #[serde(skip)]
    is_higher_better: bool,
}

impl Best {
    /// By what the run itself keeps its best adapter by.
    pub(super) fn of(run: &Record) -> Option<Self> {
        let asked = run.setting("eval.metric_for_best").and_then(toml::Value::as_str);
        let rewarded = || if super::is_rewarded(run) { "reward" } else { "loss" };
        let name = asked.unwrap_or_else(rewarded);
        let figure = EvalFigure::deciding(name)?;
        let values = run.evaluations.get(figure.name)?.iter().enumerate().filter(|(_, value)| value.is_finite());
        // Of equal ones the first, as training has it.
        let (index, value) =
            values.reduce(|best, next| if figure.is_better(*next.1, *best.1) { next } else { best })?;
        let step = run.evaluations.get("step").and_then(|steps| steps.get(index)).copied();
        Some(Self { figure: figure.name, value: *value, step, is_higher_better: figure.is_higher_better })
    }
}

/// A run in its place; those that cannot be compared with most of the others have none, and come last.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Ranked {
    rank: Option<usize>,
    run: String,
    /// Its index among the runs.
    #[serde(skip)]
    side: usize,
    #[serde(flatten)]
    best: Option<Best>,
}

/// The runs, the best first.
pub(super) fn ranking(sides: &[Side]) -> Vec<Ranked> {
    let is_alike = |a: &Side, b: &Side| {
        let is_same_figure = a.best.as_ref().zip(b.best.as_ref()).is_some_and(|(a, b)| a.figure == b.figure);
        is_same_figure && !a.evaluates_other_tokens(b) && !a.has_other_objective(b)
    };
    let num_alike = |side: &Side| sides.iter().filter(|other| is_alike(side, other)).count();
    // Of equally many the first.
    let most = sides.iter().rev().max_by_key(|side| num_alike(side));
    let mut order: Vec<usize> = (0..sides.len()).collect();
    let place = |index: &usize| {
        let side = &sides[*index];
        let best = side.best.as_ref().filter(|_| most.is_some_and(|most| is_alike(most, side)));
        best.map_or(f64::INFINITY, |best| if best.is_higher_better { -best.value } else { best.value })
    };
    order.sort_by(|a, b| place(a).total_cmp(&place(b)));
    let ranked = order.into_iter().enumerate().map(|(index, side)| Ranked {
        rank: place(&side).is_finite().then_some(index + 1),
        run: sides[side].name.clone(),
        side,
        best: sides[side].best.clone(),
    });
    ranked.collect()
}

/// The ranking as a table, with the keys by which the recipes differ. Empty where no run has evaluations.
pub(super) fn lines(ranking: &[Ranked], sides: &[Side], differences: &[Difference]) -> Vec<String> {
    let Some(figure) = ranking.iter().find_map(|ranked| Some(ranked.best.as_ref()?.figure)) else {
        return vec!["no ranking: there are no evaluations".to_owned()];
    };
    let last = |key: &str| key.rsplit('.').next().unwrap_or(key).to_owned();
    let is_ambiguous = |key: &str| differences.iter().filter(|other| last(&other.key) == last(key)).count() > 1;
    let keys = &differences[..differences.len().min(MAX_KEYS)];
    let names = keys.iter().map(|one| if is_ambiguous(&one.key) { one.key.clone() } else { last(&one.key) });
    let shown = ["tokens/s", "peak memory", "wall time"].map(str::to_owned);
    let mut rows = vec![
        ["rank", "run", &figure.replace('_', " "), "best at"]
            .map(str::to_owned)
            .into_iter()
            .chain(names)
            .chain(shown)
            .collect(),
    ];
    for Ranked { rank, run, side, best } in ranking {
        let index = *side;
        let side = &sides[index];
        let value = |name: &str, unit: Unit| side.value(name).map_or_else(|| "-".to_owned(), |value| unit.text(value));
        let best = best.as_ref();
        let own = [
            rank.map_or_else(|| "-".to_owned(), |rank| rank.to_string()),
            format!("{run}{}", if side.is_finished { "" } else { " (unfinished)" }),
            best.map_or_else(|| "-".to_owned(), |best| format!("{:.4}", best.value)),
            best.and_then(|best| best.step).map_or_else(|| "-".to_owned(), |step| format!("step {step}")),
        ];
        let keys = keys.iter().map(|one| shortened(one.values[index].as_deref().unwrap_or("-"), MAX_VALUE));
        let figures = [
            value("tokens_per_second", Unit::Count),
            value(side.peak_figure(side), Unit::Bytes),
            value("wall_seconds", Unit::Seconds),
        ];
        rows.push(own.into_iter().chain(keys).chain(figures).collect());
    }
    let mut lines = aligned(&rows);
    if ranking.iter().any(|ranked| ranked.rank.is_none()) {
        lines.push("- not ranked: no evaluation, or one of other rows or of another objective than most".to_owned());
    }
    if differences.len() > MAX_KEYS {
        lines.push(format!("{} more keys differ; --json has all", differences.len() - MAX_KEYS));
    }
    lines
}
