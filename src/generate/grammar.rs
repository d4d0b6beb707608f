//! Texts that are held to a JSON schema while they are written: before each token, those that the schema does not allow
//! are ruled out.

use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::data::tokenizer::Tokenizer;

/// The white space that may stand between two parts of JSON: enough to indent it, and not so much that a text is nothing
/// else.
const BLANK: &str = r"[ \n\r\t]{1,32}";

/// Why a text cannot be held to a schema.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(String);

/// Makes grammars for the tokens of a model.
pub struct Grammars(ParserFactory);

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
        // The end of a text, where the model has no token for it.
        words.push(vec![TokTrie::SPECIAL_TOKEN_MARKER, b'.']);
        let ends: Vec<u32> = tokenizer.eos_ids().iter().copied().filter(|id| *id < num_tokens).collect();
        let ends = if ends.is_empty() { vec![num_tokens] } else { ends };
        let trie = TokTrie::from(&TokRxInfo::new(num_tokens + 1, ends[0]), &words).with_eos_tokens(&ends);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&tokens).map_err(|error| failed(&error))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self(factory))
    }

    /// The grammar of the JSON that a schema allows.
    ///
    /// # Errors
    /// What the schema asks for and cannot be followed.
    pub fn of_schema(&self, schema: &Value) -> Result<Grammar, GrammarError> {
        let mut schema = schema.clone();
        let Some(keys) = schema.as_object_mut() else { return Err(GrammarError("the schema is no object".into())) };
        keys.insert("x-guidance".to_owned(), json!({"whitespace_pattern": BLANK}));
        let matcher = Matcher::new(self.0.create_parser(TopLevelGrammar::from_json_schema(schema)));
        match matcher.get_error() {
            Some(error) => Err(GrammarError(error.lines().next().unwrap_or_default().to_owned())),
            None => Ok(Grammar(Box::new(matcher))),
        }
    }
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
    /// The logits with every token ruled out that may not come next; `None` where none may.
    pub(super) fn mask(&mut self, logits: &[f32]) -> Result<Option<Vec<f32>>, GrammarError> {
        let allowed: SimpleVob = self.0.compute_mask_or_eos().map_err(|error| GrammarError(error.to_string()))?;
        let may_come = |id: usize| u32::try_from(id).is_ok_and(|id| allowed.is_allowed(id));
        if !(0..logits.len()).any(may_come) {
            return Ok(None);
        }
        let masked = logits.iter().enumerate();
        Ok(Some(masked.map(|(id, &logit)| if may_come(id) { logit } else { f32::NEG_INFINITY }).collect()))
    }

    /// Takes a token; returns whether the text is complete and nothing can follow.
    pub(super) fn take(&mut self, token: u32) -> Result<bool, GrammarError> {
        self.0.consume_token(token).map_err(|error| GrammarError(error.to_string()))?;
        Ok(self.0.is_stopped())
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Grammar")
    }
}
