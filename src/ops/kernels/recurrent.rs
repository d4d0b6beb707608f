//! What goes along the tokens of a document: short convolutions, the delta rule, and state spaces.

use burn::tensor::Tensor;

use super::Properties;
use crate::ops::layout::Layout;
use crate::ops::plain::delta_rule::{DeltaInputs, Gates, plain_delta_rule, plain_delta_rule_backward};
use crate::ops::plain::next::{Convolution, TextRows, plain_convolve_next, plain_states_next};
use crate::ops::plain::short_conv::{
    ConvWeights, plain_gated_conv, plain_gated_conv_backward, plain_short_conv, plain_short_conv_backward,
};
use crate::ops::plain::state_space::{StateGates, StateInputs, plain_state_space, plain_state_space_backward};

/// Short convolutions, the delta rule and state spaces, as in [`short_conv`](crate::ops::short_conv),
/// [`delta_rule`](crate::ops::delta_rule) and [`state_space`](crate::ops::state_space).
#[expect(missing_docs, reason = "the doors describe the operations")]
pub trait Recurrent: Properties {
    /// Behind the last inputs of each text, and these of the tokens.
    fn convolve_next(
        &self,
        conv: Convolution<'_>,
        last: Vec<Tensor<2>>,
        texts: &[TextRows],
        x: &Tensor<2>,
    ) -> (Tensor<2>, Vec<Tensor<2>>) {
        plain_convolve_next(last, texts, x, |x, layout| self.convolve(conv, x, layout))
    }

    fn convolve(&self, conv: Convolution<'_>, x: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        match conv {
            Convolution::Short(weights) => self.short_conv(x, weights, layout),
            Convolution::Gated(weight) => self.gated_conv(x, weight, layout),
        }
    }

    /// From the state of each text, and the states after it.
    fn delta_rule_next(
        &self,
        memories: Vec<Tensor<3>>,
        texts: &[TextRows],
        inputs: DeltaInputs<'_>,
    ) -> (Tensor<2>, Vec<Tensor<3>>) {
        plain_states_next(memories, texts, |text, memory| {
            let [decay, strength] = [&inputs.gates.decay, &inputs.gates.strength].map(|gate| text.part(gate));
            let (qkv, gates) = (text.part(inputs.qkv), Gates { decay, strength });
            self.delta_rule(DeltaInputs { qkv: &qkv, gates: &gates, layout: &text.own, ..inputs }, Some(memory))
        })
    }

    /// Likewise.
    fn state_space_next(
        &self,
        memories: Vec<Tensor<3>>,
        texts: &[TextRows],
        inputs: StateInputs<'_>,
    ) -> (Tensor<2>, Vec<Tensor<3>>) {
        plain_states_next(memories, texts, |text, memory| {
            let [decay, strength] = [&inputs.gates.decay, &inputs.gates.strength].map(|gate| text.part(gate));
            let (xbc, gates) = (text.part(inputs.xbc), StateGates { decay, strength });
            self.state_space(StateInputs { xbc: &xbc, gates: &gates, layout: &text.own, ..inputs }, Some(memory))
        })
    }

    fn short_conv(&self, x: &Tensor<2>, weights: ConvWeights<'_>, layout: &Layout) -> Tensor<2> {
        plain_short_conv(x, weights, layout)
    }

    fn short_conv_backward(
        &self,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        weights: ConvWeights<'_>,
        layout: &Layout,
    ) -> Tensor<2> {
        plain_short_conv_backward(dy, x, weights, layout)
    }

    fn gated_conv(&self, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        plain_gated_conv(bcx, weight, layout)
    }

    fn gated_conv_backward(&self, dy: &Tensor<2>, bcx: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        plain_gated_conv_backward(dy, bcx, weight, layout)
    }

    /// With a state, that after the only document as well.
    fn delta_rule(&self, inputs: DeltaInputs<'_>, state: Option<Tensor<3>>) -> (Tensor<2>, Option<Tensor<3>>) {
        plain_delta_rule(self.f32_products(), inputs, state)
    }

    fn delta_rule_backward(&self, d_o: &Tensor<2>, inputs: DeltaInputs<'_>) -> (Tensor<2>, Gates<Tensor<2>>) {
        plain_delta_rule_backward(self.f32_products(), d_o, inputs)
    }

    /// With a state, that after the only document as well.
    fn state_space(&self, inputs: StateInputs<'_>, state: Option<Tensor<3>>) -> (Tensor<2>, Option<Tensor<3>>) {
        plain_state_space(self.f32_products(), inputs, state)
    }

    fn state_space_backward(&self, dy: &Tensor<2>, inputs: StateInputs<'_>) -> (Tensor<2>, StateGates<Tensor<2>>) {
        plain_state_space_backward(self.f32_products(), dy, inputs)
    }
}
