//! Encoders of the blocks of a GGUF file: the bytes that llama.cpp's `ggml_quantize_chunk` writes, from `f32` arithmetic in the
//! same order. What ggml sums number after number within a block is summed for a row of blocks at once.

use anamnesis::GgufType;
use rayon::prelude::*;

use super::simd::vectorised;

mod encoded;
mod groups;
mod lanes;
mod search;
mod small;
mod tile;

#[cfg(test)]
mod tests;

use encoded::Encoded;
use lanes::{MAX_LANES, lanes};
use tile::Tile;

/// The types of blocks that are encoded.
pub const ENCODED: [GgufType; 14] = [
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
    GgufType::IQ4_NL,
    GgufType::IQ4_XS,
    GgufType::MXFP4,
    GgufType::NVFP4,
];

/// A number is not finite, or so large that the scale of its block is not in `f16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow;

/// Numbers of a task: a whole number of rows of blocks of any type.
const TASK: usize = 256 * 8 * MAX_LANES;

/// A matrix `[rows, width]` to be encoded.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    numbers: &'a [f32],
    width: usize,
    importance: Option<&'a [f32]>,
    /// Mean squares of the rows, where the type needs them.
    mean_squares: &'a [f32],
}

/// Encodes a matrix `[rows, width]` as blocks of one of the types [`ENCODED`].
///
/// `importance` has a weight from 0 on for each column, a mean square of the input from an importance matrix (`imatrix`);
/// `Q8_0`, `MXFP4` and `NVFP4` have no use for it. Source: `ggml-quants.c` of llama.cpp.
///
/// # Errors
/// A number that is not finite, and a scale that is not finite in `f16`.
///
/// # Panics
/// Panics if the type is not encoded, or if rows are not whole blocks.
pub fn encode(kind: GgufType, numbers: &[f32], width: usize, importance: Option<&[f32]>) -> Result<Vec<u8>, Overflow> {
    assert!(numbers.len().is_multiple_of(width.max(1)), "{} numbers are no rows of {width}", numbers.len());
    assert!(
        importance.is_none_or(|importance| importance.len() == width),
        "one importance for each of {width} columns"
    );
    let mean_squares: Vec<f32> = match kind {
        GgufType::Q4_0 | GgufType::Q4_1 | GgufType::Q5_0 | GgufType::Q5_1 if importance.is_some() => numbers
            .par_chunks(width.max(1))
            .map(|row| row.iter().fold(0.0, |sum, x| sum + x * x) / width as f32)
            .collect(),
        _ => Vec::new(),
    };
    let mut blocks = vec![0; numbers.len() / kind.block_size() * type_size(kind)];
    run(kind, Matrix { numbers, width, importance, mean_squares: &mean_squares }, &mut blocks, false)?;
    Ok(blocks)
}

/// Chooses codes anew in the blocks of a matrix `[rows, width]`, whose scales and minimums stay.
///
/// # Errors
/// As [`encode`].
///
/// # Panics
/// As [`encode`], and for a type without scales of scales.
pub fn encode_codes(kind: GgufType, numbers: &[f32], width: usize, blocks: &mut [u8]) -> Result<(), Overflow> {
    assert!(kind.block_size() == 256, "{kind} has no scales to keep");
    run(kind, Matrix { numbers, width, importance: None, mean_squares: &[] }, blocks, true)
}

fn run(kind: GgufType, matrix: Matrix, blocks: &mut [u8], keep_scales: bool) -> Result<(), Overflow> {
    assert!(ENCODED.contains(&kind), "{kind} is not encoded");
    assert!(matrix.width.is_multiple_of(kind.block_size()), "rows of {} are no blocks of {kind}", matrix.width);
    let size = type_size(kind);
    assert_eq!(blocks.len(), matrix.numbers.len() / kind.block_size() * size);
    let num = TASK / kind.block_size();
    let tasks = blocks.par_chunks_mut(num * size).enumerate();
    let done = tasks.map(|(task, blocks)| encode_blocks(kind, matrix, task * num, blocks, keep_scales));
    if done.reduce(|| true, |one, other| one && other) { Ok(()) } else { Err(Overflow) }
}

fn type_size(kind: GgufType) -> usize {
    kind.type_size().unwrap_or(0)
}

vectorised! {
    /// Encodes blocks from block `first` of the matrix on; `false` if one overflows.
    fn encode_blocks<'a, S>(
        simd, kind: GgufType, matrix: Matrix<'a>, first: usize, blocks: &'a mut [u8], keep_scales: bool,
    ) -> bool {
        let (len, size) = (kind.block_size(), type_size(kind));
        // No scale in `f16` reaches so far, and the searches' products would not be finite.
        let limit = if matches!(kind, GgufType::MXFP4 | GgufType::NVFP4) { f32::MAX } else { 1e12 };
        let (mut tile, mut encoded) = (Tile::new(simd), Encoded::new(kind, lanes::<S>()));
        for (i, blocks) in blocks.chunks_mut(lanes::<S>() * size).enumerate() {
            tile.load(matrix, len, first + i * lanes::<S>(), blocks.len() / size);
            encoded.overflows |= tile.largest.total_cmp(&limit).is_gt();
            if keep_scales {
                encoded.load(blocks, size);
            }
            if len == tile::LEN {
                groups::encode(&tile, &mut encoded, keep_scales);
            } else {
                small::encode(&tile, &mut encoded);
            }
            encoded.store(blocks, size);
        }
        !encoded.overflows
    }
}
