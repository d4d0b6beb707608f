//! What the user typed, as the tokens that the model continues.

use serde_json::json;

use super::GenerateError;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;

/// Token ids of a prompt: with `template`, a conversation of `system` and a user's turn, up to where the answer starts;
/// without, the text as it is, after BOS where the tokenizer adds one.
///
/// # Errors
/// What tokenizer and template refuse; `system` without `template`.
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
    // The template has written BOS itself.
    Ok(tokenizer.encode(&text, false)?)
}
