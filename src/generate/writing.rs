//! One text in the making: its tokens are chosen, decoded, and ended.

use std::collections::VecDeque;

use super::grammar::Grammar;
use super::{Ending, GenerateOptions};
use crate::data::tokenizer::{DecodeStream, Tokenizer, TokenizerError};
use crate::ops::draw::{Draw, Drawn, draw_row};

/// Tokens at the end of the prompt that the decoder sees first: enough for one character and the space before it.
const DECODE_CONTEXT: usize = 8;

/// A text in the making.
#[derive(Debug)]
pub(super) struct Writing<'a> {
    tokenizer: &'a Tokenizer,
    /// The next draw.
    pub(super) draw: Draw,
    /// Entropy of what the last token was drawn from.
    pub(super) entropy: Option<f64>,
    /// What the text may become, where it is held to that.
    pub(super) grammar: Option<Grammar>,
    stream: DecodeStream<'a>,
    max_new_tokens: usize,
    stop_ids: &'a [u32],
    stop: Vec<String>,
    /// Text that may turn out to be the start of a string to stop at.
    held: String,
    /// The last tokens, whose text is not whole yet.
    unfinished: Vec<u32>,
    /// The tokens of `held`, the first of which may have begun before it.
    held_tokens: VecDeque<TokenText>,
    /// How much of the first token's text has been passed on.
    passed_on: usize,
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
    /// The new token; absent where one ended the text.
    pub(super) token: Option<u32>,
    /// For each of the next tokens whose text has now been shown whole, its bytes.
    pub(super) shown: Vec<Vec<u8>>,
    /// The token to go on with, or why the text has ended.
    pub(super) then: Result<u32, Ending>,
}

/// What a token has added to a text.
#[derive(Debug)]
struct TokenText {
    bytes: Vec<u8>,
    /// How many bytes of the text it ends; other than `bytes` where these are no text, which then has U+FFFD.
    length: usize,
}

impl<'a> Writing<'a> {
    /// An empty text after a prompt, which ends at the first of `stop_ids` and `stop`; with `special_tokens`, these are part of
    /// it.
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        prompt_ids: &[u32],
        options: &GenerateOptions,
        stop_ids: &'a [u32],
        stop: Vec<String>,
        special_tokens: bool,
    ) -> Result<Self, TokenizerError> {
        let GenerateOptions { max_new_tokens, temperature, top_p, top_k, min_p, seed } = *options;
        let mut stream = tokenizer.decode_stream(!special_tokens);
        // A word after the prompt starts with a space.
        for &id in &prompt_ids[prompt_ids.len().saturating_sub(DECODE_CONTEXT)..] {
            let _ = stream.push(id)?;
        }
        Ok(Self {
            tokenizer,
            draw: Draw { temperature, top_k, top_p, min_p, seed, index: 0 },
            entropy: None,
            grammar: None,
            stream,
            max_new_tokens,
            stop_ids,
            stop,
            held: String::new(),
            unfinished: Vec::new(),
            held_tokens: VecDeque::new(),
            passed_on: 0,
            token_ids: Vec::new(),
            end_token: None,
            text: String::new(),
        })
    }

    /// Holds the text to a grammar.
    pub(super) fn within(self, grammar: Option<Grammar>) -> Self {
        Self { grammar, ..self }
    }

    /// Chooses the next token and takes it. `is_full`: there is no position for it.
    pub(super) fn next(&mut self, logits: &[f32], is_full: bool) -> Result<Next, TokenizerError> {
        let drawn = self.choose(logits);
        self.take(drawn, is_full)
    }

    /// Takes the next token, which was drawn as [`draw`](Self::draw) says.
    pub(super) fn take(&mut self, drawn: Result<Drawn, Ending>, is_full: bool) -> Result<Next, TokenizerError> {
        let before = self.token_ids.len();
        self.draw.index += 1;
        self.entropy = drawn.ok().and_then(|drawn| drawn.entropy);
        let ending = match drawn.map(|drawn| drawn.id) {
            Err(ending) => ending,
            Ok(token) if self.stop_ids.contains(&token) => {
                self.end_token = Some(token);
                Ending::EndOfText
            }
            Ok(token) => {
                let taken = self.grammar.as_mut().map(|grammar| grammar.take(token));
                self.token_ids.push(token);
                self.unfinished.push(token);
                let text = self.stream.push(token)?;
                if !text.is_empty() {
                    self.hold(&text);
                }
                match taken {
                    Some(Err(_)) => Ending::OutOfGrammar,
                    Some(Ok(true)) => Ending::EndOfText,
                    _ if is_full => Ending::MaxPositions,
                    _ if self.token_ids.len() >= self.max_new_tokens => Ending::MaxNewTokens,
                    _ => {
                        let (text, shown, is_stopped) = self.release(false);
                        let then = if is_stopped { Err(Ending::EndOfText) } else { Ok(token) };
                        return Ok(Next { text, token: Some(token), shown, then });
                    }
                }
            }
        };
        let rest = self.stream.finish()?;
        self.hold(&rest);
        let (text, shown, is_stopped) = self.release(true);
        let token = self.token_ids.get(before).copied();
        Ok(Next { text, token, shown, then: Err(if is_stopped { Ending::EndOfText } else { ending }) })
    }

    /// Chooses the next token by its logits.
    pub(super) fn choose(&mut self, logits: &[f32]) -> Result<Drawn, Ending> {
        let drawn = match &mut self.grammar {
            None => draw_row(logits, &self.draw),
            Some(grammar) => {
                let allowed = grammar.mask(logits, self.stop_ids).map_err(|_| Ending::OutOfGrammar)?;
                draw_row(&allowed.ok_or(Ending::EndOfText)?, &self.draw)
            }
        };
        drawn.ok_or(Ending::NonFiniteLogits)
    }

    /// Takes the text that the unfinished tokens make together.
    fn hold(&mut self, text: &str) {
        self.held.push_str(text);
        let mut tokens = std::mem::take(&mut self.unfinished).into_iter();
        if tokens.len() <= 1 {
            let token = |_| TokenText { bytes: text.as_bytes().to_vec(), length: text.len() };
            self.held_tokens.extend(tokens.next().map(token));
            return;
        }
        let bytes: Vec<Vec<u8>> = tokens.map(|token| self.tokenizer.bytes_in_text(token)).collect();
        let is_text = bytes.concat() == text.as_bytes();
        let last = bytes.len() - 1;
        let length = |at: usize, bytes: &[u8]| match (is_text, at == last) {
            (true, _) => bytes.len(),
            (false, true) => text.len(),
            (false, false) => 0,
        };
        let tokens = bytes.into_iter().enumerate();
        self.held_tokens.extend(tokens.map(|(at, bytes)| TokenText { length: length(at, &bytes), bytes }));
    }

    /// The tokens of the next `length` bytes of text, where it `ends` with that of which only a part is shown.
    fn tokens_of(&mut self, length: usize, ends: bool) -> Vec<Vec<u8>> {
        let (mut shown, mut left) = (Vec::new(), self.passed_on + length);
        while let Some(token) = self.held_tokens.pop_front_if(|token| token.length <= left) {
            left -= token.length;
            shown.push(token.bytes);
        }
        self.passed_on = left;
        if ends && left > 0 {
            let cut = self.held_tokens.pop_front();
            shown.extend(cut.map(|token| token.bytes.into_iter().take(left).collect()));
        }
        shown
    }

    /// The text that can be shown, its tokens, and whether it ends at a string to stop at.
    fn release(&mut self, is_end: bool) -> (String, Vec<Vec<u8>>, bool) {
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
        let shown = self.tokens_of(text.len(), stop.is_some());
        (text, shown, stop.is_some())
    }
}
