//! Muon (Jordan et al., 2024), as `torch.optim.Muon` does it, but for the orthogonalisation, which is in `f32`, and of each expert's
//! matrix by itself.

use burn::tensor::Tensor;

use super::states::{StateForm, numbers};
use super::{Parameter, State, Update};
use crate::config::OptimizerConfig;
use crate::ops::product::device_product;
use crate::util::stats::as_f64;

/// Momentum by default.
pub(super) const MOMENTUM: f64 = 0.95;
/// Steps of the iteration of Newton and Schulz, and its coefficients.
const STEPS: usize = 5;
const COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];
/// Least norm that a matrix is divided by.
const EPS: f64 = 1e-7;

/// The momentum.
pub(super) fn states(shape: [usize; 2]) -> Vec<StateForm> {
    vec![StateForm::zeros("momentum_buffer", shape)]
}

pub(super) fn update(config: &OptimizerConfig, parameter: Parameter, grad: &Tensor<2>, update: Update) -> Parameter {
    let momentum = config.momentum.unwrap_or(MOMENTUM);
    let grad = grad.clone() * update.grad_scale;
    let [buffer] = numbers(parameter.states);
    let buffer = buffer * momentum + grad.clone() * (1.0 - momentum);
    let direction = grad * (1.0 - momentum) + buffer.clone() * momentum;
    let [all, columns] = direction.dims();
    let rows = all / update.num_stacked;
    let direction = orthogonal(direction.reshape([update.num_stacked, rows, columns])).reshape([all, columns]);
    let rate = update.learning_rate * (as_f64(rows) / as_f64(columns)).max(1.0).sqrt();
    let decayed = parameter.values * (1.0 - update.learning_rate * config.weight_decay);
    Parameter { values: decayed - direction * rate, states: vec![State::Numbers(buffer)] }
}

/// Matrices with the singular vectors of these, whose singular values are near 1.
fn orthogonal(matrices: Tensor<3>) -> Tensor<3> {
    let [_, rows, columns] = matrices.dims();
    let mut x = if rows > columns { matrices.transpose() } else { matrices };
    let norms = x.clone().square().sum_dim(2).sum_dim(1).sqrt().clamp_min(EPS);
    x = x / norms;
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..STEPS {
        let gram = device_product(x.clone(), x.clone().transpose());
        let polynomial = gram.clone() * b + device_product(gram.clone(), gram) * c;
        x = x.clone() * a + device_product(polynomial, x);
    }
    if rows > columns { x.transpose() } else { x }
}
