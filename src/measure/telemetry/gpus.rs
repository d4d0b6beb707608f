//! The NVIDIA GPUs of this machine, as NVML lists them.

use std::ffi::OsStr;

use nvml_wrapper::Device;
use serde::Serialize;

use super::nvml;

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

/// A GPU. Figures that its driver does not report are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GpuInfo {
    /// Its name.
    pub name: String,
    /// `GPU-...`.
    pub uuid: Option<String>,
    /// Its memory.
    pub memory_bytes: Option<u64>,
    /// The part of its memory that is free.
    pub free_memory_bytes: Option<u64>,
    /// Processes that compute on it.
    pub num_processes: Option<usize>,
    /// The highest power that it may draw.
    pub power_limit_watts: Option<f64>,
    /// Temperature of the chip.
    pub temperature_celsius: Option<u32>,
    /// The slices that it is divided into (MIG), each of which is a GPU to CUDA.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mig_slices: Vec<MigSlice>,
}

/// A slice of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MigSlice {
    /// Its name.
    pub name: String,
    /// `MIG-...`.
    pub uuid: Option<String>,
    /// Its memory.
    pub memory_bytes: Option<u64>,
    /// The part of its memory that is free.
    pub free_memory_bytes: Option<u64>,
}

impl GpuInfo {
    /// Whether CUDA sees this GPU, NVML's number `index`, or a slice of it when `CUDA_VISIBLE_DEVICES` is `visible`.
    /// `seen` are the UUIDs of those that it sees, without a prefix. Where it cannot be asked, it is taken to number GPUs as
    /// NVML does, which holds if `CUDA_DEVICE_ORDER` is `PCI_BUS_ID` or all GPUs are alike.
    #[must_use]
    pub fn is_visible(&self, index: usize, visible: &str, seen: Option<&[String]>) -> bool {
        let mut uuids = self.uuid.iter().chain(self.mig_slices.iter().filter_map(|slice| slice.uuid.as_ref()));
        if let Some(seen) = seen {
            return uuids.any(|uuid| seen.iter().any(|seen| uuid.split_once('-').is_some_and(|uuid| uuid.1 == seen)));
        }
        visible.split(',').map(str::trim).any(|name| match name.parse::<usize>() {
            Ok(number) => number == index,
            Err(_) => {
                let is_uuid = name.starts_with("GPU-") || name.starts_with("MIG-");
                is_uuid && uuids.clone().any(|uuid| uuid.starts_with(name))
            }
        })
    }
}

/// Asks NVML, or another library that stands in for it.
///
/// # Errors
/// One line that says why there is no NVML.
pub fn list(library: Option<&OsStr>) -> Result<Gpus, String> {
    let nvml = nvml::open(library)?;
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
            mig_slices: mig_slices(&device),
        })
    });
    Ok(Gpus {
        driver_version: nvml.sys_driver_version().ok(),
        cuda_version: nvml.sys_cuda_driver_version().ok().map(|version| (version / 1000, version % 1000 / 10)),
        gpus: gpus.collect(),
    })
}

/// The slices of a GPU; empty places are skipped.
fn mig_slices(device: &Device<'_>) -> Vec<MigSlice> {
    let slices = (0..device.mig_device_count().unwrap_or(0)).filter_map(|index| device.mig_device_by_index(index).ok());
    let described = slices.map(|slice| {
        let memory = slice.memory_info().ok();
        MigSlice {
            name: slice.name().unwrap_or_else(|_| "MIG slice".to_owned()),
            uuid: slice.uuid().ok(),
            memory_bytes: memory.as_ref().map(|memory| memory.total),
            free_memory_bytes: memory.as_ref().map(|memory| memory.free),
        }
    });
    described.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_visible_by_its_number_the_beginning_of_its_uuid_or_a_slice_of_it() {
        let slice = MigSlice { uuid: Some("MIG-0123-4567".into()), ..MigSlice::default() };
        let gpu = GpuInfo { uuid: Some("GPU-ffee-ddcc".into()), mig_slices: vec![slice], ..GpuInfo::default() };
        for visible in ["1", "0,1", "2, 1", "GPU-ffee", "GPU-0011,GPU-ffee-ddcc", "MIG-0123-4567"] {
            assert!(gpu.is_visible(1, visible, None), "{visible}");
        }
        for visible in ["", "-1", "0", "11", "GPU-0011", "MIG-4567", "none"] {
            assert!(!gpu.is_visible(1, visible, None), "{visible}");
        }
        // What CUDA sees counts, whatever the number.
        for seen in ["ffee-ddcc", "0123-4567"] {
            assert!(gpu.is_visible(1, "0", Some(&[seen.to_owned()])), "{seen}");
        }
        assert!(!gpu.is_visible(1, "1", Some(&["0011-2233".to_owned()])));
    }
}
