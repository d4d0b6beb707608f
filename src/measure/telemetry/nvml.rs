//! One GPU, read through NVML.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use super::energy::EnergyMeter;
use super::gpm::Gpm;
use super::{GpuStart, NvmlSelector};
use crate::measure::figures::MachineSample;

/// Time between two readings of figures that the driver answers slowly or that change seldom.
const SLOW_INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct Gpu<'nvml> {
    device: Device<'nvml>,
    is_mig: bool,
    /// Its performance counters, as long as they can be read.
    gpm: Option<Gpm<'nvml>>,
    energy: EnergyMeter,
    /// When the slow figures were last read, and their values.
    slow: Option<(Instant, Slow)>,
}

/// Figures that are read only once a second.
#[derive(Clone, Copy, Debug, Default)]
struct Slow {
    pcie_received_bytes_per_second: Option<f64>,
    pcie_sent_bytes_per_second: Option<f64>,
    other_processes_memory_bytes: Option<u64>,
}

impl<'nvml> Gpu<'nvml> {
    /// Opens a GPU. The error is one line that says why there is none.
    pub(super) fn find(nvml: &'nvml Nvml, selector: &NvmlSelector) -> Result<Self, String> {
        let device =
            find(nvml, selector).map_err(|error| one_line(&format!("NVML does not find {selector} ({error})")))?;
        let is_mig = device.mig_is_mig_device_handle().unwrap_or(false);
        let gpm = Gpm::open(nvml, &device, is_mig);
        Ok(Self { device, is_mig, gpm, energy: EnergyMeter::default(), slow: None })
    }

    /// The GPU, unless it is a slice: for that, NVML gives power, clocks, temperature and energy of the whole card.
    fn card(&self) -> Option<&Device<'nvml>> {
        (!self.is_mig).then_some(&self.device)
    }

    /// What NVML says now. Figures that the GPU does not support are absent.
    pub(super) fn read(&mut self) -> MachineSample {
        // First, since the other figures depend on whether the counters can be read.
        let mut counted = MachineSample::default();
        if self.gpm.as_mut().is_some_and(|gpm| !gpm.read(&self.device, &mut counted)) {
            // The slow figures lack those that the counters were to give, so they are read again.
            (self.gpm, self.slow) = (None, None);
        }
        let slow = self.read_slow();
        let card = self.card();
        let rates = card.and_then(|card| card.utilization_rates().ok());
        let utilization_percent = rates.as_ref().map(|rates| f64::from(rates.gpu));
        let clock = |clock| card?.clock_info(clock).ok().map(f64::from);
        let gpu_power_watts = card.and_then(|card| card.power_usage().ok()).map(watts);
        let throttles = card.and_then(|card| card.current_throttle_reasons().ok());
        let mut sample = MachineSample {
            gpu_utilization_percent: utilization_percent,
            gpu_utilization_max_percent: utilization_percent,
            gpu_memory_used_bytes: self.device.memory_info().ok().map(|memory| memory.used),
            gpu_power_watts,
            gpu_temperature_celsius: card.and_then(|card| card.temperature(TemperatureSensor::Gpu).ok()).map(f64::from),
            gpu_sm_clock_mhz: clock(Clock::SM),
            gpu_memory_clock_mhz: clock(Clock::Memory),
            gpu_throttle_shares: throttles.map(throttle_shares),
            gpu_pcie_received_bytes_per_second: counted
                .gpu_pcie_received_bytes_per_second
                .or(slow.pcie_received_bytes_per_second),
            gpu_pcie_sent_bytes_per_second: counted.gpu_pcie_sent_bytes_per_second.or(slow.pcie_sent_bytes_per_second),
            gpu_other_processes_memory_bytes: slow.other_processes_memory_bytes,
            ..counted
        };
        if self.gpm.is_none() {
            sample.gpu_memory_activity_percent = rates.map(|rates| f64::from(rates.memory));
        }
        let millijoules = card.and_then(|card| card.total_energy_consumption().ok());
        sample.energy_joules = self.energy.add(millijoules, gpu_power_watts, Instant::now());
        sample
    }

    /// Repeats the last reading for up to a second.
    fn read_slow(&mut self) -> Slow {
        if let Some((at, slow)) = self.slow
            && at.elapsed() < SLOW_INTERVAL
        {
            return slow;
        }
        // The driver counts for 20 ms before it answers; performance counters have the figure without that wait.
        let card = self.card().filter(|_| self.gpm.is_none());
        let pcie = |counter| Some(f64::from(card?.pcie_throughput(counter).ok()?) * 1024.0);
        let [received, sent] = [PcieUtilCounter::Receive, PcieUtilCounter::Send].map(pcie);
        let processes = self.device.running_compute_processes().ok();
        if let Some(gpm) = &mut self.gpm {
            gpm.runs_on(processes.iter().flatten().find_map(|process| process.gpu_instance_id));
        }
        let slow = Slow {
            pcie_received_bytes_per_second: received,
            pcie_sent_bytes_per_second: sent,
            other_processes_memory_bytes: processes.and_then(|processes| of_others(&processes, std::process::id())),
        };
        self.slow = Some((Instant::now(), slow));
        slow
    }

    /// Figures that are read once. If they are unknown, the samples' figures are still asked for.
    pub(super) fn start(&self) -> GpuStart {
        let Self { device, .. } = self;
        let card = self.card();
        GpuStart {
            label: [device.name().ok(), device.uuid().ok()].into_iter().flatten().collect::<Vec<_>>().join(", "),
            max_sm_clock_mhz: card.and_then(|card| card.max_clock_info(Clock::SM).ok()).map(f64::from),
            power_limit_watts: card.and_then(|card| card.enforced_power_limit().ok()).map(watts),
            default_power_limit_watts: card.and_then(|card| card.power_management_limit_default().ok()).map(watts),
        }
    }

    /// Tells the user which figures will be absent.
    pub(super) fn notice(&self) -> Option<String> {
        let there = if self.gpm.is_some() { "its memory and what its counters say" } else { "its memory" };
        self.is_mig.then(|| format!("the device is a MIG slice: NVML gives {there}, the other GPU figures are absent"))
    }
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1e3
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

/// What keeps the clocks down in a single sample.
fn throttle_shares(reasons: ThrottleReasons) -> BTreeMap<String, f64> {
    let set = THROTTLES.iter().filter(|(reason, _)| reasons.contains(*reason));
    set.map(|(_, name)| ((*name).to_owned(), 1.0)).collect()
}

/// Opens NVML, or another library that stands in for it. The error is one line.
pub(super) fn open(library: Option<&OsStr>) -> Result<Nvml, String> {
    let nvml = match library {
        Some(path) => Nvml::builder().lib_path(path).init(),
        None => Nvml::init(),
    };
    nvml.map_err(|error| one_line(&error.to_string()))
}

fn find<'nvml>(nvml: &'nvml Nvml, selector: &NvmlSelector) -> Result<Device<'nvml>, NvmlError> {
    let found = match selector {
        NvmlSelector::Index(index) => nvml.device_by_index(*index),
        NvmlSelector::Unknown => Err(NvmlError::NotFound),
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
            Self::Unknown => f.write_str("the GPU"),
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
        assert!(throttle_shares(ThrottleReasons::GPU_IDLE | ThrottleReasons::NONE).is_empty());
        let hot = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        let names = ["power cap", "hardware thermal slowdown"].map(|name| (name.to_owned(), 1.0));
        assert_eq!(throttle_shares(hot), BTreeMap::from(names));
    }
}
