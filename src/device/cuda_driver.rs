//! The CUDA driver, asked before burn starts.
//!
//! burn panics if there is no driver or no such GPU, so the driver is loaded and asked here first. The driver also
//! gives the GPU's UUID. By it NVML finds the same GPU, MIG slices included, for any `CUDA_VISIBLE_DEVICES` and
//! `CUDA_DEVICE_ORDER`.

use std::path::{Path, PathBuf};

use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{DriverError, result, sys};

use super::{CudaGpu, DeviceError, DriverLibrary};
use crate::util::panics::guarded;

const NO_DRIVER_HINT: &str =
    "install NVIDIA's driver (`nvidia-smi` must work; in a container, start it with GPU access), or use `--device cpu`";

/// Loads the driver's library and asks its version, which needs no GPU.
///
/// # Errors
/// If it cannot be loaded: why, in one line.
pub(super) fn driver_library() -> Result<DriverLibrary, String> {
    let cuda_version = ask(cuda_version).map_err(|silence| silence.reason)?;
    Ok(DriverLibrary { path: loaded_from("/libcuda.so"), cuda_version })
}

/// Path of a library that is loaded, by a part of the path; `None` if the system does not report it.
pub(super) fn loaded_from(part: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]));
    paths.find(|path| path.contains(part)).map(PathBuf::from)
}

/// How many GPUs the driver shows.
///
/// # Errors
/// If it is missing or does not start.
pub(super) fn num_gpus() -> Result<u32, DeviceError> {
    let count = ask(|| result::init().and_then(|()| result::device::get_count()))?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// Memory of a GPU that nobody uses, as its driver sees it. This process has its context on it already.
///
/// # Errors
/// If the driver does not say.
pub(super) fn free_memory_bytes(ordinal: u32) -> Result<u64, DeviceError> {
    let free = ask(|| {
        let device = result::device::get(ordinal.cast_signed())?;
        // SAFETY: `device` comes from cuDeviceGet, and what is retained is released.
        unsafe {
            result::ctx::set_current(result::primary_ctx::retain(device)?)?;
            let free = result::mem_get_info();
            result::primary_ctx::release(device)?;
            free
        }
    })?;
    Ok(free.0 as u64)
}

/// Finds a GPU by its number.
///
/// # Errors
/// If the driver is missing, does not start, or sees no such GPU.
pub(super) fn probe(ordinal: u32) -> Result<CudaGpu, DeviceError> {
    let num_gpus = num_gpus()?;
    if ordinal >= num_gpus {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let visible = visible.map(|value| format!(" (CUDA_VISIBLE_DEVICES is `{value}`)")).unwrap_or_default();
        let hint = match num_gpus {
            0 => "use `--device cpu`".into(),
            1 => "use `cuda:0`".into(),
            n => format!("use `cuda:0` to `cuda:{}`", n - 1),
        };
        return Err(DeviceError::NoSuchCudaGpu { ordinal, num_gpus, visible, hint });
    }
    Ok(ask(|| describe(ordinal))?)
}

/// Why the driver gives no answer.
struct Silence {
    reason: String,
    /// It has a GPU, by the system's files.
    is_broken: bool,
    /// It is that of cuda-compat, which is not for this GPU, or not for the machine's driver.
    is_compat: bool,
}

impl From<Silence> for DeviceError {
    fn from(Silence { reason, is_broken, is_compat }: Silence) -> Self {
        if is_compat {
            let problem = format!("{reason}: NVIDIA's cuda-compat does not go with this GPU or this machine's driver");
            let remedy = "install NVIDIA's driver 570 or newer (cuda-compat is for cards of data centres)".into();
            Self::Incomplete { problem, remedy }
        } else if is_broken {
            Self::BrokenCudaDriver { reason }
        } else {
            Self::NoCudaDriver { reason, hint: NO_DRIVER_HINT }
        }
    }
}

/// Calls the driver. cudarc loads it at the first call and panics if it is missing or lacks a function.
fn ask<T>(call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, Silence> {
    let missing = |reason| Silence { reason, is_broken: false, is_compat: false };
    // SAFETY: loading NVIDIA's driver library runs its initialisers only.
    if !unsafe { sys::is_culib_present() } {
        return Err(missing("no CUDA driver on this machine (libcuda.so.1 cannot be loaded)".into()));
    }
    guarded(call).map_err(missing)?.map_err(|DriverError(error)| Silence {
        reason: format!("the CUDA driver does not start: {error:?}"),
        // `CUDA_VISIBLE_DEVICES` may hide them all.
        is_broken: error != sys::CUresult::CUDA_ERROR_NO_DEVICE
            && ["/dev/nvidiactl", "/dev/dxg"].iter().any(|file| Path::new(file).exists()),
        is_compat: match error {
            sys::CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => true,
            // Also where a driver was updated and the machine not started anew.
            sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => is_compat(),
            _ => false,
        },
    })
}

/// Whether the driver's library is that of cuda-compat.
fn is_compat() -> bool {
    loaded_from("/libcuda.so").is_some_and(|path| path.to_string_lossy().contains("compat"))
}

/// Newest CUDA that the driver supports, major and minor.
fn cuda_version() -> Result<(u32, u32), DriverError> {
    let mut version = 0;
    // SAFETY: `version` outlives the call.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    let version = u32::try_from(version).unwrap_or(0);
    Ok((version / 1000, version % 1000 / 10))
}

fn describe(ordinal: u32) -> Result<CudaGpu, DriverError> {
    let device = result::device::get(ordinal.cast_signed())?;
    let attribute = |attribute| {
        // SAFETY: `device` comes from cuDeviceGet.
        let value = unsafe { result::device::get_attribute(device, attribute) }?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    // SAFETY: `device` comes from cuDeviceGet.
    let memory_bytes = unsafe { result::device::total_mem(device) }? as u64;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // Only version 2 distinguishes the slices of a MIG GPU.
    // SAFETY: `uuid` outlives the call, and `device` comes from cuDeviceGet.
    unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }.result()?;
    Ok(CudaGpu {
        ordinal,
        name: result::device::get_name(device)?,
        uuid: format_uuid(uuid),
        memory_bytes,
        is_integrated: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        compute_capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        driver_cuda_version: cuda_version()?,
    })
}

/// `8-4-4-4-12` hexadecimal digits, as NVML and nvidia-smi write it.
fn format_uuid(uuid: sys::CUuuid) -> String {
    let hex: String = uuid.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_is_not_there_is_an_error_with_a_driver_and_without() {
        match probe(1 << 20).unwrap_err() {
            DeviceError::NoSuchCudaGpu { ordinal, .. } => assert_eq!(ordinal, 1 << 20),
            error => assert!(error.to_string().contains("hint: install NVIDIA's driver"), "{error}"),
        }
    }

    #[test]
    fn uuids_are_written_as_nvml_writes_them() {
        let bytes = std::array::from_fn(|i| (i * 17) as std::ffi::c_char);
        assert_eq!(format_uuid(sys::CUuuid { bytes }), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
