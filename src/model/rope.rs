//! Rotary tables.

use std::sync::Arc;

use crate::ops::layout::RotaryTable;
use crate::spec::{ModelConfig, Rope};

impl Rope {
    /// Cosines and sines of positions `0..num_positions`, for texts of that [`reach`](Self::reach). Angles are computed in
    /// `f32` for every precision.
    #[must_use]
    pub fn table(&self, num_positions: usize, reach: usize) -> RotaryTable {
        self.table_of((0..num_positions).map(|position| [position; 3]), reach)
    }

    /// The same of tokens by their three positions, of which most embeddings know the first.
    #[must_use]
    pub fn table_of(&self, positions: impl Iterator<Item = [usize; 3]>, reach: usize) -> RotaryTable {
        let frequencies = self.inverse_frequencies(reach).into_iter().enumerate();
        let axis = |pair| self.axes.map_or(0, |axes| axes.of_pair(pair));
        let turns: Vec<(usize, f32)> = frequencies.map(|(pair, frequency)| (axis(pair), frequency)).collect();
        #[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
        let of_token = |at: [usize; 3]| turns.iter().map(move |(axis, frequency)| at[*axis] as f32 * frequency);
        let angles: Vec<f32> = positions.flat_map(of_token).collect();
        #[expect(clippy::cast_possible_truncation, reason = "computed in f32")]
        let factor = self.attention_factor() as f32;
        let values = |of: fn(f32) -> f32| angles.iter().map(|angle| of(*angle) * factor).collect();
        let table = RotaryTable::new(values(f32::cos), values(f32::sin), self.width / 2);
        table.within(self.head_dim, self.pairs)
    }
}

impl ModelConfig {
    /// The table of every rotary embedding, for texts of these reaches.
    #[must_use]
    pub fn rotary_tables(&self, num_positions: usize, reaches: &[usize]) -> Arc<[RotaryTable]> {
        let reaches = reaches.iter().copied().chain(std::iter::repeat(0));
        self.ropes.iter().zip(reaches).map(|(rope, reach)| rope.table(num_positions, reach)).collect()
    }

    /// The same of tokens by their three positions.
    #[must_use]
    pub fn rotary_tables_of(&self, positions: &[[usize; 3]]) -> Arc<[RotaryTable]> {
        let longest = positions.iter().flatten().max().map_or(0, |last| last + 1);
        let table = |rope: &Rope| rope.table_of(positions.iter().copied(), rope.reach(longest));
        self.ropes.iter().map(table).collect()
    }
}
