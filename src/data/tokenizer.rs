//! The tokenizer of a Hugging Face model folder: text to token ids and back.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Tokens that chat models write at the end of a turn. Where a vocabulary has one, generation stops at it.
const TURN_END_TOKENS: [&str; 5] = ["<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>"];

/// Name of the template that is used where `tokenizer_config.json` lists several.
const DEFAULT_TEMPLATE_NAME: &str = "default";

/// Why a tokenizer could not be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The folder has no `tokenizer.json`.
    #[error(
        "{}: no tokenizer.json\n  hint: a model folder needs a fast tokenizer; \
         `AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers writes one", .0.display()
    )]
    Missing(PathBuf),
    /// A file is there but cannot be read.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A named special token is not in the vocabulary.
    #[error("{}: `{key}` is {token:?}, which the vocabulary of tokenizer.json does not have", path.display())]
    UnknownToken {
        /// The file that names the token.
        path: PathBuf,
        /// The key, such as `bos_token`.
        key: &'static str,
        /// Its text.
        token: String,
    },
    /// A text could not be tokenised.
    #[error("cannot tokenise {text:?}: {reason}")]
    Encode {
        /// Start of the text.
        text: String,
        /// What the tokenizer said.
        reason: String,
    },
    /// Token ids could not be turned into text.
    #[error("cannot decode token ids: {0}")]
    Decode(String),
}

/// A special token by text and id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// As it is written in text.
    pub text: String,
    /// Its id.
    pub id: u32,
}

/// A token and the bytes of the text that it stands for.
///
/// Some tokenizers leave the space out that a token starts with, so `start` may be a few bytes late, and equal to `end`
/// for a token of spaces alone. A token that was added in front has `0..0`, one that was added behind `len..len + 1`.
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
    /// A token that was added behind a text of `len` bytes.
    #[must_use]
    pub fn behind(id: u32, len: usize) -> Self {
        Self { id, start: len, end: len + 1 }
    }
}

/// Text to token ids and back, as the model folder says. Can be shared between threads.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bos: Option<SpecialToken>,
    eos: Option<SpecialToken>,
    pad: Option<SpecialToken>,
    unk: Option<SpecialToken>,
    /// Whether `encode(.., true)` starts with BOS: what `tokenizer_config.json` says, else what `tokenizer.json` does.
    add_bos: bool,
    eos_ids: Vec<u32>,
    chat_template: Option<String>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` and the small files beside it in `model_dir`: `tokenizer_config.json`,
    /// `special_tokens_map.json`, `chat_template.jinja`, `generation_config.json`, `config.json`. All but the
    /// first may be absent. Truncation and padding settings of `tokenizer.json` are not used.
    ///
    /// # Errors
    /// A missing `tokenizer.json`, a file that is not valid, a special token that the vocabulary does not have.
    pub fn open(model_dir: &Path) -> Result<Self, TokenizerError> {
        let path = model_dir.join("tokenizer.json");
        if !path.is_file() {
            return Err(TokenizerError::Missing(model_dir.to_path_buf()));
        }
        let mut inner = tokenizers::Tokenizer::from_file(&path)
            .map_err(|error| TokenizerError::File { path: path.clone(), reason: error.to_string() })?;
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|error| TokenizerError::File { path: path.clone(), reason: error.to_string() })?;

        let config_path = model_dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or(Value::Null);
        let map_path = model_dir.join("special_tokens_map.json");
        let map = read_json(&map_path)?.unwrap_or(Value::Null);
        let special = |key: &'static str| -> Result<Option<SpecialToken>, TokenizerError> {
            for (file, path) in [(&config, &config_path), (&map, &map_path)] {
                if let Some(text) = token_text(&file[key]) {
                    return match inner.token_to_id(&text) {
                        Some(id) => Ok(Some(SpecialToken { text, id })),
                        None => Err(TokenizerError::UnknownToken { path: path.clone(), key, token: text }),
                    };
                }
            }
            Ok(None)
        };
        let generation_config = read_json(&model_dir.join("generation_config.json"))?.unwrap_or(Value::Null);
        let model_config = read_json(&model_dir.join("config.json"))?.unwrap_or(Value::Null);
        // Where the tokenizer's own files name no BOS or EOS, the model's ids stand in.
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
        let added = inner.get_added_tokens_decoder();
        eos_ids.extend(added.iter().filter(|(_, t)| TURN_END_TOKENS.contains(&t.content.as_str())).map(|(id, _)| *id));

        let starts_with_bos = bos.as_ref().is_some_and(|bos| {
            inner.encode("a", true).is_ok_and(|encoding| encoding.get_ids().first() == Some(&bos.id))
        });
        let add_bos = bos.is_some() && config["add_bos_token"].as_bool().unwrap_or(starts_with_bos);

        Ok(Self {
            chat_template: read_chat_template(model_dir, &config, &config_path)?,
            eos_ids: eos_ids.into_iter().collect(),
            inner,
            bos,
            eos,
            pad,
            unk,
            add_bos,
        })
    }

    /// Token ids of `text`. With `add_special_tokens`, the ids that the tokenizer puts around a text (BOS) are added;
    /// text that a chat template wrote already has them. Special tokens written out in the text become their ids.
    ///
    /// # Errors
    /// What the tokenizer refuses, such as a character that the vocabulary cannot express.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        Ok(self.encode_tokens(text, add_special_tokens)?.into_iter().map(|token| token.id).collect())
    }

    /// As [`encode`](Self::encode), with the bytes of `text` that each token stands for.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_tokens(&self, text: &str, add_special_tokens: bool) -> Result<Vec<Token>, TokenizerError> {
        let encoding = self.inner.encode(text, add_special_tokens).map_err(|error| TokenizerError::Encode {
            text: text.chars().take(60).collect(),
            reason: error.to_string(),
        })?;
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
        self.inner.decode(ids, skip_special_tokens).map_err(|error| TokenizerError::Decode(error.to_string()))
    }

    /// Text of ids that arrive one at a time.
    #[must_use]
    pub fn decode_stream(&self, skip_special_tokens: bool) -> DecodeStream<'_> {
        DecodeStream { tokenizer: self, skip_special_tokens, ids: Vec::new(), shown: 0 }
    }

    /// The token's own spelling in the vocabulary, such as `Ġhello` or `▁hello`.
    #[must_use]
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Id of a token by its spelling in the vocabulary.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
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

    /// Token that fills rows up. Many base models have none.
    #[must_use]
    pub fn pad(&self) -> Option<&SpecialToken> {
        self.pad.as_ref()
    }

    /// Token for what the vocabulary does not have.
    #[must_use]
    pub fn unk(&self) -> Option<&SpecialToken> {
        self.unk.as_ref()
    }

    /// Id that rows are filled up with: the padding token, else EOS, else 0. Padding is told from tokens by
    /// [`Batch::documents`](super::batch::Batch::documents), never by this id.
    #[must_use]
    pub fn pad_id(&self) -> u32 {
        self.pad.as_ref().or(self.eos.as_ref()).map_or(0, |token| token.id)
    }

    /// Ids at which generation stops, ascending: EOS, what `generation_config.json` and `config.json` name, and the
    /// end of a turn in chat models (`<|im_end|>`, `<|eot_id|>`, ...).
    #[must_use]
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The model's chat template: `chat_template.jinja`, else the one in `tokenizer_config.json`.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Number of tokens, added ones included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Largest id that can come out of [`encode`](Self::encode). A model whose `vocab_size` is not larger cannot use
    /// this tokenizer.
    #[must_use]
    pub fn max_id(&self) -> u32 {
        self.inner.get_vocab(true).into_values().max().unwrap_or(0)
    }
}

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

impl DecodeStream<'_> {
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

/// Contents of a JSON file; `None` where there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| TokenizerError::File { path: path.to_path_buf(), reason: error.to_string() })
}

/// Contents of a text file; `None` where there is no such file.
fn read_text(path: &Path) -> Result<Option<String>, TokenizerError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TokenizerError::File { path: path.to_path_buf(), reason: error.to_string() }),
    }
}

/// A special token is written as its text or as an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// Token ids are written as a number or a list of numbers.
fn token_ids(value: &Value) -> impl Iterator<Item = u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
}

/// `chat_template.jinja` goes before `tokenizer_config.json`, as in transformers. The latter has a string or a list of
/// `{name, template}`.
fn read_chat_template(dir: &Path, config: &Value, config_path: &Path) -> Result<Option<String>, TokenizerError> {
    if let Some(text) = read_text(&dir.join("chat_template.jinja"))? {
        return Ok(Some(text));
    }
    match &config["chat_template"] {
        Value::Null => Ok(None),
        Value::String(template) => Ok(Some(template.clone())),
        Value::Array(named) => {
            let template = named.iter().find(|entry| entry["name"] == DEFAULT_TEMPLATE_NAME);
            if let Some(template) = template.and_then(|entry| entry["template"].as_str()) {
                return Ok(Some(template.to_owned()));
            }
            let found: Vec<&str> = named.iter().filter_map(|entry| entry["name"].as_str()).collect();
            let reason = format!(
                "`chat_template` lists {found:?}, and none is \"{DEFAULT_TEMPLATE_NAME}\"\n  hint: write the one to \
                 use to a file and set `data.chat_template` to its path"
            );
            Err(TokenizerError::File { path: config_path.to_path_buf(), reason })
        }
        _ => Err(TokenizerError::File {
            path: config_path.to_path_buf(),
            reason: "`chat_template` must be a string or a list of {name, template}".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::fixture::{BOS, EOS, IM_END, model_folder, tokenizer};

    fn open(config: &Value, files: &[(&str, Value)]) -> Result<Tokenizer, TokenizerError> {
        let folder = model_folder(config);
        for (name, content) in files {
            let text = content.as_str().map_or_else(|| content.to_string(), str::to_owned);
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Tokenizer::open(folder.path())
    }

    #[test]
    fn special_tokens_are_read_in_every_spelling_and_from_every_file() {
        let tokenizer = open(
            &json!({"bos_token": {"content": "<s>", "lstrip": false}, "pad_token": null}),
            &[
                ("special_tokens_map.json", json!({"bos_token": "</s>", "unk_token": {"content": "!"}})),
                ("generation_config.json", json!({"eos_token_id": [7, 8]})),
                ("config.json", json!({"eos_token_id": 257, "bos_token_id": 257})),
            ],
        )
        .unwrap();
        assert_eq!(tokenizer.bos().unwrap().id, BOS);
        assert_eq!(tokenizer.unk().unwrap().text, "!");
        assert_eq!(tokenizer.eos().unwrap(), &SpecialToken { text: "</s>".into(), id: EOS });
        assert!(tokenizer.pad().is_none());
        assert_eq!(tokenizer.pad_id(), EOS);
        assert_eq!(tokenizer.eos_ids(), [7, 8, EOS, IM_END]);
    }

    #[test]
    fn a_special_token_that_does_not_exist_is_an_error() {
        let error = open(&json!({"eos_token": "<eos>"}), &[]).unwrap_err().to_string();
        assert!(
            error.ends_with("`eos_token` is \"<eos>\", which the vocabulary of tokenizer.json does not have"),
            "{error}"
        );
        let empty = tempfile::TempDir::new().unwrap();
        assert!(matches!(Tokenizer::open(empty.path()), Err(TokenizerError::Missing(_))));
    }

    #[test]
    fn bos_is_added_as_the_configuration_says_and_truncation_and_padding_are_not_used() {
        let ids = |config: Value| open(&config, &[]).unwrap().encode("abcdefgh", true).unwrap();
        assert_eq!(ids(json!({"bos_token": "<s>"})), [BOS, 260, 99, 100, 101, 102, 103, 104]);
        assert_eq!(ids(json!({"bos_token": "<s>", "add_bos_token": false})).len(), 7);
        let other = json!({"bos_token": "</s>", "add_bos_token": true});
        assert_eq!(ids(other)[..2], [EOS, BOS], "what tokenizer.json puts in front is no BOS here, so it stays");
        assert_eq!(tokenizer().encode("abcdefgh", false).unwrap().len(), 7);
    }

    #[test]
    fn tokens_know_their_bytes() {
        let tokens = tokenizer().encode_tokens("é</s>ab", true).unwrap();
        let bytes: Vec<_> = tokens.iter().map(|token| (token.id, token.start, token.end)).collect();
        // Both halves of é stand for the whole character.
        assert_eq!(bytes, [(BOS, 0, 0), (0xc3, 0, 2), (0xa9, 0, 2), (EOS, 2, 6), (260, 6, 8)]);
    }

    #[test]
    fn ids_beyond_a_models_vocabulary_can_be_seen() {
        let tokenizer = tokenizer();
        assert_eq!((tokenizer.max_id(), tokenizer.vocab_size()), (260, 261));
    }

    #[test]
    fn a_stream_gives_whole_characters() {
        let tokenizer = tokenizer();
        let text = "aé 😀 ab";
        let mut stream = tokenizer.decode_stream(true);
        let mut parts = Vec::new();
        for id in tokenizer.encode(text, true).unwrap() {
            parts.push(stream.push(id).unwrap());
        }
        assert_eq!(parts.concat(), text);
        assert_eq!(parts, ["", "a", "", "é", " ", "", "", "", "😀", " ", "ab"]);
        stream.push(0xf0).unwrap();
        assert_eq!(stream.finish().unwrap(), "\u{fffd}");
        assert_eq!(stream.finish().unwrap(), "");
    }

    #[test]
    fn the_template_file_goes_before_the_configuration() {
        let named =
            json!({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]});
        assert_eq!(open(&named, &[]).unwrap().chat_template(), Some("D"));
        let file = [("chat_template.jinja", json!("F"))];
        assert_eq!(open(&named, &file).unwrap().chat_template(), Some("F"));
        assert_eq!(open(&json!({}), &[]).unwrap().chat_template(), None);
        let error = open(&json!({"chat_template": [{"name": "rag", "template": "R"}]}), &[]).unwrap_err().to_string();
        assert!(
            error.contains("lists [\"rag\"], and none is \"default\"") && error.contains("data.chat_template"),
            "{error}"
        );
    }
}
