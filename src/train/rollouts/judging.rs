//! What rules, programs, functions and the environment say of answers.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value;

use super::played::Played;
use super::reward::{Failure, Judged, PromptRow, Scores};
use super::writing::WrittenAnswer;
use super::{RolloutError, Rollouts};
use crate::config::OnFailure;
use crate::data::batch::RowSource;
use crate::data::dataset::Dataset;
use crate::measure::figures::Mean;

/// What micro-batches that were written together got.
#[derive(Debug, Default)]
pub(super) struct Judgement {
    pub(super) scores: Vec<Scores>,
    /// Means of what functions have logged.
    pub(super) metrics: BTreeMap<String, f64>,
    /// Columns that they have logged, a value for each answer.
    pub(super) extra: BTreeMap<String, Vec<Value>>,
}

impl Judgement {
    /// That of some of the answers.
    pub(super) fn part(&self, of: Range<usize>) -> Self {
        let scores = |scores: &Scores| Scores { by_answer: scores.by_answer[of.clone()].to_vec(), ..scores.clone() };
        let column = |(name, values): (&String, &Vec<Value>)| (name.clone(), values[of.clone()].to_vec());
        let (scores, extra) = (self.scores.iter().map(scores).collect(), self.extra.iter().map(column).collect());
        Self { scores, extra, ..Self::default() }
    }

    /// The sum of what an answer got, each times its factor; `None` where nothing judges it.
    pub(super) fn reward(&self, index: usize) -> Option<f64> {
        let rewards = self.scores.iter().filter_map(|of| Some(of.by_answer[index]? * of.weight));
        rewards.fold(None, |sum, reward| Some(sum.unwrap_or(0.0) + reward))
    }
}

impl Rollouts {
    /// What all rules and functions say of answers.
    pub(super) fn judge(
        &mut self,
        written: &[WrittenAnswer],
        data: &Dataset,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Judgement, RolloutError> {
        // Nothing judges what an environment has left half done.
        let whole: Vec<usize> = (0..written.len()).filter(|index| written[*index].failure().is_none()).collect();
        let (mut all, num_answers) = (self.judged_by_environment(written)?, written.len());
        if whole.is_empty() {
            return Ok(all);
        }
        let none = PromptRow::default();
        let judged = |index: &usize| {
            let written = &written[*index];
            let row = self.rows.get(&written.source).unwrap_or(&none);
            Judged { row, text: written.answer(), ids: &written.ids, played: written.played.as_deref() }
        };
        let judged: Vec<Judged<'_>> = whole.iter().map(judged).collect();
        for reward in &mut self.rewards {
            let (scores, said) = reward.judge(&judged, &self.state, is_stopped).map_err(|failure| {
                let Failure { index, reason } = failure;
                match index.and_then(|index| whole.get(index)).map(|index| written[*index].source) {
                    Some(RowSource { file, row }) => {
                        RolloutError::Reward { path: data.files()[file].path.clone(), row, reason }
                    }
                    None => RolloutError::Judge(reason),
                }
            })?;
            for mut scores in scores {
                let num_equal = all.scores.iter().filter(|other| other.name.split(' ').next() == Some(&scores.name));
                match num_equal.count() {
                    0 => {}
                    before => scores.name.push_str(&format!(" {}", before + 1)),
                }
                scores.by_answer = spread(&whole, &scores.by_answer, num_answers);
                all.scores.push(scores);
            }
            all.metrics.extend(said.metrics);
            let extra = said.extra.into_iter().map(|(name, values)| (name, spread(&whole, &values, num_answers)));
            all.extra.extend(extra);
        }
        Ok(all)
    }

    /// What the environment says of its episodes.
    fn judged_by_environment(&self, written: &[WrittenAnswer]) -> Result<Judgement, RolloutError> {
        let Some(environment) = &self.environment else { return Ok(Judgement::default()) };
        let is_zero = environment.config().on_failure == OnFailure::Zero;
        let played = || written.iter().filter_map(|written| written.played.as_deref());
        let score = |played: &Played| match played.failure {
            Some(_) => is_zero.then_some(0.0),
            None => played.reward,
        };
        let by_answer: Vec<Option<f64>> = played().map(score).collect();
        if self.rewards.is_empty() && by_answer.iter().all(Option::is_none) {
            let text = "nothing judges: the environment gives no reward, and there is no [[objective.reward]]";
            return Err(RolloutError::Judge(text.into()));
        }
        let mut metrics: BTreeMap<String, Mean> = BTreeMap::new();
        for (name, value) in played().filter(|played| played.failure.is_none()).flat_map(|played| &played.metrics) {
            *metrics.entry(name.clone()).or_default() += Mean::of(*value);
        }
        let metrics = metrics.into_iter().filter_map(|(name, mean)| Some((name, mean.value()?))).collect();
        let name = environment.hello().map(|hello| hello.name.clone()).unwrap_or_default();
        let is_judged = by_answer.iter().any(Option::is_some);
        let scores = is_judged.then_some(Scores { name, weight: 1.0, by_answer }).into_iter().collect();
        Ok(Judgement { scores, metrics, ..Judgement::default() })
    }
}

/// The values of some of so many answers; others have none.
fn spread<T: Clone + Default>(of: &[usize], values: &[T], num_answers: usize) -> Vec<T> {
    let mut all = vec![T::default(); num_answers];
    of.iter().zip(values).for_each(|(index, value)| all[*index] = value.clone());
    all
}
