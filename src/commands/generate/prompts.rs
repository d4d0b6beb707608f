//! A file of prompts: their texts are written together, and printed as JSON lines in the order of the file.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::{NON_FINITE, print};
use crate::commands::named::{LoadArgs, OpenedModel};
use crate::data::template::{ChatTemplate, Stops};
use crate::data::tokenizer::Tokenizer;
use crate::generate::{Ending, GenerateOptions, NewText, TextBatch, TextRequest, encode_prompt, encode_row};
use crate::images::Images;
use crate::schema::Problem;
use crate::util::failure::Failure;

/// A prompt of the file.
#[derive(Debug)]
pub(super) struct PromptRow {
    fields: Map<String, Value>,
    prompt_ids: Vec<u32>,
}

/// Reads a file of prompts: a prompt a line in a .txt file, else JSON lines with `prompt` or `messages`, and images as in training.
///
/// # Errors
/// The first line that is no prompt.
pub(super) fn read(
    path: &Path,
    system: Option<&str>,
    asked: &(Option<&ChatTemplate>, Result<&Images, String>),
    tokenizer: &Tokenizer,
) -> Result<Vec<PromptRow>, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Problem::new(format!("--prompts {}: {error}", path.display())))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let is_text = path.extension().is_some_and(|extension| extension == "txt");
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let rows = lines.map(|(index, line)| {
        let wrong = |what: String| Failure::from(Problem::new(what).at(format!("{}:{}", path.display(), index + 1)));
        let fields = if is_text { json!({"prompt": line}) } else { json_line(line).map_err(&wrong)? };
        let prompt_ids = encoded(&fields, path, system, asked, tokenizer).map_err(wrong)?;
        Ok(PromptRow { fields: fields.as_object().cloned().unwrap_or_default(), prompt_ids })
    });
    rows.collect()
}

fn encoded(
    fields: &Value,
    path: &Path,
    system: Option<&str>,
    (template, images): &(Option<&ChatTemplate>, Result<&Images, String>),
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, String> {
    let beside = ["images", "image"].map(|name| &fields[name]);
    let has_images = !beside.iter().all(|images| images.is_null() || **images == json!([]) || **images == json!(""));
    let messages = match (&fields["prompt"], &fields["messages"], template) {
        (Value::String(prompt), Value::Null, _) if !has_images => {
            return encode_prompt(tokenizer, *template, system, prompt).map_err(|error| error.to_string());
        }
        (Value::String(prompt), Value::Null, _) => json!([{"role": "user", "content": prompt}]),
        (Value::Null, messages @ Value::Array(_), Some(_)) => messages.clone(),
        (Value::Null, Value::Array(_), None) => return Err("`messages` need a chat template".to_owned()),
        _ => return Err("expected `prompt`, a text, or `messages`, a list".to_owned()),
    };
    let seen = match images {
        Ok(images) => Some((*images, path.parent().unwrap_or(Path::new("")))),
        Err(reason) if has_images => return Err(format!("has images: {reason}")),
        Err(_) => None,
    };
    let template = template.ok_or("images need a chat template")?;
    let row = json!({"messages": messages, "images": beside[0], "image": beside[1]});
    encode_row(tokenizer, (template, seen), &row, system).map_err(|error| error.to_string())
}

fn json_line(line: &str) -> Result<Value, String> {
    if line.trim_start().starts_with('[') {
        return Err(
            "expected a JSON object a line, not an array\n  hint: `jq -c '.[]' FILE` writes its objects so".to_owned()
        );
    }
    serde_json::from_str(line).map_err(|error| format!("not a JSON object: {error}"))
}

/// Writes a text for every row.
pub(super) fn write(
    rows: Vec<PromptRow>,
    opened: &OpenedModel,
    options: GenerateOptions,
    stops: &Stops,
    args: &LoadArgs,
) -> Result<(), Failure> {
    let (count, start) = (rows.len(), Instant::now());
    let mut batch = TextBatch::new(&opened.model, &opened.tokenizer).within(opened.text_bytes);
    let mut texts = Texts::default();
    let mut waiting = (0..).zip(rows);
    loop {
        while batch.has_room()
            && let Some((id, row)) = waiting.next()
        {
            let options = GenerateOptions { seed: options.seed.wrapping_add(id), ..options };
            let request = TextRequest::new(row.prompt_ids, &opened.adapters[0].set, options, stops);
            texts.unprinted.insert(id, WrittenText { fields: row.fields, ..WrittenText::default() });
            batch.add(id, request, |id, text| texts.take(id, &text)).map_err(Failure::input)?;
        }
        texts.print()?;
        if batch.is_empty() {
            break;
        }
        batch.step(|id, text| texts.take(id, &text)).map_err(Failure::running)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
    let speed = texts.num_tokens as f64 / seconds;
    args.note(&format!("{count} prompts: {} tokens in {seconds:.1} s, {speed:.1} tokens/s", texts.num_tokens));
    Ok(())
}

/// The texts that are not printed yet, by their place in the file.
#[derive(Default)]
struct Texts {
    unprinted: BTreeMap<u64, WrittenText>,
    num_tokens: usize,
}

#[derive(Default)]
struct WrittenText {
    fields: Map<String, Value>,
    text: String,
    num_tokens: usize,
    ending: Option<Ending>,
}

impl Texts {
    fn take(&mut self, id: u64, new: &NewText) -> ControlFlow<()> {
        if let Some(text) = self.unprinted.get_mut(&id) {
            text.text.push_str(&new.text);
            text.num_tokens += usize::from(new.token.is_some());
            text.ending = new.ending;
        }
        ControlFlow::Continue(())
    }

    /// Prints the texts that have ended, up to the first that has not.
    fn print(&mut self) -> Result<(), Failure> {
        while let Some(first) = self.unprinted.first_entry()
            && let Some(ending) = first.get().ending
        {
            let WrittenText { mut fields, text, num_tokens, .. } = first.remove();
            let reason = ending.finish_reason().ok_or_else(|| Failure::running(NON_FINITE))?;
            self.num_tokens += num_tokens;
            for (key, value) in [("text", json!(text)), ("tokens", json!(num_tokens)), ("finish_reason", json!(reason))]
            {
                fields.insert(key.to_owned(), value);
            }
            print(&Value::Object(fields).to_string())?;
        }
        Ok(())
    }
}
