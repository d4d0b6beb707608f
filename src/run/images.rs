//! The features of images. Those of a data set are made before the first step, image by image, and kept for later runs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Device;

use crate::config::DataConfig;
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::data::progress::{Meter, Work};
use crate::generate::encode_sample;
use crate::hub::PublicFiles;
use crate::images::{FeatureWriter, Features, Image, Images, Limits};
use crate::model::Model;
use crate::model::tower::{self, Tower};
use crate::model::weights::{WeightFiles, Weights};
use crate::spec::{ModelConfig, Vision};
use crate::util::failure::Failure;
use crate::util::files::{CACHE_VARIABLE, cache_folder};

/// What reads the images of rows for the model in a folder, if it has a tower.
pub(crate) fn images_of_rows(folder: &Path, config: &ModelConfig, data: &DataConfig) -> Option<Arc<Images>> {
    images(folder, config, data).map(|images| Arc::new(fetched(images)))
}

/// The same where it is enough to know what images there are.
pub(crate) fn image_headers_of_rows(folder: &Path, config: &ModelConfig, data: &DataConfig) -> Option<Arc<Images>> {
    images(folder, config, data).map(|images| Arc::new(fetched(images).headers_alone()))
}

/// What reads images of rows, and fetches those that are named by web addresses.
pub(crate) fn fetched(images: Images) -> Images {
    images.of_rows().with_web(web())
}

/// [`image_headers_of_rows`] without fetching any.
pub(crate) fn kept_image_headers_of_rows(
    folder: &Path,
    config: &ModelConfig,
    data: &DataConfig,
) -> Option<Arc<Images>> {
    let headers = |images: Images| images.of_rows().with_web(web().kept_alone()).headers_alone();
    images(folder, config, data).map(|images| Arc::new(headers(images)))
}

/// Images at web addresses, kept beside the features.
fn web() -> PublicFiles {
    PublicFiles::new(cache_folder().map(|cache| cache.join("images")))
}

/// Where features are kept, if they are: beside the token cache.
pub(crate) fn feature_folder(cache: &CacheSettings) -> Option<PathBuf> {
    cache.folder.as_ref().map(|folder| folder.with_file_name("images"))
}

/// What reads images for the model in a folder, if it has a tower.
pub(crate) fn images(folder: &Path, config: &ModelConfig, data: &DataConfig) -> Option<Images> {
    let vision = Vision::of_folder(folder, config).map_err(|problems| problems.to_string()).transpose()?;
    let DataConfig { image_folder, image_max_pixels, image_cache_gib, max_length, .. } = data;
    let (folder, most_pixels) = (image_folder.clone(), *image_max_pixels);
    let most_feature_bytes = (*image_cache_gib as u64).saturating_mul(1 << 30);
    Some(Images::new(vision, Limits { folder, most_pixels, max_length: *max_length, most_feature_bytes }))
}

/// The model with what it sees in place of images, if there are any; its tower is among the weights in the folder.
///
/// # Errors
/// An image or a tower that cannot be read; a folder that cannot be written to; a stop between two images, of which those before
/// are kept.
pub(crate) fn with_images(
    model: Model,
    source: (&Path, &Weights),
    images: Option<&Arc<Images>>,
    options: &OpenOptions<'_>,
) -> Result<Model, Failure> {
    let Some(images) = images.filter(|images| !images.all().is_empty()) else { return Ok(model) };
    let features = features(source, images, &model, options)?;
    Ok(model.with_features(features))
}

/// Reads the images that prompts of samples show.
///
/// # Errors
/// A prompt that cannot be asked, or an image of one that cannot be read.
pub(crate) fn add_shown(data: &Dataset, prompts: &[String]) -> Result<(), Failure> {
    let seen = (data.template(), data.images().map(Arc::as_ref));
    for prompt in prompts {
        encode_sample(data.tokenizer(), seen, prompt).map_err(|error| {
            // Its hints are about rows.
            let reason = error.to_string().lines().next().unwrap_or_default().to_owned();
            Failure::input(format!("`eval.generate`: {reason}\n  hint: paths in it start in the working directory"))
        })?;
    }
    Ok(())
}

/// The files that the weights of a tower are in, and what stands for these weights, if there are any.
fn tower_in(weights: &Weights) -> Option<(&WeightFiles, [u8; 32])> {
    let Weights::Files(files) = weights else { return None };
    Some((files, tower::digest(files)?))
}

/// Whether there are weights of a tower.
pub(crate) fn has_tower(weights: &Weights) -> bool {
    tower_in(weights).is_some()
}

/// The tower among a model's weights.
///
/// # Errors
/// Weights without one, or that do not fit it.
pub(crate) fn tower_of(
    weights: &Weights,
    config: &ModelConfig,
    vision: &Vision,
    device: &Device,
) -> Result<Tower, String> {
    let (files, _) = tower_in(weights).ok_or("cannot be seen: the model's weights have no vision tower")?;
    Tower::load(vision.clone(), (weights, files), config, device).map_err(|problem| problem.to_string())
}

/// Looks at the tower among a model's weights, if rows have images for it.
///
/// # Errors
/// Weights without one, or that do not fit it.
pub(crate) fn check_tower(
    (folder, weights): (&Path, &Weights),
    config: &ModelConfig,
    images: &Images,
) -> Result<(), Failure> {
    let Some(vision) = images.vision().ok().filter(|_| !images.all().is_empty()) else { return Ok(()) };
    let (files, _) = tower_in(weights).ok_or_else(|| no_tower(folder))?;
    Tower::check(vision, (weights, files), config).map_err(Failure::input)
}

fn no_tower(folder: &Path) -> Failure {
    Failure::input(format!("the weights in {} have no vision tower", folder.display()))
}

fn features(
    (folder, weights): (&Path, &Weights),
    images: &Arc<Images>,
    model: &Model,
    options: &OpenOptions<'_>,
) -> Result<Features, Failure> {
    let vision = images.vision().map_err(Failure::input)?;
    let (_, digest) = tower_in(weights).ok_or_else(|| no_tower(folder))?;
    let tower_of = || tower_of(weights, &model.config, vision, &model.device());
    let key = images.key(digest).map_err(Failure::input)?;
    let all = images.all();
    let kept_in = (feature_folder(&options.cache), images.most_feature_bytes());
    let mut writer = FeatureWriter::new(kept_in, key, vision, &all).map_err(Failure::input)?;
    let mut meter = Meter::start(options.progress, Work::Seeing, "images".to_owned(), all.len());
    // Read once the first image needs it, and dropped behind the last, if all are kept.
    let (mut tower, mut num_unkept) = (None, 0);
    for (index, image) in all.iter().enumerate() {
        if (options.is_stopped)() {
            return Err(Failure::Interrupted);
        }
        let features = || {
            let pieces = images.pieces(image)?;
            if tower.is_none() {
                tower = Some(tower_of()?);
            }
            Ok(tower.as_ref().map(|tower| tower.features(pieces)).unwrap_or_default())
        };
        let of_image = |reason: String| Failure::input(format!("the image {:?} {reason}", image.name));
        if !writer.add(image, features).map_err(of_image)? {
            // It is encoded only when it is read; an image that is damaged is to end the run before its first step.
            images.pieces(image).map_err(of_image)?;
            num_unkept += 1;
        }
        meter.advance(index + 1);
    }
    meter.finish();
    if num_unkept == 0 {
        images.drop_spool();
        return Ok(writer.finish());
    }
    options.progress.note(&format!(
        "warning: there is no room to keep what is seen of {num_unkept} of {} images: they are encoded in every epoch, with the tower \
         in memory\n  hint: `data.image_max_pixels` makes images smaller, `data.image_cache_gib` is how much is kept, and {} names a \
         folder on another disk",
        all.len(),
        CACHE_VARIABLE
    ));
    let tower = tower.map_or_else(tower_of, Ok).map_err(Failure::input)?;
    let (tower, images) = (Mutex::new(tower), Arc::clone(images));
    let make = move |image: &Image| {
        let pieces = images.pieces(image)?;
        Ok(tower.lock().unwrap_or_else(PoisonError::into_inner).features(pieces))
    };
    Ok(writer.finish().made_by(make))
}
