//! Rows of embedding and head for tokens that were added to a model's tokenizer.

use std::path::Path;

use super::{SavedAdapter, find_adapter, read_adapter};
use crate::config::LoraConfig;
use crate::data::tokenizer::Tokenizer;
use crate::spec::ModelConfig;

/// Gives the model in a folder rows for the tokens that were added to its tokenizer, if `lora` trains them: for all where it trains
/// the embedding or the head, or for those of the adapter that it starts from.
pub fn grow(config: &mut ModelConfig, model: &Path, lora: &LoraConfig) {
    let start = lora.start_from.as_deref().filter(|_| lora.trains_tables(config));
    let start = start.and_then(|folder| read_adapter(&find_adapter(folder)).ok());
    grow_to(config, model, lora, start.map(|saved| saved.num_rows()));
}

fn grow_to(config: &mut ModelConfig, model: &Path, lora: &LoraConfig, rows: Option<usize>) {
    let trained = lora.trainable_token_indices.iter().flatten().map(|id| id + 1).max().unwrap_or(0);
    let is_enough = |rows: usize| rows <= config.vocab_size;
    if rows.map_or_else(|| !lora.trains_tables(config) && is_enough(trained), is_enough) {
        return;
    }
    // What is wrong with it is said where rows are read.
    let Ok(tokenizer) = Tokenizer::open(model) else { return };
    let of_all = if lora.trains_tables(config) { tokenizer.max_id() as usize + 1 } else { trained };
    let rows = rows.unwrap_or(of_all);
    if (config.vocab_size..rows).all(|id| u32::try_from(id).is_ok_and(|id| tokenizer.is_added(id))) {
        config.grow(rows);
    }
}

impl SavedAdapter {
    /// Gives the model in a folder the rows that the adapter has, if its tokenizer has their tokens.
    pub fn grow(&self, config: &mut ModelConfig, model: &Path) {
        grow_to(config, model, &self.config, Some(self.num_rows()));
    }

    /// Rows of the embedding or the head that the adapter knows of.
    fn num_rows(&self) -> usize {
        let tokens = self.config.trainable_token_indices.iter().flatten().map(|id| id + 1);
        self.weights.modules.values().map(|values| values.num_rows).chain(tokens).max().unwrap_or(0)
    }
}
