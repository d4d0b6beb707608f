//! A feed-forward layer with a mixture of experts beside it (Gemma 4). Both take the residual stream, each through norms of its own;
//! so does the router.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::gated::GatedKept;
use super::mixture::MixtureKept;
use super::{
    Backward, BlockContext, Compute, LayerWeights, Linears, LoadedSublayer, Mixing, SizedBy, SublayerShape,
    SublayerSizes,
};
use crate::ops::linear::InputGrad;
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::spec::{self, BRANCH_NORMS, EXPERT_SCALES, ROUTER_SCALE};
use crate::util::stats::as_f64;

/// Both, and their own frozen weights in `f32`.
#[derive(Debug)]
struct TwoBranches {
    spec: spec::TwoBranches,
    /// Norms of the inputs of the feed-forward layer, the experts and the router, `[hidden_size]` each.
    norms_before: [Tensor<1>; 3],
    /// Norms of the outputs of the feed-forward layer and of the experts, likewise.
    norms_after: [Tensor<1>; 2],
    /// What the outputs of experts are multiplied by, `[experts]`.
    scales: Tensor<1>,
}

/// What the backward needs of the forward; norms of inputs are cheaper to compute again.
#[derive(Debug)]
struct BranchesKept {
    gated: GatedKept,
    mixture: MixtureKept,
    /// Before their norms.
    outputs: [Tensor<2>; 2],
}

impl SublayerShape for spec::TwoBranches {
    fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer {
        let hidden = weights.config.hidden_size;
        let norm = |part| weights.norm(part, hidden);
        let [[of_gated, of_experts], [after_gated, after_experts]] = BRANCH_NORMS;
        let of_router = weights.vector(ROUTER_SCALE, hidden)? / as_f64(hidden).sqrt();
        Ok(Arc::new(TwoBranches {
            spec: self.clone(),
            norms_before: [norm(of_gated)?, norm(of_experts)?, of_router],
            norms_after: [norm(after_gated)?, norm(after_experts)?],
            scales: weights.vector(EXPERT_SCALES, self.mixture.experts.len())?,
        }))
    }

    fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let both = self.gated.sizes(by).and(self.mixture.sizes(by));
        let hidden = by.hidden_size;
        SublayerSizes {
            kept: both.kept + 2 * hidden,
            forward: both.forward + 3 * hidden,
            backward: both.backward + 5 * hidden,
        }
    }
}

impl Compute for TwoBranches {
    type Kept = BranchesKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, _: Mixing<'_>) -> BranchesKept {
        let spec::TwoBranches { gated, mixture } = &self.spec;
        let [of_gated, of_experts, of_router] =
            self.norms_before.each_ref().map(|weight| normed(x, weight, linears.context));
        let of_gated = gated.inside(&of_gated, linears);
        let router = mixture.router_with(None, Some(&self.scales));
        let of_mixture = mixture.activations_with(&of_experts, &of_router, router, linears);
        let outputs = [gated.output(&of_gated, None, linears), mixture.output(&of_mixture, None, linears)];
        BranchesKept { gated: of_gated, mixture: of_mixture, outputs }
    }

    fn output(&self, kept: &BranchesKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let [gated, experts] =
            [0, 1].map(|which| normed(&kept.outputs[which], &self.norms_after[which], linears.context));
        let both = gated + experts;
        residual.map_or(both.clone(), |residual| residual + both)
    }

    fn backward(&self, kept: BranchesKept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        let Backward { dy, x, input_grad } = given;
        let (spec::TwoBranches { gated, mixture }, context, x) = (&self.spec, linears.context, x());
        let [before_gated, before_experts, before_router] = &self.norms_before;
        let [d_gated, d_mixture] = [0, 1].map(|which| {
            let y = &kept.outputs[which];
            normed_backward(dy, y, &self.norms_after[which], context, y.zeros_like())
        });
        let of_gated = Backward { dy: &d_gated, x: &|| normed(&x, before_gated, context), input_grad };
        let d_gated = gated.backward(kept.gated, of_gated, linears);
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
