//! Rows to token batches, in host memory: no tensor is made here.

pub mod batch;
pub mod config;
