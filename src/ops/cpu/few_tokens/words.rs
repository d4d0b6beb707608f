//! Weights as 32-bit words, and how a vector of words is widened in registers.

use pulp::Simd;

/// What the 32-bit words of a weight are.
#[derive(Clone, Copy)]
pub(super) enum WordKind {
    F32,
    /// Two, of which the first is in the lower bits.
    Bf16,
    /// Likewise.
    F16,
}

impl WordKind {
    /// Numbers of a word.
    pub(super) fn parts(self) -> usize {
        if matches!(self, Self::F32) { 1 } else { 2 }
    }
}

/// How a word is widened.
pub(super) trait WeightWord {
    const PARTS: usize;

    /// The numbers of every word; of one part, twice.
    fn parts<S: Simd>(simd: S, words: S::u32s) -> [S::f32s; 2];
}

pub(super) struct SingleWord;
pub(super) struct Bf16Pair;
pub(super) struct F16Pair;

impl WeightWord for SingleWord {
    const PARTS: usize = 1;

    #[inline(always)]
    fn parts<S: Simd>(simd: S, words: S::u32s) -> [S::f32s; 2] {
        [simd.transmute_f32s_u32s(words); 2]
    }
}

impl WeightWord for Bf16Pair {
    const PARTS: usize = 2;

    /// The upper half of a pair is an `f32` already, the lower half is one after a shift.
    #[inline(always)]
    fn parts<S: Simd>(simd: S, words: S::u32s) -> [S::f32s; 2] {
        let first = simd.wrapping_dyn_shl_u32s(words, simd.splat_u32s(16));
        let second = simd.and_u32s(words, simd.splat_u32s(0xffff_0000));
        [simd.transmute_f32s_u32s(first), simd.transmute_f32s_u32s(second)]
    }
}

impl WeightWord for F16Pair {
    const PARTS: usize = 2;

    #[inline(always)]
    fn parts<S: Simd>(simd: S, words: S::u32s) -> [S::f32s; 2] {
        let first = simd.wrapping_dyn_shl_u32s(words, simd.splat_u32s(16));
        [widen_upper_f16(simd, first), widen_upper_f16(simd, words)]
    }
}

/// The `f16` in the upper half of every word. Exponent and fraction in their places of an `f32` stand for a number that is
/// 2^112 times smaller, also below the normal range. Infinities and what is no number have the highest exponent.
///
/// A function, as a closure would not be inlined, and with it none of its instructions.
#[inline(always)]
fn widen_upper_f16<S: Simd>(simd: S, half: S::u32s) -> S::f32s {
    let splat = |bits| simd.splat_u32s(bits);
    let small = simd.wrapping_dyn_shr_u32s(simd.and_u32s(half, splat(0x7fff_0000)), splat(3));
    let number = simd.mul_f32s(simd.transmute_f32s_u32s(small), simd.splat_f32s(2.0_f32.powi(112)));
    let no_number = simd.or_u32s(small, splat(0x7f80_0000));
    let is_number = simd.less_than_u32s(small, splat(0x0f80_0000));
    let size = simd.select_u32s(is_number, simd.transmute_u32s_f32s(number), no_number);
    simd.transmute_f32s_u32s(simd.or_u32s(size, simd.and_u32s(half, splat(0x8000_0000))))
}
