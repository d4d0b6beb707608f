//! The one file that names a backend.

use serde::Serialize;

/// Section `[device]` of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceConfig {
    /// `auto`, `cpu`, `cuda`, `cuda:N`, or another backend that is compiled in.
    pub name: String,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self { name: "auto".into() }
    }
}

/// Floating-point formats that a recipe can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision, 4 bytes.
    F32,
    /// bfloat16, 2 bytes: the range of `f32`, 8 bits of mantissa.
    Bf16,
    /// IEEE half precision, 2 bytes.
    F16,
}
