//! `AdamW`.

use burn::tensor::Tensor;

use super::states::{StateForm, numbers};
use super::{Parameter, State, Update};
use crate::config::OptimizerConfig;
use crate::ops::adamw;
use crate::ops::kernels::Place;

/// First and second moment.
pub(super) fn states(shape: [usize; 2]) -> Vec<StateForm> {
    ["exp_avg", "exp_avg_sq"].map(|name| StateForm::zeros(name, shape)).into()
}

/// The update in the form that the kernels take.
pub(super) fn of_kernels(config: &OptimizerConfig, update: Update) -> adamw::Update {
    let OptimizerConfig { betas, eps, weight_decay, .. } = *config;
    let Update { learning_rate, number, grad_scale, .. } = update;
    adamw::Update { learning_rate, betas, eps, weight_decay, step: number, grad_scale }
}

pub(super) fn update(
    place: Place,
    config: &OptimizerConfig,
    parameters: Vec<(Parameter, &Tensor<2>)>,
    update: Update,
    factor: Option<&Tensor<1>>,
) -> Vec<Parameter> {
    let states = parameters.into_iter().map(|(Parameter { values, states }, grad)| {
        let [m, v] = numbers(states);
        (adamw::AdamState { parameter: values, m, v }, grad)
    });
    let updated = adamw::adamw(place, states.collect(), &of_kernels(config, update), factor);
    let parameter = |adamw::AdamState { parameter, m, v }| Parameter {
        values: parameter,
        states: [m, v].map(State::Numbers).into(),
    };
    updated.into_iter().map(parameter).collect()
}
