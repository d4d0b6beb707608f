//! Rows of preferences and prompts.

use super::*;

/// What a row of preferences trains on.
pub(super) fn preference(kind: RowKind, row: &Value, has_template: bool) -> Result<Sample, String> {
    let tokenizer = chat_tokenizer();
    let template = has_template.then(|| ChatTemplate::open("auto", &tokenizer).unwrap().unwrap());
    RowFormat::detect(DataFormat::Auto, &BTreeMap::new(), row, kind)?.read(row, template.as_ref())
}

pub(super) fn turns(sample: &Sample) -> Vec<(String, String, bool)> {
    let Sample::Chat { messages, .. } = sample else { panic!("{sample:?}") };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    messages.iter().map(|m| (text(&m["role"]), text(&m["content"]), m["weight"] != 0)).collect()
}

#[test]
fn pairs_in_every_spelling_are_one_prompt_and_two_answers() {
    let user = |text: &str| json!({"role": "user", "content": text});
    let assistant = |text: &str| json!({"role": "assistant", "content": text});
    for row in [
        json!({"prompt": "q", "chosen": "good", "rejected": "bad"}),
        json!({"question": "q", "chosen": "good", "rejected": "bad"}),
        json!({"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}),
        json!({"prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")]}),
        json!({"prompt": [user("q")], "chosen": "good", "rejected": "bad"}),
        json!({"prompt": [user("q")], "chosen": assistant("good"), "rejected": assistant("bad")}),
        json!({"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]}),
        json!({"prompt": "q", "chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]}),
        json!({"prompt": "q", "chosen": [assistant("good")], "rejected": [assistant("bad")]}),
        json!({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
               "rejected": {"from": "gpt", "value": "bad"}}),
        json!({"input": {"messages": [user("q")], "tools": [], "parallel_tool_calls": true}, "preferred_output": [assistant("good")],
               "non_preferred_output": [assistant("bad")]}),
        json!({"input": [user("q")], "preferred_output": "good", "non_preferred_output": "bad"}),
    ] {
        let Sample::Pair(chosen, rejected, _) = preference(RowKind::Pair, &row, true).unwrap() else { panic!("{row}") };
        let expected = |answer: &str| {
            vec![("user".to_owned(), "q".to_owned(), true), ("assistant".to_owned(), answer.to_owned(), true)]
        };
        assert_eq!((turns(&chosen), turns(&rejected)), (expected("good"), expected("bad")), "{row}");
    }
}

#[test]
fn rows_of_openai_have_their_tools_beside_their_messages_and_name_what_is_not_read() {
    let call = json!({"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    let input = json!({"messages": [{"role": "user", "content": "q"}], "tools": [tool], "parallel_tool_calls": false});
    let row = json!({"input": input, "preferred_output": [call], "non_preferred_output": [{"role": "assistant", "content": "bad"}]});
    let format = RowFormat::detect(DataFormat::Auto, &BTreeMap::new(), &row, RowKind::Pair).unwrap();
    let Sample::Pair(chosen, rejected, _) = format.read(&row, Some(&template())).unwrap() else { panic!() };
    for (sample, has_call) in [(*chosen, true), (*rejected, false)] {
        let Sample::Chat { messages, tools } = sample else { panic!() };
        assert_eq!((tools, messages.len()), (Some(json!([tool])), 2));
        assert_eq!(messages[1]["tool_calls"][0]["function"]["arguments"] == json!({"x": 1}), has_call);
    }
    let mut unused = BTreeSet::new();
    format.add_unused(&row, &mut unused);
    assert_eq!(unused.into_iter().collect::<Vec<_>>(), ["input.parallel_tool_calls"]);
    let prompt = preference(RowKind::Prompt, &row, true).unwrap();
    assert!(matches!(prompt, Sample::Prompt(Prompt::Chat { messages, tools: Some(_) }) if messages.len() == 1));
    // An answer alone is never proposed.
    let error = read(&row, true).unwrap_err();
    assert!(
        error.ends_with(
            "`preferred_output` and `non_preferred_output`)\n  hint: `name = \"dpo\"` in [objective] learns from it"
        ),
        "{error}"
    );
    let apart = json!({"prompt": input["messages"], "chosen": [call], "rejected": []});
    assert!(!read(&apart, true).unwrap_err().contains("columns"));
}

#[test]
fn only_what_follows_the_common_messages_carries_loss() {
    let row = json!({
        "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
                   {"role": "assistant", "content": "good"}],
        "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
                     {"role": "assistant", "content": "bad"}],
    });
    let Sample::Pair(chosen, ..) = preference(RowKind::Pair, &row, true).unwrap() else { panic!() };
    let with_loss: Vec<bool> = turns(&chosen).into_iter().map(|(_, _, carries_loss)| carries_loss).collect();
    assert_eq!(with_loss, [true, false, true, true], "of the earlier answer none");
}

#[test]
fn texts_without_a_prompt_have_their_common_start_as_prompt() {
    let row = json!({"chosen": "Q: a\nA: yes", "rejected": "Q: a\nA: no"});
    let Sample::Pair(chosen, rejected, _) = preference(RowKind::Pair, &row, false).unwrap() else { panic!() };
    let completion =
        |prompt: &str, completion: &str| Sample::Completion { prompt: prompt.into(), completion: completion.into() };
    assert_eq!((*chosen, *rejected), (completion("Q: a\nA:", " yes"), completion("Q: a\nA:", " no")));
}

#[test]
fn scored_pairs_have_the_margin_of_their_row_and_others_none() {
    for (margin, expected) in [(json!(0.5), 0.5), (json!(-2), -2.0), (json!("1.5"), 1.5), (json!(null), 0.0)] {
        let row = json!({"prompt": "q", "chosen": "good", "rejected": "bad", "margin": margin});
        for (kind, expected) in [(RowKind::ScoredPair, expected), (RowKind::Pair, 0.0)] {
            let Sample::Pair(.., found) = preference(kind, &row, true).unwrap() else { panic!("{row}") };
            assert_eq!(found.to_bits(), f32::to_bits(expected), "{row}");
        }
    }
    let row = json!({"prompt": "q", "chosen": "good", "rejected": "bad"});
    assert!(matches!(preference(RowKind::ScoredPair, &row, true), Ok(Sample::Pair(_, _, 0.0))));
    for margin in [json!("much"), json!(true), json!(1e300)] {
        let row = json!({"prompt": "q", "chosen": "good", "rejected": "bad", "margin": margin});
        let error = preference(RowKind::ScoredPair, &row, true).unwrap_err();
        assert!(error.contains("`margin` must be a number"), "{error}");
    }
}

#[test]
fn labels_in_every_spelling_are_good_or_bad() {
    for (label, is_good) in [(json!(true), true), (json!("False"), false), (json!(1), true), (json!(0.0), false)] {
        for row in [
            json!({"prompt": "q", "completion": "a", "label": label}),
            json!({"instruction": "q", "output": "a", "kto_tag": label}),
            json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "label": label}),
        ] {
            let Sample::Labelled(sample, found) = preference(RowKind::Labelled, &row, true).unwrap() else {
                panic!("{row}")
            };
            assert_eq!((turns(&sample).len(), found), (2, is_good), "{row}");
        }
    }
}

#[test]
fn rows_that_are_no_preferences_are_refused_with_what_is_missing() {
    let message = |text: &str| json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]);
    for (kind, row, reason) in [
        (
            RowKind::Pair,
            json!({"prompt": "q", "completion": "a"}),
            "two answers a row, the chosen and the rejected one; the row has `prompt`, `completion`\n  hint: name what it \
             has under another name: `columns = { chosen = \"...\", rejected = \"...\" }`",
        ),
        (RowKind::Pair, json!({"prompt": "q", "chosen": "a", "rejected": "a"}), "are equal"),
        (RowKind::Pair, json!({"prompt": "q", "chosen": "a", "rejected": null}), "must both be there"),
        (RowKind::Pair, json!({"prompt": "q", "chosen": "a", "rejected": message("b")}), "must both be text or both"),
        (
            RowKind::Pair,
            json!({"prompt": "x", "chosen": message("a"), "rejected": message("b")}),
            "`prompt` is not what",
        ),
        (
            RowKind::Pair,
            json!({"prompt": "q", "chosen": [], "rejected": [1]}),
            "must be an object with `role` and `content`",
        ),
        (RowKind::Labelled, json!({"prompt": "q", "completion": "a", "label": "good"}), "must be true or false"),
        (RowKind::Labelled, json!({"prompt": "q", "label": true}), "needs a column `completion` or `messages`"),
        (RowKind::Labelled, json!({"prompt": "q", "chosen": "a", "rejected": "b"}), "pairs are for \"dpo\""),
        (RowKind::Sequence, json!({"prompt": "q", "chosen": "a", "rejected": "b"}), "`name = \"dpo\"` in [objective]"),
    ] {
        let error = preference(kind, &row, true).unwrap_err();
        assert!(error.contains(reason), "{row}: {error}");
    }
}

#[test]
fn images_of_a_row_stand_in_its_prompt_whatever_the_row_is_for() {
    let source = "{% for m in messages %}{{ m.role }}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
                  {{ '*' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}";
    let template = ChatTemplate::new(source, "the test", &tokenizer()).unwrap();
    let read = |kind: RowKind, row: &Value| {
        let format = RowFormat::detect(DataFormat::Auto, &BTreeMap::new(), row, kind).unwrap();
        format.with_images(Some("f".into())).read(row, Some(&template))
    };
    let parts = json!([{"type": "image"}, {"type": "text", "text": "q"}]);
    let said = |answer: &str| json!([{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]);
    for (kind, row) in [
        (RowKind::Pair, json!({"images": ["a.png"], "prompt": "q", "chosen": "good", "rejected": "bad"})),
        (RowKind::Pair, json!({"image": "a.png", "prompt": "<image>q", "chosen": "good", "rejected": "bad"})),
        (RowKind::Pair, json!({"images": ["a.png"], "chosen": said("good"), "rejected": said("bad")})),
        (RowKind::Pair, json!({"images": ["a.png"], "prompt": "q", "chosen": said("good"), "rejected": said("bad")})),
        (RowKind::Labelled, json!({"image": {"path": "a.png"}, "prompt": "q", "completion": "good", "label": true})),
        (RowKind::Prompt, json!({"images": ["a.png"], "prompt": [{"role": "user", "content": parts}]})),
        (RowKind::default(), json!({"image": "a.png", "prompt": "q", "completion": "good"})),
        (RowKind::default(), json!({"image": "a.png", "instruction": "q", "output": "good"})),
    ] {
        let samples = match read(kind, &row).unwrap() {
            Sample::Pair(chosen, rejected, _) => vec![*chosen, *rejected],
            Sample::Labelled(sample, _) => vec![*sample],
            Sample::Prompt(Prompt::Chat { messages, tools }) => vec![Sample::Chat { messages, tools }],
            sample => vec![sample],
        };
        for sample in samples {
            let Sample::Chat { messages, .. } = sample else { panic!("{row}") };
            let expected = json!([{"type": "image", "image": "f/a.png"}, {"type": "text", "text": "q"}]);
            assert_eq!((&messages[0]["content"], messages.len() < 3), (&expected, true), "{row}");
        }
    }
    let texts = json!({"image": "a.png", "chosen": "say good", "rejected": "say bad"});
    let two = json!({"images": ["a.png", "b.png"], "prompt": "<image>q", "chosen": "good", "rejected": "bad"});
    for (row, reason) in [(texts, "no `prompt` for them"), (two, "1 places for images, and the row has 2")] {
        let error = read(RowKind::Pair, &row).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}
