//! One text in the making: its tokens are chosen, decoded, and ended.

use super::sampler::Sampler;
use super::{Ending, GenerateOptions};
use crate::data::tokenizer::{DecodeStream, Tokenizer, TokenizerError};

/// Tokens at the end of the prompt that the decoder sees first: enough for one character and the space before it.
const DECODE_CONTEXT: usize = 8;

/// A text in the making.
#[derive(Debug)]
pub(super) struct Writing<'a> {
    tokenizer: &'a Tokenizer,
    sampler: Sampler,
    stream: DecodeStream<'a>,
    max_new_tokens: usize,
    stop: Vec<String>,
    /// Text that may turn out to be the start of a string to stop at.
    held: String,
    /// The tokens so far, without the one that ended the text.
    pub(super) token_ids: Vec<u32>,
    /// The token that ended the text, if one did.
    pub(super) end_token: Option<u32>,
    /// Their text, as far as it has been passed on.
    pub(super) text: String,
}

/// What a choice of a token has given.
#[derive(Debug)]
pub(super) struct Next {
    /// Text that can be shown now; empty while a character is incomplete.
    pub(super) text: String,
    /// The token to go on with, or why the text has ended.
    pub(super) then: Result<u32, Ending>,
}

impl<'a> Writing<'a> {
    /// An empty text after a prompt, which ends at the first of `stop`.
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        prompt_ids: &[u32],
        options: &GenerateOptions,
        stop: Vec<String>,
    ) -> Result<Self, TokenizerError> {
        let mut stream = tokenizer.decode_stream(true);
        // A word after the prompt starts with a space.
        for &id in &prompt_ids[prompt_ids.len().saturating_sub(DECODE_CONTEXT)..] {
            let _ = stream.push(id)?;
        }
        Ok(Self {
            tokenizer,
            sampler: Sampler::new(options),
            stream,
            max_new_tokens: options.max_new_tokens,
            stop,
            held: String::new(),
            token_ids: Vec::new(),
            end_token: None,
            text: String::new(),
        })
    }

    /// Chooses the next token by its logits. `is_full`: there is no position for it.
    pub(super) fn next(&mut self, logits: &[f32], is_full: bool) -> Result<Next, TokenizerError> {
        let ending = match self.sampler.next(logits) {
            None => Ending::NonFiniteLogits,
            Some(token) if self.tokenizer.eos_ids().contains(&token) => {
                self.end_token = Some(token);
                Ending::EndOfText
            }
            Some(token) => {
                self.token_ids.push(token);
                let text = self.stream.push(token)?;
                self.held.push_str(&text);
                if is_full {
                    Ending::MaxPositions
                } else if self.token_ids.len() >= self.max_new_tokens {
                    Ending::MaxNewTokens
                } else {
                    let (text, is_stopped) = self.release(false);
                    return Ok(Next { text, then: if is_stopped { Err(Ending::EndOfText) } else { Ok(token) } });
                }
            }
        };
        let rest = self.stream.finish()?;
        self.held.push_str(&rest);
        let (text, is_stopped) = self.release(true);
        Ok(Next { text, then: Err(if is_stopped { Ending::EndOfText } else { ending }) })
    }

    /// The text that can be shown, and whether it ends at a string to stop at.
    fn release(&mut self, is_end: bool) -> (String, bool) {
        let stop = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        let may_start_one = |at: &usize| self.stop.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let end = match stop {
            Some(at) => at,
            None if is_end => self.held.len(),
            None => self.held.char_indices().map(|(at, _)| at).find(may_start_one).unwrap_or(self.held.len()),
        };
        let held = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, held);
        self.text.push_str(&text);
        (text, stop.is_some())
    }
}
