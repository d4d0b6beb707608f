//! Causal attention within documents, without a matrix of scores in memory (Dao 2023, "FlashAttention-2").
//!
//! Tiles of 96 queries by 96 keys pass through the caches; the backward pass recomputes the probabilities from the
//! log-sum-exp that the forward pass kept. Nothing has the size of the sequence squared.
//!
//! What several documents begin with is a [`Stretch`] of its own: its keys are seen by all that continue it, as those of one
//! long document would be; each of these sees it whole before itself.

mod arithmetic;
mod backward;
mod cached;
mod forward;
#[cfg(test)]
mod tests;

pub use backward::attention_backward;
pub use cached::{CachedKeys, attention_of_last};
pub use forward::attention;

use crate::ops::layout::Stretch;
pub use crate::spec::Heads;

use std::f32::consts::LOG2_E;

/// Queries and keys in a tile: a multiple of 6 and 8 rows and of every vector length.
const TILE: usize = 96;

/// Rows of a tile on the diagonal whose masked part is skipped together.
const STRIP: usize = 32;

impl Heads {
    /// The key and value head that query head `head` reads.
    fn kv_head(&self, head: usize) -> usize {
        head / (self.num_heads / self.num_kv_heads)
    }

    /// Width of a head, padded to whole vectors of any instruction set.
    fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// End of the queries of the document that see the key at `key`.
    fn end_query(&self, key: usize, len: usize) -> usize {
        self.window.map_or(len, |window| key.saturating_add(window).min(len))
    }

    /// What a product of a query and a key is multiplied by: to the score in units of log2, or, where scores have a cap, to the
    /// share of it whose tangent is taken.
    fn product_factor(&self) -> f32 {
        let scale = self.scale as f32;
        self.soft_cap.map_or(scale * LOG2_E, |cap| scale / cap as f32)
    }

    /// The same for the tokens of a stretch: a window holds all of what is shared.
    fn of(&self, stretch: &Stretch) -> Self {
        if stretch.is_shared() { Self { window: None, ..*self } } else { *self }
    }

    fn check(&self, q: usize, k: usize, v: usize, stretches: &[Stretch]) -> usize {
        assert!(
            self.num_kv_heads > 0 && self.num_heads.is_multiple_of(self.num_kv_heads) && self.head_dim > 0,
            "attention: {self:?}"
        );
        assert!(self.window != Some(0), "attention: a window of no keys");
        let tokens = q / self.query_width();
        assert!(
            q == tokens * self.query_width() && k == tokens * self.key_value_width() && v == k,
            "attention: q {q}, k {k}, v {v} for {self:?}"
        );
        let mut end = 0;
        for stretch in stretches {
            let &Stretch { start, len, reach, ref prefix } = stretch;
            assert!(
                start >= end
                    && start + len <= tokens
                    && start + reach <= tokens
                    && (prefix.end <= start || stretch.is_both_ways()),
                "attention: {stretch:?} of {tokens} tokens"
            );
            end = start + len;
        }
        tokens
    }
}

/// The tokens `(start, len)` that belong to no stretch.
fn gaps(stretches: &[Stretch], tokens: usize) -> impl Iterator<Item = (usize, usize)> {
    let ends = std::iter::once(0).chain(stretches.iter().map(|stretch| stretch.start + stretch.len));
    let starts = stretches.iter().map(|stretch| stretch.start).chain(std::iter::once(tokens));
    ends.zip(starts).filter(|(end, start)| end < start).map(|(end, start)| (end, start - end))
}

/// Zeroes the rows of `x` that belong to no stretch.
fn clear_gaps(x: &mut [f32], width: usize, stretches: &[Stretch]) {
    for (start, len) in gaps(stretches, x.len() / width) {
        x[start * width..(start + len) * width].fill(0.0);
    }
}
