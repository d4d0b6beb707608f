//! The low-rank update of a linear layer (Hu et al., 2021), as the operations and kernels see it.

use super::cpu::Dropout;

/// The two factors, or what belongs to each of them: its gradient, its shape, its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowRank<T> {
    /// `A`, `[r, in_features]`.
    pub a: T,
    /// `B`, `[out_features, r]`.
    pub b: T,
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
