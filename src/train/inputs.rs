//! A micro-batch as a model takes it, and a model's output for one without training.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{DType, Tensor};

use crate::data::batch::{Batch, Document, RowSource};
use crate::lora::{AdapterSet, Directions};
use crate::model::context::Watch;
use crate::model::{Model, Tokens};
use crate::ops::kernels::Place;
use crate::spec::{ModelConfig, SiteId};
use crate::util::faults;

/// The score of each row of `hidden`, `[rows, hidden_size]`, by the vector `score`, `[1, hidden_size]`, in `f32`: their product,
/// as `...ForSequenceClassification` of transformers has it with one label.
pub(super) fn scores_of(hidden: &Tensor<2>, score: &Tensor<2>) -> Tensor<1> {
    (hidden.clone().cast(DType::F32) * score.clone()).sum_dim(1).squeeze_dim(1)
}

/// Tokens up to which documents share what they begin with alike; 0 where each is computed by itself.
pub(super) fn longest_sharing(place: Place, config: &ModelConfig, is_noisy: bool) -> usize {
    if place.pads_rows() || is_noisy { 0 } else { config.longest_sharing() }
}

impl Model {
    /// A micro-batch in the form that this model's operations expect: padded to equal row lengths, but for the
    /// kernels of the CPU, which compute once what documents begin with alike, but where tokens are noisy.
    #[must_use]
    pub fn arranged<'a>(&self, batch: &'a Batch, is_noisy: bool) -> Cow<'a, Batch> {
        if self.place().pads_rows() {
            return Cow::Owned(batch.padded());
        }
        batch.sharing_prefixes(longest_sharing(self.place(), &self.config, is_noisy))
    }

    /// The tokens of a micro-batch that is [`arranged`](Self::arranged).
    #[must_use]
    pub fn tokens(&self, batch: &Batch) -> Tokens {
        let documents = batch.documents.iter().map(|document| (document.start, document.len)).collect();
        let num_rows = if self.place().pads_rows() { batch.num_rows() } else { 1 };
        let before =
            |(document, prefix): (&Document, &Range<usize>)| (document.start, &batch.input_ids[prefix.clone()]);
        let continued: Vec<_> = batch.documents.iter().zip(&batch.prefixes).map(before).collect();
        let continued = (&batch.prefixes[..], &continued[..]);
        Tokens::new(self, &batch.input_ids, num_rows, documents, batch.positions(), continued)
    }

    /// What the last block makes, `[tokens, hidden_size]`, for evaluation: without dropout, and nothing is kept.
    #[must_use]
    pub fn hidden(&self, batch: &Batch, adapters: &AdapterSet) -> Tensor<2> {
        let batch = &*self.arranged(batch, false);
        let mut embedded = self.embed(&self.tokens(batch), adapters, None);
        for (layer, block) in self.walk(0..self.blocks.len()) {
            embedded.through(self, (layer, &block), adapters, None);
        }
        self.last_hidden(embedded.x)
    }

    /// Passes a micro-batch through the base as far as `directions` want to see inputs, of the tokens that are trained on.
    ///
    /// # Panics
    /// As [`faults::read`].
    pub fn show(&self, batch: &Batch, directions: &mut Directions) {
        let (Some(last), true) = (directions.last_wanted(), !batch.targets.is_empty()) else { return };
        // No documents share tokens, so that each is behind the one that predicts it.
        let batch = &*self.arranged(batch, true);
        let none = AdapterSet::none(self.blocks.len());
        let trained: Vec<u32> = batch.targets.iter().filter_map(|it| u32::try_from(it.position + 1).ok()).collect();
        let trained = self.token_ids(&trained);
        let mut embedded = self.embed(&self.tokens(batch), &none, None);
        for (layer, block) in self.walk(0..=last) {
            let watch = Watch::new(directions.wanted(layer));
            embedded.through(self, (layer, &block), &none, Some(&watch));
            let read = |(site, x): (SiteId, Tensor<2>)| {
                let x = x.select(0, trained.clone()).cast(DType::F32);
                (site, faults::read(x, "the input of a layer"))
            };
            directions.see(layer, batch.targets.len(), watch.seen().into_iter().map(read).collect());
        }
        directions.share_out();
    }

    /// The scores of the micro-batch's targets, the last tokens of texts, without dropout; `None` without a head that scores.
    #[must_use]
    pub fn scores(&self, batch: &Batch, adapters: &AdapterSet) -> Option<Vec<f32>> {
        let score = adapters.score()?;
        let batch = &*self.arranged(batch, false);
        let mut rows: Vec<u32> = batch.targets.iter().filter_map(|it| u32::try_from(it.position).ok()).collect();
        // As many rows as in training, which are rounded alike.
        rows.resize(rows.len().next_multiple_of(self.place().target_multiple()), rows.first().copied().unwrap_or(0));
        let hidden = self.hidden(batch, adapters).select(0, self.token_ids(&rows));
        let (normed, _) = self.own_norm(adapters).forward(self.place(), &hidden, self.config.rms_norm_eps);
        Some(faults::read(scores_of(&normed, score).narrow(0, 0, batch.targets.len()), "the scores"))
    }

    /// The score of a text, without dropout; `None` without a head that scores.
    #[must_use]
    pub fn score(&self, ids: &[u32], adapters: &AdapterSet) -> Option<f32> {
        let mut batch = Batch::default();
        batch.push_scored(RowSource { file: 0, row: 0 }, ids);
        batch.row_lengths.push(ids.len());
        self.scores(&batch, adapters)?.first().copied()
    }

    /// The logits of every token of the [`arranged`](Self::arranged) batch, `[tokens, vocab_size]`, in `f32`: for tests and
    /// short texts, not for training.
    #[must_use]
    pub fn logits(&self, batch: &Batch, adapters: &AdapterSet) -> Tensor<2> {
        let (hidden, norm) = (self.hidden(batch, adapters), self.own_norm(adapters));
        let (normed, _) = norm.forward(self.place(), &hidden, self.config.rms_norm_eps);
        self.own_head(adapters).head().logits(self.place(), &normed)
    }
}
