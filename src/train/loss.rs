//! The loss: cross-entropy of the target tokens, from the last block's output.
//!
//! Only rows that carry loss go through the norm and the head, a chunk of them at a time.

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::data::batch::Batch;
use crate::faults;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::ops::cross_entropy::{LossAndGrad, LossChunk, linear_cross_entropy, linear_cross_entropy_loss};
use crate::ops::norm::{rms_norm, rms_norm_backward};
use crate::ops::profile;

/// Sum of losses over target tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSum {
    /// In nats.
    pub sum: f64,
    /// Number of tokens in the sum.
    pub target_tokens: u64,
}

impl LossSum {
    /// Mean loss per target token, in nats; `None` where there is no target token.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
    pub fn mean(&self) -> Option<f64> {
        (self.target_tokens > 0).then(|| self.sum / self.target_tokens as f64)
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

/// The target tokens of a micro-batch.
#[derive(Debug)]
pub struct Targets {
    /// Rows of the last block's output that carry loss, on the device.
    rows: Tensor<1, Int>,
    /// The token that each of them is to predict.
    tokens: Vec<u32>,
}

impl Targets {
    /// The targets of a batch that is arranged for this model.
    #[must_use]
    pub fn new(model: &Model, batch: &Batch) -> Self {
        let row = |position| i32::try_from(position).unwrap_or(i32::MAX);
        let rows: Vec<i32> = batch.targets.iter().map(|target| row(target.position)).collect();
        let shape = [rows.len()];
        Self {
            rows: Tensor::from_data(TensorData::new(rows, shape), (&model.device(), DType::I32)),
            tokens: batch.targets.iter().map(|target| target.token).collect(),
        }
    }

    /// Number of target tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }
}

/// Losses of the target tokens in nats, `[targets]`, `f32`, and `grad_scale` times the gradient of their sum with
/// respect to the last block's output `x`, `[tokens, hidden_size]`.
#[must_use]
pub fn loss_and_grad(
    model: &Model,
    x: Tensor<2>,
    targets: Targets,
    grad_scale: f64,
    chunk: LossChunk,
) -> (Tensor<1>, Tensor<2>) {
    let Targets { rows, tokens } = targets;
    let (place, width) = (model.place(), profile::passes(&x, 2));
    let (hidden, no_grad) =
        profile::measure("target_rows", || width.clone(), || (x.clone().select(0, rows.clone()), x.zeros_like()));
    drop(x);
    let (normed, rstd) = rms_norm(place, &hidden, &model.norm, model.config.rms_norm_eps);
    let LossAndGrad { losses, dhidden } =
        linear_cross_entropy(place, &normed, &model.lm_head, &tokens, grad_scale, chunk);
    let dhidden = rms_norm_backward(place, &dhidden, &hidden, &model.norm, &rstd, hidden.zeros_like());
    let scatter = || no_grad.select_assign(0, rows, dhidden, IndexingUpdateOp::Add);
    (losses, profile::measure("target_rows", || width, scatter))
}

/// Loss of a micro-batch, without dropout and without gradients.
#[must_use]
pub fn eval_loss(model: &Model, adapters: &AdapterSet, batch: &Batch, chunk: LossChunk) -> LossSum {
    if batch.targets.is_empty() {
        return LossSum::default();
    }
    let batch = &*model.arranged(batch);
    let Targets { rows, tokens } = Targets::new(model, batch);
    let hidden = model.hidden(batch, adapters).select(0, rows);
    let (normed, _) = rms_norm(model.place(), &hidden, &model.norm, model.config.rms_norm_eps);
    let losses = linear_cross_entropy_loss(model.place(), &normed, &model.lm_head, &tokens, chunk);
    let losses = faults::read(losses, "the evaluation loss");
    LossSum { sum: losses.iter().map(|&loss| f64::from(loss)).sum(), target_tokens: batch.num_target_tokens() as u64 }
}
