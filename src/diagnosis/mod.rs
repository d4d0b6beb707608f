//! What the figures of a run say about it: where its time went, and which recipe keys are worth changing.

pub use crate::metrics::{Change, Finding, Severity};
