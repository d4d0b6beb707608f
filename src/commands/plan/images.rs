//! What a plan says of images: what their features take on disk, what it takes to make them, and how they become fewer.

use serde::Serialize;

use crate::data::cache::CacheSettings;
use crate::data::dataset::Dataset;
use crate::images::{Images, room};
use crate::model::tower::encoding_flops;
use crate::run::dir::nearest_existing;
use crate::run::images::feature_folder;
use crate::train::budget::fit::size;
use crate::util::stats::as_f64;
use crate::util::text::{counted, with_commas};

/// Images that take a larger share of the tokens of their rows are worth making smaller.
const LARGE_SHARE: f64 = 0.5;

/// The images of a recipe's rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct PlannedImages {
    num_images: usize,
    /// Bytes on disk of their features.
    image_bytes: u64,
    /// Bytes of features beyond the limit.
    unkept_image_bytes: u64,
    /// Bytes of features that the disk still has room for.
    #[serde(skip_serializing_if = "Option::is_none")]
    image_room_bytes: Option<u64>,
    /// FLOPs of encoding each image once.
    image_flops: f64,
    /// Time of that.
    #[serde(skip_serializing_if = "Option::is_none")]
    image_seconds: Option<f64>,
    image_tokens: usize,
    /// Their share of the tokens of rows with images.
    image_token_share: f64,
    #[serde(flatten)]
    smaller: Option<Smaller>,
}

/// A limit that leaves room for all features, or else half as many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Smaller {
    suggested_image_max_pixels: usize,
    /// Tokens of all images with it.
    suggested_image_tokens: usize,
}

impl PlannedImages {
    /// Those of a data set, if it has some. `token_share`: of the tokens of rows with images. `rate`: FLOPs in a second, where it is
    /// known.
    pub(super) fn of(data: &Dataset, token_share: f64, rate: Option<f64>) -> Option<Self> {
        let folder = feature_folder(&CacheSettings::from_env());
        let room = room(nearest_existing(&folder.unwrap_or_else(std::env::temp_dir)));
        Self::of_images(data.images()?, token_share, rate, room)
    }

    fn of_images(images: &Images, image_token_share: f64, rate: Option<f64>, room: Option<u64>) -> Option<Self> {
        let (vision, all) = (images.vision().ok()?, images.all());
        let image_tokens: usize = all.iter().map(|image| image.num_tokens()).sum();
        if all.is_empty() {
            return None;
        }
        let [image_bytes, unkept_image_bytes] = images.feature_bytes();
        let image_flops: f64 = all.iter().map(|image| encoding_flops(vision, &image.cut)).sum();
        // What is there already needs no room.
        let most_bytes = room.unwrap_or(u64::MAX).min(images.most_feature_bytes());
        let bytes = image_bytes + unkept_image_bytes;
        let most_tokens = if bytes > most_bytes {
            Some(as_f64(image_tokens) * as_f64(most_bytes) / as_f64(bytes))
        } else {
            (image_token_share > LARGE_SHARE).then(|| as_f64(image_tokens) / 2.0)
        };
        let smaller = most_tokens.and_then(|most| images.most_pixels_for(whole(most)));
        let smaller = smaller.map(|(suggested_image_max_pixels, suggested_image_tokens)| Smaller {
            suggested_image_max_pixels,
            suggested_image_tokens,
        });
        Some(Self {
            num_images: all.len(),
            image_bytes,
            unkept_image_bytes,
            image_room_bytes: room,
            image_flops,
            image_seconds: rate.map(|rate| image_flops / rate),
            image_tokens,
            image_token_share,
            smaller,
        })
    }

    /// Lines of the table.
    pub(super) fn lines(&self, duration: impl Fn(f64) -> String) -> Vec<String> {
        let kept = size(as_f64(self.image_bytes));
        let room = self.image_room_bytes.map(|room| format!("; its disk has room for {}", size(as_f64(room))));
        let mut lines = Vec::new();
        if self.image_bytes > 0 {
            lines.push(format!("images: {kept} on disk, made once{}", room.unwrap_or_default()));
        }
        if self.unkept_image_bytes > 0 {
            lines.push(format!(
                "images: {} beyond `data.image_cache_gib`, made in every epoch; the tower stays in memory",
                size(as_f64(self.unkept_image_bytes))
            ));
        }
        let num_images = as_f64(self.num_images);
        let seconds = self.image_seconds.map(|seconds| format!(", about {}", duration(seconds))).unwrap_or_default();
        lines.push(format!(
            "images: {}, {} an image, take {} to encode{seconds}",
            counted(with_commas(self.num_images), "image"),
            flops(self.image_flops / num_images),
            flops(self.image_flops)
        ));
        if let Some(Smaller { suggested_image_max_pixels, suggested_image_tokens }) = self.smaller {
            let [now, then] = [self.image_tokens, suggested_image_tokens]
                .map(|tokens| with_commas(whole(as_f64(tokens) / num_images)));
            lines.push(format!(
                "  data.image_max_pixels={suggested_image_max_pixels} makes their tokens {then} an image in place of {now}, which are \
                 {:.0} % of those of their rows",
                100.0 * self.image_token_share
            ));
        }
        lines
    }
}

/// FLOPs, as text.
fn flops(number: f64) -> String {
    match number {
        n if n < 1e9 => format!("{:.1} MFLOP", n / 1e6),
        n if n < 1e12 => format!("{:.1} GFLOP", n / 1e9),
        n if n < 1e15 => format!("{:.1} TFLOP", n / 1e12),
        n => format!("{:.1} PFLOP", n / 1e15),
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tokens")]
fn whole(count: f64) -> usize {
    count as usize
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::images::Limits;
    use crate::spec::{ModelConfig, Vision};

    /// Three images of 75 x 50, 37 x 90 and 32 x 32 pixels.
    fn images(most_pixels: Option<usize>, most_feature_bytes: u64) -> Images {
        let folder = Path::new("tests/golden/images-qwen3_vl");
        let config = ModelConfig::from_file(&folder.join("config.json")).unwrap();
        let vision = Vision::of_folder(folder, &config).unwrap().unwrap();
        let images = Images::new(Ok(vision), Limits { most_pixels, most_feature_bytes, ..Limits::default() });
        for name in ["a.png", "b.png", "c.png"] {
            images.add(&folder.join(name).display().to_string()).unwrap();
        }
        images
    }

    #[test]
    fn a_limit_is_named_that_leaves_room_for_all_or_half_the_tokens() {
        let planned = |images: &Images, share, room| PlannedImages::of_images(images, share, Some(1e9), room).unwrap();
        let all = planned(&images(None, u64::MAX), 0.4, None);
        assert_eq!((all.smaller, all.num_images, all.unkept_image_bytes), (None, 3, 0));
        assert!((all.image_seconds.unwrap() - all.image_flops / 1e9).abs() < 1e-12);
        let most = all.image_bytes * 3 / 4;
        for (limit, share, room, left) in
            [(u64::MAX, 0.6, None, 0.5), (most, 0.4, None, 0.75), (u64::MAX, 0.6, Some(most), 0.75)]
        {
            let found = planned(&images(None, limit), share, room);
            assert_eq!(found.unkept_image_bytes, all.image_bytes.saturating_sub(limit));
            let Smaller { suggested_image_max_pixels: pixels, suggested_image_tokens: tokens } = found.smaller.unwrap();
            let with = planned(&images(Some(pixels), u64::MAX), 0.4, None);
            assert_eq!(with.image_tokens, tokens);
            assert!(as_f64(tokens) <= left * as_f64(all.image_tokens) && with.image_flops < all.image_flops);
            // A larger one would not do.
            let larger = planned(&images(Some(pixels + pixels / 4), u64::MAX), 0.4, None);
            assert!(as_f64(larger.image_tokens) > left * as_f64(all.image_tokens), "{pixels}");
            assert!(found.lines(|_| String::new()).last().unwrap().contains(&format!("image_max_pixels={pixels} ")));
        }
        // None leaves no tokens.
        assert_eq!(planned(&images(None, 0), 0.6, None).smaller, None);
    }
}
