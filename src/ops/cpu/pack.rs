//! Rearranging matrices into the panels that the inner loops read in order.

use crate::device::has_avx512;

/// Columns of a packed panel: four of the widest vectors.
pub(super) const PANEL: usize = 64;

/// Side of the blocks that are transposed in registers.
const BLOCK: usize = 16;

/// A 32-bit word of a packed panel: a float, or a pair of bfloat16.
pub(super) trait PanelWord: bytemuck::Pod {}
impl PanelWord for f32 {}
impl PanelWord for u32 {}

/// Copies `rows` rows of `width` floats, `stride` apart, times `factor`, into rows of `to_stride`; pads with zeros.
#[inline(always)]
pub(super) fn pack_rows(
    from: &[f32],
    stride: usize,
    rows: usize,
    width: usize,
    factor: f32,
    to: &mut [f32],
    to_stride: usize,
) {
    for i in 0..rows {
        let to = &mut to[i * to_stride..(i + 1) * to_stride];
        let (body, padding) = to.split_at_mut(width);
        for (to, from) in body.iter_mut().zip(&from[i * stride..i * stride + width]) {
            *to = from * factor;
        }
        padding.fill(0.0);
    }
}

/// Transposes: word (i, d) of `rows` rows of `width`, `stride` apart, goes to `d * to_stride + i`.
///
/// Columns `rows..` of the result, up to the next multiple of 16, become zero.
pub(super) fn pack_columns<W: PanelWord>(
    from: &[W],
    stride: usize,
    rows: usize,
    width: usize,
    to: &mut [W],
    to_stride: usize,
) {
    if rows == 0 || width == 0 {
        return;
    }
    let padded = rows.next_multiple_of(BLOCK);
    assert!((rows - 1) * stride + width <= from.len() && padded <= to_stride && width * to_stride <= to.len());
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        for row in (0..rows).step_by(BLOCK) {
            for column in (0..width).step_by(BLOCK) {
                let (block_rows, block_columns) = (BLOCK.min(rows - row), BLOCK.min(width - column));
                // SAFETY: AVX-512F is there; the block's rows and columns lie inside both matrices by the assertion,
                // and `W` has 32 bits without padding.
                unsafe {
                    x86::transpose_block(
                        from.as_ptr().add(row * stride + column).cast(),
                        stride,
                        block_rows,
                        block_columns,
                        to.as_mut_ptr().add(column * to_stride + row).cast(),
                        to_stride,
                    );
                }
            }
        }
        return;
    }
    let [whole_rows, whole_width] = whole_octets(from, stride, [rows, width], to, to_stride);
    for (d, to) in to.chunks_mut(to_stride).take(width).enumerate() {
        let first = if d < whole_width { whole_rows } else { 0 };
        for (i, to) in to[..padded].iter_mut().enumerate().skip(first) {
            *to = if i < rows { from[i * stride + d] } else { W::zeroed() };
        }
    }
}

/// The part of [`pack_columns`] that AVX2 transposes in blocks of 8 by 8; returns how many rows and columns of the source
/// that were.
fn whole_octets<W: PanelWord>(
    from: &[W],
    stride: usize,
    shape: [usize; 2],
    to: &mut [W],
    to_stride: usize,
) -> [usize; 2] {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        let [rows, width] = shape.map(|len| len / 8 * 8);
        for row in (0..rows).step_by(8) {
            for column in (0..width).step_by(8) {
                // SAFETY: AVX2 is there; the block lies inside both matrices, as `pack_columns` has asserted, and `W` has 32
                // bits without padding.
                unsafe {
                    x86::transpose_octet(
                        from.as_ptr().add(row * stride + column).cast(),
                        stride,
                        to.as_mut_ptr().add(column * to_stride + row).cast(),
                        to_stride,
                    );
                }
            }
        }
        return [rows, width];
    }
    let _ = (from, stride, shape, to, to_stride);
    [0, 0]
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, __mmask16, _mm256_castpd_ps, _mm256_castps_pd, _mm256_loadu_ps, _mm256_permute2f128_ps,
        _mm256_storeu_ps, _mm256_unpackhi_pd, _mm256_unpackhi_ps, _mm256_unpacklo_pd, _mm256_unpacklo_ps,
        _mm512_castpd_ps, _mm512_castps_pd, _mm512_maskz_loadu_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4,
        _mm512_storeu_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
    };

    /// Transposes 8 by 8 words.
    ///
    /// # Safety
    /// 8 rows of 8 words must be readable at `from`, `stride` apart, and writable at `to`, `to_stride` apart.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn transpose_octet(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: row i of the block.
        let x: [__m256; 8] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(from.add(i * stride)) });
        // y[4 q + c] holds column c of each 128-bit lane for rows 4 q..4 q + 4.
        let y: [__m256; 8] = std::array::from_fn(|i| {
            let (quad, column) = (i / 4 * 4, i % 4);
            let unpack = |a: __m256, b: __m256| {
                _mm256_castps_pd(if column < 2 { _mm256_unpacklo_ps(a, b) } else { _mm256_unpackhi_ps(a, b) })
            };
            let (low, high) = (unpack(x[quad], x[quad + 1]), unpack(x[quad + 2], x[quad + 3]));
            _mm256_castpd_ps(if column % 2 == 0 {
                _mm256_unpacklo_pd(low, high)
            } else {
                _mm256_unpackhi_pd(low, high)
            })
        });
        for column in 0..4 {
            let (top, bottom) = (y[column], y[4 + column]);
            // SAFETY: columns `column` and `4 + column` of the block, 8 words each.
            unsafe {
                _mm256_storeu_ps(to.add(column * to_stride), _mm256_permute2f128_ps::<0x20>(top, bottom));
                _mm256_storeu_ps(to.add((4 + column) * to_stride), _mm256_permute2f128_ps::<0x31>(top, bottom));
            }
        }
    }

    /// Transposes up to 16 by 16 words; missing rows read as zero, and all 16 words of each column are written.
    ///
    /// # Safety
    /// `rows` rows of `columns` words, `stride` apart, must be readable at `from`, and `columns` rows of 16 words,
    /// `to_stride` apart, writable at `to`.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn transpose_block(
        from: *const f32,
        stride: usize,
        rows: usize,
        columns: usize,
        to: *mut f32,
        to_stride: usize,
    ) {
        let mask: __mmask16 = if columns >= 16 { !0 } else { (1 << columns) - 1 };
        let x: [__m512; 16] = std::array::from_fn(|i| {
            if i < rows {
                // SAFETY: row i, of which the mask admits the first `columns` words.
                unsafe { _mm512_maskz_loadu_ps(mask, from.add(i * stride)) }
            } else {
                _mm512_setzero_ps()
            }
        });
        // Pairs of rows, then pairs of pairs: y[4 q + c] holds column c of each 128-bit lane for rows 4 q..4 q + 4.
        let y: [__m512; 16] = std::array::from_fn(|i| {
            let (quad, column) = (i / 4 * 4, i % 4);
            let unpack = |a: __m512, b: __m512| {
                if column < 2 { _mm512_unpacklo_ps(a, b) } else { _mm512_unpackhi_ps(a, b) }
            };
            let (low, high) = (unpack(x[quad], x[quad + 1]), unpack(x[quad + 2], x[quad + 3]));
            let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
            _mm512_castpd_ps(if column % 2 == 0 {
                _mm512_unpacklo_pd(low, high)
            } else {
                _mm512_unpackhi_pd(low, high)
            })
        });
        // Column 4 lane + c collects 128-bit lane `lane` of the four quads' y[.. + c].
        for lane in 0..4 {
            for column in 0..4 {
                let [a, b, c, d] = std::array::from_fn(|quad| y[4 * quad + column]);
                let place = 4 * lane + column;
                if place >= columns {
                    return;
                }
                let row = match lane {
                    0 => _mm512_shuffle_f32x4::<0x88>(
                        _mm512_shuffle_f32x4::<0x00>(a, b),
                        _mm512_shuffle_f32x4::<0x00>(c, d),
                    ),
                    1 => _mm512_shuffle_f32x4::<0x88>(
                        _mm512_shuffle_f32x4::<0x55>(a, b),
                        _mm512_shuffle_f32x4::<0x55>(c, d),
                    ),
                    2 => _mm512_shuffle_f32x4::<0x88>(
                        _mm512_shuffle_f32x4::<0xaa>(a, b),
                        _mm512_shuffle_f32x4::<0xaa>(c, d),
                    ),
                    _ => _mm512_shuffle_f32x4::<0x88>(
                        _mm512_shuffle_f32x4::<0xff>(a, b),
                        _mm512_shuffle_f32x4::<0xff>(c, d),
                    ),
                };
                // SAFETY: column `place` of the block, 16 words.
                unsafe { _mm512_storeu_ps(to.add(place * to_stride), row) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_lands_in_its_transposed_place_and_the_padding_is_zero() {
        for (rows, width, stride) in [(1usize, 1, 1), (16, 16, 16), (5, 33, 40), (50, 17, 17), (96, 64, 70)] {
            let from: Vec<u32> = (1..=(rows * stride) as u32).collect();
            let to_stride = rows.next_multiple_of(16);
            let mut to = vec![u32::MAX; width * to_stride];
            pack_columns(&from, stride, rows, width, &mut to, to_stride);
            for d in 0..width {
                for i in 0..to_stride {
                    let expected = if i < rows { from[i * stride + d] } else { 0 };
                    assert_eq!(to[d * to_stride + i], expected, "({i}, {d}) of {rows} x {width}");
                }
            }
        }
    }
}
