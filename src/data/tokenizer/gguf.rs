//! A tokenizer from the metadata of a GGUF file, as the `tokenizer.json` that it came from.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::TokenizerError;
use crate::util::gguf::GgufFile;

/// How Llama 3 splits a text into words.
pub const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen's way, which differs in the length of numbers.
pub const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of Qwen3.5, which keeps marks with their letters.
pub const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral Nemo's.
pub const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of GPT-4o and gpt-oss.
pub const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// llama.cpp's name of a way to split a text, the steps of it in tokenizer.json, and whether a word that is a token skips
/// the merges.
pub type Split = (&'static str, &'static [&'static str], bool);

/// The known ways to split a text. In those that skip merges, a text also begins with BOS unless the file says otherwise.
pub const SPLITS: [Split; 9] = [
    ("gpt-2", &["bytes of words"], false),
    ("smollm", &["digits", "bytes of words"], false),
    ("llama-bpe", &[LLAMA3, "bytes"], true),
    ("smaug-bpe", &[LLAMA3, "bytes"], false),
    ("qwen2", &[QWEN2, "bytes"], false),
    ("qwen35", &[QWEN35, "bytes"], false),
    ("tekken", &[TEKKEN, "bytes"], true),
    ("gpt-4o", &[GPT4O, "bytes"], false),
    // Every token is what its merges make: skipping them changes nothing.
    ("gpt-4o", &[GPT4O, "bytes"], true),
];

/// Type of a token: part of the vocabulary.
pub const NORMAL: i32 = 1;
/// Stands for text that no token has.
const UNKNOWN: i32 = 2;
/// Type of a token: marks the beginning of a turn, for example.
pub const CONTROL: i32 = 3;
/// Type of a token: text that is never split.
pub const USER_DEFINED: i32 = 4;
/// Type of a token: only fills a row of the embedding.
pub const UNUSED: i32 = 5;
/// Type of a token: a byte of a character that has no token.
pub const BYTE: i32 = 6;

/// The texts of `tokenizer.json` and `tokenizer_config.json` that a file stands for.
pub(super) struct Described {
    pub(super) tokenizer: Value,
    pub(super) config: Value,
}

/// What a file's metadata says of its tokenizer.
///
/// # Errors
/// A kind of tokenizer that is not read, or a part that is missing.
pub(super) fn describe(file: &GgufFile) -> Result<Described, TokenizerError> {
    let vocabulary = Vocabulary::read(file)?;
    let (tokenizer, adds_bos) = match vocabulary.key("model") {
        Some("gpt2") => vocabulary.byte_level()?,
        Some("llama") => (vocabulary.sentencepiece()?, true),
        Some("gemma4") => (vocabulary.characters(&vocabulary.merges()?, false), true),
        other => {
            let found = other.unwrap_or("unnamed");
            return Err(
                vocabulary.refuse(&format!("`tokenizer.ggml.model` = \"{found}\", expected gpt2, llama or gemma4"))
            );
        }
    };
    Ok(Described { tokenizer, config: config(file, adds_bos) })
}

/// The `tokenizer_config.json` of a file.
pub(super) fn config(file: &GgufFile, adds_bos: bool) -> Value {
    let tokens = file.texts("tokenizer.ggml.tokens").unwrap_or_default();
    let token = |name: &str| {
        let id = file.token_id(name).ok().flatten()?;
        tokens.get(usize::try_from(id).ok()?)
    };
    json!({
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_bos_token": file.flag("tokenizer.ggml.add_bos_token").unwrap_or(adds_bos),
        "chat_template": file.text("tokenizer.chat_template"),
        "tool_template": file.text("tokenizer.chat_template.tool_use"),
    })
}

struct Vocabulary<'a> {
    file: &'a GgufFile,
    tokens: &'a [String],
    types: Vec<i64>,
}

impl<'a> Vocabulary<'a> {
    fn read(file: &'a GgufFile) -> Result<Self, TokenizerError> {
        let tokens = file.texts("tokenizer.ggml.tokens").unwrap_or_default();
        let types = file.integers("tokenizer.ggml.token_type").unwrap_or_else(|| vec![NORMAL.into(); tokens.len()]);
        let vocabulary = Self { file, tokens, types };
        if tokens.is_empty() || vocabulary.types.len() != tokens.len() {
            return Err(vocabulary.refuse("the file has no tokens, or not one type for each"));
        }
        Ok(vocabulary)
    }

    fn key(&self, name: &str) -> Option<&'a str> {
        self.file.text(&format!("tokenizer.ggml.{name}"))
    }

    fn refuse(&self, reason: &str) -> TokenizerError {
        let hint = "put the model's own tokenizer.json beside the file";
        TokenizerError::of_file(self.file.path(), format!("{reason}\n  hint: {hint}"))
    }

    /// Every token with its id and its type.
    fn used(&self) -> impl Iterator<Item = (usize, &'a str, i64)> {
        let all = self.tokens.iter().zip(&self.types).enumerate();
        all.map(|(id, (text, kind))| (id, text.as_str(), *kind)).filter(|(.., kind)| *kind != i64::from(UNUSED))
    }

    fn ids(&self) -> Map<String, Value> {
        self.used().map(|(id, text, _)| (text.to_owned(), json!(id))).collect()
    }

    /// The tokens that are found in a text before it is split.
    fn added(&self) -> Vec<Value> {
        let is_added = |kind: i64| [UNKNOWN, CONTROL, USER_DEFINED].map(i64::from).contains(&kind);
        let added = self.used().filter(|(_, text, kind)| is_added(*kind) && !text.is_empty());
        let json = |(id, text, kind): (usize, &str, i64)| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": kind != i64::from(USER_DEFINED)})
        };
        added.map(json).collect()
    }

    /// A tokenizer of bytes, and whether it begins a text with BOS where the file does not say.
    fn byte_level(&self) -> Result<(Value, bool), TokenizerError> {
        let name = self.key("pre").unwrap_or("default");
        let known = SPLITS.iter().find(|(known, ..)| *known == name);
        let Some((_, steps, skips_merges)) = known else {
            let names = SPLITS.map(|(name, ..)| name).join(", ");
            return Err(self.refuse(&format!("`tokenizer.ggml.pre` = \"{name}\", expected one of {names}")));
        };
        let merges = self.merges()?;
        let steps: Vec<Value> = steps.iter().map(|name| step(name)).collect();
        // Qwen's own tokenizers compose letters first.
        let normalizer = if name.starts_with("qwen") { json!({"type": "NFC"}) } else { Value::Null };
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added(),
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": null,
            "decoder": bytes(true),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": skips_merges, "vocab": self.ids(), "merges": merges,
            },
        });
        Ok((tokenizer, *skips_merges))
    }

    fn merges(&self) -> Result<Vec<(&'a str, &'a str)>, TokenizerError> {
        let merges = self.file.texts("tokenizer.ggml.merges").ok_or_else(|| self.refuse("the file has no merges"))?;
        Ok(merges.iter().filter_map(|merge| merge.split_once(' ')).collect())
    }

    /// A tokenizer of characters that are joined by the scores of tokens.
    fn sentencepiece(&self) -> Result<Value, TokenizerError> {
        let scores = self.file.numbers("tokenizer.ggml.scores").filter(|scores| scores.len() == self.tokens.len());
        let scores = scores.ok_or_else(|| self.refuse("the file has no scores, or not one for each token"))?;
        let merges = merges(&self.scored(scores));
        if merges.iter().all(|merge| scores[merge.id] == scores[merges[0].id]) {
            return Err(self.refuse("all tokens have the same score, so that nothing says which are joined first"));
        }
        let merges: Vec<_> = merges.into_iter().map(|merge| (merge.left, merge.right)).collect();
        Ok(self.characters(&merges, self.file.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true)))
    }

    /// A tokenizer of characters with bytes for those that have no token.
    fn characters(&self, merges: &[(&str, &str)], begins_with_space: bool) -> Value {
        let to_underline = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let to_space = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let mut normalizers = vec![to_underline];
        let mut decoders = vec![to_space, json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
        if begins_with_space {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = self.used().find(|(.., kind)| *kind == i64::from(UNKNOWN)).map(|(_, text, _)| text);
        json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added(),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": self.ids(), "merges": merges,
            },
        })
    }

    /// The tokens that text is joined to, with their scores and ids.
    fn scored(&self, scores: &[f32]) -> Vec<Scored<'a>> {
        let joined = self.used().filter(|(.., kind)| *kind == i64::from(NORMAL));
        joined.map(|(id, text, _)| Scored { text, score: scores[id], id }).collect()
    }
}

struct Scored<'a> {
    text: &'a str,
    score: f32,
    id: usize,
}

struct Merge<'a> {
    left: &'a str,
    right: &'a str,
    id: usize,
}

/// Every way to join two tokens to a third, the highest score first, as transformers derives them from `SentencePiece`.
fn merges<'a>(tokens: &[Scored<'a>]) -> Vec<Merge<'a>> {
    let ids: HashMap<&str, usize> = tokens.iter().map(|token| (token.text, token.id)).collect();
    let mut merges = Vec::new();
    for token in tokens {
        let halves = token.text.char_indices().skip(1).map(|(at, _)| token.text.split_at(at));
        let mut of_token: Vec<_> =
            halves.filter_map(|(left, right)| Some((ids.get(left)?, ids.get(right)?, left, right))).collect();
        of_token.sort();
        merges.extend(of_token.into_iter().map(|(.., left, right)| (token.score, Merge { left, right, id: token.id })));
    }
    let lengths = |merge: &Merge<'_>| (merge.left.chars().count(), merge.right.chars().count());
    merges.sort_by(|(score, merge), (other_score, other)| {
        other_score.total_cmp(score).then_with(|| lengths(other).cmp(&lengths(merge)))
    });
    merges.into_iter().map(|(_, merge)| merge).collect()
}

/// A step of a [`Split`] in tokenizer.json.
fn step(name: &str) -> Value {
    match name {
        "digits" => json!({"type": "Digits", "individual_digits": true}),
        "bytes" => bytes(false),
        "bytes of words" => bytes(true),
        regex => json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
    }
}

fn bytes(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_join_a_token_follows_its_score_and_then_the_longer_first_half() {
        let tokens = [("a", 0.0), ("b", -1.0), ("ab", -4.0), ("aa", -5.0), ("aab", -2.0), ("▁", -6.0), ("▁a", -4.0)];
        let scored = |(id, (text, score)): (usize, (&'static str, f32))| Scored { text, score, id };
        let merges = merges(&tokens.into_iter().enumerate().map(scored).collect::<Vec<_>>());
        let pairs: Vec<_> = merges.iter().map(|merge| (merge.left, merge.right)).collect();
        assert_eq!(pairs, [("aa", "b"), ("a", "ab"), ("a", "b"), ("▁", "a"), ("a", "a")]);
    }
}
