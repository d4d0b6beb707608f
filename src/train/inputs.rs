//! A micro-batch as a model takes it, and a model's output for one without training.

use std::borrow::Cow;

use burn::tensor::{DType, Int, Tensor};

use crate::data::batch::Batch;
use crate::lora::{AdapterSet, Directions};
use crate::model::block::Block;
use crate::model::context::{BlockContext, Watch};
use crate::model::{Carried, Model};
use crate::ops::kernels::Place;
use crate::ops::layout::Layout;
use crate::spec::{ModelConfig, SiteId};
use crate::util::faults;

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

    /// Positions of the sequences in a micro-batch that is [`arranged`](Self::arranged).
    #[must_use]
    pub fn layout(&self, batch: &Batch) -> Layout {
        let positions = batch.positions();
        let longest = positions.iter().max().map_or(0, |&last| last as usize + 1);
        let documents = batch.documents.iter().map(|document| (document.start, document.len)).collect();
        let tables = self.rotary_tables(longest);
        let num_rows = if self.place().pads_rows() { batch.num_rows() } else { 1 };
        Layout::new(num_rows, documents, positions, tables).with_prefixes(&batch.prefixes)
    }

    /// The output of the last block, `[tokens, hidden_size]`, for evaluation: without dropout, and nothing is kept.
    #[must_use]
    pub fn hidden(&self, batch: &Batch, adapters: &AdapterSet) -> Tensor<2> {
        let batch = &*self.arranged(batch, false);
        let layout = self.layout(batch);
        let mut passing = Passing::new(self, self.token_ids(&batch.input_ids), adapters);
        for (layer, block) in self.walk(0..self.blocks.len()) {
            passing.through(self, (layer, &block), &layout, adapters);
        }
        passing.x
    }

    /// Passes a micro-batch through the base as far as `directions` want to see inputs, of the tokens that are trained on.
    ///
    /// # Panics
    /// As [`faults::read`].
    pub fn show(&self, batch: &Batch, directions: &mut Directions) {
        let (Some(last), true) = (directions.last_wanted(), !batch.targets.is_empty()) else { return };
        // No documents share tokens, so that each is behind the one that predicts it.
        let batch = &*self.arranged(batch, true);
        let (layout, none) = (self.layout(batch), AdapterSet::none(self.blocks.len()));
        let trained: Vec<u32> = batch.targets.iter().filter_map(|it| u32::try_from(it.position + 1).ok()).collect();
        let trained = self.token_ids(&trained);
        let mut passing = Passing::new(self, self.token_ids(&batch.input_ids), &none);
        for (layer, block) in self.walk(0..=last) {
            let watch = Watch::new(directions.wanted(layer));
            passing.through_watched(self, (layer, &block), &layout, &none, Some(&watch));
            let read = |(site, x): (SiteId, Tensor<2>)| {
                let x = x.select(0, trained.clone()).cast(DType::F32);
                (site, faults::read(x, "the input of a layer"))
            };
            directions.see(layer, batch.targets.len(), watch.seen().into_iter().map(read).collect());
        }
        directions.share_out();
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

/// A forward without dropout, block by block, of which nothing is kept.
#[derive(Debug)]
pub(super) struct Passing {
    /// The last block's output, `[tokens, hidden_size]`.
    pub(super) x: Tensor<2>,
    carried: Carried,
}

impl Passing {
    /// Before the first block.
    #[must_use]
    pub(super) fn new(model: &Model, input_ids: Tensor<1, Int>, adapters: &AdapterSet) -> Self {
        let x = model.embed_ids(input_ids.clone(), adapters);
        Self { carried: model.carried(input_ids, &x), x }
    }

    /// Goes through a block.
    pub(super) fn through(
        &mut self,
        model: &Model,
        (layer, block): (usize, &Block),
        layout: &Layout,
        adapters: &AdapterSet,
    ) {
        self.through_watched(model, (layer, block), layout, adapters, None);
    }

    fn through_watched(
        &mut self,
        model: &Model,
        (layer, block): (usize, &Block),
        layout: &Layout,
        adapters: &AdapterSet,
        watch: Option<&Watch>,
    ) {
        let block = &*model.with_own_norms(layer, block, adapters);
        let context = BlockContext::new(model.place(), &model.config, layout, &adapters.blocks[layer], None);
        let context = BlockContext { inputs: self.carried.inputs(&model.config, layer), watch, ..context };
        let activations = block.activations(self.x.clone(), &context);
        self.x = block.output(&activations, &context);
        self.carried.keep(&model.config, layer, &activations);
    }
}
