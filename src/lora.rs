//! Low-rank adapters.

pub mod adapters;
pub mod combine;
mod dora;
pub mod kind;
pub mod matrices;
pub(crate) mod start;
pub mod targets;

pub use adapters::{Adapter, AdapterSet, BlockAdapters};
pub use dora::RowNorms;
pub use matrices::Matrices;
