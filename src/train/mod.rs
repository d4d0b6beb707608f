//! Training: the loop, one step, block-wise backpropagation, loss, optimizer, schedule, evaluation.

pub mod backprop;
pub mod config;
pub mod eval;
mod figures;
pub mod fit;
pub mod flops;
pub mod forecast;
pub mod grads;
pub mod host_memory;
mod laps;
pub mod memory;
pub mod offload;
pub mod optim;
pub mod plan;
pub mod schedule;
pub mod state;
pub mod step;
pub mod stop;
pub mod totals;
pub mod trainer;
pub mod watchdog;
