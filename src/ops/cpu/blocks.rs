//! Frozen weights as the blocks of a GGUF file: small integers with their scales, 32 or 256 numbers a block.

use anamnesis::{F32Out, GgufType, dequantize_gguf_blocks};

mod grids;
mod parts;

use grids::{decode_grid, has_grid};
use parts::{PART, decode_parts, has_parts};

/// The types of blocks that are decoded: those of gguf-py.
pub const KINDS: [GgufType; 23] = [
    GgufType::Q4_0,
    GgufType::Q4_1,
    GgufType::Q5_0,
    GgufType::Q5_1,
    GgufType::Q8_0,
    GgufType::Q2_K,
    GgufType::Q3_K,
    GgufType::Q4_K,
    GgufType::Q5_K,
    GgufType::Q6_K,
    GgufType::IQ1_S,
    GgufType::IQ1_M,
    GgufType::IQ2_XXS,
    GgufType::IQ2_XS,
    GgufType::IQ2_S,
    GgufType::IQ3_XXS,
    GgufType::IQ3_S,
    GgufType::IQ4_NL,
    GgufType::IQ4_XS,
    GgufType::TQ1_0,
    GgufType::TQ2_0,
    GgufType::MXFP4,
    GgufType::NVFP4,
];

/// A matrix of blocks, row after row; a row is a whole number of blocks.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// The type of the blocks.
    pub kind: GgufType,
    /// All of them.
    pub bytes: &'a [u8],
}

impl Blocks<'_> {
    /// Numbers of the matrix.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / self.kind.type_size().unwrap_or(1) * self.kind.block_size()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Decodes the numbers from `first` on.
    pub fn decode(&self, first: usize, to: &mut [f32]) {
        if (has_parts(self.kind) || has_grid(self.kind)) && first.is_multiple_of(PART) {
            let (parts, rest) = to.split_at_mut(to.len() / PART * PART);
            let decode = if has_grid(self.kind) { decode_grid } else { decode_parts };
            decode(self.kind, self.bytes, first / PART, parts);
            if !rest.is_empty() {
                self.decode_blocks(first + parts.len(), rest);
            }
        } else {
            self.decode_blocks(first, to);
        }
    }

    /// Decodes whole blocks, and keeps what is asked for.
    fn decode_blocks(&self, first: usize, to: &mut [f32]) {
        let (len, bytes) = (self.kind.block_size(), self.kind.type_size().unwrap_or(0));
        let range = first / len..(first + to.len()).div_ceil(len);
        let blocks = &self.bytes[range.start * bytes..range.end * bytes];
        let (mut skipped, mut rest) = (first % len, to);
        let decoded = dequantize_gguf_blocks::<F32Out, _>(blocks, self.kind, range.len() * len, |block| {
            let num = (len - skipped).min(rest.len());
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(num);
            bytemuck::cast_slice_mut(part).copy_from_slice(&block[4 * skipped..4 * (skipped + num)]);
            (skipped, rest) = (0, behind);
            Ok(())
        });
        let Ok(()) = decoded else { panic!("{} has no decoder; it was checked when the file was read", self.kind) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_every_type_have_gguf_pys_numbers_to_the_bit_from_any_number_on() {
        let golden = include_bytes!("../../../tests/golden/gguf.safetensors");
        let golden = safetensors::SafeTensors::deserialize(golden).unwrap();
        for kind in KINDS {
            let tensor = |part: &str| golden.tensor(&format!("{kind}.{part}")).unwrap().data().to_vec();
            let blocks = tensor("blocks");
            let expected: Vec<f32> = bytemuck::pod_collect_to_vec(&tensor("numbers"));
            let blocks = Blocks { kind, bytes: &blocks };
            assert_eq!(blocks.len(), expected.len(), "{kind}");
            let len = kind.block_size();
            for range in [0..3 * len, len - 32..2 * len, 1..2, 32..64, 5..len, len - 3..2 * len + 7, 3 * len..3 * len] {
                let mut numbers = vec![f32::NAN; range.len()];
                blocks.decode(range.start, &mut numbers);
                let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&numbers), bits(&expected[range.clone()]), "{kind} {range:?}");
            }
        }
    }
}
