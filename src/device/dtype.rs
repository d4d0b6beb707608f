//! Floating-point formats.

use std::fmt;
use std::str::FromStr;

use burn::tensor::{DType, FloatDType};

use crate::schema::{Choice, choice};

choice! {
    /// Floating-point formats that a recipe can name.
    #[derive(Hash)]
    pub enum Dtype {
        /// IEEE single precision, 4 bytes.
        F32 = "f32", ["fp32", "float32", "float", "32", "no"];
        /// bfloat16, 2 bytes: the range of `f32`, 8 bits of mantissa.
        Bf16 = "bf16", ["bfloat16"];
        /// IEEE half precision, 2 bytes.
        F16 = "f16", ["fp16", "float16", "half"];
    }
}

impl Dtype {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// The name in recipes.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.word()
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
