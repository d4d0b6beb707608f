//! What makes losses of hidden states behind the last norm: the head of a language model, or one that scores.

use burn::tensor::{DType, Tensor};

use super::LossContext;
use super::targets::Targets;
use crate::lora::FullTensor;
use crate::model::OwnHead;
use crate::ops::cross_entropy::{Head, HeadGrads, LossChunk, linear_cross_entropy, linear_cross_entropy_loss};
use crate::ops::kernels::Place;
use crate::ops::product::matmul;
use crate::train::inputs::scores_of;
use crate::train::objective::{Needs, OfLogits, Weighed};
use crate::util::faults;

/// The losses of a micro-batch's targets, and their gradients.
pub(super) struct HeadLoss {
    /// Negative log-likelihoods in nats, or negative scores, `f32`, `[targets]`, without those that fill up.
    pub(super) losses: Tensor<1>,
    pub(super) weighed: Weighed,
    /// `grad_scale` times the gradient of the weighted losses with respect to the head's input, `[targets, hidden_size]`.
    pub(super) dhidden: Tensor<2>,
    /// The gradients of what of the head is trained in full.
    pub(super) grads: Vec<(FullTensor, Tensor<2>)>,
}

/// What an objective makes of losses, which it may not ask for.
pub(super) type Weigh<'a> = &'a dyn Fn(&dyn Fn() -> Tensor<1>) -> Weighed;

/// A head, of hidden states `[targets, hidden_size]`.
pub(super) trait LossHead {
    /// The losses alone, see [`HeadLoss`].
    fn losses(&self, hidden: &Tensor<2>, targets: &Targets) -> Tensor<1>;

    /// The losses and their gradients.
    fn loss_and_grad(&self, hidden: &Tensor<2>, targets: &Targets, grad_scale: f64, weigh: Weigh<'_>) -> HeadLoss;

    /// What the objective needs of the logits of each target.
    fn of_logits(&self, _hidden: &Tensor<2>, _targets: &Targets) -> Vec<f32> {
        Vec::new()
    }
}

/// The head of a language model with what adapters have in place of it: the losses are cross-entropies.
pub(super) struct TextHead {
    place: Place,
    own: OwnHead,
    /// Likewise, of an input that is divided by the temperature.
    at_temperature: OwnHead,
    /// All of it, where it is trained.
    trained: Option<FullTensor>,
    needs: Needs,
    chunk: LossChunk,
}

impl TextHead {
    pub(super) fn new(context: &LossContext<'_>) -> Self {
        let LossContext { model, adapters, objective, chunk, .. } = *context;
        let trained = adapters.full.iter().map(|(full, _)| full).find(|full| full.is_head());
        let (own, needs) = (model.own_head(adapters), objective.needs());
        let at_temperature = own.over(needs.temperature.unwrap_or(1.0));
        Self { place: model.place(), own, at_temperature, trained, needs, chunk }
    }

    /// The head and its input such that all logits are divided by the temperature.
    fn at_temperature(&self, hidden: &Tensor<2>) -> (Tensor<2>, Head<'_>) {
        let hidden = hidden.clone();
        let scaled = match self.needs.temperature {
            Some(temperature) => hidden / temperature,
            None => hidden,
        };
        (scaled, self.at_temperature.head())
    }

    /// Number of targets that are the most likely tokens.
    pub(super) fn num_right(&self, hidden: &Tensor<2>, targets: &Targets) -> usize {
        let (head, tokens) = (self.own.head(), &targets.tokens);
        let [vocab_size, _] = head.weight.dims();
        let size = self.chunk.tokens(self.place, head.weight.dims(), tokens.len());
        let num_right = |(index, targets): (usize, &[u32])| {
            let hidden = hidden.clone().narrow(0, index * size, targets.len());
            let logits: Vec<f32> = faults::read(head.logits(self.place, &hidden), "the logits of a token");
            let is_right =
                |(logits, token): &(&[f32], &u32)| logits.iter().all(|logit| *logit <= logits[**token as usize]);
            logits.chunks(vocab_size).zip(targets).filter(is_right).count()
        };
        tokens[..targets.num_tokens()].chunks(size).enumerate().map(num_right).sum()
    }
}

impl LossHead for TextHead {
    fn losses(&self, hidden: &Tensor<2>, targets: &Targets) -> Tensor<1> {
        let (hidden, head) = self.at_temperature(hidden);
        targets.cut(linear_cross_entropy_loss(self.place, &hidden, head, &targets.tokens, self.chunk))
    }

    fn loss_and_grad(&self, hidden: &Tensor<2>, targets: &Targets, grad_scale: f64, weigh: Weigh<'_>) -> HeadLoss {
        let (scaled, head) = self.at_temperature(hidden);
        // The gradient of the whole head is a sum over the targets, whose weights are known before it.
        let weighed = self.trained.map(|_| weigh(&|| self.losses(hidden, targets)));
        let inputs = weighed.as_ref().map(|weighed| {
            let weights = weighed.weights.clone().unwrap_or_else(|| vec![1.0; targets.num_tokens()]);
            weighted(scaled.clone().cast(DType::F32), weights)
        });
        let head = Head { inputs: inputs.as_ref(), ..head };
        // Every token's own gradient, which its weight multiplies once it is known: the head's products run once.
        let (losses, grads) = linear_cross_entropy(self.place, &scaled, head, &targets.tokens, grad_scale, self.chunk);
        let losses = targets.cut(losses);
        let weighed = weighed.unwrap_or_else(|| weigh(&|| losses.clone()));
        let HeadGrads { dhidden, drows, dweight } = grads;
        let dhidden = weighed.weigh(dhidden);
        let mut grads: Vec<_> = self.trained.zip(dweight).into_iter().collect();
        grads.extend(drows.map(|drows| {
            // What fills up goes nowhere here either.
            let [drows, scaled] = [weighed.weigh(drows), scaled].map(|x| targets.cut(x).cast(DType::F32));
            (FullTensor::Tokens, matmul(&drows.transpose(), &scaled, self.place.f32_products()))
        }));
        let dhidden = match self.needs.temperature {
            Some(temperature) => dhidden / temperature,
            None => dhidden,
        };
        HeadLoss { losses, weighed, dhidden, grads }
    }

    fn of_logits(&self, hidden: &Tensor<2>, targets: &Targets) -> Vec<f32> {
        let Some(needed) = self.needs.of_logits else { return Vec::new() };
        let ((hidden, head), num_tokens) = (self.at_temperature(hidden), targets.num_tokens());
        let size = self.chunk.tokens(self.place, head.weight.dims(), num_tokens);
        let of_chunk = |start: usize| {
            let hidden = hidden.clone().narrow(0, start, size.min(num_tokens - start));
            let logits = head.logits(self.place, &hidden);
            let logits = logits.clone() - logits.max_dim(1);
            let log_sum = logits.clone().exp().sum_dim(1).log();
            let found = match needed {
                OfLogits::Squares => (logits * 2.0).exp().sum_dim(1).log() - log_sum * 2.0,
                OfLogits::Entropy => log_sum.clone() - ((logits.clone() - log_sum).exp() * logits).sum_dim(1),
            };
            faults::read(found.squeeze_dim::<1>(1), "the logits of all tokens")
        };
        (0..num_tokens).step_by(size).flat_map(of_chunk).collect()
    }
}

/// The head that scores texts, `[1, hidden_size]`: the losses are negative scores.
pub(super) struct ScoreHead<'a>(pub(super) &'a Tensor<2>);

impl ScoreHead<'_> {
    /// `scale` times the gradient of each row's loss with respect to the row.
    fn hidden_grad(&self, hidden: &Tensor<2>, scale: f64) -> Tensor<2> {
        (self.0.clone() * -scale).expand(hidden.dims()).cast(hidden.dtype())
    }
}

impl LossHead for ScoreHead<'_> {
    fn losses(&self, hidden: &Tensor<2>, targets: &Targets) -> Tensor<1> {
        targets.cut(-scores_of(hidden, self.0))
    }

    fn loss_and_grad(&self, hidden: &Tensor<2>, targets: &Targets, grad_scale: f64, weigh: Weigh<'_>) -> HeadLoss {
        let losses = self.losses(hidden, targets);
        let weighed = weigh(&|| losses.clone());
        let dhidden = weighed.weigh(self.hidden_grad(hidden, grad_scale));
        let grads = weighed.weights.iter().map(|weights| (FullTensor::Score, vector_grad(hidden, weights))).collect();
        HeadLoss { losses, weighed, dhidden, grads }
    }
}

/// The gradient with respect to the vector of minus the scores of the rows of `hidden`, each times its weight, `[1, hidden_size]`.
fn vector_grad(hidden: &Tensor<2>, weights: &[f32]) -> Tensor<2> {
    let weights = Tensor::<1>::from_data(weights, (&hidden.device(), DType::F32)).unsqueeze_dim::<2>(1);
    -(hidden.clone().narrow(0, 0, weights.dims()[0]).cast(DType::F32) * weights).sum_dim(0)
}

impl Weighed {
    /// Gradients of targets' own losses, each times its weight.
    fn weigh(&self, grads: Tensor<2>) -> Tensor<2> {
        match &self.weights {
            Some(weights) => weighted(grads, weights.clone()),
            None => grads,
        }
    }
}

/// Rows times their weights; those of targets that fill up weigh nothing.
fn weighted(rows: Tensor<2>, mut weights: Vec<f32>) -> Tensor<2> {
    weights.resize(rows.dims()[0], 0.0);
    let (dtype, device) = (rows.dtype(), rows.device());
    let weights = Tensor::<1>::from_data(weights.as_slice(), (&device, DType::F32));
    (rows.cast(DType::F32) * weights.unsqueeze_dim(1)).cast(dtype)
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
        let values = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(scores_of(&hidden, &score).into_data().try_to_vec::<f32>().unwrap(), [-1.0, -6.0, 9.0]);
        assert_eq!(values(ScoreHead(&score).hidden_grad(&hidden, 0.5)), [-1.0, 0.0, 0.5].repeat(3));
        // Rows that fill up have no weight.
        assert_eq!(values(vector_grad(&hidden, &[1.0, -2.0])), [-3.0, -1.0, 5.0]);
    }
}
