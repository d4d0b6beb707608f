//! Muon (Jordan et al., 2024), as `torch.optim.Muon` does it, but for the orthogonalisation, which is in `f32`.

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
    let direction = orthogonal(grad * (1.0 - momentum) + buffer.clone() * momentum);
    let [rows, columns] = direction.dims();
    let rate = update.learning_rate * (as_f64(rows) / as_f64(columns)).max(1.0).sqrt();
    let decayed = parameter.values * (1.0 - update.learning_rate * config.weight_decay);
    Parameter { values: decayed - direction * rate, states: vec![State::Numbers(buffer)] }
}

/// A matrix with the singular vectors of this one, whose singular values are near 1.
fn orthogonal(matrix: Tensor<2>) -> Tensor<2> {
    let [rows, columns] = matrix.dims();
    let mut x = if rows > columns { matrix.transpose() } else { matrix };
    let norm = x.clone().square().sum().sqrt().clamp_min(EPS);
    x = x / norm.unsqueeze_dim::<2>(0);
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..STEPS {
        let gram = device_product(x.clone(), x.clone().transpose());
        let polynomial = gram.clone() * b + device_product(gram.clone(), gram) * c;
        x = x.clone() * a + device_product(polynomial, x);
    }
    if rows > columns { x.transpose() } else { x }
}
