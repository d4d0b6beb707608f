//! Decodes token ids that arrive one at a time.

use super::{Tokenizer, TokenizerError};

/// Decodes ids that arrive one at a time, and returns text only in whole characters.
///
/// A character may be spread over several tokens, and a decoder may treat the first token of a sequence differently (it
/// drops a leading space). So each call decodes the new ids together with the ids of the last returned text, and
/// removes the text that was already returned.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special_tokens: bool,
    /// Ids whose text may still change, and earlier ids that the decoder needs.
    ids: Vec<u32>,
    /// How many of `ids` have been returned as text.
    shown: usize,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, ids: Vec::new(), shown: 0 }
    }

    /// Adds an id and returns the new text, which is empty while a character is incomplete.
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

    /// Returns the rest of the text at the end: an incomplete character, as U+FFFD.
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
