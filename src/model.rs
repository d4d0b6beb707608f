//! A decoder model: embedding, blocks, norm and head. The training and generation code runs the blocks one by one.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use self::block::Block;
use self::embed::{LayerInputWeights, rounded};
use self::host::HostBlocks;
use self::pager::Pager;
use self::streams::StreamProjections;
use crate::images::Features;
use crate::lora::AdapterSet;
use crate::ops::kernels::Place;
use crate::ops::layout::RotaryTable;
use crate::ops::linear::Weight;
use crate::ops::norm::Norm;
use crate::ops::place::place_of;
use crate::ops::product::F32Products;
use crate::spec::{ModelConfig, SiteId};
use crate::util::faults;

mod between_blocks;
pub mod block;
pub mod budget;
pub mod context;
pub mod decode;
mod embed;
mod host;
mod in_place;
mod linears;
pub mod load;
pub mod mixing;
mod pager;
mod positions;
pub mod rope;
mod streams;
mod sublayers;
pub mod tower;
pub mod weights;

pub use between_blocks::BetweenBlocks;
pub use embed::{Embedded, Tokens};
pub use in_place::OwnHead;
pub use positions::Continued;
pub use weights::Storage;

/// Frozen weights of a model, on its device.
#[derive(Clone, Debug)]
pub struct Model {
    /// Shape and constants.
    pub config: ModelConfig,
    /// Type of the activations; weights may be stored in another type.
    pub compute: DType,
    /// `[vocab_size, hidden_size]`.
    pub embed_tokens: Tensor<2>,
    /// The blocks, which [`walk`](Self::walk) brings to the device.
    pub blocks: Vec<Block>,
    /// The last norm.
    pub norm: Norm,
    /// `[vocab_size, hidden_size]`; shares the embedding's memory where the two are tied.
    pub lm_head: Weight,
    /// Factor of the embeddings.
    embedding_scale: Option<f64>,
    /// What makes the layers' own embeddings of the tokens.
    layer_inputs: Option<LayerInputWeights>,
    /// What makes several residual streams, and one of them.
    streams: Option<StreamProjections>,
    /// Angles of every rotary embedding up to the longest position so far; grows on demand.
    rotary: Arc<Mutex<Rotary>>,
    place: Place,
    /// What is in place of the embeddings of images.
    features: Option<Arc<Features>>,
    /// Where the weights are on disk.
    pager: Option<Arc<Pager>>,
    /// Where the matrices of the blocks are in host memory, and the device is a GPU.
    host: Option<Arc<HostBlocks>>,
}

/// Angles of every rotary embedding, for texts of these reaches.
#[derive(Debug)]
struct Rotary {
    reaches: Vec<usize>,
    tables: Arc<[RotaryTable]>,
}

impl Model {
    /// Makes a model from its weights.
    #[must_use]
    pub fn new(
        config: ModelConfig,
        compute: DType,
        embed_tokens: Tensor<2>,
        blocks: Vec<Block>,
        norm: Norm,
        lm_head: Weight,
    ) -> Self {
        let rotary = Arc::new(Mutex::new(Rotary { reaches: Vec::new(), tables: config.rotary_tables(0, &[]) }));
        let place = place_of(&norm.weight.device(), compute);
        let place = place.with_rounding(lm_head.rounds).unwrap_or(place);
        let embedding_scale = config.embedding_scale;
        let mut model = Self {
            config,
            compute,
            embed_tokens,
            blocks,
            norm,
            lm_head,
            embedding_scale,
            layer_inputs: None,
            streams: None,
            rotary,
            place,
            features: None,
            pager: None,
            host: None,
        };
        model.embedding_scale = embedding_scale.map(|scale| rounded(scale, model.rounding_dtype()));
        model
    }

    /// What numbers are rounded to that products have to round.
    fn rounding_dtype(&self) -> DType {
        if self.lm_head.rounds { DType::BF16 } else { self.compute }
    }

    /// The model with what it sees in place of images.
    #[must_use]
    pub fn with_features(self, features: impl Into<Arc<Features>>) -> Self {
        Self { features: Some(features.into()), ..self }
    }

    /// The model with these products of operands in `f32`; the kernels of the CPU have only one kind.
    #[must_use]
    pub fn with_f32_products(self, products: F32Products) -> Self {
        Self { place: self.place.with_f32_products(products).unwrap_or(self.place), ..self }
    }

    /// The device that the weights are on.
    #[must_use]
    pub fn device(&self) -> Device {
        self.norm.weight.device()
    }

    /// Where the operations run.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// The blocks of these layers, in this order. What is not in the device's memory is read ahead and released behind.
    pub fn walk(&self, layers: impl Iterator<Item = usize>) -> impl Iterator<Item = (usize, Cow<'_, Block>)> {
        let mut layers = layers.peekable();
        std::iter::from_fn(move || {
            let layer = layers.next()?;
            let next = layers.peek().copied();
            if let Some(pager) = &self.pager {
                pager.turn_to(layer, next);
            }
            let block = match &self.host {
                Some(host) => Cow::Owned(host.turn_to(&self.blocks, layer, next)),
                None => Cow::Borrowed(&self.blocks[layer]),
            };
            Some((layer, block))
        })
    }

    /// The elements of a linear layer's weight, row by row, in `f32`.
    #[must_use]
    pub fn weight_values(&self, layer: usize, site: SiteId) -> Vec<f32> {
        let values = |(_, block): (_, Cow<'_, Block>)| {
            faults::read(block.linears[site].values.dense().into_owned(), "a weight of the base")
        };
        self.walk(std::iter::once(layer)).map(values).next().unwrap_or_default()
    }

    /// Gives the magnitudes of new adapters, where they have some, the norms of the rows of their weights.
    pub fn start_magnitudes(&self, adapters: &mut AdapterSet) {
        let has_some = |layer: &usize| adapters.blocks[*layer].values().any(|it| it.matrices.magnitude.is_some());
        let layers: Vec<usize> = (0..adapters.blocks.len()).filter(has_some).collect();
        for (layer, block) in self.walk(layers.into_iter()) {
            for (&site, adapter) in &mut adapters.blocks[layer] {
                adapter.start_magnitude(&block.linears[site]);
            }
        }
    }

    /// Angles of every rotary embedding for texts of at most `num_positions` positions.
    #[must_use]
    pub fn rotary_tables(&self, num_positions: usize) -> Arc<[RotaryTable]> {
        let mut rotary = self.rotary.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let reaches: Vec<usize> = self.config.ropes.iter().map(|rope| rope.reach(num_positions)).collect();
        let is_short = rotary.tables.iter().any(|table| table.num_positions() < num_positions);
        if is_short || rotary.reaches != reaches {
            let tables = self.config.rotary_tables(num_positions.next_power_of_two(), &reaches);
            *rotary = Rotary { reaches, tables };
        }
        Arc::clone(&rotary.tables)
    }

    /// Token ids on the device, `[tokens]`.
    #[must_use]
    pub fn token_ids(&self, input_ids: &[u32]) -> Tensor<1, Int> {
        let ids: Vec<i32> = input_ids.iter().map(|&id| id.cast_signed()).collect();
        let shape = [ids.len()];
        Tensor::from_data(TensorData::new(ids, shape), (&self.device(), DType::I32))
    }
}
