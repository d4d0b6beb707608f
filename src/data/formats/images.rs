//! Images in rows: every form that people write them in becomes one, a part `{"type": "image", "image": ...}` of a message with
//! a path or an address.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{is_filled, kind_of, list_of};
use crate::images::has_image_name;

/// Where a text stands for an image.
const MARKER: &str = "<image>";

/// Keys of a part that hold its image.
const IMAGE_KEYS: [&str; 6] = ["image", "image_url", "path", "url", "base64", "source"];

/// Columns of a row that hold its images, the last as `datasets` names them in a folder of images.
const COLUMNS: [&str; 3] = ["images", "image", "file_name"];

/// The images of a row beside its messages, and where paths start; without a folder, images are not seen, and texts stay as they are.
#[derive(Debug, Default)]
pub(super) struct RowImages<'a> {
    folder: Option<&'a Path>,
    /// Paths or addresses.
    given: Vec<String>,
}

impl<'a> RowImages<'a> {
    /// Those of a row whose images are seen.
    pub(super) fn of(row: &Value, folder: &'a Path) -> Result<Self, String> {
        Ok(Self { folder: Some(folder), given: images_of(row)? })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.given.is_empty()
    }

    /// Reads a message: each of its images becomes a part `{"type": "image"}`, with `image` where the message says what it is.
    /// `read` reads the rest of it. `<image>` in a text stands for an image of the row, if that has some.
    pub(super) fn read(
        &self,
        message: &Value,
        read: impl FnOnce(&Value) -> Result<Value, String>,
    ) -> Result<Value, String> {
        let Some(folder) = self.folder else { return read(message) };
        let Apart { text, images } = Apart::of(message, !self.is_empty())?;
        let mut message = read(&text)?;
        put_back(&mut message, images, folder);
        Ok(message)
    }

    /// Puts the images of the row, in their order, where a conversation has images without `image`, or all before the first text of
    /// the user where it has none at all.
    pub(super) fn place(&self, messages: &mut [Value]) -> Result<(), String> {
        let Some(folder) = self.folder else { return Ok(()) };
        let mut rest = self.given.iter();
        let (mut has_places, mut num_places) = (false, 0);
        let parts = messages.iter_mut().filter_map(|message| message["content"].as_array_mut()).flatten();
        for part in parts.filter(|part| part["type"] == "image") {
            has_places = true;
            if part["image"].is_null() {
                num_places += 1;
                *part = rest.next().map_or_else(|| part.clone(), |source| image(source, folder));
            }
        }
        let first = messages.iter_mut().find(|message| !has_places && message["role"] == "user");
        if let Some(message) = first {
            put_back(message, rest.by_ref().map(|source| (0, Some(source.clone()))).collect(), folder);
        }
        if rest.next().is_some() || has_places && num_places != self.given.len() {
            return Err(format!(
                "its messages have {num_places} places for images, and the row has {} images",
                self.given.len()
            ));
        }
        Ok(())
    }
}

/// Whether a column holds images of its row, if that has any: a `file_name` may be that of another file, or of what the row names
/// besides.
pub(super) fn is_column(row: &Value, name: &str) -> bool {
    let is_alone = || {
        !["images", "image"].iter().any(|name| is_filled(&row[*name]))
            && !row.as_object().into_iter().flat_map(Map::values).any(names_images)
    };
    COLUMNS.contains(&name) && (name != "file_name" || row[name].as_str().is_some_and(has_image_name) && is_alone())
}

/// The columns of images, or of sound, as `datasets` stores them: `bytes` and `path`.
pub(super) fn stored(row: &Value) -> impl Iterator<Item = &str> {
    let is_one = |value: &Value| {
        value.as_object().is_some_and(|keys| {
            ["bytes", "path"].iter().all(|key| keys.contains_key(*key)) && keys.values().any(is_filled)
        })
    };
    let columns = row.as_object().into_iter().flatten();
    let stored = columns.filter(move |(_, value)| is_one(value.get(0).unwrap_or(value)));
    stored.map(|(name, _)| name.as_str())
}

/// What makes a question and its answer of an image and a text.
pub(super) fn with_question(answer: &str) -> String {
    format!(
        "with a column of questions, such as `prompt`, which may all be \"What is shown?\", `columns = {{ prompt = \"prompt\", completion = \
         {answer:?} }}` teaches to answer with the text"
    )
}

/// Whether a column has messages that say what their images are.
fn names_images(column: &Value) -> bool {
    let list = list_of(if column["messages"].is_array() { &column["messages"] } else { column });
    let messages = list.iter().filter_map(|list| list.as_array()).flatten();
    let parts = messages.filter_map(|message| message["content"].as_array().or(message["value"].as_array())).flatten();
    parts.filter(|part| is_image(part)).any(|part| IMAGE_KEYS.iter().any(|key| !part[*key].is_null()))
}

/// The images of a row beside its messages.
fn images_of(row: &Value) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for name in COLUMNS.into_iter().filter(|name| is_column(row, name)) {
        match &row[name] {
            Value::Null => {}
            Value::String(text) if text.is_empty() => {}
            Value::Array(items) => {
                let sources = items.iter().map(|item| source_of(item).map_err(|reason| format!("`{name}` {reason}")));
                found.extend(sources.collect::<Result<Vec<_>, _>>()?);
            }
            item => found.push(source_of(item).map_err(|reason| format!("`{name}` {reason}"))?),
        }
    }
    Ok(found)
}

/// A path or an address.
fn source_of(item: &Value) -> Result<String, String> {
    match item {
        Value::String(source) => Ok(source.clone()),
        Value::Object(keys) => {
            match (item["bytes"].as_str().or(item["data"].as_str()), item["path"].as_str().or(item["url"].as_str())) {
                (Some(bytes), _) => Ok(of_base64(bytes)),
                (None, Some(source)) => Ok(source.to_owned()),
                (None, None) => Err(format!(
                    "has neither `bytes`, `path` nor `url`; it has {}",
                    super::keys_of(&keys.clone().into())
                )),
            }
        }
        other => Err(format!("must be a path or an address, not {}", kind_of(other))),
    }
}

fn of_base64(bytes: &str) -> String {
    if bytes.starts_with("data:") { bytes.to_owned() } else { format!("data:image;base64,{bytes}") }
}

/// Whether a content has a place for an image. `has_markers`: a text may have it.
fn has_place(content: &Value, has_markers: bool) -> bool {
    let is_marked = |text: Option<&str>| has_markers && text.is_some_and(|text| text.contains(MARKER));
    let parts = content.as_array().map_or(&[][..], Vec::as_slice);
    is_marked(content.as_str()) || parts.iter().any(|part| is_image(part) || is_marked(part["text"].as_str()))
}

fn is_image(part: &Value) -> bool {
    matches!(part["type"].as_str(), Some("image" | "image_url" | "input_image"))
}

/// A message without its images.
struct Apart {
    text: Value,
    /// Before which of its parts of text each image is, and what it is, if the part says it.
    images: Vec<(usize, Option<String>)>,
}

impl Apart {
    fn of(message: &Value, has_markers: bool) -> Result<Self, String> {
        let key = if message["content"].is_null() { "value" } else { "content" };
        let content = &message[key];
        if !has_place(content, has_markers) {
            return Ok(Self { text: message.clone(), images: Vec::new() });
        }
        let whole = [content.clone()];
        let (mut texts, mut images) = (Vec::new(), Vec::new());
        for part in content.as_array().map_or(&whole[..], Vec::as_slice) {
            if is_image(part) {
                images.push((texts.len(), own_source(part)?));
                continue;
            }
            match part.as_str().or(part["text"].as_str()).filter(|text| has_markers && text.contains(MARKER)) {
                None => texts.push(part.clone()),
                Some(text) => {
                    for (index, text) in text.split(MARKER).enumerate() {
                        if index > 0 {
                            images.push((texts.len(), None));
                        }
                        if !text.is_empty() {
                            texts.push(json!({"type": "text", "text": text}));
                        }
                    }
                }
            }
        }
        let mut text: Map<String, Value> = message.as_object().cloned().unwrap_or_default();
        text.insert(key.to_owned(), texts.into());
        Ok(Self { text: text.into(), images })
    }
}

/// What a part says its image is.
fn own_source(part: &Value) -> Result<Option<String>, String> {
    let given = IMAGE_KEYS.into_iter().find(|key| !part[*key].is_null());
    let Some(key) = given else { return Ok(None) };
    let source =
        source_of(&part[key]).map_err(|reason| format!("a part of its `content` has `{key}`, which {reason}"))?;
    Ok(Some(if key == "base64" { of_base64(&source) } else { source }))
}

/// Puts images before the parts of text that they were before.
fn put_back(message: &mut Value, images: Vec<(usize, Option<String>)>, folder: &Path) {
    if images.is_empty() {
        return;
    }
    let mut parts = match message["content"].take() {
        Value::Array(parts) => parts,
        text => vec![json!({"type": "text", "text": text})],
    };
    for (at, source) in images.into_iter().rev() {
        let part = source.map_or_else(|| json!({"type": "image"}), |source| image(&source, folder));
        parts.insert(at.min(parts.len()), part);
    }
    message["content"] = parts.into();
}

/// A part of a message; a path starts in `folder`.
fn image(source: &str, folder: &Path) -> Value {
    let is_elsewhere = ["data:", "file://"].iter().any(|start| source.starts_with(start)) || source.contains("://");
    let path = || folder.join(source).to_string_lossy().into_owned();
    json!({"type": "image", "image": if is_elsewhere { source.to_owned() } else { path() }})
}

/// The content of a message from a prompt that shows images as Markdown does: `![](a.png) What is it?`
pub(crate) fn content_of_prompt(prompt: &str) -> Value {
    let (mut parts, mut rest) = (Vec::new(), prompt);
    while let Some((before, (image, after))) =
        rest.split_once("![](").and_then(|(before, shown)| Some((before, shown.split_once(')')?)))
    {
        parts.extend((!before.is_empty()).then(|| json!({"type": "text", "text": before})));
        parts.push(json!({"type": "image", "image": image}));
        rest = after.strip_prefix(' ').unwrap_or(after);
    }
    if parts.is_empty() {
        return prompt.into();
    }
    parts.extend((!rest.is_empty()).then(|| json!({"type": "text", "text": rest})));
    parts.into()
}

/// The images that a prompt shows so.
pub(crate) fn images_in_prompt(prompt: &str) -> Vec<String> {
    let parts = content_of_prompt(prompt);
    let parts = parts.as_array().into_iter().flatten();
    parts.filter_map(|part| part["image"].as_str().map(ToOwned::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::config::{DataFormat, RowKind};
    use crate::data::fixture::tokenizer;
    use crate::data::formats::{RowFormat, Sample};
    use crate::data::template::ChatTemplate;

    const TEMPLATE: &str = "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}\
                            {% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}";

    /// What a row is read as, and the columns that are not read.
    fn read(row: &Value) -> (Result<Sample, String>, BTreeSet<String>) {
        let template = ChatTemplate::new(TEMPLATE, "the test", &tokenizer()).unwrap();
        let format = RowFormat::detect(DataFormat::Auto, &BTreeMap::new(), row, RowKind::Sequence).unwrap();
        let (format, mut unused) = (format.with_images(Some("folder".into())), BTreeSet::new());
        format.add_unused(row, &mut unused);
        (format.read(row, Some(&template)), unused)
    }

    #[test]
    fn rows_with_an_image_in_any_form_are_the_same_conversation() {
        let text = json!({"type": "text", "text": "Total?"});
        let conversation = |image: &str| {
            let asked = json!([{"type": "image", "image": image}, text]);
            let messages = [json!({"role": "user", "content": asked}), json!({"role": "assistant", "content": "12"})];
            Sample::Chat { messages: messages.into(), tools: None }
        };
        let answer = json!({"role": "assistant", "content": "12"});
        let asked = |content: Value| json!({"role": "user", "content": content});
        let part = |image: Value| json!({"messages": [asked(json!([image, text])), answer]});
        let turns = json!([{"from": "human", "value": "<image>Total?"}, {"from": "gpt", "value": "12"}]);
        let place = asked(json!([{"type": "image"}, text]));
        let (file, struct_of_path) = ("folder/a.png", json!({"bytes": null, "path": "a.png"}));
        let (inline, bytes) = ("data:image;base64,AAAA", json!({"bytes": "AAAA", "path": "a.png"}));
        for (row, image) in [
            (part(json!({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}})), file),
            (part(json!({"type": "image_url", "image_url": "a.png"})), file),
            (part(json!({"type": "input_image", "image_url": "a.png"})), file),
            (part(json!({"type": "image", "image": "a.png"})), file),
            (part(json!({"type": "image", "path": "a.png"})), file),
            (part(json!({"type": "image", "url": "https://host/a.png"})), "https://host/a.png"),
            (part(json!({"type": "image", "image": "file:///a.png"})), "file:///a.png"),
            (part(json!({"type": "image", "base64": "AAAA"})), inline),
            (part(json!({"type": "image", "source": {"type": "base64", "data": "AAAA"}})), inline),
            (part(json!({"type": "image", "source": {"type": "url", "url": "a.png"}})), file),
            (json!({"images": ["a.png"], "messages": [place, answer]}), file),
            (json!({"image": "a.png", "messages": [asked("Total?".into()), answer]}), file),
            (json!({"images": [struct_of_path], "messages": [asked("<image>Total?".into()), answer]}), file),
            (json!({"image": bytes, "messages": [asked("Total?".into()), answer]}), inline),
            (json!({"images": ["a.png"], "prompt": "Total?", "completion": "12"}), file),
            (json!({"images": ["a.png"], "prompt": [place], "completion": [answer]}), file),
            (json!({"images": ["a.png"], "prompt": [place], "completion": "12", "tools": null}), file),
            (json!({"image": "a.png", "conversations": turns}), file),
            (json!({"images": ["a.png"], "instruction": "<image>Total?", "input": "", "output": "12"}), file),
            (json!({"file_name": "a.png", "question": "Total?", "answer": "12"}), file),
        ] {
            assert_eq!(read(&row), (Ok(conversation(image)), BTreeSet::new()), "{row}");
        }
        // The image has its name in the row once more.
        for (row, image) in [
            (json!({"images": ["a.png"], "messages": [asked("<image>Total?".into()), answer]}), file),
            (part(json!({"type": "image", "image": "a.png"})), file),
            (json!({"image": bytes, "question": "Total?", "answer": "12"}), inline),
        ] {
            let mut named = row;
            named["file_name"] = "a.png".into();
            assert_eq!(read(&named), (Ok(conversation(image)), BTreeSet::from(["file_name".to_owned()])), "{named}");
        }
        // Texts of images without a question, and with one.
        for (name, has) in [("file_name", "the `file_name` of an image"), ("image", "`image`")] {
            let caption = json!({name: "a.png", "text": "A bill."});
            let error = read(&caption).0.unwrap_err();
            assert!(error.starts_with(&format!("the row has {has}; an image is seen in a question, and")), "{error}");
            assert!(error.contains("`columns = { prompt = \"prompt\", completion = \"text\" }` teaches"), "{error}");
            let columns =
                [("prompt", "prompt"), ("completion", "text")].map(|(name, column)| (name.into(), column.into()));
            let asked = json!({name: "a.png", "prompt": "Total?", "text": "12"});
            let format = RowFormat::detect(DataFormat::Auto, &columns.into(), &asked, RowKind::Sequence).unwrap();
            let template = ChatTemplate::new(TEMPLATE, "the test", &tokenizer()).unwrap();
            assert_eq!(format.with_images(Some("folder".into())).read(&asked, Some(&template)), Ok(conversation(file)));
            let captions = json!({name: "a.png", "caption": "A bill."});
            let error =
                RowFormat::detect(DataFormat::Auto, &BTreeMap::new(), &captions, RowKind::Sequence).unwrap_err();
            assert!(error.contains("completion = \"caption\" }` teaches"), "{error}");
        }
        let (_, unused) = read(&json!({"file_name": "a.py", "question": "Total?", "answer": "12"}));
        assert_eq!(unused, BTreeSet::from(["file_name".to_owned()]));
    }

    #[test]
    fn images_in_a_column_of_another_name_are_named_or_refused() {
        let template = ChatTemplate::new(TEMPLATE, "the test", &tokenizer()).unwrap();
        let image = json!({"bytes": "AAAA", "path": "a.png"});
        for img in [image.clone(), json!([image])] {
            let row = json!({"img": img, "question": "Total?", "answer": "12"});
            let error = read(&row).0.unwrap_err();
            assert!(error.contains("not read\n  hint: `columns = { images = \"img\" }`"), "{error}");
            let detect = |column: &str| {
                let columns = [("images", column), ("prompt", "question"), ("completion", "answer")];
                let columns = columns.map(|(name, column)| (name.to_owned(), column.to_owned())).into();
                RowFormat::detect(DataFormat::Auto, &columns, &row, RowKind::Sequence)
            };
            let blind = detect("img").unwrap().read(&row, Some(&template)).unwrap_err();
            assert!(blind.contains("text alone is learnt from"), "{blind}");
            let (format, mut unused) = (detect("img").unwrap().with_images(Some("folder".into())), BTreeSet::new());
            format.add_unused(&row, &mut unused);
            let (sample, named) =
                (format.read(&row, Some(&template)), json!({"images": img, "question": "Total?", "answer": "12"}));
            assert_eq!((sample, unused), read(&named));
            let texts = [("images", "img"), ("text", "answer")];
            let texts = texts.map(|(name, column)| (name.to_owned(), column.to_owned())).into();
            let error = RowFormat::detect(DataFormat::Auto, &texts, &row, RowKind::Sequence).unwrap_err();
            assert!(error.contains("has `images`, which format `text` does not use"), "{error}");
            assert!(detect("imgs").unwrap_err().contains("`images` is column `imgs`; the row has `img`"));
        }
    }

    #[test]
    fn prompts_show_images_as_markdown_does() {
        let (a, b) = (json!({"type": "image", "image": "a.png"}), json!({"type": "image", "image": "https://b/c.png"}));
        let text = |text: &str| json!({"type": "text", "text": text});
        for (prompt, expected) in [
            ("What?", "What?".into()),
            ("![](a.png What?", "![](a.png What?".into()),
            ("![](a.png) What?", json!([a, text("What?")])),
            ("Is ![](a.png) like ![](https://b/c.png)?", json!([text("Is "), a, text("like "), b, text("?")])),
            ("![](a.png)", json!([a])),
        ] {
            assert_eq!(content_of_prompt(prompt), expected);
        }
        assert_eq!(images_in_prompt("Is ![](a.png) like ![](https://b/c.png)?"), ["a.png", "https://b/c.png"]);
    }
}
