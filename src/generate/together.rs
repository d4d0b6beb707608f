//! Several texts that are written together: each pass over the weights gives every text its next token.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::grammar::Grammar;
use super::logprobs::{Logprobs, logprobs};
use super::lookup::guess;
use super::writing::{Next, Writing};
use super::{Ending, GenerateError, GenerateOptions, check, is_full};
use crate::data::template::Stops;
use crate::data::tokenizer::Tokenizer;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::model::budget::text_bytes;
use crate::model::decode::{NextTokens, Sequence, next_logits};
use crate::ops::cpu::MOST_TEXTS;
use crate::ops::draw::{Draw, Drawn, LOGITS, draw};
use crate::util::faults;

/// A text to write.
#[derive(Clone, Debug)]
pub struct TextRequest<'a> {
    /// The tokens to continue.
    pub prompt_ids: Vec<u32>,
    /// The adapters that write the text.
    pub adapters: &'a AdapterSet,
    /// How the prompt is continued.
    pub options: GenerateOptions,
    /// The text ends at the first of these tokens.
    pub stop_ids: &'a [u32],
    /// The text ends before the first of these strings.
    pub stop: Vec<String>,
    /// Whether to give logarithms of probabilities, and of how many of the most likely tokens.
    pub top_logprobs: Option<usize>,
    /// Whether special tokens are part of the text.
    pub special_tokens: bool,
    /// What the text may become.
    pub grammar: Option<Grammar>,
}

/// What a pass has added to a text.
#[derive(Clone, Debug, PartialEq)]
pub struct NewText {
    /// Text that can be shown now; may be empty.
    pub text: String,
    /// The new token; absent where a token ended the text.
    pub token: Option<u32>,
    /// The token that ended the text, if one did.
    pub end_token: Option<u32>,
    /// Entropy in nats of what that was drawn from, at its temperature and before top-k, top-p and min-p; absent where it was the most
    /// likely one.
    pub entropy: Option<f64>,
    /// The tokens whose text ends in `text`, if logarithms of their probabilities were requested.
    pub shown: Vec<ShownToken>,
    /// Why the text has ended, if it has.
    pub ending: Option<Ending>,
}

/// A token of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct ShownToken {
    /// The token.
    pub id: u32,
    /// Its part of the text, which may end within a character.
    pub bytes: Vec<u8>,
    /// Logarithms of its probabilities.
    pub logprobs: Logprobs,
}

impl<'a> TextRequest<'a> {
    /// The text goes on until the model ends it at one of `stops`.
    #[must_use]
    pub fn new(prompt_ids: Vec<u32>, adapters: &'a AdapterSet, options: GenerateOptions, stops: &'a Stops) -> Self {
        let (stop_ids, stop, grammar) = (&stops.ids, stops.texts.clone(), None);
        Self { prompt_ids, adapters, options, stop_ids, stop, top_logprobs: None, special_tokens: false, grammar }
    }
}

/// The texts that are being written.
#[derive(Debug)]
pub struct TextBatch<'a> {
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    /// Texts of the same adapters are neighbours.
    texts: Vec<Text<'a>>,
    /// The previous prompt with the logits after it, if prompts start alike.
    before: Option<(Sequence, Vec<f32>)>,
    /// Memory that more than several may take.
    memory_bytes: Option<u64>,
    /// What the model has seen of texts that have ended, if they may go on.
    ended: Option<Vec<(u64, Sequence)>>,
}

/// Texts that are written together without asking for memory, and tokens of a pass on the CPU that take hardly longer than one.
const SEVERAL: usize = 16;
/// Texts beside which tokens are guessed: with few, a pass of some tokens more takes hardly longer.
const FEW: usize = 8;
/// Tokens that are guessed for a text, and where all of them were right.
const GUESSED: [usize; 2] = [3, 7];

#[derive(Debug)]
struct Text<'a> {
    id: u64,
    sequence: Sequence,
    adapters: &'a AdapterSet,
    writing: Writing<'a>,
    top_logprobs: Option<usize>,
    /// The tokens whose text has not been shown, if their logarithms are wanted.
    unshown: VecDeque<(u32, Logprobs)>,
    /// The token that the model sees next.
    token: u32,
    /// What its layers keep at most.
    most_bytes: usize,
    /// Tokens that are guessed beyond the next one.
    most_guessed: usize,
}

impl<'a> TextBatch<'a> {
    /// No texts.
    #[must_use]
    pub fn new(model: &'a Model, tokenizer: &'a Tokenizer) -> Self {
        Self { model, tokenizer, texts: Vec::new(), before: None, memory_bytes: None, ended: None }
    }

    /// A batch for texts that may [go on](Self::go_on) once they have ended.
    #[must_use]
    pub fn of_turns(self) -> Self {
        Self { ended: Some(Vec::new()), ..self }
    }

    /// What the model has seen of the texts that have ended since the last call, with their ids.
    pub fn take_ended(&mut self) -> Vec<(u64, Sequence)> {
        self.ended.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Up to 64 texts in place of 16, if they and one more fit into this memory when they are as long as they may become.
    #[must_use]
    pub fn within(self, memory_bytes: Option<u64>) -> Self {
        Self { memory_bytes, ..self }
    }

    /// A batch for prompts that start alike, of the same adapters: the start that a prompt shares with the previous
    /// one is not computed again, and nothing of one that is the same.
    #[must_use]
    pub fn of_equal_starts(self) -> Self {
        Self { before: Some((Sequence::new(self.model), Vec::new())), ..self }
    }

    /// Whether another text has room.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let bytes = || self.texts.iter().map(|text| text.most_bytes as u64);
        let fits = |memory| bytes().sum::<u64>() + bytes().max().unwrap_or_default() <= memory;
        self.texts.len() < MOST_TEXTS && (self.texts.len() < SEVERAL || self.memory_bytes.is_some_and(fits))
    }

    /// Whether no text is being written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Starts a text: computes its prompt and its first token. `on_text` gets `id` and what was written, here and in
    /// [`step`](Self::step), and can break the text off.
    ///
    /// # Errors
    /// A prompt that the model cannot continue.
    pub fn add(
        &mut self,
        id: u64,
        request: TextRequest<'a>,
        on_text: impl FnMut(u64, NewText) -> ControlFlow<()>,
    ) -> Result<(), GenerateError> {
        self.go_on(id, request, None, on_text)
    }

    /// The same for a text of which the model has seen a start, by the same adapters: that is not computed again.
    ///
    /// # Errors
    /// A prompt that the model cannot continue.
    pub fn go_on(
        &mut self,
        id: u64,
        request: TextRequest<'a>,
        seen: Option<Sequence>,
        mut on_text: impl FnMut(u64, NewText) -> ControlFlow<()>,
    ) -> Result<(), GenerateError> {
        let TextRequest { prompt_ids, adapters, options, stop_ids, stop, top_logprobs, special_tokens, grammar } =
            request;
        check(self.model, &prompt_ids)?;
        let most_tokens = (prompt_ids.len() + options.max_new_tokens).min(self.model.config.max_position_embeddings);
        let most_bytes = text_bytes(&self.model.config, self.model.compute.size(), most_tokens);
        let writing = Writing::new(self.tokenizer, &prompt_ids, &options, stop_ids, stop, special_tokens)?;
        let writing = writing.within(grammar);
        let shares_start = self.before.is_some() && seen.is_none();
        let (sequence, logits) = match if shares_start { self.before.take() } else { None } {
            Some(same) if same.0.has_seen(&prompt_ids) => same,
            other => {
                // In several turns texts come in any order: what one shares with another would be chance.
                let other = other.map(|(sequence, _)| sequence).filter(|_| self.ended.is_none());
                let mut sequence = seen.or(other).unwrap_or_else(|| Sequence::new(self.model));
                let kept = sequence.keep_start_of(&prompt_ids);
                let part =
                    NextTokens { sequence: &mut sequence, adapters, token_ids: &prompt_ids[kept..], num_logits: 1 };
                let logits: Vec<f32> = faults::read(next_logits(self.model, &mut [part]), LOGITS);
                (sequence, logits)
            }
        };
        let shared = shares_start.then(|| sequence.clone());
        let (unshown, [most_guessed, _]) = (VecDeque::new(), GUESSED);
        let mut text =
            Text { id, sequence, adapters, writing, top_logprobs, unshown, token: 0, most_bytes, most_guessed };
        let next = text.writing.next(&logits, is_full(self.model, &text.sequence))?;
        let goes_on = text.take(next, &logits, &mut on_text);
        self.before = shared.map(|sequence| (sequence, logits)).or(self.before.take());
        if goes_on {
            let neighbour = self.texts.iter().rposition(|other| std::ptr::eq(other.adapters, adapters));
            self.texts.insert(neighbour.map_or(self.texts.len(), |at| at + 1), text);
        } else if let Some(ended) = &mut self.ended {
            ended.push((text.id, text.sequence));
        }
        Ok(())
    }

    /// Gives every text its next token, or some; those that have ended are gone afterwards.
    ///
    /// # Errors
    /// A token that cannot be decoded.
    pub fn step(&mut self, mut on_text: impl FnMut(u64, NewText) -> ControlFlow<()>) -> Result<(), GenerateError> {
        if self.texts.is_empty() {
            return Ok(());
        }
        let next: Vec<Vec<u32>> = self.texts.iter().map(|text| self.next_of(text)).collect();
        let mut parts = Vec::with_capacity(self.texts.len());
        for (Text { sequence, adapters, .. }, token_ids) in self.texts.iter_mut().zip(&next) {
            parts.push(NextTokens { sequence, adapters, token_ids, num_logits: token_ids.len() });
        }
        let logits = next_logits(self.model, &mut parts);
        let (drawn, logits) = self.drawn(logits, &next);
        let (mut drawn, mut logits) = (drawn.into_iter(), logits.chunks(self.model.config.vocab_size));
        let mut kept = Vec::with_capacity(self.texts.len());
        for (mut text, next) in self.texts.drain(..).zip(next) {
            let mut of_text = drawn.by_ref().take(next.len()).collect::<Vec<_>>().into_iter();
            let before = text.sequence.num_tokens() - next.len();
            let (mut num_right, mut goes_on) = (0, true);
            // A guess that was not drawn is followed by nothing.
            while goes_on && num_right < next.len() && (num_right == 0 || next[num_right] == text.token) {
                num_right += 1;
                let is_full = before + num_right >= self.model.config.max_position_embeddings;
                let drawn = of_text.next().unwrap_or(Err(Ending::NonFiniteLogits));
                let next = text.writing.take(drawn, is_full)?;
                goes_on = text.take(next, logits.next().unwrap_or_default(), &mut on_text);
            }
            if num_right < next.len() {
                text.sequence.truncate(before + num_right);
            }
            text.most_guessed = GUESSED[usize::from(num_right == next.len() && next.len() > 1)];
            if goes_on {
                kept.push(text);
            } else if let Some(ended) = &mut self.ended {
                ended.push((text.id, text.sequence));
            }
        }
        self.texts = kept;
        Ok(())
    }

    /// What the model sees next of a text: its token, and what may follow.
    fn next_of(&self, text: &Text<'_>) -> Vec<u32> {
        let seen = text.sequence.token_ids();
        let left = self.model.config.max_position_embeddings.saturating_sub(seen.len() + 1);
        let at_once = if self.model.place().is_host() { SEVERAL } else { MOST_TEXTS } / self.texts.len();
        let most = text.most_guessed.min(left).min(at_once.saturating_sub(1));
        let is_guessed = self.texts.len() <= FEW && self.only_draws() && text.sequence.can_go_back(self.model);
        let guessed = if is_guessed { guess(seen, text.token, most) } else { &[] };
        [&[text.token], guessed].concat()
    }

    /// What is drawn behind each of the tokens, and the logits, if one of the texts is more than drawn from: otherwise these stay on the
    /// device.
    fn drawn(&mut self, logits: Tensor<2>, next: &[Vec<u32>]) -> (Vec<Result<Drawn, Ending>>, Vec<f32>) {
        if self.only_draws() {
            let of_text = |(text, next): (&Text<'_>, &Vec<u32>)| {
                let first = text.writing.draw;
                (0..).take(next.len()).map(move |later| Draw { index: first.index + later, ..first })
            };
            let draws: Vec<_> = self.texts.iter().zip(next).flat_map(of_text).collect();
            let drawn = draw(self.model.place(), &logits, &draws).into_iter();
            return (drawn.map(|drawn| drawn.ok_or(Ending::NonFiniteLogits)).collect(), Vec::new());
        }
        let logits = faults::read(logits, LOGITS);
        let rows = logits.par_chunks(self.model.config.vocab_size);
        let drawn = self.texts.par_iter_mut().zip(rows).map(|(text, logits)| text.writing.choose(logits));
        (drawn.collect(), logits)
    }

    /// Whether nothing but the drawn tokens is asked of logits.
    fn only_draws(&self) -> bool {
        self.texts.iter().all(|text| text.writing.grammar.is_none() && text.top_logprobs.is_none())
    }
}

impl Text<'_> {
    /// Takes the next token; returns whether the text goes on.
    fn take(&mut self, next: Next, logits: &[f32], on_text: &mut impl FnMut(u64, NewText) -> ControlFlow<()>) -> bool {
        let Next { text, token, shown, then } = next;
        let chosen = token.zip(self.top_logprobs);
        self.unshown.extend(chosen.map(|(token, top)| (token, logprobs(logits, token, top))));
        let shown = shown.into_iter().zip(std::iter::from_fn(|| self.unshown.pop_front()));
        let shown = shown.map(|(bytes, (id, logprobs))| ShownToken { id, bytes, logprobs }).collect();
        let (end_token, entropy) = (self.writing.end_token, self.writing.entropy);
        let new = NewText { text, token, end_token, entropy, shown, ending: then.err() };
        let wants_more = on_text(self.id, new).is_continue();
        self.token = then.unwrap_or_default();
        wants_more && then.is_ok()
    }
}
