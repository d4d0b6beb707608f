//! Low-rank adapters.

pub mod adapters;
pub mod combine;
mod dora;
pub mod kind;
pub mod matrices;
mod row_norms;
pub(crate) mod start;
pub mod targets;

pub use adapters::{Adapter, AdapterSet, BlockAdapters, Whole};
pub use matrices::Matrices;
pub use row_norms::RowNorms;
