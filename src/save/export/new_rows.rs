//! Rows of embedding and head for tokens that were added to a model's tokenizer.

use std::path::{Path, PathBuf};

use super::{SavedAdapter, find_adapter, read_adapter};
use crate::config::LoraConfig;
use crate::data::tokenizer::Tokenizer;
use crate::spec::ModelConfig;

/// Gives the model in a folder rows for the tokens that were added to its tokenizer, if `lora` trains them: for all where it trains
/// the embedding or the head, or for those of the adapter that it starts from. The folder of that adapter, where the tokenizer
/// with the tokens is there.
pub fn grow(config: &mut ModelConfig, model: &Path, lora: &LoraConfig) -> Option<PathBuf> {
    let start = lora.start_from.as_deref().map(find_adapter);
    if let Some((folder, saved)) = start.and_then(|folder| Some((folder.clone(), read_adapter(&folder).ok()?))) {
        return saved.grow(config, model, &folder);
    }
    let trained = lora.trainable_token_indices.iter().flatten().map(|id| id + 1).max().unwrap_or(0);
    if !lora.trains_tables(config) && trained <= config.vocab_size {
        return None;
    }
    // What is wrong with it is said where rows are read.
    let tokenizer = Tokenizer::open(model).ok()?;
    let of_all = if lora.trains_tables(config) { tokenizer.max_id() as usize + 1 } else { trained };
    if of_all <= tokenizer.max_id() as usize + 1 && has_tokens(&tokenizer, config.vocab_size, of_all) {
        config.grow(of_all);
    }
    None
}

/// Whether a tokenizer has tokens that were added for the rows from `first` on: for all of them, or, where a table was made
/// longer than needed, for those before the last ones.
fn has_tokens(tokenizer: &Tokenizer, first: usize, rows: usize) -> bool {
    let end = rows.min(tokenizer.max_id() as usize + 1);
    first < end && (first..end).all(|id| u32::try_from(id).is_ok_and(|id| tokenizer.is_added(id)))
}

impl SavedAdapter {
    /// Gives the model in a folder the rows that the adapter in `folder` has, if the model's tokenizer has their tokens, or that
    /// beside the adapter. Returns `folder` where only that has them.
    pub fn grow(&self, config: &mut ModelConfig, model: &Path, folder: &Path) -> Option<PathBuf> {
        let rows = self.num_rows();
        let with_tokens = |folder: &&Path| {
            // What is wrong with it is said where rows are read.
            Tokenizer::open(folder).is_ok_and(|tokenizer| has_tokens(&tokenizer, config.vocab_size, rows))
        };
        let found = [model, folder].into_iter().filter(|_| rows > config.vocab_size).find(with_tokens)?;
        config.grow(rows);
        (found != model && config.vocab_size == rows).then(|| folder.to_owned())
    }

    /// Rows of the embedding or the head that the adapter knows of.
    fn num_rows(&self) -> usize {
        let tokens = self.config.trainable_token_indices.iter().flatten().map(|id| id + 1);
        let tables = self.weights.full.values().chain(self.weights.beside.values());
        tables.map(|values| values.num_rows).chain(tokens).max().unwrap_or(0)
    }
}
