//! One GPU, read through NVML.

use std::cell::Cell;
use std::ffi::OsStr;
use std::time::Instant;

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::NvmlSelector;

/// What NVML says at one moment. What the GPU does not support is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct GpuReading {
    pub(super) utilization_percent: Option<f64>,
    pub(super) memory_used_bytes: Option<u64>,
    pub(super) power_watts: Option<f64>,
    pub(super) temperature_celsius: Option<f64>,
    /// The GPU's own counter, which started with its driver.
    pub(super) energy_millijoules: Option<u64>,
}

/// An open GPU, and which of its figures are worth asking for.
pub(super) struct Gpu<'nvml> {
    device: Device<'nvml>,
    is_mig: bool,
    utilization: Supported,
    memory: Supported,
    power: Supported,
    temperature: Supported,
    energy: Supported,
}

/// Whether a figure is there. One that the GPU does not support is not asked for again.
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
            // The GPU is busy or on its way out: this sample lacks the figure, the next may have it.
            Err(_) => None,
        }
    }
}

impl Gpu<'_> {
    pub(super) fn read(&self) -> GpuReading {
        GpuReading {
            utilization_percent: self
                .utilization
                .read(|| self.device.utilization_rates())
                .map(|rates| f64::from(rates.gpu)),
            memory_used_bytes: self.memory.read(|| self.device.memory_info()).map(|memory| memory.used),
            power_watts: self.power.read(|| self.device.power_usage()).map(|milliwatts| f64::from(milliwatts) / 1e3),
            temperature_celsius: self
                .temperature
                .read(|| self.device.temperature(TemperatureSensor::Gpu))
                .map(f64::from),
            energy_millijoules: self.energy.read(|| self.device.total_energy_consumption()),
        }
    }

    /// What will be absent, for the user.
    pub(super) fn notice(&self) -> Option<String> {
        self.is_mig.then(|| "the device is a MIG slice: NVML gives its memory, the other GPU figures are absent".into())
    }
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
    // What NVML says of a slice's power, temperature and energy is the whole card's.
    let whole = || Supported(Cell::new(!is_mig));
    let gpu = Gpu {
        device,
        is_mig,
        utilization: whole(),
        memory: yes(),
        power: whole(),
        temperature: whole(),
        energy: whole(),
    };
    use_gpu(&gpu);
    Ok(())
}

fn find<'nvml>(nvml: &'nvml Nvml, selector: &NvmlSelector) -> Result<Device<'nvml>, NvmlError> {
    let found = match selector {
        NvmlSelector::Index(index) => nvml.device_by_index(*index),
        NvmlSelector::Uuid(uuid) if uuid.starts_with("GPU-") || uuid.starts_with("MIG-") => {
            nvml.device_by_uuid(uuid.as_str())
        }
        // CUDA gives the bytes only, which say not whether they name a card or a slice of one.
        NvmlSelector::Uuid(uuid) => {
            nvml.device_by_uuid(format!("GPU-{uuid}")).or_else(|_| nvml.device_by_uuid(format!("MIG-{uuid}")))
        }
    };
    match found {
        // Virtual GPUs may carry another UUID here; where there is but one, it is meant.
        Err(_) if matches!(selector, NvmlSelector::Uuid(_)) && matches!(nvml.device_count(), Ok(1)) => {
            nvml.device_by_index(0)
        }
        found => found,
    }
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

/// Energy since the first sample: from the GPU's counter, or the integral of its power where it has none.
#[derive(Debug, Default)]
pub(super) struct EnergyMeter {
    counter_at_start: Option<u64>,
    integral_joules: f64,
    last_power: Option<(Instant, f64)>,
}

impl EnergyMeter {
    #[allow(clippy::cast_precision_loss, reason = "millijoules of a run stay far below 2^52")]
    pub(super) fn add(&mut self, reading: &GpuReading, now: Instant) -> Option<f64> {
        if let Some(watts) = reading.power_watts {
            if let Some((before, watts_before)) = self.last_power {
                // Trapezoid rule between two samples.
                self.integral_joules += f64::midpoint(watts, watts_before) * now.duration_since(before).as_secs_f64();
            }
            self.last_power = Some((now, watts));
        }
        if let Some(counter) = reading.energy_millijoules {
            let start = *self.counter_at_start.get_or_insert(counter);
            return Some(counter.saturating_sub(start) as f64 / 1e3);
        }
        // A counter that was there once and fails now must not be replaced by a figure of another kind.
        if self.counter_at_start.is_some() {
            return None;
        }
        self.last_power.map(|_| self.integral_joules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn energy_is_the_difference_of_the_counter() {
        let mut meter = EnergyMeter::default();
        let now = Instant::now();
        let reading = |millijoules| GpuReading {
            energy_millijoules: Some(millijoules),
            power_watts: Some(1e6),
            ..GpuReading::default()
        };
        assert_eq!(meter.add(&reading(7_000_000), now), Some(0.0));
        assert_eq!(meter.add(&reading(7_012_500), now + Duration::from_secs(1)), Some(12.5));
        assert_eq!(meter.add(&GpuReading::default(), now + Duration::from_secs(2)), None);
    }

    #[test]
    fn without_a_counter_energy_is_the_integral_of_power() {
        let mut meter = EnergyMeter::default();
        let start = Instant::now();
        let reading = |watts| GpuReading { power_watts: Some(watts), ..GpuReading::default() };
        assert_eq!(meter.add(&reading(100.0), start), Some(0.0));
        // 2 s from 100 W to 300 W, then 1 s at 300 W.
        meter.add(&reading(300.0), start + Duration::from_secs(2));
        let joules = meter.add(&reading(300.0), start + Duration::from_secs(3)).unwrap();
        assert!((joules - 700.0).abs() < 1e-9, "{joules}");
        assert_eq!(EnergyMeter::default().add(&GpuReading::default(), start), None);
    }
}
