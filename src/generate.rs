//! Text generation: the model continues an encoded prompt token by token, and the text is passed on as it is made.

pub(crate) mod calls;
mod grammar;
mod logprobs;
mod lookup;
mod together;
mod writing;

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

use crate::data::encode::taken_out;
use crate::data::formats::{content_of_prompt, conversation_of_row};
use crate::data::template::{ChatTemplate, Stops, TemplateError};
use crate::data::tokenizer::{Tokenizer, TokenizerError};
use crate::images::{Images, is_of_image};
use crate::lora::AdapterSet;
use crate::model::Model;
use crate::model::decode::Sequence;

pub use grammar::{Grammar, GrammarError, Grammars, json_of, quoted};
pub use logprobs::Logprobs;
pub use together::{NewText, ShownToken, TextBatch, TextRequest};

/// Length of the texts that are sampled at evaluations, in tokens.
const SAMPLE_TOKENS: usize = 96;

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
    /// Tokens are drawn only from those at least this share as likely as the most likely one (Nguyen et al., 2024); in
    /// [0, 1], absent: all.
    pub min_p: Option<f64>,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new_tokens: 256, temperature: 0.0, top_p: 1.0, top_k: None, min_p: None, seed: 0 }
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
    /// A message, an image or a tool that templates do not get.
    #[error("{0}")]
    Conversation(String),
    /// An image that cannot be seen.
    #[error("an image {0}")]
    Image(String),
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
    /// The model wrote a token that ends a text or a turn, or one of the strings at which the caller wanted to stop.
    EndOfText,
    /// `max_new_tokens` were written.
    MaxNewTokens,
    /// The text has reached the model's `max_position_embeddings`.
    MaxPositions,
    /// The caller stopped it.
    Stopped,
    /// The logits were not finite numbers.
    NonFiniteLogits,
    /// What its grammar allows next could not be computed.
    OutOfGrammar,
}

impl Ending {
    /// OpenAI's word for it; `None` where the text is no result.
    #[must_use]
    pub fn finish_reason(self) -> Option<&'static str> {
        match self {
            Self::EndOfText | Self::Stopped => Some("stop"),
            Self::MaxNewTokens | Self::MaxPositions => Some("length"),
            Self::NonFiniteLogits | Self::OutOfGrammar => None,
        }
    }
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
    /// Tokens behind which others were drawn within `decode_seconds`.
    pub num_decoded: usize,
}

impl Generated {
    /// Tokens per second after the prompt; `None` where no token was computed after it.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.num_decoded > 0).then(|| self.num_decoded as f64 / self.decode_seconds)
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
    /// Where texts end.
    pub stops: &'a Stops,
}

impl Generator<'_> {
    /// Continues `prompt_ids`. `on_text` gets the text of every token as it is made (empty while a character is
    /// incomplete) and can stop the generation. Dropout is off.
    ///
    /// # Errors
    /// A prompt without tokens, with tokens that the model does not have, or longer than `max_position_embeddings`.
    pub fn generate(
        &self,
        prompt_ids: &[u32],
        options: &GenerateOptions,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        self.go_on(&mut Sequence::new(self.model), prompt_ids, options, on_text)
    }

    /// [`generate`](Self::generate) where the model has seen a text already, of these adapters: what the prompt shares
    /// with it is not computed again. Afterwards it has seen the prompt and what it wrote.
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate).
    pub fn go_on(
        &self,
        sequence: &mut Sequence,
        prompt_ids: &[u32],
        options: &GenerateOptions,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        let mut batch = TextBatch::new(self.model, self.tokenizer).of_turns();
        let request = TextRequest::new(prompt_ids.to_vec(), self.adapters, *options, self.stops);
        let seen = std::mem::replace(sequence, Sequence::new(self.model));
        let (mut token_ids, mut text, mut ending) = (Vec::new(), String::new(), Ending::Stopped);
        let mut take = |_, new: NewText| {
            token_ids.extend(new.token);
            text.push_str(&new.text);
            let then = on_text(&new.text);
            ending = new.ending.filter(|_| then.is_continue()).unwrap_or(Ending::Stopped);
            then
        };
        let start = Instant::now();
        batch.go_on(0, request, Some(seen), &mut take)?;
        let prompt_seconds = start.elapsed().as_secs_f64();
        let decode_start = Instant::now();
        while !batch.is_empty() {
            batch.step(&mut take)?;
        }
        let decode_seconds = decode_start.elapsed().as_secs_f64();
        batch.take_ended().into_iter().for_each(|(_, seen)| *sequence = seen);
        let num_decoded = sequence.num_tokens() - prompt_ids.len();
        Ok(Generated { token_ids, text, ending, prompt_seconds, decode_seconds, num_decoded })
    }

    /// Continues each prompt greedily by a few sentences: the samples that a run shows at its evaluations. The same
    /// model gives the same texts. `None` where `stop` returns true before the end.
    ///
    /// With `template`, a prompt is a user's turn and the text is the answer; without, the prompt itself is continued.
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate), and those of the tokenizer and the template.
    pub fn samples(
        &self,
        prompts: &[String],
        (template, images): (Option<&ChatTemplate>, Option<&Images>),
        stop: impl Fn() -> bool,
    ) -> Result<Option<Vec<String>>, GenerateError> {
        let options = GenerateOptions { max_new_tokens: SAMPLE_TOKENS, ..GenerateOptions::default() };
        let mut texts = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let prompt_ids = encode_sample(self.tokenizer, (template, images), prompt)?;
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

/// Token ids of a prompt of samples, which may show images to a model that sees.
///
/// # Errors
/// Those of [`encode_prompt`] and [`encode_messages`].
pub(crate) fn encode_sample(
    tokenizer: &Tokenizer,
    (template, images): (Option<&ChatTemplate>, Option<&Images>),
    prompt: &str,
) -> Result<Vec<u32>, GenerateError> {
    let (Some(template), Some(images)) = (template, images) else {
        return encode_prompt(tokenizer, template, None, prompt);
    };
    let asked = json!({"role": "user", "content": content_of_prompt(prompt)});
    encode_messages(tokenizer, (template, Some(images)), &[asked], None)
}

/// Refuses a prompt that the model cannot continue.
pub(crate) fn check(model: &Model, prompt_ids: &[u32]) -> Result<(), GenerateError> {
    let (num_tokens, config) = (prompt_ids.len(), &model.config);
    let (vocab_size, max_position_embeddings) = (config.vocab_size, config.max_position_embeddings);
    if prompt_ids.is_empty() {
        return Err(GenerateError::EmptyPrompt);
    }
    if num_tokens > max_position_embeddings {
        return Err(GenerateError::PromptTooLong { num_tokens, max_position_embeddings });
    }
    match prompt_ids.iter().find(|&&id| id as usize >= vocab_size && !is_of_image(id)) {
        Some(&id) => Err(GenerateError::UnknownToken { id, vocab_size }),
        None => Ok(()),
    }
}

/// Whether the text has used all positions that the model was made for.
fn is_full(model: &Model, sequence: &Sequence) -> bool {
    sequence.num_tokens() >= model.config.max_position_embeddings
}

/// Token ids of a prompt. With `template`: a conversation of `system` and a user's turn, up to where the answer starts.
/// Without: the plain text, after BOS where the tokenizer adds one.
///
/// # Errors
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
    encode_messages(tokenizer, (template, None), &[json!({"role": "user", "content": prompt})], system)
}

/// Token ids of a conversation, up to where the next answer starts. Roles, parts and calls are read as in training; `system`
/// is the system message of conversations without one, and `images` reads those of a model that sees.
///
/// # Errors
/// A message that training does not read either; what leaves no trace in the template's text; errors of tokenizer and template.
pub fn encode_messages(
    tokenizer: &Tokenizer,
    (template, images): (&ChatTemplate, Option<&Images>),
    messages: &[Value],
    system: Option<&str>,
) -> Result<Vec<u32>, GenerateError> {
    encode_row(
        tokenizer,
        (template, images.map(|images| (images, Path::new("")))),
        &json!({"messages": messages}),
        system,
    )
}

/// The same of a row with `messages`, and images beside them whose paths start in a folder.
pub(crate) fn encode_row(
    tokenizer: &Tokenizer,
    (template, seen): (&ChatTemplate, Option<(&Images, &Path)>),
    row: &Value,
    system: Option<&str>,
) -> Result<Vec<u32>, GenerateError> {
    let wrong = |error: &dyn std::fmt::Display| GenerateError::Conversation(error.to_string());
    let images = seen.map(|(images, _)| images);
    let read = conversation_of_row(row, system, (template, seen.map(|(_, folder)| folder.to_owned())));
    let (messages, tools) = read.map_err(|error| wrong(&error))?;
    let (messages, in_text) = taken_out(images, &messages).map_err(|error| wrong(&error))?;
    let text = template.render_prompt(&messages, tools.as_ref())?;
    // The template writes BOS.
    in_text.prompt_ids(images, tokenizer, text).map_err(|error| wrong(&error))
}

#[cfg(test)]
mod tests;
