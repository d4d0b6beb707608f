//! One `AdamW` update of one parameter (Loshchilov and Hutter, 2019, algorithm 2), as `torch.optim.AdamW` does it.

use burn::tensor::Tensor;

use super::kernels::Place;

pub use super::cpu::AdamW as Update;

/// A parameter with its moments.
#[derive(Clone, Debug)]
pub struct State {
    /// The parameter.
    pub parameter: Tensor<2>,
    /// First moment.
    pub m: Tensor<2>,
    /// Second moment.
    pub v: Tensor<2>,
}

/// The states after one update, each with its gradient, all in `f32` and each of one shape. A `factor` of
/// [`Kernels::grad_factor`](super::kernels::Kernels::grad_factor) is in the place of the update's.
#[must_use]
pub fn adamw(
    place: Place,
    states: Vec<(State, &Tensor<2>)>,
    update: &Update,
    factor: Option<&Tensor<1>>,
) -> Vec<State> {
    place.adamw(states, update, factor)
}

/// [`adamw`] of one state in plain tensor calls.
#[must_use]
pub fn plain_adamw(state: State, grad: &Tensor<2>, update: &Update) -> State {
    let [beta1, beta2] = update.betas;
    #[expect(clippy::cast_precision_loss, reason = "exact below 2^53 steps")]
    let [correction1, correction2] = update.betas.map(|beta| 1.0 - beta.powf(update.step as f64));
    let grad = grad.clone() * update.grad_scale;
    let m = state.m * beta1 + grad.clone() * (1.0 - beta1);
    let v = state.v * beta2 + grad.square() * (1.0 - beta2);
    let denominator = v.clone().sqrt() / correction2.sqrt() + update.eps;
    let decayed = state.parameter * (1.0 - update.learning_rate * update.weight_decay);
    let parameter = decayed - m.clone() / denominator * (update.learning_rate / correction1);
    State { parameter, m, v }
}
