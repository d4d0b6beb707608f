//! Requests in the form of OpenAI's interface. What a request asks for and is not there is refused.

use rand::Rng as _;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;
use crate::generate::{GenerateOptions, encode_messages};

/// Length of a completion whose request does not say it, as in OpenAI's interface.
const COMPLETION_TOKENS: usize = 16;
/// Most of the likely tokens that are shown.
const MAX_TOP_LOGPROBS: usize = 20;
/// Parameters that change nothing in the text.
const WITHOUT_EFFECT: [&str; 7] =
    ["user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"];

/// Which of the two endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

/// A request that is understood.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) model: Option<String>,
    content: Content,
    pub(super) options: GenerateOptions,
    pub(super) stop: Vec<String>,
    pub(super) top_logprobs: Option<usize>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

#[derive(Debug)]
enum Content {
    Messages(Vec<Value>),
    Text(String),
    Tokens(Vec<u32>),
}

/// The body of a request. Parameters that are `null` are absent.
#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    messages: Option<Vec<Map<String, Value>>>,
    prompt: Option<Prompt>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    seed: Option<i64>,
    stop: Option<Stop>,
    logprobs: Option<Value>,
    top_logprobs: Option<usize>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Texts([String; 1]),
    Tokens(Vec<u32>),
    ManyTokens([Vec<u32>; 1]),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

impl Asking {
    /// Reads the body of a request.
    pub(super) fn parse(kind: Kind, body: &[u8]) -> Result<Self, ApiError> {
        let body: Body =
            serde_json::from_slice(body).map_err(|error| ApiError::wrong(format!("the body: {error}"), None))?;
        refuse_unknown(&body.rest)?;
        let content = match (kind, body.messages, body.prompt) {
            (Kind::Chat, Some(messages), None) => Content::Messages(self::messages(messages)?),
            (Kind::Completion, None, Some(Prompt::Text(text) | Prompt::Texts([text]))) => Content::Text(text),
            (Kind::Completion, None, Some(Prompt::Tokens(ids) | Prompt::ManyTokens([ids]))) => Content::Tokens(ids),
            (Kind::Chat, ..) => {
                return Err(ApiError::wrong("`messages` is wanted here, and no `prompt`", Some("messages")));
            }
            (Kind::Completion, ..) => {
                return Err(ApiError::wrong("`prompt` is wanted here, and no `messages`", Some("prompt")));
            }
        };
        let within = |name: &str, is_allowed: bool, expected: &str| {
            if is_allowed { Ok(()) } else { Err(ApiError::wrong(format!("`{name}`: expected {expected}"), Some(name))) }
        };
        let max_tokens = body.max_completion_tokens.or(body.max_tokens);
        within("max_tokens", max_tokens != Some(0), "at least 1")?;
        let temperature = body.temperature.unwrap_or(1.0);
        within("temperature", (0.0..=2.0).contains(&temperature), "a number from 0 to 2")?;
        let top_p = body.top_p.unwrap_or(1.0);
        within("top_p", top_p > 0.0 && top_p <= 1.0, "a number above 0, at most 1")?;
        let stop = match body.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop],
            Some(Stop::Several(stops)) => stops,
        };
        within("stop", stop.iter().all(|stop| !stop.is_empty()), "texts that are not empty")?;
        let top_logprobs = top_logprobs(kind, body.logprobs.as_ref(), body.top_logprobs)?;
        within("top_logprobs", top_logprobs.is_none_or(|top| top <= MAX_TOP_LOGPROBS), "at most 20")?;
        let options = GenerateOptions {
            max_new_tokens: max_tokens.unwrap_or(if kind == Kind::Chat { usize::MAX } else { COMPLETION_TOKENS }),
            temperature,
            top_p,
            top_k: None,
            seed: body.seed.map_or_else(|| rand::rng().random(), i64::cast_unsigned),
        };
        Ok(Self {
            model: body.model,
            content,
            options,
            stop,
            top_logprobs,
            stream: body.stream.unwrap_or_default(),
            include_usage: body.stream_options.is_some_and(|options| options.include_usage),
        })
    }

    /// The tokens to continue. `system` is the system message of conversations that have none.
    pub(super) fn prompt_ids(
        &self,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        system: Option<&str>,
    ) -> Result<Vec<u32>, ApiError> {
        match (&self.content, template) {
            (Content::Tokens(ids), _) => Ok(ids.clone()),
            (Content::Text(text), _) => {
                tokenizer.encode(text, true).map_err(|error| ApiError::wrong(error.to_string(), Some("prompt")))
            }
            (Content::Messages(_), None) => {
                Err(ApiError::wrong("this model has no chat template; /v1/completions continues a text", Some("model")))
            }
            (Content::Messages(messages), Some(template)) => {
                let is_unknown = |role: &&str| *role != "user" && *role != "assistant" && !template.names_role(role);
                let mut roles = messages.iter().filter_map(|message| message["role"].as_str());
                if let Some(role) = roles.find(|role| is_unknown(role) && *role != "system") {
                    return Err(ApiError::wrong(format!("the chat template has no role `{role}`"), Some("messages")));
                }
                let has_system = messages.iter().any(|message| message["role"] == "system");
                let system = system.filter(|_| !has_system).map(|text| json!({"role": "system", "content": text}));
                let messages: Vec<Value> = system.into_iter().chain(messages.iter().cloned()).collect();
                encode_messages(tokenizer, template, &messages).map_err(|error| ApiError::of_prompt(&error))
            }
        }
    }
}

/// Messages with text: parts of text are joined, and what a template would leave out is refused.
fn messages(messages: Vec<Map<String, Value>>) -> Result<Vec<Value>, ApiError> {
    let wrong =
        |index: usize, what: &str| Err(ApiError::wrong(format!("`messages[{index}]` {what}"), Some("messages")));
    let mut texts = Vec::with_capacity(messages.len());
    for (index, mut message) in messages.into_iter().enumerate() {
        let Some(role) = message.remove("role").filter(Value::is_string) else { return wrong(index, "has no role") };
        let content = match message.remove("content") {
            Some(Value::String(text)) => text,
            Some(Value::Array(parts)) => {
                let texts: Option<Vec<&str>> =
                    parts.iter().map(|part| part["text"].as_str().filter(|_| part["type"] == "text")).collect();
                match texts {
                    Some(texts) => texts.concat(),
                    None => return wrong(index, "has parts that are no text"),
                }
            }
            _ => return wrong(index, "has no content"),
        };
        if let Some(key) = message.iter().find(|(_, value)| !is_off(value)).map(|(key, _)| key) {
            return wrong(index, &format!("has `{key}`, which is not supported"));
        }
        texts.push(json!({"role": role, "content": content}));
    }
    if texts.is_empty() {
        return Err(ApiError::wrong("`messages` is empty", Some("messages")));
    }
    Ok(texts)
}

/// How many of the likely tokens to show; the two endpoints ask differently.
fn top_logprobs(kind: Kind, logprobs: Option<&Value>, top: Option<usize>) -> Result<Option<usize>, ApiError> {
    let wrong = |name: &str, text: &str| Err(ApiError::wrong(format!("`{name}`: {text}"), Some(name)));
    match (kind, logprobs, top) {
        (_, None | Some(Value::Bool(false) | Value::Null), None) => Ok(None),
        (Kind::Chat, Some(Value::Bool(true)), top) => Ok(Some(top.unwrap_or(0))),
        (Kind::Chat, None | Some(_), Some(_)) => wrong("top_logprobs", "needs `logprobs` = true"),
        (Kind::Chat, Some(_), None) => wrong("logprobs", "expected true or false"),
        (Kind::Completion, Some(number), None) => match number.as_u64().and_then(|top| usize::try_from(top).ok()) {
            Some(top) => Ok(Some(top)),
            None => wrong("logprobs", "expected a number of tokens"),
        },
        (Kind::Completion, _, Some(_)) => wrong("top_logprobs", "belongs to /v1/chat/completions"),
    }
}

/// A value that asks for nothing.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) => false,
    }
}

/// Refuses parameters that would change the text and are not there.
fn refuse_unknown(rest: &Map<String, Value>) -> Result<(), ApiError> {
    let is_default = |key: &str, value: &Value| match key {
        "n" | "best_of" => *value == 1,
        "response_format" => value["type"] == "text",
        "tool_choice" | "function_call" => value == "none" || value == "auto",
        _ => WITHOUT_EFFECT.contains(&key),
    };
    match rest.iter().find(|(key, value)| !is_off(value) && !is_default(key, value)) {
        Some((key, value)) => Err(ApiError::wrong(format!("`{key}` = {value} is not supported"), Some(key))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kind: Kind, body: &Value) -> Result<Asking, Value> {
        Asking::parse(kind, body.to_string().as_bytes()).map_err(|error| error.json()["error"].clone())
    }

    fn chat(more: &Value) -> Result<Asking, Value> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(Kind::Chat, &body)
    }

    #[test]
    fn parameters_have_openais_defaults_and_names() {
        let asking = chat(&json!({})).unwrap();
        assert_eq!((asking.options.temperature, asking.options.max_new_tokens), (1.0, usize::MAX));
        let asking = parse(Kind::Completion, &json!({"prompt": ["Once"], "logprobs": 2, "stop": null})).unwrap();
        assert_eq!((asking.options.max_new_tokens, asking.top_logprobs), (16, Some(2)));
        let more = json!({"max_completion_tokens": 5, "stop": "x", "seed": -1, "logprobs": true, "top_logprobs": 3,
            "temperature": 0, "top_p": 0.5, "stream": true, "stream_options": {"include_usage": true}});
        let asking = chat(&more).unwrap();
        assert_eq!((asking.options.max_new_tokens, asking.options.seed, asking.options.top_p), (5, u64::MAX, 0.5));
        assert_eq!((asking.stop, asking.top_logprobs), (vec!["x".to_owned()], Some(3)));
        assert!(asking.stream && asking.include_usage);
    }

    #[test]
    fn what_changes_nothing_is_let_through_and_what_is_not_there_is_refused_by_name() {
        for fine in [
            json!({"n": 1, "user": "me", "presence_penalty": 0, "tools": [], "logit_bias": null}),
            json!({"response_format": {"type": "text"}, "frequency_penalty": 0.0, "tool_choice": "none"}),
        ] {
            chat(&fine).unwrap();
        }
        for (wrong, param) in [
            (json!({"n": 2}), "n"),
            (json!({"presence_penalty": 0.5}), "presence_penalty"),
            (json!({"tools": [{"type": "function"}]}), "tools"),
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"top_p": 0}), "top_p"),
            (json!({"stop": [""]}), "stop"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
            (json!({"prompt": "x"}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}), "messages"),
            (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages"),
        ] {
            let error = chat(&wrong).unwrap_err();
            assert_eq!((&error["param"], &error["type"]), (&json!(param), &json!("invalid_request_error")), "{error}");
        }
        assert!(parse(Kind::Completion, &json!({"prompt": ["a", "b"]})).is_err());
        assert!(
            parse(Kind::Chat, &json!({"messages": "x"})).unwrap_err()["message"].as_str().unwrap().contains("sequence")
        );
    }

    #[test]
    fn parts_of_text_are_joined() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let asking = chat(&json!({"messages": [{"role": "user", "content": parts, "name": null}]})).unwrap();
        let Content::Messages(messages) = asking.content else { panic!("{:?}", asking.content) };
        assert_eq!(messages, [json!({"role": "user", "content": "ab"})]);
    }
}
