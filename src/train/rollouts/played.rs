//! What an episode has come to.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::measure::figures::{Mean, ObjectiveFigures, RolloutEpisode};
use crate::util::stats::as_f64;

/// Why an episode is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Ended {
    /// The environment or the model has ended it.
    #[default]
    Done,
    /// It has as many tokens as it may have.
    Length,
    /// It has as many answers.
    Turns,
    /// The environment has failed.
    Failed,
}

impl Ended {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Length => "length",
            Self::Turns => "turns",
            Self::Failed => "failed",
        }
    }
}

/// What an episode has come to.
#[derive(Clone, Debug, Default)]
pub(super) struct Played {
    pub(super) prompt_ids: Vec<u32>,
    /// The prompt as messages.
    pub(super) prompt: Vec<Value>,
    /// The tokens behind it, and which of them the model has drawn.
    pub(super) ids: Vec<u32>,
    pub(super) is_drawn: Vec<bool>,
    /// Answers and replies.
    pub(super) messages: Vec<Value>,
    /// The last answer's text.
    pub(super) answer: String,
    pub(super) turns: usize,
    pub(super) calls: usize,
    pub(super) failed_calls: usize,
    pub(super) reward: Option<f64>,
    pub(super) metrics: BTreeMap<String, f64>,
    pub(super) entropy: Mean,
    pub(super) ended: Ended,
    /// How often it has begun anew as its environment had failed.
    pub(super) retries: usize,
    /// Why it has failed for good, if it has.
    pub(super) failure: Option<String>,
}

impl Played {
    /// Adds to the figures of a step.
    pub(super) fn report(&self, figures: &mut ObjectiveFigures) {
        let is_failed = f64::from(u8::from(self.failure.is_some()));
        figures.failed_episodes += Mean::of(is_failed);
        figures.episode_retries += Mean::of(as_f64(self.retries));
        if self.failure.is_none() {
            figures.turns += Mean::of(as_f64(self.turns));
            figures.tool_calls += Mean::of(as_f64(self.calls));
            figures.tool_failures += Mean { sum: as_f64(self.failed_calls), count: as_f64(self.calls) };
        }
    }

    /// What is recorded of it.
    pub(super) fn recorded(&self) -> RolloutEpisode {
        RolloutEpisode {
            turns: self.turns,
            messages: self.messages.clone(),
            tool_calls: self.calls,
            tool_failures: self.failed_calls,
            retries: self.retries,
            failure: self.failure.clone(),
            metrics: self.metrics.clone(),
        }
    }
}
