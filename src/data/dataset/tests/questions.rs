use serde_json::json;

use super::*;

fn ask(dataset: &Dataset, asking: &Asking<'_>) -> Vec<Question> {
    dataset.questions(asking, Ok).unwrap()
}

const ALL: Asking<'_> = Asking { max_rows: 9, prompt: None, num_fewshot: 0, needs_choices: false };

#[test]
fn a_conversation_asks_up_to_its_last_answer_with_the_tokens_of_training() {
    let files = Files::new();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let turns =
        [turn("user", "x"), turn("assistant", "y"), turn("user", "z"), turn("assistant", " ab\n"), turn("user", "q")];
    let source = files.write("r.jsonl", &format!("{}\n", json!({"messages": turns})));
    let config = DataConfig { eval: vec![source.clone()], ..config(vec![source]) };
    let tokenizer = chat_tokenizer();
    let dataset = Dataset::open(&config, Arc::clone(&tokenizer), 7, &OpenOptions::default()).unwrap();
    let [question] = &ask(&dataset, &ALL)[..] else { panic!("one row") };
    assert_eq!(question.answer, "ab");
    assert!(question.prompt.ends_with("user\nz<|im_end|>\n<|im_start|>assistant\n"), "{}", question.prompt);
    let (_, row) = dataset.train_row(0).unwrap();
    let start = row.carries_loss.iter().rposition(|loss| *loss).unwrap() - 3;
    assert_eq!(
        question.prompt_ids(&tokenizer, None).unwrap(),
        row.ids[..start],
        "without the answer's space, AB, newline, end"
    );
}

#[test]
fn a_prompt_of_the_task_has_examples_of_the_training_rows_and_none_of_the_row_itself() {
    let files = Files::new();
    let row = |question: &str, answer: &str| format!("{}\n", json!({"question": question, "answer": answer}));
    let train = files.write("t.jsonl", &[row("a", "1"), row("b", "2"), row("c", "3")].concat());
    let eval = files.write("e.jsonl", &[row("d", " 4 "), row("a", "1")].concat());
    let dataset = open(&DataConfig { eval: vec![eval], ..config(vec![train]) });
    let questions = ask(&dataset, &Asking { prompt: Some("Q: {prompt}\nA:"), num_fewshot: 2, ..ALL });
    assert_eq!(questions[0].prompt, "Q: a\nA: 1\n\nQ: b\nA: 2\n\nQ: d\nA:");
    assert_eq!(questions[1].prompt, "Q: b\nA: 2\n\nQ: c\nA: 3\n\nQ: a\nA:");
    assert_eq!(questions.iter().map(|question| question.answer.as_str()).collect::<Vec<_>>(), ["4", "1"]);
    assert_eq!(ask(&dataset, &Asking { max_rows: 1, ..ALL }).len(), 1);
}

#[test]
fn a_choice_is_named_by_its_text_a_letter_or_a_number_and_its_tokens_are_the_targets() {
    let files = Files::new();
    let row =
        |answer: serde_json::Value| format!("{}\n", json!({"question": "x", "choices": ["u", "vw"], "answer": answer}));
    let rows = [row(json!("vw")), row(json!("B")), row(json!(1)), row(json!("1")), row(json!("C"))].concat();
    let source = files.write("r.jsonl", &rows);
    let dataset = open(&DataConfig { eval: vec![source.clone()], ..config(vec![source]) });
    let asking = Asking { needs_choices: true, prompt: Some("{prompt}:"), ..ALL };
    let questions = ask(&dataset, &asking);
    let right: Vec<Option<usize>> = questions.iter().map(Question::right_choice).collect();
    assert_eq!(right, [Some(1), Some(1), Some(1), Some(1), None]);
    // A number is trained on as the choice that it names.
    assert_eq!(dataset.train_row(2).unwrap().1.ids, dataset.train_row(0).unwrap().1.ids);

    let batch = questions[0].answered("vw", &tokenizer(), None).unwrap();
    let [x, colon, space, v, w] = *b"x: vw";
    assert_eq!(batch.input_ids[1..], [x, colon, space, v, w].map(u32::from));
    assert_eq!(batch.targets.iter().map(|target| target.token).collect::<Vec<_>>(), [space, v, w].map(u32::from));
}

#[test]
fn rows_that_cannot_be_asked_are_named() {
    let files = Files::new();
    let error = |name: &str, content: &str, asking: &Asking<'_>| {
        let source = files.write(name, content);
        let dataset = open(&DataConfig { eval: vec![source.clone()], ..config(vec![source]) });
        dataset.questions(asking, Ok).unwrap_err().to_string()
    };
    let choices = Asking { needs_choices: true, ..ALL };
    let text = error("r.jsonl", "{\"prompt\": \"x\", \"completion\": \"y\"}\n", &choices);
    assert!(text.contains("r.jsonl:line 1: multiple choice needs `choices`"), "{text}");
    assert!(error("r.jsonl", "{\"text\": \"x y\"}\n", &ALL).contains("line 1: is plain text"));
    assert!(error("r.txt", "some text", &ALL).contains("r.txt: is plain text"));
}
