//! What passes between the blocks of a model besides the residual stream: where tokens are and what they see and, in Gemma 4, the
//! layers' own embeddings of the tokens, and keys and values that later layers use, and, in Qwen3-VL, what is added at images.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{IndexingUpdateOp, Int, Tensor};

use super::block::Activations;
use super::context::{BlockContext, BlockInputs, KeyValues};
use crate::lora::BlockAdapters;
use crate::ops::dropout::Dropout;
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::spec::{Attention, Block, ModelConfig};

/// What passes between the blocks for some tokens.
#[derive(Debug)]
pub struct BetweenBlocks {
    layout: Arc<Layout>,
    /// By layer, `[tokens, width]`; none where the model has none.
    layer_inputs: Vec<Tensor<2>>,
    /// By the layer that makes them.
    key_values: BTreeMap<usize, KeyValues>,
    /// Sums of their gradients, likewise.
    key_value_grads: BTreeMap<usize, KeyValues>,
    /// At tokens of images, if there are any.
    later: Option<Arc<AddedLater>>,
}

/// What is added to the outputs of the first blocks at tokens of images (`DeepStack`, Meng et al., 2024). It has no gradient.
#[derive(Debug)]
pub(super) struct AddedLater {
    /// Which tokens these are, `[image tokens]`.
    pub(super) places: Tensor<1, Int>,
    /// By layer, `[image tokens, hidden_size]`.
    pub(super) parts: Vec<Tensor<2>>,
}

impl BetweenBlocks {
    pub(super) fn new(layout: Arc<Layout>, layer_inputs: Vec<Tensor<2>>, later: Option<Arc<AddedLater>>) -> Self {
        Self { layout, layer_inputs, key_values: BTreeMap::new(), key_value_grads: BTreeMap::new(), later }
    }

    /// The output of the block of `layer` with what is added to it.
    #[must_use]
    pub fn added(&self, layer: usize, y: Tensor<2>) -> Tensor<2> {
        match self.later.as_ref().and_then(|later| Some((later, later.parts.get(layer)?))) {
            Some((later, part)) => y.select_assign(0, later.places.clone(), part.clone(), IndexingUpdateOp::Add),
            None => y,
        }
    }

    /// The context of the block of `layer`.
    #[must_use]
    pub fn context<'a>(
        &'a self,
        place: Place,
        config: &ModelConfig,
        layer: usize,
        adapters: &'a BlockAdapters,
        dropout: Option<Dropout>,
    ) -> BlockContext<'a> {
        let earlier = earlier_layer(&config.blocks[layer]);
        let inputs = BlockInputs {
            layer_input: self.layer_inputs.get(layer),
            key_values: earlier.and_then(|earlier| self.key_values.get(&earlier)),
            key_value_grads: self.key_value_grads.get(&layer),
        };
        BlockContext { inputs, ..BlockContext::new(place, config, &self.layout, adapters, dropout) }
    }

    /// Keeps what later layers use of `layer`.
    pub fn keep(&mut self, config: &ModelConfig, layer: usize, activations: &Activations) {
        if config.shares_key_values(layer) {
            self.key_values.extend(activations.key_values().map(|key_values| (layer, key_values)));
        }
    }

    /// After the backward of `layer`, whose own keys and values no other layer needs any more: adds the gradients of those that it
    /// used to the sums.
    pub fn add_grads(&mut self, config: &ModelConfig, layer: usize, grads: Option<KeyValues>) {
        self.key_values.remove(&layer);
        self.key_value_grads.remove(&layer);
        let Some((earlier, [dk, dv])) = earlier_layer(&config.blocks[layer]).zip(grads) else { return };
        let sum = match self.key_value_grads.remove(&earlier) {
            Some([of_k, of_v]) => [of_k + dk, of_v + dv],
            None => [dk, dv],
        };
        self.key_value_grads.insert(earlier, sum);
    }
}

fn earlier_layer(block: &Block) -> Option<usize> {
    block.attention().and_then(Attention::key_value_layer)
}

impl ModelConfig {
    /// Numbers per token that pass between blocks besides the residual stream, where the first `num_recomputed` blocks are computed
    /// again.
    #[must_use]
    pub fn between_blocks_size(&self, num_recomputed: usize) -> usize {
        let layer_inputs = self.layer_inputs.map_or(0, |inputs| inputs.width * self.num_layers());
        let shared = self.blocks.iter().map(Block::attention).enumerate().filter_map(|(layer, attention)| {
            let attention = attention.filter(|_| self.shares_key_values(layer))?;
            // Their gradients, and they themselves where the block that made them does not keep them.
            let times = if layer < num_recomputed { 4 } else { 2 };
            Some(times * attention.own_key_value_width())
        });
        layer_inputs + shared.sum::<usize>()
    }
}
