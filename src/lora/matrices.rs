//! The trained matrices of an adapter.

use burn::tensor::Tensor;

use super::row_norms::RowNorms;
use crate::ops::dropout::Dropout;
use crate::ops::low_rank::{Lora, LowRank};

/// The matrices of an adapter, or what belongs to each of them: its name, its gradient, its moments, its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrices<T> {
    /// `A`, `[r, in_features]`.
    pub a: T,
    /// `B`, `[out_features, r]`.
    pub b: T,
    /// Magnitudes of the rows of the weight, `[1, out_features]`, where the kind has them.
    pub magnitude: Option<T>,
}

impl Matrices<&'static str> {
    /// Their names in PEFT.
    pub const NAMES: Self = Self { a: "lora_A", b: "lora_B", magnitude: Some("lora_magnitude_vector") };
}

impl<T> From<LowRank<T>> for Matrices<T> {
    fn from(LowRank { a, b }: LowRank<T>) -> Self {
        Self { a, b, magnitude: None }
    }
}

impl<T> Matrices<T> {
    /// References to all.
    pub fn as_ref(&self) -> Matrices<&T> {
        Matrices { a: &self.a, b: &self.b, magnitude: self.magnitude.as_ref() }
    }

    /// A and B.
    pub fn low_rank(self) -> LowRank<T> {
        LowRank { a: self.a, b: self.b }
    }

    /// `change` of each, A first.
    pub fn map<U>(self, mut change: impl FnMut(T) -> U) -> Matrices<U> {
        Matrices { a: change(self.a), b: change(self.b), magnitude: self.magnitude.map(change) }
    }

    /// Each with the other's counterpart, where both have it.
    pub fn zip<U>(self, other: Matrices<U>) -> Matrices<(T, U)> {
        let magnitude = self.magnitude.zip(other.magnitude);
        Matrices { a: (self.a, other.a), b: (self.b, other.b), magnitude }
    }

    /// `change` of each, until one fails.
    ///
    /// # Errors
    /// That of the first that fails.
    pub fn try_map<U, E>(self, mut change: impl FnMut(T) -> Result<U, E>) -> Result<Matrices<U>, E> {
        let (a, b) = (change(self.a)?, change(self.b)?);
        Ok(Matrices { a, b, magnitude: self.magnitude.map(change).transpose()? })
    }

    /// Each with its name in PEFT.
    pub fn named(self) -> impl Iterator<Item = (&'static str, T)> {
        let names = Matrices::NAMES;
        let magnitude = names.magnitude.zip(self.magnitude);
        [(names.a, self.a), (names.b, self.b)].into_iter().chain(magnitude)
    }

    /// Each, A first.
    pub fn values(self) -> impl Iterator<Item = T> {
        self.named().map(|(_, value)| value)
    }
}

impl<T, U> Matrices<(T, U)> {
    /// The inverse of [`Matrices::zip`].
    pub fn unzip(self) -> (Matrices<T>, Matrices<U>) {
        let (of_t, of_u) = self.magnitude.unzip();
        (Matrices { a: self.a.0, b: self.b.0, magnitude: of_t }, Matrices { a: self.a.1, b: self.b.1, magnitude: of_u })
    }
}

/// An adapter as it is applied to the input of its linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Applied<'a> {
    /// In `f32`.
    pub matrices: Matrices<&'a Tensor<2>>,
    /// Scale of the update.
    pub scale: f64,
    /// Dropout on the input; absent in evaluation.
    pub dropout: Option<Dropout>,
    /// Norms of the rows of its weight, where the kind needs them.
    pub norms: &'a RowNorms,
}

impl<'a> Applied<'a> {
    /// Its low-rank update.
    #[must_use]
    pub fn lora(self) -> Lora<&'a Tensor<2>> {
        Lora { matrices: self.matrices.low_rank(), scale: self.scale, dropout: self.dropout }
    }
}
