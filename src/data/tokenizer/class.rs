//! Finds where transformers gives token ids that differ from those of tokenizer.json.
//!
//! For some values of `tokenizer_class`, `AutoTokenizer` of transformers 5 takes only vocabulary, merges, added tokens
//! and post-processor from tokenizer.json. The class then builds its own normalizer and pre-tokenizer.

use serde_json::{Value, json};

use super::files::{Files, read_json};
use super::{Tokenizer, added};
use crate::util::panics::guarded;

/// Texts on which tokenizers differ: spaces, digits, line ends, composed letters, scripts, special tokens.
const SAMPLES: [&str; 16] = [
    "Hello world",
    " leading and  double   spaces",
    "trailing ",
    "1234567890 3.14 2024-01-31",
    "I'm you've they'll HE'S",
    "line\nbreaks\n\n  indented\ttab\r\n",
    "naïve café cafe\u{301} Å Ａ ﬁ",
    "日本語の文章。中文，한국어",
    "🙂 👩‍👩‍👧 🇩🇪",
    "def f(x):\n    return x+1  # ok",
    "<|x|> [INST] </s> <s>",
    "हिन्दी नमस्ते",
    "a\u{a0}b\u{200b}c",
    "ﷺ ½ ²",
    "▁under ▁▁ bar",
    "https://a.b/c?d=e&f=1",
];

impl Tokenizer {
    /// A warning if transformers 5 gives other ids for some texts because of the folder's `tokenizer_class`. Reads the
    /// tokenizer again, which takes as long as opening it.
    #[must_use]
    pub fn class_warning(&self) -> Option<String> {
        let (class, rebuilt) = self.rebuilt_by_class()?;
        let differs = |sample: &&str| {
            let ids = guarded(|| rebuilt.encode(*sample, false)).ok().and_then(Result::ok);
            ids.is_none_or(|ids| self.encode(sample, false).is_ok_and(|own| own != ids.get_ids()))
        };
        let differing: Vec<&str> = SAMPLES.into_iter().filter(differs).collect();
        let example = differing.first()?;
        Some(format!(
            "transformers 5 gives other token ids to {} of {} sample texts, such as {example:?}: it follows \
             `tokenizer_class` = {class:?}, training followed tokenizer.json\n  hint: for the same ids set \
             `tokenizer_class` to \"PreTrainedTokenizerFast\" in {}",
            differing.len(),
            SAMPLES.len(),
            self.folder.join("tokenizer_config.json").display()
        ))
    }

    /// The folder's `tokenizer_class`, and the tokenizer that transformers 5 builds for it from tokenizer.json; `None`
    /// where it uses tokenizer.json unchanged. Files that can no longer be read are ignored: this is only for a
    /// warning.
    fn rebuilt_by_class(&self) -> Option<(String, tokenizers::Tokenizer)> {
        let read = |name: &str| read_json(&self.folder.join(name)).ok().flatten().unwrap_or(Value::Null);
        let (config, model_config) = (read("tokenizer_config.json"), read("config.json"));
        let class = config["tokenizer_class"].as_str().or_else(|| model_config["tokenizer_class"].as_str())?;
        // Skip repositories with code of their own, and a family for which transformers always uses tokenizer.json.
        if !config["auto_map"].is_null() || model_config["model_type"] == "mistral" {
            return None;
        }
        let mut tokenizer = read("tokenizer.json");
        let name = class.strip_suffix("Fast").unwrap_or(class);
        let is_byte_level = || tokenizer.to_string().contains("\"ByteLevel\"");
        if tokenizer["model"]["type"] != "BPE" || (name == "LlamaTokenizer" && is_byte_level()) {
            return None;
        }
        let (normalizer, pre_tokenizer, model) = parts_of_class(name, &config)?;
        (tokenizer["normalizer"], tokenizer["pre_tokenizer"]) = (normalizer, pre_tokenizer);
        (tokenizer["padding"], tokenizer["truncation"]) = (Value::Null, Value::Null);
        for (key, value) in model.as_object()? {
            tokenizer["model"][key] = value.clone();
        }
        let mut rebuilt = guarded(|| tokenizers::Tokenizer::from_bytes(tokenizer.to_string())).ok()?.ok()?;
        let files = Files::read(&self.folder).ok()?;
        added::add(&mut rebuilt, &files, &files.named_tokens()).ok()?;
        Some((class.to_owned(), rebuilt))
    }
}

/// The normalizer, the pre-tokenizer and the model's settings that a class builds.
///
/// Source: `__init__` of these classes in transformers 5.23.
fn parts_of_class(class: &str, config: &Value) -> Option<(Value, Value, Value)> {
    let add_prefix_space = config["add_prefix_space"].as_bool();
    let byte_level = |use_regex: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space.unwrap_or(false), "trim_offsets": true,
               "use_regex": use_regex})
    };
    let sequence = |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
    let nfc = json!({"type": "NFC"});
    let of_bytes = json!({"unk_token": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false});
    let of_characters = |unk_token: Value| json!({"unk_token": unk_token, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false});
    let metaspace = |is_legacy: bool| {
        let scheme = match (add_prefix_space.unwrap_or(true), is_legacy) {
            (false, _) => "never",
            (true, true) => "always",
            (true, false) => "first",
        };
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false})
    };
    Some(match class {
        "LlamaTokenizer" => (Value::Null, metaspace(config["legacy"] == true), of_characters(Value::Null)),
        "CodeLlamaTokenizer" => (Value::Null, metaspace(false), of_characters(json!("<unk>"))),
        "GemmaTokenizer" => (
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
            of_characters(json!("<unk>")),
        ),
        "GPT2Tokenizer" | "CodeGenTokenizer" => (Value::Null, byte_level(true), of_bytes),
        "GPTNeoXTokenizer" => (nfc, byte_level(true), of_bytes),
        "CohereTokenizer" => {
            (nfc, sequence(json!({"type": "Digits", "individual_digits": true}), byte_level(true)), of_bytes)
        }
        "Qwen2Tokenizer" => {
            let words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
            let split = json!({"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": false});
            (nfc, sequence(split, byte_level(false)), of_bytes)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixture::model_folder;

    /// The warning for a class after `change` to the fixture's tokenizer.json.
    fn warning(class: &str, model_type: &str, change: impl FnOnce(&mut Value)) -> Option<String> {
        let folder = model_folder(&json!({"tokenizer_class": class}));
        let path = folder.path().join("tokenizer.json");
        let mut tokenizer = read_json(&path).unwrap().unwrap();
        tokenizer["pre_tokenizer"]["use_regex"] = true.into();
        change(&mut tokenizer);
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        std::fs::write(folder.path().join("config.json"), json!({"model_type": model_type}).to_string()).unwrap();
        Tokenizer::open(folder.path()).unwrap().class_warning()
    }

    #[test]
    fn a_class_that_builds_its_own_tokenizer_is_warned_of_only_where_ids_differ() {
        let as_it_is = |_: &mut Value| {};
        for class in ["GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "LlamaTokenizer", "MyTokenizer"]
        {
            assert_eq!(warning(class, "llama", as_it_is), None, "{class}");
        }
        // The class does not build this normalizer.
        let lower_case = |tokenizer: &mut Value| tokenizer["normalizer"] = json!({"type": "Lowercase"});
        let warned = warning("GPT2TokenizerFast", "llama", lower_case).unwrap();
        assert!(
            warned.contains(
                "to 4 of 16 sample texts, such as \"Hello world\": it follows `tokenizer_class` = \"GPT2TokenizerFast\""
            ),
            "{warned}"
        );
        assert!(warned.contains("tokenizer_config.json"), "{warned}");
        assert!(warning("Qwen2Tokenizer", "llama", as_it_is).is_some_and(|warned| warned.contains("such as \"naïve")));
        for (class, model_type) in [("PreTrainedTokenizerFast", "llama"), ("GPT2Tokenizer", "mistral")] {
            assert_eq!(warning(class, model_type, lower_case), None, "{class}");
        }
    }

    #[test]
    fn llamas_class_and_a_legacy_tokenizer_json_treat_spaces_differently() {
        let legacy = |tokenizer: &mut Value| {
            let vocab = [("<s>", 256), ("</s>", 257), ("<|im_start|>", 258), ("<|im_end|>", 259), ("▁", 0), ("H", 1)];
            tokenizer["model"]["vocab"] = vocab.into_iter().map(|(token, id)| (token.to_owned(), json!(id))).collect();
            tokenizer["model"]["merges"] = json!([]);
            (tokenizer["pre_tokenizer"], tokenizer["decoder"]) = (Value::Null, Value::Null);
            tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
        };
        let warned = warning("LlamaTokenizer", "llama", legacy).unwrap();
        assert!(warned.contains("such as \" leading and  double"), "{warned}");
    }
}
