//! What a layer makes of its own embeddings of the tokens (Gemma 4): they are gated by the residual stream and projected to it.

use burn::tensor::Tensor;

use super::budget::{SizedBy, SublayerSizes};
use super::linears::Linears;
use crate::ops::linear::InputGrad;
use crate::ops::swiglu::{gated, gated_backward};
use crate::spec;

/// What the backward needs of the forward.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// `[tokens, width]`
    gate: Tensor<2>,
}

impl spec::LayerInput {
    /// Sizes of its tensors.
    pub(super) fn sizes(&self, by: SizedBy) -> SublayerSizes {
        SublayerSizes {
            kept: self.width,
            forward: self.width + by.hidden_size,
            backward: 4 * self.width + 2 * by.hidden_size,
        }
    }

    pub(super) fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>) -> Kept {
        Kept { gate: linears.forward(self.gate, x, None) }
    }

    pub(super) fn output(&self, kept: &Kept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let h = gated(linears.context.place(), self.activation, &kept.gate, embeddings(linears));
        linears.forward(self.projection, &h, residual)
    }

    /// The gradient of the input if `input_grad`. `x` computes the input again.
    pub(super) fn backward(
        &self,
        dy: &Tensor<2>,
        Kept { gate }: Kept,
        x: impl FnOnce() -> Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> Option<Tensor<2>> {
        let (place, embeddings) = (linears.context.place(), embeddings(linears));
        let h = gated(place, self.activation, &gate, embeddings);
        let dh = linears.backward(self.projection, dy, &h, InputGrad::Fresh);
        let dh = dh.unwrap_or_else(|| gate.zeros_like());
        // The embeddings are frozen.
        let (dgate, _) = gated_backward(place, self.activation, &dh, &gate, embeddings);
        linears.backward(self.gate, &dgate, &x(), InputGrad::of(input_grad, None))
    }
}

fn embeddings<'a>(linears: &Linears<'a>) -> &'a Tensor<2> {
    linears.context.inputs.layer_input.unwrap_or_else(|| unreachable!("the model has embeddings for the layer"))
}
