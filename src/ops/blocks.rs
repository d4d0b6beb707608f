//! A frozen matrix as the blocks of a GGUF file: what [`cpu::Blocks`] is to slices, this is to tensors.

use anamnesis::GgufType;
use burn::tensor::{Bytes, Device, Int, Tensor};
use rayon::prelude::*;

use super::host::HostBytes;
use super::quantised::bytes_tensor;
use super::{cpu, host};

pub use cpu::{KINDS, Overflow};

/// A frozen matrix `[out_features, in_features]` as blocks.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// `[out_features, in_features]`.
    pub shape: [usize; 2],
    /// The type of the blocks.
    pub kind: GgufType,
    pub(super) bytes: Tensor<1, Int>,
}

impl Blocks {
    /// A matrix whose rows are whole blocks.
    #[must_use]
    pub fn new(shape: [usize; 2], kind: GgufType, bytes: Bytes) -> Self {
        Self { shape, kind, bytes: bytes_tensor(bytes, &Device::flex()) }
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.bytes.dims()[0]
    }

    /// The same for other numbers, as [`encode_again`] makes it.
    ///
    /// # Errors
    /// As [`encode`].
    pub fn encoded_again(&self, values: &[f32], importance: Option<&[f32]>) -> Result<Self, Overflow> {
        let bytes = encode_again(self.kind, host::bytes(&self.bytes).to_vec(), values, self.shape[1], importance)?;
        Ok(Self::new(self.shape, self.kind, Bytes::from_elems(bytes)))
    }

    /// The matrix in `f32`.
    #[must_use]
    pub fn decoded(&self) -> Tensor<2> {
        let mut values = vec![0.0; self.shape[0] * self.shape[1]];
        HostBlocks::new(self).get().decode(0, &mut values);
        host::tensor(values, self.shape, &self.bytes.device())
    }
}

/// The blocks of numbers in rows of `width` that have changed since others were encoded as `blocks`: scales of scales, whose search
/// is dear, stay, and other blocks are made anew, as [`encode`] makes them.
///
/// # Errors
/// As [`encode`].
pub fn encode_again(
    kind: GgufType,
    mut blocks: Vec<u8>,
    rows: &[f32],
    width: usize,
    importance: Option<&[f32]>,
) -> Result<Vec<u8>, Overflow> {
    if !keeps_scales(kind) {
        return encode(kind, rows, width, importance);
    }
    cpu::encode_codes(kind, rows, width, &mut blocks)?;
    Ok(blocks)
}

/// Whether [`encode_again`] looks at the blocks before.
#[must_use]
pub fn keeps_scales(kind: GgufType) -> bool {
    kind.block_size() == 256
}

/// The blocks of numbers in rows of `width`, which is a multiple of their length. `importance`, of as many numbers, says how much
/// an error in each column costs; without it, all cost the same.
///
/// # Errors
/// A scale that is too large for `f16`.
pub fn encode(kind: GgufType, rows: &[f32], width: usize, importance: Option<&[f32]>) -> Result<Vec<u8>, Overflow> {
    cpu::encode(kind, rows, width, importance)
}

/// The numbers of whole blocks.
#[must_use]
pub fn decode(kind: GgufType, bytes: &[u8]) -> Vec<f32> {
    let blocks = cpu::Blocks { kind, bytes };
    let mut values = vec![0.0; blocks.len()];
    // As much as a core's cache holds.
    values.par_chunks_mut(1 << 14).enumerate().for_each(|(index, part)| blocks.decode(index << 14, part));
    values
}

/// The slices of [`Blocks`] in host memory.
pub(super) struct HostBlocks {
    kind: GgufType,
    bytes: HostBytes,
}

impl HostBlocks {
    pub(super) fn new(matrix: &Blocks) -> Self {
        Self { kind: matrix.kind, bytes: host::bytes(&matrix.bytes) }
    }

    pub(super) fn get(&self) -> cpu::Blocks<'_> {
        cpu::Blocks { kind: self.kind, bytes: &self.bytes }
    }
}
