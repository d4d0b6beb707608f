//! Decoders of i-quants, whose codes are places in a grid of short vectors, for a part at a time as in [`parts`](super::parts).
//!
//! The grids are not written down here: each is asked of the decoder of whole blocks, once.

use std::sync::OnceLock;

use anamnesis::GgufType;

use super::Blocks;
use super::parts::{BlockPart, float, of_blocks};
use crate::ops::cpu::simd::vectorised;

/// A grid as the blocks of a type show it: where the upper bits of the first place lie, whose lower ones are byte 2, and
/// what a block of scale 1 has made of its numbers.
struct Grid {
    kind: GgufType,
    places: usize,
    upper: Option<usize>,
    factor: f32,
    offset: f32,
    numbers: OnceLock<Vec<f32>>,
}

impl Grid {
    const fn new(kind: GgufType, places: usize, upper: Option<usize>, factor: f32, offset: f32) -> Self {
        Self { kind, places, upper, factor, offset, numbers: OnceLock::new() }
    }

    /// `[places, WIDTH]`.
    fn vectors<const WIDTH: usize>(&self) -> &[[f32; WIDTH]] {
        let numbers =
            self.numbers.get_or_init(|| (0..self.places).flat_map(|place| self.vector::<WIDTH>(place)).collect());
        numbers.as_chunks().0
    }

    fn vector<const WIDTH: usize>(&self, place: usize) -> [f32; WIDTH] {
        const ONE: [u8; 2] = [0x00, 0x3c];
        let [lower, upper, ..] = place.to_le_bytes();
        let mut block = vec![0; self.kind.type_size().unwrap_or(0)];
        block[..2].copy_from_slice(&ONE);
        block[2] = lower;
        if let Some(at) = self.upper {
            block[at] = upper;
        }
        let mut numbers = [0.0; WIDTH];
        Blocks { kind: self.kind, bytes: &block }.decode_blocks(0, &mut numbers);
        numbers.map(|x| x * self.factor - self.offset)
    }
}

static IQ1: Grid = Grid::new(GgufType::IQ1_S, 2048, Some(34), 1.0, 0.125);
static IQ2_XXS: Grid = Grid::new(GgufType::IQ2_XXS, 256, None, 8.0, 0.0);
static IQ2_XS: Grid = Grid::new(GgufType::IQ2_XS, 512, Some(3), 8.0, 0.0);
static IQ2_S: Grid = Grid::new(GgufType::IQ2_S, 1024, Some(66), 8.0, 0.0);
static IQ3_XXS: Grid = Grid::new(GgufType::IQ3_XXS, 256, None, 4.0, 0.0);
static IQ3_S: Grid = Grid::new(GgufType::IQ3_S, 512, Some(66), 1.0, 0.0);

/// Whether parts of this type are decoded here.
pub(super) fn has_grid(kind: GgufType) -> bool {
    use GgufType::{IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    matches!(kind, IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S)
}

/// Decodes whole parts from part `first` on, of a type that [has a grid](has_grid).
pub(super) fn decode_grid(kind: GgufType, bytes: &[u8], first: usize, to: &mut [f32]) {
    match kind {
        GgufType::IQ1_S => iq1_s(IQ1.vectors(), bytes, first, to),
        GgufType::IQ2_XXS => iq2_xxs(IQ2_XXS.vectors(), bytes, first, to),
        GgufType::IQ2_XS => iq2_xs(IQ2_XS.vectors(), bytes, first, to),
        GgufType::IQ2_S => iq2_s(IQ2_S.vectors(), bytes, first, to),
        GgufType::IQ3_XXS => iq3_xxs(IQ3_XXS.vectors(), bytes, first, to),
        _ => iq3_s(IQ3_S.vectors(), bytes, first, to),
    }
}

/// A number of two bytes.
#[inline(always)]
fn pair(block: &[u8], at: usize) -> usize {
    usize::from(block[at]) | usize::from(block[at + 1]) << 8
}

/// A number of four bytes.
#[inline(always)]
fn quad(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// The half of a byte.
#[inline(always)]
fn half(byte: u8, which: usize) -> f32 {
    f32::from(byte >> (4 * which) & 15)
}

/// Seven signs, and the eighth that makes their number even.
#[inline(always)]
fn even(signs: u32) -> u32 {
    signs | (signs.count_ones() & 1) << 7
}

/// `scale * vector`, negative where a bit of `signs` is set.
#[inline(always)]
fn signed<const WIDTH: usize>(vector: &[f32; WIDTH], scale: f32, signs: u32, to: &mut [f32]) {
    for (i, (to, x)) in to.iter_mut().zip(vector).enumerate() {
        *to = f32::from_bits((scale * x).to_bits() ^ (signs >> i & 1) << 31);
    }
}

vectorised! {
    /// Scale; 32 lower bytes of places; by part the upper three bits of four places, a scale and the sign of a shift.
    fn iq1_s<'a, S>(_simd, grid: &'a [[f32; 8]], bytes: &'a [u8], first: usize, to: &'a mut [f32]) {
        of_blocks::<50, 8>(bytes, first, to, |block, part, to: &mut BlockPart| {
            let upper = pair(block, 34 + 2 * part);
            let scale = float(block, 0) * (2 * (upper >> 12 & 7) + 1) as f32;
            let shift = if upper & 0x8000 == 0 { 0.125 } else { -0.125 };
            for (l, to) in to.chunks_exact_mut(8).enumerate() {
                let place = usize::from(block[2 + 4 * part + l]) | (upper >> (3 * l) & 7) << 8;
                for (to, x) in to.iter_mut().zip(&grid[place]) {
                    *to = scale * (x + shift);
                }
            }
        });
    }
}

vectorised! {
    /// Scale; by part four places, and four times seven signs with a scale of four bits.
    fn iq2_xxs<'a, S>(_simd, grid: &'a [[f32; 8]], bytes: &'a [u8], first: usize, to: &'a mut [f32]) {
        of_blocks::<66, 8>(bytes, first, to, |block, part, to: &mut BlockPart| {
            let signs = quad(block, 6 + 8 * part);
            let scale = float(block, 0) * (0.5 + (signs >> 28) as f32) * 0.25;
            for (l, to) in to.chunks_exact_mut(8).enumerate() {
                signed(&grid[usize::from(block[2 + 8 * part + l])], scale, even(signs >> (7 * l) & 127), to);
            }
        });
    }
}

vectorised! {
    /// Scale; 32 places of nine bits with seven signs; by part two scales of four bits.
    fn iq2_xs<'a, S>(_simd, grid: &'a [[f32; 8]], bytes: &'a [u8], first: usize, to: &'a mut [f32]) {
        of_blocks::<74, 8>(bytes, first, to, |block, part, to: &mut BlockPart| {
            for (l, to) in to.chunks_exact_mut(8).enumerate() {
                let code = pair(block, 2 + 8 * part + 2 * l);
                let scale = float(block, 0) * (0.5 + half(block[66 + part], l / 2)) * 0.25;
                signed(&grid[code & 511], scale, even((code >> 9) as u32), to);
            }
        });
    }
}

vectorised! {
    /// Scale; 32 lower bytes of places; 32 times eight signs; by part two more bits of four places; by part two scales.
    fn iq2_s<'a, S>(_simd, grid: &'a [[f32; 8]], bytes: &'a [u8], first: usize, to: &'a mut [f32]) {
        of_blocks::<82, 8>(bytes, first, to, |block, part, to: &mut BlockPart| {
            for (l, to) in to.chunks_exact_mut(8).enumerate() {
                let at = 2 + 4 * part + l;
                let place = usize::from(block[at]) | usize::from(block[66 + part] >> (2 * l) & 3) << 8;
                let scale = float(block, 0) * (0.5 + half(block[74 + part], l / 2)) * 0.25;
                signed(&grid[place], scale, u32::from(block[32 + at]), to);
            }
        });
    }
}

vectorised! {
    /// Scale; 64 places of half a vector; by part four times seven signs with a scale of four bits.
    fn iq3_xxs<'a, S>(_simd, grid: &'a [[f32; 4]], bytes: &'a [u8], first: usize, to: &'a mut [f32]) {
        of_blocks::<98, 8>(bytes, first, to, |block, part, to: &mut BlockPart| {
            let signs = quad(block, 66 + 4 * part);
            let scale = float(block, 0) * (0.5 + (signs >> 28) as f32) * 0.5;
            for (l, to) in to.chunks_exact_mut(4).enumerate() {
                let signs = even(signs >> (7 * (l / 2)) & 127) >> (l % 2 * 4);
                signed(&grid[usize::from(block[2 + 8 * part + l])], scale, signs, to);
            }
        });
    }
}

vectorised! {
    /// Scale; 64 lower bytes of places of half a vector; by part their ninth bits; 32 times eight signs; by two parts two
    /// scales of four bits.
    fn iq3_s<'a, S>(_simd, grid: &'a [[f32; 4]], bytes: &'a [u8], first: usize, to: &'a mut [f32]) {
        of_blocks::<110, 8>(bytes, first, to, |block, part, to: &mut BlockPart| {
            let scale = float(block, 0) * (1.0 + 2.0 * half(block[106 + part / 2], part % 2));
            for (l, to) in to.chunks_exact_mut(4).enumerate() {
                let place = usize::from(block[2 + 8 * part + l]) | usize::from(block[66 + part] >> l & 1) << 8;
                signed(&grid[place], scale, u32::from(block[74 + 4 * part + l / 2]) >> (l % 2 * 4), to);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_has_small_whole_numbers() {
        let all = [&IQ2_XXS, &IQ2_XS, &IQ2_S].map(|grid| grid.vectors::<8>().as_flattened());
        let short = [&IQ3_XXS, &IQ3_S].map(|grid| grid.vectors::<4>().as_flattened());
        for numbers in all.into_iter().chain(short).chain([IQ1.vectors::<8>().as_flattened()]) {
            assert!(numbers.iter().all(|x| x.fract() == 0.0 && x.abs() < 64.0) && numbers.iter().any(|x| *x != 0.0));
        }
    }
}
