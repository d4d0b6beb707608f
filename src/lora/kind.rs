//! Kinds of adapters: what one adds to its linear layer, its gradients, its merged weight and the shapes of its matrices.

use std::ops::Range;

use burn::tensor::Tensor;

use super::dora;
use super::matrices::{Applied, Matrices};
use crate::ops::cpu::{Weight as HostWeight, linear_backward_input};
use crate::ops::kernels::Place;
use crate::ops::linear::{InputGrad, Layer, Weight, add_low_rank, linear, linear_backward, low_rank_input};
use crate::ops::low_rank::LowRank;

/// The kind of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// `scale B A` is added to the weight (Hu et al., 2021).
    Lora,
    /// The rows of the sum are brought to trained lengths besides (Liu et al., 2024).
    Dora,
}

impl AdapterKind {
    /// Shapes of the matrices of rank `r` on a weight `[out_features, in_features]`.
    #[must_use]
    pub fn shapes(self, r: usize, [out_features, in_features]: [usize; 2]) -> Matrices<[usize; 2]> {
        match self {
            Self::Lora => Matrices { a: [r, in_features], b: [out_features, r], magnitude: None },
            Self::Dora => {
                let low_rank = Self::Lora.shapes(r, [out_features, in_features]);
                Matrices { magnitude: Some([1, out_features]), ..low_rank }
            }
        }
    }

    /// The output of a linear layer with its adapter, added to `residual` if there is one, and what the backward needs.
    ///
    /// # Shapes
    /// As in [`linear`].
    #[must_use]
    pub fn forward(
        self,
        place: Place,
        x: &Tensor<2>,
        weight: &Weight,
        adapter: Applied<'_>,
        residual: Option<Tensor<2>>,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        match self {
            Self::Lora => linear(place, x, weight, Some(adapter.lora()), residual),
            Self::Dora => (dora::forward(place, x, weight, adapter, residual), None),
        }
    }

    /// The linear layer with its adapter, where the adapter is nothing but a low-rank update: such layers of one input are
    /// computed together.
    #[must_use]
    pub fn layer<'a>(self, weight: &'a Weight, adapter: Applied<'a>) -> Option<Layer<'a>> {
        match self {
            Self::Lora => Some(Layer { weight, lora: Some(adapter.lora()) }),
            Self::Dora => None,
        }
    }

    /// Adds what the adapter adds for some of the tokens to their rows of `y`, the output of the layer without one.
    #[must_use]
    pub fn add(
        self,
        place: Place,
        y: Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        adapter: Applied<'_>,
        rows: Range<usize>,
    ) -> Tensor<2> {
        match self {
            Self::Lora => add_low_rank(place, y, x, weight, adapter.lora(), rows),
            Self::Dora => dora::add(place, y, x, weight, adapter, rows),
        }
    }

    /// The gradients of the input, as `input_grad` asks, and of the matrices. `kept` is of the forward, or computed anew.
    ///
    /// # Shapes
    /// As in [`linear_backward`].
    #[must_use]
    pub fn backward(
        self,
        place: Place,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        (adapter, kept): (Applied<'_>, Option<Tensor<2>>),
        input_grad: InputGrad,
    ) -> (Option<Tensor<2>>, Option<Matrices<Tensor<2>>>) {
        match self {
            Self::Lora => {
                let lora = adapter.lora();
                let xa = kept.unwrap_or_else(|| low_rank_input(place, x, lora));
                let (dx, grads) = linear_backward(place, dy, x, weight, Some((lora, &xa)), input_grad);
                (dx, grads.map(Matrices::from))
            }
            Self::Dora => dora::backward(place, dy, x, weight, adapter, input_grad),
        }
    }

    /// What merging adds to `weight`, `[out_features, in_features]`.
    #[must_use]
    pub fn difference(
        self,
        matrices: Matrices<&[f32]>,
        scale: f64,
        weight: &[f32],
        [out_features, in_features]: [usize; 2],
    ) -> Vec<f32> {
        match self {
            Self::Lora => {
                let LowRank { a, b } = matrices.low_rank();
                let mut update = vec![0.0; out_features * in_features];
                linear_backward_input(b, HostWeight::f32(a), in_features, a.len() / in_features, &mut update, false);
                // The product is rounded before it is scaled, as in PEFT.
                #[expect(clippy::cast_possible_truncation, reason = "the sum is in f32")]
                update.iter_mut().for_each(|update| *update *= scale as f32);
                update
            }
            Self::Dora => {
                let update = Self::Lora.difference(matrices, scale, weight, [out_features, in_features]);
                dora::difference(update, weight, matrices.magnitude.unwrap_or_default())
            }
        }
    }
}
