//! Answers in the form of OpenAI's interface.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::api::Endpoint;
use super::error::ApiError;
use crate::commands::generate::NON_FINITE;
use crate::commands::named::OpenedModel;
use crate::generate::calls::CallReader;
use crate::generate::{Ending, NewText, ShownToken};

/// What an answer says besides its text.
pub(super) struct Reply {
    endpoint: Endpoint,
    id: String,
    created: u64,
    model: String,
    prompt_tokens: usize,
    completion_tokens: usize,
    /// Characters so far, of each text.
    text_offsets: Vec<usize>,
    /// Texts that have not ended.
    num_open: usize,
    /// Finds the calls in the text of a chat.
    pub(super) reader: Option<CallReader>,
    opened: Arc<OpenedModel>,
}

impl Reply {
    /// An answer without text to these prompts, of the model that the request names.
    pub(super) fn new(endpoint: Endpoint, model: String, prompts: &[Vec<u32>], opened: &Arc<OpenedModel>) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        Self {
            endpoint,
            id: format!("{prefix}-{:x}", since.as_nanos()),
            created: since.as_secs(),
            model,
            prompt_tokens: prompts.iter().map(Vec::len).sum(),
            completion_tokens: 0,
            text_offsets: vec![0; prompts.len()],
            num_open: prompts.len(),
            reader: None,
            opened: Arc::clone(opened),
        }
    }

    /// The whole answer; `texts` has what was written for each prompt.
    pub(super) fn whole(&mut self, texts: &[Vec<NewText>]) -> Result<Value, ApiError> {
        let choices = texts.iter().enumerate().map(|(index, texts)| self.choice(index, texts));
        let choices = choices.collect::<Result<Vec<_>, _>>()?;
        let object = if self.endpoint == Endpoint::Chat { "chat.completion" } else { "text_completion" };
        Ok(json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
            "usage": self.usage(),
        }))
    }

    fn choice(&mut self, index: usize, texts: &[NewText]) -> Result<Value, ApiError> {
        let ending = texts.last().and_then(|text| text.ending);
        let finish_reason = finish_reason(ending)?;
        let text: String = texts.iter().map(|text| text.text.as_str()).collect();
        let logprobs = self.logprobs(index, texts);
        self.completion_tokens += texts.iter().filter(|text| text.token.is_some()).count();
        Ok(match self.endpoint {
            Endpoint::Chat => {
                let mut message = json!({"role": "assistant", "content": text, "refusal": null});
                let mut finish_reason = finish_reason;
                if let Some(reader) = &mut self.reader {
                    let content = reader.push(&text);
                    let (rest, calls) = reader.end();
                    let content = format!("{content}{rest}");
                    message["content"] =
                        if content.is_empty() && !calls.is_empty() { Value::Null } else { content.into() };
                    if !calls.is_empty() {
                        message["tool_calls"] = calls.into();
                        finish_reason = of_calls(finish_reason);
                    }
                }
                json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason})
            }
            Endpoint::Response | Endpoint::Completion | Endpoint::Score => {
                json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})
            }
        })
    }

    /// The first part of a stream.
    pub(super) fn start(&self) -> Option<Value> {
        let delta =
            json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null});
        (self.endpoint == Endpoint::Chat).then(|| self.chunk(&json!([delta]), None))
    }

    /// Whether every text has ended, or one has failed.
    pub(super) fn has_ended(&self) -> bool {
        self.num_open == 0
    }

    /// The parts of a stream with new text: none where there is nothing to show or after a failure, and several at the end.
    pub(super) fn parts(
        &mut self,
        (index, text): (usize, Result<NewText, ApiError>),
        include_usage: bool,
    ) -> Vec<Value> {
        if self.num_open == 0 {
            return Vec::new();
        }
        let (text, reason) = match text.and_then(|text| Ok((finish_reason(text.ending)?, text))) {
            Ok((reason, text)) => (text, reason),
            Err(error) => {
                self.num_open = 0;
                return vec![error.json()];
            }
        };
        self.completion_tokens += usize::from(text.token.is_some());
        if text.text.is_empty() && text.shown.is_empty() && reason.is_none() {
            return Vec::new();
        }
        let logprobs = self.logprobs(index, std::slice::from_ref(&text));
        let (mut content, mut calls) = (text.text, Vec::new());
        if let Some(reader) = &mut self.reader {
            content = reader.push(&content);
            if reason.is_some() {
                let (rest, found) = reader.end();
                content.push_str(&rest);
                calls = found;
            }
        }
        let finish_reason = if calls.is_empty() { reason } else { of_calls(reason) };
        let new = match self.endpoint {
            Endpoint::Chat => json!({"delta": {"content": content}}),
            Endpoint::Response | Endpoint::Completion | Endpoint::Score => json!({"text": content}),
        };
        let mut new = vec![(new, logprobs)];
        for (index, mut call) in calls.into_iter().enumerate() {
            call["index"] = json!(index);
            new.push((json!({"delta": {"tool_calls": [call]}}), Value::Null));
        }
        let last = new.len() - 1;
        let chunks = new.into_iter().enumerate().map(|(at, (mut choice, logprobs))| {
            choice["index"] = json!(index);
            choice["logprobs"] = logprobs;
            choice["finish_reason"] = json!(finish_reason.filter(|_| at == last));
            self.chunk(&json!([choice]), None)
        });
        let mut parts: Vec<Value> = chunks.collect();
        self.num_open -= usize::from(reason.is_some());
        parts.extend((self.has_ended() && include_usage).then(|| self.chunk(&json!([]), Some(&self.usage()))));
        parts
    }

    fn chunk(&self, choices: &Value, usage: Option<&Value>) -> Value {
        let object = if self.endpoint == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
            "usage": usage,
        })
    }

    fn usage(&self) -> Value {
        let (prompt, completion) = (self.prompt_tokens, self.completion_tokens);
        json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
    }

    /// The logarithms of probabilities of the tokens of a text; null where they were not asked for.
    fn logprobs(&mut self, index: usize, texts: &[NewText]) -> Value {
        let tokens: Vec<&ShownToken> = texts.iter().flat_map(|text| &text.shown).collect();
        if tokens.is_empty() {
            return Value::Null;
        }
        if self.endpoint == Endpoint::Chat {
            let of =
                |bytes: &[u8], text: &str, logprob: f64| json!({"bytes": bytes, "token": text, "logprob": logprob});
            let content = tokens.iter().map(|ShownToken { bytes, logprobs, .. }| {
                let mut token = of(bytes, &String::from_utf8_lossy(bytes), logprobs.chosen);
                let top =
                    logprobs.top.iter().map(|(id, logprob)| of(&self.bytes_of(*id), &self.text_of(*id), *logprob));
                token["top_logprobs"] = top.collect();
                token
            });
            return json!({"content": content.collect::<Vec<_>>(), "refusal": null});
        }
        let top = tokens.iter().map(|token| {
            let mut top = Map::new();
            for (id, logprob) in &token.logprobs.top {
                // Of tokens that read alike, the most likely one.
                top.entry(self.text_of(*id)).or_insert(json!(logprob));
            }
            Value::Object(top)
        });
        let top: Vec<Value> = top.collect();
        let is_first = |byte: &&u8| **byte & 0b1100_0000 != 0b1000_0000;
        let offset = |token: &&ShownToken| {
            let within = token.bytes.first().is_some_and(|byte| !is_first(&byte));
            let start = self.text_offsets[index] - usize::from(within && self.text_offsets[index] > 0);
            self.text_offsets[index] += token.bytes.iter().filter(is_first).count();
            start
        };
        let offsets: Vec<usize> = tokens.iter().map(offset).collect();
        let words: Vec<_> = tokens.iter().map(|token| String::from_utf8_lossy(&token.bytes)).collect();
        json!({
            "tokens": words, "token_logprobs": tokens.iter().map(|token| token.logprobs.chosen).collect::<Vec<_>>(),
            "top_logprobs": top, "text_offset": offsets,
        })
    }

    fn bytes_of(&self, id: u32) -> Vec<u8> {
        self.opened.tokenizer.bytes_in_text(id)
    }

    /// A token as text; one that adds no text by its name.
    fn text_of(&self, id: u32) -> String {
        match self.bytes_of(id) {
            bytes if bytes.is_empty() => self.opened.tokenizer.token_text(id).unwrap_or_default(),
            bytes => String::from_utf8_lossy(&bytes).into_owned(),
        }
    }
}

/// Why a text ended, in OpenAI's words; `None` where it goes on.
fn finish_reason(ending: Option<Ending>) -> Result<Option<&'static str>, ApiError> {
    let failure = |ending: Ending| match ending {
        Ending::OutOfGrammar => "what the schema allows next is too much to compute",
        _ => NON_FINITE,
    };
    let reason = |ending: Ending| ending.finish_reason().ok_or_else(|| ApiError::failed(failure(ending)));
    ending.map(reason).transpose()
}

/// Why an answer with calls ended.
fn of_calls(reason: Option<&'static str>) -> Option<&'static str> {
    reason.map(|reason| if reason == "stop" { "tool_calls" } else { reason })
}
