use regex::Regex;
use serde_json::json;

use super::*;
use crate::data::fixture::{CHATML, tokenizer};

mod ends;
mod stock;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "the test", &tokenizer()).unwrap()
}

fn conversation(turns: &[(&str, &str)]) -> Vec<Value> {
    turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
}

fn answers(source: &str, turns: &[(&str, &str)]) -> Result<Vec<String>, TemplateError> {
    let rendered = template(source).render_with_answers(&conversation(turns), None)?;
    Ok(rendered.answers.iter().map(|range| rendered.text[range.clone()].to_owned()).collect())
}

/// Imitates Llama 3's template: it writes BOS and a date, strips content, always has a system turn, and reads tools
/// from an optional variable.
const LLAMA_LIKE: &str = "{{- bos_token }}\n\
    {%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}\n\
    {%- if messages[0]['role'] == 'system' %}\n\
        {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}\n\
    {%- else %}{%- set system = '' %}{%- endif %}\n\
    {{- '<system>Today: ' + date_string + '\\n' + system + '<end>' }}\n\
    {%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}\n\
    {%- for message in messages %}\n\
        {{- '<' + message['role'] + '>\\n\\n' + message['content'] | trim + '<end>' }}\n\
    {%- endfor %}\n\
    {%- if add_generation_prompt %}{{- '<assistant>\\n\\n' }}{%- endif %}\n";

#[test]
fn answers_are_the_assistants_text_with_the_end_of_the_turn() {
    let turns = [("user", "hi"), ("assistant", "yes?"), ("user", "bye"), ("assistant", "see you")];
    assert_eq!(answers(CHATML, &turns).unwrap(), ["yes?<|im_end|>", "see you<|im_end|>"]);
    assert_eq!(answers(CHATML, &turns[..3]).unwrap(), ["yes?<|im_end|>"]);
    assert!(answers(CHATML, &turns[..1]).unwrap().is_empty());
}

#[test]
fn default_system_messages_dates_and_stripped_content_are_no_obstacle() {
    let turns =
        [("system", " be kind\n"), ("user", " hi "), ("assistant", "\n yes? \n"), ("user", "?"), ("assistant", "!")];
    assert_eq!(answers(LLAMA_LIKE, &turns).unwrap(), ["yes?<end>", "!<end>"]);
    assert_eq!(answers(LLAMA_LIKE, &turns[1..]).unwrap(), ["yes?<end>", "!<end>"]);
    let text = template(LLAMA_LIKE).render(&conversation(&turns[..2]), None, true).unwrap();
    let (start, rest) = text.split_once("Today: ").unwrap();
    let (date, rest) = rest.split_once('\n').unwrap();
    assert_eq!((start, rest), ("<s><system>", "be kind<end><user>\n\nhi<end><assistant>\n\n"));
    assert!(Regex::new(r"^\d\d [A-Z][a-z]{2} 20\d\d$").unwrap().is_match(date), "{date}");
}

#[test]
fn tools_reach_the_template() {
    let tools = json!([{"name": "f<é>"}]);
    let text = template(LLAMA_LIKE).render(&conversation(&[("user", "hi")]), Some(&tools), false).unwrap();
    assert!(text.contains("[\n    {\n        \"name\": \"f<é>\"\n    }\n]<user>"), "{text}");
}

#[test]
fn a_template_that_writes_the_start_differently_later_is_refused() {
    let last_only = "{% for m in messages %}{{ m.role }}:{{ '<think>' if loop.last }}{{ m.content }};{% endfor %}";
    let error =
        answers(last_only, &[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("answer 1 cannot be separated"), "{message}");
    assert!(message.contains("…\"<think>b;\" against …\"b;user:c;assistant:<think>d;\""), "{message}");
    assert!(message.contains("train_on_inputs = true"), "{message}");
}

#[test]
fn a_template_on_which_the_library_panics_is_refused() {
    let error = answers("{{ '%\u{35b}' | format('a') }}", &[("user", "a"), ("assistant", "b")]).unwrap_err();
    assert!(error.to_string().starts_with("the chat template of the test failed: "), "{error}");
}

#[test]
fn what_a_template_drops_is_an_error_that_says_what_and_why() {
    // This template writes a system prompt only when it is the only message, and never writes tools or calls.
    let source = "{% for m in messages %}{% if m.role == 'system' %}{% if loop.length == 1 %}{{ m.content }}{% endif %}\
                  {% elif m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content | trim }}<end>{% endif %}\
                  {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let template = template(source);
    let error = |messages: &[Value], tools: Option<&Value>| {
        template.render_with_answers(messages, tools).unwrap_err().to_string()
    };
    let turns = conversation(&[("system", "a"), ("user", "banana"), ("assistant", " b\n")]);
    for _ in 0..2 {
        // Checked twice; the dropped `a` also appears elsewhere in the text.
        assert_eq!(
            error(&turns, None),
            "message 1 (system): \"a\" of its `content` leaves no trace in the text that the chat template of the \
             test writes"
        );
    }
    assert!(template.render_with_answers(&turns[1..], None).is_ok());
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let message = error(&turns[1..], Some(&tools));
    assert!(
        message.starts_with("tool `f` leaves no trace") && message.contains("template has no tools\n  hint: take"),
        "{message}"
    );
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {}}}]);
    let call = json!({"role": "assistant", "content": "", "tool_calls": call});
    let message = error(&[turns[1].clone(), call], None);
    assert!(message.contains("message 2: the call of `f` leaves no trace"), "{message}");
    let message = error(&[turns[1].clone(), json!({"role": "tool", "content": "x"})], None);
    assert!(message.contains("leaves no trace"), "{message}");
}

#[test]
fn a_part_of_a_text_that_is_dropped_is_named() {
    let source = "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }};{% endfor %}\
                  {% if add_generation_prompt %}assistant:{% endif %}";
    let turns = [("user", "a thought"), ("assistant", "<think>a thought</think>yes")];
    let message = answers(source, &turns).unwrap_err().to_string();
    assert!(message.contains("message 2 (assistant): \"<think>a thought</think>yes\" of its `content`"), "{message}");
    let escaped = "{% for m in messages %}{{ m.role }}:{{ m.content | tojson }};{% endfor %}\
                   {% if add_generation_prompt %}assistant:{% endif %}";
    assert_eq!(answers(escaped, &[("user", "a\nb"), ("assistant", "\"c\"\nd")]).unwrap(), ["\"\\\"c\\\"\\nd\";"]);
}

#[test]
fn a_thought_that_is_dropped_is_named_where_a_later_message_has_the_same_text() {
    let template = template(
        "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }};\
         {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    );
    let repeated = |text: &str| {
        let turns = [("user", "ask"), ("assistant", text), ("user", text), ("assistant", "end")];
        template.render_with_answers(&conversation(&turns), None).map(|rendered| rendered.answers.len())
    };
    assert_eq!(repeated("say").unwrap(), 2);
    assert_eq!(repeated("<think></think>say").unwrap(), 2);
    let message = repeated("<think>muse</think>say").unwrap_err().to_string();
    assert!(
        message.contains("message 2 (assistant): \"<think>muse</think>say\" of its `content` leaves no trace"),
        "{message}"
    );
}

#[test]
fn what_a_generation_prompt_supplies_and_what_follows_the_turn_carry_no_loss() {
    // Like Qwen3: only the last answer gets an empty thought; a prompt without thinking has one too.
    let source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
                  {% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}\
                  {{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}\
                  {{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}\
                  {{ '<think></think>' }}{% endif %}{% endif %}";
    let tokenizer = crate::data::fixture::chat_tokenizer();
    let template = ChatTemplate::new(source, "the test", &tokenizer).unwrap();
    let answers = |turns: &[(&str, &str)]| {
        let rendered = template.render_with_answers(&conversation(turns), None).unwrap();
        let answers: Vec<String> =
            rendered.answers.iter().map(|range| rendered.text[range.clone()].to_owned()).collect();
        (answers, rendered.empty_answer)
    };
    let turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
    assert_eq!(answers(&turns).0, ["b<|im_end|>", "d<|im_end|>"]);
    let mut silent = conversation(&[("user", "a"), ("assistant", " ")]);
    silent[1]["mood"] = json!("sad");
    assert_eq!(template.render_with_answers(&silent, None).unwrap().empty_answer, Some(1));
    let turns = [("user", "a"), ("assistant", " "), ("user", "c"), ("assistant", "<think>x</think>d")];
    assert_eq!(answers(&turns), (vec!["<think>x</think>d<|im_end|>".to_owned()], Some(1)));
}

#[test]
fn an_answer_before_a_later_question_may_lose_the_thought_that_its_prompt_opens() {
    // Like Qwen3.5: all answers behind the last question get a thought, and so do all prompts.
    let source = "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}\
                  {% set ns.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}\
                  {{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.asked %}\
                  {{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}\
                  {% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}\
                  {% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}";
    let template = ChatTemplate::new(source, "the test", &crate::data::fixture::chat_tokenizer()).unwrap();
    let turns =
        [("user", "a"), ("assistant", "b"), ("tool", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")];
    let rendered = template.render_with_answers(&conversation(&turns), None).unwrap();
    let answers: Vec<&str> = rendered.answers.iter().map(|range| &rendered.text[range.clone()]).collect();
    assert_eq!(answers, ["b<|im_end|>", "d<|im_end|>", "f<|im_end|>"]);
}

#[test]
fn answers_of_weight_0_carry_no_loss() {
    let mut turns = conversation(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    turns[1]["weight"] = json!(0);
    let tokenizer = crate::data::fixture::chat_tokenizer();
    let rendered =
        ChatTemplate::new(CHATML, "the test", &tokenizer).unwrap().render_with_answers(&turns, None).unwrap();
    assert_eq!(rendered.answers.iter().map(|range| &rendered.text[range.clone()]).collect::<Vec<_>>(), ["d<|im_end|>"]);
}

/// What carries loss where the assistant's turn is written so, and the error of the row.
fn marked(turn: &str, turns: &[Value]) -> Result<Vec<String>, String> {
    let source = CHATML.replace(
        "{{ '<|im_start|>' + message.role",
        "{% if message.role == 'assistant' %}TURN{% else %}{{ '<|im_start|>' + message.role",
    );
    let source = source
        .replace("<|im_end|>\n' }}{% endfor %}", "<|im_end|>\n' }}{% endif %}{% endfor %}")
        .replace("TURN", &format!("{{{{ '<|im_start|>assistant\\n' }}}}{turn}"));
    let rendered = template(&source).render_with_marks(turns, None).map_err(|error| error.to_string())?;
    assert!(!rendered.text.contains('\u{fdd0}'));
    Ok(rendered.answers.iter().map(|range| rendered.text[range.clone()].to_owned()).collect())
}

#[test]
fn what_a_template_marks_as_generated_carries_loss_and_nothing_else() {
    let turns = conversation(&[("user", "?"), ("assistant", "a/b"), ("user", "!"), ("assistant", "c/d")]);
    let whole = "{% generation %}{{ message.content + ';' }}{% endgeneration %}";
    assert_eq!(marked(whole, &turns).unwrap(), ["a/b;", "c/d;"]);
    let without_end = "{% generation %}{{ message.content }}{% endgeneration %}{{ ';' }}";
    assert_eq!(marked(without_end, &turns).unwrap(), ["a/b", "c/d"]);
    let without_thought = "{% set parts = message.content.split('/') %}{{ parts[0] }}/{%- generation -%} \n\
                           {{ parts[1] }};{%- endgeneration %}";
    assert_eq!(marked(without_thought, &turns).unwrap(), ["b;", "d;"]);
    let last = "{% if loop.last %}{% generation %}{{ message.content }};{% endgeneration %}{% else %}{{ message.content }}{% endif %}";
    assert_eq!(marked(last, &turns).unwrap(), ["c/d;"]);
    // A turn's own mask holds, too.
    let mut masked = turns.clone();
    masked[3]["weight"] = json!(0);
    assert_eq!(marked(whole, &masked).unwrap(), ["a/b;"]);
    masked[1]["train_detail"] = json!([[2, 3]]);
    assert_eq!(marked(without_end, &masked).unwrap(), ["b"]);
}

#[test]
fn marks_that_mark_nothing_or_text_that_changes_are_errors_of_the_row() {
    let turns = conversation(&[("user", "?"), ("assistant", "yes")]);
    let nothing = "{% if message.name %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}";
    assert!(marked(nothing, &turns).unwrap_err().contains("writes none of them here\n  hint: "));
    assert!(marked(nothing, &turns[..1]).unwrap().is_empty(), "a prompt alone has nothing to mark");
    let counted =
        "{% set x %}{% generation %}{{ message.content }}{% endgeneration %}{% endset %}{{ x }}{{ x | length }}";
    assert!(marked(counted, &turns).unwrap_err().contains("changes what its `{% generation %}` tags enclose"));
}

#[test]
fn conversations_with_tools_are_written_by_the_template_for_them() {
    let named = json!([{"name": "default", "template": CHATML}, {"name": "tool_use", "template": format!("{{{{ tools | tojson }}}}{CHATML}")}]);
    let open = |template: &Value| {
        let folder = crate::data::fixture::model_folder(&json!({"chat_template": template}));
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        ChatTemplate::open("auto", &tokenizer).unwrap().unwrap()
    };
    let (template, turns) = (open(&named), conversation(&[("user", "a"), ("assistant", "b")]));
    let tools = json!([{"type": "function", "function": {"name": "tide"}}]);
    let text = |tools: Option<&Value>| template.render_with_answers(&turns, tools).unwrap().text;
    assert!(text(Some(&tools)).starts_with("[{\"type\"") && text(None).starts_with("<|im_start|>"));
    assert!(template.identity().is_some() && template.identity() != open(&json!(CHATML)).identity());
}

#[test]
fn a_list_of_templates_without_a_default_is_for_rows_with_tools_alone() {
    let source = format!("{{{{ tools | tojson }}}}{CHATML}");
    let named = json!([{"name": "tool_use", "template": source}, {"name": "rag", "template": "R"}]);
    let config = json!({"eos_token": "</s>", "chat_template": named});
    let tokenizer = Tokenizer::open(crate::data::fixture::model_folder(&config).path()).unwrap();
    let template = ChatTemplate::open("auto", &tokenizer).unwrap().unwrap();
    let messages = conversation(&[("user", "x"), ("assistant", "y")]);
    let text = template.render(&messages, Some(&json!([])), false).unwrap();
    assert!(text.starts_with("[]<|im_start|>"), "{text}");
    let error = template.render(&messages, None, false).unwrap_err().to_string();
    assert!(error.contains("has [\"rag\", \"tool_use\"], and none is \"default\"\n  hint: write"), "{error}");
    assert_eq!(Stops::of(&tokenizer, Some(&template)).ids, [257, 259], "where the answers of that template end");
}

#[test]
fn what_a_template_raises_is_what_the_user_reads() {
    let source =
        "{% for m in messages %}\n{% if m.role == 'tool' %}\n{{ raise_exception('no tools') }}{% endif %}{% endfor %}";
    let error = answers(source, &[("tool", "a")]).unwrap_err().to_string();
    assert_eq!(error, "the chat template of the test failed: invalid operation: no tools (in chat_template:3)");
    let error = ChatTemplate::new("{% if %}", "f.jinja", &tokenizer()).unwrap_err().to_string();
    assert!(error.starts_with("chat template of f.jinja: syntax error") && error.contains(":1)"), "{error}");
}

#[test]
fn a_template_can_be_the_models_a_files_or_none() {
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("t.jinja");
    std::fs::write(&file, "{{ eos_token }}").unwrap();
    let tokenizer = tokenizer();
    let opened = ChatTemplate::open(file.to_str().unwrap(), &tokenizer).unwrap().unwrap();
    assert_eq!(opened.render(&[], None, false).unwrap(), "</s>");
    assert!(ChatTemplate::open("none", &tokenizer).unwrap().is_none());
    assert!(ChatTemplate::open("auto", &tokenizer).unwrap().is_none());
    let chat = crate::data::fixture::chat_tokenizer();
    assert_eq!(ChatTemplate::open("auto", &chat).unwrap().unwrap().origin(), "the model");
    let error = ChatTemplate::open("/no/such.jinja", &tokenizer).unwrap_err().to_string();
    assert!(error.starts_with("`data.chat_template` = \"/no/such.jinja\": No such file"), "{error}");
}
