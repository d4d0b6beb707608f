//! Linear layers and their low-rank updates, the gate between two of them, and the rows of a mixture's experts.

use std::ops::Range;

use burn::tensor::Tensor;

use super::Properties;
use crate::ops::cpu::Dropout;
use crate::ops::experts::Experts;
use crate::ops::low_rank::Lora;
use crate::ops::plain::dropout::plain_dropout;
use crate::ops::plain::gates::{plain_gated, plain_gated_backward};
use crate::ops::plain::linear::{
    Applied, InputGrad, Layer, LayerGrads, LayerOutput, LayersGrads, Weight, plain_add_low_rank, plain_linear,
    plain_linear_backward,
};
use crate::ops::plain::routing::{ExpertRows, plain_gather, plain_scatter_add};
use crate::spec::Activation;

/// Linear layers and what is between them, as in [`linear`](crate::ops::linear), [`swiglu`](crate::ops::swiglu) and
/// [`routing`](crate::ops::routing).
#[expect(missing_docs, reason = "the doors describe the operations")]
pub trait Linears: Properties {
    fn linear(&self, x: &Tensor<2>, layer: Layer<'_>, residual: Option<Tensor<2>>) -> LayerOutput {
        plain_linear(self.f32_products(), x, layer, residual)
    }

    fn linear_backward(&self, dy: &Tensor<2>, x: &Tensor<2>, layer: Applied<'_>, input_grad: InputGrad) -> LayerGrads {
        plain_linear_backward(self.f32_products(), dy, x, layer, input_grad)
    }

    fn linears(&self, x: &Tensor<2>, layers: &[Layer<'_>]) -> Vec<LayerOutput> {
        layers.iter().map(|layer| self.linear(x, *layer, None)).collect()
    }

    fn linears_backward(&self, dys: Vec<Tensor<2>>, x: &Tensor<2>, layers: &[Applied<'_>], dx: bool) -> LayersGrads {
        each_backward(self, dys, x, layers, dx)
    }

    fn low_rank_input(&self, x: &Tensor<2>, lora: Lora<&Tensor<2>>) -> Tensor<2> {
        let dropped = lora.dropout.map(|settings| self.dropout(x, settings));
        let weight = &Weight::new(lora.matrices.a.clone());
        self.linear(dropped.as_ref().unwrap_or(x), Layer { weight, lora: None }, None).0
    }

    fn add_low_rank(&self, y: Tensor<2>, x: &Tensor<2>, layer: Layer<'_>, rows: Range<usize>) -> Tensor<2> {
        plain_add_low_rank(self.f32_products(), y, x, layer, rows)
    }

    fn dropout(&self, x: &Tensor<2>, settings: Dropout) -> Tensor<2> {
        plain_dropout(x, settings)
    }

    fn gated(&self, activation: Activation, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
        plain_gated(activation, gate, up)
    }

    fn gated_backward(&self, activation: Activation, dh: &Tensor<2>, gate_up: [&Tensor<2>; 2]) -> [Tensor<2>; 2] {
        plain_gated_backward(activation, dh, gate_up)
    }

    fn gather(&self, x: &Tensor<2>, rows: &ExpertRows, weighted: bool) -> Tensor<2> {
        plain_gather(x, rows, weighted)
    }

    fn scatter_add(&self, y: Tensor<2>, rows: &ExpertRows, update: &Tensor<2>, weighted: bool) -> Tensor<2> {
        plain_scatter_add(y, rows, update, weighted)
    }

    /// The experts of a mixture together, where it has kernels for them.
    fn experts(&self) -> Option<&dyn Experts> {
        None
    }
}

/// [`Linears::linears_backward`] layer by layer.
pub(crate) fn each_backward<L: Linears + ?Sized>(
    place: &L,
    dys: Vec<Tensor<2>>,
    x: &Tensor<2>,
    layers: &[Applied<'_>],
    input_grad: bool,
) -> LayersGrads {
    let mut sum = None;
    let grads = dys.into_iter().zip(layers).map(|(dy, layer)| {
        let (dx, grad) = place.linear_backward(&dy, x, *layer, InputGrad::of(input_grad, sum.take()));
        sum = dx;
        grad
    });
    let grads = grads.collect();
    (sum, grads)
}
