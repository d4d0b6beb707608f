//! All experts of a mixture at once, where a place computes them so.

use burn::tensor::{DType, Tensor};

use super::gated;
use crate::model::linears::Linears;
use crate::ops::experts::{self, Experts, Sorted};
use crate::ops::linear::Weight;
use crate::ops::swiglu::{gated as gate, gated_backward};
use crate::spec::{self, Projections};

impl spec::Mixture {
    /// What computes the experts together, if it takes activations of this type and all of their matrices.
    pub(super) fn together<'a>(&self, dtype: DType, linears: &Linears<'a>) -> Option<&'a dyn Experts> {
        let together = linears.context.place().experts()?;
        let is_taken = |expert: &spec::Gated| {
            let mut sites = expert.gate_up.sites().iter().chain([&expert.down]);
            matches!(expert.gate_up, Projections::Apart(_))
                && sites.all(|site| together.takes(dtype, linears.weight(*site)))
        };
        self.experts.iter().all(is_taken).then_some(together)
    }

    fn of_groups<'a>(
        &self,
        sorted: &Sorted,
        weights: impl Fn(&spec::Gated) -> Vec<&'a Weight>,
    ) -> Vec<Vec<&'a Weight>> {
        sorted.groups.iter().map(|(expert, _)| weights(&self.experts[*expert])).collect()
    }

    fn gate_up<'a>(&self, sorted: &Sorted, linears: &Linears<'a>) -> Vec<Vec<&'a Weight>> {
        self.of_groups(sorted, |expert| expert.gate_up.sites().iter().map(|site| linears.weight(*site)).collect())
    }

    fn down<'a>(&self, sorted: &Sorted, linears: &Linears<'a>) -> Vec<Vec<&'a Weight>> {
        self.of_groups(sorted, |expert| vec![linears.weight(expert.down)])
    }

    pub(super) fn activations_together(
        &self,
        together: &dyn Experts,
        x: &Tensor<2>,
        sorted: &Sorted,
        linears: &Linears<'_>,
    ) -> gated::Kept {
        let rows = together.gather(x, sorted, false);
        let outputs = experts::forward(together, &rows, &self.gate_up(sorted, linears), sorted);
        let [gate, up] = outputs.try_into().unwrap_or_else(|_| unreachable!("there are two layers"));
        gated::Kept { gate, up }
    }

    pub(super) fn output_together(
        &self,
        together: &dyn Experts,
        kept: &[gated::Kept],
        sorted: &Sorted,
        linears: &Linears<'_>,
    ) -> Tensor<2> {
        let ([gated::Kept { gate: of_gate, up }], Some(expert)) = (kept, self.experts.first()) else {
            unreachable!("what is kept is of all experts")
        };
        let h = gate(linears.context.place(), expert.activation, of_gate, up);
        let output = experts::forward(together, &h, &self.down(sorted, linears), sorted).pop();
        output.unwrap_or_else(|| unreachable!("there is one output"))
    }

    /// The gradient of the experts' rows, and the scalar product of every row's output and its gradient `dy`.
    pub(super) fn backward_together(
        &self,
        together: &dyn Experts,
        dy: Tensor<2>,
        mut kept: Vec<gated::Kept>,
        sorted: &Sorted,
        linears: &Linears<'_>,
    ) -> (Tensor<2>, Tensor<1>) {
        let (Some(gated::Kept { gate: of_gate, up }), Some(expert)) = (kept.pop(), self.experts.first()) else {
            unreachable!("what is kept is of all experts")
        };
        let (place, down) = (linears.context.place(), self.down(sorted, linears));
        let h = gate(place, expert.activation, &of_gate, &up);
        let dh = experts::backward(together, std::slice::from_ref(&dy), &down, sorted);
        let products = together.products(&h, &dh, &dy, &down, sorted);
        drop((h, dy));
        let (d_gate, d_up) = gated_backward(place, expert.activation, &dh, &of_gate, &up);
        drop((dh, of_gate, up));
        (experts::backward(together, &[d_gate, d_up], &self.gate_up(sorted, linears), sorted), products)
    }
}
