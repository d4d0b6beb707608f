//! The product of a few tokens with a frozen weight, on which generation spends its time.
//!
//! Every weight is used only a few times, so memory sets the speed. All cores read the weights once, as they are stored,
//! and widen them in registers or in the first-level cache. The order of a sum does not depend on the number of tokens:
//! a text is the same to the bit whether it is written alone or beside others.

use std::ops::Range;

use half::bf16;
use pulp::Simd;
use rayon::prelude::*;

use super::gemm::{round_in_place, widen};
use super::linear::{Values, Weight};
use super::simd::{rows_per_chunk, vectorised, with_scratch};

/// Most tokens of a product that is computed here; with more, packed weights pay.
pub const FEW_TOKENS: usize = 16;

/// Runs `$one::<S, T>` for tokens `first..first + T`, as many at a time as have room in the registers.
macro_rules! for_tokens {
    ($S:ident, $tokens:expr, $one:ident, $($arg:expr),*) => {
        let (tokens, mut first) = ($tokens, 0);
        while $S::REGISTER_COUNT >= 32 && tokens - first >= 4 {
            $one::<$S, 4>(first, $($arg),*);
            first += 4;
        }
        while tokens - first >= 2 {
            $one::<$S, 2>(first, $($arg),*);
            first += 2;
        }
        if tokens > first {
            $one::<$S, 1>(first, $($arg),*);
        }
    };
}

vectorised! {
    /// `x`: `[tokens, row_len]`, `w`: `[rows, row_len]`, `y`: `[rows, tokens]`.
    fn dots<'a, S>(simd, x: &'a [f32], w: &'a [f32], row_len: usize, y: &'a mut [f32]) {
        let tokens = x.len() / row_len;
        for (y, w) in y.chunks_exact_mut(tokens).zip(w.chunks_exact(row_len)) {
            for_tokens!(S, tokens, dot_of_row, simd, x, w, y);
        }
    }
}

/// The products of `T` tokens with one row, each summed in four interleaved chains of vectors.
#[inline(always)]
fn dot_of_row<S: Simd, const T: usize>(first: usize, simd: S, x: &[f32], w: &[f32], y: &mut [f32]) {
    let x: [&[f32]; T] = std::array::from_fn(|t| &x[(first + t) * w.len()..][..w.len()]);
    let (w_body, w_tail) = S::as_simd_f32s(w);
    let (w_quads, w_rest) = pulp::as_arrays::<4, _>(w_body);
    let quads = x.map(|x| &pulp::as_arrays::<4, _>(S::as_simd_f32s(x).0).0[..w_quads.len()]);
    let rests = x.map(|x| &pulp::as_arrays::<4, _>(S::as_simd_f32s(x).0).1[..w_rest.len()]);
    let mut sums = [[simd.splat_f32s(0.0); 4]; T];
    for (i, w) in w_quads.iter().enumerate() {
        for (sums, quads) in sums.iter_mut().zip(quads) {
            for lane in 0..4 {
                sums[lane] = simd.mul_add_e_f32s(quads[i][lane], w[lane], sums[lane]);
            }
        }
    }
    for (i, w) in w_rest.iter().enumerate() {
        for (sums, rest) in sums.iter_mut().zip(rests) {
            sums[0] = simd.mul_add_e_f32s(rest[i], *w, sums[0]);
        }
    }
    if !w_tail.is_empty() {
        let w = simd.partial_load_f32s(w_tail);
        for (sums, x) in sums.iter_mut().zip(x) {
            sums[1] = simd.mul_add_e_f32s(simd.partial_load_f32s(S::as_simd_f32s(x).1), w, sums[1]);
        }
    }
    for (y, sums) in y[first..first + T].iter_mut().zip(sums) {
        *y = total(simd, sums);
    }
}

#[inline(always)]
fn total<S: Simd>(simd: S, sums: [S::f32s; 4]) -> f32 {
    simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3])))
}

vectorised! {
    /// [`dots`] with bf16 rows, read two numbers at a time: the upper half of 32 bits is an f32 already, the lower half
    /// is one after a shift. `x` comes as its elements of even and of odd index.
    fn dots_bf16<'a, S>(simd, even: &'a [f32], odd: &'a [f32], pairs: &'a [u32], row_len: usize, y: &'a mut [f32]) {
        let tokens = even.len() / row_len;
        for (y, pairs) in y.chunks_exact_mut(tokens).zip(pairs.chunks_exact(row_len)) {
            for_tokens!(S, tokens, dot_of_pairs, simd, even, odd, pairs, y);
        }
    }
}

/// [`dot_of_row`] with a row of pairs.
#[inline(always)]
fn dot_of_pairs<S: Simd, const T: usize>(
    first: usize,
    simd: S,
    even: &[f32],
    odd: &[f32],
    pairs: &[u32],
    y: &mut [f32],
) {
    let [even, odd]: [[&[f32]; T]; 2] =
        [even, odd].map(|x| std::array::from_fn(|t| &x[(first + t) * pairs.len()..][..pairs.len()]));
    let (body, tail) = S::as_simd_u32s(pairs);
    let (twos, rest) = pulp::as_arrays::<2, _>(body);
    let [evens, odds] = [even, odd].map(|x| x.map(|x| pulp::as_arrays::<2, _>(S::as_simd_f32s(x).0)));
    let [even_twos, odd_twos] = [evens, odds].map(|x| x.map(|(of_token, _)| &of_token[..twos.len()]));
    let (upper, shift) = (simd.splat_u32s(0xffff_0000), simd.splat_u32s(16));
    let low = |pair: S::u32s| simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(pair, shift));
    let high = |pair: S::u32s| simd.transmute_f32s_u32s(simd.and_u32s(pair, upper));
    let mut sums = [[simd.splat_f32s(0.0); 4]; T];
    for (i, pair) in twos.iter().enumerate() {
        let w = [low(pair[0]), high(pair[0]), low(pair[1]), high(pair[1])];
        for ((sums, even), odd) in sums.iter_mut().zip(even_twos).zip(odd_twos) {
            let (even, odd) = (even[i], odd[i]);
            sums[0] = simd.mul_add_e_f32s(w[0], even[0], sums[0]);
            sums[1] = simd.mul_add_e_f32s(w[1], odd[0], sums[1]);
            sums[2] = simd.mul_add_e_f32s(w[2], even[1], sums[2]);
            sums[3] = simd.mul_add_e_f32s(w[3], odd[1], sums[3]);
        }
    }
    for (i, pair) in rest.iter().enumerate() {
        for ((sums, even), odd) in sums.iter_mut().zip(evens).zip(odds) {
            sums[0] = simd.mul_add_e_f32s(low(*pair), even.1[i], sums[0]);
            sums[1] = simd.mul_add_e_f32s(high(*pair), odd.1[i], sums[1]);
        }
    }
    if !tail.is_empty() {
        let pair = simd.partial_load_u32s(tail);
        for (sums, (even, odd)) in sums.iter_mut().zip(even.into_iter().zip(odd)) {
            let tail_of = |x: &[f32]| simd.partial_load_f32s(S::as_simd_f32s(x).1);
            sums[2] = simd.mul_add_e_f32s(low(pair), tail_of(even), sums[2]);
            sums[3] = simd.mul_add_e_f32s(high(pair), tail_of(odd), sums[3]);
        }
    }
    for (y, sums) in y[first..first + T].iter_mut().zip(sums) {
        *y = total(simd, sums);
    }
}

/// [`linear`](super::linear::linear) of one to [`FEW_TOKENS`] tokens.
pub(super) fn linear_of_few(x: &[f32], w: Weight<'_>, in_features: usize, y: &mut [f32], accumulate: bool) {
    let tokens = x.len() / in_features;
    with_scratch(y.len(), |products| {
        products_of_few(x, w, in_features, products);
        y.par_chunks_mut(products.len() / tokens).enumerate().for_each(|(token, y)| {
            for (y, products) in y.iter_mut().zip(products.chunks_exact(tokens)) {
                *y = if accumulate { *y + products[token] } else { products[token] };
            }
        });
    });
}

/// `products`: `[out_features, tokens]`.
fn products_of_few(x: &[f32], w: Weight<'_>, in_features: usize, products: &mut [f32]) {
    if w.rounds {
        return with_scratch(x.len(), |rounded| {
            rounded.copy_from_slice(x);
            round_in_place(rounded);
            match w.values {
                Values::Bf16(_) => products_of_few(rounded, w.rounding(false), in_features, products),
                _ => widened(rounded, w, in_features, products),
            }
        });
    }
    let tokens = x.len() / in_features;
    match (w.values, pairs(w, in_features)) {
        (Values::F32(w), _) => {
            for_each_chunk(products, tokens, in_features, |range, y| dots(x, &w[range], in_features, y));
        }
        (_, Some(pairs)) => products_of_bf16(x, pairs, in_features, products),
        _ => widened(x, w, in_features, products),
    }
}

/// Row by row through `f32`, rounded on the way if the weight asks for it.
fn widened(x: &[f32], w: Weight<'_>, in_features: usize, products: &mut [f32]) {
    let tokens = x.len() / in_features;
    for_each_chunk(products, tokens, in_features, |range, y| {
        with_scratch(in_features, |row| {
            for (index, y) in y.chunks_exact_mut(tokens).enumerate() {
                widen(w, range.start + index * in_features, row);
                if w.rounds {
                    round_in_place(row);
                }
                dots(x, row, in_features, y);
            }
        });
    });
}

fn products_of_bf16(x: &[f32], pairs: &[u32], in_features: usize, products: &mut [f32]) {
    with_scratch(x.len(), |halves| {
        let (even, odd) = halves.split_at_mut(x.len() / 2);
        for ((even, odd), x) in even.iter_mut().zip(&mut *odd).zip(x.chunks_exact(2)) {
            (*even, *odd) = (x[0], x[1]);
        }
        let (even, odd) = (&*even, &*odd);
        for_each_chunk(products, x.len() / in_features, in_features, |range, y| {
            dots_bf16(even, odd, &pairs[range.start / 2..range.end / 2], in_features / 2, y);
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

/// Cuts `y`, `[out_features, tokens]`, into chunks for the cores; each comes with the range of the weights of its rows.
fn for_each_chunk(y: &mut [f32], tokens: usize, in_features: usize, product: impl Fn(Range<usize>, &mut [f32]) + Sync) {
    let rows = rows_per_chunk(in_features);
    y.par_chunks_mut(rows * tokens).enumerate().for_each(|(chunk, y)| {
        let start = chunk * rows * in_features;
        product(start..start + y.len() / tokens * in_features, y);
    });
}

#[cfg(test)]
mod tests {
    use super::super::linear::linear;
    use super::super::reference::random;
    use super::*;

    #[test]
    fn a_token_among_others_has_the_bits_of_one_alone_in_every_type() {
        for [in_features, out_features] in [[576, 200], [70, 33], [7, 5], [1536, 64]] {
            let w = random(out_features * in_features, 1);
            let (halves, small): (Vec<bf16>, Vec<half::f16>) =
                w.iter().map(|w| (bf16::from_f32(*w), half::f16::from_f32(*w))).unzip();
            for weight in [Weight::f32(&w), Weight::bf16(&halves), Weight::f16(&small)] {
                for (weight, accumulate) in [(weight, false), (weight, true), (weight.rounding(true), false)] {
                    for tokens in [2, 3, 4, 7, FEW_TOKENS] {
                        let x = random(tokens * in_features, 2);
                        let mut together = vec![0.5; tokens * out_features];
                        linear(&x, weight, in_features, out_features, &mut together, accumulate);
                        for (x, together) in x.chunks(in_features).zip(together.chunks(out_features)) {
                            let mut alone = vec![0.5; out_features];
                            linear(x, weight, in_features, out_features, &mut alone, accumulate);
                            assert_eq!(alone, together, "{in_features} -> {out_features}, {tokens} tokens");
                        }
                    }
                }
            }
        }
    }
}
