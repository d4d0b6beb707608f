//! An NVIDIA GPU and its driver, as CUDA describes them.

use std::path::PathBuf;

use serde::Serialize;

/// A GPU as the CUDA driver knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CudaGpu {
    /// Its number among the GPUs that this process sees, from 0.
    pub ordinal: u32,
    /// Its name: `NVIDIA H200`.
    pub name: String,
    /// Its UUID without a prefix: `5a2b1c34-....`. NVML knows it as `GPU-...`, or as `MIG-...` for a slice of a GPU.
    pub uuid: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Newest CUDA that the driver supports, major and minor.
    pub driver_cuda_version: (u32, u32),
}

impl CudaGpu {
    /// One line: `cuda:0 (NVIDIA H200, 139.8 GiB, sm_90, driver for CUDA 12.8)`.
    pub(super) fn label(&self) -> String {
        let Self {
            ordinal,
            name,
            compute_capability: (major, minor),
            driver_cuda_version: (cuda_major, cuda_minor),
            ..
        } = self;
        #[allow(clippy::cast_precision_loss, reason = "shown with one decimal")]
        let gib = self.memory_bytes as f64 / f64::from(1 << 30);
        format!("cuda:{ordinal} ({name}, {gib:.1} GiB, sm_{major}{minor}, driver for CUDA {cuda_major}.{cuda_minor})")
    }
}

/// The driver's library on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DriverLibrary {
    /// Path of the library; absent if the loader does not report it.
    pub path: Option<PathBuf>,
    /// Newest CUDA that it supports, major and minor.
    pub cuda_version: (u32, u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_described_in_one_line() {
        let gpu = CudaGpu {
            ordinal: 1,
            name: "NVIDIA H200".into(),
            uuid: String::new(),
            memory_bytes: 150_000_000_000,
            compute_capability: (9, 0),
            driver_cuda_version: (12, 8),
        };
        assert_eq!(gpu.label(), "cuda:1 (NVIDIA H200, 139.7 GiB, sm_90, driver for CUDA 12.8)");
    }
}
