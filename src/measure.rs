//! What is measured while training, and where it is written.

pub mod figures;
pub mod metrics;
pub mod telemetry;
