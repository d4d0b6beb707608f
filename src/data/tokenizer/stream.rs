//! Text of token ids that arrive one at a time.

use super::{Tokenizer, TokenizerError};

/// Text of ids that arrive one at a time: gives out text only in whole characters.
///
/// A character may be spread over several tokens, and a decoder may treat the first token of a sequence differently
/// (it drops a leading space). So the ids since the last whole character before this one are decoded together, and
/// what was already given out is taken off.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special_tokens: bool,
    /// Ids whose text may still change, and those before them that the decoder needs to see.
    ids: Vec<u32>,
    /// How many of `ids` have been given out.
    shown: usize,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, ids: Vec::new(), shown: 0 }
    }

    /// Adds an id; the new text, empty while a character is incomplete.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let text = self.new_text()?;
        if text.is_empty() || text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.ids.drain(..self.shown);
        self.shown = self.ids.len();
        Ok(text)
    }

    /// What is left at the end: an incomplete character, as U+FFFD.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.new_text()?;
        self.ids.clear();
        self.shown = 0;
        Ok(text)
    }

    fn new_text(&self) -> Result<String, TokenizerError> {
        let before = self.tokenizer.decode(&self.ids[..self.shown], self.skip_special_tokens)?;
        let all = self.tokenizer.decode(&self.ids, self.skip_special_tokens)?;
        Ok(all.strip_prefix(&before).unwrap_or(&all).to_owned())
    }
}
