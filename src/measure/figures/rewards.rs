//! What answers of "grpo" got of each rule or function, and the answers themselves.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use super::StepMetrics;

/// What is needed of numbers to say their mean and their standard deviation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    sum: f64,
    squares: f64,
    count: f64,
}

impl Spread {
    /// Mean and standard deviation (with n - 1); `None` of nothing.
    #[must_use]
    pub fn value(&self) -> Option<(f64, f64)> {
        let mean = (self.count > 0.0).then(|| self.sum / self.count)?;
        Some((mean, ((self.squares - self.sum * mean).max(0.0) / (self.count - 1.0).max(1.0)).sqrt()))
    }
}

impl FromIterator<f64> for Spread {
    fn from_iter<I: IntoIterator<Item = f64>>(numbers: I) -> Self {
        let mut all = Self::default();
        for number in numbers {
            all += Self { sum: number, squares: number * number, count: 1.0 };
        }
        all
    }
}

impl AddAssign for Spread {
    fn add_assign(&mut self, other: Self) {
        self.sum += other.sum;
        self.squares += other.squares;
        self.count += other.count;
    }
}

impl StepMetrics {
    /// Takes over what answers got of each rule or function, and what functions have logged.
    pub fn set_rewards(&mut self, rewards: &BTreeMap<String, Spread>, logged: &BTreeMap<String, f64>) {
        let values = |of: fn((f64, f64)) -> f64| {
            let value = |(name, spread): (&String, &Spread)| Some((name.clone(), of(spread.value()?)));
            Some(rewards.iter().filter_map(value).collect::<BTreeMap<_, _>>()).filter(|values| !values.is_empty())
        };
        (self.reward_means, self.reward_stds) = (values(|(mean, _)| mean), values(|(_, std)| std));
        self.reward_metrics = Some(logged.clone()).filter(|logged| !logged.is_empty());
    }

    /// These figures by their tags.
    pub(crate) fn reward_scalars(&self) -> Vec<(String, f64)> {
        let name = |name: &str| name.replace(|c: char| !(c.is_alphanumeric() || "_-. /".contains(c)), "_");
        let of = |values: &Option<BTreeMap<String, f64>>, tag: fn(String) -> String| {
            let values = values.iter().flatten();
            values.map(|(own, value)| (tag(name(own)), *value)).collect::<Vec<_>>()
        };
        let means = of(&self.reward_means, |name| format!("rewards/{name}/mean"));
        let stds = of(&self.reward_stds, |name| format!("rewards/{name}/std"));
        let logged = of(&self.reward_metrics, |name| format!("reward_metrics/{name}"));
        [means, stds, logged].concat()
    }
}

/// An answer of "grpo": a line of rollouts.jsonl.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// The step that it was written for, the first that trains on it.
    pub step: u64,
    /// File of the row.
    pub file: String,
    /// Number of the row in it, from 1.
    pub row: usize,
    /// Number of the prompt among those that were answered together, from 1: its answers are compared with one another.
    pub group: usize,
    /// The prompt as the model has read it, without special tokens.
    pub prompt: String,
    /// The answer.
    pub completion: String,
    /// Tokens of the answer, with the one that ends it.
    pub tokens: usize,
    /// Whether it ended by itself, "stop", or did not, "length"; of an episode also "turns" or "failed".
    pub ending: String,
    /// Entropy in nats of what its tokens were drawn from, mean.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub entropy: Option<f64>,
    /// What it got of each rule or function, by its name, without factors; what does not judge it is `null`.
    pub rewards: BTreeMap<String, Option<f64>>,
    /// The sum of these, each times its factor; `null` where nothing judges it.
    pub reward: Option<f64>,
    /// By how much that is above the mean of the group, over its standard deviation or what else the recipe says.
    pub advantage: f64,
    /// What functions have logged by `log_extra`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub extra: BTreeMap<String, serde_json::Value>,
    /// Its turns, where an environment replied to it.
    #[serde(flatten, skip_serializing_if = "Option::is_none", default)]
    pub episode: Option<RolloutEpisode>,
}

/// The turns of an answer to which an environment replied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutEpisode {
    /// Answers of the model.
    pub turns: usize,
    /// These and the replies.
    pub messages: Vec<serde_json::Value>,
    /// Calls of tools.
    pub tool_calls: usize,
    /// Those that have failed.
    pub tool_failures: usize,
    /// How often it has begun anew as its environment had failed.
    pub retries: usize,
    /// Why it has failed for good, if it has.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failure: Option<String>,
    /// What the environment has measured.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub metrics: BTreeMap<String, f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewards_of_a_function_have_the_mean_and_deviation_of_all_micro_batches() {
        let mut all: Spread = [1.0, 2.0].into_iter().collect();
        all += [6.0].into_iter().collect();
        let rewards = BTreeMap::from([("f g/h:".to_owned(), all), ("none".to_owned(), Spread::default())]);
        let mut step = StepMetrics::default();
        step.set_rewards(&rewards, &BTreeMap::from([("x".to_owned(), 0.5)]));
        // The squares of the differences from 3 are 4, 1 and 9.
        let expected =
            [("rewards/f g/h_/mean", 3.0), ("rewards/f g/h_/std", 7.0_f64.sqrt()), ("reward_metrics/x", 0.5)];
        assert_eq!(step.reward_scalars(), expected.map(|(tag, value)| (tag.to_owned(), value)));
        step.set_rewards(&BTreeMap::new(), &BTreeMap::new());
        assert_eq!(step, StepMetrics::default());
    }
}
