//! Processes that train together: what they sum and agree on.

use std::fmt::Debug;

/// The ranks of a run, as one of them sees them.
pub trait Ranks: Debug + Send {
    /// Number of ranks.
    fn size(&self) -> usize;

    /// Replaces gradients and figures by their sums over all ranks, added in the order of the ranks.
    fn sum(&mut self, gradients: &mut [f32], figures: &mut [f64]);

    /// Whether any rank says so.
    fn agree(&mut self, says_so: bool) -> bool;
}

/// The only rank.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl Ranks for Alone {
    fn size(&self) -> usize {
        1
    }

    fn sum(&mut self, _: &mut [f32], _: &mut [f64]) {}

    fn agree(&mut self, says_so: bool) -> bool {
        says_so
    }
}
