//! The operations of a step, each with its forward and backward.
//!
//! Every operation is written twice: in [`plain`], in tensor calls, which run on any backend, and, in [`cpu`], as kernels
//! on slices of host memory; in [`cuda`], some are kernels for NVIDIA GPUs. The [`Place`](kernels::Place) of the model picks
//! one of them, and the other files are the doors: what an operation computes and costs. The plain version is the kernels'
//! oracle, and burn's autodiff is the oracle of the plain version's backward.
//!
//! Tokens are flat: a micro-batch is a matrix `[tokens, width]` whose rows are the tokens of all sequences, end to
//! end. [`Layout`](layout::Layout) knows where a sequence begins.

pub mod adamw;
pub mod adamw_8bit;
pub mod attention;
pub mod blocks;
pub mod cached_attention;
#[allow(
    unsafe_code,
    clippy::approx_constant,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::inline_always,
    clippy::missing_panics_doc,
    clippy::too_many_arguments,
    reason = "kernels share buffers between threads, compute in f32 on purpose, inline into vectorised bodies, and check their slices' lengths"
)]
pub mod cpu;
mod cpu_kernels;
pub mod cross_entropy;
pub mod cuda;
#[cfg(feature = "cuda-llvm")]
mod custom;
pub mod delta_rule;
pub mod draw;
pub mod dropout;
pub mod experts;
pub mod head_norm;
pub mod host;
pub mod kernels;
pub mod layout;
pub mod linear;
pub mod low_rank;
pub mod noise;
pub mod norm;
pub mod output_gate;
pub mod peak;
pub mod place;
pub mod plain;
pub mod product;
pub mod profile;
pub mod quantised;
pub mod rotary;
pub mod routing;
pub mod short_conv;
pub mod state_space;
pub mod swiglu;
pub mod token_rows;
pub mod travel;
