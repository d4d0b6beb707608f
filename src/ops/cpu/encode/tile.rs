//! The numbers of as many blocks as a row has lanes, side by side.

use bytemuck::Zeroable;
use pulp::Simd;

use super::Matrix;
use super::lanes::{Lanes, MAX_LANES, Numbers, Row, lanes};

/// The most numbers of a block.
pub(super) const LEN: usize = 256;

/// Blocks side by side; lanes without a block hold zeros.
pub(super) struct Tile<S: Simd> {
    pub(super) simd: S,
    /// The numbers of the blocks.
    pub(super) x: [Row<S>; LEN],
    /// The importance of their columns.
    pub(super) importance: [Row<S>; LEN],
    pub(super) is_weighted: bool,
    /// The mean square of the row in which a block is, where the matrix has them.
    pub(super) mean_square: Numbers,
    /// The largest magnitude; infinity or NaN if one of the numbers is.
    pub(super) largest: f32,
}

impl<S: Simd> Tile<S> {
    #[inline(always)]
    pub(super) fn new(simd: S) -> Self {
        Self {
            simd,
            x: [Row::<S>::zeroed(); LEN],
            importance: [Row::<S>::zeroed(); LEN],
            is_weighted: false,
            mean_square: [0.0; MAX_LANES],
            largest: 0.0,
        }
    }

    /// Takes `num` blocks of `len` numbers from block `first` on.
    #[inline(always)]
    pub(super) fn load(&mut self, matrix: Matrix, len: usize, first: usize, num: usize) {
        let numbers = &matrix.numbers[first * len..][..num * len];
        let largest = numbers.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
        self.largest = f32::from_bits(largest);
        if num < lanes::<S>() {
            self.x = Zeroable::zeroed();
        }
        for (lane, block) in numbers.chunks_exact(len).enumerate() {
            put::<S>(&mut self.x[..len], lane, block);
        }
        self.is_weighted = matrix.importance.is_some();
        let Some(importance) = matrix.importance else { return };
        let blocks_per_row = matrix.width / len;
        for lane in 0..num {
            let block = first + lane;
            put::<S>(&mut self.importance[..len], lane, &importance[block % blocks_per_row * len..][..len]);
            if let Some(mean_square) = matrix.mean_squares.get(block / blocks_per_row) {
                self.mean_square[lane] = *mean_square;
            }
        }
    }

    /// The sum of the squares of numbers, one after the other.
    #[inline(always)]
    pub(super) fn sum_of_squares(&self, x: &[Row<S>]) -> Lanes<S> {
        let mut sum = Lanes::splat(self.simd, 0.0);
        for x in x {
            let x = Lanes::new(self.simd, *x);
            sum = sum + x * x;
        }
        sum
    }

    /// The weights of numbers from `first` on: with an importance, it times a magnitude of which `mean_square` is a part, else
    /// squares.
    #[inline(always)]
    pub(super) fn weigh(&self, first: usize, mean_square: Lanes<S>, weights: &mut [Row<S>]) {
        let numbers = self.x[first..].iter().zip(&self.importance[first..]);
        for (to, (x, importance)) in weights.iter_mut().zip(numbers) {
            let x = Lanes::new(self.simd, *x);
            *to = if self.is_weighted {
                (Lanes::new(self.simd, *importance) * (mean_square + x * x).sqrt()).row
            } else {
                (x * x).row
            };
        }
    }
}

/// Puts the numbers of one block into its lane.
#[inline(always)]
fn put<S: Simd>(rows: &mut [Row<S>], lane: usize, block: &[f32]) {
    let sides = bytemuck::cast_slice_mut::<_, f32>(rows);
    for (to, x) in sides[lane..].iter_mut().step_by(lanes::<S>()).zip(block) {
        *to = *x;
    }
}
