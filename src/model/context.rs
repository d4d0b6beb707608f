//! What a pass through a block is given and what it gives, besides activations.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::Tensor;

use crate::lora::{BlockAdapters, Matrices};
use crate::ops::dropout::Dropout;
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::spec::{ModelConfig, PerSite, SiteId};

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

    /// Whether somebody wants the input of a layer.
    pub(super) fn sees(&self, site: SiteId) -> bool {
        self.watch.is_some_and(|watch| watch.sites.contains(&site))
    }

    /// Where the operations run.
    pub(super) fn place(&self) -> Place {
        self.place
    }
}

/// Gradients of a block's adapters.
pub type BlockGrads = PerSite<Matrices<Tensor<2>>>;

/// What a block's backward makes.
#[derive(Debug, Default)]
pub struct BlockBackward {
    /// The gradient of the block's input, where it was asked for.
    pub dx: Option<Tensor<2>>,
    /// Of the keys and values of an earlier layer, where it uses such.
    pub key_values: Option<KeyValues>,
    /// Of its adapters.
    pub adapters: BlockGrads,
    /// Of those of its norms that are trained, `[1, hidden_size]`, in `f32`.
    pub norms: Vec<(&'static str, Tensor<2>)>,
}
