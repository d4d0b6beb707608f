//! Energy: of a GPU, or of the processor's packages.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::memory::number;

/// Where Linux shows the counters of running average power limits: Intel's and, since 5.8, AMD's.
const POWERCAP: &str = "/sys/class/powercap";

/// Energy of a GPU since the first sample: from its counter or, without one, the integral of its power.
#[derive(Debug, Default)]
pub(super) struct EnergyMeter {
    counter_at_start: Option<u64>,
    last_power: Option<(Instant, f64)>,
    joules: Option<f64>,
}

impl EnergyMeter {
    /// Adds a sample of the GPU's own counter and its power. Returns the energy, as far as it is known.
    #[allow(clippy::cast_precision_loss, reason = "millijoules of a run stay far below 2^52")]
    pub(super) fn add(&mut self, millijoules: Option<u64>, watts: Option<f64>, now: Instant) -> Option<f64> {
        if let Some(counter) = millijoules {
            let start = *self.counter_at_start.get_or_insert(counter);
            self.joules = Some(counter.saturating_sub(start) as f64 / 1e3);
        }
        // A counter that worked once and fails now must not be replaced by a figure of another kind.
        if let (None, Some(watts)) = (self.counter_at_start, watts) {
            // Trapezoid rule between two samples.
            let since = self.last_power.replace((now, watts));
            let passed = since.map_or(0.0, |(at, before)| f64::midpoint(watts, before) * (now - at).as_secs_f64());
            self.joules = Some(self.joules.unwrap_or(0.0) + passed);
        }
        self.joules
    }
}

/// Energy counters of the processor's packages and their memory.
#[derive(Debug)]
pub(super) struct PackageEnergy {
    counters: Vec<Counter>,
    joules: f64,
}

#[derive(Debug)]
struct Counter {
    path: PathBuf,
    /// Value at which it starts again at 0.
    range_microjoules: u64,
    last_microjoules: u64,
}

impl PackageEnergy {
    /// Opens this machine's counters; `None` if none may be read, as on many systems where only root may.
    pub(super) fn open() -> Option<Self> {
        Self::open_in(Path::new(POWERCAP))
    }

    fn open_in(folder: &Path) -> Option<Self> {
        let zones = std::fs::read_dir(folder).ok()?.flatten().map(|zone| zone.path());
        let counters: Vec<Counter> =
            zones.filter(|zone| is_package_or_memory(zone)).filter_map(|zone| Counter::open(&zone)).collect();
        (!counters.is_empty()).then_some(Self { counters, joules: 0.0 })
    }

    /// Joules since the counters were opened.
    pub(super) fn read(&mut self) -> f64 {
        self.joules += self.counters.iter_mut().map(Counter::advance).sum::<f64>();
        self.joules
    }
}

impl Counter {
    fn open(zone: &Path) -> Option<Self> {
        let range_microjoules = number(&zone.join("max_energy_range_uj"))?;
        let path = zone.join("energy_uj");
        Some(Self { last_microjoules: number(&path)?, path, range_microjoules })
    }

    /// Joules since the last call.
    #[allow(clippy::cast_precision_loss, reason = "microjoules between two samples stay far below 2^52")]
    fn advance(&mut self) -> f64 {
        let Some(now) = number(&self.path) else { return 0.0 };
        let before = std::mem::replace(&mut self.last_microjoules, now);
        let passed = now.checked_sub(before).unwrap_or_else(|| self.range_microjoules.saturating_sub(before) + now);
        passed as f64 / 1e6
    }
}

/// `package-0` and `dram`. Not `core` and `uncore`, which are part of a package, nor `psys`, which includes everything.
/// A zone of `intel-rapl-mmio` is another view of a package.
fn is_package_or_memory(zone: &Path) -> bool {
    let file = zone.file_name().unwrap_or_default().to_string_lossy();
    let name = std::fs::read_to_string(zone.join("name")).unwrap_or_default();
    file.starts_with("intel-rapl:") && (name.starts_with("package-") || name.trim() == "dram")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn energy_is_the_difference_of_the_counter_or_the_integral_of_power() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut meter = EnergyMeter::default();
        assert_eq!(meter.add(Some(7_000_000), Some(1e6), start), Some(0.0));
        assert_eq!(meter.add(Some(7_012_500), Some(1e6), after(1)), Some(12.5));
        assert_eq!(meter.add(None, Some(1e6), after(2)), Some(12.5), "the last known");

        let mut meter = EnergyMeter::default();
        assert_eq!(meter.add(None, None, start), None);
        assert_eq!(meter.add(None, Some(100.0), start), Some(0.0));
        // 2 s from 100 W to 300 W, then 1 s at 300 W.
        meter.add(None, Some(300.0), after(2));
        assert_eq!(meter.add(None, Some(300.0), after(3)), Some(700.0));
    }

    #[test]
    fn packages_and_memory_are_added_and_a_counter_that_starts_again_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let zone = |file: &str, name: &str, microjoules: u64| {
            let zone = folder.path().join(file);
            std::fs::create_dir_all(&zone).unwrap();
            std::fs::write(zone.join("name"), format!("{name}\n")).unwrap();
            std::fs::write(zone.join("max_energy_range_uj"), "10000000\n").unwrap();
            std::fs::write(zone.join("energy_uj"), format!("{microjoules}\n")).unwrap();
        };
        assert!(PackageEnergy::open_in(folder.path()).is_none());
        zone("intel-rapl", "", 0);
        zone("intel-rapl:0", "package-0", 9_000_000);
        zone("intel-rapl:0:0", "core", 1);
        zone("intel-rapl:0:1", "dram", 2_000_000);
        zone("intel-rapl-mmio:0", "package-0", 9_000_000);
        let mut energy = PackageEnergy::open_in(folder.path()).unwrap();
        assert_eq!(energy.read(), 0.0);
        zone("intel-rapl:0", "package-0", 9_500_000);
        zone("intel-rapl:0:0", "core", 900_000);
        assert!((energy.read() - 0.5).abs() < 1e-12);
        zone("intel-rapl:0", "package-0", 250_000);
        zone("intel-rapl:0:1", "dram", 2_250_000);
        assert!((energy.read() - 1.5).abs() < 1e-12);
    }
}
