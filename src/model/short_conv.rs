//! The gated short convolution of a block: two gates and a convolution over the last tokens, between two projections (LFM2).

use burn::tensor::Tensor;

use super::budget::{SizedBy, SublayerSizes};
use super::context::TokenMixing;
use super::linears::Linears;
use crate::ops::linear::InputGrad;
use crate::ops::short_conv::gated_conv_backward;
use crate::spec;

/// A gated short convolution and its own frozen weight.
#[derive(Clone, Debug)]
pub struct ShortConv {
    /// Its shape.
    pub spec: spec::ShortConv,
    /// Of the convolution, `[kernel_size, hidden_size]`, in `f32`.
    pub conv: Tensor<2>,
}

/// What the backward needs of the forward; the convolution is cheaper to compute again.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// The gates before and behind the convolution, and what it takes, side by side, `[tokens, 3 * hidden_size]`.
    bcx: Tensor<2>,
    /// The input of the projection of the output, `[tokens, hidden_size]`.
    y: Tensor<2>,
}

impl spec::ShortConv {
    /// Sizes of its tensors: in the backward the gradients of the output's projection and of what it was made of.
    pub(super) fn sizes(by: SizedBy) -> SublayerSizes {
        let hidden = by.hidden_size;
        SublayerSizes { kept: 4 * hidden, forward: hidden, backward: 6 * hidden }
    }
}

impl ShortConv {
    pub(super) fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, mixing: &mut dyn TokenMixing) -> Kept {
        let bcx = linears.forward(self.spec.input, x, None);
        let y = mixing.gated_conv(&bcx, &self.conv);
        Kept { bcx, y }
    }

    pub(super) fn output(&self, kept: &Kept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        linears.forward(self.spec.output, &kept.y, residual)
    }

    /// The gradient of the input if `input_grad`. `x` computes the input again.
    pub(super) fn backward(
        &self,
        dout: &Tensor<2>,
        Kept { bcx, y }: Kept,
        x: impl FnOnce() -> Tensor<2>,
        linears: &mut Linears<'_>,
        input_grad: bool,
    ) -> Option<Tensor<2>> {
        let dy = linears.backward(self.spec.output, dout, &y, InputGrad::Fresh).unwrap_or_else(|| y.zeros_like());
        drop(y);
        let context = linears.context;
        let d_bcx = gated_conv_backward(context.place(), &dy, &bcx, &self.conv, context.layout);
        drop((dy, bcx));
        linears.backward(self.spec.input, &d_bcx, &x(), InputGrad::of(input_grad, None))
    }
}
