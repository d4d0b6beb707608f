use super::*;

fn columns(renames: &[(&str, &str)]) -> BTreeMap<String, String> {
    renames.iter().map(|(name, column)| ((*name).to_owned(), (*column).to_owned())).collect()
}

fn detect(format: DataFormat, renames: &[(&str, &str)], row: &Value) -> Result<RowFormat, String> {
    RowFormat::detect(format, &columns(renames), row)
}

/// What `auto` makes of a row.
fn read(row: &Value, has_template: bool) -> Result<Sample, String> {
    detect(DataFormat::Auto, &[], row)?.read(row, has_template)
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
    assert_eq!(read(&row, true).unwrap(), Sample::Completion { prompt: "a".into(), completion: "b".into() });
    assert_eq!(read(&json!({"text": "a"}), true).unwrap(), Sample::Text("a".into()));
}

#[test]
fn columns_of_no_format_are_listed_with_what_would_help() {
    let error = read(&json!({"question": "a", "answer": "b"}), true).unwrap_err();
    assert!(error.starts_with("the columns [\"question\", \"answer\"] are those of no format"), "{error}");
    assert!(error.contains("alpaca (instruction, output)") && error.contains("columns = {"), "{error}");
}

#[test]
fn columns_are_renamed() {
    let row = json!({"question": "a", "answer": "b", "extra": 0});
    let format = detect(DataFormat::Auto, &[("prompt", "question"), ("completion", "answer")], &row).unwrap();
    assert_eq!(format.format(), DataFormat::PromptCompletion);
    assert_eq!(format.read(&row, false).unwrap(), Sample::Completion { prompt: "a".into(), completion: "b".into() });
    assert_eq!(format.unused_columns(&row), ["extra"]);

    let error = detect(DataFormat::PromptCompletion, &[("prompt", "q"), ("completion", "answer")], &row).unwrap_err();
    assert_eq!(error, "`columns` says that `prompt` is column `q`; the row has [\"question\", \"answer\", \"extra\"]");
    let error = detect(DataFormat::Text, &[("question", "text")], &json!({"text": "a"})).unwrap_err();
    assert_eq!(error, "`columns` has `question`, which format `text` does not use; it uses text");
    let error = detect(DataFormat::Alpaca, &[], &row).unwrap_err();
    assert!(error.starts_with("format `alpaca` needs a column `instruction`; the row has [\"question\""), "{error}");
    assert!(error.contains("columns = { instruction = \"...\" }"), "{error}");
}

#[test]
fn sharegpt_roles_are_those_of_chat_templates() {
    let turns: Vec<Value> = SHAREGPT_ROLES.iter().map(|(name, role)| json!({"from": name, "value": role})).collect();
    let Sample::Chat { messages, .. } = read(&json!({"conversations": turns, "system": "s"}), true).unwrap() else {
        panic!("a conversation")
    };
    assert_eq!(messages[0], json!({"role": "system", "content": "s"}));
    assert!(messages[1..].iter().all(|message| message["role"] == message["content"]));
    let error = read(&json!({"conversations": [{"from": "bob", "value": "x"}]}), true).unwrap_err();
    assert!(error.starts_with("turn 0: `from` is \"bob\"; known are human, user, gpt"), "{error}");
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
fn keys_that_are_null_do_not_reach_the_template_and_tools_do() {
    let call = json!([{"function": {"name": "f", "arguments": {"x": null}}}]);
    let row = json!({"messages": [{"role": "user", "content": "a", "tool_calls": null},
                                  {"role": "assistant", "content": null, "tool_calls": call}],
                     "tools": "[{\"name\": \"f\"}]"});
    let Sample::Chat { messages, tools } = read(&row, true).unwrap() else { panic!("a conversation") };
    assert_eq!(messages, [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "tool_calls": call})]);
    assert_eq!(tools, Some(json!([{"name": "f"}])));
}

#[test]
fn what_is_wrong_with_a_row_is_said() {
    let cases = [
        (json!({"messages": []}), "`messages` is empty"),
        (json!({"messages": "hi"}), "`messages` must be a list of objects, not text"),
        (json!({"messages": [{"role": "user"}]}), "message 0: has no `content`; it has `role`"),
        (json!({"messages": [{"from": "human", "value": "a"}]}), "`from` and `value` are format \"sharegpt\""),
        (json!({"messages": [{"role": "user", "content": 1}]}), "message 0: `content` must be text, not a number"),
        (json!({"messages": ["hi"]}), "message 0: must be an object with `role` and `content`, not text"),
        (json!({"conversations": [{"from": "human"}]}), "turn 0: needs text in `from` and `value`; it has [\"from\"]"),
        (json!({"prompt": ["a"], "completion": "b"}), "`prompt` must be text, not a list"),
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
}
