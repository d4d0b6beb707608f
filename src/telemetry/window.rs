//! Collects samples between two looks at them.

use std::collections::BTreeMap;

use nvml_wrapper::bitmasks::device::ThrottleReasons;

use super::nvml::{Reading, throttle_names};
use crate::figures::{MachineSample, MachineSamples};

/// Samples since the last [`Window::take`].
#[derive(Debug, Default)]
pub(super) struct Window {
    samples: MachineSamples,
    throttles: Throttles,
    latest_throttle_reasons: Option<ThrottleReasons>,
}

/// In how many samples each reason kept the clocks down.
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

    /// Share of the samples for each reason, from 0 to 1; `None` if nothing kept the clocks down.
    fn shares(&self) -> Option<BTreeMap<String, f64>> {
        let share =
            |(name, count): (&&str, &u32)| ((*name).to_owned(), f64::from(*count) / f64::from(self.num_samples));
        (!self.by_name.is_empty()).then(|| self.by_name.iter().map(share).collect())
    }
}

impl Window {
    /// A window that begins with this sample.
    pub(super) fn new(first: &MachineSample) -> Self {
        let mut window = Self::default();
        window.samples.add(first);
        window.samples.take();
        window
    }

    pub(super) fn add(&mut self, reading: &Reading) {
        self.samples.add(&reading.figures);
        self.throttles.add(reading.throttle_reasons);
        self.latest_throttle_reasons = reading.throttle_reasons;
    }

    /// The figures of the window, which then starts anew. Without a sample the latest one stands in.
    pub(super) fn take(&mut self) -> MachineSample {
        let mut throttles = std::mem::take(&mut self.throttles);
        if throttles.num_samples == 0 {
            throttles.add(self.latest_throttle_reasons);
        }
        MachineSample { gpu_throttle_shares: throttles.shares(), ..self.samples.take() }
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
            let figures = MachineSample {
                gpu_utilization_percent: Some(utilization),
                gpu_utilization_max_percent: Some(utilization),
                gpu_sm_activity_percent: Some(utilization / 2.0),
                gpu_memory_used_bytes: Some(memory),
                gpu_power_watts: Some(power),
                gpu_temperature_celsius: Some(temperature),
                gpu_sm_clock_mhz: Some(10.0 * utilization),
                ..MachineSample::default()
            };
            let throttle_reasons = Some(ThrottleReasons::empty());
            window.add(&Reading { figures, throttle_reasons, ..Reading::default() });
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
        let host = |read, faults, available| MachineSample {
            disk_read_bytes: Some(read),
            major_page_faults: Some(faults),
            host_available_bytes: Some(available),
            ..MachineSample::default()
        };
        let mut window = Window::new(&host(1000, 5, 90));
        let reading = |reasons, figures| Reading { figures, throttle_reasons: Some(reasons), ..Reading::default() };
        window.add(&reading(ThrottleReasons::GPU_IDLE, host(1500, 5, 80)));
        window.add(&reading(ThrottleReasons::SW_POWER_CAP, host(1700, 9, 40)));
        let hot = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        window.add(&reading(hot, host(1750, 9, 70)));
        window.add(&reading(ThrottleReasons::NONE, host(1800, 9, 60)));
        let sample = window.take();
        let shares = BTreeMap::from([("power cap".to_owned(), 0.5), ("hardware thermal slowdown".to_owned(), 0.25)]);
        assert_eq!(sample.gpu_throttle_shares, Some(shares), "of four samples");
        assert_eq!((sample.disk_read_bytes, sample.major_page_faults), (Some(800), Some(4)));
        assert_eq!(sample.host_available_bytes, Some(40), "the lowest");
        let empty = window.take();
        assert_eq!((empty.disk_read_bytes, empty.host_available_bytes), (Some(0), Some(60)));
        assert_eq!(empty.gpu_throttle_shares, None, "nothing did in the latest sample");
        window.add(&reading(ThrottleReasons::SW_POWER_CAP, host(1800, 9, 60)));
        window.take();
        assert_eq!(
            window.take().gpu_throttle_shares,
            Some(BTreeMap::from([("power cap".to_owned(), 1.0)])),
            "the latest stands in"
        );
    }

    #[test]
    fn what_was_never_read_stays_absent() {
        let mut window = Window::default();
        let figures = MachineSample { gpu_power_watts: Some(70.0), ..MachineSample::default() };
        window.add(&Reading { figures, ..Reading::default() });
        let sample = window.take();
        assert_eq!(sample.gpu_power_watts, Some(70.0));
        assert_eq!((sample.gpu_utilization_percent, sample.gpu_memory_used_bytes), (None, None));
        assert_eq!(Window::default().take(), MachineSample::default());
    }
}
