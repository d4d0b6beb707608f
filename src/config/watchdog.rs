//! Section `[watchdog]` of a recipe.

use crate::schema::section;

section! {
    /// Section `[watchdog]` of a recipe.
    #[derive(Copy)]
    pub struct WatchdogConfig {
        /// Steps in a row whose loss or gradient is no finite number, so that no update is made, after which training
        /// stops; 0: never.
        // The search for f16's loss scale may skip 16 steps in a row.
        max_skipped_steps: u64 = 20 => count(0..);
        /// Standard deviations above its running mean at which a loss is a spike; 0: none is.
        loss_spike_z: f64 = 6.0 => number(0.0..);
        /// Steps in a row with a loss spike or losses 2 nats above where they started, with a gradient of exactly zero, or
        /// with adapters that do not move, after which training stops; 0: never.
        patience: u64 = 50 => count(0..);
    }
}
