//! Products of bfloat16 pairs by AMX, with sums in f32.
//!
//! A tile has 16 rows of 16 words. Two tiles of the left operand times two of the right one, so that each that is read is
//! multiplied twice, fill all eight tiles there are with their four of sums; what is left over goes tile by tile.

use std::arch::asm;

use super::super::pack::pack_columns;
use super::super::product::{Left, ProductInto};
use super::super::simd::with_scratch;

/// Rows of a tile, and words of its rows.
pub(super) const SIDE: usize = 16;
/// Rows, and columns, that are multiplied together.
const WIDTH: usize = 2 * SIDE;

/// The shapes of the eight tiles, as `ldtilecfg` reads them: 0 to 3 are sums, 4 and 5 lie left, 6 and 7 right.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// For `rows` rows of the result and a depth of `words`, both at most [`SIDE`].
    fn new(rows: usize, words: usize) -> Self {
        let (mut row_bytes, mut tile_rows) = ([0; 16], [0; 16]);
        for (tile, (bytes, of)) in row_bytes.iter_mut().zip(&mut tile_rows).take(8).enumerate() {
            (*bytes, *of) = match tile {
                0..4 => (64, rows as u8),
                4 | 5 => (4 * words as u16, rows as u8),
                _ => (64, words as u8),
            };
        }
        Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows: tile_rows }
    }
}

/// [`ProductInto`] of pairs.
///
/// # Safety
/// The machine must have [tiles](crate::device::has_bf16_tiles), `n` must be a multiple of [`SIDE`], and rows, columns and depths
/// must lie inside the operands and the result, of which there must be some.
pub(super) unsafe fn multiply(product: ProductInto<'_, u32>) {
    let ProductInto { shape: [m, _, k], a, b, b_stride, then, .. } = product;
    if a.column_stride != 1 {
        let width = k.next_multiple_of(SIDE);
        return with_scratch(m * width, |rows| {
            let rows = bytemuck::cast_slice_mut(rows);
            pack_columns(a.data, a.column_stride, k, m, rows, width);
            // SAFETY: by the caller's promise; the rows are those of `a`.
            unsafe { multiply(ProductInto { a: Left::rows(rows, width), ..product }) };
        });
    }
    assert!(then.is_none_or(|(a, _)| a.column_stride == 1), "tiles: the second operand lies in columns");
    let (mut from, mut accumulate) = (0, product.accumulate);
    for (a, k) in [Some((a, k)), then].into_iter().flatten() {
        let whole = k / SIDE * SIDE;
        for (first, words, steps) in [(0, SIDE, whole / SIDE), (whole, k - whole, 1)] {
            if words * steps > 0 {
                let (a, b) = (Left::rows(&a.data[first..], a.row_stride), &b[(from + first) * b_stride..]);
                let part = ProductInto { shape: [m, product.shape[1], words], a, b, accumulate, ..product };
                // SAFETY: by the caller's promise.
                unsafe { rows(&part, steps) };
                accumulate = true;
            }
        }
        from += k;
    }
    // SAFETY: the machine has tiles.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
}

/// All rows and columns, for `steps` times the depth of the shape. The right operand of two tiles' width stays in the
/// first-level cache while the rows pass it.
///
/// # Safety
/// Rows, columns and depths must lie inside the operands and the result, and the machine must have tiles.
unsafe fn rows(product: &ProductInto<'_, u32>, steps: usize) {
    let ProductInto { shape: [m, n, words], c, c_stride, a, b, b_stride, accumulate, .. } = *product;
    let at = |row: usize, column: usize| TileBlock {
        c: c.wrapping_add(row * c_stride + column),
        c_bytes: 4 * c_stride,
        a: a.data.as_ptr().wrapping_add(row * a.row_stride),
        a_bytes: 4 * a.row_stride,
        b: b.as_ptr().wrapping_add(column),
        b_bytes: 4 * b_stride,
        steps,
        accumulate,
    };
    let (tall, whole) = (m / WIDTH * WIDTH, m / SIDE * SIDE);
    for (rows, height) in [(0..whole, SIDE), (whole..m, m - whole)] {
        if rows.is_empty() {
            continue;
        }
        let shapes = Shapes::new(height, words);
        // SAFETY: shapes of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, preserves_flags)) };
        let wide = n / WIDTH * WIDTH;
        for column in (0..wide).step_by(WIDTH) {
            for row in (rows.start..rows.end.min(tall)).step_by(WIDTH) {
                // SAFETY: two tiles of rows and of columns lie inside.
                unsafe { at(row, column).four() };
            }
        }
        for row in rows.clone().step_by(SIDE) {
            for column in (if row < tall { wide } else { 0 }..n).step_by(SIDE) {
                // SAFETY: a tile of `height` rows lies inside.
                unsafe { at(row, column).one() };
            }
        }
    }
}

/// A corner of the result with what is multiplied into it; strides in bytes.
struct TileBlock {
    c: *mut f32,
    c_bytes: usize,
    a: *const u32,
    a_bytes: usize,
    b: *const u32,
    b_bytes: usize,
    steps: usize,
    accumulate: bool,
}

impl TileBlock {
    /// Two tiles by two.
    ///
    /// # Safety
    /// Both operands and the result must be there as the loaded shapes say, and `steps` must not be 0.
    #[inline]
    unsafe fn four(self) {
        // SAFETY: by the caller's promise.
        unsafe {
            asm!(
                "test {accumulate:e}, {accumulate:e}",
                "jnz 2f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 3f",
                "2:",
                "tileloadd tmm0, [{c} + {c_bytes}*1]",
                "tileloadd tmm1, [{c} + {c_bytes}*1 + 64]",
                "tileloadd tmm2, [{c_low} + {c_bytes}*1]",
                "tileloadd tmm3, [{c_low} + {c_bytes}*1 + 64]",
                "3:",
                "tileloadd tmm6, [{b} + {b_bytes}*1]",
                "tileloadd tmm4, [{a} + {a_bytes}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {b_bytes}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a_low} + {a_bytes}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 64",
                "add {a_low}, 64",
                "add {b}, {b_step}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{c} + {c_bytes}*1], tmm0",
                "tilestored [{c} + {c_bytes}*1 + 64], tmm1",
                "tilestored [{c_low} + {c_bytes}*1], tmm2",
                "tilestored [{c_low} + {c_bytes}*1 + 64], tmm3",
                accumulate = in(reg) u32::from(self.accumulate),
                c = in(reg) self.c,
                c_low = in(reg) self.c.wrapping_byte_add(SIDE * self.c_bytes),
                c_bytes = in(reg) self.c_bytes,
                a = inout(reg) self.a => _,
                a_low = inout(reg) self.a.wrapping_byte_add(SIDE * self.a_bytes) => _,
                a_bytes = in(reg) self.a_bytes,
                b = inout(reg) self.b => _,
                b_bytes = in(reg) self.b_bytes,
                b_step = in(reg) SIDE * self.b_bytes,
                steps = inout(reg) self.steps => _,
                out("tmm0") _,
                out("tmm1") _,
                out("tmm2") _,
                out("tmm3") _,
                out("tmm4") _,
                out("tmm5") _,
                out("tmm6") _,
                out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// One tile by one.
    ///
    /// # Safety
    /// As for [`four`](Self::four).
    #[inline]
    unsafe fn one(self) {
        // SAFETY: by the caller's promise.
        unsafe {
            asm!(
                "test {accumulate:e}, {accumulate:e}",
                "jnz 2f",
                "tilezero tmm0",
                "jmp 3f",
                "2:",
                "tileloadd tmm0, [{c} + {c_bytes}*1]",
                "3:",
                "tileloadd tmm4, [{a} + {a_bytes}*1]",
                "tileloadd tmm6, [{b} + {b_bytes}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "add {a}, 64",
                "add {b}, {b_step}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{c} + {c_bytes}*1], tmm0",
                accumulate = in(reg) u32::from(self.accumulate),
                c = in(reg) self.c,
                c_bytes = in(reg) self.c_bytes,
                a = inout(reg) self.a => _,
                a_bytes = in(reg) self.a_bytes,
                b = inout(reg) self.b => _,
                b_bytes = in(reg) self.b_bytes,
                b_step = in(reg) SIDE * self.b_bytes,
                steps = inout(reg) self.steps => _,
                out("tmm0") _,
                out("tmm4") _,
                out("tmm6") _,
                options(nostack),
            );
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod emulator;

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use half::bf16;

    use super::super::super::reference::{assert_close, matmul_f64, random};
    use super::*;
    use crate::device::processor_has_tiles;

    /// Numbers and their pairs along a row, in rows of `words`.
    fn rows_of_pairs(rows: usize, words: usize, seed: u64) -> (Vec<f32>, Vec<u32>) {
        let numbers: Vec<bf16> = random(rows * 2 * words, seed).into_iter().map(bf16::from_f32).collect();
        let pairs = numbers.chunks(2).map(|p| u32::from(p[0].to_bits()) | u32::from(p[1].to_bits()) << 16).collect();
        (numbers.iter().map(|x| x.to_f32()).collect(), pairs)
    }

    fn transposed<T: Copy>(x: &[T], width: usize) -> Vec<T> {
        (0..width).flat_map(|j| x.iter().skip(j).step_by(width).copied()).collect()
    }

    /// Every remainder of rows, columns and depths, both ways of laying out the left operand, with and without a second one.
    #[test]
    fn tiles_multiply_ragged_shapes_as_f64_does() {
        if !processor_has_tiles() {
            emulator::install();
        }
        for [m, n, k, then_k] in
            [[16, 16, 16, 0], [33, 48, 7, 3], [47, 32, 40, 0], [96, 64, 35, 20], [32, 80, 1, 16], [17, 16, 0, 5]]
        {
            let ((a, a_words), (then, then_words)) = (rows_of_pairs(m, k, 1), rows_of_pairs(m, then_k, 2));
            // The right operand's columns, each along the depth.
            let depth = k + then_k;
            let (b, b_words) = rows_of_pairs(n, depth, 3);
            let b_words = transposed(&b_words, depth);
            let part = |a: &[f32], k: usize, from: usize| {
                matmul_f64([m, n, 2 * k], a, [2 * k, 1], &b[2 * from..], [1, 2 * depth])
            };
            let exact: Vec<f64> = part(&a, k, 0).iter().zip(part(&then, then_k, k)).map(|(x, y)| x + y).collect();
            let columns = transposed(&a_words, k.max(1));
            for a in [Left::rows(&a_words, k), Left::columns(&columns, m)] {
                let mut c = vec![f32::NAN; m * n];
                for (accumulate, times) in [(false, 1.0), (true, 2.0)] {
                    let then = (then_k > 0).then_some((Left::rows(&then_words, then_k), then_k));
                    let (shape, to) = ([m, n, k], c.as_mut_ptr());
                    let product =
                        ProductInto { shape, c: to, c_stride: n, a, b: &b_words, b_stride: n, then, accumulate };
                    // SAFETY: the operands have these rows, columns and depths, and tiles are there or stood in for.
                    unsafe { multiply(product) };
                    assert_close(&c, &exact.iter().map(|x| times * x).collect::<Vec<_>>(), 1e-5);
                }
            }
        }
    }
}
