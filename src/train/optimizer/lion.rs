//! Lion (Chen et al., 2023, algorithm 2).

use burn::tensor::Tensor;

use super::states::{StateForm, numbers};
use super::{Parameter, State, Update};
use crate::config::OptimizerConfig;

/// The momentum.
pub(super) fn states(shape: [usize; 2]) -> Vec<StateForm> {
    vec![StateForm::zeros("exp_avg", shape)]
}

pub(super) fn update(config: &OptimizerConfig, parameter: Parameter, grad: &Tensor<2>, update: Update) -> Parameter {
    let [beta1, beta2] = config.betas;
    let grad = grad.clone() * update.grad_scale;
    let [momentum] = numbers(parameter.states);
    let direction = (momentum.clone() * beta1 + grad.clone() * (1.0 - beta1)).sign();
    let decayed = parameter.values * (1.0 - update.learning_rate * config.weight_decay);
    let momentum = momentum * beta2 + grad * (1.0 - beta2);
    Parameter { values: decayed - direction * update.learning_rate, states: vec![State::Numbers(momentum)] }
}
