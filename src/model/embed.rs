//! What a decoder sees, made of tokens in one place: hidden states, positions, and which tokens see which.

use std::f64::consts::FRAC_1_SQRT_2;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor};
use half::{bf16, f16};

use super::Model;
use super::between_blocks::{AddedLater, BetweenBlocks};
use super::block::Block;
use super::context::{BlockContext, Watch};
use super::positions::Continued;
use crate::images::{FIRST_IMAGE_ID, is_of_image};
use crate::lora::{AdapterSet, FullTensor};
use crate::ops::host;
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::ops::linear::{Weight, linear};
use crate::ops::noise::{Noise, with_noise};
use crate::ops::norm::rms_norm;
use crate::ops::profile::{self, Cost};

/// Tokens on a model's device, with their positions and what sees what.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[tokens]`
    ids: Tensor<1, Int>,
    layout: Arc<Layout>,
    /// What some of them are, where these are of images.
    images: Option<ImageTokens>,
}

/// Tokens of images, whose embeddings are features.
#[derive(Clone, Debug)]
struct ImageTokens {
    /// `[image tokens, hidden_size]`
    features: Tensor<2>,
    /// What the first layers add to them.
    later: Arc<AddedLater>,
    /// Where the embedding of every token is: among those of all tokens, and behind them the features, `[tokens]`.
    rows: Tensor<1, Int>,
    /// 0 at tokens of images, else 1, `[tokens, 1]`.
    is_text: Tensor<2>,
}

/// What a decoder sees of tokens.
#[derive(Debug)]
pub struct Embedded {
    /// Hidden states, `[tokens, hidden_size]`: embeddings, then what the blocks so far make of them. Of several residual streams, all
    /// side by side.
    pub x: Tensor<2>,
    /// Positions, what sees what, and what else every block is given.
    pub between_blocks: BetweenBlocks,
}

/// What makes the layers' own embeddings of the tokens.
#[derive(Clone, Debug)]
pub(super) struct LayerInputWeights {
    /// `[vocab_size, num_layers * width]`
    pub(super) table: Tensor<2>,
    /// Of the embeddings of the tokens, `[num_layers * width, hidden_size]`.
    pub(super) projection: Weight,
    /// Of what the projection makes for a layer, `[width]`.
    pub(super) norm: Tensor<1>,
}

impl Tokens {
    /// Tokens in `num_rows` rows, with their positions in `documents` (start, length), each of which continues its own of
    /// `prefixes`, if any does: see [`Layout::with_prefixes`]. `continued`: what comes before tokens in their texts, in order.
    ///
    /// # Panics
    /// Where tokens are of images whose [features](Model::with_features) are not there, or cannot be read any more.
    #[must_use]
    pub fn new(
        model: &Model,
        ids: &[u32],
        num_rows: usize,
        documents: Vec<(usize, usize)>,
        positions: Vec<u32>,
        (prefixes, continued): (&[Range<usize>], &[Continued<'_>]),
    ) -> Self {
        let (positions, tables) = match model.three_positions(ids, &positions, continued) {
            // A row of the tables for each token.
            Some(three) => ((0..).take(positions.len()).collect(), model.config.rotary_tables_of(&three)),
            None => {
                let longest = positions.iter().max().map_or(0, |&last| last as usize + 1);
                (positions, model.rotary_tables(longest))
            }
        };
        let layout = Layout::new(num_rows, documents, positions, tables).with_prefixes(prefixes);
        let layout = layout.with_blocks(model.image_blocks(ids));
        let images = ids.iter().any(|id| is_of_image(*id)).then(|| ImageTokens::new(model, ids));
        let table_id = model.features.as_ref().map_or(0, |features| features.table_id());
        let in_vocabulary = |id: &u32| if is_of_image(*id) { table_id } else { *id };
        let ids: Vec<u32> = ids.iter().map(in_vocabulary).collect();
        Self { ids: model.token_ids(&ids), layout: Arc::new(layout), images }
    }
}

impl ImageTokens {
    fn new(model: &Model, ids: &[u32]) -> Self {
        let Some(features) = &model.features else { panic!("token {FIRST_IMAGE_ID} is of an image without features") };
        let of_images: Vec<u32> = ids.iter().copied().filter(|id| is_of_image(*id)).collect();
        let values = features.read(&of_images);
        let values = values.unwrap_or_else(|error| panic!("the features of an image cannot be read any more: {error}"));
        let mut next = ids.len();
        let row = |(at, id): (usize, &u32)| {
            let row = if is_of_image(*id) { next } else { at };
            next += usize::from(is_of_image(*id));
            u32::try_from(row).unwrap_or(u32::MAX)
        };
        let rows: Vec<u32> = ids.iter().enumerate().map(row).collect();
        let is_text = ids.iter().map(|id| if is_of_image(*id) { 0.0 } else { 1.0 }).collect();
        let places: Vec<u32> = (0..).zip(ids).filter(|(_, id)| is_of_image(**id)).map(|(at, _)| at).collect();
        let (hidden_size, width) = (model.config.hidden_size, features.width());
        let parts = (0..width / hidden_size).map(|part| {
            let of_token = values.chunks_exact(width).flat_map(|row| &row[part * hidden_size..][..hidden_size]);
            let part = host::tensor(of_token.copied().collect(), [places.len(), hidden_size], &model.device());
            part.cast(model.compute)
        });
        let mut parts: Vec<Tensor<2>> = parts.collect();
        Self {
            features: parts.remove(0),
            later: Arc::new(AddedLater { places: model.token_ids(&places), parts }),
            rows: model.token_ids(&rows),
            is_text: host::tensor(is_text, [ids.len(), 1], &model.device()),
        }
    }

    /// The embeddings `x` of all tokens with features in place of those of images.
    fn in_place(&self, x: Tensor<2>) -> Tensor<2> {
        Tensor::cat(vec![x, self.features.clone()], 0).select(0, self.rows.clone())
    }
}

impl Embedded {
    /// Goes through the block of a layer, without dropout; nothing is kept. `watch` sees inputs of its linear layers.
    pub fn through(
        &mut self,
        model: &Model,
        (layer, block): (usize, &Block),
        adapters: &AdapterSet,
        watch: Option<&Watch>,
    ) {
        let block = &*model.with_own_norms(layer, block, adapters);
        let context = self.between_blocks.context(model.place(), &model.config, layer, &adapters.blocks[layer], None);
        let context = BlockContext { watch, ..context };
        let activations = block.activations(self.x.clone(), &context);
        let y = block.output(&activations, &context);
        self.x = self.between_blocks.added(layer, y);
        self.between_blocks.keep(&model.config, layer, &activations);
    }
}

impl Model {
    /// What the first block sees of tokens, with what adapters have in place of the model's embeddings, and noise on them.
    #[must_use]
    pub fn embed(&self, tokens: &Tokens, adapters: &AdapterSet, noise: Option<Noise>) -> Embedded {
        let x = self.embeddings(tokens.ids.clone(), adapters);
        let x = match noise {
            Some(noise) => with_noise(&x, noise),
            None => x,
        };
        self.embedded(self.place, tokens, x)
    }

    /// The same at a place, with adapters by rows of tokens.
    #[must_use]
    pub fn embed_by_rows(&self, place: Place, tokens: &Tokens, by_rows: Vec<(Range<usize>, &AdapterSet)>) -> Embedded {
        let of_rows = |(rows, adapters): (Range<usize>, _)| self.embeddings(tokens.ids.clone().slice([rows]), adapters);
        self.embedded(place, tokens, Tensor::cat(by_rows.into_iter().map(of_rows).collect(), 0))
    }

    fn embedded(&self, place: Place, tokens: &Tokens, x: Tensor<2>) -> Embedded {
        let x = if let Some(images) = &tokens.images { images.in_place(x) } else { x };
        let of_layers = |weights| self.layer_inputs_of(place, weights, tokens.ids.clone(), &x);
        let layer_inputs = self.layer_inputs.as_ref().map(of_layers).unwrap_or_default();
        let later = tokens.images.as_ref().map(|images| Arc::clone(&images.later));
        let between_blocks = BetweenBlocks::new(Arc::clone(&tokens.layout), layer_inputs, later);
        Embedded { x: self.first_streams(x), between_blocks }
    }

    /// The embeddings of token ids, with what adapters have in place of the model's, `[tokens, hidden_size]`.
    fn embeddings(&self, ids: Tensor<1, Int>, adapters: &AdapterSet) -> Tensor<2> {
        let num_tokens = ids.dims()[0];
        let embed = || {
            let own = adapters.full.get(FullTensor::Embedding).or_else(|| adapters.full.get(FullTensor::Tied));
            let x = match own {
                Some(own) => own.clone().select(0, ids.clone()).cast(self.rounding_dtype()),
                None => self.embed_tokens.clone().select(0, ids.clone()),
            };
            let x = x.cast(self.compute);
            let x = if let Some(scale) = self.embedding_scale { x * scale } else { x };
            if self.config.family().is_muse() {
                let ones = Tensor::ones([x.dims()[1]], (&x.device(), DType::F32));
                return rms_norm(self.place, &x, &ones, self.config.rms_norm_eps).0;
            }
            match adapters.full.tokens() {
                Some(rows) => rows.embedded(ids, x, self.embedding_scale, self.rounding_dtype()),
                None => x,
            }
        };
        let bytes = profile::count(2 * num_tokens * self.config.hidden_size * self.compute.size());
        profile::measure("embedding", || Cost { bytes, ..Cost::default() }, embed)
    }

    /// The gradient of what adapters have in place of embeddings, from that of the embeddings, in `f32`; `None` where they have none.
    #[must_use]
    pub fn embed_backward(
        &self,
        tokens: Tokens,
        adapters: &AdapterSet,
        dx: Tensor<2>,
    ) -> Option<(FullTensor, Tensor<2>)> {
        let (scale, ids) = (self.embedding_scale, tokens.ids);
        let dx =
            if let Some(images) = &tokens.images { dx.clone() * images.is_text.clone().cast(dx.dtype()) } else { dx };
        if let Some(rows) = adapters.full.tokens() {
            return Some((FullTensor::Tokens, rows.embedded_backward(ids, dx, scale, self.place.f32_products())));
        }
        let (full, own) = adapters.full.iter().find(|(full, _)| full.embeds())?;
        let work = || {
            let dx = dx.cast(DType::F32);
            let dx = if let Some(scale) = scale { dx * scale } else { dx };
            own.zeros_like().select_assign(0, ids, dx, IndexingUpdateOp::Add)
        };
        let bytes = profile::bytes(own);
        Some((full, profile::measure("embedding_backward", || Cost { bytes, ..Cost::default() }, work)))
    }

    /// By layer, `[tokens, width]`.
    #[expect(clippy::cast_precision_loss, reason = "widths")]
    fn layer_inputs_of(
        &self,
        place: Place,
        weights: &LayerInputWeights,
        ids: Tensor<1, Int>,
        x: &Tensor<2>,
    ) -> Vec<Tensor<2>> {
        let ([tokens, hidden], [width]) = (x.dims(), weights.norm.dims());
        let scale = rounded((width as f64).sqrt(), self.rounding_dtype());
        let rows = weights.table.dims()[0];
        let ids = if rows < self.config.vocab_size {
            // Tokens of images and sound, which Gemma 3n's table has not, have its first row.
            ids.clone().mask_fill(ids.greater_equal_elem(i64::try_from(rows).unwrap_or(i64::MAX)), 0)
        } else {
            ids
        };
        let own = weights.table.clone().select(0, ids).cast(self.compute) * scale;
        let projected = linear(place, x, &weights.projection, None, None).0 * (hidden as f64).sqrt().recip();
        let num_layers = self.config.num_layers();
        let in_rows = |x: Tensor<2>| x.reshape([tokens * num_layers, width]);
        let (normed, _) = rms_norm(place, &in_rows(projected), &weights.norm, self.config.rms_norm_eps);
        let all = (normed + in_rows(own)) * FRAC_1_SQRT_2;
        let all = all.reshape([tokens, num_layers * width]);
        // Copies: views of one tensor have gaps between their rows.
        let of_layer = |layer: usize| {
            let part = all.clone().narrow(1, layer * width, width);
            part.zeros_like().slice_assign([0..tokens, 0..width], part)
        };
        (0..num_layers).map(of_layer).collect()
    }
}

/// A number as `dtype` has it.
#[expect(clippy::cast_possible_truncation, reason = "the nearest number in f32")]
pub(super) fn rounded(number: f64, dtype: DType) -> f64 {
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
