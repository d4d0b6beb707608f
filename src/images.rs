//! The images of a data set: from files to pixels, and what a model sees in their place, which is made once and kept on disk.
//!
//! Every token of an image has an id of its own, from [`FIRST_IMAGE_ID`] on, as if it were a token of a larger vocabulary: its
//! embedding is a feature of the image. So rows of tokens are cut, packed and shared as ever, and equal ids mean equal features.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

use crate::hub::PublicFiles;
use crate::spec::{Cut, Grid, Vision};
use crate::util::files::temporary;

mod features;
pub mod picture;
pub mod resize;

use features::read_exact_at;
pub use features::{FeatureKey, FeatureWriter, Features, is_of_image, room};
use picture::{Oddities, Picture};
use resize::resize;

/// Id of the first token of an image; what is below is a token of the vocabulary.
pub const FIRST_IMAGE_ID: u32 = 1 << 29;

/// Ids that tokens of images may have: the two bits above have another meaning in token files.
const NUM_IDS: u32 = 1 << 29;

const PLACES: &str = "\n  hint: paths start beside the file with the rows, or in `data.image_folder`; base64 is written \
                      `data:image/png;base64,...`";

/// Larger files are refused.
const MOST_FILE_BYTES: u64 = 256 << 20;

/// What reads the images that rows name, and the images that it has read.
#[derive(Debug)]
pub struct Images {
    /// Or why there is none.
    vision: Result<Vision, String>,
    limits: Limits,
    /// Whether bytes of images that are no files wait on disk.
    spools: bool,
    /// Whether no more than their headers is asked for.
    is_of_headers: bool,
    /// What fetches those at web addresses, which are refused without it.
    web: Option<PublicFiles>,
    found: Mutex<Found>,
}

/// What a recipe says of images.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Where relative paths start, if not beside the data file.
    pub folder: Option<PathBuf>,
    /// Images of more pixels are made smaller.
    pub most_pixels: Option<usize>,
    /// Tokens at which a row is cut.
    pub max_length: usize,
    /// Bytes of features that are kept.
    pub most_feature_bytes: u64,
}

#[derive(Debug, Default)]
struct Found {
    /// By path, the id of its first token.
    by_name: HashMap<String, u32>,
    by_content: HashMap<[u8; 32], u32>,
    /// By the id of their first token.
    images: BTreeMap<u32, Arc<Image>>,
    /// A file without a name, and its length.
    spool: Option<(File, u64)>,
}

/// An image that a row names.
#[derive(Debug)]
pub struct Image {
    /// How its row names it, for messages.
    pub name: String,
    source: Source,
    /// SHA-256 of the file.
    pub content: [u8; 32],
    /// Width and height of the file's picture.
    pub size: [usize; 2],
    /// What is seen otherwise than one may expect.
    pub odd: Oddities,
    /// What is seen of it.
    pub cut: Cut,
    /// Id of the first of its tokens.
    pub first_id: u32,
}

#[derive(Debug)]
enum Source {
    File(PathBuf),
    /// A web address, whose file is kept.
    Web(String),
    Bytes(Vec<u8>),
    /// A place in the spool, if that is there.
    Spooled(Range<u64>),
}

/// A piece of an image as a vision tower takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaled {
    /// Width and height.
    pub size: [usize; 2],
    /// `[3, height, width]`: red, then green, then blue.
    pub values: Vec<f32>,
}

impl Images {
    /// Reads images for a tower; where that cannot be, this is why.
    #[must_use]
    pub fn new(vision: Result<Vision, String>, limits: Limits) -> Self {
        Self { vision, limits, spools: false, is_of_headers: false, web: None, found: Mutex::default() }
    }

    /// The same for rows, of which many may have their images in them: these wait in a temporary file until they are encoded.
    #[must_use]
    pub fn of_rows(self) -> Self {
        Self { spools: true, ..self }
    }

    /// The same where no image is [decoded](Self::pieces): what is in rows is not kept.
    #[must_use]
    pub fn headers_alone(self) -> Self {
        Self { is_of_headers: true, ..self }
    }

    /// Removes what waits to be encoded, as all is.
    pub fn drop_spool(&self) {
        self.found().spool = None;
    }

    /// The same for rows that name images by web addresses.
    #[must_use]
    pub fn with_web(self, web: PublicFiles) -> Self {
        Self { web: Some(web), ..self }
    }

    /// What fetches images, if they are kept then.
    pub(crate) fn web(&self) -> Option<&PublicFiles> {
        self.web.as_ref().filter(|web| web.keeps() && web.fetches())
    }

    /// The hosts of images at web addresses, and how many each has.
    #[must_use]
    pub fn hosts(&self) -> BTreeMap<String, usize> {
        let mut hosts = BTreeMap::new();
        for image in self.all() {
            if let Source::Web(address) = &image.source {
                let host = address.split(['/', '?', '#']).nth(2).unwrap_or_default();
                *hosts.entry(host.to_owned()).or_default() += 1;
            }
        }
        hosts
    }

    /// The tower that they are read for.
    ///
    /// # Errors
    /// Why there is none.
    pub fn vision(&self) -> Result<&Vision, String> {
        self.vision.as_ref().map_err(Clone::clone)
    }

    /// The token of the vocabulary that stands for a token of an image.
    #[must_use]
    pub fn image_token_id(&self) -> u32 {
        self.vision.as_ref().map_or(u32::MAX, |vision| vision.image_token_id)
    }

    /// Tokens at which a row is cut.
    #[must_use]
    pub fn max_length(&self) -> usize {
        self.limits.max_length
    }

    /// The folder from which relative paths in `data` start.
    #[must_use]
    pub fn folder_for(&self, data: &Path) -> PathBuf {
        let beside = || data.parent().unwrap_or(Path::new("")).to_owned();
        self.limits.folder.clone().unwrap_or_else(beside)
    }

    /// The images so far, in the order of their ids.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Image>> {
        self.found().images.values().cloned().collect()
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image that a row names by a path, a `data:` or a web address. Equal images are one.
    ///
    /// # Errors
    /// What cannot be read, or is no image of a decent size.
    pub fn add(&self, name: &str) -> Result<Arc<Image>, String> {
        self.vision()?;
        let known = |found: &Found| found.by_name.get(name).map(|first_id| Arc::clone(&found.images[first_id]));
        let known = known(&self.found());
        known.map_or_else(|| self.read(name), Ok).map_err(|reason| format!("the image {:?} {reason}", shown(name)))
    }

    fn read(&self, name: &str) -> Result<Arc<Image>, String> {
        let (source, bytes) = if let Some(data) = name.strip_prefix("data:") {
            let bytes = of_data(data)?;
            (Source::Bytes(bytes.clone()), bytes)
        } else if let (true, Some(web)) = (is_web(name), &self.web) {
            let bytes = web.get(name, is_image)?;
            (if web.keeps() { Source::Web(name.to_owned()) } else { Source::Bytes(bytes.clone()) }, bytes)
        } else {
            let path = PathBuf::from(name.strip_prefix("file://").unwrap_or(name));
            let bytes = of_file(&path).map_err(|reason| {
                let is_lost = self.spools && reason.starts_with("cannot be read");
                reason + if is_lost { PLACES } else { "" }
            })?;
            (Source::File(path), bytes)
        };
        let (size, odd) = picture::header_of(&bytes)?;
        let cut = self.vision()?.cut(size, self.limits.most_pixels)?;
        let content: [u8; 32] = Sha256::digest(&bytes).into();
        let found = &mut *self.found();
        // Another row may have named it meanwhile.
        let first_id = match found.by_content.get(&content) {
            Some(first_id) => *first_id,
            None => found
                .free_ids(cut.num_tokens())
                .ok_or("is one too many: the images of a data set may have 536,870,912 tokens")?,
        };
        // What is in its name is not kept twice.
        if let Source::File(_) | Source::Web(_) = source {
            found.by_name.insert(name.to_owned(), first_id);
        }
        found.by_content.insert(content, first_id);
        if let Some(known) = found.images.get(&first_id) {
            return Ok(Arc::clone(known));
        }
        let source = match source {
            Source::Bytes(_) if self.is_of_headers => Source::Spooled(0..0),
            Source::Bytes(bytes) if self.spools => found.spool(&bytes)?,
            source => source,
        };
        let image = Arc::new(Image { name: shown(name), source, content, size, odd, cut, first_id });
        found.images.insert(first_id, Arc::clone(&image));
        Ok(image)
    }

    /// The bytes of an image, in the format of its file.
    fn bytes(&self, image: &Image) -> Result<Vec<u8>, String> {
        match &image.source {
            Source::File(path) => of_file(path),
            Source::Web(address) => self.web.as_ref().ok_or("is not there any more")?.get(address, is_image),
            Source::Bytes(bytes) => Ok(bytes.clone()),
            Source::Spooled(place) => {
                let mut bytes = vec![0; usize::try_from(place.end - place.start).unwrap_or(usize::MAX)];
                let found = self.found();
                let (file, _) = found.spool.as_ref().ok_or("is not there any more")?;
                read_exact_at(file, &mut bytes, place.start).map_err(|error| format!("cannot be read: {error}"))?;
                Ok(bytes)
            }
        }
    }

    /// Forgets images that nobody holds, first those that were read first, until the rest and their features take no more than this,
    /// and returns the ids of their first tokens.
    pub fn forget(&self, most_bytes: u64) -> Vec<u32> {
        let found = &mut *self.found();
        let bytes = |image: &Arc<Image>| {
            let of_features = |vision| features::bytes_of(vision, std::slice::from_ref(image));
            image.source_bytes() + self.vision.as_ref().map_or(0, of_features)
        };
        let mut sum: u64 = found.images.values().map(bytes).sum();
        let mut forgotten = Vec::new();
        for (first_id, image) in &found.images {
            if sum > most_bytes && Arc::strong_count(image) == 1 {
                sum -= bytes(image);
                forgotten.push(*first_id);
            }
        }
        found.images.retain(|first_id, _| !forgotten.contains(first_id));
        found.by_content.retain(|_, first_id| !forgotten.contains(first_id));
        found.by_name.retain(|_, first_id| !forgotten.contains(first_id));
        forgotten
    }

    /// Bytes that the features of all images so far take on disk, and bytes of those that are beyond its limit.
    #[must_use]
    pub fn feature_bytes(&self) -> [u64; 2] {
        let all = self.vision.as_ref().map_or(0, |vision| features::bytes_of(vision, &self.all()));
        let kept = all.min(self.limits.most_feature_bytes);
        [kept, all - kept]
    }

    /// The largest `data.image_max_pixels`, to two digits, with which all images so far have no more than so many tokens, and how many
    /// they have then; `None` where none makes them as few.
    #[must_use]
    pub fn most_pixels_for(&self, most_tokens: usize) -> Option<(usize, usize)> {
        let (vision, all) = (self.vision.as_ref().ok()?, self.all());
        let num_tokens = |image: &Image, most: usize| {
            vision.cut(image.size, Some(most)).map_or_else(|_| image.num_tokens(), |cut| cut.num_tokens())
        };
        // A small one may be seen larger than it is.
        let sizes = all.iter().flat_map(|image| [Some(image.size), image.cut.sizes.last().copied()]).flatten();
        let largest =
            sizes.map(|[width, height]| width * height).max()?.min(self.limits.most_pixels.unwrap_or(usize::MAX));
        let smaller =
            std::iter::successors(Some(largest), |pixels| Some(pixels * 19 / 20).filter(|pixels| *pixels > 99));
        let in_two_digits = smaller.map(|pixels| pixels - pixels % 10_usize.pow(pixels.ilog10().saturating_sub(1)));
        let counted = in_two_digits.map(|most| (most, all.iter().map(|image| num_tokens(image, most)).sum()));
        counted.into_iter().find(|(_, tokens)| *tokens <= most_tokens)
    }

    /// Bytes of features that are kept.
    #[must_use]
    pub fn most_feature_bytes(&self) -> u64 {
        self.limits.most_feature_bytes
    }

    /// What makes the features of images besides their contents: of `tower`, which stands for its weights.
    ///
    /// # Errors
    /// Where there is no tower.
    pub fn key(&self, tower: [u8; 32]) -> Result<FeatureKey, String> {
        Ok(FeatureKey::new(self.vision()?, self.limits.most_pixels, tower))
    }

    /// Decodes, resizes, cuts and scales an image.
    ///
    /// # Errors
    /// What cannot be read any more, or is damaged.
    pub fn pieces(&self, image: &Image) -> Result<Vec<Scaled>, String> {
        let picture = Picture::decode(&self.bytes(image)?)?;
        let vision = self.vision()?;
        let resized = |Picture { size, pixels }, to: [usize; 2]| Picture {
            size: to,
            pixels: resize(&pixels, size, to, vision.pixels.filter),
        };
        let original = (image.cut.behind.is_some() && image.cut.is_seen_as_it_was).then(|| picture.clone());
        let whole = image.cut.sizes.iter().fold(picture, |picture, size| resized(picture, *size));
        let pieces = match image.cut.squares {
            None => vec![whole],
            Some(Grid { rows, columns }) => {
                let size = [whole.size[0] / columns, whole.size[1] / rows];
                let places =
                    (0..rows).flat_map(|row| (0..columns).map(move |column| [column * size[0], row * size[1]]));
                let mut pieces: Vec<Picture> = places.map(|corner| whole.part(corner, size)).collect();
                pieces.extend(image.cut.behind.map(|(size, _)| resized(original.unwrap_or(whole), size)));
                pieces
            }
        };
        let scaled = |Picture { size, pixels }| Scaled { size, values: scaled(&pixels, vision) };
        Ok(pieces.into_iter().map(scaled).collect())
    }
}

impl Image {
    /// Number of its tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.cut.num_tokens()
    }

    /// Bytes of it in memory.
    fn source_bytes(&self) -> u64 {
        if let Source::Bytes(bytes) = &self.source { bytes.len() as u64 } else { 0 }
    }
}

impl Found {
    /// Puts bytes behind those that wait already.
    fn spool(&mut self, bytes: &[u8]) -> Result<Source, String> {
        let (file, start) = match self.spool.take() {
            Some(spool) => spool,
            None => (temporary()?, 0),
        };
        let written = (&file).seek(SeekFrom::Start(start)).and_then(|_| (&file).write_all(bytes));
        let end = start + bytes.len() as u64;
        self.spool = Some((file, if written.is_ok() { end } else { start }));
        let hint = "TMPDIR names a folder with more room";
        written.map_err(|error| format!("cannot be written to a temporary file: {error}\n  hint: {hint}"))?;
        Ok(Source::Spooled(start..end))
    }

    /// The first of so many ids that no image has: behind all others, or where some were forgotten.
    fn free_ids(&self, num_tokens: usize) -> Option<u32> {
        let (num_tokens, mut start) = (u32::try_from(num_tokens).ok()?, FIRST_IMAGE_ID);
        let end = |image: &Arc<Image>| u32::try_from(image.num_tokens()).ok().map(|tokens| image.first_id + tokens);
        let last = self.images.values().next_back().map_or(Some(FIRST_IMAGE_ID), end)?;
        if FIRST_IMAGE_ID + NUM_IDS - last >= num_tokens {
            return Some(last);
        }
        for image in self.images.values() {
            if image.first_id - start >= num_tokens {
                return Some(start);
            }
            start = end(image)?;
        }
        None
    }
}

/// Numbers around 0, or from 0 to 1 where they are not normed, color by color. In `f32`, as transformers has them.
#[expect(clippy::cast_possible_truncation, reason = "transformers has them in f32")]
fn scaled(pixels: &[u8], vision: &Vision) -> Vec<f32> {
    let of_channel = |channel: usize| pixels[channel..].iter().step_by(3).map(|byte| f32::from(*byte));
    let Some(norm) = vision.pixels.norm else {
        return (0..3).flat_map(of_channel).map(|byte| byte * (1.0 / 255.0)).collect();
    };
    let normed = |channel: usize| {
        let [mean, std] = norm.map(|of| of[channel] as f32 * 255.0);
        of_channel(channel).map(move |byte| (byte - mean) / std)
    };
    (0..3).flat_map(normed).collect()
}

/// A name for messages: the beginning of one that is a whole image, and an address without what may be secret.
fn shown(name: &str) -> String {
    let name = if is_web(name) { name.split(['?', '#']).next().unwrap_or_default() } else { name };
    name.chars().take(if name.starts_with("data:") { 60 } else { 200 }).collect()
}

/// Whether a name is a web address.
pub(crate) fn is_web(name: &str) -> bool {
    ["https://", "http://"].iter().any(|scheme| name.starts_with(scheme))
}

/// Whether a file is named as an image is.
pub(crate) fn has_image_name(file: &str) -> bool {
    [".png", ".jpg", ".jpeg", ".gif", ".webp"].iter().any(|end| file.to_lowercase().ends_with(end))
}

/// Whether a file begins as an image does.
pub(crate) fn is_image(file: &[u8]) -> bool {
    picture::size_of(file).is_ok()
}

fn of_file(path: &Path) -> Result<Vec<u8>, String> {
    if path.to_string_lossy().contains("://") {
        return Err("is an address, and here only files are read\n  hint: download it, and name the file".to_owned());
    }
    let unreadable = |error: std::io::Error| format!("cannot be read: {error}");
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(MOST_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MOST_FILE_BYTES {
        return Err(format!("has more than {MOST_FILE_BYTES} bytes"));
    }
    Ok(bytes)
}

/// The bytes of a `data:` address without its beginning.
fn of_data(data: &str) -> Result<Vec<u8>, String> {
    let (_, encoded) = data.split_once(";base64,").ok_or("is no `data:image/...;base64,` of an image")?;
    let encoded: Vec<u8> = encoded.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    STANDARD.decode(encoded).map_err(|error| format!("has damaged base64: {error}"))
}

#[cfg(test)]
mod tests;
