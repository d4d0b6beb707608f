//! The images of requests, and what the model makes of them, for as long as they are kept.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use super::error::{ApiError, without_hint};
use crate::commands::named::{OpenedModel, images_for};
use crate::data::template::ChatTemplate;
use crate::generate::GenerateError;
use crate::images::{Features, Image, Images};
use crate::model::tower::Tower;
use crate::run::images::tower_of;

/// Bytes of images and of their features that are kept for later requests.
const KEPT_BYTES: u64 = 1 << 30;
/// Most images of a request.
const MOST_IMAGES: usize = 64;

/// What reads images for the model.
#[derive(Debug)]
pub(super) struct Sight {
    images: Arc<Images>,
    features: Arc<Features>,
    /// Images are decoded one by one: each may take hundreds of megabytes.
    decoding: Mutex<()>,
}

impl Sight {
    /// That of a model which sees, if one of these templates writes images.
    pub(super) fn of(opened: &OpenedModel, templates: &[Option<ChatTemplate>]) -> Option<Self> {
        let images = templates.iter().find_map(|template| images_for(&opened.source, template.as_ref()).ok())?;
        let features = Arc::new(Features::new(images.vision().ok()?));
        Some(Self { images, features, decoding: Mutex::default() })
    }

    /// What the model sees in place of images.
    pub(super) fn features(&self) -> Arc<Features> {
        Arc::clone(&self.features)
    }

    /// What reads images.
    pub(super) fn images(&self) -> &Images {
        &self.images
    }

    /// Reads the headers of the images in messages. As long as they are held, they are not forgotten.
    pub(super) fn read(&self, messages: &mut [Value], max_tokens: usize) -> Result<Vec<Arc<Image>>, ApiError> {
        self.features.forget(&self.images.forget(KEPT_BYTES));
        let mut held = Vec::new();
        for (index, message) in messages.iter_mut().enumerate() {
            for part in parts(message).filter(|part| is_image(part)) {
                let wrong = |what: String| ApiError::wrong(format!("`messages[{index}]`{what}"), Some("messages"));
                if held.len() == MOST_IMAGES {
                    return Err(wrong(format!(" has an image beyond {MOST_IMAGES}, the most of a request")));
                }
                let data = source_of(part).map_err(wrong)?;
                let added = self.images.add(&data);
                held.push(added.map_err(|reason| wrong(format!(": {}", without_hint(&reason))))?);
                *part = json!({"type": "image", "image": data});
            }
        }
        let num_tokens: usize = held.iter().map(|image| image.num_tokens()).sum();
        if num_tokens > max_tokens {
            return Err(ApiError::beyond_context(&format!("images of {num_tokens} tokens"), max_tokens));
        }
        Ok(held)
    }

    /// Refuses images whose header is whole and the rest is not.
    pub(super) fn check(&self, images: &[Arc<Image>]) -> Result<(), ApiError> {
        for image in images.iter().filter(|image| !self.features.has(image)) {
            let _one = self.decoding.lock().unwrap_or_else(PoisonError::into_inner);
            let wrong = |reason: String| {
                let text = format!("the image {:?} {}", image.name, without_hint(&reason));
                ApiError::wrong(text, Some("messages"))
            };
            self.images.pieces(image).map_err(wrong)?;
        }
        Ok(())
    }

    /// Makes the features of images that have none yet; the first of them brings the tower into memory.
    pub(super) fn see(
        &self,
        images: &[Arc<Image>],
        tower: &mut Option<Tower>,
        opened: &OpenedModel,
    ) -> Result<(), GenerateError> {
        for image in images.iter().filter(|image| !self.features.has(image)) {
            let vision = self.images.vision().map_err(GenerateError::Image)?;
            let tower = match tower {
                Some(tower) => tower,
                None => {
                    let loaded =
                        tower_of(&opened.source.weights, &opened.source.config, vision, &opened.model.device());
                    tower.insert(loaded.map_err(GenerateError::Image)?)
                }
            };
            let pieces = self.images.pieces(image).map_err(GenerateError::Image)?;
            self.features.keep(image, tower.features(pieces));
        }
        Ok(())
    }
}

/// The parts of a message's content.
fn parts(message: &mut Value) -> impl Iterator<Item = &mut Value> {
    message.get_mut("content").and_then(Value::as_array_mut).into_iter().flatten()
}

fn is_image(part: &Value) -> bool {
    part["type"].as_str().is_some_and(|kind| kind.contains("image"))
}

/// Refuses messages with images.
pub(super) fn refuse(messages: &mut [Value], reason: &str) -> Result<(), ApiError> {
    let has_image = |message: &mut Value| parts(message).any(|part| is_image(part));
    match messages.iter_mut().position(has_image) {
        Some(index) => Err(ApiError::wrong(format!("`messages[{index}]` has an image, {reason}"), Some("messages"))),
        None => Ok(()),
    }
}

/// The `data:` address of a part that is an image: of a chat (`image_url`), or of Responses (`input_image`).
fn source_of(part: &Value) -> Result<String, String> {
    let keys = part.as_object().into_iter().flatten();
    let known = ["type", "image_url", "detail"];
    if let Some((key, _)) = keys.filter(|(_, value)| !value.is_null()).find(|(key, _)| !known.contains(&key.as_str())) {
        return Err(format!(" has an image with `{key}`, which is not supported"));
    }
    let url = &part["image_url"];
    let source = url.as_str().or(url["url"].as_str());
    let source = source.ok_or(" has an image without `image_url`, a `data:image/...;base64,` address")?;
    if !source.starts_with("data:") {
        let shown: String = source.chars().take(60).collect();
        return Err(format!(
            " has the image {shown:?}; no address and no file is read here, only `data:image/...;base64,`"
        ));
    }
    Ok(source.to_owned())
}
