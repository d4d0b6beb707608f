//! A frozen matrix as the blocks of a GGUF file: what [`cpu::Blocks`] is to slices, this is to tensors.

use anamnesis::GgufType;
use burn::tensor::{Bytes, Device, Int, Tensor};

use super::host::HostBytes;
use super::quantised::bytes_tensor;
use super::{cpu, host};

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

    /// The matrix in `f32`.
    #[must_use]
    pub fn decoded(&self) -> Tensor<2> {
        let mut values = vec![0.0; self.shape[0] * self.shape[1]];
        HostBlocks::new(self).get().decode(0, &mut values);
        host::tensor(values, self.shape, &self.bytes.device())
    }
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
