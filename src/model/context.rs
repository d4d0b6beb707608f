//! What a pass through a block is given and what it gives, besides activations.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::Tensor;

use crate::lora::{BlockAdapters, Matrices};
use crate::ops::attention::{Attended, AttentionInputs, attention};
use crate::ops::delta_rule::{DeltaInputs, Gates, delta_rule};
use crate::ops::dropout::Dropout;
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::ops::short_conv::{gated_conv, short_conv};
use crate::spec::{DeltaHeads, Heads, ModelConfig, PerSite, SiteId};

/// The inputs of a block besides its weights and activations.
#[derive(Clone, Copy, Debug)]
pub struct BlockContext<'a> {
    /// Where the operations run.
    pub place: Place,
    /// Positions of the sequences.
    pub layout: &'a Layout,
    /// Added to the mean square in the norms.
    pub eps: f64,
    /// What it is given besides the residual stream.
    pub inputs: BlockInputs<'a>,
    /// Adapters of this block.
    pub adapters: &'a BlockAdapters,
    /// Dropout on the inputs of the adapters, with the seed of this block's masks; absent in evaluation.
    pub dropout: Option<Dropout>,
    /// Where texts of several adapters are written together: the adapters by rows of tokens, instead of `adapters`.
    pub by_rows: &'a [(Range<usize>, &'a BlockAdapters)],
    /// Keeps the inputs of some of its linear layers.
    pub watch: Option<&'a Watch>,
}

/// Keeps the inputs of some linear layers of a block, `[tokens, in_features]` each.
#[derive(Debug)]
pub struct Watch {
    sites: Vec<SiteId>,
    seen: Mutex<PerSite<Tensor<2>>>,
}

impl Watch {
    /// For these layers.
    #[must_use]
    pub fn new(sites: Vec<SiteId>) -> Self {
        Self { sites, seen: Mutex::default() }
    }

    /// Keeps the input of a layer, if it is one of them.
    pub(super) fn see(&self, site: SiteId, x: &Tensor<2>) {
        if self.sites.contains(&site) {
            self.seen.lock().unwrap_or_else(PoisonError::into_inner).insert(site, x.clone());
        }
    }

    /// What was kept.
    #[must_use]
    pub fn seen(self) -> PerSite<Tensor<2>> {
        self.seen.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keys, after norm and rotary embedding, and values, `[tokens, num_kv_heads * head_dim]` each; or their gradients.
pub type KeyValues = [Tensor<2>; 2];

/// What a block is given besides the residual stream (Gemma 4).
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockInputs<'a> {
    /// The layer's own embeddings of the tokens, `[tokens, width]`.
    pub layer_input: Option<&'a Tensor<2>>,
    /// Those of an earlier layer, which its attention uses.
    pub key_values: Option<&'a KeyValues>,
    /// In the backward: what later layers add to the gradients of its own keys and values.
    pub key_value_grads: Option<&'a KeyValues>,
}

impl<'a> BlockContext<'a> {
    /// The context of a micro-batch.
    #[must_use]
    pub fn new(
        place: Place,
        config: &ModelConfig,
        layout: &'a Layout,
        adapters: &'a BlockAdapters,
        dropout: Option<Dropout>,
    ) -> Self {
        let inputs = BlockInputs::default();
        Self { place, layout, eps: config.rms_norm_eps, inputs, adapters, dropout, by_rows: &[], watch: None }
    }

    /// Where the operations run.
    pub(super) fn place(&self) -> Place {
        self.place
    }
}

/// How tokens see those before them.
pub trait TokenMixing {
    /// Attention of queries, keys (both after the rotary embedding) and values.
    fn attention(&mut self, qkv: [&Tensor<2>; 3], heads: Heads) -> Attended;

    /// The gated convolution of `bcx`, `[tokens, 3 * channels]`, with the weight `conv`, `[kernel_size, channels]`.
    fn gated_conv(&mut self, bcx: &Tensor<2>, conv: &Tensor<2>) -> Tensor<2>;

    /// The gated delta rule of queries, keys and values side by side, `[tokens, qkv_width]`, after their convolution with the weight
    /// `conv`, `[kernel_size, qkv_width]`.
    fn delta_rule(
        &mut self,
        qkv: &Tensor<2>,
        gates: &Gates<Tensor<2>>,
        conv: &Tensor<2>,
        heads: DeltaHeads,
    ) -> Tensor<2>;
}

/// Tokens see those of their document in a micro-batch.
#[derive(Debug)]
pub struct InDocuments<'a> {
    /// Where the operations run.
    pub place: Place,
    /// Of the micro-batch.
    pub layout: &'a Layout,
    /// What the block's attention gives, from the first pass on, so that a second pass does not compute it again; absent where it is
    /// not to be remembered.
    pub memory: Option<Option<Attended>>,
}

impl TokenMixing for InDocuments<'_> {
    fn attention(&mut self, qkv: [&Tensor<2>; 3], heads: Heads) -> Attended {
        let attend = || attention(self.place, AttentionInputs { qkv, layout: self.layout, heads });
        match &mut self.memory {
            Some(memory) => memory.get_or_insert_with(attend).clone(),
            None => attend(),
        }
    }

    fn gated_conv(&mut self, bcx: &Tensor<2>, conv: &Tensor<2>) -> Tensor<2> {
        gated_conv(self.place, bcx, conv, self.layout)
    }

    fn delta_rule(
        &mut self,
        qkv: &Tensor<2>,
        gates: &Gates<Tensor<2>>,
        conv: &Tensor<2>,
        heads: DeltaHeads,
    ) -> Tensor<2> {
        let qkv = &short_conv(self.place, qkv, conv, self.layout);
        delta_rule(self.place, DeltaInputs { qkv, gates, layout: self.layout, heads })
    }
}

/// Gradients of a block's adapters.
pub type BlockGrads = PerSite<Matrices<Tensor<2>>>;
