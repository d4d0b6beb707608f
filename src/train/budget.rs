//! What a recipe will take before it runs: memory, FLOPs, steps.

mod activations;
mod base_weights;
mod decomposed;
mod eva;
pub mod fit;
pub mod flops;
pub mod forecast;
pub mod gpu;
pub mod images;
pub mod memory;
mod operands;
pub mod workload;
