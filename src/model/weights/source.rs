//! What every source of weights offers.

use std::borrow::Cow;
use std::path::Path;

use burn::tensor::{Bytes, Device};

use super::convert::{self, Overflow};
use super::pages::Pages;
use super::storage::Storage;
use crate::device::Dtype;
use crate::ops::linear::Matrix;
use crate::schema::Problem;
use crate::spec::ModelConfig;

/// How a model holds its matrices, and where.
pub(super) struct Held<'a> {
    pub(super) storage: Storage,
    pub(super) config: &'a ModelConfig,
    pub(super) device: &'a Device,
}

/// Where tensors come from, by their names in Hugging Face.
pub(super) trait Source {
    /// Checks that the tensors are exactly those of `config`, each in its shape. The error lists every tensor that is
    /// missing, unexpected, misshapen or of a type that cannot be read.
    fn check(&self, config: &ModelConfig) -> Result<(), Problem>;

    /// Digest that identifies the weights, whatever their folder; absent for random weights.
    fn digest(&self) -> Option<[u8; 32]>;

    /// The numbers of a tensor, which must have this shape, and the file that they are in.
    fn numbers(&self, name: &str, shape: &[usize]) -> Result<(Numbers<'_>, &Path), Problem>;

    /// The matrix in the form that it is stored in, where products use that form.
    fn as_stored(&self, _name: &str, _shape: [usize; 2], _held: &Held<'_>) -> Result<Option<Matrix>, Problem> {
        Ok(None)
    }

    /// Where a tensor lies in its file, if products read it there.
    fn pages(&self, _name: &str) -> Option<Pages> {
        None
    }

    /// Gives a tensor's pages back to the system after it was read.
    fn release_pages(&self, _name: &str) {}

    /// A tensor that a device may make by itself.
    fn drawn(&self, _name: &str) -> Option<Drawn> {
        None
    }
}

/// How the numbers of a tensor are made.
#[derive(Clone, Copy)]
pub(super) enum Drawn {
    Constant(f32),
    /// With mean 0.
    Normal {
        seed: u64,
        deviation: f64,
    },
}

/// The numbers of a tensor, row after row.
pub(super) enum Numbers<'a> {
    /// Little-endian, at any alignment.
    Stored(Cow<'a, [u8]>, Dtype),
    /// Read by a function.
    Decoded(Box<Read<'a>>),
}

/// Writes numbers from an element on, at most 2,048 of them.
type Read<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

impl Numbers<'_> {
    /// Writes the numbers from element `first` on, at most 2,048 of them.
    pub(super) fn read(&self, first: usize, to: &mut [f32]) {
        match self {
            Self::Stored(bytes, from) => {
                let width = from.num_bytes();
                convert::widen(&bytes[first * width..(first + to.len()) * width], *from, to);
            }
            Self::Decoded(read) => read(first, to),
        }
    }

    /// A buffer of all `len` numbers, in type `dtype`.
    pub(super) fn buffer(&self, len: usize, dtype: Dtype) -> Result<Bytes, Overflow> {
        match self {
            Self::Stored(bytes, from) => convert::into_buffer(bytes, *from, dtype),
            Self::Decoded(read) => convert::generate(len, dtype, read),
        }
    }
}
