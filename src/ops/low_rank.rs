//! The low-rank update of a linear layer (Hu et al., 2021), as the operations and kernels see it.

use super::cpu::Dropout;

/// The two matrices of a low-rank update, or what belongs to each of them: its gradient, its moments, its elements.
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

    /// Both with their names in PEFT.
    pub fn named(self) -> [(&'static str, T); 2] {
        [("lora_A", self.a), ("lora_B", self.b)]
    }

    /// A, then B.
    pub fn into_array(self) -> [T; 2] {
        [self.a, self.b]
    }
}

impl LowRank<[usize; 2]> {
    /// Shapes of the matrices of rank `r` on a weight `[out_features, in_features]`.
    #[must_use]
    pub fn shapes(r: usize, [out_features, in_features]: [usize; 2]) -> Self {
        Self { a: [r, in_features], b: [out_features, r] }
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
