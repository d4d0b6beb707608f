//! The NVIDIA GPUs of this machine, as NVML lists them.

use std::ffi::OsStr;

use nvml_wrapper::Nvml;
use serde::Serialize;

/// The driver and its GPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpus {
    /// Version of the driver.
    pub driver_version: Option<String>,
    /// Newest CUDA that the driver supports, major and minor.
    pub cuda_version: Option<(i32, i32)>,
    /// The GPUs, in NVML's order.
    pub gpus: Vec<GpuInfo>,
}

/// A GPU. What its driver does not say is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GpuInfo {
    /// What it is called.
    pub name: String,
    /// `GPU-...`.
    pub uuid: Option<String>,
    /// Its memory.
    pub memory_bytes: Option<u64>,
    /// What of it nobody uses.
    pub free_memory_bytes: Option<u64>,
    /// Processes that compute on it.
    pub num_processes: Option<usize>,
    /// The most power that it may draw.
    pub power_limit_watts: Option<f64>,
    /// Temperature of the chip.
    pub temperature_celsius: Option<u32>,
}

/// Asks NVML, or another library in its place.
///
/// # Errors
///
/// One line that says why there is no NVML.
pub fn list(library: Option<&OsStr>) -> Result<Gpus, String> {
    let nvml = match library {
        Some(path) => Nvml::builder().lib_path(path).init(),
        None => Nvml::init(),
    };
    let nvml = nvml.map_err(|error| error.to_string().split_whitespace().collect::<Vec<_>>().join(" "))?;
    let count = nvml.device_count().unwrap_or(0);
    let gpus = (0..count).filter_map(|index| {
        let device = nvml.device_by_index(index).ok()?;
        let memory = device.memory_info().ok();
        Some(GpuInfo {
            name: device.name().unwrap_or_else(|_| format!("GPU {index}")),
            uuid: device.uuid().ok(),
            memory_bytes: memory.as_ref().map(|memory| memory.total),
            free_memory_bytes: memory.as_ref().map(|memory| memory.free),
            num_processes: device.running_compute_processes_count().ok().map(|count| count as usize),
            power_limit_watts: device.enforced_power_limit().ok().map(|milliwatts| f64::from(milliwatts) / 1e3),
            temperature_celsius: device.temperature(nvml_wrapper::enum_wrappers::device::TemperatureSensor::Gpu).ok(),
        })
    });
    Ok(Gpus {
        driver_version: nvml.sys_driver_version().ok(),
        cuda_version: nvml.sys_cuda_driver_version().ok().map(|version| (version / 1000, version % 1000 / 10)),
        gpus: gpus.collect(),
    })
}
