//! Products of a few tokens by AVX512-BF16, which multiplies pairs of bfloat16 as they are stored and sums in f32.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_maskz_loadu_epi32, _mm512_reduce_add_ps,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_f32x4, _mm512_shuffle_ps,
};

use super::{ROWS, fetch_after};
use crate::device::has_bf16_products;

/// Words of a vector.
const LANES: usize = 16;

/// Tokens that are multiplied at the same time.
const TOKENS: usize = 4;

/// `x`: `[tokens, words]`; `w`: `[rows, words]`; `y`: `[rows, tokens]`. A word is a pair. Only on machines that
/// [multiply pairs](has_bf16_products).
pub(super) fn dots(x: &[u32], tokens: usize, w: &[u32], y: &mut [f32]) {
    assert!(has_bf16_products(), "dots: no products of bf16 pairs here");
    let words = x.len() / tokens;
    assert!(w.len() / words == y.len() / tokens, "dots: {} words in rows of {words} for {} sums", w.len(), y.len());
    let whole = y.len() / (ROWS * tokens) * (ROWS * tokens);
    let (y, last_y) = y.split_at_mut(whole);
    let (w, last_w) = w.split_at(y.len() / tokens * words);
    for (y, w) in y.chunks_exact_mut(ROWS * tokens).zip(w.chunks_exact(ROWS * words)) {
        // SAFETY: the machine has the instructions.
        unsafe { of_rows::<ROWS>(x, tokens, w, y) };
    }
    for (y, w) in last_y.chunks_exact_mut(tokens).zip(last_w.chunks_exact(words)) {
        // SAFETY: as above.
        unsafe { of_rows::<1>(x, tokens, w, y) };
    }
}

/// [`dots`] of `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn of_rows<const R: usize>(x: &[u32], tokens: usize, w: &[u32], y: &mut [f32]) {
    let words = x.len() / tokens;
    for (group, x) in x.chunks(TOKENS * words).enumerate() {
        let y = &mut y[group * TOKENS..];
        match x.len() / words {
            4 => of_group::<R, 4>(x, tokens, w, y, group == 0),
            3 => of_group::<R, 3>(x, tokens, w, y, group == 0),
            2 => of_group::<R, 2>(x, tokens, w, y, group == 0),
            _ => of_group::<R, 1>(x, tokens, w, y, group == 0),
        }
    }
}

/// [`dots`] of `R` rows and the first `T` tokens. `fetches`: the rows after these are fetched on the way.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn of_group<const R: usize, const T: usize>(x: &[u32], tokens: usize, w: &[u32], y: &mut [f32], fetches: bool) {
    let words = w.len() / R;
    assert!(x.len() >= T * words, "dots: {} words of {T} tokens in rows of {words}", x.len());
    let mut sums = [[_mm512_setzero_ps(); T]; R];
    for start in (0..words).step_by(LANES) {
        let mask = if words - start < LANES { (1 << (words - start)) - 1 } else { u16::MAX };
        let mut pairs = [_mm512_setzero_si512(); T];
        for (token, pairs) in pairs.iter_mut().enumerate() {
            // SAFETY: `x` has as many tokens, and the mask leaves out what is behind the last word of this one.
            *pairs = unsafe { _mm512_maskz_loadu_epi32(mask, x.as_ptr().add(token * words + start).cast()) };
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            let place = w.as_ptr().wrapping_add(row * words + start);
            if fetches {
                fetch_after(place.wrapping_add(w.len()));
            }
            // SAFETY: as above, with the rows of `w`.
            let row = unsafe { _mm512_maskz_loadu_epi32(mask, place.cast()) };
            for (sum, pairs) in sums.iter_mut().zip(pairs) {
                *sum = _mm512_dpbf16_ps(*sum, as_pairs(pairs), as_pairs(row));
            }
        }
    }
    if R * T == LANES {
        let mut vectors = [_mm512_setzero_ps(); LANES];
        vectors.as_chunks_mut().0.iter_mut().zip(sums).for_each(|(vectors, sums): (&mut [_; T], _)| *vectors = sums);
        let sums = sums_of_all(vectors);
        y.chunks_mut(tokens).zip(sums.chunks(T)).for_each(|(y, sums)| y[..T].copy_from_slice(sums));
        return;
    }
    for (y, sums) in y.chunks_mut(tokens).zip(sums) {
        for (y, sum) in y.iter_mut().zip(sums) {
            *y = _mm512_reduce_add_ps(sum);
        }
    }
}

/// The sum of each vector, to the bit that of `_mm512_reduce_add_ps`: halves are added, then their halves, and so on, here of two
/// vectors at a time.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[expect(clippy::large_types_passed_by_value, reason = "they are in registers")]
fn sums_of_all(vectors: [__m512; LANES]) -> [f32; LANES] {
    let [mut halves, mut quarters, mut pairs] = [[_mm512_setzero_ps(); LANES / 2]; 3];
    for (i, half) in halves.iter_mut().enumerate() {
        // In an order that the last step undoes.
        let of = |i: usize| [0, 8, 4, 12][i / 4] + [0, 2, 1, 3][i % 4];
        let (a, b) = (vectors[of(i)], vectors[of(i + 8)]);
        *half = _mm512_add_ps(_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b));
    }
    for (i, quarter) in quarters[..4].iter_mut().enumerate() {
        let (a, b) = (halves[i], halves[i + 4]);
        *quarter =
            _mm512_add_ps(_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
    }
    for (i, pair) in pairs[..2].iter_mut().enumerate() {
        let (a, b) = (quarters[i], quarters[i + 2]);
        *pair = _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>(a, b), _mm512_shuffle_ps::<0b11_10_11_10>(a, b));
    }
    let [a, b] = [pairs[0], pairs[1]];
    let sums = _mm512_add_ps(_mm512_shuffle_ps::<0b10_00_10_00>(a, b), _mm512_shuffle_ps::<0b11_01_11_01>(a, b));
    // SAFETY: both are 16 numbers.
    unsafe { std::mem::transmute(sums) }
}

#[inline]
fn as_pairs(words: __m512i) -> __m512bh {
    // SAFETY: both types have 512 bits, and all bits are valid for both.
    unsafe { std::mem::transmute(words) }
}
