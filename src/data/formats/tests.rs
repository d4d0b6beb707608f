use super::*;
use crate::config::RowKind;
use crate::data::fixture::{chat_tokenizer, tokenizer};

mod preferences;

use preferences::{preference, turns};

fn columns(renames: &[(&str, &str)]) -> BTreeMap<String, String> {
    renames.iter().map(|(name, column)| ((*name).to_owned(), (*column).to_owned())).collect()
}

fn detect(format: DataFormat, renames: &[(&str, &str)], row: &Value) -> Result<RowFormat, String> {
    RowFormat::detect(format, &columns(renames), row, RowKind::Sequence)
}

/// A template that writes everything.
fn template() -> ChatTemplate {
    ChatTemplate::new("{{ messages }}{{ tools }}{% if 'critic' %}{% endif %}", "the test", &tokenizer()).unwrap()
}

/// The sample that `auto` makes of a row.
fn read(row: &Value, has_template: bool) -> Result<Sample, String> {
    let template = has_template.then(template);
    detect(DataFormat::Auto, &[], row)?.read(row, template.as_ref())
}

fn chat(turns: &[(&str, &str)]) -> Sample {
    let messages = turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    Sample::Chat { messages, tools: None }
}

#[test]
fn every_format_is_recognised_by_its_columns() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let turns = json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]);
    let asked = chat(&[("user", "a"), ("assistant", "b")]);
    assert_eq!(read(&json!({"id": 1, "messages": messages}), true).unwrap(), asked);
    assert_eq!(read(&json!({"conversations": turns}), true).unwrap(), asked);
    assert_eq!(read(&json!({"conversations": messages}), true).unwrap(), asked, "the keys of messages");
    assert_eq!(read(&json!({"instruction": "a", "input": "", "output": "b", "text": "t"}), true).unwrap(), asked);
    let row = json!({"prompt": "a", "completion": "b"});
    assert_eq!(read(&row, true).unwrap(), asked);
    assert_eq!(read(&row, false).unwrap(), Sample::Completion { prompt: "a".into(), completion: "b".into() });
    assert_eq!(read(&json!({"text": "a"}), true).unwrap(), Sample::Text("a".into()));
}

#[test]
fn common_pairs_of_columns_are_read_where_they_are_the_only_one() {
    for (question, answer) in [
        ("question", "answer"),
        // Headings of a table.
        ("Question", "Answer"),
        ("PROMPT", "Completion"),
        ("Instruction", "output"),
        ("instruction", "response"),
        ("query", "response"),
        ("input", "output"),
        ("prompt", "response"),
    ] {
        let row = json!({question: "a", answer: "b", "id": 1});
        assert_eq!(read(&row, true).unwrap(), chat(&[("user", "a"), ("assistant", "b")]), "{question}");
    }
    let row = json!({"instruction": "a", "context": "c", "response": "b", "category": "x"});
    assert_eq!(read(&row, true).unwrap(), chat(&[("user", "a\nc"), ("assistant", "b")]));
    let mut unused = BTreeSet::new();
    detect(DataFormat::Auto, &[], &row).unwrap().add_unused(&row, &mut unused);
    assert_eq!(unused.into_iter().collect::<Vec<_>>(), ["category"]);
    let two = json!({"question": "a", "answer": "b", "input": "c", "output": "d"});
    assert!(read(&two, true).unwrap_err().contains("are those of no format"));
}

#[test]
fn preference_data_is_called_so() {
    for row in [
        json!({"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}),
        json!({"chosen": [{"role": "user", "content": "a"}], "rejected": []}),
        json!({"messages": [{"role": "user", "content": "a"}], "label": false}),
    ] {
        let error = read(&row, true).unwrap_err();
        assert!(error.starts_with("this is preference data") && error.contains("`columns = { "), "{error}");
    }
    for (row, columns) in [
        (
            json!({"prompt": "a", "completion": "b", "label": "True"}),
            "prompt = \"prompt\", completion = \"completion\"",
        ),
        (json!({"prompt": "a", "completion": "b", "label": 0}), "prompt = \"prompt\", completion = \"completion\""),
        (
            json!({"instruction": "a", "output": "b", "kto_tag": "1"}),
            "prompt = \"instruction\", completion = \"output\"",
        ),
    ] {
        let error = detect(DataFormat::Auto, &[], &row).unwrap_err();
        assert!(error.starts_with("this is preference data") && error.contains(columns), "{error}");
    }
    // Classes: of other rows, beside other columns.
    let first = detect(DataFormat::Auto, &[], &json!({"prompt": "a", "completion": "b", "label": 3})).unwrap();
    assert!(first.read(&json!({"prompt": "a", "completion": "b", "label": 1}), None).is_ok());
    assert!(detect(DataFormat::Auto, &[], &json!({"prompt": "a", "completion": "b", "label": 1, "id": 7})).is_ok());
    assert!(detect(DataFormat::Auto, &[], &json!({"instruction": "a", "output": "b", "label": "true"})).is_ok());
    let row = json!({"chosen": [{"role": "user", "content": "a"}], "rejected": []});
    let format = detect(DataFormat::Auto, &[("messages", "chosen")], &row).unwrap();
    assert_eq!(format.read(&row, Some(&template())).unwrap(), chat(&[("user", "a")]));
}

#[test]
fn numbers_and_truth_values_are_the_text_that_they_are_written_as() {
    let columns = [("prompt", "text"), ("completion", "label")];
    for (label, expected) in [(json!(1), "1"), (json!(-0.5), "-0.5"), (json!(2.0), "2.0"), (json!(true), "true")] {
        let row = json!({"text": "q", "label": label});
        let sample = detect(DataFormat::Auto, &columns, &row).unwrap().read(&row, Some(&template())).unwrap();
        assert_eq!(sample, chat(&[("user", "q"), ("assistant", expected)]));
        let row = json!({"instruction": 1, "input": 2, "output": label});
        assert_eq!(read(&row, true).unwrap(), chat(&[("user", "1\n2"), ("assistant", expected)]));
        let row = json!({"prompt": 7, "chosen": label, "rejected": "no"});
        let Sample::Pair(chosen, ..) = preference(RowKind::Pair, &row, true).unwrap() else { panic!() };
        assert_eq!(turns(&chosen)[1].1, expected);
    }
    let row = |completion: u64| json!({"prompt": "q", "completion": completion, "choices": ["a", "b"]});
    assert_eq!(read(&row(1), true).unwrap(), chat(&[("user", "q"), ("assistant", "b")]));
    assert_eq!(read(&row(2), true).unwrap_err(), "`completion` = 2 is none of the texts in `choices`");
}

#[test]
fn columns_that_are_the_point_of_rows_of_texts_are_named() {
    let unlearnt = |row: &Value, renames: &[(&str, &str)]| {
        let format = detect(DataFormat::Auto, renames, row).unwrap();
        let mut unused = BTreeSet::new();
        format.add_unused(row, &mut unused);
        format.unlearnt(&unused)
    };
    let said = unlearnt(&json!({"Text": "a", "Label": true, "id": 1}), &[]).unwrap();
    assert!(said.starts_with("`Label` is not learnt\n"), "{said}");
    assert!(said.contains("`columns = { prompt = \"Text\", completion = \"Label\" }` teaches"), "{said}");
    for (row, renames) in [
        (json!({"text": "a", "label": 1}), &[("text", "text")][..]),
        (json!({"text": "a", "id": 1}), &[]),
        (json!({"prompt": "a", "completion": "b", "category": "c"}), &[]),
        (
            json!({"prompt": "a", "completion": "b", "context": "c"}),
            &[("prompt", "prompt"), ("completion", "completion")],
        ),
    ] {
        assert_eq!(unlearnt(&row, renames), None, "{row}");
    }
    // What a question is about; the columns that it names are read.
    for (column, ours, place) in [("Context", "input", "below the question"), ("system", "system", "the system prompt")]
    {
        let row = json!({"question": "q", "answer": "a", column: "c", "id": 1});
        let said = unlearnt(&row, &[]).unwrap();
        let columns = format!("{{ instruction = \"question\", {ours} = \"{column}\", output = \"answer\" }}");
        assert!(said.contains(&columns) && said.ends_with(place), "{said}");
        let named = [("instruction", "question"), (ours, column), ("output", "answer")];
        let format = detect(DataFormat::Auto, &named, &row).unwrap();
        let mut unused = BTreeSet::new();
        format.add_unused(&row, &mut unused);
        assert_eq!(unused.into_iter().collect::<Vec<_>>(), ["id"]);
    }
    for row in
        [json!({"text": "a", "audio": "x.wav"}), json!({"prompt": "a", "completion": "b", "image": {"path": "x"}})]
    {
        let error = read(&row, true).unwrap_err();
        assert!(error.contains("that `lora-train help images` lists\n  hint: `columns = { "), "{error}");
    }
    let row = json!({"text": "a", "audio": "x.wav"});
    assert_eq!(
        detect(DataFormat::Auto, &[("text", "text")], &row).unwrap().read(&row, None),
        Ok(Sample::Text("a".into()))
    );
    for row in
        [json!({"anchor": "a", "positive": "b", "negative": "c"}), json!({"query": "a", "pos": ["b"], "neg": ["c"]})]
    {
        assert!(read(&row, true).unwrap_err().contains("rows for an embedding model"), "{row}");
    }
}

#[test]
fn a_message_names_some_of_very_many_columns() {
    let row: Map<String, Value> = (0..1000).map(|index| (format!("c{index}"), json!(1))).collect();
    let error = read(&row.into(), true).unwrap_err();
    assert!(error.len() < 1000 && error.contains("`c29` and 970 more"), "{error}");
}

#[test]
fn columns_of_no_format_are_listed_with_what_would_help() {
    let error = read(&json!({"user_msg": "a", "bot_msg": "b"}), true).unwrap_err();
    assert!(error.starts_with("the columns `user_msg`, `bot_msg` are those of no format"), "{error}");
    assert!(error.contains("alpaca (instruction, output)"), "{error}");
    assert!(error.ends_with("`columns = { prompt = \"user_msg\", completion = \"bot_msg\" }`"), "{error}");
    let error = read(&json!({"id": 1, "dialog": [{"role": "user", "content": "a"}]}), true).unwrap_err();
    assert!(error.ends_with("`columns = { messages = \"dialog\" }`"), "{error}");
    let error = read(&json!({"image": "a.png", "caption": "A bill."}), true).unwrap_err();
    let columns = "`columns = { prompt = \"prompt\", completion = \"caption\" }` teaches to answer with the text";
    assert!(error.contains("an image is seen in a question") && error.ends_with(columns), "{error}");
}

#[test]
fn the_columns_of_a_hint_are_those_with_the_longest_texts() {
    let row = json!({"id": "17", "ask": "What is it?", "tell": "A cell.", "lang": "en"});
    let error = read(&row, true).unwrap_err();
    assert!(error.ends_with("`columns = { prompt = \"ask\", completion = \"tell\" }`"), "{error}");
    let error = detect(DataFormat::Alpaca, &[("output", "tell")], &row).unwrap_err();
    assert!(error.contains("`columns = { instruction = \"ask\" }` names another column"), "{error}");
    let row = json!({"id": "17", "chat": "[{\"role\": \"user\", \"content\": \"a\"}]"});
    let error = detect(DataFormat::Messages, &[], &row).unwrap_err();
    assert!(error.contains("`columns = { messages = \"chat\" }`"), "{error}");
}

#[test]
fn conversations_in_text_cells_are_their_json() {
    let turns = json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]).to_string();
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).to_string();
    let asked = chat(&[("user", "a"), ("assistant", "b")]);
    let rows = [
        json!({"messages": messages, "tools": "", "functions": ""}),
        json!({"conversations": messages}),
        json!({"conversations": turns, "system": "", "tools": ""}),
    ];
    for row in &rows {
        assert_eq!(read(row, true).unwrap(), asked, "{row}");
    }
    let error = read(&json!({"messages": "[{'role': 'user', 'content': 'a'}]"}), true).unwrap_err();
    assert!(error.starts_with("`messages` must be a list of objects in JSON: key must be a string"), "{error}");
    assert!(error.ends_with("hint: Python's `json.dumps` writes it, `str` does not"), "{error}");
}

#[test]
fn a_default_system_prompt_is_that_of_rows_without_one() {
    let config = DataConfig { system: Some("be brief".into()), ..DataConfig::default() };
    let read = |row: &Value, template: Option<&ChatTemplate>| {
        detect(DataFormat::Auto, &[], row).unwrap().under(&config).read(row, template).unwrap()
    };
    let asked = chat(&[("system", "be brief"), ("user", "a"), ("assistant", "b")]);
    let own = chat(&[("system", "s"), ("user", "a"), ("assistant", "b")]);
    let turns = json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]);
    let messages = json!([{"role": "developer", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let cases = [
        (json!({"conversations": turns}), &asked),
        (json!({"conversations": turns, "system": "s"}), &own),
        (json!({"messages": messages}), &own),
        (json!({"instruction": "a", "output": "b", "system": ""}), &asked),
        (json!({"instruction": "a", "output": "b", "system": "s"}), &own),
        (json!({"prompt": "a", "completion": "b"}), &asked),
    ];
    for (row, expected) in cases {
        assert_eq!(read(&row, Some(&template())), *expected, "{row}");
    }
    let Sample::Completion { prompt, .. } = read(&json!({"instruction": "a", "output": "b"}), None) else { panic!() };
    assert!(prompt.starts_with("be brief\n\nBelow is"), "{prompt}");
}

#[test]
fn the_last_turn_alone_carries_loss_where_that_is_asked_for() {
    let config = DataConfig { train_on_turns: TrainOnTurns::Last, ..DataConfig::default() };
    let turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
    let messages: Vec<Value> = turns.iter().map(|(role, text)| json!({"role": role, "content": text})).collect();
    let row = json!({"messages": messages});
    let format = detect(DataFormat::Auto, &[], &row).unwrap().under(&config);
    let Sample::Chat { messages, .. } = format.read(&row, Some(&template())).unwrap() else { panic!() };
    let tokenizer = chat_tokenizer();
    let template = ChatTemplate::open("auto", &tokenizer).unwrap().unwrap();
    let rendered = template.render_with_answers(&messages, None).unwrap();
    let answers: Vec<&str> = rendered.answers.iter().map(|answer| &rendered.text[answer.clone()]).collect();
    assert_eq!(answers, ["d<|im_end|>"]);
}

#[test]
fn columns_are_renamed() {
    let row = json!({"question": "a", "answer": "b", "extra": 0});
    let format = detect(DataFormat::Auto, &[("prompt", "question"), ("completion", "answer")], &row).unwrap();
    assert_eq!(format.format(), DataFormat::PromptCompletion);
    assert_eq!(format.read(&row, None).unwrap(), Sample::Completion { prompt: "a".into(), completion: "b".into() });

    let error = detect(DataFormat::PromptCompletion, &[("prompt", "q"), ("completion", "answer")], &row).unwrap_err();
    assert_eq!(error, "`columns` says that `prompt` is column `q`; the row has `question`, `answer`, `extra`");
    let error = detect(DataFormat::Text, &[("question", "text")], &json!({"text": "a"})).unwrap_err();
    assert_eq!(error, "`columns` has `question`, which format `text` does not use; it uses text");
    let error = detect(DataFormat::Alpaca, &[], &row).unwrap_err();
    assert!(error.starts_with("format `alpaca` needs a column `instruction`; the row has `question`"), "{error}");
    assert!(error.contains("columns = { instruction = \"question\" }"), "{error}");
}

#[test]
fn roles_have_the_names_of_chat_templates_in_both_formats() {
    let names = [
        ("human", "user"),
        ("gpt", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("developer", "system"),
        ("observation", "tool"),
        ("function", "tool"),
        ("critic", "critic"),
    ];
    let turns: Vec<Value> = names.iter().map(|(name, _)| json!({"from": name, "value": "x"})).collect();
    let messages: Vec<Value> = names.iter().map(|(name, _)| json!({"role": name, "content": "x"})).collect();
    let sharegpt = read(&json!({"conversations": turns, "system": ""}), true).unwrap();
    assert_eq!(sharegpt, chat(&names.map(|(_, role)| (role, "x"))), "and a role that the template names");
    assert_eq!(read(&json!({"messages": messages}), true).unwrap(), sharegpt);
    let error = read(&json!({"conversations": [{"from": "bob", "value": "x"}]}), true).unwrap_err();
    assert!(error.starts_with("turn 1: its role is \"bob\"; known are human, user, gpt"), "{error}");
    let error = read(&json!({"messages": [{"role": "bob", "content": "x"}]}), true).unwrap_err();
    assert!(error.starts_with("message 1: its role is \"bob\"; known are"), "{error}");
    let error = read(&json!({"messages": [{"role": "User", "content": "x"}]}), true).unwrap_err();
    assert!(error.ends_with("\n  hint: write \"user\""), "{error}");
}

#[test]
fn calls_of_tools_have_one_form() {
    let function = json!({"name": "f", "parameters": {"type": "object"}});
    let call = json!({"name": "f", "arguments": {"x": 1}});
    let framed = json!({"type": "function", "function": function});
    let expected = [
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": call, "type": "function", "id": "call00000"}]}),
        json!({"role": "tool", "content": "1", "tool_call_id": "call00000"}),
        json!({"role": "assistant", "content": "b"}),
    ];
    let text = json!({"name": "f", "arguments": "{\"x\": 1}"});
    let openai = |call: Value| json!({"tools": [function], "messages": [expected[0], call, {"role": "tool", "content": "1"}, expected[3]]});
    let rows = [
        json!({"tools": json!([function]).to_string(), "conversations": [
            {"from": "human", "value": "a"}, {"from": "function_call", "value": call.to_string()},
            {"from": "observation", "value": "1"}, {"from": "gpt", "value": "b"}]}),
        openai(json!({"role": "assistant", "content": null, "tool_calls": [{"function": text, "type": "function"}]})),
        openai(json!({"role": "assistant", "function_call": text})),
        openai(json!({"role": "assistant", "tool_calls": [call]})),
    ];
    for row in rows {
        let Sample::Chat { messages, tools } = read(&row, true).unwrap() else { panic!("a conversation") };
        assert_eq!((messages.as_slice(), tools), (expected.as_slice(), Some(json!([framed]))), "{row}");
    }
    let both = json!({"role": "assistant", "tool_calls": [call], "function_call": call});
    assert!(read(&openai(both), true).unwrap_err().contains("`tool_calls` and `function_call`, which are one thing"));
    for (call, what) in [
        (json!({"name": "f", "arguments": "{x: 1}"}), "the `arguments` of the call of `f` are not a JSON object"),
        (json!({"arguments": {}}), "a tool call has no `name`"),
    ] {
        let error = read(&openai(json!({"role": "assistant", "tool_calls": [call]})), true).unwrap_err();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn nulls_that_datasets_writes_as_json_are_left_out_where_a_property_shows_them() {
    let row = |properties: &Value, arguments: &Value| {
        let call = json!({"type": "function", "function": {"name": "tide", "arguments": arguments}});
        let tool = json!({"type": "function", "function": {"name": "tide", "parameters": {"properties": properties}}});
        json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]})
    };
    let (port, of_all) =
        (json!({"port": {"type": "string"}}), json!({"port": {"type": "string", "enum": null}, "fruit": null}));
    let plain = read(&row(&port, &json!({"port": "a", "at": [null, {}]})), true).unwrap();
    let written = row(&of_all, &json!({"port": "a", "fruit": null, "at": [null, {"x": null}]}));
    assert_eq!(read(&written, true).unwrap(), plain);
    // Elsewhere a null may be meant.
    let meant = row(&json!({"port": {"default": null}}), &json!({"port": null}));
    let Sample::Chat { messages, tools } = read(&meant, true).unwrap() else { panic!("a conversation") };
    assert_eq!(messages[0]["tool_calls"][0]["function"]["arguments"], json!({"port": null}));
    assert_eq!(tools, Some(meant["tools"].clone()));
    let none = json!({"messages": messages, "tools": []});
    assert!(matches!(read(&none, true).unwrap(), Sample::Chat { tools: Some(tools), .. } if tools == json!([])));
}

#[test]
fn contents_of_text_parts_are_joined_and_others_are_refused_by_name() {
    let row = |parts: Value| json!({"messages": [{"role": "user", "content": parts}]});
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(read(&row(parts.clone()), true).unwrap(), chat(&[("user", "ab")]));
    let reader = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}";
    let reader = ChatTemplate::new(reader, "the test", &tokenizer()).unwrap();
    let Sample::Chat { messages, .. } =
        detect(DataFormat::Auto, &[], &row(parts.clone())).unwrap().read(&row(parts.clone()), Some(&reader)).unwrap()
    else {
        panic!("a conversation")
    };
    assert_eq!(messages[0]["content"], parts);
    let error = read(&row(json!([{"type": "image_url", "image_url": "x"}])), true).unwrap_err();
    assert!(error.contains("is of type \"image_url\"; text alone is learnt from"), "{error}");
    let error = read(&json!({"messages": [{"role": "user", "content": "a"}], "images": ["x.png"]}), true).unwrap_err();
    assert!(
        error.starts_with("the row has `images`; text alone is learnt from, and images with the models"),
        "{error}"
    );
}

#[test]
fn alpaca_rows_are_a_conversation_or_the_published_prompt() {
    let row = json!({"instruction": "Add.", "input": "1 2", "output": "3"});
    assert_eq!(read(&row, true).unwrap(), chat(&[("user", "Add.\n1 2"), ("assistant", "3")]));
    let Sample::Completion { prompt, completion } = read(&row, false).unwrap() else { panic!("a completion") };
    assert_eq!(completion, "3");
    assert!(prompt.starts_with("Below is an instruction that describes a task, paired with an input that provides"));
    assert!(prompt.ends_with("\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:"), "{prompt}");
    let row = json!({"instruction": "Go.", "input": null, "output": "3", "system": "S"});
    let Sample::Completion { prompt, .. } = read(&row, false).unwrap() else { panic!("a completion") };
    assert!(prompt.starts_with("S\n\nBelow is an instruction that describes a task. Write a response"), "{prompt}");
    assert!(prompt.ends_with("request.\n\n### Instruction:\nGo.\n\n### Response:"), "{prompt}");
    assert_eq!(read(&row, true).unwrap(), chat(&[("system", "S"), ("user", "Go."), ("assistant", "3")]));
}

#[test]
fn tools_beside_the_messages_of_a_prompt_are_known_to_its_completion() {
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let prompt = json!({"messages": [{"role": "user", "content": "a"}], "tools": tools});
    let row = json!({"prompt": prompt, "completion": [{"role": "assistant", "content": "b"}]});
    let Sample::Chat { messages, tools: Some(found) } = read(&row, true).unwrap() else { panic!("with tools") };
    assert_eq!((messages.len(), found), (2, tools));
}

#[test]
fn keys_that_are_null_do_not_reach_the_template() {
    let row = json!({"messages": [{"role": "user", "content": "a", "tool_calls": null, "name": null}], "tools": null});
    assert_eq!(read(&row, true).unwrap(), chat(&[("user", "a")]));
    let row = json!({"messages": [{"role": "assistant", "content": "a", "reasoning": "r", "weight": 1, "x": 1}]});
    let two = json!({"messages": [{"role": "assistant", "content": "a", "reasoning": "r", "thinking": "t"}]});
    assert!(read(&two, true).unwrap_err().contains("has different texts in `reasoning_content`"));
    let turn = json!({"from": "gpt", "value": "a", "reasoning": "r", "weight": 0.5});
    assert!(read(&json!({"conversations": [turn]}), true).unwrap_err().contains("`weight` must be 0 or 1"));
    let Sample::Chat { messages, .. } = read(&row, true).unwrap() else { panic!("a conversation") };
    assert_eq!((&messages[0]["reasoning_content"], &messages[0]["thinking"]), (&json!("r"), &json!("r")));
}

#[test]
fn what_is_wrong_with_a_row_is_said() {
    let cases = [
        (json!({"messages": []}), "`messages` is empty"),
        (json!({"messages": "hi"}), "`messages` must be a list of objects, not text"),
        (json!({"messages": [{"role": "user"}]}), "message 1: has no `content`; it has `role`"),
        (json!({"messages": [{"role": "user", "content": null}]}), "message 1: its `content` is null"),
        (json!({"data": [{"prompt": "a", "completion": "b"}]}), "the rows are in `data`: write that list alone"),
        (json!({"messages": [{"from": "human", "value": "a"}]}), "`from` and `value` are format \"sharegpt\""),
        (
            json!({"messages": [{"role": "user", "content": 1}]}),
            "`content` must be text or a list of parts, not a number",
        ),
        (json!({"messages": ["hi"]}), "message 1: must be an object with `role` and `content`, not text"),
        (json!({"conversations": [{"from": "human"}]}), "turn 1: needs text in `value`, not null"),
        (json!({"prompt": ["a"], "completion": "b"}), "`prompt`, message 1: must be an object with `role`"),
        (json!({"prompt": [], "completion": [{"role": "user", "content": "a"}]}), "an answer has no message of the"),
        (json!({"text": null}), "`text` must be text, not null"),
        (
            json!({"messages": [{"role": "user", "content": "a"}], "tools": 1}),
            "`tools` must be a list of schemas, not a",
        ),
    ];
    for (row, message) in cases {
        let error = read(&row, true).unwrap_err();
        assert!(error.contains(message), "{row}: {error}");
    }
    let error = read(&json!({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}), false).unwrap_err();
    assert!(error.contains("not a list\n  hint: a list of messages needs a chat template"), "{error}");
}

#[test]
fn a_mask_that_a_person_wrote_is_followed_or_refused() {
    let messages = |answer: Value| {
        let mut message = json!({"role": "assistant", "content": "abcd"});
        message.as_object_mut().unwrap().extend(answer.as_object().unwrap().clone());
        json!({"messages": [{"role": "user", "content": "q"}, message]})
    };
    let mask = |answer: Value| {
        read(&messages(answer), true).map(|sample| {
            let Sample::Chat { messages, .. } = sample else { panic!("a conversation") };
            (messages[1]["weight"].clone(), messages[1]["train_detail"].clone())
        })
    };
    let (all, none) = ((Value::Null, Value::Null), (json!(0), Value::Null));
    let part = |begin: u64, last: u64, train: bool| json!({"begin_offset": begin, "end_offset": last, "train": train});
    for key in ["weight", "train", "training", "loss"] {
        for (value, expected) in [(json!(true), &all), (json!(1.0), &all), (json!(false), &none), (json!(0), &none)] {
            assert_eq!(mask(json!({key: value})).unwrap(), *expected, "{key}");
        }
        for value in [json!(0.5), json!("0"), json!([])] {
            assert!(mask(json!({key: value})).unwrap_err().contains("must be 0 or 1"), "{key} {value}");
        }
    }
    assert_eq!(mask(json!({"train": null, "weight": null})).unwrap(), all);
    let detail = json!([part(0, 1, true), part(2, 2, false), part(3, 3, true)]);
    assert_eq!(mask(json!({"train_detail": detail})).unwrap(), (Value::Null, json!([[0, 2], [3, 4]])));
    assert_eq!(mask(json!({"train_detail": detail, "train": false})).unwrap(), none);
    assert_eq!(mask(json!({"train_detail": [part(0, 3, false)]})).unwrap(), none);
    for (answer, reason) in [
        (json!({"train": true, "weight": 0}), "`weight` and `train` say whether the message carries loss, and differ"),
        (json!({"train_detail": [part(0, 4, true)]}), "0 to 4 is not after 0, or beyond the 4 characters"),
        (json!({"train_detail": [part(2, 3, true), part(0, 1, true)]}), "ascending order"),
        (json!({"train_detail": [{"start": 0}]}), "must be a list of `begin_offset`, `end_offset`"),
        (json!({"train_detail": true}), "must be a list of `begin_offset`, `end_offset`"),
        (json!({"train_detail": [part(0, 1, true)], "reasoning": "r"}), "says nothing of calls and reasoning"),
    ] {
        let error = mask(answer).unwrap_err();
        assert!(error.starts_with("message 2: ") && error.contains(reason), "{error}");
    }
    let asked = |turn: Value| read(&json!({"conversations": [turn, {"from": "gpt", "value": "a"}]}), true);
    assert!(asked(json!({"from": "human", "value": "q", "train": false})).is_ok());
    let error = asked(json!({"from": "human", "value": "q", "train": true})).unwrap_err();
    assert!(error.starts_with("turn 1: `train` asks for loss on a message of \"user\"; only an answer"), "{error}");
    let error = asked(json!({"from": "human", "value": "qq", "train_detail": [part(0, 1, true)]})).unwrap_err();
    assert!(error.starts_with("turn 1: `train_detail` asks for loss"), "{error}");
}

#[test]
fn a_row_says_which_of_its_answers_carry_loss_and_other_settings_in_it_are_refused() {
    let turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
    let messages: Vec<Value> = turns.iter().map(|(role, text)| json!({"role": role, "content": text})).collect();
    let masked = |key: &str, value: Value| {
        let row = json!({"messages": messages, key: value});
        let Sample::Chat { messages, .. } = read(&row, true)? else { panic!("a conversation") };
        let mut unused = BTreeSet::new();
        detect(DataFormat::Auto, &[], &row).unwrap().add_unused(&row, &mut unused);
        assert!(unused.is_empty(), "{unused:?}");
        Ok::<_, String>(messages[1]["weight"] == 0)
    };
    assert_eq!(masked("train_on_turns", json!("last")), Ok(true));
    assert_eq!(masked("mask_history", json!(true)), Ok(true));
    for (key, value) in [
        ("train_on_turns", json!("all")),
        ("mask_history", json!(false)),
        ("train_on_inputs", json!(false)),
        ("train_on_eos", json!("turn")),
        ("roles_to_train", json!(["assistant"])),
        ("train_on_turns", Value::Null),
    ] {
        assert_eq!(masked(key, value), Ok(false), "{key}");
    }
    for (key, value) in [
        ("train_on_turns", json!([1])),
        ("train_on_inputs", json!(true)),
        ("train_on_eos", json!("all")),
        ("roles_to_train", json!(["user"])),
    ] {
        let error = masked(key, value.clone()).unwrap_err();
        assert!(error.starts_with(&format!("`{key}` = {value} in a row is not followed\n  hint: ")), "{error}");
    }
}
