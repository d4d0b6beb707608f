//! What training minimises: from the log-probabilities of a micro-batch's target tokens to a loss, a count and a weight for
//! every token. The gradient of any such loss is that of the tokens' cross-entropies, each times its weight.

mod cross_entropy;

use std::fmt::Debug;
use std::ops::Range;

pub use cross_entropy::CrossEntropy;

use crate::config::TrainConfig;
use crate::ops::cross_entropy::TokenWeights;

/// The rows of a micro-batch, as an objective sees them.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The target tokens of each row, as a range of all of the micro-batch.
    pub targets: &'a [Range<usize>],
    /// Log-probability of every target token in nats; empty where the objective does not need them.
    pub log_probabilities: &'a [f32],
}

impl Rows<'_> {
    /// Number of target tokens.
    #[must_use]
    pub fn num_targets(&self) -> usize {
        self.targets.iter().map(ExactSizeIterator::len).sum()
    }
}

/// What an objective makes of a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Weighed {
    /// The loss, summed over what is counted; `None`: the sum of the target tokens' cross-entropies.
    pub loss: Option<f64>,
    /// What the sums of a step are divided by, this micro-batch's part of it.
    pub count: f64,
    /// Derivative of the loss with respect to every target token's cross-entropy.
    pub weights: TokenWeights,
}

/// A loss.
pub trait Objective: Debug + Send + Sync {
    /// Whether the weights depend on the log-probabilities: then the head's products run twice.
    fn needs_log_probabilities(&self) -> bool;

    /// Weighs the target tokens of a micro-batch.
    fn weigh(&self, rows: &Rows<'_>) -> Weighed;
}

impl TrainConfig {
    /// What the recipe minimises.
    #[must_use]
    pub fn objective(&self) -> Box<dyn Objective> {
        Box::new(CrossEntropy)
    }
}
