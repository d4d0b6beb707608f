//! The tensors of a model: from safetensors files, from a GGUF file, or random.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device, Distribution, Tensor};

use crate::config::Residency;
use crate::device::Dtype;
use crate::ops::linear::Matrix;
use crate::ops::quantised::Coding;
use crate::schema::Problem;
use crate::spec::{ModelConfig, StoredQuantisation};
use crate::util::faults;
use crate::util::gguf::is_gguf;

mod bitsandbytes;
pub mod convert;
mod files;
#[cfg(test)]
pub(crate) mod fixture;
mod floats;
mod form;
mod gguf;
mod kept;
mod layer;
pub(crate) mod layout;
mod pages;
pub mod quantise;
mod random;
mod safetensors;
mod source;
mod storage;
mod stored;
mod words;

pub use files::{StoredTensor, WeightFiles};
pub use gguf::GgufWeights;
pub(super) use layer::LayerWeights;
pub(super) use pages::Pages;
pub use quantise::Quantisation;
pub use random::RandomWeights;
pub use storage::Storage;

use convert::Overflow;
use files::overflow;
use pages::of_bytes;
use source::{Drawn, MatrixStorage, Numbers, Source};

/// The source of a model's tensors.
#[derive(Clone, Debug)]
pub enum Weights {
    /// The safetensors files of a model folder.
    Files(WeightFiles),
    /// A GGUF file.
    Gguf(Arc<GgufWeights>),
    /// Drawn at random, for benchmarks.
    Random(RandomWeights),
}

impl Weights {
    /// Opens a model's folder or GGUF file; no weights are read.
    ///
    /// # Errors
    /// Files that are missing, damaged or cut short.
    pub fn open(model: &Path, config: &ModelConfig) -> Result<Self, Problem> {
        if is_gguf(model) {
            return GgufWeights::open(model, config).map(Arc::new).map(Self::Gguf);
        }
        WeightFiles::open(model).map(Self::Files)
    }

    /// The one of these that it is.
    fn source(&self) -> &dyn Source {
        match self {
            Self::Files(files) => files,
            Self::Gguf(file) => &**file,
            Self::Random(random) => random,
        }
    }

    /// Checks that the tensors are exactly those of `config`, each in its shape.
    ///
    /// # Errors
    /// Lists every tensor that is missing, unexpected, misshapen or of a type that cannot be read.
    pub fn check(&self, config: &ModelConfig) -> Result<(), Problem> {
        self.source().check(config)
    }

    /// Digest that identifies the weights, whatever their path; absent for random weights. See [`WeightFiles::digest`].
    #[must_use]
    pub fn digest(&self) -> Option<[u8; 32]> {
        self.source().digest()
    }

    /// One tensor in the storage type `dtype`, on `device`.
    ///
    /// # Errors
    /// Where the tensor is missing, has another shape, or does not fit `dtype`.
    pub fn load<const D: usize>(
        &self,
        name: &str,
        shape: [usize; D],
        dtype: Dtype,
        device: &Device,
    ) -> Result<Tensor<D>, Problem> {
        let options = (device, DType::from(dtype));
        // Backends without memory pools compute in host memory, and draw on a single thread.
        if let Some(drawn) = self.source().drawn(name).filter(|_| device.memory_pool_usage().is_some()) {
            return Ok(match drawn {
                Drawn::Constant(value) => Tensor::full(shape, value, options),
                Drawn::Normal { seed, deviation } => {
                    device.seed(seed);
                    Tensor::random(shape, Distribution::Normal(0.0, deviation), options)
                }
            });
        }
        let buffer = self.read(name, &shape, dtype, |numbers| numbers.buffer(shape.iter().product(), dtype))?;
        Ok(of_bytes(buffer, shape, dtype, device))
    }

    /// A number that a file has as a tensor of this shape, which has room for one.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn scalar(&self, name: &str, shape: &[usize]) -> Result<f32, Problem> {
        let bytes = self.read(name, shape, Dtype::F32, |numbers| numbers.buffer(1, Dtype::F32))?;
        Ok(bytes.first_chunk().map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes)))
    }

    /// Reads the numbers of a tensor, all of which `dtype` must have room for.
    fn read<T>(
        &self,
        name: &str,
        shape: &[usize],
        dtype: Dtype,
        read: impl FnOnce(&Numbers<'_>) -> Result<T, Overflow>,
    ) -> Result<T, Problem> {
        let source = self.source();
        let (numbers, path) = source.numbers(name, shape)?;
        let found = read(&numbers);
        source.release_pages(name);
        found.map_err(|_| overflow(path, name, dtype))
    }

    /// The matrix of an embedding, which is never quantised, held as `storage` says, on `device`.
    ///
    /// # Errors
    /// As [`load`](Self::load); where it is to stay on disk, that it is not [`in_form`](Self::in_form).
    pub fn table(
        &self,
        name: &str,
        shape: [usize; 2],
        storage: Storage,
        device: &Device,
    ) -> Result<Tensor<2>, Problem> {
        match self {
            Self::Files(files)
                if storage.residency == Residency::Mapped && files.rows_of_fewer(name, &shape).is_none() =>
            {
                files.map(name, shape, storage.dtype, device).map(|matrix| matrix.dense().into_owned())
            }
            _ => self.load(name, shape, storage.dtype, device),
        }
    }

    /// The parts of files in which a tensor lies.
    pub(super) fn pages(&self, name: &str) -> Option<Pages> {
        self.source().pages(name)
    }

    /// The numbers of a matrix, decoded where it is stored as codes.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn matrix_values(&self, name: &str, shape: [usize; 2], config: &ModelConfig) -> Result<Vec<f32>, Problem> {
        Ok(match self.matrix(name, shape, Dtype::F32.into(), config, &Device::flex())? {
            Matrix::Dense(values) => faults::read(values, "a weight"),
            Matrix::Quantised(codes) => codes.to_f32(),
            Matrix::Blocks(blocks) => faults::read(blocks.decoded(), "a weight"),
        })
    }

    /// The matrix of a linear layer on `device`: as codes where it is stored so, else held as `storage` says.
    ///
    /// # Errors
    /// As [`table`](Self::table).
    pub fn matrix(
        &self,
        name: &str,
        shape: [usize; 2],
        storage: Storage,
        config: &ModelConfig,
        device: &Device,
    ) -> Result<Matrix, Problem> {
        if let Some(matrix) = self.source().as_stored(name, shape, &MatrixStorage { storage, config, device })? {
            return Ok(matrix);
        }
        // What is outside of the blocks, and what files of codes leave whole, is in codes only where it is stored so.
        let is_whole =
            !name.starts_with("model.layers.") || config.quantisation.is_some() && matches!(self, Self::Files(_));
        let Some(mut quantisation) = storage.quantisation.filter(|_| !is_whole) else {
            return self.load(name, shape, storage.dtype, device).map(Matrix::Dense);
        };
        // Random numbers instead of stored ones, whose scales are of rows or tiles.
        if quantisation.coding == Coding::Fp8
            && config.quantisation.as_ref().is_some_and(StoredQuantisation::is_in_codes)
        {
            quantisation.coding = Coding::Int8;
        }
        let read = |numbers: &Numbers<'_>| quantisation.quantise(shape, device, |first, to| numbers.read(first, to));
        self.read(name, &shape, Dtype::F16, read).map(|matrix| Matrix::Quantised(Arc::new(matrix)))
    }
}
