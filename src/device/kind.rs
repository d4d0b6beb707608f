//! The backends.

use serde::Serialize;

/// Which backend computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The processor, by burn's flex backend.
    Cpu,
    /// An NVIDIA GPU, by CUDA.
    Cuda,
    /// A GPU, by Vulkan.
    Vulkan,
    /// An Apple GPU, by Metal.
    Metal,
    /// An AMD GPU, by `ROCm`.
    Rocm,
}

impl DeviceKind {
    /// Kinds in the order in which `auto` prefers them.
    pub const ALL: [Self; 5] = [Self::Cuda, Self::Metal, Self::Rocm, Self::Vulkan, Self::Cpu];

    /// The name in recipes, and of the Cargo feature.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
            Self::Rocm => "rocm",
        }
    }

    /// Whether this binary was built with the backend.
    #[must_use]
    pub fn is_compiled_in(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Cuda => cfg!(feature = "cuda-llvm"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::Metal => cfg!(feature = "metal"),
            Self::Rocm => cfg!(feature = "rocm"),
        }
    }

    /// Whether the backend computes on a GPU.
    #[must_use]
    pub fn is_gpu(self) -> bool {
        self != Self::Cpu
    }
}
