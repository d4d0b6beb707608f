//! When checkpoints are saved, and how many are kept.

use crate::schema::{Section, section};

section! {
    /// Section `[checkpoint]` of a recipe. By default neither a killed process nor a power cut takes more than a quarter of
    /// an hour.
    pub struct CheckpointConfig then check {
        /// Minutes after the last checkpoint until the next one; 0: none by time. Default: 15, or none where `save_steps` is
        /// given. One is saved in any case when training is interrupted, and, unless there are none at all, at its end, so that
        /// more steps can follow.
        save_minutes: Option<f64> = Some(15.0) => optional_number(0.0..);
        /// Steps between checkpoints. Default: time alone decides.
        save_steps: Option<u64> = None => optional_count(1..) like 500,
            ["save_every", "save_interval", "steps_per_save", "saves_per_epoch", "save_strategy", "checkpoint_interval",
             "checkpointing_steps", "steps", "every", "interval", "every_n_steps"];
        /// Checkpoints kept; the oldest go first. While the watchdog finds something wrong, the newest from before is kept
        /// besides. Default: 2, or all where `save_steps` or `save_minutes` is given.
        save_total_limit: Option<usize> = Some(2) => optional_count(1..),
            ["save_limit", "keep_last", "keep_last_n", "max_checkpoints"];
    }
}

impl CheckpointConfig {
    /// Where the recipe says when to save, the other default does not apply. `save_minutes = 0` is kept: removing it
    /// would bring the default back.
    fn check(self, section: &mut Section) -> Self {
        let says_when = section.has("save_steps") || section.has("save_minutes");
        Self {
            save_minutes: self.save_minutes.filter(|_| !says_when || section.has("save_minutes")),
            save_total_limit: self.save_total_limit.filter(|_| !says_when || section.has("save_total_limit")),
            ..self
        }
    }

    /// Seconds after the last checkpoint until the next one; absent where time does not trigger a save.
    #[must_use]
    pub fn save_seconds(&self) -> Option<f64> {
        self.save_minutes.filter(|minutes| *minutes > 0.0).map(|minutes| 60.0 * minutes)
    }
}
