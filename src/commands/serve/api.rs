//! Requests in the form of OpenAI's interface. What a request asks for and is not there is refused.

use rand::Rng as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::responses::AsResponse;
use crate::generate::GenerateOptions;
use crate::generate::calls::functions;

/// Length of a completion whose request does not say it, as in OpenAI's interface.
const COMPLETION_TOKENS: usize = 16;
/// Most of the likely tokens that are shown.
const MAX_TOP_LOGPROBS: usize = 20;
/// Most strings to stop at; every token is compared with them.
const MAX_STOPS: usize = 16;
/// Most prompts of a request.
const MAX_PROMPTS: usize = 2048;
/// Longest value of a parameter that is repeated to the user, in bytes.
const MAX_REPEATED: usize = 60;
/// Parameters that change nothing in the text.
const WITHOUT_EFFECT: [&str; 9] = [
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "priority", "request_id",
];

/// Which of the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/responses`, which is asked as a chat
    Response,
    /// `/v1/completions`
    Completion,
    /// `/v1/score`
    Score,
}

/// A request that is understood.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) endpoint: Endpoint,
    pub(super) model: Option<String>,
    pub(super) content: AskedContent,
    max_new_tokens: usize,
    temperature: f64,
    top_p: f64,
    min_p: Option<f64>,
    seed: Option<i64>,
    pub(super) stop: Vec<String>,
    pub(super) top_logprobs: Option<usize>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// What the model may call.
    pub(super) tools: Option<Value>,
    pub(super) tool_choice: ToolChoice,
    /// Whether an answer has at most one call.
    pub(super) one_call: bool,
    /// What the text is held to.
    pub(super) schema: Option<Value>,
}

/// Whether an answer is a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ToolChoice {
    /// As the model will.
    #[default]
    Auto,
    /// It is one.
    Required,
    /// It is one of this function.
    Function(String),
}

/// What is continued or scored.
#[derive(Debug)]
pub(super) enum AskedContent {
    /// As the request has them.
    Messages(Vec<Value>),
    Prompts(Prompts),
}

/// What `prompt` may be: a text or its tokens, or a list of either.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Prompts {
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

impl Stop {
    fn texts(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Several(texts) => texts,
        }
    }
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

impl Prompts {
    fn len(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::ManyTokens(prompts) => prompts.len(),
        }
    }
}

impl Asking {
    /// Reads the body of a request, and how it is answered where that is not the form of its endpoint.
    pub(super) fn parse(endpoint: Endpoint, body: &[u8]) -> Result<(Self, Option<AsResponse>), ApiError> {
        let body = serde_json::from_slice(body).map_err(|_| ApiError::wrong("the body is not a JSON object", None))?;
        if endpoint == Endpoint::Response {
            let (chat, form) = AsResponse::read(body)?;
            return Ok((Self::read(Endpoint::Chat, chat)?, Some(form)));
        }
        Ok((Self::read(endpoint, body)?, None))
    }

    fn read(endpoint: Endpoint, body: Map<String, Value>) -> Result<Self, ApiError> {
        const COUNT: &str = "a whole number";
        const TEMPERATURE: &str = "a number from 0 to 2";
        const TOP_P: &str = "a number above 0, at most 1";
        const MIN_P: &str = "a number from 0 to 1";
        const STOP: &str = "a text that is not empty, or a list of at most 16 such";
        let mut body = Body(body);
        let within = |name: &str, is_allowed: bool, expected: &str| {
            if is_allowed { Ok(()) } else { Err(unexpected(name, expected)) }
        };
        let content = content(endpoint, &mut body)?;
        if endpoint == Endpoint::Score {
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
        let stop = body.take("stop", STOP)?.map_or_else(Vec::new, Stop::texts);
        within("stop", stop.len() <= MAX_STOPS && stop.iter().all(|stop| !stop.is_empty()), STOP)?;
        let logprobs = body.take("logprobs", "true, false or a number")?;
        let top_logprobs = top_logprobs(endpoint, logprobs.as_ref(), body.take("top_logprobs", COUNT)?)?;
        within("top_logprobs", top_logprobs.is_none_or(|top| top <= MAX_TOP_LOGPROBS), "at most 20")?;
        let (tools, tool_choice) =
            if endpoint == Endpoint::Chat { tools(&mut body)? } else { (None, ToolChoice::Auto) };
        let schema = schema(&mut body)?;
        let stream_options: Option<StreamOptions> = body.take("stream_options", "an object")?;
        let asking = Self {
            endpoint,
            model: body.take("model", "a text")?,
            content,
            max_new_tokens: max_tokens.unwrap_or(if endpoint == Endpoint::Chat {
                usize::MAX
            } else {
                COMPLETION_TOKENS
            }),
            temperature,
            top_p,
            min_p,
            seed: body.take("seed", COUNT)?,
            stop,
            top_logprobs,
            stream: body.take("stream", "true or false")?.unwrap_or_default(),
            include_usage: stream_options.is_some_and(|options| options.include_usage),
            tools,
            tool_choice,
            one_call: body.take("parallel_tool_calls", "true or false")? == Some(false),
            schema,
        };
        refuse_unknown(&body.0)?;
        Ok(asking)
    }

    fn to_score(model: Option<String>, content: AskedContent) -> Self {
        Self {
            endpoint: Endpoint::Score,
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
            tools: None,
            tool_choice: ToolChoice::Auto,
            one_call: false,
            schema: None,
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
}

/// The tools that the model may call, and whether it must.
fn tools(body: &mut Body) -> Result<(Option<Value>, ToolChoice), ApiError> {
    const CHOICES: &str =
        "\"auto\", \"none\", \"required\", or {\"type\": \"function\", \"function\": {\"name\": ...}}";
    let tools: Option<Vec<Value>> = body.take("tools", "a list of tools")?;
    let tools = tools.filter(|tools| !tools.is_empty()).map(Value::Array);
    let choice: Value = body.take("tool_choice", CHOICES)?.unwrap_or_else(|| json!("auto"));
    let wrong = |text: String| Err(ApiError::wrong(text, Some("tool_choice")));
    let choice = match (choice.as_str(), choice["function"]["name"].as_str()) {
        (Some("auto"), _) => ToolChoice::Auto,
        (Some("none"), _) => return Ok((None, ToolChoice::Auto)),
        (Some("required"), _) => ToolChoice::Required,
        (None, Some(name)) => ToolChoice::Function(name.to_owned()),
        _ => return wrong(format!("`tool_choice`: expected {CHOICES}")),
    };
    let names: Vec<&str> = tools.iter().flat_map(functions).filter_map(|function| function["name"].as_str()).collect();
    match &choice {
        ToolChoice::Required if names.is_empty() => wrong("`tool_choice` = \"required\" without `tools`".to_owned()),
        ToolChoice::Function(name) if !names.contains(&name.as_str()) => {
            wrong(format!("`tool_choice` names `{name}`; `tools` has: {}", names.join(", ")))
        }
        _ => Ok((tools, choice)),
    }
}

/// The schema that `response_format` holds the text to.
fn schema(body: &mut Body) -> Result<Option<Value>, ApiError> {
    const EXPECTED: &str = "\"text\", \"json_object\", or \"json_schema\" with `json_schema.schema`";
    let Some(mut format) = body.take::<Value>("response_format", EXPECTED)? else { return Ok(None) };
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(json!({"type": "object"}))),
        Some("json_schema") if format["json_schema"]["schema"].is_object() => {
            Ok(Some(format["json_schema"]["schema"].take()))
        }
        _ => Err(ApiError::wrong(format!("`response_format`: its `type` is {EXPECTED}"), Some("response_format"))),
    }
}

/// What an endpoint is asked to continue or to score.
fn content(endpoint: Endpoint, body: &mut Body) -> Result<AskedContent, ApiError> {
    let messages: Option<Vec<Value>> = body.take("messages", "a list of messages")?;
    let texts = if endpoint == Endpoint::Score { "input" } else { "prompt" };
    let prompt = body.take(texts, "a text, a list of texts, or tokens of a text or of several")?;
    match (endpoint, messages, prompt) {
        (Endpoint::Chat | Endpoint::Score, Some(messages), None) if messages.is_empty() => {
            Err(ApiError::wrong("`messages` is empty", Some("messages")))
        }
        (Endpoint::Chat | Endpoint::Score, Some(messages), None) => Ok(AskedContent::Messages(messages)),
        (Endpoint::Completion | Endpoint::Score, None, Some(Prompts::Texts(list))) if list.is_empty() => {
            Err(ApiError::wrong(format!("`{texts}` is empty"), Some(texts)))
        }
        (Endpoint::Completion | Endpoint::Score, None, Some(prompts)) if prompts.len() > MAX_PROMPTS => {
            Err(ApiError::wrong(format!("`{texts}` has more than {MAX_PROMPTS} texts"), Some(texts)))
        }
        (Endpoint::Completion | Endpoint::Score, None, Some(prompts)) => Ok(AskedContent::Prompts(prompts)),
        (Endpoint::Score, ..) => Err(ApiError::wrong("`messages` or `input` is wanted here", Some("messages"))),
        (Endpoint::Chat | Endpoint::Response, ..) => {
            Err(ApiError::wrong("`messages` is wanted here, and no `prompt`", Some("messages")))
        }
        (Endpoint::Completion, ..) => {
            Err(ApiError::wrong("`prompt` is wanted here, and no `messages`", Some("prompt")))
        }
    }
}

/// How many of the likely tokens to show; the two endpoints ask differently.
fn top_logprobs(endpoint: Endpoint, logprobs: Option<&Value>, top: Option<usize>) -> Result<Option<usize>, ApiError> {
    let wrong = |name: &str, text: &str| Err(ApiError::wrong(format!("`{name}`: {text}"), Some(name)));
    match (endpoint, logprobs, top) {
        (_, None | Some(Value::Bool(false)), None | Some(0)) => Ok(None),
        (Endpoint::Chat, Some(Value::Bool(true)), top) => Ok(Some(top.unwrap_or(0))),
        (Endpoint::Chat, None | Some(_), Some(_)) => wrong("top_logprobs", "needs `logprobs` = true"),
        (Endpoint::Chat, Some(_), None) => wrong("logprobs", "expected true or false"),
        (_, Some(number), None) => match number.as_u64().and_then(|top| usize::try_from(top).ok()) {
            Some(top) => Ok(Some(top)),
            None => wrong("logprobs", "expected a number of tokens"),
        },
        (_, _, Some(_)) => wrong("top_logprobs", "belongs to /v1/chat/completions"),
    }
}

/// A value that asks for nothing.
pub(super) fn is_off(value: &Value) -> bool {
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
    match rest.iter().find(|(key, value)| !value.is_null() && !is_default(key, value)) {
        Some((key, value)) => {
            let value = value.to_string();
            let value = if value.len() <= MAX_REPEATED { format!(" = {value}") } else { String::new() };
            Err(ApiError::wrong(format!("`{key}`{value} is not supported"), Some(key)))
        }
        None => Ok(()),
    }
}

/// Whether a parameter asks for what happens anyway. The names beyond OpenAI's are those of vLLM, llama.cpp and transformers.
fn is_default(key: &str, value: &Value) -> bool {
    let is = |number: f64| value.as_f64() == Some(number);
    match key {
        "n" | "best_of" | "num_beams" | "repetition_penalty" | "repeat_penalty" | "length_penalty" | "typical_p"
        | "tfs_z" | "dynatemp_exponent" => is(1.0),
        "top_k" => is(-1.0) || is(0.0),
        "skip_special_tokens"
        | "spaces_between_special_tokens"
        | "add_generation_prompt"
        | "detokenize"
        | "clean_up_tokenization_spaces"
        | "include_reasoning" => *value == true,
        "modalities" => *value == json!(["text"]),
        "verbosity" => value == "medium",
        "truncation" => value == "disabled",
        "tool_choice" | "function_call" => value == "none" || value == "auto",
        _ => is_off(value) || WITHOUT_EFFECT.contains(&key),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(endpoint: Endpoint, body: &Value) -> Result<Asking, Value> {
        let asking = Asking::parse(endpoint, body.to_string().as_bytes());
        asking.map(|(asking, _)| asking).map_err(|error| error.json()["error"].clone())
    }

    fn chat(more: &Value) -> Result<Asking, Value> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(Endpoint::Chat, &body)
    }

    #[test]
    fn parameters_have_openais_defaults_and_names() {
        let asking = chat(&json!({})).unwrap();
        assert_eq!((asking.options().temperature, asking.options().max_new_tokens), (1.0, usize::MAX));
        let asking = parse(Endpoint::Completion, &json!({"prompt": ["Once"], "logprobs": 2, "stop": null})).unwrap();
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
            json!({"top_k": -1, "repetition_penalty": 1, "length_penalty": 1.0, "skip_special_tokens": true}),
            json!({"top_k": 0, "logprobs": false, "top_logprobs": 0, "modalities": ["text"], "verbosity": "medium"}),
            json!({"add_generation_prompt": true, "ignore_eos": false, "spaces_between_special_tokens": true}),
        ] {
            chat(&fine).unwrap();
        }
        let named = json!({"type": "function", "function": {"name": "find"}});
        let asking = chat(&json!({"tools": [named, {"name": "other"}], "tool_choice": named})).unwrap();
        assert_eq!(asking.tool_choice, ToolChoice::Function("find".to_owned()));
        for (wrong, param) in [
            (json!({"n": 2}), "n"),
            (json!({"n": 0}), "n"),
            (json!({"presence_penalty": 0.5}), "presence_penalty"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
            (json!({"skip_special_tokens": false}), "skip_special_tokens"),
            (json!({"top_k": 5}), "top_k"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
            (json!({"tools": "find"}), "tools"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tool_choice": "find", "tools": [{"name": "find"}]}), "tool_choice"),
            (json!({"tool_choice": {"type": "function", "function": {"name": "find"}}}), "tool_choice"),
            (json!({"tool_choice": {"type": "allowed_tools"}, "tools": [{"name": "find"}]}), "tool_choice"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format"),
            (json!({"response_format": "json"}), "response_format"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"top_p": 0}), "top_p"),
            (json!({"min_p": 1.5}), "min_p"),
            (json!({"stop": [""]}), "stop"),
            (json!({"stop": vec!["x"; 17]}), "stop"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
            (json!({"prompt": "x"}), "messages"),
            (json!({"messages": []}), "messages"),
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
            (json!({"stop": 3}), "`stop`: expected a text that is not empty, or a list of at most 16 such"),
            (json!({"stream": "yes"}), "`stream`: expected true or false"),
        ] {
            assert_eq!(chat(&wrong).unwrap_err()["message"], message);
        }
        let asked = |prompt: Value| parse(Endpoint::Completion, &json!({"prompt": prompt}));
        for wrong in [json!(["a", 1]), json!({"a": 1}), json!([[1], "a"])] {
            let expected = "`prompt`: expected a text, a list of texts, or tokens of a text or of several";
            assert_eq!(asked(wrong).unwrap_err()["message"], expected);
        }
        assert_eq!(asked(json!([])).unwrap_err()["message"], "`prompt` is empty");
        let error = Asking::parse(Endpoint::Chat, b"{").unwrap_err().json();
        assert_eq!(error["error"]["message"], "the body is not a JSON object");
    }

    #[test]
    fn each_prompt_of_a_list_has_a_seed_of_its_own_unless_the_request_has_one() {
        let asking = parse(Endpoint::Completion, &json!({"prompt": ["a", "a"]})).unwrap();
        assert_ne!(asking.options().seed, asking.options().seed);
        let asking = parse(Endpoint::Completion, &json!({"prompt": ["a", "a"], "seed": 7})).unwrap();
        assert_eq!((asking.options().seed, asking.options().seed), (7, 7));
    }
}
