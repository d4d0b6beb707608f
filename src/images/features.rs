//! Features of images on disk: a file for each, complete or absent. What they are of is in its name.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::{FIRST_IMAGE_ID, Image};
use crate::spec::{Grid, Vision};
use crate::util::files::{UNFINISHED_SUFFIX, hex, tidy};

const MAGIC: [u8; 8] = *b"LTIMAGE1";
/// With the checksum of what follows.
const HEADER_BYTES: usize = 12;
const SUFFIX: &str = ".features";
/// Most bytes of features that are kept: of one data set, too.
const MOST_BYTES: u64 = 128 << 30;

/// What makes features besides an image.
#[derive(Clone, Debug)]
pub struct FeatureKey(Sha256);

impl FeatureKey {
    pub(super) fn new(vision: &Vision, most_pixels: Option<usize>, tower: [u8; 32]) -> Self {
        let mut hash = Sha256::new_with_prefix(MAGIC);
        hash.update(format!("{vision:?} {most_pixels:?}"));
        hash.update(tower);
        Self(hash)
    }

    fn path(&self, folder: &Path, image: &Image) -> PathBuf {
        let hash = self.0.clone().chain_update(image.content).finalize();
        folder.join(format!("{}{SUFFIX}", hex(&hash)))
    }
}

/// Makes the features of a data set's images, in the order of their ids.
#[derive(Debug)]
pub struct FeatureWriter {
    folder: PathBuf,
    key: FeatureKey,
    features: Features,
}

/// The features of a data set's images.
#[derive(Clone, Debug)]
pub struct Features {
    width: usize,
    image_token_id: u32,
    /// Whether the tokens of an image see each other both ways.
    pub is_seen_both_ways: bool,
    /// By image, in the order of their ids.
    files: Vec<FeatureFile>,
    /// Where they are, if there is no folder for what is kept.
    _temporary: Option<Arc<TempDir>>,
}

#[derive(Clone, Debug)]
struct FeatureFile {
    path: PathBuf,
    first_id: u32,
    /// Of its last piece; of what has several pieces, no places are asked for.
    tokens: Grid,
}

impl FeatureWriter {
    /// Features of `images` in a folder, or for this process alone.
    ///
    /// # Errors
    /// A folder that cannot be made; more features than are kept.
    pub fn new(
        folder: Option<PathBuf>,
        key: FeatureKey,
        vision: &Vision,
        images: &[Arc<Image>],
    ) -> Result<Self, String> {
        let bytes = bytes_of(vision, images);
        if bytes > MOST_BYTES {
            return Err(format!(
                "the features of these images take {bytes} bytes, and {MOST_BYTES} are kept at most\n  hint: \
                 `data.image_max_pixels` makes them fewer"
            ));
        }
        let temporary =
            if folder.is_none() { Some(Arc::new(TempDir::new().map_err(|error| error.to_string())?)) } else { None };
        let folder = folder.or_else(|| temporary.as_ref().map(|folder| folder.path().to_owned())).unwrap_or_default();
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        // Those that are used now are the last to go.
        let files: Vec<PathBuf> = images.iter().map(|image| key.path(&folder, image)).collect();
        files.iter().flat_map(File::open).for_each(|file| drop(file.set_modified(SystemTime::now())));
        tidy(&folder, SUFFIX, MOST_BYTES - bytes, Path::new(""));
        let (width, image_token_id) = (vision.feature_size(), vision.image_token_id);
        let is_seen_both_ways = vision.is_seen_both_ways;
        let features = Features { width, image_token_id, is_seen_both_ways, files: Vec::new(), _temporary: temporary };
        Ok(Self { folder, key, features })
    }

    /// Adds an image, whose features are made if they are not there yet, row by row.
    ///
    /// # Errors
    /// Whatever `make` or the file system reports.
    pub fn add(&mut self, image: &Image, make: impl FnOnce() -> Result<Vec<f32>, String>) -> Result<(), String> {
        let path = self.key.path(&self.folder, image);
        if !is_whole(&path, image.num_tokens() * self.features.width) {
            let values = make()?;
            write(&path, &values).map_err(|error| format!("cannot be kept in {}: {error}", self.folder.display()))?;
        }
        self.features.files.push(FeatureFile { path, first_id: image.first_id, tokens: image.cut.tokens });
        Ok(())
    }

    /// All of them.
    #[must_use]
    pub fn finish(self) -> Features {
        self.features
    }
}

/// Bytes that features take.
pub(super) fn bytes_of(vision: &Vision, images: &[Arc<Image>]) -> u64 {
    images.iter().map(|image| (HEADER_BYTES + 4 * image.num_tokens() * vision.feature_size()) as u64).sum()
}

fn write(path: &Path, values: &[f32]) -> io::Result<()> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let folder = path.parent().unwrap_or(Path::new(""));
    // Several runs may make the same file at once, so each has a file of its own.
    let mut file = tempfile::Builder::new().suffix(UNFINISHED_SUFFIX).tempfile_in(folder)?;
    file.write_all(&MAGIC)?;
    file.write_all(&crc32fast::hash(&bytes).to_le_bytes())?;
    file.write_all(&bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

fn is_whole(path: &Path, num_values: usize) -> bool {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
    let Some((header, values)) = bytes.split_at_checked(HEADER_BYTES).filter(|_| read.is_ok()) else { return false };
    header[..8] == MAGIC && header[8..] == crc32fast::hash(values).to_le_bytes() && values.len() == 4 * num_values
}

impl Features {
    /// The token of the vocabulary in whose place they are.
    #[must_use]
    pub fn image_token_id(&self) -> u32 {
        self.image_token_id
    }

    /// The features of tokens of images, row by row.
    ///
    /// # Errors
    /// A file that was removed or changed since it was checked.
    pub fn read(&self, ids: &[u32]) -> io::Result<Vec<f32>> {
        let mut values = Vec::with_capacity(ids.len() * self.width);
        let first_of = |id: u32| self.file_of(id).map(|file| file.first_id);
        for ids in ids.chunk_by(|a, b| a + 1 == *b && first_of(*a) == first_of(*b)) {
            let file = self.file_of(ids[0]).ok_or(io::ErrorKind::NotFound)?;
            let row_bytes = 4 * self.width;
            let start = HEADER_BYTES + (ids[0] - file.first_id) as usize * row_bytes;
            let mut bytes = vec![0; ids.len() * row_bytes];
            read_exact_at(&File::open(&file.path)?, &mut bytes, start as u64)?;
            values.extend(
                bytes.chunks_exact(4).filter_map(|word| word.first_chunk()).map(|word| f32::from_le_bytes(*word)),
            );
        }
        Ok(values)
    }

    /// Width of a feature.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    fn file_of(&self, id: u32) -> Option<&FeatureFile> {
        self.files.get(self.files.partition_point(|file| file.first_id <= id).checked_sub(1)?)
    }

    /// The tokens of an image that is seen as a whole, and which of them has this id; `None` where no token of an image has.
    #[must_use]
    pub fn place_of(&self, id: u32) -> Option<(Grid, usize)> {
        let file = self.file_of(id).filter(|_| is_of_image(id))?;
        Some((file.tokens, (id - file.first_id) as usize))
    }
}

fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    use std::io::{Seek as _, SeekFrom};
    let mut file = file;
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(bytes)
}

/// Whether an id is that of a token of an image.
#[must_use]
pub fn is_of_image(id: u32) -> bool {
    id >= FIRST_IMAGE_ID
}
