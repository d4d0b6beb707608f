//! A decoder model: embedding, blocks, norm and head. The training and generation code runs the blocks one by one.

use std::borrow::Cow;
use std::f64::consts::FRAC_1_SQRT_2;
use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use half::{bf16, f16};

use self::block::Block;
use self::host::HostBlocks;
use self::pager::Pager;
use crate::lora::AdapterSet;
use crate::ops::kernels::Place;
use crate::ops::layout::RotaryTable;
use crate::ops::linear::{Weight, linear};
use crate::ops::norm::{Norm, rms_norm};
use crate::ops::place::place_of;
use crate::ops::product::F32Products;
use crate::spec::{ModelConfig, SiteId};
use crate::util::faults;

mod attention;
mod beside;
pub mod block;
pub mod budget;
mod cache;
mod carried;
pub mod context;
pub mod decode;
pub mod delta_net;
mod gated;
mod host;
mod in_place;
mod layer_input;
mod linears;
pub mod load;
mod mixture;
mod pager;
pub mod rope;
pub mod short_conv;
pub mod weights;

pub use carried::Carried;
pub use in_place::OwnHead;
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
    /// Angles of every rotary embedding up to the longest position so far; grows on demand.
    rotary: Arc<Mutex<Rotary>>,
    place: Place,
    /// Where the weights are on disk.
    pager: Option<Arc<Pager>>,
    /// Where the matrices of the blocks are in host memory, and the device is a GPU.
    host: Option<Arc<HostBlocks>>,
}

/// What makes the layers' own embeddings of the tokens.
#[derive(Clone, Debug)]
struct LayerInputWeights {
    /// `[vocab_size, num_layers * width]`
    table: Tensor<2>,
    /// Of the embeddings of the tokens, `[num_layers * width, hidden_size]`.
    projection: Weight,
    /// Of what the projection makes for a layer, `[width]`.
    norm: Tensor<1>,
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
            rotary,
            place,
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

    /// What passes between the blocks besides the residual stream, for tokens with these ids and embeddings.
    #[must_use]
    pub fn carried(&self, ids: Tensor<1, Int>, x: &Tensor<2>) -> Carried {
        Carried::new(
            self.layer_inputs.as_ref().map(|weights| self.layer_inputs_of(weights, ids, x)).unwrap_or_default(),
        )
    }

    /// By layer, `[tokens, width]`.
    #[expect(clippy::cast_precision_loss, reason = "widths")]
    fn layer_inputs_of(&self, weights: &LayerInputWeights, ids: Tensor<1, Int>, x: &Tensor<2>) -> Vec<Tensor<2>> {
        let ([tokens, hidden], [width]) = (x.dims(), weights.norm.dims());
        let own = weights.table.clone().select(0, ids).cast(self.compute) * self.scale_of(width);
        let projected = linear(self.place, x, &weights.projection, None, None).0 * (hidden as f64).sqrt().recip();
        let num_layers = self.config.num_layers();
        let in_rows = |x: Tensor<2>| x.reshape([tokens * num_layers, width]);
        let (normed, _) = rms_norm(self.place, &in_rows(projected), &weights.norm, self.config.rms_norm_eps);
        let all = (normed + in_rows(own)) * FRAC_1_SQRT_2;
        let all = all.reshape([tokens, num_layers * width]);
        // Copies: views of one tensor have gaps between their rows.
        let of_layer = |layer: usize| {
            let part = all.clone().narrow(1, layer * width, width);
            part.zeros_like().slice_assign([0..tokens, 0..width], part)
        };
        (0..num_layers).map(of_layer).collect()
    }

    /// The root of the width of embeddings, as the computation has it.
    #[expect(clippy::cast_precision_loss, reason = "a width")]
    fn scale_of(&self, width: usize) -> f64 {
        rounded((width as f64).sqrt(), self.rounding_dtype())
    }
}

/// A number as `dtype` has it.
#[expect(clippy::cast_possible_truncation, reason = "the nearest number in f32")]
fn rounded(number: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => bf16::from_f64(number).to_f64(),
        DType::F16 => f16::from_f64(number).to_f64(),
        _ => f64::from(number as f32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_of_embeddings_is_rounded_to_the_type_of_the_computation() {
        let scale = 3072.0_f64.sqrt();
        let types = [DType::BF16, DType::F16, DType::F32];
        assert_eq!(types.map(|dtype| rounded(scale, dtype)), [55.5, 55.4375, f64::from(55.425_625_f32)]);
    }
}
