//! What ends turns under templates of each kind.

use super::*;
use crate::data::fixture::{chat_tokenizer, model_folder};

/// A tokenizer with other names for the four special tokens `<s>`, `</s>`, `<|im_start|>`, `<|im_end|>`, two of which end texts.
fn renamed(names: [&str; 4], stops: &[&str]) -> Tokenizer {
    let folder = model_folder(&json!({}));
    let path = folder.path().join("tokenizer.json");
    let mut text = std::fs::read_to_string(&path).unwrap();
    for (old, new) in ["<s>", "</s>", "<|im_start|>", "<|im_end|>"].iter().zip(names) {
        text = text.replace(old, new);
    }
    std::fs::write(&path, text).unwrap();
    let ids: Vec<usize> = (0..4).filter(|index| stops.contains(&names[*index])).map(|index| 256 + index).collect();
    std::fs::write(folder.path().join("generation_config.json"), json!({"eos_token_id": ids}).to_string()).unwrap();
    Tokenizer::open(folder.path()).unwrap()
}

/// The parts that carry loss, and the end of the last one that the template does not write.
fn learned(template: &ChatTemplate, messages: &[Value]) -> (Vec<String>, Option<String>) {
    let Rendered { text, answers, unwritten_end, .. } = template.render_with_answers(messages, None).unwrap();
    (answers.iter().map(|answer| text[answer.clone()].to_owned()).collect(), unwritten_end)
}

const GLM: &str = "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ '\n' + m.content }}\
    {% if m.tool_calls %}{{ m.tool_calls | map(attribute='function') | map(attribute='name') | join }}{{ m.tool_calls[0].function.arguments }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

#[test]
fn the_token_of_the_next_role_ends_an_answer_where_generation_stops_at_it() {
    let names = ["<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"];
    let template = ChatTemplate::new(GLM, "the test", &renamed(names, &names[..2])).unwrap();
    let call =
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]});
    let told = |mut turns: Vec<Value>, more: &[&Value]| {
        turns.extend(more.iter().map(|message| (*message).clone()));
        learned(&template, &turns)
    };
    let asked = conversation(&[("user", "a"), ("assistant", "b"), ("user", "c")]);
    let first = "\nb<|user|>".to_owned();
    let (result, answer) = (json!({"role": "tool", "content": "1"}), json!({"role": "assistant", "content": "d"}));
    let said = |texts: &[&str]| {
        [&[first.clone()][..], &texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>()].concat()
    };
    assert_eq!(told(asked.clone(), &[&answer]), (said(&["\nd"]), Some("<|user|>".into())));
    assert_eq!(told(asked.clone(), &[&call]), (said(&["\nf{'x': 1}"]), Some("<|observation|>".into())));
    let all = told(asked.clone(), &[&call, &result, &answer]);
    assert_eq!(all, (said(&["\nf{'x': 1}<|observation|>", "\nd"]), Some("<|user|>".into())));
    // Nothing that carries loss is the last.
    assert_eq!(told(asked.clone(), &[]), (said(&[]), None));
    let unlearned = json!({"role": "assistant", "content": "d", "weight": 0});
    assert_eq!(told(asked.clone(), &[&unlearned]), (said(&[]), None));
    let whole = template.render_traced(&[asked, vec![answer]].concat(), None).unwrap();
    assert_eq!(whole.unwritten_end.as_deref(), Some("<|user|>"));

    let tokens: Vec<&str> = template.ends().tokens.iter().map(|token| &*token.text).collect();
    assert_eq!((tokens, &template.ends().without_end), (vec!["<|user|>", "<|observation|>"], &None));
    // Where generation does not stop at them, that with which a conversation can begin ends none.
    let template = ChatTemplate::new(GLM, "the test", &renamed(names, &[])).unwrap();
    assert_eq!(learned(&template, &conversation(&[("user", "a"), ("assistant", "b"), ("user", "c")])).0, ["\nb"]);
    assert!(template.ends().without_end.is_some());
}

#[test]
fn what_a_template_writes_behind_an_answer_ends_it() {
    let turn = |end: &str| {
        format!(
            "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n' + m.content }}}}{{% if m.role == 'user' %}}\
             {{{{ '<|im_end|>\n' }}}}{{% else %}}{end}{{% endif %}}{{% endfor %}}"
        )
    };
    let prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let with_prompt = |end: &str| turn(end) + prompt;
    let between = "{% if not loop.last %}{{ '<|im_end|>\n' }}{% endif %}";
    let other_last = "{{ '</s>' if loop.last else '<|im_end|>' }}";
    let eos_last = "{{ '<s>\n' }}{{ '</s>' if loop.last else '' }}";
    let no = |problems: [bool; 2]| problems;
    // The source, what ends both answers of a conversation, whether an end is added to the last; the token, the text; whether
    // answers have no end, whether prompts are bad.
    for (source, ends, unwritten, token, text, problems) in [
        (with_prompt("{{ '<|im_end|>\n' }}"), ["<|im_end|>"; 2], None, "<|im_end|>", None, no([false; 2])),
        (with_prompt("{{ '<s>\n' }}"), ["<s>"; 2], None, "<s>", None, no([false; 2])),
        (with_prompt("{{ '\n### End\n' }}"), ["\n### End"; 2], None, "", Some("\n### End"), no([false; 2])),
        (with_prompt("{{ '\n\n' }}"), ["\n\n"; 2], None, "", None, no([true, false])),
        (with_prompt(";"), [";"; 2], None, "", None, no([true, false])),
        (with_prompt(between), ["<|im_end|>", ""], Some("<|im_end|>"), "<|im_end|>", None, no([false; 2])),
        (with_prompt(other_last), ["<|im_end|>", "</s>"], None, "</s>", None, no([false; 2])),
        (with_prompt(eos_last), ["<s>"; 2], None, "<s>", None, no([false; 2])),
        // The prompt is written in any case.
        (
            turn("{{ '<|im_end|>' }}") + "{{ '<|im_start|>assistant\n' }}",
            ["<|im_end|>"; 2],
            None,
            "<|im_end|>",
            None,
            no([false; 2]),
        ),
    ] {
        let template = ChatTemplate::new(&source, "the test", &chat_tokenizer()).unwrap();
        let turns = conversation(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        let (said, end) = learned(&template, &turns);
        assert_eq!(said, [format!("b{}", ends[0]), format!("d{}", ends[1])], "{source}");
        assert_eq!(end.as_deref(), unwritten, "{source}");
        let found = template.ends();
        let tokens: Vec<&str> = found.tokens.iter().map(|token| &*token.text).collect();
        assert_eq!((tokens.join(" "), found.text.as_deref()), (token.to_owned(), text), "{source}");
        assert_eq!([&found.without_end, &found.bad_prompt].map(Option::is_some), problems, "{source}");
        let (tokenizer, stops) = (chat_tokenizer(), Stops::of(&chat_tokenizer(), Some(&template)));
        assert!(
            tokenizer
                .eos_ids()
                .iter()
                .chain(found.tokens.iter().map(|token| &token.id))
                .all(|id| stops.ids.contains(id))
        );
        assert_eq!(stops.texts, text.into_iter().map(ToOwned::to_owned).collect::<Vec<_>>());
    }
}

#[test]
fn nothing_behind_the_ending_token_carries_loss_where_that_is_not_special() {
    let folder = model_folder(&json!({"eos_token": "<|im_end|>"}));
    let path = folder.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap().replace("\"special\":true", "\"special\":false");
    std::fs::write(&path, text).unwrap();
    let tokenizer = Tokenizer::open(folder.path()).unwrap();
    // The one that the configuration names is special to transformers, as it is here.
    assert!(!tokenizer.special_texts().contains(&"</s>".to_owned()) && tokenizer.added_tokens().len() == 4);
    for (source, end) in [(CHATML, "<|im_end|>"), (&CHATML.replace("<|im_end|>", "</s>"), "</s>")] {
        let template = ChatTemplate::new(source, "the test", &tokenizer).unwrap();
        let turns = conversation(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
        assert_eq!(learned(&template, &turns), (vec![format!("b{end}"), format!("d{end}")], None));
    }
}

#[test]
fn prompts_that_end_before_the_answer_begins_are_named() {
    let problem =
        |source: &str| ChatTemplate::new(source, "t.jinja", &chat_tokenizer()).unwrap().ends().bad_prompt.clone();
    let without = CHATML.split("{% if add_generation_prompt").next().unwrap();
    let problem_of = problem(without).unwrap();
    assert!(
        problem_of.starts_with("the chat template of t.jinja has no generation prompt: \"<|im_start|>assistant\\n\""),
        "{problem_of}"
    );
    let joined = problem("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}").unwrap();
    assert!(joined.starts_with("the chat template of t.jinja ends prompts with \"<|im_end|>\""), "{joined}");
    // Where the question's own text leads to the answer, none is needed.
    let inst = "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token }}\
                {% endfor %}";
    assert_eq!(problem(inst), None);
}

#[test]
fn a_call_that_ends_otherwise_than_an_answer_ends_generation_and_what_closes_a_call_does_not() {
    let calls = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}\
                 {{ call.function.name + CLOSES }}{% endfor %}{{ ENDS if m.tool_calls else '<|im_end|>' }}{% endfor %}";
    for (closes, ends, tokens) in [("''", "'<s>'", &["<|im_end|>", "<s>"][..]), ("'<s>'", "''", &["<|im_end|>"])] {
        let source = calls.replace("CLOSES", closes).replace("ENDS", ends);
        let template = ChatTemplate::new(&source, "the test", &chat_tokenizer()).unwrap();
        let found: Vec<&str> = template.ends().tokens.iter().map(|token| &*token.text).collect();
        assert_eq!(found, tokens, "{source}");
    }
}
