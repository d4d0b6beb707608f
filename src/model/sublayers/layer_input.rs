//! What a layer makes of its own embeddings of the tokens (Gemma 4): they are gated by the residual stream and projected to it.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{Backward, Compute, LayerWeights, Linears, LoadedSublayer, Mixing, SizedBy, SublayerShape, SublayerSizes};
use crate::ops::linear::InputGrad;
use crate::ops::swiglu::{gated, gated_backward};
use crate::spec;

/// What the backward needs of the forward.
#[derive(Debug)]
pub(super) struct LayerInputKept {
    /// `[tokens, width]`
    gate: Tensor<2>,
}

impl SublayerShape for spec::LayerInput {
    fn load(&self, _: LayerWeights<'_>) -> LoadedSublayer {
        Ok(Arc::new(*self))
    }

    fn sizes(&self, by: SizedBy) -> SublayerSizes {
        SublayerSizes {
            kept: self.width,
            forward: self.width + by.hidden_size,
            backward: 4 * self.width + 2 * by.hidden_size,
        }
    }
}

impl Compute for spec::LayerInput {
    type Kept = LayerInputKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, _: Mixing<'_>) -> LayerInputKept {
        LayerInputKept { gate: linears.forward(self.gate, x, None) }
    }

    fn output(&self, kept: &LayerInputKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let h = gated(linears.context.place(), self.activation, &kept.gate, embeddings(linears));
        linears.forward(self.projection, &h, residual)
    }

    fn backward(
        &self,
        LayerInputKept { gate }: LayerInputKept,
        given: Backward<'_>,
        linears: &mut Linears<'_>,
    ) -> Option<Tensor<2>> {
        let Backward { dy, x, input_grad } = given;
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
