//! Sections `[train]`, `[optimizer]`, `[scheduler]`, `[eval]` of a recipe.

use std::ops::Bound;

use serde::Serialize;

use crate::device::Dtype;
use crate::ops::cross_entropy::LossChunk;
use crate::schema::{Choice, Problem, Section, Value};

/// Any number above 0.
const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

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
    /// What the backward finds of the forward, and what it computes again.
    pub gradient_checkpointing: GradientCheckpointing,
    /// Target tokens whose logits exist at a time; absent: as many as fill 96 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_chunk_tokens: Option<usize>,
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
            gradient_checkpointing: GradientCheckpointing::On,
            loss_chunk_tokens: None,
            max_grad_norm: 1.0,
        }
    }
}

impl TrainConfig {
    /// Reads section `[train]`. Without `num_epochs` and `max_steps` it is one epoch.
    pub fn read(section: &mut Section) -> Self {
        let default = Self::default();
        let config = Self {
            precision: section.choice("precision", default.precision),
            micro_batch_size: section.count("micro_batch_size", default.micro_batch_size, 1..),
            gradient_accumulation_steps: section.count(
                "gradient_accumulation_steps",
                default.gradient_accumulation_steps,
                1..,
            ),
            num_epochs: section.optional_number("num_epochs", POSITIVE),
            max_steps: section.optional_count("max_steps", 1..),
            gradient_checkpointing: GradientCheckpointing::read(section).unwrap_or(default.gradient_checkpointing),
            loss_chunk_tokens: section.optional_count("loss_chunk_tokens", 1..),
            max_grad_norm: section.number("max_grad_norm", default.max_grad_norm, 0.0..),
        };
        match (config.num_epochs, config.max_steps) {
            (None, None) => Self { num_epochs: Some(1.0), ..config },
            _ => config,
        }
    }

    /// How many target tokens' logits exist at a time.
    #[must_use]
    pub fn loss_chunk(&self) -> LossChunk {
        self.loss_chunk_tokens.map_or(LossChunk::Auto, LossChunk::Tokens)
    }
}

/// What of a block's forward is kept for its backward. In a recipe: `false`, `true` or `"offload"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientCheckpointing {
    /// Everything that the backward needs.
    Off,
    /// The block's input; the rest is computed again on the way back.
    On,
    /// The block's input, in host memory until the backward comes near it: for long sequences on a GPU.
    Offload,
}

impl GradientCheckpointing {
    const KEY: &'static str = "gradient_checkpointing";

    fn read(section: &mut Section) -> Option<Self> {
        section.optional(Self::KEY, "true, false or \"offload\"", |value| match value {
            Value::Boolean(on) => Ok(Self::from(*on)),
            Value::String(text) => match text.to_lowercase().as_str() {
                "offload" if text == "offload" => Ok(Self::Offload),
                "true" | "false" => Err(Some(format!("write {} without quotes", text.to_lowercase()))),
                "offload" | "cpu" | "cpu_offload" => {
                    Err(Some("block inputs in host memory: this trainer calls it \"offload\"".into()))
                }
                "unsloth" => Err(Some("what Unsloth does is called \"offload\" here".into())),
                _ => Err(None),
            },
            _ => Err(None),
        })
    }
}

impl From<bool> for GradientCheckpointing {
    fn from(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }
}

impl Serialize for GradientCheckpointing {
    /// As it is written in a recipe.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_bool(false),
            Self::On => serializer.serialize_bool(true),
            Self::Offload => serializer.serialize_str("offload"),
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

impl Choice for OptimizerName {
    const NAMES: &'static [(&'static str, Self)] = &[("adamw", Self::Adamw)];
    const PEERS: &'static [(&'static str, &'static str)] = &[
        ("adam", "adamw"),
        ("adamw_torch", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("adamw_hf", "adamw"),
        ("torch.optim.adamw", "adamw"),
        ("paged_adamw_32bit", "adamw"),
    ];
}

impl OptimizerConfig {
    /// Reads section `[optimizer]`.
    pub fn read(section: &mut Section) -> Self {
        let default = Self::default();
        Self {
            name: section.choice("name", default.name),
            learning_rate: section.number(
                "learning_rate",
                default.learning_rate,
                (Bound::Excluded(0.0), Bound::Included(1.0)),
            ),
            weight_decay: section.number("weight_decay", default.weight_decay, 0.0..=1.0),
            betas: section.numbers("betas", default.betas, 0.0..1.0),
            eps: section.number("eps", default.eps, POSITIVE),
        }
    }
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

impl Choice for LrScheduler {
    const NAMES: &'static [(&'static str, Self)] =
        &[("cosine", Self::Cosine), ("linear", Self::Linear), ("constant", Self::Constant)];
    const PEERS: &'static [(&'static str, &'static str)] = &[
        ("constant_with_warmup", "constant"),
        ("cosine_with_min_lr", "cosine"),
        ("cosine_decay", "cosine"),
        ("linear_schedule", "linear"),
    ];
}

impl SchedulerConfig {
    /// Reads section `[scheduler]`.
    pub fn read(section: &mut Section) -> Self {
        let config = Self {
            lr_scheduler: section.choice("lr_scheduler", LrScheduler::Cosine),
            warmup_ratio: section.optional_number("warmup_ratio", 0.0..1.0),
            warmup_steps: section.optional_count("warmup_steps", 0..),
            min_lr_ratio: section.number("min_lr_ratio", 0.0, 0.0..=1.0),
        };
        if section.has("warmup_ratio") && section.has("warmup_steps") {
            let message = "`scheduler.warmup_steps` excludes `scheduler.warmup_ratio`: they say the same thing twice";
            section.reject("warmup_steps", Problem::new(message).hint("keep one of the two"));
        }
        config
    }
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

impl EvalConfig {
    /// Reads section `[eval]`.
    pub fn read(section: &mut Section) -> Self {
        Self {
            eval_steps: section.optional_count("eval_steps", 1..),
            max_batches: section.optional_count("max_batches", 1..),
            early_stopping_patience: section.optional_count("early_stopping_patience", 1..),
            generate: section.strings("generate"),
        }
    }
}
