//! OpenAI's Responses: requests are read as those of a chat, and answers and streams are written from a chat's.

use axum::response::sse::Event;
use serde_json::{Map, Value, json};

use super::error::ApiError;

/// An answer in the form of Responses, as far as it is written.
#[derive(Debug, Default)]
pub(super) struct AsResponse {
    /// What the request said, which an answer repeats.
    request: Map<String, Value>,
    /// Id, time and model.
    start: Value,
    output: Vec<Value>,
    /// Whether the last of `output` is a message that goes on.
    is_open: bool,
    reason: Value,
    usage: Value,
    error: Option<Value>,
    num_events: usize,
}

impl AsResponse {
    /// The same request to a chat, and the form of its answer.
    pub(super) fn read(mut body: Map<String, Value>) -> Result<(Map<String, Value>, Self), ApiError> {
        let mut request = body.clone();
        request.retain(|key, _| !["input", "stream", "stream_options"].contains(&key.as_str()));
        let wrong = |text: &str, param: &str| ApiError::wrong(format!("`{param}`: {text}"), Some(param));
        if body.get("previous_response_id").is_some_and(|id| !id.is_null()) {
            let text = "answers are not kept here; `input` takes the whole conversation";
            return Err(wrong(text, "previous_response_id"));
        }
        body.shift_remove("stream_options");
        let mut messages = Vec::new();
        if let Some(text) = body.shift_remove("instructions").filter(|text| !text.is_null()) {
            messages.push(json!({"role": "developer", "content": text}));
        }
        match body.shift_remove("input") {
            Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
            Some(Value::Array(items)) if !items.is_empty() => {
                for (index, item) in items.into_iter().enumerate() {
                    take_item(&mut messages, item).map_err(|text| wrong(&text, &format!("input[{index}]")))?;
                }
            }
            _ => return Err(wrong("expected a text or a list of messages", "input")),
        }
        body.insert("messages".to_owned(), messages.into());
        let max_tokens = body.shift_remove("max_output_tokens");
        body.extend(max_tokens.map(|tokens| ("max_tokens".to_owned(), tokens)));
        let framed = |mut function: Value| {
            function.as_object_mut().map(|keys| keys.shift_remove("type"));
            json!({"type": "function", "function": function})
        };
        for tool in body.get_mut("tools").and_then(Value::as_array_mut).into_iter().flatten() {
            if tool["type"] != "function" {
                return Err(wrong("only functions can be called here", "tools"));
            }
            *tool = framed(tool.take());
        }
        if let Some(choice) = body.get_mut("tool_choice").filter(|choice| choice["type"] == "function") {
            *choice = framed(choice.take());
        }
        match body.shift_remove("text") {
            Some(Value::Object(mut text)) => {
                if let Some(mut format) = text.shift_remove("format") {
                    let schema = format.get_mut("schema").map(Value::take);
                    let format = json!({"type": format["type"], "json_schema": {"schema": schema}});
                    body.insert("response_format".to_owned(), format);
                }
                body.extend(text);
            }
            None | Some(Value::Null) => {}
            Some(_) => return Err(wrong("expected an object with `format`", "text")),
        }
        let is_streamed = body.get("stream") == Some(&json!(true));
        body.extend(is_streamed.then(|| ("stream_options".to_owned(), json!({"include_usage": true}))));
        Ok((body, Self { request, ..Self::default() }))
    }

    /// The answer, from that of a chat.
    pub(super) fn whole(mut self, chat: &Value) -> Value {
        let choice = &chat["choices"][0];
        drop(self.take_start(chat));
        drop(self.take_delta(&choice["message"]));
        self.reason = choice["finish_reason"].clone();
        self.usage = chat["usage"].clone();
        drop(self.close());
        self.response()
    }

    /// The events of a part of a chat's stream.
    pub(super) fn events(&mut self, part: &Value) -> Vec<Event> {
        if let Some(error) = part.get("error") {
            self.error = Some(error.clone());
            return Vec::new();
        }
        let mut events = self.take_start(part);
        let choice = &part["choices"][0];
        events.extend(self.take_delta(&choice["delta"]));
        if !choice["finish_reason"].is_null() {
            self.reason = choice["finish_reason"].clone();
        }
        if !part["usage"].is_null() {
            self.usage = part["usage"].clone();
        }
        events.into_iter().map(|event| self.numbered(event)).collect()
    }

    /// The last events of a stream.
    pub(super) fn end(&mut self) -> Vec<Event> {
        let mut events = self.close();
        let response = self.response();
        let status = response["status"].as_str().unwrap_or_default();
        events.push(json!({"type": format!("response.{status}"), "response": response}));
        events.into_iter().map(|event| self.numbered(event)).collect()
    }

    fn numbered(&mut self, mut event: Value) -> Event {
        event["sequence_number"] = json!(self.num_events);
        self.num_events += 1;
        Event::default().event(event["type"].as_str().unwrap_or_default()).data(event.to_string())
    }

    fn take_start(&mut self, chat: &Value) -> Vec<Value> {
        if !self.start.is_null() {
            return Vec::new();
        }
        let id = chat["id"].as_str().unwrap_or_default().replace("chatcmpl-", "");
        self.start = json!({"id": id, "created_at": chat["created"], "model": chat["model"]});
        let of = |name: &str| json!({"type": format!("response.{name}"), "response": self.response()});
        vec![of("created"), of("in_progress")]
    }

    /// More text, or calls.
    fn take_delta(&mut self, delta: &Value) -> Vec<Value> {
        let mut events = Vec::new();
        if let Some(text) = delta["content"].as_str().filter(|text| !text.is_empty()) {
            if !self.is_open {
                self.is_open = true;
                let empty = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
                let message = json!({"type": "message", "role": "assistant", "status": "in_progress", "content": []});
                events.push(self.add("msg", message));
                events.push(self.of_last("response.content_part.added", json!({"content_index": 0, "part": empty})));
                self.set_last("content", json!([empty]));
            }
            let whole = self.text() + text;
            self.set_last(
                "content",
                json!([{"type": "output_text", "text": whole, "annotations": [], "logprobs": []}]),
            );
            let delta = json!({"content_index": 0, "delta": text, "logprobs": []});
            events.push(self.of_last("response.output_text.delta", delta));
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            events.extend(self.close());
            let (name, arguments) = (&call["function"]["name"], &call["function"]["arguments"]);
            let call = json!({"type": "function_call", "call_id": call["id"], "name": name, "arguments": "", "status": "in_progress"});
            events.push(self.add("fc", call));
            events.push(self.of_last("response.function_call_arguments.delta", json!({"delta": arguments})));
            let done = json!({"name": name, "arguments": arguments});
            events.push(self.of_last("response.function_call_arguments.done", done));
            self.set_last("arguments", arguments.clone());
            events.push(self.done());
        }
        events
    }

    /// Ends the message.
    fn close(&mut self) -> Vec<Value> {
        if !std::mem::take(&mut self.is_open) {
            return Vec::new();
        }
        let text = self.text();
        let part = self.output.last().map(|message| message["content"][0].clone());
        let done = json!({"content_index": 0, "text": text, "logprobs": []});
        let done = self.of_last("response.output_text.done", done);
        let part = self.of_last("response.content_part.done", json!({"content_index": 0, "part": part}));
        vec![done, part, self.done()]
    }

    fn add(&mut self, kind: &str, mut item: Value) -> Value {
        let id = self.start["id"].as_str().unwrap_or_default();
        item["id"] = json!(format!("{kind}_{id}_{}", self.output.len()));
        self.output.push(item.clone());
        json!({"type": "response.output_item.added", "output_index": self.output.len() - 1, "item": item})
    }

    fn done(&mut self) -> Value {
        let status = if self.reason == "length" { "incomplete" } else { "completed" };
        self.set_last("status", json!(status));
        json!({"type": "response.output_item.done", "output_index": self.output.len().saturating_sub(1),
               "item": self.output.last()})
    }

    /// An event of the last of `output`.
    fn of_last(&self, kind: &str, mut event: Value) -> Value {
        event["type"] = json!(kind);
        event["item_id"] = self.output.last().map(|item| item["id"].clone()).into();
        event["output_index"] = json!(self.output.len().saturating_sub(1));
        event
    }

    fn set_last(&mut self, key: &str, value: Value) {
        if let Some(last) = self.output.last_mut() {
            last[key] = value;
        }
    }

    fn text(&self) -> String {
        let text = self.output.last().and_then(|message| message["content"][0]["text"].as_str());
        text.unwrap_or_default().to_owned()
    }

    fn response(&self) -> Value {
        let (status, details) = match (&self.error, self.reason.as_str()) {
            (Some(_), _) => ("failed", Value::Null),
            (None, None) => ("in_progress", Value::Null),
            (None, Some("length")) => ("incomplete", json!({"reason": "max_output_tokens"})),
            (None, Some(_)) => ("completed", Value::Null),
        };
        let usage = self.usage.as_object().map(|usage| {
            json!({"input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
                   "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                   "total_tokens": usage["total_tokens"]})
        });
        let error = self.error.as_ref().map(|error| json!({"code": "server_error", "message": error["message"]}));
        let mut response = json!({
            "instructions": null, "metadata": {}, "parallel_tool_calls": true, "temperature": 1.0, "tool_choice": "auto",
            "tools": [], "top_p": 1.0, "max_output_tokens": null, "text": {"format": {"type": "text"}},
        });
        let id = format!("resp_{}", self.start["id"].as_str().unwrap_or_default());
        let own = json!({
            "id": id, "object": "response", "created_at": self.start["created_at"], "model": self.start["model"],
            "status": status, "incomplete_details": details, "error": error, "output": self.output, "usage": usage,
            "previous_response_id": null,
        });
        let said = self.request.iter().filter(|(_, value)| !value.is_null());
        for (key, value) in said.chain(own.as_object().into_iter().flatten()) {
            response[key] = value.clone();
        }
        response
    }
}

/// An item of `input` as a message of a chat.
fn take_item(messages: &mut Vec<Value>, mut item: Value) -> Result<(), String> {
    if !item.is_object() {
        return Err("is no object".to_owned());
    }
    let kind = item["type"].as_str().unwrap_or("message").to_owned();
    let text_parts = |content: Value| match content {
        Value::Array(parts) => parts
            .into_iter()
            .map(|mut part| {
                if part["type"] == "input_text" || part["type"] == "output_text" {
                    json!({"type": "text", "text": part["text"].take()})
                } else {
                    part
                }
            })
            .collect(),
        content => content,
    };
    match kind.as_str() {
        "message" => messages.push(json!({"role": item["role"], "content": text_parts(item["content"].take())})),
        "function_call" => {
            let call = json!({"id": item["call_id"], "type": "function",
                              "function": {"name": item["name"], "arguments": item["arguments"]}});
            match messages.last_mut().filter(|last| last["role"] == "assistant") {
                Some(last) => match last["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                },
                None => messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
            }
        }
        "function_call_output" => {
            let content = text_parts(item["output"].take());
            messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": content}));
        }
        other => {
            return Err(format!("has the `type` {other:?}; there are message, function_call, function_call_output"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> Result<(Value, AsResponse), Value> {
        let read = AsResponse::read(body.as_object().unwrap().clone());
        read.map(|(chat, form)| (chat.into(), form)).map_err(|error| error.json()["error"]["param"].clone())
    }

    #[test]
    fn a_request_is_that_of_a_chat() {
        let call = json!({"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"});
        let (chat, _) = read(&json!({
            "instructions": "Be brief.", "max_output_tokens": 9, "stream": true, "text": {"verbosity": "medium", "format":
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}, "tools": [{"type": "function", "name": "find"}],
            "tool_choice": {"type": "function", "name": "find"},
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, call, call,
                      {"type": "function_call_output", "call_id": "c1", "output": "7"}],
        }))
        .unwrap();
        let called = json!({"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}});
        let expected = json!({
            "messages": [{"role": "developer", "content": "Be brief."},
                         {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                         {"role": "assistant", "content": null, "tool_calls": [called, called]},
                         {"role": "tool", "tool_call_id": "c1", "content": "7"}],
            "max_tokens": 9, "stream": true, "stream_options": {"include_usage": true}, "verbosity": "medium",
            "tools": [{"type": "function", "function": {"name": "find"}}],
            "tool_choice": {"type": "function", "function": {"name": "find"}},
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        });
        assert_eq!(chat, expected);
        for (wrong, param) in [
            (json!({}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": ["Hi"]}), "input[0]"),
            (json!({"input": [{"type": "reasoning"}]}), "input[0]"),
            (json!({"input": "Hi", "text": "json"}), "text"),
            (json!({"input": "Hi", "tools": [{"type": "web_search"}]}), "tools"),
            (json!({"input": "Hi", "previous_response_id": "resp_1"}), "previous_response_id"),
        ] {
            assert_eq!(read(&wrong).unwrap_err(), param);
        }
    }

    #[test]
    fn an_answer_has_the_text_and_the_calls_of_the_chats() {
        let call = json!({"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}});
        let chat = json!({
            "id": "chatcmpl-1", "created": 5, "model": "m",
            "choices": [{"message": {"content": "Yes.", "tool_calls": [call]}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        });
        let (_, form) = read(&json!({"input": "Hi", "temperature": 0, "metadata": {"a": "b"}})).unwrap();
        let response = form.whole(&chat);
        let pick =
            |places: &[&str]| places.iter().map(|place| response.pointer(place).unwrap().clone()).collect::<Value>();
        assert_eq!(pick(&["/id", "/status", "/temperature", "/metadata/a"]), json!(["resp_1", "incomplete", 0, "b"]));
        assert_eq!(
            pick(&["/output/0/content/0/text", "/output/1/name", "/output/1/call_id"]),
            json!(["Yes.", "find", "c1"])
        );
        assert_eq!(pick(&["/usage/input_tokens", "/usage/output_tokens"]), json!([3, 4]));
        assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
    }
}
