//! Images in rows: every form that people write them in becomes one, a part `{"type": "image", "image": ...}` of a message with
//! a path or a `data:` address.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::kind_of;

/// Where a text stands for an image.
const MARKER: &str = "<image>";

/// Keys of a part that hold its image.
const IMAGE_KEYS: [&str; 5] = ["image", "image_url", "path", "url", "base64"];

/// Reads the messages of a row with their images. `read` reads a message of text; paths start in `folder`.
///
/// An image without a path of its own, and `<image>` in a text, stand for the next one of the row's `images`. Where there is no such
/// place, all are put before the first text of the user.
pub(super) fn read_with_images(
    row: &Value,
    messages: &[Value],
    folder: &Path,
    mut read: impl FnMut(usize, &Value) -> Result<Value, String>,
) -> Result<Vec<Value>, String> {
    let given = images_of(row)?;
    let has_places = messages.iter().filter_map(content_of).any(|content| has_place(content, !given.is_empty()));
    let mut rest = given.iter();
    let mut num_places = 0;
    let mut placed = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let Apart { text, images } = Apart::of(message, !given.is_empty())?;
        let mut message = read(index, &text)?;
        let mut sources = Vec::new();
        for (at, source) in images {
            num_places += usize::from(source.is_none());
            sources.extend(source.or_else(|| rest.next().cloned()).map(|source| (at, source)));
        }
        if !has_places && message["role"] == "user" {
            sources.extend(rest.by_ref().map(|source| (0, source.clone())));
        }
        put_back(&mut message, sources, folder);
        placed.push(message);
    }
    let num_left = rest.count();
    if num_left > 0 || has_places && num_places != given.len() {
        return Err(format!(
            "its messages have {num_places} places for images, and the row has {} images",
            given.len()
        ));
    }
    Ok(placed)
}

/// The images of a row beside its messages, as their sources.
fn images_of(row: &Value) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for name in ["images", "image"] {
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

/// A path or a `data:` address.
fn source_of(item: &Value) -> Result<String, String> {
    match item {
        Value::String(source) => Ok(source.clone()),
        Value::Object(keys) => match (&item["bytes"], item["path"].as_str().or(item["url"].as_str())) {
            (Value::Null, Some(source)) => Ok(source.to_owned()),
            (Value::Null, None) => {
                Err(format!("has neither `path` nor `url`; it has {}", super::keys_of(&keys.clone().into())))
            }
            _ => {
                Err("has an image as bytes in a table\n  hint: write images as files, and their paths into the rows"
                    .into())
            }
        },
        other => Err(format!("must be a path or a `data:` address, not {}", kind_of(other))),
    }
}

fn content_of(message: &Value) -> Option<&Value> {
    [&message["content"], &message["value"]].into_iter().find(|content| !content.is_null())
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
    Ok(Some(if key == "base64" && !source.starts_with("data:") {
        format!("data:image;base64,{source}")
    } else {
        source
    }))
}

/// Puts images before the parts of text that they were before.
fn put_back(message: &mut Value, images: Vec<(usize, String)>, folder: &Path) {
    if images.is_empty() {
        return;
    }
    let mut parts = match message["content"].take() {
        Value::Array(parts) => parts,
        text => vec![json!({"type": "text", "text": text})],
    };
    for (at, source) in images.into_iter().rev() {
        let is_elsewhere = ["data:", "file://"].iter().any(|start| source.starts_with(start)) || source.contains("://");
        let source = if is_elsewhere { source } else { folder.join(source).to_string_lossy().into_owned() };
        parts.insert(at.min(parts.len()), json!({"type": "image", "image": source}));
    }
    message["content"] = parts.into();
}
