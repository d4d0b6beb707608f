//! The safetensors files of a model folder, memory-mapped.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;
use sha2::{Digest as _, Sha256};

use super::convert;
use super::layout::{cannot_read, damaged, no_weights_hint, read_index};
use super::pages::Pages;
use crate::device::Dtype;
use crate::schema::Problem;
use crate::spec::{has_row_for_each_token, name_alone};
use crate::util::text;

mod experts;

use experts::Strides;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Number of samples that a digest reads from each file, and bytes of a sample.
const NUM_SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 4096;

/// The weights of a model folder: `model.safetensors`, or the shards of `model.safetensors.index.json`.
///
/// Files are memory-mapped. Pages are released once their tensor has been read, so that host memory never holds the
/// model twice. If a mapped file is cut short, the process ends, as with every mapping.
#[derive(Clone, Debug)]
pub struct WeightFiles {
    pub(super) folder: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, StoredTensor>,
    /// Tensors that hold the matrices of several experts, as they are stored.
    joined: BTreeMap<String, StoredTensor>,
}

#[derive(Clone, Debug)]
struct Shard {
    path: PathBuf,
    map: Arc<Mmap>,
    metadata: Option<std::collections::HashMap<String, String>>,
}

/// Place and type of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
    /// Type of the numbers in the file.
    pub dtype: safetensors::Dtype,
    /// Index of its file in [`WeightFiles::shard_names`].
    pub shard: usize,
    /// Its name in the file, where that is the one in a multimodal model.
    pub nested_name: Option<String>,
    /// Bytes in that file.
    range: Range<usize>,
    /// Where its elements are among them; absent: one after the other.
    strides: Option<Strides>,
    /// Whether it is a part of a tensor that holds the matrices of several experts.
    is_part: bool,
}

impl StoredTensor {
    /// The float type of its numbers; `None` where it is no floating-point type that can be loaded.
    #[must_use]
    pub fn float_dtype(&self) -> Option<Dtype> {
        convert::float_dtype(self.dtype)
    }

    /// Puts the bytes of this part of a tensor, row by row, into those of the whole.
    pub fn put_into(&self, whole: &Self, from: &[u8], to: &mut [u8]) {
        let to = &mut to[self.range.start - whole.range.start..];
        match self.strides {
            Some(strides) => strides.scatter(from, to),
            None => to[..from.len()].copy_from_slice(from),
        }
    }

    /// Whether its elements lie one after the other.
    pub(super) fn is_dense(&self) -> bool {
        self.strides.is_none()
    }
}

impl WeightFiles {
    /// Maps the files of a model folder and reads their headers, but no weights.
    ///
    /// # Errors
    /// Where there are no safetensors files, where one is damaged or cut short, or where index and files disagree.
    pub fn open(folder: &Path) -> Result<Self, Problem> {
        let single = folder.join(SINGLE);
        let index = folder.join(INDEX);
        let (paths, weight_map) = if single.is_file() {
            (vec![single], None)
        } else if index.is_file() {
            let weight_map = read_index(&index)?;
            let mut names: Vec<&String> = weight_map.values().collect();
            names.sort();
            names.dedup();
            let absent: Vec<String> = names
                .iter()
                .filter(|name| !folder.join(name).is_file())
                .map(|name| format!("names `{name}`, which is not in the folder"))
                .collect();
            if !absent.is_empty() {
                let problem = Problem::new(format!("shards are missing:{}", text::lines(&absent))).at(index.display());
                return Err(problem.hint("the model is half-downloaded"));
            }
            (names.into_iter().map(|name| folder.join(name)).collect(), Some(weight_map))
        } else {
            let problem = Problem::new(format!("no {SINGLE} and no {INDEX}")).at(folder.display());
            return Err(problem.hint(no_weights_hint(folder)));
        };

        let mut files =
            Self { folder: folder.to_owned(), shards: Vec::new(), tensors: BTreeMap::new(), joined: BTreeMap::new() };
        let mut names = HashSet::new();
        for path in paths {
            names.extend(files.add_shard(path, weight_map.as_ref())?);
        }
        if let Some(weight_map) = weight_map {
            let absent: Vec<String> = weight_map
                .iter()
                .filter(|(name, _)| !names.contains(*name))
                .map(|(name, file)| format!("`{name}` is not in `{file}`"))
                .collect();
            if !absent.is_empty() {
                let message = format!("tensors are not where the index says:{}", text::lines(&absent));
                return Err(Problem::new(message).at(index.display()));
            }
        }
        (files.tensors, files.joined) = experts::apart(with_shared_experts(files.tensors));
        Ok(files)
    }

    /// Maps one file.
    pub(super) fn open_file(path: PathBuf) -> Result<Self, Problem> {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let mut files = Self { folder, shards: Vec::new(), tensors: BTreeMap::new(), joined: BTreeMap::new() };
        files.add_shard(path, None)?;
        Ok(files)
    }

    /// Maps one more file. Returns the names of the tensors that are used of it, as it has them.
    #[expect(unsafe_code, reason = "a file can only be mapped so")]
    fn add_shard(
        &mut self,
        path: PathBuf,
        weight_map: Option<&BTreeMap<String, String>>,
    ) -> Result<Vec<String>, Problem> {
        let io_error = |error| cannot_read(&path, &error);
        let file = File::open(&path).map_err(io_error)?;
        // SAFETY: the mapping is read-only and lives as long as the shard. If another process writes to the file
        // meanwhile, values are wrong, just as if they had been read a moment later.
        let map = Arc::new(unsafe { Mmap::map(&file) }.map_err(io_error)?);
        let (header_len, header) = SafeTensors::read_metadata(&map).map_err(|error| damaged(&path, &map, &error))?;
        let data_start = header_len + size_of::<u64>();
        let shard = self.shards.len();
        let file_name = path.file_name().unwrap_or_default();
        let mut names = Vec::new();
        for (name, info) in header.tensors() {
            // Two shards may hold the same tensor; the index says which is used.
            if weight_map.and_then(|map| map.get(&name)).is_some_and(|file| **file != *file_name) {
                continue;
            }
            names.push(name.clone());
            let range = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
            let (name, nested_name) = match name_alone(&name) {
                Some(alone) => (alone, Some(name)),
                None => (name, None),
            };
            let (shape, dtype) = (info.shape.clone(), info.dtype);
            self.tensors
                .insert(name, StoredTensor { shape, dtype, shard, nested_name, range, strides: None, is_part: false });
        }
        let metadata = Metadata::metadata(&header).clone();
        self.shards.push(Shard { path, map, metadata });
        Ok(names)
    }

    /// SHA-256 of the files' names and sizes, and of 64 pages spread over each file. Reading all of a file takes long,
    /// and a sample is enough because fine-tuning changes all numbers of a model.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        digest(self.shard_names().zip(self.shards.iter().map(|shard| &shard.map[..])))
    }

    /// The file of a tensor.
    pub(super) fn path(&self, stored: &StoredTensor) -> &Path {
        &self.shards[stored.shard].path
    }

    /// Names of the files, sorted.
    pub fn shard_names(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().filter_map(|shard| shard.path.file_name()?.to_str())
    }

    /// Metadata in the header of a file, usually `{"format": "pt"}`.
    #[must_use]
    pub fn shard_metadata(&self, shard: usize) -> Option<&std::collections::HashMap<String, String>> {
        self.shards.get(shard)?.metadata.as_ref()
    }

    /// Every tensor in the files, by name; the language model of a multimodal model has the names that it has alone.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    /// The tensors of the files that hold the matrices of several experts, by name; [`tensors`](Self::tensors) has these one by one.
    #[must_use]
    pub fn joined(&self) -> &BTreeMap<String, StoredTensor> {
        &self.joined
    }

    /// The matrices, or their codes, in one of these: expert by expert, gate before up.
    #[must_use]
    pub fn parts(&self, joined: &StoredTensor) -> Vec<(&String, &StoredTensor)> {
        let is_part = |stored: &StoredTensor| {
            stored.is_part && stored.shard == joined.shard && joined.range.contains(&stored.range.start)
        };
        let mut parts: Vec<_> = self.tensors.iter().filter(|(_, stored)| is_part(stored)).collect();
        parts.sort_by_key(|(_, stored)| stored.range.start);
        parts
    }

    /// Whether the numbers or codes of a tensor are a part of one of these.
    #[must_use]
    pub fn is_part(&self, name: &str) -> bool {
        let module = |name: &str| name.rsplit_once('.').map(|(module, _)| module.to_owned());
        let Some(of_name) = module(name) else { return false };
        let first = self.tensors.range(format!("{of_name}.")..).next();
        first.is_some_and(|(first, stored)| stored.is_part && module(first) == Some(of_name))
    }

    /// Size of all tensors in the files.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let apart = self.tensors.values().filter(|tensor| !tensor.is_part);
        apart.chain(self.joined.values()).map(|tensor| tensor.range.len()).sum()
    }

    /// One tensor as `f32` in host memory.
    ///
    /// # Errors
    /// Where the tensor is missing, or has another shape or type.
    pub fn load_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Problem> {
        let (stored, from) = self.find(name, shape)?;
        let numbers = convert::to_f32(&self.bytes(stored), from);
        self.release(stored);
        Ok(numbers)
    }

    /// The stored bytes of a tensor, row by row.
    #[must_use]
    pub fn bytes(&self, stored: &StoredTensor) -> Cow<'_, [u8]> {
        let bytes = self.in_place(stored);
        stored.strides.map_or(Cow::Borrowed(bytes), |strides| Cow::Owned(strides.gather(bytes)))
    }

    /// The stored bytes of a tensor that [is dense](StoredTensor::is_dense).
    pub(super) fn in_place(&self, stored: &StoredTensor) -> &[u8] {
        &self.shards[stored.shard].map[stored.range.clone()]
    }

    /// Releases the pages of a tensor to the system; they can be read from the file again.
    pub fn release(&self, stored: &StoredTensor) {
        self.pages(stored).release();
    }

    /// Where a tensor lies in its file.
    pub(super) fn pages(&self, stored: &StoredTensor) -> Pages {
        Pages::new(&self.shards[stored.shard].map, stored.range.clone())
    }

    pub(super) fn find(&self, name: &str, shape: &[usize]) -> Result<(&StoredTensor, Dtype), Problem> {
        self.stored(name, shape).map_err(|problem| self.mismatch(&[problem]))
    }

    /// A tensor that must have this shape and a floating-point type.
    pub(super) fn stored(&self, name: &str, shape: &[usize]) -> Result<(&StoredTensor, Dtype), String> {
        let stored = self.shaped(name, shape)?;
        let wrong_type = || format!("type: `{name}` is {:?}, expected F32, BF16 or F16", stored.dtype);
        Ok((stored, stored.float_dtype().ok_or_else(wrong_type)?))
    }

    /// A tensor that must have this shape and type.
    pub(super) fn part(&self, name: &str, shape: &[usize], dtype: safetensors::Dtype) -> Result<&StoredTensor, String> {
        let stored = self.shaped(name, shape)?;
        let wrong_type = || format!("type: `{name}` is {:?}, expected {dtype:?}", stored.dtype);
        (stored.dtype == dtype).then_some(stored).ok_or_else(wrong_type)
    }

    fn shaped(&self, name: &str, shape: &[usize]) -> Result<&StoredTensor, String> {
        let stored = self.tensors.get(name).ok_or_else(|| format!("missing: `{name}` {shape:?}"))?;
        if stored.shape != shape {
            return Err(format!("misshapen: `{name}` is {:?}, expected {shape:?}", stored.shape));
        }
        Ok(stored)
    }

    /// How many rows a table has in the files, where a model has more: see [`grow`](crate::spec::ModelConfig::grow).
    #[must_use]
    pub fn rows_of_fewer(&self, name: &str, shape: &[usize]) -> Option<usize> {
        let rows = self.tensors.get(name).filter(|_| has_row_for_each_token(name))?.shape.first().copied()?;
        (rows < shape[0]).then_some(rows)
    }

    pub(in crate::model) fn mismatch(&self, problems: &[String]) -> Problem {
        let message = format!("the weights do not fit config.json:{}", text::lines(problems));
        Problem::new(message).at(self.folder.display())
    }
}

/// Hunyuan 3's files call shared experts what modules of earlier Hunyuans are called.
fn with_shared_experts(tensors: BTreeMap<String, StoredTensor>) -> BTreeMap<String, StoredTensor> {
    if !tensors.keys().any(|name| name.ends_with(".mlp.gate.e_score_correction_bias")) {
        return tensors;
    }
    let renamed = |(name, stored): (String, StoredTensor)| {
        let ours = name.replace(".mlp.shared_mlp.", ".mlp.shared_experts.");
        let nested_name = stored.nested_name.clone().or((ours != name).then_some(name));
        (ours, StoredTensor { nested_name, ..stored })
    };
    tensors.into_iter().map(renamed).collect()
}

/// Digest of files by name and content, from samples.
pub(super) fn digest<'a>(files: impl Iterator<Item = (&'a str, &'a [u8])>) -> [u8; 32] {
    let mut digest = Sha256::new();
    for (name, bytes) in files {
        digest.update(name.as_bytes());
        digest.update((bytes.len() as u64).to_le_bytes());
        let step = (bytes.len() / NUM_SAMPLES).max(SAMPLE_BYTES);
        for sample in bytes.chunks(step) {
            digest.update(&sample[..sample.len().min(SAMPLE_BYTES)]);
        }
    }
    digest.finalize().into()
}

/// The problem of a tensor with a value beyond the range of `dtype`.
pub(super) fn overflow(path: &Path, name: &str, dtype: Dtype) -> Problem {
    let problem = Problem::new(format!("a value of `{name}` is too large for {dtype}")).at(path.display());
    problem.hint("set `model.dtype` to \"bf16\" or \"f32\"")
}

#[cfg(test)]
mod tests;
