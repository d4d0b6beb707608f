//! What every source of weights offers.

use std::borrow::Cow;
use std::path::Path;

use burn::tensor::{Bytes, Device};
use rayon::prelude::*;

use super::convert::{self, Overflow};
use super::pages::Pages;
use super::storage::Storage;
use crate::device::Dtype;
use crate::ops::linear::Matrix;
use crate::schema::Problem;
use crate::spec::ModelConfig;
use crate::util::stats::as_f64;

/// How a model holds its matrices, and where.
pub(super) struct MatrixStorage<'a> {
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
    fn as_stored(&self, _name: &str, _shape: [usize; 2], _held: &MatrixStorage<'_>) -> Result<Option<Matrix>, Problem> {
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

/// Columns that one thread sums.
const COLUMNS_AT_A_TIME: usize = 64;

/// Writes numbers from an element on, at most 2,048 of them.
type Read<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

impl Numbers<'_> {
    /// These numbers of a matrix `[rows, columns]`, and behind them rows that are the mean of all.
    pub(super) fn with_means(self, shape: &[usize]) -> Self {
        let (rows, columns) = (shape[0], shape[1]);
        let mut means = vec![0.0; columns];
        means.par_chunks_mut(COLUMNS_AT_A_TIME).enumerate().for_each(|(chunk, means)| {
            let mut row = vec![0.0; means.len()];
            let mut sums = vec![0.0; means.len()];
            for start in (0..rows).map(|row| row * columns + chunk * COLUMNS_AT_A_TIME) {
                self.read(start, &mut row);
                sums.iter_mut().zip(&row).for_each(|(sum, number)| *sum += f64::from(*number));
            }
            #[expect(clippy::cast_possible_truncation, reason = "a mean of f32 is in their range")]
            means.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = (sum / as_f64(rows)) as f32);
        });
        // As a model would have them that was resized.
        if let Self::Stored(_, dtype) = &self
            && let Ok(stored) = convert::from_f32(&means, *dtype)
        {
            means = convert::to_f32(&stored, *dtype);
        }
        Self::Decoded(Box::new(move |first, to| {
            let (own, new) = to.split_at_mut((rows * columns).saturating_sub(first).min(to.len()));
            if !own.is_empty() {
                self.read(first, own);
            }
            let places = (first + own.len()) % columns..;
            new.iter_mut().zip(places).for_each(|(number, place)| *number = means[place % columns]);
        }))
    }

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
