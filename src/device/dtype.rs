//! Floating-point formats.

use std::fmt;
use std::str::FromStr;

use burn::tensor::{DType, FloatDType};
use serde::Serialize;

use crate::schema::Choice;

/// Floating-point formats that a recipe can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision, 4 bytes.
    F32,
    /// bfloat16, 2 bytes: the range of `f32`, 8 bits of mantissa.
    Bf16,
    /// IEEE half precision, 2 bytes.
    F16,
}

impl Dtype {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// The name in recipes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Bytes of one number.
    #[must_use]
    pub fn num_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

impl Choice for Dtype {
    const NAMES: &'static [(&'static str, Self)] = &[("f32", Self::F32), ("bf16", Self::Bf16), ("f16", Self::F16)];
    const PEERS: &'static [(&'static str, &'static str)] = &[
        ("fp32", "f32"),
        ("float32", "f32"),
        ("float", "f32"),
        ("32", "f32"),
        ("no", "f32"),
        ("bfloat16", "bf16"),
        ("fp16", "f16"),
        ("float16", "f16"),
        ("half", "f16"),
    ];
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = ();

    /// Reads a recipe name.
    ///
    /// # Errors
    ///
    /// If it is not the name of one of [`Dtype::ALL`]; the caller adds where the name stands.
    fn from_str(name: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or(())
    }
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::BF16,
            Dtype::F16 => Self::F16,
        }
    }
}

impl From<Dtype> for FloatDType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::BF16,
            Dtype::F16 => Self::F16,
        }
    }
}

impl TryFrom<DType> for Dtype {
    type Error = DType;

    /// The recipe's format of a tensor's type.
    ///
    /// # Errors
    ///
    /// Returns the type if recipes have no name for it.
    fn try_from(dtype: DType) -> Result<Self, DType> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::BF16 => Ok(Self::Bf16),
            DType::F16 => Ok(Self::F16),
            other => Err(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_burn_types_lead_there_and_back() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(Dtype::try_from(DType::from(dtype)), Ok(dtype));
            assert_eq!(DType::from(dtype).size(), dtype.num_bytes());
            assert_eq!(DType::from(FloatDType::from(dtype)), DType::from(dtype));
        }
        assert_eq!("float32".parse::<Dtype>(), Err(()));
        assert_eq!(Dtype::try_from(DType::I32), Err(DType::I32));
    }
}
