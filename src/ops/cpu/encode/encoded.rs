//! Encoded blocks side by side, and where their bytes are: the layouts of ggml-common.h.

use anamnesis::GgufType;
use half::f16;

use super::lanes::{Bytes, MAX_LANES, Numbers};
use super::tile::LEN;

/// The most bytes of a block.
const SIZE: usize = 210;

/// The most groups of a block.
pub(super) const MAX_GROUPS: usize = 16;

/// A number of every group of a block.
pub(super) type OfGroups = [Numbers; MAX_GROUPS];

/// Blocks of one type, a lane each.
pub(super) struct Encoded {
    pub(super) kind: GgufType,
    /// Lanes that are in use.
    pub(super) lanes: usize,
    /// The codes of the numbers.
    pub(super) codes: [Bytes; LEN],
    /// The blocks.
    pub(super) bytes: [Bytes; SIZE],
    /// Whether a float was beyond `f16`, in these blocks or in others before them.
    pub(super) overflows: bool,
}

impl Encoded {
    pub(super) fn new(kind: GgufType, lanes: usize) -> Self {
        Self { kind, lanes, codes: [[0; MAX_LANES]; LEN], bytes: [[0; MAX_LANES]; SIZE], overflows: false }
    }

    /// Takes blocks, but for their codes.
    pub(super) fn load(&mut self, blocks: &[u8], size: usize) {
        self.codes = [[0; MAX_LANES]; LEN];
        for (lane, block) in blocks.chunks_exact(size).enumerate() {
            for (bytes, byte) in self.bytes.iter_mut().zip(block) {
                bytes[lane] = *byte;
            }
        }
    }

    /// Writes the blocks.
    pub(super) fn store(&self, blocks: &mut [u8], size: usize) {
        for (lane, block) in blocks.chunks_exact_mut(size).enumerate() {
            for (byte, bytes) in block.iter_mut().zip(&self.bytes) {
                *byte = bytes[lane];
            }
        }
    }

    /// Stores a float of each block at byte `at`.
    pub(super) fn set_floats(&mut self, at: usize, x: &Numbers) {
        for (lane, x) in x.iter().enumerate().take(self.lanes) {
            let x = f16::from_f32(*x);
            self.overflows |= !x.is_finite();
            [self.bytes[at][lane], self.bytes[at + 1][lane]] = x.to_le_bytes();
        }
    }

    /// The float of each block at byte `at`.
    fn floats(&self, at: usize) -> Numbers {
        std::array::from_fn(|lane| f16::from_le_bytes([self.bytes[at][lane], self.bytes[at + 1][lane]]).to_f32())
    }

    /// Bytes at which the unit of the scales is, and that of the minimums where there are some.
    pub(super) fn units_at(&self) -> [usize; 2] {
        match self.kind {
            GgufType::Q2_K => [80, 82],
            GgufType::Q3_K => [108, 108],
            GgufType::Q6_K => [208, 208],
            _ => [0, 2],
        }
    }

    /// Stores the integers of the scales of all groups, from 0 on but for `Q6_K`, and of their minimums.
    pub(super) fn set_integers(&mut self, scales: &[Bytes; MAX_GROUPS], minimums: &[Bytes; MAX_GROUPS]) {
        let bytes = &mut self.bytes;
        match self.kind {
            GgufType::Q2_K => {
                for group in 0..16 {
                    bytes[group] = join(scales[group], minimums[group], 4);
                }
            }
            GgufType::Q3_K => {
                for i in 0..8 {
                    bytes[96 + i] = join(scales[i].map(|code| code & 15), scales[i + 8], 4);
                }
                for i in 0..4 {
                    let upper = [0, 4, 8, 12].map(|group| scales[i + group].map(|code| code >> 4));
                    bytes[104 + i] = join(join(upper[0], upper[1], 2), join(upper[2], upper[3], 2), 4);
                }
            }
            GgufType::Q6_K => bytes[192..208].copy_from_slice(scales),
            GgufType::IQ4_XS => {
                for i in 0..2 {
                    let upper = [0, 1, 2, 3].map(|group| scales[4 * i + group].map(|code| code >> 4));
                    bytes[2 + i] = join(join(upper[0], upper[1], 2), join(upper[2], upper[3], 2), 4);
                }
                for i in 0..4 {
                    bytes[4 + i] = join(scales[2 * i].map(|code| code & 15), scales[2 * i + 1], 4);
                }
            }
            _ => {
                for i in 0..4 {
                    let upper = |of: &[Bytes; MAX_GROUPS]| of[i + 4].map(|code| code >> 4);
                    bytes[4 + i] = join(scales[i], upper(scales), 6);
                    bytes[8 + i] = join(minimums[i], upper(minimums), 6);
                    bytes[12 + i] = join(scales[i + 4].map(|code| code & 15), minimums[i + 4], 4);
                }
            }
        }
    }

    /// The integers of the scale and of the minimum of a group.
    fn integers(&self, group: usize, lane: usize) -> [f32; 2] {
        let at = |i: usize| self.bytes[i][lane];
        let signed = |code: u8| [f32::from(code) - 32.0, 0.0];
        match self.kind {
            GgufType::Q2_K => [at(group) & 15, at(group) >> 4].map(f32::from),
            GgufType::Q3_K => {
                let upper = at(104 + group % 4) >> (group / 4 * 2) & 3;
                signed(at(96 + group % 8) >> (group / 8 * 4) & 15 | upper << 4)
            }
            GgufType::Q6_K => [f32::from(at(192 + group).cast_signed()), 0.0],
            GgufType::IQ4_XS => {
                let upper = at(2 + group / 4) >> (group % 4 * 2) & 3;
                signed(at(4 + group / 2) >> (group % 2 * 4) & 15 | upper << 4)
            }
            _ if group < 4 => [at(4 + group) & 63, at(8 + group) & 63].map(f32::from),
            _ => {
                let (lower, scale, minimum) = (at(8 + group), at(group), at(4 + group));
                [lower & 15 | scale >> 6 << 4, lower >> 4 | minimum >> 6 << 4].map(f32::from)
            }
        }
    }

    /// Scales and minimums of the groups as a reader multiplies them out.
    pub(super) fn decoded(&self, num_groups: usize) -> [OfGroups; 2] {
        let mut decoded = [[[0.0; MAX_LANES]; MAX_GROUPS]; 2];
        let units = self.units_at().map(|at| self.floats(at));
        let [scales, minimums] = &mut decoded;
        for (group, (scales, minimums)) in scales.iter_mut().zip(minimums).enumerate().take(num_groups) {
            for lane in 0..self.lanes {
                let [scale, minimum] = self.integers(group, lane);
                (scales[lane], minimums[lane]) = (units[0][lane] * scale, units[1][lane] * minimum);
            }
        }
        decoded
    }

    /// Writes the codes of numbers.
    pub(super) fn pack(&mut self) {
        match self.kind {
            GgufType::Q4_0 | GgufType::IQ4_NL => self.pack_fields(32, 32, 16, [0, 4], 2),
            GgufType::Q4_1 => self.pack_fields(32, 32, 16, [0, 4], 4),
            GgufType::Q5_0 | GgufType::Q5_1 => {
                let at = if self.kind == GgufType::Q5_0 { 2 } else { 4 };
                for i in 0..4 {
                    let bit = |i: usize| self.codes[i].map(|code| code >> 4);
                    let pair = |j: usize| join(bit(8 * i + j), bit(8 * i + j + 1), 1);
                    self.bytes[at + i] = join(join(pair(0), pair(2), 2), join(pair(4), pair(6), 2), 4);
                }
                self.pack_fields(32, 32, 16, [0, 4], at + 4);
            }
            GgufType::MXFP4 => self.pack_fields(32, 32, 16, [0, 4], 1),
            GgufType::NVFP4 => self.pack_fields(64, 16, 8, [0, 4], 4),
            GgufType::Q8_0 => self.bytes[2..34].copy_from_slice(&self.codes[..32]),
            GgufType::Q2_K => self.pack_fields(LEN, 128, 32, [0, 2], 16),
            GgufType::Q3_K => {
                self.pack_fields(LEN, 256, 32, [2, 1], 0);
                self.pack_fields(LEN, 128, 32, [0, 2], 32);
            }
            GgufType::Q4_K => self.pack_fields(LEN, 64, 32, [0, 4], 16),
            GgufType::Q5_K => {
                self.pack_fields(LEN, 256, 32, [4, 1], 16);
                self.pack_fields(LEN, 64, 32, [0, 4], 48);
            }
            GgufType::Q6_K => {
                self.pack_fields(LEN, 128, 64, [0, 4], 0);
                self.pack_fields(LEN, 128, 32, [4, 2], 128);
            }
            _ => self.pack_fields(LEN, 32, 16, [0, 4], 8),
        }
    }

    /// Packs `num_bits` of each of `len` codes, from bit `first_bit` on, into the bytes from `at` on. Of each `stretch` numbers,
    /// those that lie `apart` share a byte, the first in its lowest bits.
    fn pack_fields(&mut self, len: usize, stretch: usize, apart: usize, [first_bit, num_bits]: [u8; 2], at: usize) {
        let mask = (1 << num_bits) - 1;
        for (i, to) in self.bytes[at..][..len / stretch * apart].iter_mut().enumerate() {
            let first = i / apart * stretch + i % apart;
            *to = [0; MAX_LANES];
            for (code, shift) in self.codes[first..].iter().step_by(apart).zip((0..8).step_by(usize::from(num_bits))) {
                for lane in 0..MAX_LANES {
                    to[lane] |= (code[lane] >> first_bit & mask) << shift;
                }
            }
        }
    }
}

/// `low | high << shift`.
fn join(low: Bytes, high: Bytes, shift: u32) -> Bytes {
    std::array::from_fn(|lane| low[lane] | high[lane] << shift)
}
