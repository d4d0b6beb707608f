//! What goes along the tokens of a document: short convolutions, and the delta rule.

use burn::tensor::Tensor;

use super::Properties;
use crate::ops::layout::Layout;
use crate::ops::plain::delta_rule::{DeltaInputs, Gates, plain_delta_rule, plain_delta_rule_backward};
use crate::ops::plain::short_conv::{
    plain_gated_conv, plain_gated_conv_backward, plain_short_conv, plain_short_conv_backward,
};

/// Short convolutions and the delta rule, as in [`short_conv`](crate::ops::short_conv) and
/// [`delta_rule`](crate::ops::delta_rule).
#[expect(missing_docs, reason = "the doors describe the operations")]
pub trait Recurrent: Properties {
    fn short_conv(&self, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        plain_short_conv(x, weight, layout)
    }

    fn short_conv_backward(&self, dy: &Tensor<2>, x: &Tensor<2>, weight: &Tensor<2>, layout: &Layout) -> Tensor<2> {
        plain_short_conv_backward(dy, x, weight, layout)
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
}
