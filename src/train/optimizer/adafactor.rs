//! Adafactor (Shazeer and Stern, 2018), with the learning rate of the schedule, as `Trainer` of transformers sets it.

use burn::tensor::Tensor;

use super::states::{StateForm, numbers};
use super::{Parameter, State, Update};
use crate::config::OptimizerConfig;
use crate::util::stats::as_f64;

/// Added to the squared gradient.
const EPS: f64 = 1e-30;
/// The root mean square of an update is at most this.
const CLIP_THRESHOLD: f64 = 1.0;
/// The moment's decay is one less this power of the number of the update.
const DECAY_RATE: f64 = -0.8;

/// Means of the second moment over rows and columns; those of a vector are whole.
pub(super) fn states([rows, columns]: [usize; 2]) -> Vec<StateForm> {
    match rows {
        1 => vec![StateForm::zeros("exp_avg_sq", [rows, columns])],
        _ => vec![StateForm::zeros("exp_avg_sq_row", [rows, 1]), StateForm::zeros("exp_avg_sq_col", [1, columns])],
    }
}

pub(super) fn update(config: &OptimizerConfig, parameter: Parameter, grad: &Tensor<2>, update: Update) -> Parameter {
    let Parameter { values, states } = parameter;
    let grad = grad.clone() * update.grad_scale;
    let decay = 1.0 - as_f64(update.number).powf(DECAY_RATE);
    let squares = grad.clone().square() + EPS;
    let next = |moment: Tensor<2>, squares: Tensor<2>| moment * decay + squares * (1.0 - decay);
    let (inverse_root, states) = match states.len() {
        1 => {
            let [moment] = numbers(states);
            let moment = next(moment, squares);
            (moment.clone().sqrt().recip(), vec![moment])
        }
        _ => {
            let [rows, columns] = numbers(states);
            let rows = next(rows, squares.clone().mean_dim(1));
            let columns = next(columns, squares.mean_dim(0));
            let of_rows = (rows.clone() / rows.clone().mean_dim(0)).sqrt().recip();
            (of_rows * columns.clone().sqrt().recip(), vec![rows, columns])
        }
    };
    let step = inverse_root * grad;
    let count = as_f64(step.shape().num_elements());
    let root_mean_square = (step.clone().square().sum() / count).sqrt();
    let clip = (root_mean_square / CLIP_THRESHOLD).clamp_min(1.0).recip() * update.learning_rate;
    let decayed = values * (1.0 - update.learning_rate * config.weight_decay);
    let values = decayed - step * clip.unsqueeze_dim::<2>(0);
    Parameter { values, states: states.into_iter().map(State::Numbers).collect() }
}
