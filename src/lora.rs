//! Low-rank adapters.

pub mod adapters;
pub mod targets;

pub use adapters::{Adapter, AdapterSet, BlockAdapters};
