//! When checkpoints are saved, and how many are kept.

use serde::Serialize;

use crate::schema::Section;

/// Section `[checkpoint]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; absent: time alone decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_steps: Option<u64>,
    /// Minutes after the last checkpoint until the next one, at the end of a step; absent or 0: steps alone decide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_minutes: Option<f64>,
    /// Checkpoints kept; the oldest go first; absent: all. While the watchdog finds something wrong, the newest from before
    /// is kept besides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_total_limit: Option<usize>,
}

impl Default for CheckpointConfig {
    /// Neither a killed process nor a power cut takes more than a quarter of an hour.
    fn default() -> Self {
        Self { save_steps: None, save_minutes: Some(15.0), save_total_limit: Some(2) }
    }
}

impl CheckpointConfig {
    /// Reads section `[checkpoint]`. Where nothing says when to save, it is the default; with `save_minutes = 0` only when
    /// training is interrupted.
    pub fn read(section: &mut Section) -> Self {
        let says_when = section.has("save_steps") || section.has("save_minutes");
        let default = if says_when { Self::none() } else { Self::default() };
        let minutes = section.optional_number("save_minutes", 0.0..);
        Self {
            save_steps: section.optional_count("save_steps", 1..),
            // 0 is kept: a recipe that says neither means the default.
            save_minutes: minutes.or(default.save_minutes),
            save_total_limit: section.optional_count("save_total_limit", 1..).or(default.save_total_limit),
        }
    }

    /// Seconds after the last checkpoint until the next one, where time decides.
    #[must_use]
    pub fn save_seconds(&self) -> Option<f64> {
        self.save_minutes.filter(|minutes| *minutes > 0.0).map(|minutes| 60.0 * minutes)
    }

    fn none() -> Self {
        Self { save_steps: None, save_minutes: None, save_total_limit: None }
    }
}
