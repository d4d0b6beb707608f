//! Features of images: on disk a file for each, complete or absent, with what they are of in its name; or in memory.

use std::collections::BTreeMap;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::SystemTime;

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::{FIRST_IMAGE_ID, Image};
use crate::spec::{Grid, SeenBothWays, Vision};
use crate::util::files::{InUse, UNFINISHED_SUFFIX, free_bytes, hex, tidy};

const MAGIC: [u8; 8] = *b"LTIMAGE1";
/// With the checksum of what follows.
const HEADER_BYTES: usize = 12;
const SUFFIX: &str = ".features";
/// Bytes of the disk that are left to others.
const SPARED_BYTES: u64 = 1 << 30;

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
    /// Bytes that may be kept, and bytes that may be written.
    left: [u64; 2],
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
    /// What makes those that are not kept.
    maker: Option<Maker>,
    /// Keeps other processes from deleting them.
    _in_use: Option<InUse>,
    /// Where they are, if there is no folder for what is kept.
    _temporary: Option<TempDir>,
}

type Make = dyn Fn(&Image) -> Result<Vec<f32>, String> + Send + Sync;

/// Makes the features of an image.
struct Maker(Box<Make>);

impl fmt::Debug for Maker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Maker")
    }
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
    /// Nowhere: they are made when they are read.
    Unkept(Arc<Image>),
}

impl FeatureWriter {
    /// Features of `images` in a folder, or for this process alone; so many bytes of them, and of what is there of others.
    ///
    /// # Errors
    /// A folder that cannot be made.
    pub fn new(
        (folder, most_bytes): (Option<PathBuf>, u64),
        key: FeatureKey,
        vision: &Vision,
        images: &[Arc<Image>],
    ) -> Result<Self, String> {
        let temporary = if folder.is_none() { Some(TempDir::new().map_err(|error| error.to_string())?) } else { None };
        let folder = folder.or_else(|| temporary.as_ref().map(|folder| folder.path().to_owned())).unwrap_or_default();
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let in_use = InUse::mark(&folder).ok();
        // Later for each file: another process may have marked them meanwhile.
        let now = || in_use.iter().fold(SystemTime::now(), |now, in_use| now.max(in_use.since));
        // Of what is kept, that which is there is used now, and the rest is to have room.
        let (mut left, mut missing) = (most_bytes, 0);
        for image in images {
            let bytes = bytes_of(vision, std::slice::from_ref(image));
            if bytes <= left {
                left -= bytes;
                match File::open(key.path(&folder, image)) {
                    Ok(file) => drop(file.set_modified(now())),
                    Err(_) => missing += bytes,
                }
            }
        }
        tidy(&folder, SUFFIX, most_bytes - missing, Path::new(""));
        let room = room(&folder).unwrap_or(u64::MAX);
        let features = Features { _in_use: in_use, _temporary: temporary, ..Features::new(vision) };
        Ok(Self { folder, key, left: [most_bytes, room], features })
    }

    /// Adds an image, whose features are made if they are not there yet, row by row. Says whether they are kept: where there is no
    /// room for them, they are not made before they are read.
    ///
    /// # Errors
    /// Whatever `make` or the file system reports.
    pub fn add(&mut self, image: &Arc<Image>, make: impl FnOnce() -> Result<Vec<f32>, String>) -> Result<bool, String> {
        let path = self.key.path(&self.folder, image);
        let num_values = image.num_tokens() * self.features.width;
        let bytes = (HEADER_BYTES + 4 * num_values) as u64;
        let has_room = |left: &u64| *left >= bytes;
        let is_there = has_room(&self.left[0]) && is_whole(&path, num_values);
        if !is_there {
            if !self.left.iter().all(has_room) {
                self.features.insert(image, Rows::Unkept(Arc::clone(image)));
                return Ok(false);
            }
            let values = make()?;
            write(&path, &values).map_err(|error| format!("cannot be kept in {}: {error}", self.folder.display()))?;
            self.left[1] -= bytes;
        }
        self.left[0] -= bytes;
        self.features.insert(image, Rows::File(path));
        Ok(true)
    }

    /// All of them.
    #[must_use]
    pub fn finish(self) -> Features {
        self.features
    }
}

/// Bytes of features that may still be written to the disk of a folder, where the system says it.
#[must_use]
pub fn room(folder: &Path) -> Option<u64> {
    free_bytes(folder).map(|free| free.saturating_sub(SPARED_BYTES))
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
            maker: None,
            _in_use: None,
            _temporary: None,
        }
    }

    /// The same with what makes those that are not kept.
    #[must_use]
    pub fn made_by(self, make: impl Fn(&Image) -> Result<Vec<f32>, String> + Send + Sync + 'static) -> Self {
        Self { maker: Some(Maker(Box::new(make))), ..self }
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
    /// A file that was removed or changed since it was checked, or an error of what makes the features that are not kept.
    pub fn read(&self, ids: &[u32]) -> io::Result<Vec<f32>> {
        let mut values = Vec::with_capacity(ids.len() * self.width);
        let by_image = self.by_image();
        let of = |id: u32| by_image.range(..=id).next_back();
        let first_of = |id: u32| of(id).map(|(first_id, _)| *first_id);
        // An image may be in several rows.
        let mut made = HashMap::new();
        for ids in ids.chunk_by(|a, b| a + 1 == *b && first_of(*a) == first_of(*b)) {
            let (first_id, of_image) = of(ids[0]).ok_or(io::ErrorKind::NotFound)?;
            let (start, count) = ((ids[0] - first_id) as usize * self.width, ids.len() * self.width);
            match &of_image.rows {
                Rows::Unkept(image) => {
                    let rows = match made.entry(*first_id) {
                        Entry::Occupied(made) => made.into_mut(),
                        Entry::Vacant(place) => {
                            let Maker(make) = self.maker.as_ref().ok_or(io::ErrorKind::NotFound)?;
                            place.insert(make(image).map_err(io::Error::other)?)
                        }
                    };
                    values.extend(rows.get(start..start + count).ok_or(io::ErrorKind::NotFound)?);
                }
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
