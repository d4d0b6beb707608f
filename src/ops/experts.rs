//! The experts of a mixture together: rows sorted by expert, and one product of them all, each with the matrix of its expert.
//!
//! Where a place has no [`Experts`], they are computed one by one, with [`gather`](super::routing::gather) and
//! [`scatter_add`](super::routing::scatter_add).

use std::fmt::Debug;

use burn::tensor::{Int, Tensor};

use super::low_rank::{Lora, LowRank};
use super::plain::linear::Weight;
use super::plain::routing::Router;
use super::profile::{self, Cost};
use crate::spec::Choice;

/// Most bytes of quantised matrices that are decoded at a time.
pub const DECODED_BYTES: usize = 128 << 20;

/// The rows of all experts, sorted by expert, those of an expert in the order of their tokens.
#[derive(Clone, Debug)]
pub struct Sorted {
    /// Experts of a token.
    pub per_token: usize,
    /// Probabilities of the experts, `[tokens, experts]` in `f32`.
    pub probabilities: Tensor<2>,
    /// Whether they are over a sum of several.
    pub is_over_sum: bool,
    /// What the gradient of the scores is multiplied by, likewise: the slope of a sigmoid, over the sigmoid.
    pub slopes: Option<Tensor<2>>,
    /// Of every slot, `token * per_token + j` for the `j`-th expert of a token, its expert.
    pub chosen: Tensor<1, Int>,
    /// Weights of slots, in `f32`.
    pub weights: Tensor<1>,
    /// The first row of every expert, and at the end the number of rows: `[experts + 1]`.
    pub first: Tensor<1, Int>,
    /// Of every row its slot.
    pub slots: Tensor<1, Int>,
    /// Of every slot its row.
    pub places: Tensor<1, Int>,
}

impl Sorted {
    /// Number of rows.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.slots.dims()[0]
    }

    /// Number of tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.probabilities.dims()[0]
    }
}

/// [`Experts::route`], measured.
#[must_use]
pub fn route(experts: &dyn Experts, scores: &Tensor<2>, router: Router<'_>) -> Sorted {
    let work = || experts.route(scores, router);
    profile::measure("route", || profile::passes(scores, 2), work)
}

/// [`Experts::forward`], measured.
#[must_use]
pub fn forward(experts: &dyn Experts, x: &Tensor<2>, weights: &[Vec<&Weight>], sorted: &Sorted) -> Vec<Tensor<2>> {
    profile::measure("experts", || cost(weights, sorted), || experts.forward(x, weights, sorted))
}

/// [`Experts::backward`], measured.
#[must_use]
pub fn backward(experts: &dyn Experts, dys: &[Tensor<2>], weights: &[Vec<&Weight>], sorted: &Sorted) -> Tensor<2> {
    profile::measure("experts_backward", || cost(weights, sorted), || experts.backward(dys, weights, sorted))
}

/// Of experts that have as many rows each.
fn cost(weights: &[Vec<&Weight>], sorted: &Sorted) -> Cost {
    let numbers: usize = weights.iter().flatten().map(|weight| weight.dims().iter().product::<usize>()).sum();
    Cost {
        shape: format!("{} experts", weights.len()),
        flops: profile::count(2 * sorted.num_rows() * numbers / weights.len().max(1)),
        bytes: weights.iter().flatten().map(|weight| weight.values.num_bytes()).sum(),
    }
}

/// Rows of experts on a device, in the type of its activations. Weights are given by expert, of each layer one.
pub trait Experts: Debug + Send + Sync {
    /// Whether it multiplies activations of this type, of so many `slots`, with the matrices of these layers' experts, of which a
    /// router chooses so.
    fn takes(&self, x: &Tensor<2>, slots: usize, choice: Choice, weights: &[Vec<&Weight>]) -> bool;

    /// Whether it computes low-rank updates of such a rank.
    fn takes_rank(&self, rank: usize) -> bool;

    /// Sends every token to the experts with the highest scores, `[tokens, experts]`; of equal ones, to the first.
    fn route(&self, scores: &Tensor<2>, router: Router<'_>) -> Sorted;

    /// The rows of `x`, `[tokens, width]`, that the experts take, each multiplied by its weight if it is `weighted`. Returns
    /// `[num_rows, width]`.
    fn gather(&self, x: &Tensor<2>, sorted: &Sorted, weighted: bool) -> Tensor<2>;

    /// Adds the rows of `y`, `[num_rows, width]`, to those of their tokens in `sum`, `[tokens, width]`, likewise.
    fn combine(&self, sum: Tensor<2>, y: &Tensor<2>, sorted: &Sorted, weighted: bool) -> Tensor<2>;

    /// The outputs of layers of one input, each row by its expert: `[num_rows, out_features]` for each of the layers.
    fn forward(&self, x: &Tensor<2>, weights: &[Vec<&Weight>], sorted: &Sorted) -> Vec<Tensor<2>>;

    /// The gradient of the input from those of the layers' outputs.
    fn backward(&self, dys: &[Tensor<2>], weights: &[Vec<&Weight>], sorted: &Sorted) -> Tensor<2>;

    /// Adds the low-rank update of every expert to its rows of `y`, an output of [`forward`](Self::forward). Dropout is off.
    ///
    /// # Shapes
    /// A: `[experts r, in_features]`, B: `[experts out_features, r]`, expert below expert.
    fn add_low_rank(&self, y: Tensor<2>, x: &Tensor<2>, lora: Lora<&Tensor<2>>, sorted: &Sorted) -> Tensor<2>;

    /// The gradient of the input with what comes through the update added to `dx`, and the gradients of A and B in `f32`, zeros of
    /// experts without rows.
    fn low_rank_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        lora: Lora<&Tensor<2>>,
        sorted: &Sorted,
        dx: Tensor<2>,
    ) -> (Tensor<2>, LowRank<Tensor<2>>);

    /// The scalar products of the rows of `dy` and the outputs of layers that are linear in `h`, from the products of `h` and its
    /// gradient `dh`, and those of `dy` with the layers' biases. Returns `[num_rows]` in `f32`.
    fn products(
        &self,
        h: &Tensor<2>,
        dh: &Tensor<2>,
        dy: &Tensor<2>,
        weights: &[Vec<&Weight>],
        sorted: &Sorted,
    ) -> Tensor<1>;

    /// The gradient of scores, `[tokens, experts]` in `f32`, from the products of every row's weight and its gradient,
    /// `[num_rows]`.
    fn scores_backward(&self, products: Tensor<1>, sorted: &Sorted) -> Tensor<2>;
}
