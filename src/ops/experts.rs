//! The experts of a mixture together: rows sorted by expert, and a product of each group of them with its own matrix.
//!
//! Where a place has no [`Experts`], they are computed one by one, with [`gather`](super::routing::gather) and
//! [`scatter_add`](super::routing::scatter_add).

use std::fmt::Debug;
use std::ops::Range;

use burn::tensor::{DType, Int, Tensor};

use super::layout::indices;
use super::linear::Weight;
use super::profile::{self, Cost};

/// Groups of rows are filled up to a multiple of this: the fewer sizes there are, the fewer products are to be chosen.
pub const GROUP_MULTIPLE: usize = 16;

/// Experts, each with its rows.
type Groups = Vec<(usize, Range<usize>)>;

/// The rows of all experts, sorted by expert.
#[derive(Clone, Debug)]
pub struct Sorted {
    /// The experts that have tokens, each with its rows.
    pub groups: Groups,
    /// Number of rows.
    pub num_rows: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Of every row its slot, `token * per_token + j` for the `j`-th expert of a token; negative where a group is filled up.
    pub slots: Tensor<1, Int>,
    /// Of every slot its row.
    pub places: Tensor<1, Int>,
    /// Of every slot its expert.
    pub chosen: Tensor<1, Int>,
    /// Weights of slots, in `f32`.
    pub weights: Tensor<1>,
}

impl Sorted {
    /// `chosen`: the expert of every slot; `weights`: of tokens and experts, `[tokens, experts]`.
    pub(super) fn new(chosen: &[usize], per_token: usize, weights: Tensor<2>) -> Self {
        let ([num_tokens, num_experts], device) = (weights.dims(), weights.device());
        let (groups, tables) = sorted(chosen, num_experts);
        let (num_rows, [slots, places]) = (tables[0].len(), tables.map(|table| indices(table, &device)));
        let of_slots = chosen.iter().enumerate().map(|(slot, expert)| slot / per_token * num_experts + expert);
        let weights = weights.reshape([num_tokens * num_experts]).select(0, indices(of_slots, &device));
        Self { groups, num_rows, per_token, slots, places, chosen: indices(chosen.iter().copied(), &device), weights }
    }
}

/// Groups, slots of rows and rows of slots.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "far below 2^31")]
fn sorted(chosen: &[usize], num_experts: usize) -> (Groups, [Vec<i32>; 2]) {
    let mut counts = vec![0_usize; num_experts];
    chosen.iter().for_each(|expert| counts[*expert] += 1);
    let (mut groups, mut next, mut end) = (Vec::new(), vec![0; num_experts], 0);
    for (expert, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let rows = end..end + count.next_multiple_of(GROUP_MULTIPLE);
        (next[expert], end) = (rows.start, rows.end);
        groups.push((expert, rows));
    }
    let (mut slots, mut places) = (vec![-1; end], Vec::with_capacity(chosen.len()));
    for (slot, expert) in chosen.iter().enumerate() {
        slots[next[*expert]] = slot as i32;
        places.push(next[*expert] as i32);
        next[*expert] += 1;
    }
    (groups, [slots, places])
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

fn cost(weights: &[Vec<&Weight>], sorted: &Sorted) -> Cost {
    let numbers =
        |weights: &[&Weight]| weights.iter().map(|weight| weight.dims().iter().product::<usize>()).sum::<usize>();
    let flops = |((_, rows), weights): (&(usize, Range<usize>), &Vec<&Weight>)| 2 * rows.len() * numbers(weights);
    Cost {
        shape: format!("{} experts", weights.len()),
        flops: profile::count(sorted.groups.iter().zip(weights).map(flops).sum()),
        bytes: weights.iter().flatten().map(|weight| weight.values.num_bytes()).sum(),
    }
}

/// Rows of experts on a device, in the type of its activations. Rows that fill up a group hold anything finite.
pub trait Experts: Debug + Send + Sync {
    /// Whether it multiplies activations of this type with this matrix.
    fn takes(&self, dtype: DType, weight: &Weight) -> bool;

    /// The rows of `x`, `[tokens, width]`, that the experts take, each multiplied by its weight if it is `weighted`. Returns
    /// `[num_rows, width]`.
    fn gather(&self, x: &Tensor<2>, sorted: &Sorted, weighted: bool) -> Tensor<2>;

    /// Adds the rows of `y`, `[num_rows, width]`, to those of their tokens in `sum`, `[tokens, width]`, likewise.
    fn combine(&self, sum: Tensor<2>, y: &Tensor<2>, sorted: &Sorted, weighted: bool) -> Tensor<2>;

    /// The outputs of layers of one input, each group by the weights of its expert.
    ///
    /// `weights`: by group, of each layer one. Returns `[num_rows, out_features]` for each of the layers.
    fn forward(&self, x: &Tensor<2>, weights: &[Vec<&Weight>], sorted: &Sorted) -> Vec<Tensor<2>>;

    /// The gradient of the input from those of the layers' outputs.
    fn backward(&self, dys: &[Tensor<2>], weights: &[Vec<&Weight>], sorted: &Sorted) -> Tensor<2>;

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

    /// The gradient of scores, `[tokens, experts]` in `f32`, whose softmax is `probabilities`, from the products of every row's
    /// weight and its gradient, `[num_rows]`.
    fn scores_backward(&self, probabilities: &Tensor<2>, products: Tensor<1>, sorted: &Sorted) -> Tensor<2>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_expert_after_expert_in_the_order_of_their_tokens() {
        // Three tokens of two experts each; the second expert of four has none.
        let (groups, [slots, places]) = sorted(&[3, 0, 0, 2, 3, 0], 4);
        assert_eq!(groups, [(0, 0..16), (2, 16..32), (3, 32..48)]);
        assert_eq!(slots[..3], [1, 2, 5]);
        assert_eq!((slots[16], slots[32..34].to_vec()), (3, vec![0, 4]));
        assert_eq!(slots.iter().filter(|slot| **slot < 0).count(), 48 - 6);
        assert_eq!(places, [32, 0, 1, 16, 33, 2]);
    }
}
