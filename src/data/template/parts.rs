//! Contents as a template reads them: texts, or lists of parts.

use serde_json::{Value, json};

use super::ChatTemplate;

/// Roles whose contents may have to be lists. The first is in the conversations that show this of the others.
const ROLES: [&str; 5] = ["user", "assistant", "system", "developer", "tool"];
/// A word that no template has.
const WORD: &str = "qxpa";

impl ChatTemplate {
    /// Finds the roles whose contents leave a trace as lists of parts alone, as in `SmolVLM`'s template.
    pub(super) fn find_list_roles(&mut self) {
        // What reads lists reads the `text` of their parts.
        if self.mentions("text") {
            for role in ROLES {
                let reads = |content: Value| self.reads(role, &content);
                if !reads(WORD.into()) && reads(json!([{"type": "text", "text": WORD}])) {
                    self.list_roles.push(role);
                }
            }
        }
    }

    /// Whether this content, which has [`WORD`], leaves a trace in a message of this role.
    fn reads(&self, role: &str, content: &Value) -> bool {
        let user = json!({"role": "user", "content": "x"});
        let call = json!({"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}});
        let call = json!({"role": "assistant", "content": "", "tool_calls": [call]});
        let mut message = json!({"role": role, "content": content});
        let messages = match role {
            "user" => vec![message],
            "assistant" => vec![user, message],
            "tool" => {
                (message["tool_call_id"], message["name"]) = ("call00000".into(), "f".into());
                vec![user, call, message]
            }
            _ => vec![message, user],
        };
        self.render(&messages, None, false).is_ok_and(|text| text.contains(WORD))
    }

    /// Messages as the template gets them.
    pub(super) fn values(&self, messages: &[Value]) -> Vec<minijinja::Value> {
        messages.iter().map(|message| self.value(message)).collect()
    }

    /// A message as the template gets it: without the loss mask, which only the trainer reads; a text is the one part of a list
    /// where the template reads lists alone.
    pub(super) fn value(&self, message: &Value) -> minijinja::Value {
        let is_list = message["role"].as_str().is_some_and(|role| self.list_roles.contains(&role));
        let keys = message.as_object().into_iter().flatten();
        let keys = keys.filter(|(key, _)| !["weight", "train_detail"].contains(&key.as_str()));
        let value = |key: &str, value: &Value| match value {
            Value::String(text) if is_list && key == "content" => {
                minijinja::Value::from_serialize(json!([{"type": "text", "text": text}]))
            }
            value => minijinja::Value::from_serialize(value),
        };
        keys.map(|(key, of_key)| (key.as_str(), value(key, of_key))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::Encoder;
    use crate::data::fixture::{CHATML, chat_tokenizer};
    use crate::data::formats::Sample;

    /// As `SmolVLM`'s: each role alike.
    const OF_ALL: &str = "{% for m in messages %}{{ m['role'] | capitalize }}\
        {% if m['content'][0]['type'] == 'image' %}:{% else %}{{ ': ' }}{% endif %}\
        {% for part in m['content'] %}{{ '*' if part['type'] == 'image' }}{{ part['text'] if part['type'] == 'text' }}{% endfor %}\
        {{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";
    /// As PaddleOCR-VL's: the images of a question go before its text.
    const OF_EACH: &str = "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' }}\
        {% for part in m.content if part.type == 'image' %}*{% endfor %}\
        {% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{{ '\n' }}\
        {% elif m.role == 'assistant' %}{{ 'Assistant: ' }}ANSWER{{ '</s>' }}\
        {% else %}{% for part in m.content if part.type == 'text' %}{{ part.text + '\n' }}{% endfor %}{% endif %}{% endfor %}\
        {% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}";

    /// Rows whose answers are texts, and a question that is.
    fn turns() -> Vec<Value> {
        let shown = json!([{"type": "image"}, {"type": "text", "text": "what?"}]);
        let turns = [
            ("system", "Be.".into()),
            ("user", shown),
            ("assistant", "say".into()),
            ("user", "more".into()),
            ("assistant", "end".into()),
        ];
        turns.map(|(role, content)| json!({"role": role, "content": content})).to_vec()
    }

    #[test]
    fn texts_are_written_where_a_template_reads_lists_alone() {
        let tokenizer = chat_tokenizer();
        let lists = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}";
        let of_each = "<s>Be.\nUser: *what?\nAssistant: say</s>User: more\nAssistant: end</s>";
        for (source, text, answers) in [
            (
                OF_ALL.to_owned(),
                "System: Be.<|im_end|>\nUser:*what?<|im_end|>\nAssistant: say<|im_end|>\nUser: more<|im_end|>\n\
                 Assistant: end<|im_end|>\n",
                [" say<|im_end|>", " end<|im_end|>"],
            ),
            (OF_EACH.replace("ANSWER", lists), of_each, ["say</s>", "end</s>"]),
            // The user's role alone.
            (OF_EACH.replace("ANSWER", "{{ m.content }}"), of_each, ["say</s>", "end</s>"]),
        ] {
            let template = ChatTemplate::new(&source, "the test", &tokenizer).unwrap();
            let messages = turns();
            let rendered = template.render_with_answers(&messages, None).unwrap();
            let found: Vec<&str> = rendered.answers.iter().map(|answer| &rendered.text[answer.clone()]).collect();
            assert_eq!((&*rendered.text, &found[..]), (text, &answers[..]));
            let prompt = template.render_prompt(&messages[..4], None).unwrap();
            assert!(text.starts_with(&prompt) && prompt.contains("more"), "{prompt}");
            let ends = template.ends();
            assert!(ends.without_end.is_none() && ends.bad_prompt.is_none(), "{ends:?}");

            let encoder = Encoder {
                tokenizer: &tokenizer,
                template: Some(&template),
                train_on_inputs: false,
                scores: false,
                images: None,
            };
            let row = encoder.encode(&Sample::Chat { messages: messages[3..].to_vec(), tools: None }).unwrap();
            let learned = row.ids.iter().zip(&row.carries_loss).filter(|(_, loss)| **loss).map(|(id, _)| *id);
            assert_eq!(tokenizer.decode(&learned.collect::<Vec<_>>(), false).unwrap(), answers[1]);
        }
    }

    #[test]
    fn a_template_that_reads_texts_gets_them() {
        let both = CHATML
            .replace("message.content", "(message.content if message.content is string else message.content[0].text)");
        let shown = "{% for m in messages %}{{ m | tojson }}{{ m.text }}{% endfor %}";
        for source in [CHATML, &both, shown] {
            let template = ChatTemplate::new(source, "the test", &chat_tokenizer()).unwrap();
            assert!(template.list_roles.is_empty(), "{source}");
            let text = template.render(&turns()[3..], None, false).unwrap();
            assert!(!text.contains("type") && text.contains("more") && text.contains("end"), "{text}");
        }
    }
}
