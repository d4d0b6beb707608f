//! Encodes the user's prompt.

use serde_json::json;

use super::GenerateError;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;

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
    let system = system.map(|content| json!({"role": "system", "content": content}));
    let user = json!({"role": "user", "content": prompt});
    let messages: Vec<_> = system.into_iter().chain([user]).collect();
    let text = template.render(&messages, None, true)?;
    // The template has already written BOS.
    Ok(tokenizer.encode(&text, false)?)
}
