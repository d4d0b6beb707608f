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
    parameter: Parameter,
    grad: &Tensor<2>,
    Update { learning_rate, number, grad_scale }: Update,
) -> Parameter {
    let OptimizerConfig { betas, eps, weight_decay, .. } = *config;
    let update = adamw::Update { learning_rate, betas, eps, weight_decay, step: number, grad_scale };
    let Ok([m, v]) = <[_; 2]>::try_from(parameter.states) else { unreachable!("AdamW has two states") };
    let State { parameter, m, v } = adamw::adamw(place, State { parameter: parameter.values, m, v }, grad, &update);
    Parameter { values: parameter, states: vec![m, v] }
}
