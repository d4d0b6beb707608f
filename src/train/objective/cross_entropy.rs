//! The mean cross-entropy of all target tokens of a step.

use super::{LossRows, Needs, Objective, Weighed};
use crate::measure::figures::ObjectiveFigures;
use crate::util::stats::as_f64;

/// Every target token counts and weighs one.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy;

impl Objective for CrossEntropy {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn weigh(&self, rows: &LossRows<'_>) -> Weighed {
        let count = as_f64(rows.num_targets());
        Weighed { loss: None, count, weights: None, figures: ObjectiveFigures::default() }
    }
}
