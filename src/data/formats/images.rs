//! Images in rows: every form that people write them in becomes one, a part `{"type": "image", "image": ...}` of a message with
//! a path or an address.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::kind_of;

/// Where a text stands for an image.
const MARKER: &str = "<image>";

/// Keys of a part that hold its image.
const IMAGE_KEYS: [&str; 5] = ["image", "image_url", "path", "url", "base64"];

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

/// The images of a row beside its messages.
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

/// A path or an address.
fn source_of(item: &Value) -> Result<String, String> {
    match item {
        Value::String(source) => Ok(source.clone()),
        Value::Object(keys) => match (item["bytes"].as_str(), item["path"].as_str().or(item["url"].as_str())) {
            (Some(bytes), _) => Ok(of_base64(bytes)),
            (None, Some(source)) => Ok(source.to_owned()),
            (None, None) => {
                Err(format!("has neither `bytes`, `path` nor `url`; it has {}", super::keys_of(&keys.clone().into())))
            }
        },
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
