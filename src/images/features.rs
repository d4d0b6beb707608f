//! Features of images: on disk a file for each, complete or absent, with what they are of in its name; or in memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::SystemTime;

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::{FIRST_IMAGE_ID, Image};
use crate::spec::{Grid, SeenBothWays, Vision};
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

/// The features of images.
#[derive(Debug)]
pub struct Features {
    width: usize,
    table_id: u32,
    /// Where the tokens of an image see each other both ways.
    pub seen_both_ways: SeenBothWays,
    /// By the id of an image's first token.
    by_image: RwLock<BTreeMap<u32, OfImage>>,
    /// Where they are, if there is no folder for what is kept.
    _temporary: Option<TempDir>,
}

#[derive(Debug)]
struct OfImage {
    rows: Rows,
    /// Of its first piece; of what has several pieces, no places are asked for.
    tokens: Grid,
}

/// Where features are, row by row.
#[derive(Debug)]
enum Rows {
    File(PathBuf),
    Memory(Vec<f32>),
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
        let temporary = if folder.is_none() { Some(TempDir::new().map_err(|error| error.to_string())?) } else { None };
        let folder = folder.or_else(|| temporary.as_ref().map(|folder| folder.path().to_owned())).unwrap_or_default();
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        // Those that are used now are the last to go.
        let files: Vec<PathBuf> = images.iter().map(|image| key.path(&folder, image)).collect();
        files.iter().flat_map(File::open).for_each(|file| drop(file.set_modified(SystemTime::now())));
        tidy(&folder, SUFFIX, MOST_BYTES - bytes, Path::new(""));
        Ok(Self { folder, key, features: Features { _temporary: temporary, ..Features::new(vision) } })
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
        self.features.insert(image, Rows::File(path));
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
    /// None yet.
    #[must_use]
    pub fn new(vision: &Vision) -> Self {
        Self {
            width: vision.feature_size(),
            table_id: vision.table_id,
            seen_both_ways: vision.seen_both_ways,
            by_image: RwLock::default(),
            _temporary: None,
        }
    }

    /// The token of the vocabulary that stands for theirs where tables have rows of tokens.
    #[must_use]
    pub fn table_id(&self) -> u32 {
        self.table_id
    }

    /// Keeps the features of an image, row by row, in memory.
    pub fn keep(&self, image: &Image, values: Vec<f32>) {
        self.insert(image, Rows::Memory(values));
    }

    fn insert(&self, image: &Image, rows: Rows) {
        let of_image = OfImage { rows, tokens: image.cut.tokens };
        self.by_image.write().unwrap_or_else(PoisonError::into_inner).insert(image.first_id, of_image);
    }

    /// Drops those of the images whose first tokens have these ids.
    pub fn forget(&self, first_ids: &[u32]) {
        let mut by_image = self.by_image.write().unwrap_or_else(PoisonError::into_inner);
        by_image.retain(|first_id, _| !first_ids.contains(first_id));
    }

    /// Whether those of an image are there.
    #[must_use]
    pub fn has(&self, image: &Image) -> bool {
        self.by_image().contains_key(&image.first_id)
    }

    fn by_image(&self) -> RwLockReadGuard<'_, BTreeMap<u32, OfImage>> {
        self.by_image.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The features of tokens of images, row by row.
    ///
    /// # Errors
    /// A file that was removed or changed since it was checked.
    pub fn read(&self, ids: &[u32]) -> io::Result<Vec<f32>> {
        let mut values = Vec::with_capacity(ids.len() * self.width);
        let by_image = self.by_image();
        let of = |id: u32| by_image.range(..=id).next_back();
        let first_of = |id: u32| of(id).map(|(first_id, _)| *first_id);
        for ids in ids.chunk_by(|a, b| a + 1 == *b && first_of(*a) == first_of(*b)) {
            let (first_id, of_image) = of(ids[0]).ok_or(io::ErrorKind::NotFound)?;
            let (start, count) = ((ids[0] - first_id) as usize * self.width, ids.len() * self.width);
            match &of_image.rows {
                Rows::Memory(rows) => values.extend(rows.get(start..start + count).ok_or(io::ErrorKind::NotFound)?),
                Rows::File(path) => {
                    let mut bytes = vec![0; 4 * count];
                    read_exact_at(&File::open(path)?, &mut bytes, (HEADER_BYTES + 4 * start) as u64)?;
                    let words = bytes.chunks_exact(4).filter_map(|word| word.first_chunk());
                    values.extend(words.map(|word| f32::from_le_bytes(*word)));
                }
            }
        }
        Ok(values)
    }

    /// Width of a feature.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The tokens of an image that is seen as a whole, and which of them has this id; `None` where no token of an image has.
    #[must_use]
    pub fn place_of(&self, id: u32) -> Option<(Grid, usize)> {
        let by_image = is_of_image(id).then(|| self.by_image())?;
        let (first_id, of_image) = by_image.range(..=id).next_back()?;
        Some((of_image.tokens, (id - first_id) as usize))
    }
}

pub(super) fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
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
