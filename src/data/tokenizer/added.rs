//! The tokens that the files beside `tokenizer.json` add to it, as transformers adds them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::files::{Files, token_text};
use crate::util::panics::guarded;

/// Keys with lists of special tokens that have no name.
const LIST_KEYS: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];
/// The names that every tokenizer has, in the order in which transformers adds them; the names of others follow.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl Files {
    /// The files that name special tokens, those that count first.
    fn naming(&self) -> impl Iterator<Item = &(PathBuf, Value)> {
        self.old_map().into_iter().chain([&self.config])
    }

    /// `special_tokens_map.json`, where it counts.
    fn old_map(&self) -> Option<&(PathBuf, Value)> {
        self.config.1["added_tokens_decoder"].is_null().then_some(&self.map)
    }

    /// The special tokens that have a name, with the file that names them: the keys that end with `_token`, and those of
    /// `extra_special_tokens`.
    pub(super) fn named_tokens(&self) -> BTreeMap<String, (&Path, String)> {
        let mut named = BTreeMap::new();
        for (path, file) in self.naming() {
            let keys = file.as_object().into_iter().flatten().filter(|(key, _)| key.ends_with("_token"));
            let extra = file["extra_special_tokens"].as_object().into_iter().flatten();
            for (key, token) in keys.chain(extra) {
                if let Some(text) = token_text(token) {
                    named.entry(key.clone()).or_insert((path.as_path(), text));
                }
            }
        }
        named
    }

    /// What a file says of a token with a name, and its place among those of `extra_special_tokens`.
    fn description(&self, name: &str) -> (&Value, usize) {
        let found = self.naming().find_map(|(_, file)| {
            let extra = file["extra_special_tokens"].as_object();
            let place = extra.and_then(|extra| extra.keys().position(|key| key == name));
            file.get(name).or_else(|| extra?.get(name)).map(|token| (token, place.unwrap_or(0)))
        });
        found.unwrap_or((&Value::Null, 0))
    }

    /// The special tokens without a name: those of the new key, or else those of the old one.
    fn unnamed_tokens(&self) -> Vec<&Value> {
        let [new, old] = LIST_KEYS;
        let own = of(&self.config, new).or_else(|| of(&self.config, old));
        let others = self.old_map().and_then(|map| of(map, new).or_else(|| of(map, old).filter(|_| own.is_none())));
        own.into_iter().chain(others).flatten().collect()
    }
}

/// The items of a list under `key`, if it has any.
fn of<'a>((_, file): &'a (PathBuf, Value), key: &str) -> Option<&'a Vec<Value>> {
    file[key].as_array().filter(|items| !items.is_empty())
}

/// Most bytes of all added tokens, and of those that are long: the library takes seconds for more.
const MAX_BYTES: usize = 4_000_000;
const LONG: usize = 32;
const MAX_LONG_BYTES: usize = 256_000;

/// What `tokenizer.json` says of added tokens.
#[derive(Deserialize)]
pub(super) struct Described {
    #[serde(default)]
    added_tokens: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    content: String,
}

impl Described {
    /// Refuses more text than a vocabulary has.
    pub(super) fn check(&self) -> Result<(), String> {
        check(self.added_tokens.iter().map(|token| token.content.as_str()))
    }
}

fn check<'a>(tokens: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let (mut all, mut long) = (0, 0);
    for token in tokens {
        all += token.len();
        long += if token.len() > LONG { token.len() } else { 0 };
    }
    if all <= MAX_BYTES && long <= MAX_LONG_BYTES {
        return Ok(());
    }
    Err(format!(
        "its added tokens have {all} bytes, {long} of them in tokens of more than {LONG}; at most {MAX_BYTES} and \
         {MAX_LONG_BYTES} are read"
    ))
}

/// Everything that decides which tokens are added.
pub(super) fn described(files: &Files) -> String {
    format!("{:?}", (&files.config.1["added_tokens_decoder"], &files.added, files.unnamed_tokens()))
}

/// Adds the tokens of `added_tokens_decoder`, or else of `added_tokens.json`, and the special tokens. The flags of
/// `added_tokens_decoder` go before those of tokenizer.json, and what has a name is special.
pub(super) fn add(
    tokenizer: &mut Tokenizer,
    files: &Files,
    named: &BTreeMap<String, (&Path, String)>,
) -> Result<(), String> {
    let by_id = tokenizer.get_added_tokens_decoder();
    let there: HashMap<&str, &AddedToken> = by_id.values().map(|token| (token.content.as_str(), token)).collect();
    let names: HashSet<&str> = named.values().map(|(_, text)| text.as_str()).collect();
    let unnamed =
        files.unnamed_tokens().into_iter().filter_map(|token| Some(added_token(token_text(token)?, token, true)));
    let unnamed: Vec<AddedToken> = unnamed.filter(|token| !there.contains_key(token.content.as_str())).collect();
    // By id, which is the order in which they are added.
    let mut numbered: BTreeMap<u64, AddedToken> = BTreeMap::new();
    if let Some(tokens) = files.config.1["added_tokens_decoder"].as_object() {
        let tokens = tokens.iter().filter_map(|(id, token)| Some((id.parse().ok()?, token_text(token)?, token)));
        numbered.extend(tokens.map(|(id, text, token)| (id, added_token(text, token, false))));
    } else {
        let is_special = |text: &str| names.contains(text) || unnamed.iter().any(|token| token.content == text);
        let tokens =
            files.added.as_object().into_iter().flatten().filter(|(text, _)| !there.contains_key(text.as_str()));
        let is_free = |id: &u64| u32::try_from(*id).is_ok_and(|id| !by_id.contains_key(&id));
        let tokens = tokens.filter_map(|(text, id)| Some((id.as_u64().filter(is_free)?, text)));
        numbered.extend(tokens.map(|(id, text)| (id, AddedToken::from(text, is_special(text)))));
    }
    let mut tokens: Vec<AddedToken> = numbered.into_values().collect();
    let mut known: HashSet<String> = tokens.iter().map(|token| token.content.clone()).collect();
    let mut named: Vec<_> = named.iter().collect();
    named.sort_by_key(|(key, _)| {
        (NAMES.iter().position(|name| name == key).unwrap_or(NAMES.len()), files.description(key).1)
    });
    let named = named.into_iter().map(|(key, (_, text))| {
        let new = || added_token(text.clone(), files.description(key).0, true);
        there.get(text.as_str()).map_or_else(new, |token| (*token).clone())
    });
    tokens.extend(named.chain(unnamed).filter(|token| known.insert(token.content.clone())));
    tokens.iter_mut().filter(|token| names.contains(token.content.as_str())).for_each(|token| token.special = true);
    tokens.retain(|token| there.get(token.content.as_str()).is_none_or(|other| flags(other) != flags(token)));
    if tokens.is_empty() {
        return Ok(());
    }
    check(tokens.iter().map(|token| token.content.as_str()))?;
    guarded(|| tokenizer.add_tokens(tokens)).and_then(|added| added.map(drop).map_err(|error| error.to_string()))
}

/// A token with the flags that an object names.
fn added_token(text: String, flags: &Value, is_special: bool) -> AddedToken {
    let special = flags["special"].as_bool().unwrap_or(is_special);
    let token = AddedToken::from(text, special);
    let flag = |key: &str, default: bool| flags[key].as_bool().unwrap_or(default);
    let (single_word, lstrip, rstrip) = (flag("single_word", false), flag("lstrip", false), flag("rstrip", false));
    let normalized = flag("normalized", token.normalized);
    token.single_word(single_word).lstrip(lstrip).rstrip(rstrip).normalized(normalized)
}

fn flags(token: &AddedToken) -> [bool; 5] {
    [token.special, token.single_word, token.lstrip, token.rstrip, token.normalized]
}
