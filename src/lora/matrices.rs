//! The trained matrices of an adapter.

use burn::tensor::Tensor;

use super::row_norms::RowNorms;
use super::trained::TensorId;
use crate::ops::dropout::Dropout;
use crate::ops::low_rank::{Lora, LowRank};
use crate::spec::SiteId;

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

    /// The same, to be changed.
    pub fn as_mut(&mut self) -> Matrices<&mut T> {
        Matrices { a: &mut self.a, b: &mut self.b, magnitude: self.magnitude.as_mut() }
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

    /// Each with its name in PEFT.
    pub fn named(self) -> impl Iterator<Item = (&'static str, T)> {
        let names = Matrices::NAMES;
        let magnitude = names.magnitude.zip(self.magnitude);
        [(names.a, self.a), (names.b, self.b)].into_iter().chain(magnitude)
    }

    /// Each as one of all tensors that are trained; of the adapter at this place.
    pub fn tensors(self, layer: usize, site: SiteId) -> impl Iterator<Item = (TensorId, T)> {
        self.named().map(move |(name, value)| (TensorId::Adapter(layer, site, name), value))
    }

    /// Each, A first.
    pub fn values(self) -> impl Iterator<Item = T> {
        self.named().map(|(_, value)| value)
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
