//! What a template writes between two answers of a conversation, so that it can go on by its own tokens: what was written before is
//! never rendered, or tokenised, again.

use serde_json::{Value, json};

use super::{ChatTemplate, TemplateError};
use crate::data::formats::conversation;
use crate::data::tokenizer::Tokenizer;

/// Words that stand for a question and an answer.
const QUESTION: &str = "qxqu";
const ANSWER: &str = "qxan";

/// How conversations go on under a template: with `Ok`, whether it would itself leave all as it is that stands before the end of the
/// answer, a thought in it, too; or why nothing can be appended to an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoesOn {
    /// Behind an answer that calls a tool, by what that gives.
    pub tool_results: Result<bool, String>,
    /// Behind an answer by a message of the user.
    pub user_messages: Result<bool, String>,
}

impl ChatTemplate {
    /// Token ids of what stands between the end of an answer and the start of the next one, where `replies` follow the first: the
    /// answer calls these functions, or none.
    ///
    /// They are those of a conversation of a question, an answer and the replies, behind the token that ends the answer.
    ///
    /// # Errors
    /// A message that training does not read either, or that leaves no trace in the text; a template that does not append.
    pub fn between(
        &self,
        calls: &[Value],
        replies: &[Value],
        tools: Option<&Value>,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, TemplateError> {
        let mut answer = json!({"role": "assistant", "content": if calls.is_empty() { ANSWER } else { "" }});
        if !calls.is_empty() {
            answer["tool_calls"] = calls.into();
        }
        let messages = [&[json!({"role": "user", "content": QUESTION}), answer], replies].concat();
        let (messages, tools) = conversation(&messages, tools, None, (self, false)).map_err(TemplateError)?;
        // All of the replies leaves a trace.
        let rendered = self.render_with_answers(&messages, tools.as_ref())?;
        let whole = self.render(&messages, tools.as_ref(), true)?;
        let cannot = |why: &str| TemplateError(format!("the chat template of {} {why}", self.origin));
        let end = rendered.answers.first().map(|answer| answer.end);
        let end = end.filter(|end| whole.starts_with(&rendered.text[..*end]));
        let end = end.ok_or_else(|| cannot("writes no end of an answer that is followed by others"))?;
        let tokens = tokenizer.encode_tokens(&whole, false).map_err(|error| TemplateError(error.to_string()))?;
        if tokens.iter().any(|token| token.start < end && token.end > end) {
            return Err(cannot("ends answers with a text that becomes one token with what follows"));
        }
        Ok(tokens.iter().filter(|token| token.end > end).map(|token| token.id).collect())
    }

    /// How conversations go on under this template.
    #[must_use]
    pub fn goes_on(&self, tokenizer: &Tokenizer) -> GoesOn {
        let call = json!({"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "1"}}});
        let parameters = json!({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]});
        let tools =
            json!([{"type": "function", "function": {"name": "f", "description": "f", "parameters": parameters}}]);
        let result = json!({"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "qxre"});
        let more = json!({"role": "user", "content": "qxmo"});
        let behind = |calls: &[Value], reply: Value, tools: Option<&Value>| match self.between(
            calls,
            std::slice::from_ref(&reply),
            tools,
            tokenizer,
        ) {
            Ok(_) => Ok(self.keeps_before(calls, reply, tools)),
            Err(error) => Err(error.0.split("\n  hint:").next().unwrap_or_default().to_owned()),
        };
        GoesOn { tool_results: behind(&[call], result, Some(&tools)), user_messages: behind(&[], more, None) }
    }

    /// Whether an answer with a thought, and what stands before it, is written as before once a reply follows.
    fn keeps_before(&self, calls: &[Value], reply: Value, tools: Option<&Value>) -> bool {
        let mut answer = json!({"role": "assistant", "content": format!("<think>\nqxth\n</think>\n\n{ANSWER}")});
        if !calls.is_empty() {
            answer["tool_calls"] = calls.into();
        }
        let mut messages = vec![json!({"role": "user", "content": QUESTION}), answer];
        let Ok(alone) = self.render_with_answers(&messages, tools) else { return false };
        messages.push(reply);
        let whole = self.render(&messages, tools, true).unwrap_or_default();
        alone.answers.first().is_some_and(|answer| whole.starts_with(&alone.text[..answer.end]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixture::{CHATML, chat_tokenizer};

    const WITH_TOOLS: &str = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}\
        {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif %}\
        {% for call in m.tool_calls %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}\
        {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, "the test", &chat_tokenizer()).unwrap()
    }

    fn call(name: &str) -> Value {
        json!({"function": {"name": name, "arguments": {"x": "1"}}})
    }

    #[test]
    fn a_conversation_that_goes_on_by_its_own_tokens_has_those_of_the_whole() {
        let tokenizer = chat_tokenizer();
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
        let user = |text: &str| json!({"role": "user", "content": text});
        let said = |text: &str| json!({"role": "assistant", "content": text});
        let called = json!({"role": "assistant", "content": "Wait: ", "tool_calls": [call("f"), call("f")]});
        let result = |text: &str| json!({"role": "tool", "name": "f", "content": text});
        let end = "<|im_end|>\n";
        for (source, tools, turns) in [
            (CHATML, None, vec![(said("abab"), vec![user("more")]), (said(""), vec![user("ab"), user("abc")])]),
            (
                WITH_TOOLS,
                Some(&tools),
                vec![(called, vec![result("7"), result("{\"error\": 1}")]), (said("It is 7."), vec![user("Sure?")])],
            ),
        ] {
            let template = template(source);
            let mut messages = vec![user("Begin.")];
            let mut ids = tokenizer.encode(&template.render_prompt(&messages, tools).unwrap(), false).unwrap();
            for (answer, replies) in turns {
                // What the model would write, with the token that ends the turn.
                let before = template.render_prompt(&messages, tools).unwrap();
                messages.push(answer.clone());
                let whole = template.render(&messages, tools, false).unwrap();
                let written = whole[before.len()..].strip_suffix(end).unwrap();
                ids.extend(tokenizer.encode(&format!("{written}<|im_end|>"), false).unwrap());
                let calls = answer["tool_calls"].as_array().cloned().unwrap_or_default();
                ids.extend(template.between(&calls, &replies, tools, &tokenizer).unwrap());
                messages.extend(replies);
                let whole = template.render_prompt(&messages, tools).unwrap();
                assert_eq!(ids, tokenizer.encode(&whole, false).unwrap(), "{whole}");
            }
        }
    }

    #[test]
    fn a_template_that_does_not_append_says_why() {
        let tokenizer = chat_tokenizer();
        let goes_on = |source: &str| template(source).goes_on(&tokenizer);
        assert_eq!(goes_on(WITH_TOOLS), GoesOn { tool_results: Ok(true), user_messages: Ok(true) });
        let chatml = goes_on(CHATML);
        assert!(chatml.user_messages == Ok(true) && chatml.tool_results.unwrap_err().contains("leaves no trace"));
        // As Qwen3's: thoughts before the last question are left out.
        let dropping = WITH_TOOLS.replace(
            "{{ m.content }}",
            "{% if m.role == 'assistant' and messages[-1].role == 'user' %}{{ m.content.split('</think>')[-1] }}\
             {% else %}{{ m.content }}{% endif %}",
        );
        assert_eq!(goes_on(&dropping), GoesOn { tool_results: Ok(true), user_messages: Ok(false) });
        let refusing = format!(
            "{{% if messages | length > 2 %}}{{{{ raise_exception('two at most') }}}}{{% endif %}}{WITH_TOOLS}"
        );
        assert!(goes_on(&refusing).user_messages.unwrap_err().contains("two at most"));
    }
}
