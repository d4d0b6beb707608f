//! Training state on disk.

use serde::Serialize;

/// Section `[checkpoint]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; absent: only when training is interrupted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_steps: Option<u64>,
    /// Checkpoints kept; the oldest go first; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_total_limit: Option<usize>,
}
