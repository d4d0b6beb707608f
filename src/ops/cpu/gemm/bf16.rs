//! Products of bfloat16 pairs by AVX512-BF16, with sums in f32.

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32,
    _mm512_setzero_ps, _mm512_storeu_ps,
};

use super::super::pack::PANEL;
use super::{Arithmetic, Block, Term, panel};

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

    unsafe fn multiply(block: &Block<'_, u32>) {
        let depth: usize = block.a.iter().map(|a| a.2).sum();
        assert!(block.columns.is_multiple_of(16) && block.columns <= PANEL && depth * PANEL <= block.panel.len());
        for (a, stride, depth) in block.a {
            assert!(depth == 0 || (block.rows - 1) * stride + depth <= a.len());
        }
        // SAFETY: the assertions keep the reads inside the operands; the caller promises that the writes stay inside
        // the result. `gemm` chose this arithmetic because the machine has the instructions.
        unsafe { multiply(block) };
    }
}

/// # Safety
/// Rows, columns and depths must lie inside the block's operands and result.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn multiply(block: &Block<'_, u32>) {
    // SAFETY: by the caller's promise; the widths are those of the block.
    unsafe {
        match block.columns / 16 {
            1 => rows::<12, 1>(block),
            2 => rows::<12, 2>(block),
            3 => rows::<8, 3>(block),
            _ => rows::<6, 4>(block),
        }
    }
}

/// All rows of the block, `ROWS` at a time, then 4, 2, 1.
///
/// # Safety
/// As for [`multiply`], with `VECTORS * 16` columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn rows<const ROWS: usize, const VECTORS: usize>(block: &Block<'_, u32>) {
    let mut i = 0;
    // SAFETY: rows i..i + ROWS lie below the block's.
    unsafe {
        while i + ROWS <= block.rows {
            register_tile::<ROWS, VECTORS>(block, i);
            i += ROWS;
        }
        while i + 4 <= block.rows {
            register_tile::<4, VECTORS>(block, i);
            i += 4;
        }
        while i < block.rows {
            register_tile::<1, VECTORS>(block, i);
            i += 1;
        }
    }
}

/// One register tile: rows `first..first + ROWS`.
///
/// # Safety
/// As for [`rows`], and the rows must lie below the block's.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn register_tile<const ROWS: usize, const VECTORS: usize>(block: &Block<'_, u32>, first: usize) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    let mut b = block.panel.as_ptr();
    for (a, stride, depth) in block.a {
        if depth == 0 {
            continue;
        }
        // SAFETY: row `first`, by the caller's promise.
        let a = unsafe { a.as_ptr().add(first * stride) };
        for p in 0..depth {
            let mut right = [pairs(_mm512_set1_epi32(0)); VECTORS];
            for (v, right) in right.iter_mut().enumerate() {
                // SAFETY: word row p of the panel, vector v < VECTORS.
                *right = pairs(unsafe { _mm512_loadu_si512(b.add(16 * v).cast()) });
            }
            // SAFETY: at most the end of the panel.
            b = unsafe { b.add(PANEL) };
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: row first + i, word p < depth.
                let left = pairs(_mm512_set1_epi32(unsafe { *a.add(i * stride + p) }.cast_signed()));
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
                let c = block.c.add((first + i) * block.c_stride + 16 * v);
                let value: __m512 = if block.accumulate { _mm512_add_ps(_mm512_loadu_ps(c), *sum) } else { *sum };
                _mm512_storeu_ps(c, value);
            }
        }
    }
}

/// Reinterprets the bits as the instruction's operand type.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pairs(words: std::arch::x86_64::__m512i) -> __m512bh {
    // SAFETY: both types have 512 bits, and all bits are valid for both.
    unsafe { std::mem::transmute(words) }
}
