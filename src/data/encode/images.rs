//! The tokens of images in a conversation.

use std::ops::Range;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::data::error::DataError;
use crate::data::tokenizer::{Token, Tokenizer};
use crate::images::{Image, Images};

/// The images of a conversation, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct InText {
    images: Vec<Arc<Image>>,
    /// Where their tokens are written.
    places: Vec<Range<usize>>,
}

/// A conversation for a chat template, which is not to know what its images are, and these.
pub(crate) fn taken_out(images: Option<&Images>, messages: &[Value]) -> Result<(Vec<Value>, InText), DataError> {
    let (mut messages, mut found) = (messages.to_vec(), Vec::new());
    for message in &mut messages {
        let parts = message.get_mut("content").and_then(Value::as_array_mut).into_iter().flatten();
        for part in parts.filter(|part| part["type"] == "image") {
            let images =
                images.ok_or_else(|| DataError::Config("has images, which this model does not see".to_owned()))?;
            found.push(images.add(part["image"].as_str().unwrap_or_default()).map_err(DataError::Config)?);
            *part = json!({"type": "image"});
        }
    }
    Ok((messages, InText { images: found, places: Vec::new() }))
}

impl InText {
    /// The tokens of a prompt that a chat template wrote, with those of the images in it.
    pub(crate) fn prompt_ids(
        mut self,
        images: Option<&Images>,
        tokenizer: &Tokenizer,
        mut text: String,
    ) -> Result<Vec<u32>, DataError> {
        let of_prompt = |error| match error {
            DataError::Config(reason) if reason.starts_with("has ") => {
                // Its hints are about rows.
                DataError::Config(format!("the prompt {}", reason.lines().next().unwrap_or_default()))
            }
            other => other,
        };
        self.write(images, &mut text, &mut []).map_err(of_prompt)?;
        let tokens = tokenizer.encode_tokens(&text, false)?;
        self.number(images, &tokens, &mut vec![false; tokens.len()]).map_err(of_prompt)
    }

    /// Writes in place of every image's marker the tokens that stand for it, and moves `answers` accordingly.
    pub(crate) fn write(
        &mut self,
        images: Option<&Images>,
        text: &mut String,
        answers: &mut [Range<usize>],
    ) -> Result<(), DataError> {
        let Some(images) = images.filter(|_| !self.images.is_empty()) else { return Ok(()) };
        let cutting = images.vision().map_err(DataError::Config)?.cutting;
        let image = cutting.marker();
        let markers: Vec<usize> = text.match_indices(image).map(|(at, _)| at).collect();
        if markers.len() != self.images.len() {
            return Err(DataError::Config(format!(
                "has {} images, and its text has {} times {image:?}\n  hint: the chat template must write it once for each \
                 image, and the texts of a row must not have it",
                self.images.len(),
                markers.len()
            )));
        }
        let mut written = String::with_capacity(text.len());
        let mut before = 0;
        for (found, &at) in self.images.iter().zip(&markers) {
            written.push_str(&text[before..at]);
            let start = written.len();
            written.push_str(&found.cut.text(cutting));
            self.places.push(start..written.len());
            before = at + image.len();
        }
        written.push_str(&text[before..]);
        let grown = |at: usize| {
            let earlier = markers.iter().zip(&self.places).take_while(|(marker, _)| **marker < at);
            at + earlier.map(|(_, place)| place.len() - image.len()).sum::<usize>()
        };
        for answer in answers {
            *answer = grown(answer.start)..grown(answer.end);
        }
        *text = written;
        Ok(())
    }

    /// The ids of a text's tokens, and of those that may carry loss: none of an image do. A text that is cut at
    /// `max_length` tokens must have its images whole.
    pub(crate) fn number(
        &self,
        images: Option<&Images>,
        tokens: &[Token],
        carries_loss: &mut [bool],
    ) -> Result<Vec<u32>, DataError> {
        let mut ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        let Some(images) = images else { return Ok(ids) };
        let (image_token_id, mut last) = (images.image_token_id(), 0);
        let mut own = self.images.iter().flat_map(|image| (image.first_id..).take(image.num_tokens()));
        let mut places = self.places.iter().peekable();
        for (at, token) in tokens.iter().enumerate() {
            while places.next_if(|place| place.end <= token.start).is_some() {}
            if places.peek().is_none_or(|place| token.start < place.start) {
                if token.id == image_token_id {
                    return Err(DataError::Config(
                        "has the token of images in its text, which stands for none\n  hint: the images of a row are in `images` or \
                         `image`; a text of a row without them must not have it"
                            .to_owned(),
                    ));
                }
                continue;
            }
            (carries_loss[at], last) = (false, at);
            if token.id == image_token_id {
                ids[at] = own.next().ok_or_else(|| miscounted(images))?;
            }
        }
        if own.next().is_some() {
            return Err(miscounted(images));
        }
        let max_length = images.max_length();
        if last >= max_length {
            return Err(DataError::Config(format!(
                "has {} tokens, and its images end with token {}: `data.max_length` = {max_length} would cut into them\n  \
                 hint: raise it, or set `data.image_max_pixels`",
                ids.len(),
                last + 1
            )));
        }
        Ok(ids)
    }
}

/// The tokenizer does not know the markers as tokens.
fn miscounted(images: &Images) -> DataError {
    let marker = images.vision().map(|vision| vision.cutting.marker()).unwrap_or_default();
    DataError::Config(format!(
        "the tokenizer makes other tokens of {marker:?} than the token of images in config.json\n  hint: they are of different models",
    ))
}
