//! CPU kernels of a training step on plain `f32` slices: vectorised for the machine at run time, on all cores.
//!
//! Matrices are row-major and contiguous; tokens lie flat, the rows of a batch end to end. The number of threads never
//! changes a bit of a result: work is cut at fixed places and summed in a fixed order.

mod attention;
mod blocks;
mod codes;
mod cross_entropy;
mod delta_rule;
mod draw;
mod dropout;
mod dynamic;
mod encode;
mod few_tokens;
mod gemm;
mod linear;
mod lora;
mod norm;
mod optimizer;
mod optimizer_8bit;
mod output_gate;
mod over_tokens;
mod pack;
mod product;
mod rope;
mod round;
mod short_conv;
mod simd;
mod swiglu;
mod weight;

#[cfg(test)]
mod reference;

pub use attention::{CachedKeys, Heads, attention, attention_backward, attention_of_last};
pub use blocks::{Blocks, KINDS};
pub use codes::{Codes, NESTED_LEN, Packed, Scales};
pub use cross_entropy::{Head, HeadGradient, linear_cross_entropy};
pub use delta_rule::{DeltaInputs, delta_rule, delta_rule_backward};
pub use draw::{Draw, Drawn, draw};
pub(in crate::ops) use dropout::FACTORS;
pub use dropout::{Dropout, dropout, mix};
pub use dynamic::{Nearest, dynamic_table};
pub use encode::{ENCODED, Overflow, encode, encode_codes};
pub use linear::{linear, linear_backward_input};
pub use lora::{add_low_rank, lora_linear, lora_linear_backward};
pub use norm::{rms_norm, rms_norm_backward};
pub use optimizer::{AdamW, adamw, sum_of_squares};
pub use optimizer_8bit::{BLOCK_LEN, Coded, adamw_8bit};
pub use output_gate::{gate_output, gate_output_backward};
pub use rope::{RopeShape, rope};
pub use short_conv::{gated_conv, gated_conv_backward, short_conv, short_conv_backward};
pub use swiglu::{gated, gated_backward};
pub use weight::MOST_TEXTS;
pub use weight::Weight;
