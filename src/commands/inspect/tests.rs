use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::*;

/// A tokenizer whose tokens are the letters a to z, a space and two special ones. It puts BOS in front of texts.
fn model_folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    let mut vocab: serde_json::Map<String, serde_json::Value> =
        ('a'..='z').chain([' ', '\n']).zip(0..).map(|(letter, id)| (letter.to_string(), id.into())).collect();
    vocab.insert("<s>".into(), 28.into());
    vocab.insert("</s>".into(), 29.into());
    let special = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                           "rstrip": false, "normalized": false})
    };
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "added_tokens": [special(28, "<s>"), special(29, "</s>")],
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    });
    let config = serde_json::json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true});
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

/// The output for these rows, and the warnings.
fn inspected(rows: &str, data: &str, num_shown: usize, marks: Marks) -> (String, Vec<String>) {
    let folder = model_folder();
    let file = folder.path().join("r.jsonl");
    fs::write(&file, rows).unwrap();
    let text = format!(
        "[model]\npath = \"m\"\n[train]\nmax_steps = 1\nmicro_batch_size = 2\n[data]\nshuffle = false\n{data}\n[[data.train]]\npath = {:?}\n",
        file.to_str().unwrap()
    );
    let recipe = Recipe::parse(Path::new("r.toml"), &text, &[], Purpose::Training).unwrap();
    let tokenizer = Arc::new(Tokenizer::open(folder.path()).unwrap());
    let data = Dataset::open(&recipe.data, Arc::clone(&tokenizer), 0, &OpenOptions::default()).unwrap();
    let mut out = Vec::new();
    let warnings = inspect(&recipe, &data, &tokenizer, num_shown, Some(marks), &mut out).unwrap();
    (String::from_utf8(out).unwrap().replace(folder.path().to_str().unwrap(), ""), warnings)
}

const ROWS: &str =
    "{\"prompt\": \"abc\\n\", \"completion\": \"de\\nf\", \"id\": 1}\n{\"prompt\": \"\\n\", \"completion\": \"h\"}\n";

#[test]
fn a_row_shows_its_text_and_tokens_with_what_carries_loss_marked() {
    let (shown, warnings) = inspected(ROWS, "", 1, Marks::Brackets);
    let expected = "\
training data: /r.jsonl (2 rows, JSON lines, format prompt_completion); prompt and completion joined as they are; columns not read: id

/r.jsonl row 1: 10 tokens, 5 carry loss
  text (⟦ ⟧ carry loss):
    │ <s>abc
    │ ⟦de
    │ f</s>⟧
  tokens:
    28:\"<s>\" 0:\"a\" 1:\"b\" 2:\"c\" 27:\"\\n\" ⟦3:\"d\"⟧ ⟦4:\"e\"⟧ ⟦27:\"\\n\"⟧ ⟦5:\"f\"⟧ ⟦29:\"</s>\"⟧

2 training rows:
  tokens a row   shortest 4, half up to 4, 90% up to 10, 99% up to 10, longest 10
";
    assert!(shown.starts_with(expected), "{shown}");
    assert!(shown.contains("        4-4      ████████████████████████████████████████ 1\n"), "{shown}");
    assert!(shown.contains("  carrying loss  7 of 14 tokens (50.0%)\n"), "{shown}");
    assert!(shown.contains("  padding        89.1% of a micro-batch of 2 rows (unpacked"), "{shown}");
    assert!(warnings.is_empty());
}

#[test]
fn color_marks_every_line() {
    let (shown, _) = inspected(ROWS, "", 2, Marks::Color);
    assert!(shown.contains("\x1b[1;32mde\x1b[0m\n    │ \x1b[1;32mf</s>\x1b[0m\n"), "{shown}");
    assert!(shown.contains("\x1b[2m28:\"<s>\"\x1b[0m"), "{shown}");
    assert!(shown.contains("r.jsonl row 2: 4 tokens, 2 carry loss"), "{shown}");
}

#[test]
fn what_is_cut_and_what_has_no_answer_is_warned_of_with_the_key_to_change() {
    let rows = format!("{ROWS}\n{{\"prompt\": \"</s>\", \"completion\": \"\"}}\n");
    let (shown, warnings) = inspected(&rows, "max_length = 5", 1, Marks::Brackets);
    assert!(
        shown.contains(
            "r.jsonl row 1: 5 tokens, 0 carry loss, cut off from 10; left out: nothing of the answer is left"
        ),
        "{shown}"
    );
    assert!(shown.contains("truncated      1 row at `data.max_length` = 5, 1 without any of the answer"), "{shown}");
    assert!(shown.contains("left out       2 rows") && shown.contains("longest 4"), "{shown}");
    assert!(
        warnings[0].contains("2 of 3 rows carry no loss and are left out:\n  line 1: of 10 tokens"),
        "{warnings:?}"
    );
    assert!(warnings[0].contains("\n  line 4: `completion` is empty"), "the line, not the row: {warnings:?}");
    assert!(!warnings.iter().any(|warning| warning.contains("odd")), "said once: {warnings:?}");
}
