//! Images that users show a model.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::config::DataConfig;
use crate::data::template::ChatTemplate;
use crate::images::Images;
use crate::run::images::{fetched, has_tower, images};
use crate::run::inputs::ModelSource;

/// What reads images for a model that is asked through this template.
///
/// # Errors
/// Why it sees none.
pub(crate) fn images_for(source: &ModelSource, template: Option<&ChatTemplate>) -> Result<Arc<Images>, String> {
    seen_by(source, template).map(Arc::new)
}

/// The same, and images at web addresses are fetched. A server is not to fetch what its users name.
///
/// # Errors
/// As [`images_for`].
pub(crate) fn fetched_images_for(source: &ModelSource, template: Option<&ChatTemplate>) -> Result<Arc<Images>, String> {
    seen_by(source, template).map(|images| Arc::new(fetched(images)))
}

fn seen_by(source: &ModelSource, template: Option<&ChatTemplate>) -> Result<Images, String> {
    // What a training keeps is not deleted for a question.
    let whole = DataConfig { max_length: usize::MAX, image_cache_gib: usize::MAX, ..DataConfig::default() };
    let images = images(&source.folder, &source.config, &whole).filter(|_| has_tower(&source.weights));
    let images =
        images.ok_or("this model sees no images\n  hint: `lora-train help images` lists those that do".to_owned())?;
    images.vision()?;
    if template.is_none_or(|template| !template.reads_parts()) {
        return Err("images need a chat template that reads them, and the model has none".to_owned());
    }
    Ok(images)
}

/// A message of the user with images, as their paths, before its text.
pub(crate) fn message(text: &str, images: &[String]) -> Value {
    if images.is_empty() {
        return json!({"role": "user", "content": text});
    }
    let parts = images.iter().map(|path| json!({"type": "image", "image": path}));
    let parts: Vec<Value> = parts.chain([json!({"type": "text", "text": text})]).collect();
    json!({"role": "user", "content": parts})
}
