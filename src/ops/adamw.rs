//! One `AdamW` update of one parameter (Loshchilov and Hutter, 2019, algorithm 2), as `torch.optim.AdamW` does it.

use burn::tensor::Tensor;

use super::kernels::Place;

pub use super::plain::updates::{AdamState, Update};

/// The states after one update, each with its gradient, all in `f32` and each of one shape. A `factor` of
/// [`Updates::grad_factor`](super::kernels::Updates::grad_factor) is in the place of the update's.
#[must_use]
pub fn adamw(
    place: Place,
    states: Vec<(AdamState, &Tensor<2>)>,
    update: &Update,
    factor: Option<&Tensor<1>>,
) -> Vec<AdamState> {
    place.adamw(states, update, factor)
}
