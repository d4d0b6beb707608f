//! Section `[train]` of a recipe.

use std::fmt;
use std::ops::Bound;

use serde::Serialize;

use super::{FileType, POSITIVE};
use crate::device::Dtype;
use crate::schema::{Choice, Section, Value, section};

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
        micro_batch_size: usize = 4 => count(1..=65_536), OtherRows + steps,
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
        /// Keep only the input of every block and compute the rest again on the way back: less memory, more time. "auto": of as
        /// few blocks as the memory allows. "12-blocks": of the first 12, of which what attention gives is kept, too.
        /// "offload" keeps the inputs in host memory meanwhile, for long sequences on a GPU.
        gradient_checkpointing: GradientCheckpointing = GradientCheckpointing::Auto
            => any("\"auto\", true, false, \"12-blocks\" or \"offload\"", GradientCheckpointing::accept), None,
            ["enable_activation_checkpointing", "activation_checkpointing", "grad_checkpoint",
             "use_gradient_checkpointing", "checkpoint_activations", "gradient_checkpoint"];
        /// Target tokens whose logits exist at a time: more are fewer passes over the head, fewer need less memory.
        /// Default: as many as fill 96 MiB; on a GPU up to 1024, with no more logits than the head has weights.
        loss_chunk_tokens: Option<usize> = None => optional_count(1..) like 512, None,
            ["num_output_chunks", "chunked_cross_entropy_num_chunks", "loss_chunk_size", "loss_chunk";
             "it is the target tokens of a chunk, not the number of chunks"];
        /// Noise on the embeddings while training (NEFTune): uniform, up to this over the root of the numbers in the longest
        /// row of a micro-batch. Default: none.
        neftune_noise_alpha: Option<f64> = None => optional_number(POSITIVE) like 5.0, LaterSteps,
            ["noisy_embedding_alpha", "neftune_alpha", "neftune"];
        /// Gradients of a larger global norm are scaled down to it; 0 turns this off.
        max_grad_norm: f64 = 1.0 => number(0.0..), LaterSteps,
            ["gradient_clipping", "grad_clip", "clip_grad_norm", "max_norm", "gradient_clip_val", "grad_clip_norm", "clip"];
        /// Type of the GGUF file that the model will be served as, such as `"q4_k_m"`: the last steps compute with the weights
        /// as that file has them, so that the adapter makes up for the rounding, and `merge` writes them. Default: none.
        ship_as: Option<FileType> = None => optional_choice() like "q4_k_m", LaterSteps,
            ["qat", "qat_scheme", "quantization_aware_training", "nvfp4_merge_aware", "quantizer"];
        /// Share of the steps that are made before those.
        ship_from: f64 = 0.8 => number((Bound::Included(0.0), Bound::Excluded(1.0))), LaterSteps,
            ["fake_quant_after_n_steps"; "it is a share of the steps, not their number"];
    }
}

impl TrainConfig {
    /// If only `max_steps` says when to end, the default number of epochs does not apply.
    fn check(self, section: &mut Section) -> Self {
        if self.ship_as.is_none() && self.ship_from.to_bits() != Self::default().ship_from.to_bits() {
            section.problem("ship_from", "is of no use without `ship_as`: leave it out, or name a type of files");
        }
        let num_epochs = self.num_epochs.filter(|_| section.has("num_epochs") || self.max_steps.is_none());
        Self { num_epochs, ..self }
    }
}

/// What `train.precision` names: a type of activations, and how its matrix products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Products of `f32`, also on devices that round its operands to TF32.
    F32,
    /// Activations in `f32`, and products in TF32 where the device has it: one product instead of three.
    Tf32,
    /// Products of `bf16` with sums in `f32`.
    Bf16,
    /// Products of `f16` with sums in `f32`, and a scaled loss.
    F16,
}

impl Precision {
    /// The name in recipes.
    #[must_use]
    pub fn name(self) -> &'static str {
        if self == Self::Tf32 { "tf32" } else { self.dtype().name() }
    }

    /// The type of the activations.
    #[must_use]
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 | Self::Tf32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
            Self::F16 => Dtype::F16,
        }
    }
}

impl From<Dtype> for Precision {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
        }
    }
}

impl Choice for Precision {
    const NAMES: &'static [(&'static str, Self)] =
        &[("f32", Self::F32), ("tf32", Self::Tf32), ("bf16", Self::Bf16), ("f16", Self::F16)];
    const PEERS: &'static [(&'static str, &'static str)] = Dtype::PEERS;
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a block's forward keeps for its backward. In a recipe: `"auto"`, `false`, `true`, `"12-blocks"` or `"offload"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientCheckpointing {
    /// As much as the memory allows: what that is, is decided before the first step. Undecided, it is [`On`](Self::On).
    Auto,
    /// Everything that the backward needs.
    Off,
    /// Only the block's input; the backward computes the rest again.
    On,
    /// Only the input of so many blocks, the first ones, and what their attention gives; of the others everything.
    Blocks(usize),
    /// Only the block's input, in host memory until shortly before its backward: for long sequences on a GPU.
    Offload,
}

/// Behind the number of blocks that are computed again.
const BLOCKS: &str = "-blocks";

impl GradientCheckpointing {
    /// The blocks that are computed again: the first so many of `num_blocks`.
    #[must_use]
    pub fn num_recomputed(self, num_blocks: usize) -> usize {
        match self {
            Self::Off => 0,
            Self::Blocks(blocks) => blocks.min(num_blocks),
            Self::Auto | Self::On | Self::Offload => num_blocks,
        }
    }

    /// Whether what the attention of a block gives is kept where the rest of the block is computed again. To move that to the host's
    /// memory and back takes longer than to compute it, by estimate.
    #[must_use]
    pub fn keeps_attention(self) -> bool {
        matches!(self, Self::Blocks(_))
    }

    /// The value that names a number of blocks.
    #[must_use]
    pub fn some_blocks(text: &str) -> Option<Self> {
        text.strip_suffix(BLOCKS)?.parse().ok().map(Self::Blocks)
    }

    fn accept(value: &Value) -> Result<Self, Option<String>> {
        match value {
            Value::Boolean(on) => Ok(Self::from(*on)),
            Value::String(text) => match text.to_lowercase().as_str() {
                "auto" if text == "auto" => Ok(Self::Auto),
                "offload" if text == "offload" => Ok(Self::Offload),
                "true" | "false" => Err(Some(format!("write {} without quotes", text.to_lowercase()))),
                "offload" | "cpu" | "cpu_offload" => {
                    Err(Some("what is kept of blocks in host memory: this trainer calls it \"offload\"".into()))
                }
                text if let Some(blocks) = Self::some_blocks(text) => Ok(blocks),
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
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("false"),
            Self::On => f.write_str("true"),
            Self::Blocks(blocks) => write!(f, "{blocks}{BLOCKS}"),
            Self::Offload => f.write_str("offload"),
        }
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
            Self::Auto | Self::Blocks(_) | Self::Offload => serializer.collect_str(self),
        }
    }
}
