//! The product of one token with a frozen weight, on which generation spends its time.
//!
//! Every weight is used once, so memory sets the speed. All cores read the weights as they are stored and widen them in
//! registers or in the first-level cache.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::gemm::{round_in_place, widen};
use super::linear::{Values, Weight};
use super::simd::{dot, rows_per_chunk, vectorised, with_scratch};

vectorised! { fn dots<'a, S>(simd, x: &'a [f32], w: &'a [f32], y: &'a mut [f32], accumulate: bool) {
    for (y, w) in y.iter_mut().zip(w.chunks_exact(x.len())) {
        let product = dot(simd, x, w);
        *y = if accumulate { *y + product } else { product };
    }
} }

vectorised! {
    /// [`dots`] with bf16 rows, read two numbers at a time: the upper half of 32 bits is an f32 already, the lower half
    /// is one after a shift. `x` comes as its elements of even and of odd index.
    fn dots_bf16<'a, S>(
        simd, even: &'a [f32], odd: &'a [f32], pairs: &'a [u32], y: &'a mut [f32], accumulate: bool,
    ) {
        let row_len = even.len();
        let (even, even_tail) = S::as_simd_f32s(even);
        let (odd, odd_tail) = S::as_simd_f32s(odd);
        let (even_twos, even_rest) = pulp::as_arrays::<2, _>(even);
        let (odd_twos, odd_rest) = pulp::as_arrays::<2, _>(odd);
        let (zero, upper, shift) = (simd.splat_f32s(0.0), simd.splat_u32s(0xffff_0000), simd.splat_u32s(16));
        let low = |pair: S::u32s| simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(pair, shift));
        let high = |pair: S::u32s| simd.transmute_f32s_u32s(simd.and_u32s(pair, upper));
        for (y, pairs) in y.iter_mut().zip(pairs.chunks_exact(row_len)) {
            let (pairs, pairs_tail) = S::as_simd_u32s(pairs);
            let (pair_twos, pair_rest) = pulp::as_arrays::<2, _>(pairs);
            let mut sums = [zero; 4];
            for ((pair, even), odd) in pair_twos.iter().zip(even_twos).zip(odd_twos) {
                sums[0] = simd.mul_add_e_f32s(low(pair[0]), even[0], sums[0]);
                sums[1] = simd.mul_add_e_f32s(high(pair[0]), odd[0], sums[1]);
                sums[2] = simd.mul_add_e_f32s(low(pair[1]), even[1], sums[2]);
                sums[3] = simd.mul_add_e_f32s(high(pair[1]), odd[1], sums[3]);
            }
            for ((pair, even), odd) in pair_rest.iter().zip(even_rest).zip(odd_rest) {
                sums[0] = simd.mul_add_e_f32s(low(*pair), *even, sums[0]);
                sums[1] = simd.mul_add_e_f32s(high(*pair), *odd, sums[1]);
            }
            if !pairs_tail.is_empty() {
                let pair = simd.partial_load_u32s(pairs_tail);
                sums[2] = simd.mul_add_e_f32s(low(pair), simd.partial_load_f32s(even_tail), sums[2]);
                sums[3] = simd.mul_add_e_f32s(high(pair), simd.partial_load_f32s(odd_tail), sums[3]);
            }
            let sum = simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3]));
            let product = simd.reduce_sum_f32s(sum);
            *y = if accumulate { *y + product } else { product };
        }
    }
}

/// [`linear`](super::linear::linear) of one token.
pub(super) fn linear_of_one(x: &[f32], w: Weight<'_>, y: &mut [f32], accumulate: bool) {
    let in_features = x.len();
    if w.rounds {
        return with_scratch(in_features, |rounded| {
            rounded.copy_from_slice(x);
            round_in_place(rounded);
            match w.values {
                Values::Bf16(_) => linear_of_one(rounded, w.rounding(false), y, accumulate),
                _ => widened(rounded, w, y, accumulate),
            }
        });
    }
    match (w.values, pairs(w, in_features)) {
        (Values::F32(w), _) => for_each_chunk(y, in_features, |range, y| dots(x, &w[range], y, accumulate)),
        (_, Some(pairs)) => linear_of_one_bf16(x, pairs, y, accumulate),
        _ => widened(x, w, y, accumulate),
    }
}

/// Row by row through `f32`, rounded on the way if the weight asks for it.
fn widened(x: &[f32], w: Weight<'_>, y: &mut [f32], accumulate: bool) {
    for_each_chunk(y, x.len(), |range, y| {
        with_scratch(x.len(), |row| {
            for (index, y) in y.chunks_exact_mut(1).enumerate() {
                widen(w, range.start + index * x.len(), row);
                if w.rounds {
                    round_in_place(row);
                }
                dots(x, row, y, accumulate);
            }
        });
    });
}

fn linear_of_one_bf16(x: &[f32], pairs: &[u32], y: &mut [f32], accumulate: bool) {
    with_scratch(x.len(), |halves| {
        let (even, odd) = halves.split_at_mut(x.len() / 2);
        for ((even, odd), x) in even.iter_mut().zip(&mut *odd).zip(x.chunks_exact(2)) {
            (*even, *odd) = (x[0], x[1]);
        }
        let (even, odd) = (&*even, &*odd);
        for_each_chunk(y, x.len(), |range, y| {
            dots_bf16(even, odd, &pairs[range.start / 2..range.end / 2], y, accumulate);
        });
    });
}

/// A bf16 weight as pairs of neighbours, where no pair spans two rows; the first of a pair is in the lower bits.
fn pairs(w: Weight<'_>, in_features: usize) -> Option<&[u32]> {
    match w.values {
        Values::Bf16(w) if in_features.is_multiple_of(2) && cfg!(target_endian = "little") => {
            bytemuck::try_cast_slice::<bf16, u32>(w).ok()
        }
        _ => None,
    }
}

/// Cuts `y` into chunks for the cores; each comes with the range of the weights of its rows.
fn for_each_chunk(y: &mut [f32], in_features: usize, product: impl Fn(Range<usize>, &mut [f32]) + Sync) {
    let rows = rows_per_chunk(in_features);
    y.par_chunks_mut(rows).enumerate().for_each(|(chunk, y)| {
        let start = chunk * rows * in_features;
        product(start..start + y.len() * in_features, y);
    });
}
