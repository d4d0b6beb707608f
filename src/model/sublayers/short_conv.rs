//! The gated short convolution of a block: two gates and a convolution over the last tokens, between two projections (LFM2).

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{
    Backward, Compute, LayerCache, LayerWeights, Linears, LoadedSublayer, Mixing, Model, SizedBy, SublayerShape,
    SublayerSizes,
};
use crate::ops::layout::Layout;
use crate::ops::linear::InputGrad;
use crate::ops::short_conv::{Convolution, gated_conv, gated_conv_backward};
use crate::spec::{self, GATED_CONV};

/// A gated short convolution and its own frozen weight.
#[derive(Debug)]
struct ShortConv {
    spec: spec::ShortConv,
    /// Of the convolution, `[kernel_size, hidden_size]`, in `f32`.
    conv: Tensor<2>,
}

/// What the backward needs of the forward; the convolution is cheaper to compute again.
#[derive(Debug)]
struct ShortConvKept {
    /// The gates before and behind the convolution, and what it takes, side by side, `[tokens, 3 * hidden_size]`.
    bcx: Tensor<2>,
    /// The input of the projection of the output, `[tokens, hidden_size]`.
    y: Tensor<2>,
}

impl SublayerShape for spec::ShortConv {
    fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer {
        let conv = weights.conv(GATED_CONV, weights.config.hidden_size, self.kernel_size)?;
        Ok(Arc::new(ShortConv { spec: *self, conv }))
    }

    fn sizes(&self, SizedBy { hidden_size: hidden, .. }: SizedBy) -> SublayerSizes {
        // In the backward the gradients of the output's projection and of what it was made of.
        SublayerSizes { kept: 4 * hidden, forward: hidden, backward: 6 * hidden }
    }

    fn cache(&self, model: &Model) -> Option<LayerCache> {
        Some(LayerCache::state(model, [self.kernel_size - 1, 3 * model.config.hidden_size], None))
    }
}

impl Compute for ShortConv {
    type Kept = ShortConvKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, mixing: Mixing<'_>) -> ShortConvKept {
        let bcx = linears.forward(self.spec.input, x, None);
        let place = linears.context.place();
        let y = mixing.recurrent(&|layout: &Layout| gated_conv(place, &bcx, &self.conv, layout), &|mut states| {
            states.convolved(Convolution::Gated(&self.conv), &bcx)
        });
        ShortConvKept { bcx, y }
    }

    fn output(&self, kept: &ShortConvKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        linears.forward(self.spec.output, &kept.y, residual)
    }

    fn backward(
        &self,
        ShortConvKept { bcx, y }: ShortConvKept,
        given: Backward<'_>,
        linears: &mut Linears<'_>,
    ) -> Option<Tensor<2>> {
        let Backward { dy: dout, x, input_grad } = given;
        let dy = linears.backward(self.spec.output, dout, &y, InputGrad::Fresh).unwrap_or_else(|| y.zeros_like());
        drop(y);
        let context = linears.context;
        let d_bcx = gated_conv_backward(context.place(), &dy, &bcx, &self.conv, context.layout);
        drop((dy, bcx));
        linears.backward(self.spec.input, &d_bcx, &x(), InputGrad::of(input_grad, None))
    }
}
