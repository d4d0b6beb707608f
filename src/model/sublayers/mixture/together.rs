//! All experts of a mixture at once, where a place computes them so.

use burn::tensor::Tensor;

use super::GatedKept;
use crate::model::linears::Linears;
use crate::ops::experts::{self, Experts, Sorted};
use crate::ops::linear::Weight;
use crate::ops::swiglu::{gated as gate, gated_backward};
use crate::spec::{self, Activation, Projections};

impl spec::Mixture {
    /// What computes the experts of this input together, if it takes it and all of their matrices, and nothing wants to see the
    /// input of each.
    pub(super) fn together<'a>(&self, x: &Tensor<2>, linears: &Linears<'a>) -> Option<&'a dyn Experts> {
        let together = linears.context.place().experts().filter(|_| !linears.context.sees(self.experts[0].down))?;
        let slots = x.dims()[0] * self.num_per_token;
        let is_taken = self.experts.iter().all(|expert| matches!(expert.gate_up, Projections::Apart(_)))
            && together.takes(x, slots, &self.gate_up(linears))
            && together.takes(x, slots, &self.down(linears));
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
        let rows = together.gather(x, sorted, false);
        let outputs = experts::forward(together, &rows, &self.gate_up(linears), sorted);
        let [gate, up] = outputs.try_into().unwrap_or_else(|_| unreachable!("there are two layers"));
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
        output.unwrap_or_else(|| unreachable!("there is one output"))
    }

    /// The gradient of the experts' rows, and the scalar product of every row's output and its gradient `dy`.
    pub(super) fn backward_together(
        &self,
        together: &dyn Experts,
        dy: Tensor<2>,
        GatedKept { gate: of_gate, up }: GatedKept,
        sorted: &Sorted,
        linears: &Linears<'_>,
    ) -> (Tensor<2>, Tensor<1>) {
        let (place, activation, down) = (linears.context.place(), self.activation(), self.down(linears));
        let h = gate(place, activation, &of_gate, &up);
        let dh = experts::backward(together, std::slice::from_ref(&dy), &down, sorted);
        let products = together.products(&h, &dh, &dy, &down, sorted);
        drop((h, dy));
        let (d_gate, d_up) = gated_backward(place, activation, &dh, &of_gate, &up);
        drop((dh, of_gate, up));
        (experts::backward(together, &[d_gate, d_up], &self.gate_up(linears), sorted), products)
    }
}
