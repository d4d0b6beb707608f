//! The gated feed-forward layer of a block.

use burn::tensor::Tensor;

use super::budget::{SizedBy, SublayerSizes};
use super::linears::Linears;
use crate::ops::linear::InputGrad;
use crate::ops::swiglu::{gated, gated_backward};
use crate::spec::{self, Projections};

/// What the backward needs of the forward, each `[tokens, intermediate_size]`; their product is cheaper to compute again.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) gate: Tensor<2>,
    pub(super) up: Tensor<2>,
}

impl spec::Gated {
    /// Sizes of its tensors: in the forward the product of gate and up, and the output beside its residual.
    pub(super) fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let (inside, hidden) = (self.intermediate_size, by.hidden_size);
        let kept = if matches!(self.gate_up, Projections::Same(_)) { inside } else { 2 * inside };
        SublayerSizes { kept, forward: inside + hidden, backward: 3 * inside + 2 * hidden }
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
        self.backward_and(dy, kept, x, linears, input_grad, |_, _| ()).0
    }

    /// [`backward`](Self::backward), and the scalar product of every token's output and `dy`, `[tokens]`.
    pub(super) fn backward_with_product(
        &self,
        dy: &Tensor<2>,
        kept: Kept,
        x: impl FnOnce() -> Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> (Option<Tensor<2>>, Tensor<1>) {
        // But for its bias, the output is linear in what is inside.
        let product = |h: Tensor<2>, dh: &Tensor<2>| (h * dh.clone()).sum_dim(1).squeeze_dim(1);
        let of_bias = linears.bias(self.down).map(|bias| (dy.clone() * bias.cast(dy.dtype()).unsqueeze()).sum_dim(1));
        let (dx, product) = self.backward_and(dy, kept, x, linears, input_grad, product);
        (dx, of_bias.map_or(product.clone(), |of_bias| product + of_bias.squeeze_dim(1)))
    }

    fn backward_and<R>(
        &self,
        dy: &Tensor<2>,
        kept: Kept,
        x: impl FnOnce() -> Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
        look: impl FnOnce(Tensor<2>, &Tensor<2>) -> R,
    ) -> (Option<Tensor<2>>, R) {
        let (place, Kept { gate, up }) = (linears.context.place(), kept);
        let h = gated(place, self.activation, &gate, &up);
        let dh = linears.backward(self.down, dy, &h, InputGrad::Fresh);
        let dh = dh.unwrap_or_else(|| gate.zeros_like());
        let seen = look(h, &dh);
        let (dgate, dup) = gated_backward(place, self.activation, &dh, &gate, &up);
        drop((dh, gate, up));
        (linears.project_backward(self.gate_up, [dgate, dup], &x(), input_grad), seen)
    }
}
