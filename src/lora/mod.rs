//! Low-rank adapters.

pub mod config;
