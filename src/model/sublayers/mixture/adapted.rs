//! The adapters of experts, which are one for all experts of a layer.

use burn::tensor::Tensor;

use crate::lora::{BlockAdapters, Matrices};
use crate::model::context::BlockGrads;
use crate::model::linears::Linears;
use crate::ops::routing::ExpertRows;
use crate::spec;

impl spec::Mixture {
    /// The adapters of each of these experts.
    pub(super) fn adapters_of(&self, experts: &[(usize, ExpertRows)], linears: &Linears<'_>) -> Vec<BlockAdapters> {
        let all = linears.of_experts();
        let of = |(expert, _): &(usize, ExpertRows)| -> BlockAdapters {
            let moved = self.experts[*expert].down - self.experts[0].down;
            all.iter().map(|(site, adapter)| (site + moved, adapter.of_expert(*expert))).collect()
        };
        experts.iter().map(of).collect()
    }

    /// Gives the gradients of some experts' adapters back as those of all, row below row: zeros of the others.
    pub(super) fn join_grads(&self, mut grads: Vec<(usize, BlockGrads)>, linears: &mut Linears<'_>) {
        for (site, adapter) in linears.of_experts() {
            let num_experts = self.experts.len();
            let mut parts: Vec<Option<Matrices<Tensor<2>>>> = vec![None; num_experts];
            for (expert, of_expert) in &mut grads {
                let moved = self.experts[*expert].down - self.experts[0].down;
                parts[*expert] = of_expert.remove(&(site + moved));
            }
            let none = adapter.of_expert(0).matrices;
            let parts: Vec<_> =
                parts.into_iter().map(|of| of.unwrap_or_else(|| none.as_ref().map(Tensor::zeros_like))).collect();
            let join = |of: fn(&Matrices<Tensor<2>>) -> &Tensor<2>| {
                Tensor::cat(parts.iter().map(|part| of(part).clone()).collect(), 0)
            };
            let joined = Matrices { a: join(|part| &part.a), b: join(|part| &part.b), magnitude: None };
            linears.grads.adapters.insert(site, joined);
        }
    }
}
