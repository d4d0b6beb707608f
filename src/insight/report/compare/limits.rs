//! How much worse a run may be before a check fails.

use std::str::FromStr;

use serde::Serialize;

use super::super::axis::Unit;
use super::{Comparison, Side};

/// Figures that can have a limit: median tokens a second, peak memory, last evaluation loss.
const LIMITED: [&str; 3] = ["tokens_per_second", "peak_memory", "eval_loss"];

/// How much worse figures may become, in percent: `5` for all that the baseline has, or `eval_loss=1` for a single
/// figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// The figure; `None`: all.
    pub figure: Option<&'static str>,
    /// In percent.
    pub percent: f64,
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, number) = text.split_once('=').map_or((None, text), |(name, number)| (Some(name.trim()), number));
        let percent = number.trim().trim_end_matches('%').trim().parse().ok();
        let percent = percent.filter(|percent: &f64| percent.is_finite() && *percent >= 0.0);
        let percent = percent.ok_or_else(|| format!("`{number}`: expected a percentage, 0 or above"))?;
        let find = |name: &str| {
            let figure = LIMITED.into_iter().find(|figure| *figure == name);
            figure.ok_or_else(|| format!("`{name}`: expected one of {}", LIMITED.join(", ")))
        };
        Ok(Self { figure: name.map(find).transpose()?, percent })
    }
}

/// A figure that became worse than its limit allows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Regression {
    /// The run.
    pub run: String,
    /// The figure.
    pub figure: &'static str,
    /// How much worse, in percent; absent where the run lacks the figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<f64>,
    /// How much was allowed.
    pub allowed_percent: f64,
    /// The regression in words.
    pub text: String,
}

/// The result of a check against limits.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checked {
    /// Figures worse than their limits allow.
    pub regressions: Vec<Regression>,
    /// Checks that could not be made, in words.
    pub not_checked: Vec<String>,
}

impl Comparison {
    /// The figures that became worse than the limits allow, including those that the baseline has and a run lacks.
    /// Where sides have several runs, overlapping ranges are not worse.
    ///
    /// # Errors
    /// A limit on one figure that cannot be compared with the baseline's.
    pub fn check(&self, limits: &[Limit]) -> Result<Checked, String> {
        let mut checked = Checked::default();
        let Some((baseline, others)) = self.sides.split_first() else { return Ok(checked) };
        for figure in LIMITED {
            // A limit on this figure overrides one on all.
            let named: Vec<&Limit> = limits.iter().filter(|limit| limit.figure == Some(figure)).collect();
            let of_all = limits.iter().filter(|limit| limit.figure.is_none() && named.is_empty());
            for limit in named.iter().copied().chain(of_all) {
                for side in others {
                    match regression(baseline, side, figure, limit.percent) {
                        Ok(found) => checked.regressions.extend(found),
                        Err(text) if limit.figure.is_some() => return Err(text),
                        Err(text) => checked.not_checked.push(text),
                    }
                }
            }
        }
        Ok(checked)
    }
}

/// The regression of one figure, if it regressed.
///
/// # Errors
/// Why the figure cannot be compared.
fn regression(baseline: &Side, side: &Side, figure: &'static str, allowed: f64) -> Result<Option<Regression>, String> {
    let (key, unit, sign) = match figure {
        "tokens_per_second" => (figure, Unit::TokensPerSecond, -1.0),
        "peak_memory" => (side.peak_figure(baseline), Unit::Bytes, 1.0),
        _ => ("final_eval_loss", Unit::Plain, 1.0),
    };
    let (run, base) = (&side.name, &baseline.name);
    let before =
        baseline.value(key).ok_or_else(|| format!("`{figure}` of {run}: {base} has none to compare it with"))?;
    let before = unit.text(before);
    let found = |percent, text| Some(Regression { run: run.clone(), figure, percent, allowed_percent: allowed, text });
    let Some((own, value)) = side.figure(key).and_then(|own| Some((own, own.value?))) else {
        return Ok(found(None, format!("{run}: {figure} is missing or no number, in {base} it is {before}")));
    };
    let Some(change) = own.change_percent else {
        let why = match figure {
            "eval_loss" if side.has_other_objective(baseline) => "has another objective",
            "eval_loss" if side.evaluates_other_tokens(baseline) => "evaluates other tokens",
            _ => "has 0",
        };
        return Err(format!("`{figure}` of {run}: {base} {why}, so the two cannot be compared"));
    };
    let (percent, after) = (sign * change, unit.text(value));
    let text =
        format!("{run}: {figure} is {percent:.1} % worse than in {base} ({before} -> {after}), more than {allowed} %");
    Ok(if percent > allowed && own.is_clear != Some(false) { found(Some(percent), text) } else { None })
}
