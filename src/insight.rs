//! What the figures of a run say about it.

pub mod diagnosis;
pub mod report;
