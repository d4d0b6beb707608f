//! The tokenizer of a model folder as llama.cpp reads it from a file's metadata.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::super::ExportError;
use super::file::{list, text};
use crate::data::tokenizer::Tokenizer;
use crate::data::tokenizer::gguf::{BYTE, CONTROL, NORMAL, SPLITS, UNUSED, USER_DEFINED};
use crate::schema::Problem;
use crate::spec::ModelConfig;
use crate::util::gguf::{List, Value};

/// Tokens of Gemma 4 that llama.cpp shows, as it looks for them in an answer.
const VISIBLE: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

/// The tokenizer of `folder`, with a token for every row of the embedding.
///
/// # Errors
/// A tokenizer that llama.cpp has no name for, or that has more tokens than the model.
pub(super) fn vocabulary(
    folder: &Path,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
) -> Result<Vec<(String, Value)>, ExportError> {
    let path = folder.join("tokenizer.json");
    let mut json: Json = std::fs::read(&path)
        .and_then(|content| Ok(serde_json::from_slice(&content)?))
        .map_err(ExportError::io("read", &path))?;
    // The files beside it may add more.
    let added = tokenizer.added().map(|(id, text, special)| json!({"id": id, "content": text, "special": special}));
    json["added_tokens"] = added.collect();
    let is_sentencepiece = json["model"]["byte_fallback"] == true;
    let (mut tokens, types) =
        tokens(&json, config.vocab_size, is_sentencepiece).map_err(|problem| problem.at(path.display()))?;
    let merges: Vec<String> = json["model"]["merges"].as_array().into_iter().flatten().filter_map(merge).collect();
    let mut keys = if is_sentencepiece {
        let scores = ("scores", list(List::F32(scores(&tokens, &merges))));
        // Texts begin with no space of their own there.
        let begins_with_space = json["normalizer"].to_string().contains("Prepend");
        if config.family().is_gemma4() && !begins_with_space {
            vec![("model", text("gemma4")), scores, ("merges", list(List::String(merges)))]
        } else {
            with_spaces(&mut tokens, &types);
            vec![("model", text("llama")), ("pre", text("default")), scores]
        }
    } else {
        let split = split(&json).ok_or_else(|| unknown_split(&path))?;
        vec![("model", text("gpt2")), ("pre", text(split)), ("merges", list(List::String(merges)))]
    };
    keys.extend([("tokens", list(List::String(tokens))), ("token_type", list(List::I32(types)))]);
    keys.extend(special(tokenizer));
    Ok(keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect())
}

/// Gives added tokens the spaces that stand for themselves in texts: Gemma has some for runs of spaces.
fn with_spaces(tokens: &mut [String], types: &[i32]) {
    let added = tokens.iter_mut().zip(types).filter(|(_, kind)| **kind == USER_DEFINED);
    added.for_each(|(token, _)| *token = token.replace('\u{2581}', " "));
}

/// Texts and types of the tokens, by id.
fn tokens(json: &Json, vocab_size: usize, is_sentencepiece: bool) -> Result<(Vec<String>, Vec<i32>), Problem> {
    let mut tokens: Vec<(String, i32)> = (0..vocab_size).map(|id| (format!("[PAD{id}]"), UNUSED)).collect();
    let normal = json["model"]["vocab"].as_object().into_iter().flatten().map(|(text, id)| {
        let is_byte = is_sentencepiece && text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        (text.as_str(), id, if is_byte { BYTE } else { NORMAL })
    });
    let added = json["added_tokens"].as_array().into_iter().flatten().filter_map(|token| {
        let text = token["content"].as_str()?;
        let is_shown = VISIBLE.contains(&text);
        let is_control = !is_shown && token["special"] == true || (text.starts_with("<|") && text.ends_with("|>"));
        Some((text, &token["id"], if is_control { CONTROL } else { USER_DEFINED }))
    });
    for (text, id, kind) in normal.chain(added) {
        let place = id.as_u64().and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
        match place {
            Some(place) => *place = (text.to_owned(), kind),
            // Those for images of a model that reads texts have no rows.
            None if matches!(kind, CONTROL | USER_DEFINED) => {}
            None => {
                return Err(Problem::new(format!("token {text:?} has id {id}, but the model has {vocab_size} tokens")));
            }
        }
    }
    Ok(tokens.into_iter().unzip())
}

/// A merge as `left right`; spaces within a token are written as byte-level tokenizers write them.
fn merge(merge: &Json) -> Option<String> {
    match merge.as_array() {
        None => merge.as_str().map(ToOwned::to_owned),
        Some(pair) => {
            let token = |index: usize| Some(pair.get(index)?.as_str()?.replace(' ', "\u{120}"));
            Some(format!("{} {}", token(0)?, token(1)?))
        }
    }
}

/// The earlier a token can be merged, the higher its score: llama.cpp joins the neighbours with the highest score first.
#[expect(clippy::cast_precision_loss, reason = "a vocabulary has fewer than 2^24 tokens")]
fn scores(tokens: &[String], merges: &[String]) -> Vec<f32> {
    let mut ranks = std::collections::HashMap::new();
    for merge in merges {
        let rank = ranks.len();
        ranks.entry(merge.replacen(' ', "", 1)).or_insert(rank);
    }
    tokens.iter().map(|token| -(*ranks.get(token).unwrap_or(&merges.len()) as f32)).collect()
}

/// llama.cpp's name of the way in which a byte-level tokenizer splits a text.
fn split(json: &Json) -> Option<&'static str> {
    let steps = match &json["pre_tokenizer"]["pretokenizers"] {
        Json::Array(steps) => steps.iter().map(step).collect::<Option<Vec<&str>>>()?,
        _ => vec![step(&json["pre_tokenizer"])?],
    };
    let skips = json["model"]["ignore_merges"] == true;
    let known = SPLITS.iter().find(|(_, known, known_skips)| *known == steps && *known_skips == skips);
    known.map(|(name, ..)| *name).filter(|_| json["model"]["type"] == "BPE")
}

fn step(step: &Json) -> Option<&str> {
    match step["type"].as_str()? {
        "Digits" if step["individual_digits"] == true => Some("digits"),
        "ByteLevel" if step["add_prefix_space"] == true => None,
        "ByteLevel" if step["use_regex"] == false => Some("bytes"),
        "ByteLevel" => Some("bytes of words"),
        "Split" if step["behavior"] == "Isolated" && step["invert"] == false => step["pattern"]["Regex"].as_str(),
        _ => None,
    }
}

fn unknown_split(path: &Path) -> Problem {
    let names: Vec<&str> = SPLITS.iter().map(|(name, ..)| *name).collect();
    let message =
        format!("this `pre_tokenizer` is not one of those that llama.cpp is known to have ({})", names.join(", "));
    let hint = "--adapter-only needs no tokenizer; or merge into a folder, and try llama.cpp's own converter on it";
    Problem::new(message).at(path.display()).hint(hint)
}

/// Ids of the special tokens, and what is put around a text.
fn special(tokenizer: &Tokenizer) -> Vec<(&'static str, Value)> {
    let ids = [
        ("bos_token_id", tokenizer.bos()),
        ("eos_token_id", tokenizer.eos()),
        ("unknown_token_id", tokenizer.unk()),
        ("padding_token_id", tokenizer.pad()),
    ];
    let mut keys: Vec<(&str, Value)> =
        ids.into_iter().filter_map(|(key, token)| Some((key, Value::U32(token?.id)))).collect();
    let first = |with_special: bool| tokenizer.encode("a", with_special).ok()?.first().copied();
    let adds_bos = first(true).is_some() && first(true) == tokenizer.bos().map(|bos| bos.id);
    let adds_space = first(false).and_then(|id| tokenizer.token_text(id)).is_some_and(|text| text.starts_with('▁'));
    let adds = [("add_bos_token", adds_bos), ("add_eos_token", false), ("add_space_prefix", adds_space)];
    keys.extend(adds.map(|(key, is_added)| (key, Value::Bool(is_added))));
    keys
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::tokenizer::gguf::{GPT4O, LLAMA3, QWEN2, TEKKEN};

    #[test]
    fn ways_to_split_a_text_have_llama_cpps_names_and_others_are_unknown() {
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "use_regex": use_regex, "add_prefix_space": false});
        let regex = |regex: &str| {
            let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
            json!({"type": "Sequence", "pretokenizers": [split, bytes(false)]})
        };
        let digits = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true}, bytes(true)]});
        for (pre_tokenizer, ignore_merges, expected) in [
            (bytes(true), false, Some("gpt-2")),
            (digits, false, Some("smollm")),
            (regex(LLAMA3), true, Some("llama-bpe")),
            (regex(LLAMA3), false, Some("smaug-bpe")),
            (regex(QWEN2), false, Some("qwen2")),
            (regex(TEKKEN), true, Some("tekken")),
            (regex(GPT4O), false, Some("gpt-4o")),
            (regex(GPT4O), true, Some("gpt-4o")),
            (regex(r"\w+"), false, None),
            (json!(null), false, None),
            (json!({"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}), false, None),
        ] {
            let model = json!({"type": "BPE", "ignore_merges": ignore_merges});
            let json = json!({"pre_tokenizer": pre_tokenizer, "model": model});
            assert_eq!(split(&json), expected, "{json}");
        }
    }

    #[test]
    fn every_row_of_the_embedding_has_a_token_and_its_type() {
        let mut json = json!({
            "model": {"vocab": {"<unk>": 0, "<0x0A>": 1, "a": 2, "ab": 3}},
            "added_tokens": [
                {"content": "<unk>", "id": 0, "special": true},
                {"content": "<|end|>", "id": 4, "special": false},
                {"content": "mine", "id": 5, "special": false},
            ],
        });
        let (texts, types) = tokens(&json, 7, true).unwrap();
        assert_eq!(texts, ["<unk>", "<0x0A>", "a", "ab", "<|end|>", "mine", "[PAD6]"]);
        assert_eq!(types, [CONTROL, BYTE, NORMAL, NORMAL, CONTROL, USER_DEFINED, UNUSED]);
        assert_eq!(tokens(&json, 7, false).unwrap().1[1], NORMAL);
        let mut texts = ["\u{2581}a", "\u{2581}\u{2581}"].map(str::to_owned);
        with_spaces(&mut texts, &[NORMAL, USER_DEFINED]);
        assert_eq!(texts, ["\u{2581}a", "  "]);
        json["added_tokens"][2]["id"] = json!(7);
        assert_eq!(tokens(&json, 7, true).unwrap().0[5], "[PAD5]");
        json["model"]["vocab"]["ab"] = json!(7);
        let error = tokens(&json, 7, true).unwrap_err().to_string();
        assert_eq!(error, "token \"ab\" has id 7, but the model has 7 tokens");
    }

    #[test]
    fn tokens_that_merge_first_score_highest_and_spaces_within_tokens_do_not_split_a_merge() {
        let tokens = ["x", "abc", "ab"].map(ToOwned::to_owned);
        assert_eq!(scores(&tokens, &["a b".into(), "ab c".into(), "a bc".into()]), [-3.0, -1.0, -0.0]);
        assert_eq!(merge(&json!("a b")).unwrap(), "a b");
        assert_eq!(merge(&json!(["a ", "b"])).unwrap(), "a\u{120} b");
    }
}
