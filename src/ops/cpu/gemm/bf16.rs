//! Products of bfloat16 pairs by AVX512-BF16, with sums in f32.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_ps, _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
    _mm512_storeu_si512,
};

use super::super::product::{Left, ProductInto};
use super::{Arithmetic, Term, panel, tiles};
use crate::device::{has_bf16_products, has_bf16_tiles};

/// Words of a vector.
const LANES: usize = 16;

/// Pairs of bfloat16 along the depth, one pair per word.
pub(super) struct Pairs;

impl Arithmetic for Pairs {
    type Word = u32;

    fn words(k: usize) -> usize {
        k.div_ceil(2)
    }

    fn pack(term: &Term<'_>, first: usize, depth: usize, column: usize, columns: usize, panel: &mut [u32]) {
        panel::pack_pairs(&term.b, term.k, first, depth, column, columns, panel);
    }

    unsafe fn multiply(product: ProductInto<'_, u32>) {
        // SAFETY: by the caller's promise.
        unsafe { multiply(product) };
    }
}

/// # Safety
/// As for [`ProductInto::promise`].
pub(in crate::ops::cpu) unsafe fn multiply(product: ProductInto<'_, u32>) {
    let ProductInto { shape: [m, n, k], a, then, .. } = product;
    if m == 0 || n == 0 {
        return;
    }
    let depth = k + then.map_or(0, |(_, k)| k);
    assert!(has_bf16_products() && n.is_multiple_of(LANES) && a.holds(m, k));
    assert!(then.is_none_or(|(a, k)| a.holds(m, k)));
    assert!(depth == 0 || (depth - 1) * product.b_stride + n <= product.b.len());
    // SAFETY: the machine has the instructions; the assertions keep the reads inside the operands, and the caller promises
    // that the writes stay inside the result.
    unsafe {
        if has_bf16_tiles() && m >= tiles::SIDE && depth > 0 {
            tiles::multiply(product);
        } else {
            columns(product);
        }
    }
}

/// All columns, a few vectors at a time.
///
/// # Safety
/// Rows, columns and depths must lie inside the operands and the result.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn columns(product: ProductInto<'_, u32>) {
    let num_vectors = product.shape[1] / LANES;
    let mut first = 0;
    while first < num_vectors {
        let at = ProductInto {
            // SAFETY: columns remain, so the pointer stays inside the result.
            c: unsafe { product.c.add(first * LANES) },
            // Without depth nothing lies behind the start, and nothing is read.
            b: &product.b[(first * LANES).min(product.b.len())..],
            ..product
        };
        // SAFETY: by the caller's promise; as many vectors remain.
        first += unsafe {
            match num_vectors - first {
                1 => rows::<12, 1>(&at),
                2 => rows::<12, 2>(&at),
                left if left % 4 == 0 => rows::<6, 4>(&at),
                _ => rows::<8, 3>(&at),
            }
        };
    }
}

/// All rows of the first `VECTORS` vectors, `ROWS` at a time, then 4, 1; returns `VECTORS`.
///
/// # Safety
/// As for [`columns`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn rows<const ROWS: usize, const VECTORS: usize>(product: &ProductInto<'_, u32>) -> usize {
    let (mut i, num_rows) = (0, product.shape[0]);
    // SAFETY: rows i..i + ROWS lie below the product's.
    unsafe {
        while i + ROWS <= num_rows {
            register_tile::<ROWS, VECTORS>(product, i);
            i += ROWS;
        }
        while i + 4 <= num_rows {
            register_tile::<4, VECTORS>(product, i);
            i += 4;
        }
        while i < num_rows {
            register_tile::<1, VECTORS>(product, i);
            i += 1;
        }
    }
    VECTORS
}

/// One register tile: rows `first..first + ROWS`.
///
/// # Safety
/// As for [`columns`], and the rows must lie below the product's.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn register_tile<const ROWS: usize, const VECTORS: usize>(product: &ProductInto<'_, u32>, first: usize) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    let mut b = product.b.as_ptr();
    for (a, depth) in [Some((product.a, product.shape[2])), product.then].into_iter().flatten() {
        let Left { data, row_stride, column_stride } = a;
        for p in 0..depth {
            let mut right = [pairs(_mm512_set1_epi32(0)); VECTORS];
            for (v, right) in right.iter_mut().enumerate() {
                // SAFETY: word row p of b, vector v < VECTORS.
                *right = pairs(unsafe { _mm512_loadu_si512(b.add(LANES * v).cast()) });
            }
            // Not `add`: behind the last row nothing may lie, and nothing is read.
            b = b.wrapping_add(product.b_stride);
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: row first + i, word p < depth.
                let word = unsafe { *data.as_ptr().add((first + i) * row_stride + p * column_stride) };
                let left = pairs(_mm512_set1_epi32(word.cast_signed()));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = _mm512_dpbf16_ps(*sum, left, right);
                }
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate() {
            // SAFETY: row first + i, vector v of the result.
            unsafe {
                let c = product.c.add((first + i) * product.c_stride + LANES * v);
                let value: __m512 = if product.accumulate { _mm512_add_ps(_mm512_loadu_ps(c), *sum) } else { *sum };
                _mm512_storeu_ps(c, value);
            }
        }
    }
}

/// The whole vectors of [`round_to_pairs`](super::round_to_pairs); returns the number of words.
pub(super) fn round_to_pairs(x: &[f32], words: &mut [u32]) -> usize {
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn vectors(x: &[f32], words: &mut [u32]) {
        for (x, words) in x.chunks_exact(2 * LANES).zip(words.chunks_exact_mut(LANES)) {
            let (low, high) = x.split_at(LANES);
            store(words, round_both(low, high));
        }
    }
    if !has_bf16_products() {
        return 0;
    }
    // SAFETY: the machine has the instructions.
    unsafe { vectors(x, words) };
    (x.len() / (2 * LANES)).min(words.len() / LANES) * LANES
}

/// Words of two rows, each number rounded to bfloat16, those of `low` in the low halves.
pub(in crate::ops::cpu) fn stack(low: &[f32], high: &[f32], words: &mut [u32]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn vectors(low: &[f32], high: &[f32], words: &mut [u32]) {
        let rows = low.chunks_exact(LANES).zip(high.chunks_exact(LANES));
        for ((low, high), words) in rows.zip(words.chunks_exact_mut(LANES)) {
            store(words, interleave(round_both(low, high)));
        }
    }
    assert!(
        has_bf16_products() && low.len().is_multiple_of(LANES) && low.len() == high.len() && low.len() == words.len()
    );
    // SAFETY: the machine has the instructions.
    unsafe { vectors(low, high, words) };
}

/// [`LANES`] numbers of each, rounded, those of `low` in the lower half.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn round_both(low: &[f32], high: &[f32]) -> __m512i {
    assert!(low.len() == LANES && high.len() == LANES);
    // SAFETY: the assertion; both types of the result have 512 bits.
    unsafe {
        let [low, high] = [low, high].map(|x| _mm512_loadu_ps(x.as_ptr()));
        std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Numbers of the lower and the upper half in turn.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn interleave(halves: __m512i) -> __m512i {
    const ORDER: [u16; 2 * LANES] = {
        let mut order = [0; 2 * LANES];
        let mut i = 0;
        while i < LANES {
            (order[2 * i], order[2 * i + 1]) = (i as u16, (LANES + i) as u16);
            i += 1;
        }
        order
    };
    // SAFETY: the array has 512 bits.
    let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
    _mm512_permutexvar_epi16(order, halves)
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn store(words: &mut [u32], values: __m512i) {
    assert!(words.len() == LANES);
    // SAFETY: the assertion.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), values) };
}

/// Reinterprets the bits as the instruction's operand type.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pairs(words: __m512i) -> __m512bh {
    // SAFETY: both types have 512 bits, and all bits are valid for both.
    unsafe { std::mem::transmute(words) }
}
