//! The loss of a micro-batch, from the last block's output.
//!
//! Only rows that carry loss go through the norm and the head, a chunk of them at a time.

mod compared;
mod head;
mod targets;

use std::ops::AddAssign;

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::objective::{LossRows, Objective};
use super::references::References;
use crate::config::TrainConfig;
use crate::data::batch::Batch;
use crate::lora::{AdapterSet, FullTensor};
use crate::measure::figures::ObjectiveFigures;
use crate::model::Model;
use crate::ops::cross_entropy::LossChunk;
use crate::ops::norm::rms_norm_weight_grad;
use crate::ops::profile;
use crate::util::faults;
use crate::util::stats::as_f64;
use head::{HeadLoss, LossHead, ScoreHead, TextHead};

pub use compared::Compared;
pub use targets::Targets;

impl TrainConfig {
    /// Number of target tokens whose logits exist at a time.
    #[must_use]
    pub fn loss_chunk(&self) -> LossChunk {
        self.loss_chunk_tokens.map_or(LossChunk::Auto, LossChunk::Tokens)
    }
}

/// Sum of losses over what the objective counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSum {
    /// Of cross-entropies in nats.
    pub sum: f64,
    /// What it is divided by; of cross-entropies the number of target tokens.
    pub count: f64,
    /// Number of target tokens.
    pub target_tokens: u64,
    /// What else the objective reports.
    pub figures: ObjectiveFigures,
}

impl LossSum {
    /// The mean loss; `None` where nothing is counted.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }

    /// `exp` of the mean loss; `None` where the loss is not a cross-entropy.
    #[must_use]
    pub fn perplexity(&self) -> Option<f64> {
        self.mean().filter(|_| self.figures == ObjectiveFigures::default()).map(f64::exp)
    }
}

impl AddAssign for LossSum {
    fn add_assign(&mut self, other: Self) {
        self.sum += other.sum;
        self.count += other.count;
        self.target_tokens += other.target_tokens;
        self.figures += other.figures;
    }
}

/// Dynamic loss scale of `f16` (Micikevicius et al., 2018), with the constants of `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    scale: f64,
    good_steps: u32,
}

impl Default for LossScale {
    /// Before the first step.
    fn default() -> Self {
        Self { scale: 65_536.0, good_steps: 0 }
    }
}

impl LossScale {
    const GROWTH_INTERVAL: u32 = 2000;

    /// The factor by which the loss is multiplied.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// After a step whose loss and gradient were finite, or not.
    #[must_use]
    pub fn after(self, finite: bool) -> Self {
        match (finite, self.good_steps + 1) {
            (false, _) => Self { scale: (self.scale * 0.5).max(1.0), good_steps: 0 },
            (true, Self::GROWTH_INTERVAL) => Self { scale: self.scale * 2.0, good_steps: 0 },
            (true, good_steps) => Self { good_steps, ..self },
        }
    }
}

/// The loss of a micro-batch.
#[derive(Debug)]
pub struct MicroBatchLoss {
    /// Numbers whose sum is the loss, `f32`, still on the device.
    pub losses: Tensor<1>,
    /// Its part of what the step's sums are divided by.
    pub count: f64,
    /// Number of target tokens.
    pub target_tokens: u64,
    /// What else the objective reports.
    pub figures: ObjectiveFigures,
    /// Gradients of what is trained as a whole behind the last block, the embedding there as the head. That of the head that
    /// scores is that of the loss; the others are `grad_scale` times it.
    pub grads: Vec<(FullTensor, Tensor<2>)>,
}

/// What the losses of micro-batches are computed with.
#[derive(Clone, Copy, Debug)]
pub struct LossContext<'a> {
    /// The frozen model.
    pub model: &'a Model,
    /// Its adapters.
    pub adapters: &'a AdapterSet,
    /// The adapters before training, with which an objective may compare.
    pub reference: &'a AdapterSet,
    /// What is known of the model with these, where the objective needs no more.
    pub references: Option<&'a References>,
    /// What is minimised.
    pub objective: &'a dyn Objective,
    /// Number of target tokens whose logits exist at a time.
    pub chunk: LossChunk,
}

impl<'a> LossContext<'a> {
    fn head(&self) -> Box<dyn LossHead + 'a> {
        match self.adapters.score() {
            Some(score) => Box::new(ScoreHead(score)),
            None => Box::new(TextHead::new(self)),
        }
    }

    /// The same with the adapters before training.
    fn of_reference(self) -> Self {
        Self { adapters: self.reference, ..self }
    }

    /// The input of the head for each target, `[targets, hidden_size]`, from the last block's output.
    fn normed(&self, x: Tensor<2>, targets: &Targets) -> Tensor<2> {
        let norm = self.model.own_norm(self.adapters);
        norm.forward(self.model.place(), &targets.select(x), self.model.config.rms_norm_eps).0
    }

    /// The targets of a micro-batch, and the input of the head for each, without dropout.
    fn normed_targets(&self, batch: &Batch) -> (Tensor<2>, Targets) {
        let batch = &*self.model.arranged(batch, false);
        let targets = Targets::new(self.model, batch);
        (self.normed(self.model.hidden(batch, self.adapters), &targets), targets)
    }

    /// What a micro-batch's loss is compared with, of the last block's output of the reference, `[tokens, hidden_size]`, where that
    /// was needed.
    pub(super) fn compared(&self, targets: &Targets, reference: Option<Tensor<2>>, divergence: f64) -> Compared {
        let context = self.of_reference();
        let of_tokens = |x| log_probabilities(TextHead::new(&context).losses(&context.normed(x, targets), targets));
        let compute = || reference.map(of_tokens).unwrap_or_default();
        Compared::new(targets, self.references, divergence, compute)
    }

    /// The loss of a micro-batch, and `grad_scale` times its gradient with respect to the last block's output `x`,
    /// `[tokens, hidden_size]`.
    #[must_use]
    pub fn loss_and_grad(
        &self,
        x: Tensor<2>,
        targets: &Targets,
        compared: &Compared,
        grad_scale: f64,
    ) -> (MicroBatchLoss, Tensor<2>) {
        let Self { model, adapters, objective, .. } = *self;
        let (place, shape, width) = (model.place(), x.dims(), profile::passes(&x, 2));
        let hidden = profile::measure("target_rows", || width.clone(), || targets.select(x));
        let norm = model.own_norm(adapters);
        let (normed, rstd) = norm.forward(place, &hidden, model.config.rms_norm_eps);
        let head = self.head();
        let weigh = |losses: &dyn Fn() -> Tensor<1>| {
            let is_read = objective.needs().log_probabilities;
            objective.weigh(&LossRows {
                log_probabilities: &if is_read { log_probabilities(losses()) } else { Vec::new() },
                of_logits: &head.of_logits(&normed, targets),
                ..compared.rows(targets)
            })
        };
        let HeadLoss { losses, weighed, dhidden, mut grads } = head.loss_and_grad(&normed, targets, grad_scale, &weigh);
        let last_norm = FullTensor::Norm(model.config.last_norm);
        grads.extend(adapters.full.get(last_norm).map(|_| {
            let [dhidden, hidden] = [&dhidden, &hidden].map(|x| targets.cut(x.clone()));
            let grad = rms_norm_weight_grad(&dhidden, &hidden, &targets.cut(rstd.clone()));
            (last_norm, model.own_norm_backward(grad))
        }));
        let dhidden = norm.backward(place, &dhidden, &hidden, &rstd, hidden.zeros_like());
        #[expect(clippy::cast_possible_truncation, reason = "read as f32")]
        let losses = match weighed.loss {
            Some(loss) => Tensor::from_data([loss as f32], (&losses.device(), DType::F32)),
            None => losses,
        };
        let (count, figures, target_tokens) = (weighed.count, weighed.figures, targets.num_tokens() as u64);
        let loss = MicroBatchLoss { losses, count, target_tokens, figures, grads };
        (loss, profile::measure("target_rows", || width, || targets.scatter(dhidden, shape)))
    }

    /// Log-probability of every target token of a micro-batch in nats, as the objective sees it, without dropout.
    #[must_use]
    pub fn log_probabilities(&self, batch: &Batch) -> Vec<f32> {
        if batch.targets.is_empty() {
            return Vec::new();
        }
        let (normed, targets) = self.normed_targets(batch);
        log_probabilities(TextHead::new(self).losses(&normed, &targets))
    }

    /// By how much the mean log-probability of a micro-batch's documents is above the reference's, in nats, without dropout.
    #[must_use]
    pub fn divergence(&self, batch: &Batch) -> f64 {
        let sum = |of: Self| of.log_probabilities(batch).iter().map(|&p| f64::from(p)).sum::<f64>();
        (sum(*self) - sum(self.of_reference())) / as_f64(batch.documents.len().max(1))
    }

    /// Number of target tokens of a micro-batch that the model finds the most likely ones, without dropout.
    #[must_use]
    pub fn num_right_tokens(&self, batch: &Batch) -> usize {
        let (normed, targets) = self.normed_targets(batch);
        TextHead::new(self).num_right(&normed, &targets)
    }

    /// Loss of a micro-batch, without dropout and without gradients.
    #[must_use]
    pub fn eval_loss(&self, batch: &Batch) -> LossSum {
        if batch.targets.is_empty() {
            return LossSum::default();
        }
        let (normed, targets) = self.normed_targets(batch);
        let (head, needs) = (self.head(), self.objective.needs());
        let of_targets = log_probabilities(head.losses(&normed, &targets));
        let reference = || match needs.reference {
            Some(_) => self.of_reference().log_probabilities(batch),
            None => Vec::new(),
        };
        let mismatched = batch.mismatched.as_ref().filter(|_| needs.divergence);
        let divergence = mismatched.map_or(0.0, |batch| self.divergence(batch));
        let weighed = self.objective.weigh(&LossRows {
            log_probabilities: &of_targets,
            of_logits: &head.of_logits(&normed, &targets),
            ..Compared::new(&targets, self.references, divergence, reference).rows(&targets)
        });
        let cross_entropy = || -of_targets.iter().map(|&log_probability| f64::from(log_probability)).sum::<f64>();
        LossSum {
            sum: weighed.loss.unwrap_or_else(cross_entropy),
            count: weighed.count,
            target_tokens: batch.num_target_tokens() as u64,
            figures: weighed.figures,
        }
    }
}

/// Log-probabilities, or scores, of losses that are minus these.
fn log_probabilities(losses: Tensor<1>) -> Vec<f32> {
    faults::read(losses.neg(), "the log-probabilities")
}
