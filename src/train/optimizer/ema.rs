//! Exponential moving averages of parameters, as `torch.optim.swa_utils.AveragedModel` makes them with `get_ema_multi_avg_fn`.

use burn::tensor::Tensor;

use super::State;
use super::states::{StateForm, numbers};

/// The average.
pub(super) fn state(shape: [usize; 2]) -> StateForm {
    StateForm::parameter("ema", shape)
}

/// The average after the update of this number, which starts with the first.
pub(super) fn next(decay: f64, average: State, values: &Tensor<2>, number: u64) -> State {
    let [average] = numbers(vec![average]);
    State::Numbers(match number {
        1 => values.clone(),
        _ => average.clone() + (values.clone() - average) * (1.0 - decay),
    })
}
