//! Texts that are held to a JSON schema, or to rules with schemas in them, while they are written: before each token, those
//! that are not allowed are ruled out.

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::data::tokenizer::{SpecialToken, Tokenizer};

/// Why a text cannot be held to a schema.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(String);

/// Makes grammars for the tokens of a model.
pub struct Grammars {
    factory: ParserFactory,
    /// Tokens that stand for their text wherever it is.
    added: Vec<SpecialToken>,
}

impl Grammars {
    /// For a model of so many tokens.
    ///
    /// # Errors
    /// A vocabulary that cannot be used.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, GrammarError> {
        let failed = |error: &dyn fmt::Display| GrammarError(error.to_string());
        let bytes = |id: u32| match tokenizer.bytes_in_text(id) {
            // No text is ever this token.
            bytes if bytes.is_empty() => [&[TokTrie::SPECIAL_TOKEN_MARKER], format!("{id}").as_bytes()].concat(),
            bytes => bytes,
        };
        let num_tokens = u32::try_from(vocab_size).map_err(|error| failed(&error))?;
        let mut words: Vec<Vec<u8>> = (0..num_tokens).map(bytes).collect();
        // The end of a text: which tokens end one is the affair of who writes it.
        words.push(vec![TokTrie::SPECIAL_TOKEN_MARKER, b'.']);
        let trie = TokTrie::from(&TokRxInfo::new(num_tokens + 1, num_tokens), &words);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&tokens).map_err(|error| failed(&error))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        let added = tokenizer.added_tokens().into_iter();
        let added = added.filter(|token| token.id < num_tokens && !token.text.trim().is_empty()).collect();
        Ok(Self { factory, added })
    }

    /// The grammar of the JSON that a schema allows.
    ///
    /// # Errors
    /// What the schema asks for and cannot be followed.
    pub fn of_schema(&self, schema: &Value) -> Result<Grammar, GrammarError> {
        if !schema.is_object() {
            return Err(GrammarError("the schema is no object".into()));
        }
        self.of(TopLevelGrammar::from_json_schema(with_blanks(schema)))
    }

    /// The grammar of rules in the language of Lark, as llguidance reads it, the first of which is `start`.
    ///
    /// # Errors
    /// Rules that cannot be followed.
    pub fn of_rules(&self, rules: String) -> Result<Grammar, GrammarError> {
        self.of(TopLevelGrammar::from_lark(rules))
    }

    /// A part of a rule: this text, in which what is the text of a token of its own is that token.
    #[must_use]
    pub fn literal(&self, text: &str) -> String {
        let found = self.added.iter().filter_map(|token| Some((text.find(&token.text)?, token)));
        match found.min_by_key(|(at, token)| (*at, Reverse(token.text.len()))) {
            Some((at, token)) => {
                let rest = self.literal(&text[at + token.text.len()..]);
                format!("{} <[{}]> {rest}", quoted(&text[..at]), token.id)
            }
            None => quoted(text),
        }
    }

    fn of(&self, grammar: TopLevelGrammar) -> Result<Grammar, GrammarError> {
        let matcher = Matcher::new(self.factory.create_parser(grammar));
        match matcher.get_error() {
            Some(error) => Err(GrammarError(error.lines().next().unwrap_or_default().to_owned())),
            None => Ok(Grammar(Box::new(matcher))),
        }
    }
}

/// A part of a rule: this text, whatever tokens it has.
#[must_use]
pub fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// A part of a rule: the JSON that a schema allows, which is an object.
#[must_use]
pub fn json_of(schema: &Value) -> String {
    format!("%json {}", with_blanks(schema))
}

/// The schema, with the white space that may stand in its JSON: a blank behind `,` and `:`. Small models fill whatever more is
/// allowed.
fn with_blanks(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(keys) = schema.as_object_mut() {
        let separators = json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"});
        keys.insert("x-guidance".to_owned(), separators);
    }
    schema
}

impl fmt::Debug for Grammars {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Grammars")
    }
}

/// What a text may become, from where it is.
#[derive(Clone)]
pub struct Grammar(Box<Matcher>);

impl Grammar {
    /// The logits with every token ruled out that may not come next; `None` where none may. One of `ends`, which end the text,
    /// may come where it is complete, and nowhere within.
    pub(crate) fn mask(&mut self, logits: &[f32], ends: &[u32]) -> Result<Option<Vec<f32>>, GrammarError> {
        let failed = |error: &dyn fmt::Display| GrammarError(error.to_string());
        let allowed: SimpleVob = self.0.compute_mask_or_eos().map_err(|error| failed(&error))?;
        let is_complete = self.0.is_accepting().map_err(|error| failed(&error))?;
        let is_allowed = |id: u32| if ends.contains(&id) { is_complete } else { allowed.is_allowed(id) };
        let may_come = |id: usize| u32::try_from(id).is_ok_and(is_allowed);
        if !(0..logits.len()).any(may_come) {
            return Ok(None);
        }
        let masked = logits.iter().enumerate();
        Ok(Some(masked.map(|(id, &logit)| if may_come(id) { logit } else { f32::NEG_INFINITY }).collect()))
    }

    /// Takes a token; returns whether the text is complete and nothing can follow.
    pub(crate) fn take(&mut self, token: u32) -> Result<bool, GrammarError> {
        self.0.consume_token(token).map_err(|error| GrammarError(error.to_string()))?;
        Ok(self.0.is_stopped())
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Grammar")
    }
}
