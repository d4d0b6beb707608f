//! Sections `[train]`, `[optimizer]`, `[scheduler]`, `[eval]` of a recipe.

use crate::device::Dtype;
use serde::Serialize;

/// Section `[train]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainConfig {
    /// Type of activations and matrix products. Adapters, moments, norms and the loss stay in `f32`.
    pub precision: Dtype,
    /// Rows in one forward and backward pass.
    pub micro_batch_size: usize,
    /// Micro-batches in one step.
    pub gradient_accumulation_steps: usize,
    /// Passes over the training rows; absent when only `max_steps` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_epochs: Option<f64>,
    /// Steps after which training ends, whatever `num_epochs` says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<u64>,
    /// Keep only the input of every block and compute the rest again on the way back.
    pub gradient_checkpointing: bool,
    /// Gradients whose global norm is larger are scaled down to it; 0 turns clipping off.
    pub max_grad_norm: f64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            precision: Dtype::F32,
            micro_batch_size: 4,
            gradient_accumulation_steps: 1,
            num_epochs: None,
            max_steps: None,
            gradient_checkpointing: true,
            max_grad_norm: 1.0,
        }
    }
}

/// Section `[optimizer]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerConfig {
    /// Which optimizer.
    pub name: OptimizerName,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Decay of the first and second moment, in `[0, 1)`.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self { name: OptimizerName::Adamw, learning_rate: 2e-4, weight_decay: 0.0, betas: [0.9, 0.999], eps: 1e-8 }
    }
}

/// Which optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
    #[default]
    Adamw,
}

/// Section `[scheduler]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SchedulerConfig {
    /// Shape of the decay after warm-up.
    pub lr_scheduler: LrScheduler,
    /// Share of all steps in which the learning rate rises from 0; excludes `warmup_steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_ratio: Option<f64>,
    /// Steps in which the learning rate rises from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// Where the decay ends, as a share of the peak.
    pub min_lr_ratio: f64,
}

/// Shape of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LrScheduler {
    /// Half a cosine down to `min_lr_ratio`.
    #[default]
    Cosine,
    /// A straight line down to `min_lr_ratio`.
    Linear,
    /// The peak to the end.
    Constant,
}

/// Section `[eval]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EvalConfig {
    /// Steps between evaluations; absent: before the first step and after the last only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_steps: Option<u64>,
    /// Micro-batches in an evaluation; absent: the whole set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_batches: Option<usize>,
    /// Evaluations without a better loss after which training stops.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stopping_patience: Option<usize>,
    /// Prompts continued at every evaluation.
    pub generate: Vec<String>,
}
