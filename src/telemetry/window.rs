//! Samples of a GPU since the last look.

use super::MachineSample;
use super::nvml::GpuReading;

/// Sums and extremes of the samples since the last [`Window::take`], and the latest sample.
#[derive(Debug, Default)]
pub(super) struct Window {
    utilization_percent: Mean,
    memory_used_bytes: Option<u64>,
    power_watts: Mean,
    temperature_celsius: Option<f64>,
    latest: GpuReading,
}

#[derive(Debug, Default)]
struct Mean {
    sum: f64,
    count: u32,
    max: Option<f64>,
}

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        let Some(value) = value else { return };
        self.sum += value;
        self.count += 1;
        self.max = Some(self.max.map_or(value, |max| max.max(value)));
    }

    fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

impl Window {
    pub(super) fn add(&mut self, reading: &GpuReading) {
        self.utilization_percent.add(reading.utilization_percent);
        self.memory_used_bytes = self.memory_used_bytes.max(reading.memory_used_bytes);
        self.power_watts.add(reading.power_watts);
        if let Some(new) = reading.temperature_celsius {
            self.temperature_celsius = Some(self.temperature_celsius.map_or(new, |max| max.max(new)));
        }
        self.latest = *reading;
    }

    /// The GPU's figures of the window, which then starts anew. Without a sample the latest one stands in.
    pub(super) fn take(&mut self) -> MachineSample {
        let latest = self.latest;
        let window = std::mem::replace(self, Self { latest, ..Self::default() });
        MachineSample {
            gpu_utilization_percent: window.utilization_percent.mean().or(latest.utilization_percent),
            gpu_utilization_max_percent: window.utilization_percent.max.or(latest.utilization_percent),
            gpu_memory_used_bytes: window.memory_used_bytes.or(latest.memory_used_bytes),
            gpu_power_watts: window.power_watts.mean().or(latest.power_watts),
            gpu_temperature_celsius: window.temperature_celsius.or(latest.temperature_celsius),
            ..MachineSample::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_holds_means_and_maxima_and_an_empty_one_the_latest_sample() {
        let mut window = Window::default();
        for (utilization, memory, power, temperature) in
            [(80.0, 5, 300.0, 61.0), (100.0, 9, 500.0, 63.0), (60.0, 7, 100.0, 62.0)]
        {
            window.add(&GpuReading {
                utilization_percent: Some(utilization),
                memory_used_bytes: Some(memory),
                power_watts: Some(power),
                temperature_celsius: Some(temperature),
                energy_millijoules: None,
            });
        }
        let sample = window.take();
        assert_eq!(sample.gpu_utilization_percent, Some(80.0));
        assert_eq!(sample.gpu_utilization_max_percent, Some(100.0));
        assert_eq!(sample.gpu_memory_used_bytes, Some(9));
        assert_eq!(sample.gpu_power_watts, Some(300.0));
        assert_eq!(sample.gpu_temperature_celsius, Some(63.0));
        let empty = window.take();
        assert_eq!(empty.gpu_utilization_percent, Some(60.0));
        assert_eq!(empty.gpu_memory_used_bytes, Some(7));
        assert_eq!(empty.gpu_temperature_celsius, Some(62.0));
    }

    #[test]
    fn what_was_never_read_stays_absent() {
        let mut window = Window::default();
        window.add(&GpuReading { power_watts: Some(70.0), ..GpuReading::default() });
        let sample = window.take();
        assert_eq!(sample.gpu_power_watts, Some(70.0));
        assert_eq!((sample.gpu_utilization_percent, sample.gpu_memory_used_bytes), (None, None));
        assert_eq!(Window::default().take(), MachineSample::default());
    }
}
