//! What training minimises: from the log-probabilities of a micro-batch's target tokens to a loss, a count and a weight for
//! every token. The gradient of any such loss is that of the tokens' cross-entropies, each times its weight.

mod contrastive;
mod cross_entropy;
mod dpo;
mod grpo;
mod kto;
mod odds_ratio;
mod pairs;
mod reward;

use std::fmt::Debug;
use std::ops::Range;

pub use cross_entropy::CrossEntropy;

use crate::config::{ObjectiveConfig, ObjectiveName};
use crate::data::batch::Answer;
use crate::measure::figures::ObjectiveFigures;

/// The rows of a micro-batch, as an objective sees them.
#[derive(Clone, Copy, Debug, Default)]
pub struct LossRows<'a> {
    /// The target tokens of each document, as a range of all of the micro-batch.
    pub targets: &'a [Range<usize>],
    /// What preferences know of each document; empty for other rows.
    pub answers: &'a [Answer],
    /// Log-probability of every target token in nats, or its score; empty where the objective does not need them.
    pub log_probabilities: &'a [f32],
    /// The same of the reference; empty where the objective needs none, or `reference_answers` are known.
    pub reference: &'a [f32],
    /// Log-probability of every document's target tokens by the reference; empty unless the objective needs no more of it.
    pub reference_answers: &'a [f64],
    /// The same by the model that wrote the tokens; empty where it is this one.
    pub written: &'a [f32],
    /// What is needed of the logits of every target; empty where nothing is.
    pub of_logits: &'a [f32],
    /// By how much the mean log-probability of the answers to other prompts is above the reference's, in nats.
    pub divergence: f64,
}

impl LossRows<'_> {
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
    /// Derivative of the loss with respect to every target token's cross-entropy; `None` where all are 1.
    pub weights: Option<Vec<f32>>,
    /// What else is reported.
    pub figures: ObjectiveFigures,
}

/// What an objective needs of heads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needs {
    /// The log-probability of every target token, which is then read from the device.
    pub log_probabilities: bool,
    /// Those of the reference: the model as it was before training.
    pub reference: Option<OfReference>,
    /// The divergence from the reference.
    pub divergence: bool,
    /// A number of the logits of every target.
    pub of_logits: Option<OfLogits>,
    /// What logits are divided by before their softmax; `None` for 1.
    pub temperature: Option<f64>,
}

/// What is needed of the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfReference {
    /// The log-probability of every target token.
    Tokens,
    /// That of each document alone, and documents come again.
    Documents,
}

/// A number of the logits of all tokens at a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfLogits {
    /// Logarithm of the sum of the squared probabilities.
    Squares,
    /// Entropy in nats.
    Entropy,
}

/// A loss.
pub trait Objective: Debug + Send + Sync {
    /// What its weights depend on.
    fn needs(&self) -> Needs {
        Needs { log_probabilities: true, ..Needs::default() }
    }

    /// Weighs the target tokens of a micro-batch.
    fn weigh(&self, rows: &LossRows<'_>) -> Weighed;
}

/// What a recipe minimises.
#[must_use]
pub fn objective(config: &ObjectiveConfig) -> Box<dyn Objective> {
    match config.name {
        ObjectiveName::CrossEntropy => Box::new(CrossEntropy),
        ObjectiveName::Dpo => Box::new(dpo::Dpo::new(config)),
        ObjectiveName::Orpo => Box::new(odds_ratio::OddsRatio { beta: config.beta() }),
        ObjectiveName::Cpo | ObjectiveName::Simpo => Box::new(contrastive::Contrastive::new(config)),
        ObjectiveName::Reward => Box::new(reward::Reward { centering: config.center_rewards_coefficient }),
        ObjectiveName::Kto => Box::new(kto::Kto::new(config)),
        ObjectiveName::Grpo => Box::new(grpo::Grpo::new(config)),
    }
}

/// What a recipe's objective needs.
#[must_use]
pub fn needs(config: &ObjectiveConfig) -> Needs {
    objective(config).needs()
}
