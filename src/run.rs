//! A training run, as a straight line.

pub mod dir;
pub mod environment;
