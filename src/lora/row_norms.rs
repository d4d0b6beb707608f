//! Norms of the rows of a weight, with and without a low-rank update.

use std::sync::OnceLock;

use burn::tensor::{DType, Tensor};

use crate::ops::kernels::Place;
use crate::ops::linear::{Weight, linear};
use crate::ops::low_rank::{Lora, LowRank};

/// Numbers of a weight that are squared at a time.
const CHUNK_LEN: usize = 1 << 20;

/// Norms of the rows of a weight, each computed when it is first needed, `[1, out_features]` in `f32`.
#[derive(Debug, Default)]
pub struct RowNorms {
    /// Squares of those of the frozen weight.
    squares: OnceLock<Tensor<2>>,
    /// Those of its sum with the low-rank update.
    of_sum: OnceLock<Tensor<2>>,
}

impl Clone for RowNorms {
    /// A copy is of an adapter that may become another: it has those of the frozen weight.
    fn clone(&self) -> Self {
        Self { squares: self.squares.clone(), of_sum: OnceLock::new() }
    }
}

impl RowNorms {
    /// Those of the frozen weight: the adapter is about to change.
    #[must_use]
    pub(crate) fn before_change(self) -> Self {
        Self { of_sum: OnceLock::new(), ..self }
    }

    /// Norms of the frozen weight.
    pub(super) fn of_weight(&self, weight: &Weight) -> Tensor<2> {
        self.squares(weight).sqrt()
    }

    fn squares(&self, weight: &Weight) -> Tensor<2> {
        kept(&self.squares, || {
            let values = weight.values.dense();
            let [rows, columns] = values.dims();
            let most = (CHUNK_LEN / columns).max(1);
            let part = |first: usize| values.as_ref().clone().narrow(0, first, most.min(rows - first));
            let sums = (0..rows).step_by(most).map(|first| part(first).cast(DType::F32).square().sum_dim(1));
            Tensor::cat(sums.collect(), 0).reshape([1, rows])
        })
    }

    /// `||w + scale b A||^2 = ||w||^2 + scale b (2 A w + scale A A^T b)`: the sum itself, which is as large as the weight and
    /// would have to be decoded, is not needed. Products with the weight are in `dtype`.
    pub(super) fn of_sum(&self, place: Place, weight: &Weight, lora: Lora<&Tensor<2>>, dtype: DType) -> Tensor<2> {
        kept(&self.of_sum, || {
            let LowRank { a, b } = lora.matrices;
            let (a, b) = (a.clone().detach(), b.clone().detach() * lora.scale);
            let product = |x: &Tensor<2>, weight: &Weight| linear(place, x, weight, None, None).0.cast(DType::F32);
            let aw = product(&a.clone().cast(dtype), &weight.without_bias()); // [r, out]
            let aa = product(&a, &Weight::new(a.clone())); // [r, r]
            let cross = aw.transpose() * 2.0 + product(&b, &Weight::new(aa)); // [out, r]
            let squares = self.squares(weight) + (b * cross).sum_dim(1).transpose();
            // A row of zeros stays one, instead of becoming no number.
            squares.clamp_min(f32::MIN_POSITIVE).sqrt()
        })
    }
}

/// What the cell holds, or else `make` puts there. Another thread that makes the same does not wait, for it may be one that
/// helps to make this.
fn kept(cell: &OnceLock<Tensor<2>>, make: impl FnOnce() -> Tensor<2>) -> Tensor<2> {
    if let Some(found) = cell.get() {
        return found.clone();
    }
    let made = make();
    drop(cell.set(made.clone()));
    made
}
