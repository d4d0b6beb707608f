//! A feed-forward layer with a mixture of experts beside it (Gemma 4). Both take the residual stream, each through norms of its own;
//! so does the router.

use burn::tensor::Tensor;

use super::budget::{SizedBy, SublayerSizes};
use super::context::BlockContext;
use super::linears::Linears;
use super::{gated, mixture};
use crate::ops::linear::InputGrad;
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::spec;

/// Both, and their own frozen weights in `f32`.
#[derive(Clone, Debug)]
pub struct Beside {
    /// Its shape.
    pub spec: spec::Beside,
    /// Norms of the inputs of the feed-forward layer, the experts and the router, `[hidden_size]` each.
    pub norms_before: [Tensor<1>; 3],
    /// Norms of the outputs of the feed-forward layer and of the experts, likewise.
    pub norms_after: [Tensor<1>; 2],
    /// What the outputs of experts are multiplied by, `[experts]`.
    pub scales: Tensor<1>,
}

/// What the backward needs of the forward; norms of inputs are cheaper to compute again.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    gated: gated::Kept,
    mixture: mixture::Kept,
    /// Before their norms.
    outputs: [Tensor<2>; 2],
}

impl spec::Beside {
    /// Sizes of its tensors.
    pub(super) fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let both = self.gated.sizes(by).and(self.mixture.sizes(by));
        let hidden = by.hidden_size;
        SublayerSizes {
            kept: both.kept + 2 * hidden,
            forward: both.forward + 3 * hidden,
            backward: both.backward + 5 * hidden,
        }
    }
}

impl Beside {
    pub(super) fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>) -> Kept {
        let spec::Beside { gated, mixture } = &self.spec;
        let [of_gated, of_experts, of_router] =
            self.norms_before.each_ref().map(|weight| normed(x, weight, linears.context));
        let of_gated = gated.activations(&of_gated, linears);
        let of_mixture = mixture.activations_with(&of_experts, &of_router, Some(&self.scales), linears);
        let outputs = [gated.output(&of_gated, None, linears), mixture.output(&of_mixture, None, linears)];
        Kept { gated: of_gated, mixture: of_mixture, outputs }
    }

    pub(super) fn output(&self, kept: &Kept, residual: Option<Tensor<2>>, linears: &Linears<'_>) -> Tensor<2> {
        let [gated, experts] =
            [0, 1].map(|which| normed(&kept.outputs[which], &self.norms_after[which], linears.context));
        let both = gated + experts;
        residual.map_or(both.clone(), |residual| residual + both)
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
        let (spec::Beside { gated, mixture }, context, x) = (&self.spec, linears.context, x());
        let [before_gated, before_experts, before_router] = &self.norms_before;
        let [d_gated, d_mixture] = [0, 1].map(|which| {
            let y = &kept.outputs[which];
            normed_backward(dy, y, &self.norms_after[which], context, y.zeros_like())
        });
        let d_gated = gated.backward(&d_gated, kept.gated, || normed(&x, before_gated, context), linears, input_grad);
        let of_experts = normed(&x, before_experts, context);
        let (d_experts, d_scores) =
            mixture.backward_to_scores(&d_mixture, kept.mixture, &of_experts, linears, input_grad)?;
        let of_router = normed(&x, before_router, context);
        let d_router = linears.backward(mixture.router, &d_scores, &of_router, InputGrad::Fresh);
        let branches = [(d_gated, before_gated), (d_experts, before_experts), (d_router, before_router)];
        let add = |sum, (dy, weight): (Option<Tensor<2>>, _)| match dy {
            Some(dy) => normed_backward(&dy, &x, weight, context, sum),
            None => sum,
        };
        Some(branches.into_iter().fold(x.zeros_like(), add))
    }
}

fn normed(x: &Tensor<2>, weight: &Tensor<1>, context: &BlockContext<'_>) -> Tensor<2> {
    rms_norm(context.place(), x, weight, context.eps).0
}

/// The gradient of [`normed`] with respect to `x`, added to `sum`.
fn normed_backward(
    dy: &Tensor<2>,
    x: &Tensor<2>,
    weight: &Tensor<1>,
    context: &BlockContext<'_>,
    sum: Tensor<2>,
) -> Tensor<2> {
    let (_, rstd) = rms_norm(context.place(), x, weight, context.eps);
    rms_norm_backward(context.place(), dy, x, weight, &rstd, sum)
}
