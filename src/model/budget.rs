//! Sizes of the tensors of sublayers.

use crate::device::Dtype;
use crate::ops::kernels::Place;
use crate::spec::NormKind;

/// What the sizes of a sublayer depend on besides its shape.
#[derive(Clone, Copy, Debug)]
pub struct SizedBy {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Where it is computed.
    pub place: Place,
    /// Type of the computation.
    pub dtype: Dtype,
    /// What norms compute.
    pub norm_kind: NormKind,
    /// Whether the outputs of linear layers of one input share memory.
    pub joins_outputs: bool,
}

/// Sizes of a sublayer's tensors, or of a block's, as numbers per token.
#[derive(Clone, Copy, Debug, Default)]
pub struct SublayerSizes {
    /// Tensors that the backward needs, including the input.
    pub kept: usize,
    /// Temporary tensors of the forward.
    pub forward: usize,
    /// Temporary tensors of the backward.
    pub backward: usize,
}

impl SublayerSizes {
    /// Of both, one after the other.
    #[must_use]
    pub fn and(self, next: Self) -> Self {
        Self {
            kept: self.kept + next.kept,
            forward: self.forward.max(next.forward),
            backward: self.backward.max(next.backward),
        }
    }
}
