//! Samples the machine during training, on its own thread.
//!
//! The training loop never calls NVML: its calls wait for the driver, and polling it there has slowed trainers down. A
//! sampler thread calls it at a fixed interval, and [`Telemetry::window`] only takes what was gathered since the last
//! call.

#[expect(unsafe_code, reason = "the operating system is asked by a system call")]
mod disk;
mod energy;
mod gpm;
pub mod gpus;
#[expect(unsafe_code, reason = "the operating system is asked by system calls")]
mod host;
#[expect(unsafe_code, reason = "the operating system is asked by system calls")]
mod memory;
mod nvml;
mod sampler;
#[expect(unsafe_code, reason = "the operating system is asked by a system call")]
mod usage;

use std::ffi::OsString;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use crate::measure::figures::MachineSample;
pub use disk::{disk_read_bytes_per_second, free_disk_bytes};
use energy::PackageEnergy;
use host::Host;
pub use host::{ThreadTime, share_of_others, thread_time};
pub use memory::{available_host_memory_bytes, peak_host_memory_bytes, total_host_memory_bytes};
use nvml::Gpu;
use sampler::{Gathered, Sampler};

/// Whether the energy of the processor's packages can be read on this machine.
#[must_use]
pub fn counts_processor_energy() -> bool {
    PackageEnergy::open().is_some()
}

/// Names an NVML library to load instead of the system's. If it is set, the first GPU of that library is sampled even
/// when training runs on the CPU; this tests the path from NVML to the files.
pub const NVML_LIBRARY_VARIABLE: &str = "LORA_TRAIN_NVML";

/// How long to wait for NVML to start. Without the persistence daemon the first call wakes the driver.
const NVML_START_TIMEOUT: Duration = Duration::from_secs(15);

/// How NVML finds a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NvmlSelector {
    /// NVML's own number of the GPU, which neither `CUDA_VISIBLE_DEVICES` nor `CUDA_DEVICE_ORDER` changes.
    Index(u32),
    /// `GPU-...`, `MIG-...`, or the UUID without a prefix, as the CUDA driver gives it.
    Uuid(String),
    /// A GPU of another backend than CUDA, which does not say whether NVML knows it and by what name. It has no figures.
    Unknown,
}

impl NvmlSelector {
    /// The first GPU that `CUDA_VISIBLE_DEVICES` names, by number or beginning of a UUID; `None` if it names no GPU.
    /// CUDA numbers GPUs as NVML does if `CUDA_DEVICE_ORDER` is `PCI_BUS_ID` or all GPUs are alike.
    #[must_use]
    pub fn from_visible_devices(value: &str) -> Option<Self> {
        let first = value.split(',').next()?.trim();
        match first.parse() {
            Ok(index) => Some(Self::Index(index)),
            Err(_) if first.starts_with("GPU-") || first.starts_with("MIG-") => Some(Self::Uuid(first.to_owned())),
            Err(_) => None,
        }
    }
}

/// The sampler thread and what it has gathered. Dropping it ends the thread.
#[derive(Debug)]
pub struct Telemetry {
    gathered: Arc<Mutex<Gathered>>,
    notice: Option<String>,
    gpu: Option<GpuStart>,
    processor_time: Mutex<ProcessorTime>,
    /// Dropped to end the thread.
    running: Option<Sender<()>>,
    sampler: Option<JoinHandle<()>>,
}

/// Figures that are read from a GPU once.
#[derive(Debug)]
struct GpuStart {
    /// Name and UUID.
    label: String,
    max_sm_clock_mhz: Option<f64>,
    power_limit_watts: Option<f64>,
    default_power_limit_watts: Option<f64>,
}

/// Processor time at the start of the current window.
#[derive(Debug)]
struct ProcessorTime {
    at: Instant,
    used: Option<Duration>,
    percent: Option<f64>,
}

impl ProcessorTime {
    fn now() -> Self {
        Self { at: Instant::now(), used: host::processor_time(), percent: None }
    }
}

impl Telemetry {
    /// Starts to sample the host, and a GPU if one is given, every `sample_ms` milliseconds (at least 10; with 0,
    /// never).
    ///
    /// It does not fail: without NVML the GPU's figures are absent and [`Self::notice`] says why.
    #[must_use]
    pub fn start(sample_ms: u64, gpu: Option<NvmlSelector>) -> Self {
        let library = std::env::var_os(NVML_LIBRARY_VARIABLE);
        let visible = || NvmlSelector::from_visible_devices(&std::env::var("CUDA_VISIBLE_DEVICES").ok()?);
        let gpu = gpu.or_else(|| library.as_ref().and_then(|_| visible()));
        Self::start_with_library(sample_ms, gpu, library)
    }

    /// Like [`start`](Self::start), with an NVML library of one's own.
    #[must_use]
    pub fn start_with_library(sample_ms: u64, gpu: Option<NvmlSelector>, library: Option<OsString>) -> Self {
        if sample_ms == 0 {
            return Self::off();
        }
        let gpu = gpu.or_else(|| library.as_ref().map(|_| NvmlSelector::Index(0)));
        let mut host = Host::new();
        let mut first = MachineSample::default();
        host.read(&mut first);
        let mut gathered = Gathered::default();
        // Counters of the first window count from here.
        gathered.samples.add(&first);
        gathered.samples.take();
        let gathered = Arc::new(Mutex::new(gathered));
        let interval = Duration::from_millis(sample_ms.max(10));
        let (running, ended) = mpsc::channel();
        let (nvml_started, nvml_start) = mpsc::channel();
        let without_gpu = gpu.is_none();
        // In a run on a GPU, the processor's energy must not pass for the GPU's.
        let packages = if without_gpu { PackageEnergy::open() } else { None };
        let sampler = Sampler { gathered: Arc::clone(&gathered), interval, ended, host, packages };
        let sampler = std::thread::Builder::new().name("telemetry".into()).spawn(move || {
            let Some(selector) = gpu else { return sampler.run(MachineSample::default) };
            let nvml = match selector {
                NvmlSelector::Unknown => Err("they come from NVML, by the device `cuda`".to_owned()),
                _ => nvml::open(library.as_deref()).map_err(|error| format!("NVML cannot be loaded ({error})")),
            };
            let gpu = nvml.as_ref().map_err(String::clone).and_then(|nvml| Gpu::find(nvml, &selector));
            // The receiver may have stopped waiting; sampling continues anyway.
            drop(nvml_started.send(gpu.as_ref().map(|gpu| (gpu.start(), gpu.notice())).map_err(String::clone)));
            match gpu {
                Ok(mut gpu) => sampler.run(|| gpu.read()),
                Err(_) => sampler.run(MachineSample::default),
            }
        });
        let (gpu, notice) = if without_gpu {
            (None, None)
        } else {
            match nvml_start.recv_timeout(NVML_START_TIMEOUT) {
                Ok(Ok((gpu, notice))) => (Some(gpu), notice),
                Ok(Err(reason)) => (None, Some(format!("no GPU figures: {reason}"))),
                Err(_) => (None, Some("no GPU figures yet: NVML has not started within 15 seconds".to_owned())),
            }
        };
        let notice = match &sampler {
            Ok(_) => notice,
            Err(error) => Some(format!("no figures of the machine: the sampler thread does not start ({error})")),
        };
        let processor_time = Mutex::new(ProcessorTime::now());
        Self { gathered, notice, gpu, processor_time, running: Some(running), sampler: sampler.ok() }
    }

    /// Samples nothing.
    fn off() -> Self {
        let notice = Some("no figures of the machine: `logging.gpu_sample_ms` is 0".to_owned());
        let (gathered, processor_time) = (Arc::default(), Mutex::new(ProcessorTime::now()));
        Self { gathered, notice, gpu: None, processor_time, running: None, sampler: None }
    }

    /// One line that says which figures are absent and why; `None` if no figure is absent.
    #[must_use]
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Name and UUID of the GPU that is sampled.
    #[must_use]
    pub fn gpu(&self) -> Option<&str> {
        self.gpu.as_ref().map(|gpu| gpu.label.as_str()).filter(|label| !label.is_empty())
    }

    /// The clock that the GPU's multiprocessors reach if nothing keeps it down.
    #[must_use]
    pub fn max_sm_clock_mhz(&self) -> Option<f64> {
        self.gpu.as_ref()?.max_sm_clock_mhz
    }

    /// The GPU's power limit in force.
    #[must_use]
    pub fn power_limit_watts(&self) -> Option<f64> {
        self.gpu.as_ref()?.power_limit_watts
    }

    /// The GPU's default power limit, in force if nobody has set another one.
    #[must_use]
    pub fn default_power_limit_watts(&self) -> Option<f64> {
        self.gpu.as_ref()?.default_power_limit_watts
    }

    /// Processor time that the sampler thread has taken.
    #[must_use]
    pub fn seconds(&self) -> Option<f64> {
        lock(&self.gathered).sampler_time.map(|time| time.as_secs_f64())
    }

    /// Figures since the previous call, or since the start. Without a sample in that time, the latest one stands in.
    #[must_use]
    pub fn window(&self) -> MachineSample {
        if self.sampler.is_none() {
            return MachineSample::default();
        }
        let cpu_utilization_percent = self.processor_time_percent();
        MachineSample { cpu_utilization_percent, ..lock(&self.gathered).samples.take() }
    }

    /// Energy since the start: of the GPU or, without a GPU, of the processor's packages.
    #[must_use]
    pub fn energy_joules(&self) -> Option<f64> {
        lock(&self.gathered).energy_joules
    }

    /// The most memory of the GPU that any sample saw in use.
    #[must_use]
    pub fn peak_gpu_memory_bytes(&self) -> Option<u64> {
        lock(&self.gathered).peak_gpu_memory_bytes
    }

    /// Share of all threads that this process used since the previous call. An exact figure needs both ends of the
    /// window, and asking costs only a microsecond, so the caller's thread reads it.
    fn processor_time_percent(&self) -> Option<f64> {
        let mut last = lock(&self.processor_time);
        let (now, used) = (Instant::now(), host::processor_time());
        let elapsed = now.duration_since(last.at).as_secs_f64();
        // Too short for the kernel's accounting: the last figure stands, and the window stays open.
        if elapsed < 0.001 {
            return last.percent;
        }
        let percent = used.zip(last.used).map(|(used, before)| {
            let share = used.saturating_sub(before).as_secs_f64() / (elapsed * host::num_threads());
            (100.0 * share).min(100.0)
        });
        *last = ProcessorTime { at: now, used, percent };
        percent
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        self.running = None;
        if let Some(sampler) = self.sampler.take() {
            // A panic of the sampler has been printed; it must not end training.
            let _ = sampler.join();
        }
    }
}

/// After a panic while the lock was held the figures are still whole, since each is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_the_host_alone_is_sampled_and_nothing_is_said_of_gpus() {
        let telemetry = Telemetry::start_with_library(10, None, None);
        let started = Instant::now();
        let mut spin = 0_u64;
        while started.elapsed() < Duration::from_millis(120) {
            spin = std::hint::black_box(spin.wrapping_add(1));
        }
        let sample = telemetry.window();
        assert!(sample.host_memory_bytes.unwrap() > 1 << 20, "{sample:?}");
        let cpu = sample.cpu_utilization_percent.unwrap();
        assert!(cpu > 0.0 && cpu <= 100.0, "{sample:?}");
        let only_host = MachineSample {
            host_memory_bytes: sample.host_memory_bytes,
            host_available_bytes: sample.host_available_bytes,
            host_swapped_bytes: sample.host_swapped_bytes,
            cpu_utilization_percent: sample.cpu_utilization_percent,
            disk_read_bytes: sample.disk_read_bytes,
            major_page_faults: sample.major_page_faults,
            cpu_energy_joules: sample.cpu_energy_joules,
            ..MachineSample::default()
        };
        assert_eq!(sample, only_host);
        assert_eq!(telemetry.notice(), None);
        assert_eq!((telemetry.gpu(), telemetry.peak_gpu_memory_bytes()), (None, None));
        // The sampler measures its own work, which is little.
        let seconds = telemetry.seconds().unwrap();
        assert!(seconds > 0.0 && seconds < 0.1, "{seconds} s of 0.12 s");
    }

    #[test]
    fn an_interval_of_zero_turns_it_off() {
        let telemetry = Telemetry::start_with_library(0, Some(NvmlSelector::Index(0)), None);
        assert!(telemetry.sampler.is_none() && telemetry.notice().unwrap().contains("`logging.gpu_sample_ms` is 0"));
        assert_eq!(telemetry.window(), MachineSample::default());
        assert_eq!((telemetry.seconds(), telemetry.energy_joules()), (None, None));
    }

    #[cfg(target_os = "linux")]
    #[test]
    #[expect(unsafe_code, reason = "the page cache is emptied by a system call")]
    fn what_is_read_from_a_disk_is_counted() {
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::io::Write::write_all(&mut file, &vec![7; 8 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        // SAFETY: the descriptor is open; the call drops its clean pages from the cache.
        unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(&file), 0, 0, libc::POSIX_FADV_DONTNEED) };
        let telemetry = Telemetry::start_with_library(10, None, None);
        let counted = || {
            let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
            io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse::<u64>().ok()).unwrap_or(0)
        };
        let before = counted();
        std::fs::read(file.path()).unwrap();
        // 0 on a file system in memory; otherwise all that the system has counted must arrive.
        let expected = counted() - before;
        assert!(expected == 0 || expected >= 8 << 20, "{expected}");
        let mut read = 0;
        for _ in 0..200 {
            std::thread::sleep(Duration::from_millis(20));
            read += telemetry.window().disk_read_bytes.unwrap_or(0);
            if read >= expected {
                return;
            }
        }
        panic!("{read} of {expected} bytes");
    }

    #[test]
    fn the_first_visible_device_is_the_one_that_is_meant() {
        let selector = NvmlSelector::from_visible_devices;
        assert_eq!(selector("1"), Some(NvmlSelector::Index(1)));
        assert_eq!(selector("GPU-0011,0"), Some(NvmlSelector::Uuid("GPU-0011".into())));
        assert_eq!(selector(" MIG-0123-45 "), Some(NvmlSelector::Uuid("MIG-0123-45".into())));
        assert_eq!((selector(""), selector("-1"), selector("NoDevFiles")), (None, None, None));
    }

    #[test]
    fn a_missing_nvml_is_a_notice_not_an_error() {
        let library = Some("libnvidia-ml-that-is-nowhere.so.1".into());
        let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Index(0)), library);
        let notice = telemetry.notice().unwrap();
        assert!(notice.starts_with("no GPU figures: NVML cannot be loaded"), "{notice}");
        assert_eq!(notice.lines().count(), 1);
        assert_eq!(telemetry.window().gpu_utilization_percent, None);
        // Nor does the energy of the processor stand in for that of a GPU without NVML.
        let telemetry = Telemetry::start_with_library(10, Some(NvmlSelector::Unknown), None);
        assert!(telemetry.notice().unwrap().starts_with("no GPU figures: they come from NVML"));
        assert_eq!(telemetry.energy_joules(), None);
    }

    #[test]
    fn dropping_ends_the_thread_at_once() {
        let telemetry = Telemetry::start_with_library(600_000, None, None);
        let started = Instant::now();
        drop(telemetry);
        assert!(started.elapsed() < Duration::from_mins(1));
    }
}
