//! The gated feed-forward layer of a block.

use burn::tensor::Tensor;

use super::budget::{SizedBy, SublayerSizes};
use super::linears::Linears;
use crate::ops::linear::InputGrad;
use crate::ops::swiglu::{gated, gated_backward};
use crate::spec;

/// What the backward needs of the forward, each `[tokens, intermediate_size]`; their product is cheaper to compute again.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    gate: Tensor<2>,
    up: Tensor<2>,
}

impl spec::Gated {
    /// Sizes of its tensors: in the forward the product of gate and up, and the output beside its residual.
    pub(super) fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (inside, hidden) = (self.intermediate_size, by.hidden_size);
        SublayerSizes { kept: 2 * inside, forward: inside + hidden, backward: 3 * inside + 2 * hidden }
    }

    pub(super) fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>) -> Kept {
        let [gate, up] = linears.project(self.gate_up, x);
        Kept { gate, up }
    }

    pub(super) fn output(&self, kept: &Kept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let h = gated(linears.context.place(), self.activation, &kept.gate, &kept.up);
        linears.forward(self.down, &h, residual)
    }

    /// The gradient of the input if `input_grad`. `x` computes the input again.
    pub(super) fn backward(
        &self,
        dy: &Tensor<2>,
        kept: Kept,
        x: impl FnOnce() -> Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> Option<Tensor<2>> {
        let (place, Kept { gate, up }) = (linears.context.place(), kept);
        let h = gated(place, self.activation, &gate, &up);
        let dh = linears.backward(self.down, dy, &h, InputGrad::Fresh);
        drop(h);
        let dh = dh.unwrap_or_else(|| gate.zeros_like());
        let (dgate, dup) = gated_backward(place, self.activation, &dh, &gate, &up);
        drop((dh, gate, up));
        linears.project_backward(self.gate_up, [dgate, dup], &x(), input_grad)
    }
}
