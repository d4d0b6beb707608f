//! `AdamW`.

use burn::tensor::Tensor;

use super::{Parameter, Update};
use crate::config::OptimizerConfig;
use crate::ops::adamw::{self, State};
use crate::ops::kernels::Place;

/// First and second moment.
pub(super) const STATES: [&str; 2] = ["exp_avg", "exp_avg_sq"];

pub(super) fn update(
    place: Place,
    config: &OptimizerConfig,
    parameters: Vec<(Parameter, &Tensor<2>)>,
    Update { learning_rate, number, grad_scale }: Update,
) -> Vec<Parameter> {
    let OptimizerConfig { betas, eps, weight_decay, .. } = *config;
    let update = adamw::Update { learning_rate, betas, eps, weight_decay, step: number, grad_scale };
    let states = parameters.into_iter().map(|(Parameter { values, states }, grad)| {
        let Ok([m, v]) = <[_; 2]>::try_from(states) else { unreachable!("AdamW has two states") };
        (State { parameter: values, m, v }, grad)
    });
    let updated = adamw::adamw(place, states.collect(), &update);
    updated.into_iter().map(|State { parameter, m, v }| Parameter { values: parameter, states: vec![m, v] }).collect()
}
