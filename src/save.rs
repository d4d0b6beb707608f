//! What a run writes to keep: checkpoints, adapters, merged models.

pub mod checkpoint;
pub mod export;
