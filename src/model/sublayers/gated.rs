//! The gated feed-forward layer of a block.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::{Backward, Compute, LayerWeights, Linears, LoadedSublayer, Mixing, SizedBy, SublayerShape, SublayerSizes};
use crate::ops::linear::InputGrad;
use crate::ops::swiglu::{gated, gated_backward};
use crate::spec::{self, Activation, CURVE_NAMES, Curve, Projections};
use crate::util::stats::as_f64;

/// What the backward needs of the forward, each `[tokens, intermediate_size]`; their product is cheaper to compute again.
#[derive(Debug)]
pub(super) struct GatedKept {
    pub(super) gate: Tensor<2>,
    pub(super) up: Tensor<2>,
}

impl SublayerShape for spec::Gated {
    fn load(&self, weights: LayerWeights<'_>) -> LoadedSublayer {
        let Activation::Xielu(_) = self.activation else { return Ok(Arc::new(self.clone())) };
        let [positive, negative, beta, _] = CURVE_NAMES;
        let softplus = |number: f32| number.max(0.0) + (-number.abs()).exp().ln_1p();
        let beta = weights.number(beta, &[])?;
        let curve = Curve {
            positive: softplus(weights.number(positive, &[1])?),
            negative: beta + softplus(weights.number(negative, &[1])?),
            beta,
        };
        Ok(Arc::new(Self { activation: Activation::Xielu(curve), ..self.clone() }))
    }

    fn sizes(&self, by: SizedBy) -> SublayerSizes {
        // In the forward the product of gate and up, and the output beside its residual.
        let (inside, hidden) = (self.intermediate_size, by.hidden_size);
        let kept = if matches!(self.gate_up, Projections::Same(_)) { inside } else { 2 * inside };
        let ones = if self.is_alone() { inside } else { 0 };
        SublayerSizes { kept, forward: inside + ones + hidden, backward: 3 * inside + ones + 2 * hidden }
    }
}

impl Compute for spec::Gated {
    type Kept = GatedKept;

    fn activations(&self, x: &Tensor<2>, linears: &mut Linears<'_>, _: Mixing<'_>) -> GatedKept {
        self.inside(x, linears)
    }

    fn output(&self, kept: &GatedKept, residual: Option<Tensor<2>>, linears: &mut Linears<'_>) -> Tensor<2> {
        let h = gated(linears.context.place(), self.activation, &self.above(&kept.gate), &self.factor(kept));
        linears.forward(self.down, &h, residual)
    }

    fn backward(&self, kept: GatedKept, given: Backward<'_>, linears: &mut Linears<'_>) -> Option<Tensor<2>> {
        self.backward_and(kept, given, linears, |_, _| ()).0
    }
}

impl spec::Gated {
    pub(super) fn inside(&self, x: &Tensor<2>, linears: &mut Linears<'_>) -> GatedKept {
        let [gate, up] = linears.project(self.gate_up, x);
        GatedKept { gate: self.scaled(gate), up }
    }

    /// What the gate's activation is multiplied by: nothing where it is alone.
    fn factor(&self, kept: &GatedKept) -> Tensor<2> {
        if self.is_alone() { kept.gate.ones_like() } else { kept.up.clone() }
    }

    /// Whether nothing is multiplied with the gate.
    pub(super) fn is_alone(&self) -> bool {
        matches!(self.gate_up, Projections::Same(_)) && self.activation != Activation::Relu
    }

    /// What the gate has more than its cutoff, where there is such.
    fn above(&self, gate: &Tensor<2>) -> Tensor<2> {
        let Some(cutoff) = self.cutoff else { return gate.clone() };
        let (centred, deviation) = spread(gate);
        (centred - deviation * cutoff).clamp_min(0.0).cast(gate.dtype())
    }

    /// The gradient of the gate from that of [`above`](Self::above), through its mean and deviation.
    fn above_backward(&self, d: Tensor<2>, gate: &Tensor<2>) -> Tensor<2> {
        let Some(cutoff) = self.cutoff else { return d };
        let ((centred, deviation), width) = (spread(gate), as_f64(self.intermediate_size));
        let is_below = (centred.clone() - deviation.clone() * cutoff).lower_equal_elem(0.0);
        let d = d.cast(DType::F32).mask_fill(is_below, 0.0);
        let of_all = d.clone().sum_dim(1) / width;
        (d - of_all.clone() - centred * (of_all * cutoff / deviation)).cast(gate.dtype())
    }

    fn scaled(&self, gate: Tensor<2>) -> Tensor<2> {
        match self.gate_scale {
            Some(scale) => gate * scale,
            None => gate,
        }
    }

    /// [`backward`](Compute::backward), and the scalar product of every token's output and `dy`, `[tokens]`.
    pub(super) fn backward_with_product(
        &self,
        kept: GatedKept,
        given: Backward<'_>,
        linears: &mut Linears<'_>,
    ) -> (Option<Tensor<2>>, Tensor<1>) {
        let dy = given.dy;
        // But for its bias, the output is linear in what is inside.
        let product = |h: Tensor<2>, dh: &Tensor<2>| (h * dh.clone()).sum_dim(1).squeeze_dim(1);
        let of_bias = linears.bias(self.down).map(|bias| (dy.clone() * bias.cast(dy.dtype()).unsqueeze()).sum_dim(1));
        let (dx, product) = self.backward_and(kept, given, linears, product);
        (dx, of_bias.map_or(product.clone(), |of_bias| product + of_bias.squeeze_dim(1)))
    }

    fn backward_and<R>(
        &self,
        kept: GatedKept,
        Backward { dy, x, input_grad }: Backward<'_>,
        linears: &mut Linears<'_>,
        look: impl FnOnce(Tensor<2>, &Tensor<2>) -> R,
    ) -> (Option<Tensor<2>>, R) {
        let place = linears.context.place();
        let up = self.factor(&kept);
        let whole = kept.gate;
        let gate = self.above(&whole);
        let h = gated(place, self.activation, &gate, &up);
        let dh = linears.backward(self.down, dy, &h, InputGrad::Fresh);
        let dh = dh.unwrap_or_else(|| gate.zeros_like());
        let seen = look(h, &dh);
        let (dgate, dup) = gated_backward(place, self.activation, &dh, &gate, &up);
        let dup = if self.is_alone() { dup.zeros_like() } else { dup };
        let dgate = self.scaled(self.above_backward(dgate, &whole));
        drop((dh, gate, up, whole));
        (linears.project_backward(self.gate_up, [dgate, dup], &x(), input_grad), seen)
    }
}

/// Rows less their means, and their standard deviations, `[tokens, 1]`, in `f32`.
fn spread(x: &Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    let x = x.clone().cast(DType::F32);
    let centred = x.clone() - x.mean_dim(1);
    let deviation = (centred.clone() * centred.clone()).mean_dim(1).sqrt();
    (centred, deviation.clamp_min(f64::from(f32::MIN_POSITIVE)))
}
