//! How much worse a run may be before a check fails.

use std::str::FromStr;

use serde::Serialize;

use super::super::axis::Unit;
use super::{Comparison, Run, peak_key};

/// A figure that can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitedFigure {
    /// Median tokens a second after warm-up.
    TokensPerSecond,
    /// The most memory in use.
    PeakMemory,
    /// The last evaluation loss.
    EvalLoss,
}

impl LimitedFigure {
    const ALL: [Self; 3] = [Self::TokensPerSecond, Self::PeakMemory, Self::EvalLoss];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TokensPerSecond => "tokens_per_second",
            Self::PeakMemory => "peak_memory",
            Self::EvalLoss => "eval_loss",
        }
    }
}

/// How much worse a figure may become, in percent: `5` of each figure that both runs have, or `eval_loss=1` of one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Which figure; absent: all.
    pub figure: Option<LimitedFigure>,
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
            let names = LimitedFigure::ALL.map(LimitedFigure::name).join(", ");
            let figure = LimitedFigure::ALL.into_iter().find(|figure| figure.name() == name);
            figure.ok_or_else(|| format!("`{name}`: expected one of {names}"))
        };
        Ok(Self { figure: name.map(find).transpose()?, percent })
    }
}

/// A figure that became worse than it may.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Regression {
    /// The run.
    pub run: String,
    /// The figure.
    pub figure: LimitedFigure,
    /// How much worse, in percent.
    pub percent: f64,
    /// How much was allowed.
    pub allowed_percent: f64,
    /// In words.
    pub text: String,
}

impl Comparison {
    /// The figures that became worse than the limits allow. A difference of speed that chance may be behind is none.
    ///
    /// # Errors
    ///
    /// A limit on a figure that the runs do not both have.
    pub fn regressions(&self, limits: &[Limit]) -> Result<Vec<Regression>, String> {
        let mut regressions = Vec::new();
        for limit in limits {
            for figure in LimitedFigure::ALL.into_iter().filter(|figure| limit.figure.is_none_or(|one| one == *figure))
            {
                // What is said of one figure goes before what is said of all.
                let is_named = limits.iter().any(|other| other.figure == Some(figure));
                if limit.figure.is_none() && is_named {
                    continue;
                }
                for run in &self.runs[1..] {
                    match self.worse_percent(run, figure) {
                        Some(worse) if worse > limit.percent => {
                            regressions.push(self.regression(run, figure, worse, limit.percent));
                        }
                        None if limit.figure.is_some() => {
                            let (name, baseline) = (figure.name(), &self.runs[0].name);
                            return Err(format!("`{name}` is not in the figures of both {baseline} and {}", run.name));
                        }
                        _ => {}
                    }
                }
            }
        }
        Ok(regressions)
    }

    fn key(&self, run: &Run, figure: LimitedFigure) -> Option<&'static str> {
        match figure {
            LimitedFigure::TokensPerSecond => Some("tokens_per_second"),
            LimitedFigure::PeakMemory => peak_key(&self.runs[0], run),
            LimitedFigure::EvalLoss => Some("final_eval_loss"),
        }
    }

    /// By how much a figure is worse, 0 where chance may be behind it; `None` where it cannot be compared.
    fn worse_percent(&self, run: &Run, figure: LimitedFigure) -> Option<f64> {
        let compared = run.figure(self.key(run, figure)?)?;
        let change = compared.change_percent?;
        if compared.is_noise == Some(true) {
            return Some(0.0);
        }
        Some(if figure == LimitedFigure::TokensPerSecond { -change } else { change })
    }

    fn regression(&self, run: &Run, figure: LimitedFigure, percent: f64, allowed_percent: f64) -> Regression {
        let unit = match figure {
            LimitedFigure::TokensPerSecond => Unit::TokensPerSecond,
            LimitedFigure::PeakMemory => Unit::Bytes,
            LimitedFigure::EvalLoss => Unit::Plain,
        };
        let key = self.key(run, figure);
        let value = |run: &Run| {
            let value = key.and_then(|key| run.value(key));
            value.map_or_else(String::new, |value| unit.text(value))
        };
        let text = format!(
            "{}: {} is {percent:.1} % worse than in {} ({} -> {}), more than {allowed_percent} %",
            run.name,
            figure.name(),
            self.runs[0].name,
            value(&self.runs[0]),
            value(run)
        );
        Regression { run: run.name.clone(), figure, percent, allowed_percent, text }
    }
}
