//! The precision of a step's arithmetic.

use std::fmt;

use serde::Serialize;

use crate::device::Dtype;
use crate::schema::Choice;

/// What `train.precision` names: a type of activations, and how its matrix products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Products of `f32`, also on devices that round its operands to TF32.
    F32,
    /// Activations in `f32`, and products in TF32 where the device has it: one product instead of three.
    Tf32,
    /// Products of `bf16` with sums in `f32`.
    Bf16,
    /// Products of `f16` with sums in `f32`, and a scaled loss.
    F16,
}

impl Precision {
    /// The name in recipes.
    #[must_use]
    pub fn name(self) -> &'static str {
        if self == Self::Tf32 { "tf32" } else { self.dtype().name() }
    }

    /// The type of the activations.
    #[must_use]
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 | Self::Tf32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
            Self::F16 => Dtype::F16,
        }
    }
}

impl From<Dtype> for Precision {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
        }
    }
}

impl Choice for Precision {
    const NAMES: &'static [(&'static str, Self)] =
        &[("f32", Self::F32), ("tf32", Self::Tf32), ("bf16", Self::Bf16), ("f16", Self::F16)];
    const PEERS: &'static [(&'static str, &'static str)] = Dtype::PEERS;
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
