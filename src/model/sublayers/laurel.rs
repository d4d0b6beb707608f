//! A product of low rank beside attention (Gemma 3n). What is added to it, [`Sublayer`](crate::model::block::Sublayer) adds.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{Backward, Compute, LayerWeights, Linears, LoadedSublayer, Mixing, SizedBy, SublayerShape, SublayerSizes};
use crate::ops::linear::InputGrad;
use crate::spec;

/// What the backward needs of the forward.
#[derive(Debug)]
pub(super) struct LaurelKept {
    /// `[tokens, rank]`
    low: Tensor<2>,
}

impl SublayerShape for spec::Laurel {
    fn load(&self, _: LayerWeights<'_>) -> LoadedSublayer {
        Ok(Arc::new(*self))
    }

    fn sizes(&self, by: SizedBy) -> SublayerSizes {
        // The residual stream that is added to, too, and the normed input.
        let hidden = by.hidden_size;
        SublayerSizes { kept: self.rank + hidden, forward: 2 * hidden, backward: self.rank + 3 * hidden }
    }
}

impl Compute for spec::Laurel {
    type Kept = LaurelKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, _: Mixing<'_>) -> LaurelKept {
        LaurelKept { low: linears.forward(self.left, x, None) }
    }

    fn output(&self, kept: &LaurelKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        linears.forward(self.right, &kept.low, residual)
    }

    fn backward(&self, kept: LaurelKept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        let Backward { dy, x, input_grad } = given;
        let dlow = linears.backward(self.right, dy, &kept.low, InputGrad::Fresh);
        let dlow = dlow.unwrap_or_else(|| kept.low.zeros_like());
        linears.backward(self.left, &dlow, &x(), InputGrad::of(input_grad, None))
    }
}
