//! Conversations that begin with each role, and keys that a template's text contains, under templates of each kind.

use std::collections::BTreeSet;

use super::*;
use crate::data::fixture::chat_tokenizer;

const OWN: &str = "{% for m in messages %}\
    {% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are named Own, trained by us. \
    <|im_start|>assistant\nYes.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const WITHOUT_PROMPT: &str = "{% for m in messages %}\
    {% if loop.first and m.role != 'system' %}{{ 'Answers train a model.<|im_end|>' }}{% endif %}\
    {% if m.role == 'system' %}{{ m.content + '<|im_end|>' }}{% elif m.role == 'user' %}{{ 'Q: ' + m.content + ' A:' }}\
    {% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}";
const READS_FIRST: &str = "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0].content }}\
    {% else %}{{ '<|im_start|>system\nloss weight train' }}{% endif %}{{ '<|im_end|>\n' }}{% for m in messages %}\
    {% if m.role != 'system' or not loop.first %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
    {% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const LLAMA_3: &str = "{{- bos_token }}{%- set head = '' %}{%- if messages[0]['role'] == 'system' %}\
    {%- set head = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- endif %}\
    {{- '<|im_start|>system|>\n\nCutting Knowledge Date: never\n\n' + head + '<|im_end|>' }}{%- for m in messages %}\
    {{- '<|im_start|>' + m['role'] + '|>\n\n' + m['content'] | trim + '<|im_end|>' }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant|>\n\n' }}{%- endif %}";
const MISTRAL: &str = "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
    {{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}\
    {% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}";
const GEMMA: &str = "{{ bos_token }}{% set head = '' %}{% if messages[0].role == 'system' %}\
    {% set head = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}\
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
    {{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (head if loop.first else '') }}\
    {{ m.content | trim + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}";
/// Every prompt opens a thought, and a conversation needs a question.
const THINKS: &str = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}\
    {{ raise_exception('no user query') }}{% endif %}{% for m in messages %}\
    {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}";

fn quickstart() -> String {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/quickstart/model/tokenizer_config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(config).unwrap()).unwrap();
    config["chat_template"].as_str().unwrap().to_owned()
}

fn templates() -> Vec<ChatTemplate> {
    let quickstart = quickstart();
    let sources = [&quickstart, CHATML, OWN, WITHOUT_PROMPT, READS_FIRST, LLAMA_3, MISTRAL, GEMMA, THINKS];
    sources.iter().map(|source| ChatTemplate::new(source, "the test", &chat_tokenizer()).unwrap()).collect()
}

#[test]
fn whoever_begins_a_conversation_the_assistants_words_alone_carry_loss() {
    let turns = [("user", "ask"), ("assistant", "say"), ("user", "more"), ("assistant", "end")];
    let welcome = [&[("assistant", "hail")], &turns[..]].concat();
    let told = |turns: &[(&'static str, &'static str)]| [&[("system", "rule")], turns].concat();
    let rows =
        [turns.to_vec(), told(&turns), welcome.clone(), told(&welcome), welcome[..1].to_vec(), told(&welcome[..1])];
    for template in templates() {
        let mut num_refused = 0;
        for turns in &rows {
            let said = turns.iter().filter(|(role, _)| *role == "assistant");
            let said: Vec<String> = said.map(|(_, words)| format!("{words}<|im_end|>")).collect();
            match template.render_with_answers(&conversation(turns), None) {
                Ok(Rendered { text, answers, .. }) => {
                    let answers: Vec<&str> = answers.iter().map(|answer| text[answer.clone()].trim_start()).collect();
                    assert_eq!(answers, said, "{turns:?} under {}", template.source());
                }
                Err(error) => {
                    let error = error.to_string();
                    let raised = ["roles must alternate", "no user query"];
                    assert!(raised.iter().any(|reason| error.contains(reason)), "{error}: {}", template.source());
                    num_refused += 1;
                }
            }
        }
        let expected = match template.source() {
            MISTRAL => 5,
            GEMMA => 4,
            THINKS => 2,
            _ => 0,
        };
        assert_eq!(num_refused, expected, "{}", template.source());
    }
}

#[test]
fn answers_in_another_order_than_their_messages_are_refused() {
    let reversed = "{% for m in messages[::-1] %}{{ m.role ~ ' ' ~ m.content }}<|im_end|>{% endfor %}";
    let error = answers(reversed, &[("assistant", "say"), ("user", "ask"), ("assistant", "end")]).unwrap_err();
    assert!(error.to_string().contains("cannot be"), "{error}");
}

#[test]
fn a_key_that_only_the_text_of_a_template_contains_is_not_read() {
    let word = Regex::new("[A-Za-z_]+").unwrap();
    for template in templates() {
        let words: BTreeSet<&str> = word.find_iter(template.source()).map(|word| word.as_str()).collect();
        for key in words.into_iter().filter(|key| !["role", "content", "weight"].contains(key)) {
            for value in [json!(false), json!(true), json!("by")] {
                let mut messages = conversation(&[("user", "ask"), ("assistant", "say")]);
                let plain = template.render(&messages, None, false).unwrap();
                messages[1][key] = value;
                let Rendered { text, unread, .. } = template.render_with_answers(&messages, None).unwrap();
                assert_eq!((text, unread.contains(key)), (plain, true), "{key} under {}", template.source());
            }
        }
    }
    let reads = "{% for m in messages %}{{ m.role }}{% if m.name is defined %}{{ m.name }}{% endif %}: {{ m.content }}\
                 <|im_end|>{% endfor %}";
    let reads = ChatTemplate::new(reads, "the test", &chat_tokenizer()).unwrap();
    let mut messages = conversation(&[("user", "ask"), ("assistant", "say")]);
    (messages[0]["name"], messages[1]["nick"]) = (json!("ann"), json!("bo"));
    let unread = reads.render_traced(&messages, None).unwrap().unread;
    assert_eq!(unread.into_iter().collect::<Vec<_>>(), ["nick"]);
}

#[test]
fn a_mask_does_not_reach_the_template() {
    let writes_all = "{% for m in messages %}{{ m.role ~ ' ' ~ m | tojson }}<|im_end|>{% endfor %}";
    let writes_all = ChatTemplate::new(writes_all, "the test", &chat_tokenizer()).unwrap();
    let mut messages = conversation(&[("user", "ask"), ("assistant", "say")]);
    let plain = writes_all.render(&messages, None, false).unwrap();
    (messages[0]["weight"], messages[1]["train_detail"]) = (json!(0), json!([[0, 1]]));
    assert_eq!(writes_all.render(&messages, None, false).unwrap(), plain);
}

#[test]
fn the_named_characters_of_an_answer_and_its_end_carry_loss() {
    for template in templates() {
        let mut messages = conversation(&[("user", "ask"), ("assistant", " sé it! ")]);
        messages[1]["train_detail"] = json!([[0, 3], [5, 8]]);
        let Rendered { text, answers, .. } = template.render_with_answers(&messages, None).unwrap();
        let parts: Vec<&str> = answers.iter().map(|part| text[part.clone()].trim()).collect();
        assert_eq!(parts, ["sé", "t!", "<|im_end|>"], "{}", template.source());
    }
    let shouts = "{% for m in messages %}{{ m.role + m.content | upper }}<|im_end|>{% endfor %}";
    let shouts = ChatTemplate::new(shouts, "the test", &chat_tokenizer()).unwrap();
    let mut messages = conversation(&[("user", "ask"), ("assistant", "say")]);
    messages[1]["train_detail"] = json!([[0, 1]]);
    let error = shouts.render_with_answers(&messages, None).unwrap_err().to_string();
    assert!(error.contains("does not write its `content` as it is"), "{error}");
}
