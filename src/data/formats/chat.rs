//! Converts the common forms of messages, turns and tools to the one form that chat templates get: OpenAI's, with the
//! arguments of a call as an object.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

use super::{TEXT_ONLY, keys_of, kind_of};
use crate::data::template::ChatTemplate;

/// Names of roles in data files, and the names that chat templates use.
const ROLES: [(&str, &str); 16] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("bot", "assistant"),
    ("assistant", "assistant"),
    ("model", "assistant"),
    ("function_call", "assistant"),
    ("system", "system"),
    ("developer", "system"),
    ("tool", "tool"),
    ("observation", "tool"),
    ("function", "tool"),
    ("function_response", "tool"),
];

/// Keys of a message that say whether it carries loss: OpenAI's, axolotl's two, and ms-swift's.
const LOSS_KEYS: [&str; 4] = ["weight", "train", "training", "loss"];

/// The template's name for a role. An unknown role is kept if the template names it.
fn role(name: &str, template: Option<&ChatTemplate>) -> Result<String, String> {
    let is_named = template.is_some_and(|template| template.names_role(name));
    match ROLES.iter().find(|(known, _)| *known == name) {
        Some((_, role)) if name != "developer" || !is_named => Ok((*role).to_owned()),
        _ if is_named => Ok(name.to_owned()),
        _ => {
            let known: Vec<&str> = ROLES.iter().map(|(name, _)| *name).collect();
            let meant = name.to_lowercase();
            let hint = if known.contains(&&*meant) { format!("\n  hint: write {meant:?}") } else { String::new() };
            Err(format!("its role is {name:?}; known are {}{hint}", known.join(", ")))
        }
    }
}

/// A message of a `messages` row.
pub(super) fn message(message: &Value, template: Option<&ChatTemplate>) -> Result<Value, String> {
    let Some(object) = message.as_object() else {
        return Err(format!("must be an object with `role` and `content`, not {}", kind_of(message)));
    };
    let Some(name) = message["role"].as_str() else {
        let hint = if message["from"].is_null() { "" } else { "\n  hint: `from` and `value` are format \"sharegpt\"" };
        return Err(format!("has no text in `role`; it has {}{hint}", keys_of(message)));
    };
    // Parquet writes absent keys as null, and templates test whether a key is present.
    let mut out: Map<String, Value> =
        object.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), value.clone())).collect();
    out.insert("role".into(), role(name, template)?.into());
    super::refuse_media(message)?;
    if out.contains_key("refusal") {
        return Err("has a `refusal`, which this trainer does not read; put it into `content`".into());
    }
    // `function_call` is OpenAI's older form for calling one function.
    let calls = match (out.remove("tool_calls"), out.remove("function_call")) {
        (Some(_), Some(_)) => return Err("has `tool_calls` and `function_call`, which are one thing".into()),
        (Some(calls), None) => Some(calls),
        (None, call) => call.map(|call| json!([call])),
    };
    if let Some(calls) = calls.filter(|calls| calls.as_array().is_none_or(|calls| !calls.is_empty())) {
        out.insert("tool_calls".into(), tool_calls(&calls)?);
    }
    // These keys mean the same thing; transformers passes them to templates.
    let mut thoughts = ["reasoning_content", "thinking", "reasoning"].map(|key| out.remove(key)).into_iter().flatten();
    let thought = thoughts.next();
    if thoughts.any(|other| Some(&other) != thought.as_ref()) {
        return Err(
            "has different texts in `reasoning_content`, `thinking` and `reasoning`, which are one thing".into()
        );
    }
    if let Some(thought) = thought {
        out.insert("reasoning_content".into(), thought.clone());
        out.insert("thinking".into(), thought);
    }
    match out.get("content") {
        // Qwen3's template needs `content` to be present.
        None if out.contains_key("tool_calls") => drop(out.insert("content".into(), "".into())),
        None if message.get("content").is_some() => return Err("its `content` is null".into()),
        None => return Err(format!("has no `content`; it has {}", keys_of(message))),
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let content = content_of_parts(parts, template)?;
            out.insert("content".into(), content);
        }
        Some(other) => return Err(format!("`content` must be text or a list of parts, not {}", kind_of(other))),
    }
    read_mask(&mut out)?;
    Ok(Value::Object(out))
}

/// Reads whether a message carries loss. Without loss its `weight` becomes 0; with loss on a part, `train_detail` becomes
/// the ranges of characters that have it.
fn read_mask(message: &mut Map<String, Value>) -> Result<(), String> {
    let mut carries_loss: Option<(&str, bool)> = None;
    for key in LOSS_KEYS {
        let Some(given) = message.remove(key) else { continue };
        let said = match (given.as_bool(), given.as_f64()) {
            (Some(said), _) => said,
            (_, Some(0.0)) => false,
            (_, Some(1.0)) => true,
            _ => {
                return Err(format!(
                    "`{key}` must be 0 or 1, or false or true: whether an answer carries loss\n  hint: leave the key out \
                     of the row where it means another thing"
                ));
            }
        };
        if let Some((other, _)) = carries_loss.filter(|(_, other)| *other != said) {
            return Err(format!("`{other}` and `{key}` say whether the message carries loss, and differ"));
        }
        carries_loss = Some((key, said));
    }
    let detail = message.remove("train_detail").map(|detail| trained_ranges(&detail, message)).transpose()?;
    let is_answer = message["role"] == "assistant";
    match (carries_loss, detail) {
        (Some((_, false)), _) => drop(message.insert("weight".into(), json!(0))),
        (_, Some(ranges)) if ranges.is_empty() => drop(message.insert("weight".into(), json!(0))),
        (_, Some(ranges)) if is_answer => drop(message.insert("train_detail".into(), json!(ranges))),
        (None, None) => {}
        (Some((_, true)), None) if is_answer => {}
        (said, _) => {
            let (key, role) = (said.map_or("train_detail", |(key, _)| key), &message["role"]);
            return Err(format!(
                "`{key}` asks for loss on a message of {role}; only an answer carries loss\n  hint: leave the key out, or set \
                 `data.train_on_inputs = true`, which trains on every token"
            ));
        }
    }
    Ok(())
}

/// The characters of a message's content that carry loss by axolotl's `train_detail`: half-open ranges, ascending. There
/// `end_offset` is the last character of a part.
fn trained_ranges(detail: &Value, message: &Map<String, Value>) -> Result<Vec<[u64; 2]>, String> {
    let Some(Value::String(content)) = message.get("content") else {
        return Err("`train_detail` needs a `content` that is text".into());
    };
    if message.contains_key("tool_calls") || message.contains_key("reasoning_content") {
        return Err(
            "`train_detail` says nothing of calls and reasoning\n  hint: `weight` 0 or 1 is for all of a message"
                .into(),
        );
    }
    let (mut ranges, mut at, length) = (Vec::new(), 0, content.chars().count() as u64);
    for part in detail.as_array().ok_or(DETAIL)? {
        let numbers = (part["begin_offset"].as_u64(), part["end_offset"].as_u64(), part["train"].as_bool());
        let (Some(begin), Some(last), Some(train)) = numbers else { return Err(DETAIL.into()) };
        if begin < at || last < begin || last >= length {
            return Err(format!(
                "{DETAIL}; {begin} to {last} is not after {at}, or beyond the {length} characters of the content"
            ));
        }
        at = last + 1;
        if train {
            ranges.push([begin, at]);
        }
    }
    Ok(ranges)
}

const DETAIL: &str = "`train_detail` must be a list of `begin_offset`, `end_offset` (the last character) and `train`, in \
                      ascending order and without overlaps";

/// The content for a list of text parts: the list itself where the template reads lists, otherwise one text. The parts
/// are joined with nothing between them, as templates that read lists do.
fn content_of_parts(parts: &[Value], template: Option<&ChatTemplate>) -> Result<Value, String> {
    let texts = parts.iter().map(|part| match (part, part["type"].as_str(), part["text"].as_str()) {
        (Value::String(text), ..) => Ok(text.as_str()),
        (Value::Object(keys), Some("text" | "input_text" | "output_text"), Some(text)) => {
            let is_media = |key: &str| ["image", "audio", "video"].iter().any(|kind| key.starts_with(kind));
            match keys.iter().find(|(key, value)| !value.is_null() && is_media(key)) {
                Some((key, _)) => Err(format!("a part of its `content` has `{key}`; {TEXT_ONLY}")),
                None => Ok(text),
            }
        }
        (_, Some("text" | "input_text" | "output_text"), None) => {
            Err("a part of its `content` has no `text`".to_owned())
        }
        (_, Some(kind), _) => Err(format!("a part of its `content` is of type {kind:?}; {TEXT_ONLY}")),
        _ => Err("a part of its `content` is neither text nor an object with `type` and `text`".to_owned()),
    });
    let texts: Vec<&str> = texts.collect::<Result<_, _>>()?;
    if template.is_some_and(ChatTemplate::reads_parts) {
        return Ok(texts.iter().map(|text| json!({"type": "text", "text": text})).collect());
    }
    Ok(texts.concat().into())
}

/// A turn of a `sharegpt` row.
pub(super) fn turn(turn: &Value, template: Option<&ChatTemplate>) -> Result<Value, String> {
    let Some(object) = turn.as_object() else {
        return Err(format!("must be an object with `from` and `value`, not {}", kind_of(turn)));
    };
    let (Some(from), value) = (turn["from"].as_str(), &turn["value"]) else {
        let hint = if turn["role"].is_null() { "" } else { "\n  hint: `role` and `content` are format \"messages\"" };
        return Err(format!("needs text in `from` and `value`; it has {}{hint}", keys_of(turn)));
    };
    // All other keys are those of `messages`.
    let mut message: Map<String, Value> =
        object.iter().filter(|(key, _)| !["from", "value"].contains(&key.as_str())).map(owned).collect();
    if ["role", "content"].iter().any(|key| message.get(*key).is_some_and(|value| !value.is_null())) {
        return Err("has `from` and `value`, and `role` or `content` too, which are one thing".into());
    }
    message.insert("role".into(), from.into());
    if from == "function_call" {
        let parsed: Option<Value> = match value {
            Value::String(text) => serde_json::from_str(text).ok(),
            value => Some(value.clone()),
        };
        let calls = match parsed {
            Some(Value::Array(calls)) if !calls.is_empty() => Value::Array(calls),
            Some(Value::Object(call)) => json!([call]),
            _ => {
                let reason = "a `function_call` must be JSON with `name` and `arguments`, or a list of such objects";
                return Err(reason.into());
            }
        };
        message.insert("tool_calls".into(), calls);
    } else if value.is_string() || value.is_array() {
        message.insert("content".into(), value.clone());
    } else {
        return Err(format!("needs text in `value`, not {}", kind_of(value)));
    }
    self::message(&Value::Object(message), template)
}

/// Calls with `type`, `function.name`, `function.arguments` as an object, and all their other keys.
fn tool_calls(calls: &Value) -> Result<Value, String> {
    let Some(calls) = calls.as_array() else {
        return Err(format!("`tool_calls` must be a list, not {}", kind_of(calls)));
    };
    calls.iter().map(tool_call).collect::<Result<Value, String>>()
}

fn tool_call(call: &Value) -> Result<Value, String> {
    let function = if call["function"].is_object() { &call["function"] } else { call };
    let Some(name) = function["name"].as_str() else {
        return Err("a tool call has no `name` of its function".into());
    };
    let arguments = match &function["arguments"] {
        Value::Null => json!({}),
        Value::String(text) if text.trim().is_empty() => json!({}),
        Value::String(text) => serde_json::from_str(text)
            .ok()
            .filter(Value::is_object)
            .ok_or_else(|| format!("the `arguments` of the call of `{name}` are not a JSON object: {text:.60?}"))?,
        arguments @ Value::Object(_) => arguments.clone(),
        other => {
            return Err(format!("the `arguments` of the call of `{name}` must be an object, not {}", kind_of(other)));
        }
    };
    let id = call.get("id").filter(|id| !id.is_null()).cloned();
    // Keys and their order are kept: some templates write a call as JSON.
    let mut out = if call["function"].is_object() {
        Value::Object(call.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()).map(owned).collect())
    } else {
        json!({"function": call.as_object().into_iter().flatten().filter(|(key, _)| *key != "id").map(owned).collect::<Map<_, _>>()})
    };
    out["function"]["arguments"] = arguments;
    if out["type"].is_null() {
        out["type"] = "function".into();
    }
    if let Some(id) = id {
        out["id"] = id;
    }
    Ok(out)
}

fn owned((key, value): (&String, &Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

/// Gives an id to calls without one, and gives the results that follow them those ids, in order. Some templates
/// (Mistral's) refuse calls without an id. All templates accept nine letters and digits.
pub(super) fn number_calls(messages: &mut [Value]) {
    let (mut num_calls, mut unanswered) = (0, VecDeque::new());
    for message in messages {
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            if call["id"].is_null() {
                call["id"] = format!("call{num_calls:05}").into();
            }
            num_calls += 1;
            unanswered.push_back(call["id"].clone());
        }
        if message["role"] == "tool" {
            let given = message["tool_call_id"].clone();
            if given.is_null() {
                if let Some(id) = unanswered.pop_front() {
                    message["tool_call_id"] = id;
                }
            } else {
                unanswered.retain(|id| *id != given);
            }
        }
    }
}

/// The tools of a row, given as a list or as its JSON text. A bare function is wrapped in the object that templates
/// expect.
pub(super) fn tools(tools: Option<&Value>) -> Result<Option<Value>, String> {
    let tools = match tools {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => {
            serde_json::from_str::<Value>(text).map_err(|error| format!("must be a list of schemas: {error}"))?
        }
        Some(tools) => tools.clone(),
    };
    let Value::Array(tools) = tools else {
        return Err(format!("must be a list of schemas, not {}", kind_of(&tools)));
    };
    let framed = tools.into_iter().map(|tool| match tool {
        Value::String(text) => {
            serde_json::from_str(&text).map_err(|error| format!("has a tool that is no JSON: {error}"))
        }
        tool => Ok(tool),
    });
    let framed = framed.map(|tool| match tool? {
        tool if tool["function"]["name"].is_string() => Ok(tool),
        tool if tool["name"].is_string() => Ok(json!({"type": "function", "function": tool})),
        _ => Err("has a tool without the `name` of its function".to_owned()),
    });
    // An empty list is given to the template, as by transformers.
    framed.collect::<Result<Value, String>>().map(Some)
}

/// Drops the nulls of a row that `datasets` wrote as JSON. It gives every tool the properties of all tools, and every call the
/// arguments of all calls, as null; a property that is null is no schema, so that such a row shows it.
pub(super) fn drop_nulls_of_arrow(messages: &mut [Value], tools: &mut Option<Value>) {
    let Some(Value::Array(tools)) = tools else { return };
    let properties = tools.iter().filter_map(|tool| tool["function"]["parameters"]["properties"].as_object());
    if !properties.flat_map(Map::values).any(Value::is_null) {
        return;
    }
    tools.iter_mut().for_each(drop_nulls);
    let calls = messages.iter_mut().filter_map(|message| message.get_mut("tool_calls")?.as_array_mut());
    calls.flatten().for_each(|call| drop_nulls(&mut call["function"]["arguments"]));
}

fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}
