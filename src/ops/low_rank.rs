//! The low-rank update of a linear layer (Hu et al., 2021), as the operations and kernels see it.

use super::cpu::Dropout;

/// The matrices of an adapter, or what belongs to each of them: its name, its gradient, its moments, its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowRank<T> {
    /// `A`, `[r, in_features]`.
    pub a: T,
    /// `B`, `[out_features, r]`.
    pub b: T,
}

impl LowRank<&'static str> {
    /// Their names in PEFT.
    pub const NAMES: Self = Self { a: "lora_A", b: "lora_B" };
}

impl<T> LowRank<T> {
    /// References to both.
    pub fn as_ref(&self) -> LowRank<&T> {
        LowRank { a: &self.a, b: &self.b }
    }

    /// `change` of both, A first.
    pub fn map<U>(self, mut change: impl FnMut(T) -> U) -> LowRank<U> {
        LowRank { a: change(self.a), b: change(self.b) }
    }

    /// Both, each with the other's counterpart.
    pub fn zip<U>(self, other: LowRank<U>) -> LowRank<(T, U)> {
        LowRank { a: (self.a, other.a), b: (self.b, other.b) }
    }

    /// `change` of each, until one fails.
    ///
    /// # Errors
    /// That of the first that fails.
    pub fn try_map<U, E>(self, mut change: impl FnMut(T) -> Result<U, E>) -> Result<LowRank<U>, E> {
        Ok(LowRank { a: change(self.a)?, b: change(self.b)? })
    }

    /// Each with its name in PEFT.
    pub fn named(self) -> impl Iterator<Item = (&'static str, T)> {
        let names = LowRank::NAMES;
        [(names.a, self.a), (names.b, self.b)].into_iter()
    }

    /// Each, A first.
    pub fn values(self) -> impl Iterator<Item = T> {
        self.named().map(|(_, value)| value)
    }
}

impl<T, U> LowRank<(T, U)> {
    /// The inverse of [`LowRank::zip`].
    pub fn unzip(self) -> (LowRank<T>, LowRank<U>) {
        (LowRank { a: self.a.0, b: self.b.0 }, LowRank { a: self.a.1, b: self.b.1 })
    }
}

/// A low-rank update as an operation applies it: `scale dropout(x) A^T B^T`.
#[derive(Clone, Copy, Debug)]
pub struct Lora<T> {
    /// In `f32`.
    pub matrices: LowRank<T>,
    /// `alpha / r`, or `alpha / sqrt(r)` for rsLoRA.
    pub scale: f64,
    /// Dropout on the input of A; absent in evaluation.
    pub dropout: Option<Dropout>,
}
