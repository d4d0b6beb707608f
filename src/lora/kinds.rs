//! Kinds of adapters: what one adds to its linear layer, its gradients, its merged weight and its names on disk.

mod lora;

use std::ops::Range;

use burn::tensor::Tensor;

use crate::ops::kernels::Place;
use crate::ops::linear::{InputGrad, Weight};
use crate::ops::low_rank::{Lora, LowRank};

/// The kind of an adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// `scale B A` is added to the weight.
    #[default]
    Lora,
}

impl Kind {
    /// Shapes of the matrices of rank `r` on a weight `[out_features, in_features]`.
    #[must_use]
    pub fn shapes(self, r: usize, weight: [usize; 2]) -> LowRank<[usize; 2]> {
        match self {
            Self::Lora => lora::shapes(r, weight),
        }
    }

    /// The output of a linear layer with its adapter, added to `residual` if there is one, and what the backward needs.
    ///
    /// # Shapes
    /// As in [`linear`](crate::ops::linear::linear).
    #[must_use]
    pub fn forward(
        self,
        place: Place,
        x: &Tensor<2>,
        weight: &Weight,
        adapter: Lora<&Tensor<2>>,
        residual: Option<Tensor<2>>,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        match self {
            Self::Lora => lora::forward(place, x, weight, adapter, residual),
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
        adapter: Lora<&Tensor<2>>,
        rows: Range<usize>,
    ) -> Tensor<2> {
        match self {
            Self::Lora => lora::add(place, y, x, weight, adapter, rows),
        }
    }

    /// The gradients of the input, as `input_grad` asks, and of the matrices. `kept` is of the forward, or computed anew.
    ///
    /// # Shapes
    /// As in [`linear_backward`](crate::ops::linear::linear_backward).
    #[must_use]
    pub fn backward(
        self,
        place: Place,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weight: &Weight,
        (adapter, kept): (Lora<&Tensor<2>>, Option<Tensor<2>>),
        input_grad: InputGrad,
    ) -> (Option<Tensor<2>>, Option<LowRank<Tensor<2>>>) {
        match self {
            Self::Lora => lora::backward(place, dy, x, weight, (adapter, kept), input_grad),
        }
    }

    /// What merging adds to the weight `[out_features, in_features]`.
    #[must_use]
    pub fn difference(self, matrices: LowRank<&[f32]>, scale: f64, weight: [usize; 2]) -> Vec<f32> {
        match self {
            Self::Lora => lora::difference(matrices, scale, weight),
        }
    }
}
