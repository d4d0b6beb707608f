//! The tokenizer of a Hugging Face model folder: text to token ids and back.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::util::panics::guarded;

mod added;
mod class;
mod files;
pub mod gguf;
mod stream;

pub(crate) use files::token_ids;
use files::{Files, Templates};
pub use stream::DecodeStream;

/// Tokens that chat models write at the end of a turn. Generation stops at those that the vocabulary has, but for gpt-oss's
/// `<|end|>`.
const TURN_END_TOKENS: [&str; 5] = ["<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>"];

/// Why a tokenizer could not be opened or used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TokenizerError(String);

impl TokenizerError {
    fn of_file(path: &Path, reason: impl fmt::Display) -> Self {
        Self(format!("{}: {reason}", path.display()))
    }
}

/// A special token by text and id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its text.
    pub text: String,
    /// Its id.
    pub id: u32,
}

/// A token and the byte range of the text that it stands for.
///
/// Some tokenizers leave a token's leading space out of the range, so `start` may be a few bytes late, and equal to
/// `end` for a token made only of spaces. A token added in front has `0..0`, a token added behind has `len..len + 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Token id.
    pub id: u32,
    /// First byte of its text.
    pub start: usize,
    /// One past the last byte of its text.
    pub end: usize,
}

impl Token {
    /// A token added behind a text of `len` bytes.
    #[must_use]
    pub fn behind(id: u32, len: usize) -> Self {
        Self { id, start: len, end: len + 1 }
    }
}

/// Converts text to token ids and back, as the model folder specifies. Can be shared between threads.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    folder: PathBuf,
    bos: Option<SpecialToken>,
    eos: Option<SpecialToken>,
    pad: Option<SpecialToken>,
    unk: Option<SpecialToken>,
    /// Texts of all special tokens that have a name.
    named: BTreeMap<String, String>,
    /// Whether `encode(.., true)` starts with BOS: as `tokenizer_config.json` says, otherwise as `tokenizer.json` does.
    add_bos: bool,
    eos_ids: Vec<u32>,
    max_id: u32,
    /// Texts with a larger id are refused.
    last_row: u32,
    templates: Templates,
    digest: [u8; 32],
}

impl Tokenizer {
    /// Reads `tokenizer.json` and the small files beside it in `model_dir`: `tokenizer_config.json`,
    /// `special_tokens_map.json`, `added_tokens.json`, `chat_template.jinja`, `additional_chat_templates`,
    /// `generation_config.json`, `config.json`. Only `tokenizer.json` is required. Its truncation and padding settings are not
    /// used.
    ///
    /// Where two files differ, that counts which counts in transformers: the added tokens of `tokenizer_config.json` go before
    /// those of `tokenizer.json`, and `special_tokens_map.json` is read where that has none, before its other keys. A special
    /// token that no vocabulary has is added behind it.
    ///
    /// `model_dir` may be a GGUF file: then what is not beside it comes from its metadata.
    ///
    /// # Errors
    /// A missing `tokenizer.json`, an invalid file.
    pub fn open(model_dir: &Path) -> Result<Self, TokenizerError> {
        let files = Files::read(model_dir)?;
        let named = files.named_tokens();
        let Files { path, content, generation_config, model_config, templates, .. } = &files;
        let failed = |reason: String| TokenizerError::of_file(path, reason);
        let mut inner = read(content)
            .map_err(|reason| failed(format!("{reason}\n  hint: put the model's own tokenizer.json there")))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| failed(error.to_string()))?;

        added::add(&mut inner, &files, &named).map_err(failed)?;
        let special = |key: &str| -> Result<Option<SpecialToken>, TokenizerError> {
            let Some((path, text)) = named.get(key) else { return Ok(None) };
            let id = inner.token_to_id(text).ok_or_else(|| {
                let reason = format!("`{key}` is {text:?}, which the vocabulary of tokenizer.json does not have");
                TokenizerError::of_file(path, reason)
            })?;
            Ok(Some(SpecialToken { text: text.clone(), id }))
        };
        // Where the tokenizer's files name no BOS or EOS, use the ids of the model's config.
        let of_model = |key: &str| {
            let id = token_ids(&model_config[key]).next()?;
            inner.id_to_token(id).map(|text| SpecialToken { text, id })
        };
        let bos = special("bos_token")?.or_else(|| of_model("bos_token_id"));
        let eos = special("eos_token")?.or_else(|| of_model("eos_token_id"));
        let (pad, unk) = (special("pad_token")?, special("unk_token")?);

        let mut eos_ids: BTreeSet<u32> = eos.iter().map(|token| token.id).collect();
        eos_ids.extend(token_ids(&generation_config["eos_token_id"]));
        eos_ids.extend(token_ids(&model_config["eos_token_id"]));
        eos_ids.extend(turn_end_ids(&inner));
        let starts_with_bos = bos.as_ref().is_some_and(|bos| {
            guarded(|| inner.encode("a", true))
                .is_ok_and(|encoded| encoded.is_ok_and(|encoding| encoding.get_ids().first() == Some(&bos.id)))
        });
        let add_bos = bos.is_some() && files.config.1["add_bos_token"].as_bool().unwrap_or(starts_with_bos);

        // Templates know of none that the model's config alone names.
        let named: BTreeMap<String, String> = named.into_iter().map(|(name, (_, text))| (name, text)).collect();
        let mut digest = Sha256::new_with_prefix(content);
        digest.update(format!("{:?}", (&bos, &eos, &named, add_bos, added::described(&files))));

        Ok(Self {
            digest: digest.finalize().into(),
            max_id: inner.get_vocab(true).into_values().max().unwrap_or(0),
            last_row: u32::MAX,
            templates: templates.clone(),
            eos_ids: eos_ids.into_iter().collect(),
            inner,
            folder: model_dir.to_owned(),
            bos,
            eos,
            pad,
            unk,
            named,
            add_bos,
        })
    }

    /// For a model with so many rows in its embedding. Added tokens may have none, such as those for images of a model that is
    /// trained on texts: where a text has one, it is refused.
    ///
    /// # Errors
    /// Other tokens without a row, or the one that begins or ends texts.
    pub fn for_rows(mut self, vocab_size: usize) -> Result<Self, TokenizerError> {
        let Some(first) = u32::try_from(vocab_size).ok().filter(|first| *first <= self.max_id) else { return Ok(self) };
        let added = self.inner.get_added_tokens_decoder();
        // A vocabulary may have any ids.
        let beyond = |(_, id): &(String, u32)| *id >= first && !added.contains_key(id);
        if let Some((text, id)) = self.inner.get_vocab(false).into_iter().filter(beyond).max_by_key(|(_, id)| *id) {
            let reason = format!(
                "token {id} ({text:?}) is beyond the {vocab_size} tokens of config.json\n  \
                 hint: tokenizer.json and config.json are of different models"
            );
            return Err(TokenizerError::of_file(&self.folder, reason));
        }
        // They are put around texts.
        if let Some(token) = [&self.bos, &self.eos].into_iter().flatten().find(|token| token.id >= first) {
            let hint = format!("`lora.trainable_token_indices` = [{}] gives it one, which is trained", token.id);
            let reason = format!("the model's embedding has no row for {:?}, token {}", token.text, token.id);
            return Err(TokenizerError::of_file(&self.folder, format!("{reason}\n  hint: {hint}")));
        }
        self.last_row = first.saturating_sub(1);
        self.digest = Sha256::new_with_prefix(self.digest).chain_update(first.to_le_bytes()).finalize().into();
        Ok(self)
    }

    /// Token ids of `text`. `add_special_tokens` adds the ids that the tokenizer puts around a text (BOS), but none at which
    /// texts end, behind which nothing goes on; text from a chat template already has them. Special tokens that are spelled
    /// out in the text become their ids.
    ///
    /// # Errors
    /// A text that the tokenizer refuses, such as a character that the vocabulary cannot express, or a token without a
    /// [row](Self::for_rows).
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        Ok(self.encode_tokens(text, add_special_tokens)?.into_iter().map(|token| token.id).collect())
    }

    /// Like [`encode`](Self::encode), with the byte range of `text` that each token stands for.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_tokens(&self, text: &str, add_special_tokens: bool) -> Result<Vec<Token>, TokenizerError> {
        let refused = |reason: String| {
            let start: String = text.chars().take(60).collect();
            TokenizerError(format!("cannot tokenise {start:?}: {reason}"))
        };
        let encoding = guarded(|| self.inner.encode(text, add_special_tokens))
            .map_err(refused)?
            .map_err(|error| refused(error.to_string()))?;
        if let Some(id) = encoding.get_ids().iter().find(|id| **id > self.last_row) {
            let token = self.token_text(*id).unwrap_or_default();
            return Err(refused(format!(
                "the model's embedding has no row for {token:?}, token {id}\n  \
                 hint: `lora.trainable_token_indices` = [{id}] gives it one, which is trained"
            )));
        }
        let added = encoding.get_special_tokens_mask();
        let mut tokens: Vec<Token> = Vec::with_capacity(added.len() + 1);
        let mut in_text = false;
        for ((&id, &(start, end)), &added) in encoding.get_ids().iter().zip(encoding.get_offsets()).zip(added) {
            in_text |= added == 0;
            tokens.push(match (added, in_text) {
                (0, _) => Token { id, start, end },
                (_, false) => Token { id, start: 0, end: 0 },
                (_, true) => Token::behind(id, text.len()),
            });
        }
        // The post-processor of some tokenizers (`add_eos_token`) ends every text.
        while let [.., _, last] = &tokens[..]
            && added.get(tokens.len() - 1) == Some(&1)
            && self.eos_ids.contains(&last.id)
        {
            tokens.pop();
        }
        if let Some(bos) = self.bos.as_ref().filter(|_| add_special_tokens) {
            let has_bos = added.first() == Some(&1) && tokens.first().is_some_and(|token| token.id == bos.id);
            match (self.add_bos, has_bos) {
                (true, false) => tokens.insert(0, Token { id: bos.id, start: 0, end: 0 }),
                (false, true) => drop(tokens.remove(0)),
                _ => {}
            }
        }
        Ok(tokens)
    }

    /// Text of token ids.
    ///
    /// # Errors
    /// When the decoder of `tokenizer.json` fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        let failed = |reason: String| TokenizerError(format!("cannot decode token ids: {reason}"));
        guarded(|| self.inner.decode(ids, skip_special_tokens))
            .map_err(failed)?
            .map_err(|error| failed(error.to_string()))
    }

    /// A decoder for ids that arrive one at a time.
    #[must_use]
    pub fn decode_stream(&self, skip_special_tokens: bool) -> DecodeStream<'_> {
        DecodeStream::new(self, skip_special_tokens)
    }

    /// The token's own spelling in the vocabulary, such as `Ġhello` or `▁hello`.
    #[must_use]
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The bytes that a token adds to a text after other words: a part of a character, for some; nothing for a special
    /// token, which texts are shown without.
    #[must_use]
    pub fn bytes_in_text(&self, id: u32) -> Vec<u8> {
        let decoded = |ids: &[u32]| self.decode(ids, true).unwrap_or_default();
        // At the start of a text, decoders drop a space.
        let word = self.inner.token_to_id("a");
        let (before, all) =
            (word.map(|word| decoded(&[word])), decoded(&word.into_iter().chain([id]).collect::<Vec<_>>()));
        let text = before.as_deref().and_then(|before| all.strip_prefix(before)).unwrap_or(&all);
        if !text.contains('\u{fffd}') {
            return text.as_bytes().to_vec();
        }
        let spelling = self.token_text(id).unwrap_or_default();
        let code = spelling.strip_prefix("<0x").and_then(|code| u8::from_str_radix(code.strip_suffix('>')?, 16).ok());
        let spelled = || spelling.chars().map(byte_of).collect();
        code.map(|byte| vec![byte]).or_else(spelled).unwrap_or_else(|| text.as_bytes().to_vec())
    }

    /// Bytes of the longest spelling of a token: no token stands for more.
    #[must_use]
    pub fn longest_token(&self) -> usize {
        self.inner.get_vocab(true).keys().map(String::len).max().unwrap_or(0)
    }

    /// Text of the tokens that are marked as special.
    #[must_use]
    pub fn special_texts(&self) -> Vec<String> {
        let added = self.inner.get_added_tokens_decoder().into_values();
        added.filter(|token| token.special).map(|token| token.content).collect()
    }

    /// The tokens that were added to the vocabulary, special or not.
    #[must_use]
    pub fn added_tokens(&self) -> Vec<SpecialToken> {
        let added = self.inner.get_added_tokens_decoder().into_iter();
        added.map(|(id, token)| SpecialToken { text: token.content, id }).collect()
    }

    /// Texts of the tokens that end a turn in a conversation: those at which generation stops, and gpt-oss's `<|end|>`.
    #[must_use]
    pub fn turn_ends(&self) -> Vec<String> {
        let stops = self.eos_ids.iter().filter_map(|id| self.token_text(*id));
        stops.chain(self.special_texts().into_iter().filter(|text| TURN_END_TOKENS.contains(&text.as_str()))).collect()
    }

    /// Token that starts a sequence.
    #[must_use]
    pub fn bos(&self) -> Option<&SpecialToken> {
        self.bos.as_ref()
    }

    /// Token that ends a sequence.
    #[must_use]
    pub fn eos(&self) -> Option<&SpecialToken> {
        self.eos.as_ref()
    }

    /// Token used for padding. Many base models have no such token.
    #[must_use]
    pub fn pad(&self) -> Option<&SpecialToken> {
        self.pad.as_ref()
    }

    /// Token for text that is not in the vocabulary.
    #[must_use]
    pub fn unk(&self) -> Option<&SpecialToken> {
        self.unk.as_ref()
    }

    /// Ids at which generation stops, ascending: EOS, the ids in `generation_config.json` and `config.json`, and the
    /// end of a turn in chat models (`<|im_end|>`, `<|eot_id|>`, ...). Answers through a template may end otherwise:
    /// [`Stops`](super::template::Stops).
    #[must_use]
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The special tokens that have a name, such as `eos_token`, by name.
    #[must_use]
    pub fn named_tokens(&self) -> &BTreeMap<String, String> {
        &self.named
    }

    /// The model's chat template: `chat_template.jinja`, else the one in `chat_template.json`, `processor_config.json` or
    /// `tokenizer_config.json`; of several, `default`.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.templates.default.as_deref()
    }

    /// The model's chat template for conversations with tools, `tool_use`, where it has one of its own.
    #[must_use]
    pub fn tool_template(&self) -> Option<&str> {
        self.templates.with_tools.as_deref()
    }

    /// Largest id that [`encode`](Self::encode) can return.
    #[must_use]
    pub fn max_id(&self) -> u32 {
        self.max_id.min(self.last_row)
    }

    /// The tokens that were added to the vocabulary: id, text, and whether they are special.
    pub fn added(&self) -> impl Iterator<Item = (u32, &str, bool)> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().iter();
        added.map(|(id, token)| (*id, token.content.as_str(), token.special))
    }

    /// Whether the token was added to the vocabulary.
    #[must_use]
    pub fn is_added(&self, id: u32) -> bool {
        self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id)
    }

    /// SHA-256 of everything that decides the ids of a text and the special tokens of a template: `tokenizer.json`, and
    /// the special tokens that the files beside it name.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }
}

/// Reads a `tokenizer.json`; otherwise why it is none.
fn read(content: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    // The library unwraps in some places on invalid JSON, and panics on other unexpected values.
    serde_json::from_slice::<added::Described>(content).map_err(|error| error.to_string())?.check()?;
    guarded(|| tokenizers::Tokenizer::from_bytes(content))
        .map_err(|panic| format!("not a tokenizer: {panic}"))?
        .map_err(|error| error.to_string())
}

/// The added tokens that end turns.
fn turn_end_ids(inner: &tokenizers::Tokenizer) -> impl Iterator<Item = u32> {
    let added = inner.get_added_tokens_decoder();
    // In answers of gpt-oss `<|end|>` ends a thought, and more follows.
    let has_return = added.values().any(|token| token.content == "<|return|>");
    let ends = move |text: &str| TURN_END_TOKENS.contains(&text) && !(has_return && text == "<|end|>");
    added.into_iter().filter(move |(_, token)| ends(&token.content)).map(|(id, _)| id)
}

/// The byte that a character stands for in the vocabularies of byte-level tokenizers, since GPT-2: printable ones for
/// themselves, the others by their number from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(character) {
        code @ 0..=0xff => u8::try_from(code).ok().filter(is_printable),
        code => (0..=u8::MAX).filter(|byte| !is_printable(byte)).nth(usize::try_from(code - 0x100).ok()?),
    }
}

#[cfg(test)]
mod tests;
