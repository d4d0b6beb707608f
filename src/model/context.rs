//! What a pass through a block is given and what it gives, besides activations.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::lora::{BlockAdapters, Matrices};
use crate::ops::attention::Attended;
use crate::ops::dropout::Dropout;
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::spec::{Heads, ModelConfig, PerSite};

/// The inputs of a block besides its weights and activations.
#[derive(Clone, Copy, Debug)]
pub struct BlockContext<'a> {
    /// Positions of the sequences.
    pub layout: &'a Layout,
    /// Added to the mean square in the norms.
    pub eps: f64,
    /// Adapters of this block.
    pub adapters: &'a BlockAdapters,
    /// Dropout on the inputs of the adapters, with the seed of this block's masks; absent in evaluation.
    pub dropout: Option<Dropout>,
    /// Where texts of several adapters are written together: the adapters by rows of tokens, instead of `adapters`.
    pub by_rows: &'a [(Range<usize>, &'a BlockAdapters)],
}

impl<'a> BlockContext<'a> {
    /// The context of a micro-batch.
    #[must_use]
    pub fn new(
        config: &ModelConfig,
        layout: &'a Layout,
        adapters: &'a BlockAdapters,
        dropout: Option<Dropout>,
    ) -> Self {
        Self { layout, eps: config.rms_norm_eps, adapters, dropout, by_rows: &[] }
    }

    /// Where the operations run.
    pub(super) fn place(&self) -> Place {
        self.layout.place()
    }
}

/// An attention of queries, keys (both after the rotary embedding) and values.
pub type Attend<'a> = &'a mut dyn FnMut([&Tensor<2>; 3], Heads) -> Attended;

/// Gradients of a block's adapters.
pub type BlockGrads = PerSite<Matrices<Tensor<2>>>;
