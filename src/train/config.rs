//! Sections `[train]`, `[optimizer]`, `[scheduler]`, `[eval]` of a recipe.

use std::fmt;
use std::ops::Bound;

use serde::Serialize;

use super::optimizer::OptimizerName;
use super::precision::Precision;
use super::schedule::LrScheduler;
use super::task::config::TaskConfig;
use crate::ops::cross_entropy::LossChunk;
use crate::schema::{Choice, Problem, Section, Value, section};

const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

section! {
    /// Section `[train]`.
    pub struct TrainConfig then check {
        /// Type of activations and matrix products: "f32", "bf16" or "f16". Adapters, optimizer and loss stay in f32.
        /// "tf32" is "f32" whose products a GPU may compute in TF32, with 11 significant bits and three times as fast.
        precision: Precision = Precision::F32 => choice(), LaterSteps,
            ["bf16", "use_bf16"; "write precision = \"bf16\""],
            ["fp16", "use_fp16", "f16"; "write precision = \"f16\""],
            ["fp32", "f32"; "write precision = \"f32\""],
            ["tf32"; "write precision = \"tf32\""],
            ["mixed_precision", "compute_dtype", "amp", "bnb_4bit_compute_dtype", "dtype"];
        /// Rows in one forward and backward pass.
        micro_batch_size: usize = 4 => count(1..), OtherRows + steps,
            ["batch_size", "per_device_train_batch_size", "micro_batch", "train_batch_size", "per_device_batch_size", "mbs",
             "device_batch_size"];
        /// Micro-batches in one step: the update is that of all their rows together.
        gradient_accumulation_steps: usize = 1 => count(1..), LaterSteps + steps,
            ["global_batch_size", "effective_batch_size";
             "rows in a step are micro_batch_size x gradient_accumulation_steps"],
            ["grad_accum", "gradient_accumulation", "grad_accumulation_steps", "accumulate_grad_batches",
             "grad_accum_steps"];
        /// All micro-batches of a step go through a block before the next block is used, so that weights on disk or in host
        /// memory are brought once a step. The inputs of their blocks are kept meanwhile. Nothing else changes.
        layered_accumulation: bool = false => boolean(), None;
        /// Passes over the training rows. Default: 1, or none where `max_steps` is given.
        num_epochs: Option<f64> = Some(1.0) => optional_number(POSITIVE), None + steps,
            ["epochs", "num_train_epochs", "n_epochs", "max_epochs", "epoch"];
        /// Steps after which training ends in any case. Default: none.
        max_steps: Option<u64> = None => optional_count(1..) like 1000, None + steps,
            ["iters", "steps", "num_steps", "max_train_steps", "max_steps_per_epoch", "num_iters"];
        /// Keep only the input of every block and compute the rest again on the way back: less memory, more time. "auto":
        /// only where the memory is too small for a step without. "offload" keeps those inputs in host memory meanwhile, for
        /// long sequences on a GPU.
        gradient_checkpointing: GradientCheckpointing = GradientCheckpointing::Auto
            => any("\"auto\", true, false or \"offload\"", GradientCheckpointing::accept), None,
            ["enable_activation_checkpointing", "activation_checkpointing", "grad_checkpoint",
             "use_gradient_checkpointing", "checkpoint_activations", "gradient_checkpoint"];
        /// Target tokens whose logits exist at a time: more are fewer passes over the head, fewer need less memory.
        /// Default: as many as fill 96 MiB; on a GPU up to 1024, with no more logits than the head has weights.
        loss_chunk_tokens: Option<usize> = None => optional_count(1..) like 512, None,
            ["num_output_chunks", "chunked_cross_entropy_num_chunks", "loss_chunk_size", "loss_chunk";
             "it is the target tokens of a chunk, not the number of chunks"];
        /// Gradients of a larger global norm are scaled down to it; 0 turns this off.
        max_grad_norm: f64 = 1.0 => number(0.0..), LaterSteps,
            ["gradient_clipping", "grad_clip", "clip_grad_norm", "max_norm", "gradient_clip_val", "grad_clip_norm", "clip"];
    }
}

impl TrainConfig {
    /// If only `max_steps` says when to end, the default number of epochs does not apply.
    fn check(self, section: &mut Section) -> Self {
        let num_epochs = self.num_epochs.filter(|_| section.has("num_epochs") || self.max_steps.is_none());
        Self { num_epochs, ..self }
    }

    /// Number of target tokens whose logits exist at a time.
    #[must_use]
    pub fn loss_chunk(&self) -> LossChunk {
        self.loss_chunk_tokens.map_or(LossChunk::Auto, LossChunk::Tokens)
    }
}

/// What a block's forward keeps for its backward. In a recipe: `"auto"`, `false`, `true` or `"offload"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientCheckpointing {
    /// As much as the memory allows: [`Decision`](super::fit::Decision) says what. Undecided, it is [`On`](Self::On).
    Auto,
    /// Everything that the backward needs.
    Off,
    /// Only the block's input; the backward computes the rest again.
    On,
    /// Only the block's input, in host memory until shortly before its backward: for long sequences on a GPU.
    Offload,
}

impl GradientCheckpointing {
    fn accept(value: &Value) -> Result<Self, Option<String>> {
        match value {
            Value::Boolean(on) => Ok(Self::from(*on)),
            Value::String(text) => match text.to_lowercase().as_str() {
                "auto" if text == "auto" => Ok(Self::Auto),
                "offload" if text == "offload" => Ok(Self::Offload),
                "true" | "false" => Err(Some(format!("write {} without quotes", text.to_lowercase()))),
                "offload" | "cpu" | "cpu_offload" => {
                    Err(Some("block inputs in host memory: this trainer calls it \"offload\"".into()))
                }
                "unsloth" => Err(Some("what Unsloth does is called \"offload\" here".into())),
                _ => Err(None),
            },
            _ => Err(None),
        }
    }
}

/// The value in the form that `--set` takes.
impl fmt::Display for GradientCheckpointing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Off => "false",
            Self::On => "true",
            Self::Offload => "offload",
        })
    }
}

impl From<bool> for GradientCheckpointing {
    fn from(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }
}

impl Serialize for GradientCheckpointing {
    /// Writes the value in the form that a recipe uses.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off | Self::On => serializer.serialize_bool(*self == Self::On),
            Self::Auto | Self::Offload => serializer.collect_str(self),
        }
    }
}

section! {
    /// Section `[optimizer]`.
    pub struct OptimizerConfig {
        /// "adamw".
        name: OptimizerName = OptimizerName::Adamw => choice(),
            ["optim", "optimizer_type", "type", "_component_", "optimizer_name", "optimizer"];
        /// Peak learning rate.
        learning_rate: f64 = 2e-4 => number((Bound::Excluded(0.0), Bound::Included(1.0))),
            ["lr", "max_lr", "peak_lr", "base_lr", "learning_rate_init"];
        /// Decoupled weight decay.
        weight_decay: f64 = 0.0 => number(0.0..=1.0), ["wd", "decay", "l2"];
        /// Decay of the first and second moment.
        betas: [f64; 2] = [0.9, 0.999] => numbers(0.0..1.0),
            ["adam_beta1", "adam_beta2", "beta1", "beta2", "adam_betas", "optim_args";
             "both in one list: betas = [0.9, 0.999]"];
        /// Added to the root of the second moment.
        eps: f64 = 1e-8 => number(POSITIVE), ["adam_epsilon", "epsilon", "adam_eps"];
    }
}

section! {
    /// Section `[scheduler]`.
    pub struct SchedulerConfig then check {
        /// Shape after warm-up: "cosine", "linear" or "constant".
        lr_scheduler: LrScheduler = LrScheduler::Cosine => choice(),
            ["lr_scheduler_type", "scheduler", "schedule", "lr_schedule", "decay_type", "name", "type"];
        /// Share of all steps in which the learning rate rises from 0. Excludes `warmup_steps`. Default: no warm-up.
        warmup_ratio: Option<f64> = None => optional_number(0.0..1.0) like 0.03,
            ["warmup_fraction", "lr_warmup_fraction", "warmup_proportion"];
        /// The same as a number of steps.
        warmup_steps: Option<u64> = None => optional_count(0..) like 10,
            ["num_warmup_steps", "warmup", "lr_warmup_steps", "warmup_iters", "steps"];
        /// Where the decay ends, as a share of the peak.
        min_lr_ratio: f64 = 0.0 => number(0.0..=1.0),
            ["min_lr", "cosine_min_lr", "min_learning_rate", "end_lr", "lr_end";
             "it is a share of the peak: min_lr / learning_rate"],
            ["cosine_min_lr_ratio", "min_lr_rate", "lr_scheduler_kwargs"];
    }
}

impl SchedulerConfig {
    fn check(self, section: &mut Section) -> Self {
        if section.has("warmup_ratio") && section.has("warmup_steps") {
            let message = "`scheduler.warmup_steps` excludes `scheduler.warmup_ratio`: they say the same thing twice";
            section.reject("warmup_steps", Problem::new(message).hint("keep one of the two"));
        }
        self
    }
}

section! {
    /// Section `[eval]`.
    #[derive(Eq)]
    pub struct EvalConfig {
        /// Steps between evaluations. One also runs before the first step and after the last; that is the default.
        eval_steps: Option<u64> = None => optional_count(1..) like 100,
            ["eval_interval", "evals_per_epoch", "steps_per_eval", "run_val_every_n_steps", "evaluation_strategy",
             "eval_strategy", "val_check_interval", "eval_every", "steps", "every", "interval", "every_n_steps"];
        /// Evaluate before the first step; false leaves that evaluation out.
        eval_on_start: bool = true => boolean(), ["val_at_start", "val_before_train"];
        /// Micro-batches in an evaluation. Default: the whole set.
        max_batches: Option<usize> = None => optional_count(1..) like 50,
            ["val_batches", "eval_max_batches", "max_iters", "limit_val_batches", "eval_iters", "batches", "max_steps"];
        /// What makes an evaluation better than another, for adapter-best/ and early stopping: "loss", or "score", that of
        /// [eval.task].
        metric_for_best: BestBy = BestBy::Loss => choice(), ["metric_for_best_model"];
        /// Stop after so many evaluations that were no better. Default: never.
        early_stopping_patience: Option<usize> = None => optional_count(1..) like 3,
            ["early_stopping", "patience", "early_stop_patience", "early_stopping_rounds"];
        /// Prompts answered at every evaluation, into samples.jsonl.
        generate: Vec<String> = Vec::new() => strings(),
            ["prompts", "sample_prompts", "eval_prompts", "samples", "do_sample_eval"];
        /// A score of the model's answers at every evaluation, before the first step that of the base.
        task: TaskConfig = TaskConfig::default() => section() of TaskConfig, ["eval_task", "tasks"];
    }
}

/// What makes an evaluation better than another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BestBy {
    /// A lower loss.
    Loss,
    /// A higher score.
    Score,
}

impl Choice for BestBy {
    const NAMES: &'static [(&'static str, Self)] = &[("loss", Self::Loss), ("score", Self::Score)];
    const PEERS: &'static [(&'static str, &'static str)] = &[("eval_loss", "loss"), ("eval_score", "score")];
}
