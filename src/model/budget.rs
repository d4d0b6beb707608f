//! Sizes of the tensors of sublayers, and of what layers keep of a text.

use crate::device::Dtype;
use crate::ops::kernels::Place;
use crate::spec::{ModelConfig, NormKind, Sublayer};

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

/// Bytes of what layers keep of a text with so many tokens, where an activation has `activation_bytes`.
#[must_use]
pub fn text_bytes(config: &ModelConfig, activation_bytes: usize, num_tokens: usize) -> usize {
    let cached = config.blocks.iter().flat_map(|block| &block.sublayers).map(Sublayer::cached_numbers);
    cached.map(|[token, state]| token * num_tokens * activation_bytes + state * size_of::<f32>()).sum()
}
