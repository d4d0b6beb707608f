//! What persists is told during the run, once.

use std::collections::{BTreeSet, VecDeque};

use super::rules::{clocks, compute, data, input, memory, stalls};
use super::{Facts, Figures, Finding, Rule, Run, Severity};
use crate::metrics::StepMetrics;

/// Steps that something has to last before it is told.
const WINDOW_STEPS: usize = 50;
/// A step that takes so many times the middle one of those before it is an anomaly,
const SLOW_FACTOR: f64 = 3.0;
/// if it takes so much longer, in seconds.
const SLOW_SECONDS: f64 = 0.25;
/// Steps after which the middle one means something.
const KNOWN_STEPS: usize = 20;

/// Rules that can hold for a while and are worth a change in the middle of a run.
const RULES: &[Rule] = &[
    input::input_bound,
    compute::host_to_device,
    compute::launch_overhead,
    data::padding,
    data::truncation,
    stalls::evaluation,
    stalls::checkpoint,
    stalls::logging,
    memory::pressure,
    memory::creep,
    memory::swapping,
    memory::other_process,
    clocks::throttled,
];

/// Looks at the last steps.
#[derive(Clone, Debug)]
pub struct Watch {
    facts: Facts,
    recent: VecDeque<StepMetrics>,
    seen: usize,
    told: BTreeSet<String>,
}

impl Watch {
    /// Of a run about which so much is known.
    #[must_use]
    pub fn new(facts: Facts) -> Self {
        Self { facts, recent: VecDeque::new(), seen: 0, told: BTreeSet::new() }
    }

    /// Takes in a step other than the first of a start. What has lasted for 50 steps, and has not been told yet.
    pub fn observe(&mut self, line: &StepMetrics) -> Vec<Finding> {
        self.recent.push_back(line.clone());
        if self.recent.len() > WINDOW_STEPS {
            self.recent.pop_front();
        }
        self.seen += 1;
        if !self.seen.is_multiple_of(WINDOW_STEPS) {
            return Vec::new();
        }
        let figures = Figures::of(&self.recent);
        let steps = figures.steps;
        let run = Run { facts: self.facts.clone(), figures };
        let holds = RULES.iter().filter_map(|rule| rule(&run)).filter(|finding| finding.severity <= Severity::Advice);
        let new = holds.filter(|finding| self.told.insert(finding.rule.clone()));
        new.map(|finding| Finding { steps, ..finding }).collect()
    }

    /// Whether a step that has not been taken in yet takes far longer than those before it.
    #[must_use]
    pub fn is_slow(&self, line: &StepMetrics) -> bool {
        let mut before: Vec<f64> = self.recent.iter().map(|line| line.step_seconds).collect();
        before.sort_by(f64::total_cmp);
        let middle = before.get(before.len() / 2).copied().unwrap_or(f64::INFINITY);
        let is_slow = line.step_seconds > (SLOW_FACTOR * middle).max(middle + SLOW_SECONDS);
        before.len() >= KNOWN_STEPS && is_slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::tests::{facts, line};

    #[test]
    fn what_lasts_is_told_once_with_its_steps_and_what_passes_is_not() {
        let mut watch = Watch::new(facts());
        let waiting = |step, seconds| StepMetrics { data_wait_seconds: seconds, ..line(step) };
        for step in 2..=51 {
            // A tenth of a step on average would be too much.
            assert!(watch.observe(&waiting(step, if step < 10 { 0.3 } else { 0.0 })).is_empty(), "step {step}");
        }
        for step in 52..=100 {
            assert!(watch.observe(&waiting(step, 0.4)).is_empty());
        }
        let told = watch.observe(&waiting(101, 0.4));
        assert_eq!((told.len(), told[0].rule.as_str(), told[0].steps), (1, "input_bound_queue", Some((52, 101))));
        assert!((102..400).all(|step| watch.observe(&waiting(step, 0.4)).is_empty()), "it has been told");
    }

    #[test]
    fn a_step_far_slower_than_those_before_it_is_an_anomaly() {
        let mut watch = Watch::new(facts());
        let taking = |step, step_seconds| StepMetrics { step_seconds, ..line(step) };
        assert!(!watch.is_slow(&taking(2, 100.0)), "nothing is known yet");
        (2..30).for_each(|step| drop(watch.observe(&taking(step, 0.1))));
        assert!(!watch.is_slow(&taking(30, 0.31)) && watch.is_slow(&taking(30, 0.4)));
    }
}
