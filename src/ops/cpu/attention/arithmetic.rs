//! How the operands of attention's products lie: as f32, or rounded to pairs of bfloat16 along the depth.

use pulp::Simd;

#[cfg(target_arch = "x86_64")]
use crate::ops::cpu::gemm::{bf16, round_to_pairs};
use crate::ops::cpu::pack::{PanelWord, pack_columns, pack_rows};
use crate::ops::cpu::product::ProductInto;
#[cfg(target_arch = "x86_64")]
use crate::ops::cpu::simd::with_scratch;

use super::TILE;

/// Operands of a product. Widths and strides of what is packed count words.
pub(super) trait Arithmetic {
    type Word: PanelWord;

    /// Numbers in a word, neighbours along the depth.
    const NUMBERS: usize;

    /// A factor of the scores as one of an operand and one of the products: both directions must round the same numbers.
    fn factors(of_scores: f32) -> [f32; 2] {
        if Self::NUMBERS == 1 { [of_scores, 1.0] } else { [1.0, of_scores] }
    }

    /// `rows` rows of `width` numbers, `stride` apart, times `factor`, into rows of `to_stride`, padded with zeros.
    fn rows(x: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [Self::Word], to_stride: usize);

    /// Their transpose, for a depth of `width`, in rows of [`TILE`] words.
    fn columns(x: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [Self::Word]);

    /// The rows as they are, for a depth of `rows`, in rows of `to_stride`, padded with zeros.
    fn stacked(
        x: &[f32],
        stride: usize,
        rows: usize,
        width: usize,
        factor: f32,
        to: &mut [Self::Word],
        to_stride: usize,
    );

    /// Rows of a tile, [`TILE`] numbers each, as [`rows`](Self::rows).
    fn tile_rows<'a>(tile: &'a [f32], to: &'a mut [Self::Word]) -> &'a [Self::Word];

    /// The first `rows` rows of a tile, [`TILE`] numbers each, as [`stacked`](Self::stacked).
    fn tile_stacked<'a>(tile: &'a [f32], rows: usize, to: &'a mut [Self::Word]) -> &'a [Self::Word];

    /// # Safety
    /// As for [`ProductInto::promise`].
    unsafe fn multiply<S: Simd>(simd: S, product: ProductInto<'_, Self::Word>);
}

pub(super) struct Single;

impl Arithmetic for Single {
    type Word = f32;

    const NUMBERS: usize = 1;

    #[inline(always)]
    fn rows(x: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [f32], to_stride: usize) {
        pack_rows(x, stride, rows, width, factor, to, to_stride);
    }

    #[inline(always)]
    fn columns(x: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [f32]) {
        pack_columns(x, stride, rows, width, to, TILE);
        if factor != 1.0 {
            to[..width * TILE].iter_mut().for_each(|x| *x *= factor);
        }
    }

    #[inline(always)]
    fn stacked(x: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [f32], to_stride: usize) {
        pack_rows(x, stride, rows, width, factor, to, to_stride);
    }

    #[inline(always)]
    fn tile_rows<'a>(tile: &'a [f32], _: &'a mut [f32]) -> &'a [f32] {
        tile
    }

    #[inline(always)]
    fn tile_stacked<'a>(tile: &'a [f32], _: usize, _: &'a mut [f32]) -> &'a [f32] {
        tile
    }

    #[inline(always)]
    unsafe fn multiply<S: Simd>(simd: S, product: ProductInto<'_, f32>) {
        // SAFETY: by the caller's promise.
        simd.vectorize(unsafe { product.promise() });
    }
}

/// Only on processors that multiply pairs.
#[cfg(target_arch = "x86_64")]
pub(super) struct Pairs;

#[cfg(target_arch = "x86_64")]
impl Arithmetic for Pairs {
    type Word = u32;

    const NUMBERS: usize = 2;

    fn rows(x: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [u32], to_stride: usize) {
        with_scratch(2 * to_stride, |row| {
            for (i, to) in to.chunks_exact_mut(to_stride).take(rows).enumerate() {
                let x = &x[i * stride..i * stride + width];
                if width == row.len() && factor == 1.0 {
                    round_to_pairs(x, to);
                } else {
                    pack_rows(x, stride, 1, width, factor, row, 2 * to_stride);
                    round_to_pairs(row, to);
                }
            }
        });
    }

    fn columns(x: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [u32]) {
        let words = width.next_multiple_of(2 * 16) / 2;
        with_scratch(rows * words, |scratch| {
            let scratch: &mut [u32] = bytemuck::cast_slice_mut(scratch);
            Self::rows(x, stride, rows, width, factor, scratch, words);
            pack_columns(scratch, words, rows, width.div_ceil(2), to, TILE);
        });
    }

    fn stacked(x: &[f32], stride: usize, rows: usize, width: usize, factor: f32, to: &mut [u32], to_stride: usize) {
        with_scratch(2 * to_stride, |pair| {
            for (i, to) in to.chunks_exact_mut(to_stride).take(rows.div_ceil(2)).enumerate() {
                let present = (rows - 2 * i).min(2);
                pack_rows(&x[2 * i * stride..], stride, present, width, factor, pair, to_stride);
                let (low, high) = pair.split_at_mut(to_stride);
                if present == 1 {
                    high.fill(0.0);
                }
                bf16::stack(low, high, to);
            }
        });
    }

    fn tile_rows<'a>(tile: &'a [f32], to: &'a mut [u32]) -> &'a [u32] {
        round_to_pairs(tile, &mut to[..tile.len() / 2]);
        to
    }

    fn tile_stacked<'a>(tile: &'a [f32], rows: usize, to: &'a mut [u32]) -> &'a [u32] {
        let zeros = [0.0; TILE];
        for (rows, to) in tile[..rows * TILE].chunks(2 * TILE).zip(to.chunks_exact_mut(TILE)) {
            let (low, high) = rows.split_at(TILE);
            bf16::stack(low, if high.is_empty() { &zeros } else { high }, to);
        }
        to
    }

    unsafe fn multiply<S: Simd>(_: S, product: ProductInto<'_, u32>) {
        // SAFETY: by the caller's promise.
        unsafe { bf16::multiply(product) };
    }
}
