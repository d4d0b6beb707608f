//! Frozen weights in every form in which they are multiplied.

use half::{bf16, f16};

use super::blocks::Blocks;
use super::codes::Codes;
use crate::device::has_bf16_products;

/// Most tokens of a product that is computed row by row of the weight; with more, packed weights pay.
pub(super) const FEW_TOKENS: usize = 16;

/// The same where the tokens are of as many texts, and each has the bits that it has alone.
pub const MOST_TEXTS: usize = 64;

/// A frozen weight `[out_features, in_features]`: as it is stored, and how it is multiplied with.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    pub(super) values: Values<'a>,
    pub(super) rounds: bool,
    pub(super) of_texts: bool,
}

/// Elements in their storage type.
#[derive(Clone, Copy, Debug)]
pub(super) enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    Codes(Codes<'a>),
    Blocks(Blocks<'a>),
}

impl<'a> Weight<'a> {
    /// Stored as 32-bit floats, multiplied in `f32`.
    #[must_use]
    pub fn f32(values: &'a [f32]) -> Self {
        Self { values: Values::F32(values), rounds: false, of_texts: false }
    }

    /// Stored as bfloat16, multiplied in `f32`.
    #[must_use]
    pub fn bf16(values: &'a [bf16]) -> Self {
        Self { values: Values::Bf16(values), rounds: false, of_texts: false }
    }

    /// Stored in IEEE half precision, multiplied in `f32`.
    #[must_use]
    pub fn f16(values: &'a [f16]) -> Self {
        Self { values: Values::F16(values), rounds: false, of_texts: false }
    }

    /// Stored as codes, multiplied in `f32`.
    #[must_use]
    pub fn codes(values: Codes<'a>) -> Self {
        Self { values: Values::Codes(values), rounds: false, of_texts: false }
    }

    /// Stored as blocks, multiplied in `f32`.
    #[must_use]
    pub fn blocks(values: Blocks<'a>) -> Self {
        Self { values: Values::Blocks(values), rounds: false, of_texts: false }
    }

    /// With `rounds`, both operands of a product are rounded to bfloat16 where the processor [multiplies such
    /// numbers](has_bf16_products) faster than `f32`; sums stay in `f32`. Elsewhere rounding would only cost time and digits.
    #[must_use]
    pub fn rounding(self, rounds: bool) -> Self {
        Self { rounds: rounds && has_bf16_products(), ..self }
    }
}

impl Weight<'_> {
    /// Products of up to [`MOST_TEXTS`] tokens have the bits that each token has alone, otherwise those of a few.
    #[must_use]
    pub fn of_texts(self, of_texts: bool) -> Self {
        Self { of_texts, ..self }
    }

    /// Most tokens that have the bits that each has alone.
    pub(super) fn few(&self) -> usize {
        if self.of_texts { MOST_TEXTS } else { FEW_TOKENS }
    }

    /// Number of elements.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        match self.values {
            Values::F32(w) => w.len(),
            Values::Bf16(w) => w.len(),
            Values::F16(w) => w.len(),
            Values::Codes(w) => w.len,
            Values::Blocks(w) => w.len(),
        }
    }
}
