//! All experts of a mixture at once, where a place computes them so.

use burn::tensor::Tensor;

use super::GatedKept;
use crate::lora::{Adapter, Matrices};
use crate::model::linears::Linears;
use crate::ops::experts::{self, Experts, Sorted};
use crate::ops::linear::Weight;
use crate::ops::low_rank::LowRank;
use crate::ops::swiglu::{gated as gate, gated_backward};
use crate::spec::{self, Activation, Projections, SiteId};

impl spec::Mixture {
    /// What computes the experts of this input together, if it takes it, all of their matrices and adapters, and nothing wants to see
    /// the input of each.
    pub(super) fn together<'a>(&self, x: &Tensor<2>, linears: &Linears<'a>) -> Option<&'a dyn Experts> {
        let together = linears.context.place().experts().filter(|_| !linears.context.sees(self.experts[0].down))?;
        let slots = x.dims()[0] * self.num_per_token;
        let first = &self.experts[0];
        let is_plain = !matches!(first.gate_up, Projections::Fused { .. }) && first.gate_scale.is_none();
        let is_taken = is_plain
            && !first.is_alone()
            && together.takes(x, slots, self.choice, &self.gate_up(linears))
            && together.takes(x, slots, self.choice, &self.down(linears));
        let rank = |adapter: &Adapter| adapter.matrices.a.dims()[0] / self.experts.len();
        let is_taken = is_taken && linears.of_experts().values().all(|adapter| together.takes_rank(rank(adapter)));
        is_taken.then_some(together)
    }

    fn gate_up<'a>(&self, linears: &Linears<'a>) -> Vec<Vec<&'a Weight>> {
        let of = |expert: &spec::Gated| expert.gate_up.sites().iter().map(|site| linears.weight(*site)).collect();
        self.experts.iter().map(of).collect()
    }

    fn down<'a>(&self, linears: &Linears<'a>) -> Vec<Vec<&'a Weight>> {
        self.experts.iter().map(|expert| vec![linears.weight(expert.down)]).collect()
    }

    fn activation(&self) -> Activation {
        self.experts[0].activation
    }

    pub(super) fn activations_together(
        &self,
        together: &dyn Experts,
        x: &Tensor<2>,
        sorted: &Sorted,
        linears: &Linears<'_>,
    ) -> GatedKept {
        let rows = together.gather(x, sorted, self.weighs_inputs);
        let outputs = experts::forward(together, &rows, &self.gate_up(linears), sorted);
        let sites = self.experts[0].gate_up.sites().iter();
        let mut outputs = sites.zip(outputs).map(|(site, y)| with_update(together, *site, y, &rows, sorted, linears));
        let gate = outputs.next().unwrap_or_else(|| unreachable!("there is a layer"));
        // Of one layer they are one.
        let up = outputs.next().unwrap_or_else(|| gate.clone());
        GatedKept { gate, up }
    }

    pub(super) fn output_together(
        &self,
        together: &dyn Experts,
        kept: &GatedKept,
        sorted: &Sorted,
        linears: &Linears<'_>,
    ) -> Tensor<2> {
        let h = gate(linears.context.place(), self.activation(), &kept.gate, &kept.up);
        let output = experts::forward(together, &h, &self.down(linears), sorted).pop();
        let output = output.unwrap_or_else(|| unreachable!("there is one output"));
        with_update(together, self.experts[0].down, output, &h, sorted, linears)
    }

    /// The gradient of the experts' rows, and the scalar product of every row's output and its gradient `dy`. `x` is the input.
    pub(super) fn backward_together(
        &self,
        together: &dyn Experts,
        [dy, x]: [Tensor<2>; 2],
        GatedKept { gate: of_gate, up }: GatedKept,
        sorted: &Sorted,
        linears: &mut Linears<'_>,
    ) -> (Tensor<2>, Tensor<1>) {
        let (place, activation, down) = (linears.context.place(), self.activation(), self.down(linears));
        let h = gate(place, activation, &of_gate, &up);
        let dh = experts::backward(together, std::slice::from_ref(&dy), &down, sorted);
        let dh = update_backward(together, self.experts[0].down, [&dy, &h], dh, sorted, linears);
        let products = together.products(&h, &dh, &dy, &down, sorted);
        drop((h, dy));
        let (d_gate, d_up) = gated_backward(place, activation, &dh, &of_gate, &up);
        drop((dh, of_gate, up));
        let sites = self.experts[0].gate_up.sites();
        let dys = if sites.len() == 1 { vec![d_gate + d_up] } else { vec![d_gate, d_up] };
        let dx = experts::backward(together, &dys, &self.gate_up(linears), sorted);
        if linears.of_experts().is_empty() {
            return (dx, products);
        }
        let rows = together.gather(&x, sorted, self.weighs_inputs);
        let add = |dx, (site, dy): (&SiteId, _)| update_backward(together, *site, [dy, &rows], dx, sorted, linears);
        (sites.iter().zip(&dys).fold(dx, add), products)
    }
}

/// The output `y` of the experts' layer for their rows `x`, with the update of its adapter, if it has one.
fn with_update(
    together: &dyn Experts,
    site: SiteId,
    y: Tensor<2>,
    x: &Tensor<2>,
    sorted: &Sorted,
    linears: &Linears<'_>,
) -> Tensor<2> {
    match linears.of_experts().get(&site) {
        Some(adapter) => together.add_low_rank(y, x, adapter.applied(None).lora(), sorted),
        None => y,
    }
}

/// The gradient `dx` of a layer's input with what comes through its adapter, whose gradients become known.
fn update_backward(
    together: &dyn Experts,
    site: SiteId,
    [dy, x]: [&Tensor<2>; 2],
    dx: Tensor<2>,
    sorted: &Sorted,
    linears: &mut Linears<'_>,
) -> Tensor<2> {
    let Some(adapter) = linears.of_experts().remove(&site) else { return dx };
    let (dx, LowRank { a, b }) = together.low_rank_backward(dy, x, adapter.applied(None).lora(), sorted, dx);
    linears.grads.adapters.insert(site, Matrices { a, b, magnitude: None });
    dx
}
