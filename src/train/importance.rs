//! How much the inputs of linear layers weigh: the means of their squares over the tokens of rows. A quantiser that knows them
//! rounds those weights well which are multiplied by large inputs (llama.cpp's "importance matrix").

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};

use crate::data::batch::Batch;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::model::context::Watch;
use crate::spec::{Role, SiteId};
use crate::util::faults;

/// Sums over the tokens that were seen.
#[derive(Debug, Default)]
pub struct Importance {
    /// Of the squares of each input, by block and layer.
    sums: BTreeMap<(usize, SiteId), Vec<f64>>,
    num_tokens: usize,
    num_batches: usize,
}

impl Importance {
    /// Passes the texts of a micro-batch through the model with its adapters. Experts are not watched.
    ///
    /// # Panics
    /// As [`faults::read`].
    pub fn see(&mut self, model: &Model, adapters: &AdapterSet, batch: &Batch) {
        // No documents share tokens, so that each token is there.
        let batch = &*model.arranged(batch, true);
        let of_texts = batch.documents.iter().flat_map(|document| document.start..document.start + document.len);
        let tokens: Vec<u32> = of_texts.filter_map(|token| u32::try_from(token).ok()).collect();
        self.num_tokens += tokens.len();
        self.num_batches += 1;
        let tokens = model.token_ids(&tokens);
        let mut embedded = model.embed(&model.tokens(batch), adapters, None);
        for (layer, block) in model.walk(0..model.blocks.len()) {
            let sites =
                model.config.blocks[layer].sites.iter().enumerate().filter(|(_, site)| site.role == Role::Linear);
            let watch = Watch::new(sites.map(|(id, _)| id).collect());
            embedded.through(model, (layer, &block), adapters, Some(&watch));
            for (site, x) in watch.seen() {
                let x: Tensor<2> = x.select(0, tokens.clone()).cast(DType::F32);
                let squares = faults::read((x.clone() * x).sum_dim(0), "the input of a layer");
                let sums = self.sums.entry((layer, site)).or_insert_with(|| vec![0.0; squares.len()]);
                sums.iter_mut().zip(&squares).for_each(|(sum, square)| *sum += f64::from(*square));
            }
        }
    }

    /// Tokens that were seen.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Micro-batches that were seen.
    #[must_use]
    pub fn num_batches(&self) -> usize {
        self.num_batches
    }

    /// The means, by block and layer: one number for each input.
    pub fn means(&self) -> impl Iterator<Item = ((usize, SiteId), Vec<f32>)> {
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "weights of errors")]
        self.sums
            .iter()
            .map(|(place, sums)| (*place, sums.iter().map(|sum| (sum / self.num_tokens as f64) as f32).collect()))
    }
}
