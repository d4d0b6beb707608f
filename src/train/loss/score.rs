//! Scores of texts: the product of the last hidden state with one vector, as `...ForSequenceClassification` of transformers
//! has it with one label.

use burn::tensor::{DType, Tensor};

use super::{Targets, normed_targets};
use crate::data::batch::{Batch, RowSource};
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::ops::cross_entropy::{HeadGrads, LossAndGrad};
use crate::util::faults;

/// Minus the score of each row of `hidden`, `[rows, hidden_size]`, in `f32`, and `scale` times its gradient.
pub(super) fn negative_scores(hidden: &Tensor<2>, score: &Tensor<2>, scale: f64) -> LossAndGrad {
    let losses = -(hidden.clone().cast(DType::F32) * score.clone()).sum_dim(1).squeeze_dim::<1>(1);
    let dhidden = (score.clone() * -scale).expand(hidden.dims()).cast(hidden.dtype());
    LossAndGrad { losses, grads: HeadGrads { dhidden, drows: None, dweight: None } }
}

/// The gradient with respect to the vector of minus the scores of the rows of `hidden`, each times its weight, `[1, hidden_size]`.
pub(super) fn vector_grad(hidden: &Tensor<2>, weights: &[f32]) -> Tensor<2> {
    let weights = Tensor::<1>::from_data(weights, (&hidden.device(), DType::F32)).unsqueeze_dim::<2>(1);
    -(hidden.clone().narrow(0, 0, weights.dims()[0]).cast(DType::F32) * weights).sum_dim(0)
}

/// The scores of the micro-batch's targets, the last tokens of texts, without dropout; `None` without a head that scores.
#[must_use]
pub fn scores(model: &Model, adapters: &AdapterSet, batch: &Batch) -> Option<Vec<f32>> {
    let score = adapters.score()?;
    let (normed, targets) = normed_targets(model, adapters, batch);
    Some(of_normed(&normed, &targets, score))
}

/// The score of a text, without dropout; `None` without a head that scores.
#[must_use]
pub fn score(model: &Model, adapters: &AdapterSet, ids: &[u32]) -> Option<f32> {
    let mut batch = Batch::default();
    batch.push_scored(RowSource { file: 0, row: 0 }, ids);
    batch.row_lengths.push(ids.len());
    scores(model, adapters, &batch)?.first().copied()
}

/// The scores of targets.
pub(super) fn of_normed(normed: &Tensor<2>, targets: &Targets, score: &Tensor<2>) -> Vec<f32> {
    let losses = negative_scores(normed, score, 1.0).losses.narrow(0, 0, targets.num_tokens());
    faults::read(-losses, "the scores")
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::ops::host;

    #[test]
    fn scores_and_their_gradients_are_those_of_a_product() {
        let device = Device::flex();
        let hidden: Tensor<2> = host::tensor(vec![1.0, 2.0, 3.0, -1.0, 0.5, 4.0, 9.0, 9.0, 9.0], [3, 3], &device);
        let score: Tensor<2> = host::tensor(vec![2.0, 0.0, -1.0], [1, 3], &device);
        let LossAndGrad { losses, grads: HeadGrads { dhidden, .. } } = negative_scores(&hidden, &score, 0.5);
        let values = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(losses.into_data().try_to_vec::<f32>().unwrap(), [1.0, 6.0, -9.0]);
        assert_eq!(values(dhidden), [-1.0, 0.0, 0.5].repeat(3));
        // Rows that fill up have no weight.
        assert_eq!(values(vector_grad(&hidden, &[1.0, -2.0])), [-3.0, -1.0, 5.0]);
    }
}
