//! One GPU, read through NVML.

use std::cell::Cell;
use std::ffi::OsStr;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use super::gpm::{Gpm, GpmFigures};
use super::{GpuStart, NvmlSelector};
use crate::figures::MachineSample;

/// Time between two readings of figures that the driver answers slowly or that change seldom.
const SLOW_INTERVAL: Duration = Duration::from_secs(1);

/// What NVML says at one moment; the host's figures are added to it. Figures that the GPU does not support are absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Reading {
    pub(super) figures: MachineSample,
    pub(super) throttle_reasons: Option<ThrottleReasons>,
    /// The GPU's own counter, which starts with its driver.
    pub(super) energy_millijoules: Option<u64>,
}

/// An open GPU, and which of its figures are worth asking for.
pub(super) struct Gpu<'nvml> {
    device: Device<'nvml>,
    /// Name and UUID.
    label: String,
    is_mig: bool,
    gpm: Option<Gpm<'nvml>>,
    utilization: Supported,
    memory: Supported,
    power: Supported,
    temperature: Supported,
    sm_clock: Supported,
    memory_clock: Supported,
    throttle: Supported,
    pcie: Supported,
    processes: Supported,
    energy: Supported,
    slow: Cell<Option<(Instant, Slow)>>,
}

/// Figures that are read only once a second.
#[derive(Clone, Copy, Debug, Default)]
struct Slow {
    pcie_received_bytes_per_second: Option<f64>,
    pcie_sent_bytes_per_second: Option<f64>,
    other_processes_memory_bytes: Option<u64>,
}

/// Whether the GPU supports a figure. An unsupported figure is not asked for again.
struct Supported(Cell<bool>);

impl Supported {
    fn read<T>(&self, ask: impl FnOnce() -> Result<T, NvmlError>) -> Option<T> {
        if !self.0.get() {
            return None;
        }
        match ask() {
            Ok(value) => Some(value),
            Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::NoPermission) => {
                self.0.set(false);
                None
            }
            // The GPU is busy or failing: this sample lacks the figure, the next may have it.
            Err(_) => None,
        }
    }
}

impl Gpu<'_> {
    pub(super) fn read(&self) -> Reading {
        let device = &self.device;
        let rates = self.utilization.read(|| device.utilization_rates());
        let clock = |supported: &Supported, clock| supported.read(|| device.clock_info(clock)).map(f64::from);
        // First, since the other figures depend on whether the counters may be read.
        let had_gpm = self.has_gpm();
        let gpm = self.gpm.as_ref().map_or_else(GpmFigures::default, |gpm| gpm.read(device));
        if had_gpm && !self.has_gpm() {
            // The slow figures lack those that the counters were to give, so they are read again.
            self.slow.set(None);
        }
        let slow = self.read_slow();
        let utilization_percent = rates.as_ref().map(|rates| f64::from(rates.gpu));
        let figures = MachineSample {
            gpu_utilization_percent: utilization_percent,
            gpu_utilization_max_percent: utilization_percent,
            gpu_sm_activity_percent: gpm.sm_activity_percent,
            gpu_memory_activity_percent: if self.has_gpm() {
                gpm.memory_bandwidth_percent
            } else {
                rates.map(|rates| f64::from(rates.memory))
            },
            gpu_tensor_activity_percent: gpm.tensor_activity_percent,
            gpu_float_activity_percent: gpm.float_activity_percent,
            gpu_memory_used_bytes: self.memory.read(|| device.memory_info()).map(|memory| memory.used),
            gpu_power_watts: self.power.read(|| device.power_usage()).map(|milliwatts| f64::from(milliwatts) / 1e3),
            gpu_temperature_celsius: self
                .temperature
                .read(|| device.temperature(TemperatureSensor::Gpu))
                .map(f64::from),
            gpu_sm_clock_mhz: clock(&self.sm_clock, Clock::SM),
            gpu_memory_clock_mhz: clock(&self.memory_clock, Clock::Memory),
            gpu_pcie_received_bytes_per_second: gpm
                .pcie_received_bytes_per_second
                .or(slow.pcie_received_bytes_per_second),
            gpu_pcie_sent_bytes_per_second: gpm.pcie_sent_bytes_per_second.or(slow.pcie_sent_bytes_per_second),
            gpu_other_processes_memory_bytes: slow.other_processes_memory_bytes,
            ..MachineSample::default()
        };
        Reading {
            figures,
            throttle_reasons: self.throttle.read(|| device.current_throttle_reasons()),
            energy_millijoules: self.energy.read(|| device.total_energy_consumption()),
        }
    }

    fn has_gpm(&self) -> bool {
        self.gpm.as_ref().is_some_and(Gpm::is_allowed)
    }

    /// Repeats the last reading for up to a second.
    fn read_slow(&self) -> Slow {
        if let Some((at, slow)) = self.slow.get()
            && at.elapsed() < SLOW_INTERVAL
        {
            return slow;
        }
        let device = &self.device;
        // The driver counts for 20 ms before it answers; performance counters have the figure without that wait.
        let pcie = |counter| {
            let kib = || self.pcie.read(|| device.pcie_throughput(counter));
            if self.has_gpm() { None } else { kib().map(|kib| f64::from(kib) * 1024.0) }
        };
        let processes = self.processes.read(|| device.running_compute_processes());
        if let Some(gpm) = &self.gpm {
            gpm.runs_on(processes.iter().flatten().find_map(|process| process.gpu_instance_id));
        }
        let slow = Slow {
            pcie_received_bytes_per_second: pcie(PcieUtilCounter::Receive),
            pcie_sent_bytes_per_second: pcie(PcieUtilCounter::Send),
            other_processes_memory_bytes: processes.and_then(|processes| of_others(&processes, std::process::id())),
        };
        self.slow.set(Some((Instant::now(), slow)));
        slow
    }

    /// Figures that are read once. If they are unknown, the samples' figures are still asked for.
    pub(super) fn start(&self) -> GpuStart {
        // For a slice, NVML gives the limits of the whole card.
        let whole = (!self.is_mig).then_some(&self.device);
        let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
        GpuStart {
            label: self.label.clone(),
            max_sm_clock_mhz: whole.and_then(|card| card.max_clock_info(Clock::SM).ok()).map(f64::from),
            power_limit_watts: whole.and_then(|card| card.enforced_power_limit().ok()).map(watts),
            default_power_limit_watts: whole.and_then(|card| card.power_management_limit_default().ok()).map(watts),
        }
    }

    /// Tells the user which figures will be absent.
    pub(super) fn notice(&self) -> Option<String> {
        let there = if self.has_gpm() { "its memory and what its counters say" } else { "its memory" };
        self.is_mig.then(|| format!("the device is a MIG slice: NVML gives {there}, the other GPU figures are absent"))
    }
}

/// Memory of processes other than `own`. In a container NVML gives process numbers from outside of it, so `own` is not
/// among them; then all processes but the largest certainly belong to others.
fn of_others(processes: &[ProcessInfo], own: u32) -> Option<u64> {
    let used = |process: &ProcessInfo| match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    };
    let all = processes.iter().map(|process| Some((process.pid, used(process)?))).collect::<Option<Vec<_>>>()?;
    let total: u64 = all.iter().map(|(_, bytes)| bytes).sum();
    let ours = match all.iter().find(|(pid, _)| *pid == own) {
        Some((_, bytes)) => Some(*bytes),
        None => all.iter().map(|(_, bytes)| *bytes).max(),
    };
    Some(total - ours.unwrap_or(0))
}

/// What keeps clocks down, with names for people. An idle GPU's low clocks are left out.
const THROTTLES: [(ThrottleReasons, &str); 8] = [
    (ThrottleReasons::SW_POWER_CAP, "power cap"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "thermal slowdown"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "hardware thermal slowdown"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
    (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
    (ThrottleReasons::SYNC_BOOST, "sync boost"),
    (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "application clocks"),
    (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display clocks"),
];

pub(super) fn throttle_names(reasons: ThrottleReasons) -> Vec<&'static str> {
    THROTTLES.iter().filter(|(reason, _)| reasons.contains(*reason)).map(|(_, name)| *name).collect()
}

/// Opens NVML and a GPU for as long as `use_gpu` runs.
///
/// # Errors
///
/// One line that says why there is no NVML or no such GPU.
pub(super) fn with_gpu(
    library: Option<&OsStr>,
    selector: &NvmlSelector,
    use_gpu: impl FnOnce(&Gpu<'_>),
) -> Result<(), String> {
    let nvml = match library {
        Some(path) => Nvml::builder().lib_path(path).init(),
        None => Nvml::init(),
    };
    let nvml = nvml.map_err(|error| one_line(&format!("NVML cannot be loaded ({error})")))?;
    let device =
        find(&nvml, selector).map_err(|error| one_line(&format!("NVML does not find {selector} ({error})")))?;
    let is_mig = device.mig_is_mig_device_handle().unwrap_or(false);
    let yes = || Supported(Cell::new(true));
    // For a slice, NVML gives power, clocks, temperature and energy of the whole card.
    let whole = || Supported(Cell::new(!is_mig));
    let label = [device.name().ok(), device.uuid().ok()].into_iter().flatten().collect::<Vec<_>>().join(", ");
    let gpu = Gpu {
        gpm: Gpm::open(&nvml, &device, is_mig),
        device,
        label,
        is_mig,
        utilization: whole(),
        memory: yes(),
        power: whole(),
        temperature: whole(),
        sm_clock: whole(),
        memory_clock: whole(),
        throttle: whole(),
        pcie: whole(),
        processes: yes(),
        energy: whole(),
        slow: Cell::new(None),
    };
    use_gpu(&gpu);
    Ok(())
}

fn find<'nvml>(nvml: &'nvml Nvml, selector: &NvmlSelector) -> Result<Device<'nvml>, NvmlError> {
    let found = match selector {
        NvmlSelector::Index(index) => nvml.device_by_index(*index),
        NvmlSelector::Uuid(uuid) if uuid.starts_with("GPU-") || uuid.starts_with("MIG-") => {
            nvml.device_by_uuid(uuid.as_str()).or_else(|error| by_prefix(nvml, uuid).ok_or(error))
        }
        // CUDA gives only the bytes, which do not say whether they name a card or a slice.
        NvmlSelector::Uuid(uuid) => {
            nvml.device_by_uuid(format!("GPU-{uuid}")).or_else(|_| nvml.device_by_uuid(format!("MIG-{uuid}")))
        }
    };
    match found {
        // A virtual GPU may have another UUID here; if the machine has only one GPU, that one is meant.
        Err(error) if matches!(selector, NvmlSelector::Uuid(uuid) if !uuid.starts_with("MIG-")) => {
            only_card(nvml).ok_or(error)
        }
        found => found,
    }
}

/// The only GPU of a machine, unless it is divided into slices: a slice is not the whole GPU.
fn only_card(nvml: &Nvml) -> Option<Device<'_>> {
    const ENABLED: u32 = 1;
    let card = nvml.device_by_index(0).ok().filter(|_| matches!(nvml.device_count(), Ok(1)))?;
    (!card.mig_mode().is_ok_and(|mode| mode.current == ENABLED)).then_some(card)
}

/// The one GPU whose UUID begins with `prefix`: `CUDA_VISIBLE_DEVICES` takes abbreviations.
fn by_prefix<'nvml>(nvml: &'nvml Nvml, prefix: &str) -> Option<Device<'nvml>> {
    let devices = (0..nvml.device_count().ok()?).filter_map(|index| nvml.device_by_index(index).ok());
    let mut matching = devices.filter(|device| device.uuid().is_ok_and(|uuid| uuid.starts_with(prefix)));
    matching.next().filter(|_| matching.next().is_none())
}

impl std::fmt::Display for NvmlSelector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Index(index) => write!(f, "GPU {index}"),
            Self::Uuid(uuid) => write!(f, "the GPU with UUID {uuid}"),
        }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_other_processes_is_told_from_ones_own() {
        let process = |pid, bytes| ProcessInfo {
            pid,
            used_gpu_memory: UsedGpuMemory::Used(bytes),
            gpu_instance_id: None,
            compute_instance_id: None,
        };
        let all = [process(10, 5), process(11, 7), process(12, 2)];
        assert_eq!(of_others(&all, 11), Some(7));
        assert_eq!(of_others(&all, 10), Some(9));
        // In a container our number is missing, but one of the processes is ours.
        assert_eq!(of_others(&all, 99), Some(7));
        assert_eq!((of_others(&all[..1], 99), of_others(&[], 99)), (Some(0), Some(0)));
        let unknown = ProcessInfo { used_gpu_memory: UsedGpuMemory::Unavailable, ..process(13, 0) };
        assert_eq!(of_others(&[process(10, 5), unknown], 10), None);
    }

    #[test]
    fn an_idle_gpu_is_not_throttled() {
        assert!(throttle_names(ThrottleReasons::GPU_IDLE | ThrottleReasons::NONE).is_empty());
        let hot = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        assert_eq!(throttle_names(hot), ["power cap", "hardware thermal slowdown"]);
    }
}
