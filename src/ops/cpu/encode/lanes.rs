//! Blocks side by side: a row holds one number of each of them, so that what is summed within a block is summed in order,
//! and all blocks at once.

use std::ops::{Add, Div, Mul, Sub};

use pulp::Simd;

/// Vectors of a row: two, as an addition waits for the one before it.
pub(super) const VECTORS: usize = 2;

/// The most blocks of a row.
pub(super) const MAX_LANES: usize = 16 * VECTORS;

/// A number of each block.
pub(super) type Row<S> = [<S as Simd>::f32s; VECTORS];

/// A byte of each block.
pub(super) type Bytes = [u8; MAX_LANES];

/// Blocks of a row.
pub(super) const fn lanes<S: Simd>() -> usize {
    VECTORS * S::F32_LANES
}

/// The same one by one.
pub(super) type Numbers = [f32; MAX_LANES];

/// 1.5 * 2^23: its sum with a small number holds the nearest integer, ties to even, in its lowest bits.
const ROUND: f32 = 12_582_912.0;

/// 2^23: from here on, the bits of a float are those of an integer.
const UNIT: f32 = 8_388_608.0;

/// The nearest integer in the lowest 23 bits of the sum with [`ROUND`], whatever the number, as ggml takes it.
#[inline(always)]
pub(super) fn nearest(x: f32) -> i32 {
    ((x + ROUND).to_bits() & 0x7f_ffff).cast_signed() - 0x40_0000
}

/// A row in registers.
#[derive(Clone, Copy)]
pub(super) struct Lanes<S: Simd> {
    simd: S,
    pub(super) row: Row<S>,
}

/// Which blocks.
#[derive(Clone, Copy)]
pub(super) struct Mask<S: Simd>(S, [S::m32s; VECTORS]);

macro_rules! operator {
    ($operator:ident, $name:ident, $of_simd:ident) => {
        impl<S: Simd> $operator for Lanes<S> {
            type Output = Self;

            #[inline(always)]
            fn $name(mut self, other: Self) -> Self {
                for i in 0..VECTORS {
                    self.row[i] = self.simd.$of_simd(self.row[i], other.row[i]);
                }
                self
            }
        }
    };
}

operator!(Add, add, add_f32s);
operator!(Sub, sub, sub_f32s);
operator!(Mul, mul, mul_f32s);
operator!(Div, div, div_f32s);

impl<S: Simd> Lanes<S> {
    #[inline(always)]
    pub(super) fn new(simd: S, row: Row<S>) -> Self {
        Self { simd, row }
    }

    #[inline(always)]
    pub(super) fn splat(simd: S, x: f32) -> Self {
        Self { simd, row: [simd.splat_f32s(x); VECTORS] }
    }

    #[inline(always)]
    pub(super) fn of(simd: S, numbers: &Numbers) -> Self {
        let mut row = [simd.splat_f32s(0.0); VECTORS];
        bytemuck::cast_slice_mut(&mut row).copy_from_slice(&numbers[..lanes::<S>()]);
        Self { simd, row }
    }

    #[inline(always)]
    pub(super) fn numbers(self) -> Numbers {
        let mut numbers = [0.0; MAX_LANES];
        numbers[..lanes::<S>()].copy_from_slice(bytemuck::cast_slice(&self.row));
        numbers
    }

    #[inline(always)]
    pub(super) fn abs(mut self) -> Self {
        for vector in &mut self.row {
            *vector = self.simd.abs_f32s(*vector);
        }
        self
    }

    #[inline(always)]
    pub(super) fn negated(self) -> Self {
        // Not from 0, which would lose the sign of zeros.
        Self::splat(self.simd, -0.0) - self
    }

    #[inline(always)]
    pub(super) fn sqrt(mut self) -> Self {
        for vector in &mut self.row {
            *vector = self.simd.sqrt_f32s(*vector);
        }
        self
    }

    #[inline(always)]
    pub(super) fn less(self, other: Self) -> Mask<S> {
        let mut mask = [self.simd.less_than_f32s(self.row[0], other.row[0]); VECTORS];
        for (mask, (one, other)) in mask.iter_mut().zip(self.row.into_iter().zip(other.row)) {
            *mask = self.simd.less_than_f32s(one, other);
        }
        Mask(self.simd, mask)
    }

    #[inline(always)]
    pub(super) fn equal(self, other: Self) -> Mask<S> {
        let mut mask = [self.simd.equal_f32s(self.row[0], other.row[0]); VECTORS];
        for (mask, (one, other)) in mask.iter_mut().zip(self.row.into_iter().zip(other.row)) {
            *mask = self.simd.equal_f32s(one, other);
        }
        Mask(self.simd, mask)
    }

    /// The smaller number; `self` of zeros of either sign.
    #[inline(always)]
    pub(super) fn min(self, other: Self) -> Self {
        other.less(self).select(other, self)
    }

    /// The larger number; `self` of zeros of either sign.
    #[inline(always)]
    pub(super) fn max(self, other: Self) -> Self {
        self.less(other).select(other, self)
    }

    /// As [`nearest`], as a float.
    #[inline(always)]
    pub(super) fn near(self) -> Self {
        self.low_bits(0x7f_ffff) - Self::splat(self.simd, ROUND)
    }

    /// The lowest byte of an integer.
    #[inline(always)]
    pub(super) fn low_byte(self) -> Self {
        self.low_bits(0xff) - Self::splat(self.simd, UNIT)
    }

    /// [`UNIT`] plus those of the lowest bits of the sum with [`ROUND`] that are in `mask`.
    #[inline(always)]
    fn low_bits(self, mask: u32) -> Self {
        let simd = self.simd;
        let mut sum = self + Self::splat(simd, ROUND);
        for vector in &mut sum.row {
            let bits = simd.and_u32s(simd.transmute_u32s_f32s(*vector), simd.splat_u32s(mask));
            *vector = simd.transmute_f32s_u32s(simd.or_u32s(bits, simd.splat_u32s(UNIT.to_bits())));
        }
        sum
    }

    /// The lowest bytes of integers.
    #[inline(always)]
    pub(super) fn bytes(self) -> Bytes {
        let sum = self + Self::splat(self.simd, ROUND);
        let words: &[u32] = bytemuck::cast_slice(&sum.row);
        let mut bytes = [0; MAX_LANES];
        for (byte, word) in bytes.iter_mut().zip(words) {
            *byte = *word as u8;
        }
        bytes
    }
}

impl<S: Simd> Mask<S> {
    #[inline(always)]
    pub(super) fn select(self, mut yes: Lanes<S>, no: Lanes<S>) -> Lanes<S> {
        for i in 0..VECTORS {
            yes.row[i] = self.0.select_f32s(self.1[i], yes.row[i], no.row[i]);
        }
        yes
    }

    #[inline(always)]
    pub(super) fn and(mut self, other: Self) -> Self {
        for i in 0..VECTORS {
            self.1[i] = self.0.and_m32s(self.1[i], other.1[i]);
        }
        self
    }

    #[inline(always)]
    pub(super) fn or(mut self, other: Self) -> Self {
        for i in 0..VECTORS {
            self.1[i] = self.0.or_m32s(self.1[i], other.1[i]);
        }
        self
    }

    #[inline(always)]
    pub(super) fn not(mut self) -> Self {
        for mask in &mut self.1 {
            *mask = self.0.not_m32s(*mask);
        }
        self
    }

    #[inline(always)]
    pub(super) fn any(self) -> bool {
        self.1.iter().any(|mask| self.0.first_true_m32s(*mask) < S::F32_LANES)
    }
}
