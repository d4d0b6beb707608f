//! What a step came to.

use serde::Serialize;

use crate::measure::figures::ObjectiveFigures;
use crate::train::loss::LossSum;

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss of what the step counts; of target tokens in nats.
    pub loss: f64,
    /// Global norm of the gradient of the mean loss, before clipping.
    pub grad_norm: f64,
    /// What its sums were divided by.
    pub count: f64,
    /// Number of tokens that carried loss.
    pub target_tokens: u64,
    /// What else the objective reports.
    pub figures: ObjectiveFigures,
    /// Why there was no update, if it was skipped.
    pub skipped: Option<SkipReason>,
}

impl StepOutcome {
    /// The result of a step of this loss, with the sum of the squares of its gradient.
    pub(super) fn new(loss: &LossSum, squares: f64) -> Self {
        let LossSum { sum, count, target_tokens, figures } = *loss;
        if target_tokens == 0 {
            let skipped = Some(SkipReason::NoTargetTokens);
            return Self { loss: 0.0, grad_norm: 0.0, count, target_tokens, figures, skipped };
        }
        let (loss, grad_norm) = (sum / count, squares.sqrt() / count);
        let skipped = match (loss.is_finite(), grad_norm.is_finite()) {
            (false, _) => Some(SkipReason::NonFiniteLoss),
            (_, false) => Some(SkipReason::NonFiniteGradient),
            _ if grad_norm <= 0.0 && has_equal_rewards(&figures) => Some(SkipReason::EqualRewards),
            _ => None,
        };
        Self { loss, grad_norm, count, target_tokens, figures, skipped }
    }
}

/// Whether all answers to each prompt have the same reward.
pub(super) fn has_equal_rewards(figures: &ObjectiveFigures) -> bool {
    figures.frac_reward_zero_std.value() == Some(1.0)
}

/// Why a step made no update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The loss was not a finite number.
    NonFiniteLoss,
    /// The gradient was not finite. In `f16` the loss scale was too high, and has been halved.
    NonFiniteGradient,
    /// No token carried loss.
    NoTargetTokens,
    /// All answers to each prompt had the same reward.
    EqualRewards,
}

impl SkipReason {
    /// The reason as text for the user.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::NonFiniteLoss => "no update, its loss is not a finite number",
            Self::NonFiniteGradient => "no update, its gradient is not finite",
            Self::NoTargetTokens => "no update, none of its tokens carries loss",
            Self::EqualRewards => {
                "no update, all answers to each of its prompts have the same reward\n  hint: other prompts, a larger \
                 `num_generations`, or a reward that some answers get in part"
            }
        }
    }
}
