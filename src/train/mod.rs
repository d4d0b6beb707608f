//! Training: the loop, one step, block-wise backpropagation, loss, optimizer, schedule, evaluation.

pub mod config;
pub mod flops;
pub mod schedule;
pub mod stop;

pub mod backprop;
pub mod grads;
pub mod optim;
pub mod step;
