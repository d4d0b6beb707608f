//! Rotary tables.

use std::sync::Arc;

use crate::ops::layout::RotaryTable;
use crate::spec::{ModelConfig, Rope};

impl Rope {
    /// Cosines and sines of positions `0..num_positions`, for texts of that [`reach`](Self::reach). Angles are computed in
    /// `f32` for every precision.
    #[must_use]
    pub fn table(&self, num_positions: usize, reach: usize) -> RotaryTable {
        let frequencies = self.inverse_frequencies(reach);
        let angles = || {
            #[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
            (0..num_positions).flat_map(|position| frequencies.iter().map(move |f| position as f32 * f))
        };
        #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
        let factor = self.attention_factor() as f32;
        let values = |of: fn(f32) -> f32| angles().map(|angle| of(angle) * factor).collect();
        let table = RotaryTable::new(values(f32::cos), values(f32::sin), self.width / 2);
        table.within(self.head_dim, self.pairs).with_query_growth(self.query_growth)
    }
}

impl ModelConfig {
    /// The table of every rotary embedding, for texts of these reaches.
    #[must_use]
    pub fn rotary_tables(&self, num_positions: usize, reaches: &[usize]) -> Arc<[RotaryTable]> {
        let reaches = reaches.iter().copied().chain(std::iter::repeat(0));
        self.ropes.iter().zip(reaches).map(|(rope, reach)| rope.table(num_positions, reach)).collect()
    }
}
