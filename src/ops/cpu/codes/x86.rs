//! Codes of four bits to numbers by a permutation of the sixteen that they can stand for (AVX-512).

use std::arch::x86_64::{
    __m512i, _mm_loadl_epi64, _mm_loadu_si128, _mm512_castsi512_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu8_epi64,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_or_si512, _mm512_permutexvar_epi32,
    _mm512_permutexvar_ps, _mm512_set1_ps, _mm512_slli_epi32, _mm512_slli_epi64, _mm512_srli_epi32, _mm512_srli_epi64,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

use super::super::round::round;
use super::Scale;
use crate::device::has_avx512;

/// Numbers of a vector.
const LANES: usize = 16;

/// Whether the machine has the instructions of this file.
#[inline(always)]
pub(super) fn has_words() -> bool {
    has_avx512()
}

/// The codes of eight bytes, one to a word; above the four bits of a code, a word holds anything.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread(bytes: [u8; 8]) -> __m512i {
    // SAFETY: eight bytes are read.
    let wide = _mm512_cvtepu8_epi64(unsafe { _mm_loadl_epi64(bytes.as_ptr().cast()) });
    _mm512_or_si512(_mm512_srli_epi64::<4>(wide), _mm512_slli_epi64::<32>(wide))
}

/// The numbers of a block, rounded to bfloat16, in the lower halves of the words.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(table: &[f32; 16], scale: Scale) -> __m512i {
    // SAFETY: the table holds 16 floats.
    let shifted = _mm512_sub_ps(unsafe { _mm512_loadu_ps(table.as_ptr()) }, _mm512_set1_ps(scale.zero));
    let scaled = _mm512_mul_ps(shifted, _mm512_set1_ps(scale.scale));
    let mut words = [0u32; LANES];
    // SAFETY: 16 words.
    unsafe { _mm512_storeu_ps(words.as_mut_ptr().cast(), scaled) };
    for word in &mut words {
        *word = u32::from(round(f32::from_bits(*word)));
    }
    // SAFETY: 16 words.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

/// `to[i]` = the number of `table` for code `i`.
///
/// # Safety
/// Only where [`has_words`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn numbers(bytes: &[u8], table: &[f32; 16], to: &mut [f32]) {
    // SAFETY: the table holds 16 floats.
    let numbers = unsafe { _mm512_loadu_ps(table.as_ptr()) };
    let (whole, rest) = to.as_chunks_mut::<LANES>();
    let (eights, last) = bytes.split_at(whole.len() * LANES / 2);
    for (to, bytes) in whole.iter_mut().zip(eights.as_chunks::<8>().0) {
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), _mm512_permutexvar_ps(spread(*bytes), numbers)) };
    }
    super::numbers(last, table, rest);
}

/// A word for each byte: the number of its upper code in the lower half, of its lower code in the upper half.
///
/// # Safety
/// Only where [`has_words`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pairs(bytes: &[u8], table: &[f32; 16], scale: Scale, words: &mut [u32]) {
    let first = rounded(table, scale);
    let second = _mm512_slli_epi32::<16>(first);
    let (whole, rest) = words.as_chunks_mut::<LANES>();
    let (vectors, last) = bytes.as_chunks::<LANES>();
    for (words, bytes) in whole.iter_mut().zip(vectors) {
        // SAFETY: 16 bytes are read.
        let codes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
        let first = _mm512_permutexvar_epi32(_mm512_srli_epi32::<4>(codes), first);
        // SAFETY: 16 words.
        unsafe {
            _mm512_storeu_si512(
                words.as_mut_ptr().cast(),
                _mm512_or_si512(first, _mm512_permutexvar_epi32(codes, second)),
            );
        }
    }
    if !rest.is_empty() {
        let table = table.map(|number| u32::from(round(scale.of(number))));
        for (word, byte) in rest.iter_mut().zip(last) {
            *word = table[usize::from(byte >> 4)] | table[usize::from(byte & 15)] << 16;
        }
    }
}

/// Writes the numbers to the lower halves of the words and clears the upper ones or, with `is_upper`, to the upper halves.
///
/// # Safety
/// Only where [`has_words`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn halves(bytes: &[u8], table: &[f32; 16], scale: Scale, is_upper: bool, words: &mut [u32]) {
    let numbers = rounded(table, scale);
    let numbers = if is_upper { _mm512_slli_epi32::<16>(numbers) } else { numbers };
    let (whole, rest) = words.as_chunks_mut::<LANES>();
    let (eights, last) = bytes.split_at(whole.len() * LANES / 2);
    for (words, bytes) in whole.iter_mut().zip(eights.as_chunks::<8>().0) {
        let half = _mm512_permutexvar_epi32(spread(*bytes), numbers);
        // SAFETY: 16 words.
        unsafe {
            let old = _mm512_loadu_si512(words.as_ptr().cast());
            let new = if is_upper { _mm512_or_si512(old, half) } else { half };
            _mm512_storeu_si512(words.as_mut_ptr().cast(), new);
        }
    }
    if !rest.is_empty() {
        let mut table_words = [0u32; LANES];
        // SAFETY: 16 words.
        unsafe { _mm512_storeu_ps(table_words.as_mut_ptr().cast(), _mm512_castsi512_ps(numbers)) };
        let mut halves = [0u32; LANES];
        super::numbers(last, &table_words, &mut halves[..rest.len()]);
        for (word, half) in rest.iter_mut().zip(halves) {
            *word = if is_upper { *word | half } else { half };
        }
    }
}
