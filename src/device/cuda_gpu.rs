//! An NVIDIA GPU and its driver, as CUDA describes them.

use std::path::PathBuf;

use serde::Serialize;

use super::DeviceError;

/// Oldest CUDA of a driver and of NVRTC. Since then drivers have all functions that cudarc calls for CUDA 13
/// (`cuEventElapsedTime_v2`), and headers all that kernels call (`htanh`).
pub(super) const OLDEST_CUDA: (u32, u32) = (12, 8);

/// Oldest GPUs: the first with tensor cores.
const OLDEST_COMPUTE_CAPABILITY: (u32, u32) = (7, 0);

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
    /// Whether its memory is the host's.
    pub is_integrated: bool,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Newest CUDA that the driver supports, major and minor.
    pub driver_cuda_version: (u32, u32),
}

impl CudaGpu {
    /// Checks that the GPU and its driver are recent enough.
    ///
    /// # Errors
    /// If one of them is not.
    pub(super) fn require_recent(&self) -> Result<(), DeviceError> {
        if self.compute_capability < OLDEST_COMPUTE_CAPABILITY {
            let [found, needed] = [self.compute_capability, OLDEST_COMPUTE_CAPABILITY].map(dotted);
            let gpu = format!("{} has compute capability {found}, and {needed} is needed", self.name);
            return Err(DeviceError::OldGpu { ordinal: self.ordinal, gpu });
        }
        if self.driver_cuda_version < OLDEST_CUDA {
            let [found, needed] = [self.driver_cuda_version, OLDEST_CUDA].map(dotted);
            return Err(DeviceError::Incomplete {
                problem: format!("the driver is for CUDA {found}, and {needed} is needed"),
                remedy: self.newer_driver(),
            });
        }
        Ok(())
    }

    /// How a driver that is recent enough is had: on cards for which NVIDIA has it also without a change to the machine's.
    fn newer_driver(&self) -> String {
        let install = "install NVIDIA's driver 570 or newer";
        if ["GeForce", "TITAN"].iter().any(|brand| self.name.contains(brand)) {
            return install.into();
        }
        format!(
            "{install}; where the driver is not yours to change (a notebook, a cluster), install NVIDIA's cuda-compat for cards of \
             data centres: `apt-get install cuda-compat-13-0`, or `conda install -c conda-forge cuda-compat`; it is found, and \
             taken, in /usr/local/cuda*/compat and in $CONDA_PREFIX/cuda-compat"
        )
    }

    /// Whether it multiplies `bf16`.
    pub(crate) fn has_bf16(&self) -> bool {
        self.compute_capability >= (8, 0)
    }

    /// One line: `cuda:0 (NVIDIA H200, 139.8 GiB, sm_90, driver for CUDA 12.8)`.
    pub(crate) fn label(&self) -> String {
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

/// A version or a compute capability as NVIDIA writes it: `12.8`.
pub(super) fn dotted((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
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
pub(super) mod tests {
    use super::*;

    pub(in crate::device) fn h200() -> CudaGpu {
        CudaGpu {
            ordinal: 1,
            name: "NVIDIA H200".into(),
            uuid: String::new(),
            is_integrated: false,
            memory_bytes: 150_000_000_000,
            compute_capability: (9, 0),
            driver_cuda_version: (13, 0),
        }
    }

    #[test]
    fn a_gpu_is_described_in_one_line() {
        assert_eq!(h200().label(), "cuda:1 (NVIDIA H200, 139.7 GiB, sm_90, driver for CUDA 13.0)");
    }

    #[test]
    fn an_old_gpu_and_an_old_driver_are_refused_with_what_is_needed() {
        assert_eq!(h200().require_recent(), Ok(()));
        let error = CudaGpu { compute_capability: (6, 1), ..h200() }.require_recent().unwrap_err().to_string();
        assert!(error.contains("NVIDIA H200 has compute capability 6.1, and 7.0 is needed"), "{error}");
        for driver_cuda_version in [(12, 6), (11, 8)] {
            let error = CudaGpu { driver_cuda_version, ..h200() }.require_recent().unwrap_err().to_string();
            assert!(error.contains("12.8 is needed\n  hint: install NVIDIA's driver 570"), "{error}");
            assert!(error.contains("cuda-compat-13-0") && error.contains("/usr/local/cuda*/compat"), "{error}");
        }
        let of_a_home = CudaGpu { driver_cuda_version: (12, 4), name: "NVIDIA GeForce RTX 2080".into(), ..h200() };
        let error = of_a_home.require_recent().unwrap_err().to_string();
        assert!(error.ends_with("driver 570 or newer; or use `--device cpu`"), "{error}");
        assert_eq!(CudaGpu { driver_cuda_version: (12, 8), ..h200() }.require_recent(), Ok(()));
    }
}
