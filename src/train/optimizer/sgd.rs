//! Stochastic gradient descent, as `torch.optim.SGD` does it: weight decay is added to the gradient.

use burn::tensor::Tensor;

use super::states::{StateForm, numbers};
use super::{Parameter, State, Update};
use crate::config::OptimizerConfig;

/// The momentum, if there is any.
pub(super) fn states(config: &OptimizerConfig, shape: [usize; 2]) -> Vec<StateForm> {
    config.momentum().map(|_| StateForm::zeros("momentum_buffer", shape)).into_iter().collect()
}

pub(super) fn update(config: &OptimizerConfig, parameter: Parameter, grad: &Tensor<2>, update: Update) -> Parameter {
    let Parameter { values, states } = parameter;
    let mut step = grad.clone() * update.grad_scale;
    if config.weight_decay > 0.0 {
        step = step + values.clone() * config.weight_decay;
    }
    if let Some(momentum) = config.momentum() {
        let [buffer] = numbers(states);
        step = buffer * momentum + step;
    }
    let states = config.momentum().map(|_| State::Numbers(step.clone())).into_iter().collect();
    Parameter { values: values - step * update.learning_rate, states }
}
