//! Samples since the last look.

use std::collections::BTreeMap;

use nvml_wrapper::bitmasks::device::ThrottleReasons;

use super::MachineSample;
use super::host::HostReading;
use super::nvml::{GpuReading, throttle_names};

/// Sums and extremes of the samples since the last [`Window::take`], and the latest sample.
#[derive(Debug, Default)]
pub(super) struct Window {
    utilization_percent: Mean,
    sm_activity_percent: Mean,
    memory_activity_percent: Mean,
    tensor_activity_percent: Mean,
    float_activity_percent: Mean,
    power_watts: Mean,
    sm_clock_mhz: Mean,
    memory_clock_mhz: Mean,
    pcie_received: Mean,
    pcie_sent: Mean,
    memory_used_bytes: Option<u64>,
    other_processes_memory_bytes: Option<u64>,
    temperature_celsius: Option<f64>,
    throttles: Throttles,
    available_bytes: Option<u64>,
    latest: GpuReading,
    latest_host: HostReading,
    /// The host's counters where the window began.
    host_before: HostReading,
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

/// In how many samples the clocks were kept down by what.
#[derive(Debug, Default)]
struct Throttles {
    num_samples: u32,
    by_name: BTreeMap<&'static str, u32>,
}

impl Throttles {
    fn add(&mut self, reasons: Option<ThrottleReasons>) {
        let Some(reasons) = reasons else { return };
        self.num_samples += 1;
        for name in throttle_names(reasons) {
            *self.by_name.entry(name).or_default() += 1;
        }
    }

    /// Shares of the samples, from 0 to 1; `None` where nothing kept the clocks down.
    fn shares(&self) -> Option<BTreeMap<&'static str, f64>> {
        let share = |(name, count): (&&'static str, &u32)| (*name, f64::from(*count) / f64::from(self.num_samples));
        (!self.by_name.is_empty()).then(|| self.by_name.iter().map(share).collect())
    }
}

impl Window {
    /// A window that begins where the host's counters stand so.
    pub(super) fn new(host: HostReading) -> Self {
        Self { latest_host: host, host_before: host, ..Self::default() }
    }

    pub(super) fn add(&mut self, reading: &GpuReading, host: HostReading) {
        self.utilization_percent.add(reading.utilization_percent);
        self.sm_activity_percent.add(reading.sm_activity_percent);
        self.memory_activity_percent.add(reading.memory_activity_percent);
        self.tensor_activity_percent.add(reading.tensor_activity_percent);
        self.float_activity_percent.add(reading.float_activity_percent);
        self.power_watts.add(reading.power_watts);
        self.sm_clock_mhz.add(reading.sm_clock_mhz);
        self.memory_clock_mhz.add(reading.memory_clock_mhz);
        self.pcie_received.add(reading.pcie_received_bytes_per_second);
        self.pcie_sent.add(reading.pcie_sent_bytes_per_second);
        self.memory_used_bytes = self.memory_used_bytes.max(reading.memory_used_bytes);
        self.other_processes_memory_bytes = self.other_processes_memory_bytes.max(reading.other_processes_memory_bytes);
        if let Some(new) = reading.temperature_celsius {
            self.temperature_celsius = Some(self.temperature_celsius.map_or(new, |max| max.max(new)));
        }
        self.throttles.add(reading.throttle_reasons);
        self.available_bytes = [self.available_bytes, host.available_bytes].into_iter().flatten().min();
        (self.latest, self.latest_host) = (*reading, host);
    }

    /// The figures of the window, which then starts anew. Without a sample the latest one stands in.
    pub(super) fn take(&mut self) -> MachineSample {
        let (latest, host) = (self.latest, self.latest_host);
        let window = std::mem::replace(self, Self { latest, ..Self::new(host) });
        let since = |now: Option<u64>, before: Option<u64>| Some(now?.saturating_sub(before?));
        let before = window.host_before;
        let mut throttles = window.throttles;
        if throttles.num_samples == 0 {
            throttles.add(latest.throttle_reasons);
        }
        MachineSample {
            host_memory_bytes: host.resident_bytes,
            host_available_bytes: window.available_bytes.or(host.available_bytes),
            host_swapped_bytes: host.swapped_bytes,
            disk_read_bytes: since(host.disk_read_bytes, before.disk_read_bytes),
            major_page_faults: since(host.major_page_faults, before.major_page_faults),
            gpu_utilization_percent: window.utilization_percent.mean().or(latest.utilization_percent),
            gpu_utilization_max_percent: window.utilization_percent.max.or(latest.utilization_percent),
            gpu_sm_activity_percent: window.sm_activity_percent.mean().or(latest.sm_activity_percent),
            gpu_memory_activity_percent: window.memory_activity_percent.mean().or(latest.memory_activity_percent),
            gpu_tensor_activity_percent: window.tensor_activity_percent.mean().or(latest.tensor_activity_percent),
            gpu_float_activity_percent: window.float_activity_percent.mean().or(latest.float_activity_percent),
            gpu_memory_used_bytes: window.memory_used_bytes.or(latest.memory_used_bytes),
            gpu_power_watts: window.power_watts.mean().or(latest.power_watts),
            gpu_temperature_celsius: window.temperature_celsius.or(latest.temperature_celsius),
            gpu_sm_clock_mhz: window.sm_clock_mhz.mean().or(latest.sm_clock_mhz),
            gpu_memory_clock_mhz: window.memory_clock_mhz.mean().or(latest.memory_clock_mhz),
            gpu_throttle_shares: throttles.shares(),
            gpu_pcie_received_bytes_per_second: window.pcie_received.mean().or(latest.pcie_received_bytes_per_second),
            gpu_pcie_sent_bytes_per_second: window.pcie_sent.mean().or(latest.pcie_sent_bytes_per_second),
            gpu_other_processes_memory_bytes: window
                .other_processes_memory_bytes
                .or(latest.other_processes_memory_bytes),
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
            let reading = GpuReading {
                utilization_percent: Some(utilization),
                sm_activity_percent: Some(utilization / 2.0),
                memory_used_bytes: Some(memory),
                power_watts: Some(power),
                temperature_celsius: Some(temperature),
                sm_clock_mhz: Some(10.0 * utilization),
                throttle_reasons: Some(ThrottleReasons::empty()),
                ..GpuReading::default()
            };
            window.add(&reading, HostReading::default());
        }
        let sample = window.take();
        assert_eq!(sample.gpu_utilization_percent, Some(80.0));
        assert_eq!(sample.gpu_utilization_max_percent, Some(100.0));
        assert_eq!((sample.gpu_sm_activity_percent, sample.gpu_sm_clock_mhz), (Some(40.0), Some(800.0)));
        assert_eq!(sample.gpu_memory_used_bytes, Some(9));
        assert_eq!(sample.gpu_power_watts, Some(300.0));
        assert_eq!(sample.gpu_temperature_celsius, Some(63.0));
        assert_eq!(sample.gpu_throttle_shares, None, "nothing kept it back");
        let empty = window.take();
        assert_eq!(empty.gpu_utilization_percent, Some(60.0));
        assert_eq!(empty.gpu_memory_used_bytes, Some(7));
        assert_eq!(empty.gpu_temperature_celsius, Some(62.0));
    }

    #[test]
    fn what_throttled_in_a_window_is_told_with_its_share_and_counters_are_those_of_the_window() {
        let host = |read, faults, available| HostReading {
            disk_read_bytes: Some(read),
            major_page_faults: Some(faults),
            available_bytes: Some(available),
            ..HostReading::default()
        };
        let mut window = Window::new(host(1000, 5, 90));
        let reading = |reasons| GpuReading { throttle_reasons: Some(reasons), ..GpuReading::default() };
        window.add(&reading(ThrottleReasons::GPU_IDLE), host(1500, 5, 80));
        window.add(&reading(ThrottleReasons::SW_POWER_CAP), host(1700, 9, 40));
        let hot = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        window.add(&reading(hot), host(1750, 9, 70));
        window.add(&reading(ThrottleReasons::NONE), host(1800, 9, 60));
        let sample = window.take();
        let shares = BTreeMap::from([("power cap", 0.5), ("hardware thermal slowdown", 0.25)]);
        assert_eq!(sample.gpu_throttle_shares, Some(shares), "of four samples");
        assert_eq!((sample.disk_read_bytes, sample.major_page_faults), (Some(800), Some(4)));
        assert_eq!(sample.host_available_bytes, Some(40), "the lowest");
        let empty = window.take();
        assert_eq!((empty.disk_read_bytes, empty.host_available_bytes), (Some(0), Some(60)));
        assert_eq!(empty.gpu_throttle_shares, None, "nothing did in the latest sample");
        window.add(&reading(ThrottleReasons::SW_POWER_CAP), host(1800, 9, 60));
        window.take();
        assert_eq!(
            window.take().gpu_throttle_shares,
            Some(BTreeMap::from([("power cap", 1.0)])),
            "the latest stands in"
        );
    }

    #[test]
    fn what_was_never_read_stays_absent() {
        let mut window = Window::default();
        window.add(&GpuReading { power_watts: Some(70.0), ..GpuReading::default() }, HostReading::default());
        let sample = window.take();
        assert_eq!(sample.gpu_power_watts, Some(70.0));
        assert_eq!((sample.gpu_utilization_percent, sample.gpu_memory_used_bytes), (None, None));
        assert_eq!(Window::default().take(), MachineSample::default());
    }
}
