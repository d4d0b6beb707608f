//! Low-rank adapters.

pub mod adapters;
pub mod combine;
mod dora;
pub mod kind;
mod known;
pub mod matrices;
mod row_norms;
pub(crate) mod start;
pub mod targets;
pub mod trained;

pub use adapters::{Adapter, AdapterSet, BlockAdapters};
pub use matrices::Matrices;
pub use row_norms::RowNorms;
pub use start::Directions;
pub use trained::{FullTensor, FullTensors, TensorId};
