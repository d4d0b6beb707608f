//! Text generation: the model continues an encoded prompt token by token, and the text is passed on as it is made.

mod sampler;

use std::ops::ControlFlow;
use std::time::Instant;

use serde_json::json;

use crate::data::template::{ChatTemplate, TemplateError};
use crate::data::tokenizer::{DecodeStream, Tokenizer, TokenizerError};
use crate::faults;
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::model::decode::Decoder;

use sampler::Sampler;

/// Length of the texts that are sampled at evaluations, in tokens.
const SAMPLE_TOKENS: usize = 96;

/// Tokens at the end of the prompt that the decoder sees first: enough for one character and the space before it.
const DECODE_CONTEXT: usize = 8;

/// What is read from the device, to people.
const LOGITS: &str = "the logits of a token";

/// How a text is continued.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to generate, where the model does not end the text earlier.
    pub max_new_tokens: usize,
    /// Divisor of the logits; at 0 the most likely token is always taken (greedy).
    pub temperature: f64,
    /// Tokens are drawn only from the most likely ones that together reach this probability (Holtzman et al., 2020); in
    /// (0, 1], 1 for all.
    pub top_p: f64,
    /// Tokens are drawn only from this many most likely ones; absent: all.
    pub top_k: Option<usize>,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new_tokens: 256, temperature: 0.0, top_p: 1.0, top_k: None, seed: 0 }
    }
}

/// Why a text could not be continued.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The prompt cannot be tokenised.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// There is a system message, but no chat template to format it.
    #[error(
        "a system message needs a chat template, and the prompt is taken as it is\n  hint: put it into the prompt, or give --chat"
    )]
    SystemWithoutTemplate,
    /// The prompt has no tokens.
    #[error("the prompt has no tokens, and the tokenizer adds none: there is nothing to continue")]
    EmptyPrompt,
    /// The prompt is longer than the model's `max_position_embeddings`.
    #[error(
        "the prompt is {num_tokens} tokens long, and the model was made for {max_position_embeddings} positions\n  \
         hint: shorten the prompt"
    )]
    PromptTooLong {
        /// Length of the prompt, in tokens.
        num_tokens: usize,
        /// Positions of the model.
        max_position_embeddings: usize,
    },
    /// Tokenizer and model do not belong together.
    #[error(
        "the prompt has token {id}, and the model has embeddings for {vocab_size} tokens\n  hint: tokenizer.json and \
         config.json are of different models"
    )]
    UnknownToken {
        /// The token.
        id: u32,
        /// Embeddings of the model.
        vocab_size: usize,
    },
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model wrote a token that ends a text or a turn.
    EndOfText,
    /// `max_new_tokens` were written.
    MaxNewTokens,
    /// The text has reached the model's `max_position_embeddings`.
    MaxPositions,
    /// The caller stopped it.
    Stopped,
    /// The logits were not finite numbers.
    NonFiniteLogits,
}

/// What a model wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The new tokens, without the token that ended the text.
    pub token_ids: Vec<u32>,
    /// The text of these tokens, without special tokens.
    pub text: String,
    /// Why the text ended.
    pub ending: Ending,
    /// Seconds from the start to the first logits: the time for the prompt.
    pub prompt_seconds: f64,
    /// Seconds for the tokens after the first.
    pub decode_seconds: f64,
    /// Forward passes of single tokens within `decode_seconds`.
    pub num_passes: usize,
}

impl Generated {
    /// Tokens per second after the prompt; `None` where no token was computed after it.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.num_passes > 0).then(|| self.num_passes as f64 / self.decode_seconds)
    }
}

/// A model with adapters and tokenizer that generates text.
#[derive(Clone, Copy, Debug)]
pub struct Generator<'a> {
    /// The base model.
    pub model: &'a Model,
    /// Applied unmerged; use [`AdapterSet::none`] for the base model alone.
    pub adapters: &'a AdapterSet,
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
}

impl Generator<'_> {
    /// Continues `prompt_ids`. `on_text` gets the text of every token as it is made (empty while a character is
    /// incomplete) and can stop the generation. Dropout is off.
    ///
    /// # Errors
    ///
    /// A prompt without tokens, with tokens that the model does not have, or longer than `max_position_embeddings`.
    pub fn generate(
        &self,
        prompt_ids: &[u32],
        options: &GenerateOptions,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        self.check(prompt_ids)?;
        let mut sampler = Sampler::new(options);
        let mut decoder = Decoder::new(self.model, self.adapters);
        let mut stream = self.stream_after(prompt_ids)?;
        let (mut token_ids, mut text) = (Vec::new(), String::new());

        let start = Instant::now();
        let mut logits = faults::read(decoder.append(prompt_ids), LOGITS);
        let prompt_seconds = start.elapsed().as_secs_f64();
        let decode_start = Instant::now();
        let ending = loop {
            if token_ids.len() >= options.max_new_tokens {
                break Ending::MaxNewTokens;
            }
            let Some(token) = sampler.next(&logits) else { break Ending::NonFiniteLogits };
            if self.tokenizer.eos_ids().contains(&token) {
                break Ending::EndOfText;
            }
            token_ids.push(token);
            let new_text = stream.push(token)?;
            text.push_str(&new_text);
            if on_text(&new_text).is_break() {
                break Ending::Stopped;
            }
            if decoder.num_tokens() >= self.model.config.max_position_embeddings {
                break Ending::MaxPositions;
            }
            if token_ids.len() < options.max_new_tokens {
                logits = faults::read(decoder.append(&[token]), LOGITS);
            }
        };
        let decode_seconds = decode_start.elapsed().as_secs_f64();
        let rest = stream.finish()?;
        if !rest.is_empty() && ending != Ending::Stopped {
            text.push_str(&rest);
            let _ = on_text(&rest);
        }
        let num_passes = decoder.num_tokens() - prompt_ids.len();
        Ok(Generated { token_ids, text, ending, prompt_seconds, decode_seconds, num_passes })
    }

    fn check(&self, prompt_ids: &[u32]) -> Result<(), GenerateError> {
        let (num_tokens, config) = (prompt_ids.len(), &self.model.config);
        let (vocab_size, max_position_embeddings) = (config.vocab_size, config.max_position_embeddings);
        if prompt_ids.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        if num_tokens > max_position_embeddings {
            return Err(GenerateError::PromptTooLong { num_tokens, max_position_embeddings });
        }
        match prompt_ids.iter().find(|&&id| id as usize >= vocab_size) {
            Some(&id) => Err(GenerateError::UnknownToken { id, vocab_size }),
            None => Ok(()),
        }
    }

    /// A decoder that has seen the end of the prompt, so that a word after it starts with a space.
    fn stream_after(&self, prompt_ids: &[u32]) -> Result<DecodeStream<'_>, TokenizerError> {
        let mut stream = self.tokenizer.decode_stream(true);
        for &id in &prompt_ids[prompt_ids.len().saturating_sub(DECODE_CONTEXT)..] {
            let _ = stream.push(id)?;
        }
        Ok(stream)
    }

    /// Continues each prompt greedily by a few sentences: the samples that a run shows at its evaluations. The same
    /// model gives the same texts. `None` where `stop` returns true before the end.
    ///
    /// With `template`, a prompt is a user's turn and the text is the answer; without, the prompt itself is continued.
    ///
    /// # Errors
    ///
    /// Those of [`generate`](Self::generate), and those of the tokenizer and the template.
    pub fn samples(
        &self,
        prompts: &[String],
        template: Option<&ChatTemplate>,
        stop: impl Fn() -> bool,
    ) -> Result<Option<Vec<String>>, GenerateError> {
        let options = GenerateOptions { max_new_tokens: SAMPLE_TOKENS, ..GenerateOptions::default() };
        let mut texts = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let prompt_ids = encode_prompt(self.tokenizer, template, None, prompt)?;
            let on_text = |_: &str| if stop() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
            let generated = self.generate(&prompt_ids, &options, on_text)?;
            if generated.ending == Ending::Stopped {
                return Ok(None);
            }
            texts.push(generated.text);
        }
        Ok(Some(texts))
    }
}

/// Token ids of a prompt. With `template`: a conversation of `system` and a user's turn, up to where the answer starts.
/// Without: the plain text, after BOS where the tokenizer adds one.
///
/// # Errors
///
/// Errors of tokenizer and template; `system` without `template`.
pub fn encode_prompt(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    system: Option<&str>,
    prompt: &str,
) -> Result<Vec<u32>, GenerateError> {
    let Some(template) = template else {
        return match system {
            Some(_) => Err(GenerateError::SystemWithoutTemplate),
            None => Ok(tokenizer.encode(prompt, true)?),
        };
    };
    let system = system.map(|content| json!({"role": "system", "content": content}));
    let user = json!({"role": "user", "content": prompt});
    let messages: Vec<_> = system.into_iter().chain([user]).collect();
    let text = template.render(&messages, None, true)?;
    // The template has already written BOS.
    Ok(tokenizer.encode(&text, false)?)
}

#[cfg(test)]
mod tests;
