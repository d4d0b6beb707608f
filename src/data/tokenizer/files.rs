//! Reads the small files beside `tokenizer.json`.

use std::path::Path;

use serde_json::Value;

use super::TokenizerError;

/// Name of the template to use where `tokenizer_config.json` lists several.
const DEFAULT_TEMPLATE_NAME: &str = "default";

/// Contents of a JSON file; `None` where there is no such file.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|error| TokenizerError::of_file(path, error))
}

/// Contents of a text file; `None` where there is no such file.
fn read_text(path: &Path) -> Result<Option<String>, TokenizerError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TokenizerError::of_file(path, error)),
    }
}

/// The text of a special token, which is written as a string or as an object with `content`.
pub(super) fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// Token ids, which are written as a number or a list of numbers.
pub(super) fn token_ids(value: &Value) -> impl Iterator<Item = u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
}

/// The chat template: `chat_template.jinja` if it exists, else `tokenizer_config.json`, as in transformers. The latter
/// has a string or a list of `{name, template}`.
pub(super) fn read_chat_template(
    dir: &Path,
    config: &Value,
    config_path: &Path,
) -> Result<Option<String>, TokenizerError> {
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
            Err(TokenizerError::of_file(config_path, reason))
        }
        _ => {
            let reason = "`chat_template` must be a string or a list of {name, template}";
            Err(TokenizerError::of_file(config_path, reason))
        }
    }
}
