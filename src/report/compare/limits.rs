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

/// How much worse a figure may become, in percent: `5` of each figure that the baseline has, or `eval_loss=1` of one.
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
    /// How much worse, in percent; absent where the run lacks the figure, or the baseline's is 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<f64>,
    /// How much was allowed.
    pub allowed_percent: f64,
    /// In words.
    pub text: String,
}

/// What a check against limits found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checked {
    /// What became worse than it may.
    pub regressions: Vec<Regression>,
    /// What could not be checked since the baseline lacks it, in words.
    pub not_checked: Vec<String>,
}

/// How a figure of a run stands to that of the baseline.
enum Standing {
    /// Worse by so many percent; 0 or below where it is not, or where chance may be behind it.
    Worse(f64),
    /// Worse than a baseline of 0, of which there are no percentages.
    WorseThanZero,
    /// The run lacks it, or it is no number: a loss that diverged.
    Lost,
    /// The baseline lacks it.
    NoBaseline,
    /// It is over other tokens than the baseline's.
    OtherTokens,
}

impl Comparison {
    /// The figures that became worse than the limits allow, among them those that a run lacks and the baseline has. A
    /// difference of speed that chance may be behind is none.
    ///
    /// # Errors
    ///
    /// A limit on one figure, which the baseline does not have, or which is over other tokens there.
    pub fn check(&self, limits: &[Limit]) -> Result<Checked, String> {
        let mut checked = Checked::default();
        for limit in limits {
            for figure in LimitedFigure::ALL.into_iter().filter(|figure| limit.figure.is_none_or(|one| one == *figure))
            {
                // What is said of one figure goes before what is said of all.
                let is_named = limits.iter().any(|other| other.figure == Some(figure));
                if limit.figure.is_none() && is_named {
                    continue;
                }
                for run in &self.runs[1..] {
                    let percent = match self.standing(run, figure) {
                        Standing::Worse(percent) if percent <= limit.percent => continue,
                        Standing::Worse(percent) => Some(percent),
                        Standing::WorseThanZero | Standing::Lost => None,
                        standing @ (Standing::NoBaseline | Standing::OtherTokens) => {
                            let (name, baseline) = (figure.name(), &self.runs[0].name);
                            let why = match standing {
                                Standing::OtherTokens => "evaluates other tokens, so the two cannot be compared",
                                _ => "has none to compare it with",
                            };
                            let text = format!("`{name}` of {}: {baseline} {why}", run.name);
                            if limit.figure.is_some() {
                                return Err(text);
                            }
                            checked.not_checked.push(text);
                            continue;
                        }
                    };
                    checked.regressions.push(self.regression(run, figure, percent, limit.percent));
                }
            }
        }
        Ok(checked)
    }

    /// The figure by which two runs are compared; `None` where the baseline has none.
    fn key(&self, run: &Run, figure: LimitedFigure) -> Option<&'static str> {
        let baseline = &self.runs[0];
        let key = match figure {
            LimitedFigure::TokensPerSecond => "tokens_per_second",
            LimitedFigure::EvalLoss => "final_eval_loss",
            LimitedFigure::PeakMemory => peak_key(baseline, run).or_else(|| {
                // The run lacks what the baseline has.
                let keys = ["peak_gpu_memory_bytes", "peak_host_memory_bytes"];
                let has = |run: &Run, key: &str| run.value(key).is_some();
                keys.into_iter().find(|key| has(baseline, key) || has(run, key))
            })?,
        };
        baseline.value(key).is_some().then_some(key)
    }

    fn standing(&self, run: &Run, figure: LimitedFigure) -> Standing {
        let Some((key, base)) = self.key(run, figure).and_then(|key| Some((key, self.runs[0].value(key)?))) else {
            return Standing::NoBaseline;
        };
        let Some((compared, value)) = run.figure(key).and_then(|compared| Some((compared, compared.value?))) else {
            return Standing::Lost;
        };
        if figure == LimitedFigure::EvalLoss && run.evaluates_other_tokens(&self.runs[0]) {
            return Standing::OtherTokens;
        }
        let is_higher_better = figure == LimitedFigure::TokensPerSecond;
        match compared.change_percent {
            Some(_) if compared.is_noise == Some(true) => Standing::Worse(0.0),
            Some(change) => Standing::Worse(if is_higher_better { -change } else { change }),
            None if value == base || is_higher_better == (value > base) => Standing::Worse(0.0),
            None => Standing::WorseThanZero,
        }
    }

    fn regression(&self, run: &Run, figure: LimitedFigure, percent: Option<f64>, allowed_percent: f64) -> Regression {
        let unit = match figure {
            LimitedFigure::TokensPerSecond => Unit::TokensPerSecond,
            LimitedFigure::PeakMemory => Unit::Bytes,
            LimitedFigure::EvalLoss => Unit::Plain,
        };
        let key = self.key(run, figure);
        let value = |run: &Run| Some(unit.text(run.value(key?)?));
        let (name, baseline) = (figure.name(), &self.runs[0]);
        let before = value(baseline).unwrap_or_default();
        let text = match (percent, value(run)) {
            (_, None) => {
                format!("{}: {name} is missing or no number, in {} it is {before}", run.name, baseline.name)
            }
            (None, Some(after)) => {
                format!("{}: {name} is worse than in {} ({before} -> {after})", run.name, baseline.name)
            }
            (Some(percent), Some(after)) => format!(
                "{}: {name} is {percent:.1} % worse than in {} ({before} -> {after}), more than {allowed_percent} %",
                run.name, baseline.name
            ),
        };
        Regression { run: run.name.clone(), figure, percent, allowed_percent, text }
    }
}
