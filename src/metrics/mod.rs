//! The figures of a step, and where they are written.

use serde::Serialize;

use crate::schema::Section;

/// Section `[logging]` of a recipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoggingConfig {
    /// Steps between two lines on the console (metrics.jsonl and TensorBoard get every step).
    pub logging_steps: u64,
    /// Write TensorBoard event files.
    pub tensorboard: bool,
    /// Milliseconds between two samples of the GPU and the host.
    pub gpu_sample_ms: u64,
}

impl Default for LoggingConfig {
    fn default() -> Self {
        Self { logging_steps: 1, tensorboard: true, gpu_sample_ms: 100 }
    }
}

impl LoggingConfig {
    /// Reads section `[logging]`.
    pub fn read(section: &mut Section) -> Self {
        let default = Self::default();
        Self {
            logging_steps: section.count("logging_steps", default.logging_steps, 1..),
            tensorboard: section.boolean("tensorboard", default.tensorboard),
            gpu_sample_ms: section.count("gpu_sample_ms", default.gpu_sample_ms, 10..=60_000),
        }
    }
}

/// The figures of one step: the line of metrics.jsonl, field by field. What was not measured is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(default)]
pub struct StepMetrics {
    /// Optimizer update, from 1.
    pub step: u64,
    /// Passes over the training rows so far.
    pub epoch: f64,
    /// Mean loss of the step's target tokens, in nats.
    pub loss: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens of the step that are not padding.
    pub tokens: u64,
    /// Tokens of the step that carry loss.
    pub target_tokens: u64,
    /// `tokens / step_seconds`.
    pub tokens_per_second: f64,
    /// Wall time of the step.
    pub step_seconds: f64,
    /// Time the loop waited for data.
    pub data_wait_seconds: f64,
    /// Time of the forward and backward passes.
    pub forward_backward_seconds: f64,
    /// Time of clipping and the update.
    pub optimizer_seconds: f64,
}
