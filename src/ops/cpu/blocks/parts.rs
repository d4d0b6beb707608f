//! Decoders of the types that most files are made of, for 32 numbers at a time: products read stretches that are shorter
//! than a block of 256. Their arithmetic is that of ggml, operation by operation, so that the numbers are the same.

use anamnesis::GgufType;
use half::f16;

use super::super::simd::vectorised;

/// Numbers of a part.
pub(super) const PART: usize = 32;

pub(super) type BlockPart = [f32; PART];

/// Whether parts of this type are decoded here.
pub(super) fn has_parts(kind: GgufType) -> bool {
    use GgufType::{IQ4_XS, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    matches!(kind, Q4_0 | Q8_0 | Q4_K | Q5_K | Q6_K | IQ4_XS)
}

vectorised! {
    /// Decodes whole parts from part `first` on, of a type that [has them](has_parts).
    pub(super) fn decode_parts<'a, S>(_simd, kind: GgufType, bytes: &'a [u8], first: usize, to: &'a mut [f32]) {
        match kind {
            GgufType::Q4_0 => of_blocks::<18, 1>(bytes, first, to, q4_0),
            GgufType::Q8_0 => of_blocks::<34, 1>(bytes, first, to, q8_0),
            GgufType::Q4_K => of_blocks::<144, 8>(bytes, first, to, q4_k),
            GgufType::Q5_K => of_blocks::<176, 8>(bytes, first, to, q5_k),
            GgufType::Q6_K => of_blocks::<210, 8>(bytes, first, to, q6_k),
            _ => of_blocks::<136, 8>(bytes, first, to, iq4_xs),
        }
    }
}

/// `LEN`: bytes of a block; `PARTS`: its parts.
#[inline(always)]
pub(super) fn of_blocks<const LEN: usize, const PARTS: usize>(
    bytes: &[u8],
    first: usize,
    to: &mut [f32],
    decode: impl Fn(&[u8; LEN], usize, &mut BlockPart),
) {
    let (blocks, _) = bytes.as_chunks::<LEN>();
    for (part, to) in (first..).zip(to.as_chunks_mut().0) {
        decode(&blocks[part / PARTS], part % PARTS, to);
    }
}

#[inline(always)]
pub(super) fn float(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// 32 bytes of a block.
#[inline(always)]
fn stretch(block: &[u8], at: usize) -> [u8; PART] {
    std::array::from_fn(|i| block[at..][..PART][i])
}

/// Scale; 16 bytes with the first numbers in their lower halves and the others in the upper.
#[inline(always)]
fn q4_0(block: &[u8; 18], _: usize, to: &mut BlockPart) {
    let scale = float(block, 0);
    for i in 0..PART {
        let code = block[2 + i % 16] >> (i / 16 * 4) & 15;
        to[i] = f32::from(code.cast_signed() - 8) * scale;
    }
}

/// Scale; 32 integers.
#[inline(always)]
fn q8_0(block: &[u8; 34], _: usize, to: &mut BlockPart) {
    let scale = float(block, 0);
    for (to, code) in to.iter_mut().zip(stretch(block, 2)) {
        *to = f32::from(code.cast_signed()) * scale;
    }
}

/// Scale and minimum of a part of `Q4_K` and `Q5_K`: each six bits, of which the upper two of the last four parts are in the
/// bytes of the first four. Two floats are before them.
#[inline(always)]
fn scale_and_minimum(block: &[u8], part: usize) -> [f32; 2] {
    let byte = |i: usize| block[4 + i];
    let [scale, minimum] = match part {
        0..4 => [byte(part) & 63, byte(part + 4) & 63],
        _ => [byte(part + 4) & 15 | byte(part - 4) >> 6 << 4, byte(part + 4) >> 4 | byte(part) >> 6 << 4],
    };
    [float(block, 0) * f32::from(scale), float(block, 2) * f32::from(minimum)]
}

/// Two parts in the halves of 32 bytes.
#[inline(always)]
fn q4_k(block: &[u8; 144], part: usize, to: &mut BlockPart) {
    let [scale, minimum] = scale_and_minimum(block, part);
    let shift = part % 2 * 4;
    for (to, pair) in to.iter_mut().zip(stretch(block, 16 + part / 2 * PART)) {
        *to = scale * f32::from(pair >> shift & 15) - minimum;
    }
}

/// As `Q4_K`, with a fifth bit: that of part 0 is the lowest of 32 bytes.
#[inline(always)]
fn q5_k(block: &[u8; 176], part: usize, to: &mut BlockPart) {
    let [scale, minimum] = scale_and_minimum(block, part);
    let shift = part % 2 * 4;
    let (pairs, bits) = (stretch(block, 48 + part / 2 * PART), stretch(block, 16));
    for i in 0..PART {
        let code = pairs[i] >> shift & 15 | (bits[i] >> part & 1) << 4;
        to[i] = scale * f32::from(code) - minimum;
    }
}

/// Four bits of two parts in 32 bytes, two bits of four parts in 32 bytes, two scales a part, one float. Parts 0 and 2, 1
/// and 3 share bytes, and likewise in the second half of a block.
#[inline(always)]
fn q6_k(block: &[u8; 210], part: usize, to: &mut BlockPart) {
    let (half, of_half) = (part / 4, part % 4);
    let low = stretch(block, 64 * half + of_half % 2 * PART);
    let high = stretch(block, 128 + PART * half);
    let scales = [0, 1].map(|i| float(block, 208) * f32::from(block[192 + 2 * part + i].cast_signed()));
    for i in 0..PART {
        let code = low[i] >> (of_half / 2 * 4) & 15 | (high[i] >> (of_half * 2) & 3) << 4;
        to[i] = scales[i / 16] * f32::from(code.cast_signed() - 32);
    }
}

/// Scale; the upper two bits of eight scales, then their lower four; by part 16 bytes as in `Q4_0`, with places in a table.
#[inline(always)]
fn iq4_xs(block: &[u8; 136], part: usize, to: &mut BlockPart) {
    const NUMBERS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    let upper = u16::from_le_bytes([block[2], block[3]]) >> (2 * part) & 3;
    let scale = block[4 + part / 2] >> (part % 2 * 4) & 15 | (upper as u8) << 4;
    let scale = float(block, 0) * f32::from(scale.cast_signed() - 32);
    for i in 0..PART {
        let code = block[8 + 16 * part + i % 16] >> (i / 16 * 4) & 15;
        to[i] = scale * f32::from(NUMBERS[usize::from(code)]);
    }
}
