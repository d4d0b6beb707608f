//! The tokens of a request's prompts. A prompt may take seconds to render and to tokenise: this is for threads that nobody
//! else waits for.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::api::{AskedContent, Asking, Endpoint, Prompts, is_off};
use super::error::{ApiError, without_hint};
use super::sight::{self, Sight};
use crate::data::encode::{Encoder, taken_out};
use crate::data::formats::{Sample, conversation};
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;
use crate::generate::GenerateError;
use crate::images::{Image, is_of_image};

/// Keys of messages that training reads.
const KEYS: [&str; 11] = [
    "role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning",
    "thinking", "weight", "refusal",
];

/// What prompts are made with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prompting<'a> {
    /// What reads images, if the model sees some.
    pub(super) sight: Option<&'a Sight>,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: Option<&'a ChatTemplate>,
    /// The system message of conversations that have none.
    pub(super) system: Option<&'a str>,
    pub(super) max_tokens: usize,
    pub(super) vocab_size: usize,
    /// Bytes of the longest text of so many tokens.
    pub(super) max_bytes: usize,
}

/// The tokens of each prompt, and the images in them, which are not forgotten meanwhile.
pub(super) type Prompted = (Vec<Vec<u32>>, Vec<Arc<Image>>);

impl Prompting<'_> {
    /// The tokens to continue or to score, of each prompt.
    pub(super) fn ids(&self, asking: &Asking) -> Result<Prompted, ApiError> {
        let is_scored = asking.endpoint == Endpoint::Score;
        match (&asking.content, self.template) {
            (AskedContent::Prompts(prompts), _) => Ok((self.text_prompts(prompts, is_scored)?, Vec::new())),
            (AskedContent::Messages(_), None) => {
                let other = if is_scored { "`input` takes a text" } else { "/v1/completions continues a text" };
                Err(ApiError::wrong(format!("this model has no chat template; {other}"), Some("model")))
            }
            (AskedContent::Messages(messages), Some(template)) => {
                self.conversation(messages, asking.tools.as_ref(), template, is_scored)
            }
        }
    }

    fn text_prompts(&self, prompts: &Prompts, is_scored: bool) -> Result<Vec<Vec<u32>>, ApiError> {
        let text_ids = |text: &String| self.text_ids(text, is_scored);
        let given = |ids: &Vec<u32>| match ids.iter().find(|id| is_of_image(**id)) {
            Some(&id) => Err(ApiError::of_prompt(&GenerateError::UnknownToken { id, vocab_size: self.vocab_size })),
            None => Ok(ids.clone()),
        };
        match prompts {
            Prompts::Text(text) => Ok(vec![text_ids(text)?]),
            Prompts::Tokens(ids) => Ok(vec![given(ids)?]),
            Prompts::Texts(texts) => texts.iter().map(text_ids).collect(),
            Prompts::ManyTokens(prompts) => prompts.iter().map(given).collect(),
        }
    }

    fn text_ids(&self, text: &str, is_scored: bool) -> Result<Vec<u32>, ApiError> {
        self.check_length(text)?;
        // A text is scored behind its end.
        let encoder =
            Encoder { tokenizer: self.tokenizer, template: None, train_on_inputs: false, scores: true, images: None };
        let ids = if is_scored {
            encoder.encode(&Sample::Text(text.to_owned())).map(|row| row.ids).map_err(|error| error.to_string())
        } else {
            self.tokenizer.encode(text, true).map_err(|error| error.to_string())
        };
        ids.map_err(|error| ApiError::wrong(error, Some(if is_scored { "input" } else { "prompt" })))
    }

    fn conversation(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        template: &ChatTemplate,
        is_scored: bool,
    ) -> Result<Prompted, ApiError> {
        let wrong = |error: &dyn std::fmt::Display| {
            let text = error.to_string();
            let is_of_tools = ["`tools`", "tool "].iter().any(|start| text.starts_with(start));
            let param = if is_of_tools { "tools" } else { "messages" };
            ApiError::wrong(without_hint(&text), Some(param))
        };
        // A template writes a token for each, at least.
        if messages.len() > self.max_tokens {
            return Err(ApiError::beyond_context(&format!("{} messages", messages.len()), self.max_tokens));
        }
        let messages = messages.iter().enumerate().map(|(index, message)| cleaned(index, message));
        let mut messages = messages.collect::<Result<Vec<Value>, _>>()?;
        let sight = self.sight.filter(|_| template.reads_parts() && !is_scored);
        let held = match sight {
            Some(sight) => sight.read(&mut messages, self.max_tokens)?,
            None => {
                let reason = if is_scored { "and images are not scored" } else { "and this model sees none" };
                sight::refuse(&mut messages, reason).map(|()| Vec::new())?
            }
        };
        let images = sight.map(Sight::images);
        let read = conversation(&messages, tools, self.system, (template, images.is_some()));
        let (messages, tools) = read.map_err(|error| wrong(&error))?;
        let tools = tools.as_ref();
        let (messages, in_text) = taken_out(images, &messages).map_err(|error| wrong(&error))?;
        let text = template.render_prompt(&messages, tools).map_err(|error| wrong(&error))?;
        refuse_names(&messages, tools, template, &text)?;
        let text =
            if is_scored { template.render(&messages, tools, false).map_err(|error| wrong(&error))? } else { text };
        self.check_length(&text)?;
        let ids = in_text.prompt_ids(images, self.tokenizer, text).map_err(|error| wrong(&error))?;
        Ok((vec![ids], held))
    }

    /// Refuses a text that cannot be a prompt, before time goes into its tokens.
    fn check_length(&self, text: &str) -> Result<(), ApiError> {
        if text.len() <= self.max_bytes {
            return Ok(());
        }
        Err(ApiError::beyond_context(&format!("a prompt of {} bytes", text.len()), self.max_tokens))
    }
}

/// A message without the keys that say nothing; clients send back all that they got.
fn cleaned(index: usize, message: &Value) -> Result<Value, ApiError> {
    let wrong = |what: String| ApiError::wrong(format!("`messages[{index}]` {what}"), Some("messages"));
    let Some(message) = message.as_object() else { return Err(wrong("is no object".to_owned())) };
    let says = |(key, value): &(&String, &Value)| ["role", "content"].contains(&key.as_str()) || !is_off(value);
    let kept: Map<String, Value> =
        message.iter().filter(says).map(|(key, value)| (key.clone(), value.clone())).collect();
    match kept.keys().find(|key| !KEYS.contains(&key.as_str())) {
        Some(key) => Err(wrong(format!("has `{key}`, which is not supported"))),
        None => Ok(kept.into()),
    }
}

/// Refuses names of speakers that the template leaves out of `text`. That of a tool only tells results apart.
fn refuse_names(
    messages: &[Value],
    tools: Option<&Value>,
    template: &ChatTemplate,
    text: &str,
) -> Result<(), ApiError> {
    let has_name = |message: &Value| !message["name"].is_null() && message["role"] != "tool";
    let Some(named) = messages.iter().position(has_name) else { return Ok(()) };
    let mut nameless = messages.to_vec();
    nameless.iter_mut().filter_map(Value::as_object_mut).for_each(|message| drop(message.shift_remove("name")));
    if template.render(&nameless, tools, true).is_ok_and(|nameless| nameless == text) {
        let message = format!("`messages[{named}]` has `name`, which the chat template does not write");
        return Err(ApiError::wrong(message, Some("messages")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::fixture::chat_tokenizer;

    /// The text of the prompt that messages make, or the refusal.
    fn prompt(template: Option<&str>, messages: &Value) -> Result<String, String> {
        let tokenizer = chat_tokenizer();
        let template = template.or(tokenizer.chat_template()).unwrap();
        let template = ChatTemplate::new(template, "the model", &tokenizer).unwrap();
        let prompting = Prompting {
            tokenizer: &tokenizer,
            template: Some(&template),
            system: None,
            sight: None,
            max_tokens: 600,
            vocab_size: 600,
            max_bytes: 600 * tokenizer.longest_token(),
        };
        let body = json!({"messages": messages}).to_string();
        let (asking, _) = Asking::parse(Endpoint::Chat, body.as_bytes()).unwrap();
        let refused = |error: ApiError| error.json()["error"]["message"].as_str().unwrap().to_owned();
        let (ids, _) = prompting.ids(&asking).map_err(refused)?;
        Ok(tokenizer.decode(&ids[0], false).unwrap())
    }

    const WITH_CALLS: &str = "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}\
        {% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}";

    #[test]
    fn messages_are_read_as_in_training() {
        let text = |template: &'static str, messages: Value| prompt(Some(template), &messages).unwrap();
        let developer = json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
        assert_eq!(text(WITH_CALLS, developer.clone()), "[system]Be brief.[user]Hi");
        assert!(prompt(None, &developer).unwrap().starts_with("<|im_start|>system\nBe brief.<|im_end|>\n"));
        let call = json!({"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{\"x\": 1}"}});
        let calls = json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [call], "refusal": null, "annotations": []},
            {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "find", "weight": 1},
        ]);
        assert!(prompt(Some(WITH_CALLS), &calls).unwrap_err().contains("`weight` asks for loss"));
        let mut calls = calls;
        calls[2].as_object_mut().unwrap().remove("weight");
        assert_eq!(text(WITH_CALLS, calls.clone()), "[user]ab[assistant]find{\"x\": 1}[tool find]7");
        let error = prompt(None, &calls).unwrap_err();
        assert!(error.contains("the call of `find` leaves no trace"), "{error}");
    }

    #[test]
    fn what_the_template_would_leave_out_is_refused() {
        let user = |more: Value| {
            let mut message = json!({"role": "user", "content": "Hi"});
            message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!([message])
        };
        for (message, reason) in [
            (json!({"role": "pilot"}), "its role is \"pilot\""),
            (json!({"content": null}), "its `content` is null"),
            (json!({"content": [{"type": "image_url"}]}), "`messages[0]` has an image, and this model sees none"),
            (json!({"name": "Ada"}), "`messages[0]` has `name`, which the chat template does not write"),
            (json!({"audio": {"id": "a"}}), "`messages[0]` has `audio`, which is not supported"),
        ] {
            let error = prompt(None, &user(message)).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        assert_eq!(prompt(Some(WITH_CALLS), &user(json!({"name": "Ada"}))).unwrap(), "[user Ada]Hi");
    }

    #[test]
    fn what_cannot_fit_is_refused_before_it_is_rendered_and_tokenised() {
        let error = prompt(None, &json!([{"role": "user", "content": "a".repeat(600 * 13)}])).unwrap_err();
        assert!(error.starts_with("a prompt of 78") && error.contains("600 tokens"), "{error}");
        let many = vec![json!({"role": "user", "content": ""}); 601];
        assert!(prompt(None, &json!(many)).unwrap_err().starts_with("601 messages"));
    }
}
