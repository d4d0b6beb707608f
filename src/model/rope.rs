//! Rotary tables.

use std::sync::Arc;

use crate::ops::layout::RotaryTable;
use crate::spec::{ModelConfig, Rope};

impl Rope {
    /// Cosines and sines of positions `0..num_positions`. Angles are computed in `f32` for every precision.
    #[must_use]
    pub fn table(&self, num_positions: usize) -> RotaryTable {
        let frequencies = self.inverse_frequencies();
        let angles = || {
            #[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
            (0..num_positions).flat_map(|position| frequencies.iter().map(move |f| position as f32 * f))
        };
        RotaryTable::new(angles().map(f32::cos).collect(), angles().map(f32::sin).collect(), self.head_dim / 2)
    }
}

impl ModelConfig {
    /// The table of every rotary embedding.
    #[must_use]
    pub fn rotary_tables(&self, num_positions: usize) -> Arc<[RotaryTable]> {
        self.ropes.iter().map(|rope| rope.table(num_positions)).collect()
    }
}
