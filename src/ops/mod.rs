//! The operations of a step, each with its forward and backward.

pub mod cpu;
