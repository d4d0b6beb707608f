//! A micro-batch as a model takes it, and a model's output for one without training.

use std::borrow::Cow;

use burn::tensor::Tensor;

use crate::data::batch::Batch;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::model::context::BlockContext;
use crate::ops::layout::Layout;
use crate::ops::norm::rms_norm;

impl Model {
    /// A micro-batch in the form that this model's operations expect: padded to equal row lengths, but for the
    /// kernels of the CPU.
    #[must_use]
    pub fn arranged<'a>(&self, batch: &'a Batch) -> Cow<'a, Batch> {
        if self.place().pads_rows() { Cow::Owned(batch.padded()) } else { Cow::Borrowed(batch) }
    }

    /// Positions of the sequences in a micro-batch that is [`arranged`](Self::arranged).
    #[must_use]
    pub fn layout(&self, batch: &Batch) -> Layout {
        let positions = batch.positions();
        let longest = positions.iter().max().map_or(0, |&last| last as usize + 1);
        let documents = batch.documents.iter().map(|document| (document.start, document.len)).collect();
        let tables = self.rotary_tables(longest);
        let num_rows = if self.place().pads_rows() { batch.num_rows() } else { 1 };
        Layout::new(self.place(), num_rows, documents, positions, tables)
    }

    /// The output of the last block, `[tokens, hidden_size]`, for evaluation: without dropout, and nothing is kept.
    #[must_use]
    pub fn hidden(&self, batch: &Batch, adapters: &AdapterSet) -> Tensor<2> {
        let batch = &*self.arranged(batch);
        let layout = self.layout(batch);
        let ids = self.token_ids(&batch.input_ids);
        let mut x = self.embed_ids(ids.clone());
        let mut carried = self.carried(ids, &x);
        for (layer, block) in self.walk(0..self.blocks.len()) {
            let context = BlockContext::new(&self.config, &layout, &adapters.blocks[layer], None);
            let context = BlockContext { inputs: carried.inputs(&self.config, layer), ..context };
            let activations = block.activations(x, &context);
            x = block.output(&activations, &context);
            carried.keep(&self.config, layer, &activations);
        }
        x
    }

    /// The logits of every token of the [`arranged`](Self::arranged) batch, `[tokens, vocab_size]`, in `f32`: for tests and
    /// short texts, not for training.
    #[must_use]
    pub fn logits(&self, batch: &Batch, adapters: &AdapterSet) -> Tensor<2> {
        let (normed, _) = rms_norm(self.place(), &self.hidden(batch, adapters), &self.norm, self.config.rms_norm_eps);
        self.logits_of(&normed)
    }
}
