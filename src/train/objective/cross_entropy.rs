//! The mean cross-entropy of all target tokens of a step.

use super::{Objective, Rows, Weighed};
use crate::measure::figures::ObjectiveFigures;
use crate::ops::cross_entropy::TokenWeights;
use crate::util::stats::as_f64;

/// Every target token counts and weighs one.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy;

impl Objective for CrossEntropy {
    fn needs_log_probabilities(&self) -> bool {
        false
    }

    fn weigh(&self, rows: &Rows<'_>) -> Weighed {
        let (count, weights) = (as_f64(rows.num_targets()), TokenWeights::Same(1.0));
        Weighed { loss: None, count, weights, figures: ObjectiveFigures::default() }
    }
}
