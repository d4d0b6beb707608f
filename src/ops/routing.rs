//! Which tokens go to which experts, and what carries them there and back.

use burn::tensor::Tensor;

use super::kernels::Place;
use super::plain::routing::route_now;
use super::profile::{self, Cost};

pub use super::plain::routing::{ExpertRows, Router, Routing};

/// Sends every token to the experts with the highest scores, `[tokens, experts]`; of equal ones, to the first.
#[must_use]
pub fn route(scores: &Tensor<2>, router: Router<'_>) -> Routing {
    let work = || route_now(scores, router);
    profile::measure("route", || profile::passes(scores, 2), work)
}

/// The rows of `x` that an expert's tokens have, each multiplied by its weight if it is `weighted`.
///
/// # Shapes
/// `x`: `[tokens, width]`. Returns `[tokens of the expert, width]`.
#[must_use]
pub fn gather(place: Place, x: &Tensor<2>, rows: &ExpertRows, weighted: bool) -> Tensor<2> {
    profile::measure("gather", || cost(x, rows, 2), || place.gather(x, rows, weighted))
}

/// Adds the rows of `update` to those of an expert's tokens in `y`, each multiplied by its weight if it is `weighted`.
///
/// # Shapes
/// `y`: `[tokens, width]`, `update`: `[tokens of the expert, width]`.
#[must_use]
pub fn scatter_add(place: Place, y: Tensor<2>, rows: &ExpertRows, update: &Tensor<2>, weighted: bool) -> Tensor<2> {
    profile::measure("scatter", || cost(update, rows, 3), || place.scatter_add(y, rows, update, weighted))
}

fn cost(x: &Tensor<2>, rows: &ExpertRows, num_passes: usize) -> Cost {
    let width = x.dims()[1];
    let bytes = profile::count(num_passes * rows.tokens().count() * width * x.dtype().size());
    Cost { shape: width.to_string(), flops: 0.0, bytes }
}
