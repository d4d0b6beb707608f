//! Schedule-free `AdamW` (Defazio et al., 2024), as `AdamWScheduleFree` does it: the parameters are trained at y, between z,
//! which takes the steps, and x, the average that is evaluated and written.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::states::{StateForm, numbers};
use super::{Parameter, State, Update};
use crate::config::OptimizerConfig;
use crate::util::stats::as_f64;

/// z and the second moment.
pub(super) fn states(shape: [usize; 2]) -> Vec<StateForm> {
    vec![StateForm::parameter("z", shape), StateForm::zeros("exp_avg_sq", shape)]
}

/// What the weight of a step in the average depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepWeights {
    /// The highest learning rate so far.
    highest: f64,
    /// Sum of the weights of all steps so far.
    sum: f64,
}

impl StepWeights {
    /// Counts a step; returns its share of the average.
    pub(super) fn add(&mut self, learning_rate: f64) -> f64 {
        self.highest = self.highest.max(learning_rate);
        let weight = self.highest.powi(2);
        self.sum += weight;
        if self.sum > 0.0 { weight / self.sum } else { 0.0 }
    }
}

pub(super) fn update(config: &OptimizerConfig, parameter: Parameter, grad: &Tensor<2>, update: Update) -> Parameter {
    let OptimizerConfig { betas: [beta1, beta2], eps, weight_decay, .. } = *config;
    let (rate, share, y) = (update.learning_rate, update.share, parameter.values);
    let grad = grad.clone() * update.grad_scale;
    let [z, moment] = numbers(parameter.states);
    let moment = moment * beta2 + grad.clone().square() * (1.0 - beta2);
    let correction = 1.0 - beta2.powf(as_f64(update.number));
    let mut step = grad / ((moment.clone() / correction).sqrt() + eps);
    if weight_decay > 0.0 {
        step = step + y.clone() * weight_decay;
    }
    let y = y * (1.0 - share) + z.clone() * share + step.clone() * (rate * (beta1 * (1.0 - share) - 1.0));
    Parameter { values: y, states: [z - step * rate, moment].map(State::Numbers).into() }
}

/// x of a y.
pub(super) fn average(config: &OptimizerConfig, y: &Tensor<2>, states: &[State]) -> Tensor<2> {
    let [beta1, _] = config.betas;
    match states.first() {
        Some(State::Numbers(z)) => y.clone() + (z.clone() - y.clone()) * (1.0 - 1.0 / beta1),
        _ => y.clone(),
    }
}
