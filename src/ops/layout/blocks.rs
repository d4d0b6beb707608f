//! Tokens that see each other both ways.

use burn::tensor::{Device, Int, Tensor};

use super::indices;

/// Stretches of as many tokens each.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// Their tokens, `[blocks * length]`.
    pub(in crate::ops) places: Tensor<1, Int>,
    /// Where what is in place of theirs is: behind that of all tokens, `[tokens]`.
    pub(in crate::ops) order: Tensor<1, Int>,
    /// Tokens of each.
    pub(in crate::ops) length: usize,
    /// Whether they do so only where there is a window.
    pub(super) are_in_windows: bool,
}

impl Blocks {
    /// Of so many tokens from each of `starts` on, among `num_tokens`.
    ///
    /// # Panics
    /// Where they are not among these.
    #[must_use]
    pub fn new(starts: &[usize], length: usize, num_tokens: usize, device: &Device) -> Self {
        let places: Vec<usize> = starts.iter().flat_map(|start| *start..start + length).collect();
        let mut order: Vec<usize> = (0..num_tokens).collect();
        places.iter().enumerate().for_each(|(row, place)| order[*place] = num_tokens + row);
        Self { places: indices(places, device), order: indices(order, device), length, are_in_windows: false }
    }

    /// The same, which see each other so only where there is a window, or everywhere.
    #[must_use]
    pub fn in_windows(self, are_in_windows: bool) -> Self {
        Self { are_in_windows, ..self }
    }
}
