//! Reports lasting findings during the run, each once.

use std::collections::{BTreeSet, VecDeque};

use super::rules::{RULES, When};
use super::{Facts, Figures, Finding, Run, Severity};
use crate::measure::metrics::StepMetrics;
use crate::util::stats::{Line, as_f64, median};

/// Steps that a finding has to last before it is reported.
const WINDOW_STEPS: usize = 50;
/// A step is an anomaly if it takes this many times what earlier steps and its tokens explain,
const SLOW_FACTOR: f64 = 3.0;
/// and at least this much longer, in seconds.
const SLOW_SECONDS: f64 = 0.25;
/// Steps after which their median means something.
const KNOWN_STEPS: usize = 20;
/// Correlation of step times and tokens from which a straight line predicts the time.
const SOUND_CORRELATION: f64 = 0.9;

/// Watches the last steps.
#[derive(Clone, Debug)]
pub struct Watch {
    facts: Facts,
    recent: VecDeque<StepMetrics>,
    seen: usize,
    start_epoch: Option<f64>,
    reported: BTreeSet<String>,
}

impl Watch {
    /// A watch over a run with these facts.
    #[must_use]
    pub fn new(facts: Facts) -> Self {
        Self { facts, recent: VecDeque::new(), seen: 0, start_epoch: None, reported: BTreeSet::new() }
    }

    /// Adds a step, which must not be the first of a start. Returns the findings that lasted 50 steps and are new.
    pub fn observe(&mut self, line: &StepMetrics) -> Vec<Finding> {
        self.start_epoch.get_or_insert(line.epoch);
        self.recent.push_back(line.clone());
        if self.recent.len() > WINDOW_STEPS {
            self.recent.pop_front();
        }
        self.seen += 1;
        if !self.seen.is_multiple_of(WINDOW_STEPS) {
            return Vec::new();
        }
        let mut figures = Figures { start_epoch: self.start_epoch, ..Figures::default() };
        self.recent.iter().for_each(|line| figures.add(line));
        let steps = self.recent.front().map(|first| (first.step, line.step));
        let run = Run { facts: self.facts.clone(), figures };
        let rules = RULES.iter().filter(|(_, when)| *when != When::AtTheEnd);
        let holds = rules.filter_map(|(rule, _)| rule(&run)).filter(|finding| finding.severity <= Severity::Advice);
        let new = holds.filter(|finding| self.reported.insert(finding.rule.clone()));
        new.map(|finding| Finding { steps, ..finding }).collect()
    }

    /// Whether a step, not added yet, takes far longer than the earlier ones and than its tokens explain.
    #[must_use]
    pub fn is_slow(&self, line: &StepMetrics) -> bool {
        let expected = self.expected_seconds(self.computed_tokens(line));
        let is_slow = line.step_seconds > (SLOW_FACTOR * expected).max(expected + SLOW_SECONDS);
        self.recent.len() >= KNOWN_STEPS && is_slow
    }

    /// The time that earlier steps predict for this many tokens, at least their median time. If the step times fit a
    /// straight line, the line predicts it. If not, or for rows longer than all before, it grows in proportion to the
    /// tokens: as much as they can explain while attention is the smaller part.
    fn expected_seconds(&self, tokens: f64) -> f64 {
        let points = self.recent.iter().map(|line| (self.computed_tokens(line), line.step_seconds));
        let (all_tokens, all_seconds): (Vec<f64>, Vec<f64>) = points.clone().unzip();
        let (Some(middle_tokens), Some(middle)) = (median(&all_tokens), median(&all_seconds)) else {
            return f64::INFINITY;
        };
        let line = Line::through(points);
        let is_sound = line.correlation().is_some_and(|correlation| correlation > SOUND_CORRELATION);
        let was_seen = all_tokens.iter().any(|seen| *seen >= tokens);
        let explained = match (line.intercept(), line.slope()) {
            (Some(start), Some(slope)) if is_sound && was_seen => start + slope * tokens,
            _ => middle * tokens / middle_tokens.max(1.0),
        };
        explained.max(middle)
    }

    fn computed_tokens(&self, line: &StepMetrics) -> f64 {
        let padding = line.padding_tokens.filter(|_| !self.facts.leaves_padding_out);
        as_f64(line.tokens + padding.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::diagnosis::tests::{facts, line};

    #[test]
    fn what_lasts_is_told_once_with_its_steps_and_what_passes_is_not() {
        let mut watch = Watch::new(facts());
        let waiting = |step, seconds| StepMetrics { data_wait_seconds: seconds, ..line(step) };
        for step in 2..=51 {
            // Waiting is reported from a tenth of the step time on average.
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

    #[test]
    fn what_a_steps_tokens_explain_is_no_anomaly_and_what_they_do_not_is_one() {
        // 37 rows of 10 tokens, then one of 454: all that is known about it is that it is 45 times as long.
        let of = |step, tokens, step_seconds| StepMetrics { tokens, step_seconds, padding_tokens: None, ..line(step) };
        let mut alike = Watch::new(facts());
        (2..40).for_each(|step| drop(alike.observe(&of(step, 10, 0.1))));
        assert!(!alike.is_slow(&of(40, 454, 4.0)), "45 times the tokens, 40 times the time");
        assert!(alike.is_slow(&of(40, 10, 0.5)) && alike.is_slow(&of(40, 454, 14.0)));
        // Rows of 10 to 454 tokens, each step 0.08 s and 2 ms a token: the line predicts each step.
        let mut various = Watch::new(facts());
        let takes = |tokens: u64| 0.08 + 0.002 * (tokens as f64);
        for step in 2..60 {
            let tokens = if step % 12 == 0 { 454 } else { 10 + step % 5 };
            assert!(!various.is_slow(&of(step, tokens, takes(tokens))), "step {step}");
            various.observe(&of(step, tokens, takes(tokens)));
        }
        assert!(various.is_slow(&of(60, 454, 3.2 * takes(454))), "ten times the time of the middle one is explained");
        assert!(various.is_slow(&of(60, 10, 0.5)) && !various.is_slow(&of(60, 454, 2.0 * takes(454))));
    }

    #[test]
    fn padding_that_is_computed_explains_time_and_padding_that_is_left_out_does_not() {
        let padded = |step| StepMetrics { tokens: 100, padding_tokens: Some(900), step_seconds: 4.0, ..line(step) };
        let plain = |step| StepMetrics { tokens: 100, padding_tokens: Some(0), step_seconds: 0.5, ..line(step) };
        let mut watch = Watch::new(facts());
        (2..40).for_each(|step| drop(watch.observe(&plain(step))));
        assert!(!watch.is_slow(&padded(40)));
        watch.facts.leaves_padding_out = true;
        assert!(watch.is_slow(&padded(40)));
    }
}
