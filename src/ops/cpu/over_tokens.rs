//! Sums over all tokens: the gradients of weights.

use rayon::prelude::*;

use super::product::{Left, ProductInto};
use super::simd::{SharedMut, arch};

/// Columns of the features that one task sums over all tokens.
const BLOCK_FEATURES: usize = 96;
/// Rows that it sums: those of a low-rank term in one task, those of a whole weight in several.
const BLOCK_ROWS: usize = 384;
/// Tokens whose part of a block of columns stays in the caches.
const BLOCK_TOKENS: usize = 128;
/// Floats of the longest vector.
const VECTOR: usize = 16;

/// A sum over all tokens, `left^T right`: `[rows, width]` from `[tokens, rows]`, in rows of `stride`, and `[tokens, width]`.
#[derive(Clone, Copy)]
pub(super) struct OverTokens<'a> {
    pub(super) left: &'a [f32],
    pub(super) rows: usize,
    pub(super) stride: usize,
    pub(super) right: &'a [f32],
    pub(super) width: usize,
}

impl OverTokens<'_> {
    /// Blocks of rows, and of columns.
    fn blocks(&self) -> [usize; 2] {
        [self.rows.div_ceil(BLOCK_ROWS), self.width.div_ceil(BLOCK_FEATURES)]
    }

    /// Adds a block of the sum to `out`, which has all of it.
    fn add_block(&self, block: usize, out: SharedMut) {
        let [_, of_columns] = self.blocks();
        let (first_row, first) = (block / of_columns * BLOCK_ROWS, block % of_columns * BLOCK_FEATURES);
        let (num_rows, columns) = (BLOCK_ROWS.min(self.rows - first_row), BLOCK_FEATURES.min(self.width - first));
        let whole = columns / VECTOR * VECTOR;
        let tokens = self.left.chunks(BLOCK_TOKENS * self.stride).zip(self.right.chunks(BLOCK_TOKENS * self.width));
        for (left, right) in tokens {
            let product = ProductInto {
                shape: [num_rows, whole, left.len() / self.stride],
                // SAFETY: the first column of the block lies inside its first row.
                c: unsafe { out.get().add(first_row * self.width + first) },
                c_stride: self.width,
                a: Left::columns(&left[first_row..], self.stride),
                b: &right[first..],
                b_stride: self.width,
                then: None,
                accumulate: true,
            };
            // SAFETY: the block's rows and columns, which this task alone writes.
            arch().dispatch(unsafe { product.promise() });
        }
        for column in first + whole..first + columns {
            for row in first_row..first_row + num_rows {
                let left = self.left[row..].iter().step_by(self.stride);
                let terms = left.zip(self.right[column..].iter().step_by(self.width));
                // SAFETY: as above, for a column left over after the vectors.
                unsafe { *out.get().add(row * self.width + column) += terms.map(|(x, y)| x * y).sum::<f32>() };
            }
        }
    }
}

/// Adds each sum to its slice. One task takes a block of rows and columns of one sum, over all tokens.
pub(super) fn add_over_tokens(sums: &mut [(OverTokens<'_>, &mut [f32])]) {
    let sums: Vec<_> = sums
        .iter_mut()
        .map(|(sum, out)| {
            assert_eq!(out.len(), sum.rows * sum.width, "a gradient of {} rows", sum.rows);
            (*sum, SharedMut(out.as_mut_ptr()))
        })
        .collect();
    let blocks = |sum: &OverTokens<'_>| sum.blocks().iter().product::<usize>();
    (0..sums.iter().map(|(sum, _)| blocks(sum)).sum()).into_par_iter().with_max_len(1).for_each(|mut block| {
        for (sum, out) in &sums {
            if block < blocks(sum) {
                return sum.add_block(block, *out);
            }
            block -= blocks(sum);
        }
    });
}
