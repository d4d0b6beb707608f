//! The update of parameters, and the norm of gradients.

use burn::tensor::{DType, Tensor};

use super::Properties;
use crate::ops::plain::updates::{AdamState, Coded, Update, plain_adamw, plain_adamw_8bit, plain_sum_of_squares};

/// Updates, as in [`adamw`](crate::ops::adamw) and [`adamw_8bit`](crate::ops::adamw_8bit).
#[expect(missing_docs, reason = "the doors describe the operations")]
pub trait Updates: Properties {
    fn adamw(
        &self,
        states: Vec<(AdamState, &Tensor<2>)>,
        update: &Update,
        factor: Option<&Tensor<1>>,
    ) -> Vec<AdamState> {
        assert!(factor.is_none(), "made by no one");
        states.into_iter().map(|(state, grad)| plain_adamw(state, grad, update)).collect()
    }

    fn adamw_8bit(&self, state: Coded, grad: &Tensor<2>, update: &Update, factor: Option<&Tensor<1>>) -> Coded {
        assert!(factor.is_none(), "made by no one");
        plain_adamw_8bit(state, grad, update)
    }

    /// The factor of the gradients, `[1]`, which clips their mean over `count` to `max_norm`, unless that is 0; `None` where no update
    /// takes one that the host does not know. `numbers` are losses and the sum of the gradients' squares, `[losses + 1]`; where one of
    /// them is not finite, updates with the factor leave all as it is.
    fn grad_factor(&self, _numbers: &Tensor<1>, _max_norm: f64, _count: f64) -> Option<Tensor<1>> {
        None
    }

    /// The numbers of some matrices in `f32`, one after another.
    fn flatten(&self, matrices: Vec<Tensor<2>>) -> Tensor<1> {
        Tensor::cat(matrices.into_iter().map(|matrix| matrix.flatten(0, 1).cast(DType::F32)).collect(), 0)
    }

    fn sum_of_squares(&self, blocks: &[Vec<&Tensor<2>>]) -> Tensor<1> {
        plain_sum_of_squares(blocks)
    }
}
