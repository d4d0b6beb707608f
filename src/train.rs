//! Training: the loop, one step, block-wise backpropagation, loss, optimizer, schedule, evaluation.

mod adapters;
pub mod backprop;
mod base_weights;
mod decomposed;
pub mod eval;
pub mod fit;
pub mod flops;
pub mod forecast;
pub mod grads;
mod inputs;
pub(crate) mod laps;
pub mod loss;
pub mod memory;
pub mod objective;
pub mod offload;
pub mod optimizer;
pub mod ranks;
pub mod recorder;
pub mod saver;
pub mod schedule;
pub mod state;
pub mod step;
mod step_work;
pub mod stop;
pub mod task;
pub mod trainer;
pub mod watchdog;
