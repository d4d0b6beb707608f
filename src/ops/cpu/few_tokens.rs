//! The product of a few tokens with a frozen weight, on which generation spends its time.
//!
//! Every weight is used only a few times, so memory sets the speed. All cores read the weights once, as they are stored,
//! and widen them in registers or in the first-level cache. The order of a sum does not depend on the number of tokens:
//! a text is the same to the bit whether it is written alone or beside others.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::gemm::{round_in_place, round_to_pairs, widen};
use super::simd::{rows_per_chunk, vectorised, with_scratch};
use super::weight::{Values, Weight};

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "instructions that not every processor has")]
mod pairs;
mod words;

use words::{Bf16Pair, F16Pair, SingleWord, WeightWord, WordKind};

/// Rows of the weight that are multiplied at the same time, so that a value of `x` is loaded once for all of them.
const ROWS: usize = 4;

/// Tokens whose products are laid in order at a time: their numbers of an output lie in a cache line.
const GROUP: usize = 16;

/// Outputs of a token that are written at a time, a cache line.
const LINE: usize = 16;

/// Most numbers in a vector of any instruction set.
const MAX_LANES: usize = 16;

/// 32-bit words by which the reading of weights runs ahead of the rows in use.
const WORDS_AHEAD: usize = 256;

/// Tokens that are multiplied at the same time, of `left` ones: as many as have room in the registers.
#[inline(always)]
fn group_of<S: Simd>(left: usize) -> usize {
    match left {
        4.. if S::REGISTER_COUNT >= 32 => 4,
        2.. => 2,
        _ => 1,
    }
}

vectorised! {
    /// Lays out `x`, `[tokens, words * parts]`, in the order of use: by group of tokens, step of a vector of words, token,
    /// and part of a word (of a pair, the elements of even index come first). What is past the end of a row is zero.
    fn pack<'a, S>(_simd, x: &'a [f32], tokens: usize, parts: usize, packed: &'a mut [f32]) {
        let row_len = x.len() / tokens;
        let step_len = parts * S::F32_LANES;
        let packed_len = row_len.div_ceil(step_len) * step_len;
        packed.fill(0.0);
        let mut first = 0;
        while first < tokens {
            let group = group_of::<S>(tokens - first);
            let packed = &mut packed[first * packed_len..][..group * packed_len];
            for (token, x) in x[first * row_len..].chunks_exact(row_len).take(group).enumerate() {
                for (step, x) in x.chunks(step_len).enumerate() {
                    let packed = &mut packed[(step * group + token) * step_len..][..step_len];
                    if parts == 1 {
                        packed[..x.len()].copy_from_slice(x);
                        continue;
                    }
                    let (even, odd) = packed.split_at_mut(S::F32_LANES);
                    for ((even, odd), x) in even.iter_mut().zip(odd).zip(pulp::as_arrays::<2, _>(x).0) {
                        [*even, *odd] = *x;
                    }
                }
            }
            first += group;
        }
    }
}

vectorised! {
    /// `x`: what [`pack`] made of `[tokens, words * parts]`; `w`: `[rows, words]`; `y`: `[rows, tokens]`.
    fn dots<'a, S>(simd, x: &'a [f32], tokens: usize, kind: WordKind, w: &'a [u32], y: &'a mut [f32]) {
        match kind {
            WordKind::F32 => dots_of::<S, SingleWord>(simd, x, tokens, w, y),
            WordKind::Bf16 => dots_of::<S, Bf16Pair>(simd, x, tokens, w, y),
            WordKind::F16 => dots_of::<S, F16Pair>(simd, x, tokens, w, y),
        }
    }
}

/// [`dots`] of a kind of words.
#[inline(always)]
fn dots_of<S: Simd, W: WeightWord>(simd: S, x: &[f32], tokens: usize, w: &[u32], y: &mut [f32]) {
    let words = w.len() / (y.len() / tokens);
    let x = &x[..words.div_ceil(S::F32_LANES) * W::PARTS * S::F32_LANES * tokens];
    let (y, last_y) = y.split_at_mut(y.len() / (ROWS * tokens) * (ROWS * tokens));
    let (w, last_w) = w.split_at(y.len() / tokens * words);
    for (y, w) in y.chunks_exact_mut(ROWS * tokens).zip(w.chunks_exact(ROWS * words)) {
        dots_of_rows::<S, W, ROWS>(simd, x, tokens, w, y);
    }
    for (y, w) in last_y.chunks_exact_mut(tokens).zip(last_w.chunks_exact(words)) {
        dots_of_rows::<S, W, 1>(simd, x, tokens, w, y);
    }
}

/// [`dots`] of `R` rows.
#[inline(always)]
fn dots_of_rows<S: Simd, W: WeightWord, const R: usize>(simd: S, x: &[f32], tokens: usize, w: &[u32], y: &mut [f32]) {
    let mut first = 0;
    while first < tokens {
        let group = group_of::<S>(tokens - first);
        let (x, y) = (&x[x.len() / tokens * first..][..x.len() / tokens * group], &mut y[first..]);
        match (group, first) {
            (4, 0) => dots_of_group::<S, W, R, 4, true>(simd, x, tokens, w, y),
            (4, _) => dots_of_group::<S, W, R, 4, false>(simd, x, tokens, w, y),
            (2, 0) => dots_of_group::<S, W, R, 2, true>(simd, x, tokens, w, y),
            (2, _) => dots_of_group::<S, W, R, 2, false>(simd, x, tokens, w, y),
            (_, 0) => dots_of_group::<S, W, R, 1, true>(simd, x, tokens, w, y),
            _ => dots_of_group::<S, W, R, 1, false>(simd, x, tokens, w, y),
        }
        first += group;
    }
}

/// [`dots`] of `R` rows and the first `T` tokens. `FETCH`: the rows after these are fetched on the way.
#[inline(always)]
fn dots_of_group<S: Simd, W: WeightWord, const R: usize, const T: usize, const FETCH: bool>(
    simd: S,
    x: &[f32],
    tokens: usize,
    w: &[u32],
    y: &mut [f32],
) {
    let words = w.len() / R;
    let steps = words / S::F32_LANES;
    let rows: [&[u32]; R] = std::array::from_fn(|r| &w[r * words..][..words]);
    let bodies: [&[S::u32s]; R] = std::array::from_fn(|r| &S::as_simd_u32s(rows[r]).0[..steps]);
    let (x, _) = S::as_simd_f32s(x);
    let mut sums = [[simd.splat_f32s(0.0); T]; R];
    for (step, x) in x.chunks_exact(T * W::PARTS).take(steps).enumerate() {
        if FETCH {
            rows.iter().for_each(|row| fetch_after(row.as_ptr().wrapping_add(w.len() + step * S::F32_LANES)));
        }
        add_step::<S, W, R, T>(simd, x, std::array::from_fn(|r| bodies[r][step]), &mut sums);
    }
    if steps * S::F32_LANES < words {
        let last = std::array::from_fn(|r| simd.partial_load_u32s(S::as_simd_u32s(rows[r]).1));
        add_step::<S, W, R, T>(simd, &x[steps * T * W::PARTS..], last, &mut sums);
    }
    for (y, sums) in y.chunks_mut(tokens).zip(sums) {
        for (y, sum) in y.iter_mut().zip(sums) {
            *y = simd.reduce_sum_f32s(sum);
        }
    }
}

/// Adds the products of one vector of words of every row.
#[inline(always)]
fn add_step<S: Simd, W: WeightWord, const R: usize, const T: usize>(
    simd: S,
    x: &[S::f32s],
    words: [S::u32s; R],
    sums: &mut [[S::f32s; T]; R],
) {
    let x = &x[..T * W::PARTS];
    for (sums, words) in sums.iter_mut().zip(words) {
        let parts = W::parts(simd, words);
        for (token, sum) in sums.iter_mut().enumerate() {
            for part in 0..W::PARTS {
                *sum = simd.mul_add_e_f32s(x[token * W::PARTS + part], parts[part], *sum);
            }
        }
    }
}

/// Asks for the cache line [`WORDS_AHEAD`] of a place, which need not be one that can be read.
#[inline(always)]
fn fetch_after(place: *const u32) {
    let words = place.wrapping_add(WORDS_AHEAD);
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which never faults; every x86-64 processor has it.
        #[expect(unsafe_code, reason = "the hint takes an address")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(words.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = words;
}

/// [`linear`](super::linear::linear) of a few tokens.
pub(super) fn linear_of_few(x: &[f32], w: Weight<'_>, in_features: usize, y: &mut [f32], accumulate: bool) {
    let tokens = x.len() / in_features;
    if tokens == 1 && !accumulate {
        return products_of_few(x, w, in_features, y);
    }
    with_scratch(y.len(), |products| {
        products_of_few(x, w, in_features, products);
        let out_features = products.len() / tokens;
        let groups = y.par_chunks_mut(GROUP * out_features).with_min_len(rows_per_chunk(GROUP * out_features));
        groups.enumerate().for_each(|(group, y)| {
            for (block, products) in products.chunks(LINE * tokens).enumerate() {
                for (token, y) in y.chunks_exact_mut(out_features).enumerate() {
                    let products = products.iter().skip(group * GROUP + token).step_by(tokens);
                    for (y, product) in y[block * LINE..].iter_mut().zip(products) {
                        *y = if accumulate { *y + product } else { *product };
                    }
                }
            }
        });
    });
}

/// `products`: `[out_features, tokens]`.
fn products_of_few(x: &[f32], w: Weight<'_>, in_features: usize, products: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if let (true, Some((WordKind::Bf16, pairs))) = (w.rounds, words(w, in_features)) {
        let tokens = x.len() / in_features;
        let mut rounded = vec![0; x.len() / 2];
        round_to_pairs(x, &mut rounded);
        return for_each_chunk(products, tokens, in_features, |range, y| {
            pairs::dots(&rounded, tokens, &pairs[range.start / 2..range.end / 2], y);
        });
    }
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
    match words(w, in_features) {
        Some((kind, w)) => products_of_words(x, w, kind, in_features, products),
        None => widened(x, w, in_features, products),
    }
}

fn products_of_words(x: &[f32], w: &[u32], kind: WordKind, in_features: usize, products: &mut [f32]) {
    let (tokens, parts) = (x.len() / in_features, kind.parts());
    packed(x, tokens, parts, |x| {
        for_each_chunk(products, tokens, in_features, |range, y| {
            dots(x, tokens, kind, &w[range.start / parts..range.end / parts], y);
        });
    });
}

/// Through `f32`, rounded on the way if the weight asks for it.
fn widened(x: &[f32], w: Weight<'_>, in_features: usize, products: &mut [f32]) {
    let tokens = x.len() / in_features;
    packed(x, tokens, 1, |x| {
        let rows = rows_per_chunk(in_features);
        for_each_chunk(products, tokens, in_features, |range, y| {
            for (start, y) in range.step_by(rows * in_features).zip(y.chunks_mut(rows * tokens)) {
                with_scratch(y.len() / tokens * in_features, |wide| {
                    widen(w, start, wide);
                    if w.rounds {
                        round_in_place(wide);
                    }
                    dots(x, tokens, WordKind::F32, bytemuck::cast_slice(wide), y);
                });
            }
        });
    });
}

/// Runs `product` with what [`pack`] makes of `x`.
fn packed(x: &[f32], tokens: usize, parts: usize, product: impl FnOnce(&[f32])) {
    let most = (x.len() / tokens).next_multiple_of(parts * MAX_LANES) * tokens;
    with_scratch(most, |packed| {
        pack(x, tokens, parts, packed);
        product(packed);
    });
}

/// A weight as words: numbers, or pairs of neighbours where no pair spans two rows.
fn words(w: Weight<'_>, in_features: usize) -> Option<(WordKind, &[u32])> {
    let has_pairs = in_features.is_multiple_of(2) && cfg!(target_endian = "little");
    match w.values {
        Values::F32(w) => Some((WordKind::F32, bytemuck::cast_slice(w))),
        Values::Bf16(w) if has_pairs => Some((WordKind::Bf16, bytemuck::try_cast_slice(w).ok()?)),
        Values::F16(w) if has_pairs => Some((WordKind::F16, bytemuck::try_cast_slice(w).ok()?)),
        _ => None,
    }
}

/// Cuts `y`, `[out_features, tokens]`, into tasks for the cores; each comes with the range of the weights of its rows.
fn for_each_chunk(y: &mut [f32], tokens: usize, in_features: usize, product: impl Fn(Range<usize>, &mut [f32]) + Sync) {
    // A few for each core, so that one that is late does not hold up the others; rows are computed alike in any task.
    let rows = (y.len() / tokens).div_ceil(4 * rayon::current_num_threads()).max(rows_per_chunk(in_features));
    let rows = rows.next_multiple_of(ROWS);
    y.par_chunks_mut(rows * tokens).enumerate().for_each(|(chunk, y)| {
        let start = chunk * rows * in_features;
        product(start..start + y.len() / tokens * in_features, y);
    });
}

#[cfg(test)]
mod tests {
    use super::super::linear::linear;
    use super::super::reference::{assert_close, random};
    use super::super::weight::{FEW_TOKENS, MOST_TEXTS};
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_number_in_half_precision_is_widened_as_it_is() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for place in 0..2 {
            let pair = |number: &f16| if place == 0 { [*number, f16::ZERO] } else { [f16::ZERO, *number] };
            let mut found = vec![0.5; all.len()];
            linear(
                &[1.0; 2],
                Weight::f16(&all.iter().flat_map(pair).collect::<Vec<_>>()),
                2,
                all.len(),
                &mut found,
                false,
            );
            let is_same = |(all, found): (&f16, &f32)| all.to_f32() == *found || (all.is_nan() && found.is_nan());
            assert_eq!(all.iter().zip(&found).position(|pair| !is_same(pair)), None);
        }
    }

    #[test]
    fn a_token_among_others_has_the_bits_of_one_alone_in_every_type() {
        for [in_features, out_features] in [[576, 200], [70, 33], [7, 5], [1536, 64]] {
            let w = random(out_features * in_features, 1);
            let (halves, small): (Vec<bf16>, Vec<f16>) =
                w.iter().map(|w| (bf16::from_f32(*w), f16::from_f32(*w))).unzip();
            for weight in [Weight::f32(&w), Weight::bf16(&halves), Weight::f16(&small)] {
                for (weight, accumulate) in [(weight, false), (weight, true), (weight.rounding(true), false)] {
                    for tokens in [2, 3, 4, 7, FEW_TOKENS, 33, MOST_TEXTS] {
                        let x = random(tokens * in_features, 2);
                        let mut together = vec![0.5; tokens * out_features];
                        let of_texts = weight.of_texts(true);
                        linear(&x, of_texts, in_features, out_features, &mut together, accumulate);
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

    #[test]
    fn products_that_round_are_those_of_rounded_operands() {
        for [in_features, out_features, tokens] in [[576, 41, 5], [70, 33, 3], [2, 1, 1]] {
            let [mut x, mut w] = [random(tokens * in_features, 3), random(out_features * in_features, 4)];
            let halves: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
            let mut found = vec![0.5; tokens * out_features];
            let weight = Weight::bf16(&halves).rounding(true);
            linear(&x, weight, in_features, out_features, &mut found, false);
            round_in_place(&mut w);
            if weight.rounds {
                round_in_place(&mut x);
            }
            let [x, w] = [x, w].map(|operand| operand.into_iter().map(f64::from).collect::<Vec<_>>());
            let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum();
            let rows = |x| w.chunks(in_features).map(move |w| dot(x, w));
            let expected: Vec<f64> = x.chunks(in_features).flat_map(rows).collect();
            assert_close(&found, &expected, 1e-6);
        }
    }
}
