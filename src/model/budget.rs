//! Sizes of the tensors of sublayers.

use crate::device::Dtype;
use crate::ops::kernels::Place;
use crate::spec::{self, NormKind, Sublayer, SublayerKind};

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

impl Sublayer {
    /// Sizes of its tensors, with those of the norms around it.
    #[must_use]
    pub fn sizes(&self, by: SizedBy) -> SublayerSizes {
        let inside = match &self.kind {
            SublayerKind::Attention(attention) => attention.sizes(by),
            SublayerKind::DeltaNet(net) => net.sizes(by),
            SublayerKind::ShortConv(_) => spec::ShortConv::sizes(by),
            SublayerKind::Gated(gated) => gated.sizes(by),
            SublayerKind::Mixture(mixture) => mixture.sizes(by),
            SublayerKind::Beside(beside) => beside.sizes(by),
            SublayerKind::LayerInput(input) => input.sizes(by),
        };
        // The input, and a factor of every token in its norm; the norm of the output has an input of its own.
        let of_norms = usize::from(self.norm_before.is_some()) + self.norm_after.map_or(0, |_| by.hidden_size);
        // What is centred, in `f32`, and what is made of that.
        let centred = match by.norm_kind {
            NormKind::Rms => 0,
            NormKind::Layer => {
                3 * by.hidden_size * Dtype::F32.num_bytes() / by.place.activation_dtype(by.dtype).num_bytes()
            }
        };
        SublayerSizes {
            kept: inside.kept + by.hidden_size + of_norms,
            forward: inside.forward + centred,
            backward: inside.backward + centred,
        }
    }
}
