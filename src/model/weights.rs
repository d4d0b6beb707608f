//! The tensors of a model: from safetensors files, from a GGUF file, or random.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::Storage;
use crate::config::Residency;
use crate::device::Dtype;
use crate::gguf::is_gguf;
use crate::ops::linear::Matrix;
use crate::schema::Problem;
use crate::spec::ModelConfig;

mod bitsandbytes;
pub mod convert;
mod files;
#[cfg(test)]
pub(crate) mod fixture;
mod floats;
mod form;
mod gguf;
mod kept;
pub(crate) mod layout;
mod pages;
pub mod quantise;
mod random;
mod stored;
mod words;

pub use files::{StoredTensor, WeightFiles};
pub use gguf::GgufWeights;
pub(super) use pages::Pages;
pub use quantise::Quantisation;
pub use random::RandomWeights;
pub(super) use words::gcd;

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

    /// Checks that the tensors are exactly those of `config`, each in its shape.
    ///
    /// # Errors
    /// Lists every tensor that is missing, unexpected, misshapen or of a type that cannot be read.
    pub fn check(&self, config: &ModelConfig) -> Result<(), Problem> {
        match self {
            Self::Files(files) => files.check(config),
            Self::Gguf(file) => file.check(config),
            Self::Random(_) => Ok(()),
        }
    }

    /// Digest that identifies the weights, whatever their path; absent for random weights. See [`WeightFiles::digest`].
    #[must_use]
    pub fn digest(&self) -> Option<[u8; 32]> {
        match self {
            Self::Files(files) => Some(files.digest()),
            Self::Gguf(file) => Some(file.digest()),
            Self::Random(_) => None,
        }
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
        match self {
            Self::Files(files) => files.load(name, shape, dtype, device),
            Self::Gguf(file) => file.load(name, shape, dtype, device),
            Self::Random(random) => random.load(name, shape, dtype, device),
        }
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
        match (self, storage.residency) {
            (Self::Files(files), Residency::Mapped) => {
                files.map(name, shape, storage.dtype, device).map(|matrix| matrix.dense().into_owned())
            }
            _ => self.load(name, shape, storage.dtype, device),
        }
    }

    /// The parts of files in which a tensor lies.
    pub(super) fn pages(&self, name: &str) -> Option<Pages> {
        match self {
            Self::Files(files) => Some(files.pages(files.tensors().get(name)?)),
            Self::Gguf(_) | Self::Random(_) => None,
        }
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
        // The head is in codes only where it is stored so.
        let quantisation = storage.quantisation.filter(|_| name != "lm_head.weight");
        let quantised = match (self, &config.quantisation, quantisation) {
            (Self::Files(files), ..) if storage.residency == Residency::Mapped => {
                return files.map(name, shape, storage.dtype, device);
            }
            (Self::Files(files), Some(stored), _) if files.is_coded(name, &shape) => {
                return files.stored_matrix(name, shape, stored.method, storage.dtype, device);
            }
            (Self::Files(files), None, Some(quantisation)) => files.quantise(name, shape, quantisation, device),
            // Those of a GPU travel as numbers: it has no kernel for the blocks of GGUF.
            (Self::Gguf(file), ..)
                if storage.residency != Residency::Host
                    && let Some(blocks) = file.blocks(name, shape, device)? =>
            {
                return Ok(Matrix::Blocks(Arc::new(blocks)));
            }
            (Self::Gguf(file), _, Some(quantisation)) => file.quantise(name, shape, quantisation, device),
            (Self::Random(random), _, Some(quantisation)) => random.quantise(name, shape, quantisation, device),
            _ => return self.table(name, shape, storage, device).map(Matrix::Dense),
        };
        quantised.map(|matrix| Matrix::Quantised(Arc::new(matrix)))
    }
}
