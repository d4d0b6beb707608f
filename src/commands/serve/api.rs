//! Requests in the form of OpenAI's interface. What a request asks for and is not there is refused.

use rand::Rng as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use crate::data::encode::Encoder;
use crate::data::formats::Sample;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;
use crate::generate::{GenerateError, GenerateOptions, encode_messages};

/// Length of a completion whose request does not say it, as in OpenAI's interface.
const COMPLETION_TOKENS: usize = 16;
/// Most of the likely tokens that are shown.
const MAX_TOP_LOGPROBS: usize = 20;
/// Parameters that change nothing in the text.
const WITHOUT_EFFECT: [&str; 7] =
    ["user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"];

/// Which of the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
    /// `/v1/score`
    Score,
}

/// A request that is understood.
#[derive(Debug)]
pub(super) struct Asking {
    kind: Kind,
    pub(super) model: Option<String>,
    content: Content,
    max_new_tokens: usize,
    temperature: f64,
    top_p: f64,
    min_p: Option<f64>,
    seed: Option<i64>,
    pub(super) stop: Vec<String>,
    pub(super) top_logprobs: Option<usize>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

#[derive(Debug)]
enum Content {
    Messages(Vec<Value>),
    Prompts(Prompts),
}

/// What `prompt` may be: a text or its tokens, or a list of either.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    ManyTokens(Vec<Vec<u32>>),
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

/// The parameters that are left of a request.
struct Body(Map<String, Value>);

impl Body {
    /// A parameter; one that is `null` is absent.
    fn take<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Result<Option<T>, ApiError> {
        let value = self.0.shift_remove(name).filter(|value| !value.is_null());
        value.map(|value| serde_json::from_value(value).map_err(|_| unexpected(name, expected))).transpose()
    }
}

fn unexpected(name: &str, expected: &str) -> ApiError {
    ApiError::wrong(format!("`{name}`: expected {expected}"), Some(name))
}

impl Asking {
    /// Reads the body of a request.
    pub(super) fn parse(kind: Kind, body: &[u8]) -> Result<Self, ApiError> {
        const COUNT: &str = "a whole number";
        const TEMPERATURE: &str = "a number from 0 to 2";
        const TOP_P: &str = "a number above 0, at most 1";
        const MIN_P: &str = "a number from 0 to 1";
        const STOP: &str = "a text that is not empty, or a list of such";
        let body = serde_json::from_slice(body).map_err(|_| ApiError::wrong("the body is not a JSON object", None))?;
        let mut body = Body(body);
        let within = |name: &str, is_allowed: bool, expected: &str| {
            if is_allowed { Ok(()) } else { Err(unexpected(name, expected)) }
        };
        let messages = body.take("messages", "a list of messages")?;
        let texts = if kind == Kind::Score { "input" } else { "prompt" };
        let prompt = body.take(texts, "a text, a list of texts, or tokens of a text or of several")?;
        let content = match (kind, messages, prompt) {
            (Kind::Chat | Kind::Score, Some(messages), None) => Content::Messages(self::messages(messages)?),
            (Kind::Completion | Kind::Score, None, Some(Prompts::Texts(list))) if list.is_empty() => {
                return Err(ApiError::wrong(format!("`{texts}` is empty"), Some(texts)));
            }
            (Kind::Completion | Kind::Score, None, Some(prompts)) => Content::Prompts(prompts),
            (Kind::Score, ..) => {
                return Err(ApiError::wrong("`messages` or `input` is wanted here", Some("messages")));
            }
            (Kind::Chat, ..) => {
                return Err(ApiError::wrong("`messages` is wanted here, and no `prompt`", Some("messages")));
            }
            (Kind::Completion, ..) => {
                return Err(ApiError::wrong("`prompt` is wanted here, and no `messages`", Some("prompt")));
            }
        };
        if kind == Kind::Score {
            let model = body.take("model", "a text")?;
            refuse_unknown(&body.0)?;
            return Ok(Self::to_score(model, content));
        }
        let (new, old) = (body.take("max_completion_tokens", COUNT)?, body.take("max_tokens", COUNT)?);
        let max_tokens = new.or(old);
        within("max_tokens", max_tokens != Some(0), "at least 1")?;
        let temperature = body.take("temperature", TEMPERATURE)?.unwrap_or(1.0);
        within("temperature", (0.0..=2.0).contains(&temperature), TEMPERATURE)?;
        let top_p = body.take("top_p", TOP_P)?.unwrap_or(1.0);
        within("top_p", top_p > 0.0 && top_p <= 1.0, TOP_P)?;
        let min_p = body.take("min_p", MIN_P)?;
        within("min_p", min_p.is_none_or(|min_p| (0.0..=1.0).contains(&min_p)), MIN_P)?;
        let stop = match body.take("stop", STOP)? {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop],
            Some(Stop::Several(stops)) => stops,
        };
        within("stop", stop.iter().all(|stop| !stop.is_empty()), STOP)?;
        let logprobs = body.take("logprobs", "true, false or a number")?;
        let top_logprobs = top_logprobs(kind, logprobs.as_ref(), body.take("top_logprobs", COUNT)?)?;
        within("top_logprobs", top_logprobs.is_none_or(|top| top <= MAX_TOP_LOGPROBS), "at most 20")?;
        let stream_options: Option<StreamOptions> = body.take("stream_options", "an object")?;
        let asking = Self {
            kind,
            model: body.take("model", "a text")?,
            content,
            max_new_tokens: max_tokens.unwrap_or(if kind == Kind::Chat { usize::MAX } else { COMPLETION_TOKENS }),
            temperature,
            top_p,
            min_p,
            seed: body.take("seed", COUNT)?,
            stop,
            top_logprobs,
            stream: body.take("stream", "true or false")?.unwrap_or_default(),
            include_usage: stream_options.is_some_and(|options| options.include_usage),
        };
        refuse_unknown(&body.0)?;
        Ok(asking)
    }

    fn to_score(model: Option<String>, content: Content) -> Self {
        Self {
            kind: Kind::Score,
            model,
            content,
            max_new_tokens: 0,
            temperature: 0.0,
            top_p: 1.0,
            min_p: None,
            seed: None,
            stop: Vec::new(),
            top_logprobs: None,
            stream: false,
            include_usage: false,
        }
    }

    /// How one prompt is continued: where the request has no seed, each prompt gets its own.
    pub(super) fn options(&self) -> GenerateOptions {
        GenerateOptions {
            max_new_tokens: self.max_new_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: None,
            min_p: self.min_p,
            seed: self.seed.map_or_else(|| rand::rng().random(), i64::cast_unsigned),
        }
    }

    /// The tokens to continue, of each prompt. `system` is the system message of conversations that have none.
    pub(super) fn prompt_ids(
        &self,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        system: Option<&str>,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let is_scored = self.kind == Kind::Score;
        let encode = |text: &String| {
            // A text is scored behind its end.
            let encoder = Encoder { tokenizer, template: None, train_on_inputs: false, scores: true };
            let ids = if is_scored {
                encoder.encode(&Sample::Text(text.clone())).map(|row| row.ids).map_err(|error| error.to_string())
            } else {
                tokenizer.encode(text, true).map_err(|error| error.to_string())
            };
            ids.map_err(|error| ApiError::wrong(error, Some(if is_scored { "input" } else { "prompt" })))
        };
        match (&self.content, template) {
            (Content::Prompts(Prompts::Text(text)), _) => Ok(vec![encode(text)?]),
            (Content::Prompts(Prompts::Tokens(ids)), _) => Ok(vec![ids.clone()]),
            (Content::Prompts(Prompts::Texts(texts)), _) => texts.iter().map(encode).collect(),
            (Content::Prompts(Prompts::ManyTokens(prompts)), _) => Ok(prompts.clone()),
            (Content::Messages(_), None) => {
                let other = if is_scored { "`input` takes a text" } else { "/v1/completions continues a text" };
                Err(ApiError::wrong(format!("this model has no chat template; {other}"), Some("model")))
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
                let encode = || -> Result<_, GenerateError> {
                    if is_scored {
                        return Ok(tokenizer.encode(&template.render(&messages, None, false)?, false)?);
                    }
                    encode_messages(tokenizer, template, &messages)
                };
                encode().map(|ids| vec![ids]).map_err(|error| ApiError::of_prompt(&error))
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
        (_, Some(number), None) => match number.as_u64().and_then(|top| usize::try_from(top).ok()) {
            Some(top) => Ok(Some(top)),
            None => wrong("logprobs", "expected a number of tokens"),
        },
        (_, _, Some(_)) => wrong("top_logprobs", "belongs to /v1/chat/completions"),
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
        assert_eq!((asking.options().temperature, asking.options().max_new_tokens), (1.0, usize::MAX));
        let asking = parse(Kind::Completion, &json!({"prompt": ["Once"], "logprobs": 2, "stop": null})).unwrap();
        assert_eq!((asking.options().max_new_tokens, asking.top_logprobs), (16, Some(2)));
        let more = json!({"max_completion_tokens": 5, "stop": "x", "seed": -1, "logprobs": true, "top_logprobs": 3,
            "temperature": 0, "top_p": 0.5, "min_p": 0.1, "stream": true, "stream_options": {"include_usage": true}});
        let asking = chat(&more).unwrap();
        assert_eq!(
            (asking.options().max_new_tokens, asking.options().seed, asking.options().top_p),
            (5, u64::MAX, 0.5)
        );
        assert_eq!(asking.options().min_p, Some(0.1));
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
            (json!({"min_p": 1.5}), "min_p"),
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
    }

    #[test]
    fn a_parameter_of_the_wrong_type_is_named_with_what_is_expected() {
        for (wrong, message) in [
            (json!({"messages": "x"}), "`messages`: expected a list of messages"),
            (json!({"max_tokens": "5"}), "`max_tokens`: expected a whole number"),
            (json!({"stop": 3}), "`stop`: expected a text that is not empty, or a list of such"),
            (json!({"stream": "yes"}), "`stream`: expected true or false"),
        ] {
            assert_eq!(chat(&wrong).unwrap_err()["message"], message);
        }
        let asked = |prompt: Value| parse(Kind::Completion, &json!({"prompt": prompt}));
        for wrong in [json!(["a", 1]), json!({"a": 1}), json!([[1], "a"])] {
            let expected = "`prompt`: expected a text, a list of texts, or tokens of a text or of several";
            assert_eq!(asked(wrong).unwrap_err()["message"], expected);
        }
        assert_eq!(asked(json!([])).unwrap_err()["message"], "`prompt` is empty");
        let error = Asking::parse(Kind::Chat, b"{").unwrap_err().json();
        assert_eq!(error["error"]["message"], "the body is not a JSON object");
    }

    #[test]
    fn each_prompt_of_a_list_has_a_seed_of_its_own_unless_the_request_has_one() {
        let asking = parse(Kind::Completion, &json!({"prompt": ["a", "a"]})).unwrap();
        assert_ne!(asking.options().seed, asking.options().seed);
        let asking = parse(Kind::Completion, &json!({"prompt": ["a", "a"], "seed": 7})).unwrap();
        assert_eq!((asking.options().seed, asking.options().seed), (7, 7));
    }

    #[test]
    fn parts_of_text_are_joined() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let asking = chat(&json!({"messages": [{"role": "user", "content": parts, "name": null}]})).unwrap();
        let Content::Messages(messages) = asking.content else { panic!("{:?}", asking.content) };
        assert_eq!(messages, [json!({"role": "user", "content": "ab"})]);
    }
}
