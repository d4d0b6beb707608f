//! Training: the loop, one step, block-wise backpropagation, loss, optimizer, schedule, evaluation.

mod adapters;
pub mod backprop;
pub mod budget;
pub mod eval;
pub mod grads;
pub mod importance;
mod inputs;
pub(crate) mod laps;
pub mod loss;
pub mod objective;
pub mod offload;
pub mod optimizer;
pub mod ranks;
pub mod recorder;
mod references;
pub mod rollouts;
mod rounding;
pub mod saver;
pub mod schedule;
pub mod shipping;
pub mod state;
pub mod step;
mod step_work;
pub mod stop;
pub mod task;
pub mod trainer;
pub mod watchdog;
